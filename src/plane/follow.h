// SPDX-License-Identifier: Apache-2.0
/**
 * Follow the publishers of the event plane: keep what they have, through lost messages and restarts.
 *
 *            first message, gap, other incarnation
 *   whole ───────────────────────────────────────────► waiting: ask SUBJECT.snapshot,
 *     ▲                                                │        keep live messages
 *     │  live messages from the snapshot's sequence on │
 *     └────────────────── reset, records ◄─────────────┘
 *
 * A gap shows at the next message of the publisher: an ALIVE one at the latest. A snapshot whose
 * parts got lost is asked for again, at a message that comes 2 s or more behind the last part.
 *
 * Threads: callbacks run on threads of the client, one at a time, and must not call this follower.
 */
#ifndef KV_PLANE_FOLLOW_H
#define KV_PLANE_FOLLOW_H

#include "plane/nats.h"

struct kvp_follow;

/** Calls of a follower about a publisher. All but heard are required. */
struct kvp_follow_ops {
    /** A message of @publisher has come, of whatever kind: it lives. NULL: nobody asks. */
    void (*heard)(void *arg, const char *publisher);
    /** Forget all blocks of @publisher: a snapshot follows. */
    void (*reset)(void *arg, const char *publisher);
    /** Take a record: @header->publisher has a block, or has it no longer. */
    kvp_record_fn record;
    /** The blocks of @publisher are all that it has, or may lack some and have others too many. */
    void (*whole)(void *arg, const char *publisher, bool whole);
};

struct kvp_follow_opts {
    const struct kvp_nats_opts *server;
    const char *subject;     /* of publishers, may have wildcards; NULL: "kvasir.*.*.*.*" */
    uint64_t buffer_bytes;   /* live messages that wait for a snapshot; 0: 256 MiB */
    uint32_t max_publishers; /* 0: 4096; messages of more are left out and counted */
    uint32_t retry_ms;       /* silence of a snapshot before it is asked for again; 0: 2000 */
};

/** Start to follow. Returns as kvp_nats_open. */
int kvp_follow_open(const struct kvp_follow_opts *opts, const struct kvp_follow_ops *ops, void *arg,
                    struct kvp_follow **ret);
/** Stop. No callback runs after the return. NULL is a no-op. */
void kvp_follow_close(struct kvp_follow *follow);

/**
 * Forget a publisher that isn't heard of any more: its next message is that of a new one. A no-op for one
 * that isn't known. Not from a callback.
 */
void kvp_follow_forget(struct kvp_follow *follow, const char *publisher);

struct kvp_follow_stats {
    uint32_t publishers, whole; /* known now; of these, whole */
    uint64_t records;           /* handed out */
    uint64_t gaps, restarts;    /* seen */
    uint64_t asked, snapshots;  /* snapshots asked for; arrived to the end */
    uint64_t bad;               /* messages that aren't of the plane, or not of their subject */
    uint64_t refused;           /* messages of publishers beyond max_publishers */
    uint64_t buffered_bytes, overflows; /* waiting now; times when the buffer was full */
    struct kvp_nats_stats nats;
};
void kvp_follow_get_stats(struct kvp_follow *follow, struct kvp_follow_stats *ret);

#endif
