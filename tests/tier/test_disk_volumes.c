// SPDX-License-Identifier: Apache-2.0
/* Volumes of a disk tier that come in another order, are missing, return or are new; and files that
 * belong to something else. */
#include "tier/disk_unit.h"

#include <sys/file.h>

#include "tier/disk/format.h"

enum { EACH = 12, SLOT_BYTES = 8192, KEYS = 40, DIRS = 4 };

static const char *file_of(uint32_t volume, const char *kind)
{
    static char path[300];

    assert_true(snprintf(path, sizeof(path), "%s/kvbm-cache.%s", disk_dirs[volume], kind) <
                (int)sizeof(path));
    return path;
}

/* The tier of these directories, by number; EACH slots a volume. */
static struct kvbm_disk_opts opts_of(const int *dirs, uint32_t n)
{
    static const char *names[DIRS];
    struct kvbm_disk_opts opts = disk_opts(n, n * EACH);

    for (uint32_t i = 0; i < n; i++)
        names[i] = disk_dirs[dirs[i]];
    opts.directories = names;
    return opts;
}

static struct kvbm_disk *open_dirs(const int *dirs, uint32_t n)
{
    struct kvbm_disk_opts opts = opts_of(dirs, n);

    return disk_open(&opts);
}

struct found {
    struct kvbm_disk *disk;
    bool keys[KEYS];
    uint32_t slots[KEYS], n;
};

static int note(void *arg, const struct kvbm_disk_record *record)
{
    struct found *found = arg;
    uint64_t key;

    memcpy(&key, record->key, 8);
    assert_true(key < KEYS && !found->keys[key]);
    found->keys[key] = true;
    found->slots[key] = record->slot;
    found->n++;
    return 0;
}

/* All that is there; every block has its bytes. */
static struct found look(struct kvbm_disk *disk)
{
    uint8_t *data = disk_pages(SLOT_BYTES), *expected = disk_pages(SLOT_BYTES);
    struct found found = {.disk = disk};
    long n = kvbm_disk_each(disk, note, &found);

    assert_int_equal(n, found.n);
    for (uint64_t key = 0; key < KEYS; key++) {
        if (!found.keys[key])
            continue;
        disk_fill(expected, SLOT_BYTES, key);
        assert_int_equal(disk_read(disk, found.slots[key], key, data, SLOT_BYTES), 0);
        assert_memory_equal(data, expected, SLOT_BYTES);
    }
    free(data);
    free(expected);
    return found;
}

static int put(struct kvbm_disk *disk, uint32_t slot, uint64_t key)
{
    uint8_t *data = disk_pages(SLOT_BYTES);
    int rc;

    disk_fill(data, SLOT_BYTES, key);
    rc = disk_write(disk, slot, key, data, SLOT_BYTES);
    free(data);
    return rc;
}

/* Keys 0 to n - 1 in the slots of that number. */
static void fill(const int *dirs, uint32_t n_dirs, uint32_t n)
{
    struct kvbm_disk *disk = open_dirs(dirs, n_dirs);

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(put(disk, i, i), 0);
    kvbm_disk_close(disk);
}

static uint32_t n_found(const int *dirs, uint32_t n)
{
    struct kvbm_disk *disk = open_dirs(dirs, n);
    uint32_t found = look(disk).n;

    kvbm_disk_close(disk);
    return found;
}

static uint32_t n_down(struct kvbm_disk *disk)
{
    struct kvbm_disk_stats stats;

    kvbm_disk_get_stats(disk, &stats);
    return stats.volumes_down;
}

static void test_order(void **state)
{
    (void)state;
    fill((int[]){0, 1, 2}, 3, 30);
    assert_int_equal(n_found((int[]){2, 0, 1}, 3), 30);
    assert_int_equal(n_found((int[]){1, 0, 2}, 3), 30);
    assert_int_equal(n_found((int[]){0, 1, 2}, 3), 30);
}

