// SPDX-License-Identifier: Apache-2.0
/*
 * Remove blocks. First the entries, from the top down, so that the first step makes the whole loss
 * visible. Names, blocks and empty chains follow at the end of the call (kvi_settle).
 *
 * A removal takes a copy; the last copy takes the tier; the last tier cuts the holder's entry:
 *
 *     entry of the holder   [ a b c d ]─── [ e f ]     remove c
 *     after the cut         [ a b ]                    c is gone; d, e, f are parked
 *
 * Invariant: a holder that has a place has all places above it. What is below a removed block
 * therefore leaves the tree at once, also where another holder keeps the chains alive.
 *
 * Memory is needed only for blocks that keep other tiers (mix_entries) and for parking. The first
 * is allocated before the first change, so a call that fails removed nothing. Without the second,
 * blocks are forgotten and counted: the answer is short, and the holder's `lost` says so.
 */
#include <limits.h>

#include "index/tree/kids.h"
#include "index/tree/windows.h"
#include "index/write/store.h"

/* Remove the entry, whose blocks are no longer counted. */
static void drop_entry(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry)
{
    uint64_t e = kvi_who_get(entry);

    chain->n_full -= kvi_entry_len(e) == kvi_chain_run(chain).len;
    chain->kid_hint = kvi_entry_kids(ix, e);
    kvi_who_remove(chain, entry);
    if (!kvi_entry_mask(e))
        kvi_tmap_retire(ix, kvi_tmap_at(ix, e));
}

/* Forget the blocks' names. @copies: the first block whose copies are forgotten, too. */
static void forget_blocks(struct kvi_index *ix, struct kvi_holder *holder,
                          const struct kvi_chain *chain, uint64_t entry, uint32_t from,
                          uint32_t copies)
{
    uint32_t len = kvi_entry_len(entry), pos = kvi_chain_run(chain).pos;

    kvi_entry_account(ix, holder, entry, from, len, false);
    for (uint32_t i = copies; i < len && holder->n_copies; i++)
        kvi_copies_forget(ix, holder, kvi_mask_at(ix, entry, i), kvi_name_of(ix, holder, pos + i));
    if (holder->n_aliases)
        kvi_aliases_forget(ix, holder, kvi_chain_run(chain).pos + from, len - from);
}

bool kvi_drop_kid(void *arg, struct kvi_chain *kid)
{
    struct kvi_drop *drop = arg;
    _Atomic uint64_t *entry = kvi_who_find(kid, drop->holder->id);

    if (!entry)
        return true;
    forget_blocks(drop->ix, drop->holder, kid, kvi_who_get(entry), 0,
                  drop->parked ? UINT32_MAX : 0);
    drop_entry(drop->ix, kid, entry);
    kvi_mark_dirty(drop->ix, kid);
    return --drop->left > 0;
}

/*
 * The queue of dirty chains also lists the chains whose children are still to be visited. A chain
 * that was queued before has no children with this holder, since a cut queued it.
 */
void kvi_drop_below_queued(struct kvi_drop *drop, const struct kvi_chain *seen)
{
    struct kvi_chain *next = seen ? (struct kvi_chain *)seen->link.word : drop->ix->dirty_head;

    for (; next; next = (struct kvi_chain *)next->link.word) {
        drop->left = next->kid_hint == KVI_AUX_MAX ? UINT64_MAX : next->kid_hint;
        if (drop->left)
            kvi_kids_each(next, kvi_drop_kid, drop);
    }
}

/* Remove the holder from the children of @chain and all chains below them. */
static void drop_below(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
                       uint64_t n_kids, bool parked)
{
    const struct kvi_chain *seen = ix->dirty_tail;
    struct kvi_drop drop = {ix, holder, n_kids, parked};

    if (n_kids)
        kvi_kids_each(chain, kvi_drop_kid, &drop);
    kvi_drop_below_queued(&drop, seen);
}

/*
 * Parking comes first, while names and children can still be read. Then one step of the entry takes
 * all from block @len on out of the holder's reach: a reader enters no child of a chain that the
 * holder doesn't have whole. The entries below can go in any order after it.
 */
void kvi_cut(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
             _Atomic uint64_t *entry, uint32_t len, bool forget)
{
    uint64_t e = kvi_who_get(entry);
    bool was_full = kvi_entry_len(e) == kvi_chain_run(chain).len;
    uint32_t n_kids = kvi_entry_kids(ix, e);

    if (!forget && (n_kids || len + 1 < kvi_entry_len(e)))
        kvi_park_below(ix, holder, chain, len);
    forget_blocks(ix, holder, chain, e, len, forget ? len : UINT32_MAX);
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
        drop_below(ix, holder, chain, n_kids == KVI_AUX_MAX ? UINT64_MAX : n_kids, !forget);
}

