// SPDX-License-Identifier: Apache-2.0
#include "indexer/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "base/xxh.h"
#include "event/reader.h"
#include "indexer/lookup.h"

void ki_applier_fini(struct ki_applier *a)
{
    kve_reader_destroy(a->reader);
    ki_store_run_fini(&a->run);
    ki_reports_fini(&a->reports);
    ki_unsure_fini(&a->unsure);
    ki_small_clear(&a->small);
    ki_doubts_clear(&a->doubts);
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

void ki_applier_set_habits(struct ki_applier *a, const struct ki_habits *habits)
{
    a->habits = *habits;
    if (!~habits->eagle_groups)
        a->habits.eagle_groups = 0; /* all that a registration can name: all there are */
    a->reports.mode = habits->report_mode;
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

    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        left_out += harmless[i] ? 0 : a->stats.skipped[i];
    return a->overlaps || left_out || a->left_out ? 0 : a->last.unknown;
}

uint64_t ki_applier_held(const struct ki_applier *a, struct kvi_index *index)
{
    uint64_t held = a->run.n_blocks;
    struct kvi_holder_info info;

    for (uint32_t i = 0; i < a->n_ranks; i++)
        if (kvi_get_holder(index, (struct kv_holder){a->instance, a->ranks[i]}, &info) == 0)
            held += info.blocks + info.parked;
    return held;
}

/* Judge the meaning of an event before it is applied: see reports.h. */
static enum ki_verdict verdict_of(struct ki_applier *a, struct kvi_index *index,
                                  const struct kve_batch *batch, size_t at)
{
    const struct kve_op *op = &batch->ops[at];

    if (a->overlaps || op->tier != KV_TIER_DEVICE ||
        (op->type != KVE_OP_STORE && op->type != KVE_OP_STORE_KNOWN))
        return KI_VERDICT_COPIES;
    if (op->type == KVE_OP_STORE && op->has_parent)
        return KI_VERDICT_COPIES;
    return ki_reports_judge(&a->reports, index, (struct kv_holder){a->instance, op->rank},
                            a->reader, &a->unsure, batch, at, a->habits.eagle_drop);
}

/* Store blocks again that were in doubt and that an event of new copies proves to be held. */
static int put_back(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op)
{
    if (!a->unsure.n_open || op->tier != KV_TIER_DEVICE || op->source || !op->has_parent)
        return 0;
    return ki_unsure_restore(&a->unsure, index, holder, op->parent);
}

static void note_copies(struct ki_applier *a, const struct kve_op *op,
                        const struct kvi_stored *stored)
{
    bool at_root = !op->has_parent && op->n;

    if (op->tier != KV_TIER_DEVICE || op->source)
        return;
    /*
     * A request that finds its first block recomputes that block only when it has no further one.
     */
    if (a->unsure.n)
        ki_unsure_stored(&a->unsure, op->rank, KI_UNSURE_MAIN, &op->blocks[0].hash,
                         sizeof(op->blocks[0]), op->n,
                         at_root && op->n > 1 && !a->has_windows && !a->habits.eagle_drop);
    a->reports.suspects |= at_root && stored->duplicate == op->n;
}

static int apply_store(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_op *op, enum ki_verdict verdict)
{
    static struct kv_log_rate rate;
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    struct kvi_stored stored = {0};
    int rc = put_back(a, index, holder, op);

    /*
     * Sources other than the engine's own cache have one copy of a block, however often they
     * announce it.
     */
    if (!rc)
        rc = (a->overlaps && !op->source) || verdict == KI_VERDICT_EITHER
                 ? kvi_store(index, holder, op->tier, parent, op->blocks, op->n, &stored)
                 : kvi_add(index, holder, op->tier, op->source, parent, op->blocks, op->n, &stored);
    ki_event_counts_store(&a->counts, stored.parked ? -ENOENT : rc, op->n - stored.duplicate,
                          op->n);
    if (rc == 0) {
        a->stats.orphans += stored.parked > 0; /* common after a loss, and in lower tiers */
        if (verdict == KI_VERDICT_EITHER)
            ki_unsure_note(&a->unsure, op);
        else if (!a->overlaps)
            note_copies(a, op, &stored);
        if (verdict == KI_VERDICT_COPIES && !a->overlaps && !stored.parked && op->n)
            ki_store_run_begin(&a->run, holder, op->blocks[op->n - 1].hash);
        return stored.lagging ? -ENOMEM : 0;
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

/* Return true when a store below a known block can only mean new copies, whatever preceded it. */
static bool may_wait(const struct ki_applier *a)
{
    return !a->overlaps && !a->has_windows && !a->habits.eagle_drop &&
           !ki_reports_are_on(&a->reports);
}

/*
 * Store the waiting events one by one, when the index refuses them together. Returns a negative
 * errno when one is lost.
 */
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
        int rc = apply_store(a, index, run->holder, &op, KI_VERDICT_COPIES);

        result = rc < 0 ? rc : result;
        parent = run->blocks[first + n - 1].hash;
    }
    return result;
}

/* Store the waiting events and end the run. Returns a negative errno when one is lost. */
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

void ki_applier_note_losses(struct ki_applier *a, struct kvi_index *index)
{
    struct kvi_stats stats = KVI_STATS_INIT;
    struct kvi_holder_info info;
    uint64_t lost;

    (void)kvi_get_stats(index, &stats);
    lost = stats.parked_forgotten + stats.copies_uncounted;
    if (lost == a->losses_seen)
        return;
    a->losses_seen = lost;
    a->left_out = 0;
    for (uint32_t i = 0; i < a->n_ranks; i++)
        if (kvi_get_holder(index, (struct kv_holder){a->instance, a->ranks[i]}, &info) == 0)
            a->left_out += info.lost;
}

enum ki_applied ki_applier_flush(struct ki_applier *a, struct kvi_index *index)
{
    int rc;

    memset(&a->last, 0, sizeof(a->last));
    rc = flush(a, index);
    ki_event_counts_add(&a->counts);
    ki_applier_note_losses(a, index);
    return rc < 0 ? KI_APPLIED_PART : KI_APPLIED;
}

/* -- windows ----------------------------------------------------------------------------------- */

/* Whether the engine gives up the last matched block of a group; @group -1: unknown. */
static bool gives_up(const struct ki_applier *a, int64_t group)
{
    uint64_t groups = a->habits.eagle_groups;

    return a->habits.eagle_drop && (!groups || group < 0 || (group < 64 && groups >> group & 1));
}

/*
 * Tell the index which groups give up the last matched block. Each time: the holder, or the index,
 * may be a new one.
 */
static int declare_drops(const struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    struct kv_holder holder = {a->instance, rank};
    int64_t main = kve_sources_main_group(&a->reader->sources, rank);
    uint64_t groups = a->habits.eagle_groups;

    if (!a->habits.eagle_drop)
        return 0;
    return kvi_set_keeps(index, holder, !gives_up(a, main), groups ? ~groups : 0);
}

/* The windows of a holder. */
struct windows {
    struct kvi_window items[KVI_MAX_WINDOWS];
    int n;
};

static void get_windows(struct kvi_index *index, struct kv_holder holder, struct windows *ret)
{
    ret->n = kvi_get_windows(index, holder, ret->items);
}

static uint32_t parts_of(const struct kvi_window *window)
{
    return KV_MAX(window->parts, 1u);
}

/* Whether a window gives up the last matched block: with its group, or another one like it. */
static bool drops_in(const struct ki_applier *a, const struct windows *windows,
                     const struct kvi_window *window)
{
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->window == window->window && w->need == window->need && w->stride == window->stride &&
            w->state == window->state && parts_of(w) == parts_of(window) && gives_up(a, w->group))
            return true;
    }
    return false;
}

