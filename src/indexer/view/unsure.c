// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of which the engine has between `certain` and `certain` + `possible` copies (unsure.h).
 * The index counts the certain ones, an entry the possible ones:
 *
 *     event                              certain    possible   the entry
 *     new copy, or report                           + 1
 *     removal, several are certain       - 1
 *     removal, one certain, children     stays 1    - 1        the engine has a parent of blocks
 *     removal, one certain, no child     0                     open: the index lacks it
 *     removal, open                                 - 1        the last one ends it: it is gone
 *     store of a child, open             1          - 1        closed: the parent is there
 *     store of the block                 + 1                   closed
 *
 * Suspects are the same the other way round: the index has counted the possible copies, too.
 *
 * Invariants: an entry has at least one possible copy. `n_open` is the number of open entries, and
 * the view is partial while it isn't 0. Without room for an entry its rank is in `lost` until its
 * clear.
 */
#include "indexer/view/unsure.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/mix.h"

#define FIRST_CAPACITY 64
#define MAX_DEPTH 4096 /* most parents that are stored again with a block */

static void free_tables(struct ki_unsure *u)
{
    for (size_t i = 0; i < u->n_tables; i++)
        free(u->tables[i].items);
    free(u->tables);
}

void ki_unsure_fini(struct ki_unsure *u)
{
    free_tables(u);
    ki_doubts_clear(&u->lost);
    memset(u, 0, sizeof(*u));
}

void ki_unsure_clear(struct ki_unsure *u)
{
    ki_unsure_fini(u);
}

/* -- the tables -------------------------------------------------------------------------------- */

