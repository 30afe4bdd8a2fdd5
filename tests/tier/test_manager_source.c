// SPDX-License-Identifier: Apache-2.0
/* Peers that lease a manager's blocks: those of the host tier at once, those of the disk or of the
 * object store once they are in the host tier. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"

#define N 8u

static struct {
    struct world w;
    struct kvbm_agent *owner, *reader;
    struct kvbm_blockset *set;
    struct kvbm_session *session;
} t;

static uint64_t soon(void)
{
    return kv_now_ns() + 60 * KV_NS_PER_S;
}

/* Store a prompt in the object store with a manager of its own, which ends. */
static void stored_before(void)
{
    assert_int_equal(world_store(&t.w, 1000, N), N);
    assert_int_equal(kvbm_manager_drain(t.w.m, 60000), 0);
    world_stop(&t.w);
    world_start(&t.w);
    world_attach(&t.w, false);
}

/* Begin an owner that lends in @shared memory or through the session. Its manager has a disk, or
 * (@object) an object store. */
static void begin_with(bool shared, bool object)
{
    static char path[80];
    const char *endpoint = path;
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = "owner", .fingerprint = "test", .listen = &endpoint};
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};

    world_init(&t.w, N);
    t.w.opts.host_shared = shared;
    t.w.opts.fingerprint = "test";
    t.w.opts.disk_buffered = true;
    if (!object)
        world_with_disk(&t.w, 64);
    t.w.opts.object = object ? t.w.object : NULL;
    world_start(&t.w);
    world_attach(&t.w, false);
    if (object) /* another process has stored the blocks: this one knows nothing of them */
        stored_before();
    snprintf(path, sizeof(path), "unix:%s/owner", t.w.dir);
    opts.n_listen = 1;
    assert_int_equal(kvbm_agent_create(&opts, &t.owner), 0);
    source = kvbm_manager_source(t.w.m);
    what.layout = kvbm_manager_host_layout(t.w.m);
    what.source = &source;
    what.shared = kvbm_manager_shared(t.w.m);
    assert_int_equal(kvbm_blockset_export(t.owner, &what, &t.set), 0);
    opts.name = "reader";
    opts.n_listen = 0;
    assert_int_equal(kvbm_agent_create(&opts, &t.reader), 0);
    assert_int_equal(kvbm_session_open(t.reader, endpoint, NULL, &t.session), 0);
}

static void begin(bool shared)
{
    begin_with(shared, false);
}

static void end(void)
{
    assert_int_equal(kvbm_session_close(t.session), 0);
    kvbm_blockset_destroy(t.set); /* gives all pins back: the manager can be destroyed */
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
    assert_int_equal(kvbm_agent_destroy(t.owner), 0);
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(t.w.m)), 0);
    assert_int_equal(world_stats(&t.w).pins_now, 0);
    world_fini(&t.w);
}

/* Lease a prompt's blocks, and read them into the blocks of the cache, wiped before. */
static void check_lease(uint64_t first, bool shared)
{
    const uint32_t to_blocks[N] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct kvbm_lease_read_opts opts = {
        .size = sizeof(opts), .to = t.w.layout, .to_blocks = to_blocks, .n = N};
    struct kvbm_lease *lease;
    uint64_t keys[N], limit = soon();

    world_keys(first, keys, N);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, N, 60000, soon(), &lease), 0);
    assert_int_equal(kvbm_lease_count(lease), N);
    assert_int_equal(kvbm_lease_is_shared(lease), shared);
    world_wipe(&t.w);
    assert_int_equal(kvbm_lease_read(lease, &opts), N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&t.w, i, keys[i]));
    kvbm_lease_release(lease);
    /* The owner gives the blocks back once its own send has returned, which may be after the bytes
     * and even the release arrived; the next lease needs all of them. */
    while (world_stats(&t.w).pins_now && kv_now_ns() < limit)
        usleep(1000);
    assert_int_equal(world_stats(&t.w).pins_now, 0);
}

/* Each prompt fills the host tier: the ones before it are on the disk only. */
static void test_blocks_of_every_tier(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        uint8_t tiers[N], none[1];
        uint64_t keys[N], missing = 77;

        begin(shared);
        for (uint64_t first = 1000; first < 4000; first += 1000) {
            assert_int_equal(world_store(&t.w, first, N), N);
            assert_int_equal(kvbm_manager_drain(t.w.m, 60000), 0);
        }
        world_keys(3000, keys, N);
        assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, N, soon(), tiers), 0);
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(tiers[i], KV_TIER_HOST);
        world_keys(1000, keys, N);
        assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, N, soon(), tiers), 0);
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(tiers[i], KV_TIER_DISK);
        assert_int_equal(kvbm_session_lookup(t.session, 1, 0, &missing, 1, soon(), none), 0);
        assert_int_equal(none[0], KVBM_NO_TIER);
        for (uint64_t first = 1000; first < 4000; first += 1000)
            check_lease(first, shared);
        end();
    }
}

/* A lease that is held when everything ends: its pin goes with the set. */
static void test_end_with_leases(void **state)
{
    struct kvbm_lease *lease;
    uint64_t keys[N];

    (void)state;
    begin(true);
    assert_int_equal(world_store(&t.w, 1000, N), N);
    assert_int_equal(kvbm_manager_drain(t.w.m, 60000), 0);
    world_keys(1000, keys, N);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, N, 60000, soon(), &lease), 0);
    assert_int_equal(world_stats(&t.w).pins_now, 1);
    assert_int_equal(kvbm_manager_destroy(t.w.m, 1000), -EBUSY);
    kvbm_blockset_destroy(t.set);
    t.set = NULL;
    assert_int_equal(world_stats(&t.w).pins_now, 0);
    assert_int_equal(kvbm_agent_destroy(t.reader), -EBUSY);
    kvbm_lease_release(lease);
    end();
}

/* Load a prompt in its sequence: each key is registered at its position. */
static void loads_in_sequence(void)
{
    uint32_t blocks[N] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct kvbm_chain chain;
    uint64_t keys[N];

    world_keys(1000, keys, N);
    chain = world_chain(keys);
    world_wipe(&t.w);
    assert_int_equal(kvbm_cache_load(t.w.cache, &chain, N, blocks, 60000), N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&t.w, i, keys[i]));
    assert_int_equal(world_stats(&t.w).host.failed, 0);
}

/* Peers name keys without their places. A lookup by a peer places no key that the object store
 * has: the owner's own load finds it where it belongs. */
static void test_lookup_places_nothing(void **state)
{
    uint64_t keys[N], limit;
    uint8_t tiers[N];

    (void)state;
    begin_with(false, true);
    world_keys(1000, keys, N);
    /* a question to the object store, if the lookup began one, has ended by then */
    for (limit = kv_now_ns() + KV_NS_PER_S / 2; kv_now_ns() < limit; usleep(20000))
        assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, N, soon(), tiers), 0);
    loads_in_sequence();
    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, N, soon(), tiers), 0);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(tiers[i], KV_TIER_HOST);
    end();
}

/* A lease of blocks that only the object store has. They are lent, and not registered: their
 * places are unknown. */
static void test_lease_places_nothing(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        begin_with(shared, true);
        check_lease(1000, shared);
        kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_HOST));
        loads_in_sequence();
        kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_HOST));
        check_lease(1000, shared); /* of keys whose places are known: registered there */
        loads_in_sequence();
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_of_every_tier),
        cmocka_unit_test(test_end_with_leases),
        cmocka_unit_test(test_lookup_places_nothing),
        cmocka_unit_test(test_lease_places_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
