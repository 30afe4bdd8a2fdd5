// SPDX-License-Identifier: Apache-2.0
/** Collection of packs: those with few live blobs are rewritten, those with none removed. */
#ifndef KV_TIERED_PACK_SWEEP_H
#define KV_TIERED_PACK_SWEEP_H

#include "tiered/config.h"
#include "tiered/keys.h"
#include "tiered/pack.h"

/** Add the keys of all packs that are published, readable or not. Returns 0 or an error. */
int trd_published_packs(struct kvs_store *store, struct trd_keys *ret);

/**
 * Sweep the packs of a member that weren't written or used for @min_age_s: remove those without a live blob;
 * where fewer than half of the bytes are live, write the live blobs into new packs, wait @linger_ns, and
 * remove the old ones. A blob that a younger pack has, too, is live there alone. A pack that can't be read
 * stays. Opens the member itself, with its deadline. Adds to @swept. Returns 0 or an error.
 */
int trd_sweep_packs(const struct trd_member_config *member, uint64_t linger_ns, uint64_t min_age_s,
                    kv_store_live_fn live, void *arg, kv_store_swept *swept);

/** As trd_sweep_packs, on an open store; p->to is the member. */
int trd_sweep_packs_of(struct trd_packing *p, uint64_t linger_ns, uint64_t min_age_s,
                       kv_store_live_fn live, void *arg, kv_store_swept *swept);

/**
 * As trd_sweep_packs_of, where all that isn't noted as deleted is live: for programs that know nothing of
 * manifests. Returns also -ECANCELED: a hook of @p has ended it; what it left a later call goes on with.
 */
int trd_rewrite_packs(struct trd_packing *p, uint64_t linger_ns, kv_store_swept *swept);

/** Sums over a member's packs. */
struct trd_weight {
    uint64_t packs, blobs, bytes; /* blobs that aren't deleted, and that no younger pack has */
    uint64_t poor,
        poor_bytes; /* packs that trd_rewrite_packs rewrites or removes; of their blobs */
};
/** Add up @packs (NULL: none). */
void trd_weigh_packs(const struct trd_packs *packs, struct trd_weight *ret);

#endif
