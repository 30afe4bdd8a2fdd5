// SPDX-License-Identifier: Apache-2.0
/**
 * Parked blocks: a holder has them, but no prompt can reach them, because the block above is
 * missing. They are kept by name, outside the tree, until the missing block is stored.
 *
 *     by_name    (holder, hash)   -> record
 *     by_parent  (holder, parent) -> its first child record -> next -> next
 *     holder     oldest record -> newer -> newer; the oldest goes first at the limit
 *
 * A name is in the tree or parked, never both. No block is parked below a name that is in the tree.
 *
 * Threads: the index's lock.
 */
#ifndef KV_INDEX_TREE_PARKED_H
#define KV_INDEX_TREE_PARKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/memory/table.h"
#include "kv_index.h"

#define KVI_NO_RECORD UINT32_MAX

struct kvi_index;
struct kvi_holder;

struct kvi_parked {
    uint64_t hash, parent, local;
    uint32_t holder;
    uint32_t mask;         /* tiers of the block, never 0 */
    uint32_t older, newer; /* older and newer records of the same holder */
    uint32_t prev, next;   /* siblings below the same parent; the first one's prev is the last */
};

struct kvi_parking {
    struct kvi_parked *items; /* free records are linked by `next` from `free_head` */
    size_t n, n_used, capacity;
    size_t max, max_holder;
    uint32_t free_head;
    struct kvi_table by_name, by_parent;
    uint32_t *stack;    /* names being attached, see attach.c */
    uint64_t forgotten; /* blocks forgotten at a limit or for lack of memory: kvi_parking_lose */
};

int kvi_parking_init(struct kvi_index *ix);
void kvi_parking_fini(struct kvi_index *ix);

/** The record of a block, or NULL. Valid until the next change. */
struct kvi_parked *kvi_parked_find(const struct kvi_index *ix, const struct kvi_holder *holder,
                                   uint64_t hash);
/** Return the child that was parked first below @parent, or NULL. */
struct kvi_parked *kvi_parked_child(const struct kvi_index *ix, const struct kvi_holder *holder,
                                    uint64_t parent);
/**
 * Park @block below @parent in the tiers of @mask. A parked block keeps its other tiers and moves
 * below @parent. At the holder's limit, forgets its oldest block. Returns false without room: the
 * block and its copies are forgotten and counted.
 */
bool kvi_park(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
              struct kv_block block, uint32_t mask);
/** Forget a block that the holder has in the tiers of @mask, with its copies, and count them. */
void kvi_parking_lose(struct kvi_index *ix, struct kvi_holder *holder, uint32_t mask,
                      uint64_t hash);
/** Note that the index forgot blocks that nobody has counted. */
void kvi_parking_lose_more(struct kvi_index *ix, struct kvi_holder *holder);
/** Remove a record. The caller is responsible for the block's copies. */
void kvi_unpark(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked);
/** Forget the holder's oldest @n records and their copies. Returns how many are left. */
size_t kvi_parked_forget(struct kvi_index *ix, struct kvi_holder *holder, size_t n);

#endif
