// SPDX-License-Identifier: Apache-2.0
/* System calls that fail: these definitions replace libc's in the whole program. */
#include <dlfcn.h>
#include <sched.h>
#include <sys/xattr.h>

#include "base/core/clock.h"
#include "store/file_unit.h"

enum call {
    NONE,
    FSYNC,
    SYNCFS,
    RENAME,
    RENAME2,
    OPEN,
    OPEN_ANY,
    WRITE,
    SETXATTR,
    LINK,
    UTIMES,
    N_CALLS
};

static enum call fail_call;
static int fail_after, fail_errno;
static int fail_times = 1;    /* one after the other */
static _Atomic int fail_seen; /* syncs run on several threads */
static bool short_writes;
static _Atomic int n_opens;

static bool fails(enum call call)
{
    int nth;

    if (call != fail_call)
        return false;
    nth = fail_seen++;
    if (nth < fail_after || nth >= fail_after + fail_times)
        return false;
    errno = fail_errno;
    return true;
}

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

int fsync(int fd)
{
    return fails(FSYNC) ? -1 : REAL(int, fsync, (int))(fd);
}

int syncfs(int fd)
{
    return fails(SYNCFS) ? -1 : REAL(int, syncfs, (int))(fd);
}

int renameat(int a, const char *from, int b, const char *to)
{
    return fails(RENAME)
               ? -1
               : REAL(int, renameat, (int, const char *, int, const char *))(a, from, b, to);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    if (fails(RENAME2))
        return -1;
    return REAL(int, renameat2, (int, const char *, int, const char *, unsigned))(a, from, b, to,
                                                                                  flags);
}

int linkat(int a, const char *from, int b, const char *to, int flags)
{
    if (fails(LINK))
        return -1;
    return REAL(int, linkat, (int, const char *, int, const char *, int))(a, from, b, to, flags);
}

int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags)
{
    if (fails(SETXATTR))
        return -1;
    return REAL(int, fsetxattr, (int, const char *, const void *, size_t, int))(fd, name, value,
                                                                                size, flags);
}

ssize_t write(int fd, const void *data, size_t len)
{
    static int interrupted;

    if (fails(WRITE))
        return -1;
    if (short_writes && ++interrupted % 2) {
        errno = EINTR;
        return -1;
    }
    return REAL(ssize_t, write,
                (int, const void *, size_t))(fd, data, short_writes && len > 7 ? len / 2 : len);
}

int openat(int at, const char *path, int flags, ...)
{
    mode_t mode = 0;
    va_list args;

    va_start(args, flags);
    if (flags & (O_CREAT | O_TMPFILE))
        mode = va_arg(args, mode_t);
    va_end(args);
    n_opens++;
    if (((flags & O_CREAT) && fails(OPEN)) || fails(OPEN_ANY))
        return -1;
    return REAL(int, openat, (int, const char *, int, ...))(at, path, flags, mode);
}

int utimensat(int at, const char *path, const struct timespec times[2], int flags)
{
    if (fails(UTIMES))
        return -1;
    return REAL(int, utimensat, (int, const char *, const struct timespec *, int))(at, path, times,
                                                                                   flags);
}

/* -- The tests ---------------------------------------------------------------------------------- */

static uint8_t blob[50000];

enum { CHUNKS = 8 };

static int save(kv_store_v1 *h, int generation)
{
    char text[16];

    for (uint64_t i = 0; i < CHUNKS; i++) { /* half of them are new */
        uint64_t n = (uint64_t)generation * CHUNKS / 2 + i;
        int rc = unit_put(h, n, blob + n % 100, 1000 + n);

        if (rc < 0)
            return rc;
    }
    snprintf(text, sizeof(text), "%d", generation);
    return unit_publish(h, "object", text);
}

/* The object is one generation, complete. */
static int whole(kv_store_v1 *h)
{
    uint8_t *data;
    size_t len;
    int generation = 0, rc = kvs_file_vtable()->get_manifest(h, "object", &data, &len);

    assert_int_equal(rc, 0);
    for (size_t i = 0; i < len; i++)
        generation = 10 * generation + data[i] - '0';
    free(data);
    for (uint64_t i = 0; i < CHUNKS; i++) {
        uint64_t n = (uint64_t)generation * CHUNKS / 2 + i;

        assert_int_equal(unit_get(h, n, blob + n % 100, 1000 + n), 0);
    }
    return generation;
}

/*
 * Fail the first call of a kind, the second, ... until a save needs no more of them. Whatever
 * failed: what is published is whole, for this handle and a new one, the next save succeeds, and
 * nothing stays behind.
 */
