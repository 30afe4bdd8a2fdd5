// SPDX-License-Identifier: Apache-2.0
/* Directories whose slots lie in several files: made, found again, lost in part, and others' in the way. */
#include "tier/disk_unit.h"

#include <sched.h>

#include "tier/disk/format.h"

enum { SLOTS = 40, BYTES = 8192 };

static uint8_t *block; /* of BYTES */

static const char *path_of(uint32_t directory, const char *name)
{
    static char path[300];

    snprintf(path, sizeof(path), "%s/%s", disk_dirs[directory], name);
    return path;
}

static bool is_there(uint32_t directory, const char *name)
{
    return access(path_of(directory, name), F_OK) == 0;
}

/* Count the slots files of a directory, by their names. */
static uint32_t files_in(uint32_t directory)
{
    char name[64];
    uint32_t n = is_there(directory, "kvbm-cache.slots");

    for (uint32_t i = 2; i < 10; i++) {
        snprintf(name, sizeof(name), "kvbm-cache.%u.slots", i);
        n += is_there(directory, name);
    }
    return n;
}

static struct kvbm_disk *open_files(uint32_t n_volumes, uint32_t n_files, uint32_t n_slots)
{
    struct kvbm_disk_opts opts = disk_opts(n_volumes, n_slots);

    opts.n_files = n_files;
    opts.buffered = opts.volatile_ = true;
    return disk_open(&opts);
}

static void fill(uint64_t key)
{
    memset(block, (int)(key * 37 + 1), BYTES);
}

static void write_keys(struct kvbm_disk *disk, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        fill(first + i);
        assert_int_equal(disk_write(disk, i, first + i, block, BYTES), 0);
    }
}

struct found {
    bool keys[1000];
    uint32_t slots[1000], n;
};

static int note(void *arg, const struct kvbm_disk_record *record)
{
    struct found *found = arg;
    uint64_t key;

    memcpy(&key, record->key, 8);
    assert_true(key < KV_COUNT(found->keys) && !found->keys[key]);
    found->keys[key] = true;
    found->slots[key] = record->slot;
    found->n++;
    return 0;
}

/* Find all keys; each must have its bytes. */
static struct found look(struct kvbm_disk *disk)
{
    struct found found = {.n = 0};
    uint8_t *want = disk_pages(BYTES);

    assert_true(kvbm_disk_each(disk, note, &found) >= 0);
    for (uint64_t key = 0; key < KV_COUNT(found.keys); key++) {
        if (!found.keys[key])
            continue;
        fill(key);
        memcpy(want, block, BYTES);
        assert_int_equal(disk_read(disk, found.slots[key], key, block, BYTES), 0);
        assert_memory_equal(want, block, BYTES);
    }
    free(want);
    return found;
}

static void close_with(struct kvbm_disk *disk, uint32_t n_keys)
{
    assert_int_equal(look(disk).n, n_keys);
    kvbm_disk_close(disk);
}

static void test_made_and_found_again(void **state)
{
    struct kvbm_disk *disk = open_files(1, 3, SLOTS);
    struct kvbm_disk_stats stats;

    (void)state;
    assert_int_equal(files_in(0), 3);
    assert_true(is_there(0, "kvbm-cache.slots") && is_there(0, "kvbm-cache.3.index"));
    write_keys(disk, 100, SLOTS);
    kvbm_disk_get_stats(disk, &stats);
    assert_true(stats.volumes == 1 && stats.volumes_down == 0);
    close_with(disk, SLOTS);
    for (uint32_t wanted = 0; wanted <= KVBM_DISK_MAX_FILES; wanted++) { /* whatever is asked for */
        close_with(open_files(1, wanted, SLOTS), SLOTS);
        assert_int_equal(files_in(0), 3);
    }
    close_with(open_files(1, 0, SLOTS * 2), SLOTS);
    disk = open_files(1, 0, SLOTS / 2); /* a smaller tier drops slots of every file */
    assert_in_range(look(disk).n, SLOTS / 2 - 3, SLOTS / 2 + 3);
    kvbm_disk_close(disk);
    kvbm_disk_close(open_files(1, 0, 2)); /* fewer slots than files */
    assert_int_equal(files_in(0), 3);
}