/* -- by hash ----------------------------------------------------------------------------------- */

/* Return true when each block is in one tier: removing it never leaves others, nor needs memory. */
static bool one_tier_each(const struct kvi_holder *holder)
{
    uint64_t sum = 0;

    for (int t = 0; t < KV_N_TIERS; t++)
        sum += holder->tier[t].blocks;
    return sum == atomic_load_explicit(&holder->blocks, memory_order_relaxed);
}

/*
 * Give a tmap to each entry in which some blocks, but not all, change their tiers. No other memory
 * is needed to remove or add a tier by hash. @giving: the tier is added.
 *
 * A tmap lasts as long as the call needs it. An entry loses it once all its blocks have equal
 * tiers; while a block is still to be changed, it differs from the one just changed.
 */
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

    if (mask) { /* a single block: mix_entries gave the longer entries a tmap */
        mask = on ? mask | bit : mask & ~bit;
        kvi_who_set(place.chain, place.entry,
                    (entry & ~(UINT64_C(0xf) << 33)) | (uint64_t)mask << 33);
    } else {
        kvi_tmap_set(place.chain, kvi_tmap_at(ix, entry), place.off, place.off + 1, bit, on);
        kvi_entry_unmix(ix, place.chain, place.entry);
    }
    kvi_account_tier(ix, holder, tier, on ? 1 : (uint64_t)-1);
}

/* Take the tier from a block that has it: in the tree, or else parked. */
static void lose(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint64_t hash)
{
    struct kvi_parked *parked;
    struct kvi_place place;

    if (kvi_locate(ix, holder, hash, &place, NULL)) {
        if (kvi_mask_at(ix, kvi_who_get(place.entry), place.off) == 1u << tier)
            kvi_cut(ix, holder, place.chain, place.entry, place.off, false);
        else
            set_tier(ix, holder, place, tier, false);
        return;
    }
    parked = kvi_parked_find(ix, holder, hash);
    parked->mask &= ~(1u << tier);
    if (!parked->mask)
        kvi_unpark(ix, holder, parked);
}

int kvi_lose_reserve(struct kvi_index *ix, const struct kvi_holder *holder, enum kv_tier tier,
                     uint64_t hash)
{
    return mix_entries(ix, holder, 1u << tier, &hash, 1, false);
}

void kvi_lose(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint64_t hash)
{
    lose(ix, holder, tier, hash);
    if (kvi_windows_of(holder) && !kvi_tiers_of(ix, holder, hash))
        kvi_overlays_lose(ix, holder, hash);
}

uint32_t kvi_tiers_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash)
{
    const struct kvi_parked *parked;
    struct kvi_place place;

    if (kvi_locate(ix, holder, hash, &place, NULL))
        return kvi_mask_at(ix, kvi_who_get(place.entry), place.off);
    parked = kvi_parked_find(ix, holder, hash);
    return parked ? parked->mask : 0;
}

static bool remove_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                       uint32_t source, uint64_t hash, uint32_t left)
{
    enum kvi_taken taken;

    if (!(kvi_tiers_of(ix, holder, hash) >> tier & 1))
        return false;
    taken = kvi_copies_take(ix, holder, tier, source, hash, left);
    if (taken == KVI_TAKEN_LAST)
        lose(ix, holder, tier, hash);
    return taken != KVI_TAKEN_NONE;
}

/*
 * Remove blocks from the holder's overlays after a removal. Settles: chains seen before may be joined.
 */
static void lose_in_overlays(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash)
{
    if (kvi_windows_of(holder) && !kvi_tiers_of(ix, holder, hash))
        kvi_overlays_lose(ix, holder, hash);
}

int kvi_take_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                 uint32_t source, uint64_t hash, uint32_t left)
{
    bool taken;

    if (mix_entries(ix, holder, 1u << tier, &hash, 1, false))
        return -ENOMEM;
    taken = remove_one(ix, holder, tier, source, hash, left);
    lose_in_overlays(ix, holder, hash);
    return taken;
}

static bool give_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint64_t hash)
{
    struct kvi_parked *parked;
    struct kvi_place place;

    if (!kvi_locate(ix, holder, hash, &place, NULL)) {
        parked = kvi_parked_find(ix, holder, hash);
        if (parked)
            parked->mask |= 1u << tier;
        return parked != NULL;
    }
    if (!(kvi_mask_at(ix, kvi_who_get(place.entry), place.off) >> tier & 1))
        set_tier(ix, holder, place, tier, true);
    return true;
}

