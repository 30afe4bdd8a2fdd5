// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of layouts: a config with known figures, and random configs. */
#ifndef KV_TEST_BM_LAYOUT_UNIT_H
#define KV_TEST_BM_LAYOUT_UNIT_H

#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "index/random.h"
#include "kvbm_layout.h"

/**
 * 7 blocks, 5 layers, K and V, pages of 4 tokens, 13 elements of 4 bytes, blocks aligned to 256.
 */
struct kvbm_layout_config known_config(enum kvbm_layout_kind kind);

/** A config of random kind and extents. */
struct kvbm_layout_config random_config(struct rng *rng);

/** Require equal fields. The bytes between fields are anything: compilers copy structs without. */
void same_config(const struct kvbm_layout_config *a, const struct kvbm_layout_config *b);
void same_shape(const struct kvbm_layout_shape *a, const struct kvbm_layout_shape *b);
void same_cache(const kvx_cache_desc_t *a, const kvx_cache_desc_t *b);

/** Storage over memory that is the caller's. */
struct kvbm_storage *external(void *memory, uint64_t bytes);

/** A layout over memory of its own kind: NULL (addresses only) or SYSTEM. */
struct kvbm_layout *allocate(const struct kvbm_layout_config *config, enum kvbm_storage_kind kind);

#endif
