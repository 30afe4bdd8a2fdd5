// SPDX-License-Identifier: Apache-2.0
/*
 * Priorities that end: a heap of when, one entry a retained block, which knows its place in it. (So
 * an entry goes with its block's priority or life, and there are never more of them than blocks.)
 *
 * Nothing happens at an end by itself. Ends that have come are carried out by calls that evict, the
 * oldest first, a few more than blocks are evicted: however many come at once, no call does more
 * than its share, and as long as there are any, each eviction finds blocks among them that it may
 * take. What asks for one block's priority carries out that block's end.
 */
#ifndef KVBM_BM_RETAIN_H
#define KVBM_BM_RETAIN_H

#include <stddef.h>
#include <stdint.h>

#define KVBM_RETAIN_MORE 16 /* ends carried out beyond the number of blocks evicted */
/* Of a place of the heap: half as many levels, and so cache misses, as of two. */
#define KVBM_RETAIN_CHILDREN 4

struct kvbm_pool;

struct kvbm_retained_one {
    uint64_t when_ns; /* monotonic */
    uint32_t slot;
    uint32_t
        position; /* in its sequence: of one end the greater first, so that a prompt's end goes first */
};

struct kvbm_retained {
    struct kvbm_retained_one *heap;
    size_t n, capacity;
    uint32_t *
        place; /* [n_blocks + 1] in the heap, of slots with SLOT_RETAINED; NULL: there never were any */
    size_t place_mapped;
};

/** Room for @n more. Returns 0 or -ENOMEM. */
int kvbm_retain_reserve(struct kvbm_pool *pool, size_t n);
/** The end of @ttl_ms from now; 0, never: of 0, and of more than 2^63 ns. */
uint64_t kvbm_retain_until(uint64_t ttl_ms);
/** Slot @i keeps its priority up to then. There is room. */
void kvbm_retain_set(struct kvbm_pool *pool, uint32_t i, uint64_t when_ns);
/** Slot @i keeps its priority for ever, or isn't registered any more. */
void kvbm_retain_drop(struct kvbm_pool *pool, uint32_t i);
/** Ends that have come, @max at most: their blocks get the default priority. */
void kvbm_retain_expire(struct kvbm_pool *pool, size_t max);
/** The same for slot @i alone, if its end has come. */
void kvbm_retain_expire_one(struct kvbm_pool *pool, uint32_t i);
/** When slot @i's priority ends; 0: never. */
uint64_t kvbm_retain_end(const struct kvbm_pool *pool, uint32_t i);
void kvbm_retain_fini(struct kvbm_retained *retained);

#endif
