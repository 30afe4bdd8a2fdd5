// SPDX-License-Identifier: Apache-2.0
#include "index/tree/tree.h"

static size_t tmap_words(uint32_t capacity)
{
    return (capacity + 15) / 16;
}

static size_t tmap_bytes(uint32_t capacity)
{
    return sizeof(struct kvi_tmap) + tmap_words(capacity) * sizeof(uint64_t);
}

struct kvi_tmap *kvi_tmap_new(struct kvi_index *ix, uint32_t capacity, uint32_t mask)
{
    struct kvi_tmap *tmap = kvi_mem_alloc(&ix->mem, tmap_bytes(capacity));

    if (!tmap)
        return NULL;
    /*
     * Set the capacity before the tmap gets its number: a reader may still hold an entry with the
     * number's last owner.
     */
    tmap->capacity = (uint32_t)tmap_words(capacity) * 16;
    for (size_t i = 0; i < tmap_words(capacity); i++)
        atomic_store_explicit(&tmap->word[i], UINT64_C(0x1111111111111111) * mask,
                              memory_order_release);
    if (kvi_dir_add(&ix->tmaps, tmap, KVI_AUX_MAX, &tmap->number)) {
        kvi_mem_free(&ix->mem, tmap);
        return NULL;
    }
    return tmap;
}

void kvi_tmap_free(struct kvi_index *ix, struct kvi_tmap *tmap)
{
    kvi_dir_remove(&ix->tmaps, tmap->number);
    kvi_mem_free(&ix->mem, tmap);
}

void kvi_tmap_retire(struct kvi_index *ix, struct kvi_tmap *tmap)
{
    kvi_dir_remove(&ix->tmaps, tmap->number);
    kvi_retire_memory(ix, &tmap->retired, tmap_bytes(tmap->capacity));
}

void kvi_tmap_set(struct kvi_chain *chain, struct kvi_tmap *tmap, uint32_t from, uint32_t to,
                  uint32_t mask, bool on)
{
    for (uint32_t w = (uint32_t)tmap_words(to); w-- > from / 16;) {
        uint64_t old = atomic_load_explicit(&tmap->word[w], memory_order_relaxed), bits = 0;

        for (uint32_t i = KV_MAX(from, w * 16); i < KV_MIN(to, w * 16 + 16); i++)
            bits |= (uint64_t)mask << (i % 16 * 4);
        atomic_store_explicit(&tmap->word[w], on ? old | bits : old & ~bits, memory_order_release);
        kvi_chain_bump(chain);
    }
}

int kvi_entry_mix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry,
                  uint32_t capacity)
{
    uint64_t e = kvi_who_get(entry);
    uint32_t len = kvi_entry_len(e);
    struct kvi_tmap *old = kvi_entry_mask(e) ? NULL : kvi_tmap_at(ix, e), *tmap;

    if (old && old->capacity >= capacity)
        return 0;
    tmap = kvi_tmap_new(ix, KV_MAX(capacity, len), kvi_entry_mask(e));
    if (!tmap)
        return -ENOMEM;
    tmap->kids = kvi_entry_kids(ix, e);
    for (size_t i = 0; old && i < tmap_words(old->capacity); i++)
        atomic_store_explicit(&tmap->word[i],
                              atomic_load_explicit(&old->word[i], memory_order_relaxed),
                              memory_order_release);
    kvi_who_set(chain, entry, kvi_entry(kvi_entry_holder(e), len, 0, tmap->number));
    chain->flags |= KVI_MIXED;
    if (old)
        kvi_tmap_retire(ix, old);
    return 0;
}

void kvi_entry_unmix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry)
{
    uint64_t e = kvi_who_get(entry);
    struct kvi_tmap *tmap;
    uint32_t mask;

    if (kvi_entry_mask(e))
        return;
    tmap = kvi_tmap_at(ix, e);
    mask = kvi_tmap_get(tmap, 0);
    for (uint32_t i = 1; i < kvi_entry_len(e); i++)
        if (kvi_tmap_get(tmap, i) != mask)
            return;
    kvi_who_set(chain, entry, kvi_entry(kvi_entry_holder(e), kvi_entry_len(e), mask, tmap->kids));
    kvi_tmap_retire(ix, tmap);
}

uint32_t kvi_entry_kids(const struct kvi_index *ix, uint64_t entry)
{
    return kvi_entry_mask(entry) ? kvi_entry_aux(entry) : kvi_tmap_at(ix, entry)->kids;
}

void kvi_entry_set_kids(struct kvi_index *ix, _Atomic uint64_t *entry, uint32_t kids)
{
    uint64_t e = kvi_who_get(entry);

    if (!kvi_entry_mask(e))
        kvi_tmap_at(ix, e)->kids = kids;
    else
        atomic_store_explicit(
            entry, kvi_entry(kvi_entry_holder(e), kvi_entry_len(e), kvi_entry_mask(e), kids),
            memory_order_release);
}

/*
 * Count a child. At its maximum the count sticks: it means unknown, and all children are visited.
 */
void kvi_entry_count_kid(struct kvi_index *ix, _Atomic uint64_t *entry, int more)
{
    uint32_t kids = kvi_entry_kids(ix, kvi_who_get(entry));

    if (kids < KVI_AUX_MAX)
        kvi_entry_set_kids(ix, entry, kids + (uint32_t)more);
}

void kvi_account_tier(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                      uint64_t n)
{
    holder->tier[tier].blocks += n;
    if (!holder->main)
        kvi_count(&ix->n_tier_blocks[tier], n);
}

void kvi_entry_account(struct kvi_index *ix, struct kvi_holder *holder, uint64_t entry,
                       uint32_t from, uint32_t to, bool more)
{
    uint64_t n[KV_N_TIERS] = {0}, blocks = to - from;

    for (uint32_t i = from; i < to; i++) {
        uint32_t mask = kvi_mask_at(ix, entry, i);

        if (kvi_entry_mask(entry)) { /* all blocks have the same tiers */
            for (int t = 0; t < KV_N_TIERS; t++)
                n[t] = mask >> t & 1 ? blocks : 0;
            break;
        }
        for (int t = 0; t < KV_N_TIERS; t++)
            n[t] += mask >> t & 1;
    }
    for (int t = 0; t < KV_N_TIERS; t++)
        if (n[t])
            kvi_account_tier(ix, holder, (enum kv_tier)t, more ? n[t] : -n[t]);
    kvi_account_places(ix, holder, more ? blocks : -blocks);
}
