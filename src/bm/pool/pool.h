// SPDX-License-Identifier: Apache-2.0
/*
 * A pool: its blocks' slots, the free ones, the inactive ones in the order of their eviction.
 *
 *   free:     ring of slot numbers, first in first out
 *   mutable:  refs 1, state Reset, Partial or Complete (which names an entry)
 *   active:   Registered, refs > 0; a duplicate holds one of its primary's refs
 *   inactive: Registered, refs 0; in one of the policy's lists (evict.h)
 *
 * The registry's lock guards all state.
 */
#ifndef KVBM_BM_POOL_POOL_H
#define KVBM_BM_POOL_POOL_H

#include <errno.h>

#include "base/core/error.h"
#include "bm/pool/evict.h"
#include "bm/pool/retain.h"
#include "bm/pool/sketch.h"
#include "bm/pool/slab.h"
#include "bm/registry/registry.h"

/* Flags of slots. */
#define SLOT_DUPLICATE 1u
#define SLOT_RETAINED 2u /* its priority ends (retain.h) */
#define SLOT_INACTIVE 4u
#define SLOT_LISTED 8u   /* in one of evict's lists: lineage lists leaves only */
#define SLOT_CLAIMED 16u /* seen in the array of handles being checked */
#define SLOT_LEAVING 32u /* kvbm_pool_leaving listed it, and no caller has used it since */
#define SLOT_FIRST 64u   /* kvbm_evict_first chose its place in its list */

/* A slot. Blocks lie in memory in the order of their numbers, so a call costs the cache lines that
 * it waits for. A slot is half a line, and never crosses one. */
struct kvbm_slot {
    uint32_t entry;      /* Complete, Registered */
    uint32_t refs;       /* strong handles, and duplicates that reference it */
    uint32_t generation; /* of strong handles: changes with the state and at the last release */
    uint32_t life;       /* of weak handles: changes when the block stops being registered */
    uint32_t prev;       /* listed: neighbours in the list; a duplicate: prev is its primary */
    uint32_t next;       /* as prev; of an active primary: number of its duplicates; else 0 */
    union {
        uint32_t tokens; /* buffer of Partial and Complete, 0: none */
        /* inactive: slot released KVBM_AHEAD releases later (evict.h); 0: unknown */
        uint32_t ahead;
        uint32_t age; /* inactive, lineage: its age class (evict.h) */
    };
    uint8_t state;
    uint8_t flags;
    uint8_t priority;
    uint8_t level; /* as in evict.h */
};
_Static_assert(sizeof(struct kvbm_slot) == 32, "half a cache line");

/**
 * Place of a Partial block in its sequence, stored in front of the tokens in the block's buffer.
 */
struct kvbm_start {
    uint64_t salt_hash;
    uint64_t parent;
    uint32_t chain;
    uint32_t position;
    uint32_t group;
    uint32_t has_parent;
    uint32_t n_tokens; /* number so far */
};
#define KVBM_START_WORDS (sizeof(struct kvbm_start) / 4)

struct kvbm_pool {
    struct kvbm_registry *registry;
    struct kvbm_pool *next; /* next pool of the registry */
    char name[32];
    enum kv_tier tier;
    uint64_t groups;
    uint32_t n_blocks;
    uint32_t block_size;
    bool reject_duplicates, reset_on_release;
    const struct kvbm_layout *layout;

    struct kvbm_slot *slots; /* [n_blocks + 1], then the ends of evict's lists */
    size_t slots_mapped;
    uint32_t *free; /* ring of free slots */
    size_t free_mapped;
    uint32_t free_head, n_free;
    uint64_t n_inactive, n_mutable, n_immutable;

    struct kvbm_evict evict;
    struct kvbm_sketch sketch; /* LFU */
    struct kvbm_retained retained;
    struct kvbm_slab tokens;
    struct kvbm_pool_stats stats; /* counters; gauges are filled in on demand */
    uint8_t watched;              /* kvbm_pool_watch: bits of tiers */
    /* evicted before kvbm_pool_leaving listed them, and in none of those tiers */
    uint64_t n_lost;
    /* [n_blocks + 1] code address of the last acquisition, when handles are tracked */
    void **acquired;
    size_t acquired_mapped;
};

static inline struct kvbm_entry *kvbm_slot_entry(const struct kvbm_pool *pool,
                                                 const struct kvbm_slot *slot)
{
    return kvbm_entry(pool->registry, slot->entry);
}

/** Return the block that lookups find under the key of registered slot @i. */
static inline uint32_t kvbm_primary_of(const struct kvbm_pool *pool, uint32_t i)
{
    return pool->slots[i].flags & SLOT_DUPLICATE ? pool->slots[i].prev : i;
}

static inline void kvbm_prefetch_slot(const struct kvbm_pool *pool, uint32_t i)
{
    __builtin_prefetch(&pool->slots[i], 1);
}

/** Return the start of a Partial slot. */
static inline struct kvbm_start *kvbm_slot_start(const struct kvbm_pool *pool,
                                                 const struct kvbm_slot *slot)
{
    return (struct kvbm_start *)kvbm_slab_at(&pool->tokens, slot->tokens);
}

/** Return the tokens of a slot that has a buffer. */
static inline uint32_t *kvbm_slot_tokens(const struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    return kvbm_slab_at(&pool->tokens, slot->tokens) + KVBM_START_WORDS;
}

static inline void kvbm_track(struct kvbm_pool *pool, uint32_t i, void *caller)
{
    if (KV_UNLIKELY(pool->acquired != NULL))
        pool->acquired[i] = caller;
}

