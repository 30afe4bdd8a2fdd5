// SPDX-License-Identifier: Apache-2.0
/*
 * Stores and removals of one cache: the engine's main cache or a window, or another owner's.
 *
 *     open parent comes back (prove_parent) ─► the index stores, with or without a further copy
 *                                           ─► note: ranges, lacking components, doubts
 *
 * Waiting chains enter together (ki_applier_end_run): where the index refuses one, its events are
 * stored one by one, and each is asked what it tells.
 */
#include "indexer/view/apply_impl.h"

#include <inttypes.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/log.h"

/* Note that the engine has the parent of a store, which may be an open block. */
static int prove_parent(struct ki_applier *a, struct kvi_index *index,
                        const struct kvi_cache *cache, const struct kve_op *op)
{
    if (!a->ranges.n_open || !ki_has_ranges(cache) || cache->window || !op->has_parent)
        return 0;
    return ki_ranges_prove(&a->ranges, index, cache, op->parent);
}

/*
 * Note what a store tells of the ranges of its blocks: new copies, or maybe a report of known ones.
 */
static void note_ranges(struct ki_applier *a, struct kvi_index *index,
                        const struct kvi_cache *cache, const struct kve_op *op,
                        enum ki_verdict verdict, const struct kvi_stored *stored)
{
    bool from_root = !op->has_parent && op->n;
    bool held = cache->window || (op->n && stored->duplicate == op->n);
    bool may_be = ki_reports_may_be(&a->reports) && (!a->has_windows || a->reports.maybe);

    if (verdict == KI_VERDICT_EITHER) {
        ki_ranges_maybe(&a->ranges, index, cache, op, false);
        return;
    }
    /* Of a window, events below the one from the root stay in doubt with it. */
    if (may_be && held && (cache->window || from_root))
        ki_ranges_maybe(&a->ranges, index, cache, op, true);
    else
        ki_ranges_stored(&a->ranges, index, cache, op);
    a->reports.suspects |= from_root && held && op->type == KVE_OP_STORE;
}

long ki_applier_take(struct ki_applier *a, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op)
{
    long rc = ki_ranges_take(&a->ranges, index, cache, op);

    if (KV_LIKELY(a->ranges.n_real < KI_ENOUGH_REAL))
        return rc;
    a->reports.trusted = true;
    ki_ranges_trust(&a->ranges);
    for (uint32_t i = 0; i < a->n_ranks; i++)
        ki_doubts_end(&a->doubts, a->ranks[i], 0, KI_WHY_REPORTS);
    return rc;
}

void ki_applier_note_complete(struct ki_applier *a, const struct kve_op *op)
{
    for (size_t i = 0; (a->incomplete.n || op->incomplete) && i < op->n; i++) {
        uint64_t hash = kve_op_hash(op, i);

        if (op->incomplete)
            ki_doubts_add(&a->incomplete, op->rank, hash, 1u << op->tier);
        else
            ki_doubts_end(&a->incomplete, op->rank, hash, 1u << op->tier);
    }
}

/*
 * Return true when a store shows that the view isn't the engine's. A block of the device has its
 * parent there, unless the publisher tells blocks in any order, and a place has one name: where it gets another, something that the events don't
 * tell differs (an image, an adapter), unless the index is told to leave images out.
 */
static bool contradicts(const struct ki_applier *a, const struct kve_op *op,
                        const struct kvi_stored *stored)
{
    bool names_all = !a->reader->ignore_mm_keys && !a->reader->ignore_mm_offsets;

    return op->tier == KV_TIER_DEVICE && !op->source &&
           ((stored->parked && !a->unordered) || (stored->renamed && names_all));
}

/* Put blocks into a cache that the event names by hash. Unknown ones leave the tier in doubt. */
static long store_known(struct ki_applier *a, struct kvi_index *index,
                        const struct kvi_cache *cache, const struct kve_op *op)
{
    struct kve_source source = {.owner = ""};
    long rc;

    if (op->incomplete) {
        ki_applier_note_complete(a, op);
        return (long)op->n;
    }
    rc = kvi_add_known(index, *cache, op->hashes, op->n);
    if (rc >= 0 && (size_t)rc < op->n && kve_reader_source(a->reader, op->source, &source) == 0)
        ki_doubts_add(&a->doubts, op->rank, ki_owner_id(&source), 1u << op->tier);
    return rc;
}

/*
 * Put the blocks into the cache: a copy more of each, or at least one. Sources other than the
 * engine's own cache have one copy of a block, however often they announce it. An event that may be
 * a report counts no copy; a window's names blocks that the window hasn't, and changes nothing.
 */
static long into_cache(struct ki_applier *a, struct kvi_index *index, const struct kvi_cache *cache,
                       const struct kve_op *op, enum ki_verdict verdict, struct kvi_stored *stored)
{
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;

    if (cache->window && verdict == KI_VERDICT_EITHER)
        return 0;
    if (op->type == KVE_OP_STORE_KNOWN)
        return store_known(a, index, cache, op);
    if (!cache->window && (op->single || verdict == KI_VERDICT_EITHER))
        return kvi_store(index, cache->holder, cache->tier, parent, op->blocks, op->n, stored);
    return kvi_add(index, *cache, parent, op->blocks, op->n, stored);
}

