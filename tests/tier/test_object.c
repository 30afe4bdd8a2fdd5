// SPDX-License-Identifier: Apache-2.0
/* The object tier over real stores: put blocks come back, and values that don't verify are
 * misses. */
#include "tier/object_unit.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "skip.h"
#include "starve.h"

/* -- round trips ------------------------------------------------------------------------------- */

static void round_trip(uint32_t key_len, size_t block, uint32_t n)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct job *put = job_new(KVBM_OBJECT_PUT, 0, n, block), *again, *get;
    struct job *exists = job_new(KVBM_OBJECT_EXISTS, 0, n, block), *none;
    struct kvbm_object_stats stats;
    struct kvbm_object *o;

    opts.key_len = key_len;
    opts.block_bytes = block;
    o = open_with(&opts);
    none = job_new(KVBM_OBJECT_GET, 0, n, block);
    assert_int_equal(kvbm_object_submit(o, &none->batch), 0);
    job_wait(none);
    assert_int_equal(none->ios[n - 1].status, -ENOENT);
    assert_int_equal(kvbm_object_submit(o, &put->batch), 0);
    job_wait(put);
    again = job_new(KVBM_OBJECT_PUT, 0, n, block);
    assert_int_equal(kvbm_object_submit(o, &again->batch), 0);
    job_wait(again);
    stats = stats_of(o);
    assert_int_equal(stats.puts, n);
    assert_int_equal(stats.already, n);
    assert_int_equal(stats.bytes_written, n * block);
    kvbm_object_close(o);

    o = open_with(&opts);
    get = job_new(KVBM_OBJECT_GET, 0, n, block);
    assert_int_equal(kvbm_object_submit(o, &get->batch), 0);
    assert_int_equal(kvbm_object_submit(o, &exists->batch), 0);
    job_wait(get);
    job_wait(exists);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(put->ios[i].status, 0);
        assert_int_equal(again->ios[i].status, 0);
        assert_int_equal(get->ios[i].status, 0);
        assert_int_equal(exists->ios[i].status, 0);
    }
    stats = stats_of(o);
    assert_int_equal(stats.gets, n);
    assert_int_equal(stats.hits, n);
    assert_int_equal(stats.exists, n);
    assert_int_equal(stats.bytes_read, n * block);
    kvbm_object_close(o);
    job_free(none);
    job_free(put);
    job_free(again);
    job_free(get);
    job_free(exists);
}

static void test_round_trip(void **state)
{
    static const uint32_t key_lens[] = {4, 5, 8, 16, 31, 32, 64};

    for (size_t i = 0; i < KV_COUNT(key_lens); i++) {
        fresh_folder(state);
        round_trip(key_lens[i], i == 0 ? 1 : 4096 + i, 20);
    }
    fresh_folder(state);
    round_trip(16, 65536, 600); /* several slices, by number and by bytes */
    fresh_folder(state);
    round_trip(16, 20 << 20, 2); /* a block that is more than a slice */
}

/* Fingerprint, group, length of block and key each separate one tier's blocks from another's. */
static void test_separate(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder), other[4];
    struct kvbm_object *o = open_with(&opts);
    struct job *get;
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 3, 0);
    get = job_new(KVBM_OBJECT_GET, 0, 3, BLOCK);
    job_set_group(get, 7);
    assert_int_equal(kvbm_object_submit(o, &get->batch), 0);
    job_wait(get);
    assert_int_equal(get->ios[0].status, -ENOENT);
    job_free(get);
    for (size_t i = 0; i < KV_COUNT(other); i++) {
        struct kvbm_object *p;
        size_t block = i == 1 ? BLOCK + 1 : BLOCK;

        other[i] = opts;
        other[i].fingerprint = i == 0 ? "model-a/fp16/1" : opts.fingerprint;
        other[i].block_bytes = block;
        other[i].key_len = i == 2 ? KEY_LEN - 1 : KEY_LEN;
        p = open_with(&other[i]);
        get = job_new(KVBM_OBJECT_GET, 0, 3, block);
        assert_int_equal(kvbm_object_submit(p, &get->batch), 0);
        job_wait(get);
        assert_int_equal(get->ios[0].status, i == 3 ? 0 : -ENOENT);
        job_free(get);
        kvbm_object_close(p);
    }
    kvbm_object_close(o);
}

