// SPDX-License-Identifier: Apache-2.0
#include "indexer/unsure.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 64
#define MAX_DEPTH 4096 /* most parents that are stored again with a block */

void ki_unsure_fini(struct ki_unsure *u)
{
    free(u->items);
    memset(u, 0, sizeof(*u));
}

void ki_unsure_clear(struct ki_unsure *u)
{
    ki_unsure_fini(u);
}

/* -- the table --------------------------------------------------------------------------------- */

static size_t slot_of(const struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash)
{
    uint64_t mixed = (hash ^ (uint64_t)rank << 32 ^ group) * UINT64_C(0x9e3779b97f4a7c15);

    return (size_t)(mixed >> 32) & (u->capacity - 1);
}

/* Return the block's slot, or the free slot where it would be. */
static struct ki_unsure_entry *probe(const struct ki_unsure *u, uint32_t rank, unsigned group,
                                     uint64_t hash)
{
    size_t at = slot_of(u, rank, group, hash);

    for (;; at = (at + 1) & (u->capacity - 1)) {
        struct ki_unsure_entry *e = &u->items[at];

        if (!e->copies || (e->hash == hash && e->rank == rank && e->group == group))
            return e;
    }
}

struct ki_unsure_entry *ki_unsure_find(const struct ki_unsure *u, uint32_t rank, unsigned group,
                                       uint64_t hash)
{
    struct ki_unsure_entry *e = u->n ? probe(u, rank, group, hash) : NULL;

    return e && e->copies ? e : NULL;
}

static bool grow(struct ki_unsure *u)
{
    struct ki_unsure more = *u;

    if (u->capacity && u->n < u->capacity / 2)
        return true;
    more.capacity = u->capacity ? 2 * u->capacity : FIRST_CAPACITY;
    more.items = calloc(more.capacity, sizeof(*more.items));
    if (!more.items)
        return false;
    for (size_t i = 0; i < u->capacity; i++) {
        const struct ki_unsure_entry *e = &u->items[i];

        if (e->copies)
            *probe(&more, e->rank, e->group, e->hash) = *e;
    }
    free(u->items);
    *u = more;
    return true;
}

/* Add a copy to the block's entry, made when it is missing. NULL at the limit. */
static struct ki_unsure_entry *add(struct ki_unsure *u, uint32_t rank, unsigned group,
                                   uint64_t hash)
{
    struct ki_unsure_entry *e;

    if (u->n == KI_MAX_UNSURE || !grow(u)) {
        u->lost = true;
        return NULL;
    }
    e = probe(u, rank, group, hash);
    if (!e->copies) {
        *e = (struct ki_unsure_entry){.hash = hash, .rank = rank, .group = (uint8_t)group};
        u->n++;
    }
    e->copies++;
    return e;
}

static void set_open(struct ki_unsure *u, struct ki_unsure_entry *e, bool open)
{
    u->n_open += (size_t)open - (size_t)e->open;
    e->open = open;
}

/* Empty the slot, and move up the entries behind it in its run of slots. */
static void drop(struct ki_unsure *u, struct ki_unsure_entry *e)
{
    size_t hole = (size_t)(e - u->items), mask = u->capacity - 1;

    set_open(u, e, false);
    u->n--;
    for (size_t at = (hole + 1) & mask; u->items[at].copies; at = (at + 1) & mask) {
        const struct ki_unsure_entry *next = &u->items[at];
        size_t home = slot_of(u, next->rank, next->group, next->hash);

        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        u->items[hole] = *next;
        hole = at;
    }
    u->items[hole].copies = 0;
}

/* One of the entry's copies is certain, or gone: subtract it. */
static void take_one(struct ki_unsure *u, struct ki_unsure_entry *e)
{
    if (e->copies > 1)
        e->copies--;
    else
        drop(u, e);
}

void ki_unsure_clear_rank(struct ki_unsure *u, uint32_t rank)
{
    for (size_t i = 0; u->n && i < u->capacity;) {
        if (u->items[i].copies && u->items[i].rank == rank)
            drop(u, &u->items[i]); /* another entry may have moved here */
        else
            i++;
    }
}

/* -- stores ------------------------------------------------------------------------------------ */

void ki_unsure_note(struct ki_unsure *u, const struct kve_op *op)
{
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, KI_UNSURE_MAIN, op->blocks[i].hash);

        if (e && e->open) { /* at least one of its copies is there */
            set_open(u, e, false);
            continue;
        }
        e = add(u, op->rank, KI_UNSURE_MAIN, op->blocks[i].hash);
        if (!e)
            return;
        e->tokens_hash = op->blocks[i].tokens_hash;
        e->has_parent = i > 0;
        e->parent = i ? op->blocks[i - 1].hash : 0;
    }
}

