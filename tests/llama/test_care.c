// SPDX-License-Identifier: Apache-2.0
/* Verification and collection of a store that holds a prefix cache beside objects. */
#include <unistd.h>

#include "base/core/error.h"
#include "base/hash/prefix_block.h"
#include "llama/toy_llama.h"
#include "store/memory_backend.h"

#define URI "memory://care"

enum { DAY_S = 86400, N = 70 };

static struct kvs_store *store;
static kv_store_ext by_list;
static int32_t tokens[N];

static void open_store(bool sweeps)
{
    memory_forget_all();
    by_list = *memory_ext();
    by_list.sweep_chunks = sweeps ? by_list.sweep_chunks : NULL;
    assert_int_equal(kvs_open_with(memory_vtable(), &by_list, URI, false, &store), 0);
    for (int32_t i = 0; i < N; i++)
        tokens[i] = i * i;
}

static void close_store(void)
{
    kvs_close(store);
    memory_forget_all();
}

static struct kvl_cache *open_cache(const char *fingerprint)
{
    const struct kvl_opts opts = {.size = sizeof(opts),
                                  .fingerprint = fingerprint,
                                  .libllama = &toy_table,
                                  .block_tokens = 8};
    struct kvl_cache *cache;

    assert_int_equal(kvl_open(store, &opts, &cache), 0);
    return cache;
}

/* Save N tokens of a memory that can be cut, or of one that can't. */
static void save(const char *fingerprint, bool recurrent)
{
    const struct toy_kind kind = {
        .n_streams = 1, .n_layers = 1, .k_row = 4, .v_row = 4, .recurrent = recurrent};
    struct toy_memory *toy = malloc(sizeof(*toy));
    struct llama_context ctx = {toy};
    struct kvl_cache *cache = open_cache(fingerprint);

    assert_non_null(toy);
    toy_init(toy, &kind);
    toy_decode(toy, 0, tokens, N);
    assert_int_equal(kvl_save(cache, &ctx, 0, tokens, N, NULL), recurrent ? N : N / 8 * 8);
    kvl_close(cache);
    free(toy);
}

static struct kvs_verify_result verify(size_t bad, unsigned *lines)
{
    struct kvs_verify_result r = KVS_VERIFY_RESULT_INIT;

    *lines = 0;
    assert_int_equal(kvs_verify(store, NULL, NULL, NULL, NULL, &r), 0);
    assert_int_equal(r.bad_prefix_chunks, bad);
    return r;
}

static void count_line(void *arg, const char *line)
{
    assert_non_null(strstr(line, "prefix cache: chunk 4b5650")); /* KVP */
    ++*(unsigned *)arg;
}

static int give_up(void *arg, uint64_t done, uint64_t total)
{
    (void)arg, (void)done, (void)total;
    return 1;
}

static void test_verify(void **state)
{
    struct kvs_verify_result r = KVS_VERIFY_RESULT_INIT;
    unsigned lines = 0;

    (void)state;
    open_store(true);
    save("model", false);
    save("recurrent", true);
    assert_int_equal(kvs_save_buffer(store, "object", "content", 7, NULL, NULL), 0);
    r = verify(0, &lines);
    assert_int_equal(r.prefix_chunks, 8 + 1 + 1 + 1 + 1); /* blocks, snapshot, part, two layouts */
    assert_int_equal(r.chunks, 1);
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        if (o->hash_len == KV_PREFIX_KEY && (o->hash[3] == 'l' || o->hash[3] == 'p'))
            o->data[o->len - 1] ^= 4;
    assert_int_equal(kvs_verify(store, NULL, count_line, NULL, &lines, &r), 0);
    assert_int_equal(r.bad_prefix_chunks, 3);
    assert_int_equal(lines, 3);
    assert_int_equal(kvs_verify(store, NULL, NULL, give_up, NULL, &r), -ECANCELED);
    close_store();
}

/* A snapshot whose part is gone. */
static void test_verify_finds_missing_parts(void **state)
{
    struct kvs_verify_result r;
    unsigned lines;

    (void)state;
    open_store(true);
    save("recurrent", true);
    for (struct memory_object *o = memory_space(URI)->chunks, *next; o; o = next) {
        uint8_t key[KV_PREFIX_KEY];

        next = o->next;
        if (o->hash[3] != 'p')
            continue;
        memcpy(key, o->hash, sizeof(key));
        assert_int_equal(kvs_delete_chunk(store, key, sizeof(key)), 0);
    }
    r = verify(0, &lines);
    assert_int_equal(r.prefix_chunks, 2);
    assert_int_equal(r.missing_chunks, 1); /* no problem in a store with a limit */
    close_store();
}

static int refused;      /* error of gets of chunks of kind `refused_kind`; 0: none */
static int list_refused; /* error with which a listing of chunks breaks off; 0: none */
static uint8_t refused_kind;

static int refuse_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                      size_t *ret_len)
{
    return refused && hash_len == KV_PREFIX_KEY && hash[3] == refused_kind
               ? refused
               : memory_get_chunk(self, hash, hash_len, ret, ret_len);
}

static int refuse_exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present)
{
    return refused && hash_len == KV_PREFIX_KEY && hashes[3] == refused_kind
               ? refused
               : memory_exists_chunks(self, hashes, hash_len, n, ret_present);
}