static void fail_each(enum call call, int error, const char *options)
{
    static int generation;
    kv_store_v1 *h = unit_open(options), *other;
    int rc, n_failed = 0;

    assert_int_equal(save(h, ++generation), 0);
    for (fail_after = 0; fail_after < 300; fail_after++) {
        int before = generation, now;

        fail_seen = 0;
        fail_errno = error;
        fail_call = call;
        rc = save(h, ++generation);
        fail_call = NONE;
        n_failed += rc < 0;
        other = unit_open(options);
        now = whole(other);
        assert_true(rc == 0 ? now == generation : now == generation || now == before);
        if (rc < 0 && fail_after % 2 == 0) /* the same again, or go on with the next */
            assert_int_equal(save(h, generation), 0);
        else if (rc < 0)
            assert_int_equal(save(h, ++generation), 0);
        assert_int_equal(whole(other), generation);
        assert_int_equal(whole(h), generation);
        kvs_file_vtable()->close(other);
        if (fail_seen <= fail_after)
            break;
    }
    assert_true(fail_after > 0 && fail_after < 300);
    assert_true(n_failed > 0 || call == LINK || call == RENAME2 || call == SETXATTR ||
                call == UTIMES);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/bad"), 0);
}

static void fsync_fails(void **state)
{
    (void)state;
    fail_each(FSYNC, EIO, "?sync=files");
    fail_each(FSYNC, EIO, "?sync=files&sums=files");
    fail_each(FSYNC, ENOSPC, "?sync=fs");
}

static void syncfs_fails(void **state)
{
    (void)state;
    fail_each(SYNCFS, EIO, "?sync=fs");
}

static void no_space(void **state)
{
    (void)state;
    fail_each(OPEN, ENOSPC, "");
    fail_each(WRITE, ENOSPC, "");
    fail_each(WRITE, EDQUOT, "?sums=files");
    fail_each(SETXATTR, ENOSPC, "");
}

/* No descriptor left says nothing about the file that was to be opened. */
static void no_descriptors(void **state)
{
    (void)state;
    fail_each(OPEN_ANY, ENFILE, "");
    fail_times = 3; /* looking at a chunk once more, and again, does not help */
    fail_each(OPEN_ANY, EMFILE, "?sums=files");
    fail_times = 1;
}

static void renames_fail(void **state)
{
    (void)state;
    fail_each(RENAME, EIO, "");
    fail_each(RENAME, ENOSPC, "?sums=files");
    fail_each(RENAME2, EIO, "");
    fail_each(RENAME2, EINVAL, ""); /* a file system that knows no RENAME_NOREPLACE */
    fail_each(LINK, ENOENT, "?sums=files");
    fail_each(LINK, EPERM, "?sums=files"); /* nor hard links */
    fail_each(UTIMES, EPERM, "");          /* another user's files */
    fail_each(UTIMES, EIO, "");
}

static void short_writes_are_continued(void **state)
{
    kv_store_v1 *h = unit_open("");
    (void)state;

    short_writes = true;
    assert_int_equal(save(h, 5000), 0);
    short_writes = false;
    assert_int_equal(whole(h), 5000);
    kvs_file_vtable()->close(h);
}

/* After a failed sync the same file is never synced again: what can be read is written anew. */
static void a_retry_writes_anew(void **state)
{
    kv_store_v1 *h = unit_open("?sync=files");
    uint64_t before;
    (void)state;

    assert_int_equal(unit_put(h, 900000, blob, 1000), 0);
    fail_seen = fail_after = 0;
    fail_errno = EIO;
    fail_call = FSYNC;
    assert_int_equal(unit_publish_own(h, "r"), -EIO);
    fail_call = NONE;
    before = atomic_load(&h->written);
    assert_int_equal(unit_publish_own(h, "r"), 0);
    assert_int_equal(atomic_load(&h->written), before + 1000 + 10);
    assert_int_equal(unit_get(h, 900000, blob, 1000), 0);
    kvs_file_vtable()->close(h);
}

/* How often a publication that succeeds calls @call. */
static int n_calls(kv_store_v1 *h, enum call call)
{
    fail_seen = 0;
    fail_after = 1 << 30;
    fail_call = call;
    assert_int_equal(unit_publish_own(h, "counted"), 0);
    fail_call = NONE;
    return fail_seen;
}

/* Somebody set its times: what was noted of it holds no longer. */
static void set_old(const char *path)
{
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};

    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/*
 * A chunk's name is made durable by whoever publishes something that needs it, unless some handle
 * did so before, noted it, and nothing happened to the name since.
 */
