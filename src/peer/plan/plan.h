// SPDX-License-Identifier: Apache-2.0
/** Internals of a plan between tensor-parallel layouts. */
#ifndef KVBM_PEER_PLAN_PLAN_H
#define KVBM_PEER_PLAN_PLAN_H

#include "kvbm_plan.h"

/** A rank's layout and heads, with what it didn't know filled in. */
struct plan_side {
    struct kvbm_layout_config config; /* num_heads is known */
    struct kvbm_layout_shape shape;
    uint64_t width, dim; /* bytes of an element, elements of a head */
    uint32_t first, end; /* heads of the model: [first, end) */
    uint32_t total;      /* heads of the model */
};

struct kvbm_plan {
    struct kvbm_plan_part *parts;
    struct kvbm_plan_copy *copies;
    struct plan_side *sides; /* [1 + n_ranks] the local one first */
    uint64_t *remote_blocks; /* [n_ranks] number of blocks of each remote layout */
    uint64_t local_blocks;
    size_t n_parts, n_copies, n_ranks;
    bool converts;
};

/** Tell whether a layout and its shard, as they are now, have the blocks of a planned side. */
bool kvbm_plan_side_fits(const struct plan_side *side, const struct kvbm_layout_config *layout,
                         const struct kvbm_shard *shard);

/** Fill the copies of the parts. Returns 0; -EOVERFLOW (KVBM_MAX_PLAN_COPIES); -ENOMEM. */
int kvbm_plan_fill(struct kvbm_plan *plan, const struct plan_side *local,
                   const struct plan_side *remotes);

#endif
