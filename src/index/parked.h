// SPDX-License-Identifier: Apache-2.0
/**
 * Parked blocks: those that a holder has and no prompt can reach now, because the block above is
 * missing. They are kept by name, outside the tree, and come back when the hole is filled.
 *
 *     by_name    (holder, hash)   -> record
 *     by_parent  (holder, parent) -> its first child record -> next -> next
 *     holder     oldest record -> newer -> newer: who goes first at the limit
 *
 * A name is in the tree or parked, never both. Nothing is parked below a name that is in the tree.
 *
 * Threads: the index's lock.
 */
#ifndef KV_INDEX_PARKED_H
#define KV_INDEX_PARKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/table.h"
#include "kv_index.h"

#define KVI_NO_RECORD UINT32_MAX

struct kvi_index;
struct kvi_holder;

struct kvi_parked {
    uint64_t hash, parent, local;
    uint32_t holder;
    uint32_t mask;         /* as of a block in the tree, never 0 */
    uint32_t older, newer; /* of the same holder */
    uint32_t prev, next;   /* children of the same parent; the first one's prev is the last */
};

struct kvi_parking {
    struct kvi_parked *items; /* holes are linked by `next` from `free_head` */
    size_t n, n_used, capacity;
    size_t max, max_holder;
    uint32_t free_head;
    struct kvi_table by_name, by_parent;
    uint32_t *stack;    /* of names being attached, see attach.c */
    uint64_t forgotten; /* blocks given up at a limit or for want of memory */
};

int kvi_parking_init(struct kvi_index *ix);
void kvi_parking_fini(struct kvi_index *ix);

/** The record of a block, or NULL. Valid until the next change. */
struct kvi_parked *kvi_parked_find(const struct kvi_index *ix, const struct kvi_holder *holder,
                                   uint64_t hash);
/** The child parked first below @parent, or NULL. */
struct kvi_parked *kvi_parked_child(const struct kvi_index *ix, const struct kvi_holder *holder,
                                    uint64_t parent);
/**
 * Park @block below @parent in the tiers of @mask, beside those it is parked in already; its place
 * becomes this one. At the holder's limit its oldest goes. Returns false, having counted and
 * forgotten the block with its copies, when there is no room.
 */
bool kvi_park(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
              struct kv_block block, uint32_t mask);
/** Take a record out. Its copies are the caller's. */
void kvi_unpark(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked);
/** Give up the holder's oldest @n records, and their copies. Returns how many are left. */
size_t kvi_parked_forget(struct kvi_index *ix, struct kvi_holder *holder, size_t n);

#endif
