// SPDX-License-Identifier: Apache-2.0
/**
 * Tensor-parallel groups for the test of kvbm_plan_read: ranks that each lend their heads of the same
 * blocks. An element's value follows from its key and its place in the model, so that any rank in any
 * form can be checked alone. Values are whole numbers below 128, which F32, BF16 and F16 hold exactly.
 */
#ifndef KV_TEST_PLAN_WORLD_H
#define KV_TEST_PLAN_WORLD_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "kvbm_lease.h"
#include "kvbm_plan.h"
#include "kvbm_transfer.h"

#define PW_HEADS 8u
#define PW_DIM 4u
#define PW_PAGE 4u
#define PW_LAYERS 2u
#define PW_MAX_RANKS 8u

/** How the ranks of a group hold and lend blocks. */
struct pw_form {
    uint32_t n_ranks;
    enum kvbm_block_order order;
    kvx_dtype_t dtype;
    uint32_t width;
    bool shared, tcp;  /* lends from shared memory; listens at a tcp: endpoint */
    uint32_t lease_ms; /* longest lease; 0: the default */
    bool plain;        /* of one rank: its layout knows neither num_heads nor dtype */
};

struct pw_rank {
    struct kvbm_agent *agent;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_shared *shared;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    struct kvbm_shard shard;
    kvx_dtype_t dtype;
    char at[96];
};

struct pw_group {
    struct pw_form form;
    uint32_t n_blocks;
    struct pw_rank ranks[PW_MAX_RANKS];
};

/* ---- elements ---- */

static inline float pw_value(uint64_t key, uint32_t layer, uint32_t outer, uint32_t token,
                             uint32_t head, uint32_t e)
{
    return (float)((key * 31 + layer * 7 + outer * 3 + token * 5 + head * 11 + e) % 127 + 1);
}

/** A whole number below 128 as an element of 2 bytes: BF16 or F16. */
static inline uint16_t pw_half(float value, kvx_dtype_t dtype)
{
    uint32_t bits, exponent;

    memcpy(&bits, &value, 4);
    if (dtype == KVX_DTYPE_BF16)
        return (uint16_t)(bits >> 16);
    exponent = (bits >> 23 & 255) - 127 + 15;
    return (uint16_t)(exponent << 10 | (bits >> 13 & 0x3ff));
}

/** Write or (@check) compare all elements of a block. Returns whether they are the key's. */
static inline bool pw_block(const struct pw_rank *rank, uint32_t block, uint64_t key, bool check)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(rank->layout);
    uint32_t heads = c->inner_dim / PW_DIM;
    struct kvbm_view view;
    bool same = true;

    for (uint32_t i = 0; i < PW_LAYERS * 2 * PW_PAGE * heads * PW_DIM; i++) {
        uint32_t e = i % PW_DIM, head = i / PW_DIM % heads;
        uint32_t token = i / PW_DIM / heads % PW_PAGE;
        uint32_t outer = i / PW_DIM / heads / PW_PAGE % 2;
        uint32_t layer = i / PW_DIM / heads / PW_PAGE / 2;
        uint64_t at = c->order == KVBM_ORDER_HND ? (head * PW_PAGE + token) * PW_DIM + e
                                                 : (token * heads + head) * PW_DIM + e;
        float value = pw_value(key, layer, outer, token, rank->shard.first_head + head, e);
        uint16_t half = pw_half(value, rank->dtype);
        const void *bytes = c->dtype_width_bytes == 4 ? (const void *)&value : (const void *)&half;
        uint8_t *to;

        (void)kvbm_layout_region(rank->layout, block, layer, outer, &view);
        to = (uint8_t *)(uintptr_t)view.addr + at * c->dtype_width_bytes;
        if (check)
            same = same && memcmp(to, bytes, c->dtype_width_bytes) == 0;
        else
            memcpy(to, bytes, c->dtype_width_bytes);
    }
    return same;
}

/* ---- ranks ---- */

static inline struct kvbm_layout_config pw_config(const struct pw_form *form, uint32_t n_blocks)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = n_blocks,
                                       .num_layers = PW_LAYERS,
                                       .outer_dim = 2,
                                       .page_size = PW_PAGE,
                                       .inner_dim = PW_HEADS / form->n_ranks * PW_DIM,
                                       .dtype_width_bytes = form->width,
                                       .num_heads = form->plain ? 0 : PW_HEADS / form->n_ranks,
                                       .dtype = form->plain ? 0 : form->dtype,
                                       .order = form->order};
}

static inline struct kvbm_shard pw_shard(const struct pw_form *form, uint32_t i)
{
    if (form->plain)
        return (struct kvbm_shard){.n_ranks = 1};
    return (struct kvbm_shard){.rank = i,
                               .n_ranks = form->n_ranks,
                               .axis = KVBM_SHARD_HEADS,
                               .first_head = i * (PW_HEADS / form->n_ranks),
                               .total_heads = PW_HEADS};
}

static inline void pw_memory(struct pw_rank *rank, const struct kvbm_layout_config *config,
                             bool shared)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_shared_opts memory = {.size = sizeof(memory),
                                      .n_blocks = (uint32_t)config->num_blocks};
    struct kvbm_layout_shape shape;

    if (shared) {
        assert_int_equal(kvbm_layout_compute(config, &shape), 0);
        memory.bytes = shape.n_storages * ((shape.required_bytes + 63) / 64 * 64);
        assert_int_equal(kvbm_shared_create(&memory, &rank->shared), 0);
        allocator = kvbm_shared_allocator(rank->shared);
    }
    assert_int_equal(kvbm_layout_allocate(config, &allocator, &rank->layout), 0);
}

