// SPDX-License-Identifier: Apache-2.0
/** Functions of shape.c for settle.c. Threads: the index's lock. */
#ifndef KV_INDEX_SHAPE_H
#define KV_INDEX_SHAPE_H

#include "index/tree.h"

/** The @n slots at @pos, an extent, are no part of a chain any more. */
void kvi_extent_retire(struct kvi_index *ix, uint32_t pos, uint32_t n);

/** One chain in place of @upper and its only child: returned, or @upper as it was. Best effort. */
struct kvi_chain *kvi_chain_join(struct kvi_index *ix, struct kvi_chain *upper);

/** The key under which its parent has the chain. */
static inline uint64_t kvi_first_local(const struct kvi_index *ix, const struct kvi_chain *chain)
{
    return *kvi_arena_locals(&ix->arena, kvi_chain_run(chain).pos);
}

#endif
