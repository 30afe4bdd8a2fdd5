// SPDX-License-Identifier: Apache-2.0
/**
 * The overlap with a peer's dump: batches that were applied there while the dump was written are
 * applied here again, on blocks that may have them already. Their last event about a block tells
 * whether it is there, unless the engine has several copies of it: a removal may leave some.
 *
 * Therefore a dump ends with the records of copies as they are at the end of the overlap, of each block
 * that had several at some time since its beginning:
 *
 *     block        removal      store
 *     listed       ignored      sets the listed number
 *     not listed   the last     the first, or nothing
 *
 * Only source 0's copies are counted, and treated so: other sources have one copy of a block.
 *
 * A store below a block may follow a removal that counts as the last too early. Of windows alone the
 * events tell where blocks are, so the index keeps the places of removed ones until the overlap's
 * end (kvi_keep_places).
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_OVERLAP_H
#define KV_INDEXER_VIEW_OVERLAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "index/tree/facts.h"
#include "indexer/view/unsure.h"
#include "kv_event.h"

/** Copies that source 0 has of a block at the end of the overlap. */
struct ki_end_copies {
    struct kv_holder holder;
    uint64_t hash;
    uint32_t copies;
    uint32_t group; /* of a window */
    uint8_t tier, part;
    bool in_window, taken;
};

/** Add the copies of @extra (KVI_EXTRA_COPIES) to @records, if source 0 has any. */
void ki_end_copies_add(struct kv_buf *records, const struct kvi_extra *extra);

/** Doubts that the peer had about a stream at the end of the overlap. */
struct ki_end_doubts {
    bool known;          /* the dump has told it: the rest counts */
    bool trusted;        /* see struct ki_reports */
    uint32_t n_real;     /* see struct ki_unsure */
    struct kv_buf items; /* struct ki_unsure_told */
};

struct ki_overlap {
    struct ki_end_doubts doubts;
    bool known;                  /* the dump has told copies: the rest counts */
    struct ki_end_copies *items; /* sorted */
    size_t n;
};

/** Take over @n @items, on the heap. */
void ki_overlap_set(struct ki_overlap *o, struct ki_end_copies *items, size_t n);
void ki_overlap_clear(struct ki_overlap *o);

/**
 * Remove blocks of source 0 that are gone at the end of the overlap. @window: the window with number
 * @number that has them; NULL: the main cache. Returns like kvi_take.
 */
long ki_overlap_take(const struct ki_overlap *o, struct kvi_index *index, struct kv_holder holder,
                     const struct kve_op *op, const struct kvi_window *window, uint32_t number);

/** Set the copies of the operation's blocks, which have been stored uncounted. */
void ki_overlap_stored(const struct ki_overlap *o, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_op *op, const struct kvi_window *window);

#endif
