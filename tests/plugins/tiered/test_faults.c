// SPDX-License-Identifier: Apache-2.0
/* A member that fails, lies, has no extensions or can't be opened: an error or the blob, never a false
 * miss. The member is a file store behind tests/tier/shaky_plugin.c. */
#include "tiered_unit.h"

#include "tier/shaky.h"

enum { N = 8 };

static struct shaky *shaky;

static void keys_of(uint8_t keys[N * 16])
{
    uint8_t data[LEN];

    for (uint64_t n = 0; n < N; n++)
        make_blob(n, keys + n * 16, data);
}

/* Even blobs lie in the fast member, odd ones in the shaky one. */
static void begin(struct world *w, const char *top)
{
    memset(shaky, 0, sizeof(*shaky));
    world_open(w, top, "shaky://");
    world_fill(w, N);
}

/* Every second blob is in the member that fails: the batch brings the others in one call. */
static void one_key_alone_fails(struct kvs_store *store, const uint8_t *keys)
{
    uint8_t present[N];
    void *data[N];
    size_t len[N];

    assert_int_equal(kvs_look_each(store, keys, 16, N, present), 0);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(present[i], i % 2 ? KVS_UNKNOWN : KVS_THERE);
    assert_int_equal(kvs_get_chunks(store, keys, 16, N, data, len), -EIO);
    assert_int_equal(kvs_get_chunks_each(store, keys, 16, N, data, len), (N + 1) / 2);
    for (size_t i = 0; i < N; i++) {
        if (i % 2)
            assert_true(!data[i] && len[i] == KVS_LEN_UNKNOWN);
        else
            assert_true(data[i] && len[i] == LEN);
        free(data[i]);
    }
}

static void test_failing(void **state)
{
    uint8_t keys[N * 16], present[N];
    struct iovec parts[N];
    int64_t each[N];
    struct world w;
    (void)state;

    begin(&w, "puts = fast\n");
    keys_of(keys);
    assert_int_equal(kvs_exists(w.store, keys, 16, N, present), 0);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(present[i], 1);
    shaky->fail_rc = -EIO;
    for (uint64_t n = 0; n < N; n++)
        assert_int_equal(get_blob(w.store, n), n % 2 ? -EIO : 0);
    assert_int_equal(get_blob(w.store, 1000), -EIO); /* the shaky member may have it */
    assert_int_equal(kvs_exists(w.store, keys, 16, 1, present), 0);
    assert_int_equal(kvs_exists(w.store, keys, 16, 2, present), -EIO);
    one_key_alone_fails(w.store, keys);
    for (size_t i = 0; i < N; i++)
        parts[i] = (struct iovec){malloc(LEN), LEN};
    /* a batch with blobs that can't be had brings the others */
    assert_int_equal(kvs_get_chunks_into(w.store, keys, 16, N, parts, NULL, each), N / 2);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(each[i], i % 2 ? -EIO : LEN);
        free(parts[i].iov_base);
    }
    shaky->fail_rc = 0;
    wait_until(get_blob(w.store, 1000) == -ENOENT);
    for (uint64_t n = 0; n < N; n++)
        assert_int_equal(get_blob(w.store, n), 0);
    world_close(&w);
}

static void test_is_left_alone(void **state)
{
    struct world w;
    int gets;
    (void)state;

    begin(&w, "puts = fast\n");
    shaky->fail_rc = -EIO;
    for (uint64_t n = 100; n < 103; n++)
        assert_int_equal(get_blob(w.store, n), -EIO);
    gets = shaky->gets;
    assert_int_equal(gets, 3);
    for (uint64_t n = 200; n < 300; n++)
        assert_int_equal(get_blob(w.store, n), -EIO);
    assert_true(shaky->gets <= gets + 30); /* a probe each second, if that */
    world_close(&w);
}

/* Bytes are checked by their length and by the callers' own checksums, as of any store. */
static void test_lying(void **state)
{
    static const uint8_t object[20000] = "an object";
    kv_store_stats stats = {.size = sizeof(stats)};
    struct kvs_result saved = KVS_RESULT_INIT;
    void *got;
    size_t len;
    struct world w;
    (void)state;

    memset(shaky, 0, sizeof(*shaky));
    world_open(&w, "puts = cold\nmanifests = fast\n", "shaky://");
    assert_int_equal(kvs_save_buffer(w.store, "o", object, sizeof(object), NULL, &saved), 0);
    shaky->lie = 1;
    assert_int_equal(kvs_restore_buffer(w.store, "o", &got, &len, NULL), -EBADMSG);
    shaky->lie = 0;
    assert_int_equal(kvs_restore_buffer(w.store, "o", &got, &len, NULL), 0);
    assert_int_equal(len, sizeof(object));
    assert_memory_equal(got, object, len);
    free(got);
    assert_int_equal(kvs_stats(w.store, &stats), 0);
    world_close(&w);
}

