// SPDX-License-Identifier: Apache-2.0
/*
 * Judge events from the root: new copies, or maybe a report (reports.h). An event is a report only
 * if it passes each of these; the first that it fails makes it new copies:
 *
 *     the row          one event for each group, in order       find_row
 *     is complete      each names all blocks from the root      may_report
 *     is expected      the stream has reports, or shows one     ki_reports_are_on, goes_on
 *     is held          the engine's lookup may find them all    may_be_found
 *
 * Where a group lives below the device, events stand by themselves: what it has there may be more
 * than the engine found, and comes at other times (may_be_held).
 *
 * Invariant: all events of one row have one verdict.
 */
#include "indexer/view/reports.h"

#include "base/core/error.h"
#include "event/reader/reader.h"
#include "indexer/view/ranges.h"

#define LOOK_AHEAD 64 /* operations in which a batch may continue below a report */
#define MAX_GROUPS (KVI_MAX_WINDOWS + 1)

void ki_reports_fini(struct ki_reports *r)
{
    kvi_matches_fini(&r->matches);
    kv_buf_fini(&r->locals);
}

/* -- one event for each group ------------------------------------------------------------------ */

/* Consecutive events of several groups about the same blocks. */
struct row {
    const struct kve_batch *batch;
    size_t from, to;
    const struct kve_op *chain; /* operation that tells the places of the blocks */
    size_t n_windows;
};

/* Return true for a store in one of the engine's own groups, on the device. */
static bool is_own_store(const struct kve_reader *reader, const struct kve_op *op,
                         struct kve_source *ret)
{
    *ret = (struct kve_source){.stride = 1, .parts = 1};
    if ((op->type != KVE_OP_STORE && op->type != KVE_OP_STORE_KNOWN) ||
        op->tier != KV_TIER_DEVICE || !op->n)
        return false;
    if (!op->source)
        return op->type == KVE_OP_STORE;
    return kve_reader_source(reader, op->source, ret) == 0 && ret->kind == KVE_SOURCE_WINDOW &&
           !ret->owner[0];
}

/* Whether a window's event names every block of the chain that the window can have. */
static bool names_all(const struct kve_op *window, const struct kve_source *source,
                      const struct kve_op *chain)
{
    uint32_t stride = source->stride, parts = source->parts;

    if (window->has_parent || window->n != chain->n * parts / stride)
        return false;
    for (size_t i = parts - 1; i < window->n; i += parts)
        if (kve_op_hash(window, i) != kve_op_hash(chain, (i + 1) * stride / parts - 1))
            return false;
    return true;
}

/* Return the number of the group of an operation of one of the engine's own caches. */
static int64_t group_of(const struct kve_reader *reader, const struct kve_op *op,
                        const struct kve_source *source)
{
    return op->source ? (int64_t)source->group : kve_sources_main_group(&reader->sources, op->rank);
}

/*
 * Find the row that begins at @at: an engine announces its groups in the order of their numbers. So
 * the last event of one row is never taken for the first of the next.
 */
static void find_row(const struct kve_reader *reader, const struct kve_batch *batch, size_t at,
                     struct row *ret)
{
    int64_t last = INT64_MIN;

    *ret = (struct row){.batch = batch, .from = at, .to = at};
    for (; ret->to < batch->n_ops && ret->to - at < MAX_GROUPS; ret->to++) {
        const struct kve_op *op = &batch->ops[ret->to];
        struct kve_source source;
        int64_t group;

        if (op->rank != batch->ops[at].rank || !is_own_store(reader, op, &source))
            break;
        group = group_of(reader, op, &source);
        if (group <= last)
            break;
        last = group;
        if (op->type == KVE_OP_STORE && (!ret->chain || !op->source))
            ret->chain = op;
        ret->n_windows += op->source > 0;
    }
}

/* Return true when the row's events can be a report: each names all blocks from the root on. */
static bool may_report(const struct kve_reader *reader, const struct row *row)
{
    struct kve_source source;

    if (!row->chain || row->chain->has_parent)
        return false;
    for (size_t i = row->from; i < row->to; i++)
        if (!is_own_store(reader, &row->batch->ops[i], &source) ||
            !names_all(&row->batch->ops[i], &source, row->chain))
            return false;
    return true;
}

