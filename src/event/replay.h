// SPDX-License-Identifier: Apache-2.0
/**
 * The replay side of a publisher: a ROUTER that answers requests from the ring, a slice at a time,
 * so that live batches go out in between. Used from the publisher's thread only.
 */
#ifndef KV_EVENT_REPLAY_H
#define KV_EVENT_REPLAY_H

#include "event/ring.h"
#include "kv_event.h"

/** Clients served at the same time; a request beyond is left unanswered, and its client tries
 * again. */
#define KVE_MAX_REPLAYS 16

/** One client being served. */
struct kve_replay_job {
    zmq_msg_t peer;      /* routing id; empty: the job is free */
    uint64_t next, stop; /* sequences in [next, stop) are due, then the end marker */
    uint64_t stalled_ns; /* since when the client takes nothing; 0: it does */
};

struct kve_replay {
    void *router; /* NULL: no replay */
    struct kve_ring *ring;
    enum kve_replay_framing framing;
    const char *topic;
    struct kve_replay_job jobs[KVE_MAX_REPLAYS];
    unsigned n_jobs, n_stalled;
    uint64_t requests, batches; /* served so far */
};

void kve_replay_init(struct kve_replay *replay, void *router, struct kve_ring *ring,
                     enum kve_replay_framing framing, const char *topic);
void kve_replay_fini(struct kve_replay *replay);

/** Take waiting requests; what is asked for ends before @next_sequence. */
void kve_replay_receive(struct kve_replay *replay, uint64_t next_sequence);

/** Send some of what is due. */
void kve_replay_serve(struct kve_replay *replay);

/** How long the thread may sleep on account of replays, in milliseconds; -1: for ever. */
long kve_replay_timeout_ms(const struct kve_replay *replay);

#endif