/* A volume that isn't named any more, and named again; a new one joins. */
static void test_dropped_and_joined(void **state)
{
    struct kvbm_disk *disk;

    (void)state;
    fill((int[]){0, 1}, 2, 20);
    assert_int_equal(n_found((int[]){1}, 1), 10);
    assert_int_equal(n_found((int[]){0}, 1), 10);
    assert_int_equal(n_found((int[]){1, 0}, 2), 20);
    disk = open_dirs((int[]){3, 1, 0}, 3);
    assert_int_equal(look(disk).n, 20);
    assert_int_equal(n_down(disk), 0);
    assert_int_equal(put(disk, 0, 30), 0); /* slots of the new one */
    assert_int_equal(put(disk, 33, 31), 0);
    kvbm_disk_close(disk);
    assert_int_equal(n_found((int[]){0, 1, 3}, 3), 22);
    assert_int_equal(n_found((int[]){3}, 1), 2);
}

static void test_missing(void **state)
{
    struct kvbm_disk_opts opts = opts_of((int[]){0, 1}, 2);
    struct kvbm_disk *disk;
    uint8_t data[8];
    char away[300];

    (void)state;
    fill((int[]){0, 1}, 2, 20);
    snprintf(away, sizeof(away), "%s.away", disk_dirs[0]);
    assert_int_equal(rename(disk_dirs[0], away), 0);
    disk = open_dirs((int[]){0, 1}, 2);
    assert_int_equal(look(disk).n, 10);
    assert_int_equal(n_down(disk), 1);
    assert_false(kvbm_disk_usable(disk, 0));
    assert_true(kvbm_disk_usable(disk, 1));
    assert_int_equal(put(disk, 0, 25), -EIO);
    assert_int_equal(disk_read(disk, 2, 2, data, 8), -EIO);
    assert_int_equal(put(disk, 21, 25), 0);
    kvbm_disk_close(disk);
    assert_int_equal(rename(away, disk_dirs[0]), 0);
    assert_int_equal(n_found((int[]){0, 1}, 2), 21);
    assert_int_equal(rename(disk_dirs[1], away), 0);
    assert_int_equal(n_found((int[]){1, 0}, 2), 10);
    opts = opts_of((int[]){1}, 1);
    assert_int_equal(kvbm_disk_open(&opts, &disk), -ENOENT); /* none is there */
    assert_int_equal(rename(away, disk_dirs[1]), 0);
    assert_int_equal(n_found((int[]){1, 0}, 2), 21);
}

/* The key was stored again while the volume that has it was away: the newer record holds. */
static void test_comes_back_older(void **state)
{
    struct kvbm_disk *disk;

    (void)state;
    fill((int[]){0, 1}, 2, 2);
    disk = open_dirs((int[]){0}, 1);
    assert_int_equal(put(disk, 5, 1), 0);
    kvbm_disk_close(disk);
    disk = open_dirs((int[]){0, 1}, 2);
    assert_int_equal(look(disk).slots[1], 10); /* number 5 of the first of two */
    assert_int_equal(look(disk).n, 2);
    kvbm_disk_close(disk);
    assert_int_equal(n_found((int[]){1}, 1), 0);
}

static void test_sizes(void **state)
{
    struct kvbm_disk_opts opts = opts_of((int[]){0, 1}, 2);
    struct kvbm_disk *disk;

    (void)state;
    fill((int[]){0, 1}, 2, 24);
    for (uint32_t n = 60; n >= 24; n -= 18) { /* grown, and back */
        opts.n_slots = n;
        disk = disk_open(&opts);
        assert_int_equal(look(disk).n, 24);
        kvbm_disk_close(disk);
    }
    opts.n_slots = 10; /* what lies beyond goes */
    disk = disk_open(&opts);
    assert_int_equal(look(disk).n, 10);
    kvbm_disk_close(disk);
    opts.n_slots = 24;
    disk = disk_open(&opts);
    assert_int_equal(look(disk).n, 10);
    kvbm_disk_close(disk);
}

