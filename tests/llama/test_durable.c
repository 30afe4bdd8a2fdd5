// SPDX-License-Identifier: Apache-2.0
/* The prefix cache over a file store: what a save leaves on the disk while the process runs on. */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/hash/prefix_block.h"
#include "kv_llama.h"
#include "kv_store.h"
#include "support.h"

enum { STATE = 64 << 10, TOKENS = 10, LIMIT = 512 << 10 };

static struct {
    char dir[128];
    struct kvs_store *store, *other; /* other: as another process has it */
    struct kvl_cache *cache, *others;
    uint64_t rng;
} t;

static void open_both(const char *options)
{
    struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "model"};
    char uri[256];

    snprintf(uri, sizeof(uri), "%s%s", t.dir, options);
    assert_int_equal(kvs_open(uri, &t.store), 0);
    assert_int_equal(kvs_open(t.dir, &t.other), 0);
    assert_int_equal(kvl_open(t.store, &opts, &t.cache), 0);
    assert_int_equal(kvl_open(t.other, &opts, &t.others), 0);
}

static int setup(void **state)
{
    (void)state;
    t.rng = 3;
    return disk_dir(t.dir, sizeof(t.dir));
}

static int teardown(void **state)
{
    (void)state;
    kvl_close(t.cache);
    kvl_close(t.others);
    kvs_close(t.store);
    kvs_close(t.other);
    return remove_dir(t.dir);
}

/* Tokens of conversation @n, and a state of noise that can't be cut at tokens. */
static void make(int32_t n, int32_t tokens[TOKENS], uint8_t *state)
{
    for (int32_t i = 0; i < TOKENS; i++)
        tokens[i] = n;
    for (size_t i = 0; state && i < STATE; i++)
        state[i] = (uint8_t)unit_random(&t.rng);
}

static void save(int32_t n)
{
    int32_t tokens[TOKENS];
    uint8_t *state = malloc(STATE);

    make(n, tokens, state);
    assert_int_equal(kvl_save_state(t.cache, tokens, TOKENS, KVL_FORM_SEQUENCE, state, STATE, NULL),
                     TOKENS);
    free(state);
}

static int64_t load(struct kvl_cache *cache, int32_t n)
{
    int32_t tokens[TOKENS];
    void *state;
    size_t len;
    int64_t got;

    make(n, tokens, NULL);
    got = kvl_load_state(cache, tokens, TOKENS, KVL_FORM_SEQUENCE, &state, &len, NULL);
    if (got > 0)
        free(state);
    return got;
}

static int n_files(const char *folder)
{
    char path[256];
    int n = -2; /* . and .. */
    DIR *dir;

    snprintf(path, sizeof(path), "%s/%s", t.dir, folder);
    dir = opendir(path);
    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* A limit holds while the process runs, and takes what was used longest ago. */
static void test_limit(void **state)
{
    kv_store_stats stats = {.size = sizeof(stats)};
    (void)state;

    open_both("?limit=512KiB");
    for (int32_t n = 0; n < 20; n++) {
        save(n);
        assert_int_equal(load(t.cache, 0), TOKENS); /* a use */
        assert_int_equal(kvs_stats(t.store, &stats), 0);
        assert_true(stats.bytes <= LIMIT);
    }
    assert_true(stats.evicted > 0);
    assert_int_equal(load(t.others, 0), TOKENS);
    assert_int_equal(load(t.others, 1), 0);
    assert_int_equal(load(t.others, 19), TOKENS);
}

static int make_old(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};

    (void)st;
    (void)ftw;
    return flag == FTW_F ? utimensat(AT_FDCWD, path, times, 0) : 0;
}

/* Saves keep nothing from collection: no links, no notes of chunks that a manifest may need. */
static void test_collection(void **state)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = KVS_GC_NO_GRACE};
    struct kvs_gc_result result = KVS_GC_RESULT_INIT;
    char chunks[256];
    (void)state;

    open_both("");
    save(1);
    assert_int_equal(n_files(".kvasir/tmp"), 0);
    assert_int_equal(n_files(".kvasir/refs"), 0);
    assert_int_equal(kvs_gc(t.other, &opts, &result), 0);
    assert_int_equal(result.opaque_manifests, 0);
    assert_int_equal(result.deleted_chunks, 0);
    assert_int_equal(load(t.others, 1), TOKENS);
    snprintf(chunks, sizeof(chunks), "%s/chunks", t.dir);
    assert_int_equal(nftw(chunks, make_old, 16, FTW_PHYS), 0);
    assert_int_equal(kvs_gc(t.other, &opts, &result), 0);
    assert_true(result.deleted_chunks > 0);
    assert_int_equal(load(t.others, 1), 0);
    assert_int_equal(kvs_delete_manifest(t.other, "kvasir-llama"), 0);
    save(1);
    assert_int_equal(load(t.others, 1), TOKENS);
}

static int delete_layout(void *arg, const kv_store_entry *entry)
{
    uint8_t *key = arg;

    if (entry->hash_len != KV_PREFIX_KEY || entry->hash[3] != KV_PREFIX_LAYOUT)
        return 0;
    memcpy(key, entry->hash, KV_PREFIX_KEY);
    return 1;
}

/* A layout that got lost is durable with the save that puts it again, and so is its snapshot. */
static void test_lost_layout(void **state)
{
    uint8_t key[KV_PREFIX_KEY], *same = malloc(STATE);
    int32_t tokens[TOKENS];
    (void)state;

    open_both("");
    make(1, tokens, same);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(
            kvl_save_state(t.cache, tokens, TOKENS, KVL_FORM_SEQUENCE, same, STATE, NULL), TOKENS);
        assert_int_equal(kvl_find(t.others, tokens, TOKENS), TOKENS);
        assert_int_equal(kvs_list_chunks(t.other, delete_layout, key), 1);
        assert_int_equal(kvs_delete_chunk(t.other, key, sizeof(key)), 0);
        assert_int_equal(kvl_find(t.others, tokens, TOKENS), 0);
    }
    free(same);
}

static int count_one(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 0;
}

static int n_chunks(void)
{
    int n = 0;

    assert_int_equal(kvs_list_chunks(t.other, count_one, &n), 0);
    return n;
}

/* A snapshot that is discarded leaves no part, and others alone. */
static void test_discard(void **state)
{
    int32_t tokens[TOKENS];
    int before;
    (void)state;

    open_both("");
    save(1);
    before = n_chunks();
    save(2);
    assert_true(n_chunks() > before + 1); /* a head and at least a part */
    make(2, tokens, NULL);
    assert_int_equal(kvl_discard(t.cache, tokens, TOKENS - 1, KVL_FORM_SEQUENCE), 0);
    assert_int_equal(kvl_discard(t.cache, tokens, TOKENS, KVL_FORM_CONTEXT), 0);
    assert_int_equal(kvl_discard(t.cache, tokens, 0, KVL_FORM_SEQUENCE), 0);
    assert_int_equal(kvl_discard(NULL, tokens, TOKENS, KVL_FORM_SEQUENCE), -EINVAL);
    assert_int_equal(load(t.others, 2), TOKENS);
    assert_int_equal(kvl_discard(t.cache, tokens, TOKENS, KVL_FORM_SEQUENCE), 1);
    assert_int_equal(kvl_discard(t.cache, tokens, TOKENS, KVL_FORM_SEQUENCE), 0);
    assert_int_equal(n_chunks(), before);
    assert_int_equal(load(t.others, 2), 0);
    assert_int_equal(load(t.others, 1), TOKENS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(test_collection, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lost_layout, setup, teardown),
        cmocka_unit_test_setup_teardown(test_discard, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