/* Note what a store of a main cache's blocks with their tokens tells, besides their ranges. */
static void note_main(struct ki_applier *a, const struct kvi_cache *cache, const struct kve_op *op,
                      enum ki_verdict verdict, const struct kvi_stored *stored)
{
    a->stats.orphans += stored->parked > 0; /* common after a loss, and in lower tiers */
    if (contradicts(a, op, stored))
        ki_doubts_add(&a->doubts, op->rank, 0, 1u << KV_TIER_DEVICE);
    if (op->single || a->incomplete.n)
        ki_applier_note_complete(a, op);
    if (verdict == KI_VERDICT_COPIES && !stored->parked && op->n)
        ki_store_run_begin(&a->run, cache->holder, op->blocks[op->n - 1].hash, op->single);
}

/* Note that the index refused a store. Returns 0 when the reason is the event's own. */
static int note_refused(struct ki_applier *a, const struct kve_op *op, int rc)
{
    static struct kv_log_rate rate;
    char digits[KV_INSTANCE_DIGITS];

    a->last.full |= rc == -ENOSPC;
    a->stats.rejected++;
    if (rc == -EINVAL) /* a block below itself: its name isn't that of one place */
        ki_doubts_add(&a->doubts, op->rank, 0, 1u << op->tier);
    if (kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", "the index refused blocks",
                    "worker=%s rank=%" PRIu32 " blocks=%zu error=\"%s\"",
                    kv_instance_text(a->instance, a->who, digits), op->rank, op->n, strerror(-rc));
    return rc == -EINVAL ? 0 : rc;
}

int ki_applier_store(struct ki_applier *a, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op, enum ki_verdict verdict)
{
    struct kvi_stored stored = {0};
    long rc = prove_parent(a, index, cache, op);

    if (!rc)
        rc = into_cache(a, index, cache, op, verdict, &stored);
    if (!cache->window && op->type == KVE_OP_STORE)
        ki_event_counts_store(&a->counts, stored.parked ? -ENOENT : (int)rc,
                              op->n - stored.duplicate, op->n);
    else if (!cache->window)
        ki_event_counts_named(&a->counts, KI_EVENT_STORED, rc, op->n);
    if (rc < 0)
        return note_refused(a, op, (int)rc);
    if (!cache->window && op->type == KVE_OP_STORE)
        note_main(a, cache, op, verdict, &stored);
    if (ki_has_ranges(cache) && !op->single)
        note_ranges(a, index, cache, op, verdict, &stored);
    return stored.lagging ? -ENOMEM : 0;
}

/*
 * Store the events of waiting chain @i one by one, when the index refuses them together. Returns a
 * negative errno when one is lost.
 */
static int store_each(struct ki_applier *a, struct kvi_index *index, const struct ki_store_run *run,
                      size_t i)
{
    const struct kvi_new_chain *chain = &run->room->chains[i];
    const struct kvi_cache cache = kvi_cache_of(chain->holder, KV_TIER_DEVICE, 0);
    bool has_parent = chain->has_parent;
    uint64_t parent = chain->parent;
    size_t end, n;
    int result = 0;

    for (size_t k = ki_store_run_events(run, i, &end); k < end; k++) {
        const struct kv_block *blocks = run->room->blocks + ki_store_run_blocks(run, k, &n);
        struct kve_op op = {.type = KVE_OP_STORE,
                            .rank = chain->holder.rank,
                            .tier = KV_TIER_DEVICE,
                            .has_parent = has_parent,
                            .parent = parent,
                            .blocks = blocks,
                            .n = n,
                            .single = run->single};
        int rc = ki_applier_store(a, index, &cache, &op, KI_VERDICT_COPIES);

        result = rc < 0 ? rc : result;
        has_parent = true;
        parent = blocks[n - 1].hash;
    }
    return result;
}

/* Note that chains @from to @to - 1 have been stored. */
static void note_stored(struct ki_applier *a, const struct ki_store_run *run, size_t from,
                        size_t to)
{
    for (size_t i = from, end; i < to; i++) {
        ki_applier_touch(a, run->room->chains[i].holder.rank);
        for (size_t k = ki_store_run_events(run, i, &end); k < end; k++)
            ki_event_counts_store(&a->counts, 0, 1, 1);
    }
}

int ki_applier_end_run(struct ki_applier *a, struct kvi_index *index)
{
    struct ki_store_run run = a->run;
    bool together = true;
    int rc = 0, result = 0;

    a->run = (struct ki_store_run){.off = run.off};
    for (size_t i = 0; i < run.n_chains;) {
        if (together) {
            struct kvi_stored stored;
            size_t n = kvi_add_chains(index, run.room->chains + i, run.n_chains - i, &stored, &rc);

            note_stored(a, &run, i, i + n);
            result = stored.lagging ? -ENOMEM : result;
            i += n;
        }
        if (i == run.n_chains)
            break;
        ki_applier_touch(a, run.room->chains[i].holder.rank);
        rc = store_each(a, index, &run, i++);
        result = rc < 0 ? rc : result;
        together = !a->ranges.n; /* which each store may have to look at */
    }
    a->run.open = false;
    ki_store_run_fini(&run);
    return result;
}
