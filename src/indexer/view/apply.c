// SPDX-License-Identifier: Apache-2.0
/*
 * One batch's way into the index:
 *
 *     payload ─► reader (event/reader) ─► operations ─► their windows are declared
 *       ┌─────────────────────────────────────┘
 *       ├─ store that may wait ─► run (store_run.h): enters with those that continue it
 *       └─ all else ─► the run enters first ─► main group: apply_store.c, apply_op below
 *                                              windows: apply_window.c
 *                                              clears: apply_clear.c
 *     at the end: doubt what was left out; APPLIED, PART (something is lost) or CLEARED
 *
 * Invariants: operations take effect in the order of the batch. What the index should have and
 * doesn't get leaves a doubt, whose reason apply_reasons.c names, or the result PART.
 */
#include "indexer/view/apply_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/log.h"
#include "event/reader/reader.h"
#include "indexer/model/lookup.h"

void ki_applier_fini(struct ki_applier *a)
{
    kve_reader_destroy(a->reader);
    ki_store_run_fini(&a->run);
    ki_reports_fini(&a->reports);
    ki_ranges_clear(&a->ranges);
    ki_small_clear(&a->small);
    ki_main_names_fini(&a->names);
    ki_doubts_clear(&a->doubts);
    ki_doubts_clear(&a->cleared);
    ki_doubts_clear(&a->incomplete);
    free(a->ranks);
    free(a->left_of);
    free(a->moved_of);
    memset(a, 0, sizeof(*a));
}

/* Put a 0 at @at into *@counts, which has one for each rank so far. */
static bool insert_count(const struct ki_applier *a, uint64_t **counts, uint32_t at)
{
    uint64_t *grown = realloc(*counts, (a->n_ranks + 1) * sizeof(*grown));

    if (!grown)
        return false;
    memmove(grown + at + 1, grown + at, (a->n_ranks - at) * sizeof(*grown));
    grown[at] = 0;
    *counts = grown;
    return true;
}

bool ki_applier_note_rank(struct ki_applier *a, uint32_t rank)
{
    uint32_t at = 0, *grown;

    a->unnamed &= rank != a->rank;
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
    if (!insert_count(a, &a->left_of, at) || !insert_count(a, &a->moved_of, at))
        return false;
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
    a->rank = rank;
    a->touched = KI_RANKS_MANY; /* the index may have blocks of the ranks */
    if (!ki_applier_note_rank(a, rank))
        return -ENOMEM;
    a->unnamed = true;
    rc = kve_reader_create(&opts, &a->reader);
    if (rc < 0)
        ki_applier_fini(a);
    return rc;
}

void ki_applier_set_habits(struct ki_applier *a, const struct ki_habits *habits)
{
    a->habits = *habits;
    if (!~habits->eagle_groups)
        a->habits.eagle_groups = 0; /* all that a registration can name: all there are */
    a->reports.mode = habits->report_mode;
    a->reader->sources.told = habits->groups;
}

uint64_t ki_applier_unexplained(const struct ki_applier *a)
{
    /*
     * Skipped events whose loss leaves the index right: their removals are skipped, too, or there
     * are none.
     */
    static const bool harmless[KVE_N_SKIPS] = {
        [KVE_SKIP_GROUP] = true, [KVE_SKIP_MEDIUM] = true, [KVE_SKIP_REMOTE] = true};
    uint64_t left_out = a->stats.rejected;

    if (!a->last.unknown)
        return 0;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        left_out += harmless[i] ? 0 : a->stats.skipped[i];
    return left_out || a->left_out ? 0 : a->last.unknown;
}

/* Judge the meaning of an event before it is applied: see reports.h. */
static enum ki_verdict verdict_of(struct ki_applier *a, struct kvi_index *index,
                                  const struct kve_batch *batch, size_t at)
{
    const struct kve_op *op = &batch->ops[at];

    if (op->single || op->tier != KV_TIER_DEVICE ||
        (op->type != KVE_OP_STORE && op->type != KVE_OP_STORE_KNOWN))
        return KI_VERDICT_COPIES;
    if (op->type == KVE_OP_STORE && op->has_parent)
        return KI_VERDICT_COPIES;
    return ki_reports_judge(&a->reports, index, (struct kv_holder){a->instance, op->rank},
                            a->reader, &a->ranges, batch, at, a->habits.eagle_drop);
}