static void test_one_file_stays_one(void **state)
{
    struct kvbm_disk *disk = open_files(1, 1, SLOTS);

    (void)state;
    write_keys(disk, 100, SLOTS);
    kvbm_disk_close(disk);
    close_with(open_files(1, 4, SLOTS), SLOTS);
    assert_int_equal(files_in(0), 1);
    close_with(open_files(2, 4, 2 * SLOTS), SLOTS); /* and so does a directory beside it */
    assert_int_equal(files_in(1), 1);
}

static void test_several_directories(void **state)
{
    static const char *turned[2];
    struct kvbm_disk_opts opts = disk_opts(2, SLOTS);
    struct kvbm_disk *disk = open_files(2, 3, SLOTS);

    (void)state;
    assert_int_equal(files_in(0) + files_in(1), 6);
    write_keys(disk, 100, SLOTS);
    kvbm_disk_close(disk);
    turned[0] = disk_dirs[1];
    turned[1] = disk_dirs[0];
    opts.directories = turned;
    close_with(disk_open(&opts), SLOTS);
    close_with(open_files(3, 0, SLOTS * 2), SLOTS); /* a new directory gets as many */
    assert_int_equal(files_in(2), 3);
}

/* A file that is lost takes its own blocks with it, the first file too. */
static void test_lost(void **state)
{
    static const char *const names[] = {"kvbm-cache.2.index", "kvbm-cache.3.slots",
                                        "kvbm-cache.slots", "kvbm-cache.index"};
    uint32_t left = SLOTS;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(names); i++) {
        struct kvbm_disk *disk = open_files(1, 4, SLOTS);

        write_keys(disk, 100 * (i + 1), SLOTS);
        left = look(disk).n;
        kvbm_disk_close(disk);
        assert_int_equal(unlink(path_of(0, names[i])), 0);
        disk = open_files(1, 0, SLOTS);
        assert_int_equal(files_in(0), 4);
        assert_int_equal(look(disk).n, left - SLOTS / 4);
        kvbm_disk_close(disk);
    }
}

/* A process that is killed while it makes the files has made the last ones first. */
static void test_killed_when_made(void **state)
{
    (void)state;
    kvbm_disk_close(open_files(1, 3, SLOTS));
    assert_int_equal(truncate(path_of(0, "kvbm-cache.slots"), 0), 0);
    assert_int_equal(truncate(path_of(0, "kvbm-cache.index"), 0), 0);
    assert_int_equal(truncate(path_of(0, "kvbm-cache.2.index"), 0), 0);
    close_with(open_files(1, 0, SLOTS), 0);
    assert_int_equal(files_in(0), 3);
}

/* Another model's files stay, wherever they are. */
static void test_other_models(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, SLOTS);
    struct kvbm_disk *disk = open_files(1, 3, SLOTS), *other;
    struct kvbm_disk_seen seen;

    (void)state;
    write_keys(disk, 100, SLOTS);
    opts.fingerprint = "other";
    opts.n_files = 2;
    other = disk_open(&opts); /* in a subdirectory, while the first is in use */
    write_keys(other, 200, SLOTS);
    close_with(other, SLOTS);
    close_with(disk, SLOTS);
    close_with(disk_open(&opts), SLOTS);
    assert_int_equal(kvbm_disk_look(disk_dirs[0], NULL, "other", &seen), 0);
    assert_true(seen.ours && seen.n_slots == SLOTS);
    assert_int_equal(kvbm_disk_look(disk_dirs[0], NULL, "model", &seen), 0);
    assert_true(seen.ours && seen.n_slots == SLOTS);
    /* of the first model's files only the second and third are left */
    assert_int_equal(unlink(path_of(0, "kvbm-cache.slots")), 0);
    assert_int_equal(unlink(path_of(0, "kvbm-cache.index")), 0);
    opts.fingerprint = "third";
    opts.n_files = 4;
    other = disk_open(&opts);
    write_keys(other, 300, SLOTS);
    kvbm_disk_close(other);
    assert_int_equal(files_in(0), 3);
    close_with(disk_open(&opts), SLOTS);
}

