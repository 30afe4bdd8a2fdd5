// SPDX-License-Identifier: Apache-2.0
/* Blocking stores and loads by keys. A burst larger than the host blocks waits and drops no
 * block. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"

#define N 8u

static void fill(struct world *w, uint64_t first, uint64_t *keys, uint32_t *blocks, uint32_t at)
{
    world_keys(first, keys, N);
    for (uint32_t i = 0; i < N; i++) {
        blocks[i] = at + i;
        world_fill(w, at + i, keys[i]);
    }
}

static void expect_back(struct world *w, const uint64_t *keys, const uint32_t *blocks, long want)
{
    struct kvbm_chain chain = world_chain(keys);

    world_wipe(w);
    assert_int_equal(kvbm_cache_load(w->cache, &chain, N, blocks, 30000), want);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(w, blocks[i], i < want ? keys[i] : ~UINT64_C(0)));
}

/* @host_blocks 0: staging buffers alone, fewer than there are blocks. */
static void back_and_forth(uint32_t host_blocks)
{
    struct kvbm_chain chain;
    uint32_t blocks[N];
    uint64_t keys[N];
    struct world w;

    world_init(&w, host_blocks);
    if (!host_blocks) {
        w.opts.staging_blocks = 2;
        w.opts.disk = w.disk;
        w.opts.disk_bytes = 16u * HOST_STRIDE;
    }
    world_start(&w);
    world_attach(&w, false);
    fill(&w, 100, keys, blocks, 3);
    chain = world_chain(keys);
    assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, 30000), 0); /* nobody has them */
    assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, 30000), N);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, 30000), N); /* again: no copy */
    assert_int_equal(world_stats(&w).host.dropped, 0);
    assert_int_equal(world_stats(&w).disk.dropped, 0);
    expect_back(&w, keys, blocks, N);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 0, NULL, 0), 0);
    world_fini(&w);
}

static void test_host(void **state)
{
    (void)state;
    back_and_forth(12);
}

static void test_no_host(void **state)
{
    (void)state;
    back_and_forth(0);
}

struct burst {
    struct world *w;
    uint64_t keys[N];
    uint32_t blocks[N];
    uint32_t rounds;
    long stored; /* or loaded */
};

static void *store_burst(void *arg)
{
    struct burst *b = arg;
    struct kvbm_chain chain = world_chain(b->keys);

    b->stored = kvbm_cache_store(b->w->cache, &chain, N, b->blocks, 60000);
    return NULL;
}

/* Four threads store 8 blocks each through 2 staging buffers: all 32 are on the disk afterwards. */
static void test_burst(void **state)
{
    struct burst bursts[4];
    pthread_t threads[4];
    struct world w;

    (void)state;
    world_init(&w, 0);
    w.opts.staging_blocks = 2;
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 64u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 4; i++) {
        bursts[i].w = &w;
        fill(&w, 1000 * (i + 1), bursts[i].keys, bursts[i].blocks, N * i);
    }
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, store_burst, &bursts[i]), 0);
    for (uint32_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(bursts[i].stored, N);
    }
    world_fini(&w);
}

/* Host blocks that somebody holds give no room: the status says so, when the time is over. */
static void test_no_room(void **state)
{
    struct kvbm_chain chain;
    struct kvbm_pin *pin;
    uint64_t keys[N], held[4];
    uint32_t blocks[N];
    struct world w;

    (void)state;
    world_init(&w, 4);
    world_start(&w);
    world_attach(&w, false);
    world_keys(900, held, 4);
    chain = world_chain(held);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 4);
    fill(&w, 100, keys, blocks, 0);
    chain = world_chain(keys);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, 60), 0);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 4, blocks, 30000), 4);
    world_fini(&w);
}

/* More blocks than the host tier has: they go through it to the disk, a part of them at a time. */
static void test_larger_than_host(void **state)
{
    struct kvbm_chain chain;
    uint32_t blocks[N];
    uint64_t keys[N], start;
    struct world w;

    (void)state;
    for (uint32_t disk_blocks = 0; disk_blocks <= 64; disk_blocks += 64) {
        world_init(&w, 3);
        if (disk_blocks)
            world_with_disk(&w, disk_blocks);
        world_start(&w);
        world_attach(&w, false);
        fill(&w, 100, keys, blocks, 0);
        chain = world_chain(keys);
        start = kv_now_ns();
        assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, 20000), disk_blocks ? N : 3);
        assert_true(kv_now_ns() - start < 15 * KV_NS_PER_S); /* also when the rest has no place */
        assert_int_equal(world_stats(&w).disk.dropped, 0);
        world_fini(&w);
    }
}

static void *release_soon(void *arg)
{
    usleep(100000);
    kvbm_pin_release(arg);
    return NULL;
}

