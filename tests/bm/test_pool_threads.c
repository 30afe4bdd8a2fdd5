// SPDX-License-Identifier: Apache-2.0
/* Many threads on the pools of one registry: the same keys registered, found, dropped and evicted
 * at once. Each thread writes its mark into its blocks' bytes and checks it, which proves that no
 * two threads own one block. Also meant for the thread sanitizer. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/unit.h"
#include "bm.h"
#include "index/random.h"

#define THREADS 6
#define KEYS 24
#define BLOCKS 16
#define CHAIN 4
/* Each thread has a chain, and the first blocks of two chains live on by their duplicates. */
#define MOST_BLOCKS ((THREADS + 2) * CHAIN)

static struct world {
    struct bm bm;
    struct kvbm_pool *pools[2];
    uint64_t bytes[2][MOST_BLOCKS]; /* what the blocks hold: written by who has it mutable alone */
    _Atomic uint32_t destroyed, attached;
    uint32_t type;
    bool lets_others;        /* who holds blocks lets other threads go first */
    uint8_t somewhere[KEYS]; /* by the consolidated events */
    size_t n_consolidated;
    long rounds;
    _Atomic(const char *) wrong;
} w;

#define MUST(condition)                         \
    do {                                        \
        if (!(condition)) {                     \
            atomic_store(&w.wrong, #condition); \
            return;                             \
        }                                       \
    } while (0)

/* Chains of CHAIN keys: 1000, 1001, ... */
static void keys_of(uint32_t chain, uint64_t *ret)
{
    for (uint64_t i = 0; i < CHAIN; i++)
        ret[i] = 1000 + (uint64_t)chain * CHAIN + i;
}

static void destroyed(void *value)
{
    (void)value;
    atomic_fetch_add_explicit(&w.destroyed, 1, memory_order_relaxed);
}

static void produce(int p, const uint64_t *keys, size_t n)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_mutable blocks[CHAIN];
    struct kvbm_complete complete[CHAIN];
    struct kvbm_immutable held[CHAIN];
    int rc = kvbm_pool_allocate(w.pools[p], n, blocks, NULL);

    if (rc == -ENOSPC)
        return;
    MUST(rc == 0);
    for (size_t i = 0; i < n; i++)
        w.bytes[p][blocks[i].handle.block] = keys[i];
    MUST(kvbm_pool_complete(w.pools[p], blocks, n, &chain, complete) == 0);
    if (keys[0] % 7 == 0) {
        MUST(kvbm_pool_release_complete(w.pools[p], complete, n) == 0);
        return;
    }
    MUST(kvbm_pool_register(w.pools[p], complete, n, held) == 0);
    for (size_t i = 0; i < n; i++)
        MUST(w.bytes[p][held[i].handle.block] == keys[i]);
    if (kvbm_registry_attach(w.bm.registry, 0, &keys[0], w.type, &w) == 0)
        atomic_fetch_add_explicit(&w.attached, 1, memory_order_relaxed);
    if (w.lets_others)
        sched_yield();
    MUST(kvbm_pool_release(w.pools[p], held, n) == 0);
}

static void consume(int p, const uint64_t *keys, size_t n)
{
    struct kvbm_immutable held[CHAIN], again, clone;
    struct kvbm_weak weak;
    long found = kvbm_pool_match(w.pools[p], 0, keys, n, 0, held);

    MUST(found >= 0);
    for (long i = 0; i < found; i++)
        MUST(w.bytes[p][held[i].handle.block] == keys[i]);
    if (!found)
        return;
    MUST(kvbm_immutable_clone(&held[0], &clone) == 0);
    MUST(kvbm_immutable_downgrade(&held[0], &weak) == 0);
    MUST(kvbm_pool_release(w.pools[p], held, (size_t)found) == 0);
    MUST(w.bytes[p][clone.handle.block] == keys[0]);
    MUST(kvbm_immutable_release(&clone) == 0);
    /* perhaps the last one, just now: found again as what it was, or not at all */
    if (kvbm_weak_upgrade(&weak, &again) == 0) {
        MUST(w.bytes[p][again.handle.block] == keys[0]);
        MUST(kvbm_immutable_release(&again) == 0);
    }
}

