// SPDX-License-Identifier: Apache-2.0
/*
 * kvbm_manager_remove over an index file that can't be written, synced or read for a while: a removal
 * that returns 0 leaves nothing that a restart finds, whatever failed before it.
 */
#define CACHE_BLOCKS 320u
#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "manager_scattered.h"

/* ---- an index file that fails ---- */

static _Atomic bool fail_writes, fail_syncs, fail_reads, fail_folders;
static _Atomic int n_failed, n_synced; /* of index files: those that didn't fail */

/* Tell whether the file's path holds @part. */
static bool is_in(int fd, const char *part)
{
    char link[64], path[PATH_MAX];
    ssize_t len;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    len = readlink(link, path, sizeof(path) - 1);
    path[len < 0 ? 0 : len] = '\0';
    return strstr(path, part) != NULL;
}

static bool fails(_Atomic bool *set, int fd)
{
    if (!atomic_load(set) || !is_in(fd, set == &fail_folders ? "/object" : ".index"))
        return false;
    atomic_fetch_add(&n_failed, 1);
    errno = EIO;
    return true;
}

ssize_t pwrite(int fd, const void *from, size_t len, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pwrite");

    return fails(&fail_writes, fd) ? -1 : real(fd, from, len, at);
}

ssize_t pread(int fd, void *to, size_t len, off_t at)
{
    ssize_t (*real)(int, void *, size_t, off_t) =
        (ssize_t(*)(int, void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pread");

    return at && fails(&fail_reads, fd) ? -1 : real(fd, to, len, at); /* not the header */
}

int fdatasync(int fd)
{
    int (*real)(int) = (int (*)(int))(uintptr_t)dlsym(RTLD_NEXT, "fdatasync");

    if (fails(&fail_syncs, fd))
        return -1;
    atomic_fetch_add(&n_synced, is_in(fd, ".index"));
    return real(fd);
}

int fsync(int fd)
{
    int (*real)(int) = (int (*)(int))(uintptr_t)dlsym(RTLD_NEXT, "fsync");

    return fails(&fail_folders, fd) ? -1 : real(fd);
}

int syncfs(int fd)
{
    int (*real)(int) = (int (*)(int))(uintptr_t)dlsym(RTLD_NEXT, "syncfs");

    return fails(&fail_folders, fd) ? -1 : real(fd);
}

static void heal(void)
{
    fail_writes = fail_syncs = fail_reads = fail_folders = false;
}

/* ---- a manager ---- */

enum { KEYS = 4 };

static const uint64_t keys[KEYS] = {5, 3, 9, 77}, others[KEYS] = {15, 13, 19, 177};

static void start(struct world *w, uint32_t host, uint32_t disk)
{
    heal();
    n_failed = 0;
    world_init(w, host);
    w->opts.staging_blocks = N;
    w->opts.io = KVBM_IO_THREADS;
    world_with_disk(w, disk);
    world_start(w);
    world_attach(w, false);
}

static void store(struct world *w, const uint64_t *some, uint32_t n)
{
    uint8_t ok[N / 8];

    job(w, true, some, n, ok);
    assert_int_equal(kvbm_manager_drain(w->m, LONG_MS), 0);
}

static int remove_some(struct world *w, const uint64_t *some, uint32_t n)
{
    return kvbm_manager_remove(w->m, 0, some, n, LONG_MS, NULL);
}

static void check_at(struct world *w, const uint64_t *some, uint32_t n, enum kvbm_where expected)
{
    uint8_t at[N];

    lookup(w, some, n, at);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(at[i], expected);
}

/* Remove @some with success; a manager started anew has none of them. */
static void check_removed(struct world *w, const uint64_t *some, uint32_t n)
{
    assert_true(n_failed > 0);
    heal();
    assert_int_equal(remove_some(w, some, n), 0);
    restart(w);
    check_at(w, some, n, KVBM_MISS);
}

/* ---- tests ---- */

/* A removal fails until it is durable, and then no key returns. */
static void test_removal_failed(void **state)
{
    _Atomic bool *const faults[] = {&fail_writes, &fail_syncs};
    struct world w;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(faults); i++) {
        start(&w, 16, 16);
        store(&w, keys, KEYS);
        store(&w, others, KEYS);
        *faults[i] = true;
        assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
        check_at(&w, keys, KEYS, KVBM_MISS);
        for (int again = 0; again < 12; again++)
            assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
        assert_int_equal(remove_some(&w, keys, 1), -EIO);
        check_removed(&w, keys, KEYS);
        check_at(&w, others, KEYS, KVBM_ON_DISK);
        world_fini(&w);
    }
}

/* A process zeroed the records and ended before they were synced: its successor finds none, and
 * syncs before a removal of the keys is 0. @later: the first sync of the successor fails, too. */
static void check_begun_elsewhere(bool later)
{
    struct world w;

    start(&w, 16, 16);
    store(&w, keys, KEYS);
    store(&w, others, KEYS);
    fail_syncs = true;
    assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
    world_stop(&w);
    n_failed = n_synced = 0;
    fail_syncs = later;
    world_start(&w);
    world_attach(&w, false);
    assert_true(!later || n_failed > 0);
    check_at(&w, keys, KEYS, KVBM_MISS);
    if (later)
        assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
    heal();
    assert_int_equal(remove_some(&w, keys, KEYS), 0);
    assert_true(n_synced > 0);
    check_at(&w, others, KEYS, KVBM_ON_DISK);
    assert_int_equal(world_stats(&w).volumes_down, 0);
    world_fini(&w);
}

static void test_begun_elsewhere(void **state)
{
    (void)state;
    check_begun_elsewhere(false);
    check_begun_elsewhere(true);
}

/* A store failed after its records were written: they are in the file, unknown to the manager. */
static void test_commit_failed(void **state)
{
    struct world w;

    (void)state;
    start(&w, 16, 16);
    fail_syncs = true;
    store(&w, keys, KEYS);
    check_removed(&w, keys, KEYS);
    world_fini(&w);
}

/* A store evicted the keys, and couldn't zero their records. */
static void test_eviction_failed(void **state)
{
    struct world w;

    (void)state;
    start(&w, 16, KEYS);
    store(&w, keys, KEYS);
    fail_writes = true;
    store(&w, others, KEYS);
    check_removed(&w, keys, KEYS);
    world_fini(&w);
}

/* A place of the index couldn't be read at the start: its blocks are unknown, not removed. */
static void test_unreadable_index(void **state)
{
    struct world w;

    (void)state;
    start(&w, 16, 16);
    store(&w, keys, KEYS);
    fail_reads = true;
    restart(&w);
    check_at(&w, keys, KEYS, KVBM_MISS);
    check_removed(&w, keys, KEYS);
    world_fini(&w);
}

/* Of two records of a key the start couldn't zero the older one in the file. */
static void test_older_record(void **state)
{
    const uint64_t twice[1] = {5};
    struct world w;

    (void)state;
    start(&w, 0, 16);
    store(&w, others, KEYS);
    store(&w, twice, 1); /* not in the first slot */
    fail_reads = true;
    restart(&w);
    check_at(&w, twice, 1, KVBM_MISS);
    heal();
    store(&w, twice, 1); /* in another slot than before */
    n_failed = 0;
    fail_writes = true;
    restart(&w);
    check_at(&w, twice, 1, KVBM_ON_DISK);
    check_removed(&w, twice, 1);
    world_fini(&w);
}

/* A slot that is used again after a failure keeps its new block. */
static void test_used_again(void **state)
{
    struct world w;

    (void)state;
    start(&w, 16, KEYS);
    store(&w, keys, KEYS);
    fail_writes = true;
    assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
    heal();
    store(&w, others, KEYS);
    assert_int_equal(remove_some(&w, keys, KEYS), 0);
    restart(&w);
    check_at(&w, keys, KEYS, KVBM_MISS);
    check_at(&w, others, KEYS, KVBM_ON_DISK);
    world_fini(&w);
}

/* Deletions of an object store in a folder are synced, once for all keys of a call. */
static void test_object_folder(void **state)
{
    struct world w;

    (void)state;
    heal();
    n_failed = 0;
    world_init(&w, 16);
    with_object(&w);
    world_start(&w);
    world_attach(&w, false);
    store(&w, keys, KEYS);
    fail_folders = true;
    assert_int_equal(remove_some(&w, keys, KEYS), -EIO);
    assert_true(n_failed > 0);
    assert_int_equal(remove_some(&w, keys, KEYS), -EIO); /* although the files have gone */
    check_removed(&w, keys, KEYS);
    world_fini(&w);
}

/* Random faults, stores, removals and restarts: after a removal that returned 0, no lookup finds
 * its keys until they are stored again. */
static void test_random(void **state)
{
    enum { MANY = 24, SLOTS = 16 };
    uint64_t rng = unit_seed(), some[MANY], all[MANY];
    bool removed[MANY] = {false};
    uint8_t at[N];
    struct world w;

    (void)state;
    start(&w, 8, SLOTS);
    for (uint64_t i = 0; i < MANY; i++)
        all[i] = i;
    for (size_t round = unit_rounds(60); round > 0; round--) {
        uint32_t n = 1 + (uint32_t)unit_below(&rng, 6), what = (uint32_t)unit_below(&rng, 5);

        fail_writes = unit_below(&rng, 4) == 0;
        fail_syncs = unit_below(&rng, 4) == 0;
        fail_reads = unit_below(&rng, 4) == 0;
        for (uint32_t i = 0; i < n; i++)
            some[i] = unit_below(&rng, MANY);
        if (what == 0) {
            restart(&w);
        } else if (what < 3) {
            store(&w, some, n);
            for (uint32_t i = 0; i < n; i++)
                removed[some[i]] = false;
        } else if (remove_some(&w, some, n) == 0) {
            for (uint32_t i = 0; i < n; i++)
                removed[some[i]] = true;
        }
        lookup(&w, all, MANY, at);
        for (uint32_t i = 0; i < MANY; i++)
            assert_true(!removed[i] || at[i] == KVBM_MISS);
    }
    heal();
    restart(&w);
    lookup(&w, all, MANY, at);
    for (uint32_t i = 0; i < MANY; i++)
        assert_true(!removed[i] || at[i] == KVBM_MISS);
    world_fini(&w);
}

static int quiet(void **state)
{
    (void)state;
    kv_log_set_level(KV_LOG_ERROR);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_removal_failed),  cmocka_unit_test(test_commit_failed),
        cmocka_unit_test(test_eviction_failed), cmocka_unit_test(test_unreadable_index),
        cmocka_unit_test(test_older_record),    cmocka_unit_test(test_used_again),
        cmocka_unit_test(test_object_folder),   cmocka_unit_test(test_random),
        cmocka_unit_test(test_begun_elsewhere),
    };

    return cmocka_run_group_tests(tests, quiet, NULL);
}
