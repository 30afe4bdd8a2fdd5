// SPDX-License-Identifier: Apache-2.0
/*
 * Priorities that end: a heap by end time, with an entry per retained block. The block knows the
 * entry's place, so that the entry is removed with the block's priority or registration; entries
 * never outnumber blocks.
 *
 * Ends are not carried out by a timer. Calls that evict carry out past ends, the oldest first, a
 * few more than the blocks they evict. So a call does only its share, however many ends come at
 * once, and while any are left each eviction finds blocks among them. A call that needs one block's
 * priority carries out that block's end.
 */
#ifndef KVBM_BM_POOL_RETAIN_H
#define KVBM_BM_POOL_RETAIN_H

#include <stddef.h>
#include <stdint.h>

#define KVBM_RETAIN_MORE 16 /* ends carried out beyond the number of blocks evicted */
/* Children of a heap entry. Four halve the levels, and so the cache misses, of two. */
#define KVBM_RETAIN_CHILDREN 4

struct kvbm_pool;

struct kvbm_retained_one {
    uint64_t when_ns; /* monotonic */
    uint32_t slot;
    /* of the block in its sequence: among equal ends the greater first, so that a prompt's end goes
     * first */
    uint32_t position;
    /* Among equal positions, which all scattered keys have, the lower goes first: a call retains its
     * last key first. Wraps around. */
    uint32_t order;
};

struct kvbm_retained {
    struct kvbm_retained_one *heap;
    size_t n, capacity;
    uint32_t order; /* of the next entry */
    /* [n_blocks + 1] place in the heap, of slots with SLOT_RETAINED; NULL: no block was ever
     * retained */
    uint32_t *place;
    size_t place_mapped;
};

/** Reserve room for @n more entries. Returns 0 or -ENOMEM. */
int kvbm_retain_reserve(struct kvbm_pool *pool, size_t n);
/** Return the time @ttl_ms from now; 0 (no end) for 0, and for more than 2^63 ns. */
uint64_t kvbm_retain_until(uint64_t ttl_ms);
/** Let slot @i keep its priority until @when_ns. Room was reserved. */
void kvbm_retain_set(struct kvbm_pool *pool, uint32_t i, uint64_t when_ns);
/** Let slot @i keep its priority as long as @from's slot @source, which has an end. Among equal ends
 * @i goes in @source's order. Room was reserved. */
void kvbm_retain_adopt(struct kvbm_pool *pool, uint32_t i, const struct kvbm_pool *from,
                       uint32_t source);
/** Remove slot @i's end: its priority has no end, or it isn't registered any more. */
void kvbm_retain_drop(struct kvbm_pool *pool, uint32_t i);
/** Carry out past ends, @max at most: their blocks get the default priority. */
void kvbm_retain_expire(struct kvbm_pool *pool, size_t max);
/** Carry out slot @i's end if it has passed. */
void kvbm_retain_expire_one(struct kvbm_pool *pool, uint32_t i);
/** Return the end of slot @i's priority; 0: none. */
uint64_t kvbm_retain_end(const struct kvbm_pool *pool, uint32_t i);
void kvbm_retain_fini(struct kvbm_retained *retained);

#endif
