// SPDX-License-Identifier: Apache-2.0
#include "indexer/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "indexer/lookup.h"

void ki_applier_fini(struct ki_applier *a)
{
    kve_reader_destroy(a->reader);
    ki_store_run_fini(&a->run);
    free(a->ranks);
    memset(a, 0, sizeof(*a));
}

bool ki_applier_note_rank(struct ki_applier *a, uint32_t rank)
{
    uint32_t at = 0, *grown;

    while (at < a->n_ranks && a->ranks[at] < rank)
        at++;
    if (at < a->n_ranks && a->ranks[at] == rank)
        return true;
    if (a->n_ranks == KI_MAX_RANKS)
        return false;
    grown = realloc(a->ranks, (a->n_ranks + 1) * sizeof(*grown));
    if (!grown)
        return false;
    a->ranks = grown;
    memmove(grown + at + 1, grown + at, (a->n_ranks - at) * sizeof(*grown));
    grown[at] = rank;
    a->n_ranks++;
    return true;
}

int ki_applier_init(struct ki_applier *a, uint64_t instance, uint32_t rank, uint32_t block_size,
                    enum ki_mm_keys mm_keys)
{
    struct kve_reader_opts opts = {.size = sizeof(opts),
                                   .block_size = block_size,
                                   .rank = rank,
                                   .ignore_mm_keys = mm_keys == KI_MM_IGNORED,
                                   .ignore_mm_offsets = mm_keys == KI_MM_WITHOUT_OFFSETS};
    int rc;

    memset(a, 0, sizeof(*a));
    a->instance = instance;
    if (!ki_applier_note_rank(a, rank))
        return -ENOMEM;
    rc = kve_reader_create(&opts, &a->reader);
    if (rc < 0)
        ki_applier_fini(a);
    return rc;
}

/*
 * Some engines tell again what they have, where others would tell of a new copy: vLLM does for
 * requests that ask for it (kv_cache_report_mode "full"), in one event from the root for the blocks
 * that it found, before it goes on below them. A request that computes the same blocks anew has no
 * reason to stop there.
 */
#define LOOK_AHEAD 64

static bool goes_on(const struct kve_batch *batch, size_t at)
{
    const struct kve_op *op = &batch->ops[at];

    for (size_t i = at + 1; i < batch->n_ops && i <= at + LOOK_AHEAD; i++) {
        const struct kve_op *next = &batch->ops[i];

        if (next->type == KVE_OP_STORE && next->rank == op->rank && next->tier == op->tier &&
            next->source == op->source && next->has_parent &&
            next->parent == op->blocks[op->n - 1].hash)
            return true;
    }
    return false;
}

static bool may_tell_again(const struct kve_op *op)
{
    return op->type == KVE_OP_STORE && !op->has_parent && op->n && op->tier == KV_TIER_DEVICE &&
           !op->source;
}

/* Whether the event may be about blocks that were told before: then they get no second copy. */
static bool tells_again(const struct ki_applier *a, const struct kve_batch *batch, size_t at)
{
    const struct kve_op *op = &batch->ops[at];

    if (a->overlaps)
        return true;
    /* Where a window has lost its blocks, or one is dropped, a request computes known blocks anew. */
    if (a->has_windows || a->eagle_drop)
        return false;
    /* A prompt of one full block is computed anew each time: one block from the root says nothing. */
    return may_tell_again(op) && (a->tells_again || (op->n > 1 && goes_on(batch, at)));
}

