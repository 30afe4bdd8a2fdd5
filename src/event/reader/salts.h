// SPDX-License-Identifier: Apache-2.0
/**
 * Remember which blocks of a publisher belong to a salted chain.
 *
 * Engines name the cache salt with the first block of a chain; later events only name their parent.
 * The table therefore remembers the salt of every salted block, by (rank, hash), for as long as the
 * block is in some tier. Blocks without a salt, which are most, aren't in the table. Engines may hold
 * several copies of a block, in one tier and in several: the table counts copies, and forgets the
 * salt with the last one. A count that has reached its maximum stays there.
 *
 * Counts may stay too high: a store may have been a report of blocks that were there, a removal may
 * have been lost, and a clear of the device leaves the counts of ranks with lower tiers. Somebody who
 * knows which blocks the publisher has therefore sweeps the table now and then (kve_salts_sweep).
 *
 * Open addressing, linear probing, no tombstones; 32 bytes an entry, at most 3/4 full. Secrets
 * decide the slot of a hash, so that a publisher can't choose hashes and ranks that collide.
 *
 * A batch may hold tens of thousands of clears, so a clear visits no block. Each rank with blocks
 * has one more slot, with their generation and number:
 *
 *     rank slot    (rank 3)          generation 7, 2 blocks
 *     block slots  (rank 3, hash A)  generation 7   counts
 *                  (rank 3, hash B)  generation 6   stale: from before a clear; free for B
 *
 * A clear frees the rank slot. The next rebuild drops stale slots. It happens when live and stale
 * slots fill the table, so each stale slot pays for its own removal.
 */
#ifndef KV_EVENT_READER_SALTS_H
#define KV_EVENT_READER_SALTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

struct kve_salt_entry {
    uint64_t hash;
    uint64_t salt; /* term that the salt adds to a seed */
    uint32_t rank;
    uint8_t state;  /* enum kve_salt_state */
    bool ambiguous; /* stored under different salts, or both with and without one */
    uint16_t generation;
    uint8_t copies[KV_N_TIERS]; /* copies of a block in each tier, at most UINT8_MAX */
    /* In a rank slot: some block was in another tier than the device */
    bool lower;
};

enum kve_salt_state { KVE_SALT_FREE, KVE_SALT_BLOCK, KVE_SALT_RANK };

struct kve_salts {
    struct kve_salt_entry *slots;
    size_t n;                     /* number of remembered blocks */
    size_t n_ranks;               /* number of ranks with blocks */
    size_t used;                  /* used slots: of blocks, of ranks, stale */
    size_t capacity;              /* 0 or a power of two */
    size_t limit;                 /* largest n */
    size_t n_new;                 /* blocks that were added or found no room since the last sweep */
    size_t n_kept;                /* blocks that were left behind it */
    bool sweeping;                /* a sweep is under way */
    size_t n_swept;               /* slots that it is done with, from the first on */
    size_t n_paid;                /* the part of n_new for which it has visited slots */
    uint64_t secret, rank_secret; /* odd */
    size_t moves;                 /* slots visited by all rebuilds so far: their whole cost */
    uint16_t generation;          /* generation of the next rank slot */
    bool cleared; /* a rank was cleared: stale slots may have the current generation */
};

void kve_salts_init(struct kve_salts *salts, size_t limit);
void kve_salts_fini(struct kve_salts *salts);

/**
 * Make room for @n more blocks of one rank, until the next clear. Returns 0, -ENOSPC (over the
 * limit) or -ENOMEM.
 */
int kve_salts_reserve(struct kve_salts *salts, size_t n);

/** Add a copy of the block in @tier, under @salt. Room must have been reserved. */
void kve_salts_put(struct kve_salts *salts, uint32_t rank, uint64_t hash, uint64_t salt,
                   enum kv_tier tier);

/**
 * Add an entry from another reader's table: @told's hash, rank, salt, copies and flags. Returns 0,
 * -ENOSPC or -ENOMEM.
 */
int kve_salts_restore(struct kve_salts *salts, const struct kve_salt_entry *told);

/** Return true when some block of @rank was in another tier than the device. */
bool kve_salts_saw_lower(const struct kve_salts *salts, uint32_t rank);

/** Return the entry of a block, or NULL. Valid until the next put or remove. */
struct kve_salt_entry *kve_salts_find(const struct kve_salts *salts, uint32_t rank, uint64_t hash);

/** Remove a copy of the block from @tier. The last copy's removal forgets the block. */
void kve_salts_remove(struct kve_salts *salts, uint32_t rank, uint64_t hash, enum kv_tier tier);

/**
 * Remove a rank's blocks from the device, or with @all_tiers from all tiers, in constant time. When
 * only the device is emptied and the rank used other tiers, the table keeps all blocks.
 */
void kve_salts_clear(struct kve_salts *salts, uint32_t rank, bool all_tiers);
void kve_salts_reset(struct kve_salts *salts);

/** Return true when at most an eighth of the limit is free. */
bool kve_salts_are_crowded(const struct kve_salts *salts);

/**
 * Return true when a sweep is under way or due: as many blocks are new as the last one left; or an
 * eighth of the limit, where no more is left. So each new block pays for a few visits at most.
 */
bool kve_salts_want_sweep(const struct kve_salts *salts);

/** Tell whether the publisher has the block in any tier. */
typedef bool (*kve_salts_held_fn)(void *arg, uint32_t rank, uint64_t hash);

/**
 * Begin a sweep, or go on with it for a slice: forget blocks that the publisher doesn't have. It has
 * @n_held in all: a table with no more isn't looked at while there is room. A sweep may miss a few.
 */
void kve_salts_sweep(struct kve_salts *salts, uint64_t n_held, kve_salts_held_fn held, void *arg);

#endif
