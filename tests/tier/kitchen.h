// SPDX-License-Identifier: Apache-2.0
/**
 * Support of the manager's tests: a manager over temporary directories, a cache, blocks whose bytes
 * follow from their keys; a node that lends its blocks; an object store that hangs, fails, is slow
 * and lies (shaky.h).
 */
#ifndef KV_TEST_TIER_KITCHEN_H
#define KV_TEST_TIER_KITCHEN_H

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvbm_manager.h"
#include "support.h"
#include "tier/shaky.h"

#define LAYERS 3u
#define HEADS 4u
#define HEAD_DIM 16u
#define PAGE 8u
#define BLOCK_BYTES (LAYERS * 2 * PAGE * HEADS * HEAD_DIM * 2) /* F16 */
#define HOST_STRIDE ((BLOCK_BYTES + 4095u) / 4096u * 4096u)
#define WORLD_MAX_BLOCKS 1024u
#ifndef CACHE_BLOCKS /* defined before by tests that want another number, at most WORLD_MAX_BLOCKS */
#define CACHE_BLOCKS 64u
#endif

struct world {
    char dir[64];
    uint32_t n_cache_blocks;
    bool in_place; /* world_load leaves blocks of peers where they are */
    struct kvbm_layout_config block;
    struct kvbm_manager_opts opts;
    struct kvbm_manager *m;
    struct kvbm_storage *storage;
    struct kvbm_layout *layout; /* of the cache */
    struct kvbm_pool *pool;     /* of the cache, NULL unless asked for */
    struct kvbm_cache *cache;
    char disk[160], object[160];
};

/** A layout of the tests' blocks, as a cache of @n_blocks has it. */
struct kvbm_layout_config world_block_of(uint32_t n_blocks);
static inline struct kvbm_layout_config world_block(void)
{
    return world_block_of(CACHE_BLOCKS);
}

/**
 * Make the directories and the options of a manager. @host_blocks 0: no host tier. The options don't
 * name the directories for disk and object tiers yet.
 */
void world_init_of(struct world *w, uint32_t host_blocks, uint32_t n_cache_blocks);
static inline void world_init(struct world *w, uint32_t host_blocks)
{
    world_init_of(w, host_blocks, CACHE_BLOCKS);
}
/* Give the manager a disk tier of so many blocks. Before world_start. */
static inline void world_with_disk(struct world *w, uint32_t blocks)
{
    w->opts.disk = w->disk;
    w->opts.disk_bytes = (uint64_t)blocks * HOST_STRIDE;
}
/** Create the manager of the options. */
void world_start(struct world *w);
/** Attach the cache; @pool: with a pool of its own. */
void world_attach(struct world *w, bool pool);
/** Destroy the manager, the cache and its pool. */
void world_stop(struct world *w);
/** Destroy the manager as it is, then free the cache that outlives it. Returns as kvbm_manager_destroy. */
int world_destroy(struct world *w, uint32_t timeout_ms);
/** Remove the directories, too. */
void world_fini(struct world *w);

/* ---- bytes ---- */

/** Element @i of a region of a key's block: a finite half, which conversions keep bit by bit. */
uint16_t world_element(uint64_t key, uint32_t layer, uint32_t outer, uint32_t i);
uint16_t *world_region(const struct kvbm_layout *layout, uint32_t block, uint32_t layer,
                       uint32_t outer);
/** Write a key's bytes into a block of the cache. */
void world_fill(const struct world *w, uint32_t block, uint64_t key);
/** True when a layer of a block of the cache has a key's bytes. */
bool world_layer_holds(const struct world *w, uint32_t block, uint32_t layer, uint64_t key);
/** True when a block of the cache has a key's bytes. */
bool world_holds(const struct world *w, uint32_t block, uint64_t key);
/** Fill all blocks of the cache with bytes of no key. */
void world_wipe(const struct world *w);

/* ---- chains: keys from first on, as a sequence of its own ---- */

void world_keys(uint64_t first, uint64_t *keys, uint32_t n);
/** Return a chain of @keys, which may still be unset. Inline, so that gcc sees that it reads none. */
static inline struct kvbm_chain world_chain(const uint64_t *keys)
{
    return (struct kvbm_chain){.size = sizeof(struct kvbm_chain), .keys = keys};
}
/** Store @n blocks of a chain through blocks [0, n) of the cache. Returns the number stored. */
long world_store_keys(struct world *w, const uint64_t *keys, uint32_t n);
/** The same of keys @first to @first + @n - 1. */
long world_store(struct world *w, uint64_t first, uint32_t n);
/**
 * Load @n blocks into blocks [0, n), wiped before; each block that the job calls copied has its
 * bytes. Returns the length of the prefix.
 */
long world_load(struct world *w, uint64_t first, uint32_t n);
/** Return the state that a lookup gives for key @first + @i. */
uint8_t world_where(struct world *w, uint64_t first, uint32_t i);
struct kvbm_manager_stats world_stats(struct world *w);

/* ---- a node that lends ---- */

/** A node that lends: a manager, its agent, the set of its host blocks. */
struct node {
    struct world w;
    char at[96];
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    struct kvbm_shard shard; /* of the set */
};

/** Export the host blocks of a node, of which readers may lease @share percent. */
void node_export(struct node *node, uint32_t share);

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

void node_fini(struct node *node);

void wait_for_peers(struct world *w, uint32_t n);

/* ---- a store that hangs, fails, is slow and lies ---- */

extern struct shaky *shaky;

/** Let stores find the plugin, load it and set `shaky`. Ends the program if there is none. */
void find_shaky(void);

/** Begin a manager with a shaky store, which has nothing yet. */
static inline void shaky_start(struct world *w, uint32_t host_blocks)
{
    memset(shaky, 0, sizeof(*shaky));
    world_init(w, host_blocks);
    snprintf(w->object, sizeof(w->object), "shaky://%s/object", w->dir);
    w->opts.object = w->object;
    w->opts.object_timeout_ms = 100000; /* so that nothing that ends earlier waited for it */
    world_start(w);
    world_attach(w, false);
}

#endif