/* -- what is in the store ---------------------------------------------------------------------- */

static struct kvs_store *open_store(void)
{
    struct kvs_store *store;

    assert_int_equal(kvs_open(folder, &store), 0);
    return store;
}

static void chunk_key_of(uint64_t number, uint8_t ret[KVBM_OBJECT_CHUNK_KEY])
{
    struct kvbm_object_format f;
    uint8_t key[KVBM_MAX_KEY];

    block_key(number, key);
    kvbm_object_format_init(&f, "model-a/fp16/16", KEY_LEN, BLOCK);
    kvbm_object_chunk_key(&f, 0, key, ret);
}

static void spoil(struct kvs_store *store, uint64_t number, int how)
{
    uint8_t key[KVBM_OBJECT_CHUNK_KEY], other[KVBM_OBJECT_CHUNK_KEY];
    size_t len, foreign_len;
    uint8_t *value;
    void *data, *foreign;

    chunk_key_of(number, key);
    chunk_key_of(number + 100, other);
    assert_int_equal(kvs_get_chunk(store, key, sizeof(key), &data, &len), 0);
    assert_int_equal(kvs_get_chunk(store, other, sizeof(other), &foreign, &foreign_len), 0);
    assert_int_equal(kvs_delete_chunk(store, key, sizeof(key)), 0);
    value = data;
    if (how == 0)
        value[len - 1] ^= 1;
    if (how == 1)
        value[KVBM_OBJECT_HEADER] ^= 128;
    if (how >= 2 && how < 2 + KVBM_OBJECT_HEADER) /* each byte of the header counts */
        value[how - 2] ^= 16;
    if (how == 130)
        len--;
    if (how == 131)
        len = 0;
    if (how == 132)
        len = KVBM_OBJECT_HEADER;
    if (how == 133) /* whole, but another block's */
        memcpy(value, foreign, foreign_len);
    if (how == 134)
        memset(value, 0, len);
    assert_int_equal(kvs_put_chunk(store, key, sizeof(key), value, len), 0);
    assert_int_equal(kvs_put_manifest(store, "other", "", 0), 0);
    free(data);
    free(foreign);
}

static void test_spoilt(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    struct kvs_store *store = open_store();
    uint64_t n_bad = 0;
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 135, 0);
    for (int how = 0; how < 135; how++) {
        uint64_t number = (uint64_t)how % 35;
        struct kvbm_object_stats before;

        spoil(store, number, how);
        expect(o, KVBM_OBJECT_GET, number, 1, -EBADMSG);
        before = stats_of(o);
        assert_int_equal(before.bad, ++n_bad);
        wait_until(({
            uint8_t key[KVBM_OBJECT_CHUNK_KEY], there = 1;

            chunk_key_of(number, key);
            kvs_exists(store, key, sizeof(key), 1, &there);
            !there;
        })); /* else a put would find it there */
        expect(o, KVBM_OBJECT_GET, number, 1, -ENOENT);
        expect(o, KVBM_OBJECT_PUT, number, 1, 0);
        assert_int_equal(stats_of(o).puts, before.puts + 1);
        expect(o, KVBM_OBJECT_GET, number, 1, 0);
    }
    assert_false(stats_of(o).open);
    kvs_close(store);
    kvbm_object_close(o);
}

static int flip_chunk(const char *path, const struct stat *st, int type, struct FTW *at)
{
    uint8_t byte;
    int fd;

    (void)at;
    if (type != FTW_F || !strstr(path, "/chunks/") || st->st_size < BLOCK)
        return 0;
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, BLOCK / 2), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, BLOCK / 2), 1);
    close(fd);
    return 0;
}

