// SPDX-License-Identifier: Apache-2.0
/* Slots whose bytes were damaged lose their records at once. Of two records of one key the newer is
 * found. */
#include "tier/disk_unit.h"

enum { SLOT_BYTES = 8192, RECORD_BYTES = 64, MAX_SLOTS = 32 };

/* The tier's files: a slot is in directory slot % directories, and there in each file in turn. */
static uint32_t directories = 1, files = 1;

static int open_file_of(uint32_t slot, const char *kind, int flags)
{
    uint32_t file = slot / directories % files;
    char path[400], number[16] = "";
    int fd;

    if (file)
        snprintf(number, sizeof(number), ".%u", file + 1);
    snprintf(path, sizeof(path), "%s/kvbm-cache%s.%s", disk_dirs[slot % directories], number, kind);
    fd = open(path, flags | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

/* The slot's number in its file. */
static off_t in_file(uint32_t slot)
{
    return slot / (directories * files);
}

static void flip_slot(uint32_t slot)
{
    int fd = open_file_of(slot, "slots", O_RDWR);
    off_t at = 4096 + in_file(slot) * SLOT_BYTES + 77;
    uint8_t byte;

    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* A record of zeros in the index file. */
static bool record_is_zero(uint32_t slot)
{
    static const uint8_t zeros[RECORD_BYTES];
    int fd = open_file_of(slot, "index", O_RDONLY);
    uint8_t record[RECORD_BYTES];

    assert_int_equal(pread(fd, record, sizeof(record), 4096 + in_file(slot) * RECORD_BYTES),
                     sizeof(record));
    close(fd);
    return memcmp(record, zeros, sizeof(record)) == 0;
}

struct found {
    uint32_t slots[MAX_SLOTS];
    uint64_t keys[MAX_SLOTS];
    uint32_t n;
};

static int note(void *arg, const struct kvbm_disk_record *record)
{
    struct found *found = arg;

    assert_true(found->n < MAX_SLOTS);
    found->slots[found->n] = record->slot;
    memcpy(&found->keys[found->n++], record->key, 8);
    return 0;
}

static struct found look(struct kvbm_disk *disk)
{
    struct found found = {.n = 0};

    long n = kvbm_disk_each(disk, note, &found);

    assert_int_equal(n, found.n);
    return found;
}

/* The case: 8 of 16 slots, each damaged, found so, stored again elsewhere, and all of it found after a restart. */
static void stored_again(uint32_t n_directories, uint32_t n_files)
{
    struct kvbm_disk_opts opts = disk_opts(n_directories, 16);
    struct kvbm_disk *disk;
    uint8_t *data = disk_pages(SLOT_BYTES), *expected = disk_pages(SLOT_BYTES);
    struct found found;

    directories = n_directories;
    files = opts.n_files = n_files;
    disk = disk_open(&opts);
    for (uint32_t i = 0; i < 8; i++) {
        disk_fill(data, SLOT_BYTES, i);
        assert_int_equal(disk_write(disk, i, 100 + i, data, SLOT_BYTES), 0);
        flip_slot(i);
        assert_int_equal(disk_read(disk, i, 100 + i, data, SLOT_BYTES), -EBADMSG);
        assert_true(record_is_zero(i));
        assert_int_equal(disk_read(disk, i, 100 + i, data, SLOT_BYTES), -ENOENT);
    }
    for (uint32_t i = 0; i < 8; i++) {
        disk_fill(data, SLOT_BYTES, i);
        assert_int_equal(disk_write(disk, 8 + i, 100 + i, data, SLOT_BYTES), 0);
    }
    kvbm_disk_close(disk);
    disk = disk_open(&opts);
    found = look(disk);
    assert_int_equal(found.n, 8);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(found.slots[i], 8 + i);
        disk_fill(expected, SLOT_BYTES, i);
        assert_int_equal(disk_read(disk, 8 + i, 100 + i, data, SLOT_BYTES), 0);
        assert_memory_equal(data, expected, SLOT_BYTES);
    }
    kvbm_disk_close(disk);
    free(data);
    free(expected);
    directories = files = 1;
}

static void test_stored_again(void **state)
{
    (void)state;
    stored_again(1, 1);
}

static void test_stored_again_volumes(void **state)
{
    (void)state;
    stored_again(3, 1);
}

static void test_stored_again_files(void **state)
{
    (void)state;
    stored_again(1, 2);
}

static void test_stored_again_volumes_files(void **state)
{
    (void)state;
    stored_again(2, 2);
}

/* The record goes with a barrier, before the reader is told. */
static void test_durably(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 4);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages(SLOT_BYTES);
    struct kvbm_disk_stats before, after;

    (void)state;
    assert_int_equal(disk_write(disk, 0, 1, data, SLOT_BYTES), 0);
    assert_int_equal(disk_write(disk, 1, 2, data, SLOT_BYTES), 0);
    flip_slot(0);
    kvbm_disk_get_stats(disk, &before);
    assert_int_equal(disk_read(disk, 1, 2, data, SLOT_BYTES), 0);
    assert_int_equal(disk_read(disk, 0, 1, data, SLOT_BYTES), -EBADMSG);
    kvbm_disk_get_stats(disk, &after);
    assert_int_equal(after.barriers, before.barriers + 1);
    assert_int_equal(after.bad, before.bad + 1);
    assert_int_equal(after.writes, before.writes);
    assert_int_equal(after.failed, before.failed);
    assert_int_equal(disk_write(disk, 0, 3, data, SLOT_BYTES), 0); /* and its slot is free */
    assert_int_equal(disk_read(disk, 0, 3, data, SLOT_BYTES), 0);
    kvbm_disk_close(disk);
    free(data);
}

/* Readers of one bad slot at the same time: each is told, nobody hangs, nothing else goes. */
static void test_many_readers(void **state)
{
    enum { READERS = 12 };
    struct kvbm_disk_opts opts = disk_opts(1, 4);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages((size_t)READERS * SLOT_BYTES);
    struct kvbm_disk_io ios[READERS];
    uint64_t key = 7, other = 8;

    (void)state;
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t bad = 0;

        assert_int_equal(disk_write(disk, 0, key, data, SLOT_BYTES), 0);
        assert_int_equal(disk_write(disk, 1, other, data, SLOT_BYTES), 0);
        flip_slot(0);
        for (uint32_t i = 0; i < READERS; i++)
            ios[i] = (struct kvbm_disk_io){.slot = i % 4 == 3,
                                           .group = 1,
                                           .key = i % 4 == 3 ? &other : &key,
                                           .data = data + (size_t)i * SLOT_BYTES,
                                           .len = SLOT_BYTES,
                                           .status = 1};
        disk_run(disk, false, ios, READERS);
        for (uint32_t i = 0; i < READERS; i++) {
            if (i % 4 == 3)
                assert_int_equal(ios[i].status, 0);
            else
                assert_true(ios[i].status == -EBADMSG || ios[i].status == -ENOENT);
            bad += ios[i].status == -EBADMSG;
        }
        assert_true(bad > 0);
        assert_true(record_is_zero(0));
        assert_false(record_is_zero(1));
    }
    kvbm_disk_close(disk);
    free(data);
}