void ki_unsure_note_window(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                           uint32_t number, const uint64_t *hashes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct ki_unsure_entry *e = add(u, holder.rank, 1 + number, hashes[i]);

        if (!e)
            return;
        if (kvi_window_copies(index, holder, KV_TIER_DEVICE, number, hashes[i]) <= 0)
            set_open(u, e, true);
    }
}

int ki_unsure_restore(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                      uint64_t parent)
{
    struct ki_unsure_entry *e = ki_unsure_find(u, holder.rank, KI_UNSURE_MAIN, parent);
    int rc = 0;

    for (size_t depth = 0; !rc && e && e->open && depth < MAX_DEPTH; depth++) {
        struct ki_unsure_entry *top = e;
        struct kv_block block;
        uint64_t above;

        /* The highest open parent first. */
        for (size_t up = 0; top->has_parent && up < MAX_DEPTH; up++) {
            struct ki_unsure_entry *next =
                ki_unsure_find(u, holder.rank, KI_UNSURE_MAIN, top->parent);

            if (!next || !next->open)
                break;
            top = next;
        }
        block = (struct kv_block){top->hash, top->tokens_hash};
        above = top->parent;
        rc = kvi_store(index, holder, KV_TIER_DEVICE, top->has_parent ? &above : NULL, &block, 1,
                       NULL);
        if (rc)
            break;
        set_open(u, top, false);
        take_one(u, top);
        e = ki_unsure_find(u, holder.rank, KI_UNSURE_MAIN, parent);
    }
    return rc;
}

void ki_unsure_stored(struct ki_unsure *u, uint32_t rank, unsigned group, const void *hashes,
                      size_t stride, size_t n, bool alone)
{
    for (size_t i = 0; u->n && i < n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(
            u, rank, group, *(const uint64_t *)(const void *)((const char *)hashes + i * stride));

        if (e && alone)
            drop(u, e);
        else if (e)
            set_open(u, e, false);
    }
}

/* -- removals ---------------------------------------------------------------------------------- */

/*
 * Return true when the removal concerns a possible copy, and the index stays as it is. @certain:
 * copies in the index.
 */
static bool takes_possible(struct ki_unsure *u, struct ki_unsure_entry *e, long certain,
                           bool has_children)
{
    if (!certain && !e->open) /* parked, or in another tier: the index knows */
        return false;
    if (certain > 1)
        return false;
    if (!certain || has_children) {
        take_one(u, e);
        return true;
    }
    set_open(u, e, true);
    return false;
}

long ki_unsure_take(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op)
{
    long found = 0;

    if (!u->n)
        return kvi_take(index, holder, op->tier, op->source, op->hashes, op->remaining, op->n);
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, KI_UNSURE_MAIN, op->hashes[i]);
        struct kvi_block_info info = {0};
        long rc;

        if (e && op->remaining) {
            if (op->remaining[i])
                (void)ki_unsure_restore(u, index, holder, op->hashes[i]);
            ki_unsure_stored(u, op->rank, KI_UNSURE_MAIN, op->hashes + i, 0, 1, true);
        } else if (e) {
            (void)kvi_get_block(index, holder, op->tier, op->hashes[i], &info);
            if (takes_possible(u, e, info.copies, info.has_children)) {
                found++;
                continue;
            }
        }
        rc = kvi_take(index, holder, op->tier, op->source, op->hashes + i,
                      op->remaining ? op->remaining + i : NULL, 1);
        if (rc < 0)
            return rc;
        found += rc;
    }
    return found;
}

long ki_unsure_take_window(struct ki_unsure *u, struct kvi_index *index, struct kv_holder holder,
                           uint32_t number, const struct kve_op *op)
{
    long found = 0;

    if (!u->n)
        return kvi_window_take(index, holder, op->tier, number, 0, op->hashes, op->remaining,
                               op->n);
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, 1 + number, op->hashes[i]);
        long rc, certain = 0;

        if (e && op->remaining) {
            drop(u, e);
        } else if (e) {
            certain = kvi_window_copies(index, holder, op->tier, number, op->hashes[i]);
            if (takes_possible(u, e, certain, false)) {
                found++;
                continue;
            }
        }
        rc = kvi_window_take(index, holder, op->tier, number, 0, op->hashes + i,
                             op->remaining ? op->remaining + i : NULL, 1);
        if (rc < 0)
            return rc;
        found += rc;
    }
    return found;
}
