// SPDX-License-Identifier: Apache-2.0
/*
 * Keys of no sequence: batches of them are looked up, stored and loaded with one pin and one job,
 * and a missing key is no reason to leave out those behind it. The model is a set of keys.
 */
#define CACHE_BLOCKS 320u
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "manager_scattered.h"

/* Look up until the odd keys are found. On a slow machine the object store may not answer in time:
 * such keys are MISS for a while. Even keys are never found. */
static void lookup_odd(struct world *w, const uint64_t *keys, uint32_t n)
{
    uint8_t at[N];
    bool all = false;

    while (!all) {
        lookup(w, keys, n, at);
        all = true;
        for (uint32_t i = 0; i < n; i++) {
            all &= keys[i] % 2 == 0 || at[i] != KVBM_MISS;
            assert_true(keys[i] % 2 || at[i] == KVBM_MISS);
        }
    }
}

/* Every second key was stored: these, and only these, are found and arrive. */
static void check_every_second(struct world *w)
{
    uint64_t keys[N];
    uint8_t ok[N / 8];

    for (uint32_t i = 0; i < N; i++)
        keys[i] = 1000 + i * 37 % N;
    lookup_odd(w, keys, N);
    assert_int_equal(job(w, false, keys, N, ok), N / 2);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(bit(ok, i), keys[i] % 2);
}

static void store_every_second(struct world *w)
{
    uint64_t keys[N / 2];
    uint8_t ok[N / 8];

    for (uint32_t i = 0; i < N / 2; i++)
        keys[i] = 1000 + (i * 11 % (N / 2)) * 2 + 1;
    assert_int_equal(job(w, true, keys, N / 2, ok), N / 2);
    assert_int_equal(kvbm_manager_drain(w->m, LONG_MS), 0);
}

static void test_host(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, N);
    world_start(&w);
    world_attach(&w, false);
    store_every_second(&w);
    check_every_second(&w);
    world_fini(&w);
}

/* From the disk after a restart, and without a host tier. */
static void test_disk(void **state)
{
    (void)state;
    for (uint32_t host = 0; host <= N; host += N) {
        struct world w;

        world_init(&w, host);
        w.opts.staging_blocks = N;
        world_with_disk(&w, N);
        world_start(&w);
        world_attach(&w, false);
        store_every_second(&w);
        restart(&w);
        check_every_second(&w);
        world_fini(&w);
    }
}

/* From the object store, whose keys a new manager doesn't know: more keys than it fetches at once,
 * with a miss in each batch, before a lookup has asked for them and after. */
static void test_object(void **state)
{
    uint64_t keys[N];
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    world_init(&w, N);
    with_object(&w);
    world_start(&w);
    world_attach(&w, false);
    store_every_second(&w);
    restart(&w);
    for (uint32_t i = 0; i < N; i++)
        keys[i] = 1000 + i;
    assert_int_equal(job(&w, false, keys, N, ok), N / 2);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(bit(ok, i), i % 2);
    restart(&w);
    check_every_second(&w);
    check_every_second(&w);
    world_fini(&w);
}

/* Random batches, keys twice in some, against a set; the host tier has room for half. */
static void test_random(void **state)
{
    enum { KEYS = 200 };
    uint64_t rng = unit_seed();
    bool there[KEYS] = {false};
    struct world w;

    (void)state;
    world_init(&w, KEYS / 2);
    world_with_disk(&w, 2 * KEYS);
    world_start(&w);
    world_attach(&w, false);
    for (size_t round = 0; round < unit_rounds(60); round++) {
        uint32_t n = 1 + (uint32_t)unit_below(&rng, 40);
        bool store = unit_below(&rng, 2);
        uint8_t ok[N / 8], at[N];
        uint64_t keys[N];

        for (uint32_t i = 0; i < n; i++)
            keys[i] = unit_below(&rng, KEYS);
        job(&w, store, keys, n, ok);
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
        for (uint32_t i = 0; i < n; i++) {
            if (store)
                there[keys[i]] = true;
            else
                assert_int_equal(bit(ok, i), there[keys[i]]);
        }
        lookup(&w, keys, n, at);
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(at[i] != KVBM_MISS, there[keys[i]]);
        if (unit_below(&rng, 15) == 0)
            restart(&w);
    }
    world_fini(&w);
}

/* The blocking calls, which count the keys from the first on; what is refused. */
static void test_calls(void **state)
{
    uint64_t keys[3] = {5, 3, 9}, other[2] = {3, 77}, parent = 1;
    uint32_t blocks[3] = {0, 1, 2};
    struct kvbm_chain chain = scattered(keys), two = scattered(other);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    world_init(&w, 16);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 3; i++)
        world_fill(&w, i, keys[i]);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 3, blocks, LONG_MS), 3);
    world_wipe(&w);
    assert_int_equal(kvbm_cache_load(w.cache, &two, 2, blocks, LONG_MS), 1);
    assert_true(world_holds(&w, 0, 3));
    chain.parent = &parent;
    chain.position = 1;
    assert_int_equal(kvbm_manager_lookup(w.m, &chain, 3, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 3, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 3, NULL, &pin), -EINVAL);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),   cmocka_unit_test(test_disk),  cmocka_unit_test(test_object),
        cmocka_unit_test(test_random), cmocka_unit_test(test_calls),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
