// SPDX-License-Identifier: Apache-2.0
/*
 * Several threads store, load, pin and cancel the same chains through small tiers, so that everything is
 * evicted and fetched all the time. Whatever is said to be there has its bytes. Meant for thread sanitizer
 * as much as for itself.
 */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include <pthread.h>

#include "index/random.h"
#include "manager_world.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_and_disk),
        cmocka_unit_test(test_all),
        cmocka_unit_test(test_bypass),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
