// SPDX-License-Identifier: Apache-2.0
/**
 * The plan of a run of the whole system: everything that its processes have to know. The director
 * fills it from the command line and sends it to each worker as it is: no pointers.
 */
#ifndef KV_CLI_WHOLE_PLAN_H
#define KV_CLI_WHOLE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/core/error.h"
#include "kvbm_layout.h"

enum {
    KC_PLAN_WORKERS = 64,  /* at most */
    KC_PLAN_IDS = 512,     /* trace blocks of a request, at most: longer ones are cut */
    KC_PLAN_BLOCKS = 1024, /* blocks of a request, at most */
    KC_PLAN_PATH = 256
};

/** Shape of a model's K/V: what kvbm_layout_config needs. */
struct kc_shape {
    char name[32];
    uint32_t layers, heads, head_dim;
    uint32_t parts;     /* 2: K and V; 1: one latent vector (MLA) */
    uint32_t page_size; /* tokens per block */
    uint32_t hnd;       /* 1: G1 has [head][token], the host tier [token][head] */
    /* tokens that the layers of group 1 attend to: a sliding window. 0: there is no group 1. Each group
     * has `layers` layers; group 0 attends to all tokens. */
    uint32_t window;
};

/** Way on which blocks of other workers come. */
enum kc_carrier { KC_CARRIER_SHM, KC_CARRIER_TCP, KC_CARRIER_OFF };

/** Byte that a debug option changes, to show that the comparison sees it. */
enum kc_flip { KC_FLIP_NONE, KC_FLIP_GATHERED, KC_FLIP_HOST };

struct kc_plan {
    struct kc_shape shape;
    uint32_t n_workers;
    uint32_t per_id;    /* tokens that an id of the trace stands for */
    uint32_t g1_blocks; /* of a worker, as g2 and g3 */
    uint32_t g2_blocks, g3_blocks;
    uint32_t steps; /* decode steps of a request: each gathers the whole context */
    uint32_t carrier;
    uint32_t flip;
    uint64_t seed;
    char dir[KC_PLAN_PATH];     /* of the run: sockets, disk tiers, logs */
    char store[KC_PLAN_PATH];   /* URI of the object store; "": none */
    char indexer[KC_PLAN_PATH]; /* URL */
    char nats[KC_PLAN_PATH];    /* URL; "": no NATS */
};

/** Names under which the workers are known at the indexer. */
#define KC_PLAN_FINGERPRINT "kvasir replay"
#define KC_PLAN_MODEL "whole"
#define KC_PLAN_TENANT "default"
#define KC_PLAN_NATS_TENANT "nats"
#define KC_PLAN_FIRST_INSTANCE 1u
#define KC_PLAN_FIRST_ON_NATS 1001u /* an instance has one stream: the view by NATS has others */

/** Find a model's shape by its name. Returns NULL: there is none. */
const struct kc_shape *kc_shape_find(const char *name);

/** Return bytes of a block, and of a token, in one group of a shape. */
uint64_t kc_shape_block_bytes(const struct kc_shape *shape);
uint64_t kc_shape_token_bytes(const struct kc_shape *shape);

/** Return the number of groups of layers whose blocks differ. */
static inline uint32_t kc_shape_groups(const struct kc_shape *shape)
{
    return shape->window ? 2 : 1;
}

/** Return the first of the blocks before block @n that a group's layers attend to. */
static inline uint32_t kc_shape_first(const struct kc_shape *shape, uint32_t group, uint32_t n)
{
    uint32_t reach = (shape->window + shape->page_size - 1) / shape->page_size;

    return group && n > reach ? n - reach : 0;
}

/** Return the bytes of one row: a token's K, or V, in one layer. A multiple of 32. */
static inline uint32_t kc_shape_row_bytes(const struct kc_shape *shape)
{
    return shape->heads * shape->head_dim * 2;
}

/** Form of @n_blocks blocks, as G1 has them (@hnd: in the shape's order) or as the tiers below. */
struct kvbm_layout_config kc_shape_layout(const struct kc_shape *shape, uint32_t n_blocks,
                                          bool device);

/**
 * Write the tokens of @n ids, per_id each, to @ret. @pass makes other prompts of the same ids.
 * Returns their number.
 */
uint32_t kc_plan_tokens(const struct kc_plan *plan, const uint64_t *ids, uint32_t n, uint64_t pass,
                        uint32_t *ret);

#endif
