// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of leases: an owner with a pool whose blocks' bytes follow from their keys, and
 * memory that a reader copies to.
 */
#ifndef KV_TEST_LEND_UNIT_H
#define KV_TEST_LEND_UNIT_H

#include "peer/lease/lend.h"
#include "peer/session/agent.h"
#include "session_unit.h"

#define N_BLOCKS 64u
#define N_LEASABLE (N_BLOCKS / 4)

/** An owner: an agent with one set, over a pool. */
struct lending {
    struct kvbm_agent *agent;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_shared *shared; /* NULL: memory of its own alone */
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
};

static inline struct kvbm_layout_config lend_config(enum kvbm_layout_kind kind)
{
    struct kvbm_layout_config config = small_config();

    config.kind = kind;
    config.num_blocks = N_BLOCKS;
    return config;
}

/** Byte @i of a region of a key's block. */
static inline uint8_t lend_byte(uint64_t key, uint32_t layer, uint32_t outer, uint64_t i)
{
    return (uint8_t)((key * UINT64_C(0x9e3779b97f4a7c15) >> 56) + layer * 17 + outer * 5 + i * 3);
}

static inline void lend_fill(const struct kvbm_layout *layout, uint32_t block, uint64_t key)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct kvbm_view view;

    for (uint32_t layer = 0; layer < c->num_layers; layer++) {
        for (uint32_t outer = 0; outer < c->outer_dim; outer++) {
            (void)kvbm_layout_region(layout, block, layer, outer, &view);
            for (uint64_t i = 0; i < view.len; i++)
                ((uint8_t *)(uintptr_t)view.addr)[i] = lend_byte(key, layer, outer, i);
        }
    }
}

static inline bool lend_holds(const struct kvbm_layout *layout, uint32_t block, uint64_t key)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct kvbm_view view;

    for (uint32_t layer = 0; layer < c->num_layers; layer++) {
        for (uint32_t outer = 0; outer < c->outer_dim; outer++) {
            (void)kvbm_layout_region(layout, block, layer, outer, &view);
            for (uint64_t i = 0; i < view.len; i++) {
                if (((const uint8_t *)(uintptr_t)view.addr)[i] != lend_byte(key, layer, outer, i))
                    return false;
            }
        }
    }
    return true;
}

/** Put @n keys from @first on into the pool, evicting others. Returns false when too few are free. */
static inline bool lend_store(struct lending *l, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t key = first + i;
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};
        struct kvbm_mutable block;
        struct kvbm_complete complete;
        struct kvbm_immutable held;

        if (kvbm_pool_allocate(l->pool, 1, &block, NULL) < 0)
            return false;
        lend_fill(l->layout, block.handle.block, key);
        if (kvbm_pool_complete(l->pool, &block, 1, &chain, &complete) < 0 ||
            kvbm_pool_register(l->pool, &complete, 1, &held) < 0)
            return false;
        (void)kvbm_immutable_release(&held);
    }
    return true;
}

static inline int lend_export(struct lending *l)
{
    const struct kvbm_block_source source = kvbm_pool_source(l->pool);
    const struct kvbm_blockset_opts opts = {
        .size = sizeof(opts), .id = 1, .layout = l->layout, .source = &source, .shared = l->shared};

    return kvbm_blockset_export(l->agent, &opts, &l->set);
}

/** Make an owner of as many keys, from 1 on, as the layout has blocks. */
static inline void lend_init_with(struct lending *l, const struct kvbm_agent_opts *opts,
                                  struct kvbm_layout_config config, bool shared)
{
    const struct kvbm_storage_opts storage = {.size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_pool_opts pool = {.size = sizeof(pool),
                                  .tier = KV_TIER_HOST,
                                  .n_blocks = config.num_blocks,
                                  .block_size = config.page_size};
    struct kvbm_layout_shape shape;

    memset(l, 0, sizeof(*l));
    l->agent = agent_of(opts);
    if (shared) {
        struct kvbm_shared_opts memory = {.size = sizeof(memory),
                                          .n_blocks = (uint32_t)config.num_blocks};

        assert_int_equal(kvbm_layout_compute(&config, &shape), 0);
        memory.bytes = shape.n_storages * ((shape.required_bytes + 63) / 64 * 64);
        assert_int_equal(kvbm_shared_create(&memory, &l->shared), 0);
        allocator = kvbm_shared_allocator(l->shared);
    }
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &l->layout), 0);
    pool.layout = l->layout;
    assert_int_equal(kvbm_registry_create(NULL, &l->registry), 0);
    assert_int_equal(kvbm_pool_create(l->registry, &pool, &l->pool), 0);
    assert_true(lend_store(l, 1, (uint32_t)config.num_blocks));
    assert_int_equal(lend_export(l), 0);
}

/** Make an owner of keys 1 to N_BLOCKS, with the pool's blocks in memory of @shared or not. */
static inline void lend_init(struct lending *l, const struct kvbm_agent_opts *opts,
                             enum kvbm_layout_kind kind, bool shared)
{
    lend_init_with(l, opts, lend_config(kind), shared);
}

/** Number of handles that leases hold on blocks of the pool. */
static inline uint64_t lend_pinned(struct lending *l)
{
    struct kvbm_pool_stats stats = KVBM_POOL_STATS_INIT;

    assert_int_equal(kvbm_pool_get_stats(l->pool, &stats), 0);
    return stats.inflight_immutable;
}

/** Wait until the owner holds nothing for anybody. */
static inline void lend_wait_idle(struct lending *l)
{
    wait_until(lend_pinned(l) == 0);
}

static inline void lend_fini(struct lending *l)
{
    kvbm_blockset_destroy(l->set);
    assert_int_equal(lend_pinned(l), 0); /* whatever peers have done */
    assert_int_equal(kvbm_registry_check(l->registry), 0);
    assert_int_equal(kvbm_agent_destroy(l->agent), 0);
    assert_int_equal(kvbm_pool_destroy(l->pool), 0);
    assert_int_equal(kvbm_registry_destroy(l->registry), 0);
    kvbm_layout_destroy(l->layout);
    kvbm_shared_destroy(l->shared);
}

#endif
