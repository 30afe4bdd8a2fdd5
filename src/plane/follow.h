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
 * The first request goes out at once. The next one waits for a pause (kvp_follow_pause) behind the
 * request, or the last part of its answer: so neither gaps behind every snapshot, nor two publishers
 * under one subject, nor many followers with the same gap keep a publisher at work. In a row of
 * requests without a whole view the pause grows to 32 to 48 s.
 *
 * Threads: callbacks run on threads of the client and of the follower, one at a time, and must not call
 * this follower.
 */
#ifndef KV_PLANE_FOLLOW_H
#define KV_PLANE_FOLLOW_H

#include "plane/nats.h"

struct kvp_follow;

/** Calls of a follower about a publisher. All but heard are required. */
struct kvp_follow_ops {
    /**
     * A message of @publisher has come, of whatever kind: it lives. @first: it isn't known, or was
     * forgotten. Returns false to forget it with this message, which takes no place then. NULL: all are
     * followed.
     */
    bool (*heard)(void *arg, const char *publisher, bool first);
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
    uint32_t max_publishers; /* 0: 4096; messages of more are left out, counted and logged */
    uint32_t retry_ms;       /* shortest pause between two requests; 0: 2000 */
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
    uint64_t refused;  /* messages of publishers for which there was no place, or no memory */
    uint64_t unwanted; /* messages of new publishers that heard didn't want */
    uint64_t twins;    /* times that another publisher of the same subject was heard again */
    uint64_t buffered_bytes, overflows; /* waiting now; times when the buffer was full */
    struct kvp_nats_stats nats;
};
void kvp_follow_get_stats(struct kvp_follow *follow, struct kvp_follow_stats *ret);

/**
 * Return the pause behind request @n (from 0) of a row without a whole view: @retry_ns, doubled @n times
 * and at most 4, and up to half as much again by @random.
 */
uint64_t kvp_follow_pause(uint64_t retry_ns, unsigned n, uint64_t random);

#endif
