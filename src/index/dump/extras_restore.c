// SPDX-License-Identifier: Apache-2.0
/* Restore the state beside the tree, one fact per call: see extras.c. */
#include "index/tree/windows.h"

/*
 * Find the holder or overlay that a fact is about, and its tier there. Returns 0; *@ret is NULL when
 * there is none.
 */
static int subject(struct kvi_index *ix, const struct kvi_extra *extra, bool make,
                   struct kvi_holder **ret, enum kv_tier *ret_tier)
{
    struct kvi_holder *holder = *ret;
    int number;

    *ret_tier = extra->tier;
    if (!extra->in_window)
        return 0;
    *ret = NULL;
    number = kvi_window_number(holder, &extra->window);
    if (number < 0)
        return 0;
    *ret_tier = (enum kv_tier)kvi_window_tier((uint32_t)number);
    return kvi_overlay_find(ix, holder, extra->tier, (uint32_t)number, make, ret);
}

static int restore_tier(struct kvi_index *index, const struct kvi_extra *extra)
{
    struct kvi_holder *holder;
    enum kv_tier tier;
    int rc;

    if (extra->implied > KVI_MAX_SOURCE || extra->counting > KVI_COUNTS_EACH)
        return -EINVAL;
    rc = kvi_begin(index, extra->holder, &holder);
    if (!rc)
        rc = subject(index, extra, true, &holder, &tier);
    if (!rc && holder)
        kvi_copies_restore_tier(index, holder, tier, extra);
    kvi_unlock(index);
    return rc;
}

static int set_copies(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kvi_source_copies plain = {0, extra->copies, false};
    struct kvi_holder *holder;
    enum kv_tier tier;
    int rc = 0;

    for (size_t i = 0; i < extra->n_sources; i++)
        if (extra->sources[i].source > KVI_MAX_SOURCE)
            return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, extra->holder);
    if (holder)
        rc = subject(index, extra, false, &holder, &tier);
    if (!rc && holder && kvi_tiers_of(index, holder, extra->hash) >> tier & 1) {
        bool held = true;

        if (extra->n_sources)
            held =
                kvi_copies_set(index, holder, tier, extra->hash, extra->sources, extra->n_sources);
        else if (extra->copies)
            held = kvi_copies_set(index, holder, tier, extra->hash, &plain, 1);
        if (!held)
            rc = KV_MIN(
                kvi_take_one(index, holder, tier, holder->tier[tier].implied, extra->hash, 0), 0);
        if (!held && !rc && holder->main)
            kvi_overlay_tidy(index, holder, extra->hash);
    }
    kvi_unlock(index);
    return rc;
}

/*
 * Store a parked block whose parent was in the tree at the time of the dump in the tiers of @mask,
 * as a copy of their implied sources: what is said of others follows.
 */
static int attach(struct kvi_index *index, const struct kvi_extra *extra, uint32_t mask,
                  const uint32_t *implied)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    int rc = 0;

    for (uint32_t t = 0; t < KV_N_TIERS && !rc; t++)
        if (mask >> t & 1)
            rc = kvi_add(index, kvi_cache_of(extra->holder, (enum kv_tier)t, implied[t]),
                         &extra->parent, &block, 1, NULL);
    return rc;
}

/*
 * Park a block as in the dumped index. A block that is in the tree was there when the dump passed:
 * the stream tells its fate. Tiers that the dump passed while the block was parked are added.
 */
static int park(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    struct kvi_holder *holder;
    struct kvi_parked *parked;
    struct kvi_place place;
    uint32_t tiers = 0, implied[KV_N_TIERS];
    bool attaches = false;
    int rc = kvi_begin(index, extra->holder, &holder);

    if (!rc) {
        tiers = kvi_tiers_of(index, holder, extra->hash);
        for (uint32_t t = 0; t < KV_N_TIERS; t++)
            implied[t] = holder->tier[t].implied;
        parked = kvi_parked_find(index, holder, extra->hash);
        if (parked)
            parked->mask |= extra->tiers;
        else if (extra->tiers & ~tiers)
            attaches = kvi_locate(index, holder, extra->parent, &place, NULL);
        if (!parked && !attaches && !tiers)
            (void)kvi_park(index, holder, extra->parent, block, extra->tiers);
    }
    kvi_unlock(index);
    return attaches ? attach(index, extra, extra->tiers & ~tiers, implied) : rc;
}

int kvi_restore_extra(struct kvi_index *index, const struct kvi_extra *extra)
{
    if ((unsigned)extra->tier >= KV_N_TIERS || extra->tiers >> KV_N_TIERS)
        return -EINVAL;
    if (extra->kind == KVI_EXTRA_TIER)
        return restore_tier(index, extra);
    if (extra->kind == KVI_EXTRA_COPIES)
        return set_copies(index, extra);
    if (extra->kind != KVI_EXTRA_BLOCK)
        return kvi_restore_window(index, extra);
    return extra->tiers ? park(index, extra) : set_copies(index, extra);
}
