// SPDX-License-Identifier: Apache-2.0
/** Apply decoded batches to the index, and count what operators ask for. Caller-locked. */
#ifndef KV_INDEXER_VIEW_APPLY_H
#define KV_INDEXER_VIEW_APPLY_H

#include <stdbool.h>
#include <stdint.h>

#include "index/tree/facts.h"
#include "indexer/view/doubts.h"
#include "indexer/view/event_counts.h"
#include "indexer/view/habits.h"
#include "indexer/view/ranges.h"
#include "indexer/view/reasons.h"
#include "indexer/view/reports.h"
#include "indexer/view/small/small.h"
#include "indexer/view/store_run.h"
#include "kv_event.h"

/** Use of the multimodal objects in extra_keys: see kve_reader_opts. */
enum ki_mm_keys { KI_MM_PLACED, KI_MM_WITHOUT_OFFSETS, KI_MM_IGNORED };

/** Most ranks that one publisher may name: bounds what its batches can create. */
#define KI_MAX_RANKS 1024

struct ki_apply_stats {
    uint64_t batches, events, blocks, bytes;
    uint64_t orphans, rejected, malformed;
    uint64_t window_blocks; /* blocks of cache groups beside the main one */
    uint64_t skipped[KVE_N_SKIPS];
};

/** Why a rank's answers may be wrong: bits of struct ki_doubt, whose reasons are in reasons.def. */
enum ki_why {
    /**
     * The rank may have blocks in this tier that the index can't know. An event was left out, or
     * named blocks that no event had placed, or a group's blocks have a size nobody declared.
     */
    KI_WHY_TIERS = (1 << KV_N_TIERS) - 1, /* bit 1 << tier */
    /** The index had no room for the windows of a group: matches ignore that group. */
    KI_WHY_CROWDED = 1 << KV_N_TIERS,
    /**
     * The engine gives up the last matched block in windows, and keeps it in full attention. Then a
     * window may have the block behind a match, for a prompt that nothing names.
     */
    KI_WHY_DROPS = 2 << KV_N_TIERS,
    /**
     * A clear didn't say whether it emptied the device or a pool below it (apply_clear.c). The pool
     * may have lost its blocks.
     */
    KI_WHY_CLEAR = 4 << KV_N_TIERS,
    /** An event of parts of blocks may have been a report, and was counted as a store. */
    KI_WHY_REPORTS = 8 << KV_N_TIERS,
    /** Like KI_WHY_CLEAR: the device may have lost its blocks. */
    KI_WHY_DEVICE_CLEAR = 16 << KV_N_TIERS,
    /** There is no main group, and events named window blocks without telling their places. */
    KI_WHY_PLACES = 32 << KV_N_TIERS,
};

/** The last clear that counts as a pool's: see apply_clear.c. */
struct ki_pool_clear {
    uint32_t rank, n;
    uint64_t hashes[32]; /* blocks that the device has, if so */
    bool knew_device;    /* it was certain until then what the device had */
};

/** Ranks of a stream: none, one of them, or any. */
enum ki_ranks { KI_RANKS_NONE, KI_RANKS_ONE, KI_RANKS_MANY };

/** Blocks that a purge or a clear has removed, whoever has brought them. */
struct ki_loss {
    enum ki_ranks of;
    uint32_t rank;   /* KI_RANKS_ONE */
    bool own;        /* a purge was the stream's own decision: no event has told it */
    bool absent;     /* it was made for want of a connection: the stream brings nothing for now */
    uint64_t blocks; /* in all */
};

