// SPDX-License-Identifier: Apache-2.0
/* Long prompts at a peer: few questions, and all blocks; none more than needed for what nobody has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define CACHE_BLOCKS 1024u
#include "tier/kitchen.h"

#define N 1000u

static struct node owner;
static struct world reader;
static struct kvbm_block_source inner;
static atomic_uint questions;

static void counted_lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    atomic_fetch_add(&questions, 1);
    inner.lookup(arg, group, keys, n, tiers);
}

/* An owner whose questions are counted, and a reader of it. */
static void begin(void)
{
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};

    node_init(&owner, "owner", CACHE_BLOCKS, NULL, false, NULL);
    kvbm_blockset_destroy(owner.set);
    inner = source = kvbm_manager_source(owner.w.m);
    source.lookup = counted_lookup;
    what.source = &source;
    what.layout = kvbm_manager_host_layout(owner.w.m);
    assert_int_equal(kvbm_blockset_export(owner.agent, &what, &owner.set), 0);
    world_init(&reader, CACHE_BLOCKS);
    reader.opts.fingerprint = "test";
    reader.opts.peers = owner.at;
    reader.opts.peer_timeout_ms = 60000;
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, 1);
    atomic_store(&questions, 0);
}

static void end(void)
{
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(reader.m)), 0);
    assert_int_equal(world_stats(&reader).pins_now, 0);
    world_fini(&reader);
    node_fini(&owner);
}

static void test_whole(void **state)
{
    (void)state;
    begin();
    assert_int_equal(world_store(&owner.w, 10000, N), N);
    assert_int_equal(world_load(&reader, 10000, N), N);
    assert_int_equal(world_stats(&reader).peer.blocks_out, N);
    assert_true(atomic_load(&questions) <= 4);
    end();
}

/* The peer has a part: of what is behind it, not many keys are asked for. */
static void test_part(void **state)
{
    static const uint32_t parts[] = {0, 1, 127, 128, 129, 500, 639, 640, 641};

    (void)state;
    begin();
    for (uint32_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        uint64_t first = 10000 * (i + 1), asked = world_stats(&reader).peer_asked;

        atomic_store(&questions, 0);
        if (parts[i])
            assert_int_equal(world_store(&owner.w, first, parts[i]), parts[i]);
        assert_int_equal(world_load(&reader, first, N), parts[i]);
        assert_true(atomic_load(&questions) <= 3);
        asked = world_stats(&reader).peer_asked - asked;
        assert_true(asked <= (parts[i] < 128 ? 128 : parts[i] < 640 ? 640 : N));
    }
    end();
}

/* Keys that are known of already aren't asked for again. */
static void test_known(void **state)
{
    uint64_t keys[N];
    uint8_t at[N];
    struct kvbm_chain chain = world_chain(keys);
    uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S, asked;

    (void)state;
    begin();
    assert_int_equal(world_store(&owner.w, 10000, N), N);
    world_keys(10000, keys, N);
    do {
        assert_true(kv_now_ns() < until);
        usleep(1000);
        assert_true(kvbm_manager_lookup(reader.m, &chain, N, at) >= 0);
    } while (at[N - 1] != KVBM_ON_PEER);
    asked = world_stats(&reader).peer_asked;
    atomic_store(&questions, 0);
    assert_int_equal(world_load(&reader, 10000, N), N);
    /* an answer is believed for 5 s, and what others answered takes its place in the table */
    assert_true(world_stats(&reader).peer_asked - asked <= N);
    assert_true(atomic_load(&questions) <= 4);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_part),
        cmocka_unit_test(test_known),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
