// SPDX-License-Identifier: Apache-2.0
/* Onboarding by handles: blocks that the caller holds in the manager's pools are loaded in one
 * batch, from whatever tiers. */
#include <fcntl.h>

#include "base/unit.h"
#include "tier/kitchen.h"

#define FIRST 1000u
#define N 10u

/* [0, 4) on the disk only, [4, 7) in the host tier and on the disk, [7, 10) in the object store
 * only. */
static void spread(struct world *w)
{
    uint64_t keys[N];
    struct kvbm_pool *host = kvbm_manager_pool(w->m, KV_TIER_HOST);

    world_keys(FIRST, keys, N);
    assert_int_equal(world_store(w, FIRST, N), N);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    if (host) {
        kvbm_pool_reset_keys(host, 0, keys, 4, NULL);
        kvbm_pool_reset_keys(host, 0, keys + 7, 3, NULL);
    }
    kvbm_pool_reset_keys(kvbm_manager_pool(w->m, KV_TIER_DISK), 0, keys + 7, 3, NULL);
    assert_int_equal(world_where(w, FIRST, 0), KVBM_ON_DISK);
    assert_int_equal(world_where(w, FIRST, 5), host ? KVBM_READY : KVBM_ON_DISK);
    assert_int_equal(world_where(w, FIRST, 9), KVBM_REMOTE);
}

static void all_tiers(struct world *w, uint32_t host_blocks)
{
    world_init(w, host_blocks);
    w->opts.disk = w->disk;
    w->opts.disk_bytes = 100u * HOST_STRIDE;
    w->opts.object = w->object;
    world_start(w);
}

/* A handle on block @i of the sequence. */
static struct kvbm_immutable hold(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_immutable held = {0};
    uint64_t key = FIRST + i;

    assert_int_equal(kvbm_pool_match(pool, 0, &key, 1, 0, &held), 1);
    return held;
}

static const struct {
    enum kv_tier tier;
    uint32_t i;
} mixed[] = {{KV_TIER_EXTERNAL, 9}, {KV_TIER_DISK, 0},    {KV_TIER_HOST, 5},
             {KV_TIER_DISK, 2},     {KV_TIER_DISK, 6},    {KV_TIER_DISK, 2},
             {KV_TIER_EXTERNAL, 7}, {KV_TIER_EXTERNAL, 0}};
#define MIXED (sizeof(mixed) / sizeof(mixed[0]))

static void hold_mixed(struct world *w, struct kvbm_immutable *ret)
{
    for (uint32_t k = 0; k < MIXED; k++) {
        struct kvbm_pool *pool = kvbm_manager_pool(w->m, mixed[k].tier);

        ret[k] = hold(pool ? pool : kvbm_manager_pool(w->m, KV_TIER_DISK), mixed[k].i);
    }
}

static void let_go(struct kvbm_immutable *held, size_t n)
{
    for (size_t k = n; k-- > 0;)
        assert_int_equal(kvbm_immutable_release(&held[k]), 0);
}

static void nothing_held(struct kvbm_pool *pool)
{
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    kvbm_pool_get_stats(pool, &stats);
    assert_int_equal(stats.inflight_immutable, 0);
    assert_int_equal(stats.inflight_mutable, 0);
}

/* ---- a pin and a job ---- */

static void test_pin_of_mixed_tiers(void **state)
{
    struct kvbm_immutable held[MIXED];
    uint32_t blocks[MIXED];
    uint8_t at[MIXED], ok[1] = {0};
    uint64_t key = FIRST;
    struct kvbm_reset_result reset;
    struct kvbm_done done;
    struct world w;
    int64_t id;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    struct kvbm_job job = {.size = sizeof(job), .cache = w.cache, .blocks = blocks, .ok = ok};

    spread(&w);
    hold_mixed(&w, held);
    for (uint32_t k = 0; k < MIXED; k++)
        blocks[k] = k;
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, held, MIXED, NULL, &job.pin), MIXED);
    let_go(held, MIXED); /* the pin has them */
    kvbm_pool_reset_keys(kvbm_manager_pool(w.m, KV_TIER_DISK), 0, &key, 1, &reset);
    assert_int_equal(reset.held, 1);
    world_wipe(&w);
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_pin_wait(job.pin, 30000), 0);
    assert_int_equal(kvbm_pin_state(job.pin, at), MIXED);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, 0);
    assert_int_equal(ok[0], (1u << MIXED) - 1);
    for (uint32_t k = 0; k < MIXED; k++)
        assert_true(world_holds(&w, k, FIRST + mixed[k].i));
    assert_in_range(world_stats(&w).disk.blocks_out, 2, 4); /* 0 and 2; 6 is nearer */
    assert_int_equal(world_stats(&w).object.blocks_out, 2); /* 9 and 7 */
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    nothing_held(kvbm_manager_pool(w.m, KV_TIER_HOST));
    nothing_held(kvbm_manager_pool(w.m, KV_TIER_DISK));
    nothing_held(kvbm_manager_pool(w.m, KV_TIER_EXTERNAL));
    world_fini(&w);
}

