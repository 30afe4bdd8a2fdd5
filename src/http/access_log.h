// SPDX-License-Identifier: Apache-2.0
/**
 * The access log: one JSON line per request, which a thread of its own writes. Requests never wait
 * for the log: their lines go into a bounded queue. Lines beyond its size are dropped and counted.
 *
 *     {"ts":"2026-01-02T03:04:05.678Z","trace_id":"-","method":"POST","path":"/query","model":"m",
 *      "status":200,"duration_ms":0.123}
 *
 * Thread-safe.
 */
#ifndef KV_HTTP_ACCESS_LOG_H
#define KV_HTTP_ACCESS_LOG_H

#include <stdint.h>

#include "base/core/error.h"
#include "base/json/json.h"

struct kh_access_log;

struct kh_access {
    struct kv_str trace_id; /* len 0: none, written as "-" */
    const char *method;
    const char *path;  /* of the route */
    const char *model; /* NULL: none, written as "-" */
    unsigned status;
    uint64_t duration_ns;
};

/** Open @path for appending, make it when it is missing, and start the thread. */
int kh_access_log_open(const char *path, struct kh_access_log **ret, struct kv_error *error);
/** Write the queued lines for up to 2 s, then close. NULL is a no-op. */
void kh_access_log_close(struct kh_access_log *log);

/** Queue a line. Never waits. */
void kh_access_log_put(struct kh_access_log *log, const struct kh_access *access);

/**
 * Open the path again after a rotation; later lines go there. On failure the old file stays in use.
 */
int kh_access_log_reopen(struct kh_access_log *log, struct kv_error *error);

/** Return the number of lines lost: the queue was full, or the file refused them. */
uint64_t kh_access_log_dropped(const struct kh_access_log *log);

#endif