/* The store itself finds the damage, one by one or in a batch: bad, and not merely missing. */
static void test_damaged(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 12, 0);
    assert_int_equal(nftw(folder, flip_chunk, 16, FTW_PHYS), 0);
    expect(o, KVBM_OBJECT_GET, 11, 1, -EBADMSG);
    expect(o, KVBM_OBJECT_PUT, 20, 1, 0);
    expect(o, KVBM_OBJECT_GET, 0, 11, -EBADMSG);
    assert_int_equal(stats_of(o).bad, 12);
    assert_int_equal(stats_of(o).gets, 12);
    expect(o, KVBM_OBJECT_GET, 0, 12, -ENOENT); /* set aside */
    expect(o, KVBM_OBJECT_GET, 20, 1, 0);
    assert_int_equal(stats_of(o).bad, 12);
    assert_false(stats_of(o).open);
    kvbm_object_close(o);
}

/* Number of chunks damaged by spoil_file, which takes one kind of damage after the other. */
static int n_spoilt;

static int spoil_file(const char *path, const struct stat *st, int type, struct FTW *at)
{
    int how = n_spoilt % 5;

    (void)at;
    if (type != FTW_F || !strstr(path, "/chunks/") || st->st_size < BLOCK)
        return 0;
    n_spoilt++;
    if (how < 2) {
        assert_int_equal(truncate(path, how ? 0 : st->st_size - 7), 0);
        return 0;
    }
    assert_int_equal(unlink(path), 0);
    if (how == 2)
        assert_int_equal(mkfifo(path, 0600), 0);
    else if (how == 3)
        assert_int_equal(mkdir(path, 0700), 0);
    else
        assert_int_equal(symlink("/nowhere", path), 0);
    return 0;
}

/* A look that finds chunks damaged counts each of them as bad, and once. */
static void test_damage_seen_by_a_look(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 10, 0);
    kvbm_object_close(o);
    n_spoilt = 0;
    assert_int_equal(nftw(folder, spoil_file, 16, FTW_PHYS), 0);
    assert_int_equal(n_spoilt, 10);
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_EXISTS, 0, 10, -EBADMSG);
    assert_int_equal(stats_of(o).bad, 10);
    assert_int_equal(stats_of(o).exists, 10);
    expect(o, KVBM_OBJECT_EXISTS, 0, 10, -ENOENT);
    expect(o, KVBM_OBJECT_EXISTS, 10, 2, -ENOENT);
    assert_int_equal(stats_of(o).bad, 10);
    expect(o, KVBM_OBJECT_PUT, 0, 10, 0); /* stored again */
    expect(o, KVBM_OBJECT_EXISTS, 0, 10, 0);
    expect(o, KVBM_OBJECT_GET, 0, 10, 0);
    n_spoilt = 0;
    assert_int_equal(nftw(folder, spoil_file, 16, FTW_PHYS), 0);
    assert_int_equal(n_spoilt, 10);
    expect(o, KVBM_OBJECT_EXISTS, 0, 10, -EBADMSG); /* damaged anew: counted anew */
    assert_int_equal(stats_of(o).bad, 20);
    assert_false(stats_of(o).open);
    kvbm_object_close(o);
}

/* The bytes of docs/formats.md, put together by hand. */
static void test_format(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    struct kvs_store *store;
    uint8_t key[KVBM_OBJECT_CHUNK_KEY], *value, want[BLOCK], block_name[KVBM_MAX_KEY];
    struct kvs_manifest *manifest;
    char name[40] = "";
    size_t len, n;
    void *data;
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 3, 1, 0);
    snprintf(name, sizeof(name), "%s", o->manifest);
    kvbm_object_close(o);
    store = open_store();
    chunk_key_of(3, key);
    block_key(3, block_name);
    block_bytes_of(0, 3, want, BLOCK);
    assert_int_equal(kvs_get_chunk(store, key, sizeof(key), &data, &len), 0);
    value = data;
    assert_int_equal(len, 128 + BLOCK);
    assert_memory_equal(value, "KVBMOBJ\n\1\0\0\0\x80\0\0\0\0\0\0\0\x10\0\0\0", 24);
    assert_memory_equal(value + 24, "\x88\x13\0\0\0\0\0\0", 8); /* 5000 */
    assert_memory_equal(value + 64, block_name, KEY_LEN);
    for (size_t i = 64 + KEY_LEN; i < 128; i++)
        assert_int_equal(value[i], 0);
    assert_memory_equal(value + 128, want, BLOCK);
    free(data);
    assert_int_equal(strncmp(name, "kvbm-object-", 12), 0);
    assert_int_equal(strlen(name), 28);
    assert_int_equal(kvs_manifest_get(store, name, &manifest), 0);
    kvs_manifest_chunks(manifest, &n);
    assert_int_equal(n, 0);
    assert_string_equal(kvs_manifest_fingerprint(manifest), "model-a/fp16/16");
    kvs_manifest_free(manifest);
    kvs_close(store);
}