/* An onboarded block keeps its identity, including its place in its sequence. */
static void test_place_is_kept(void **state)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held[2];
    struct kvbm_pin *pin;
    struct world w;
    uint64_t parent = FIRST + 8;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    spread(&w);
    held[0] = hold(kvbm_manager_pool(w.m, KV_TIER_EXTERNAL), 9);
    held[1] = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), 3);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, held, 2, NULL, &pin), 2);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    kvbm_pin_release(pin);
    let_go(held, 2);
    held[0] = hold(kvbm_manager_pool(w.m, KV_TIER_HOST), 9);
    assert_int_equal(kvbm_immutable_info(&held[0], &info), 0);
    assert_int_equal(info.position, 9);
    assert_true(info.has_parent);
    assert_memory_equal(info.parent, &parent, sizeof(parent));
    let_go(held, 1);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_load(&w, FIRST, N), N);
    world_fini(&w);
}

/* ---- into a pool ---- */

static void onboard_mixed(uint32_t host_blocks)
{
    struct kvbm_immutable held[MIXED + 1], got[MIXED + 1];
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct world w;

    all_tiers(&w, host_blocks);
    world_attach(&w, false);
    spread(&w);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    world_attach(&w, true);
    hold_mixed(&w, held);
    world_wipe(&w);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, MIXED, 30000, got), MIXED);
    for (uint32_t k = 0; k < MIXED; k++) {
        assert_ptr_equal(got[k].handle.pool, w.pool);
        assert_true(world_holds(&w, got[k].handle.block, FIRST + mixed[k].i));
        assert_int_equal(kvbm_immutable_info(&got[k], &info), 0);
        assert_int_equal(info.position, mixed[k].i);
    }
    /* Blocks already in the cache are held, together with a handle of the cache's own pool. */
    assert_int_equal(kvbm_immutable_clone(&got[1], &held[MIXED]), 0);
    let_go(got, MIXED);
    world_wipe(&w);
    for (uint32_t k = 0; k <= MIXED; k++)
        world_fill(&w, k, 77); /* would be seen */
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, MIXED + 1, 30000, got), MIXED + 1);
    assert_int_equal(got[MIXED].handle.block, got[1].handle.block);
    assert_false(world_holds(&w, got[0].handle.block, FIRST + 9)); /* not copied again */
    let_go(got, MIXED + 1);
    let_go(held, MIXED + 1);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 0, 30000, got), 0);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    nothing_held(w.pool);
    world_fini(&w);
}

static void test_onboard_mixed_tiers(void **state)
{
    (void)state;
    onboard_mixed(32);
}

static void test_onboard_without_a_host_tier(void **state)
{
    (void)state;
    onboard_mixed(0);
}

/* No room for all of them, or for any. */
static void test_onboard_no_room(void **state)
{
    struct kvbm_immutable held[MIXED], got[MIXED];
    struct kvbm_mutable taken[CACHE_BLOCKS];
    uint32_t n = 0;
    struct world w;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    spread(&w);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    world_attach(&w, true);
    hold_mixed(&w, held);
    assert_int_equal(kvbm_pool_allocate(w.pool, CACHE_BLOCKS, taken, NULL), 0);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, MIXED, 30000, got), -ENOSPC);
    assert_int_equal(kvbm_pool_release_mutable(w.pool, taken, 3), 0);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, MIXED, 30000, got), 3);
    for (uint32_t k = 0; k < MIXED; k++) {
        n += got[k].handle.pool != NULL;
        if (got[k].handle.pool)
            assert_true(world_holds(&w, got[k].handle.block, FIRST + mixed[k].i));
    }
    assert_int_equal(n, 3);
    let_go(got, MIXED);
    let_go(held, MIXED);
    kvbm_pool_release_mutable(w.pool, taken, CACHE_BLOCKS);
    world_fini(&w);
}

/* ---- what is lost ---- */

