// SPDX-License-Identifier: Apache-2.0
/* Check from scratch the invariants that hold between calls. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/pool/pool.h"

#define MUST(condition)                                            \
    do {                                                           \
        if (!(condition)) {                                        \
            kv_log_error("kvbm", "broken", "must=%s", #condition); \
            return -EUCLEAN;                                       \
        }                                                          \
    } while (0)

struct counts {
    uint64_t free, mutable, immutable, inactive, listed, retained;
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
    if (!(slot->flags & SLOT_INACTIVE))
        MUST((slot->state != KVBM_RESET && slot->state != KVBM_REGISTERED) || !slot->tokens);
    else if (pool->evict.policy != KVBM_EVICT_LINEAGE)
        MUST(slot->ahead <= pool->n_blocks);
    counts->listed += slot->flags & SLOT_LISTED ? 1 : 0;
    if (slot->flags & SLOT_RETAINED) {
        MUST(slot->state == KVBM_REGISTERED && !(slot->flags & SLOT_DUPLICATE));
        MUST(pool->retained.place[i] < pool->retained.n);
        MUST(pool->retained.heap[pool->retained.place[i]].slot == i);
        counts->retained++;
    }
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

/*
 * Check one list. Eviction finds lists by their bits: blocks of a list without its bit are missing
 * in the count.
 */
static int check_list(const struct kvbm_pool *pool, uint32_t priority, uint32_t level, uint64_t *n,
                      uint64_t listed)
{
    uint32_t end = pool->evict.ends + priority * pool->evict.n_levels + level, before = end;

    MUST(pool->slots[end].next && pool->slots[end].next != end);
    for (uint32_t i = pool->slots[end].next; i != end; before = i, i = pool->slots[i].next) {
        MUST(i > 0 && i <= pool->n_blocks);
        MUST(pool->slots[i].prev == before);
        MUST(pool->slots[i].flags & SLOT_LISTED);
        MUST(pool->slots[i].priority == priority);
        MUST(++*n <= listed);
    }
    MUST(pool->slots[end].prev == before);
    return 0;
}

static int check_lists(const struct kvbm_pool *pool, uint64_t listed)
{
    const struct kvbm_evict *evict = &pool->evict;
    uint64_t n = 0;

    for (uint32_t priority = 0; priority <= KVBM_PRIORITY_MAX; priority++) {
        const uint64_t *words = &evict->words[(size_t)priority * evict->n_words];
        uint64_t any = evict->priorities[priority / 64] >> (priority % 64) & 1;

        MUST(any == (evict->summary[priority] != 0));
        for (uint32_t w = 0; w < evict->n_words; w++) {
            MUST((evict->summary[priority] >> w & 1) == (words[w] != 0));
            for (uint64_t left = words[w]; left; left &= left - 1) {
                uint32_t level = w * 64 + (uint32_t)__builtin_ctzll(left);

                MUST(level < evict->n_levels);
                if (check_list(pool, priority, level, &n, listed) < 0)
                    return -EUCLEAN;
            }
        }
    }
    MUST(n == listed);
    return 0;
}

/* Check that each free block is in the ring once, and that each primary counts its duplicates. */
static int check_counts(const struct kvbm_pool *pool, uint32_t *tally)
{
    memset(tally, 0, ((size_t)pool->n_blocks + 1) * sizeof(*tally));
    for (uint32_t i = 0; i < pool->n_free; i++) {
        uint32_t slot = pool->free[(pool->free_head + (uint64_t)i) % pool->n_blocks];

        MUST(!pool->slots[slot].refs && pool->slots[slot].state == KVBM_RESET);
        MUST(!tally[slot]++);
    }
    memset(tally, 0, ((size_t)pool->n_blocks + 1) * sizeof(*tally));
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        if (pool->slots[i].flags & SLOT_DUPLICATE)
            tally[pool->slots[i].prev]++;
    }
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        const struct kvbm_slot *slot = &pool->slots[i];

        MUST(slot->flags & SLOT_LISTED || slot->next == tally[i]);
        MUST(slot->refs >= tally[i]);
    }
    return 0;
}