static int apply_store(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_batch *batch, size_t at)
{
    static struct kv_log_rate rate;
    const struct kve_op *op = &batch->ops[at];
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    struct kvi_stored stored = {0};
    /* Other sources than the engine's own cache have a block once, however often they tell it. */
    bool again = !op->source && tells_again(a, batch, at);
    int rc = again
                 ? kvi_store(index, holder, op->tier, parent, op->blocks, op->n, &stored)
                 : kvi_add(index, holder, op->tier, op->source, parent, op->blocks, op->n, &stored);

    ki_event_counts_store(&a->counts, stored.parked ? -ENOENT : rc, op->n - stored.duplicate,
                          op->n);
    if (rc == 0) {
        a->stats.orphans += stored.parked > 0; /* usual after a loss, and in lower tiers */
        a->tells_again |= again && !a->overlaps && op->n > 1 && stored.duplicate == op->n;
        if (!again && !stored.parked && op->n)
            ki_store_run_begin(&a->run, holder, op->blocks[op->n - 1].hash);
        return 0;
    }
    a->last.full |= rc == -ENOSPC;
    a->stats.rejected++;
    if (kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", "the index refused blocks",
                    "worker=%" PRIu64 " rank=%" PRIu32 " blocks=%zu error=\"%s\"", holder.worker,
                    holder.rank, op->n, strerror(-rc));
    return rc == -EINVAL ? 0 : rc;
}

/* -- stores that wait -------------------------------------------------------------------------- */

/* Whether a store below a known block means nothing but new copies, whatever came before it. */
static bool may_wait(const struct ki_applier *a)
{
    return !a->overlaps && !a->has_windows && !a->eagle_drop;
}

/* Event by event, as the index doesn't take them together. Returns a negative errno when one is lost. */
static int store_each(struct ki_applier *a, struct kvi_index *index, const struct ki_store_run *run)
{
    uint64_t parent = run->parent;
    int result = 0;

    for (size_t i = 0, n; i < run->n_events; i++) {
        size_t first = ki_store_run_event(run, i, &n);
        struct kve_op op = {.type = KVE_OP_STORE,
                            .rank = run->holder.rank,
                            .tier = KV_TIER_DEVICE,
                            .has_parent = true,
                            .parent = parent,
                            .blocks = run->blocks + first,
                            .n = n};
        struct kve_batch batch = {.ops = &op, .n_ops = 1};
        int rc = apply_store(a, index, run->holder, &batch, 0);

        result = rc < 0 ? rc : result;
        parent = run->blocks[first + n - 1].hash;
    }
    return result;
}

/* Store what waits, and end the run. Returns a negative errno when something is lost. */
static int flush(struct ki_applier *a, struct kvi_index *index)
{
    struct ki_store_run run = a->run;
    int rc = 0;

    a->run.open = false;
    a->run.n_events = a->run.n_blocks = 0;
    if (!run.n_events)
        return 0;
    if (kvi_add_new(index, run.holder, run.parent, run.blocks, run.n_blocks) < 0)
        rc = store_each(a, index, &run);
    else
        for (size_t i = 0; i < run.n_events; i++)
            ki_event_counts_store(&a->counts, 0, 1, 1);
    a->run.open = false;
    return rc;
}

static void add_counts(struct ki_applier *a)
{
    ki_event_counts_add(&a->counts);
    memset(&a->counts, 0, sizeof(a->counts));
}

enum ki_applied ki_applier_flush(struct ki_applier *a, struct kvi_index *index)
{
    int rc;

    memset(&a->last, 0, sizeof(a->last));
    rc = flush(a, index);
    add_counts(a);
    return rc < 0 ? KI_APPLIED_PART : KI_APPLIED;
}

/* -- windows ----------------------------------------------------------------------------------- */

/* Whether the operation is about a window; *@ret describes it. */
static bool is_window(const struct ki_applier *a, const struct kve_op *op, struct kve_source *ret)
{
    return op->source && kve_reader_source(a->reader, op->source, ret) == 0 &&
           ret->kind == KVE_SOURCE_WINDOW;
}

