// SPDX-License-Identifier: Apache-2.0
/** Lookups: where keys are, some at a time. For where.c and hit.c. */
#ifndef KVBM_TIER_MANAGER_WHERE_H
#define KVBM_TIER_MANAGER_WHERE_H

#include "tier/manager/state/manager.h"

#define KVBM_LOOK 64 /* keys looked up at a time */

/** A lookup under one hold of the manager's lock. */
struct kvbm_look {
    struct kvbm_manager *m;
    const struct kvbm_chain *chain;
    bool peers;
    bool past_gaps;                     /* keys behind a miss count, too */
    bool missed;                        /* a key before was a miss */
    uint32_t asked_for;                 /* keys, in this lookup */
    uint64_t of_object, of_peers;       /* bit per key: unknown, and to be asked for */
    uint64_t asked_object, asked_peers; /* asked for, and not answered */
    uint8_t at[KVBM_LOOK];
};

/** Check a chain of a lookup: as of a pin, but nothing is logged, since lookups are many. */
bool kvbm_look_is_valid(const struct kvbm_chain *chain, size_t n);
/** Begin a lookup, with the lock; @own: of this node's own tiers alone. */
void kvbm_look_begin(struct kvbm_look *look, struct kvbm_manager *m, bool own);
/** Go on with the keys of @chain, which outlives the lookup. */
void kvbm_look_in(struct kvbm_look *look, const struct kvbm_chain *chain, bool past_gaps);
/** Look at keys [@i, @i + @n) of the chain, at most KVBM_LOOK, and set look->at. Unknown ones are asked for. */
void kvbm_look_at(struct kvbm_look *look, size_t i, uint32_t n);

#endif