/** Return a tier's name: "device", "host", "disk", "external". */
const char *kvbm_tier_name(enum kv_tier tier);

/** Log the numbers of held blocks, and the first 100 blocks one by one. Takes the lock (dump.c). */
void kvbm_report_leaks(struct kvbm_pool *pool, uint64_t mutable, uint64_t immutable);

/**
 * As kvbm_pool_adopt, for one block whose event gets @tokens (block_size of them; NULL: none). Also
 * returns -ENOMEM. Takes the lock (register.c).
 */
int kvbm_pool_adopt_tokens(struct kvbm_pool *pool, struct kvbm_mutable *block,
                           const struct kvbm_immutable *like, const uint32_t *tokens,
                           struct kvbm_immutable *ret);

/**
 * Count mutable, complete and immutable handles. Takes the lock, and visits every block when there
 * are any.
 */
uint64_t kvbm_pool_handles(struct kvbm_pool *pool);

/** Make all blocks free, in the order of their numbers. */
void kvbm_pool_start(struct kvbm_pool *pool);

/** Return the slot number of a strong handle, or -ESTALE, -EXDEV, -EINVAL (zeroed), -ERANGE. */
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

/** Put a slot into the free ring. Its key and buffer have been released. */
void kvbm_slot_free(struct kvbm_pool *pool, uint32_t i);

/** As kvbm_slot_put (moves.h), for any slot. */
void kvbm_slot_put_other(struct kvbm_pool *pool, uint32_t i);

/**
 * Forget a registered primary without handles, in no list: publish the removal, take off its key,
 * free it.
 */
void kvbm_slot_forget(struct kvbm_pool *pool, uint32_t i);

/** Evict the @n inactive blocks that the policy chooses. At least @n are inactive. */
void kvbm_evict_blocks(struct kvbm_pool *pool, uint32_t *ret, size_t n);

/* Calls on many blocks at a time, with one lock; an error of one block doesn't affect the others
 * (handle.c). */

/**
 * Call kvbm_weak_upgrade and then kvbm_immutable_info for each block. Where the block has gone, or
 * the handle is zeroed or another pool's, ret[i] is zeroed and info[i] unchanged.
 */
void kvbm_pool_upgrade(struct kvbm_pool *pool, const struct kvbm_weak *blocks, size_t n,
                       struct kvbm_immutable *ret, struct kvbm_block_info *info);
/**
 * Call kvbm_immutable_downgrade and kvbm_immutable_info for each block. Where the handle is zeroed
 * or no longer the pool's, ret[i] is zeroed and info[i] unchanged.
 */
void kvbm_pool_downgrade(struct kvbm_pool *pool, const struct kvbm_immutable *blocks, size_t n,
                         struct kvbm_weak *ret, struct kvbm_block_info *info);

/* Calls that list blocks about to be evicted (leave.c). */

/**
 * Count as lost, from now on, evicted blocks that kvbm_pool_leaving did not list and no tier of
 * @tiers has.
 */
void kvbm_pool_watch(struct kvbm_pool *pool, uint8_t tiers);
/**
 * List the blocks that the next @n allocations would evict and that no watched tier has, as weak
 * handles in that order, at most @max. With lineage the order is approximate.
 *
 * A block is listed once, until it is matched or touched, or released by kvbm_pool_release_oldest.
 * Searches only when n / 4 allocations have passed since the last search, which set *@since (0:
 * search now). Doesn't count as a use. Returns the number listed.
 */
size_t kvbm_pool_leaving(struct kvbm_pool *pool, size_t n, uint64_t *since, struct kvbm_weak *ret,
                         size_t max);
/**
 * Release as kvbm_immutable_release does, for a block that was leaving. Unless another caller has
 * asked for it meanwhile, it is the first to be evicted of its kind, as if it hadn't been held.
 * @again: kvbm_pool_leaving may list it again.
 */
void kvbm_pool_release_oldest(struct kvbm_immutable *block, bool again);
uint64_t kvbm_pool_lost(struct kvbm_pool *pool);

/** Forget all inactive blocks. Returns their number. */
size_t kvbm_forget_inactive(struct kvbm_pool *pool);

/**
 * Return the error of a handle that kvbm_claim (moves.h) refused; 0 for a zeroed handle when @holes
 * allows it.
 */
int kvbm_claim_refused(struct kvbm_pool *pool, const struct kvbm_handle *handle, bool holes);
/** Clear SLOT_CLAIMED. */
void kvbm_unclaim(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n);

/**
 * Copy the keys of @group that the pool has registered to @ret, packed, at most @max: those in none
 * of the tiers @except (bits 1 << tier), from place *@at on (0 at first). *@at becomes the place to go
 * on from. Returns their number: less than @max at the end. Holds the lock for 16,384 blocks at a time:
 * blocks registered or evicted meanwhile may be missed.
 */
size_t kvbm_pool_keys(struct kvbm_pool *pool, uint32_t group, uint32_t except, uint32_t *at,
                      void *ret, size_t max);

/** True for keys of no sequence. An older caller's struct has no such field. */
static inline bool kvbm_chain_scattered(const struct kvbm_chain *chain)
{
    return KV_OPT(chain, scattered, false);
}

/** Make mutable slot @i Complete under this key. Call with the pool locked. */
int kvbm_stage(struct kvbm_pool *pool, uint32_t i, uint32_t group, const void *key,
               const void *parent, uint32_t position);

#endif