void kvi_give(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t bits)
{
    for (uint32_t tier = 0; tier < KV_N_TIERS; tier++) {
        if (!(bits >> tier & 1))
            continue;
        if (mix_entries(ix, holder, 1u << tier, &hash, 1, true))
            kvi_parking_lose_more(ix, holder);
        else
            (void)give_one(ix, holder, (enum kv_tier)tier, hash);
    }
}

/* -- runs -------------------------------------------------------------------------------------- */

/*
 * A run of blocks in one chain, each of them the holder's last one there when its turn comes. One
 * cut removes them all, and only the first is searched by its name. Conditions: each block has one
 * copy, in one tier, under the name in its slot.
 */
struct run {
    struct kvi_index *ix;
    struct kvi_holder *holder;
    uint32_t bit; /* bit of the tier */
    const uint64_t *hashes;
    size_t n; /* hashes that are left */
};

/*
 * Cut the run of blocks that ends with @off in the chain. Returns its length; 0: the blocks don't
 * meet the conditions.
 */
static size_t cut_run(const struct run *run, struct kvi_chain *chain, _Atomic uint64_t *entry,
                      uint32_t off)
{
    const uint64_t *last = kvi_arena_engines(&run->ix->arena, kvi_chain_run(chain).pos) + off;
    uint64_t e = kvi_who_get(entry);
    size_t k = 0;

    if (kvi_entry_mask(e) != run->bit || kvi_entry_len(e) != off + 1 || kvi_entry_aux(e))
        return 0;
    while (k < run->n && k <= off && run->hashes[k] == *(last - k))
        k++;
    if (k)
        kvi_cut(run->ix, run->holder, chain, entry, off + 1 - (uint32_t)k, true);
    return k;
}

/*
 * Remove blocks from the front of run->hashes, up the tree. Returns their number. An engine evicts
 * a prompt from its end, and names the blocks in that order: a search by name each would be wasted.
 */
static size_t take_run(struct run run)
{
    struct kvi_place place;
    size_t taken = 0, k;

    if (!kvi_locate(run.ix, run.holder, run.hashes[0], &place, NULL))
        return 0;
    do {
        struct kvi_chain *above = place.chain->parent;

        __builtin_prefetch(above);
        k = cut_run(&run, place.chain, place.entry, place.off);
        taken += k;
        run.hashes += k;
        run.n -= k;
        if (k <= place.off || !run.n || !above->parent)
            return taken;
        place.chain = above;
        place.entry = kvi_who_find(above, run.holder->id);
        place.off = kvi_entry_len(kvi_who_get(place.entry)) - 1;
    } while (k);
    return taken;
}

/* -- calls ------------------------------------------------------------------------------------- */

/*
 * Return true when the call names blocks from the top down, judging by the first and the last.
 * Removed last first, each block is a leaf when its turn comes, and none is parked in between.
 */
static bool goes_down(const struct kvi_index *ix, const struct kvi_holder *holder,
                      const uint64_t *hashes, size_t n)
{
    struct kvi_place first, last;

    if (n < 2 || !ix->parking.max_holder || !kvi_locate(ix, holder, hashes[0], &first, NULL) ||
        !kvi_locate(ix, holder, hashes[n - 1], &last, NULL))
        return false;
    if (first.chain == last.chain)
        return first.off < last.off;
    for (const struct kvi_chain *c = last.chain->parent; c && n; c = c->parent, n--)
        if (c == first.chain)
            return true;
    return false;
}

/* Return the hashes of a call, last first. NULL: out of memory. */
static const uint64_t *reversed(struct kvi_index *ix, const uint64_t *hashes, size_t n)
{
    struct kvi_scratch *scratch = ix->scratch;

    if (kvi_mem_grow(&ix->mem, (void **)&scratch->hashes, &scratch->hashes_capacity, n,
                     sizeof(scratch->hashes[0])))
        return NULL;
    for (size_t i = 0; i < n; i++)
        scratch->hashes[i] = hashes[n - 1 - i];
    return scratch->hashes;
}

/* Return true when each of the holder's blocks has one copy, and the name in its slot. */
static bool is_plain(const struct kvi_holder *holder, enum kv_tier tier, uint32_t source)
{
    return !holder->n_copies && !holder->n_aliases && source == holder->tier[tier].implied;
}