/* Return true when the store tells something about blocks with ranges. */
static bool names_range(const struct ki_applier *a, const struct kve_op *op)
{
    const struct kvi_cache cache =
        kvi_cache_of((struct kv_holder){a->instance, op->rank}, KV_TIER_DEVICE, 0);

    for (size_t i = 0; a->ranges.n && i < op->n; i++)
        if (ki_ranges_find(&a->ranges, &cache, op->blocks[i].hash))
            return true;
    return false;
}

/*
 * Return true when a store below a known block can only mean new copies, whatever preceded it; or at least
 * one copy (single), which is the same where the index hasn't the block.
 */
static bool may_wait(const struct ki_applier *a, const struct kve_op *op)
{
    if (op->single && (op->incomplete || a->incomplete.n))
        return false;
    return !a->has_windows && !a->habits.eagle_drop && !a->ranges.n_open &&
           !ki_reports_are_on(&a->reports) && !a->run.off && !names_range(a, op);
}

/*
 * Return true when a store from the root certainly means new copies, also when the stores that wait
 * are in the index. Otherwise it is judged again behind them: nothing has changed.
 */
static bool is_new_root(struct ki_applier *a, struct kvi_index *index,
                        const struct kve_batch *batch, size_t at)
{
    struct ki_reports before = a->reports;

    if (ki_store_run_has_root(&a->run, &batch->ops[at].blocks[0]))
        return false;
    if (verdict_of(a, index, batch, at) == KI_VERDICT_COPIES && !a->reports.found)
        return true;
    before.matches = a->reports.matches; /* their memory may have grown */
    before.locals = a->reports.locals;
    a->reports = before;
    return false;
}

/* Let operation @at wait, if it may. */
static bool wait_for_more(struct ki_applier *a, struct kvi_index *index,
                          const struct kve_batch *batch, size_t at)
{
    const struct kve_op *op = &batch->ops[at];
    struct kv_holder holder = {a->instance, op->rank};

    if (op->type != KVE_OP_STORE || !may_wait(a, op))
        return false;
    if (ki_store_run_append(&a->run, holder, op))
        return true;
    if (op->tier != KV_TIER_DEVICE || op->source || !op->n || a->ranges.n)
        return false;
    if (!op->has_parent && !op->single && !is_new_root(a, index, batch, at))
        return false;
    return ki_store_run_start(&a->run, holder, op);
}

/* Return true when the engine is a vLLM: it announces the removal of each copy. */
static bool removes_each(const struct ki_applier *a)
{
    return a->habits.report_mode != KI_REPORTS_UNKNOWN || a->reader->sources.groups.n;
}

/*
 * Doubt a rank whose blocks' names moved: the names aren't those of one place each, so the index has
 * forgotten the other places of a block.
 */
static void note_moved(struct ki_applier *a, uint32_t at, const struct kvi_holder_info *info)
{
    bool moved = info->moved > a->moved_of[at];
    uint32_t tiers = 1u << KV_TIER_DEVICE;

    a->moved_of[at] = info->moved;
    for (int t = 0; t < KV_N_TIERS; t++)
        tiers |= info->tier_blocks[t] ? 1u << t : 0;
    if (moved)
        ki_doubts_add(&a->doubts, a->ranks[at], 0, tiers);
}

void ki_applier_note_losses(struct ki_applier *a, struct kvi_index *index)
{
    struct kvi_stats stats = KVI_STATS_INIT;
    bool all = a->touched == KI_RANKS_MANY, none = a->touched == KI_RANKS_NONE;
    uint64_t lost;

    (void)kvi_get_stats(index, &stats);
    lost = stats.parked_forgotten + stats.copies_uncounted + stats.doubts + stats.moved;
    a->touched = KI_RANKS_NONE;
    if (none || (lost == a->losses_seen && !a->left_out))
        return;
    a->losses_seen = lost;
    for (uint32_t i = 0; i < a->n_ranks; i++) {
        struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

        if (!all && a->ranks[i] != a->touched_rank)
            continue;
        (void)kvi_get_holder(index, (struct kv_holder){a->instance, a->ranks[i]}, &info);
        if (!removes_each(a))
            info.lost += info.doubted;
        a->left_out += info.lost - a->left_of[i];
        a->left_of[i] = info.lost;
        note_moved(a, i, &info);
    }
}

