// SPDX-License-Identifier: Apache-2.0
/**
 * Reports of held blocks: vLLM announces the blocks that a request reuses once more when the request
 * asks for it (kv_cache_report_mode "full"). The event looks like a store of new copies.
 *
 *     report       one event from the root for each cache group, in a row. Each names all blocks of
 *                  the prefix that the engine found, also those that a window hasn't.
 *     new copies   one event from the root for each cache group, too, of a request that found
 *                  nothing. A window's event leaves out the blocks that it hasn't.
 *
 * The index knows what the engine found. @n blocks from the root can be a report only when the
 * engine's lookup of these blocks finds them all. They can be copies only when its lookup of the
 * first n - 1 finds nothing, for a request computes at least its last token. Mostly one of the two
 * is impossible. Both are possible for prompts of one block, and of several with windows or EAGLE's
 * block drop: unsure.h counts such copies.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_REPORTS_H
#define KV_INDEXER_REPORTS_H

#include <stdbool.h>
#include <stddef.h>

#include "indexer/habits.h"
#include "kv_event.h"
#include "kv_index.h"

/** Meaning of events from the root. */
enum ki_verdict { KI_VERDICT_COPIES, KI_VERDICT_REPORT, KI_VERDICT_EITHER };

/** Knowledge of one stream's reports. */
struct ki_reports {
    enum ki_report_mode mode;
    bool seen;               /* KI_REPORTS_UNKNOWN: the stream has shown a report */
    bool misjudged;          /* earlier events may have been reports, and count as copies */
    bool suspects;           /* there were events that may have been reports */
    size_t judged_to;        /* in the batch: operations before it have the verdict */
    enum ki_verdict verdict; /* of them */
    struct kvi_matches matches;
};

struct ki_unsure;

void ki_reports_fini(struct ki_reports *r);

/** Whether the stream may have reports. */
static inline bool ki_reports_are_on(const struct ki_reports *r)
{
    return r->mode == KI_REPORTS_FULL || r->seen;
}

/**
 * Judge operation @at of @batch before it is applied.
 *
 * A stream of KI_REPORTS_UNKNOWN shows that it has reports when an event from the root has several
 * blocks, all held, can't be copies, and the same batch goes on below its last block.
 */
enum ki_verdict ki_reports_judge(struct ki_reports *r, struct kvi_index *index,
                                 struct kv_holder holder, const struct kve_reader *reader,
                                 const struct ki_unsure *unsure, const struct kve_batch *batch,
                                 size_t at, bool drops);

#endif
