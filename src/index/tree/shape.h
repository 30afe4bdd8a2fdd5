// SPDX-License-Identifier: Apache-2.0
/** Functions of shape.c for settle.c. Threads: the index's lock. */
#ifndef KV_INDEX_TREE_SHAPE_H
#define KV_INDEX_TREE_SHAPE_H

#include "index/tree/tree.h"

/** Retire the @n slots at @pos, an extent that no chain uses any more. */
void kvi_extent_retire(struct kvi_index *ix, uint32_t pos, uint32_t n);

/**
 * Replace @upper and its only child by one chain. Returns the new chain, or @upper when that wasn't
 * possible.
 */
struct kvi_chain *kvi_chain_join(struct kvi_index *ix, struct kvi_chain *upper);

/** Return the key of the chain in its parent. */
static inline uint64_t kvi_first_local(const struct kvi_index *ix, const struct kvi_chain *chain)
{
    return *kvi_arena_locals(&ix->arena, kvi_chain_run(chain).pos);
}

#endif
