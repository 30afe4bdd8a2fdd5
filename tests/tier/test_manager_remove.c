// SPDX-License-Identifier: Apache-2.0
/*
 * kvbm_manager_remove: keys are gone from every tier, also for a manager that is started anew,
 * whatever records the disk tier's evictions and duplicates have left behind. Held copies stay
 * whole.
 */
#define CACHE_BLOCKS 320u
#include <pthread.h>

#include "base/core/error.h"
#include "base/core/log.h"
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
    world_with_disk(&w, N);
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
static void start(struct world *w, uint32_t host, uint32_t disk)
{
    world_init(w, host);
    w->opts.staging_blocks = N;
    world_with_disk(w, disk);
    world_start(w);
    world_attach(w, false);
}

static void test_remove_held(void **state)
{
    uint64_t keys[3] = {5, 3, 9};
    struct kvbm_chain chain = scattered(keys);
    struct kvbm_remove_result ret;
    struct kvbm_pin *pin;
    uint8_t ok[N / 8];
    struct world w;

    (void)state;
    start(&w, 16, 16);
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

/* -- threads ----------------------------------------------------------------------------------- */

enum { THREADS = 3, BUSY_KEYS = 60 };

struct busy {
    struct world *w;
    uint32_t first_block;
    uint64_t rng;
    _Atomic bool *stop; /* of the thread that removes */
};

/* Stores and loads beside others, in blocks of its own. Bytes of what was loaded are right. */
static void *store_and_load(void *arg)
{
    struct busy *b = arg;

    for (size_t round = unit_rounds(40); round > 0; round--) {
        uint32_t n = 1 + (uint32_t)unit_below(&b->rng, 16), blocks[16];
        bool store = unit_below(&b->rng, 2);
        struct kvbm_job job = KVBM_JOB_INIT;
        struct kvbm_chain chain;
        uint64_t keys[16];
        uint8_t ok[2] = {0};
        int64_t id;

        for (uint32_t i = 0; i < n; i++) {
            keys[i] = unit_below(&b->rng, BUSY_KEYS);
            blocks[i] = b->first_block + i;
            world_fill(b->w, blocks[i], store ? keys[i] : ~UINT64_C(0));
        }
        chain = scattered(keys);
        job.cache = b->w->cache;
        job.blocks = blocks;
        job.ok = ok;
        assert_true((store ? kvbm_manager_prepare_store(b->w->m, &chain, n, &job.pin)
                           : kvbm_manager_prepare_load(b->w->m, &chain, n, NULL, &job.pin)) >= 0);
        id = kvbm_manager_submit(b->w->m, &job);
        assert_true(id > 0);
        kvbm_pin_release(job.pin);
        assert_int_equal(kvbm_manager_wait(b->w->m, (uint64_t)id, LONG_MS, NULL), 0);
        for (uint32_t i = 0; i < n && !store; i++)
            assert_true(world_holds(b->w, blocks[i], bit(ok, i) ? keys[i] : ~UINT64_C(0)));
    }
    return NULL;
}

static void *remove_some(void *arg)
{
    struct busy *b = arg;

    while (!*b->stop) {
        uint64_t keys[20];

        for (int i = 0; i < 20; i++)
            keys[i] = unit_below(&b->rng, BUSY_KEYS);
        assert_int_equal(kvbm_manager_remove(b->w->m, 0, keys, 20, LONG_MS, NULL), 0);
    }
    return NULL;
}

/* Keys removed while threads store and load them: what lookups find afterwards is there whole, also
 * for a manager started anew, and a removal without others beside it leaves nothing. */
static void test_beside_others(void **state)
{
    uint64_t rng = unit_seed(), keys[BUSY_KEYS];
    struct busy busy[THREADS + 1];
    pthread_t threads[THREADS + 1];
    _Atomic bool stop = false;
    uint8_t at[N], again[N], ok[N / 8];
    struct world w;

    (void)state;
    for (uint64_t i = 0; i < BUSY_KEYS; i++)
        keys[i] = i;
    start(&w, 0, N); /* without host tier and evictions: what is listed is on the disk */
    for (uint32_t t = 0; t <= THREADS; t++) {
        busy[t] = (struct busy){
            .w = &w, .first_block = t * 16, .rng = unit_random(&rng) | 1, .stop = &stop};
        assert_int_equal(
            pthread_create(&threads[t], NULL, t < THREADS ? store_and_load : remove_some, &busy[t]),
            0);
    }
    for (uint32_t t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    stop = true;
    pthread_join(threads[THREADS], NULL);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    lookup(&w, keys, BUSY_KEYS, at);
    job(&w, false, keys, BUSY_KEYS, ok);
    for (uint32_t i = 0; i < BUSY_KEYS; i++)
        assert_int_equal(bit(ok, i), at[i] != KVBM_MISS);
    restart(&w);
    lookup(&w, keys, BUSY_KEYS, again);
    for (uint32_t i = 0; i < BUSY_KEYS; i++)
        assert_true(at[i] == KVBM_MISS || again[i] == KVBM_ON_DISK);
    assert_int_equal(remove_keys(&w, keys, BUSY_KEYS).held, 0);
    restart(&w);
    check_at(&w, keys, BUSY_KEYS, KVBM_MISS);
    world_fini(&w);
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
        cmocka_unit_test(test_beside_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
