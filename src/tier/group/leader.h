// SPDX-License-Identifier: Apache-2.0
/**
 * The leader's state. leader.c has the ranks, orders.c the transfers.
 *
 *   submit: a call to each rank                          leader's thread
 *   call ends ── event thread: answer.ended, wake ─────► takes answers, merges ok bits
 *                                                        all answered, or the deadline: done
 *                                                        all calls ended: over, freed
 *
 * Locks: the leader's is taken before a session's, never the other way: what runs with a session's
 * lock held (kvbm_call_watch) sets a flag and signals.
 */
#ifndef KVBM_GROUP_LEADER_H
#define KVBM_GROUP_LEADER_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "base/thread/thread.h"
#include "peer/session/session.h"
#include "tier/group/wire.h"

/** A rank of the group. Under the leader's lock. */
struct kvbm_rank {
    struct kvbm_session *session; /* a reference; NULL: hasn't joined */
    uint64_t request;             /* its join, not answered yet; 0: answered */
    struct kvbm_joining told;
};

/** Answer of one rank to a transfer. */
struct kvbm_answer {
    struct kv_wake *wake;
    atomic_bool ended;      /* the call */
    struct kvbm_call *call; /* NULL: no answer is awaited */
};

/** A transfer that isn't over. Under the leader's lock. */
struct kvbm_order {
    LIST_ENTRY(kvbm_order) list;
    uint64_t begin_ns, deadline_ns; /* deadline 0: none */
    uint8_t *ok;                    /* the caller's, until done */
    kvbm_group_done_fn fn;
    void *arg;
    struct kvbm_group_done done;
    uint32_t n_pending; /* answers awaited */
    bool ended;         /* done is final */
    bool taken;         /* done was called, or kvbm_leader_wait has the result */
    uint8_t *all_ok;    /* of the answers so far */
    struct kvbm_answer answers[];
};

struct kvbm_leader {
    struct kvbm_agent *agent;
    uint32_t n_ranks, max_transfers;
    pthread_t thread;
    struct kv_wake wake;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* a rank joined, a transfer is done or over */
    bool stop;
    bool started;               /* all ranks were there once: n_blocks has been told */
    struct kvbm_joining common; /* places of the group; n_blocks: the least of all ranks */
    uint64_t next_id;
    uint32_t n_orders;
    LIST_HEAD(kvbm_orders, kvbm_order) orders;
    struct kvbm_rank ranks[];
};

/** Return the first rank that isn't there, or n_ranks. With the lock held. */
uint32_t kvbm_leader_lacks(struct kvbm_leader *leader);

/** Find a place of the group; NULL: none. With the lock held. */
const struct kvbm_place_facts *kvbm_leader_place(const struct kvbm_leader *leader, uint32_t id);

/** Tell whether all transfers are over and told: nothing but results is left. With the lock held. */
bool kvbm_leader_is_idle(const struct kvbm_leader *leader);

/** Free the results that nobody took, of a leader that is idle and ends. */
void kvbm_leader_drop_results(struct kvbm_leader *leader);

/** The leader's thread: ends transfers until `stop`. */
void *kvbm_leader_run(void *leader);

#endif
