// SPDX-License-Identifier: Apache-2.0
/*
 * Reasons that lie in the events of a stream: reasons.def says what each means, and what ends it.
 *
 * Invariant: each is computed from the state that it is about, whenever it is asked for. Nobody
 * sets or ends a copy of it, so none can outlive its cause or be forgotten.
 */
#include "indexer/view/apply.h"

#include "event/reader/reader.h"

static ki_reasons if_so(bool is_so, ki_reasons reason)
{
    return is_so ? reason : 0;
}

/* The doubts about single ranks and owners, for all of them. */
static ki_reasons of_doubts(const struct ki_doubts *d)
{
    uint32_t bits = ki_doubts_all(d);

    if (KV_LIKELY(!bits))
        return 0;
    return if_so(bits & KI_WHY_TIERS, KI_BECAUSE(UNKNOWN_BLOCKS)) |
           if_so(bits & KI_WHY_CROWDED, KI_BECAUSE(WINDOWS_FULL)) |
           if_so(bits & KI_WHY_DROPS, KI_BECAUSE(BLOCK_DROP)) |
           if_so(bits & (KI_WHY_CLEAR | KI_WHY_DEVICE_CLEAR), KI_BECAUSE(POOL_CLEAR)) |
           if_so(bits & KI_WHY_REPORTS, KI_BECAUSE(REPORTED_PARTS)) |
           if_so(bits & KI_WHY_PLACES, KI_BECAUSE(UNPLACED));
}

static ki_reasons of_reports(const struct ki_applier *a)
{
    bool on = ki_reports_are_on(&a->reports);

    return if_so(a->retains && on, KI_BECAUSE(SPARSE_REPORTS)) |
           if_so(a->small.n && on, KI_BECAUSE(SMALL_REPORTS)) |
           if_so(a->ranges.n_open, KI_BECAUSE(MAYBE_REPORT)) |
           if_so(ki_doubts_any(&a->ranges.lost), KI_BECAUSE(MAYBE_MORE));
}

ki_reasons ki_applier_reasons(const struct ki_applier *a)
{
    return of_doubts(&a->doubts) | of_reports(a) |
           if_so(a->habits.silent_windows, KI_BECAUSE(SILENT_WINDOWS)) |
           if_so(a->unnumbered, KI_BECAUSE(UNNUMBERED)) |
           if_so(ki_doubts_any(&a->incomplete), KI_BECAUSE(COMPONENT)) |
           if_so(a->left_out, KI_BECAUSE(LEFT_OUT)) |
           if_so(kve_reader_skips_group(a->reader), KI_BECAUSE(UNKNOWN_GROUP)) |
           if_so(ki_doubts_any(&a->small.lost), KI_BECAUSE(SMALL_LOST)) |
           if_so(ki_small_is_alone(&a->small, a->reader), KI_BECAUSE(SMALL_ALONE));
}

ki_reasons ki_applier_reasons_of_replicas(const struct ki_applier *a)
{
    /* A dump has no parts of blocks. For these, reports make no difference. */
    return (ki_applier_reasons(a) & ~KI_BECAUSE(SMALL_REPORTS)) |
           if_so(a->small.n, KI_BECAUSE(SMALL_REPORTS));
}
