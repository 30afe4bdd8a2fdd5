// SPDX-License-Identifier: Apache-2.0
/* Restore the state beside the tree, one fact per call: see extras.c, windows_dump.c. */
#include "index/tree/windows.h"

/* Return the number of the window that a fact is about, or -EINVAL. */
static int window_number(const struct kvi_holder *holder, const struct kvi_window *window)
{
    const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;

    for (uint32_t i = 0; windows && i < windows->n; i++)
        if (windows->items[i].group == window->group && windows->items[i].part == window->part)
            return (int)i;
    return -EINVAL;
}

/*
 * Find the spot of the cache that a fact is about. Returns 0; -EINVAL for an unknown window; with
 * @add an error of kvi_store.
 */
static int find_spot(struct kvi_index *ix, const struct kvi_extra *extra, bool add,
                     struct kvi_spot *ret)
{
    struct kvi_cache cache = kvi_cache_of(extra->holder, extra->tier, 0);
    int number;

    if (extra->in_window || extra->kind == KVI_EXTRA_PLACE ||
        extra->kind == KVI_EXTRA_WINDOW_BLOCK) {
        number = window_number(kvi_holder_await(ix, extra->holder), &extra->window);
        if (number < 0)
            return number;
        cache.window = (uint32_t)number + 1;
    }
    return kvi_spot_find(ix, &cache, add, ret);
}

static int restore_tier(struct kvi_index *index, const struct kvi_extra *extra)
{
    struct kvi_holder *holder;
    struct kvi_spot spot = {0};
    int rc;

    if (extra->implied > KVI_MAX_SOURCE || extra->counting > KVI_COUNTS_EACH)
        return -EINVAL;
    rc = kvi_begin(index, extra->holder, &holder);
    if (!rc)
        rc = find_spot(index, extra, true, &spot);
    if (!rc)
        kvi_copies_restore_tier(index, spot.holder, spot.tier, extra);
    kvi_unlock(index);
    return rc == -EINVAL ? 0 : rc; /* the index had no room for the window */
}

/* Set the copies of a block at the spot, if it is there. */
static int set_at(struct kvi_index *index, const struct kvi_spot *spot,
                  const struct kvi_extra *extra)
{
    const struct kvi_source_copies plain = {0, extra->copies, false};
    struct kvi_holder *holder = spot->holder;
    enum kv_tier tier = spot->tier;
    bool held = true;
    int rc = 0;

    if (!holder || !(kvi_tiers_of(index, holder, extra->hash) >> tier & 1))
        return 0;
    if (extra->n_sources)
        held = kvi_copies_set(index, holder, tier, extra->hash, extra->sources, extra->n_sources);
    else if (extra->copies)
        held = kvi_copies_set(index, holder, tier, extra->hash, &plain, 1);
    if (!held)
        rc = KV_MIN(kvi_take_one(index, holder, tier, holder->tier[tier].implied, extra->hash, 0),
                    0);
    if (!held && !rc && holder->main)
        kvi_overlay_tidy(index, holder, extra->hash);
    return rc;
}

static int set_copies(struct kvi_index *index, const struct kvi_extra *extra)
{
    struct kvi_spot spot;
    int rc = 0;

    for (size_t i = 0; i < extra->n_sources; i++)
        if (extra->sources[i].source > KVI_MAX_SOURCE)
            return -EINVAL;
    kvi_lock(index);
    if (!find_spot(index, extra, false, &spot))
        rc = set_at(index, &spot, extra);
    kvi_unlock(index);
    return rc;
}

/* Give a block its place, or put it into a window. */
static int restore_block(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    const uint64_t *parent = extra->has_parent ? &extra->parent : NULL;
    struct kvi_spot spot;
    long rc;

    kvi_lock(index);
    rc = find_spot(index, extra, true, &spot);
    if (!rc && extra->kind == KVI_EXTRA_PLACE)
        rc = kvi_overlay_place(index, &spot, extra->tier, parent, &block, 1) ? 0 : -ENOMEM;
    else if (!rc)
        rc = kvi_known(index, spot.holder, spot.tier, 0, false, &extra->hash, 1);
    if (rc > 0)
        rc = extra->copies > 1 ? set_at(index, &spot, extra) : 0;
    kvi_unlock(index);
    return (int)rc;
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
    int rc;

    if ((unsigned)extra->tier >= KV_N_TIERS || extra->tiers >> KV_N_TIERS)
        return -EINVAL;
    switch (extra->kind) {
    case KVI_EXTRA_BLOCK:
        return extra->tiers ? park(index, extra) : set_copies(index, extra);
    case KVI_EXTRA_RULE:
        rc = kvi_set_alone(index, extra->holder, extra->alone);
        if (!rc && extra->drops)
            rc = kvi_set_keeps(index, extra->holder, extra->main_keeps, extra->kept_groups);
        return rc;
    case KVI_EXTRA_WINDOW:
        return KV_MIN(kvi_set_window(index, extra->holder, &extra->window), 0);
    case KVI_EXTRA_PLACE:
    case KVI_EXTRA_WINDOW_BLOCK:
        return restore_block(index, extra);
    case KVI_EXTRA_TIER:
        return restore_tier(index, extra);
    case KVI_EXTRA_COPIES:
        return set_copies(index, extra);
    }
    return -EINVAL;
}