/** Writer of one stream's events to the index. */
struct ki_applier {
    uint64_t instance;
    const char *who; /* the instance in log lines; NULL: its number */
    uint32_t rank;   /* registered for the stream */
    struct kve_reader *reader;
    uint32_t *ranks; /* sorted ranks whose blocks this stream has brought; the registered one */
    uint32_t n_ranks;
    bool unnamed; /* the registered one is none of them: all events name others */
    struct ki_habits habits;
    uint32_t told_otherwise; /* kve_sources.differs, as it was logged */
    bool has_windows;        /* the engine has announced cache groups beside the main one */
    bool retains;            /* some group has kept none of an event's blocks: see SPARSE_REPORTS */
    /* the index lacks blocks with salts that the publisher had, and hasn't cleared since */
    bool purged;
    /* Evidence of missing blocks in the last batch (struct ki_evidence). */
    struct {
        uint64_t unknown; /* removals from the device of blocks that the index lacked */
        uint64_t removed; /* removals from the device of blocks that the index had */
        bool full;
    } last;
    struct ki_reports reports;  /* of held blocks, which look like new copies */
    struct ki_ranges ranges;    /* of blocks that they name: how many copies the engine has */
    struct ki_small small;      /* blocks of groups with smaller blocks */
    struct ki_main_names names; /* main blocks of the batch that is being applied */
    struct ki_doubts doubts;    /* enum ki_why: reasons for which a rank's answers may be wrong */
    struct ki_doubts cleared;   /* ranks that were cleared since the last loss, bit 1 */
    uint64_t losses;            /* of the stream, when cleared was emptied */
    uint32_t n_cleared;         /* ranks brought when all of them were last cleared */
    /* Blocks, by hash in place of the owner, that lack a component which others have: bit per tier */
    struct ki_doubts incomplete;
    bool unordered;  /* a block may be told before its parent */
    bool unnumbered; /* messages had no numbers: lost ones leave no trace */
    struct ki_pool_clear pool_clear;
    /* Blocks and copies of its ranks that limits of the index left out, and tiers whose copies are in
     * doubt. */
    uint64_t left_out;
    uint64_t losses_seen;  /* in the whole index, when left_out was last counted */
    uint64_t *left_of;     /* left_out by rank, as in ranks */
    uint64_t *moved_of;    /* moved of kvi_holder_info, by rank as well */
    enum ki_ranks touched; /* by the operations since then */
    uint32_t touched_rank; /* KI_RANKS_ONE */
    struct ki_loss loss; /* since the driver last took it; a writer of the same ranks may want it */
    uint64_t forms;      /* KI_FORM of each form in which its blocks were hashed */
    struct ki_apply_stats stats;
    struct ki_event_counts counts; /* outcomes of the current batch */
    struct ki_store_run run;       /* stores that wait for ki_applier_flush */
    /* Called before the applier forgets all blocks; NULL: nobody asks. */
    void (*forgets)(void *arg);
    void *forgets_arg;
};

int ki_applier_init(struct ki_applier *a, uint64_t instance, uint32_t rank, uint32_t block_size,
                    enum ki_mm_keys mm_keys);
void ki_applier_set_habits(struct ki_applier *a, const struct ki_habits *habits);
void ki_applier_fini(struct ki_applier *a);

/**
 * Note that @rank's blocks belong to this stream: a purge forgets them. Returns false at the bound
 * or out of memory.
 */
bool ki_applier_note_rank(struct ki_applier *a, uint32_t rank);
/**
 * Return the number of ranks whose blocks the stream's events have named. The registered rank is in
 * `ranks` from the start, and doesn't count before an event names it.
 */
static inline uint32_t ki_applier_n_brought(const struct ki_applier *a)
{
    return a->n_ranks - a->unnamed;
}
/** Return true when the stream's events have named blocks of @rank. */
bool ki_applier_brings(const struct ki_applier *a, uint32_t rank);

/** Return the reasons for which answers may be wrong because the events don't tell everything. */
ki_reasons ki_applier_reasons(const struct ki_applier *a);
/** The same for a replica that goes on with a dump: no dump tells the parts of blocks. */
ki_reasons ki_applier_reasons_of_replicas(const struct ki_applier *a);

/**
 * Return the number of device blocks that the last batch removed and the index lacked. 0 when the
 * stream explains them: some events were skipped, or limits of the index left blocks out.
 */
uint64_t ki_applier_unexplained(const struct ki_applier *a);

/** Return the blocks of all ranks: in the tree, parked, or waiting for ki_applier_flush. */
uint64_t ki_applier_held(const struct ki_applier *a, struct kvi_index *index);
/**
 * Count in *@ret_held the blocks, in the tree or parked, of those of the @n @ranks that the stream
 * brings. Returns false when it brings none of the ranks.
 */
