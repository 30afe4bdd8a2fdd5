// SPDX-License-Identifier: Apache-2.0
/* Ranges of objects restored: the bytes that a whole restore gives there, from few chunks; and
 * listings by prefix. */
#include "base/unit.h"
#include "cutting.h"
#include "llama_state.h"
#include "memory_backend.h"

#define URI "memory://range"

static const struct kvs_save_opts small = {
    .size = sizeof(small), .chunk_bytes = 4096, .chunk_tokens = 16};

static void drop_log(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    (void)line;
}

static int open_store(void **state)
{
    struct kvs_store *store;

    kvs_set_log(drop_log, NULL);
    assert_int_equal(memory_store(URI, &store), 0);
    *state = store;
    return 0;
}

static int close_store(void **state)
{
    kvs_close(*state);
    memory_forget_all();
    return 0;
}

static int append(void *arg, const void *data, size_t len)
{
    kv_buf_append(arg, data, len);
    return 0;
}

/* States with V as it lies and transposed (woven regions), and plain bytes. */
static void make_object(struct rng *rng, struct kv_buf *b)
{
    struct llama_state s = {.version = 3,
                            .n_tokens = 1 + rng_below(rng, 150),
                            .n_layers = 1 + rng_below(rng, 3),
                            .k_row = 8 + rng_below(rng, 100),
                            .v_row = 2 * rng_below(rng, 400),
                            .v_trans = rng_below(rng, 4) > 0,
                            .seed = rng_below(rng, 1000)};

    if (rng_below(rng, 4)) {
        llama_state_make(&s, b);
        return;
    }
    *b = (struct kv_buf)KV_BUF_INIT;
    for (uint32_t n = rng_below(rng, 20000); n > 0; n--)
        llama_u32(b, n * 77777);
}

static void check_range(struct kvs_store *store, const struct kv_buf *want, uint64_t offset,
                        uint64_t length, bool verify_first)
{
    struct kvs_restore_opts opts = {.size = sizeof(opts),
                                    .offset = offset,
                                    .length = length,
                                    .verify_first = verify_first,
                                    .window_bytes = 5000};
    struct kvs_result result = {.size = sizeof(result)};
    size_t len = length ? length : want->len - offset, buffer_len;
    struct kv_buf got = KV_BUF_INIT;
    void *buffer;

    assert_int_equal(kvs_restore(store, "a", append, &got, &opts, &result), 0);
    assert_int_equal(got.len, len);
    assert_int_equal(result.bytes, len);
    if (len)
        assert_memory_equal(got.data, want->data + offset, len);
    kv_buf_fini(&got);
    assert_int_equal(kvs_restore_buffer(store, "a", &buffer, &buffer_len, &opts), 0);
    assert_int_equal(buffer_len, len);
    if (len)
        assert_memory_equal(buffer, want->data + offset, len);
    free(buffer);
}

static void test_random_ranges(void **state)
{
    struct rng rng = {test_seed()};

    for (long round = test_rounds(60); round > 0; round--) {
        struct kv_buf want;

        make_object(&rng, &want);
        assert_int_equal(kvs_save_buffer(*state, "a", want.data, want.len, &small, NULL), 0);
        for (int i = 0; i < 12; i++) {
            uint64_t offset = rng_below(&rng, (uint32_t)want.len + 1);
            uint64_t room = want.len - offset;
            uint64_t length = rng_below(&rng, (uint32_t)(i % 2 ? room : KV_MIN(room, 50u)) + 1);

            check_range(*state, &want, offset, length, i % 3 == 0);
        }
        check_range(*state, &want, 0, 0, false);
        kv_buf_fini(&want);
    }
}

/* A range reads the chunks that hold it, and no others: those may be damaged. */
static void test_only_its_chunks(void **state)
{
    struct kvs_restore_opts opts = {.size = sizeof(opts), .offset = 500000, .length = 100};
    struct kvs_result result = {.size = sizeof(result)};
    struct kvs_store *store = *state;
    struct kv_buf want = KV_BUF_INIT, got = KV_BUF_INIT;
    const struct kvs_chunk_ref *chunks;
    struct kvs_manifest *m;
    size_t n;

    for (uint32_t i = 0; i < 250000; i++)
        llama_u32(&want, i * 77777);
    assert_int_equal(kvs_save_buffer(store, "a", want.data, want.len, &small, NULL), 0);
    assert_int_equal(kvs_manifest_get(store, "a", &m), 0);
    chunks = kvs_manifest_chunks(m, &n);
    assert_int_equal(kvs_delete_chunk(store, chunks[0].key, 16), 0);
    assert_int_equal(kvs_delete_chunk(store, chunks[n - 1].key, 16), 0);
    kvs_manifest_free(m);
    assert_int_equal(kvs_restore(store, "a", append, &got, &opts, &result), 0);
    assert_true(result.n_chunks <= 2);
    assert_memory_equal(got.data, want.data + 500000, 100);
    opts.offset = 0;
    assert_int_equal(kvs_restore(store, "a", append, &got, &opts, NULL), -ENOENT);
    kv_buf_fini(&want);
    kv_buf_fini(&got);
}

static void test_outside(void **state)
{
    static const uint64_t bad[][2] = {{11, 0},         {5, 6},          {0, 11},
                                      {UINT64_MAX, 1}, {1, UINT64_MAX}, {10, 1}};
    struct kv_buf got = KV_BUF_INIT;

    assert_int_equal(kvs_save_buffer(*state, "a", "0123456789", 10, &small, NULL), 0);
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        struct kvs_restore_opts opts = {
            .size = sizeof(opts), .offset = bad[i][0], .length = bad[i][1]};

        assert_int_equal(kvs_restore(*state, "a", append, &got, &opts, NULL), -ERANGE);
        assert_int_equal(got.len, 0);
    }
    kv_buf_fini(&got);
}

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct kv_buf *names = arg;

    kv_buf_append(names, entry->name, strlen(entry->name));
    kv_buf_append(names, " ", 1);
    return strcmp(entry->name, "stop") == 0 ? 7 : 0;
}

static void test_prefix(void **state)
{
    static const char *const names[] = {"user-1", "user-2", "use", "other", "stop"};
    struct kv_buf found = KV_BUF_INIT;

    for (size_t i = 0; i < KV_COUNT(names); i++)
        assert_int_equal(kvs_save_buffer(*state, names[i], "x", 1, NULL, NULL), 0);
    assert_int_equal(kvs_list_prefix(*state, "user-", note_name, &found), 0);
    assert_int_equal(found.len, 14);
    assert_non_null(memmem(found.data, found.len, "user-1 ", 7));
    assert_non_null(memmem(found.data, found.len, "user-2 ", 7));
    found.len = 0;
    assert_int_equal(kvs_list_prefix(*state, "nobody", note_name, &found), 0);
    assert_int_equal(found.len, 0);
    assert_int_equal(kvs_list_prefix(*state, "st", note_name, &found), 7);
    assert_int_equal(kvs_list_prefix(*state, NULL, note_name, &found), -EINVAL);
    kv_buf_fini(&found);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_random_ranges, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_only_its_chunks, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_outside, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_prefix, open_store, close_store),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
