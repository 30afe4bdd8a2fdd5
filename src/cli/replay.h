// SPDX-License-Identifier: Apache-2.0
/**
 * A replay: one run of a trace through simulated engines and a real kv-indexer. Internal to the
 * room; replay.c runs it, verify.c checks the end state, report.c and progress.c show it.
 */
#ifndef KV_CLI_REPLAY_H
#define KV_CLI_REPLAY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "cli/cache.h"
#include "cli/child.h"
#include "cli/client.h"
#include "cli/engine.h"
#include "cli/generate.h"
#include "cli/hist.h"
#include "cli/prompt.h"
#include "cli/replay_options.h"
#include "cli/route.h"
#include "cli/shadow.h"
#include "cli/trace.h"

/** Counted while requests are served; under replay->lock. */
struct kc_counts {
    uint64_t requests, tokens;
    uint64_t asked, found;       /* blocks */
    uint64_t exact, over, under; /* answers about the worker that was chosen */
    uint64_t over_blocks, under_blocks;
    uint64_t all_exact;      /* answers that were exact about every worker */
    uint64_t believed, held; /* leading blocks over all workers: answered, and there */
    uint64_t lockstep_wrong; /* answers that were wrong although everything had settled */
    double trace_ms;         /* how far the trace has come */
};

/** Figures that the indexer reports about itself at the end. */
struct kc_index_figures {
    bool known;
    uint64_t blocks, holder_blocks, bytes;
    uint64_t gaps, replayed;
    uint64_t rss; /* bytes; 0: not our child */
};

/** The comparison of the final state. */
struct kc_verdict {
    bool done;
    uint64_t prompts, comparisons, wrong;
    uint64_t settle_ms; /* until everything was equal */
    char first[160];    /* the first difference, in words */
};

struct kc_replay {
    struct kc_replay_opts opts;
    struct kc_trace trace;
    struct kc_trace_stats stats;
    struct kc_child *child; /* NULL with --url */
    struct kc_client_opts client;
    struct kc_engine **engines;
    uint64_t limit;   /* requests; UINT64_MAX: until the time is over */
    uint64_t span_ms; /* of one pass */
    uint64_t start_ns, end_ns;

    _Atomic uint64_t next;
    _Atomic uint64_t served, asked_blocks, found_blocks; /* for the progress line */
    _Atomic bool stop;                                   /* clients finish their request and end */
    _Atomic uint32_t running;

    pthread_mutex_t recovery; /* one client at a time brings the indexer back */
    uint64_t generation;      /* under recovery: how often all were registered again */

    pthread_mutex_t lock; /* all below */
    struct kc_router router;
    struct kc_shadow shadow;
    struct kc_counts counts;
    uint64_t *last_prompt;   /* per worker: the number of its last request, UINT64_MAX: none */
    struct kv_error failure; /* what ended the run early; code 0: nothing */

    struct kc_hist latency; /* of /query, ns */
    bool interrupted;
    struct kc_verdict verdict;
    struct kc_index_figures index;
};

/** Whether somebody pressed ^C. */
bool kc_replay_interrupted(void);

/**
 * Start or find the indexer, register all engines with it, and wait until it follows each of them.
 * Returns 0 or a negative errno with @error; *@ret is set when the connection was made.
 */
int kc_replay_connect(struct kc_replay *replay, struct kc_client **ret, struct kv_error *error);

/**
 * /query. When the indexer is away, waits for it to come back, registers all engines again, and
 * asks again. Returns 0 or a negative errno with @error.
 */
int kc_replay_ask(struct kc_replay *replay, struct kc_client *client,
                  const struct kc_prompt *prompt, struct kc_belief *beliefs,
                  struct kv_error *error);

/** Unregister all engines. */
void kc_replay_leave(struct kc_replay *replay, struct kc_client *client);

/** Expand request @number (they count on over passes) into @prompt. Returns 0 or -ENOMEM. */
int kc_replay_prompt(const struct kc_replay *replay, uint64_t number, struct kc_prompt *prompt);

/**
 * Compare what the indexer says with what the engines hold, for a sample of prompts and all
 * workers; waits until it is equal, at most opts.settle_ms. Fills replay->verdict. 0 or a negative
 * errno.
 */
int kc_replay_verify(struct kc_replay *replay, struct kc_client *client, struct kv_error *error);

/** Compare one answer with the truth; in words the first difference. Returns the wrong workers. */
uint32_t kc_replay_compare(struct kc_replay *replay, const struct kc_prompt *prompt,
                           const struct kc_belief *beliefs, char *why, size_t size);

/** Read the index figures from /metrics. What isn't told stays unknown. */
void kc_replay_read_metrics(struct kc_replay *replay, struct kc_client *client);

/** The table, or JSON, as the options say. Returns 0, or a negative errno with @error. */
int kc_report(struct kc_replay *replay, struct kv_error *error);

/** One line about how far it is. @final ends it. */
void kc_progress(struct kc_replay *replay, bool final);

/** Hit fraction of one cache of @blocks trace blocks (0: unlimited). Returns 0 or -ENOMEM. */
int kc_hit_fraction(const struct kc_trace *trace, uint64_t blocks, enum kc_cache_order order,
                    double *ret);

/** --check-hits; @name is shown of a trace that isn't known. Returns an exit status. */
int kc_check_hits(const struct kc_trace *trace, const struct kc_trace_stats *stats,
                  const char *name);

/** `kvasir replay`, `kvasir store`, `kvasir top`. Return an exit status. */
int kc_replay_main(int argc, char **argv);
int kc_store_main(int argc, char **argv);
int kc_bench_main(int argc, char **argv);
int kc_top_main(int argc, char **argv);

#endif