bool ki_applier_held_of(const struct ki_applier *a, struct kvi_index *index, const uint32_t *ranks,
                        uint32_t n, uint64_t *ret_held);

/** Return the mode that the stream has shown; KI_REPORTS_UNKNOWN where a registration tells it. */
static inline enum ki_report_mode ki_applier_learned_mode(const struct ki_applier *a)
{
    if (a->habits.report_mode != KI_REPORTS_UNKNOWN)
        return KI_REPORTS_UNKNOWN;
    if (a->reports.mode != KI_REPORTS_UNKNOWN)
        return a->reports.mode;
    return a->reports.seen ? KI_REPORTS_FULL : KI_REPORTS_UNKNOWN;
}

/**
 * Note that the batches contradict a view that should be whole: new copies were taken for reports.
 */
static inline void ki_applier_contradicted(struct ki_applier *a)
{
    if (ki_applier_learned_mode(a) == KI_REPORTS_FULL)
        a->reports.mode = KI_REPORTS_INCREMENTAL;
}

/**
 * Return true when the stream's ranks are known, as far as they can be: where batches name one rank,
 * nothing tells whether there are others.
 */
bool ki_applier_knows_ranks(const struct ki_applier *a);
/** Return true when the stream brings a rank that it hadn't when all its ranks were last cleared. */
static inline bool ki_applier_has_new_rank(const struct ki_applier *a)
{
    return ki_applier_n_brought(a) > a->n_cleared;
}
/** Note how many losses the stream has had: clears of ranks before the last one end none of it. */
void ki_applier_note_stream_losses(struct ki_applier *a, uint64_t losses);

/** Effect of a batch on the completeness of the view. */
enum ki_applied { KI_APPLIED, KI_APPLIED_PART, KI_APPLIED_CLEARED };

/**
 * Apply one payload. Returns KI_APPLIED_PART when some of it was lost (not a batch, no memory,
 * index full); KI_APPLIED_CLEARED when the publisher has cleared, since the last
 * loss, all ranks that this stream had brought.
 */
enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len);
/**
 * The same, but stores that continue the last one may wait for more of them (store_run.h). Call
 * ki_applier_flush before anything else looks at the stream's blocks.
 */
enum ki_applied ki_applier_put(struct ki_applier *a, struct kvi_index *index, const void *payload,
                               size_t len);
/**
 * The same for operations that come decoded, all of the registered rank. @lost_tiers: bit per tier of
 * which something was left out.
 */
enum ki_applied ki_applier_put_ops(struct ki_applier *a, struct kvi_index *index,
                                   const struct kve_batch *batch, uint32_t lost_tiers);
/**
 * Note whether the index has left out blocks or copies of the stream at one of its limits. Until
 * they are cleared, answers may be too short. Call after a restore; the functions here do.
 */
void ki_applier_note_losses(struct ki_applier *a, struct kvi_index *index);
/** Put the stores that wait into the index. Returns KI_APPLIED or KI_APPLIED_PART. */
enum ki_applied ki_applier_flush(struct ki_applier *a, struct kvi_index *index);

/**
 * Forget all blocks that the stream has brought. The ranks stay known. With @restarted, another
 * process goes on: forget the windows of the one before, too.
 */
void ki_applier_purge(struct ki_applier *a, struct kvi_index *index, bool restarted);
/** Return the number of blocks of a rank in the index, parked ones included, whoever brought them. */
uint64_t ki_applier_held_of_rank(const struct ki_applier *a, struct kvi_index *index,
                                 uint32_t rank);
/** Note that @n of the rank's blocks have left the index by a clear. */
void ki_applier_note_clear(struct ki_applier *a, uint32_t rank, uint64_t n);
/** Forget the blocks of those of the @n @ranks that the stream brings. The engine still has them. */
void ki_applier_purge_ranks(struct ki_applier *a, struct kvi_index *index, const uint32_t *ranks,
                            uint32_t n);

#endif