static void test_in_use(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, SLOTS);
    struct kvbm_disk *disk = open_files(1, 3, SLOTS), *second;

    (void)state;
    assert_int_equal(kvbm_disk_open(&opts, &second), -EBUSY);
    kvbm_disk_close(disk);
    opts.n_files = KVBM_DISK_MAX_FILES + 1;
    assert_int_equal(kvbm_disk_open(&opts, &second), -EINVAL);
}

/* Give a file a whole header of another version. */
static void set_version(const char *path, uint32_t version)
{
    uint8_t page[KVBM_DISK_PAGE];
    int fd = open(path, O_RDWR | O_CLOEXEC);

    assert_int_equal(pread(fd, page, sizeof(page), 0), sizeof(page));
    memcpy(page + 8, &(uint32_t){htole32(version)}, 4);
    kvbm_disk_sum(page, sizeof(page) - 16, page + sizeof(page) - 16);
    assert_int_equal(pwrite(fd, page, sizeof(page), 0), sizeof(page));
    close(fd);
}

static char log_line[1000];

static void keep_line(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    if (level == KV_LOG_ERROR)
        snprintf(log_line, sizeof(log_line), "%.*s", (int)len, line);
}

/* Files of a later version are refused, with its number, and nothing in them is changed. */
static void test_later_version(void **state)
{
    static const char *const kinds[] = {"kvbm-cache.index", "kvbm-cache.slots"};
    struct kvbm_disk *disk = open_files(2, 1, SLOTS);

    (void)state;
    write_keys(disk, 1, SLOTS);
    kvbm_disk_close(disk);
    kv_log_set_sink(keep_line, NULL);
    for (unsigned which = 1; which <= 4; which++) {
        struct kvbm_disk_opts opts = disk_opts(2, SLOTS);

        opts.fingerprint =
            which == 4 ? "another" : opts.fingerprint; /* whose it is can't be told */
        for (unsigned i = 0; i < 2; i++)
            if (which == 4 || which & (1u << i))
                set_version(path_of(1, kinds[i]), 3);
        log_line[0] = '\0';
        assert_int_equal(kvbm_disk_open(&opts, &disk), -EPROTONOSUPPORT);
        assert_non_null(strstr(log_line, "version=3"));
        assert_non_null(strstr(log_line, disk_dirs[1]));
        for (unsigned i = 0; i < 2; i++)
            set_version(path_of(1, kinds[i]), 1);
        close_with(open_files(2, 1, SLOTS), SLOTS);
    }
    kv_log_set_sink(NULL, NULL);
}

/* Only copies to the page cache gain by several files. */
static void test_chosen(void **state)
{
    cpu_set_t set;
    uint32_t cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct kvbm_disk_opts opts = disk_opts(1, i == 3 ? SLOTS : (256u << 20) / BYTES);
        struct kvbm_disk *disk;

        opts.directories = &disk_dir_names[i];
        opts.buffered = i != 0;
        opts.volatile_ = i != 1;
        if (kvbm_disk_open(&opts, &disk) == -ENOSPC)
            skip_because("no room for 256 MiB below KV_BUILD_DIR");
        kvbm_disk_close(disk);
        if (i >= 2 || !disk_in_memory())
            assert_int_equal(files_in(i), i == 2 ? KV_MIN(cpus, (uint32_t)KVBM_DISK_MAX_FILES) : 1);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_made_and_found_again),
        TEST(test_one_file_stays_one),
        TEST(test_several_directories),
        TEST(test_lost),
        TEST(test_killed_when_made),
        TEST(test_other_models),
        TEST(test_in_use),
        TEST(test_later_version),
        TEST(test_chosen),
    };
    int failed;

    block = disk_pages(BYTES);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(block);
    return failed;
}
