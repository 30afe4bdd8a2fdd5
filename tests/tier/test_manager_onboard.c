// SPDX-License-Identifier: Apache-2.0
/* Onboarding by keys: the events of what comes back have its tokens, and an error says why nothing
 * came. */
#include "base/unit.h"
#include "kvbm_events.h"
#include "tier/kitchen.h"

#define FIRST 1000u
#define N 6u

/* ---- tokens ---- */

/* Blocks whose events had all their tokens, and the events of which tier had none. */
struct told {
    uint32_t with[KV_N_TIERS], without[KV_N_TIERS];
};

static uint32_t token(uint64_t key, uint32_t i)
{
    return (uint32_t)key * 100 + i;
}

static void take(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct told *told = arg;

    assert_int_equal(lost, 0);
    for (size_t k = 0; k < n; k++) {
        uint64_t key;

        if (events[k].type != KVBM_EVENT_STORED)
            continue;
        memcpy(&key, events[k].key, sizeof(key));
        for (uint32_t i = 0; i < events[k].n_tokens; i++)
            assert_int_equal(events[k].tokens[i], token(key, i));
        (events[k].n_tokens == PAGE ? told->with : told->without)[events[k].tier]++;
    }
}

static struct kvbm_events *events_to(struct told *told)
{
    struct kvbm_events *events;

    assert_int_equal(kvbm_events_create(NULL, &events), 0);
    assert_true(kvbm_events_add_callback(events, KVBM_EVENTS_PER_TIER, take, told) > 0);
    return events;
}

/* Onboard the keys, of which the cache's pool has the first one already. */
static void onboard_all(struct world *w, const struct kvbm_chain *chain)
{
    struct kvbm_immutable first, held[N];

    assert_int_equal(kvbm_manager_onboard(w->cache, chain, 1, 30000, &first), 1);
    assert_int_equal(kvbm_manager_onboard(w->cache, chain, N, 30000, held), N);
    kvbm_immutable_release(&first);
    for (uint32_t i = 0; i < N; i++)
        kvbm_immutable_release(&held[i]);
}

/* A manager that finds the blocks of an earlier process on the disk. @onboards: into a pool of the
 * cache, else by a load. */
static void comes_back(uint32_t host_blocks, bool onboards)
{
    uint64_t keys[N];
    uint32_t blocks[N], tokens[N * PAGE];
    struct kvbm_chain chain = world_chain(keys);
    struct told told = {{0}, {0}};
    struct world w;

    world_keys(FIRST, keys, N);
    chain.tokens = tokens;
    for (uint32_t i = 0; i < N * PAGE; i++)
        tokens[i] = token(keys[i / PAGE], i % PAGE);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = i;
    world_init(&w, host_blocks);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, FIRST, N), N);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_stop(&w);
    w.opts.events = events_to(&told);
    world_start(&w);
    world_attach(&w, onboards);
    if (onboards)
        onboard_all(&w, &chain);
    else
        assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, 30000), N);
    assert_int_equal(kvbm_events_flush(w.opts.events, 30000), 0);
    assert_int_equal(told.with[KV_TIER_HOST], host_blocks ? N : 0);
    assert_int_equal(told.with[KV_TIER_DEVICE], onboards ? N : 0);
    assert_int_equal(told.without[KV_TIER_HOST] + told.without[KV_TIER_DEVICE], 0);
    world_stop(&w);
    kvbm_events_destroy(w.opts.events);
    world_fini(&w);
}

static void test_tokens(void **state)
{
    (void)state;
    comes_back(12, false);
    comes_back(12, true);
    comes_back(0, true);
}

/* ---- why nothing came ---- */

static long onboard_one(struct world *w, uint64_t key, uint32_t timeout_ms)
{
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_immutable held;
    long n = kvbm_manager_onboard(w->cache, &chain, 1, timeout_ms, &held);

    if (n == 1)
        kvbm_immutable_release(&held);
    return n;
}

/* The disk has the block, but there is no host block for it, or another pin stores it and doesn't
 * end. */
static void test_reasons(void **state)
{
    uint64_t other[N], key = FIRST;
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    world_init(&w, N);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, true);
    assert_int_equal(world_store(&w, FIRST, 1), 1);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_keys(kvbm_manager_pool(w.m, KV_TIER_HOST), 0, &key, 1, NULL);
    assert_int_equal(onboard_one(&w, FIRST + 1, 30000), 0); /* no tier has it */
    assert_int_equal(onboard_one(&w, FIRST + 1, 0), 0);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &pin), 1);
    assert_int_equal(onboard_one(&w, FIRST, 100), -ETIMEDOUT);
    kvbm_pin_release(pin);
    world_keys(2 * FIRST, other, N);
    chain = world_chain(other);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, N, &pin), N);
    assert_int_equal(onboard_one(&w, FIRST, 30000), -EBUSY);
    assert_int_equal(onboard_one(&w, FIRST + 1, 30000), 0);
    kvbm_pin_release(pin);
    assert_int_equal(onboard_one(&w, FIRST, 30000), 1);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_reasons),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
