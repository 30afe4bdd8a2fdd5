// SPDX-License-Identifier: Apache-2.0
/*
 * A table of the blocks with lo < hi (ranges.h has the rules). Entries have the distances of both
 * ends from the index's count, so an event that moves all three by one changes no entry: most
 * don't.
 *
 * `settle` ends each change: it is given the count, from which all else follows.
 *
 *     fewer       at most the count: lo isn't below 0
 *     open        lo = count - fewer is 0
 *     absent      the count is 0; `more` isn't, so the block may be there
 *     no entry    more and fewer are both 0: lo = hi
 *
 * Invariants: `n_open` and `n_absent` count entries. Without room for an entry its rank is in
 * `lost` until its clear.
 */
#include "indexer/view/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/mix.h"
#include "event/reader/reader.h"

#define FIRST_CAPACITY 64
#define MAX_DEPTH 4096 /* most parents that are stored again with a block */

/* -- the table --------------------------------------------------------------------------------- */

static bool is_free(const struct ki_range *e)
{
    return !e->more && !e->fewer;
}

static uint64_t rank_bit(uint32_t rank)
{
    return UINT64_C(1) << rank % 64;
}

static size_t slot_of(const struct ki_ranges *r, uint32_t rank, uint32_t window, uint64_t hash)
{
    return (size_t)kv_mix(hash + ((uint64_t)rank << 8 | window)) & (r->capacity - 1);
}

/* Return the block's slot, or the free slot where it would be. */
static struct ki_range *probe(const struct ki_ranges *r, uint32_t rank, uint32_t window,
                              uint64_t hash)
{
    size_t at = slot_of(r, rank, window, hash);

    for (;; at = (at + 1) & (r->capacity - 1)) {
        struct ki_range *e = &r->items[at];

        if (is_free(e) || (e->hash == hash && e->rank == rank && e->window == window))
            return e;
    }
}

static struct ki_range *find(const struct ki_ranges *r, const struct kvi_cache *cache,
                             uint64_t hash)
{
    struct ki_range *e = r->n ? probe(r, cache->holder.rank, cache->window, hash) : NULL;

    return e && !is_free(e) ? e : NULL;
}

const struct ki_range *ki_ranges_find(const struct ki_ranges *r, const struct kvi_cache *cache,
                                      uint64_t hash)
{
    return find(r, cache, hash);
}

static bool grow(struct ki_ranges *r)
{
    struct ki_ranges more = *r;

    if (r->capacity && r->n < r->capacity / 2)
        return true;
    more.capacity = r->capacity ? 2 * r->capacity : FIRST_CAPACITY;
    more.items = calloc(more.capacity, sizeof(*more.items));
    if (!more.items)
        return false;
    for (size_t i = 0; i < r->capacity; i++) {
        const struct ki_range *e = &r->items[i];

        if (!is_free(e))
            *probe(&more, e->rank, e->window, e->hash) = *e;
    }
    free(r->items);
    *r = more;
    return true;
}

/*
 * Return the block's entry, made when it is missing, after which the caller makes `more` or `fewer`
 * not 0. NULL at the limit, or out of memory: @lost is noted.
 */
static struct ki_range *add(struct ki_ranges *r, uint32_t rank, uint32_t window, uint64_t hash,
                            enum ki_ranges_lost lost)
{
    struct ki_range *e = r->n ? probe(r, rank, window, hash) : NULL;

    if (e && !is_free(e))
        return e;
    if (r->n >= KI_MAX_RANGES || !grow(r)) {
        ki_doubts_add(&r->lost, rank, 0, lost);
        return NULL;
    }
    e = probe(r, rank, window, hash);
    *e = (struct ki_range){.hash = hash, .rank = rank, .window = (uint8_t)window};
    r->ranks |= rank_bit(rank);
    r->n++;
    return e;
}

static void set_state(struct ki_ranges *r, struct ki_range *e, bool open, bool absent)
{
    r->n_open += (size_t)open - (size_t)e->open;
    r->n_absent += (size_t)absent - (size_t)e->absent;
    e->open = open;
    e->absent = absent;
}

/* Empty the slot, and move up the entries behind it in its run of slots. */
static void drop(struct ki_ranges *r, struct ki_range *e)
{
    size_t hole = (size_t)(e - r->items), mask = r->capacity - 1;

    set_state(r, e, false, false);
    r->n--;
    for (size_t at = (hole + 1) & mask; !is_free(&r->items[at]); at = (at + 1) & mask) {
        const struct ki_range *next = &r->items[at];
        size_t home = slot_of(r, next->rank, next->window, next->hash);

        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        r->items[hole] = *next;
        hole = at;
    }
    r->items[hole].more = r->items[hole].fewer = 0;
}