/* -- collection -------------------------------------------------------------------------------- */

static void make_old(uint64_t number)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {0}};
    uint8_t key[KVBM_OBJECT_CHUNK_KEY];
    char path[200], hex[2 * KVBM_OBJECT_CHUNK_KEY + 1];

    chunk_key_of(number, key);
    for (size_t i = 0; i < sizeof(key); i++)
        snprintf(hex + 2 * i, 3, "%02x", key[i]);
    snprintf(path, sizeof(path), "%s/chunks/%c/%s", folder, hex[0], hex);
    times[1].tv_sec = time(NULL) - 2 * 86400;
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static struct kvs_gc_result collect(void)
{
    struct kvs_gc_result result = {.size = sizeof(result)};
    struct kvs_store *store = open_store();

    assert_int_equal(kvs_gc(store, NULL, &result), 0);
    kvs_close(store);
    return result;
}

/* No manifest names blocks: a collection takes those that nobody used for the grace time, and only
 * those. */
static void test_collected(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 40, 0);
    assert_int_equal(collect().deleted_chunks, 0); /* young */
    for (uint64_t i = 0; i < 40; i++)
        make_old(i);
    expect(o, KVBM_OBJECT_GET, 0, 10, 0);  /* used now */
    expect(o, KVBM_OBJECT_PUT, 10, 10, 0); /* likewise: they were there */
    assert_int_equal(collect().deleted_chunks, 20);
    expect(o, KVBM_OBJECT_GET, 0, 20, 0);
    expect(o, KVBM_OBJECT_GET, 20, 20, -ENOENT); /* while the tier is open: nothing is pinned */
    expect(o, KVBM_OBJECT_EXISTS, 20, 20, -ENOENT);
    expect(o, KVBM_OBJECT_PUT, 20, 20, 0);
    expect(o, KVBM_OBJECT_GET, 20, 20, 0);
    kvbm_object_close(o);
}

/* Gets count as use also where the backend doesn't count them, once in a while. */
static void test_touched(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o = open_with(&opts);
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 10, 0);
    expect(o, KVBM_OBJECT_GET, 0, 10, 0);
    wait_until(shaky->touches == 1);
    expect(o, KVBM_OBJECT_GET, 0, 10, 0);
    expect(o, KVBM_OBJECT_GET, 0, 10, 0);
    kvbm_object_close(o);
    assert_int_equal(shaky->touches, 1);
}

/* -- backends that can less, or lie ------------------------------------------------------------ */

static void test_lesser_backends(void **state)
{
    for (int ext = 0; ext < 4; ext++) {
        struct kvbm_object_opts opts;
        struct kvbm_object *o;

        fresh_folder(state);
        shaky->ext = ext;
        opts = default_opts(shaky_uri);
        o = open_with(&opts);
        expect(o, KVBM_OBJECT_PUT, 0, 30, 0);
        expect(o, KVBM_OBJECT_EXISTS, 0, 30, 0);
        expect(o, KVBM_OBJECT_EXISTS, 30, 30, -ENOENT);
        expect(o, KVBM_OBJECT_GET, 0, 30, 0);
        expect(o, KVBM_OBJECT_GET, 30, 30, -ENOENT);
        expect(o, KVBM_OBJECT_PUT, 0, 30, 0);
        assert_int_equal(stats_of(o).already, 30);
        assert_false(stats_of(o).open);
        kvbm_object_close(o);
        assert_int_equal(shaky->get_batches, ext == 0 ? 2 : 0);
        assert_int_equal(shaky->put_batches, ext == 0 ? 2 : 0);
        assert_int_equal(shaky->exists, ext == 0 ? 2 : 0);
        assert_int_equal(shaky->gets, ext == 0 ? 0 : 120);
        assert_true(ext == 0 || ext == 3 ? shaky->prefetches == 0 : shaky->prefetches == 4);
        assert_int_equal(shaky->opens, shaky->closes);
    }
}

