// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks that a blocking store reports as kept are found until their last tier evicts them: through
 * host tiers of any size, beside loads, with slow and failing tiers below. A durable store survives a
 * kill.
 */
#define CACHE_BLOCKS 256u
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "tier/kitchen.h"

#define LONG_MS 60000
#define EACH 32u /* most keys of a call */

static void with_object(struct world *w)
{
    w->opts.object = w->object;
    w->opts.object_timeout_ms = 100000; /* a call given up on a busy machine is a miss */
}

/* Store keys [first, first + n), a sequence of its own, by cache blocks [at, at + n). */
static long store(struct world *w, uint64_t first, uint32_t n, uint32_t at,
                  const struct kvbm_store_opts *opts)
{
    struct kvbm_chain chain;
    uint32_t blocks[EACH];
    uint64_t keys[EACH];

    world_keys(first, keys, n);
    chain = world_chain(keys);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = at + i;
        world_fill(w, at + i, keys[i]);
    }
    return kvbm_cache_store_with(w->cache, &chain, n, blocks, opts);
}

static long store_for(struct world *w, uint64_t first, uint32_t n, uint32_t at, uint32_t timeout_ms)
{
    const struct kvbm_store_opts opts = {.size = sizeof(opts), .timeout_ms = timeout_ms};

    return store(w, first, n, at, &opts);
}

/* Load them by the same blocks. Each that is said to have come has its bytes. */
static long load(struct world *w, uint64_t first, uint32_t n, uint32_t at, uint32_t timeout_ms)
{
    struct kvbm_chain chain;
    uint32_t blocks[EACH];
    uint64_t keys[EACH];
    long came;

    world_keys(first, keys, n);
    chain = world_chain(keys);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = at + i;
        world_fill(w, at + i, UINT64_MAX);
    }
    came = kvbm_cache_load(w->cache, &chain, n, blocks, timeout_ms);
    for (long i = 0; i < came; i++)
        assert_true(world_holds(w, blocks[i], keys[i]));
    return came;
}

/* Count keys [first, first + n) that a tier of the manager has. */
static uint32_t found(struct world *w, uint64_t first, uint32_t n)
{
    struct kvbm_registry *registry = kvbm_manager_registry(w->m);
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t key;
        uint8_t tiers;

        world_keys(first + i, &key, 1);
        assert_true(kvbm_registry_locate(registry, 0, &key, 1, &tiers) >= 0);
        count += (tiers & ~(1u << KV_TIER_DEVICE)) != 0;
    }
    return count;
}

enum below { DISK, OBJECT, BOTH };

static void begin(struct world *w, uint32_t host_blocks, enum below below, uint32_t disk_blocks)
{
    world_init(w, host_blocks);
    if (below != OBJECT)
        world_with_disk(w, disk_blocks);
    if (below != DISK)
        with_object(w);
    world_start(w);
    world_attach(w, false);
}

/* ---- 3,200 blocks through a small host tier ---- */

static void through(uint32_t host_blocks, enum below below, uint32_t n)
{
    uint32_t kept = 0;
    struct world w;

    begin(&w, host_blocks, below, n + 64);
    for (uint32_t i = 0; i < n; i += EACH)
        kept += (uint32_t)store_for(&w, 1000 * (1 + i), EACH, 0, LONG_MS);
    assert_int_equal(kept, n);
    for (uint32_t i = 0; i < n; i += EACH)
        assert_int_equal(found(&w, 1000 * (1 + i), EACH), EACH);
    for (uint32_t i = 0; i < n; i += EACH)
        assert_int_equal(load(&w, 1000 * (1 + i), EACH, 0, LONG_MS), EACH);
    /* of both, the object store may be the first to have a block, which the disk then needn't get */
    assert_true(below == BOTH || !world_stats(&w).disk.dropped);
    world_fini(&w);
}

static void test_all_are_found(void **state)
{
    static const uint32_t hosts[] = {1, 2, 7, 64, 1024};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(hosts); i++)
        through(hosts[i], DISK, hosts[i] > 32 ? 3200 : 320);
    through(16, OBJECT, 320);
    through(16, BOTH, 320);
}

/* Of a queue with places for a few blocks nothing is dropped. */
static void test_short_queue(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 64);
    world_with_disk(&w, 400);
    w.opts.max_offload = 2;
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(store_for(&w, 1000 * (1 + i), EACH, 0, LONG_MS), EACH);
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(found(&w, 1000 * (1 + i), EACH), EACH);
    world_fini(&w);
}