static void flip(const struct world *w, uint32_t slot)
{
    char path[200];
    unsigned char byte;
    int fd;

    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", w->dir);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, 4096 + (long)slot * (long)HOST_STRIDE + 777), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, 4096 + (long)slot * (long)HOST_STRIDE + 777), 1);
    close(fd);
}

/* A block whose bytes are damaged is missing; the others come. One that the object store has, too,
 * comes from there. */
static void test_damaged_on_disk(void **state)
{
    for (int object = 0; object < 2; object++) {
        struct kvbm_immutable held[4], got[4];
        uint32_t slot;
        struct world w;

        (void)state;
        world_init(&w, 32);
        w.opts.disk = w.disk;
        w.opts.disk_bytes = 100u * HOST_STRIDE;
        w.opts.object = object ? w.object : NULL;
        world_start(&w);
        world_attach(&w, false);
        assert_int_equal(world_store(&w, FIRST, 4), 4);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
        assert_int_equal(kvbm_cache_detach(w.cache), 0);
        world_attach(&w, true);
        for (uint32_t i = 0; i < 4; i++)
            held[i] = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), i);
        slot = held[1].handle.block;
        flip(&w, slot);
        assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 4, 30000, got), 3 + object);
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(got[i].handle.pool != NULL, i != 1 || object);
            if (got[i].handle.pool)
                assert_true(world_holds(&w, got[i].handle.block, FIRST + i));
        }
        assert_int_equal(world_stats(&w).disk.bad, 1);
        let_go(got, 4);
        let_go(held, 4);
        world_fini(&w);
    }
}

static int unlink_values(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)ftw;
    return flag == FTW_F ? remove(path) : 0;
}

/* The object store has lost what it had: blocks behind a miss come all the same. */
static void test_lost_in_object_store(void **state)
{
    struct kvbm_immutable held[4], got[4];
    struct world w;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    spread(&w);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    world_attach(&w, true);
    held[0] = hold(kvbm_manager_pool(w.m, KV_TIER_EXTERNAL), 8);
    held[1] = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), 1);
    held[2] = hold(kvbm_manager_pool(w.m, KV_TIER_EXTERNAL), 9);
    held[3] = hold(kvbm_manager_pool(w.m, KV_TIER_HOST), 5);
    nftw(w.object, unlink_values, 16, FTW_DEPTH | FTW_PHYS);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 4, 30000, got), 2);
    assert_null(got[0].handle.pool);
    assert_null(got[2].handle.pool);
    assert_true(world_holds(&w, got[1].handle.block, FIRST + 1));
    assert_true(world_holds(&w, got[3].handle.block, FIRST + 5));
    let_go(got, 4);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 1, 30000, got), -ENOENT);
    let_go(held, 4);
    world_fini(&w);
}

/* Onboarding waits for blocks that another pin fetches, not longer than its timeout. */
static void test_onboard_timeout(void **state)
{
    struct kvbm_immutable held[2], got[2], all[4];
    struct kvbm_pin *store;
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct world w;
    long rc;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    spread(&w);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    world_attach(&w, true);
    world_keys(FIRST, keys, N);
    held[0] = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), 1);
    held[1] = hold(kvbm_manager_pool(w.m, KV_TIER_HOST), 4);
    assert_true(kvbm_manager_prepare_store(w.m, &chain, 4, &store) == 4);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 1, 30, got), -ETIMEDOUT);
    /* No time is left for the copy: "missing" would be wrong. */
    rc = kvbm_manager_onboard_blocks(w.cache, &held[1], 1, 0, got);
    assert_true(rc == -ETIMEDOUT || rc == 1);
    let_go(got, rc == 1);
    do /* the first block takes three quarters of the time, the rest may be too short */
        rc = kvbm_manager_onboard_blocks(w.cache, held, 2, 200, got);
    while (rc == -ETIMEDOUT);
    assert_int_equal(rc, 1);
    assert_null(got[0].handle.pool);
    assert_true(world_holds(&w, got[1].handle.block, FIRST + 4));
    let_go(got, 2);
    /* By hashes it is the same: a prefix that is there comes, whatever happens to the rest. */
    world_keys(FIRST + 4, keys, 3);
    world_keys(FIRST, keys + 3, 1);
    chain.parent = &(uint64_t){FIRST + 3};
    chain.position = 4;
    do {
        rc = kvbm_manager_onboard(w.cache, &chain, 4, 200, all);
        for (long i = 0; i < rc; i++)
            assert_true(world_holds(&w, all[i].handle.block, FIRST + 4 + (uint64_t)i));
        let_go(all, rc > 0 ? (size_t)rc : 0);
    } while (rc == -ETIMEDOUT || (rc > 0 && rc < 3));
    assert_int_equal(rc, 3);
    kvbm_pin_release(store); /* nothing was written: it comes from the disk */
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, held, 2, 30000, got), 2);
    assert_true(world_holds(&w, got[0].handle.block, FIRST + 1));
    let_go(got, 2);
    let_go(held, 2);
    world_fini(&w);
}

