// SPDX-License-Identifier: Apache-2.0
/*
 * Removing: entries first, from the top down, so that the whole loss becomes visible with the first
 * step; names, blocks and empty chains when the call ends (kvi_settle).
 */
#include <limits.h>

#include "index/kids.h"
#include "index/tree.h"

/* Take the entry away. Its blocks have been accounted for. */
static void drop_entry(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry)
{
    uint64_t e = kvi_who_get(entry);

    chain->n_full -= kvi_entry_len(e) == kvi_chain_run(chain).len;
    chain->kid_hint = kvi_entry_kids(ix, e);
    kvi_who_remove(chain, entry);
    if (!kvi_entry_mask(e))
        kvi_tmap_retire(ix, kvi_tmap_at(ix, e));
}

static void forget_blocks(struct kvi_index *ix, struct kvi_holder *holder,
                          const struct kvi_chain *chain, uint64_t entry, uint32_t from)
{
    uint32_t len = kvi_entry_len(entry);

    kvi_entry_account(ix, holder, entry, from, len, false);
    if (holder->n_aliases)
        kvi_aliases_forget(ix, holder, kvi_chain_run(chain).pos + from, len - from);
}

bool kvi_drop_kid(void *arg, struct kvi_chain *kid)
{
    struct kvi_drop *drop = arg;
    _Atomic uint64_t *entry = kvi_who_find(kid, drop->holder->id);

    if (!entry)
        return true;
    forget_blocks(drop->ix, drop->holder, kid, kvi_who_get(entry), 0);
    drop_entry(drop->ix, kid, entry);
    kvi_mark_dirty(drop->ix, kid);
    return --drop->left > 0;
}

/* The queue of dirty chains is also the list of those whose children are still to be looked at: a chain
 * that was in it before can't have any with this holder, for it got there by a cut. */
void kvi_drop_below_queued(struct kvi_drop *drop, const struct kvi_chain *seen)
{
    struct kvi_chain *next = seen ? (struct kvi_chain *)seen->link.word : drop->ix->dirty_head;

    for (; next; next = (struct kvi_chain *)next->link.word) {
        drop->left = next->kid_hint == KVI_AUX_MAX ? UINT64_MAX : next->kid_hint;
        if (drop->left)
            kvi_kids_each(next, kvi_drop_kid, drop);
    }
}

/* The holder leaves the children of @chain and all below them. */
static void drop_below(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
                       uint64_t n_kids)
{
    const struct kvi_chain *seen = ix->dirty_tail;
    struct kvi_drop drop = {ix, holder, n_kids};

    if (n_kids)
        kvi_kids_each(chain, kvi_drop_kid, &drop);
    kvi_drop_below_queued(&drop, seen);
}

void kvi_cut(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
             _Atomic uint64_t *entry, uint32_t len)
{
    uint64_t e = kvi_who_get(entry);
    bool was_full = kvi_entry_len(e) == kvi_chain_run(chain).len;
    uint32_t n_kids = kvi_entry_kids(ix, e);

    forget_blocks(ix, holder, chain, e, len);
    if (len == 0) {
        struct kvi_chain *parent = chain->parent;

        drop_entry(ix, chain, entry);
        if (!parent->parent)
            holder->n_roots--;
        else
            kvi_entry_count_kid(ix, kvi_who_find(parent, holder->id), -1);
    } else {
        chain->n_full -= was_full;
        kvi_who_set(chain, entry, (e & ~(UINT64_C(0x1ff) << 24)) | (uint64_t)len << 24);
        kvi_entry_set_kids(ix, entry, 0);
    }
    kvi_mark_dirty(ix, chain);
    if (was_full)
        drop_below(ix, holder, chain, n_kids == KVI_AUX_MAX ? UINT64_MAX : n_kids);
}

/* -- by hash ----------------------------------------------------------------------------------- */

static bool one_tier_each(const struct kvi_holder *holder)
{
    uint64_t sum = 0;

    for (int t = 0; t < KV_N_TIERS; t++)
        sum += holder->tier_blocks[t];
    return sum == atomic_load_explicit(&holder->blocks, memory_order_relaxed);
}