/* End a change of the entry; @count is the index's. */
static void settle(struct ki_ranges *r, struct ki_range *e, uint32_t count)
{
    e->fewer = KV_MIN(e->fewer, count);
    if (is_free(e))
        drop(r, e);
    else
        set_state(r, e, count <= e->fewer, !count);
}

/* The same, where the engine has at least one copy. */
static void settle_held(struct ki_ranges *r, struct ki_range *e, uint32_t count)
{
    e->fewer = KV_MIN(e->fewer, count ? count - 1 : 0);
    settle(r, e, count);
}

void ki_ranges_clear(struct ki_ranges *r)
{
    free(r->items);
    ki_doubts_clear(&r->lost);
    memset(r, 0, sizeof(*r));
}

void ki_ranges_clear_rank(struct ki_ranges *r, uint32_t rank)
{
    ki_doubts_end(&r->lost, rank, 0, KI_LOST_MORE | KI_LOST_FEWER);
    if (!(r->ranks & rank_bit(rank)))
        return;
    r->ranks = 0;
    for (size_t i = 0; r->n && i < r->capacity; i++) {
        while (!is_free(&r->items[i]) && r->items[i].rank == rank)
            drop(r, &r->items[i]); /* which may fill the slot with the next one */
        r->ranks |= is_free(&r->items[i]) ? 0 : rank_bit(r->items[i].rank);
    }
    if (r->n)
        return;
    free(r->items);
    r->items = NULL;
    r->capacity = 0;
}

void ki_ranges_trust(struct ki_ranges *r)
{
    r->n_real = 0;
    for (size_t i = 0; r->n && i < r->capacity; i++) {
        struct ki_range *e = &r->items[i];

        while (e->fewer) {
            e->fewer = 0;
            if (e->more)
                set_state(r, e, e->absent, e->absent);
            else
                drop(r, e);
        }
    }
    for (size_t i = r->lost.n; i--;)
        ki_doubts_end(&r->lost, r->lost.items[i].rank, 0, KI_LOST_FEWER);
    r->lost.lost &= ~(uint32_t)KI_LOST_FEWER; /* of a rank for which there was no memory */
}

/* -- in dumps ---------------------------------------------------------------------------------- */

void ki_ranges_tell(const struct ki_ranges *r, struct kv_buf *ret)
{
    for (size_t i = 0; r->n && i < r->capacity; i++)
        if (!is_free(&r->items[i]))
            kv_buf_append(ret, &r->items[i], sizeof(r->items[i]));
}

void ki_ranges_restore(struct ki_ranges *r, const struct ki_range *told)
{
    struct ki_range *e =
        add(r, told->rank, told->window, told->hash, told->more ? KI_LOST_MORE : KI_LOST_FEWER);

    if (!e)
        return;
    set_state(r, e, false, false);
    *e = *told;
    e->open = e->absent = false;
    set_state(r, e, told->open, told->open && !told->fewer);
}

/* -- stores ------------------------------------------------------------------------------------ */

static uint32_t count_of(struct kvi_index *index, const struct kvi_cache *cache, uint64_t hash)
{
    return kvi_get_block(index, *cache, hash).copies;
}

/*
 * Move the upper end up by a copy. The store of an absent main block has moved the count by the
 * same: from 0 to the copy that the event proves.
 */
static void note_more(struct ki_range *e, const struct kve_op *op, size_t i)
{
    e->more += !e->absent || e->window;
    if (e->window)
        return;
    e->tokens_hash = op->blocks[i].tokens_hash;
    e->has_parent = i > 0;
    e->parent = i ? op->blocks[i - 1].hash : 0;
}

void ki_ranges_maybe(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op, bool counted)
{
    for (size_t i = 0; i < op->n; i++) {
        uint64_t hash = kve_op_hash(op, i);
        struct ki_range *e =
            add(r, cache->holder.rank, cache->window, hash, counted ? KI_LOST_FEWER : KI_LOST_MORE);

        if (!e)
            return;
        if (counted)
            e->fewer++;
        else
            note_more(e, op, i);
        if (cache->window)
            settle(r, e, count_of(index, cache, hash));
        else /* without `fewer` the count doesn't matter: the index has the block */
            settle_held(r, e, e->fewer ? count_of(index, cache, hash) : 1);
    }
}

void ki_ranges_stored(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                      const struct kve_op *op)
{
    for (size_t i = 0; r->n && i < op->n; i++) {
        uint64_t hash = kve_op_hash(op, i);
        struct ki_range *e = find(r, cache, hash);

        if (e) /* an event that names blocks by hash alone doesn't bring absent ones back */
            settle(r, e, e->fewer || e->absent ? count_of(index, cache, hash) : 1);
    }
}

