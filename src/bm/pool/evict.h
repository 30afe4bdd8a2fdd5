// SPDX-License-Identifier: Apache-2.0
/*
 * Eviction order of inactive blocks. All policies share one structure: lists of slots, in the order
 *
 *     priority 0 .......... 100, in each: level 0 ...... n_levels - 1, in each: first in, first out
 *
 * and bitmaps that find the first non-empty list. A policy chooses the level:
 *
 *   LRU      one level
 *   LFU      four, by how often the key was used (sketch.h)
 *   lineage  4096, by when the block became inactive: level = age class, in a ring of time. Only
 *            leaves are listed. A parent is listed when its last child has gone, by its own age
 *
 * Each operation takes constant time: two bitmap steps and a list link. A list is a ring through
 * its end, which is a slot behind those of the blocks (next: the first, prev: the last, both 0:
 * empty). So a slot can leave its list without knowing which list it is in.
 *
 * A list's blocks lie anywhere in memory, and following its links costs one cache miss after the
 * other. So an inactive slot also remembers, in `ahead`, the slot released KVBM_AHEAD releases
 * later: evicting the one prefetches the other. This is a hint: the other may be active or in
 * another list by then. An eviction also reads the next slots, which are in the cache by then, and
 * prefetches their entries.
 *
 * With lineage the next victim is mostly the block's parent, whenever that was released. So each
 * eviction steps ahead from parent to parent and prefetches all that evicting them will touch.
 */
#ifndef KVBM_BM_POOL_EVICT_H
#define KVBM_BM_POOL_EVICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_pool.h"

#define KVBM_AHEAD 32
#define KVBM_CHASE 8 /* generations */

struct kvbm_evict {
    enum kvbm_eviction policy;
    uint32_t n_levels;      /* 1, 4 or 4096 */
    uint32_t level_bits;    /* n_levels is 2^level_bits */
    uint32_t n_words;       /* words of a priority's bitmap */
    uint32_t ends;          /* slot of the first list's end: [KVBM_PRIORITY_MAX + 1][n_levels] */
    uint64_t *words;        /* [..][n_words], a bit per non-empty list */
    uint64_t *summary;      /* [..], a bit per word that isn't 0 */
    uint64_t priorities[2]; /* a bit per summary that isn't 0 */
    size_t words_mapped, summary_mapped;
    uint8_t thresholds[3];
    uint64_t tick;               /* number of releases so far */
    uint32_t front;              /* slot that kvbm_evict_first moved last */
    uint32_t latest[KVBM_AHEAD]; /* slots released last, a ring by tick */
    /* lineage only: */
    uint32_t shift;     /* an age class is 2^shift ticks */
    uint64_t base;      /* oldest age class with a list of its own */
    uint32_t *children; /* by entry: number of its inactive children */
    size_t children_mapped, max_entries;
    uint32_t expected; /* entry: parent of the block evicted last */
    /* entry: an ancestor of `expected` being prefetched, n_chased generations above */
    uint32_t chased;
    uint32_t n_chased;
};

struct kvbm_pool;

/** Return the slot number of a list's end. */
static inline uint32_t kvbm_list_end(const struct kvbm_evict *evict, uint32_t priority,
                                     uint32_t level)
{
    return evict->ends + priority * evict->n_levels + level;
}

/** Note that a list was empty and slot @i is its first one. */
void kvbm_list_started(struct kvbm_pool *pool, uint32_t at, uint32_t i);
/** Note that a list is empty now. */
void kvbm_list_emptied(struct kvbm_pool *pool, uint32_t at);

int kvbm_evict_init(struct kvbm_evict *evict, const struct kvbm_pool_opts *opts);
/** Number of lists, each of which needs a slot for its end. */
size_t kvbm_evict_ends(const struct kvbm_evict *evict);
void kvbm_evict_fini(struct kvbm_evict *evict);
/** Grow the arrays by entry, since the registry has more entries. */
int kvbm_evict_grow(struct kvbm_evict *evict, size_t max_entries);

/** Insert as kvbm_evict_insert (moves.h) does, for policies with levels. */
void kvbm_evict_insert_ranked(struct kvbm_pool *pool, uint32_t i);
/** Remove as kvbm_evict_remove (moves.h) does, for lineage. */
void kvbm_lineage_remove(struct kvbm_pool *pool, uint32_t i);
/** Remove the first @n blocks, in order. At least @n are listed. */
void kvbm_evict_pop(struct kvbm_pool *pool, uint32_t *ret, size_t n);
/** Prefetch what the next @n evictions will touch. At least one block is listed. */
void kvbm_evict_fetch(const struct kvbm_pool *pool, size_t n);
/** Change the priority of slot @i. */
void kvbm_evict_prioritise(struct kvbm_pool *pool, uint32_t i, uint8_t priority);
/**
 * Move inactive slot @i to the front of its priority (LFU: of @level, which it had), behind the
 * slots that were moved there before.
 */
void kvbm_evict_first(struct kvbm_pool *pool, uint32_t i, uint8_t level);
/**
 * Visit @n inactive slots in eviction order, until @visit asks to stop. With lineage the order is
 * approximate: a leaf, then the ancestors that only this leaf keeps from eviction, then the next
 * leaf.
 */
void kvbm_evict_walk(struct kvbm_pool *pool, size_t n,
                     bool (*visit)(struct kvbm_pool *pool, uint32_t i, void *arg), void *arg);

#endif
