// SPDX-License-Identifier: Apache-2.0
/**
 * The log of notices that wait for the peers, and the streams that bring them there.
 *
 *     booking ──► log, KSEL_NOTICES_BYTES ──► a thread for each follower ──► its HTTP stream
 *
 * A thread that books appends to the log and goes on: a slow follower delays nobody. A follower that lags behind
 * the whole log is cut off; it comes again, and gets a snapshot. Without followers nothing is kept.
 */
#ifndef KV_SELECTOR_NOTICES_H
#define KV_SELECTOR_NOTICES_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "http/pipe.h"

#define KSEL_NOTICES_BYTES (8u << 20)

/** A stream to a peer. Owned by the thread that writes it. */
struct ksel_follower {
    struct kh_pipe *pipe;
    uint64_t at; /* bytes of the log that were taken */
    bool parked; /* waits for a nudge of its pipe */
    struct ksel_follower *next;
};

struct ksel_notices {
    pthread_mutex_t lock; /* guards all below, and the followers */
    char *ring;           /* size bytes, allocated for the first follower */
    size_t size;
    uint64_t head; /* bytes that were appended, ever */
    struct ksel_follower *followers;
    bool ended;
};

void ksel_notices_init(struct ksel_notices *notices, size_t size);
void ksel_notices_fini(struct ksel_notices *notices); /* no follower is left */

/** Append a line, and wake the followers that wait. */
void ksel_notices_add(struct ksel_notices *notices, const char *line, size_t len);

/** Add @follower, who gets what is appended from now on. Returns 0 or -ENOMEM. */
int ksel_notices_join(struct ksel_notices *notices, struct ksel_follower *follower);
void ksel_notices_leave(struct ksel_notices *notices, struct ksel_follower *follower);
/** Return the number of followers. */
size_t ksel_notices_followers(struct ksel_notices *notices);

/**
 * Move up to @max bytes of what @follower lacks into @out. Returns their number; 0: none, the next line
 * nudges its pipe; -EOVERFLOW: some have been overwritten; -EPIPE: none, and no more will come.
 */
long ksel_notices_take(struct ksel_notices *notices, struct ksel_follower *follower,
                       struct kv_buf *out, size_t max);

/** Let followers end once they have taken all. */
void ksel_notices_end(struct ksel_notices *notices);

#endif