/*
 * Store the absent block @hash again, which the engine has: one of its possible copies is certain.
 * The highest absent parent comes first, as a block below one that is missing would be parked.
 */
static int put_back(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                    uint64_t hash)
{
    struct ki_range *e = find(r, cache, hash);
    int rc = 0;

    if (cache->window)
        return (int)KV_MIN(kvi_store_known(index, *cache, &hash, 1), 0L);
    for (size_t depth = 0; !rc && e && e->absent && depth < MAX_DEPTH; depth++) {
        struct ki_range *top = e;
        struct kvi_stored stored = {0};
        struct kv_block block;

        for (size_t up = 0; top->has_parent && up < MAX_DEPTH; up++) {
            struct ki_range *above = find(r, cache, top->parent);

            if (!above || !above->absent)
                break;
            top = above;
        }
        block = (struct kv_block){top->hash, top->tokens_hash};
        rc = kvi_store(index, cache->holder, cache->tier, top->has_parent ? &top->parent : NULL,
                       &block, 1, &stored);
        if (rc)
            break;
        rc = stored.lagging ? -ENOMEM : 0;
        top->more--;
        settle(r, top, 1);
        e = find(r, cache, hash);
    }
    return rc;
}

int ki_ranges_prove(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                    uint64_t hash)
{
    struct ki_range *e = r->n_open ? find(r, cache, hash) : NULL;

    if (!e || !e->open)
        return 0;
    if (e->absent)
        return put_back(r, index, cache, hash);
    settle_held(r, e, count_of(index, cache, hash));
    return 0;
}

/* -- removals ---------------------------------------------------------------------------------- */

/*
 * Take copies of blocks @from to @to - 1, of which the index has counted as many as there may be.
 */
static long take_counted(struct ki_ranges *r, struct kvi_index *index,
                         const struct kvi_cache *cache, const struct kve_op *op, size_t from,
                         size_t to)
{
    const uint32_t *left = op->remaining ? op->remaining + from : NULL;
    long rc = from < to ? kvi_take(index, *cache, op->hashes + from, left, to - from) : 0;

    for (size_t i = from; r->n && i < to; i++) {
        struct ki_range *e = find(r, cache, op->hashes[i]);
        uint32_t count = e && !left ? count_of(index, cache, op->hashes[i]) : 0;

        if (!e)
            continue;
        r->n_real += !left && !count;
        if (left)
            e->fewer = 0;
        settle(r, e, count);
    }
    return rc;
}

/*
 * Take a copy of block @i, of which there may be more than the index has counted. The index keeps
 * its last one while blocks below prove that the engine still has one.
 */
static long take_possible(struct ki_ranges *r, struct kvi_index *index,
                          const struct kvi_cache *cache, const struct kve_op *op, size_t i)
{
    uint64_t hash = op->hashes[i];
    const uint32_t *left = op->remaining ? op->remaining + i : NULL;
    struct kvi_block_info block;
    struct ki_range *e;
    long rc = left && *left ? put_back(r, index, cache, hash) : 0;

    if (rc < 0)
        return rc;
    e = find(r, cache, hash);
    if (left) {
        if (e)
            drop(r, e);
        return kvi_take(index, *cache, &hash, left, 1);
    }
    block = kvi_get_block(index, *cache, hash);
    if (block.copies ? block.copies == 1 && block.has_children : e->absent) {
        e->more--;
        settle_held(r, e, block.copies);
        return 1;
    }
    rc = kvi_take(index, *cache, &hash, NULL, 1); /* not found: lost at a limit of the index */
    if (rc >= 0)
        settle(r, e, block.copies ? block.copies - 1 : 0);
    return rc;
}

long ki_ranges_take(struct ki_ranges *r, struct kvi_index *index, const struct kvi_cache *cache,
                    const struct kve_op *op)
{
    long found = 0, rc = 0;
    size_t from = 0;

    if (!ki_has_ranges(cache) || !r->n)
        return kvi_take(index, *cache, op->hashes, op->remaining, op->n);
    for (size_t i = 0; i <= op->n && rc >= 0; i++) {
        const struct ki_range *e = i < op->n ? find(r, cache, op->hashes[i]) : NULL;

        if (i < op->n && !(e && e->more))
            continue;
        rc = take_counted(r, index, cache, op, from, i);
        found += rc;
        if (rc >= 0 && i < op->n) {
            rc = take_possible(r, index, cache, op, i);
            found += rc;
        }
        from = i + 1;
    }
    return rc < 0 ? rc : found;
}