/* ---- any of four directories in any order, beside a model ---- */

struct slot {
    uint64_t key, written; /* written: 0, nothing; the later the greater */
};

/* Of several slots with one key in the volumes that are there, all but the newest are given up. */
static uint32_t keep_newest(struct slot model[DIRS][EACH], const int *dirs, uint32_t n)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < n * EACH; i++) {
        struct slot *a = &model[dirs[i / EACH]][i % EACH];

        for (uint32_t j = 0; j < n * EACH; j++) {
            const struct slot *b = &model[dirs[j / EACH]][j % EACH];

            if (b->written > a->written && b->key == a->key)
                a->written = 0;
        }
        kept += a->written != 0;
    }
    return kept;
}

static void test_random(void **state)
{
    struct slot model[DIRS][EACH] = {0};
    uint64_t random = unit_seed(), written = 0;

    (void)state;
    for (size_t round = unit_rounds(60); round > 0; round--) {
        int dirs[DIRS] = {0, 1, 2, 3};
        uint32_t n = 1 + (uint32_t)unit_below(&random, DIRS), kept;
        struct kvbm_disk *disk;
        struct found found;

        for (uint32_t i = 0; i < DIRS; i++) {
            uint32_t other = i + (uint32_t)unit_below(&random, DIRS - i);
            int dir = dirs[i];

            dirs[i] = dirs[other];
            dirs[other] = dir;
        }
        kept = keep_newest(model, dirs, n);
        disk = open_dirs(dirs, n);
        found = look(disk);
        assert_int_equal(found.n, kept);
        for (uint64_t key = 0; key < KEYS; key++) {
            const struct slot *s = &model[dirs[found.slots[key] % n]][found.slots[key] / n];

            assert_true(!found.keys[key] || (s->written && s->key == key));
        }
        for (uint64_t i = unit_below(&random, 10); i > 0; i--) {
            uint32_t slot = (uint32_t)unit_below(&random, n * EACH);
            uint64_t key = unit_below(&random, KEYS);

            assert_int_equal(put(disk, slot, key), 0);
            model[dirs[slot % n]][slot / n] = (struct slot){key, ++written};
        }
        kvbm_disk_close(disk);
    }
}

/* ---- what isn't ours ---- */

static void write_victim(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    assert_int_equal(write(fd, "precious", 8), 8);
    close(fd);
}

static void is_intact(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char text[20];

    assert_int_equal(read(fd, text, sizeof(text)), 8);
    assert_memory_equal(text, "precious", 8);
    close(fd);
}

/* Links, pipes and folders in the place of its files: refused, and what they lead to stays as it was. */
static void test_not_ours(void **state)
{
    static const char *const kinds[] = {"slots", "index"};
    struct kvbm_disk_opts opts = opts_of((int[]){0, 1}, 2);
    struct kvbm_disk *disk = NULL;
    char victim[300];

    (void)state;
    snprintf(victim, sizeof(victim), "%s/db.sqlite", disk_root);
    write_victim(victim);
    for (int volume = 0; volume < 2; volume++) {
        for (size_t k = 0; k < KV_COUNT(kinds); k++) {
            const char *path = file_of((uint32_t)volume, kinds[k]);

            unlink(path); /* made by the attempts before */
            assert_int_equal(symlink(victim, path), 0);
            assert_int_equal(kvbm_disk_open(&opts, &disk), -ELOOP);
            is_intact(victim);
            unlink(path);
            assert_int_equal(link(victim, path), 0);
            assert_int_equal(kvbm_disk_open(&opts, &disk), -EMLINK);
            is_intact(victim);
            unlink(path);
            assert_int_equal(mkfifo(path, 0600), 0);
            assert_int_equal(kvbm_disk_open(&opts, &disk), -ENXIO);
            unlink(path);
            assert_int_equal(mkdir(path, 0700), 0);
            assert_int_equal(kvbm_disk_open(&opts, &disk), -EISDIR);
            rmdir(path);
        }
    }
    disk = disk_open(&opts);
    kvbm_disk_close(disk);
    is_intact(victim);
}

