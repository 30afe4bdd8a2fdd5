// SPDX-License-Identifier: Apache-2.0
/**
 * The access log: one JSON line per request, written by a thread of its own. Requests never wait
 * for it: their lines go into a bounded queue, and lines for which there is no room are dropped and
 * counted.
 *
 *     {"ts":"2026-01-02T03:04:05.678Z","trace_id":"-","method":"POST","path":"/query","model":"m","status":200,
 *      "duration_ms":0.123}
 *
 * Thread-safe.
 */
#ifndef KV_INDEXER_ACCESS_LOG_H
#define KV_INDEXER_ACCESS_LOG_H

#include <stdint.h>

#include "base/error.h"
#include "base/json.h"

struct ki_access_log;

struct ki_access {
    struct kv_str trace_id; /* len 0: none, written as "-" */
    const char *method;
    const char *path;  /* of the route */
    const char *model; /* NULL: none, written as "-" */
    unsigned status;
    uint64_t duration_ns;
};

/** Open @path for appending (made when it isn't there) and start the thread. */
int ki_access_log_open(const char *path, struct ki_access_log **ret, struct kv_error *error);
/** Write what is queued, for up to 2 s, and close. NULL is a no-op. */
void ki_access_log_close(struct ki_access_log *log);

/** Queue a line. Never waits. */
void ki_access_log_put(struct ki_access_log *log, const struct ki_access *access);

/** Open the path again, after a rotation: lines go there from now on. On failure the old file stays. */
int ki_access_log_reopen(struct ki_access_log *log, struct kv_error *error);

/** Lines that weren't written: the queue was full, or the file refused them. */
uint64_t ki_access_log_dropped(const struct ki_access_log *log);

#endif
