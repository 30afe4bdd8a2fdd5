// SPDX-License-Identifier: Apache-2.0
/**
 * `kvasir select replay`: a decision log of kv-selector, played against policies.
 *
 * Model. Each worker computes prompts one after the other, at one speed. A prompt's first token comes when
 * all before it and its own uncovered tokens are computed; its answer takes as long as in the log. Each
 * policy has books of its own choices. Held blocks are those of the log: what a policy sends elsewhere
 * doesn't change what later prompts find.
 */
#ifndef KV_CLI_SELECT_SELECT_H
#define KV_CLI_SELECT_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "kv_select.h"

/** Hashes of each so manieth block are in a log (selector/decision_log.h). */
#define KC_SELECT_STRIDE 4

/** A worker of a logged decision. */
struct kc_select_candidate {
    struct kv_holder holder;
    bool fits;
    uint32_t reach[KV_N_TIERS];
    double waiting, uncovered;
};

/** A logged decision that was booked. */
struct kc_select_decision {
    double time;       /* seconds since the first one */
    double first, end; /* the same; negative: not in the log */
    uint64_t tokens;
    uint64_t id; /* hash of its id */
    struct kv_holder worker;
    size_t first_candidate, n_candidates; /* in the log's */
    size_t first_hash, n_hashes;
    uint32_t model; /* number of its model and group */
    uint32_t block_size;
};

struct kc_select_log {
    struct kv_buf decisions, candidates, hashes; /* raw structs; uint64_t */
    struct kv_buf models;                        /* raw uint64_t: hash of model and group */
    size_t lines, unread, unbooked, n;           /* n: decisions */
};
void kc_select_log_fini(struct kc_select_log *log);

/** Read a log; - for standard input. Lines that are no event are counted. Returns 0 or an errno with @error. */
int kc_select_log_read(const char *path, struct kc_select_log *ret, struct kv_error *error);

/** Compare two doubles, for qsort. */
int kc_select_by_value(const void *a, const void *b);

/** Return the tokens a second that the log shows: the median of its prompts. 0: it shows none. */
double kc_select_log_speed(const struct kc_select_log *log);

struct kc_select_settings {
    double speed;        /* tokens a second of every worker */
    uint64_t predict_ms; /* 0: no predictions */
    uint64_t seed;
};

/** Figures of one policy. */
struct kc_select_result {
    size_t n, same;             /* decisions; of them as logged */
    double mean_ttft, p99_ttft; /* seconds */
    double computed;            /* share of the prompts' tokens */
    double imbalance;           /* computed tokens of the busiest worker beside the mean */
};

/** Play the log with @policy; NULL: with the logged choices. Returns 0 or a negative errno. */
int kc_select_play(const struct kc_select_log *log, const char *policy,
                   const struct kc_select_settings *settings, struct kc_select_result *ret);

#endif