/* Entries in which some block, but not all, will change its tiers get a tmap: the only memory that
 * removing or adding a tier by hash can need. @giving: bits are added, not taken. */
static int mix_entries(struct kvi_index *ix, const struct kvi_holder *holder, uint32_t bit,
                       const uint64_t *hashes, size_t n, bool giving)
{
    for (size_t i = 0; i < n; i++) {
        struct kvi_place place;
        uint64_t entry;
        uint32_t mask;
        bool change;

        kvi_locate_ahead(ix, hashes, sizeof(hashes[0]), i, n);
        if (!kvi_locate(ix, holder, hashes[i], &place, NULL))
            continue;
        entry = kvi_who_get(place.entry);
        mask = kvi_entry_mask(entry);
        change = giving ? !(mask & bit) : (mask & bit) && mask != bit;
        if (mask && change && kvi_entry_len(entry) > 1) {
            int rc = kvi_entry_mix(ix, place.chain, place.entry, kvi_entry_len(entry));

            if (rc)
                return rc;
        }
    }
    return 0;
}

static void set_tier(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_place place,
                     enum kv_tier tier, bool on)
{
    uint64_t entry = kvi_who_get(place.entry);
    uint32_t bit = 1u << tier, mask = kvi_entry_mask(entry);

    if (mask) { /* one block alone */
        mask = on ? mask | bit : mask & ~bit;
        kvi_who_set(place.chain, place.entry,
                    (entry & ~(UINT64_C(0xf) << 33)) | (uint64_t)mask << 33);
    } else {
        kvi_tmap_set(place.chain, kvi_tmap_at(ix, entry), place.off, place.off + 1, bit, on);
        kvi_entry_unmix(ix, place.chain, place.entry);
    }
    kvi_account_tier(ix, holder, tier, on ? 1 : (uint64_t)-1);
}

static bool remove_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                       uint64_t hash)
{
    struct kvi_place place;
    uint32_t mask;

    if (!kvi_locate(ix, holder, hash, &place, NULL))
        return false;
    mask = kvi_mask_at(ix, kvi_who_get(place.entry), place.off);
    if (!(mask >> tier & 1))
        return false;
    if (mask == 1u << tier)
        kvi_cut(ix, holder, place.chain, place.entry, place.off);
    else
        set_tier(ix, holder, place, tier, false);
    return true;
}

static bool give_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint64_t hash)
{
    struct kvi_place place;

    if (!kvi_locate(ix, holder, hash, &place, NULL))
        return false;
    if (!(kvi_mask_at(ix, kvi_who_get(place.entry), place.off) >> tier & 1))
        set_tier(ix, holder, place, tier, true);
    return true;
}

/* An entry that the first pass made mixed stays so as long as it matters: it is unmixed when a
 * change of this tier made all its blocks alike, so that none is left to change, or when the call
 * ends. */
static long by_hash(struct kvi_index *ix, struct kv_holder key, enum kv_tier tier,
                    const uint64_t *hashes, size_t n, bool giving)
{
    struct kvi_holder *holder;
    long found = 0;

    if ((unsigned)tier >= KV_N_TIERS || n > LONG_MAX)
        return -EINVAL;
    kvi_lock(ix);
    kvi_locate_soon(ix, hashes, sizeof(hashes[0]), n);
    holder = kvi_holder_await(ix, key);
    if (holder && (giving || !one_tier_each(holder)))
        found = mix_entries(ix, holder, 1u << tier, hashes, n, giving);
    for (size_t i = 0; holder && found >= 0 && i < n; i++) {
        kvi_locate_ahead(ix, hashes, sizeof(hashes[0]), i, n);
        found += giving ? give_one(ix, holder, tier, hashes[i])
                        : remove_one(ix, holder, tier, hashes[i]);
    }
    kvi_unlock(ix);
    return found;
}

long kvi_remove(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                const uint64_t *hashes, size_t n)
{
    return by_hash(index, holder, tier, hashes, n, false);
}

long kvi_store_known(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                     const uint64_t *hashes, size_t n)
{
    return by_hash(index, holder, tier, hashes, n, true);
}
