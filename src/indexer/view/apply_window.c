// SPDX-License-Identifier: Apache-2.0
/*
 * Operations on windows. Which way one goes depends on what its blocks are:
 *
 *     blocks of the registered size     a cache of its own (apply_store.c)
 *     smaller ones, of which a match    the same, of those that end registered blocks
 *       needs the last alone              (by their names)
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

/* -- blocks that end registered ones ----------------------------------------------------------- */

/*
 * Of a group's smaller blocks a match can need those alone that end registered ones. They find their
 * places by their names, when the main group has stored these; the others never do.
 */
static long apply_names(struct ki_applier *a, struct kvi_index *index,
                        const struct kvi_cache *cache, const struct kve_op *op,
                        const struct kve_source *source, enum ki_verdict verdict)
{
    if (op->type == KVE_OP_REMOVE)
        return ki_applier_take(a, index, cache, op);
    if (kve_reader_has_main(a->reader, op->rank) && op->type == KVE_OP_STORE_KNOWN)
        return ki_applier_store(a, index, cache, op, verdict);
    lose_tier(a, op, source); /* nothing tells which blocks end registered ones */
    return 0;
}

/* -- one operation ----------------------------------------------------------------------------- */

int ki_applier_apply_window(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                            const struct kve_source *source, enum ki_verdict verdict)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    struct ki_small_group group;
    struct ki_windows windows;
    struct kvi_cache cache;
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
    a->stats.window_blocks += op->n;
    if (ki_applier_drops_beyond_main(a, &windows, op->rank))
        ki_doubts_add(&a->doubts, op->rank, 0, KI_WHY_DROPS);
    else
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_DROPS);
    if (kve_reader_has_main(a->reader, op->rank))
        group.names = &a->names;
    if (group.parts > 1)
        return apply_small(a, index, holder, op, &group, source, verdict);
    cache = kvi_window_of(holder, op->tier, source->owner[0] ? op->source : 0, group.numbers[0]);
    if (ki_form_of(a, source) == KI_FORM_NAMES)
        return (int)KV_MIN(apply_names(a, index, &cache, op, source, verdict), 0L);
    rc = op->type == KVE_OP_REMOVE ? ki_applier_take(a, index, &cache, op)
                                   : ki_applier_store(a, index, &cache, op, verdict);
    return (int)KV_MIN(rc, 0L);
}
