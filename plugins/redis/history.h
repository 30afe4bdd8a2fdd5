// SPDX-License-Identifier: Apache-2.0
/**
 * Latest publications of a handle, with the chunks that each took.
 *
 * A publication takes every chunk put on its handle, on any thread. So a snapshot, or another
 * thread's manifest, may take chunks that a later manifest of unknown format needs. Such a manifest
 * is therefore noted to need
 * - the chunks taken since the same thread's previous manifest, and
 * - on a handle on which several threads publish, those of the last RDS_TAKEN_ANYWAY publications.
 *
 * Holds at most RDS_MAX_HISTORY publications and RDS_MAX_HISTORY_BYTES of keys. Not thread-safe.
 */
#ifndef KV_REDIS_HISTORY_H
#define KV_REDIS_HISTORY_H

#include <pthread.h>

#include "base/buf.h"
#include "redis/entry.h"

#define RDS_MAX_HISTORY 256
#define RDS_MAX_HISTORY_BYTES ((size_t)4 << 20)
#define RDS_TAKEN_ANYWAY 16

struct rds_published {
    pthread_t by;
    bool opaque;        /* the manifest's format isn't ours */
    struct kv_buf keys; /* length byte and key of each chunk */
};

struct rds_history {
    struct rds_published of[RDS_MAX_HISTORY]; /* a ring */
    size_t first, n, bytes;
};

/** The calling thread published these; out of memory, they are forgotten. */
void rds_history_note(struct rds_history *history, struct rds_entry *const *refs, size_t n,
                      bool opaque);

/** Append the keys that the calling thread's manifest of unknown format may need besides. */
void rds_history_needed(const struct rds_history *history, struct kv_buf *ret);

void rds_history_fini(struct rds_history *history);

#endif
