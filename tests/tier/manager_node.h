// SPDX-License-Identifier: Apache-2.0
/** Support of the tests of peers: a node that lends its blocks. */
#ifndef KV_TEST_MANAGER_NODE_H
#define KV_TEST_MANAGER_NODE_H

#include "base/clock.h"
#include "manager_world.h"

/** A node that lends: a manager, its agent, the set of its host blocks. */
struct node {
    struct world w;
    char at[96];
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    struct kvbm_shard shard; /* of the set */
};

static inline void node_export(struct node *node, uint32_t share)
{
    struct kvbm_block_source source = kvbm_manager_source(node->w.m);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = kvbm_manager_host_layout(node->w.m),
                                            .shard = node->shard,
                                            .source = &source,
                                            .shared = kvbm_manager_shared(node->w.m),
                                            .lease_share = share};

    assert_int_equal(kvbm_blockset_export(node->agent, &what, &node->set), 0);
}

/** Begin a node of @blocks host blocks that listens at @endpoint; NULL: a unix socket. */
static inline void node_init(struct node *node, const char *name, uint32_t blocks,
                             const char *endpoint, bool shared, const char *follows)
{
    const char *at = node->at;
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = name, .fingerprint = "test", .listen = &at, .n_listen = 1};

    memset(node, 0, sizeof(*node));
    world_init(&node->w, blocks);
    snprintf(node->at, sizeof(node->at), "unix:%s/%s", node->w.dir, name);
    if (endpoint)
        at = endpoint;
    assert_int_equal(kvbm_agent_create(&opts, &node->agent), 0);
    assert_true(kvbm_agent_endpoint(node->agent, 0, node->at, sizeof(node->at), NULL) > 0);
    node->w.opts.host_shared = shared;
    node->w.opts.fingerprint = "test";
    node->w.opts.disk_buffered = true;
    node->w.opts.agent = follows ? node->agent : NULL;
    node->w.opts.peers = follows;
    world_with_disk(&node->w, 4 * blocks);
    world_start(&node->w);
    world_attach(&node->w, false);
    node_export(node, 100);
}

static inline void node_fini(struct node *node)
{
    kvbm_blockset_destroy(node->set);
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(node->w.m)), 0);
    assert_int_equal(world_stats(&node->w).pins_now, 0);
    world_stop(&node->w);
    assert_int_equal(kvbm_agent_destroy(node->agent), 0);
    world_fini(&node->w);
}

static inline void wait_for_peers(struct world *w, uint32_t n)
{
    for (uint64_t end = kv_now_ns() + 60 * KV_NS_PER_S; world_stats(w).peers_now != n;) {
        assert_true(kv_now_ns() < end);
        usleep(1000);
    }
}

#endif