void ki_applier_touch(struct ki_applier *a, uint32_t rank)
{
    if (a->touched == KI_RANKS_ONE && a->touched_rank != rank)
        a->touched = KI_RANKS_MANY;
    if (a->touched == KI_RANKS_NONE)
        a->touched = KI_RANKS_ONE;
    a->touched_rank = rank;
}

enum ki_applied ki_applier_flush(struct ki_applier *a, struct kvi_index *index)
{
    int rc;

    memset(&a->last, 0, sizeof(a->last));
    rc = ki_applier_end_run(a, index);
    ki_event_counts_add(&a->counts);
    ki_applier_note_losses(a, index);
    return rc < 0 ? KI_APPLIED_PART : KI_APPLIED;
}

/* -- batches ----------------------------------------------------------------------------------- */

/* Apply a removal from a main cache, the engine's own or another owner's. */
static long remove_main(struct ki_applier *a, struct kvi_index *index,
                        const struct kvi_cache *cache, const struct kve_op *op)
{
    long rc = ki_applier_take(a, index, cache, op);

    ki_event_counts_named(&a->counts, KI_EVENT_REMOVED, rc, op->n);
    if (!op->source)
        ki_applier_note_complete(a, op);
    if (rc < 0 || !ki_has_ranges(cache))
        return rc;
    a->last.unknown += op->n - (size_t)rc;
    a->last.removed += (size_t)rc;
    return ki_applier_forget_parts(a, index, cache->holder, op);
}

static int apply_op(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                    enum ki_verdict verdict)
{
    struct kvi_cache cache =
        kvi_cache_of((struct kv_holder){a->instance, op->rank}, op->tier, op->source);
    long rc = 0;

    switch (op->type) {
    case KVE_OP_STORE:
    case KVE_OP_STORE_KNOWN:
        rc = ki_applier_store(a, index, &cache, op, verdict);
        break;
    case KVE_OP_REMOVE:
        rc = remove_main(a, index, &cache, op);
        break;
    case KVE_OP_CLEAR:
        rc = ki_applier_clear(a, index, cache.holder, op);
        a->losses_seen = UINT64_MAX;
        a->touched = KI_RANKS_MANY;
        ki_event_counts_clear(&a->counts);
        break;
    }
    return rc < 0 ? (int)rc : 0;
}

/* Return true when the rank has no block at all after a clear. */
static bool is_empty(const struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    return kvi_get_holder(index, (struct kv_holder){a->instance, rank}, &info) == -ENOENT ||
           info.blocks + info.parked == 0;
}

void ki_applier_note_stream_losses(struct ki_applier *a, uint64_t losses)
{
    if (KV_LIKELY(a->losses == losses))
        return;
    a->losses = losses;
    ki_doubts_clear(&a->cleared);
}

/* Return true when a clear leaves none of the engine's tiers out: one that names a medium may. */
static bool clears_all(const struct ki_applier *a, const struct kve_op *op)
{
    uint32_t own = 1u << KV_TIER_DEVICE | a->reader->engine_tiers;

    return (op->tiers & own) == own;
}

/* A batch on its way into the index. */
struct put {
    const struct kve_batch *batch;
    enum ki_applied result;
    bool wrote; /* stores that wait in the run aside */
    bool alone; /* a window came before the groups of its rank */
    uint32_t alone_rank;
};

static void put_window(struct ki_applier *a, struct kvi_index *index, struct put *put, size_t i,
                       const struct kve_source *source, enum ki_verdict verdict)
{
    const struct kve_op *op = &put->batch->ops[i];

    if (!kve_reader_has_main(a->reader, op->rank)) {
        put->alone = true;
        put->alone_rank = op->rank;
    }
    if (ki_applier_apply_window(a, index, op, source, verdict) < 0)
        put->result = KI_APPLIED_PART;
}

