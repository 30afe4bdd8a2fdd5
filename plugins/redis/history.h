// SPDX-License-Identifier: Apache-2.0
/**
 * Latest publications of a handle, with the chunks that each took (base/metrics/history.h). Not
 * thread-safe.
 */
#ifndef KV_REDIS_HISTORY_H
#define KV_REDIS_HISTORY_H

#include "base/core/buf.h"
#include "base/metrics/history.h"
#include "redis/entry.h"

struct rds_published {
    uint64_t by;        /* number of its thread */
    bool opaque;        /* the manifest isn't of our own format */
    struct kv_buf keys; /* length byte and key of each chunk */
};

struct rds_history {
    struct rds_published of[KV_HISTORY_PUBLICATIONS]; /* ring buffer */
    size_t first, n, bytes;
};

/** Note a publication of the calling thread. Without memory its chunks are forgotten. */
void rds_history_note(struct rds_history *history, struct rds_entry *const *refs, size_t n,
                      bool opaque);

/**
 * Append the keys that the calling thread's manifest of unknown format may need besides pending
 * ones.
 */
void rds_history_needed(const struct rds_history *history, struct kv_buf *ret);

void rds_history_fini(struct rds_history *history);

#endif
