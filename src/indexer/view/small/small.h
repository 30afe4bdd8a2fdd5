// SPDX-License-Identifier: Apache-2.0
/**
 * Cache groups whose blocks are smaller than the registered ones: blocks of 16 tokens in a sliding
 * window beside blocks of 32 in full attention.
 *
 *     registered block    [            H            ]
 *     blocks of the group [     A     ] [     H     ]    parts 0 and 1: the last part has H's hash
 *
 * The index has a window for each part (struct kvi_window), which holds registered blocks by their
 * hashes: block H is in window 0 while the group has A, and in window 1 while the group has H. The
 * tables here (parts.h, one for each group of each rank) know which A belongs to H, and count the
 * group's copies of both. Several registered blocks may begin with one A; events name A once for
 * each copy, whichever block the copy was for.
 *
 * Where a match needs few of many parts (2 of 64), the group has one window: block H is in it while
 * the group has all that are needed, the `tail` of H.
 *
 * An event's hashes alone don't tell which blocks it leaves out. The main group's do, of the same
 * step: a hash that the main group has, too, is a last part, the ones before it are the parts before
 * (anchored.c). Without a main group, and where engines draft ahead, an event must leave out
 * exactly those blocks that can't serve any match. The view becomes partial when an event leaves out
 * others, doesn't tell with which part it begins, or contradicts an earlier one.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_SMALL_H
#define KV_INDEXER_VIEW_SMALL_H

#include "index/tree/facts.h"
#include "indexer/view/doubts.h"
#include "indexer/view/small/main_names.h"
#include "indexer/view/small/parts.h"
#include "kv_event.h"

/** Records of a stream's tables at most; the view becomes partial beyond. */
#define KI_MAX_SMALL (1u << 20)

/** Changes of windows for one batch at most; the view becomes partial beyond. */
#define KI_MAX_SMALL_WORK (1u << 20)

/** The table of one group of one rank. */
struct ki_small_table {
    uint32_t rank, group;
    struct ki_parts parts;
};

struct ki_small {
    struct ki_small_table **tables; /* ordered by rank and group */
    size_t n_tables, capacity;
    size_t n;              /* records of all tables */
    size_t work;           /* changes of windows for the current batch */
    struct ki_doubts lost; /* ranks of whose groups nothing tells what they have, bit 1 */
};

/** The group of an operation. */
struct ki_small_group {
    uint32_t group, need;            /* as in struct kvi_window */
    uint32_t parts;                  /* of a registered block, the last ones, that are followed */
    uint32_t numbers[KVE_MAX_PARTS]; /* window of each of them; of a tail, the first alone */
    bool tail;                       /* one window for all parts: see above */
    bool drops;                      /* the engine gives the last matched block of the group up */
    /* Main blocks of the batch: they place the group's blocks. NULL: there is no main group. */
    struct ki_main_names *names;
};

/** Free all, and forget that anything was lost. A zeroed struct is empty. */
void ki_small_clear(struct ki_small *s);
/** Note that nothing tells what groups of @rank have, until ki_small_clear_rank. */
void ki_small_lose(struct ki_small *s, uint32_t rank);
/** Forget the blocks of @rank, and that anything of them was lost. */
void ki_small_clear_rank(struct ki_small *s, uint32_t rank);

/**
 * Count a copy of each block that @op stores on the device. Returns 0, also when nothing tells which
 * blocks these are, or kvi_store_known's error; s->lost has the rank then.
 */
int ki_small_store(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                   const struct ki_small_group *group, const struct kve_op *op);
/** Take a copy of each block that @op removes. Returns as ki_small_store. */
int ki_small_take(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                  const struct ki_small_group *group, const struct kve_op *op);
/**
 * Forget the parts of the registered blocks @hashes, which have left the main group, where no match
 * needs them. Returns as ki_small_store.
 */
int ki_small_forget(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                    const struct ki_small_group *group, const uint64_t *hashes, size_t n);

/** Return true when a rank with such groups has no main group to compare them with. */
bool ki_small_is_alone(const struct ki_small *s, const struct kve_reader *reader);

#endif
