// SPDX-License-Identifier: Apache-2.0
/* The disk tier's room: reserved at open, or an error then. Where the file system can't reserve,
 * writes report the lack of room. The program replaces fallocate by one that refuses on demand. */
#include "disk_unit.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static struct {
    int error;  /* of calls from number from on; 0: none */
    int from;   /* counted from 0 */
    int n;      /* how many such; 0: all */
    int called; /* so far */
} refuse;

int fallocate(int fd, int mode, off_t at, off_t len)
{
    int call = refuse.called++;

    if (refuse.error && call >= refuse.from && (!refuse.n || call < refuse.from + refuse.n)) {
        errno = refuse.error;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, at, len);
}

static int open_refusing(const struct kvbm_disk_opts *opts, int error, int from, int n,
                         struct kvbm_disk **ret)
{
    int rc;

    refuse.error = error;
    refuse.from = from;
    refuse.n = n;
    refuse.called = 0;
    rc = kvbm_disk_open(opts, ret);
    refuse.error = 0;
    assert_true(refuse.called > from); /* it was asked for */
    return rc;
}

static struct stat stat_of(int volume, const char *kind)
{
    char path[400];
    struct stat st;

    snprintf(path, sizeof(path), "%s/kvbm-cache.%s", disk_dirs[volume], kind);
    assert_int_equal(stat(path, &st), 0);
    return st;
}

static bool is_reserved(int volume, const char *kind)
{
    struct stat st = stat_of(volume, kind);

    return st.st_size > 0 && (off_t)st.st_blocks * 512 >= st.st_size;
}

static void use_all(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    uint8_t *data = disk_pages(opts->slot_bytes), *back = disk_pages(opts->slot_bytes);

    for (uint32_t i = 0; i < opts->n_slots; i++) {
        disk_fill(data, opts->slot_bytes, i);
        assert_int_equal(disk_write(disk, i, i, data, opts->slot_bytes), 0);
        assert_int_equal(disk_read(disk, i, i, back, opts->slot_bytes), 0);
        assert_memory_equal(data, back, opts->slot_bytes);
    }
    free(data);
    free(back);
}

/* Of both files of all volumes, also when they grow. */
static void test_reserved(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 40);
    struct kvbm_disk *disk = disk_open(&opts);

    (void)state;
    if (!is_reserved(0, "slots")) {
        kvbm_disk_close(disk);
        skip_because("the file system can't reserve blocks");
    }
    for (uint32_t n = 40; n <= 400; n += 360) {
        for (int i = 0; i < 2; i++) {
            assert_true(is_reserved(i, "slots") && is_reserved(i, "index"));
            assert_int_equal(stat_of(i, "slots").st_size, 4096 + (off_t)n / 2 * 8192);
        }
        use_all(disk, &opts);
        kvbm_disk_close(disk);
        opts.n_slots = 400;
        disk = disk_open(&opts);
    }
    kvbm_disk_close(disk);
}

/* More than the disk has: refused before anything is taken, or everybody else on it would find it
 * full meanwhile. */
static void test_too_large(void **state)
{
    struct kvbm_disk_opts small = disk_opts(1, 16), large = disk_opts(1, INT32_MAX);
    struct kvbm_disk *disk = disk_open(&small);
    char data[100];

    (void)state;
    assert_int_equal(disk_write(disk, 15, 7, memset(data, 'x', 100), 100), 0);
    kvbm_disk_close(disk);
    refuse.called = 0;
    large.name = "large";
    large.slot_bytes = 1 << 30; /* 2 EiB, and hundreds of gigabytes of records */
    assert_int_equal(kvbm_disk_open(&large, &disk), -ENOSPC);
    assert_int_equal(refuse.called, 0);
    disk = disk_open(&small);
    assert_int_equal(disk_read(disk, 15, 7, data, 100), 0);
    kvbm_disk_close(disk);
}

static unsigned lines, told; /* of log lines: about reserving; that name the directory */

static void count_lines(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)len;
    lines += strstr(line, "reserve") != NULL;
    told += level == KV_LOG_WARN && strstr(line, disk_dirs[0]) != NULL;
}

/* NFS before 4.2, some FUSE, old kernels: files of the same sizes with holes, and the log says what
 * that means. */
static void test_cannot_reserve(void **state)
{
    static const int errors[] = {EOPNOTSUPP, ENOSYS};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        struct kvbm_disk_opts opts = disk_opts(1, i ? 20 : 10);
        struct kvbm_disk *disk;

        lines = 0;
        kv_log_set_level(KV_LOG_INFO);
        kv_log_set_sink(count_lines, NULL);
        assert_int_equal(open_refusing(&opts, errors[i], 0, 0, &disk), 0);
        kv_log_set_sink(NULL, NULL);
        kv_log_set_level(KV_LOG_ERROR);
        assert_true(lines > 0);
        assert_int_equal(stat_of(0, "slots").st_size, 4096 + (off_t)opts.n_slots * 8192);
        use_all(disk, &opts);
        kvbm_disk_close(disk);
    }
}

/* Another model's tier takes room of its own in the directory. The log says so, and where to delete
 * what when there is none. */
