// SPDX-License-Identifier: Apache-2.0
/*
 * kvbm_manager_remove: keys are gone from every tier, also for a manager that is started anew,
 * whatever records the disk tier's evictions and duplicates have left behind. Held copies stay
 * whole.
 */
#define CACHE_BLOCKS 320u
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include "base/error.h"
#include "base/log.h"
#include "base/unit.h"
#include "manager_scattered.h"

/* Removed from every tier, also for a manager that is started anew; the others stay. */
static void test_remove(void **state)
{
    uint64_t keys[40];
    uint8_t ok[N / 8], at[40];
    struct world w;

    (void)state;
    world_init(&w, N);
    with_disk(&w, N);
    with_object(&w);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 40; i++)
        keys[i] = 1 + i * 7919;
    assert_int_equal(job(&w, true, keys, 40, ok), 40);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    for (int again = 0; again < 2; again++) {
        struct kvbm_remove_result ret = remove_keys(&w, keys, 20);

        assert_int_equal(ret.host, again ? 0 : 20);
        assert_int_equal(ret.disk, again ? 0 : 20);
        assert_int_equal(ret.object, again ? 0 : 20);
        assert_int_equal(ret.held, 0);
    }
    for (int started = 0; started < 2; started++) {
        lookup(&w, keys, 40, at);
        for (uint32_t i = 0; i < 40; i++)
            assert_int_equal(at[i] != KVBM_MISS, i >= 20);
        assert_int_equal(job(&w, false, keys, 40, ok), 20);
        if (!started)
            restart(&w);
    }
    assert_int_equal(job(&w, true, keys, 20, ok), 20); /* stored again like new ones */
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    restart(&w);
    assert_int_equal(job(&w, false, keys, 40, ok), 40);
    world_fini(&w);
}

