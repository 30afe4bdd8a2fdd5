// SPDX-License-Identifier: Apache-2.0
/* What must hold between calls, checked from scratch. */
#include <errno.h>

#include "base/error.h"
#include "base/log.h"
#include "pool.h"

#define MUST(condition)                                            \
    do {                                                           \
        if (!(condition)) {                                        \
            kv_log_error("kvbm", "broken", "must=%s", #condition); \
            return -EUCLEAN;                                       \
        }                                                          \
    } while (0)

struct counts {
    uint64_t free, mutable, immutable, inactive, listed;
};

static int check_registered(const struct kvbm_pool *pool, uint32_t i)
{
    const struct kvbm_slot *slot = &pool->slots[i];
    const struct kvbm_entry *e = kvbm_slot_entry(pool, slot);
    uint32_t found = kvbm_find(pool->registry, e->group, e->key, e->tag);

    MUST(found == slot->entry);
    MUST(pool->groups >> e->group & 1);
    if (slot->flags & SLOT_DUPLICATE) {
        MUST(slot->refs > 0);
        MUST(slot->prev && slot->prev != i);
        MUST(pool->slots[slot->prev].entry == slot->entry);
        MUST(!(pool->slots[slot->prev].flags & SLOT_DUPLICATE));
        MUST(e->slot[pool->tier] == slot->prev);
    } else {
        MUST(e->slot[pool->tier] == i);
        MUST(e->tiers >> pool->tier & 1);
    }
    MUST(!(slot->flags & SLOT_INACTIVE) == (slot->refs > 0));
    return 0;
}

static int check_slot(const struct kvbm_pool *pool, uint32_t i, struct counts *counts)
{
    const struct kvbm_slot *slot = &pool->slots[i];

    MUST(!(slot->flags & SLOT_CLAIMED));
    MUST(!(slot->flags & SLOT_LISTED) || slot->flags & SLOT_INACTIVE);
    MUST((slot->entry != 0) == (slot->state >= KVBM_COMPLETE));
    MUST(slot->state != KVBM_PARTIAL || slot->tokens);
    MUST(slot->state != KVBM_REGISTERED || !slot->tokens);
    counts->listed += slot->flags & SLOT_LISTED ? 1 : 0;
    if (slot->state == KVBM_REGISTERED) {
        counts->immutable += slot->refs > 0;
        counts->inactive += slot->refs == 0;
        return check_registered(pool, i);
    }
    MUST(slot->refs <= 1);
    MUST(slot->refs || slot->state == KVBM_RESET);
    counts->mutable += slot->refs;
    counts->free += !slot->refs;
    return 0;
}

static int check_lists(const struct kvbm_pool *pool, uint64_t listed)
{
    const struct kvbm_evict *evict = &pool->evict;
    uint64_t n = 0;

    for (uint32_t priority = 0; priority <= KVBM_PRIORITY_MAX; priority++) {
        for (uint32_t level = 0; level < evict->n_levels; level++) {
            const struct kvbm_list *list =
                &evict->lists[(size_t)priority * evict->n_levels + level];
            uint64_t word = evict->words[(size_t)priority * evict->n_words + level / 64];
            uint32_t before = 0;

            MUST(!list->head == !list->tail);
            MUST((word >> (level % 64) & 1) == (list->head != 0));
            for (uint32_t i = list->head; i; before = i, i = pool->slots[i].next) {
                MUST(pool->slots[i].prev == before);
                MUST(pool->slots[i].flags & SLOT_LISTED);
                MUST(pool->slots[i].priority == priority);
                MUST(++n <= listed);
            }
            MUST(list->tail == before);
        }
    }
    MUST(n == listed);
    return 0;
}

/* Lineage: a block is listed exactly when it is inactive and none of its children in the pool is. */
static int check_leaves(const struct kvbm_pool *pool)
{
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        const struct kvbm_slot *slot = &pool->slots[i];

        if (slot->flags & SLOT_INACTIVE)
            MUST(!(slot->flags & SLOT_LISTED) == (pool->evict.children[slot->entry] > 0));
    }
    return 0;
}

static int check_pool(const struct kvbm_pool *pool)
{
    struct counts counts = {0};

    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        int err = check_slot(pool, i, &counts);

        if (err < 0)
            return err;
    }
    MUST(counts.free == pool->n_free);
    MUST(counts.mutable == pool->n_mutable);
    MUST(counts.immutable == pool->n_immutable);
    MUST(counts.inactive == pool->n_inactive);
    MUST(counts.free + counts.mutable + counts.immutable + counts.inactive == pool->n_blocks);
    for (uint32_t i = 0; i < pool->n_free; i++) {
        uint32_t slot = pool->free[(pool->free_head + (uint64_t)i) % pool->n_blocks];

        MUST(!pool->slots[slot].refs && pool->slots[slot].state == KVBM_RESET);
    }
    if (pool->evict.policy == KVBM_EVICT_LINEAGE && check_leaves(pool) < 0)
        return -EUCLEAN;
    return check_lists(pool, counts.listed);
}

/* Each cell names an entry that is found where it is, and each entry is named as often as it says. */
static int check_table(const struct kvbm_registry *r)
{
    uint64_t n = 0;

    for (size_t i = 0; r->table && i < (size_t)1 << r->table_bits; i++) {
        const struct kvbm_entry *e;

        if (!r->table[i].entry)
            continue;
        n++;
        e = kvbm_entry(r, r->table[i].entry);
        MUST(e->tag == r->table[i].tag);
        MUST(kvbm_find(r, e->group, e->key, e->tag) == r->table[i].entry);
        MUST(e->n_slots || e->n_children);
        MUST(e->n_slots || (!e->tiers && !e->parent && !e->link));
        MUST(!e->parent || kvbm_entry(r, e->parent)->position + 1 == e->position);
        for (uint32_t tier = 0; tier < KV_N_TIERS; tier++)
            MUST((e->tiers >> tier & 1) == (e->slot[tier] != 0));
    }
    MUST(n == r->live_entries);
    return 0;
}

int kvbm_registry_check(struct kvbm_registry *r)
{
    int err;

    if (!r)
        return -EINVAL;
    kvbm_lock(r);
    err = check_table(r);
    for (const struct kvbm_pool *pool = r->pools; err == 0 && pool; pool = pool->next)
        err = check_pool(pool);
    kvbm_unlock(r);
    return err;
}
