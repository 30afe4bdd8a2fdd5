// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks that a dump in progress may have missed or told wrongly (kvi_keep_copies). kvi_dump_copies
 * tells them at its end:
 *
 *     moved into the tree    parked while the dump passed their place, and in the tree by the time it
 *                            passed the parked ones
 *     gone from a tier       removed by a source of which the dump had not told yet: a reader takes
 *                            the block for the implied source's, whose removal never comes
 *
 * Beyond MAX_MISSED, the holder counts a turn: readers take its dump for torn.
 *
 * Threads: the index's lock.
 */
#ifndef KV_INDEX_TREE_MISSED_H
#define KV_INDEX_TREE_MISSED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/tree/facts.h"

struct kvi_index;
struct kvi_holder;

struct kvi_missed_block {
    uint64_t hash, parent, local;
    uint32_t holder;
    uint16_t source; /* gone: source of the last copy */
    uint8_t mask;    /* tiers */
    bool is_placed;  /* moved into the tree: parent and local hold */
};

struct kvi_missed {
    struct kvi_missed_block *items; /* oldest first */
    size_t n, capacity;
};

/** Note that parked block @block in the tiers of @mask has moved into the tree below @parent. */
void kvi_missed_moved(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
                      struct kv_block block, uint32_t mask);
/** Note that the last copy of the block, @source's, left @tier. */
void kvi_missed_gone(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint32_t source, uint64_t hash);
/** Forget everything: no dump is in progress. */
void kvi_missed_clear(struct kvi_index *ix);

#endif