/* ---- handles that aren't any ---- */

static void test_refused(void **state)
{
    struct kvbm_immutable good, bad, both[2], got[2];
    struct kvbm_cache_opts opts = {.size = sizeof(opts)};
    struct kvbm_cache *numbered;
    struct kvbm_pin *pin = NULL;
    struct world w, other;

    (void)state;
    all_tiers(&w, 32);
    all_tiers(&other, 32);
    world_attach(&w, false);
    world_attach(&other, false);
    spread(&w);
    spread(&other);
    numbered = w.cache;
    world_attach(&w, true);
    good = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), 1);
    both[0] = good;
#define REFUSED(error)                                                                       \
    do {                                                                                     \
        both[1] = bad;                                                                       \
        assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, both, 2, NULL, &pin), error); \
        assert_int_equal(kvbm_manager_onboard_blocks(w.cache, both, 2, 30000, got), error);  \
        assert_null(pin);                                                                    \
    } while (0)
    bad = (struct kvbm_immutable){0};
    REFUSED(-EINVAL);
    bad = hold(kvbm_manager_pool(other.m, KV_TIER_DISK), 1);
    REFUSED(-EXDEV);
    kvbm_immutable_release(&bad);
    bad = hold(kvbm_manager_pool(w.m, KV_TIER_DISK), 2);
    {
        struct kvbm_immutable stale = bad;

        kvbm_immutable_release(&bad);
        bad = stale;
    }
    REFUSED(-ESTALE);
    /* One of a cache's pool: to be held there, not to be loaded from. */
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, &good, 1, 30000, got), 1);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, got, 1, NULL, &pin), -EXDEV);
    kvbm_immutable_release(got);
    assert_int_equal(kvbm_manager_onboard_blocks(numbered, &good, 1, 30000, got), -EINVAL);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, NULL, 1, 30000, got), -EINVAL);
    assert_int_equal(kvbm_manager_onboard_blocks(w.cache, &good, 1, 30000, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_onboard_blocks(NULL, &good, 1, 30000, got), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, &good, 1, NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load_blocks(NULL, &good, 1, NULL, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, NULL, 1, NULL, &pin), -EINVAL);
    assert_null(pin);
    let_go(&good, 1);
    nothing_held(kvbm_manager_pool(w.m, KV_TIER_DISK));
    nothing_held(w.pool);
    assert_int_equal(kvbm_cache_detach(numbered), 0);
    world_fini(&w);
    world_fini(&other);
}

static void test_groups(void **state)
{
    const struct kvbm_chain other = {.size = sizeof(other), .group = 3, .keys = &(uint64_t){5000}};
    struct kvbm_immutable held[2];
    struct kvbm_pin *pin;
    uint32_t block;
    struct world w;

    (void)state;
    all_tiers(&w, 32);
    world_attach(&w, false);
    spread(&w);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &other, 1, &pin), 1);
    assert_int_equal(kvbm_pin_blocks(pin, &block), 1);
    assert_int_equal(kvbm_pin_commit(pin, NULL), 1);
    kvbm_pin_release(pin);
    held[0] = hold(kvbm_manager_pool(w.m, KV_TIER_HOST), 5);
    assert_int_equal(
        kvbm_pool_match(kvbm_manager_pool(w.m, KV_TIER_HOST), 3, other.keys, 1, 0, &held[1]), 1);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, held, 2, NULL, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load_blocks(w.m, held + 1, 1, NULL, &pin), 1);
    kvbm_pin_release(pin);
    let_go(held, 2);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pin_of_mixed_tiers),
        cmocka_unit_test(test_place_is_kept),
        cmocka_unit_test(test_onboard_mixed_tiers),
        cmocka_unit_test(test_onboard_without_a_host_tier),
        cmocka_unit_test(test_onboard_no_room),
        cmocka_unit_test(test_damaged_on_disk),
        cmocka_unit_test(test_lost_in_object_store),
        cmocka_unit_test(test_onboard_timeout),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_groups),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