static void test_lies(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o = open_with(&opts);
    struct job *job;
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 9, 0);
    for (int lie = 1; lie <= 2; lie++) {
        shaky->lie = lie;
        expect(o, KVBM_OBJECT_GET, 0, 3, -EBADMSG);
        shaky->lie = 0;
        wait_until(shaky->deletes == 3 * lie);
        expect(o, KVBM_OBJECT_PUT, 0, 3, 0);
        expect(o, KVBM_OBJECT_GET, 0, 3, 0);
    }
    shaky->lie = 3;
    job = job_new(KVBM_OBJECT_GET, 0, 9, BLOCK);
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    job_wait(job);
    assert_int_equal(job->ios[0].status, 0);
    for (int i = 1; i < 9; i++)
        assert_int_equal(job->ios[i].status, -EBADMSG);
    job_free(job);
    assert_int_equal(stats_of(o).bad, 14);
    kvbm_object_close(o);
}

/* Values that come in pieces: damaged ones, and cut ones. */
static void test_streams(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    shaky->ext = 4;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 9, 0);
    expect(o, KVBM_OBJECT_GET, 0, 9, 0);
    expect(o, KVBM_OBJECT_GET, 100, 3, -ENOENT);
    assert_int_equal(shaky->streams, 12);
    assert_int_equal(shaky->gets + shaky->get_batches, 0);
    for (int lie = 1; lie <= 2; lie++) {
        int seen = shaky->deletes;

        shaky->lie = lie;
        expect(o, KVBM_OBJECT_GET, 0, 3, lie == 1 ? -EBADMSG : -EPROTO);
        shaky->lie = 0;
        wait_until(shaky->deletes == seen + (lie == 1 ? 3 : 0));
        expect(o, KVBM_OBJECT_PUT, 0, 3, 0);
        expect(o, KVBM_OBJECT_GET, 0, 9, 0);
    }
    kvbm_object_close(o);
}

/* One value in pieces of any length, as a whole, cut, longer, or with one bit flipped. */
static void take_pieces(const struct kvbm_object_format *f, const uint8_t *value, size_t len,
                        struct kvbm_object_opening *opening, uint8_t *got, uint64_t *seed)
{
    uint8_t key[KVBM_MAX_KEY];
    bool fits = true, right;

    block_key(7, key);
    memset(got, 0xee, f->block_bytes);
    kvbm_object_open_value(opening, f, 1, key, got);
    for (size_t at = 0, n; at < len && fits; at += n) {
        n = unit_below(seed, 700);
        n = KV_MIN(n, len - at);
        fits = kvbm_object_open_piece(opening, value + at, n);
    }
    right = fits && kvbm_object_value_whole(opening);
    assert_int_equal(right, !opening->wrong);
}

static void test_pieces(void **state)
{
    enum { LEN = 3000, WHOLE = LEN + KVBM_OBJECT_HEADER, SUM = 48, SUM_END = 64 };
    struct kvbm_object_format f;
    uint8_t block[LEN], value[WHOLE + 1] = {0}, got[LEN], key[KVBM_MAX_KEY];
    struct kvbm_object_opening opening;
    uint64_t seed = unit_seed();

    (void)state;
    kvbm_object_format_init(&f, "m", KEY_LEN, LEN);
    block_key(7, key);
    block_bytes_of(1, 7, block, LEN);
    kvbm_object_seal(&f, 1, key, block, value);
    for (size_t round = 0; round < unit_rounds(400); round++) {
        size_t flip = unit_below(&seed, (uint64_t)WHOLE * 8), at = flip / 8;

        take_pieces(&f, value, WHOLE, &opening, got, &seed);
        assert_false(opening.wrong);
        assert_memory_equal(got, block, LEN);
        take_pieces(&f, value, unit_below(&seed, WHOLE), &opening, got, &seed);
        assert_true(opening.wrong);
        take_pieces(&f, value, WHOLE + 1, &opening, got, &seed);
        assert_true(opening.wrong);
        value[at] ^= (uint8_t)(1 << flip % 8);
        take_pieces(&f, value, WHOLE, &opening, got, &seed);
        assert_true(opening.wrong);
        if (at < SUM || (at >= SUM_END && at < KVBM_OBJECT_HEADER))
            assert_int_equal(got[0], 0xee); /* another block's: nothing was copied */
        value[at] ^= (uint8_t)(1 << flip % 8);
    }
}

