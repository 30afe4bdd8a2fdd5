// SPDX-License-Identifier: Apache-2.0
/* The checked calls on a correct backend: every value is stored and returned. */
#include "base/unit.h"
#include "memory_backend.h"

#define URI "memory://open"

static int close_all(void **state)
{
    (void)state;
    memory_forget_all();
    return 0;
}

static struct kvs_store *open_store(void)
{
    struct kvs_store *store = NULL;

    assert_int_equal(memory_store(URI, &store), 0);
    return store;
}

static void test_values(void **state)
{
    struct kvs_store *store = open_store();
    uint8_t h8[8] = {1}, h32[32] = {1};
    void *data;
    size_t len;
    (void)state;

    assert_int_equal(kvs_put_chunk(store, h8, 8, "eight", 5), 0);
    assert_int_equal(kvs_put_chunk(store, h8, 8, "eight", 5), 1);
    assert_int_equal(kvs_put_chunk(store, h32, 32, NULL, 0), 0);
    assert_int_equal(kvs_get_chunk(store, h8, 8, &data, &len), 0);
    assert_int_equal(len, 5);
    assert_memory_equal(data, "eight", 5);
    free(data);
    assert_int_equal(kvs_get_chunk(store, h32, 32, &data, &len), 0);
    assert_int_equal(len, 0);
    assert_non_null(data);
    free(data);
    h8[0] = 2;
    assert_int_equal(kvs_get_chunk(store, h8, 8, &data, &len), -ENOENT);
    assert_int_equal(kvs_put_manifest(store, "m", "one", 3), 0);
    assert_int_equal(kvs_put_manifest(store, "m", "other", 5), 0);
    assert_int_equal(kvs_get_manifest(store, "m", &data, &len), 0);
    assert_int_equal(len, 5);
    free(data);
    assert_int_equal(kvs_delete_manifest(store, "m"), 0);
    assert_int_equal(kvs_delete_manifest(store, "m"), 0);
    assert_int_equal(kvs_get_manifest(store, "m", &data, &len), -ENOENT);
    assert_int_equal(kvs_prefetch(store, h32, 32, 1), 0);
    assert_int_equal(memory_space(URI)->prefetched, 1);
    kvs_close(store);
    assert_int_equal(memory_space(URI)->opens, 0);
}

static void test_arguments(void **state)
{
    struct kvs_store *store = open_store();
    uint8_t hash[KVS_HASH_MAX + 1] = {0}, present;
    void *data;
    size_t len;
    (void)state;

    assert_int_equal(kvs_put_chunk(store, NULL, 8, "x", 1), -EINVAL);
    assert_int_equal(kvs_put_chunk(store, hash, 0, "x", 1), -EINVAL);
    assert_int_equal(kvs_put_chunk(store, hash, sizeof(hash), "x", 1), -EINVAL);
    assert_int_equal(kvs_put_chunk(store, hash, 8, NULL, 1), -EINVAL);
    assert_int_equal(kvs_put_chunk(store, hash, 8, "x", SIZE_MAX), -EINVAL);
    assert_int_equal(kvs_get_chunk(store, NULL, 8, &data, &len), -EINVAL);
    assert_int_equal(kvs_put_manifest(store, NULL, "x", 1), -EINVAL);
    assert_int_equal(kvs_put_manifest(store, "", "x", 1), -EINVAL);
    assert_int_equal(kvs_put_manifest(store, "m", NULL, 1), -EINVAL);
    assert_int_equal(kvs_get_manifest(store, "", &data, &len), -EINVAL);
    assert_int_equal(kvs_delete_manifest(store, NULL), -EINVAL);
    assert_int_equal(kvs_prefetch(store, hash, 8, SIZE_MAX / 4), -EINVAL);
    assert_int_equal(kvs_exists(store, NULL, 8, 1, &present), -EINVAL);
    assert_int_equal(kvs_exists(store, NULL, 0, 0, NULL), 0);
    assert_int_equal(kvs_prefetch(store, NULL, 0, 0), 0);
    kvs_close(store);
    kvs_close(NULL);
}

static int count(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return *(int *)arg == 2 ? 77 : 0;
}

