// SPDX-License-Identifier: Apache-2.0
/**
 * Replay service of a publisher: a ROUTER that answers requests from the ring. It sends a slice at
 * a time, so that live batches go out in between. Only the publisher's thread uses it.
 */
#ifndef KV_EVENT_PUBLISHER_REPLAY_H
#define KV_EVENT_PUBLISHER_REPLAY_H

#include "event/publisher/ring.h"
#include "kv_event.h"

/**
 * Most clients served at the same time. Further requests stay unanswered; their clients try again.
 */
#define KVE_MAX_REPLAYS 16

/** A client being served. */
struct kve_replay_job {
    zmq_msg_t peer;      /* routing id; empty: the job is free */
    uint64_t next, stop; /* sequences [next, stop) are still to send, then the end marker */
    uint64_t stalled_ns; /* time since which the client takes no message; 0: it takes them */
};

struct kve_replay {
    void *router; /* NULL: no replay service */
    struct kve_ring *ring;
    enum kve_replay_framing framing;
    const char *topic;
    struct kve_replay_job jobs[KVE_MAX_REPLAYS];
    unsigned n_jobs, n_stalled;
    uint64_t requests, batches; /* totals since the start */
};

void kve_replay_init(struct kve_replay *replay, void *router, struct kve_ring *ring,
                     enum kve_replay_framing framing, const char *topic);
void kve_replay_fini(struct kve_replay *replay);

/** Read waiting requests. Replays end before @next_sequence. */
void kve_replay_receive(struct kve_replay *replay, uint64_t next_sequence);

/** Send one slice to each client. */
void kve_replay_serve(struct kve_replay *replay);

/** Return how long the thread may sleep before replays need it, in milliseconds; -1: for ever. */
long kve_replay_timeout_ms(const struct kve_replay *replay);

#endif
