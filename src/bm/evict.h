// SPDX-License-Identifier: Apache-2.0
/*
 * Which inactive block goes first. One structure for all policies: lists of slots, in the order
 *
 *     priority 0 ............ 100, in each: level 0 ...... n_levels - 1, in each: first in, first out
 *
 * and bitmaps that find the first list that isn't empty. What a policy decides is the level:
 *
 *   LRU      one level
 *   LFU      four, by how often the key was used (sketch.h)
 *   lineage  4096, by when the block became inactive: level = age class, a ring of time that moves on
 *            (so that a parent, whose turn comes when its last child has gone, gets the place of its own
 *            age); only leaves are in lists at all
 *
 * Each operation takes constant time: two bitmap steps and a list link. A list is a ring through
 * its end, a slot behind those of the blocks (next: the first, prev: the last, both 0: empty), so
 * that who leaves it needn't know which one it is in.
 *
 * A list's blocks lie anywhere in memory, and following its links is one cache miss after the
 * other. So an inactive slot also remembers which one came KVBM_AHEAD releases later (ahead): when
 * it is evicted, that one is fetched. A hint: it may have left meanwhile, or be in another list.
 * And who evicts looks at the next ones, whose slots are there by then, and fetches their entries.
 *
 * With lineage what follows a block is mostly its parent, whenever that was released; so it goes on
 * ahead from parent to parent, one of them each time a block is evicted, and fetches all that
 * evicting them will touch.
 */
#ifndef KVBM_BM_EVICT_H
#define KVBM_BM_EVICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_pool.h"

#define KVBM_AHEAD 32
#define KVBM_CHASE 8 /* generations */

struct kvbm_evict {
    enum kvbm_eviction policy;
    uint32_t n_levels;      /* 1, 4, 4096 */
    uint32_t level_bits;    /* 2^level_bits of them */
    uint32_t n_words;       /* of a priority's bitmap */
    uint32_t ends;          /* slot of the first list's end: [KVBM_PRIORITY_MAX + 1][n_levels] */
    uint64_t *words;        /* [..][n_words], a bit per list that isn't empty */
    uint64_t *summary;      /* [..], a bit per word that isn't 0 */
    uint64_t priorities[2]; /* a bit per summary that isn't 0 */
    size_t words_mapped, summary_mapped;
    uint8_t thresholds[3];
    uint64_t tick;               /* releases so far */
    uint32_t front;              /* slot that kvbm_evict_first put in its place last */
    uint32_t latest[KVBM_AHEAD]; /* who came last, a ring of ticks */
    /* lineage: */
    uint32_t shift;     /* an age class is 2^shift ticks */
    uint64_t base;      /* the oldest age class that has a list of its own */
    uint32_t *children; /* by entry: how many of its children are inactive */
    size_t children_mapped, max_entries;
    uint32_t expected; /* entry: parent of the one that was evicted last */
    uint32_t
        chased; /* entry: an ancestor of it that is being fetched, n_chased generations above */
    uint32_t n_chased;
};

struct kvbm_pool;

/** The end of a list. */
static inline uint32_t kvbm_list_end(const struct kvbm_evict *evict, uint32_t priority,
                                     uint32_t level)
{
    return evict->ends + priority * evict->n_levels + level;
}

/** Slot @i is the first one of a list that was empty. */
void kvbm_list_started(struct kvbm_pool *pool, uint32_t at, uint32_t i);
/** Nothing but its end is left of a list. */
void kvbm_list_emptied(struct kvbm_pool *pool, uint32_t at);

int kvbm_evict_init(struct kvbm_evict *evict, const struct kvbm_pool_opts *opts);
/** How many lists there are: slots to add for their ends. */
size_t kvbm_evict_ends(const struct kvbm_evict *evict);
void kvbm_evict_fini(struct kvbm_evict *evict);
/** The registry's entries have become more. */
int kvbm_evict_grow(struct kvbm_evict *evict, size_t max_entries);

/** kvbm_evict_insert (moves.h) with a policy that has levels. */
void kvbm_evict_insert_ranked(struct kvbm_pool *pool, uint32_t i);
/** kvbm_evict_remove (moves.h) with lineage. */
void kvbm_lineage_remove(struct kvbm_pool *pool, uint32_t i);
/** Remove the first @n, in order; there are that many. */
void kvbm_evict_pop(struct kvbm_pool *pool, uint32_t *ret, size_t n);
/** Fetch what evicting the next ones will touch; there are some. */
void kvbm_evict_fetch(const struct kvbm_pool *pool, size_t n);
/** Its priority has changed. */
void kvbm_evict_prioritise(struct kvbm_pool *pool, uint32_t i, uint8_t priority);
/**
 * Slot @i, inactive, goes first among those of its priority (LFU: and of @level, which it had), but
 * for those of which this was said before: behind the last of them.
 */
void kvbm_evict_first(struct kvbm_pool *pool, uint32_t i, uint8_t level);
/**
 * Visit @n inactive slots in the order in which they would be evicted, until @visit says stop. With
 * lineage that is nearly the order: a leaf, then the ancestors that it alone holds back, then the
 * next leaf.
 */
void kvbm_evict_walk(struct kvbm_pool *pool, size_t n,
                     bool (*visit)(struct kvbm_pool *pool, uint32_t i, void *arg), void *arg);

#endif
