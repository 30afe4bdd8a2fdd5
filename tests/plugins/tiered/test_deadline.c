// SPDX-License-Identifier: Apache-2.0
/* A member with a deadline that hangs: its calls end in time, the other member's blobs are had, no byte of a
 * late answer reaches anybody, and all is as before when the member is back. */
#include "tiered_unit.h"

#include <pthread.h>

#include "tier/shaky.h"
#include "tiered/pack.h"

enum { N = 8 };

static struct shaky *shaky;

/* The shaky member is the first one, with a deadline; even blobs lie there, odd ones in the other. */
static void begin(struct world *w, const char *top, const char *deadline)
{
    char more[64];

    memset(shaky, 0, sizeof(*shaky));
    snprintf(more, sizeof(more), "deadline = %s\n", deadline);
    world_configure(w, top, "shaky://", more, "");
    w->fast = open_member(w, "fast");
    w->cold = open_member(w, "cold");
    world_fill(w, N);
    w->store = open_store(w->uri);
}

static void all_there(const struct world *w)
{
    for (uint64_t n = 0; n < N; n++)
        assert_int_equal(get_blob(w->store, n), 0);
}

static void test_reads(void **state)
{
    uint8_t keys[N * 16], data[LEN], present[N];
    void *got[N];
    size_t len[N];
    struct world w;
    (void)state;

    begin(&w, "puts = cold\n", "100ms");
    for (uint64_t n = 0; n < N; n++)
        make_blob(n, keys + n * 16, data);
    all_there(&w);
    shaky->hang = true;
    for (uint64_t n = 0; n < N; n++)
        assert_int_equal(get_blob(w.store, n), n % 2 ? 0 : -EIO);
    assert_int_equal(kvs_look_each(w.store, keys, 16, N, present), 0);
    assert_int_equal(kvs_get_chunks_each(w.store, keys, 16, N, got, len), N / 2);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(present[i], i % 2 ? KVS_THERE : KVS_UNKNOWN);
        assert_int_equal(got[i] ? LEN : len[i], i % 2 ? LEN : KVS_LEN_UNKNOWN);
        free(got[i]);
    }
    assert_int_equal(shaky->inside, 1); /* one call hangs, however many were made */
    shaky->hang = false;
    wait_until(get_blob(w.store, 0) == 0);
    all_there(&w);
    world_close(&w);
}

/* Answers that come late carry other bytes: nobody may see them. */
static void test_late_lies(void **state)
{
    struct world w;
    (void)state;

    begin(&w, "puts = cold\n", "100ms");
    assert_int_equal(put_blob(w.cold, 0), 0); /* in both */
    publish(w.cold, "x");
    shaky->hang_answers = true;
    shaky->lie = 1;
    assert_int_equal(get_blob(w.store, 0), 0);
    shaky->hang_answers = false;
    shaky->lie = 0;
    wait_until(get_blob(w.store, 2) == 0);
    assert_int_equal(get_blob(w.store, 0), 0);
    world_close(&w);
}

static void test_writes(void **state)
{
    struct world w;
    (void)state;

    begin(&w, "manifests = cold\n", "100ms");
    shaky->hang_puts = true;
    assert_int_equal(put_blob(w.store, 100), 0); /* late in one, so it goes to the other */
    publish(w.store, "m");
    assert_int_equal(get_blob(w.cold, 100), 0);
    shaky->hang_puts = false;
    wait_until(get_blob(w.store, 0) == 0);
    shaky->hang_publications = true;
    assert_int_equal(put_blob(w.store, 101), 0);
    assert_int_equal(get_blob(w.cold, 101), -ENOENT);
    assert_int_equal(kvs_put_manifest(w.store, "n", "", 0), -ETIMEDOUT); /* it may need blob 101 */
    shaky->hang_publications = false;
    wait_until(kvs_put_manifest(w.store, "n", "", 0) == 0);
    assert_int_equal(get_blob(w.fast, 101), 0);
    world_close(&w);
}

static int count(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 0;
}

static int keep_all(void *arg, const uint8_t *hash, size_t hash_len)
{
    (void)hash;
    (void)hash_len;
    ++*(int *)arg;
    return 1;
}