/* Whether full attention does: the main group, or another one that needs every block. */
static bool full_drops(const struct ki_applier *a, const struct windows *windows, uint32_t rank)
{
    bool drops = gives_up(a, kve_sources_main_group(&a->reader->sources, rank));

    for (int i = 0; i < windows->n && !drops; i++)
        drops = windows->items[i].need == KVI_NEED_ALL && drops_in(a, windows, &windows->items[i]);
    return drops;
}

/*
 * Whether windows alone give up a block: they may have the one behind the match where full attention
 * hasn't, and nothing tells which prompt that serves.
 */
static bool drops_beyond_main(const struct ki_applier *a, const struct windows *windows,
                              uint32_t rank)
{
    if (!a->habits.eagle_drop || !a->habits.eagle_groups || full_drops(a, windows, rank))
        return false;
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->need != KVI_NEED_ALL && !w->state && drops_in(a, windows, w))
            return true;
    }
    return false;
}

/* Whether the operation is about a window; *@ret describes it. */
static bool is_window(const struct ki_applier *a, const struct kve_op *op, struct kve_source *ret)
{
    return op->source && kve_reader_source(a->reader, op->source, ret) == 0 &&
           ret->kind == KVE_SOURCE_WINDOW;
}

/*
 * Give the rank the source's windows. A group for which the index has no room is left out: the view
 * is partial.
 */