/* ---- beside loads ---- */

enum { PROMPTS = 8, PROMPT = 12 };

struct loader {
    struct world *w;
    uint32_t at;
    uint64_t rng;
};

static _Atomic bool enough;

static void *load_on(void *arg)
{
    struct loader *l = arg;

    while (!atomic_load(&enough))
        (void)load(l->w, 1000 * (1 + unit_below(&l->rng, PROMPTS)), PROMPT, l->at, LONG_MS);
    return NULL;
}

/* A host tier of 16 blocks, four threads that load prompts of 12: each store gets its time, and keeps
 * all. */
static void test_beside_loads(void **state)
{
    uint64_t rng = unit_seed();
    struct loader loaders[4];
    pthread_t threads[4];
    struct world w;

    (void)state;
    begin(&w, 16, DISK, 2000);
    for (uint32_t p = 0; p < PROMPTS; p++)
        assert_int_equal(store_for(&w, 1000 * (1 + p), PROMPT, 0, LONG_MS), PROMPT);
    atomic_store(&enough, false);
    for (uint32_t i = 0; i < 4; i++) {
        loaders[i] = (struct loader){&w, 32 * (1 + i), rng + 2 * i};
        assert_int_equal(pthread_create(&threads[i], NULL, load_on, &loaders[i]), 0);
    }
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(store_for(&w, 1000 * (100 + i), PROMPT, 0, LONG_MS), PROMPT);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(found(&w, 1000 * (100 + i), PROMPT), PROMPT);
    atomic_store(&enough, true);
    for (uint32_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(load(&w, 1000 * (100 + i), PROMPT, 0, LONG_MS), PROMPT);
    world_fini(&w);
}

/* ---- random calls of several threads, beside a model of what was kept ---- */

enum { ACTORS = 4, KEYS = 400 };

struct actor {
    struct world *w;
    uint64_t first, rng; /* its keys: KEYS from first on, in sequences of EACH */
    uint32_t at;
    uint32_t kept[KEYS / EACH + 1]; /* of each sequence */
};

/* Store without waiting: the blocks are promised to nobody, and push others out. */
static void store_by_pin(struct actor *a, uint64_t first, uint32_t n)
{
    struct kvbm_job job = KVBM_JOB_INIT;
    struct kvbm_chain chain;
    uint32_t blocks[EACH];
    uint64_t keys[EACH];
    int64_t id;

    world_keys(first, keys, n);
    chain = world_chain(keys);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = a->at + i;
        world_fill(a->w, a->at + i, keys[i]);
    }
    if (kvbm_manager_prepare_store(a->w->m, &chain, n, &job.pin) < 0)
        return;
    job.cache = a->w->cache;
    job.blocks = blocks;
    id = kvbm_manager_submit(a->w->m, &job);
    if (id > 0)
        assert_int_equal(kvbm_manager_wait(a->w->m, (uint64_t)id, LONG_MS, NULL), 0);
    kvbm_pin_release(job.pin);
}

static void *act(void *arg)
{
    struct actor *a = arg;

    for (size_t round = 0; round < unit_rounds(150); round++) {
        uint32_t s = (uint32_t)unit_below(&a->rng, KEYS / EACH);
        uint32_t n = 1 + (uint32_t)unit_below(&a->rng, EACH), *kept = &a->kept[s];
        uint64_t first = a->first + (uint64_t)s * EACH;
        long rc;

        switch (unit_below(&a->rng, 4)) {
        case 0:
            store_by_pin(a, first, n);
            break;
        case 1:
            rc = load(a->w, first, n, a->at, LONG_MS);
            assert_true(rc >= KV_MIN((long)n, (long)*kept));
            break;
        default:
            rc = store_for(a->w, first, n, a->at,
                           unit_below(&a->rng, 3) ? LONG_MS : (uint32_t)unit_below(&a->rng, 3));
            assert_true(rc >= KV_MIN((long)n, (long)*kept));
            *kept = KV_MAX(*kept, (uint32_t)rc);
        }
        assert_int_equal(found(a->w, first, *kept), *kept);
    }
    return NULL;
}

