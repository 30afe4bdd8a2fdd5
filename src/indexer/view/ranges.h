// SPDX-License-Identifier: Apache-2.0
/**
 * Ranges: how many copies of a block a cache of the engine has, where its events leave that open.
 * An engine that reports held blocks announces them as it announces new copies (reports.h).
 *
 *     engine    lo ─────────── hi     lo: it has so many for certain; hi: it may have so many
 *     index          count            one number, by which lookups go
 *               fewer ┘ └ more        fewer = count - lo, more = hi - count
 *
 * A block without an entry here has lo = hi = count. Where the index puts its count depends on what
 * is likely, and only lookups of open blocks differ by it:
 *
 *     count = lo    the stream has reports: an event that may be one is none of new copies
 *     count = hi    nobody knows whether the stream has reports: as a rule it hasn't
 *
 * A block is open while lo is 0 and hi isn't: nothing tells whether it is there. The stream's view
 * is partial while any block is open. Each operation moves both ends:
 *
 *     event                                lo                hi        for
 *     new copies                           + 1               + 1
 *     new copies, or a report              at least 1        + 1       both name held blocks
 *       the same of a window               as it was         + 1       a report names others, too
 *     removal                              - 1, at least 0   - 1
 *       of the last counted copy, and      at least 1        - 1       engines evict children
 *       the index has blocks below it                                  first
 *     removal that tells the copies left   these             these
 *     store below the block                at least 1        as it was
 *     clear                                0                 0
 *
 * Of a window alone (no main group), a block that the index has dropped takes its place along.
 * Blocks that the engine stores below then find no place, and the view stays partial (`lost`).
 *
 * Only the engine's own caches on the device have ranges: all other copies are one of a block.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_RANGES_H
#define KV_INDEXER_VIEW_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "index/tree/facts.h"
#include "indexer/view/doubts.h"
#include "kv_event.h"

/** Most entries of a stream. Further blocks are not noted, and the view stays partial. */
#define KI_MAX_RANGES 65536

/** Blocks whose removals show that a stream's events from the root are copies. */
#define KI_ENOUGH_REAL 64u

/** A block of one cache, with lo < hi. Dumps tell entries as they are. */
struct ki_range {
    uint64_t hash;
    uint64_t tokens_hash, parent; /* of the main cache, with `more`: the block's place */
    uint32_t rank;
    uint32_t more, fewer; /* hi - count, count - lo: not both 0; both 0: a free slot */
    uint8_t window;       /* as in struct kvi_cache */
    bool has_parent;
    bool open;   /* lo is 0 */
    bool absent; /* open, and the index doesn't have the block */
};

/** Bits of `lost`: entries that found no room, or lost their place. */
enum ki_ranges_lost {
    KI_LOST_MORE = 1,  /* of blocks of which the engine may have more copies than counted */
    KI_LOST_FEWER = 2, /* of blocks of which it may have fewer */
};

/** The ranges of a stream. Zeroed: none. */
struct ki_ranges {
    struct ki_range *items; /* open addressing */
    size_t n, capacity;
    size_t n_open, n_absent;
    uint64_t ranks; /* bit rank % 64 of each entry's rank: clears of other ranks read no entry */
    struct ki_doubts lost; /* by rank, until its clear; the views are partial */
    uint32_t n_real;       /* blocks whose removals showed that each counted copy was one */
};

/** Return true for the caches that have ranges. */
static inline bool ki_has_ranges(const struct kvi_cache *cache)
{
    return cache->tier == KV_TIER_DEVICE && !cache->source;
}

/** Forget all, and free the memory. */
void ki_ranges_clear(struct ki_ranges *r);
/** Forget the entries of @rank, and what was lost of it. */
void ki_ranges_clear_rank(struct ki_ranges *r, uint32_t rank);

/** Return the entry of a block, or NULL. Valid until the next change. */
const struct ki_range *ki_ranges_find(const struct ki_ranges *r, const struct kvi_cache *cache,
                                      uint64_t hash);

/**
 * Note that the blocks of @op, which the index has been given, are new copies, or were reported.
 * @counted: the index has counted a copy of each; else its main cache has at least one of each, and
 * its window is as before.
 */
void ki_ranges_maybe(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op, bool counted);
/** Note that the blocks of @op are new copies, which the index has counted where it knows the block. */
void ki_ranges_stored(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                      const struct kve_op *op);
/**
 * Note that the engine has the main block @hash. Call before a store below it: the index gets the
 * block back when it has dropped it. Returns 0 or kvi_store's error.
 */
int ki_ranges_prove(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                    uint64_t hash);
/**
 * Remove copies like kvi_take, of whatever cache. Returns like kvi_take; removals of copies that
 * the index didn't count are found, too.
 */
long ki_ranges_take(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                    const struct kve_op *op);
/** Note that all counted copies are real, also of what was lost; begin to count n_real anew. */
void ki_ranges_trust(struct ki_ranges *r);

/** Append all entries to @ret, as struct ki_range. */
void ki_ranges_tell(const struct ki_ranges *r, struct kv_buf *ret);
/** Add an entry that a dump told. */
void ki_ranges_restore(struct ki_ranges *r, const struct ki_range *told);

#endif