static int declare_source(struct ki_applier *a, struct kvi_index *index, uint32_t rank,
                          const struct kve_source *source)
{
    struct kv_holder holder = {a->instance, rank};
    struct kvi_window window = {.group = source->group,
                                .window = source->window,
                                .need = source->need,
                                .stride = source->stride,
                                .state = !source->window && source->need != KVE_NEED_ALL,
                                .parts = source->parts};
    struct windows all;
    int rc = 0;

    a->has_windows = true;
    for (; window.part < source->parts && rc >= 0; window.part++)
        rc = kvi_set_window(index, holder, &window);
    if (rc == -ENOSPC && kvi_get_windows(index, holder, all.items) > 0) {
        ki_doubts_add(&a->doubts, rank, 0, KI_WHY_CROWDED);
        rc = 0;
    }
    return rc < 0 ? rc : kvi_set_alone(index, holder, !kve_reader_has_main(a->reader, rank));
}

/* Whether an operation shows the size of a group's blocks: offloaded ones may have another. */
static bool shows_size(const struct kve_op *op, const struct kve_source *source)
{
    return op->tier == KV_TIER_DEVICE && !source->owner[0] &&
           (op->type == KVE_OP_STORE || op->type == KVE_OP_STORE_KNOWN);
}

/*
 * Declare the batch's windows before their blocks are stored. Otherwise matches would ignore the
 * windows for a moment. Returns 0; -EEXIST when a group has blocks of another size than before: it
 * is another engine's, and the blocks of the one before are forgotten; or another error.
 */
static int declare_windows(struct ki_applier *a, struct kvi_index *index,
                           const struct kve_batch *batch)
{
    struct kve_source source;
    bool reshaped = false;
    int rc = 0;

    for (size_t i = 0; i < batch->n_ops && !rc; i++) {
        const struct kve_op *op = &batch->ops[i];

        if (!is_window(a, op, &source) || !ki_applier_note_rank(a, op->rank))
            continue;
        rc = flush(a, index);
        if (!rc && shows_size(op, &source))
            rc = declare_source(a, index, op->rank, &source);
        else if (!rc && a->has_windows)
            rc = kvi_set_alone(index, (struct kv_holder){a->instance, op->rank},
                               !kve_reader_has_main(a->reader, op->rank));
        if (rc == -EEXIST && !reshaped) {
            reshaped = true;
            if (a->forgets)
                a->forgets(a->forgets_arg);
            ki_applier_purge(a, index, true);
            i = SIZE_MAX; /* the windows declared so far are gone, too */
            rc = 0;
        }
    }
    return reshaped ? -EEXIST : rc;
}