/* Without extensions a miss looks like a failure, so the member must prove that it works. */
static void test_without_extensions(void **state)
{
    uint8_t keys[N * 16], present[N];
    struct world w;
    (void)state;

    memset(shaky, 0, sizeof(*shaky));
    shaky->ext = 1;
    world_open(&w, "", "shaky://");
    keys_of(keys);
    assert_int_equal(put_blob(w.cold, 1), 0);
    publish(w.cold, "x");
    assert_int_equal(get_blob(w.store, 1), 0);
    assert_int_equal(get_blob(w.store, 2), -ENOENT);
    assert_int_equal(kvs_exists(w.store, keys, 16, N, present), 0);
    assert_int_equal(present[1], 1);
    assert_int_equal(present[2], 0);
    assert_int_equal(kvs_delete_manifest(w.cold, "kv-tiered-alive"), 0);
    assert_int_equal(get_blob(w.store, 2), -EIO); /* no proof */
    world_close(&w);
}

/* Puts go on in the next member; what waits in the failed one stops publications that may need it. */
static void test_puts(void **state)
{
    struct world w;
    (void)state;

    memset(shaky, 0, sizeof(*shaky));
    world_open(&w, "puts = cold\nputs = fast\nmanifests = fast\n", "shaky://");
    shaky->fail_puts_rc = -ENOSPC;
    assert_int_equal(put_blob(w.store, 1), 0);
    assert_int_equal(get_blob(w.fast, 1), -ENOENT); /* it isn't published yet */
    publish(w.store, "m");
    assert_int_equal(get_blob(w.fast, 1), 0);
    shaky->fail_puts_rc = 0;
    assert_int_equal(put_blob(w.store, 2), 0);
    shaky->fail_publications = 1;
    assert_int_equal(kvs_put_manifest(w.store, "n", "", 0), -EIO);
    publish(w.store, "n");
    assert_int_equal(get_blob(w.cold, 2), 0);
    assert_int_equal(put_blob(w.store, 3), 0);
    shaky->fail_publications = 100;
    assert_int_equal(kvs_put_manifest(w.store, "n", "", 0), -EIO);
    shaky->fail_puts_rc = -ENOSPC;
    assert_int_equal(put_blob(w.store, 3), 0); /* to the other one: now nothing waits */
    publish(w.store, "n");
    publish(w.store, "n");
    assert_int_equal(get_blob(w.fast, 3), 0);
    world_close(&w);
}

static void test_opened_later(void **state)
{
    struct world w;
    struct kvs_store *late;
    (void)state;

    begin(&w, "puts = fast\n");
    shaky->refuse_open = true;
    late = open_store(w.uri);
    assert_int_equal(get_blob(late, 0), 0);
    assert_int_equal(get_blob(late, 1), -EIO);
    shaky->refuse_open = false;
    wait_until(get_blob(late, 1) == 0);
    kvs_close(late);
    world_close(&w);
}

static void test_batches_stay_batches(void **state)
{
    uint8_t keys[N * 16], data[LEN];
    void *got[N];
    size_t len[N];
    struct world w;
    (void)state;

    begin(&w, "puts = cold\nmanifests = fast\n");
    keys_of(keys);
    for (size_t round = 0; round < 2; round++) { /* without known places, and with */
        shaky->get_batches = shaky->gets = 0;
        assert_int_equal(kvs_get_chunks(w.store, keys, 16, N, got, len), N);
        assert_int_equal(shaky->get_batches, 1);
        assert_int_equal(shaky->last_get, N / 2); /* only those that the fast member lacks */
        assert_int_equal(shaky->gets, 0);
        for (size_t i = 0; i < N; i++)
            free(got[i]);
    }
    shaky->exists = shaky->prefetches = 0;
    assert_int_equal(kvs_prefetch(w.store, keys, 16, N), 0);
    assert_int_equal(shaky->prefetches, 1);
    assert_int_equal(kvs_touch(w.store, keys, 16, N), N);
    assert_int_equal(shaky->touches, 1);
    {
        const void *bytes[N];
        int each[N];

        make_blob(50, keys, data);
        for (size_t i = 0; i < N; i++) {
            make_blob(50 + i, keys + i * 16, data);
            bytes[i] = data;
            len[i] = LEN;
        }
        assert_int_equal(kvs_put_chunks(w.store, keys, 16, N, bytes, len, each), 0);
        assert_int_equal(shaky->put_batches, 1);
        assert_int_equal(shaky->puts, 0);
    }
    publish(w.store, "m");
    world_close(&w);
}

enum { PACKED = 60, A_PACK = 20 };

static int choose_pack(void *arg, const kv_store_entry *entry)
{
    (void)arg;
    if (!trd_is_pack_key(entry->hash, entry->hash_len))
        return 0;
    shaky->bad_ranges = (entry->hash[8] | entry->hash[9] << 8) + 1;
    return 1;
}

