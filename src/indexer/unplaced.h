// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks that a publisher has in some tiers, and whose places nothing has told yet: a snapshot may be
 * ahead of the events that tell the tokens. An open-addressing table by the block's hash; a removal
 * closes its gap. Bounded. Caller-locked.
 */
#ifndef KV_INDEXER_UNPLACED_H
#define KV_INDEXER_UNPLACED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KI_UNPLACED_SLOTS 4096 /* a power of two */
/** Most blocks. */
#define KI_UNPLACED_MAX (KI_UNPLACED_SLOTS / 2)

/** Zero-initialise. */
struct ki_unplaced {
    size_t n;
    struct {
        uint64_t hash;
        uint32_t tiers; /* bit per tier; 0: an empty slot */
    } slots[KI_UNPLACED_SLOTS];
};

/** Note that a block is in @tier. Returns false when there is no room. */
bool ki_unplaced_add(struct ki_unplaced *u, uint64_t hash, unsigned tier);
/** Forget the tiers in the mask @tiers of a block. Returns those of them that were noted. */
uint32_t ki_unplaced_take(struct ki_unplaced *u, uint64_t hash, uint32_t tiers);
void ki_unplaced_clear(struct ki_unplaced *u);

#endif