/*
 * Find the source's group among the windows. Returns 0; -ENOENT when it isn't there, or has blocks
 * of another size, or of more parts than @ret can name.
 */
static int find_group(const struct ki_applier *a, const struct windows *windows,
                      const struct kve_source *source, struct ki_small_group *ret)
{
    uint32_t found = 0;

    *ret = (struct ki_small_group){
        .group = source->group, .need = source->need, .parts = source->parts};
    if (source->parts > KV_COUNT(ret->numbers))
        return -ENOENT;
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->group != source->group || parts_of(w) != source->parts ||
            w->stride != source->stride)
            continue;
        ret->numbers[w->part] = (uint32_t)i;
        ret->drops |= drops_in(a, windows, w);
        found++;
    }
    return found == source->parts ? 0 : -ENOENT;
}

/* The same, whatever size the source's blocks have. */
static int find_size(const struct ki_applier *a, const struct windows *windows,
                     const struct kve_source *source, struct ki_small_group *ret)
{
    struct kve_source other = *source;

    for (int i = 0; i < windows->n; i++) {
        if (windows->items[i].group != source->group)
            continue;
        other.need = windows->items[i].need;
        other.stride = windows->items[i].stride;
        other.parts = parts_of(&windows->items[i]);
        return find_group(a, windows, &other, ret);
    }
    return -ENOENT;
}

/*
 * Store a window's blocks with their tokens. Without a main group, these events alone tell the
 * places.
 */
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
                         sizeof(op->blocks[0]), op->n, false);
    else
        ki_unsure_stored(&a->unsure, op->rank, 1 + number, op->hashes, sizeof(op->hashes[0]), op->n,
                         false);
}

static int store_in_window(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                           const struct kve_op *op, uint32_t number, uint32_t copies_of)
{
    if (op->tier == KV_TIER_DEVICE && !copies_of)
        note_window_copies(a, op, number);
    a->reports.suspects |= op->type == KVE_OP_STORE && !op->has_parent;
    if (op->type == KVE_OP_STORE)
        return store_window(a, index, holder, op, number, copies_of);
    return kvi_window_add(index, holder, op->tier, number, copies_of, copies_of || !a->overlaps,
                          op->hashes, op->n);
}

/* With block drop the main group's blocks keep what is known of their parts. */
static int forget_small(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                        const struct kve_op *op)
{
    struct windows windows;
    int rc = 0;

    if (!a->small.n || !a->habits.eagle_drop)
        return 0;
    get_windows(index, holder, &windows);
    for (int i = 0; i < windows.n && !rc; i++) {
        const struct kvi_window *w = &windows.items[i];
        const struct kve_source source = {
            .group = w->group, .need = w->need, .stride = w->stride, .parts = parts_of(w)};
        struct ki_small_group group;

        if (!w->part && source.parts > 1 && find_group(a, &windows, &source, &group) == 0)
            rc = ki_small_forget(&a->small, index, holder, &group, op->hashes, op->n);
    }
    return rc;
}

/* The owner of a source in doubts. */
static uint64_t owner_id(const struct kve_source *source)
{
    return source->owner[0] ? kv_xxh64(source->owner, strlen(source->owner), 0) | 1 : 0;
}

