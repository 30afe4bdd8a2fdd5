// SPDX-License-Identifier: Apache-2.0
/** Decoded batches to index writes, with the counts that operators ask for. Caller-locked. */
#ifndef KV_INDEXER_APPLY_H
#define KV_INDEXER_APPLY_H

#include <stdbool.h>
#include <stdint.h>

#include "indexer/event_counts.h"
#include "indexer/habits.h"
#include "indexer/reports.h"
#include "indexer/store_run.h"
#include "indexer/unsure.h"
#include "kv_event.h"
#include "kv_index.h"

/** Which facts of extra_keys about multimodal objects count: see kve_reader_opts. */
enum ki_mm_keys { KI_MM_PLACED, KI_MM_WITHOUT_OFFSETS, KI_MM_IGNORED };

/** Ranks that one publisher may name: a bound on what its batches can create. */
#define KI_MAX_RANKS 1024

struct ki_apply_stats {
    uint64_t batches, events, blocks, bytes;
    uint64_t orphans, rejected, malformed;
    uint64_t window_blocks; /* of cache groups beside the main one */
    uint64_t skipped[KVE_N_SKIPS];
};

/** Writer of one stream's events to the index. */
struct ki_applier {
    uint64_t instance;
    struct kve_reader *reader;
    uint32_t *ranks; /* sorted: those whose blocks this stream has brought */
    uint32_t n_ranks;
    struct ki_habits habits;
    bool has_windows; /* the engine has announced groups beside the main one */
    bool overlaps; /* the batches may be in a peer's dump already: a block told again is no copy */
    /* Evidence of missing blocks in the last batch (struct ki_evidence). */
    struct {
        uint64_t unknown; /* removals from the device of blocks that we hadn't */
        uint64_t removed; /* ... and that we had */
        bool full;
    } last;
    struct ki_reports reports; /* of held blocks, which look like new copies */
    struct ki_unsure unsure;   /* copies that these may have been */
    bool lost_tiers;           /* blocks of lower tiers were forgotten, which the engine may have */
    uint64_t forms;            /* KI_FORM of each form in which its blocks were hashed */
    struct ki_apply_stats stats;
    struct ki_event_counts counts; /* of the batch being applied */
    struct ki_store_run run;       /* stores that wait for ki_applier_flush */
};

int ki_applier_init(struct ki_applier *a, uint64_t instance, uint32_t rank, uint32_t block_size,
                    enum ki_mm_keys mm_keys);
void ki_applier_set_habits(struct ki_applier *a, const struct ki_habits *habits);
void ki_applier_fini(struct ki_applier *a);

/** @rank's blocks are this stream's: a purge forgets them. False at the bound or out of memory. */
bool ki_applier_note_rank(struct ki_applier *a, uint32_t rank);

/** Whether answers may be wrong because the events don't tell everything. */
static inline bool ki_applier_is_unsure(const struct ki_applier *a)
{
    return a->habits.silent_windows || a->lost_tiers || kve_reader_skips_group(a->reader) ||
           ki_unsure_is_partial(&a->unsure);
}

/** The same for a replica that goes on with a dump, which doesn't tell possible copies. */
static inline bool ki_applier_is_unsure_in_dumps(const struct ki_applier *a)
{
    return ki_applier_is_unsure(a) || a->unsure.n;
}

/**
 * Removals in the last batch of device blocks that we hadn't. 0 where the stream itself explains
 * them: it has brought events that were left out, or is being followed through a peer's dump.
 */
uint64_t ki_applier_unexplained(const struct ki_applier *a);

/** Blocks of all ranks: in the tree, parked, or waiting for ki_applier_flush. */
uint64_t ki_applier_held(const struct ki_applier *a, struct kvi_index *index);

/** Note that the batches contradict a view that should be whole: reports were taken for real that weren't. */
static inline void ki_applier_contradicted(struct ki_applier *a)
{
    if (a->habits.report_mode == KI_REPORTS_UNKNOWN && a->reports.seen)
        a->habits.report_mode = a->reports.mode = KI_REPORTS_INCREMENTAL;
}

/** Effect of a batch on the completeness of the view. */
enum ki_applied { KI_APPLIED, KI_APPLIED_PART, KI_APPLIED_CLEARED };

/**
 * Apply one payload. KI_APPLIED_PART when something of it was lost (not a batch, no memory, index
 * full); KI_APPLIED_CLEARED when the publisher cleared all that this stream had brought.
 */
enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len);
/**
 * The same, but stores that continue the last one may wait for more of them (store_run.h). Call
 * ki_applier_flush before anything else looks at the stream's blocks.
 */
enum ki_applied ki_applier_put(struct ki_applier *a, struct kvi_index *index, const void *payload,
                               size_t len);
/** Put the stores that wait into the index. Returns KI_APPLIED or KI_APPLIED_PART. */
enum ki_applied ki_applier_flush(struct ki_applier *a, struct kvi_index *index);

/**
 * Forget all blocks that the stream has brought. The ranks stay known. With @restarted, another
 * process goes on: forget the windows of the one before, too.
 */
void ki_applier_purge(struct ki_applier *a, struct kvi_index *index, bool restarted);

#endif
