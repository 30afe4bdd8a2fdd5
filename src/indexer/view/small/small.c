// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks smaller than the registered ones (small.h). The way of an operation whose blocks no anchor
 * places (anchored.c has the others'):
 *
 *     which table ─► first_part: where in a registered block does it begin?
 *                 ─► which blocks are named: all, or exactly those that a match can need?
 *                 ─► count a copy of each; link it to its registered block
 *                 ─► the first copy sets a bit of a window, the last one's removal clears it
 *
 * Invariant: a registered block is in the window of a part while a link of it names one with
 * copies, and in that of the last part while it has copies itself. An operation of which a step
 * fails (-ENOENT: it contradicts the tables, or doesn't tell enough) leaves its rank in `lost`: the
 * view is partial, and the tables may be wrong, until the rank is cleared.
 */
#include "indexer/view/small/impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "event/reader/reader.h"

#define NONE KI_NO_PART

/* -- tables ------------------------------------------------------------------------------------ */

static void free_tables(struct ki_small *s, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        s->n -= ki_parts_count(&s->tables[i]->parts);
        ki_parts_fini(&s->tables[i]->parts);
        free(s->tables[i]);
    }
    memmove(s->tables + from, s->tables + to, (s->n_tables - to) * sizeof(s->tables[0]));
    s->n_tables -= to - from;
}

void ki_small_clear(struct ki_small *s)
{
    if (s->n_tables)
        free_tables(s, 0, s->n_tables);
    free((void *)s->tables);
    ki_doubts_clear(&s->lost);
    *s = (struct ki_small){0};
}

/* Return the number of tables before the one of @rank and @group. */
static size_t position(const struct ki_small *s, uint64_t rank, uint64_t group)
{
    size_t low = 0, high = s->n_tables;

    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct ki_small_table *t = s->tables[middle];

        if (t->rank < rank || (t->rank == rank && t->group < group))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void ki_small_clear_rank(struct ki_small *s, uint32_t rank)
{
    size_t from = position(s, rank, 0), to = position(s, (uint64_t)rank + 1, 0);

    if (from < to)
        free_tables(s, from, to);
    ki_doubts_end(&s->lost, rank, 0, 1);
}

void ki_small_lose(struct ki_small *s, uint32_t rank)
{
    ki_doubts_add(&s->lost, rank, 0, 1);
}

/* Add an empty table at @at. NULL: out of memory. */
static struct ki_small_table *add_table(struct ki_small *s, size_t at,
                                        const struct ki_small_work *w)
{
    struct ki_small_table *t = malloc(sizeof(*t)), **grown;
    size_t more = KV_MAX(2 * s->capacity, (size_t)8);

    if (t && s->n_tables == s->capacity) {
        grown = realloc((void *)s->tables, more * sizeof(s->tables[0]));
        if (!grown) {
            free(t);
            return NULL;
        }
        s->tables = grown;
        s->capacity = more;
    }
    if (!t)
        return NULL;
    t->rank = w->holder.rank;
    t->group = w->group->group;
    ki_parts_init(&t->parts, w->group->parts);
    memmove(s->tables + at + 1, s->tables + at, (s->n_tables - at) * sizeof(s->tables[0]));
    s->tables[at] = t;
    s->n_tables++;
    return t;
}

/*
 * Find the operation's table; with @add, make it. Returns 0; -ENOENT when there is none, or one of
 * blocks of another size; -ENOMEM.
 */
int ki_small_open_table(struct ki_small_work *w, bool add)
{
    struct ki_small *s = w->s;
    uint32_t rank = w->holder.rank, group = w->group->group;
    size_t at = position(s, rank, group);
    struct ki_small_table *t = at < s->n_tables ? s->tables[at] : NULL;

    if (t && (t->rank != rank || t->group != group))
        t = NULL;
    if (!t && !add)
        return -ENOENT;
    if (!t)
        t = add_table(s, at, w);
    w->parts = t ? &t->parts : NULL;
    if (!t)
        return -ENOMEM;
    return t->parts.n_parts == w->group->parts ? 0 : -ENOENT;
}

bool ki_small_is_alone(const struct ki_small *s, const struct kve_reader *reader)
{
    for (size_t i = 0; i < s->n_tables; i++)
        if (ki_parts_count(&s->tables[i]->parts) &&
            !kve_reader_has_main(reader, s->tables[i]->rank))
            return true;
    return false;
}

/* -- the index --------------------------------------------------------------------------------- */

/* Whether the group has all parts of a registered block that a match needs. */
static bool has_tail(const struct ki_small_work *w, uint64_t hash)
{
    const struct ki_parts *p = w->parts;
    uint32_t whole = ki_whole_find(p, hash);
    bool all = whole != NONE && p->wholes.items[whole].copies;

    for (uint32_t i = 0; all && i < ki_small_last(w); i++) {
        uint32_t part = p->slots[ki_whole_slot(p, whole) + i].part;

        all = part != NONE && p->parts.items[part].copies;
    }
    return all;
}

/*
 * Put the registered block into the window of a part, or take it out. The number for each batch is
 * bounded: one copy of a part may concern every block that begins with it, under one lock.
 */
static int put(const struct ki_small_work *w, uint64_t whole, uint32_t part, bool in)
{
    static const uint32_t none;
    const struct kvi_cache window =
        kvi_window_of(w->holder, KV_TIER_DEVICE, 0, w->group->numbers[w->group->tail ? 0 : part]);
    long rc;

    w->s->work += w->group->tail ? w->group->parts : 1;
    if (w->s->work > KI_MAX_SMALL_WORK)
        return -ENOENT;
    if (w->group->tail)
        in = in && has_tail(w, whole);
    rc = in ? kvi_store_known(w->index, window, &whole, 1)
            : kvi_take(w->index, window, &whole, &none, 1);
    return rc < 0 ? (int)rc : 0;
}

bool ki_small_main_has(const struct ki_small_work *w, uint64_t hash)
{
    return kvi_get_block(w->index, kvi_cache_of(w->holder, KV_TIER_DEVICE, 0), hash).copies > 0;
}

/* Put all registered blocks that have this part into its window, or take them out. */
static int put_all(const struct ki_small_work *w, uint32_t part, bool in)
{
    const struct ki_parts *p = w->parts;
    const struct ki_block *b = &p->parts.items[part];
    int rc = 0;

    for (uint32_t slot = b->first; slot != NONE && !rc; slot = p->slots[slot].next)
        rc = put(w, ki_slot_whole(p, slot)->hash, b->index, in);
    return rc;
}

/* -- stores ------------------------------------------------------------------------------------ */

/* The part with which the operation's blocks begin, or -ENOENT when nothing tells it. */
static int first_part(const struct ki_small_work *w, const struct kve_op *op)
{
    uint32_t part;

    if (!op->has_parent || ki_whole_find(w->parts, op->parent) != NONE)
        return 0;
    part = ki_part_find(w->parts, op->parent);
    if (part != NONE)
        return w->parts->parts.items[part].index + 1;
    if (ki_small_main_has(w, op->parent))
        return 0;
    /* Without block drop and lookahead a group caches as many blocks as make up registered ones. */
    return w->group->drops || op->lookahead || op->n_covered % w->group->parts ? -ENOENT : 0;
}

/* Whether vLLM caches block @i behind the first one: others can't serve a match. */
static bool is_reachable(const struct ki_small_work *w, const struct kve_op *op, uint32_t first,
                         size_t i)
{
    uint32_t parts = w->group->parts, drop = w->group->drops;
    uint64_t need = (uint64_t)w->group->need + drop;

    if (need >= parts)
        return true;
    if (drop && !op->has_parent && !i)
        return false;
    return (first + i + parts - drop) % parts >= parts - need;
}

static bool is_full(const struct ki_small *s)
{
    return s->n >= KI_MAX_SMALL;
}

/* One copy more of a part. Returns 0 and *@ret, or an error. */
int ki_small_gain_part(struct ki_small_work *w, uint64_t hash, uint64_t above, uint32_t index,
                       uint32_t *ret)
{
    struct ki_parts *p = w->parts;
    uint32_t at = ki_part_find(p, hash);

    if (at == NONE && ki_whole_find(p, hash) != NONE)
        return -ENOENT;
    if (at == NONE && is_full(w->s))
        return -ENOENT;
    if (at == NONE) {
        at = ki_part_add(p, hash, above, index);
        if (at == NONE)
            return -ENOMEM;
        w->s->n++;
    }
    if (p->parts.items[at].index != index)
        return -ENOENT;
    *ret = at;
    return p->parts.items[at].copies++ ? 0 : put_all(w, at, true);
}

/* One copy more of a registered block's last part. */
int ki_small_gain_whole(struct ki_small_work *w, uint64_t hash, uint32_t *ret)
{
    struct ki_parts *p = w->parts;
    uint32_t at = ki_whole_find(p, hash);

    if (at == NONE && ki_part_find(p, hash) != NONE)
        return -ENOENT;
    if (at == NONE && is_full(w->s))
        return -ENOENT;
    if (at == NONE) {
        at = ki_whole_add(p, hash);
        if (at == NONE)
            return -ENOMEM;
        w->s->n++;
    }
    *ret = at;
    return p->wholes.items[at].copies++ ? 0 : put(w, hash, ki_small_last(w), true);
}

/* Note which parts the registered block has. */
int ki_small_link_parts(struct ki_small_work *w, const uint32_t *parts, uint32_t whole)
{
    struct ki_parts *p = w->parts;
    int rc = 0;

    for (uint32_t i = 0; i < ki_small_last(w) && !rc; i++) {
        bool is_new = p->slots[ki_whole_slot(p, whole) + i].part == NONE;

        if (parts[i] == NONE)
            continue;
        rc = ki_part_link(p, parts[i], whole);
        if (!rc && is_new && p->parts.items[parts[i]].copies)
            rc = put(w, p->wholes.items[whole].hash, i, true);
    }
    return rc;
}

/* Whether a match may need part @last of the operation's first block, or one before it. */
static bool needs_up_to(const struct ki_small_work *w, const struct kve_op *op, uint32_t last)
{
    for (uint32_t i = 0; i <= last; i++)
        if (is_reachable(w, op, 0, i))
            return true;
    return false;
}

/*
 * Find the parts of the registered block in whose middle the operation begins. Returns false when
 * one of them isn't known that a match may need.
 */
static bool find_parts(const struct ki_small_work *w, const struct kve_op *op, uint32_t first,
                       uint32_t *parts)
{
    uint64_t hash = op->parent;

    for (uint32_t i = first; i-- > 0;) {
        uint32_t at = ki_part_find(w->parts, hash);

        if (at == NONE)
            return !needs_up_to(w, op, i);
        if (w->parts->parts.items[at].index != i)
            return false;
        parts[i] = at;
        hash = w->parts->parts.items[at].above;
    }
    return true;
}

/* Store block @i of the operation's chain, part @part of a registered block. */
static int store_block(struct ki_small_work *w, uint64_t hash, uint64_t above, uint32_t part,
                       uint32_t *parts)
{
    uint32_t whole;
    int rc;

    if (part < ki_small_last(w))
        return ki_small_gain_part(w, hash, part ? above : 0, part, &parts[part]);
    rc = ki_small_gain_whole(w, hash, &whole);
    return rc ? rc : ki_small_link_parts(w, parts, whole);
}

static int store(struct ki_small_work *w, const struct kve_op *op)
{
    uint32_t parts[KVE_MAX_PARTS], n_parts = w->group->parts;
    uint64_t above = op->has_parent ? op->parent : 0;
    size_t n = 0, named = 0;
    int rc = ki_small_open_table(w, true), first = rc ? rc : first_part(w, op);

    memset(parts, 0xff, sizeof(parts));
    for (size_t i = 0; first >= 0 && i < op->n_covered; i++)
        n += is_reachable(w, op, (uint32_t)first, i);
    if (first < 0)
        return first;
    if ((op->n != n && op->n != op->n_covered) || !find_parts(w, op, (uint32_t)first, parts))
        return -ENOENT;
    for (size_t i = 0; i < op->n_covered && !rc; i++) {
        uint32_t part = (uint32_t)(((size_t)first + i) % n_parts);

        if (!part)
            memset(parts, 0xff, sizeof(parts));
        if (op->n != op->n_covered && !is_reachable(w, op, (uint32_t)first, i)) {
            above = 0;
            continue;
        }
        rc = store_block(w, op->hashes[named], above, part, parts);
        above = op->hashes[named++];
    }
    return rc;
}

/* Note a failure. Returns what the caller does: an error only for want of memory. */
static int result_of(const struct ki_small_work *w, int rc)
{
    if (rc < 0)
        ki_small_lose(w->s, w->holder.rank);
    return rc == -ENOENT ? 0 : rc;
}

int ki_small_store(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                   const struct ki_small_group *group, const struct kve_op *op)
{
    struct ki_small_work w = {.s = s, .index = index, .holder = holder, .group = group};
    bool anchored = group->names && !group->drops && !op->lookahead && op->n <= op->n_covered &&
                    (group->tail || op->n < op->n_covered);

    if (anchored)
        return result_of(&w, ki_small_store_anchored(&w, op));
    if (group->tail) /* without anchors nothing tells where blocks end */
        return result_of(&w, op->n ? -ENOENT : 0);
    return result_of(&w, store(&w, op));
}

/* -- removals ---------------------------------------------------------------------------------- */

/*
 * Whether a match may need parts of a registered block that the group itself hasn't: with block drop
 * it looks at one part beyond the match.
 */
static bool may_peek(const struct ki_small_work *w, uint64_t whole)
{
    return w->group->drops && ki_small_main_has(w, whole);
}

/* Forget the parts of a registered block that the group hasn't any more. */
static int forget_parts(struct ki_small_work *w, uint32_t whole)
{
    struct ki_parts *p = w->parts;
    uint32_t slot = ki_whole_slot(p, whole);
    size_t before = ki_parts_count(p);
    int rc = 0;

    for (uint32_t i = 0; i < ki_small_last(w) && !rc; i++) {
        uint32_t part = p->slots[slot + i].part;

        if (part != NONE && p->parts.items[part].copies)
            rc = put(w, p->wholes.items[whole].hash, i, false);
    }
    ki_whole_remove(p, whole);
    w->s->n -= before - ki_parts_count(p);
    return rc;
}

/*
 * Whether nothing needs the record of a registered block without copies. Where events leave parts out,
 * the block may come back without its parts, which are still there: then the record alone tells them.
 */
static bool is_idle(const struct ki_small_work *w, uint32_t whole)
{
    const struct ki_parts *p = w->parts;
    bool idle = !p->wholes.items[whole].copies && !may_peek(w, p->wholes.items[whole].hash);

    for (uint32_t i = 0; idle && w->group->names && i < ki_small_last(w); i++) {
        uint32_t part = p->slots[ki_whole_slot(p, whole) + i].part;

        idle = part == NONE || !p->parts.items[part].copies;
    }
    return idle;
}

/* Forget the idle registered blocks that have the part. The last one takes it along. */
static int forget_idle(struct ki_small_work *w, uint32_t part)
{
    struct ki_parts *p = w->parts;
    int rc = 0;

    for (uint32_t slot = p->parts.items[part].first, next; slot != NONE && !rc; slot = next) {
        uint32_t whole = (uint32_t)(ki_slot_whole(p, slot) - p->wholes.items);

        next = p->slots[slot].next; /* which belongs to another block */
        if (is_idle(w, whole))
            rc = forget_parts(w, whole);
    }
    return rc;
}

static int lose_part(struct ki_small_work *w, uint32_t at)
{
    uint64_t hash = w->parts->parts.items[at].hash;
    size_t before = ki_parts_count(w->parts);
    int rc = put_all(w, at, false);

    ki_part_tidy(w->parts, at);
    w->s->n -= before - ki_parts_count(w->parts);
    if (!rc && w->group->names && ki_part_find(w->parts, hash) != NONE)
        rc = forget_idle(w, at);
    return rc;
}

static int lose_whole(struct ki_small_work *w, uint32_t at)
{
    int rc = put(w, w->parts->wholes.items[at].hash, ki_small_last(w), false);

    if (!rc && is_idle(w, at))
        rc = forget_parts(w, at);
    return rc;
}

int ki_small_forget(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                    const struct ki_small_group *group, const uint64_t *hashes, size_t n)
{
    struct ki_small_work w = {.s = s, .index = index, .holder = holder, .group = group};
    int rc = ki_small_open_table(&w, false);

    if (rc)
        return 0;
    for (size_t i = 0; i < n && !rc; i++) {
        uint32_t at = ki_whole_find(w.parts, hashes[i]);

        if (at != NONE && !w.parts->wholes.items[at].copies && !may_peek(&w, hashes[i]))
            rc = forget_parts(&w, at);
    }
    return result_of(&w, rc);
}

/* Whether the engine has further copies of a block that the operation names. */
static bool leaves_copies(const struct kve_op *op)
{
    for (size_t i = 0; op->remaining && i < op->n; i++)
        if (op->remaining[i])
            return true;
    return false;
}

/*
 * Take a copy of the block, or leave @left. Returns 0 or an error; -ENOENT when the engine has copies
 * of a block that isn't known.
 */
static int take(struct ki_small_work *w, uint64_t hash, const uint32_t *left)
{
    uint32_t whole = ki_whole_find(w->parts, hash),
             part = whole == NONE ? ki_part_find(w->parts, hash) : NONE;
    struct ki_block *b;

    if (whole == NONE && part == NONE)
        return left && *left ? -ENOENT : 0;
    b = whole != NONE ? &w->parts->wholes.items[whole] : &w->parts->parts.items[part];
    if (!b->copies)
        return left && *left ? -ENOENT : 0;
    b->copies = left ? *left : b->copies - 1;
    if (b->copies)
        return 0;
    return whole != NONE ? lose_whole(w, whole) : lose_part(w, part);
}

int ki_small_take(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                  const struct ki_small_group *group, const struct kve_op *op)
{
    struct ki_small_work w = {.s = s, .index = index, .holder = holder, .group = group};
    int rc = ki_small_open_table(&w, false), result = 0;

    if (rc == -ENOENT && !w.parts)
        return result_of(&w, leaves_copies(op) ? -ENOENT : 0);
    for (size_t i = 0; i < op->n && !rc; i++) {
        int one = take(&w, op->hashes[i], op->remaining ? op->remaining + i : NULL);

        if (one < 0 && result != -ENOMEM)
            result = one;
    }
    return result_of(&w, rc ? rc : result);
}
