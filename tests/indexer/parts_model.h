// SPDX-License-Identifier: Apache-2.0
/**
 * A naive model of small.h: plain lists of blocks, searched from the beginning. The rules of which
 * blocks an event names are those of small.h; the model has no tables, slots or links.
 */
#ifndef KV_TESTS_INDEXER_PARTS_MODEL_H
#define KV_TESTS_INDEXER_PARTS_MODEL_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/view/small/small.h"

#define PARTS_MODEL_RANKS 2
#define PARTS_MODEL_MAX 512

/* A registered block, or a part. */
struct parts_model_block {
    uint32_t rank, group, copies;
    uint64_t hash, above;
    bool whole;
    uint32_t index;                /* part */
    uint64_t parts[KVE_MAX_PARTS]; /* registered block: hashes of its parts, 0: none */
};

struct parts_model {
    struct parts_model_block items[PARTS_MODEL_MAX];
    size_t n;
    bool lost[PARTS_MODEL_RANKS]; /* what the groups of a rank have */
};

static inline void parts_model_lose(struct parts_model *m, uint32_t rank)
{
    m->lost[rank] = true;
}

static inline size_t parts_model_records(const struct parts_model *m)
{
    return m->n;
}

static inline struct parts_model_block *parts_model_find(struct parts_model *m, uint32_t rank,
                                                         uint32_t group, uint64_t hash)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->items[i].rank == rank && m->items[i].group == group && m->items[i].hash == hash)
            return &m->items[i];
    return NULL;
}

static inline bool parts_model_has(struct parts_model *m, uint32_t rank, uint32_t group,
                                   uint64_t hash, uint32_t part, uint32_t parts)
{
    const struct parts_model_block *b = parts_model_find(m, rank, group, hash), *of;

    if (!b || !b->whole)
        return false;
    if (part + 1 == parts)
        return b->copies > 0;
    of = b->parts[part] ? parts_model_find(m, rank, group, b->parts[part]) : NULL;
    return of && of->copies;
}

/* Whether a registered block names the part. */
static inline bool parts_model_is_named(const struct parts_model *m,
                                        const struct parts_model_block *part)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->items[i].whole && m->items[i].rank == part->rank &&
            m->items[i].group == part->group && m->items[i].parts[part->index] == part->hash)
            return true;
    return false;
}

/* Remove the parts that nothing needs. */
static inline void parts_model_tidy(struct parts_model *m)
{
    for (size_t i = 0; i < m->n;) {
        struct parts_model_block *b = &m->items[i];

        if (b->whole || b->copies || parts_model_is_named(m, b))
            i++;
        else
            *b = m->items[--m->n];
    }
}

static inline struct parts_model_block *parts_model_gain(struct parts_model *m, uint32_t rank,
                                                         uint32_t group, uint64_t hash, bool whole,
                                                         uint32_t index, uint64_t above)
{
    struct parts_model_block *b = parts_model_find(m, rank, group, hash);

    if (!b) {
        b = &m->items[m->n++];
        *b = (struct parts_model_block){.rank = rank,
                                        .group = group,
                                        .hash = hash,
                                        .whole = whole,
                                        .index = index,
                                        .above = above};
    }
    if (b->whole != whole || b->index != index)
        return NULL;
    b->copies++;
    return b;
}

static inline bool parts_model_reachable(const struct ki_small_group *g, const struct kve_op *op,
                                         size_t first, size_t i)
{
    size_t need = (size_t)g->need + g->drops;

    if (need >= g->parts)
        return true;
    if (g->drops && !op->has_parent && !i)
        return false;
    return (first + i + g->parts - g->drops) % g->parts >= g->parts - need;
}

static inline int parts_model_first(struct parts_model *m, const struct ki_small_group *g,
                                    const struct kve_op *op, bool main_has_parent)
{
    const struct parts_model_block *b = parts_model_find(m, op->rank, g->group, op->parent);

    if (!op->has_parent)
        return 0;
    if (b)
        return b->whole ? 0 : (int)b->index + 1;
    if (main_has_parent)
        return 0;
    return g->drops || op->lookahead || op->n_covered % g->parts ? -ENOENT : 0;
}

