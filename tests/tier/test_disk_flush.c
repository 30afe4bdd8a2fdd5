// SPDX-License-Identifier: Apache-2.0
/*
 * Dirty pages of a store without barriers: writes wait while too many are in the page cache, reads
 * don't. This program's sync_file_range waits, and says that the machine has little memory.
 */
#include "tier/disk_unit.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum {
    BYTES = 8192,
    DEPTH = 8,
    MEMORY = 64 << 20,  /* of this machine, so the program says */
    MOST = MEMORY / 16, /* dirty bytes at which writes wait */
    SLOTS = 4 * (MOST / BYTES),
    ABOVE = 2 * DEPTH /* blocks that may have begun before the limit was reached */
};

static _Atomic uint64_t written;                         /* bytes of blocks */
static _Atomic uint32_t flushes, parts, fail;            /* parts: flushes of less than a file */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* held: no flush ends */

long sysconf(int name)
{
    long (*real)(int) = (long (*)(int))(uintptr_t)dlsym(RTLD_NEXT, "sysconf");

    return name == _SC_PHYS_PAGES ? MEMORY / real(_SC_PAGESIZE) : real(name);
}

ssize_t pwrite(int fd, const void *from, size_t len, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pwrite");
    ssize_t n = real(fd, from, len, at);

    atomic_fetch_add(&written, len == BYTES ? BYTES : 0);
    return n;
}

int sync_file_range(int fd, off_t at, off_t len, unsigned flags)
{
    (void)fd, (void)flags;
    atomic_fetch_add(&flushes, 1);
    atomic_fetch_add(&parts, at != 0 || len != 0);
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    if (atomic_load(&fail)) {
        errno = (int)atomic_load(&fail);
        return -1;
    }
    return 0;
}

static struct kvbm_disk *open_one(struct kvbm_disk_opts *opts, bool buffered, bool vol)
{
    *opts = disk_opts(2, SLOTS);
    opts->io = KVBM_IO_THREADS;
    opts->io_depth = DEPTH;
    opts->buffered = buffered;
    opts->volatile_ = vol;
    atomic_store(&written, 0);
    atomic_store(&flushes, 0);
    return disk_open(opts);
}

struct all {
    struct kvbm_disk_io ios[SLOTS];
    uint64_t keys[SLOTS];
    struct kvbm_disk_batch batch;
    sem_t sem;
};

/* Submit a write of every slot. */
static struct all *write_all(struct kvbm_disk *disk, void *data)
{
    struct all *all = calloc(1, sizeof(*all));

    sem_init(&all->sem, 0, 0);
    for (uint32_t i = 0; i < SLOTS; i++) {
        all->keys[i] = i + 1;
        all->ios[i] = (struct kvbm_disk_io){
            .slot = i, .group = 1, .key = &all->keys[i], .data = data, .len = BYTES, .status = 1};
    }
    all->batch = (struct kvbm_disk_batch){
        .write = true, .ios = all->ios, .n = SLOTS, .done = disk_done, .arg = &all->sem};
    assert_int_equal(kvbm_disk_submit(disk, &all->batch), 0);
    return all;
}

static void end_all(struct all *all)
{
    disk_await(&all->sem);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_int_equal(all->ios[i].status, 0);
    sem_destroy(&all->sem);
    free(all);
}

static void test_writes_wait_and_reads_do_not(void **state)
{
    uint8_t *data = disk_pages(BYTES), *got = disk_pages(BYTES);
    struct kvbm_disk_opts opts;
    struct kvbm_disk *disk = open_one(&opts, true, true);
    uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S;
    struct all *all;

    (void)state;
    if (disk_in_memory()) {
        kvbm_disk_close(disk);
        skip_because("KV_BUILD_DIR is on tmpfs, whose pages are never written to a device");
    }
    memset(data, 7, BYTES);
    assert_int_equal(disk_write(disk, SLOTS - 1, SLOTS, data, BYTES), 0);
    pthread_mutex_lock(&gate);
    all = write_all(disk, data);
    while (atomic_load(&written) < MOST && kv_now_ns() < until)
        sched_yield();
    for (int i = 0; i < 200;
         i++) { /* each takes a turn of the store's thread, which begins no write */
        assert_int_equal(disk_read(disk, SLOTS - 1, SLOTS, got, BYTES), 0);
        assert_memory_equal(data, got, BYTES);
    }
    assert_in_range(atomic_load(&written), MOST, MOST + (ABOVE + 1) * BYTES);
    assert_in_range(atomic_load(&flushes), 1, 2); /* one a volume */
    pthread_mutex_unlock(&gate);
    end_all(all);
    assert_in_range(atomic_load(&flushes), 3, SLOTS);
    assert_int_equal(atomic_load(&parts), 0);
    kvbm_disk_close(disk);
    free(data);
    free(got);
}

/* A flush that fails loses blocks, which don't verify. Others are stored. */
static void test_a_flush_fails(void **state)
{
    static const int errors[] = {EIO, ENOSPC, ENOSYS};
    uint8_t *data = disk_pages(BYTES);
    struct kvbm_disk_opts opts;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        struct kvbm_disk *disk = open_one(&opts, true, true);

        atomic_store(&fail, errors[i]);
        end_all(write_all(disk, data));
        assert_true(disk_in_memory() || atomic_load(&flushes) > 2);
        atomic_store(&fail, 0);
        assert_int_equal(disk_read(disk, 5, 6, data, BYTES), 0);
        kvbm_disk_close(disk);
    }
    free(data);
}

/* Barriers write all pages of a commit; direct I/O leaves none. */
static void test_others_need_none(void **state)
{
    uint8_t *data = disk_pages(BYTES);
    struct kvbm_disk_opts opts;

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct kvbm_disk *disk = open_one(&opts, i == 0, i == 1);

        end_all(write_all(disk, data));
        if (i == 0)
            assert_int_equal(atomic_load(&flushes), 0);
        kvbm_disk_close(disk);
    }
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_writes_wait_and_reads_do_not, disk_setup,
                                        disk_teardown),
        cmocka_unit_test_setup_teardown(test_a_flush_fails, disk_setup, disk_teardown),
        cmocka_unit_test_setup_teardown(test_others_need_none, disk_setup, disk_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