static void together(uint32_t host_blocks, enum below below, uint64_t *rng)
{
    struct actor *actors = calloc(ACTORS, sizeof(*actors));
    pthread_t threads[ACTORS];
    struct world w;

    assert_non_null(actors);
    begin(&w, host_blocks, below, ACTORS * KEYS + 200);
    for (uint32_t i = 0; i < ACTORS; i++) {
        actors[i] = (struct actor){.w = &w,
                                   .first = 10000 * (1 + (uint64_t)i),
                                   .rng = unit_random(rng) | 1,
                                   .at = i * EACH};
        assert_int_equal(pthread_create(&threads[i], NULL, act, &actors[i]), 0);
    }
    for (uint32_t i = 0; i < ACTORS; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < ACTORS; i++) {
        for (uint32_t s = 0; s < KEYS / EACH; s++)
            assert_true(load(&w, actors[i].first + s * EACH, EACH, 0, LONG_MS) >=
                        (long)actors[i].kept[s]);
    }
    free(actors);
    world_fini(&w);
}

static void test_model(void **state)
{
    uint64_t rng = unit_seed();

    (void)state;
    together(1 + (uint32_t)unit_below(&rng, 24), DISK, &rng);
    together(4 + (uint32_t)unit_below(&rng, 40), BOTH, &rng);
}

/* ---- durable ---- */

static const struct kvbm_store_opts durably = {
    .size = sizeof(durably), .timeout_ms = LONG_MS, .durable = true};

static void test_durable(void **state)
{
    (void)state;
    for (uint32_t host_blocks = 0; host_blocks <= 20; host_blocks += 10) {
        struct world w;
        uint64_t key;
        uint8_t tiers;

        begin(&w, host_blocks, DISK, 400);
        assert_int_equal(store_for(&w, 1000, EACH / 2, 0, LONG_MS), EACH / 2);
        assert_int_equal(store(&w, 1000, EACH, 0, &durably), EACH); /* half of them are there */
        for (uint32_t i = 0; i < EACH; i++) {
            world_keys(1000 + i, &key, 1);
            kvbm_registry_locate(kvbm_manager_registry(w.m), 0, &key, 1, &tiers);
            assert_true(tiers >> KV_TIER_DISK & 1);
        }
        world_fini(&w);
    }
}

/* A manager without a tier below keeps nothing durably. */
static void test_durable_nowhere(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 8);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(store(&w, 1000, 4, 0, &durably), -ENOTSUP);
    assert_int_equal(store_for(&w, 1000, 4, 0, LONG_MS), 4);
    world_fini(&w);
}

/* Blocks that only wait for their eviction are written at once, too. */
static void test_durable_when_evicted(void **state)
{
    uint8_t tiers;
    uint64_t key;
    struct world w;

    (void)state;
    world_init(&w, 64);
    with_object(&w);
    w.opts.object_when_evicted = true;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(store(&w, 1000, 4, 0, &durably), 4);
    world_keys(1000, &key, 1);
    kvbm_registry_locate(kvbm_manager_registry(w.m), 0, &key, 1, &tiers);
    assert_true(tiers >> KV_TIER_EXTERNAL & 1);
    world_fini(&w);
}

/* kill -9 after a durable store of 160 blocks keeps all. */
static void test_kill(void **state)
{
    enum { KEPT = 160 };
    struct world w;
    int status;
    pid_t pid;

    (void)state;
    world_init(&w, 64);
    world_with_disk(&w, 400);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        long kept = 0;

        world_start(&w);
        world_attach(&w, false);
        for (uint32_t i = 0; i < KEPT; i += EACH)
            kept += store(&w, 1000 + i, EACH, 0, &durably);
        if (kept == KEPT)
            raise(SIGKILL);
        _exit(1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < KEPT; i += EACH)
        assert_int_equal(load(&w, 1000 + i, EACH, 0, LONG_MS), EACH);
    world_fini(&w);
}

/* ---- tiers below that fail or hang ---- */

/* A store that fails keeps no block in the host tier: it is the last tier then, and evicts. */
static void test_fails(void **state)
{
    struct world w;

    (void)state;
    shaky_start(&w, 16);
    shaky->fail_puts_rc = -EIO;
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(store_for(&w, 1000 * (1 + i), 8, 0, LONG_MS), 8);
    assert_int_equal(store(&w, 90000, 4, 0, &durably), 0);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    assert_int_equal(store_for(&w, 95000, 16, 0, LONG_MS), 16); /* nothing is held any more */
    shaky->fail_puts_rc = 0;
    world_fini(&w);
}

