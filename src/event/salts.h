// SPDX-License-Identifier: Apache-2.0
/**
 * Which blocks of a publisher belong to a salted chain.
 *
 * Engines name the cache salt with the first block of a chain; what comes later only names its
 * parent. So the salt of every salted block is remembered for as long as the block is in some tier,
 * by (rank, hash). Blocks without a salt are not remembered: they are most, and what isn't here has
 * none. Engines may hold several copies of a block, in one tier and in several: copies are counted,
 * and the salt goes with the last one. A count that has reached its maximum stays there.
 *
 * Open addressing, linear probing, no tombstones; 32 bytes an entry, at most 3/4 full. Where a hash
 * goes depends on secrets, so that a publisher can't choose hashes and ranks that collide.
 *
 * A batch may hold tens of thousands of clears, so a clear looks at no block. Each rank that has
 * blocks has one more slot, with their generation and number:
 *
 *     rank slot    (rank 3)          generation 7, 2 blocks
 *     block slots  (rank 3, hash A)  generation 7   counts
 *                  (rank 3, hash B)  generation 6   stale: from before a clear; free for B
 *
 * A clear frees the rank slot. Stale slots go when the table is next built anew, which happens when
 * live and stale ones fill it: so each pays for its own removal.
 */
#ifndef KV_EVENT_SALTS_H
#define KV_EVENT_SALTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

struct kve_salt_entry {
    uint64_t hash;
    uint64_t salt; /* what the salt adds to a seed */
    uint32_t rank;
    uint8_t state;  /* enum kve_salt_state */
    bool ambiguous; /* stored under different salts, or with and without one */
    uint16_t generation;
    uint8_t copies[KV_N_TIERS]; /* of a block: in each tier, at most UINT8_MAX */
    bool lower;                 /* of a rank: some block was in another tier than the device */
};

enum kve_salt_state { KVE_SALT_FREE, KVE_SALT_BLOCK, KVE_SALT_RANK };

struct kve_salts {
    struct kve_salt_entry *slots;
    size_t n;                     /* blocks that are remembered */
    size_t n_ranks;               /* that have any */
    size_t used;                  /* slots: of blocks, of ranks, stale */
    size_t capacity;              /* 0 or a power of two */
    size_t limit;                 /* of n */
    uint64_t secret, rank_secret; /* odd */
    size_t moves;        /* slots looked at to build the table anew, ever: its whole cost */
    uint16_t generation; /* of the next rank slot */
    bool cleared;        /* a rank was, so stale slots may be of this generation */
};

void kve_salts_init(struct kve_salts *salts, size_t limit);
void kve_salts_fini(struct kve_salts *salts);

/** Make room for @n more of one rank, until the next clear. Returns 0, -ENOSPC (over the limit), -ENOMEM. */
int kve_salts_reserve(struct kve_salts *salts, size_t n);

/** One more copy of the block is in @tier, under @salt. Room must have been reserved. */
void kve_salts_put(struct kve_salts *salts, uint32_t rank, uint64_t hash, uint64_t salt,
                   enum kv_tier tier);

/** Remember a block as another table does; of @told, hash, rank, salt, copies and the flags count.
 * Returns 0, -ENOSPC, -ENOMEM. */
int kve_salts_restore(struct kve_salts *salts, const struct kve_salt_entry *told);

/** Whether some block of @rank was in another tier than the device. */
bool kve_salts_saw_lower(const struct kve_salts *salts, uint32_t rank);

/** The entry of a block, or NULL. Valid until the next put or remove. */
struct kve_salt_entry *kve_salts_find(const struct kve_salts *salts, uint32_t rank, uint64_t hash);

/** A copy of the block left @tier; with its last copy anywhere the block is forgotten. */
void kve_salts_remove(struct kve_salts *salts, uint32_t rank, uint64_t hash, enum kv_tier tier);

/**
 * A rank's blocks left the device, or with @all_tiers everything. Takes the same time however many
 * they are: where only the device is emptied and the rank used other tiers, nothing is forgotten.
 */
void kve_salts_clear(struct kve_salts *salts, uint32_t rank, bool all_tiers);
void kve_salts_reset(struct kve_salts *salts);

#endif
