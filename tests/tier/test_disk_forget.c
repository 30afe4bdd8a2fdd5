// SPDX-License-Identifier: Apache-2.0
/* Finding the slots that hold keys, and forgetting them while other batches write. */
#include "tier/disk_unit.h"

enum { SLOTS = 50, KEYS = 20, BYTES = 8192 };

/* Keys by slot, 0: none. All are of one group, disk_write's. */
struct model {
    uint64_t key[SLOTS];
    bool wanted[KEYS + 1];
};

static bool is_wanted(const void *arg, const void *key)
{
    uint64_t k;

    memcpy(&k, key, sizeof(k));
    return ((const struct model *)arg)->wanted[k];
}

/* Find @most at a time. Returns the number found, without slots of unknown records: opening leaves
 * them where it zeroed older records of a key. */
static size_t find(struct kvbm_disk *disk, uint32_t group, const struct model *m, size_t most,
                   struct kvbm_disk_found *found)
{
    size_t n = 0, n_known = 0, some = most;
    uint32_t slot = 0;

    while (some == most) {
        some = kvbm_disk_find(disk, group, is_wanted, m, &slot, found + n, most);
        n += some;
    }
    for (size_t i = 0; i < n; i++)
        if (found[i].commit != KVBM_DISK_UNKNOWN)
            found[n_known++] = found[i];
    return n_known;
}

static void check_find(struct kvbm_disk *disk, const struct model *m, size_t most)
{
    struct kvbm_disk_found found[SLOTS + 1];
    size_t n = find(disk, 1, m, most, found), k = 0;

    for (uint32_t i = 0; i < SLOTS; i++) {
        if (!m->key[i] || !m->wanted[m->key[i]])
            continue;
        assert_true(k < n);
        assert_int_equal(found[k].slot, i);
        assert_memory_equal(found[k].key, &m->key[i], 8);
        k++;
    }
    assert_int_equal(n, k);
    assert_int_equal(find(disk, 2, m, most, found), 0);
}

static void test_find(void **state)
{
    uint64_t rng = unit_seed();
    struct kvbm_disk_opts opts = disk_opts(3, SLOTS);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages(BYTES);
    struct model m = {{0}, {false}};

    (void)state;
    for (size_t i = unit_rounds(200); i > 0; i--) {
        uint32_t slot = (uint32_t)unit_below(&rng, SLOTS);

        m.key[slot] = unit_below(&rng, 4) ? 1 + unit_below(&rng, KEYS) : 0;
        if (m.key[slot])
            assert_int_equal(disk_write(disk, slot, m.key[slot], data, BYTES), 0);
        else
            assert_int_equal(kvbm_disk_forget(disk, &slot, NULL, 1), 0);
        for (int k = 1; k <= KEYS; k++)
            m.wanted[k] = unit_below(&rng, 2);
        check_find(disk, &m, 1 + unit_below(&rng, SLOTS));
        if (unit_below(&rng, 20) == 0) {
            kvbm_disk_close(disk);
            disk = disk_open(&opts);
            for (uint32_t s = 0; s < SLOTS; s++) /* opening keeps one slot of a key */
                for (uint32_t t = 0; t < SLOTS; t++)
                    if (t != s && m.key[s] == m.key[t] && m.key[s])
                        m.key[s] = disk_read(disk, s, m.key[s], data, BYTES) ? 0 : m.key[s];
        }
    }
    kvbm_disk_close(disk);
    free(data);
}

/* A record that was written after the look stays. */
static void test_other_commit(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, SLOTS);
    struct kvbm_disk *disk = disk_open(&opts);
    uint8_t *data = disk_pages(BYTES);
    struct model m = {{0}, {false, true, true}};
    struct kvbm_disk_found found[SLOTS + 1];
    uint32_t slots[2] = {7, 9};
    uint64_t commits[2];

    (void)state;
    assert_int_equal(disk_write(disk, 7, 1, data, BYTES), 0);
    assert_int_equal(disk_write(disk, 9, 2, data, BYTES), 0);
    assert_int_equal(find(disk, 1, &m, SLOTS, found), 2);
    commits[0] = found[0].commit;
    commits[1] = found[1].commit;
    assert_int_equal(disk_write(disk, 9, 2, data, BYTES), 0);
    assert_int_equal(kvbm_disk_forget(disk, slots, commits, 2), 0);
    assert_int_equal(kvbm_disk_forget(disk, slots, commits, 2), 0);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(disk_read(disk, 7, 1, data, BYTES), -ENOENT);
        assert_int_equal(disk_read(disk, 9, 2, data, BYTES), 0);
        kvbm_disk_close(disk);
        disk = disk_open(&opts);
    }
    kvbm_disk_close(disk);
    free(data);
}

/* Batches that write one slot, and a forget behind them, go one after the other: none fails. */
static void test_one_slot(void **state)
{
    enum { N = 8 };
    struct kvbm_disk_batch batches[N];
    struct kvbm_disk_io ios[N];
    uint64_t keys[N];
    uint32_t slot = 5;
    uint8_t *data = disk_pages(BYTES);
    sem_t sem;

    (void)state;
    for (int volatile_ = 0; volatile_ < 2; volatile_++) {
        struct kvbm_disk_opts opts = disk_opts(1, SLOTS);
        struct kvbm_disk *disk;

        opts.volatile_ = volatile_;
        disk = disk_open(&opts);
        sem_init(&sem, 0, 0);
        for (size_t round = unit_rounds(20); round > 0; round--) {
            for (int i = 0; i < N; i++) {
                keys[i] = 1 + (uint64_t)i;
                ios[i] = (struct kvbm_disk_io){
                    .slot = slot, .group = 1, .key = &keys[i], .data = data, .len = BYTES};
                batches[i] = (struct kvbm_disk_batch){
                    .write = true, .ios = &ios[i], .n = 1, .done = disk_done, .arg = &sem};
                assert_int_equal(kvbm_disk_submit(disk, &batches[i]), 0);
            }
            assert_int_equal(kvbm_disk_forget(disk, &slot, NULL, 1), 0);
            for (int i = 0; i < N; i++)
                disk_await(&sem);
            for (int i = 0; i < N; i++)
                assert_int_equal(ios[i].status, 0);
        }
        sem_destroy(&sem);
        kvbm_disk_close(disk);
    }
    free(data);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, disk_setup, disk_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_find), TEST(test_other_commit),
                                       TEST(test_one_slot)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
