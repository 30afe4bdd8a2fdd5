// SPDX-License-Identifier: Apache-2.0
/**
 * A replay: one run of a trace through simulated engines and a real kv-indexer. Internal to the
 * room; replay.c runs it, verify.c checks the end state, report.c and progress.c show it.
 */
#ifndef KV_CLI_REPLAY_REPLAY_H
#define KV_CLI_REPLAY_REPLAY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "cli/client/client.h"
#include "cli/replay/cache.h"
#include "cli/replay/child.h"
#include "cli/replay/engine.h"
#include "cli/replay/generate.h"
#include "cli/replay/hist.h"
#include "cli/replay/prompt.h"
#include "cli/replay/replay_options.h"
#include "cli/replay/route.h"
#include "cli/replay/shadow.h"
#include "cli/replay/trace.h"

/** Counters of served requests; under replay->lock. */
struct kc_counts {
    uint64_t requests, tokens;
    uint64_t asked, found;       /* in blocks */
    uint64_t exact, over, under; /* answers about the chosen worker */
    uint64_t over_blocks, under_blocks;
    uint64_t all_exact;      /* answers exact about every worker */
    uint64_t believed, held; /* leading blocks over all workers: as answered, and as held */
    uint64_t lockstep_wrong; /* wrong answers although all events had settled */
    double trace_ms;         /* trace time reached */
};

/** Figures that the indexer reports about itself at the end. */
struct kc_index_figures {
    bool known;
    uint64_t blocks, holder_blocks, bytes;
    uint64_t gaps, replayed;
    uint64_t rss; /* bytes; 0: the indexer is not our child */
};

/** Comparison of the final state. */
struct kc_verdict {
    bool done;
    uint64_t prompts, comparisons, wrong;
    uint64_t settle_ms; /* time until all was equal */
    char first[160];    /* the first difference, in words */
};

struct kc_replay {
    struct kc_replay_opts opts;
    struct kc_trace trace;
    struct kc_trace_stats stats;
    struct kc_child *child; /* NULL with --url */
    struct kc_client_opts client;
    char tenant[40]; /* of this run alone */
    bool joined;     /* the indexer has answered: it may know our workers */
    struct kc_engine **engines;
    uint64_t limit;   /* number of requests; UINT64_MAX: run until the time is over */
    uint64_t span_ms; /* length of one pass */
    uint64_t start_ns, end_ns;

    _Atomic uint64_t next;
    _Atomic uint64_t served, asked_blocks, found_blocks; /* for the progress line */
    /* True: clients finish their request and end. */
    _Atomic bool stop;
    _Atomic uint32_t running;

    pthread_mutex_t recovery; /* one client at a time brings the indexer back */
    /* Guarded by recovery: number of times that all workers were registered again. */
    uint64_t generation;

    pthread_mutex_t lock; /* guards all fields below */
    struct kc_router router;
    struct kc_shadow shadow;
    struct kc_counts counts;
    uint64_t *last_prompt;   /* per worker: the number of its last request, UINT64_MAX: none */
    struct kv_error failure; /* reason of an early end; code 0: none */

    struct kc_hist latency; /* of /query, in nanoseconds */
    bool interrupted;
    struct kc_verdict verdict;
    struct kc_index_figures index;
};

/** Return true after ^C. */
bool kc_replay_interrupted(void);

/**
 * Start or find the indexer, register all engines with it, and wait until it follows each of them.
 * Returns 0 or a negative errno with @error; *@ret is set when the connection was made.
 */
int kc_replay_connect(struct kc_replay *replay, struct kc_client **ret, struct kv_error *error);

/**
 * Send a /query. When the indexer is away, wait until it is back, register all engines again, and
 * repeat the query. @ret_ns (or NULL): time of the query that was answered. Returns 0 or a negative
 * errno with @error.
 */
int kc_replay_ask(struct kc_replay *replay, struct kc_client *client,
                  const struct kc_prompt *prompt, struct kc_belief *beliefs, uint64_t *ret_ns,
                  struct kv_error *error);

/** Unregister all engines, if they were registered, until the indexer no longer answers. */
void kc_replay_leave(struct kc_replay *replay, struct kc_client *client);

/** Expand request @number (counted on over passes) into @prompt. Returns 0 or -ENOMEM. */
int kc_replay_prompt(const struct kc_replay *replay, uint64_t number, struct kc_prompt *prompt);

/**
 * Compare the indexer's answers with the engines' caches, for a sample of prompts and all workers.
 * Waits until they are equal, at most opts.settle_ms. Fills replay->verdict. Returns 0 or a
 * negative errno.
 */
int kc_replay_verify(struct kc_replay *replay, struct kc_client *client, struct kv_error *error);

/**
 * Compare one answer with the truth, and describe the first difference. Returns the number of wrong
 * workers.
 */
uint32_t kc_replay_compare(struct kc_replay *replay, const struct kc_prompt *prompt,
                           const struct kc_belief *beliefs, char *why, size_t size);

/** Read the index figures from /metrics. Missing ones stay unknown. */
void kc_replay_read_metrics(struct kc_replay *replay, struct kc_client *client);

/** Print the table, or JSON, as the options ask. Returns 0, or a negative errno with @error. */
int kc_report(struct kc_replay *replay, struct kv_error *error);

/** Print one line of progress. @final ends the line. */
void kc_progress(struct kc_replay *replay, bool final);

/**
 * Compute the hit fraction of one cache of @blocks trace blocks (0: unlimited). Returns 0 or
 * -ENOMEM.
 */
int kc_hit_fraction(const struct kc_trace *trace, uint64_t blocks, enum kc_cache_order order,
                    double *ret);

/** Run --check-hits. @name is printed for an unknown trace. Returns an exit status. */
int kc_check_hits(const struct kc_trace *trace, const struct kc_trace_stats *stats,
                  const char *name);

#endif
