// SPDX-License-Identifier: Apache-2.0
/* The slot operations that calls run in large numbers, inlined for the usual case: checking a
 * handle, adding a first reference, dropping the last one, with LRU. Rarer cases are function calls
 * (pool.c, evict.c). */
#ifndef KVBM_BM_POOL_MOVES_H
#define KVBM_BM_POOL_MOVES_H

#include "bm/pool/pool.h"

/* ---- lists of inactive slots (evict.h) ---- */

static inline void kvbm_list_push(struct kvbm_pool *pool, uint32_t i, uint32_t level)
{
    struct kvbm_slot *slots = pool->slots, *slot = &slots[i];
    uint32_t at = kvbm_list_end(&pool->evict, slot->priority, level), last = slots[at].prev;

    slot->flags |= SLOT_LISTED;
    slot->next = at;
    if (KV_UNLIKELY(!last)) {
        slot->prev = at;
        kvbm_list_started(pool, at, i);
        return;
    }
    slot->prev = last;
    slots[last].next = i;
    slots[at].prev = i;
}

static inline void kvbm_list_remove(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slots = pool->slots, *slot = &slots[i];
    uint32_t prev = slot->prev, next = slot->next;

    slots[prev].next = next;
    slots[next].prev = prev;
    slot->next = 0;
    slot->flags &= (uint8_t) ~(SLOT_LISTED | SLOT_FIRST);
    if (KV_UNLIKELY(prev == next))
        kvbm_list_emptied(pool, next);
}

/* Let the slot released KVBM_AHEAD releases ago remember slot @i. */
static inline void kvbm_remember(struct kvbm_pool *pool, uint32_t i)
{
    uint32_t *latest = &pool->evict.latest[pool->evict.tick % KVBM_AHEAD];
    struct kvbm_slot *before = &pool->slots[*latest];

    *latest = i;
    if (before->flags & SLOT_INACTIVE)
        before->ahead = i;
}

/** Insert slot @i, which became inactive or was touched, as the most recent. */
static inline void kvbm_evict_insert(struct kvbm_pool *pool, uint32_t i)
{
    if (KV_UNLIKELY(pool->evict.policy != KVBM_EVICT_LRU)) {
        kvbm_evict_insert_ranked(pool, i);
        return;
    }
    pool->evict.tick++;
    pool->slots[i].flags |= SLOT_INACTIVE;
    kvbm_remember(pool, i);
    kvbm_list_push(pool, i, 0);
}

/** Take block @i off the inactive blocks. */
static inline void kvbm_evict_remove(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];

    if (KV_UNLIKELY(pool->evict.policy == KVBM_EVICT_LINEAGE)) {
        kvbm_lineage_remove(pool, i);
        return;
    }
    slot->ahead = 0;
    slot->flags &= (uint8_t)~SLOT_INACTIVE;
    kvbm_list_remove(pool, i);
}

/* ---- references ---- */

/** Give an inactive block its first handle. */
static inline void kvbm_slot_revive(struct kvbm_pool *pool, uint32_t i)
{
    kvbm_evict_remove(pool, i);
    pool->n_inactive--;
    pool->n_immutable++;
    pool->slots[i].refs = 1;
}

/** Drop a strong reference. The last one makes the block inactive or free. */
static inline void kvbm_slot_put(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];

    if (slot->refs != 1 || slot->flags & SLOT_DUPLICATE || pool->reset_on_release) {
        kvbm_slot_put_other(pool, i);
        return;
    }
    slot->refs = 0;
    slot->generation++;
    pool->n_immutable--;
    pool->n_inactive++;
    kvbm_evict_insert(pool, i);
}

/* ---- arrays of handles ---- */

/**
 * Check handles that are about to be consumed: each once in the array, in a state from @least to
 * @most; zeroed ones only where @holes are allowed. Returns 0, or the error of the first bad one
 * with nothing changed. After success their slots have SLOT_CLAIMED. The consumer clears it while
 * it walks the slots anyway; otherwise call kvbm_unclaim.
 */
static inline int kvbm_claim(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n,
                             enum kvbm_state least, enum kvbm_state most, bool holes)
{
    for (size_t i = 0; i < n; i++) {
        const struct kvbm_handle *h = &handles[i];
        struct kvbm_slot *slot;
        int err;

        if (KV_LIKELY(h->pool == pool && h->block < pool->n_blocks)) {
            slot = &pool->slots[h->block + 1];
            if (KV_LIKELY(slot->generation == h->generation && slot->refs > slot->next &&
                          !(slot->flags & SLOT_CLAIMED) && slot->state >= least &&
                          slot->state <= most)) {
                slot->flags |= SLOT_CLAIMED;
                continue;
            }
        }
        err = kvbm_claim_refused(pool, h, holes);
        if (err < 0) {
            kvbm_unclaim(pool, handles, i);
            return err;
        }
    }
    return 0;
}

#endif