/* Get the packed blobs, in one batch. Returns how many were had; the others have no answer. */
static int get_packed(struct kvs_store *store)
{
    uint8_t keys[PACKED * 16], data[LEN];
    void *many[PACKED];
    size_t lens[PACKED];
    int found;

    for (uint64_t n = 0; n < PACKED; n++)
        make_blob(n, keys + n * 16, data);
    found = kvs_get_chunks_each(store, keys, 16, PACKED, many, lens);
    for (size_t i = 0; i < PACKED; i++) {
        assert_int_equal(lens[i], many[i] ? (size_t)LEN : KVS_LEN_UNKNOWN);
        free(many[i]);
    }
    return found;
}

static void pack_all(struct world *w)
{
    kv_store_pack_opts opts = {
        .size = sizeof(opts), .to = "cold", .min_bytes = LEN, .max_bytes = A_PACK * LEN};
    kv_store_packed packed = {.size = sizeof(packed)};
    uint8_t keys[PACKED * 16], data[LEN];

    for (uint64_t n = 0; n < PACKED; n++) {
        make_blob(n, keys + n * 16, data);
        assert_true(put_blob(w->cold, n) >= 0);
    }
    publish(w->cold, "m");
    assert_int_equal(kvs_pack_chunks(w->store, &opts, keys, 16, PACKED, &packed), 0);
    assert_int_equal(packed.removed, PACKED);
}

static int delete_blob(struct kvs_store *store, uint64_t n)
{
    uint8_t key[16], data[LEN];

    make_blob(n, key, data);
    return kvs_delete_chunk(store, key, sizeof(key));
}

/* One pack that can't be read costs its own blobs: not its batch, not its member, and no false miss. */
static void test_one_bad_pack(void **state)
{
    struct kvs_store *fresh;
    struct world w;
    int bad = 0;
    (void)state;

    memset(shaky, 0, sizeof(*shaky));
    world_open(&w, "linger = 50ms\n", "shaky://");
    pack_all(&w);
    assert_int_equal(get_packed(w.store), PACKED);
    assert_int_equal(kvs_list_chunks(w.cold, choose_pack, NULL), 1);
    fresh = open_store(w.uri); /* can't read the index, either */
    for (int round = 0; round < 3; round++) {
        assert_int_equal(get_packed(w.store), PACKED - A_PACK);
        assert_int_equal(get_packed(fresh), PACKED - A_PACK);
    }
    for (uint64_t n = 0; n < PACKED; n++) {
        int rc = get_blob(w.store, n);

        assert_true(rc == 0 || rc == -EIO);
        assert_int_equal(get_blob(fresh, n), rc);
        bad += rc != 0;
    }
    assert_int_equal(bad, A_PACK);
    for (uint64_t n = 200; n < 204; n++) { /* no deletion is certain, and the member stays */
        assert_int_equal(put_blob(w.cold, n), 0);
        publish(w.cold, "m");
        assert_int_equal(delete_blob(fresh, n), -EIO);
        assert_int_equal(get_blob(w.cold, n), -ENOENT);
    }
    assert_int_equal(get_packed(fresh), PACKED - A_PACK);
    assert_int_equal(get_blob(w.store, PACKED), -ENOENT); /* it knows what is in the pack */
    assert_int_equal(get_blob(fresh, PACKED), -EIO);
    shaky->bad_ranges = 0;
    assert_int_equal(get_packed(w.store), PACKED);
    wait_until(get_packed(fresh) == PACKED);
    assert_int_equal(get_blob(fresh, PACKED), -ENOENT);
    kvs_close(fresh);
    world_close(&w);
}

/* A member of which neither packs nor single blobs can be read is left alone, as one without packs. */
static void test_packs_are_left_alone(void **state)
{
    struct world w;
    int gets;
    (void)state;

    memset(shaky, 0, sizeof(*shaky));
    world_open(&w, "puts = fast\n", "shaky://");
    pack_all(&w);
    assert_int_equal(get_packed(w.store), PACKED);
    shaky->fail_rc = -EIO;
    for (uint64_t n = 0; n < 3; n++)
        assert_int_equal(get_blob(w.store, n), -EIO);
    gets = shaky->gets;
    for (uint64_t n = 0; n < PACKED; n++)
        assert_int_equal(get_blob(w.store, n), -EIO);
    assert_true(shaky->gets <= gets + 30); /* a probe each second, if that */
    shaky->fail_rc = 0;
    wait_until(get_packed(w.store) == PACKED);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_failing),
                                       cmocka_unit_test(test_is_left_alone),
                                       cmocka_unit_test(test_lying),
                                       cmocka_unit_test(test_without_extensions),
                                       cmocka_unit_test(test_puts),
                                       cmocka_unit_test(test_opened_later),
                                       cmocka_unit_test(test_batches_stay_batches),
                                       cmocka_unit_test(test_one_bad_pack),
                                       cmocka_unit_test(test_packs_are_left_alone)};

    shaky = shaky_find();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