static void meddle(struct rng *rng, int p, const uint64_t *keys, size_t n)
{
    struct kvbm_reset_result result;
    uint8_t where[CHAIN];

    switch (rng_below(rng, 6)) {
    case 0:
        MUST(kvbm_pool_touch(w.pools[p], 0, keys, n) >= 0);
        break;
    case 1:
        MUST(kvbm_pool_retain(w.pools[p], 0, keys, n, rng_below(rng, 101), 10) >= 0);
        break;
    case 2:
        MUST(kvbm_pool_reset_keys(w.pools[p], 0, keys, n, &result) == 0);
        MUST(result.reset + result.held + result.not_found == n);
        break;
    case 3:
        MUST(kvbm_registry_locate(w.bm.registry, 0, keys, n, where) == 0);
        break;
    case 4:
        MUST(kvbm_registry_check(w.bm.registry) == 0);
        break;
    default:
        if (rng_below(rng, 20) == 0)
            MUST(kvbm_pool_reset_inactive(w.pools[p]) >= 0);
    }
}

static void *run(void *arg)
{
    struct rng rng = {test_seed() + (uint64_t)(uintptr_t)arg};

    for (long i = 0; i < w.rounds && !atomic_load(&w.wrong); i++) {
        int p = (int)rng_below(&rng, 2);
        size_t n = 1 + rng_below(&rng, CHAIN);
        uint64_t keys[CHAIN];

        keys_of(rng_below(&rng, KEYS / CHAIN), keys);
        switch (rng_below(&rng, 8)) {
        case 0:
            meddle(&rng, p, keys, n);
            break;
        case 1:
        case 2:
        case 3:
            produce(p, keys, n);
            break;
        default:
            consume(p, keys, n);
        }
    }
    return NULL;
}

/* Of each key and tier: stored, removed, stored, ...; first and last where the other tier says
 * so. */
static void judge_events(void)
{
    bool there[2][KEYS] = {{false}};

    bm_told(&w.bm);
    for (size_t i = 0; i < w.bm.n_told; i++) {
        const struct kvbm_event *e = &w.bm.told[i];
        size_t key = bm_told_key(&w.bm, i) - 1000;

        assert_true(key < KEYS && (size_t)e->tier < 2);
        assert_int_equal(e->sequence, i);
        assert_int_equal(there[e->tier][key], e->type == KVBM_EVENT_REMOVED);
        there[e->tier][key] = e->type == KVBM_EVENT_STORED;
        assert_int_equal(e->first || e->last, !there[1 - e->tier][key]);
    }
    for (size_t i = 0; i < KEYS; i++)
        assert_false(there[0][i] || there[1][i]);
}

/* On the manager's thread: of each key, first seen, gone from all, first seen, ... whatever the
 * tiers. */
static void follow(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    (void)arg;
    MUST(lost == 0);
    for (size_t i = 0; i < n; i++) {
        uint64_t key;

        memcpy(&key, events[i].key, 8);
        MUST(key >= 1000 && key < 1000 + KEYS);
        MUST(events[i].type == KVBM_EVENT_STORED ? events[i].first : events[i].last);
        MUST(w.somewhere[key - 1000] == (events[i].type == KVBM_EVENT_REMOVED));
        w.somewhere[key - 1000] = events[i].type == KVBM_EVENT_STORED;
        w.n_consolidated++;
    }
}

/* When all has gone: it was told as many times that a key is somewhere as that it is nowhere. */
static void judge_consolidated(void)
{
    size_t n = 0;

    for (size_t i = 0; i < w.bm.n_told; i++)
        n += w.bm.told[i].first || w.bm.told[i].last;
    assert_int_equal(w.n_consolidated, n);
    for (size_t i = 0; i < KEYS; i++)
        assert_int_equal(w.somewhere[i], 0);
    if (w.wrong)
        fail_msg("%s", w.wrong);
}