/* -- arguments, memory, processes -------------------------------------------------------------- */

static void test_arguments(void **state)
{
    struct kvbm_object_opts good = default_opts(folder), bad[10];
    struct kvbm_object *o = (void *)&good;
    struct job *job = job_new(KVBM_OBJECT_GET, 0, 2, BLOCK);
    (void)state;

    for (size_t i = 0; i < KV_COUNT(bad); i++)
        bad[i] = good;
    bad[0].uri = NULL;
    bad[1].uri = "redis://user:secret@host/";
    bad[2].uri = "Nope://x";
    bad[3].fingerprint = NULL;
    bad[4].fingerprint = "";
    bad[5].key_len = 3;
    bad[6].key_len = 65;
    bad[7].block_bytes = 0;
    bad[8].size = 8;
    bad[9].n_threads = 100000;
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        assert_int_equal(kvbm_object_open(&bad[i], &o), -EINVAL);
    assert_int_equal(kvbm_object_open(NULL, &o), -EINVAL);
    bad[0].uri = "nosuchplugin://x";
    assert_int_equal(kvbm_object_open(&bad[0], &o), -ENOENT);
    bad[0].uri = "/proc/version/kv";
    assert_int_equal(kvbm_object_open(&bad[0], &o), -ENOTDIR);
    assert_ptr_equal(o, &good);
    kvbm_object_close(NULL);

    o = open_with(&good);
    job->batch.n = 0;
    assert_int_equal(kvbm_object_submit(o, &job->batch), -EINVAL);
    job->batch.n = 2;
    job->ios[1].data = NULL;
    assert_int_equal(kvbm_object_submit(o, &job->batch), -EINVAL);
    job->ios[1].data = job->data + BLOCK;
    job->ios[0].key = NULL;
    assert_int_equal(kvbm_object_submit(o, &job->batch), -EINVAL);
    job->ios[0].key = job->keys[0];
    job->batch.done = NULL;
    assert_int_equal(kvbm_object_submit(o, &job->batch), -EINVAL);
    job->batch.done = job_done;
    job->batch.op = KVBM_OBJECT_DELETE + 1;
    assert_int_equal(kvbm_object_submit(o, &job->batch), -EINVAL);
    job->batch.op = KVBM_OBJECT_GET;
    assert_int_equal(kvbm_object_submit(o, NULL), -EINVAL);
    assert_int_equal(kvbm_object_submit(NULL, &job->batch), -EINVAL);
    kvbm_object_cancel(o, &job->batch); /* nothing to cancel */
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    job_wait(job);
    kvbm_object_close(o);
    assert_int_equal(job->done, 1);
    job_free(job);
}

static void test_open_starved(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = NULL;
    (void)state;

    for (long n = 1;; n++) {
        int rc;

        starve_at(n);
        rc = kvbm_object_open(&opts, &o);
        if (!starved())
            break;
        assert_int_equal(rc, -ENOMEM);
        assert_null(o);
        assert_true(n < 100);
    }
    starve_at(0);
    expect(o, KVBM_OBJECT_PUT, 0, 3, 0);
    kvbm_object_close(o);
}

/* done runs in the worker: from there its own memory can be made to run out. */
static _Atomic long starve_next;
static _Atomic bool was_starved;

static void done_and_starve(struct kvbm_object_batch *batch)
{
    was_starved = starved();
    starve_at(starve_next);
    job_done(batch);
}

