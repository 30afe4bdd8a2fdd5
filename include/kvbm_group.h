// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_group.h: one transfer for all ranks of a tensor-parallel engine (docs/kvbm-tiers.md,
 * "Leader and workers"). The leader decides which blocks move from where to where; each rank's
 * worker moves its own part of them, between layouts of its own.
 *
 *   leader                                          worker of each rank
 *   kvbm_leader_create(agent, n_ranks)
 *            ◄─────── rank, places ──────────────── kvbm_worker_join(session with the leader)
 *   all ranks are there ── blocks of each place ──►  returns
 *   kvbm_leader_submit ─── from, to, blocks ──────►  kvbm_copier_submit
 *            ◄─────── status, ok ────────────────── copied
 *   done: a block is whole when it is on every rank
 *
 * Requests travel in the sessions of kvbm_remote.h: tokens, TLS and fingerprints are theirs. A
 * process that is the leader and a worker has two agents.
 *
 * Errors are negative errno values, with the reason in the log. A NULL pointer that must not be NULL
 * is -EINVAL. Threads: any function from any thread; nothing may use an object while another thread
 * destroys it.
 */
#ifndef KVBM_GROUP_H
#define KVBM_GROUP_H

#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_remote.h"
#include "kvbm_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVBM_MAX_RANKS 1024
#define KVBM_MAX_PLACES 8
#define KVBM_MAX_GROUP_BLOCKS 65536 /* of one transfer */

/* ---------------------------------------------------------------------------------------------
 * Workers.
 */

/** Memory of a worker that its leader may name. In arrays; never grows. */
struct kvbm_group_place {
    uint32_t id; /* the same on all ranks; by custom 0 is the device, 1 the host, 2 the disk */
    uint32_t reserved;                /* zero */
    const struct kvbm_layout *layout; /* outlives the worker */
};

/** Options of a worker; set size to sizeof(struct kvbm_worker_opts), zero means the default. */
struct kvbm_worker_opts {
    size_t size;
    uint32_t rank, n_ranks;                /* rank < n_ranks <= KVBM_MAX_RANKS */
    const struct kvbm_group_place *places; /* [n_places], copied; each id once */
    uint32_t n_places;                     /* 1 to KVBM_MAX_PLACES */
    struct kvbm_copier *copier;            /* required; outlives the worker */
    uint64_t timeout_ms;                   /* until all ranks are there; 0: 60,000 */
    char *why; /* [why_size] gets the reason of a failure in words, or NULL */
    size_t why_size;
};
#define KVBM_WORKER_OPTS_INIT KV_INIT_(kvbm_worker_opts)

/** One rank's part of a group. */
struct kvbm_worker;

/**
 * Join the group whose leader is the peer of @session, and wait until all ranks have. From then on
 * the worker serves the leader's transfers, on the agent's thread and the copier's. The caller owns
 * *@ret and ends it with kvbm_worker_leave. Returns 0, or
 *   -EINVAL      an option; a rank beyond the leader's n_ranks, or another n_ranks
 *   -EEXIST      another worker has this rank, or this agent has joined a group
 *   -EMEDIUMTYPE places of other ids, layers, parts or tokens a block than those of other ranks; or
 *                fewer blocks than a group that runs has been told of
 *   -EOPNOTSUPP  the peer leads no group
 *   -ETIMEDOUT   not all ranks have come in time, or the leader doesn't answer
 *   -EPIPE       the session has ended
 *   -EDEADLK     called from a callback of the agent
 *   -EPROTO, -ENOMEM
 */
KV_API int kvbm_worker_join(struct kvbm_session *session, const struct kvbm_worker_opts *opts,
                            struct kvbm_worker **ret);

/**
 * Return how many blocks of place @id all ranks have: the least of their numbers, by which the
 * group's pools are sized. -ENOENT: no such place.
 */
KV_API int64_t kvbm_worker_blocks(const struct kvbm_worker *worker, uint32_t id);

/**
 * Leave the group, wait for copies that run, and free. The leader's transfers fail until the rank
 * has joined again. NULL is a no-op. Not from a callback of the agent or of the copier.
 */
KV_API void kvbm_worker_leave(struct kvbm_worker *worker);

/* ---------------------------------------------------------------------------------------------
 * The leader.
 */

/** Options of a leader; set size to sizeof(struct kvbm_leader_opts), zero means the default. */
struct kvbm_leader_opts {
    size_t size;
    uint32_t n_ranks; /* 1 to KVBM_MAX_RANKS */
    /* Transfers at a time that aren't over, or whose result wasn't taken; 0: 64, at most 4096. */
    uint32_t max_transfers;
};
#define KVBM_LEADER_OPTS_INIT KV_INIT_(kvbm_leader_opts)

/** The side of a group that decides. */
struct kvbm_leader;

