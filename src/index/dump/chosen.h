// SPDX-License-Identifier: Apache-2.0
/**
 * Holders whose blocks a dump tells (kvi_dump_holders), and the parts of a dump that go by them. NULL
 * stands for all holders.
 *
 * Threads: filled under the index's lock, and read by the dump alone.
 */
#ifndef KV_INDEX_DUMP_CHOSEN_H
#define KV_INDEX_DUMP_CHOSEN_H

#include "index/tree/windows.h"

/** A bit for each holder's id, its overlays' included. */
struct kvi_chosen {
    uint64_t *bits;
    size_t n; /* ids that have a bit */
};

static inline bool kvi_is_chosen(const struct kvi_chosen *chosen, uint32_t id)
{
    return !chosen || (id < chosen->n && chosen->bits[id / 64] >> id % 64 & 1);
}

/** Report the blocks in the tree: kvi_dump. */
int kvi_dump_runs(struct kvi_index *ix, const struct kvi_chosen *chosen, kvi_dump_fn fn, void *arg);
/** Report windows and their blocks. */
int kvi_dump_windows(struct kvi_index *ix, const struct kvi_chosen *chosen, kvi_extra_fn fn,
                     void *arg);

#endif
