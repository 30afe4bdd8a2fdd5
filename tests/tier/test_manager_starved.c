// SPDX-License-Identifier: Apache-2.0
/* A manager whose callers run out of memory at every possible moment: an error, or fewer blocks
 * than requested, never wrong bytes; and it works again afterwards. */
#include "base/unit.h"
#include "starve.h"
#include "tier/kitchen.h"

#define N 4u

static void three_tiers(struct world *w)
{
    world_init(w, 12);
    w->opts.disk = w->disk;
    w->opts.disk_bytes = 40u * HOST_STRIDE;
    w->opts.disk_volatile = true;
    w->opts.object = w->object;
}

/* The same without memory at some moment, and at last with all of it. */
static void test_create(void **state)
{
    struct world w;

    (void)state;
    three_tiers(&w);
    w.opts.object_when_evicted = true;
    w.opts.disk_policy.policy = w.opts.object_policy.policy = KVBM_POLICY_FREQUENCY;
    for (long n = 1;; n++) {
        int rc;

        starve_at(n);
        rc = kvbm_manager_create(&w.opts, &w.m);
        if (!starved())
            break;
        starve_at(0);
        assert_true(rc == -ENOMEM || rc == 0); /* it can do without some */
        if (rc == 0)
            assert_int_equal(kvbm_manager_destroy(w.m, 30000), 0);
        w.m = NULL;
        assert_true(n < 1000);
    }
    starve_at(0);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, N), N);
    assert_int_equal(world_load(&w, 100, N), N);
    world_fini(&w);
}

/* ---- calls ---- */

struct call {
    struct world w;
    uint64_t keys[N];
    struct kvbm_chain chain;
    uint32_t blocks[N];
    uint8_t ok;
};

static void call_init(struct call *c, uint64_t first)
{
    c->chain = world_chain(c->keys);
    world_keys(first, c->keys, N);
    for (uint32_t i = 0; i < N; i++)
        c->blocks[i] = i;
    c->ok = 0;
}

/* Returns false once there was memory enough for all of it. */
static bool store_without(struct call *c, uint64_t first, long n)
{
    struct kvbm_job job = {.size = sizeof(job), .cache = c->w.cache, .blocks = c->blocks};
    struct kvbm_done done;
    int64_t id = -1;
    long rc;
    bool hungry;

    call_init(c, first);
    for (uint32_t i = 0; i < N; i++)
        world_fill(&c->w, i, c->keys[i]);
    starve_at(n);
    rc = kvbm_manager_prepare_store(c->w.m, &c->chain, N, &job.pin);
    if (rc >= 0) {
        id = kvbm_manager_submit(c->w.m, &job);
        kvbm_pin_release(job.pin);
    }
    hungry = starved();
    starve_at(0);
    assert_true(rc >= 0 || rc == -ENOMEM);
    assert_true(rc < 0 || id > 0 || id == -ENOMEM);
    if (id > 0)
        assert_int_equal(kvbm_manager_wait(c->w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(kvbm_manager_drain(c->w.m, 30000), 0);
    return hungry;
}

static bool load_without(struct call *c, uint64_t first, long n)
{
    struct kvbm_job job = {
        .size = sizeof(job), .cache = c->w.cache, .blocks = c->blocks, .ok = &c->ok};
    struct kvbm_done done;
    int64_t id = -1;
    long rc;
    bool hungry;

    call_init(c, first);
    world_wipe(&c->w);
    starve_at(n);
    kvbm_manager_lookup(c->w.m, &c->chain, N, NULL);
    rc = kvbm_manager_prepare_load(c->w.m, &c->chain, N, NULL, &job.pin);
    if (rc >= 0) {
        id = kvbm_manager_submit(c->w.m, &job);
        kvbm_pin_release(job.pin);
    }
    hungry = starved();
    starve_at(0);
    assert_true(rc >= 0 || rc == -ENOMEM);
    assert_true(rc < 0 || id > 0 || id == -ENOMEM);
    if (id > 0)
        assert_int_equal(kvbm_manager_wait(c->w.m, (uint64_t)id, 30000, &done), 0);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&c->w, i, c->ok >> i & 1 ? c->keys[i] : ~UINT64_C(0)));
    return hungry;
}

/* Nothing is held for long: a fetch that nobody wants any more ends first. */
static void forget(struct world *w, enum kv_tier tier)
{
    struct kvbm_pool *pool = kvbm_manager_pool(w->m, tier);
    int rc = -EBUSY;

    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    for (int i = 0; pool && (rc = kvbm_pool_reset(pool)) == -EBUSY && i < 2000; i++)
        usleep(5000);
    assert_true(!pool || rc == 0);
}

