// SPDX-License-Identifier: Apache-2.0
/* Several threads store, load, pin and cancel the same chains through small tiers, so that blocks
 * are evicted and fetched all the time. Blocks reported present have their bytes. Also meant for
 * the thread sanitizer. Then producers store new sequences while consumers load earlier ones,
 * several loads at a time, and both evict each other's blocks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/core/xxh.h"
#include "base/unit.h"
#include "index/random.h"
#include "tier/kitchen.h"

#define THREADS 4u
#define CHAINS 6u
#define LENGTH 12u

struct worker {
    struct world *world; /* shared */
    struct rng random;
    uint32_t base; /* its blocks of the cache: [base, base + LENGTH) */
    uint64_t loaded, wrong;
};

static int64_t begin(struct worker *worker, uint64_t first, uint32_t n, bool store, uint8_t *ok)
{
    struct world *w = worker->world;
    uint32_t blocks[LENGTH];
    uint64_t keys[LENGTH];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks, .ok = ok};
    int64_t id;
    long rc;

    world_keys(first, keys, n);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = worker->base + i;
        world_fill(w, blocks[i], store ? keys[i] : 0);
    }
    rc = store ? kvbm_manager_prepare_store(w->m, &chain, n, &job.pin)
               : kvbm_manager_prepare_load(w->m, &chain, n, NULL, &job.pin);
    assert_true(rc >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

static void step(struct worker *worker)
{
    uint64_t first = (rng_below(&worker->random, CHAINS) + 1) * UINT64_C(1000);
    uint32_t n = 1 + rng_below(&worker->random, LENGTH), what = rng_below(&worker->random, 8);
    bool store = what < 3;
    struct kvbm_done done;
    uint8_t ok[(LENGTH + 7) / 8] = {0};
    int64_t id = begin(worker, first, n, store, ok);

    if (what == 7)
        kvbm_manager_cancel(worker->world->m, (uint64_t)id);
    assert_int_equal(kvbm_manager_wait(worker->world->m, (uint64_t)id, 60000, &done), 0);
    for (uint32_t i = 0; !store && i < n; i++) {
        bool there = ok[i / 8] >> (i % 8) & 1;

        worker->loaded += there;
        worker->wrong += there && !world_holds(worker->world, worker->base + i, first + i);
    }
}

static void *work(void *arg)
{
    struct worker *worker = arg;

    for (long i = test_rounds(600); i > 0; i--)
        step(worker);
    return NULL;
}

static void run(struct world *w)
{
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    uint64_t loaded = 0;

    world_start(w);
    world_attach(w, false);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.world = w, .random = {test_seed() + i}, .base = i * LENGTH};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].wrong, 0);
        loaded += workers[i].loaded;
    }
    assert_int_equal(kvbm_manager_drain(w->m, 60000), 0);
    if (w->opts
            .host_bytes) /* else a short run may find nothing: blocks are there once they are on the disk */
        assert_true(loaded > 0);
    assert_int_equal(world_store(w, 90000, 4), 4); /* and it works after all that */
    assert_int_equal(kvbm_manager_drain(w->m, 60000), 0);
    assert_int_equal(world_load(w, 90000, 4), 4);
    world_fini(w);
}

static void test_host_and_disk(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 20);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = (uint64_t)40 * HOST_STRIDE;
    run(&w);
}

static void test_all(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 20);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = (uint64_t)30 * HOST_STRIDE;
    w.opts.disk_volatile = true;
    w.opts.object = w.object;
    run(&w);
}

static void test_bypass(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 0);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = (uint64_t)40 * HOST_STRIDE;
    run(&w);
}

/* ---- producers and consumers ---- */

#define PRODUCERS 3u
#define CONSUMERS 3u
#define IN_FLIGHT 4u /* loads of a consumer */
#define PART 4u      /* blocks of a job */
#define RECENT 40u   /* sequences that consumers ask for */

struct market {
    struct world w;
    _Atomic uint64_t produced, to_do, loaded, wrong, lost_jobs;
    _Atomic uint64_t *sums; /* of block i of sequence s: at s * PART + i */
};

struct trader {
    struct market *market;
    struct rng random;
    uint32_t base; /* its blocks of the cache */
    pthread_t thread;
};

static uint64_t sum_of(const struct world *w, uint32_t block)
{
    struct kvbm_view view;

    assert_int_equal(kvbm_layout_block(w->layout, block, &view), 0);
    return kv_xxh64((const void *)(uintptr_t)view.addr, // NOLINT(performance-no-int-to-ptr)
                    BLOCK_BYTES, 1);
}

