// SPDX-License-Identifier: Apache-2.0
/*
 * A pool: its blocks' slots, the free ones, the inactive ones in the order of their eviction.
 *
 *   free:     ring of slot numbers, first in first out
 *   mutable:  refs 1, state Reset, Partial or Complete (which names an entry)
 *   active:   Registered, refs > 0; a duplicate holds one of its primary's refs
 *   inactive: Registered, refs 0; in one of the policy's lists (evict.h)
 *
 * All of it is guarded by the registry's lock.
 */
#ifndef KVBM_BM_POOL_H
#define KVBM_BM_POOL_H

#include <errno.h>

#include "base/error.h"
#include "evict.h"
#include "registry.h"
#include "retain.h"
#include "sketch.h"
#include "slab.h"

/* Flags of slots. */
#define SLOT_DUPLICATE 1u
#define SLOT_RETAINED 2u /* its priority ends (retain.h) */
#define SLOT_INACTIVE 4u
#define SLOT_LISTED 8u   /* in one of evict's lists: lineage lists leaves only */
#define SLOT_CLAIMED 16u /* seen in the array of handles that is being checked */
#define SLOT_LEAVING 32u /* kvbm_pool_leaving told of it, and nobody has asked for it since */
#define SLOT_FIRST 64u   /* kvbm_evict_first put it where it is in its list */

/*
 * Blocks lie in memory as they come, so that what a call costs is the cache lines it waits for: a
 * slot is half a line, and never in two.
 */
struct kvbm_slot {
    uint32_t entry;      /* Complete, Registered */
    uint32_t refs;       /* strong handles, and duplicates of it */
    uint32_t generation; /* of strong handles: changes with the state and at the last release */
    uint32_t life;       /* of weak handles: changes when the block stops being registered */
    uint32_t prev;       /* listed: neighbours in the list; a duplicate: prev is its primary */
    uint32_t next; /* likewise; of an active primary: how many duplicates lean on it; else 0 */
    union {
        uint32_t tokens; /* buffer of Partial and Complete, 0: none */
        uint32_t ahead;  /* inactive: became so some releases later (evict.h); 0: unknown */
        uint32_t age;    /* inactive, lineage: its age class (evict.h) */
    };
    uint8_t state;
    uint8_t flags;
    uint8_t priority;
    uint8_t level; /* evict.h */
};
_Static_assert(sizeof(struct kvbm_slot) == 32, "half a cache line");

/** Place of a Partial block in its sequence; lies in front of the tokens in the block's buffer. */
struct kvbm_start {
    uint64_t salt_hash;
    uint64_t parent;
    uint32_t chain;
    uint32_t position;
    uint32_t group;
    uint32_t has_parent;
    uint32_t n_tokens; /* so far */
};
#define KVBM_START_WORDS (sizeof(struct kvbm_start) / 4)

struct kvbm_pool {
    struct kvbm_registry *registry;
    struct kvbm_pool *next; /* of the registry */
    char name[32];
    enum kv_tier tier;
    uint64_t groups;
    uint32_t n_blocks;
    uint32_t block_size;
    bool reject_duplicates, reset_on_release;
    const struct kvbm_layout *layout;

    struct kvbm_slot *slots; /* [n_blocks + 1], and behind them the ends of evict's lists */
    size_t slots_mapped;
    uint32_t *free; /* ring */
    size_t free_mapped;
    uint32_t free_head, n_free;
    uint64_t n_inactive, n_mutable, n_immutable;

    struct kvbm_evict evict;
    struct kvbm_sketch sketch; /* LFU */
    struct kvbm_retained retained;
    struct kvbm_slab tokens;
    struct kvbm_pool_stats stats; /* counters; gauges are filled in on demand */
    uint8_t watched;              /* kvbm_pool_watch: bits of tiers */
    uint64_t n_lost;              /* evicted without a word, and no tier of those has them */
    void **acquired; /* [n_blocks + 1] who acquired it last, when handles are tracked */
    size_t acquired_mapped;
};

static inline struct kvbm_entry *kvbm_slot_entry(const struct kvbm_pool *pool,
                                                 const struct kvbm_slot *slot)
{
    return kvbm_entry(pool->registry, slot->entry);
}

/** The block that is found under the key of slot @i, which is registered. */
static inline uint32_t kvbm_primary_of(const struct kvbm_pool *pool, uint32_t i)
{
    return pool->slots[i].flags & SLOT_DUPLICATE ? pool->slots[i].prev : i;
}

static inline void kvbm_prefetch_slot(const struct kvbm_pool *pool, uint32_t i)
{
    __builtin_prefetch(&pool->slots[i], 1);
}

/** The start of a Partial slot. */
static inline struct kvbm_start *kvbm_slot_start(const struct kvbm_pool *pool,
                                                 const struct kvbm_slot *slot)
{
    return (struct kvbm_start *)kvbm_slab_at(&pool->tokens, slot->tokens);
}

/** The tokens of a slot that has a buffer. */
static inline uint32_t *kvbm_slot_tokens(const struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    return kvbm_slab_at(&pool->tokens, slot->tokens) + KVBM_START_WORDS;
}