static void names_are_synced_once(void **state)
{
    kv_store_v1 *h = unit_open("?sync=files"), *other = unit_open("");
    char path[512];
    (void)state;

    unit_path(path, 910000);
    assert_int_equal(unit_put(other, 910000, blob, 1000), 0);
    assert_int_equal(unit_publish(other, "o", "x"), 0);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(n_calls(h, FSYNC), 2); /* manifest, its directory */
    set_old(path);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(n_calls(h, FSYNC), 3); /* the chunk's */
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(n_calls(h, FSYNC), 2);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_publish(h, "m", "x"), -EIO);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_put(other, 910000, blob, 1000), 1);
    assert_int_equal(unit_publish(other, "o", "x"),
                     0); /* changes the time of last use, and notes it */
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(n_calls(h, FSYNC), 2);
    set_old(path);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    kvs_file_vtable()->close(h); /* a publication that fails teaches nothing */
    h = unit_open("?sync=files");
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    fail_seen = 0;
    fail_after = 1; /* the chunk's directory */
    fail_errno = EIO;
    fail_call = FSYNC;
    assert_int_equal(unit_publish_own(h, "counted"), -EIO);
    assert_int_equal(n_calls(h, FSYNC), 3);
    assert_int_equal(unit_put(h, 910000, blob, 1000), 1);
    assert_int_equal(n_calls(h, FSYNC), 2);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

/* A get of chunk @n after a prefetch, which took @ns. */
static void get_in(kv_store_v1 *h, uint64_t n, uint64_t ns)
{
    struct kvs_file_ahead_get get;
    uint8_t key[8];

    unit_key(key, n);
    kvs_file_ahead_begin(h, &get, key, 8);
    if (get.begin_ns)
        get.begin_ns = kv_now_ns() - ns;
    kvs_file_ahead_end(h, &get, 1000);
}

static void one_processor(cpu_set_t *ret_all)
{
    cpu_set_t one;
    int cpu = 0;

    assert_int_equal(sched_getaffinity(0, sizeof(*ret_all), ret_all), 0);
    while (!CPU_ISSET(cpu, ret_all))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
}

/* Announcing is for disks: of what is in memory only the first few are, of a slow store all, in time. */
static void announces_as_it_goes(void **state)
{
    enum { FROM = 920000, N = 200, AHEAD = 32 };
    kv_store_v1 *h = unit_open("");
    uint8_t keys[N][8];
    cpu_set_t all;
    int before;
    (void)state;

    one_processor(&all); /* no second reader, whose opens would count */

    for (uint64_t i = 0; i < N; i++) {
        unit_key(keys[i], FROM + i);
        assert_int_equal(unit_put(h, FROM + i, blob, 1000), 0);
    }
    assert_int_equal(unit_publish_own(h, "ahead"), 0);
    before = n_opens;
    assert_int_equal(kvs_file_vtable()->prefetch_chunks(h, keys[0], 8, N), 0);
    assert_int_equal(n_opens - before, AHEAD);
    get_in(h, FROM, 0);
    assert_int_equal(n_opens - before, AHEAD);
    get_in(h, FROM + 1, UINT64_C(1000000000));
    assert_int_equal(n_opens - before, AHEAD + 2);
    get_in(h, FROM + 40, UINT64_C(1000000000)); /* some were not wanted after all */
    assert_int_equal(n_opens - before, 2 * AHEAD + 2);
    get_in(h, FROM + 40, UINT64_C(1000000000)); /* once more: nobody announced it */
    get_in(h, 1, UINT64_C(1000000000));
    assert_int_equal(n_opens - before, 2 * AHEAD + 2);
    for (uint64_t i = 41; i < N; i++)
        get_in(h, FROM + i, UINT64_C(1000000000));
    assert_int_equal(n_opens - before, N - 41 + AHEAD + 2);
    for (int round = 0; round < 50; round++) /* more than are noted, and never fetched */
        assert_int_equal(kvs_file_vtable()->prefetch_chunks(h, keys[0], 8, N - 1), 0);
    assert_int_equal(kvs_file_vtable()->prefetch_chunks(h, keys[N / 2], 8, N / 2), 0);
    before = n_opens;
    for (uint64_t i = 0; i < N / 2; i++) {
        get_in(h, FROM + N / 2 + i, UINT64_C(1000000000));
        assert_int_equal(unit_get(h, FROM, blob, 1000), 0); /* another's */
    }
    assert_true(n_opens - before >= N / 2 - AHEAD + N / 2);
    assert_int_equal(sched_setaffinity(0, sizeof(all), &all), 0);
    kvs_file_vtable()->close(h);
}

static int setup(void **state)
{
    uint64_t rng = 11;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fsync_fails),
        cmocka_unit_test(syncfs_fails),
        cmocka_unit_test(no_space),
        cmocka_unit_test(no_descriptors),
        cmocka_unit_test(renames_fail),
        cmocka_unit_test(short_writes_are_continued),
        cmocka_unit_test(a_retry_writes_anew),
        cmocka_unit_test(names_are_synced_once),
        cmocka_unit_test(announces_as_it_goes),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