/**
 * Lead a group: workers may join by sessions with @agent from now on. One group an agent. The caller
 * owns *@ret and frees it with kvbm_leader_destroy. Returns 0; -EINVAL; -EEXIST (this agent leads a
 * group); -ENOMEM; -EAGAIN (no thread); -EMFILE.
 */
KV_API int kvbm_leader_create(struct kvbm_agent *agent, const struct kvbm_leader_opts *opts,
                              struct kvbm_leader **ret);

/**
 * Free a leader. NULL is a no-op. Returns 0; -EBUSY while transfers aren't over (nothing is freed;
 * kvbm_leader_over waits for one). Not from a callback of the agent.
 */
KV_API int kvbm_leader_destroy(struct kvbm_leader *leader);

/**
 * Wait until all ranks have joined. @why ([@why_size], or NULL) gets the ranks that lack. Returns 0 or
 * -ETIMEDOUT.
 */
KV_API int kvbm_leader_ready(struct kvbm_leader *leader, uint64_t timeout_ms, char *why,
                             size_t why_size);

/** As kvbm_worker_blocks; also -ENOTCONN before all ranks have joined for the first time. */
KV_API int64_t kvbm_leader_blocks(struct kvbm_leader *leader, uint32_t id);

/** Result of a group's transfer. Never grows. */
struct kvbm_group_done {
    uint64_t id, tag;
    /* 0: all blocks on all ranks. Else the error of the first rank that failed: as kvbm_done.status,
     * -EPIPE (its session ended), -ETIMEDOUT (the deadline), or an error of kvbm_copier_submit. */
    int status;
    uint32_t rank;   /* that failed first; UINT32_MAX: none */
    uint32_t n_late; /* ranks that haven't answered: they may still read and write these blocks */
    uint32_t n;      /* blocks of the transfer */
    uint32_t n_ok;   /* blocks that are whole on every rank */
    uint64_t run_ns; /* since submit */
};

/** Take the result of a transfer, on the leader's thread. Must not wait for transfers or destroy. */
typedef void (*kvbm_group_done_fn)(void *arg, const struct kvbm_group_done *done);

/** A transfer of all ranks; set size to sizeof(struct kvbm_group_transfer), zero: the default. */
struct kvbm_group_transfer {
    size_t size;
    uint32_t from, to;              /* ids of places; may be the same */
    const uint32_t *src_blocks;     /* [n], read by submit only */
    const uint32_t *dst_blocks;     /* [n], each once, read by submit only */
    uint32_t n;                     /* 1 to KVBM_MAX_GROUP_BLOCKS */
    uint32_t first_layer, n_layers; /* n_layers 0: all from first_layer on */
    enum kvbm_flow flow;
    int32_t priority;     /* among each worker's copies */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC, by which done is called; 0: when all have answered */
    /* [(n + 7) / 8] bit i: block i is whole on every rank. The caller's memory, valid until done.
     * NULL: not wanted. */
    uint8_t *ok;
    kvbm_group_done_fn done; /* gets the result; NULL: kvbm_leader_wait returns it */
    void *arg;               /* of done */
    uint64_t tag;            /* returned in the result */
};
#define KVBM_GROUP_TRANSFER_INIT KV_INIT_(kvbm_group_transfer)

/**
 * Hand a transfer to all workers. Doesn't wait for them. Returns its id > 0, or
 *   -EINVAL    places that the group hasn't, blocks beyond kvbm_leader_blocks, a target twice, n
 *   -ENOTCONN  a rank isn't there (kvbm_leader_ready says which)
 *   -EAGAIN    max_transfers aren't over, or have results that kvbm_leader_wait hasn't taken
 *   -ENOMEM
 */
KV_API int64_t kvbm_leader_submit(struct kvbm_leader *leader,
                                  const struct kvbm_group_transfer *transfer);

/**
 * Tell the workers to leave out blocks that they haven't begun. The result comes as always. Returns
 * 0; -ENOENT (no such transfer, or it is over).
 */
KV_API int kvbm_leader_cancel(struct kvbm_leader *leader, uint64_t id);

/**
 * Wait up to @timeout_ms for a transfer without a callback and take its result; @ret may be NULL.
 * Returns 0; -ETIMEDOUT; -ENOENT (no such transfer, or its result was taken).
 */
KV_API int kvbm_leader_wait(struct kvbm_leader *leader, uint64_t id, uint64_t timeout_ms,
                            struct kvbm_group_done *ret);

/**
 * Wait up to @timeout_ms until a transfer is over: no rank of the group uses its blocks any more,
 * because it has answered, or its session has ended. Until then the blocks of a transfer with
 * n_late > 0 must not be used for anything else: a rank that was frozen may go on. Returns 0 (also
 * for ids that are unknown); -ETIMEDOUT.
 */
KV_API int kvbm_leader_over(struct kvbm_leader *leader, uint64_t id, uint64_t timeout_ms);

#ifdef __cplusplus
}
#endif
#endif
