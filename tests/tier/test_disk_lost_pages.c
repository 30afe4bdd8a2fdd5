// SPDX-License-Identifier: Apache-2.0
/*
 * A barrier that fails while another block is being written. The kernel may drop what was written
 * before the failure, and the next barrier succeeds: no such block may be said to be stored.
 */
#include "tier/disk_unit.h"

#include <dlfcn.h>
#include <stdatomic.h>

enum { BYTES = 8192, LATE = 5 };

static sem_t late_written, first_ended;
static _Atomic bool armed;      /* the next barrier fails, and the late slot's write returns late */
static _Atomic bool hold_index; /* hold the write of the late slot's record instead */
static _Atomic int fail_in;     /* barriers that succeed before the one that fails */

/* Tell whether a write is the one that returns after the failed barrier. */
static bool is_late(off_t at, size_t len)
{
    if (!atomic_load(&armed) || atomic_load(&hold_index) != (len < BYTES))
        return false;
    return len < BYTES ? at == 4096 + LATE * (off_t)len : at == 4096 + LATE * (off_t)BYTES;
}

ssize_t pwrite(int fd, const void *from, size_t len, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pwrite");
    ssize_t n = real(fd, from, len, at);

    if (is_late(at, len)) {
        sem_post(&late_written);
        disk_await(&first_ended);
    }
    return n;
}

int fdatasync(int fd)
{
    int (*real)(int) = (int (*)(int))(uintptr_t)dlsym(RTLD_NEXT, "fdatasync");

    if (atomic_load(&armed) && atomic_fetch_sub(&fail_in, 1) == 0) {
        disk_await(&late_written);
        errno = EIO;
        return -1;
    }
    return real(fd);
}

/* Write slot 1 with a barrier that fails while slot LATE is written. */
static void fail_beside(bool index)
{
    struct kvbm_disk_opts opts = disk_opts(1, 16);
    uint8_t *data = disk_pages(BYTES);
    uint64_t keys[2] = {11, 12};
    struct kvbm_disk_io ios[2] = {{.slot = 1, .key = &keys[0], .data = data, .len = BYTES},
                                  {.slot = LATE, .key = &keys[1], .data = data, .len = BYTES}};
    struct kvbm_disk_batch batches[2];
    struct kvbm_disk *disk;
    sem_t sems[2];

    opts.io = KVBM_IO_THREADS;
    disk = disk_open(&opts);
    sem_init(&late_written, 0, 0);
    sem_init(&first_ended, 0, 0);
    for (int i = 0; i < 2; i++) { /* so that a later write of the slots zeroes a record first */
        assert_int_equal(disk_write(disk, ios[i].slot, keys[i], data, BYTES), 0);
        sem_init(&sems[i], 0, 0);
        batches[i] = (struct kvbm_disk_batch){
            .write = true, .ios = &ios[i], .n = 1, .done = disk_done, .arg = &sems[i]};
    }
    atomic_store(&hold_index, index);
    atomic_store(&fail_in, index ? 1 : 0);
    atomic_store(&armed, true);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvbm_disk_submit(disk, &batches[i]), 0);
    disk_await(&sems[0]);
    assert_int_equal(ios[0].status, -EIO);
    atomic_store(&armed, false);
    sem_post(&first_ended);
    disk_await(&sems[1]);
    assert_int_equal(ios[1].status, -EIO);
    assert_int_equal(disk_read(disk, LATE, keys[1], data, BYTES), -ENOENT);
    assert_int_equal(disk_write(disk, LATE, keys[1], data, BYTES), 0); /* the next one is stored */
    assert_int_equal(disk_read(disk, LATE, keys[1], data, BYTES), 0);
    kvbm_disk_close(disk);
    for (int i = 0; i < 2; i++)
        sem_destroy(&sems[i]);
    sem_destroy(&late_written);
    sem_destroy(&first_ended);
    free(data);
}

static void test_slots(void **state)
{
    (void)state;
    fail_beside(false);
}

static void test_index(void **state)
{
    (void)state;
    fail_beside(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_slots, disk_setup, disk_teardown),
        cmocka_unit_test_setup_teardown(test_index, disk_setup, disk_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
