// SPDX-License-Identifier: Apache-2.0
/** Insides of the peer tier: peers.c (queue, threads), work.c (batches), known.c, gate.c. */
#ifndef KVBM_TIER_PEER_IMPL_H
#define KVBM_TIER_PEER_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "peer/lease/ask.h"
#include "peer/lease/lend.h"
#include "peer/session/session.h"
#include "tier/peer/peer.h"

#define KVBM_MAX_ASKED_PEERS 16u
#define KVBM_MAX_NAMED 4u     /* workers that an indexer names, of an ASK */
#define KVBM_KNOWN_SETS 4096u /* of KVBM_KNOWN_WAYS: 1 MiB */
#define KVBM_KNOWN_WAYS 8u
#define KVBM_MAX_GATES 256u

/** Knowledge about a key. */
struct kvbm_knowledge {
    uint64_t hash, worker, until_ns; /* until_ns 0: nothing */
    uint8_t what;                    /* enum kvbm_known */
};

/** Breaker of a peer that has failed lately; peers without one are fine. */
struct kvbm_gate {
    uint64_t worker, next_ns, pause_ns;
    uint32_t failures;
    bool open, probing;
};

/** Work of one thread now. */
struct kvbm_peer_slot {
    struct kvbm_peer_batch *batch; /* NULL: none */
    struct kvbm_session *session;  /* a reference; in which it may wait. NULL: none */
};

struct kvbm_peers {
    struct kvbm_peers_opts opts;
    pthread_t *threads;           /* [opts.n_threads], then the one that watches deadlines */
    struct kvbm_peer_slot *slots; /* [opts.n_threads] */
    uint32_t n_started;
    _Atomic uint64_t any_until_ns; /* until then somebody can be asked, as far as is known */
    struct kvbm_indexer *indexer;  /* NULL: none */
    bool hears;                    /* serves KVBM_TELL_GONE; else another tier of this agent does */

    pthread_mutex_t lock; /* all below, and slots */
    pthread_cond_t work, late;
    struct kvbm_peer_batch *queue; /* oldest first */
    uint32_t n_queued, n_free;     /* n_free: slots that wait */
    bool ending, stopping;
    uint32_t turn; /* which peers are asked first, when there are too many */
    struct kvbm_knowledge known[KVBM_KNOWN_SETS][KVBM_KNOWN_WAYS];
    struct kvbm_gate gates[KVBM_MAX_GATES];
    uint32_t n_gates;
    struct kvbm_peers_stats stats;
};

/** Tell whether the blocks of a session's peer fit, as kvbm_session_fits does. Any thread. */
static inline bool kvbm_peers_fit(const struct kvbm_peers *peers, struct kvbm_session *session)
{
    return kvbm_session_fits(session, peers->opts.set, peers->opts.like, peers->opts.shard) == 0;
}

/**
 * Ask the indexer who may have the @n keys of an ASK. *@ret become sessions with such peers, of which
 * the caller drops the references. Returns their number. Without the lock.
 */
uint32_t kvbm_peers_named(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch,
                          const uint8_t *keys, struct kvbm_session *ret[KVBM_MAX_NAMED]);

/** Run a batch on the thread of @slot: fill in the results of its keys. Without the lock. */
void kvbm_peers_run(struct kvbm_peers *peers, struct kvbm_peer_slot *slot,
                    struct kvbm_peer_batch *batch);

/** Note what is known of a key, with the lock held. */
void kvbm_known_set(struct kvbm_peers *peers, uint64_t hash, enum kvbm_known what, uint64_t worker,
                    uint64_t until_ns);

/**
 * Forget that a key was asked for until @until_ns: the question ended without an answer. A later
 * question counts on. With the lock.
 */
void kvbm_known_unask(struct kvbm_peers *peers, uint64_t hash, uint64_t until_ns);

/** Take a note KVBM_TELL_GONE. A kvbm_serve_fn; @arg is the tier. */
void kvbm_known_gone(void *arg, struct kvbm_session *session, struct kvbm_request *request);

/** Tell whether a peer may be called now; an open breaker lets one probe through. With the lock. */
bool kvbm_gate_passes(struct kvbm_peers *peers, uint64_t worker, uint64_t now_ns);

/** As kvbm_gate_passes, without using up the probe. With the lock. */
bool kvbm_gate_would_pass(const struct kvbm_peers *peers, uint64_t worker, uint64_t now_ns);

/** Note that a call has ended which says nothing of the peer: another may probe. With the lock. */
void kvbm_gate_release(struct kvbm_peers *peers, uint64_t worker);

/** Note how a call to a peer has ended. @hard: it wasn't answered in time. With the lock. */
void kvbm_gate_tell(struct kvbm_peers *peers, uint64_t worker, bool ok, bool hard);

#endif
