// SPDX-License-Identifier: Apache-2.0
/* Records of the disk tier keep the tokens of blocks, beside files that have no room for them. */
#include "tier/disk_unit.h"

#include "tier/disk/format.h"

enum { SLOTS = 24, MOST = 2000 };

static uint8_t *block;

static uint32_t token(uint32_t slot, uint32_t i)
{
    return slot * 1000003u + i * 7u + 1u;
}

/* True for the slots whose blocks are written with tokens. */
static bool is_told(uint32_t slot)
{
    return slot % 3 != 2;
}

static void write_some(struct kvbm_disk *disk, uint32_t from, uint32_t to, uint32_t n_tokens)
{
    static uint32_t tokens[MOST];

    for (uint32_t slot = from; slot < to; slot++) {
        uint64_t key = slot + 1;
        struct kvbm_disk_io io = {.slot = slot,
                                  .key = &key,
                                  .tokens = n_tokens && is_told(slot) ? tokens : NULL,
                                  .data = block,
                                  .len = 4096,
                                  .status = 1};

        for (uint32_t i = 0; i < n_tokens; i++)
            tokens[i] = token(slot, i);
        disk_fill(block, 4096, key);
        disk_run(disk, true, &io, 1);
        assert_int_equal(io.status, 0);
    }
}

/* Records that a walk shall find. */
struct expected {
    uint32_t n_tokens, n, n_told;
    uint32_t volume, n_volumes; /* the one volume that keeps tokens; n_volumes 1: all */
};

static int compare(void *arg, const struct kvbm_disk_record *record)
{
    struct expected *e = arg;
    bool keeps = e->n_tokens && (e->n_volumes == 1 || record->slot % e->n_volumes == e->volume);
    uint64_t key;

    memcpy(&key, record->key, sizeof(key));
    assert_int_equal(key, record->slot + 1);
    assert_int_equal(record->tokens != NULL, keeps && is_told(record->slot));
    for (uint32_t i = 0; record->tokens && i < e->n_tokens; i++)
        assert_int_equal(record->tokens[i], token(record->slot, i));
    e->n++;
    e->n_told += record->tokens != NULL;
    return 0;
}

/* Read a slot's block. Returns its status. */
static int read_one(struct kvbm_disk *disk, uint32_t slot)
{
    uint64_t key = slot + 1;
    struct kvbm_disk_io io = {.slot = slot, .key = &key, .data = block, .len = 4096, .status = 1};

    disk_run(disk, false, &io, 1);
    return io.status;
}

static void expect(struct kvbm_disk *disk, uint32_t n_tokens, uint32_t volume, uint32_t n_volumes,
                   uint32_t n, uint32_t n_told)
{
    struct expected e = {.n_tokens = n_tokens, .volume = volume, .n_volumes = n_volumes};

    assert_int_equal(kvbm_disk_each(disk, compare, &e), n);
    assert_int_equal(e.n, n);
    assert_int_equal(e.n_told, n_told);
    for (uint32_t slot = 0; slot < n; slot++)
        assert_int_equal(read_one(disk, slot), 0);
}

/* Records of 64 bytes to 4 KiB; 2000 tokens are too many for one. */
static void test_kept(void **state)
{
    static const uint32_t sizes[] = {0, 1, 16, 64, 256, 980, 2000};

    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        struct kvbm_disk_opts opts = disk_opts(1, SLOTS);
        uint32_t kept = sizes[i] <= 980 ? sizes[i] : 0, told = kept ? SLOTS * 2 / 3 : 0;
        struct kvbm_disk *disk;

        (void)disk_teardown(state);
        assert_int_equal(disk_setup(state), 0);
        opts.block_tokens = sizes[i];
        disk = disk_open(&opts);
        write_some(disk, 0, SLOTS, sizes[i]);
        write_some(disk, 0, SLOTS, sizes[i]); /* over valid records */
        expect(disk, kept, 0, 1, SLOTS, told);
        kvbm_disk_close(disk);
        disk = disk_open(&opts);
        expect(disk, kept, 0, 1, SLOTS, told);
        kvbm_disk_close(disk);
        opts.block_tokens =
            0; /* a caller that keeps none leaves what there is, and writes without */
        disk = disk_open(&opts);
        expect(disk, 0, 0, 1, SLOTS, 0);
        write_some(disk, 0, 3, 0);
        kvbm_disk_close(disk);
        opts.block_tokens = sizes[i];
        disk = disk_open(&opts);
        write_some(disk, 0, 3, sizes[i]);
        expect(disk, kept, 0, 1, SLOTS, told);
        kvbm_disk_close(disk);
    }
}

/* A volume with files of version 1 beside a new one, whose records are longer. */
static void test_beside_older_files(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, SLOTS / 2);
    struct kvbm_disk *disk = disk_open(&opts);
    uint32_t one = 1;

    (void)state;
    kvbm_disk_close(disk);
    opts = disk_opts(2, SLOTS);
    opts.block_tokens = 16;
    for (int round = 0; round < 2; round++) {
        disk = disk_open(&opts);
        write_some(disk, 0, SLOTS, 16);
        expect(disk, 16, 1, 2, SLOTS, 8); /* of the 12 odd slots */
        assert_int_equal(kvbm_disk_forget(disk, &one, NULL, 1), 0);
        write_some(disk, 1, 2, 16);
        kvbm_disk_close(disk);
        disk = disk_open(&opts);
        expect(disk, 16, 1, 2, SLOTS, 8);
        kvbm_disk_close(disk);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_kept),
        TEST(test_beside_older_files),
    };
    int failed;

    block = disk_pages(8192);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(block);
    return failed;
}
