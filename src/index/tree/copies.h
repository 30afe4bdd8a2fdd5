// SPDX-License-Identifier: Apache-2.0
/**
 * Physical copies of blocks. Engines don't deduplicate: one hash may be in several blocks of a
 * pool, and in the pools of several owners. A block is in a tier as long as one copy of it is.
 *
 *     tree            (holder, tier, block): a bit
 *     no record       one copy, of the holder's implied source in that tier (nearly always 0)
 *     records         all copies of that (holder, tier, hash), one record for each source
 *
 * Records exist only for blocks that the holder has in that tier, in the tree or parked.
 *
 * Threads: the index's lock.
 */
#ifndef KV_INDEX_TREE_COPIES_H
#define KV_INDEX_TREE_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/memory/table.h"
#include "index/tree/facts.h"

struct kvi_index;
struct kvi_holder;

struct kvi_copy {
    uint64_t hash;
    uint32_t holder;
    uint32_t count;
    uint16_t source;
    uint8_t tier;
    bool taken; /* the record's last event was a removal */
};

struct kvi_copies {
    struct kvi_copy *items; /* dense */
    size_t n, capacity, max;
    struct kvi_table by_hash; /* holder, tier, hash -> index in items */
    uint64_t uncounted;       /* copies left out for lack of memory */
    uint64_t doubts;          /* tiers that have come into doubt: see copies.c */
};

/** Number of copies left, for a removal whose event doesn't tell it. */
#define KVI_COPIES_UNSAID UINT32_MAX

enum kvi_taken {
    KVI_TAKEN_NONE, /* the source has no copy */
    KVI_TAKEN_SOME, /* the block stays in its tier */
    KVI_TAKEN_LAST  /* no copy of any source is left */
};

int kvi_copies_init(struct kvi_index *ix);
void kvi_copies_fini(struct kvi_index *ix);

/**
 * Set the implied source of an empty tier before blocks enter: the first source with blocks there.
 */
void kvi_copies_imply(struct kvi_holder *holder, enum kv_tier tier, uint32_t source);
/** Return true when there is memory for @n more records, within max_copies. */
bool kvi_copies_have_room(struct kvi_index *ix, size_t n);
/** Count copies that were left out. */
void kvi_copies_lost(struct kvi_index *ix, struct kvi_holder *holder, uint64_t n);
/**
 * Add a copy of a block. @had: the block is in the tier already. Not @counted: the source has at
 * least one copy. Without memory for its record, the copy is left out and counted as lost. Returns
 * false when the tier must not have the block either: nothing would remove it.
 */
bool kvi_copies_add(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint32_t source, uint64_t hash, bool had, bool counted);
/**
 * Remove a copy of a block that is in the tier. @left is the number of copies left by the event, or
 * KVI_COPIES_UNSAID.
 */
enum kvi_taken kvi_copies_take(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                               uint32_t source, uint64_t hash, uint32_t left);
/** Return the number of the holder's tiers in which some removals may never be announced. */
uint64_t kvi_copies_doubted(const struct kvi_holder *holder);
/** End the doubt: the holder has no block. */
void kvi_copies_forget_doubt(struct kvi_holder *holder);
/** Forget the copies of a block that leaves the tiers of @mask. */
void kvi_copies_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t mask,
                       uint64_t hash);
/** Return the copies of all sources of a block that is in the tiers of @mask. */
uint64_t kvi_copies_total(const struct kvi_index *ix, const struct kvi_holder *holder,
                          uint32_t mask, uint64_t hash);
/** Return the copies of @source, implied ones included, of a block that is in the tier. */
uint32_t kvi_copies_count(const struct kvi_index *ix, const struct kvi_holder *holder,
                          enum kv_tier tier, uint32_t source, uint64_t hash);

/** Facts about a block's copies for a dump. */
enum kvi_said {
    KVI_SAID_NOTHING, /* nothing: one copy of the implied source */
    KVI_SAID_COUNT,   /* a number of copies of source 0, the implied source */
    KVI_SAID_SOURCES
};
enum kvi_said kvi_copies_say(const struct kvi_index *ix, const struct kvi_copy *copy);
/** Call @fn with each record of the block of @copy. */
void kvi_copies_each(const struct kvi_index *ix, const struct kvi_copy *copy,
                     void (*fn)(void *arg, const struct kvi_copy *copy), void *arg);
/**
 * Set the copies of a block that is in the tier; those without memory for a record are lost.
 * Returns false when none could be noted: the tier must not have the block.
 */
bool kvi_copies_set(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t hash, const struct kvi_source_copies *sources, size_t n);
/** Take over what another index has learned of a tier's sources. */
void kvi_copies_restore_tier(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                             const struct kvi_extra *extra);

#endif
