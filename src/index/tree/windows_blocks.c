// SPDX-License-Identifier: Apache-2.0
/* The blocks of windows: see windows.h. */
#include "index/tree/windows.h"

int kvi_spot_find(struct kvi_index *ix, const struct kvi_cache *cache, bool add,
                  struct kvi_spot *ret)
{
    uint32_t number = cache->window - 1;
    int rc = 0;

    *ret = (struct kvi_spot){.tier = cache->tier};
    if ((unsigned)cache->tier >= KV_N_TIERS || cache->source > KVI_MAX_SOURCE ||
        cache->window > KVI_MAX_WINDOWS)
        return -EINVAL;
    ret->main = ret->holder = kvi_holder_await(ix, cache->holder);
    if (!cache->window)
        return 0;
    ret->holder = NULL;
    ret->tier = (enum kv_tier)kvi_window_tier(number);
    if (!ret->main && add)
        rc = kvi_holder_add(ix, cache->holder, &ret->main);
    if (!rc && ret->main)
        rc = kvi_overlay_find(ix, ret->main, cache->tier, number, add, &ret->holder);
    return add ? rc : 0;
}

bool kvi_overlay_place(struct kvi_index *ix, const struct kvi_spot *spot, enum kv_tier tier,
                       const uint64_t *parent, const struct kv_block *blocks, size_t n)
{
    return !kvi_overlays_store(ix, spot->main, tier != KV_TIER_DEVICE, parent, blocks, n) ||
           !spot->holder->lagging;
}

bool kvi_overlays_locate(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash)
{
    const struct kvi_holder *overlay;
    struct kvi_place place;

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        if (kvi_locate(ix, overlay, hash, &place, NULL))
            return true;
    }
    return false;
}

/* Return true when only the place of @place is known, and no other block is below it. */
static bool is_ghost(const struct kvi_index *ix, struct kvi_place place)
{
    uint64_t entry = kvi_who_get(place.entry);

    return kvi_mask_at(ix, entry, place.off) == 1u << KVI_PLACED &&
           kvi_entry_len(entry) == place.off + 1 && !kvi_entry_kids(ix, entry);
}

/* Return true when any overlay of the holder has the block in a window. */
static bool is_in_window(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash)
{
    struct kvi_holder *overlay;

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        if (kvi_tiers_of(ix, overlay, hash) & ~(1u << KVI_PLACED))
            return true;
    }
    return false;
}

static void tidy_overlay(struct kvi_index *ix, struct kvi_holder *overlay, uint64_t hash)
{
    struct kvi_parked *parked = kvi_parked_find(ix, overlay, hash);
    struct kvi_place place;

    if (parked && parked->mask == 1u << KVI_PLACED)
        kvi_unpark(ix, overlay, parked);
    while (kvi_locate(ix, overlay, hash, &place, NULL) && is_ghost(ix, place)) {
        const struct kvi_chain *above = place.off ? place.chain : place.chain->parent;
        bool top = !above->parent;

        if (!top)
            hash = kvi_name_of(ix, overlay,
                               kvi_chain_run(above).pos +
                                   (place.off ? place.off : kvi_chain_run(above).len) - 1);
        kvi_cut(ix, overlay, place.chain, place.entry, place.off, false);
        if (top || is_in_window(ix, overlay->main, hash))
            break;
    }
}

void kvi_overlay_tidy(struct kvi_index *ix, struct kvi_holder *overlay, uint64_t hash)
{
    struct kvi_holder *main = overlay->main, *each;

    if (!kvi_windows_of(main)->alone || is_in_window(ix, main, hash))
        return;
    kvi_settle(ix); /* the queue of dirty chains belongs to one holder at a time */
    KVI_EACH_OVERLAY(kvi_windows_of(main), each)
    {
        tidy_overlay(ix, each, hash);
        kvi_settle(ix);
    }
}