/* A store that waits for room is one offer: a policy of two doesn't take a block at its first. */
static void test_one_offer(void **state)
{
    struct kvbm_chain chain;
    struct kvbm_pin *pin;
    uint64_t keys[N], held[4];
    uint32_t blocks[N];
    pthread_t thread;
    struct world w;

    (void)state;
    world_init(&w, 4);
    w.opts.host_policy = (struct kvbm_tier_policy){.policy = KVBM_POLICY_FREQUENCY, .threshold = 2};
    world_start(&w);
    world_attach(&w, false);
    world_keys(900, held, 4);
    fill(&w, 100, keys, blocks, 0);
    chain = world_chain(keys);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 1, blocks, 0), 0); /* its first offer */
    chain = world_chain(held);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 0);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 4);
    assert_int_equal(pthread_create(&thread, NULL, release_soon, pin), 0);
    chain = world_chain(keys);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 2, blocks, 60000), 1);
    pthread_join(thread, NULL);
    assert_int_equal(world_stats(&w).host.filtered, 1 + 4 + 1);
    world_fini(&w);
}

/* ---- loads wait for room ---- */

/* Four prompts of N blocks on the disk, and few buffers to load them through. */
static void on_disk(struct world *w, uint32_t host_blocks, struct burst *bursts)
{
    world_init(w, host_blocks);
    w->opts.staging_blocks = N;
    w->opts.disk = w->disk;
    w->opts.disk_bytes = 64u * HOST_STRIDE;
    world_start(w);
    world_attach(w, false);
    for (uint32_t i = 0; i < 4; i++) {
        bursts[i].w = w;
        fill(w, 1000 * (i + 1), bursts[i].keys, bursts[i].blocks, N * i);
        store_burst(&bursts[i]);
        assert_int_equal(bursts[i].stored, N);
        assert_int_equal(kvbm_manager_drain(w->m, 60000), 0);
    }
}

static void *load_burst(void *arg)
{
    struct burst *b = arg;
    struct kvbm_chain chain = world_chain(b->keys);

    for (b->stored = N; b->stored == N && b->rounds > 0; b->rounds--)
        b->stored = kvbm_cache_load(b->w->cache, &chain, N, b->blocks, 60000);
    return NULL;
}

/* As many threads load as there are prompts, and there are buffers for one of them. */
static void test_loads_wait(void **state)
{
    struct burst bursts[4];
    pthread_t threads[4];
    struct world w;

    (void)state;
    for (uint32_t host_blocks = 0; host_blocks <= N; host_blocks += N) {
        on_disk(&w, host_blocks, bursts);
        world_wipe(&w);
        for (uint32_t i = 0; i < 4; i++) {
            bursts[i].rounds = 10;
            assert_int_equal(pthread_create(&threads[i], NULL, load_burst, &bursts[i]), 0);
        }
        for (uint32_t i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(bursts[i].stored, N);
            for (uint32_t k = 0; k < N; k++)
                assert_true(world_holds(&w, bursts[i].blocks[k], bursts[i].keys[k]));
        }
        world_fini(&w);
    }
}

static _Atomic bool enough;

/* Load again and again, so that the buffers are free for a moment only. */
static void *load_on(void *arg)
{
    struct burst *b = arg;
    struct kvbm_chain chain = world_chain(b->keys);

    while (!atomic_load(&enough))
        b->stored = kvbm_cache_load(b->w->cache, &chain, N, b->blocks, 60000);
    return NULL;
}

/* Nobody has to wait long for his turn, however eager others are. */
static void test_turns(void **state)
{
    struct burst bursts[4];
    struct kvbm_chain chain;
    pthread_t threads[3];
    struct world w;

    (void)state;
    on_disk(&w, 0, bursts);
    atomic_store(&enough, false);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, load_on, &bursts[i]), 0);
    chain = world_chain(bursts[3].keys);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(kvbm_cache_load(w.cache, &chain, N, bursts[3].blocks, 20000), N);
    atomic_store(&enough, true);
    for (uint32_t i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(bursts[i].stored, N);
    }
    world_fini(&w);
}

/* Room that never comes: the deadline ends the wait, and the first block is no miss before. */
static void test_load_finds_no_room(void **state)
{
    uint64_t held[N], start;
    struct burst bursts[4];
    struct kvbm_chain chain;
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    on_disk(&w, N, bursts);
    world_keys(900, held, N);
    chain = world_chain(held);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, N, &pin), N);
    chain = world_chain(bursts[0].keys);
    start = kv_now_ns();
    assert_int_equal(kvbm_cache_load(w.cache, &chain, N, bursts[0].blocks, 60), 0);
    assert_true(kv_now_ns() - start >= 60 * KV_NS_PER_MS);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_cache_load(w.cache, &chain, N, bursts[0].blocks, 60000), N);
    world_fini(&w);
}