/* Note that nothing tells what the group of @source has in the operation's tier. */
static void lose_tier(struct ki_applier *a, const struct kve_op *op,
                      const struct kve_source *source)
{
    if (op->type != KVE_OP_REMOVE)
        ki_doubts_add(&a->doubts, op->rank, owner_id(source), 1u << op->tier);
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
    if (a->overlaps || verdict == KI_VERDICT_EITHER) {
        ki_small_lose(&a->small, holder.rank);
        return 0;
    }
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

static int apply_window(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                        const struct kve_source *source, enum ki_verdict verdict)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    uint32_t copies_of = source->owner[0] ? op->source : 0, number;
    struct ki_small_group group;
    struct windows windows;
    long rc;

    get_windows(index, holder, &windows);
    rc = find_group(a, &windows, source, &group);
    if (rc < 0 && op->type == KVE_OP_REMOVE)
        rc = find_size(a, &windows, source, &group);
    if (rc < 0 && !shows_size(op, source)) {
        lose_tier(a, op, source);
        return 0;
    }
    if (rc < 0)
        return ki_doubts_has(&a->doubts, KI_WHY_CROWDED) ? 0 : (int)rc;
    number = group.numbers[0];
    a->stats.window_blocks += op->n;
    if (drops_beyond_main(a, &windows, op->rank))
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
                 : kvi_window_take(index, holder, op->tier, number, copies_of, op->hashes,
                                   op->remaining, op->n);
        return rc < 0 ? (int)rc : 0;
    default:
        return 0;
    }
}

static void clear_unsure(struct ki_applier *a, uint32_t rank)
{
    ki_unsure_clear_rank(&a->unsure, rank);
    ki_small_clear_rank(&a->small, rank);
}

/* End the doubts about tiers that a clear empties. */
static void clear_doubts(struct ki_applier *a, const struct kve_op *op, uint64_t owner)
{
    ki_doubts_end(&a->doubts, op->rank, owner, op->tiers & KI_WHY_TIERS);
    if (owner || op->tiers & 1u << KV_TIER_DEVICE)
        return;
    if (op->unsure)
        ki_doubts_add(&a->doubts, op->rank, 0, KI_WHY_CLEAR);
    else
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_CLEAR);
}

/* Apply a clear. Another owner's clear empties its copies of windows, too. */
static int clear_op(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                    const struct kve_op *op)
{
    struct kve_source owner = {.owner = ""}, other;
    int rc = kvi_clear_tiers(index, holder, op->tiers, op->source);

    if (op->source && kve_reader_source(a->reader, op->source, &owner) < 0)
        return rc;
    clear_doubts(a, op, owner_id(&owner));
    if (!op->source)
        return rc;
    for (uint32_t i = 1; !rc && kve_reader_source(a->reader, i, &other) == 0; i++)
        if (other.kind == KVE_SOURCE_WINDOW && strcmp(other.owner, owner.owner) == 0)
            rc = kvi_clear_tiers(index, holder, op->tiers, i);
    return rc;
}

/* -- batches ----------------------------------------------------------------------------------- */

static int apply_op(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                    enum ki_verdict verdict)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    long rc = 0;

    switch (op->type) {
    case KVE_OP_STORE:
        rc = apply_store(a, index, holder, op, verdict);
        break;
    case KVE_OP_STORE_KNOWN:
        rc = a->overlaps && !op->source
                 ? kvi_store_known(index, holder, op->tier, op->hashes, op->n)
                 : kvi_add_known(index, holder, op->tier, op->source, op->hashes, op->n);
        ki_event_counts_named(&a->counts, KI_EVENT_STORED, rc, op->n);
        break;
    case KVE_OP_REMOVE:
        rc = op->tier == KV_TIER_DEVICE && op->source == 0
                 ? ki_unsure_take(&a->unsure, index, holder, op)
                 : kvi_take(index, holder, op->tier, op->source, op->hashes, op->remaining, op->n);
        if (rc >= 0 && op->tier == KV_TIER_DEVICE && op->source == 0) {
            a->last.unknown += op->n - (size_t)rc;
            a->last.removed += (size_t)rc;
        }
        ki_event_counts_named(&a->counts, KI_EVENT_REMOVED, rc, op->n);
        if (rc >= 0 && op->tier == KV_TIER_DEVICE && op->source == 0)
            rc = forget_small(a, index, holder, op);
        break;
    case KVE_OP_CLEAR:
        rc = clear_op(a, index, holder, op);
        if (op->source == 0 && op->tiers & 1u << KV_TIER_DEVICE)
            clear_unsure(a, op->rank);
        a->losses_seen = UINT64_MAX;
        ki_event_counts_clear(&a->counts);
        break;
    }
    return rc < 0 ? (int)rc : 0;
}

