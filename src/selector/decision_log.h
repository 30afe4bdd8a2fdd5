// SPDX-License-Identifier: Apache-2.0
/**
 * The decision log: a JSON line for each decision, first token and end of the requests that are sampled.
 * docs/selector.md has the format. Lines are written by the threads that answer; a line that can't be
 * written is counted and lost. Thread-safe.
 */
#ifndef KV_SELECTOR_DECISION_LOG_H
#define KV_SELECTOR_DECISION_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"
#include "base/json/json.h"
#include "kv_select.h"

struct ksel_log;

/** Hashes of every KSEL_LOG_STRIDE-th block are in the log: those that libkvselect reads. */
#define KSEL_LOG_STRIDE 4

/** A decision and how it came about. */
struct ksel_decision {
    const char *id;
    size_t id_len;
    const char *model, *group;
    uint32_t block_size;
    const struct kvsel_request *request;
    const struct kvsel_choice *choice; /* candidates 0: no worker fits */
    const struct kvsel_candidate *candidates;
    size_t n_candidates;
    bool booked;
    /* Write a worker's id. */
    void (*put_worker)(void *arg, struct kv_json_writer *w, uint64_t worker);
    void *arg;
};

/** Open, or create, the log. One of @sample requests is logged. Returns 0 or an errno with @error. */
int ksel_log_open(const char *path, uint64_t sample, struct ksel_log **ret, struct kv_error *error);
void ksel_log_close(struct ksel_log *log); /* NULL is a no-op */
/** Open the file again, after a rotation. On an error lines go to the old one. */
int ksel_log_reopen(struct ksel_log *log, struct kv_error *error);
/** Return the number of lines that were lost. */
uint64_t ksel_log_dropped(const struct ksel_log *log);

/** Return true when the request of this id is sampled. NULL @log: none is. */
bool ksel_log_wants(const struct ksel_log *log, const char *id, size_t len);

void ksel_log_decision(struct ksel_log *log, const struct ksel_decision *decision);
/** Log that @event, such as "first_token", happened to a request. No-op when it isn't sampled. */
void ksel_log_event(struct ksel_log *log, const char *event, const char *id, size_t len);

/** Write members of a decision: choice, reasons, candidates. Also the "decision" of "explain". */
void ksel_decision_write(const struct ksel_decision *decision, struct kv_json_writer *w);

#endif