/*
 * Check lineage: each entry counts its inactive children in the pool; a block is in a list exactly
 * when it is inactive and has none.
 */
static int check_leaves(const struct kvbm_pool *pool, uint32_t *tally)
{
    const struct kvbm_registry *r = pool->registry;

    memset(tally, 0, ((size_t)r->n_entries + 1) * sizeof(*tally));
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        if (pool->slots[i].flags & SLOT_INACTIVE)
            tally[kvbm_slot_entry(pool, &pool->slots[i])->parent]++;
    }
    for (uint32_t i = 1; i <= r->n_entries; i++)
        MUST(tally[i] == pool->evict.children[i]);
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        const struct kvbm_slot *slot = &pool->slots[i];

        if (slot->flags & SLOT_INACTIVE)
            MUST(!(slot->flags & SLOT_LISTED) == (tally[slot->entry] > 0));
    }
    return 0;
}

/* Check the heap of retained blocks. The walk over the slots has checked that the heap's entries
 * name them. */
static int check_retained(const struct kvbm_pool *pool, uint64_t retained)
{
    const struct kvbm_retained *all = &pool->retained;

    MUST(retained == all->n);
    for (size_t i = 1; i < all->n; i++)
        MUST(all->heap[(i - 1) / KVBM_RETAIN_CHILDREN].when_ns <= all->heap[i].when_ns);
    return 0;
}

static int check_pool(const struct kvbm_pool *pool, uint32_t *tally)
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
    if (check_counts(pool, tally) < 0 || check_retained(pool, counts.retained) < 0)
        return -EUCLEAN;
    if (pool->evict.policy == KVBM_EVICT_LINEAGE && check_leaves(pool, tally) < 0)
        return -EUCLEAN;
    return check_lists(pool, counts.listed);
}

/* Return the number of cells of both tables, as one row. */
static size_t n_cells(const struct kvbm_registry *r)
{
    return (r->table ? (size_t)1 << r->table_bits : 0) +
           (r->old.buckets ? (size_t)1 << r->old.bits : 0);
}

struct cell {
    uint32_t tag, entry;
};

static struct cell cell_at(const struct kvbm_registry *r, size_t i)
{
    size_t size = (size_t)1 << r->table_bits, at = i < size ? i : i - size;
    const struct kvbm_bucket *buckets = i < size ? r->table : r->old.buckets;
    const struct kvbm_bucket *bucket = &buckets[at / KVBM_BUCKET];
    struct cell cell = {bucket->tag[at % KVBM_BUCKET], bucket->entry[at % KVBM_BUCKET]};

    if (i >= size && cell.entry == KVBM_GONE)
        cell.entry = 0;
    return cell;
}

/* Check that each cell names an entry that a lookup finds there. */
static int check_table(const struct kvbm_registry *r)
{
    uint64_t n = 0, n_untold = 0;

    for (size_t i = 0; i < n_cells(r); i++) {
        struct cell cell = cell_at(r, i);
        const struct kvbm_entry *e;

        if (!cell.entry)
            continue;
        n++;
        MUST(cell.entry <= r->n_entries);
        e = kvbm_entry(r, cell.entry);
        MUST(e->tag == cell.tag);
        MUST(kvbm_find(r, e->group, e->key, e->tag) == cell.entry);
        MUST(e->n_slots || e->n_children);
        MUST(e->n_slots || (!e->tiers && !e->parent && !e->link));
        MUST(!(e->untold & ~e->tiers) && (e->tiers || !(e->flags & KVBM_TOLD)));
        MUST(!e->untold || !(e->flags & KVBM_TOLD));
        n_untold += e->untold != 0;
        MUST(!e->parent || kvbm_entry(r, e->parent)->position + 1 == e->position);
        for (uint32_t tier = 0; tier < KV_N_TIERS; tier++)
            MUST((e->tiers >> tier & 1) == (e->slot[tier] != 0));
    }
    MUST(n == r->live_entries && n_untold == r->n_untold);
    MUST(r->n_entries <= r->max_entries);
    return 0;
}