/* Note that a rank has nothing: when all ranks were cleared since the last loss, that ends. */
static void note_cleared(struct ki_applier *a, struct put *put, uint32_t rank)
{
    ki_doubts_add(&a->cleared, rank, 0, 1);
    if (a->cleared.n != ki_applier_n_brought(a) || kve_reader_has_lower(a->reader))
        return;
    put->result = KI_APPLIED_CLEARED;
    a->n_cleared = ki_applier_n_brought(a);
    a->purged = false;
}

/* Apply operation @i, behind which no store waits in the run. */
static void put_now(struct ki_applier *a, struct kvi_index *index, struct put *put, size_t i)
{
    const struct kve_op *op = &put->batch->ops[i];
    enum ki_verdict verdict;
    struct kve_source source;

    put->wrote = true;
    if (ki_applier_end_run(a, index) < 0)
        put->result = KI_APPLIED_PART;
    if (ki_applier_declare_drops(a, index, op->rank) < 0)
        put->result = KI_APPLIED_PART;
    verdict = verdict_of(a, index, put->batch, i);
    if (ki_applier_is_window(a, op, &source)) {
        put_window(a, index, put, i, &source, verdict);
    } else if (apply_op(a, index, op, verdict) < 0) {
        put->result = KI_APPLIED_PART;
    } else if (op->type == KVE_OP_CLEAR && !op->unsure && is_empty(a, index, op->rank)) {
        /* Another store of the rank's groups says whether these hold again. */
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_CROWDED | KI_WHY_DROPS);
        if (clears_all(a, op))
            note_cleared(a, put, op->rank);
    }
}

static void put_op(struct ki_applier *a, struct kvi_index *index, struct put *put, size_t i)
{
    const struct kve_op *op = &put->batch->ops[i];

    if (!op->n && op->type == KVE_OP_STORE_KNOWN) { /* of a window, which is declared now */
        a->retains = true;
        return;
    }
    if (!ki_applier_note_rank(a, op->rank)) {
        a->stats.rejected++;
        put->result = KI_APPLIED_PART;
        return;
    }
    ki_applier_touch(a, op->rank);
    if (a->pool_clear.n || op->type == KVE_OP_CLEAR)
        ki_applier_look_for_pool(a, put->batch, i);
    if (op->type == KVE_OP_STORE)
        a->forms |= KI_FORM(op->lookahead, false) | KI_FORM(op->lookahead, op->placed);
    if (!wait_for_more(a, index, put->batch, i))
        put_now(a, index, put, i);
}

/*
 * Behind a batch, doubt ranks of windows alone that have blocks in unknown places: of such an engine
 * a window's event tells the places only where it names each block that its tokens cover.
 */
static void doubt_places(struct ki_applier *a, struct kvi_index *index)
{
    for (uint32_t i = 0; i < a->n_ranks; i++) {
        struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

        if (a->touched == KI_RANKS_ONE && a->ranks[i] != a->touched_rank)
            continue;
        (void)kvi_get_holder(index, (struct kv_holder){a->instance, a->ranks[i]}, &info);
        if (info.placeless)
            ki_doubts_add(&a->doubts, a->ranks[i], 0, KI_WHY_PLACES);
        else
            ki_doubts_end(&a->doubts, a->ranks[i], 0, KI_WHY_PLACES);
    }
}

/* Doubt the tiers of an event that was left out. Of an unknown source: those of every owner. */
static void doubt_event(struct ki_applier *a, const struct kve_lost *lost)
{
    bool any = lost->source == KVE_ANY_SOURCE;
    struct kve_source source;

    if (any)
        ki_doubts_add(&a->doubts, lost->rank, 0, lost->tiers);
    for (uint32_t i = any ? 1 : lost->source; kve_reader_source(a->reader, i, &source) == 0; i++) {
        if (!any || source.owner[0])
            ki_doubts_add(&a->doubts, lost->rank, ki_owner_id(&source), lost->tiers);
        if (!any)
            break;
    }
}

/* Doubt what was left out: behind the batch's clears, which may precede it. */
static void doubt_lost(struct ki_applier *a)
{
    for (uint32_t i = 0; i < a->reader->n_lost; i++)
        doubt_event(a, &a->reader->lost[i]);
    a->doubts.lost |= a->reader->lost_beyond;
    if (a->reader->n_lost)
        a->pool_clear.n = 0; /* a block may have been stored anew */
}

