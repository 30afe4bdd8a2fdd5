// SPDX-License-Identifier: Apache-2.0
/*
 * kvs_close: chunks that were put and never published are there for the next handle, on every kind
 * of backend; where that can't be, one log line says how many are lost. Saves that failed leave
 * nothing.
 */
#include <errno.h>
#include <sys/wait.h>

#include "backends.h"

enum { KEY = 8 };

static unsigned n_lines;
static char last_line[512];

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    n_lines++;
    snprintf(last_line, sizeof(last_line), "%s", line);
}

static int set_up(void **state)
{
    int rc = backends_set_up(state);

    kvs_set_log(keep_line, NULL);
    n_lines = 0;
    return rc;
}

static void put(struct kvs_store *store, uint64_t n, int expected)
{
    uint8_t key[KEY];

    backends_key(key, n);
    assert_int_equal(kvs_put_chunk(store, key, KEY, key, KEY), expected);
}

static bool is_there(enum backend which, uint64_t n)
{
    struct kvs_store *store = backends_open(which);
    uint8_t key[KEY];
    size_t len;
    void *data;
    int rc;

    backends_key(key, n);
    rc = kvs_get_chunk(store, key, KEY, &data, &len);
    if (rc == 0) {
        assert_int_equal(len, KEY);
        assert_memory_equal(data, key, KEY);
        free(data);
    }
    kvs_close(store);
    return rc == 0;
}

static void test_close_flushes(void **state)
{
    (void)state;
    for (enum backend which = FILES; which < N_BACKENDS; which++) {
        struct kvs_store *store = backends_open(which);
        struct iovec parts[2];
        uint8_t key[KEY];
        uint32_t two = 2;
        void *data = key;
        size_t len = KEY;

        put(store, 1, 0);
        backends_key(key, 2);
        assert_int_equal(kvs_put_chunks(store, key, KEY, 1, (const void **)&data, &len, NULL), 0);
        backends_key(key, 3);
        parts[0] = (struct iovec){key, 3};
        parts[1] = (struct iovec){key + 3, 5};
        assert_int_equal(kvs_put_chunks_from(store, key, KEY, 1, parts, &two, NULL), 0);
        n_lines = 0;
        kvs_close(store);
        assert_int_equal(n_lines, which == BARE); /* it can't say whether it buffers */
        for (uint64_t n = 1; n <= 3; n++)
            assert_true(is_there(which, n));
    }
}

static int failing_flush(kv_store_v1 *self)
{
    (void)self;
    return -ENOSPC;
}

/* The line names the number of chunks since the last publication. */
static void test_failed_flush_is_told(void **state)
{
    kv_store_ext ext = *memory_ext();
    struct kvs_store *store;
    (void)state;

    ext.flush = failing_flush;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://full", false, &store), 0);
    put(store, 1, 0);
    assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
    put(store, 1, 1); /* a hit is nothing to lose */
    put(store, 2, 0);
    put(store, 3, 0);
    assert_int_equal(kvs_flush(store), -ENOSPC);
    n_lines = 0;
    kvs_close(store);
    assert_int_equal(n_lines, 1);
    assert_non_null(strstr(last_line, "chunks=2"));
    assert_non_null(strstr(last_line, "lost"));
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://full", false, &store), 0);
    put(store, 4, 0);
    assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
    kvs_close(store);
    assert_int_equal(n_lines, 1); /* all was published */
}

static int64_t read_then_fail(void *arg, void *buf, size_t cap)
{
    int *calls = arg;

    if ((*calls)++)
        return -EIO;
    memset(buf, 7, cap);
    return (int64_t)cap;
}

/* A save that was given up is not made durable by close. */
static void test_failed_save_is_dropped(void **state)
{
    struct kvs_save_opts opts = KVS_SAVE_OPTS_INIT;
    kv_store_stats stats = {.size = sizeof(stats)};
    struct kvs_store *store = backends_open(FILES);
    int calls = 0;
    (void)state;

    opts.format = KVS_FORMAT_BYTES;
    opts.chunk_bytes = 4096;
    assert_int_equal(kvs_save(store, "o", read_then_fail, &calls, &opts, NULL), -EIO);
    assert_int_equal(kvs_stats(store, &stats), 0);
    assert_true(stats.puts > 0);
    kvs_close(store);
    store = backends_open(FILES);
    assert_int_equal(kvs_stats(store, &stats), 0);
    assert_int_equal(stats.n_chunks, 0);
    kvs_close(store);
}