/* Return true when the rank has no block at all after a clear. */
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
    uint32_t alone_rank = 0;
    bool alone = false;

    memset(&a->last, 0, sizeof(a->last));
    if (kve_reader_decode(a->reader, payload, len, &batch) < 0) {
        a->stats.malformed++;
        return KI_APPLIED_PART;
    }
    a->reports.judged_to = 0;
    a->small.work = 0;
    if (declare_windows(a, index, &batch) < 0)
        result = KI_APPLIED_PART;
    for (size_t i = 0; i < batch.n_ops; i++) {
        const struct kve_op *op = &batch.ops[i];
        enum ki_verdict verdict;

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
        if (declare_drops(a, index, op->rank) < 0)
            result = KI_APPLIED_PART;
        verdict = verdict_of(a, index, &batch, i);
        if (verdict == KI_VERDICT_REPORT) {
            ki_event_counts_store(&a->counts, 0, 0, op->n);
            continue;
        }
        if (is_window(a, op, &source)) {
            if (!kve_reader_has_main(a->reader, op->rank)) {
                alone = true;
                alone_rank = op->rank;
            }
            if (apply_window(a, index, op, &source, verdict) < 0)
                result = KI_APPLIED_PART;
            continue;
        }
        if (apply_op(a, index, op, verdict) < 0)
            result = KI_APPLIED_PART;
        else if (op->type == KVE_OP_CLEAR && is_empty(a, index, op->rank)) {
            /* Another store of the rank's groups says whether these hold again. */
            ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_CROWDED | KI_WHY_DROPS);
            if (a->n_ranks == 1)
                result = KI_APPLIED_CLEARED;
        }
    }
    if (alone && a->unsure.n_open)
        ki_doubts_add(&a->unsure.lost, alone_rank, 0, 1);
    if (a->reports.misjudged) { /* until the stream is read from its beginning again */
        a->reports.misjudged = false;
        result = KI_APPLIED_PART;
    }
    if (batch.skipped[KVE_SKIP_TOO_LARGE]) /* skipped events of unknown type or content */
        result = KI_APPLIED_PART;
    ki_event_counts_add(&a->counts);
    a->stats.batches++;
    a->stats.events += batch.n_events;
    a->stats.blocks += batch.n_blocks;
    a->stats.bytes += len;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        a->stats.skipped[i] += batch.skipped[i];
    ki_applier_note_losses(a, index);
    return result;
}

enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len)
{
    enum ki_applied result = ki_applier_put(a, index, payload, len);

    if (a->run.n_events && flush(a, index) < 0)
        result = KI_APPLIED_PART;
    a->run.open = false;
    ki_event_counts_add(&a->counts);
    ki_applier_note_losses(a, index);
    return result;
}

void ki_applier_purge(struct ki_applier *a, struct kvi_index *index, bool restarted)
{
    (void)ki_applier_flush(a, index); /* the loss is counted */
    a->overlaps = false;
    a->has_windows &= !restarted;
    ki_unsure_clear(&a->unsure);
    ki_small_clear(&a->small);
    ki_doubts_clear(&a->doubts);
    a->left_out = 0;
    a->losses_seen = UINT64_MAX;
    a->reports.suspects = a->reports.misjudged = false;
    for (uint32_t i = 0; i < a->n_ranks; i++) {
        struct kv_holder holder = {.worker = a->instance, .rank = a->ranks[i]};

        if (restarted)
            (void)kvi_remove_holder(index, holder);
        else
            (void)kvi_clear(index, holder);
    }
}
