// SPDX-License-Identifier: Apache-2.0
/** The text by which lower tiers tell blocks of unlike models and shapes apart. */
#ifndef KVBM_TIER_MANAGER_SHAPE_H
#define KVBM_TIER_MANAGER_SHAPE_H

#include "kvbm_remote.h"

/**
 * Write the fingerprint of the disk and object tiers: @model, every property of @block that makes
 * equal keys mean other bytes, and the heads of @shard where these aren't all. 4096 bytes are enough
 * for any model's.
 */
void kvbm_tier_fingerprint(const char *model, const struct kvbm_layout_config *block,
                           const struct kvbm_shard *shard, char *to, size_t size);

#endif
