// SPDX-License-Identifier: Apache-2.0
/* Answer questions about a single block of a holder. */
#include "index/tree/kids.h"
#include "index/tree/windows.h"

struct search {
    const struct kvi_index *ix;
    uint32_t holder, bit;
    uint32_t left; /* children that the holder has blocks in; KVI_AUX_MAX: unknown */
    bool found;
};

static bool look_at_kid(void *arg, struct kvi_chain *kid)
{
    struct search *search = arg;
    const _Atomic uint64_t *entry = kvi_who_find(kid, search->holder);

    if (!entry)
        return true;
    search->found = kvi_mask_at(search->ix, kvi_who_get(entry), 0) & search->bit;
    if (search->left != KVI_AUX_MAX)
        search->left--;
    return !search->found && search->left;
}

static bool has_child(const struct kvi_index *ix, const struct kvi_holder *holder,
                      enum kv_tier tier, struct kvi_place place)
{
    uint64_t entry = kvi_who_get(place.entry);
    struct search search = {ix, holder->id, 1u << tier, kvi_entry_kids(ix, entry), false};

    if (place.off + 1 < kvi_entry_len(entry))
        return kvi_mask_at(ix, entry, place.off + 1) & search.bit;
    if (search.left)
        kvi_kids_each(place.chain, look_at_kid, &search);
    return search.found;
}

struct kvi_block_info kvi_get_block(struct kvi_index *index, struct kvi_cache cache, uint64_t hash)
{
    struct kvi_block_info info = {0};
    struct kvi_place place;
    struct kvi_spot spot;

    kvi_lock(index);
    if (!kvi_spot_find(index, &cache, false, &spot) && spot.holder &&
        kvi_tiers_of(index, spot.holder, hash) >> spot.tier & 1) {
        info.copies = kvi_copies_count(index, spot.holder, spot.tier, cache.source, hash);
        info.has_children = !cache.window && kvi_locate(index, spot.holder, hash, &place, NULL) &&
                            has_child(index, spot.holder, spot.tier, place);
    }
    kvi_unlock(index);
    return info;
}

bool kvi_holds(struct kvi_index *index, struct kv_holder key, uint64_t hash)
{
    const struct kvi_holder *holder, *overlay;
    bool found;

    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    found = holder && kvi_tiers_of(index, holder, hash);
    if (holder && !found)
        KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
        {
            found |= kvi_tiers_of(index, overlay, hash) != 0;
        }
    kvi_unlock(index);
    return found;
}
