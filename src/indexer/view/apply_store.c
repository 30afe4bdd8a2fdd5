// SPDX-License-Identifier: Apache-2.0
/*
 * Stores of the main group, and of other owners; and what they tell of blocks in doubt.
 *
 *     open parents come back (put_back) ─► the index stores, with or without a further copy
 *                                       ─► note: possible copies, suspects, lacking components
 *
 * A store of new copies is counted; one that may be a report is stored uncounted and noted
 * (unsure.h). Waiting chains enter together (ki_applier_end_run): where the index refuses one, its
 * events are stored one by one, and each is asked what it tells.
 */
#include "indexer/view/apply_impl.h"

#include <inttypes.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/log.h"

/* Store blocks again that were in doubt and that an event of new copies proves to be held. */
static int put_back(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op)
{
    if (!a->unsure.n_open || op->tier != KV_TIER_DEVICE || op->source || !op->has_parent)
        return 0;
    return ki_unsure_restore(&a->unsure, index, holder, op->parent);
}

static long copies_of(struct kvi_index *index, struct kv_holder holder, unsigned group,
                      uint64_t hash)
{
    if (group != KI_UNSURE_MAIN)
        return kvi_get_block(index, kvi_window_of(holder, KV_TIER_DEVICE, 0, group - 1), hash)
            .copies;
    return kvi_get_block(index, kvi_cache_of(holder, KV_TIER_DEVICE, 0), hash).copies;
}

void ki_applier_note_removals(struct ki_applier *a, struct kvi_index *index,
                              struct kv_holder holder, const struct kve_op *op, unsigned group)
{
    for (size_t i = 0; a->suspects.n && i < op->n; i++)
        if (ki_unsure_find(&a->suspects, op->rank, group, op->hashes[i]))
            ki_suspects_removed(&a->suspects, op->rank, group, op->hashes[i],
                                copies_of(index, holder, group, op->hashes[i]),
                                op->remaining != NULL);
    if (a->suspects.n_real < KI_ENOUGH_REAL)
        return;
    a->reports.trusted = true;
    ki_unsure_clear(&a->suspects);
    for (uint32_t i = 0; i < a->n_ranks; i++)
        ki_doubts_end(&a->doubts, a->ranks[i], 0, KI_WHY_REPORTS);
}

/* Note what a store tells of blocks that may have been reports, or whether it may be one itself. */
static void note_suspects(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                          const struct kve_op *op, const struct kvi_stored *stored)
{
    bool maybe = !op->has_parent && op->n && stored->duplicate == op->n &&
                 ki_reports_may_be(&a->reports) && (!a->has_windows || a->reports.maybe);

    if (!maybe && !a->suspects.n)
        return;
    if (op->has_parent)
        ki_suspects_held(&a->suspects, op->rank, KI_UNSURE_MAIN, op->parent,
                         copies_of(index, holder, KI_UNSURE_MAIN, op->parent));
    for (size_t i = 0; i < op->n; i++) {
        uint64_t hash = op->blocks[i].hash;
        long copies = copies_of(index, holder, KI_UNSURE_MAIN, hash);

        if (maybe)
            ki_suspects_note(&a->suspects, op->rank, KI_UNSURE_MAIN, hash, copies);
        else
            ki_suspects_stored(&a->suspects, op->rank, KI_UNSURE_MAIN, hash, copies);
    }
}

static void note_copies(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                        const struct kve_op *op, const struct kvi_stored *stored)
{
    bool at_root = !op->has_parent && op->n;

    if (op->tier != KV_TIER_DEVICE || op->source)
        return;
    if (a->unsure.n)
        ki_unsure_stored(&a->unsure, op->rank, KI_UNSURE_MAIN, &op->blocks[0].hash,
                         sizeof(op->blocks[0]), op->n);
    note_suspects(a, index, holder, op, stored);
    a->reports.suspects |= at_root && stored->duplicate == op->n;
}

void ki_applier_note_complete(struct ki_applier *a, const struct kve_op *op)
{
    for (size_t i = 0; (a->incomplete.n || op->incomplete) && i < op->n; i++) {
        uint64_t hash = op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];

        if (op->incomplete)
            ki_doubts_add(&a->incomplete, op->rank, hash, 1u << op->tier);
        else
            ki_doubts_end(&a->incomplete, op->rank, hash, 1u << op->tier);
    }
}

/*
 * Return true when a store shows that the view isn't the engine's. A block of the device has its
 * parent there, and a place has one name: where it gets another, something that the events don't
 * tell differs (an image, an adapter), unless the index is told to leave images out.
 */
static bool contradicts(const struct ki_applier *a, const struct kve_op *op,
                        const struct kvi_stored *stored)
{
    bool names_all = !a->reader->ignore_mm_keys && !a->reader->ignore_mm_offsets;

    return op->tier == KV_TIER_DEVICE && !op->source &&
           (stored->parked || (stored->renamed && names_all));
}

int ki_applier_store(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                     const struct kve_op *op, enum ki_verdict verdict)
{
    static struct kv_log_rate rate;
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    struct kvi_stored stored = {0};
    char digits[KV_INSTANCE_DIGITS];
    bool counts = !op->single && verdict != KI_VERDICT_EITHER;
    int rc = put_back(a, index, holder, op);

    /*
     * Sources other than the engine's own cache have one copy of a block, however often they
     * announce it.
     */
    if (!rc)
        rc = counts ? kvi_add(index, kvi_cache_of(holder, op->tier, op->source), parent, op->blocks,
                              op->n, &stored)
                    : kvi_store(index, holder, op->tier, parent, op->blocks, op->n, &stored);
    ki_event_counts_store(&a->counts, stored.parked ? -ENOENT : rc, op->n - stored.duplicate,
                          op->n);
    if (rc == 0) {
        a->stats.orphans += stored.parked > 0; /* common after a loss, and in lower tiers */
        if (contradicts(a, op, &stored))
            ki_doubts_add(&a->doubts, op->rank, 0, 1u << KV_TIER_DEVICE);
        if (op->single || a->incomplete.n)
            ki_applier_note_complete(a, op);
        if (verdict == KI_VERDICT_EITHER)
            ki_unsure_note(&a->unsure, op);
        else if (!op->single)
            note_copies(a, index, holder, op, &stored);
        if (verdict == KI_VERDICT_COPIES && !stored.parked && op->n)
            ki_store_run_begin(&a->run, holder, op->blocks[op->n - 1].hash);
        return stored.lagging ? -ENOMEM : 0;
    }
    a->last.full |= rc == -ENOSPC;
    a->stats.rejected++;
    if (rc == -EINVAL) /* a block below itself: its name isn't that of one place */
        ki_doubts_add(&a->doubts, op->rank, 0, 1u << op->tier);
    if (kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", "the index refused blocks",
                    "worker=%s rank=%" PRIu32 " blocks=%zu error=\"%s\"",
                    kv_instance_text(holder.worker, a->who, digits), holder.rank, op->n,
                    strerror(-rc));
    return rc == -EINVAL ? 0 : rc;
}

/*
 * Store the events of waiting chain @i one by one, when the index refuses them together. Returns a
 * negative errno when one is lost.
 */
static int store_each(struct ki_applier *a, struct kvi_index *index, const struct ki_store_run *run,
                      size_t i)
{
    const struct kvi_new_chain *chain = &run->room->chains[i];
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
                            .n = n};
        int rc = ki_applier_store(a, index, chain->holder, &op, KI_VERDICT_COPIES);

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
        together = !a->unsure.n && !a->suspects.n; /* which each store may have to look at */
    }
    a->run.open = false;
    ki_store_run_fini(&run);
    return result;
}
