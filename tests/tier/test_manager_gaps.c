// SPDX-License-Identifier: Apache-2.0
/* Prompts of which the object store lacks some blocks and peers lack others: what one lacks the other
 * gives, and the prompt goes on behind it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tier/kitchen.h"

#define N 12u

static struct node owner;
static struct world reader;

/* A reader with an object store, and a host tier of which fetches fill 3 blocks at a time. */
static void begin(void)
{
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    world_init(&reader, N);
    reader.opts.object = reader.object;
    reader.opts.peers = owner.at;
    reader.opts.peer_timeout_ms = 60000;
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, 1);
}

static void end(void)
{
    assert_int_equal(world_stats(&reader).pins_now, 0);
    world_fini(&reader);
    node_fini(&owner);
}

static void store_in_object(uint32_t n)
{
    assert_int_equal(world_store(&reader, 1000, n), n);
    assert_int_equal(kvbm_manager_drain(reader.m, 60000), 0);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(reader.m, KV_TIER_HOST)), n);
}

/* Remove keys from the object store, though the reader believes that they are there. */
static void lose(uint32_t first, uint32_t n)
{
    struct world w;
    uint64_t keys[N];

    world_init(&w, N);
    w.opts.object = reader.object;
    world_start(&w);
    world_keys(1000 + first, keys, n);
    assert_int_equal(kvbm_manager_remove(w.m, 0, keys, n, 60000, NULL), 0);
    world_fini(&w);
}

/* The object store lacks two blocks of a prompt, of which the peer gives one, or both. */
static void test_store_lacks(void **state)
{
    (void)state;
    for (int both = 0; both < 2; both++) {
        begin();
        assert_int_equal(world_store(&owner.w, 1000, both ? N : 4), both ? N : 4);
        store_in_object(N);
        lose(1, 1);
        lose(7, 1);
        assert_int_equal(world_load(&reader, 1000, N), both ? N : 7);
        assert_int_equal(world_stats(&reader).peer.blocks_out, both ? 2 : 1);
        end();
    }
}

/* The peer lacks the beginning of a prompt, of which nobody knows that the object store has it. */
static void test_peer_lacks(void **state)
{
    uint64_t keys[N];

    (void)state;
    begin();
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
    world_keys(1000, keys, N);
    assert_int_equal(kvbm_manager_remove(owner.w.m, 0, keys, 4, 60000, NULL), 0);
    assert_int_equal(kvbm_manager_remove(owner.w.m, 0, keys + 8, 1, 60000, NULL), 0);
    store_in_object(4);
    world_stop(&reader); /* presence in the object store is forgotten */
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, 1);
    assert_int_equal(world_load(&reader, 1000, N), 8);
    assert_int_equal(world_stats(&reader).peer.blocks_out, 4);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_store_lacks),
        cmocka_unit_test(test_peer_lacks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