static void stores_and_loads(uint32_t host_blocks)
{
    static struct call c;
    uint64_t first = 1000;
    long n;

    three_tiers(&c.w);
    c.w.opts.host_bytes = (uint64_t)host_blocks * HOST_STRIDE;
    world_start(&c.w);
    world_attach(&c.w, false);
    for (n = 1; store_without(&c, first, n); n++, first += 1000)
        assert_true(n < 1000);
    assert_int_equal(world_load(&c.w, first, N), N);
    for (int tiers = 0; tiers < 3; tiers++) {
        for (n = 1;; n++) {
            forget(&c.w, KV_TIER_HOST);
            if (tiers == 2)
                forget(&c.w, KV_TIER_DISK);
            if (!load_without(&c, first, n))
                break;
            assert_true(n < 1000);
            if (tiers == 0) /* from the host tier */
                assert_int_equal(world_load(&c.w, first, N), N);
        }
        assert_int_equal(c.ok, (1u << N) - 1);
    }
    assert_int_equal(world_stats(&c.w).pins_now, 0);
    assert_int_equal(world_stats(&c.w).jobs_now, 0);
    world_fini(&c.w);
}

static void test_stores_and_loads(void **state)
{
    (void)state;
    stores_and_loads(12);
    stores_and_loads(0);
}

/* ---- caches with a pool ---- */

static bool offload_without(struct call *c, uint64_t first, long n)
{
    struct kvbm_mutable blocks[N];
    struct kvbm_complete complete[N];
    struct kvbm_immutable held[N];
    bool hungry;
    long queued;

    call_init(c, first);
    assert_int_equal(kvbm_pool_allocate(c->w.pool, N, blocks, NULL), 0);
    for (uint32_t i = 0; i < N; i++)
        world_fill(&c->w, blocks[i].handle.block, c->keys[i]);
    assert_int_equal(kvbm_pool_complete(c->w.pool, blocks, N, &c->chain, complete), 0);
    assert_int_equal(kvbm_pool_register(c->w.pool, complete, N, held), 0);
    starve_at(n);
    queued = kvbm_manager_offload(c->w.cache, held, N, 0);
    hungry = starved();
    starve_at(0);
    assert_in_range(queued, 0, N);
    assert_int_equal(kvbm_manager_drain(c->w.m, 30000), 0);
    assert_int_equal(kvbm_pool_release(c->w.pool, held, N), 0);
    assert_int_equal(kvbm_pool_reset(c->w.pool), 0);
    return hungry;
}

static bool onboard_without(struct call *c, uint64_t first, long n)
{
    struct kvbm_immutable held[N];
    bool hungry;
    long came;

    call_init(c, first);
    world_wipe(&c->w);
    starve_at(n);
    came = kvbm_manager_onboard(c->w.cache, &c->chain, N, 30000, held);
    hungry = starved();
    starve_at(0);
    assert_true(came >= 0 || came == -ENOMEM || came == -ENOENT || came == -EBUSY);
    for (long i = 0; i < came; i++)
        assert_true(world_holds(&c->w, held[i].handle.block, c->keys[i]));
    if (came > 0)
        assert_int_equal(kvbm_pool_release(c->w.pool, held, (size_t)came), 0);
    if (!hungry)
        assert_int_equal(came, N);
    assert_int_equal(kvbm_pool_reset(c->w.pool), 0);
    return hungry;
}

static bool onboard_blocks_without(struct call *c, uint64_t first, long n)
{
    struct kvbm_pool *disk = kvbm_manager_pool(c->w.m, KV_TIER_DISK);
    struct kvbm_immutable held[N], came[N];
    bool hungry;
    long rc;

    call_init(c, first);
    world_wipe(&c->w);
    assert_int_equal(kvbm_pool_match(disk, 0, c->keys, N, 0, held), N);
    starve_at(n);
    rc = kvbm_manager_onboard_blocks(c->w.cache, held, N, 30000, came);
    hungry = starved();
    starve_at(0);
    assert_true(rc > 0 || rc == -ENOMEM || rc == -ENOENT || rc == -EBUSY);
    for (uint32_t i = 0; rc > 0 && i < N; i++) {
        if (!came[i].handle.pool)
            continue;
        assert_true(world_holds(&c->w, came[i].handle.block, c->keys[i]));
        kvbm_immutable_release(&came[i]);
    }
    if (!hungry)
        assert_int_equal(rc, N);
    assert_int_equal(kvbm_pool_release(disk, held, N), 0);
    assert_int_equal(kvbm_pool_reset(c->w.pool), 0);
    return hungry;
}

static void test_caches_with_a_pool(void **state)
{
    static struct call c;
    uint64_t first = 1000;
    long n;

    (void)state;
    three_tiers(&c.w);
    world_start(&c.w);
    world_attach(&c.w, true);
    for (n = 1; offload_without(&c, first, n); n++, first += 1000)
        assert_true(n < 1000);
    assert_int_equal(world_where(&c.w, first, N - 1), KVBM_READY);
    for (n = 1;; n++) {
        forget(&c.w, KV_TIER_HOST);
        if (!onboard_without(&c, first, n))
            break;
        assert_true(n < 1000);
    }
    for (n = 1;; n++) {
        forget(&c.w, KV_TIER_HOST);
        if (!onboard_blocks_without(&c, first, n))
            break;
        assert_true(n < 1000);
    }
    assert_int_equal(world_stats(&c.w).pins_now, 0);
    assert_int_equal(world_stats(&c.w).jobs_now, 0);
    world_fini(&c.w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_stores_and_loads),
        cmocka_unit_test(test_caches_with_a_pool),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