static void test_extensions(void **state)
{
    struct kvs_store *store = open_store();
    const uint8_t hashes[3][8] = {{1}, {2}, {3}};
    const void *data[3] = {"a", "bb", ""};
    const size_t lens[3] = {1, 2, 0};
    kv_store_stats stats = {.size = offsetof(kv_store_stats, limit_bytes), .limit_bytes = 99};
    uint8_t present[3];
    void *got[3];
    size_t got_len[3];
    int each[3], n = 0;
    (void)state;

    assert_int_equal(kvs_put_chunks(store, hashes, 8, 3, data, lens, each), 0);
    assert_int_equal(kvs_put_chunks(store, hashes, 8, 3, data, lens, each), 0);
    assert_int_equal(each[2], 1);
    assert_int_equal(kvs_delete_chunk(store, hashes[1], 8), 0);
    assert_int_equal(kvs_exists(store, hashes, 8, 3, present), 0);
    assert_true(present[0] && !present[1] && present[2]);
    assert_int_equal(kvs_get_chunks(store, hashes, 8, 3, got, got_len), 2);
    assert_non_null(got[0]);
    assert_null(got[1]);
    assert_non_null(got[2]);
    free(got[0]);
    free(got[2]);
    assert_int_equal(kvs_touch(store, hashes, 8, 3), 2);
    assert_int_equal(kvs_flush(store), 0);
    assert_int_equal(kvs_list_chunks(store, count, &n), 77);
    assert_int_equal(kvs_list(store, count, &n), 0);
    assert_int_equal(kvs_stats(store, &stats), 0);
    assert_int_equal(stats.n_chunks, 2);
    assert_int_equal(stats.limit_bytes, 99); /* beyond what the caller said it has */
    memory_space(URI)->fail_gets = -EIO;
    assert_int_equal(kvs_get_chunks(store, hashes, 8, 3, got, got_len), -EIO);
    memory_space(URI)->fail_gets = 0;
    kvs_close(store);
}

/* The same without extensions: what can be made of the ABI's calls works, the rest says so. */
static void test_without_extensions(void **state)
{
    const uint8_t hashes[2][8] = {{1}, {2}};
    const void *data[2] = {"a", "bb"};
    const size_t lens[2] = {1, 2};
    kv_store_stats stats = {.size = sizeof(stats)};
    struct kvs_store *store;
    const kv_store_ext *ext;
    uint8_t present[2];
    void *got[2];
    size_t got_len[2];
    int n = 0;
    (void)state;

    assert_int_equal(kvs_open_with(memory_vtable(), NULL, URI, false, &store), 0);
    kvs_backend(store, NULL, &ext);
    assert_null(ext);
    assert_int_equal(kvs_put_chunks(store, hashes, 8, 1, data, lens, NULL), 0);
    assert_int_equal(kvs_get_chunks(store, hashes, 8, 2, got, got_len), 1);
    assert_memory_equal(got[0], "a", 1);
    assert_null(got[1]);
    free(got[0]);
    assert_int_equal(kvs_touch(store, hashes, 8, 2), 0);
    assert_int_equal(kvs_flush(store), 0);
    assert_int_equal(kvs_exists(store, hashes, 8, 2, present), -ENOTSUP);
    assert_int_equal(kvs_delete_chunk(store, hashes, 8), -ENOTSUP);
    assert_int_equal(kvs_list(store, count, &n), -ENOTSUP);
    assert_int_equal(kvs_list_chunks(store, count, &n), -ENOTSUP);
    assert_int_equal(kvs_stats(store, &stats), -ENOTSUP);
    kvs_close(store);
}

static int put_pointers(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                        const uint8_t *const *data, const size_t *len, int *ret_each)
{
    for (size_t i = 0; i < n; i++)
        assert_non_null(data[i]);
    return memory_put_chunks(self, hashes, hash_len, n, data, len, ret_each);
}

static int put_pointer(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                       size_t len)
{
    assert_non_null(data);
    return memory_put_chunk(self, hash, hash_len, data, len);
}

/* An empty value in a batch may come without a pointer, one with bytes may not. */
static void test_batches_without_pointers(void **state)
{
    const uint8_t hashes[3][8] = {{1}, {2}, {3}};
    const void *data[3] = {NULL, "b", NULL};
    size_t lens[3] = {0, 1, 5};
    const struct iovec nothing = {NULL, 0};
    kv_store_vtable table = *memory_vtable();
    kv_store_ext ext = *memory_ext();
    struct kvs_store *store;
    int each[3];
    (void)state;

    table.put_chunk = put_pointer;
    ext.put_chunks = put_pointers;
    ext.put_parts = NULL;
    assert_int_equal(kvs_open_with(&table, &ext, URI, false, &store), 0);
    assert_int_equal(kvs_put_chunks(store, hashes, 8, 3, data, lens, each), -EINVAL);
    assert_true(each[0] == 0 && each[1] == 0 && each[2] == -EINVAL);
    lens[2] = 0;
    assert_int_equal(kvs_put_chunks(store, hashes, 8, 3, data, lens, each), 0);
    assert_true(each[0] == 1 && each[1] == 1 && each[2] == 0);
    assert_int_equal(kvs_put_chunks_from(store, hashes, 8, 1, &nothing, NULL, each), 0);
    assert_int_equal(each[0], 1);
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_values, close_all),
        cmocka_unit_test_teardown(test_arguments, close_all),
        cmocka_unit_test_teardown(test_extensions, close_all),
        cmocka_unit_test_teardown(test_without_extensions, close_all),
        cmocka_unit_test_teardown(test_batches_without_pointers, close_all),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