static void test_no_room_beside(void **state)
{
    struct kvbm_disk_opts first = disk_opts(1, 16), large = disk_opts(1, INT32_MAX);
    struct kvbm_disk *disk = disk_open(&first);

    (void)state;
    kvbm_disk_close(disk);
    told = 0;
    kv_log_set_level(KV_LOG_WARN);
    kv_log_set_sink(count_lines, NULL);
    large.fingerprint = "another model";
    large.slot_bytes = 1 << 30;
    assert_int_equal(kvbm_disk_open(&large, &disk), -ENOSPC);
    assert_int_equal(told, 2);
    assert_int_equal(kvbm_disk_open(&large, &disk), -ENOSPC);
    assert_int_equal(told, 3);
    kv_log_set_sink(NULL, NULL);
    kv_log_set_level(KV_LOG_ERROR);
    disk = disk_open(&first);
    kvbm_disk_close(disk);
}

static void test_interrupted(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 10);
    struct kvbm_disk *disk;

    (void)state;
    assert_int_equal(open_refusing(&opts, EINTR, 0, 3, &disk), 0);
    use_all(disk, &opts);
    kvbm_disk_close(disk);
}

/* Whichever of the files there is no room for: nothing of new ones stays. */
static void test_no_room_for_new(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 100);
    struct kvbm_disk *disk = NULL;

    (void)state;
    for (int call = 0; call < 4; call++) { /* index and slots of two volumes */
        assert_int_equal(open_refusing(&opts, ENOSPC, call, 1, &disk), -ENOSPC);
        assert_null(disk);
        for (int i = 0; i < 2; i++)
            assert_int_equal(stat_of(i, "slots").st_blocks + stat_of(i, "index").st_blocks, 0);
    }
    disk = disk_open(&opts);
    use_all(disk, &opts);
    kvbm_disk_close(disk);
}

/* To grow: what was there stays, serves, and can be opened as it was. The other volume grows. */
static void test_no_room_to_grow(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 20), more = disk_opts(2, 200);
    struct kvbm_disk *disk = disk_open(&opts), *larger = NULL;
    off_t size = stat_of(0, "slots").st_size;
    uint8_t *back = disk_pages(8192), *want = disk_pages(8192);

    (void)state;
    use_all(disk, &opts);
    kvbm_disk_close(disk);
    for (int call = 0; call < 4; call++) {
        struct kvbm_disk_stats stats;

        if (call < 2) { /* neither has room */
            assert_int_equal(open_refusing(&more, ENOSPC, call, 5, &larger), -ENOSPC);
            assert_null(larger);
        }
        assert_int_equal(open_refusing(&more, ENOSPC, call, 1, &larger), 0);
        kvbm_disk_get_stats(larger, &stats);
        assert_int_equal(stats.volumes_down, 0);
        for (uint32_t i = 0; i < 20; i++) {
            disk_fill(want, 8192, i);
            assert_int_equal(disk_read(larger, i, i, back, 8192), 0);
            assert_memory_equal(back, want, 8192);
            assert_true(kvbm_disk_usable(larger, i));
            assert_int_equal(disk_write(larger, i, i, back, 8192), 0);
        }
        for (uint32_t i = 20; i < 200; i++) {
            bool grown = i % 2 != (uint32_t)call / 2;

            assert_int_equal(kvbm_disk_usable(larger, i), grown);
            assert_int_equal(disk_write(larger, i, i, back, 8192), grown ? 0 : -ENOSPC);
        }
        kvbm_disk_close(larger);
        larger = NULL;
        if (call < 2)
            assert_int_equal(stat_of(0, "slots").st_size, size);
        disk = disk_open(&opts);
        for (uint32_t i = 0; i < 20; i++) {
            disk_fill(want, 8192, i);
            assert_int_equal(disk_read(disk, i, i, back, 8192), 0);
            assert_memory_equal(back, want, 8192);
        }
        kvbm_disk_close(disk);
    }
    free(back);
    free(want);
}

/* A tmpfs of a megabyte, in a namespace of our own: what fits is used to the last slot. */
static int small_tmpfs(void)
{
    struct kvbm_disk_opts opts = disk_opts(1, 200), fits = disk_opts(1, 100);
    struct kvbm_disk *disk = NULL;

    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("room", disk_dirs[0], "tmpfs", 0, "size=1m") < 0)
        return 77;
    if (kvbm_disk_open(&opts, &disk) != -ENOSPC || disk)
        return 1;
    if (kvbm_disk_open(&fits, &disk) != 0 || !is_reserved(0, "slots"))
        return 2;
    use_all(disk, &fits);
    kvbm_disk_close(disk);
    return kvbm_disk_open(&opts, &disk) == -ENOSPC ? 0 : 3;
}

static void test_small_tmpfs(void **state)
{
    pid_t pid = fork();
    int status;

    (void)state;
    if (pid == 0)
        _exit(small_tmpfs());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip_because("a tmpfs can't be mounted here");
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_reserved),        TEST(test_too_large),   TEST(test_cannot_reserve),
        TEST(test_no_room_beside),  TEST(test_interrupted), TEST(test_no_room_for_new),
        TEST(test_no_room_to_grow), TEST(test_small_tmpfs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
