// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of layouts: a config with known figures, and random configs. */
#ifndef KV_TEST_BM_LAYOUT_UNIT_H
#define KV_TEST_BM_LAYOUT_UNIT_H

#include <errno.h>
#include <string.h>

#include "base/error.h"
#include "index/random.h"
#include "kvbm_layout.h"

/**
 * 7 blocks, 5 layers, K and V, pages of 4 tokens, 13 elements of 4 bytes, blocks aligned to 256.
 */
static inline struct kvbm_layout_config known_config(enum kvbm_layout_kind kind)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kind,
                                       .num_blocks = 7,
                                       .num_layers = 5,
                                       .outer_dim = 2,
                                       .page_size = 4,
                                       .inner_dim = 13,
                                       .dtype_width_bytes = 4,
                                       .alignment = 256};
}

static inline struct kvbm_layout_config random_config(struct rng *rng)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};

    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kinds[rng_below(rng, 3)],
                                       .num_blocks = 1 + rng_below(rng, 9),
                                       .num_layers = 1 + rng_below(rng, 6),
                                       .outer_dim = 1 + rng_below(rng, 2),
                                       .page_size = 1u << rng_below(rng, 5),
                                       .inner_dim = 1 + rng_below(rng, 20),
                                       .dtype_width_bytes = 1u << rng_below(rng, 4),
                                       .alignment = 1u << rng_below(rng, 13)};
}

/** Storage over memory that is the caller's. */
static inline struct kvbm_storage *external(void *memory, uint64_t bytes)
{
    struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_EXTERNAL, .bytes = bytes, .memory = memory};
    struct kvbm_storage *storage = NULL;

    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    return storage;
}

/** A layout over memory of its own kind: NULL (addresses only) or SYSTEM. */
static inline struct kvbm_layout *allocate(const struct kvbm_layout_config *config,
                                           enum kvbm_storage_kind kind)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = kind};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout *layout = NULL;

    assert_int_equal(kvbm_layout_allocate(config, &allocator, &layout), 0);
    return layout;
}

#endif