/* Return true when the batch continues below the chain's last block. */
static bool goes_on(const struct row *row)
{
    const struct kve_batch *batch = row->batch;
    const struct kve_op *chain = row->chain;

    for (size_t i = row->to; i < batch->n_ops && i < row->to + LOOK_AHEAD; i++) {
        const struct kve_op *next = &batch->ops[i];

        if (next->type == KVE_OP_STORE && next->rank == chain->rank && next->tier == chain->tier &&
            next->source == chain->source && next->has_parent &&
            next->parent == chain->blocks[chain->n - 1].hash)
            return true;
    }
    return false;
}

/* -- what the engine found --------------------------------------------------------------------- */

/*
 * Count in *ret how many of the chain's first @n blocks the engine's lookup finds, by the index. Returns
 * 0, or an error, behind which it may find them all.
 */
static int lookup(struct ki_reports *r, struct kvi_index *index, struct kv_holder holder,
                  const struct kve_op *chain, size_t n, size_t *ret)
{
    int rc;

    *ret = 0;
    if (!n)
        return 0;
    kv_buf_clear(&r->locals);
    rc = kv_buf_reserve(&r->locals, n * sizeof(uint64_t));
    for (size_t i = 0; rc == 0 && i < n; i++)
        kv_buf_append(&r->locals, &chain->blocks[i].tokens_hash, sizeof(uint64_t));
    if (rc == 0)
        rc = kvi_find(index, (const uint64_t *)r->locals.data, n, &r->matches);
    for (size_t i = 0; rc == 0 && i < r->matches.n; i++) {
        const struct kvi_match *m = &r->matches.items[i];

        if (m->holder.worker == holder.worker && m->holder.rank == holder.rank)
            *ret = m->reach[KV_TIER_DEVICE];
    }
    r->found = KV_MAX(r->found, *ret);
    return rc;
}

/* Find the cache that an event of the row is about. Returns false for an unknown window. */
static bool cache_of(const struct kve_reader *reader, const struct kve_op *op,
                     const struct kvi_window *windows, int n_windows, struct kvi_cache *ret)
{
    struct kve_source source;

    ret->window = 0;
    if (!op->source || kve_reader_source(reader, op->source, &source) < 0)
        return !op->source;
    for (int i = 0; i < n_windows && !ret->window; i++)
        if (windows[i].group == source.group && windows[i].part + 1 == source.parts)
            ret->window = 1 + (uint32_t)i;
    return ret->window;
}

/* Return true when the cache has, or may have, blocks @from to the last of the operation. */
static bool may_have(struct kvi_index *index, const struct ki_ranges *ranges,
                     const struct kvi_cache *cache, const struct kve_op *op, size_t from)
{
    for (size_t i = from; i < op->n; i++) {
        uint64_t hash = kve_op_hash(op, i);

        if (!ki_ranges_find(ranges, cache, hash) && !kvi_get_block(index, *cache, hash).copies)
            return false;
    }
    return true;
}

/* Return true when windows alone have blocks whose places no event has told. */
static bool lacks_places(struct kvi_index *index, struct kv_holder holder,
                         const struct kve_op *chain)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    return chain->source && kvi_get_holder(index, holder, &info) == 0 && info.placeless;
}

/*
 * Return true when the row may be a report: the engine's lookup of its blocks may find them all.
 * The index can't tell that with block drop, which needs the next block, nor beside blocks in doubt.
 */
