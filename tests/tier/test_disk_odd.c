// SPDX-License-Identifier: Apache-2.0
/* The disk tier on file systems that can't sync a directory, or have no locks. */
#include "disk_unit.h"

#include "base/odd_disk.h"

static void watch(void)
{
    kv_log_set_level(KV_LOG_WARN);
    kv_log_set_sink(keep_odd_lines, NULL);
    no_lines();
}

static void test_directories_that_cannot_be_synced(void **state)
{
    static const int errors[] = {EINVAL, ENOTSUP, ENOSYS};
    struct kvbm_disk_opts opts = disk_opts(2, 8);
    uint8_t *data = disk_pages(opts.slot_bytes), *back = disk_pages(opts.slot_bytes);

    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        struct kvbm_disk *disk;

        (void)disk_teardown(state);
        assert_int_equal(disk_setup(state), 0);
        dir_sync_error = errors[i];
        watch();
        disk = disk_open(&opts);
        assert_int_equal(n_lines, 2); /* one for each volume */
        assert_non_null(strstr(lines, "fsync"));
        assert_non_null(strstr(lines, disk_dirs[0]));
        assert_non_null(strstr(lines, disk_dirs[1]));
        disk_fill(data, opts.slot_bytes, 5);
        assert_int_equal(disk_write(disk, 3, 3, data, opts.slot_bytes), 0);
        assert_int_equal(disk_read(disk, 3, 3, back, opts.slot_bytes), 0);
        assert_memory_equal(data, back, opts.slot_bytes);
        kvbm_disk_close(disk);
        dir_sync_error = 0;
    }
    dir_sync_error = EIO;
    (void)disk_teardown(state);
    assert_int_equal(disk_setup(state), 0);
    {
        struct kvbm_disk *disk;

        assert_int_equal(kvbm_disk_open(&opts, &disk), -EIO);
    }
    dir_sync_error = 0;
    kv_log_set_sink(NULL, NULL);
    free(data);
    free(back);
}

static void test_no_locks(void **state)
{
    static const int errors[] = {ENOSYS, ENOLCK, EOPNOTSUPP};
    struct kvbm_disk_opts opts = disk_opts(1, 8);
    struct kvbm_disk *disk;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        flock_error = errors[i];
        watch();
        assert_int_equal(kvbm_disk_open(&opts, &disk), -errors[i]);
        assert_non_null(strstr(lines, "locks"));
        assert_non_null(strstr(lines, disk_dirs[0]));
        assert_non_null(strstr(lines, "mount"));
    }
    flock_error = 0;
    kv_log_set_sink(NULL, NULL);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_directories_that_cannot_be_synced),
        TEST(test_no_locks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
