// SPDX-License-Identifier: Apache-2.0
/* Peers of a manager whose object store is down, or has what peers have; agents whose keys have another length. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"

#define N 8u
#define SOON_MS 60000

static int export_set(struct node *node, struct kvbm_blockset **ret)
{
    struct kvbm_block_source source = kvbm_manager_source(node->w.m);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = kvbm_manager_host_layout(node->w.m),
                                            .source = &source};

    return kvbm_blockset_export(node->agent, &what, ret);
}

static void node_agent(struct node *node, const char *name, uint32_t key_len)
{
    const char *at = node->at;
    const struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                         .name = name,
                                         .fingerprint = "test",
                                         .key_len = key_len,
                                         .listen = &at,
                                         .n_listen = 1};

    memset(node, 0, sizeof(*node));
    world_init(&node->w, 4 * N);
    node->w.opts.fingerprint = "test";
    snprintf(node->at, sizeof(node->at), "unix:%s/%s", node->w.dir, name);
    assert_int_equal(kvbm_agent_create(&opts, &node->agent), 0);
}

static void node_start(struct node *node, const char *follows)
{
    node->w.opts.agent = node->agent;
    node->w.opts.peers = follows;
    world_start(&node->w);
    world_attach(&node->w, false);
    assert_int_equal(export_set(node, &node->set), 0);
}

/* A lookup asks in the background. */
static void wait_where(struct world *w, uint64_t first, uint32_t i, uint8_t expected)
{
    uint8_t at;

    for (uint64_t end = kv_now_ns() + SOON_MS * KV_NS_PER_MS;
         (at = world_where(w, first, i)) != expected; usleep(1000)) {
        assert_int_equal(at, KVBM_PENDING);
        assert_true(kv_now_ns() < end);
    }
}

/* While the object store is down, keys that peers are asked for are pending: a miss would be
 * computed anew. */
static void test_store_is_down(void **state)
{
    struct node owner;
    struct world reader;

    (void)state;
    node_agent(&owner, "owner", 8);
    node_start(&owner, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    memset(shaky, 0, sizeof(*shaky));
    world_init(&reader, 4 * N);
    snprintf(reader.object, sizeof(reader.object), "shaky://%s/object", reader.dir);
    reader.opts.fingerprint = "test";
    reader.opts.object = reader.object;
    reader.opts.peers = owner.at;
    world_start(&reader);
    world_attach(&reader, false);
    wait_until(world_stats(&reader).peers_now == 1);
    shaky->fail_rc = -ECONNRESET;
    for (uint64_t key = 100000; !world_stats(&reader).object_down; key += 100, usleep(2000))
        assert_in_range(world_where(&reader, key, 0), KVBM_MISS, KVBM_PENDING);
    for (uint32_t i = 0; i < N; i++)
        wait_where(&reader, 1000, i, KVBM_ON_PEER);
    wait_where(&reader, 9000, 0, KVBM_MISS);
    assert_int_equal(world_load(&reader, 1000, N), N);
    shaky->fail_rc = 0;
    world_fini(&reader);
    node_fini(&owner);
}

/* Blocks that a peer has in the object store alone: a reader with an object store of its own gets them
 * there, and one without gets them from the peer, which fetches them. */
static void test_store_alone(void **state)
{
    for (int own = 0; own < 2; own++) {
        struct kvbm_manager_stats stats;
        struct node owner;
        struct world reader;

        (void)state;
        memset(shaky, 0, sizeof(*shaky));
        node_agent(&owner, "owner", 8);
        snprintf(owner.w.object, sizeof(owner.w.object), "shaky://%s/object", owner.w.dir);
        owner.w.opts.object = owner.w.object;
        node_start(&owner, NULL);
        assert_int_equal(world_store(&owner.w, 1000, N), N);
        assert_int_equal(kvbm_manager_drain(owner.w.m, SOON_MS), 0);
        kvbm_pool_reset_inactive(kvbm_manager_pool(owner.w.m, KV_TIER_HOST));
        assert_int_equal(world_where(&owner.w, 1000, N - 1), KVBM_REMOTE);
        world_init(&reader, 4 * N);
        reader.opts.fingerprint = "test";
        reader.opts.object = own ? owner.w.object : NULL;
        reader.opts.peers = owner.at;
        world_start(&reader);
        world_attach(&reader, false);
        wait_until(world_stats(&reader).peers_now == 1);
        assert_int_equal(world_load(&reader, 1000, N), N);
        stats = world_stats(&reader);
        assert_int_equal(stats.object.blocks_out, own ? N : 0);
        assert_int_equal(stats.peer.blocks_out, own ? 0 : N);
        assert_int_equal(world_stats(&owner.w).host.blocks_in, own ? N : 2 * N);
        world_fini(&reader);
        node_fini(&owner);
    }
}

/* Keys of another length than the agent's would be read beyond a request's end. */
static void test_key_lengths(void **state)
{
    struct kvbm_manager *m;
    struct node node;

    (void)state;
    node_agent(&node, "node", 4);
    node.w.opts.agent = node.agent;
    assert_int_equal(kvbm_manager_create(&node.w.opts, &m), -EINVAL);
    node.w.opts.agent = NULL;
    world_start(&node.w);
    world_attach(&node.w, false);
    assert_int_equal(export_set(&node, &node.set), -EINVAL);
    node_fini(&node);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_store_is_down),
        cmocka_unit_test(test_store_alone),
        cmocka_unit_test(test_key_lengths),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