/* Return the number of tables before that of @rank. */
static size_t position(const struct ki_unsure *u, uint32_t rank)
{
    size_t low = 0, high = u->n_tables;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (u->tables[middle].rank < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct ki_unsure_table *table_of(const struct ki_unsure *u, uint32_t rank)
{
    size_t at = u->n ? position(u, rank) : u->n_tables;

    return at < u->n_tables && u->tables[at].rank == rank ? &u->tables[at] : NULL;
}

/* Return the rank's table, made when it is missing. NULL: out of memory. */
static struct ki_unsure_table *make_table(struct ki_unsure *u, uint32_t rank)
{
    size_t at = position(u, rank);
    struct ki_unsure_table *grown;

    if (at < u->n_tables && u->tables[at].rank == rank)
        return &u->tables[at];
    grown = realloc(u->tables, (u->n_tables + 1) * sizeof(*grown));
    if (!grown)
        return NULL;
    u->tables = grown;
    memmove(grown + at + 1, grown + at, (u->n_tables - at) * sizeof(*grown));
    grown[at] = (struct ki_unsure_table){.rank = rank};
    u->n_tables++;
    return &grown[at];
}

static size_t slot_of(const struct ki_unsure_table *t, unsigned group, uint64_t hash)
{
    return (size_t)kv_mix(hash + group) & (t->capacity - 1);
}

/* Return the block's slot, or the free slot where it would be. */
static struct ki_unsure_entry *probe(const struct ki_unsure_table *t, unsigned group, uint64_t hash)
{
    size_t at = slot_of(t, group, hash);

    for (;; at = (at + 1) & (t->capacity - 1)) {
        struct ki_unsure_entry *e = &t->items[at];

        if (!e->copies || (e->hash == hash && e->group == group))
            return e;
    }
}

struct ki_unsure_entry *ki_unsure_find(const struct ki_unsure *u, uint32_t rank, unsigned group,
                                       uint64_t hash)
{
    const struct ki_unsure_table *t = table_of(u, rank);
    struct ki_unsure_entry *e = t && t->n ? probe(t, group, hash) : NULL;

    return e && e->copies ? e : NULL;
}

static bool grow(struct ki_unsure_table *t)
{
    struct ki_unsure_table more = *t;

    if (t->capacity && t->n < t->capacity / 2)
        return true;
    more.capacity = t->capacity ? 2 * t->capacity : FIRST_CAPACITY;
    more.items = calloc(more.capacity, sizeof(*more.items));
    if (!more.items)
        return false;
    for (size_t i = 0; i < t->capacity; i++) {
        const struct ki_unsure_entry *e = &t->items[i];

        if (e->copies)
            *probe(&more, e->group, e->hash) = *e;
    }
    free(t->items);
    *t = more;
    return true;
}

/* Add a copy to the block's entry, made when it is missing. NULL at the limit. */
static struct ki_unsure_entry *add(struct ki_unsure *u, uint32_t rank, unsigned group,
                                   uint64_t hash)
{
    struct ki_unsure_table *t = u->n < KI_MAX_UNSURE ? make_table(u, rank) : NULL;
    struct ki_unsure_entry *e;

    if (!t || !grow(t)) {
        ki_doubts_add(&u->lost, rank, 0, 1);
        return NULL;
    }
    e = probe(t, group, hash);
    if (!e->copies) {
        *e = (struct ki_unsure_entry){.hash = hash, .group = (uint8_t)group};
        t->n++;
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
static void drop(struct ki_unsure *u, uint32_t rank, struct ki_unsure_entry *e)
{
    struct ki_unsure_table *t = table_of(u, rank);
    size_t hole = (size_t)(e - t->items), mask = t->capacity - 1;

    set_open(u, e, false);
    u->n--;
    t->n--;
    for (size_t at = (hole + 1) & mask; t->items[at].copies; at = (at + 1) & mask) {
        const struct ki_unsure_entry *next = &t->items[at];
        size_t home = slot_of(t, next->group, next->hash);

        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        t->items[hole] = *next;
        hole = at;
    }
    t->items[hole].copies = 0;
}

/* One of the entry's copies is certain, or gone: subtract it. */
static void take_one(struct ki_unsure *u, uint32_t rank, struct ki_unsure_entry *e)
{
    if (e->copies > 1)
        e->copies--;
    else
        drop(u, rank, e);
}

void ki_unsure_clear_rank(struct ki_unsure *u, uint32_t rank)
{
    struct ki_unsure_table *t = table_of(u, rank);

    ki_doubts_end(&u->lost, rank, 0, 1);
    for (size_t i = 0; t && i < t->capacity; i++)
        if (t->items[i].copies)
            set_open(u, &t->items[i], false);
    if (!t)
        return;
    u->n -= t->n;
    free(t->items);
    u->n_tables--;
    memmove(t, t + 1, (u->n_tables - (size_t)(t - u->tables)) * sizeof(*t));
}

/* -- in dumps ---------------------------------------------------------------------------------- */

void ki_unsure_tell(const struct ki_unsure *u, uint32_t rank, bool suspects, struct kv_buf *ret)
{
    const struct ki_unsure_table *t = table_of(u, rank);

    for (size_t i = 0; t && i < t->capacity; i++) {
        const struct ki_unsure_told told = {
            .rank = rank, .suspect = suspects, .entry = t->items[i]};

        if (told.entry.copies)
            kv_buf_append(ret, &told, sizeof(told));
    }
}

void ki_unsure_restore_told(struct ki_unsure *u, const struct ki_unsure_told *told)
{
    struct ki_unsure_entry *e = add(u, told->rank, told->entry.group, told->entry.hash);

    if (!e)
        return;
    set_open(u, e, false);
    *e = told->entry;
    e->open = false;
    set_open(u, e, told->entry.open);
}

/* -- stores ------------------------------------------------------------------------------------ */

void ki_unsure_note(struct ki_unsure *u, const struct kve_op *op)
{
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, KI_UNSURE_MAIN, op->blocks[i].hash);

        /*
         * The event proves one copy, which the caller stores. It may be a new one, so all the
         * possible ones stay possible.
         */
        if (e && e->open) {
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
        if (kvi_get_block(index, kvi_window_of(holder, KV_TIER_DEVICE, 0, number), hashes[i])
                .copies <= 0)
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
        struct kvi_stored stored = {0};
        struct kv_block block;
        uint64_t above;

        /* The highest open parent first: a block below one that is missing would be parked. */
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
                       &stored);
        if (rc)
            break;
        rc = stored.lagging ? -ENOMEM : 0;
        set_open(u, top, false);
        take_one(u, holder.rank, top);
        e = ki_unsure_find(u, holder.rank, KI_UNSURE_MAIN, parent);
    }
    return rc;
}

void ki_unsure_stored(struct ki_unsure *u, uint32_t rank, unsigned group, const void *hashes,
                      size_t stride, size_t n)
{
    for (size_t i = 0; u->n && i < n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(
            u, rank, group, *(const uint64_t *)(const void *)((const char *)hashes + i * stride));

        if (e)
            set_open(u, e, false);
    }
}

void ki_unsure_forget(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash)
{
    struct ki_unsure_entry *e = ki_unsure_find(u, rank, group, hash);

    if (e)
        drop(u, rank, e);
}

/* -- removals ---------------------------------------------------------------------------------- */

/*
 * Return true when the removal concerns a possible copy, and the index stays as it is. @certain:
 * copies in the index.
 */
static bool takes_possible(struct ki_unsure *u, uint32_t rank, struct ki_unsure_entry *e,
                           long certain, bool has_children)
{
    if (!certain && !e->open) /* parked, or in another tier: the index knows */
        return false;
    if (certain > 1)
        return false;
    if (!certain || has_children) {
        take_one(u, rank, e);
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
        return kvi_take(index, kvi_cache_of(holder, op->tier, op->source), op->hashes,
                        op->remaining, op->n);
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, KI_UNSURE_MAIN, op->hashes[i]);
        struct kvi_block_info info;
        long rc;

        if (e && op->remaining) {
            if (op->remaining[i])
                (void)ki_unsure_restore(u, index, holder, op->hashes[i]);
            ki_unsure_forget(u, op->rank, KI_UNSURE_MAIN, op->hashes[i]);
        } else if (e) {
            info = kvi_get_block(index, kvi_cache_of(holder, op->tier, 0), op->hashes[i]);
            if (takes_possible(u, op->rank, e, info.copies, info.has_children)) {
                found++;
                continue;
            }
        }
        rc = kvi_take(index, kvi_cache_of(holder, op->tier, op->source), op->hashes + i,
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
        return kvi_take(index, kvi_window_of(holder, op->tier, 0, number), op->hashes,
                        op->remaining, op->n);
    for (size_t i = 0; i < op->n; i++) {
        struct ki_unsure_entry *e = ki_unsure_find(u, op->rank, 1 + number, op->hashes[i]);
        long rc, certain = 0;

        if (e && op->remaining) {
            drop(u, op->rank, e);
        } else if (e) {
            certain =
                kvi_get_block(index, kvi_window_of(holder, op->tier, 0, number), op->hashes[i])
                    .copies;
            if (takes_possible(u, op->rank, e, certain, false)) {
                found++;
                continue;
            }
        }
        rc = kvi_take(index, kvi_window_of(holder, op->tier, 0, number), op->hashes + i,
                      op->remaining ? op->remaining + i : NULL, 1);
        if (rc < 0)
            return rc;
        found += rc;
    }
    return found;
}

/* -- suspects ---------------------------------------------------------------------------------- */

void ki_suspects_note(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                      long copies)
{
    struct ki_unsure_entry *e = add(u, rank, group, hash);

    if (e)
        set_open(u, e, copies <= (long)e->copies);
}

void ki_suspects_stored(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                        long copies)
{
    struct ki_unsure_entry *e = ki_unsure_find(u, rank, group, hash);

    if (e)
        set_open(u, e, copies <= (long)e->copies);
}

void ki_suspects_held(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                      long copies)
{
    struct ki_unsure_entry *e = ki_unsure_find(u, rank, group, hash);

    if (!e || !e->open)
        return;
    if (copies <= 1) {
        drop(u, rank, e);
        return;
    }
    e->copies = (uint32_t)(copies - 1);
    set_open(u, e, false);
}

void ki_suspects_removed(struct ki_unsure *u, uint32_t rank, unsigned group, uint64_t hash,
                         long left, bool exact)
{
    struct ki_unsure_entry *e = ki_unsure_find(u, rank, group, hash);
    bool real;

    if (!e)
        return;
    real = left + 1 <= (long)e->copies;
    u->n_real += real && !exact && left <= 0;
    if (left <= 0 || exact || (real && e->copies == 1)) {
        drop(u, rank, e);
        return;
    }
    e->copies -= real;
    set_open(u, e, left <= (long)e->copies);
}
