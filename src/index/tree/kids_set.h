// SPDX-License-Identifier: Apache-2.0
/**
 * Structure of a set of children. Only kids.c and kids_each.c include this; kids.h has the drawing.
 */
#ifndef KV_INDEX_TREE_KIDS_SET_H
#define KV_INDEX_TREE_KIDS_SET_H

#include "index/tree/tree.h"

#define KIDS_FAN 256u
#define KIDS_TAG_TABLE ((uintptr_t)1)
#define KIDS_TAG_FAN ((uintptr_t)2)
#define KIDS_TAGS ((uintptr_t)3)
#define KIDS_GONE ((struct kvi_chain *)64) /* a slot used before: searches go on behind it */

struct kids_slot {
    _Atomic uint64_t key;
    struct kvi_chain *_Atomic kid; /* written last, read first */
};

struct kids_table {
    struct kv_retired retired;
    uint32_t capacity; /* a power of two */
    uint32_t n;
    uint32_t n_used; /* used slots, those of removed children included */
    uint32_t reserved;
    struct kids_slot slot[];
};

struct kids_fan {
    struct kv_retired retired;
    uint32_t n; /* children in all of the set */
    uint32_t reserved;
    _Atomic uintptr_t sub[KIDS_FAN];
};

static inline struct kids_table *kids_as_table(uintptr_t word)
{
    return (struct kids_table *)(word & ~KIDS_TAGS);
}

static inline struct kids_fan *kids_as_fan(uintptr_t word)
{
    return (struct kids_fan *)(word & ~KIDS_TAGS);
}

static inline uintptr_t kids_load(const _Atomic uintptr_t *where)
{
    return atomic_load_explicit(where, memory_order_acquire);
}

static inline struct kvi_chain *kids_slot_kid(const struct kids_slot *slot)
{
    return atomic_load_explicit(&slot->kid, memory_order_acquire);
}

static inline uint64_t kids_slot_key(const struct kids_slot *slot)
{
    return atomic_load_explicit(&slot->key, memory_order_acquire);
}

static inline bool kids_slot_live(const struct kids_slot *slot)
{
    struct kvi_chain *kid = kids_slot_kid(slot);

    return kid && kid != KIDS_GONE;
}

static inline uint64_t kids_key_of(const struct kvi_index *ix, const struct kvi_chain *chain)
{
    return *kvi_arena_locals(&ix->arena, kvi_chain_run(chain).pos);
}

#endif