/* Windows of the batch become known before its blocks do: else these count without them for a moment. */
static int declare_windows(struct ki_applier *a, struct kvi_index *index,
                           const struct kve_batch *batch)
{
    struct kve_source source;
    int rc = 0;

    for (size_t i = 0; i < batch->n_ops && rc >= 0; i++) {
        const struct kve_op *op = &batch->ops[i];
        struct kvi_window window;

        if (!is_window(a, op, &source) || !ki_applier_note_rank(a, op->rank))
            continue;
        rc = flush(a, index);
        if (rc < 0)
            break;
        window = (struct kvi_window){.group = source.group,
                                     .window = source.window,
                                     .need = source.need,
                                     .stride = source.stride,
                                     .state = !source.window && source.need != KVE_NEED_ALL};
        a->has_windows = true;
        rc = kvi_set_window(index, (struct kv_holder){a->instance, op->rank}, &window);
        if (rc >= 0)
            rc = kvi_set_alone(index, (struct kv_holder){a->instance, op->rank},
                               !kve_reader_has_main(a->reader, op->rank));
    }
    return rc < 0 ? rc : 0;
}

/* The number of the operation's window, or -ENOENT. */
static int window_number(struct kvi_index *index, struct kv_holder holder,
                         const struct kve_source *source)
{
    struct kvi_window windows[KVI_MAX_WINDOWS];
    int n = kvi_get_windows(index, holder, windows);

    for (int i = 0; i < n; i++)
        if (windows[i].group == source->group)
            return i;
    return -ENOENT;
}

/* Blocks with their tokens: of a model without a main group they are the only sign of the places. */
static int store_window(const struct ki_applier *a, struct kvi_index *index,
                        struct kv_holder holder, const struct kve_op *op, uint32_t number,
                        uint32_t source)
{
    uint64_t hashes[64];
    int rc = 0;

    if (!kve_reader_has_main(a->reader, op->rank))
        rc = kvi_window_place(index, holder, op->tier, number, op->has_parent ? &op->parent : NULL,
                              op->blocks, op->n);
    for (size_t i = 0; i < op->n && (!rc || rc == -EINVAL);) {
        size_t n = 0;

        while (n < KV_COUNT(hashes) && i < op->n)
            hashes[n++] = op->blocks[i++].hash;
        rc = kvi_window_add(index, holder, op->tier, number, source, source || !a->overlaps, hashes,
                            n);
    }
    return rc == -EINVAL ? 0 : rc;
}

static int apply_window(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                        const struct kve_source *source)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    uint32_t copies_of = source->owner[0] ? op->source : 0;
    int number = window_number(index, holder, source);

    if (number < 0)
        return number;
    a->stats.window_blocks += op->n;
    switch (op->type) {
    case KVE_OP_STORE:
        return store_window(a, index, holder, op, (uint32_t)number, copies_of);
    case KVE_OP_STORE_KNOWN:
        return kvi_window_add(index, holder, op->tier, (uint32_t)number, copies_of,
                              copies_of || !a->overlaps, op->hashes, op->n);
    case KVE_OP_REMOVE:
        return KV_MIN((int)kvi_window_take(index, holder, op->tier, (uint32_t)number, copies_of,
                                           op->hashes, op->remaining, op->n),
                      0);
    default:
        return 0;
    }
}

/* An owner's clear empties its copies of windows, too. */
static int clear_op(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op)
{
    struct kve_source owner, other;
    int rc = kvi_clear_tiers(index, holder, op->tiers, op->source);

    if (!op->source || kve_reader_source(a->reader, op->source, &owner) < 0)
        return rc;
    for (uint32_t i = 1; !rc && kve_reader_source(a->reader, i, &other) == 0; i++)
        if (other.kind == KVE_SOURCE_WINDOW && strcmp(other.owner, owner.owner) == 0)
            rc = kvi_clear_tiers(index, holder, op->tiers, i);
    return rc;
}

/* -- batches ----------------------------------------------------------------------------------- */