/* Keys of a few in slots of a few, written, damaged, read, reopened: beside a model of which slot has a key's newest bytes. */
static void newest_wins(uint32_t n_volumes)
{
    enum { SLOTS = 17, KEYS = 9 };
    struct kvbm_disk_opts opts = disk_opts(n_volumes, SLOTS);
    uint64_t random = unit_seed(), holds[SLOTS] = {0}, written[SLOTS] = {0}, n = 0;
    uint32_t rounds = (uint32_t)unit_rounds(400);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages(SLOT_BYTES);

    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t slot = (uint32_t)unit_below(&random, SLOTS);

        holds[slot] = 1 + unit_below(&random, KEYS);
        written[slot] = ++n;
        disk_fill(data, SLOT_BYTES, holds[slot]);
        assert_int_equal(disk_write(disk, slot, holds[slot], data, SLOT_BYTES), 0);
        if (unit_below(&random, 8))
            continue;
        kvbm_disk_close(disk);
        disk = disk_open(&opts);
        for (uint32_t i = 0; i < SLOTS; i++) { /* the older ones of a key have gone */
            for (uint32_t j = 0; j < SLOTS; j++)
                holds[i] = holds[j] == holds[i] && written[j] > written[i] ? 0 : holds[i];
        }
        struct found found = look(disk);
        uint32_t expected = 0;

        for (uint32_t i = 0; i < SLOTS; i++)
            expected += holds[i] != 0;
        assert_int_equal(found.n, expected);
        for (uint32_t i = 0; i < found.n; i++)
            assert_int_equal(found.keys[i], holds[found.slots[i]]);
    }
    kvbm_disk_close(disk);
    free(data);
}

static void test_newest_wins(void **state)
{
    (void)state;
    newest_wins(1);
}

static void test_newest_wins_volumes(void **state)
{
    (void)state;
    newest_wins(3);
}

/* The newer record goes: the older one doesn't come back in its place. */
static void test_older_stays_away(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 4);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages(SLOT_BYTES);
    uint32_t newer = 2;

    (void)state;
    assert_int_equal(disk_write(disk, 0, 5, data, SLOT_BYTES), 0);
    assert_int_equal(disk_write(disk, newer, 5, data, SLOT_BYTES), 0);
    kvbm_disk_close(disk);
    disk = disk_open(&opts);
    assert_int_equal(look(disk).n, 1);
    assert_int_equal(look(disk).slots[0], newer);
    assert_int_equal(disk_read(disk, 0, 5, data, SLOT_BYTES), -ENOENT);
    assert_int_equal(kvbm_disk_forget(disk, &newer, NULL, 1), 0);
    kvbm_disk_close(disk);
    disk = disk_open(&opts);
    assert_int_equal(look(disk).n, 0);
    kvbm_disk_close(disk);
    free(data);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_stored_again),
        TEST(test_stored_again_volumes),
        TEST(test_stored_again_files),
        TEST(test_stored_again_volumes_files),
        TEST(test_durably),
        TEST(test_many_readers),
        TEST(test_newest_wins),
        TEST(test_newest_wins_volumes),
        TEST(test_older_stays_away),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
