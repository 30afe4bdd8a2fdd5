// SPDX-License-Identifier: Apache-2.0
/**
 * Physical copies of blocks. Engines don't deduplicate: one hash may lie in several blocks of a
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
#ifndef KV_INDEX_COPIES_H
#define KV_INDEX_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/table.h"
#include "kv_index.h"

struct kvi_index;
struct kvi_holder;

struct kvi_copy {
    uint64_t hash;
    uint32_t holder;
    uint32_t count;
    uint16_t source;
    uint8_t tier;
    bool taken; /* the last event of it was a removal */
};

struct kvi_copies {
    struct kvi_copy *items; /* dense */
    size_t n, capacity, max;
    struct kvi_table by_hash;   /* holder, tier, hash -> index in items */
    uint64_t uncounted;         /* copies that found no room */
    struct kvi_holder *doubted; /* who has something for kvi_copies_settle */
};

/** A removal names a number of copies that are left only when the event has one. */
#define KVI_COPIES_UNSAID UINT32_MAX

enum kvi_taken {
    KVI_TAKEN_NONE, /* this source has no copy */
    KVI_TAKEN_SOME, /* the block stays in its tier */
    KVI_TAKEN_LAST  /* no copy of any source is left */
};

int kvi_copies_init(struct kvi_index *ix);
void kvi_copies_fini(struct kvi_index *ix);

/** Before blocks enter: an empty tier's implied source is the first that has blocks there. */
void kvi_copies_imply(struct kvi_holder *holder, enum kv_tier tier, uint32_t source);
/** One more copy of a block that @had copies in the tier already, or none; not @counted: the source has
 * at least one. Never fails: a copy without room for its record is left out and counted. */
void kvi_copies_add(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint32_t source, uint64_t hash, bool had, bool counted);
/** A block that is in the tier loses a copy; @left is what the event says, or KVI_COPIES_UNSAID. */
enum kvi_taken kvi_copies_take(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                               uint32_t source, uint64_t hash, uint32_t left);
/** At the end of a call that added: take back what the engine turned out to have removed. */
void kvi_copies_settle(struct kvi_index *ix);
/** The block leaves the tiers of @mask. */
void kvi_copies_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t mask,
                       uint64_t hash);
/** Copies of @source, the implied one included, of a block that is in the tier. */
uint32_t kvi_copies_count(const struct kvi_index *ix, const struct kvi_holder *holder,
                          enum kv_tier tier, uint32_t source, uint64_t hash);

/** Facts that a record tells a dump of its block. */
enum kvi_said {
    KVI_SAID_NOTHING, /* one copy of the implied source */
    KVI_SAID_COUNT,   /* a number of copies of source 0, which is implied */
    KVI_SAID_SOURCES
};
enum kvi_said kvi_copies_say(const struct kvi_index *ix, const struct kvi_copy *copy);
/** Call @fn with each record of the block of @copy. */
void kvi_copies_each(const struct kvi_index *ix, const struct kvi_copy *copy,
                     void (*fn)(void *arg, const struct kvi_copy *copy), void *arg);
/** A block that is in the tier has exactly these copies. Never fails, as kvi_copies_add. */
void kvi_copies_set(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t hash, const struct kvi_source_copies *sources, size_t n);
/** Take over facts about a tier's sources that another index has learned. */
void kvi_copies_restore_tier(struct kvi_holder *holder, enum kv_tier tier,
                             const struct kvi_extra *extra);

#endif