/* Everything that isn't a get or a put goes through the same threads. */
static void test_all_calls(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    kv_store_stats stats = {.size = sizeof(stats)};
    uint8_t keys[N * 16], data[LEN];
    const void *bytes[N];
    size_t len[N];
    int n = 0, each[N];
    struct world w;
    (void)state;

    begin(&w, "", "60s");
    for (uint64_t i = 0; i < N; i++) {
        make_blob(i, keys + i * 16, data);
        bytes[i] = data;
        len[i] = LEN;
    }
    assert_int_equal(kvs_list_chunks(w.store, count, &n), 0);
    assert_int_equal(n, N);
    assert_int_equal(kvs_touch(w.store, keys, 16, N), N);
    assert_int_equal(kvs_prefetch(w.store, keys, 16, N), 0);
    assert_int_equal(kvs_stats(w.store, &stats), 0);
    n = 0;
    assert_int_equal(w.store->ext.sweep_chunks(w.store->backend, 0, keep_all, &n, &swept), 0);
    assert_int_equal(n, N);
    assert_int_equal(swept.kept, N);
    make_blob(0, keys, data);
    assert_int_equal(kvs_delete_chunk_if(w.store, keys, 16, data, LEN), 1);
    assert_int_equal(kvs_delete_chunk(w.store, keys + 16, 16), 0);
    assert_int_equal(get_blob(w.store, 0), -ENOENT);
    assert_int_equal(get_blob(w.store, 1), -ENOENT);
    for (uint64_t i = 0; i < N; i++)
        bytes[i] = data;
    assert_int_equal(kvs_put_chunks(w.store, keys, 16, 1, bytes, len, each), 0);
    publish(w.store, "m");
    assert_int_equal(get_blob(w.fast, 0), 0);
    n = 0;
    assert_int_equal(kvs_list(w.store, count, &n), 0);
    assert_true(n >= 1);
    assert_int_equal(kvs_delete_manifest(w.store, "m"), 0);
    world_close(&w);
}

static void *let_go(void *arg)
{
    struct timespec some = {.tv_nsec = 300000000};

    (void)arg;
    nanosleep(&some, NULL);
    shaky->hang = false;
    return NULL;
}

/* A listing with progress isn't late; the store opens while a member's open hangs, and closes while a call hangs. */
static void test_open_and_close(void **state)
{
    struct world w;
    struct kvs_store *late;
    pthread_t thread;
    (void)state;

    begin(&w, "puts = cold\n", "100ms");
    shaky->hang_open = true;
    late = open_store(w.uri);
    assert_int_equal(get_blob(late, 1), 0);
    assert_int_equal(get_blob(late, 0), -EIO);
    shaky->hang_open = false;
    wait_until(get_blob(late, 0) == 0);
    shaky->hang = true;
    assert_int_equal(get_blob(late, 0), -EIO);
    kvs_close(late); /* doesn't wait for the member */
    assert_int_equal(shaky->inside, 1);
    assert_int_equal(pthread_create(&thread, NULL, let_go, NULL), 0);
    pthread_join(thread, NULL);
    wait_until(shaky->opens ==
               shaky->closes + 1); /* the late call has closed it; w.store is left */
    late = open_store(w.uri);
    assert_int_equal(get_blob(late, 0), 0);
    shaky->hang_close = true;
    kvs_close(late); /* nor for the member's own close */
    assert_int_equal(shaky->opens, shaky->closes + 2);
    shaky->hang_close = false;
    wait_until(shaky->opens == shaky->closes + 1);
    world_close(&w);
}

/* Collection and packing open the member anew: neither waits longer than its deadline. */
static void test_packs(void **state)
{
    kv_store_pack_opts opts = {.size = sizeof(opts), .to = "fast", .min_bytes = 1};
    kv_store_packed packed = {.size = sizeof(packed)};
    kv_store_swept swept = {.size = sizeof(swept)};
    uint8_t keys[2 * 16], data[LEN];
    struct trd_packing p;
    int n = 0, each[2];
    struct world w;
    (void)state;

    begin(&w, "linger = 1ms\n", "100ms");
    for (uint64_t i = 0; i < 2; i++)
        make_blob(2 * i, keys + i * 16, data);
    assert_int_equal(trd_packing_init(&p, w.fast, w.fast), 0);
    p.min_bytes = 1;
    assert_int_equal(trd_pack_write(&p, keys, 16, 2, each), 2);
    trd_packing_fini(&p);
    shaky->hang_open = true;
    assert_int_equal(w.store->ext.sweep_chunks(w.store->backend, 0, keep_all, &n, &swept), 0);
    assert_int_equal(swept.errors, 1);
    shaky->hang_open = false;
    wait_until(shaky->opens == shaky->closes + 1); /* the late one has gone */
    shaky->hang_open = true;
    assert_int_equal(w.store->ext.pack_chunks(w.store->backend, &opts, keys, 16, 2, &packed),
                     -ETIMEDOUT);
    shaky->hang_open = false;
    wait_until(get_blob(w.store, 0) == 0);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads),          cmocka_unit_test(test_late_lies),
        cmocka_unit_test(test_writes),         cmocka_unit_test(test_all_calls),
        cmocka_unit_test(test_open_and_close), cmocka_unit_test(test_packs)};

    shaky = shaky_find();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