static long sweep(struct kvbm_object *o, enum kvbm_object_op op)
{
    long n = 1;

    for (was_starved = true; was_starved; n++) {
        for (int turn = 0; turn < 2; turn++) { /* one arms it, the next suffers */
            struct job *job = job_new(op, 0, 5, BLOCK);

            job->batch.done = done_and_starve;
            starve_next = turn == 0 ? n : 0;
            wait_until(kvbm_object_submit(o, &job->batch) == 0);
            job_wait(job);
            if (turn == 1 && !was_starved)
                for (int i = 0; i < 5; i++)
                    assert_int_equal(job->ios[i].status, 0);
            job_free(job); /* whole or untouched */
        }
        assert_true(n < 1000);
    }
    return n;
}

static void test_worker_starved(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    opts.breaker_reopen_ms = 1;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 5, 0);
    assert_true(sweep(o, KVBM_OBJECT_PUT) > 4);
    sweep(o, KVBM_OBJECT_GET); /* reads into a buffer that it has */
    sweep(o, KVBM_OBJECT_EXISTS);
    expect(o, KVBM_OBJECT_GET, 0, 5, 0);
    kvbm_object_close(o);
}

static void test_fork(void **state)
{
    struct kvbm_object_opts opts = default_opts(folder);
    struct kvbm_object *o = open_with(&opts);
    struct job *job = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    int status;
    pid_t child;
    (void)state;

    child = fork();
    if (child == 0) {
        int rc = kvbm_object_submit(o, &job->batch);

        kvbm_object_cancel(o, &job->batch);
        kvbm_object_close(o);
        _exit(rc == -ECHILD ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    kvbm_object_close(o);
    job_free(job);
}

/* A worker's memory for what it gets isn't taken from the kernel, cleared, page by page, for each
 * batch anew. */
static void test_pages_are_kept(void **state)
{
    enum { N = 32, BYTES = 256 << 10, GETS = 10 };
    struct kvbm_object_opts opts = default_opts(folder);
    struct rusage before = {0}, after;
    struct kvbm_object *o;
    struct job *put, *get;

    (void)state;
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip_because("it counts page faults of glibc's allocator, which release runs with");
#else
    mallopt(M_MMAP_THRESHOLD, 1 << 20); /* as it is where larger values haven't been freed before */
    mallopt(M_TRIM_THRESHOLD, 1 << 19);
#endif
    put = job_new(KVBM_OBJECT_PUT, 0, N, BYTES);
    get = job_new(KVBM_OBJECT_GET, 0, N, BYTES);
    opts.block_bytes = BYTES;
    opts.n_threads = 1;
    o = open_with(&opts);
    assert_int_equal(kvbm_object_submit(o, &put->batch), 0);
    job_wait(put);
    for (int i = 0; i < 3 + GETS; i++) {
        if (i == 3) /* the allocator has learnt by then how large they are */
            getrusage(RUSAGE_SELF, &before);
        get->done = 0;
        assert_int_equal(kvbm_object_submit(o, &get->batch), 0);
        job_wait(get);
    }
    getrusage(RUSAGE_SELF, &after);
    assert_true(after.ru_minflt - before.ru_minflt < GETS * N * (BYTES / 4096) / 3);
    kvbm_object_close(o);
    job_free(put);
    job_free(get);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_round_trip, fresh_folder),
        cmocka_unit_test_setup(test_separate, fresh_folder),
        cmocka_unit_test_setup(test_spoilt, fresh_folder),
        cmocka_unit_test_setup(test_damaged, fresh_folder),
        cmocka_unit_test_setup(test_damage_seen_by_a_look, fresh_folder),
        cmocka_unit_test_setup(test_format, fresh_folder),
        cmocka_unit_test_setup(test_collected, fresh_folder),
        cmocka_unit_test_setup(test_touched, fresh_folder),
        cmocka_unit_test_setup(test_lesser_backends, fresh_folder),
        cmocka_unit_test_setup(test_lies, fresh_folder),
        cmocka_unit_test_setup(test_streams, fresh_folder),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test_setup(test_arguments, fresh_folder),
        cmocka_unit_test_setup(test_open_starved, fresh_folder),
        cmocka_unit_test_setup(test_worker_starved, fresh_folder),
        cmocka_unit_test_setup(test_fork, fresh_folder),
        cmocka_unit_test_setup(test_pages_are_kept, fresh_folder),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