static inline bool parts_model_above(struct parts_model *m, const struct ki_small_group *g,
                                     const struct kve_op *op, size_t first, uint64_t *parts)
{
    uint64_t hash = op->parent;

    for (size_t i = first; i-- > 0;) {
        const struct parts_model_block *b = parts_model_find(m, op->rank, g->group, hash);

        for (size_t k = 0; (!b || b->whole) && k <= i; k++)
            if (parts_model_reachable(g, op, 0, k))
                return false;
        if (!b || b->whole)
            return true;
        if (b->index != i)
            return false;
        parts[i] = hash;
        hash = b->above;
    }
    return true;
}

static inline bool parts_model_store_one(struct parts_model *m, const struct ki_small_group *g,
                                         uint32_t rank, uint64_t hash, uint64_t above,
                                         uint32_t part, uint64_t *parts)
{
    bool whole = part + 1 == g->parts;
    struct parts_model_block *b = parts_model_gain(m, rank, g->group, hash, whole, whole ? 0 : part,
                                                   part && !whole ? above : 0);

    if (!b)
        return false;
    if (!whole) {
        parts[part] = hash;
        return true;
    }
    for (uint32_t k = 0; k + 1 < g->parts; k++) {
        if (parts[k] && b->parts[k] && b->parts[k] != parts[k])
            return false;
        b->parts[k] = parts[k] ? parts[k] : b->parts[k];
    }
    return true;
}

static inline void parts_model_store(struct parts_model *m, const struct ki_small_group *g,
                                     const struct kve_op *op, bool main_has_parent)
{
    uint64_t parts[KVE_MAX_PARTS] = {0}, above = op->has_parent ? op->parent : 0;
    int first = parts_model_first(m, g, op, main_has_parent);
    size_t reachable = 0, named = 0;

    for (size_t i = 0; first >= 0 && i < op->n_covered; i++)
        reachable += parts_model_reachable(g, op, (size_t)first, i);
    if (first < 0 || (op->n != reachable && op->n != op->n_covered) ||
        !parts_model_above(m, g, op, (size_t)first, parts)) {
        parts_model_lose(m, op->rank);
        return;
    }
    for (size_t i = 0; i < op->n_covered; i++) {
        uint32_t part = (uint32_t)(((size_t)first + i) % g->parts);

        if (!part)
            memset(parts, 0, sizeof(parts));
        if (op->n != op->n_covered && !parts_model_reachable(g, op, (size_t)first, i)) {
            above = 0;
            continue;
        }
        if (!parts_model_store_one(m, g, op->rank, op->hashes[named], above, part, parts)) {
            parts_model_lose(m, op->rank);
            return;
        }
        above = op->hashes[named++];
    }
}

static inline void parts_model_forget(struct parts_model *m, uint32_t rank,
                                      const struct ki_small_group *g, uint64_t hash, bool main_has)
{
    struct parts_model_block *b = parts_model_find(m, rank, g->group, hash);

    if (!b || !b->whole || b->copies || (g->drops && main_has))
        return;
    *b = m->items[--m->n];
    parts_model_tidy(m);
}

static inline void parts_model_take(struct parts_model *m, uint32_t rank,
                                    const struct ki_small_group *g, uint64_t hash,
                                    const uint32_t *left, bool main_has)
{
    struct parts_model_block *b = parts_model_find(m, rank, g->group, hash);

    if ((!b || !b->copies) && left && *left)
        parts_model_lose(m, rank);
    if (!b || !b->copies)
        return;
    b->copies = left ? *left : b->copies - 1;
    if (b->copies)
        return;
    if (b->whole)
        parts_model_forget(m, rank, g, hash, main_has);
    else
        parts_model_tidy(m);
}

static inline void parts_model_clear(struct parts_model *m, uint32_t from, uint32_t to)
{
    for (size_t i = 0; i < m->n;) {
        if (m->items[i].rank >= from && m->items[i].rank <= to)
            m->items[i] = m->items[--m->n];
        else
            i++;
    }
    for (uint32_t rank = from; rank <= to && rank < PARTS_MODEL_RANKS; rank++)
        m->lost[rank] = false;
}

#endif
