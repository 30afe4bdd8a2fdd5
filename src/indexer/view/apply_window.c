// SPDX-License-Identifier: Apache-2.0
/*
 * Operations on windows. Which way one goes depends on what its blocks are:
 *
 *     blocks of the registered size     a bit of the block in the index (kvi_window_add, _take)
 *       of a row that may be a report   noted as possible copies (unsure.h); the index stays
 *     parts of registered blocks        counted in small.h, which sets the bits
 *     of a size nobody has declared     the tier is in doubt: nothing tells which blocks these are
 *
 * Invariant: an operation that isn't applied leaves a doubt, a lost rank of small.h, or an error.
 * Removals are the exception: what the index doesn't have needn't be removed.
 */
#include "indexer/view/apply_impl.h"

#include <errno.h>
#include <string.h>

#include "base/core/xxh.h"

/* -- blocks of the registered size ------------------------------------------------------------- */

/* Note that a window's blocks may have been announced again: missing ones may be there now. */
static void note_window(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                        const struct kve_op *op, uint32_t number)
{
    if (op->type == KVE_OP_STORE_KNOWN)
        ki_unsure_note_window(&a->unsure, index, holder, number, op->hashes, op->n);
    for (size_t i = 0; op->type == KVE_OP_STORE && i < op->n; i++)
        ki_unsure_note_window(&a->unsure, index, holder, number, &op->blocks[i].hash, 1);
}

static void note_window_copies(struct ki_applier *a, const struct kve_op *op, uint32_t number)
{
    if (!a->unsure.n)
        return;
    if (op->type == KVE_OP_STORE)
        ki_unsure_stored(&a->unsure, op->rank, 1 + number, &op->blocks[0].hash,
                         sizeof(op->blocks[0]), op->n);
    else
        ki_unsure_stored(&a->unsure, op->rank, 1 + number, op->hashes, sizeof(op->hashes[0]),
                         op->n);
}

/* Note blocks of an event that may be a report, or what it tells of earlier ones. */
static void note_suspects(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                          const struct kve_op *op, uint32_t number)
{
    bool maybe = ki_reports_may_be(&a->reports) && a->reports.maybe;

    for (size_t i = 0; (maybe || a->suspects.n) && i < op->n; i++) {
        uint64_t hash = op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];
        long copies =
            kvi_get_block(index, kvi_window_of(holder, KV_TIER_DEVICE, 0, number), hash).copies;

        if (maybe)
            ki_suspects_note(&a->suspects, op->rank, 1 + number, hash, copies);
        else
            ki_suspects_stored(&a->suspects, op->rank, 1 + number, hash, copies);
    }
}

static int store_in_window(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                           const struct kve_op *op, uint32_t number, uint32_t copies_of)
{
    struct kvi_cache cache = kvi_window_of(holder, op->tier, copies_of, number);
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    struct kvi_stored stored = {0};
    long rc;

    if (op->tier == KV_TIER_DEVICE && !copies_of)
        note_window_copies(a, op, number);
    a->reports.suspects |= op->type == KVE_OP_STORE && !op->has_parent;
    rc = op->type == KVE_OP_STORE ? kvi_add(index, cache, parent, op->blocks, op->n, &stored)
                                  : kvi_add_known(index, cache, op->hashes, op->n);
    if (stored.lagging)
        rc = -ENOMEM;
    if (op->tier == KV_TIER_DEVICE && !copies_of)
        note_suspects(a, index, holder, op, number);
    return (int)KV_MIN(rc, 0L);
}

/* -- blocks that are parts of the registered ones ---------------------------------------------- */

int ki_applier_forget_parts(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                            const struct kve_op *op)
{
    struct ki_windows windows;
    int rc = 0;

    if (!a->small.n || !a->habits.eagle_drop)
        return 0;
    ki_windows_get(index, holder, &windows);
    for (int i = 0; i < windows.n && !rc; i++) {
        const struct kvi_window *w = &windows.items[i];
        const struct kve_source source = {
            .group = w->group, .need = w->need, .stride = w->stride, .parts = ki_window_parts(w)};
        struct ki_small_group group;

        if (!w->part && source.parts > 1 && ki_windows_find(a, &windows, &source, &group) == 0)
            rc = ki_small_forget(&a->small, index, holder, &group, op->hashes, op->n);
    }
    return rc;
}