static void play(const struct kvbm_pool_opts *device, const struct kvbm_pool_opts *host)
{
    pthread_t threads[THREADS];

    memset(&w, 0, sizeof(w));
    w.rounds = test_rounds(20000);
    bm_open(&w.bm, device);
    assert_true(kvbm_events_add_callback(w.bm.events, KVBM_EVENTS_CONSOLIDATED, follow, NULL) > 0);
    w.pools[0] = w.bm.pool;
    w.pools[1] = bm_pool(&w.bm, host);
    assert_int_equal(kvbm_attachment_type(w.bm.registry, "t", false, destroyed, &w.type), 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (w.wrong)
        fail_msg("%s", w.wrong);
    for (int p = 0; p < 2; p++) {
        struct kvbm_pool_stats stats = bm_stats(w.pools[p]);

        assert_int_equal(stats.inflight_mutable + stats.inflight_immutable, 0);
        assert_int_equal(stats.stale_handles, 0);
        assert_true(stats.evictions > 0);
        assert_int_equal(kvbm_pool_reset(w.pools[p]), 0);
    }
    assert_true(w.attached > 0);
    assert_int_equal(w.attached, w.destroyed);
    judge_events();
    judge_consolidated();
    assert_int_equal(kvbm_pool_destroy(w.pools[1]), 0);
    bm_close(&w.bm);
}

static void test_lru_lfu(void **state)
{
    (void)state;
    play(&(struct kvbm_pool_opts){.n_blocks = BLOCKS},
         &(struct kvbm_pool_opts){
             .tier = KV_TIER_HOST, .n_blocks = BLOCKS, .eviction = KVBM_EVICT_LFU});
}

static void test_lineage(void **state)
{
    (void)state;
    play(&(struct kvbm_pool_opts){.n_blocks = BLOCKS, .eviction = KVBM_EVICT_LINEAGE},
         &(struct kvbm_pool_opts){.tier = KV_TIER_HOST,
                                  .n_blocks = BLOCKS,
                                  .eviction = KVBM_EVICT_LINEAGE,
                                  .reject_duplicates = true});
}

/*
 * All at the same moment: each thread has a chain of the same keys ready, registers it, and drops
 * it while others look for it. However they meet, a key is stored once and removed once.
 */
static struct {
    pthread_barrier_t barrier;
    uint32_t primary[THREADS][CHAIN];
    bool reject;
} at_once;

static void register_at_once(size_t who, const uint64_t *keys)
{
    struct kvbm_complete complete[CHAIN];
    struct kvbm_immutable held[CHAIN], found[CHAIN];
    struct kvbm_block_info info = {.size = sizeof(info)};
    long n;

    MUST(bm_complete_at(w.pools[0], 0, NULL, 0, keys, CHAIN, complete) == 0);
    pthread_barrier_wait(&at_once.barrier);
    MUST(kvbm_pool_register(w.pools[0], complete, CHAIN, held) == 0);
    for (size_t i = 0; i < CHAIN; i++) {
        MUST(kvbm_immutable_info(&held[i], &info) == 0);
        MUST(!at_once.reject || !info.duplicate);
        at_once.primary[who][i] = info.primary;
    }
    pthread_barrier_wait(&at_once.barrier);
    MUST(kvbm_pool_release(w.pools[0], held, CHAIN) == 0);
    n = kvbm_pool_match(w.pools[0], 0, keys, CHAIN, 0, found); /* others drop theirs meanwhile */
    MUST(n == CHAIN);
    for (size_t i = 0; i < CHAIN; i++)
        MUST(found[i].handle.block == at_once.primary[0][i]);
    MUST(kvbm_pool_release(w.pools[0], found, CHAIN) == 0);
}

static void *at_once_thread(void *arg)
{
    size_t who = (size_t)(uintptr_t)arg;

    for (long i = 0; i < w.rounds; i++) {
        uint64_t keys[CHAIN];

        keys_of((uint32_t)(i % (KEYS / CHAIN)), keys);
        register_at_once(who, keys);
        if (w.wrong)
            abort(); /* the others wait for this one */
        pthread_barrier_wait(&at_once.barrier);
        if (who == 0 && kvbm_pool_reset(w.pools[0]) < 0)
            abort();
        pthread_barrier_wait(&at_once.barrier);
    }
    return NULL;
}

static void all_at_once(bool reject)
{
    struct kvbm_pool_opts opts = {.n_blocks = THREADS * CHAIN, .reject_duplicates = reject};
    pthread_t threads[THREADS];
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    memset(&w, 0, sizeof(w));
    w.rounds = test_rounds(3000);
    at_once.reject = reject;
    bm_open(&w.bm, &opts);
    w.pools[0] = w.bm.pool;
    pthread_barrier_init(&at_once.barrier, NULL, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, at_once_thread, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&at_once.barrier);
    stats = bm_stats(w.pools[0]);
    assert_int_equal(stats.registrations, w.rounds * CHAIN);
    assert_int_equal(stats.registration_dedup, w.rounds * CHAIN * (THREADS - 1));
    assert_int_equal(stats.duplicate_blocks, reject ? 0 : w.rounds * CHAIN * (THREADS - 1));
    judge_events();
    assert_int_equal(w.bm.n_told, 2 * w.rounds * CHAIN);
    bm_close(&w.bm);
}

static void test_all_at_once(void **state)
{
    (void)state;
    all_at_once(false);
    all_at_once(true);
}

/*
 * Blocks that are forgotten at their last release: each drop may be the last one while others look
 * the key up or register it again. Whoever comes too late finds nothing and stores it anew, behind
 * the removal.
 */
static void *drop_last(void *arg)
{
    struct rng rng = {test_seed() + (uint64_t)(uintptr_t)arg};

    for (long i = 0; i < w.rounds && !atomic_load(&w.wrong); i++) {
        size_t n = 1 + rng_below(&rng, CHAIN);
        uint64_t keys[CHAIN];

        keys_of(rng_below(&rng, 2), keys);
        if (rng_below(&rng, 2))
            produce(0, keys, n);
        else
            consume(0, keys, n);
    }
    return NULL;
}

static void last_reference(bool reject)
{
    struct kvbm_pool_opts opts = {
        .n_blocks = MOST_BLOCKS, .reset_on_release = true, .reject_duplicates = reject};
    pthread_t threads[THREADS];
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    memset(&w, 0, sizeof(w));
    w.rounds = test_rounds(20000);
    w.lets_others = true;
    bm_open(&w.bm, &opts);
    assert_true(kvbm_events_add_callback(w.bm.events, KVBM_EVENTS_CONSOLIDATED, follow, NULL) > 0);
    w.pools[0] = w.bm.pool;
    assert_int_equal(kvbm_attachment_type(w.bm.registry, "t", false, destroyed, &w.type), 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, drop_last, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (w.wrong)
        fail_msg("%s", w.wrong);
    stats = bm_stats(w.bm.pool);
    assert_int_equal(stats.reset_pool_size, opts.n_blocks); /* nothing stays behind */
    assert_int_equal(stats.evictions + stats.allocation_failures + stats.stale_handles, 0);
    judge_events();
    judge_consolidated();
    assert_int_equal(w.bm.n_told, 2 * stats.registrations);
    assert_true(stats.registrations > 0 && stats.registrations < stats.stagings);
    assert_int_equal(w.attached, w.destroyed);
    bm_close(&w.bm);
}

static void test_last_reference(void **state)
{
    (void)state;
    last_reference(false);
    last_reference(true);
}

/* Pools come and go beside others that work: the entries move. */
static void *come_and_go(void *arg)
{
    for (long i = 0; i < 50 && !atomic_load(&w.wrong); i++) {
        struct kvbm_pool_opts opts = {.size = sizeof(opts),
                                      .tier = (enum kv_tier)(uintptr_t)arg,
                                      .n_blocks = 1 + (uint32_t)(i % 10) * 200,
                                      .block_size = BM_BLOCK,
                                      .eviction = (enum kvbm_eviction)(i % 3)};
        struct kvbm_pool *pool;

        if (kvbm_pool_create(w.bm.registry, &opts, &pool) < 0 || kvbm_pool_destroy(pool) < 0)
            atomic_store(&w.wrong, "a pool didn't come or go");
    }
    return NULL;
}

static void test_pools_come_and_go(void **state)
{
    pthread_t threads[4];
    (void)state;

    memset(&w, 0, sizeof(w));
    w.rounds = test_rounds(4000);
    bm_open(&w.bm, &(struct kvbm_pool_opts){.n_blocks = BLOCKS, .eviction = KVBM_EVICT_LINEAGE});
    w.pools[0] = w.bm.pool;
    w.pools[1] = bm_pool(&w.bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST, .n_blocks = BLOCKS});
    assert_int_equal(kvbm_attachment_type(w.bm.registry, "t", false, destroyed, &w.type), 0);
    for (uintptr_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, i < 2 ? run : come_and_go, (void *)i),
                         0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    if (w.wrong)
        fail_msg("%s", w.wrong);
    assert_int_equal(kvbm_registry_check(w.bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(w.pools[1]), 0);
    bm_close(&w.bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru_lfu),           cmocka_unit_test(test_lineage),
        cmocka_unit_test(test_all_at_once),       cmocka_unit_test(test_last_reference),
        cmocka_unit_test(test_pools_come_and_go),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
