// SPDX-License-Identifier: Apache-2.0
/* Order of eviction from a tier. A prompt is useful from its beginning on, so its end is evicted
 * before its beginning, in whatever way and order its blocks came. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include "tier/kitchen.h"

static void begin(struct world *w, uint32_t host_blocks, uint32_t disk_blocks)
{
    world_init(w, host_blocks);
    if (disk_blocks) {
        w->opts.disk = w->disk;
        w->opts.disk_bytes = (uint64_t)disk_blocks * HOST_STRIDE;
        w->opts.disk_volatile = true;
    }
    world_start(w);
    world_attach(w, false);
}

static void settle(struct world *w)
{
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
}

/* Sequences of 8 blocks, a hundred keys apart. */
static void store_others(struct world *w, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(world_store(w, first + 100 * i, 8), 8);
        settle(w);
    }
}

/* How many of the keys a tier has: the first ones, and none behind a gap. */
static uint32_t prefix_in(struct world *w, enum kv_tier tier, const uint64_t *keys, uint32_t n)
{
    uint8_t tiers[CACHE_BLOCKS];
    uint32_t left = 0;

    assert_int_equal(kvbm_registry_locate(kvbm_manager_registry(w->m), 0, keys, n, tiers), 0);
    while (left < n && tiers[left] >> tier & 1)
        left++;
    for (uint32_t i = left; i < n; i++)
        assert_false(tiers[i] >> tier & 1);
    return left;
}

static uint32_t left_in(struct world *w, enum kv_tier tier, uint64_t first, uint32_t n)
{
    uint64_t keys[CACHE_BLOCKS];

    world_keys(first, keys, n);
    return prefix_in(w, tier, keys, n);
}

/* A prompt that takes ten moves, some of them at a time; then others come until some of it has
 * gone. */
static void test_host(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 256);
    assert_int_equal(world_store(&w, 1000, 40), 40);
    settle(&w);
    assert_int_equal(left_in(&w, KV_TIER_HOST, 1000, 40), 40);
    for (uint32_t i = 0; i < 7; i++) {
        store_others(&w, 10000 + 1000 * i, 1);
        assert_int_equal(left_in(&w, KV_TIER_HOST, 1000, 40),
                         i < 3 ? 40 : 40 - 8 * (i - 2)); /* 24 were free */
    }
    world_fini(&w);
}

static void test_disk(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 64);
    assert_int_equal(world_store(&w, 1000, 40), 40);
    settle(&w);
    for (uint32_t i = 0; i < 7; i++) {
        store_others(&w, 10000 + 1000 * i, 1);
        assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 40), i < 3 ? 40 : 40 - 8 * (i - 2));
    }
    world_fini(&w);
}

static void restart(struct world *w)
{
    world_stop(w);
    world_start(w);
    world_attach(w, false);
}

/* The index says when a block was written, and of what was written together, nothing. */
static void test_disk_after_a_restart(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 64);
    assert_int_equal(world_store(&w, 1000, 40), 40);
    settle(&w);
    restart(&w);
    for (uint32_t i = 0; i < 7; i++) {
        store_others(&w, 10000 + 1000 * i, 1);
        assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 40), i < 3 ? 40 : 40 - 8 * (i - 2));
    }
    world_fini(&w);
}

/* Blocks read from the disk stay there and count as used, from the prompt's beginning on. */
static void test_fetched(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 64);
    assert_int_equal(world_store(&w, 1000, 40), 40);
    store_others(&w, 5000, 3); /* the disk is full; these are the older ones then */
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 1000, 40), 40);
    settle(&w);
    store_others(&w, 10000, 3);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 5000, 8), 0);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 5200, 8), 0);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 40), 40);
    store_others(&w, 20000, 2);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 40), 24);
    assert_int_equal(left_in(&w, KV_TIER_HOST, 1000, 40), 24);
    world_fini(&w);
}

/* ---- prompts with the same beginning ---- */

/* Eight blocks that all begin with, and eight of its own. */
static void conversation(uint64_t *keys, uint64_t i)
{
    world_keys(1000, keys, 8);
    world_keys(2000 + 100 * i, keys + 8, 8);
}

/*
 * The beginning that all share is written to the disk once, with the first of them, and never used
 * there again: the host has it. It stays as long as any of those that begin with it.
 */
static void shared(bool again)
{
    uint64_t keys[16];
    struct world w;
    uint32_t gone = 0;

    begin(&w, 64, 64);
    for (uint64_t i = 0; i < 20; i++) {
        conversation(keys, i);
        (void)world_store_keys(&w, keys, 16);
        settle(&w);
        assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 8), 8);
        assert_int_equal(left_in(&w, KV_TIER_HOST, 1000, 8), 8);
        if (again && i == 6)
            restart(&w);
    }
    for (uint64_t i = 0; i < 20; i++) { /* the older ones have gone */
        conversation(keys, i);
        assert_int_equal(prefix_in(&w, KV_TIER_DISK, keys, 16), i < 13 ? 8 : 16);
        gone += prefix_in(&w, KV_TIER_HOST, keys, 16) == 8;
    }
    assert_int_equal(gone, 13);
    world_fini(&w);
}

static void test_shared(void **state)
{
    (void)state;
    shared(false);
}

static void test_shared_after_a_restart(void **state)
{
    (void)state;
    shared(true);
}

/* A conversation goes on after others have come: its beginning is as young as its end. */
static void test_goes_on(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 64);
    assert_int_equal(world_store(&w, 1000, 20), 20);
    store_others(&w, 5000, 4);
    assert_int_equal(world_store(&w, 1000, 30), 10);
    settle(&w);
    store_others(&w, 10000, 4); /* in place of the others, and of two that nobody had */
    assert_int_equal(left_in(&w, KV_TIER_DISK, 5000, 8), 0);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 5300, 8), 2);
    assert_int_equal(left_in(&w, KV_TIER_DISK, 1000, 30), 30);
    assert_int_equal(left_in(&w, KV_TIER_HOST, 1000, 30), 30);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_disk_after_a_restart),
        cmocka_unit_test(test_fetched),
        cmocka_unit_test(test_shared),
        cmocka_unit_test(test_shared_after_a_restart),
        cmocka_unit_test(test_goes_on),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