/* A pin keeps its copies, and the call says so. */
static void test_remove_held(void **state)
{
    uint64_t keys[3] = {5, 3, 9};
    struct kvbm_chain chain = scattered(keys);
    struct kvbm_remove_result ret;
    struct kvbm_pin *pin;
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    world_init(&w, 16);
    with_disk(&w, 16);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(job(&w, true, keys, 3, ok), 3);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 1, NULL, &pin), 1);
    ret = remove_keys(&w, keys, 3);
    assert_int_equal(ret.host, 2);
    assert_int_equal(ret.disk, 3);
    assert_int_equal(ret.held, 1);
    kvbm_pin_release(pin);
    assert_int_equal(remove_keys(&w, keys, 3).host, 1);
    assert_int_equal(job(&w, false, keys, 3, ok), 0);
    assert_int_equal(kvbm_manager_remove(w.m, 99, keys, 3, 0, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_remove(w.m, 0, NULL, 3, 0, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_remove(w.m, 0, NULL, 0, 0, NULL), 0);
    world_fini(&w);
}

static void check_at(struct world *w, const uint64_t *keys, uint32_t n, enum kvbm_where expected)
{
    uint8_t at[N];

    lookup(w, keys, n, at);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(at[i], expected);
}

static void start(struct world *w, uint32_t host, uint32_t disk)
{
    world_init(w, host);
    w->opts.staging_blocks = N;
    with_disk(w, disk);
    world_start(w);
    world_attach(w, false);
}

/* Keys twice in a store without a host tier take two slots of the disk: both are forgotten. */
static void test_duplicates_on_disk(void **state)
{
    uint64_t keys[3] = {5, 5, 9};
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    start(&w, 0, N);
    job(&w, true, keys, 3, ok);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    assert_int_equal(remove_keys(&w, keys, 1).disk, 1);
    restart(&w);
    check_at(&w, keys, 2, KVBM_MISS);
    check_at(&w, keys + 2, 1, KVBM_ON_DISK);
    world_fini(&w);
}

/* Blocks that were evicted for a write that didn't come, or reset, have records still. */
static void test_evicted(void **state)
{
    uint64_t keys[4] = {5, 6, 9, 10};
    struct kvbm_mutable some[3] = {0};
    struct kvbm_pool *disk;
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    for (int reset = 0; reset < 2; reset++) {
        start(&w, 16, 4);
        disk = kvbm_manager_pool(w.m, KV_TIER_DISK);
        assert_int_equal(job(&w, true, keys, 3, ok), 3);
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
        assert_int_equal(job(&w, true, keys + 3, 1, ok), 1);
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
        if (reset) {
            assert_int_equal(kvbm_pool_reset_keys(disk, 0, keys, 3, NULL), 0);
        } else {
            assert_int_equal(kvbm_pool_allocate(disk, 3, some, NULL), 0);
            assert_int_equal(kvbm_pool_release_mutable(disk, some, 3), 0);
        }
        assert_int_equal(remove_keys(&w, keys, 3).disk, 0);
        restart(&w);
        check_at(&w, keys, 3, KVBM_MISS);
        check_at(&w, keys + 3, 1, KVBM_ON_DISK);
        world_fini(&w);
    }
}

/* Random stores and loads, with more keys than the disk has slots; then all keys are removed, and a
 * manager started anew finds none. */
static void random_use(uint64_t *rng, uint32_t host)
{
    enum { KEYS = 60, SLOTS = 50 };
    uint64_t keys[KEYS];
    uint8_t ok[N / 8];
    struct world w;

    start(&w, host, SLOTS);
    for (size_t round = 0; round < unit_rounds(60); round++) {
        uint32_t n = 1 + (uint32_t)unit_below(rng, 20);

        for (uint32_t i = 0; i < n; i++)
            keys[i] = unit_below(rng, KEYS);
        job(&w, unit_below(rng, 3) > 0, keys, n, ok);
    }
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    for (uint32_t i = 0; i < KEYS; i++)
        keys[i] = i;
    assert_int_equal(remove_keys(&w, keys, KEYS).held, 0);
    check_at(&w, keys, KEYS, KVBM_MISS);
    restart(&w);
    check_at(&w, keys, KEYS, KVBM_MISS);
    world_fini(&w);
}

static void test_random_use(void **state)
{
    uint64_t rng = unit_seed();

    (void)state;
    for (int i = 0; i < 4; i++) {
        random_use(&rng, 40);
        random_use(&rng, 0);
    }
}

/* Held blocks of the disk keep their records: they can be read, and survive a restart. */
static void test_held_on_disk(void **state)
{
    uint64_t keys[3] = {5, 3, 9};
    struct kvbm_immutable held[3];
    struct kvbm_remove_result ret;
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    start(&w, 16, 16);
    assert_int_equal(job(&w, true, keys, 3, ok), 3);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    assert_int_equal(
        kvbm_pool_match_scattered(kvbm_manager_pool(w.m, KV_TIER_DISK), 0, keys, 3, 0, held), 3);
    ret = remove_keys(&w, keys, 3);
    assert_int_equal(ret.host, 3);
    assert_int_equal(ret.disk, 0);
    assert_int_equal(ret.held, 3);
    check_at(&w, keys, 3, KVBM_ON_DISK);
    assert_int_equal(job(&w, false, keys, 3, ok), 3);
    for (int i = 0; i < 3; i++)
        kvbm_immutable_release(&held[i]);
    restart(&w);
    check_at(&w, keys, 3, KVBM_ON_DISK);
    assert_int_equal(remove_keys(&w, keys, 3).disk, 3);
    restart(&w);
    check_at(&w, keys, 3, KVBM_MISS);
    world_fini(&w);
}

/* One key several times in a call is one key. */
static void test_key_twice(void **state)
{
    uint64_t keys[5] = {5, 3, 9, 5, 5};
    struct kvbm_remove_result ret;
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    start(&w, 16, 16);
    assert_int_equal(job(&w, true, keys, 3, ok), 3);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    ret = remove_keys(&w, keys, 5);
    assert_int_equal(ret.host, 3);
    assert_int_equal(ret.disk, 3);
    assert_int_equal(ret.held, 0);
    check_at(&w, keys, 3, KVBM_MISS);
    restart(&w);
    check_at(&w, keys, 3, KVBM_MISS);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_remove),
        cmocka_unit_test(test_remove_held),
        cmocka_unit_test(test_duplicates_on_disk),
        cmocka_unit_test(test_evicted),
        cmocka_unit_test(test_random_use),
        cmocka_unit_test(test_held_on_disk),
        cmocka_unit_test(test_key_twice),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
