// SPDX-License-Identifier: Apache-2.0
/* Saves and restores request many chunks at once where that saves round trips, single chunks where
 * the backend has no batches, and accept no wrong batch. */
#include "base/unit.h"
#include "cutting.h"
#include "memory_backend.h"

#define URI "memory://batch"
enum { LEN = 400000, CHUNK = 4096 };

/* Requests that the backend has got, and its behaviour. */
static struct {
    unsigned puts, put_batches, gets, get_batches, most_puts, prefetches;
    size_t most_bytes;
    bool misses_some; /* get_chunks leaves out every third */
    int get_rc, put_rc, prefetch_rc;
    int bad_put; /* put_chunks: this one fails; -1: none */
    bool spoils; /* get_chunks fails and leaves what it freed, or what was never anything */
    bool twins;  /* the same buffer twice */
} b;
static uint8_t object[LEN];

static int count_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t len)
{
    b.puts++;
    return memory_put_chunk(self, hash, hash_len, data, len);
}

static int count_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                     size_t *len)
{
    b.gets++;
    return memory_get_chunk(self, hash, hash_len, ret, len);
}

static int count_prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    b.prefetches++;
    return b.prefetch_rc ? b.prefetch_rc : memory_prefetch_chunks(self, hashes, hash_len, n);
}

static int count_puts(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *len, int *each)
{
    size_t bytes = 0;
    int rc;

    b.put_batches++;
    b.most_puts = KV_MAX(b.most_puts, (unsigned)n);
    for (size_t i = 0; i < n; i++)
        bytes += len[i];
    b.most_bytes = KV_MAX(b.most_bytes, bytes);
    if (b.put_rc)
        return b.put_rc;
    rc = memory_put_chunks(self, hashes, hash_len, n, data, len, each);
    if (b.bad_put >= 0 && (size_t)b.bad_put < n)
        each[b.bad_put] = rc = -ENOSPC;
    return rc;
}

static int count_gets(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **data, size_t *len)
{
    int rc;

    b.get_batches++;
    rc = memory_get_chunks(self, hashes, hash_len, n, data, len);
    for (size_t i = 0; b.misses_some && i < n; i += 3) {
        free(data[i]);
        data[i] = NULL;
        rc--;
    }
    if (b.spoils)
        for (size_t i = 0; i < n; i++) {
            free(data[i]); /* and stays, dangling */
            data[i] = i % 2 ? data[i] : (uint8_t *)&b;
        }
    if (b.twins && n > 1) {
        free(data[1]);
        data[1] = data[0];
        len[1] = len[0];
    }
    return b.get_rc ? b.get_rc : rc;
}

/* A backend of version @version; its extensions without those that are false. */
static struct kvs_store *open_store(uint32_t version, bool has_ext, bool puts, bool gets)
{
    static kv_store_vtable table;
    static kv_store_ext ext;
    struct kvs_store *store;

    memset(&b, 0, sizeof(b));
    b.bad_put = -1;
    table = *memory_vtable();
    ext = *memory_ext();
    table.version = version;
    table.put_chunk = count_put;
    table.get_chunk = count_get;
    table.prefetch_chunks = count_prefetch;
    ext.put_chunks = puts ? count_puts : NULL;
    ext.get_chunks = gets ? count_gets : NULL;
    assert_int_equal(kvs_open_with(&table, has_ext ? &ext : NULL, URI, false, &store), 0);
    return store;
}

static int save(struct kvs_store *store, struct kvs_result *ret)
{
    struct kvs_save_opts opts = {
        .size = sizeof(opts), .chunk_bytes = CHUNK, .format = KVS_FORMAT_BYTES};
    struct reading reading = {.data = object, .len = LEN};

    return kvs_save(store, "o", read_some, &reading, &opts, ret);
}

static size_t taken;

static int compare(void *arg, const void *data, size_t len)
{
    (void)arg;
    assert_true(taken + len <= LEN);
    assert_memory_equal(object + taken, data, len);
    taken += len;
    return 0;
}