static int refuse_list(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    int rc = memory_list_chunks(self, each, arg);

    return list_refused ? list_refused : rc;
}

static void note_line(void *arg, const char *line)
{
    (void)line;
    ++*(unsigned *)arg;
}

/* Chunks that can't be read hide nothing of what else is wrong. */
static void test_verify_of_unreadable_chunks(void **state)
{
    static const int errors[] = {-EACCES, -EPERM, -EIO, -ECONNREFUSED};
    struct kvs_verify_result r = KVS_VERIFY_RESULT_INIT;
    kv_store_vtable table;
    unsigned n_lines;
    kv_store_ext ext;
    (void)state;

    open_store(true);
    save("model", false);
    save("recurrent", true);
    kvs_close(store);
    table = *memory_vtable();
    table.get_chunk = refuse_get;
    ext = *memory_ext();
    ext.exists_chunks = refuse_exists;
    ext.list_chunks = refuse_list;
    assert_int_equal(kvs_open_with(&table, &ext, URI, false, &store), 0);
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        if (o->hash[3] == KV_PREFIX_LAYOUT)
            o->data[o->len - 1] ^= 4; /* two damaged chunks */
    for (size_t i = 0; i < 2 * KV_COUNT(errors); i++) {
        bool denied = i / 2 < 2, outage = i / 2 == 3, part = i % 2;
        size_t n = part ? 1 : 8; /* parts, blocks */

        n_lines = 0;
        refused_kind = part ? KV_PREFIX_PART : KV_PREFIX_BLOCK;
        refused = errors[i / 2];
        assert_int_equal(kvs_verify(store, NULL, note_line, NULL, &n_lines, &r),
                         denied || outage ? refused : 0);
        refused = 0;
        if (outage)
            continue;
        assert_int_equal(n_lines, 2 + n);
        assert_int_equal(r.prefix_chunks, 12 - (denied ? n : 0));
        assert_int_equal(r.bad_prefix_chunks, 2 + (denied ? 0 : n));
        assert_int_equal(r.missing_chunks, 0);
    }
    list_refused = -EACCES;
    n_lines = 0;
    assert_int_equal(kvs_verify(store, NULL, note_line, NULL, &n_lines, &r), -EACCES);
    assert_int_equal(r.bad_prefix_chunks, 2);
    assert_int_equal(n_lines, 3);
    list_refused = 0;
    close_store();
}

static struct kvs_gc_result collect(uint64_t grace_s, uint64_t prefix_age_s, bool dry_run)
{
    const struct kvs_gc_opts opts = {
        .size = sizeof(opts), .grace_s = grace_s, .prefix_age_s = prefix_age_s, .dry_run = dry_run};
    struct kvs_gc_result r = KVS_GC_RESULT_INIT;

    assert_int_equal(kvs_gc(store, &opts, &r), 0);
    assert_int_equal(r.errors, 0);
    return r;
}

static int64_t find(void)
{
    struct kvl_cache *cache = open_cache("model");
    int64_t n = kvl_find(cache, tokens, N);

    kvl_close(cache);
    return n;
}

/* Blocks go by their own age, whatever the grace period is; objects' chunks stay. */
static void test_blocks_expire(void **state)
{
    struct kvs_gc_result r;

    (void)state;
    open_store(true);
    save("model", false);
    assert_int_equal(kvs_save_buffer(store, "object", "content", 7, NULL, NULL), 0);
    assert_int_equal(kvs_put_chunk(store, "nobody's", 8, "x", 1), 0);
    memory_space(URI)->now_s += 20 * DAY_S;
    r = collect(KVS_GC_NO_GRACE, 0, false);
    assert_int_equal(r.deleted_chunks, 1); /* nobody's */
    assert_int_equal(r.live_chunks, 10);
    assert_int_equal(find(), 64);
    save("model", false); /* uses them again */
    memory_space(URI)->now_s += 20 * DAY_S;
    assert_int_equal(collect(0, 0, false).deleted_chunks, 0);
    memory_space(URI)->now_s += 11 * DAY_S;
    r = collect(0, 0, false);
    assert_int_equal(r.deleted_chunks, 9);
    assert_int_equal(r.live_chunks, 1);
    assert_int_equal(find(), 0);
    save("model", false);
    memory_space(URI)->now_s += 100;
    assert_int_equal(collect(0, 90, false).deleted_chunks, 9);
    close_store();
}

/* The same where the backend has no sweep of its own, and of dry runs: by listing. */
static void test_blocks_expire_by_list(void **state)
{
    struct kvs_gc_result r;

    (void)state;
    for (int dry = 0; dry < 2; dry++) { /* the space's clock begins long ago */
        open_store(dry);
        save("model", false);
        r = collect(0, UINT64_MAX, dry); /* never */
        assert_int_equal(r.deleted_chunks, 0);
        r = collect(UINT64_MAX / 4, 3600, dry);
        assert_int_equal(r.deleted_chunks, 9);
        assert_int_equal(find(), dry ? 64 : 0);
        close_store();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verify),
        cmocka_unit_test(test_verify_finds_missing_parts),
        cmocka_unit_test(test_verify_of_unreadable_chunks),
        cmocka_unit_test(test_blocks_expire),
        cmocka_unit_test(test_blocks_expire_by_list),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
