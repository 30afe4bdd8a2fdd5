// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks with an unknown number of copies: an event may have announced a new copy, or reported a
 * known one (reports.h).
 *
 * The index counts the certain copies. An entry here has the number of further, possible copies.
 * While one certain copy is left the answer is right. When the last certain copy is removed:
 * - the block has children: it is still there, as vLLM evicts children before their parents. So one
 *   of the copies here is certain now.
 * - else the entry is open: the index drops the block, and the stream's view is partial until the
 *   engine stores the block again, stores a child of it, removes its last possible copy or clears.
 *
 * A window of a model without a main group also tells the places of blocks. A block that leaves it
 * in doubt takes its place along. Blocks that the engine stores below then find no place, and the
 * view stays partial.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_UNSURE_H
#define KV_INDEXER_VIEW_UNSURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "index/tree/facts.h"
#include "indexer/view/doubts.h"
#include "kv_event.h"

/** Most entries of a stream. Further blocks are not noted, and the view stays partial. */
#define KI_MAX_UNSURE 65536

/** Number of the main group in an entry; windows are 1 and more. */
#define KI_UNSURE_MAIN 0u

struct ki_unsure_entry {
    uint64_t hash, tokens_hash, parent;
    uint32_t copies; /* possible copies, beyond those in the index; 0: a free slot */
    uint8_t group;   /* KI_UNSURE_MAIN, or 1 + number of the window */
    bool has_parent;
    bool open; /* the index doesn't have the block */
};

/** Entries of one rank. */
struct ki_unsure_table {
    struct ki_unsure_entry *items; /* open addressing */
    size_t n, capacity;
    uint32_t rank;
};

struct ki_unsure {
    struct ki_unsure_table *tables; /* ordered by rank */
    size_t n_tables, n, n_open;     /* entries of all tables */
    /*
     * Ranks with a block that found no room for an entry, or lost its place: bit 1. Their views are
     * partial until a clear of the rank.
     */
    struct ki_doubts lost;
    uint32_t n_real; /* suspects: blocks whose removals showed that each of their copies was one */
};

/** Blocks whose removals show that a stream's events from the root are copies. */
#define KI_ENOUGH_REAL 64u

void ki_unsure_fini(struct ki_unsure *u);

/** An entry as dumps tell it. */
struct ki_unsure_told {
    uint32_t rank;
    bool suspect; /* of the suspects */
    struct ki_unsure_entry entry;
};

/** Append the entries of @rank to @ret, as struct ki_unsure_told. @suspects: @u has the suspects. */
void ki_unsure_tell(const struct ki_unsure *u, uint32_t rank, bool suspects, struct kv_buf *ret);
/** Add an entry that a dump told. */
void ki_unsure_restore_told(struct ki_unsure *u, const struct ki_unsure_told *told);

/** Forget the entries of @rank, or all. */
void ki_unsure_clear_rank(struct ki_unsure *u, uint32_t rank);
void ki_unsure_clear(struct ki_unsure *u);

/** Return the entry of a block, or NULL. Valid until the next call that notes or drops one. */
struct ki_unsure_entry *ki_unsure_find(const struct ki_unsure *u, uint32_t rank, unsigned group,
                                       uint64_t hash);

/**
 * Note that the main blocks of a chain at the root may have one more copy. @op is a store of blocks
 * that the index holds, or that have open entries; the caller stores the latter.
 */
void ki_unsure_note(struct ki_unsure *u, const struct kve_op *op);

/** Note that the blocks @hashes of window @number may have one more copy. */
void ki_unsure_note_window(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                           uint32_t number, const uint64_t *hashes, size_t n);

/**
 * Store @parent again if its entry is open, before a store below it. Returns 0 or kvi_store's
 * error.
 */
int ki_unsure_restore(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                      uint64_t parent);

/** Note that the engine stored the @n blocks @hashes (@stride bytes apart) of @group anew. */
void ki_unsure_stored(struct ki_unsure *u, uint32_t rank, unsigned group, const void *hashes,
                      size_t stride, size_t n);
/** Forget the entry of a block of which the engine has told all copies. */
void ki_unsure_forget(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash);

/**
 * Remove copies of the device's main blocks like kvi_take, and judge entries. Returns like
 * kvi_take; removals of possible copies count as found.
 */
long ki_unsure_take(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op);
/** Remove copies of window @number, like ki_unsure_take. */
long ki_unsure_take_window(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                           uint32_t number, const struct kve_op *op);

/*
 * Suspects: copies that the index has counted, but that may have been reports. As long as nothing
 * tells whether a stream has reports, its events from the root are taken for copies, and noted in a
 * table of their own. A block is in doubt, its entry open, when the index has no other copies of it
 * than such ones. A removal of one of these shows that it was real.
 */

/** Note that a counted copy of the block may be none. @copies: those in the index, with this one. */
void ki_suspects_note(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                      long copies);
/** Note that the block has @copies in the index after a store that was none. */
void ki_suspects_stored(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                        long copies);
/** Note that the engine has the block. @copies: those in the index. */
void ki_suspects_held(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                      long copies);
/** Note that one copy was removed and @left are in the index; @exact: so the engine says. */
void ki_suspects_removed(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                         long left, bool exact);

#endif