static int restore(struct kvs_store *store, uint32_t window)
{
    struct kvs_restore_opts opts = {.size = sizeof(opts), .window_bytes = window};

    taken = 0;
    return kvs_restore(store, "o", compare, NULL, &opts, NULL);
}

static void drop_log(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static int set_up(void **state)
{
    struct rng rng = {1};
    (void)state;

    kvs_set_log(drop_log, NULL);
    for (size_t i = 0; i < LEN; i++)
        object[i] = (uint8_t)rng_next(&rng);
    memcpy(object + LEN / 2, object, LEN / 4); /* some chunks come twice */
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_set_log(NULL, NULL);
    memory_forget_all();
    return 0;
}

static void test_batches_happen(void **state)
{
    struct kvs_result first = {.size = sizeof(first)}, again = first, single = first;
    struct kvs_store *store = open_store(1, true, true, true);
    (void)state;

    assert_int_equal(save(store, &first), 0);
    assert_int_equal(b.puts, 0);
    assert_int_equal(b.put_batches, 1);
    assert_int_equal(b.most_puts, first.n_chunks);
    assert_true(first.new_chunks < first.n_chunks); /* what comes twice in a batch is a hit */
    assert_int_equal(save(store, &again), 0);
    assert_int_equal(again.new_chunks, 0);
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(taken, LEN);
    assert_int_equal(b.gets, 0);
    assert_int_equal(b.get_batches, 1);
    assert_int_equal(restore(store, LEN / 10), 0); /* window by window */
    assert_int_equal(taken, LEN);
    assert_in_range(b.get_batches, 1 + 9, 1 + 15);
    kvs_close(store);
    memory_forget_all();
    /* The same counts as one by one. */
    store = open_store(1, true, false, false);
    assert_int_equal(save(store, &single), 0);
    assert_int_equal(b.puts, single.n_chunks);
    assert_int_equal(single.new_chunks, first.new_chunks);
    assert_int_equal(single.new_bytes, first.new_bytes);
    kvs_close(store);
}

/* Each batch is bounded, however many chunks there are, and however large they are. */
static void test_batches_are_bounded(void **state)
{
    enum { MIB = 1 << 20, BIG = 80 * MIB };
    struct kvs_save_opts opts = {
        .size = sizeof(opts), .chunk_bytes = CHUNK, .format = KVS_FORMAT_BYTES};
    struct kvs_store *store = open_store(1, true, true, true);
    struct kvs_result result = {.size = sizeof(result)};
    uint8_t *big = malloc(BIG);
    struct reading reading = {.data = big, .len = 4 * MIB};
    struct rng rng = {7};
    (void)state;

    for (size_t i = 0; i < BIG; i++)
        big[i] = (uint8_t)rng_next(&rng);
    assert_int_equal(kvs_save(store, "many", read_some, &reading, &opts, &result), 0);
    assert_int_equal(b.most_puts, 256);
    assert_int_equal(b.put_batches, (result.n_chunks + 255) / 256);
    opts.chunk_bytes = 4 * MIB;
    reading = (struct reading){.data = big, .len = BIG};
    assert_int_equal(kvs_save(store, "large", read_some, &reading, &opts, &result), 0);
    assert_true(b.most_bytes > 16 * MIB && b.most_bytes <= 32 * MIB);
    kvs_close(store);
    free(big);
}

/* prefetch_chunks overlaps with what is done with the chunks: it goes first. */
static void test_prefetch_goes_first(void **state)
{
    struct kvs_store *store = open_store(2, true, true, true);
    unsigned gets;
    (void)state;

    assert_int_equal(save(store, NULL), 0);
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(b.prefetches, 1);
    assert_int_equal(b.get_batches, 0);
    gets = b.gets;
    assert_true(gets > 0);
    b.prefetch_rc = -EIO; /* a hint that failed: the batch is what is left */
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(b.get_batches, 1);
    assert_int_equal(b.gets, gets);
    assert_int_equal(taken, LEN);
    kvs_close(store);
}

static void test_without(void **state)
{
    struct kvs_store *store = open_store(1, false, false, false);
    (void)state;

    assert_int_equal(save(store, NULL), 0);
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(taken, LEN);
    assert_true(b.puts > 0 && b.gets == b.puts);
    assert_int_equal(b.prefetches + b.put_batches + b.get_batches, 0);
    kvs_close(store);
}

/* Chunks that a batch call leaves out or refuses are put and got one by one. */
static void test_fallbacks(void **state)
{
    struct kvs_store *store = open_store(1, true, true, true);
    unsigned n;
    (void)state;

    b.put_rc = -ENOTSUP;
    assert_int_equal(save(store, NULL), 0);
    n = b.puts;
    assert_true(n > 0 && b.put_batches > 0);
    b.misses_some = true;
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(taken, LEN);
    assert_int_equal(b.gets, (n + 2) / 3);
    b.misses_some = false;
    b.spoils = true;
    b.get_rc = -EINVAL; /* too many, perhaps */
    b.gets = 0;
    assert_int_equal(restore(store, 0), 0);
    assert_int_equal(b.gets, n);
    b.get_rc = -ETIMEDOUT; /* asking again one by one would take for ever */
    b.gets = 0;
    assert_int_equal(restore(store, 0), -ETIMEDOUT);
    assert_int_equal(b.gets, 0);
    b.spoils = false;
    b.get_rc = 0;
    memory_remove(&memory_space(URI)->chunks);
    assert_int_equal(restore(store, 0), -ENOENT);
    kvs_close(store);
}

static void test_failed_puts(void **state)
{
    struct kvs_store *store = open_store(1, true, true, true);
    (void)state;

    b.bad_put = 5;
    assert_int_equal(save(store, NULL), -ENOSPC);
    b.bad_put = -1;
    b.put_rc = -EIO;
    assert_int_equal(save(store, NULL), -EIO);
    b.put_rc = 1000000;
    assert_int_equal(save(store, NULL), -EPROTO);
    assert_null(memory_space(URI)->manifests);
    assert_int_equal(b.puts, 0);
    kvs_close(store);
}

/*
 * Whose the buffers are: the consumer's when the call succeeded, whatever is wrong with them, and
 * nobody's business when it failed. A sanitizer sees both mistakes.
 */
static void test_hostile_batches(void **state)
{
    static const int failures[] = {-EPROTO, -1, -EIO, -2000000000};
    struct kvs_store *store = open_store(1, true, true, true);
    uint8_t keys[3][8] = {"chunk 0", "chunk 1", "chunk 2"};
    void *data[3];
    size_t len[3];
    (void)state;

    for (int i = 0; i < 3; i++)
        assert_int_equal(kvs_put_chunk(store, keys[i], 8, keys[i], 8), 0);
    b.spoils = true;
    for (size_t i = 0; i < KV_COUNT(failures); i++) {
        b.get_rc = failures[i];
        assert_true(kvs_get_chunks(store, keys, 8, 3, data, len) < 0);
        assert_true(!data[0] && !data[1] && !data[2]);
    }
    b.spoils = false;
    for (int rc = 1; rc <= 9; rc += 4) { /* wrong count, or one that can't be */
        b.get_rc = rc;
        assert_int_equal(kvs_get_chunks(store, keys, 8, 3, data, len), -EPROTO);
        assert_true(!data[0] && !data[1] && !data[2]);
    }
    b.get_rc = 0;
    b.twins = true;
    assert_int_equal(kvs_get_chunks(store, keys, 8, 3, data, len), -EPROTO);
    assert_true(!data[0] && !data[1] && !data[2]);
    assert_int_equal(save(store, NULL), 0);
    assert_int_equal(restore(store, 0), -EPROTO);
    kvs_close(store);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_batches_happen),  TEST(test_batches_are_bounded), TEST(test_prefetch_goes_first),
        TEST(test_without),         TEST(test_fallbacks),           TEST(test_failed_puts),
        TEST(test_hostile_batches),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