/* ---- prompts longer than the host tier ---- */

static void expect_states(struct world *w, const struct kvbm_chain *chain, uint8_t beginning,
                          uint8_t end)
{
    struct kvbm_pin *pin;
    uint8_t at[2 * N];

    assert_true(kvbm_manager_prepare_load(w->m, chain, 2 * N, NULL, &pin) >= 0);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    kvbm_pin_state(pin, at);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(at[i], beginning);
        assert_int_equal(at[N + i], end);
    }
    kvbm_pin_release(pin);
}

/* The end of a prompt fills the host tier: it makes room for the beginning, unless another pin holds
 * it, too. */
static void test_end_makes_room(void **state)
{
    uint64_t keys[2 * N];
    uint32_t blocks[2 * N];
    struct kvbm_chain chain = world_chain(keys), end = world_chain(keys + N);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    world_init(&w, N);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    fill(&w, 100, keys, blocks, 0);
    fill(&w, 100 + N, keys + N, blocks + N, N);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 2 * N, blocks, 60000), 2 * N);
    assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    end.parent = &keys[N - 1];
    end.position = N;
    assert_int_equal(kvbm_manager_prepare_load(w.m, &end, N, NULL, &pin), N);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    expect_states(&w, &chain, KVBM_BUSY, KVBM_READY);
    kvbm_pin_release(pin);
    expect_states(&w, &chain, KVBM_READY, KVBM_BUSY);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &end, N, NULL, &pin), N);
    kvbm_pin_wait(pin, 30000);
    kvbm_pin_release(pin); /* the end is there again, and the beginning on the disk */
    world_wipe(&w);
    assert_int_equal(kvbm_cache_load(w.cache, &chain, 2 * N, blocks, 60000), 2 * N);
    for (uint32_t i = 0; i < 2 * N; i++)
        assert_true(world_holds(&w, blocks[i], keys[i]));
    world_fini(&w);
}

static void test_refused(void **state)
{
    uint64_t key = 5;
    uint32_t block = 0;
    struct kvbm_chain chain = world_chain(&key), forgotten = {.keys = &key};
    struct world w;

    (void)state;
    world_init(&w, 4);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(kvbm_cache_store(NULL, &chain, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_store(w.cache, NULL, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_store(w.cache, &forgotten, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 1, NULL, 0), -EINVAL);
    assert_int_equal(kvbm_cache_load(NULL, &chain, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_load(w.cache, NULL, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_load(w.cache, &forgotten, 1, &block, 0), -EINVAL);
    assert_int_equal(kvbm_cache_load(w.cache, &chain, 1, NULL, 0), -EINVAL);
    world_fini(&w);
}

/* A block out of range, and a target for two keys, also for keys that no tier has. */
static void test_wrong_blocks(void **state)
{
    struct kvbm_chain chain;
    uint32_t blocks[N], right[N];
    uint64_t keys[N];
    struct kvbm_done done;
    uint8_t ok[N];
    struct world w;
    int64_t id;

    (void)state;
    world_init(&w, 4);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    fill(&w, 100, keys, right, 0);
    chain = world_chain(keys);
    for (uint32_t wrong = 0; wrong < 2; wrong++) {
        memcpy(blocks, right, sizeof(blocks));
        blocks[N - 1] = wrong ? CACHE_BLOCKS : CACHE_BLOCKS + 1000;
        assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, 30000), -EINVAL);
        assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, 30000), -EINVAL);
        blocks[N - 1] = blocks[wrong]; /* in the first part that fits, or not */
        assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, 30000), -EINVAL);
    }
    world_fill(&w, blocks[1], keys[1]);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, N, right, 30000), N);
    expect_back(&w, keys, right, N);
    blocks[N - 1] = blocks[1];
    assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, 30000), -EINVAL);
    /* a job tells it as its status, and has loaded none */
    struct kvbm_job job = {.size = sizeof(job), .cache = w.cache, .blocks = blocks, .ok = ok};

    memset(ok, 0xff, sizeof(ok));
    assert_true(kvbm_manager_prepare_load(w.m, &chain, N, NULL, &job.pin) > 0);
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, -EINVAL);
    assert_int_equal(ok[0], 0);
    kvbm_pin_release(job.pin);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_no_host),
        cmocka_unit_test(test_burst),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_larger_than_host),
        cmocka_unit_test(test_one_offer),
        cmocka_unit_test(test_loads_wait),
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_load_finds_no_room),
        cmocka_unit_test(test_end_makes_room),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_wrong_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