/* Check that blocks and children name each entry as often as the entry counts. */
static int check_names(const struct kvbm_registry *r, uint32_t *slots, uint32_t *children)
{
    for (const struct kvbm_pool *pool = r->pools; pool; pool = pool->next) {
        for (uint32_t i = 1; i <= pool->n_blocks; i++)
            slots[pool->slots[i].entry]++;
    }
    for (size_t i = 0; i < n_cells(r); i++) {
        uint32_t entry = cell_at(r, i).entry;

        if (entry)
            children[kvbm_entry(r, entry)->parent]++;
    }
    for (size_t i = 0; i < n_cells(r); i++) {
        uint32_t entry = cell_at(r, i).entry;

        MUST(!entry || kvbm_entry(r, entry)->n_slots == slots[entry]);
        MUST(!entry || kvbm_entry(r, entry)->n_children == children[entry]);
    }
    return 0;
}

/* Number of entries or of blocks, whichever is larger: the length of a tally of either. */
static size_t tally_len(const struct kvbm_registry *r)
{
    return (size_t)KV_MAX((uint64_t)r->n_entries, r->n_blocks) + 1;
}

/* Check everything. @tally holds two tallies. */
static int check_all(const struct kvbm_registry *r, uint32_t *tally)
{
    size_t n = tally_len(r);
    int err = check_table(r);

    memset(tally, 0, 2 * n * sizeof(*tally));
    if (err == 0)
        err = check_names(r, tally, tally + n);
    for (const struct kvbm_pool *pool = r->pools; err == 0 && pool; pool = pool->next)
        err = check_pool(pool, tally);
    return err;
}

int kvbm_registry_check(struct kvbm_registry *r)
{
    uint32_t *tally;
    int err;

    if (!r)
        return -EINVAL;
    kvbm_lock(r);
    tally = calloc(2 * tally_len(r), sizeof(*tally));
    err = tally ? check_all(r, tally) : -ENOMEM;
    free(tally);
    kvbm_unlock(r);
    return err;
}

#ifdef KVBM_CHECKED
static int check_sums(const struct kvbm_registry *r)
{
    uint64_t blocks = 0;

    for (const struct kvbm_pool *pool = r->pools; pool; pool = pool->next) {
        MUST(pool->n_free + pool->n_mutable + pool->n_immutable + pool->n_inactive ==
             pool->n_blocks);
        MUST((pool->evict.priorities[0] || pool->evict.priorities[1]) == (pool->n_inactive > 0));
        blocks += pool->n_blocks;
    }
    MUST(blocks == r->n_blocks);
    MUST(r->live_entries <= r->n_entries && r->n_entries <= r->max_entries);
    return 0;
}

/* Check that published events agree with the registry: a block stored and not removed is
 * registered. */
static int check_told(const struct kvbm_registry *r)
{
    int64_t there = 0;

    for (size_t i = 0; i < n_cells(r); i++) {
        uint32_t entry = cell_at(r, i).entry;

        there += entry ? __builtin_popcount(kvbm_entry(r, entry)->tiers) : 0;
    }
    MUST(!r->events || there == r->told);
    return 0;
}

void kvbm_check_call(struct kvbm_registry *r)
{
    bool all = ++r->calls % KVBM_CHECK_EVERY == 0 && tally_len(r) <= KVBM_CHECK_ENTRIES + 1;

    if (check_sums(r) < 0 || (all && (check_all(r, r->tally) < 0 || check_told(r) < 0)))
        abort();
}
#endif
