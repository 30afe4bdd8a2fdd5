// SPDX-License-Identifier: Apache-2.0
/** Parts of small.h that its files share. */
#ifndef KV_INDEXER_VIEW_SMALL_IMPL_H
#define KV_INDEXER_VIEW_SMALL_IMPL_H

#include "indexer/view/small/small.h"

/** An operation as it is applied. */
struct ki_small_work {
    struct ki_small *s;
    struct ki_parts *parts;
    struct kvi_index *index;
    struct kv_holder holder;
    const struct ki_small_group *group;
};

/** Return the number of a registered block's last part, which has its hash. */
static inline uint32_t ki_small_last(const struct ki_small_work *w)
{
    return w->group->parts - 1;
}

/**
 * Find the operation's table; with @add, make it. Returns 0; -ENOENT when there is none, or one of
 * blocks of another size; -ENOMEM.
 */
int ki_small_open_table(struct ki_small_work *w, bool add);

/** Return true when the index has a copy of the main block. */
bool ki_small_main_has(const struct ki_small_work *w, uint64_t hash);

/**
 * Count one copy more of part @index, below the part @above (0: unknown). Returns 0 and *@ret, -ENOENT
 * for want of room or when it contradicts the tables, or -ENOMEM.
 */
int ki_small_gain_part(struct ki_small_work *w, uint64_t hash, uint64_t above, uint32_t index,
                       uint32_t *ret);
/** Count one copy more of a registered block's last part. Returns as ki_small_gain_part. */
int ki_small_gain_whole(struct ki_small_work *w, uint64_t hash, uint32_t *ret);
/** Note which parts the registered block has: @parts[i] or KI_NO_PART. Returns as ki_small_gain_part. */
int ki_small_link_parts(struct ki_small_work *w, const uint32_t *parts, uint32_t whole);

/** Store the blocks of an operation whose places the main group tells. Returns as ki_small_gain_part. */
int ki_small_store_anchored(struct ki_small_work *w, const struct kve_op *op);

#endif
