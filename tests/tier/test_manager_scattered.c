// SPDX-License-Identifier: Apache-2.0
/*
 * Keys of no sequence: batches of them are looked up, stored and loaded with one pin and one job,
 * and a missing key is no reason to leave out those behind it. The model is a set of keys.
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
#include "manager_world.h"

enum { N = CACHE_BLOCKS, LONG_MS = 100000 };

static struct kvbm_chain scattered(const uint64_t *keys)
{
    struct kvbm_chain chain = KVBM_CHAIN_INIT;

    chain.keys = keys;
    chain.scattered = true;
    return chain;
}

/* One pin and one job for all of them. Returns the number copied; @ok tells which. */
static uint32_t job(struct world *w, bool store, const uint64_t *keys, uint32_t n, uint8_t *ok)
{
    struct kvbm_chain chain = scattered(keys);
    struct kvbm_job job = KVBM_JOB_INIT;
    struct kvbm_done done;
    uint32_t blocks[N];
    int64_t id;

    memset(ok, 0, N / 8);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = (i * 7) % N; /* neither are the blocks in order */
        world_fill(w, blocks[i], store ? keys[i] : ~UINT64_C(0));
    }
    job.cache = w->cache;
    job.blocks = blocks;
    job.ok = ok;
    if (store)
        assert_true(kvbm_manager_prepare_store(w->m, &chain, n, &job.pin) >= 0);
    else
        assert_true(kvbm_manager_prepare_load(w->m, &chain, n, NULL, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, LONG_MS, &done), 0);
    for (uint32_t i = 0; i < n && !store; i++)
        assert_true(world_holds(w, blocks[i], ok[i / 8] >> (i % 8) & 1 ? keys[i] : ~UINT64_C(0)));
    return done.n_ok;
}

static bool bit(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> (i % 8) & 1;
}

static void with_disk(struct world *w, uint32_t blocks)
{
    w->opts.disk = w->disk;
    w->opts.disk_bytes = (uint64_t)blocks * HOST_STRIDE;
}

static void with_object(struct world *w)
{
    w->opts.object = w->object;
    w->opts.object_timeout_ms = LONG_MS;
}

/* Look up until no key is PENDING. */
static void lookup(struct world *w, const uint64_t *keys, uint32_t n, uint8_t *at)
{
    struct kvbm_chain chain = scattered(keys);
    bool pending = true;

    while (pending) {
        pending = false;
        assert_true(kvbm_manager_lookup(w->m, &chain, n, at) >= 0);
        for (uint32_t i = 0; i < n; i++)
            pending |= at[i] == KVBM_PENDING;
    }
}

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

static void restart(struct world *w)
{
    world_stop(w);
    world_start(w);
    world_attach(w, false);
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
        with_disk(&w, N);
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
    with_disk(&w, 2 * KEYS);
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

static struct kvbm_remove_result remove_keys(struct world *w, const uint64_t *keys, uint32_t n)
{
    struct kvbm_remove_result ret = KVBM_REMOVE_RESULT_INIT;

    assert_int_equal(kvbm_manager_remove(w->m, 0, keys, n, LONG_MS, &ret), 0);
    return ret;
}

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_object),      cmocka_unit_test(test_random),
        cmocka_unit_test(test_calls),       cmocka_unit_test(test_remove),
        cmocka_unit_test(test_remove_held),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