static int64_t trade(struct trader *trader, uint64_t sequence, uint32_t base, bool store,
                     uint8_t *ok)
{
    struct market *market = trader->market;
    uint64_t keys[PART];
    uint32_t blocks[PART];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {
        .size = sizeof(job), .cache = market->w.cache, .blocks = blocks, .ok = ok};
    int64_t id;
    long rc;

    world_keys(sequence * 1000, keys, PART);
    for (uint32_t i = 0; i < PART; i++) {
        blocks[i] = base + i;
        world_fill(&market->w, blocks[i], store ? keys[i] : 0);
        if (store)
            atomic_store(&market->sums[sequence * PART + i], sum_of(&market->w, blocks[i]));
    }
    rc = store ? kvbm_manager_prepare_store(market->w.m, &chain, PART, &job.pin)
               : kvbm_manager_prepare_load(market->w.m, &chain, PART, NULL, &job.pin);
    assert_true(rc >= 0);
    id = kvbm_manager_submit(market->w.m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

static void *produce(void *arg)
{
    struct trader *trader = arg;
    struct market *market = trader->market;
    struct kvbm_done done;
    uint64_t sequence;

    while ((sequence = atomic_fetch_add(&market->produced, 1)) < market->to_do) {
        int64_t id = trade(trader, sequence + 1, trader->base, true, NULL);

        assert_int_equal(kvbm_manager_wait(market->w.m, (uint64_t)id, 60000, &done), 0);
        market->lost_jobs += done.status != 0 && done.status != -ENOENT;
        if (sequence % 4 == 0) /* or little would ever get to the disk before it is evicted */
            kvbm_manager_drain(market->w.m, 20);
    }
    return NULL;
}

/* The bytes by the rule they were made by, and by the checksum that the producer took before. */
static void take(struct trader *trader, uint64_t sequence, uint32_t base, uint8_t ok)
{
    struct market *market = trader->market;

    for (uint32_t i = 0; i < PART; i++) {
        if (!(ok >> i & 1))
            continue;
        market->loaded++;
        market->wrong += !world_holds(&market->w, base + i, sequence * 1000 + i);
        market->wrong += market->sums[sequence * PART + i] != sum_of(&market->w, base + i);
    }
}

static void *consume(void *arg)
{
    struct trader *trader = arg;
    struct market *market = trader->market;
    uint64_t sequences[IN_FLIGHT], now;
    int64_t ids[IN_FLIGHT];
    uint8_t ok[IN_FLIGHT];
    struct kvbm_done done;

    while ((now = atomic_load(&market->produced)) < market->to_do) {
        for (uint32_t k = 0; k < IN_FLIGHT; k++) {
            uint64_t ago = rng_below(&trader->random, RECENT);

            ok[k] = 0;
            sequences[k] = now > ago ? now - ago : 1;
            ids[k] = trade(trader, sequences[k], trader->base + k * PART, false, &ok[k]);
        }
        for (uint32_t k = 0; k < IN_FLIGHT; k++) {
            assert_int_equal(kvbm_manager_wait(market->w.m, (uint64_t)ids[k], 60000, &done), 0);
            take(trader, sequences[k], trader->base + k * PART, ok[k]);
        }
    }
    return NULL;
}

static void test_producers_and_consumers(void **state)
{
    static struct market market;
    struct trader traders[PRODUCERS + CONSUMERS];
    struct kvbm_manager_stats stats;

    (void)state;
    memset(&market, 0, sizeof(market));
    world_init(&market.w, 64);
    market.w.opts.disk = market.w.disk;
    market.w.opts.disk_bytes = (uint64_t)100 * HOST_STRIDE; /* less than consumers ask for */
    market.w.opts.disk_volatile = true;
    world_start(&market.w);
    world_attach(&market.w, false);
    market.to_do = (uint64_t)test_rounds(3000);
    market.sums = calloc((market.to_do + 1) * PART, sizeof(*market.sums));
    assert_non_null(market.sums);
    for (uint32_t i = 0; i < PRODUCERS + CONSUMERS; i++) {
        traders[i] = (struct trader){
            .market = &market,
            .random = {test_seed() + i},
            .base = i < PRODUCERS ? i * PART : (PRODUCERS + (i - PRODUCERS) * IN_FLIGHT) * PART};
        assert_int_equal(pthread_create(&traders[i].thread, NULL, i < PRODUCERS ? produce : consume,
                                        &traders[i]),
                         0);
    }
    for (uint32_t i = 0; i < PRODUCERS + CONSUMERS; i++)
        pthread_join(traders[i].thread, NULL);
    assert_int_equal(kvbm_manager_drain(market.w.m, 60000), 0);
    stats = world_stats(&market.w);
    print_message("%d loaded, %d of them from the disk\n", (int)market.loaded,
                  (int)stats.disk.blocks_out);
    assert_int_equal(market.wrong, 0);
    assert_int_equal(market.lost_jobs, 0);
    assert_true(market.loaded > 0);
    assert_int_equal(stats.jobs_now, 0);
    assert_int_equal(stats.pins_now, 0);
    free((void *)market.sums);
    world_fini(&market.w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_and_disk),
        cmocka_unit_test(test_all),
        cmocka_unit_test(test_bypass),
        cmocka_unit_test(test_producers_and_consumers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
