// SPDX-License-Identifier: Apache-2.0
/* The blocks of windows: see windows.h. */
#include "index/tree/windows.h"

#include <limits.h>

/* Add a copy of a block; not @counted: make it at least one. Returns 0 or -ENOMEM. */
static int give(struct kvi_index *ix, struct kvi_holder *part, enum kv_tier bit, uint32_t source,
                bool counted, uint64_t hash)
{
    const struct kv_block block = {hash, 0};

    if (kvi_tiers_of(ix, part, hash))
        return kvi_known(ix, part, bit, source, counted, &hash, 1) < 0 ? -ENOMEM : 0;
    if (kvi_park(ix, part, kvi_placeless_parent(hash), block, 1u << bit) &&
        !kvi_copies_add(ix, part, bit, source, hash, false, counted))
        kvi_unpark(ix, part, kvi_parked_find(ix, part, hash));
    return 0;
}

int kvi_window_add(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                   uint32_t number, uint32_t source, bool counted, const uint64_t *hashes, size_t n)
{
    enum kv_tier bit = (enum kv_tier)kvi_window_tier(number);
    struct kvi_holder *holder, *part;
    int rc;

    if ((unsigned)tier >= KV_N_TIERS || source > KVI_MAX_SOURCE)
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = kvi_part_find(index, holder, tier, number, true, &part);
    if (!rc)
        rc = kvi_known_reserve(index, part, bit, hashes, n);
    if (!rc)
        kvi_copies_imply(part, bit, source);
    for (size_t i = 0; i < n && !rc; i++)
        rc = give(index, part, bit, source, counted, hashes[i]);
    kvi_unlock(index);
    return rc;
}

int kvi_window_place(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                     uint32_t number, const uint64_t *parent, const struct kv_block *blocks,
                     size_t n)
{
    struct kvi_holder *holder, *part;
    int rc;

    if ((unsigned)tier >= KV_N_TIERS || (n && !blocks) || n > UINT32_MAX / 2)
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = kvi_part_find(index, holder, tier, number, true, &part);
    if (!rc && kvi_parts_store(index, holder, tier != KV_TIER_DEVICE, parent, blocks, n) &&
        part->lagging)
        rc = -ENOMEM;
    kvi_unlock(index);
    return rc;
}

/* Return true when only the place of @place is known, and no other block is below it. */
static bool is_ghost(const struct kvi_index *ix, struct kvi_place place)
{
    uint64_t entry = kvi_who_get(place.entry);

    return kvi_mask_at(ix, entry, place.off) == 1u << KVI_PLACED &&
           kvi_entry_len(entry) == place.off + 1 && !kvi_entry_kids(ix, entry);
}

/* Return true when any part of the holder has the block in a window. */
static bool is_in_window(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash)
{
    struct kvi_holder *part;

    KVI_EACH_PART(kvi_windows_of(holder), part)
    {
        if (kvi_tiers_of(ix, part, hash) & ~(1u << KVI_PLACED))
            return true;
    }
    return false;
}

static void tidy_part(struct kvi_index *ix, struct kvi_holder *part, uint64_t hash)
{
    struct kvi_parked *parked = kvi_parked_find(ix, part, hash);
    struct kvi_place place;

    if (parked && parked->mask == 1u << KVI_PLACED)
        kvi_unpark(ix, part, parked);
    while (kvi_locate(ix, part, hash, &place, NULL) && is_ghost(ix, place)) {
        const struct kvi_chain *above = place.off ? place.chain : place.chain->parent;
        bool top = !above->parent;

        if (!top)
            hash = kvi_name_of(ix, part,
                               kvi_chain_run(above).pos +
                                   (place.off ? place.off : kvi_chain_run(above).len) - 1);
        kvi_cut(ix, part, place.chain, place.entry, place.off, false);
        if (top || is_in_window(ix, part->main, hash))
            break;
    }
}

void kvi_part_tidy(struct kvi_index *ix, struct kvi_holder *part, uint64_t hash)
{
    struct kvi_holder *main = part->main, *each;

    if (!kvi_windows_of(main)->alone || is_in_window(ix, main, hash))
        return;
    kvi_settle(ix); /* the queue of dirty chains belongs to one holder at a time */
    KVI_EACH_PART(kvi_windows_of(main), each)
    {
        tidy_part(ix, each, hash);
        kvi_settle(ix);
    }
}

long kvi_window_take(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                     uint32_t number, uint32_t source, const uint64_t *hashes, const uint32_t *left,
                     size_t n)
{
    enum kv_tier bit = (enum kv_tier)kvi_window_tier(number);
    struct kvi_holder *holder, *part = NULL;
    long found = 0;

    if ((unsigned)tier >= KV_N_TIERS || source > KVI_MAX_SOURCE || n > LONG_MAX)
        return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    if (holder)
        (void)kvi_part_find(index, holder, tier, number, false, &part);
    for (size_t i = 0; part && i < n; i++) {
        int rc =
            kvi_take_one(index, part, bit, source, hashes[i], left ? left[i] : KVI_COPIES_UNSAID);

        if (rc < 0) {
            found = rc;
            break;
        }
        found += rc;
        kvi_part_tidy(index, part, hashes[i]);
    }
    if (holder && found >= 0 && holder->n_lost)
        kvi_note_gone(holder, n - (size_t)found);
    kvi_unlock(index);
    return found;
}