struct seen {
    struct kvs_store *store;
    uint8_t key[16];
    void *data;
    size_t len;
};

static int64_t read_once(void *arg, void *buf, size_t cap)
{
    int *calls = arg;

    return (*calls)++ ? 0 : read_then_fail(&(int){0}, buf, cap);
}

static int see_first(void *arg, const kv_store_entry *entry)
{
    struct seen *seen = arg;

    assert_int_equal(entry->hash_len, 16);
    memcpy(seen->key, entry->hash, 16);
    return 1;
}

/* The first chunk of what a save of these options puts. */
static struct seen chunk_of_save(const struct kvs_save_opts *opts)
{
    struct seen seen = {.store = backends_open(PARTS)};
    int calls = 0;

    assert_int_equal(kvs_save(seen.store, "o", read_once, &calls, opts, NULL), 0);
    assert_int_equal(kvs_list_chunks(seen.store, see_first, &seen), 1);
    assert_int_equal(kvs_get_chunk(seen.store, seen.key, 16, &seen.data, &seen.len), 0);
    kvs_close(seen.store);
    return seen;
}

static int put_by(int call, struct kvs_store *store, const struct seen *chunk)
{
    const void *data = chunk->data;
    struct iovec parts[2] = {{chunk->data, 5}, {(char *)chunk->data + 5, chunk->len - 5}};
    uint32_t two = 2;
    int each = -1;

    if (call == 0)
        return kvs_put_chunk(store, chunk->key, 16, data, chunk->len);
    if (call == 1)
        assert_int_equal(kvs_put_chunks(store, chunk->key, 16, 1, &data, &chunk->len, &each), 0);
    else
        assert_int_equal(kvs_put_chunks_from(store, chunk->key, 16, 1, parts, &two, &each), 0);
    return each;
}

struct failing {
    struct kvs_store *store;
    const struct seen *chunk;
    int call, calls;
};

/* Let a save fail after another put of a chunk that it has put. */
static int64_t read_put_fail(void *arg, void *buf, size_t cap)
{
    struct failing *f = arg;

    if (f->calls++ == 0)
        return read_then_fail(&(int){0}, buf, cap);
    if (f->call < 3)
        assert_int_equal(put_by(f->call, f->store, f->chunk), 1);
    return -EIO;
}

/* A put that finds its chunk there only because a save that fails has put it: close keeps it. */
static void test_hit_of_failed_save(void **state)
{
    struct kvs_save_opts opts = KVS_SAVE_OPTS_INIT;
    struct seen chunk;
    (void)state;

    opts.format = KVS_FORMAT_BYTES;
    opts.chunk_bytes = 4096;
    chunk = chunk_of_save(&opts);
    for (int call = 0; call < 4; call++) {
        struct kvs_store *store = backends_open(FILES);
        struct failing failing = {.store = store, .chunk = &chunk, .call = call};
        size_t len;
        void *got;
        int rc;

        assert_int_equal(kvs_save(store, "o", read_put_fail, &failing, &opts, NULL), -EIO);
        kvs_close(store);
        store = backends_open(FILES);
        rc = kvs_get_chunk(store, chunk.key, 16, &got, &len);
        assert_int_equal(rc, call < 3 ? 0 : -ENOENT);
        if (rc == 0)
            free(got);
        kvs_close(store);
        backends_tear_down(NULL);
        assert_int_equal(set_up(NULL), 0);
    }
    free(chunk.data);
}

/* A child that closes the store leaves the parent's chunks to the parent, without a word. */
static void test_fork(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    int status;
    pid_t child;
    (void)state;

    put(store, 1, 0);
    n_lines = 0;
    child = fork();
    if (child == 0) {
        kvs_close(store);
        _exit((int)n_lines);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_false(is_there(FILES, 1));
    kvs_close(store);
    assert_true(is_there(FILES, 1));
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, set_up, backends_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_close_flushes),
        TEST(test_failed_flush_is_told),
        TEST(test_failed_save_is_dropped),
        TEST(test_hit_of_failed_save),
        TEST(test_fork),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