static inline void kvbm_track(struct kvbm_pool *pool, uint32_t i, void *caller)
{
    if (KV_UNLIKELY(pool->acquired != NULL))
        pool->acquired[i] = caller;
}

/** "device", "host", "disk", "external". */
const char *kvbm_tier_name(enum kv_tier tier);

/** Log that these are held, and the first 100 of them one by one. Takes the lock (dump.c). */
void kvbm_report_leaks(struct kvbm_pool *pool, uint64_t mutable, uint64_t immutable);

/**
 * How many mutable, complete and immutable handles there are. Takes the lock, and looks at every
 * block when there are any.
 */
uint64_t kvbm_pool_handles(struct kvbm_pool *pool);

/** All blocks free, in order of their numbers. */
void kvbm_pool_start(struct kvbm_pool *pool);

/** The slot number of a strong handle, or -ESTALE, -EXDEV, -EINVAL (zeroed), -ERANGE. */
static inline int64_t kvbm_slot_of(struct kvbm_pool *pool, const struct kvbm_handle *handle)
{
    const struct kvbm_slot *slot;

    if (!handle->pool)
        return -EINVAL;
    if (handle->pool != pool)
        return -EXDEV;
    if (handle->block >= pool->n_blocks)
        return -ERANGE;
    slot = &pool->slots[handle->block + 1];
    if (slot->refs <= slot->next || slot->generation != handle->generation) {
        pool->stats.stale_handles++;
        return -ESTALE;
    }
    return (int64_t)handle->block + 1;
}

static inline struct kvbm_handle kvbm_handle_of(struct kvbm_pool *pool, uint32_t i)
{
    return (struct kvbm_handle){pool, i - 1, pool->slots[i].generation};
}

/** To the free ring: whatever it was named has been let go. */
void kvbm_slot_free(struct kvbm_pool *pool, uint32_t i);

/** kvbm_slot_put (moves.h), of any slot. */
void kvbm_slot_put_other(struct kvbm_pool *pool, uint32_t i);

/** A registered primary without handles, in no list, is forgotten: published, unnamed, free. */
void kvbm_slot_forget(struct kvbm_pool *pool, uint32_t i);

/** Take @n inactive blocks, the policy's choice; there are that many. */
void kvbm_evict_blocks(struct kvbm_pool *pool, uint32_t *ret, size_t n);

/*
 * For who moves many blocks at a time (handle.c). One lock for all, and what is wrong with one is
 * no other's concern.
 */

/** As kvbm_weak_upgrade and then kvbm_immutable_info of each: ret[i] is zeroed, and info[i] as it was, where the block
 * has gone, or the handle is zeroed or another pool's. */
void kvbm_pool_upgrade(struct kvbm_pool *pool, const struct kvbm_weak *blocks, size_t n,
                       struct kvbm_immutable *ret, struct kvbm_block_info *info);
/** As kvbm_immutable_downgrade and kvbm_immutable_info of each: ret[i] is zeroed, and info[i] as it was, where the
 * handle is zeroed or not the pool's (any more). */
void kvbm_pool_downgrade(struct kvbm_pool *pool, const struct kvbm_immutable *blocks, size_t n,
                         struct kvbm_weak *ret, struct kvbm_block_info *info);

/*
 * For who keeps what is about to be evicted (leave.c).
 */

/**
 * Count as lost from here on what is evicted that kvbm_pool_leaving didn't tell of and no tier of
 * @tiers has.
 */
void kvbm_pool_watch(struct kvbm_pool *pool, uint8_t tiers);
/**
 * List the blocks that the next @n allocations would evict and that no watched tier has, as weak
 * handles in that order, at most @max. With lineage the order is approximate.
 *
 * A block is listed once, until it is matched or touched, or given back by
 * kvbm_pool_release_oldest. Looks only after n / 4 allocations since the last look, at which
 * *@since was set (0: look now). Counts no use. Returns the number listed.
 */
size_t kvbm_pool_leaving(struct kvbm_pool *pool, size_t n, uint64_t *since, struct kvbm_weak *ret,
                         size_t max);
/**
 * As kvbm_immutable_release for one that was leaving: unless somebody has asked for it meanwhile it
 * is the first to be evicted of its kind, as if it hadn't been held. @again: tell of it again.
 */
void kvbm_pool_release_oldest(struct kvbm_immutable *block, bool again);
uint64_t kvbm_pool_lost(struct kvbm_pool *pool);

/** Forget all inactive ones. Returns how many. */
size_t kvbm_forget_inactive(struct kvbm_pool *pool);

/**
 * Return the error of a handle that kvbm_claim (moves.h) refused; 0 for a zeroed handle when @holes
 * allows it.
 */
int kvbm_claim_refused(struct kvbm_pool *pool, const struct kvbm_handle *handle, bool holes);
/** Take SLOT_CLAIMED off again. */
void kvbm_unclaim(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n);

/** Slot @i, mutable, becomes Complete as this key. The pool is locked. */
int kvbm_stage(struct kvbm_pool *pool, uint32_t i, uint32_t group, const void *key,
               const void *parent, uint32_t position);

#endif