/* A file that belongs to neither us nor the directory's owner. */
static void test_another_owners(void **state)
{
    struct kvbm_disk_opts opts = opts_of((int[]){0}, 1);
    struct kvbm_disk *disk = NULL;

    (void)state;
    if (geteuid() != 0)
        skip_because("only root can give files away");
    write_victim(file_of(0, "slots"));
    assert_int_equal(chown(file_of(0, "slots"), 12345, 12345), 0);
    assert_int_equal(kvbm_disk_open(&opts, &disk), -EPERM);
    is_intact(file_of(0, "slots"));
}

static int lock_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
}

/* A volume that another process has, or another owner's: the other one serves. */
static void test_one_unusable(void **state)
{
    struct kvbm_disk_opts opts;
    struct kvbm_disk *disk = NULL;
    int fd;

    (void)state;
    fill((int[]){0, 1}, 2, 20);
    fd = lock_file(file_of(1, "index"));
    disk = open_dirs((int[]){0, 1}, 2);
    assert_int_equal(n_down(disk), 1);
    assert_int_equal(look(disk).n, 10);
    kvbm_disk_close(disk);
    opts = opts_of((int[]){1}, 1);
    assert_int_equal(kvbm_disk_open(&opts, &disk), -EBUSY); /* without another volume */
    close(fd);
    assert_int_equal(n_found((int[]){0, 1}, 2), 20);
    if (geteuid() != 0)
        skip_because("only root can give files away");
    assert_int_equal(chown(file_of(1, "slots"), 12345, 12345), 0);
    disk = open_dirs((int[]){0, 1}, 2);
    assert_int_equal(n_down(disk), 1);
    assert_int_equal(look(disk).n, 10);
    kvbm_disk_close(disk);
    assert_int_equal(chown(file_of(1, "slots"), 0, 0), 0);
    assert_int_equal(n_found((int[]){0, 1}, 2), 20);
}

/* Another program has an empty file of the tier's name: a wait of seconds, not of a minute. */
static void test_lock_without_header(void **state)
{
    struct kvbm_disk_opts opts = opts_of((int[]){0}, 1);
    struct kvbm_disk *disk = NULL;
    int fd = lock_file(file_of(0, "index"));
    uint64_t begin = kv_now_ns();

    (void)state;
    assert_int_equal(kvbm_disk_open(&opts, &disk), -EBUSY);
    assert_true(kv_now_ns() - begin >= 2 * KV_NS_PER_S); /* a maker would have had time */
    assert_true(kv_now_ns() - begin < 25 * KV_NS_PER_S);
    close(fd);
    disk = disk_open(&opts);
    kvbm_disk_close(disk);
}

/* Several such files: all volumes together wait as long as one, and the other one serves. */
static void test_locks_of_many(void **state)
{
    struct kvbm_disk *disk;
    uint64_t begin;
    int fds[3];

    (void)state;
    fill((int[]){0}, 1, 10);
    for (int i = 0; i < 3; i++)
        fds[i] = lock_file(file_of(i + 1, "index"));
    begin = kv_now_ns();
    disk = open_dirs((int[]){0, 1, 2, 3}, 4);
    assert_true(kv_now_ns() - begin < 20 * KV_NS_PER_S); /* 5 s, and room for a busy machine */
    assert_int_equal(n_down(disk), 3);
    kvbm_disk_close(disk);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_order),         TEST(test_dropped_and_joined),
        TEST(test_missing),       TEST(test_comes_back_older),
        TEST(test_sizes),         TEST(test_random),
        TEST(test_not_ours),      TEST(test_another_owners),
        TEST(test_one_unusable),  TEST(test_lock_without_header),
        TEST(test_locks_of_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
