// SPDX-License-Identifier: Apache-2.0
/**
 * Reports of held blocks. When a request asks for it (kv_cache_report_mode "full"), vLLM announces
 * the blocks that the request reuses once more. The event looks like a store of new copies.
 *
 *     report       one event from the root for each cache group, in a row. Each names all blocks of
 *                  the prefix that the engine found, also those that a window hasn't.
 *     new copies   one event from the root for each cache group, too, of a request that found
 *                  nothing. A window's event leaves out the blocks that it hasn't.
 *
 * The index knows what the engine found. @n blocks from the root can be a report only when the
 * engine's lookup of these blocks finds them all. Where the index can't tell what that lookup finds
 * (block drop, blocks in doubt or without a place), it is enough that the engine may have the last
 * one. All other events are copies.
 *
 * Blocks that are found can be copies, too: of a request that doesn't look into the cache (prompt
 * logprobs), or one that computes its last block anew. ranges.h has such copies.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_REPORTS_H
#define KV_INDEXER_VIEW_REPORTS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/core/buf.h"
#include "index/tree/facts.h"
#include "indexer/view/habits.h"
#include "kv_event.h"

/** Meaning of events from the root. */
enum ki_verdict { KI_VERDICT_COPIES, KI_VERDICT_EITHER };

/** Knowledge of one stream's reports. */
struct ki_reports {
    enum ki_report_mode mode;
    bool
        seen; /* KI_REPORTS_UNKNOWN: the stream has shown what must be a report, or skips the cache */
    /* Earlier events may have been reports, but were counted as copies. */
    bool misjudged;
    bool suspects; /* some events may have been reports */
    /* KI_REPORTS_UNKNOWN: the stream has shown so many copies that its events count as such. */
    bool trusted;
    bool maybe;       /* with windows: the last row judged may be a report, but counts as copies */
    size_t judged_to; /* operations of the batch before this one have the verdict */
    enum ki_verdict verdict; /* the verdict */
    size_t found; /* most blocks of the last chain judged that the index was asked for and had */
    /* Memory of one lookup, which the next one uses again. */
    struct kv_buf locals; /* local hashes of the chain's blocks, uint64_t each */
    struct kvi_matches matches;
};

struct ki_ranges;

void ki_reports_fini(struct ki_reports *r);

/** Return true when the stream may have reports. */
static inline bool ki_reports_are_on(const struct ki_reports *r)
{
    return r->mode == KI_REPORTS_FULL || r->seen;
}

/** Return true when nothing tells yet whether the stream has reports. */
static inline bool ki_reports_may_be(const struct ki_reports *r)
{
    return r->mode == KI_REPORTS_UNKNOWN && !r->seen && !r->trusted;
}

/**
 * Judge operation @at of @batch before it is applied. @drops: the engine gives up the last block that
 * it finds.
 *
 * A stream of KI_REPORTS_UNKNOWN shows a report by an event from the root with several blocks. All
 * of them are held, the engine finds the first, and the same batch continues below the last one.
 */
enum ki_verdict ki_reports_judge(struct ki_reports *r, struct kvi_index *index,
                                 struct kv_holder holder, const struct kve_reader *reader,
                                 const struct ki_ranges *ranges, const struct kve_batch *batch,
                                 size_t at, bool drops);

#endif