/* The number of a told group; -1: any. */
static int64_t number_of(const struct kve_told_group *group)
{
    return group->group == KVE_ANY_GROUP ? -1 : (int64_t)group->group;
}

/* Say once of each group that its events tell it otherwise than the registration: events count. */
static void warn_of_groups(struct ki_applier *a)
{
    uint32_t news = a->reader->sources.differs & ~a->told_otherwise;
    char digits[KV_INSTANCE_DIGITS];

    for (a->told_otherwise |= news; news; news &= news - 1)
        kv_log_warn("indexer", "events tell a cache group otherwise than the registration's groups",
                    "worker=%s rank=%" PRIu32 " group=%" PRId64,
                    kv_instance_text(a->instance, a->who, digits), a->rank,
                    number_of(&a->habits.groups.items[__builtin_ctz(news)]));
}

static void count_batch(struct ki_applier *a, const struct kve_batch *batch, size_t len)
{
    ki_event_counts_add(&a->counts);
    a->stats.batches++;
    a->stats.events += batch->n_events;
    a->stats.blocks += batch->n_blocks;
    a->stats.bytes += len;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        a->stats.skipped[i] += batch->skipped[i];
}

/* Apply a decoded batch; the reader's notes of what it left out are those of this batch. */
static enum ki_applied put_batch(struct ki_applier *a, struct kvi_index *index,
                                 const struct kve_batch *batch, size_t len, enum ki_applied so_far)
{
    struct put put = {.batch = batch, .result = so_far};

    a->reports.judged_to = 0;
    a->small.work = 0;
    ki_main_names_begin(&a->names, batch);
    if (KV_UNLIKELY(a->reader->sources.differs != a->told_otherwise))
        warn_of_groups(a);
    if (ki_applier_declare_windows(a, index, batch) < 0)
        put.result = KI_APPLIED_PART;
    for (size_t i = 0; i < batch->n_ops; i++)
        put_op(a, index, &put, i);
    ki_main_names_begin(&a->names, NULL);
    doubt_lost(a);
    if (put.alone || ki_doubts_has(&a->doubts, KI_WHY_PLACES))
        doubt_places(a, index);
    if (put.alone && a->ranges.n_absent)
        ki_doubts_add(&a->ranges.lost, put.alone_rank, 0, KI_LOST_MORE);
    if (a->reports.misjudged) { /* until the stream is read from its beginning again */
        a->reports.misjudged = false;
        put.result = KI_APPLIED_PART;
    }
    /* skipped events of unknown type or content; events that never came */
    if (batch->skipped[KVE_SKIP_TOO_LARGE] || a->reader->misses_events)
        put.result = KI_APPLIED_PART;
    count_batch(a, batch, len);
    if (put.wrote) /* else ki_applier_flush does, which follows */
        ki_applier_note_losses(a, index);
    return put.result;
}

enum ki_applied ki_applier_put(struct ki_applier *a, struct kvi_index *index, const void *payload,
                               size_t len)
{
    enum ki_applied result = KI_APPLIED;
    struct kve_batch batch;

    memset(&a->last, 0, sizeof(a->last));
    if (ki_applier_sweep_salts(a, index) < 0)
        result = KI_APPLIED_PART;
    if (kve_reader_decode(a->reader, payload, len, &batch) < 0) {
        a->stats.malformed++;
        a->pool_clear.n = 0;
        return KI_APPLIED_PART;
    }
    return put_batch(a, index, &batch, len, result);
}

enum ki_applied ki_applier_put_ops(struct ki_applier *a, struct kvi_index *index,
                                   const struct kve_batch *batch, uint32_t lost_tiers)
{
    memset(&a->last, 0, sizeof(a->last));
    a->reader->n_lost = a->reader->lost_beyond = 0;
    a->reader->event = (struct kve_lost){a->rank, 0, lost_tiers};
    kve_note_lost(a->reader);
    return put_batch(a, index, batch, 0, KI_APPLIED);
}

enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len)
{
    enum ki_applied result = ki_applier_put(a, index, payload, len);

    if (a->run.n_events && ki_applier_end_run(a, index) < 0)
        result = KI_APPLIED_PART;
    a->run.open = false;
    ki_event_counts_add(&a->counts);
    ki_applier_note_losses(a, index);
    return result;
}
