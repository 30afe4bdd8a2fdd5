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

int kvi_get_block(struct kvi_index *index, struct kv_holder key, enum kv_tier tier, uint64_t hash,
                  struct kvi_block_info *ret)
{
    struct kvi_block_info info = KVI_BLOCK_INFO_INIT;
    const struct kvi_holder *holder;
    struct kvi_place place;
    int rc = -ENOENT;

    if ((unsigned)tier >= KV_N_TIERS || !kv_sized(ret, "kvi_block_info"))
        return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    if (holder && kvi_locate(index, holder, hash, &place, NULL) &&
        kvi_mask_at(index, kvi_who_get(place.entry), place.off) >> tier & 1) {
        info.copies = kvi_copies_count(index, holder, tier, 0, hash);
        info.has_children = has_child(index, holder, tier, place);
        rc = 0;
    }
    kvi_unlock(index);
    if (rc == 0)
        KV_GIVE(ret, &info);
    return rc;
}

long kvi_window_copies(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                       uint32_t number, uint64_t hash)
{
    enum kv_tier bit = (enum kv_tier)kvi_window_tier(number);
    const struct kvi_holder *holder, *part = NULL;
    const struct kvi_windows *windows;
    long copies = 0;

    if ((unsigned)tier >= KV_N_TIERS || number >= KVI_MAX_WINDOWS)
        return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    windows = holder ? kvi_windows_of(holder) : NULL;
    if (windows)
        part = windows->parts[tier][number / KVI_PART_WINDOWS];
    if (part && kvi_tiers_of(index, part, hash) >> bit & 1)
        copies = kvi_copies_count(index, part, bit, 0, hash);
    kvi_unlock(index);
    return copies;
}

bool kvi_holds(struct kvi_index *index, struct kv_holder key, uint64_t hash)
{
    const struct kvi_holder *holder, *part;
    bool found;

    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    found = holder && kvi_tiers_of(index, holder, hash);
    if (holder && !found)
        KVI_EACH_PART(kvi_windows_of(holder), part)
        {
            found |= kvi_tiers_of(index, part, hash) != 0;
        }
    kvi_unlock(index);
    return found;
}