static bool may_be_found(struct ki_reports *r, struct kvi_index *index, struct kv_holder holder,
                         const struct kve_reader *reader, const struct ki_ranges *ranges,
                         const struct row *row, bool drops)
{
    struct kvi_cache cache = kvi_cache_of(holder, KV_TIER_DEVICE, 0);
    struct kvi_window windows[KVI_MAX_WINDOWS];
    const struct kve_op *chain = row->chain;
    int n_windows, n_groups = 0;
    size_t n_found;
    bool found = lookup(r, index, holder, chain, chain->n, &n_found) < 0 || n_found == chain->n;

    if (!found && !drops && !ranges->n_absent && !lacks_places(index, holder, chain))
        return false;
    n_windows = kvi_get_windows(index, holder, windows);
    for (int i = 0; i < n_windows; i++)
        n_groups +=
            !windows[i].part && !kve_reader_lives_below(reader, holder.rank, windows[i].group);
    if (row->n_windows < (size_t)n_groups)
        return false;
    for (size_t i = row->from; i < row->to && !found; i++) {
        const struct kve_op *op = &row->batch->ops[i];

        /* Full attention needs all blocks, a window at least the last one. */
        if (!cache_of(reader, op, windows, n_windows, &cache) ||
            !may_have(index, ranges, &cache, op, cache.window ? op->n - 1 : 0))
            return false;
    }
    return true;
}

/*
 * Return true for an event that is no part of a row: of a group that lives below the device, or beside
 * full attention that does, whose events tell the tokens at other times.
 */
static bool is_by_itself(const struct kve_reader *reader, const struct kve_op *op)
{
    struct kve_source source;
    int64_t main = kve_sources_main_group(&reader->sources, op->rank);

    return is_own_store(reader, op, &source) &&
           (kve_reader_lives_below(reader, op->rank, main) ||
            kve_reader_lives_below(reader, op->rank, group_of(reader, op, &source)));
}

/* Return true when an event may be the report of its group by itself. */
static bool may_be_held(struct kvi_index *index, struct kv_holder holder,
                        const struct kve_reader *reader, const struct ki_ranges *ranges,
                        const struct kve_op *op)
{
    struct kvi_cache cache = kvi_cache_of(holder, KV_TIER_DEVICE, 0);
    struct kvi_window windows[KVI_MAX_WINDOWS];
    int n = kvi_get_windows(index, holder, windows);
    bool window = cache_of(reader, op, windows, n, &cache) && cache.window &&
                  windows[cache.window - 1].needs != KV_NEEDS_ALL;

    return (cache.window || !op->source) &&
           may_have(index, ranges, &cache, op, window ? op->n - 1 : 0);
}

enum ki_verdict ki_reports_judge(struct ki_reports *r, struct kvi_index *index,
                                 struct kv_holder holder, const struct kve_reader *reader,
                                 const struct ki_ranges *ranges, const struct kve_batch *batch,
                                 size_t at, bool drops)
{
    struct row row;
    bool on = ki_reports_are_on(r), shows, may;
    size_t n_found;

    if (at && at < r->judged_to)
        return r->verdict;
    r->judged_to = at + 1;
    r->verdict = KI_VERDICT_COPIES;
    r->found = 0;
    r->maybe = false;
    if (r->mode == KI_REPORTS_INCREMENTAL)
        return r->verdict;
    if (is_by_itself(reader, &batch->ops[at])) {
        may = (on || ki_reports_may_be(r)) &&
              may_be_held(index, holder, reader, ranges, &batch->ops[at]);
        r->maybe = may && ki_reports_may_be(r);
        return r->verdict = may && on ? KI_VERDICT_EITHER : KI_VERDICT_COPIES;
    }
    find_row(reader, batch, at, &row);
    r->judged_to = KV_MAX(row.to, at + 1);
    if (!may_report(reader, &row))
        return r->verdict;
    shows = !on && row.chain->n > 1 && goes_on(&row);
    if (!on && !shows && !(row.n_windows && ki_reports_may_be(r)))
        return r->verdict;
    may = may_be_found(r, index, holder, reader, ranges, &row, drops);
    if (may && shows && lookup(r, index, holder, row.chain, row.chain->n - 1, &n_found) == 0 &&
        n_found) {
        r->seen = on = true;
        r->misjudged = r->suspects;
    }
    if (may && on)
        r->verdict = KI_VERDICT_EITHER;
    r->maybe = may && row.n_windows && ki_reports_may_be(r);
    return r->verdict;
}