static int apply_op(struct ki_applier *a, struct kvi_index *index, const struct kve_batch *batch,
                    size_t at)
{
    const struct kve_op *op = &batch->ops[at];
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    long rc = 0;

    switch (op->type) {
    case KVE_OP_STORE:
        rc = apply_store(a, index, holder, batch, at);
        break;
    case KVE_OP_STORE_KNOWN:
        rc = a->overlaps && !op->source
                 ? kvi_store_known(index, holder, op->tier, op->hashes, op->n)
                 : kvi_add_known(index, holder, op->tier, op->source, op->hashes, op->n);
        ki_event_counts_named(&a->counts, KI_EVENT_STORED, rc, op->n);
        break;
    case KVE_OP_REMOVE:
        rc = kvi_take(index, holder, op->tier, op->source, op->hashes, op->remaining, op->n);
        if (rc >= 0 && op->tier == KV_TIER_DEVICE && op->source == 0)
            a->last.unknown += op->n - (size_t)rc;
        ki_event_counts_named(&a->counts, KI_EVENT_REMOVED, rc, op->n);
        break;
    case KVE_OP_CLEAR:
        rc = clear_op(a, index, holder, op);
        ki_event_counts_clear(&a->counts);
        break;
    }
    return rc < 0 ? (int)rc : 0;
}

/* Whether the rank has nothing at all, after a clear. */
static bool is_empty(const struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    struct kvi_holder_info info;

    return kvi_get_holder(index, (struct kv_holder){a->instance, rank}, &info) == -ENOENT ||
           info.blocks + info.parked == 0;
}

enum ki_applied ki_applier_put(struct ki_applier *a, struct kvi_index *index, const void *payload,
                               size_t len)
{
    enum ki_applied result = KI_APPLIED;
    struct kve_source source;
    struct kve_batch batch;

    memset(&a->last, 0, sizeof(a->last));
    if (kve_reader_decode(a->reader, payload, len, &batch) < 0) {
        a->stats.malformed++;
        return KI_APPLIED_PART;
    }
    if (declare_windows(a, index, &batch) < 0)
        result = KI_APPLIED_PART;
    for (size_t i = 0; i < batch.n_ops; i++) {
        const struct kve_op *op = &batch.ops[i];

        if (!ki_applier_note_rank(a, op->rank)) {
            a->stats.rejected++;
            result = KI_APPLIED_PART;
            continue;
        }
        if (op->type == KVE_OP_STORE)
            a->forms |= KI_FORM(op->lookahead, false) | KI_FORM(op->lookahead, op->placed);
        if (may_wait(a) &&
            ki_store_run_append(&a->run, (struct kv_holder){a->instance, op->rank}, op))
            continue;
        if (flush(a, index) < 0)
            result = KI_APPLIED_PART;
        /* Each time: the holder, or the index, may be a new one. */
        if (a->eagle_drop && kvi_set_drops(index, (struct kv_holder){a->instance, op->rank}) < 0)
            result = KI_APPLIED_PART;
        if (is_window(a, op, &source)) {
            if (apply_window(a, index, op, &source) < 0)
                result = KI_APPLIED_PART;
            continue;
        }
        if (apply_op(a, index, &batch, i) < 0)
            result = KI_APPLIED_PART;
        else if (op->type == KVE_OP_CLEAR && a->n_ranks == 1 && is_empty(a, index, op->rank))
            result = KI_APPLIED_CLEARED;
    }
    if (batch.skipped[KVE_SKIP_TOO_LARGE]) /* they may have been anything */
        result = KI_APPLIED_PART;
    add_counts(a);
    a->stats.batches++;
    a->stats.events += batch.n_events;
    a->stats.blocks += batch.n_blocks;
    a->stats.bytes += len;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        a->stats.skipped[i] += batch.skipped[i];
    return result;
}

enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len)
{
    enum ki_applied result = ki_applier_put(a, index, payload, len);

    if (a->run.n_events && flush(a, index) < 0)
        result = KI_APPLIED_PART;
    a->run.open = false;
    add_counts(a);
    return result;
}

void ki_applier_purge(struct ki_applier *a, struct kvi_index *index, bool restarted)
{
    (void)ki_applier_flush(a, index); /* counted, if nothing else */
    a->tells_again = a->overlaps = false;
    a->has_windows &= !restarted;
    for (uint32_t i = 0; i < a->n_ranks; i++) {
        struct kv_holder holder = {.worker = a->instance, .rank = a->ranks[i]};

        if (restarted)
            (void)kvi_remove_holder(index, holder);
        else
            (void)kvi_clear(index, holder);
    }
}