/* One that hangs gets half of the host tier: the store's time ends, loads have room, keys can be
 * removed, and destroy ends. */
static void test_hangs(void **state)
{
    struct kvbm_remove_result removed = KVBM_REMOVE_RESULT_INIT;
    struct kvbm_mutable free_blocks[8];
    uint64_t keys[8];
    struct world w;

    (void)state;
    shaky_start(&w, 16);
    shaky->hang_puts = true;
    assert_int_equal(store_for(&w, 1000, 16, 0, 300), 8);
    assert_int_equal(found(&w, 1000, 8), 8);
    assert_int_equal(kvbm_pool_allocate(kvbm_manager_pool(w.m, KV_TIER_HOST), 8, free_blocks, NULL),
                     0);
    assert_int_equal(found(&w, 1000, 8), 8);
    assert_int_equal(
        kvbm_pool_release_mutable(kvbm_manager_pool(w.m, KV_TIER_HOST), free_blocks, 8), 0);
    world_keys(1000, keys, 8);
    (void)kvbm_manager_remove(w.m, 0, keys, 8, 100, &removed); /* no move holds the last ones */
    assert_true(removed.host > 0);
    assert_int_equal(removed.host + removed.held, 8);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    w.cache = NULL;
    assert_int_equal(kvbm_manager_destroy(w.m, 100), 0);
    w.m = NULL;
    shaky->hang_puts = false;
    wait_until(shaky->inside == 0);
    world_fini(&w);
}

struct storer {
    struct world *w;
    uint64_t first;
    uint32_t at;
    pthread_barrier_t *all_there;
};

static void *store_beside(void *arg)
{
    const struct storer *s = arg;

    pthread_barrier_wait(s->all_there);
    assert_in_range(store_for(s->w, s->first, 8, s->at, 300), 0, 8);
    return NULL;
}

/* Stores of several threads get half of the host tier together. */
static void test_hangs_beside(void **state)
{
    struct kvbm_mutable free_blocks[8];
    pthread_barrier_t all_there;
    struct storer storers[8];
    pthread_t threads[8];
    struct world w;

    (void)state;
    for (size_t round = 0; round < unit_rounds(3); round++) {
        shaky_start(&w, 16);
        shaky->hang_puts = true;
        assert_int_equal(pthread_barrier_init(&all_there, NULL, 8), 0);
        for (uint32_t i = 0; i < 8; i++) {
            storers[i] = (struct storer){&w, 1000 * (1 + (uint64_t)i), 8 * i, &all_there};
            assert_int_equal(pthread_create(&threads[i], NULL, store_beside, &storers[i]), 0);
        }
        for (uint32_t i = 0; i < 8; i++)
            pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&all_there);
        assert_int_equal(
            kvbm_pool_allocate(kvbm_manager_pool(w.m, KV_TIER_HOST), 8, free_blocks, NULL), 0);
        assert_int_equal(
            kvbm_pool_release_mutable(kvbm_manager_pool(w.m, KV_TIER_HOST), free_blocks, 8), 0);
        shaky->hang_puts = false;
        wait_until(shaky->inside == 0);
        world_fini(&w);
    }
}

/* ---- a timeout of 0 ---- */

static void test_at_once(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 16, DISK, 200);
    assert_int_equal(store_for(&w, 1000, 8, 0, 0), 8);
    assert_int_equal(load(&w, 1000, 8, 0, 0), 8);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(load(&w, 1000, 8, 0, 0), 0); /* they would have to be fetched */
    assert_int_equal(load(&w, 1000, 4, 0, LONG_MS), 4);
    assert_int_equal(load(&w, 1000, 8, 0, 0), 4);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_are_found),
        cmocka_unit_test(test_short_queue),
        cmocka_unit_test(test_beside_loads),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_durable),
        cmocka_unit_test(test_durable_nowhere),
        cmocka_unit_test(test_durable_when_evicted),
        cmocka_unit_test(test_kill),
        cmocka_unit_test(test_fails),
        cmocka_unit_test(test_hangs),
        cmocka_unit_test(test_hangs_beside),
        cmocka_unit_test(test_at_once),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