/* Take copies from a main cache. Returns like kvi_take. */
static long take_from_main(struct kvi_index *index, struct kvi_holder *holder, enum kv_tier tier,
                           uint32_t source, const uint64_t *hashes, const uint32_t *left, size_t n)
{
    const uint64_t *order = NULL;
    long found = 0;

    if (!one_tier_each(holder))
        found = mix_entries(index, holder, 1u << tier, hashes, n, false);
    if (found >= 0 && !left && goes_down(index, holder, hashes, n))
        order = reversed(index, hashes, n);
    if (order) /* without memory the given order does, and parks blocks in between */
        hashes = order;
    for (size_t i = 0; found >= 0 && i < n; i++) {
        if (is_plain(holder, tier, source) && !left) {
            size_t taken = take_run((struct run){index, holder, 1u << tier, hashes + i, n - i});

            found += (long)taken;
            i += taken;
            if (i == n)
                break;
        }
        kvi_locate_ahead(index, hashes, sizeof(hashes[0]), i, n);
        found +=
            remove_one(index, holder, tier, source, hashes[i], left ? left[i] : KVI_COPIES_UNSAID);
    }
    /* Overlays that have more than their main holder in between lengthen no match. */
    for (size_t i = 0; found >= 0 && i < n; i++)
        lose_in_overlays(index, holder, hashes[i]);
    return found;
}

/* Take copies from a window. Returns like kvi_take. */
static long take_from_window(struct kvi_index *index, const struct kvi_spot *spot, uint32_t source,
                             const uint64_t *hashes, const uint32_t *left, size_t n)
{
    long found = 0;

    for (size_t i = 0; i < n; i++) {
        int rc = kvi_take_one(index, spot->holder, spot->tier, source, hashes[i],
                              left ? left[i] : KVI_COPIES_UNSAID);

        if (rc < 0)
            return rc;
        found += rc;
        kvi_overlay_tidy(index, spot->holder, hashes[i]);
    }
    return found;
}

long kvi_take(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
              const uint32_t *left, size_t n)
{
    struct kvi_spot spot;
    long found;

    if (n > LONG_MAX)
        return -EINVAL;
    kvi_lock(index);
    kvi_locate_soon(index, hashes, sizeof(hashes[0]), n);
    found = kvi_spot_find(index, &cache, false, &spot);
    if (!found && spot.holder)
        found = cache.window
                    ? take_from_window(index, &spot, cache.source, hashes, left, n)
                    : take_from_main(index, spot.holder, spot.tier, cache.source, hashes, left, n);
    if (spot.main && found >= 0 && spot.main->n_lost)
        kvi_note_gone(spot.main, n - (size_t)found);
    kvi_unlock(index);
    return found;
}

long kvi_remove(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                const uint64_t *hashes, size_t n)
{
    return kvi_take(index, kvi_cache_of(holder, tier, 0), hashes, NULL, n);
}

/* Keep a block of a window of which nothing is known but its name. */
static void park_placeless(struct kvi_index *ix, struct kvi_holder *overlay, enum kv_tier tier,
                           uint32_t source, bool counted, uint64_t hash)
{
    const struct kv_block block = {hash, 0};

    if (kvi_park(ix, overlay, kvi_placeless_parent(hash), block, 1u << tier) &&
        !kvi_copies_add(ix, overlay, tier, source, hash, false, counted))
        kvi_unpark(ix, overlay, kvi_parked_find(ix, overlay, hash));
}

long kvi_known(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint32_t source,
               bool counted, const uint64_t *hashes, size_t n)
{
    long found = mix_entries(ix, holder, 1u << tier, hashes, n, true);

    for (size_t i = 0; found >= 0 && i < n; i++) {
        uint32_t mask;

        kvi_locate_ahead(ix, hashes, sizeof(hashes[0]), i, n);
        mask = kvi_tiers_of(ix, holder, hashes[i]);
        found += mask || holder->main;
        if (!mask && holder->main)
            park_placeless(ix, holder, tier, source, counted, hashes[i]);
        if (!mask)
            continue;
        if (kvi_copies_add(ix, holder, tier, source, hashes[i], mask >> tier & 1, counted))
            (void)give_one(ix, holder, tier, hashes[i]);
    }
    return found;
}

static long add_known(struct kvi_index *ix, const struct kvi_cache *cache, bool counted,
                      const uint64_t *hashes, size_t n)
{
    struct kvi_spot spot;
    long found;

    if (n > LONG_MAX)
        return -EINVAL;
    kvi_lock(ix);
    kvi_locate_soon(ix, hashes, sizeof(hashes[0]), n);
    found = kvi_spot_find(ix, cache, true, &spot);
    if (!found && spot.holder) {
        kvi_copies_imply(spot.holder, spot.tier, cache->source);
        found = kvi_known(ix, spot.holder, spot.tier, cache->source, counted, hashes, n);
    }
    kvi_unlock(ix);
    return found;
}

long kvi_store_known(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
                     size_t n)
{
    return add_known(index, &cache, false, hashes, n);
}

long kvi_add_known(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
                   size_t n)
{
    return add_known(index, &cache, true, hashes, n);
}