uint64_t ki_owner_id(const struct kve_source *source)
{
    return source->owner[0] ? kv_xxh64(source->owner, strlen(source->owner), 0) | 1 : 0;
}

/*
 * Note that nothing tells what the group of @source has in the operation's tier. A removal adds no
 * doubt: the store of the same blocks has, or the index never had them.
 */
static void lose_tier(struct ki_applier *a, const struct kve_op *op,
                      const struct kve_source *source)
{
    if (op->type != KVE_OP_REMOVE)
        ki_doubts_add(&a->doubts, op->rank, ki_owner_id(source), 1u << op->tier);
}

/* A group whose blocks are parts of the registered ones. */
static int apply_small(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_op *op, const struct ki_small_group *group,
                       const struct kve_source *source, enum ki_verdict verdict)
{
    if (op->tier != KV_TIER_DEVICE || source->owner[0]) {
        lose_tier(a, op, source);
        return 0;
    }
    if (verdict == KI_VERDICT_EITHER) {
        ki_small_lose(&a->small, holder.rank);
        return 0;
    }
    if (op->type == KVE_OP_STORE_KNOWN && ki_reports_may_be(&a->reports) && a->reports.maybe)
        ki_doubts_add(&a->doubts, op->rank, 0, KI_WHY_REPORTS);
    switch (op->type) {
    case KVE_OP_STORE_KNOWN:
        return ki_small_store(&a->small, index, holder, group, op);
    case KVE_OP_REMOVE:
        return ki_small_take(&a->small, index, holder, group, op);
    default: /* with tokens of blocks of the registered size: not one of the group's */
        ki_small_lose(&a->small, holder.rank);
        return 0;
    }
}

/* -- one operation ----------------------------------------------------------------------------- */

int ki_applier_apply_window(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                            const struct kve_source *source, enum ki_verdict verdict)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    uint32_t copies_of = source->owner[0] ? op->source : 0, number;
    struct ki_small_group group;
    struct ki_windows windows;
    long rc;

    ki_windows_get(index, holder, &windows);
    rc = ki_windows_find(a, &windows, source, &group);
    if (rc < 0 && op->type == KVE_OP_REMOVE)
        rc = ki_windows_find_size(a, &windows, source, &group);
    if (rc < 0 && !ki_shows_size(op, source)) {
        lose_tier(a, op, source);
        return 0;
    }
    if (rc < 0)
        return ki_doubts_has(&a->doubts, KI_WHY_CROWDED) ? 0 : (int)rc;
    number = group.numbers[0];
    a->stats.window_blocks += op->n;
    if (ki_applier_drops_beyond_main(a, &windows, op->rank))
        ki_doubts_add(&a->doubts, op->rank, 0, KI_WHY_DROPS);
    else
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_DROPS);
    if (group.parts > 1)
        return apply_small(a, index, holder, op, &group, source, verdict);
    switch (op->type) {
    case KVE_OP_STORE:
    case KVE_OP_STORE_KNOWN:
        if (verdict != KI_VERDICT_EITHER)
            return store_in_window(a, index, holder, op, number, copies_of);
        note_window(a, index, holder, op, number);
        return 0;
    case KVE_OP_REMOVE:
        rc = op->tier == KV_TIER_DEVICE && !copies_of
                 ? ki_unsure_take_window(&a->unsure, index, holder, number, op)
                 : kvi_take(index, kvi_window_of(holder, op->tier, copies_of, number), op->hashes,
                            op->remaining, op->n);
        if (op->tier == KV_TIER_DEVICE && !copies_of)
            ki_applier_note_removals(a, index, holder, op, 1 + number);
        return rc < 0 ? (int)rc : 0;
    default:
        return 0;
    }
}