/** Make rank @i of a group, named @name, with memory and a pool, but without blocks. */
static inline void pw_rank_init(struct pw_group *g, uint32_t i, const char *name, const char *at)
{
    struct pw_rank *rank = &g->ranks[i];
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = name, .fingerprint = "model", .listen = &at, .n_listen = 1};
    const struct kvbm_layout_config config = pw_config(&g->form, g->n_blocks);
    const struct kvbm_pool_opts pool = {
        .size = sizeof(pool), .tier = KV_TIER_HOST, .n_blocks = g->n_blocks, .block_size = PW_PAGE};

    *rank = (struct pw_rank){.dtype = g->form.dtype, .shard = pw_shard(&g->form, i)};
    pw_memory(rank, &config, g->form.shared);
    assert_int_equal(kvbm_agent_create(&who, &rank->agent), 0);
    assert_true(kvbm_agent_endpoint(rank->agent, 0, rank->at, sizeof(rank->at), NULL) > 0);
    assert_int_equal(kvbm_registry_create(NULL, &rank->registry), 0);
    assert_int_equal(kvbm_pool_create(rank->registry, &pool, &rank->pool), 0);
}

/** Register blocks 0, 1, ... under keys 1, 2, ...; @fill: with their bytes. Then lend them. */
static inline void pw_rank_lend(struct pw_group *g, uint32_t i, bool fill)
{
    struct pw_rank *rank = &g->ranks[i];
    const struct kvbm_block_source source = kvbm_pool_source(rank->pool);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = rank->layout,
                                            .source = &source,
                                            .shard = rank->shard,
                                            .shared = rank->shared,
                                            .max_lease_ms = g->form.lease_ms,
                                            .lease_share = 100};

    for (uint32_t n = 0; n < g->n_blocks; n++) {
        struct kvbm_mutable block;
        struct kvbm_complete complete;
        struct kvbm_immutable held;
        uint64_t key;
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};

        assert_int_equal(kvbm_pool_allocate(rank->pool, 1, &block, NULL), 0);
        key = block.handle.block + 1;
        if (fill)
            (void)pw_block(rank, block.handle.block, key, false);
        assert_int_equal(kvbm_pool_complete(rank->pool, &block, 1, &chain, &complete), 0);
        assert_int_equal(kvbm_pool_register(rank->pool, &complete, 1, &held), 0);
        assert_int_equal(kvbm_immutable_release(&held), 0);
    }
    assert_int_equal(kvbm_blockset_export(rank->agent, &what, &rank->set), 0);
}

static inline void pw_rank_fini(struct pw_rank *rank)
{
    kvbm_blockset_destroy(rank->set);
    assert_int_equal(kvbm_registry_check(rank->registry), 0);
    assert_int_equal(kvbm_agent_destroy(rank->agent), 0);
    assert_int_equal(kvbm_pool_destroy(rank->pool), 0);
    assert_int_equal(kvbm_registry_destroy(rank->registry), 0);
    kvbm_layout_destroy(rank->layout);
    kvbm_shared_destroy(rank->shared);
}

/* ---- groups ---- */

static inline void pw_init(struct pw_group *g, struct pw_form form, uint32_t n_blocks,
                           const char *prefix)
{
    *g = (struct pw_group){.form = form, .n_blocks = n_blocks};
    for (uint32_t i = 0; i < form.n_ranks; i++) {
        char name[32], at[96];

        snprintf(name, sizeof(name), "%s-%u", prefix, i);
        snprintf(at, sizeof(at), "unix:/tmp/kvbm-plan-%d-%s", (int)getpid(), name);
        pw_rank_init(g, i, name, form.tcp ? "tcp:127.0.0.1:0" : at);
    }
}

static inline void pw_lend(struct pw_group *g, bool fill)
{
    for (uint32_t i = 0; i < g->form.n_ranks; i++)
        pw_rank_lend(g, i, fill);
}

static inline void pw_fini(struct pw_group *g)
{
    for (uint32_t i = 0; i < g->form.n_ranks; i++)
        pw_rank_fini(&g->ranks[i]);
}

/** Plan for a rank of @local how to read from @remote, as both are. */
static inline struct kvbm_plan *pw_plan(const struct pw_group *local, uint32_t rank,
                                        const struct pw_group *remote)
{
    const struct kvbm_layout_config mine = pw_config(&local->form, local->n_blocks);
    const struct kvbm_layout_config theirs = pw_config(&remote->form, remote->n_blocks);
    const struct kvbm_plan_rank l = {.layout = &mine, .shard = local->ranks[rank].shard};
    struct kvbm_plan_rank r[PW_MAX_RANKS];
    struct kvbm_plan *plan = NULL;

    for (uint32_t i = 0; i < remote->form.n_ranks; i++)
        r[i] = (struct kvbm_plan_rank){.layout = &theirs, .shard = pw_shard(&remote->form, i)};
    assert_int_equal(kvbm_plan_create(&l, r, remote->form.n_ranks, NULL, &plan), 0);
    return plan;
}

#endif
