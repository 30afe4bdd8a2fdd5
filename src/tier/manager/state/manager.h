// SPDX-License-Identifier: Apache-2.0
/*
 * Shared by all parts of the manager: its lock, the steps that a change makes necessary, and small
 * functions that every part calls. The structs are in types.h.
 *
 * One lock guards the manager. Invariant: whenever the lock is free, no step is due. A part that
 * changes something sets the step's bit (kvbm_step_due); leaving the lock, and waiting under it,
 * take the steps (kvbm_advance). So no part calls one above it, and no step runs inside a walk of a
 * list.
 *
 *   state   ◄── pins ◄── offload ◄── jobs ◄── the manager's own files
 *               keys up   blocks down  copies   advance.c takes the steps of all of them
 *
 * The executors (copier, disk, object, peers) call back on threads of their own, without the lock,
 * and never inside a submit. These threads take the next steps themselves: waking another thread
 * would often take longer than the step. No code waits for an executor with the lock held. Order of
 * locks: the manager's, then the registry's or an executor's.
 */
#ifndef KVBM_TIER_MANAGER_MANAGER_H
#define KVBM_TIER_MANAGER_MANAGER_H

#include <assert.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "tier/manager/state/types.h"

static inline void kvbm_manager_enter(struct kvbm_manager *m)
{
    pthread_mutex_lock(&m->lock);
    assert(!m->steps); /* the invariant above */
}

/** Note that a step is due. With the lock. */
static inline void kvbm_step_due(struct kvbm_manager *m, enum kvbm_step step)
{
    m->steps |= 1u << step;
}

/** Take all steps that are due, and those that they make due. Returns true if there were any. */
bool kvbm_advance(struct kvbm_manager *m);

static inline void kvbm_manager_leave(struct kvbm_manager *m)
{
    if (m->steps)
        kvbm_advance(m);
    pthread_mutex_unlock(&m->lock);
}

/** Check that calls may use @m. Returns 0; -EINVAL (NULL); -ECHILD (in a child after fork). */
int kvbm_manager_usable(const struct kvbm_manager *m);

/**
 * Report the end of an operation on an executor's thread, without the lock: takes the lock, calls
 * @ended with @operation, and takes the steps that follow. @ended may free the operation.
 */
void kvbm_note(struct kvbm_manager *m, void (*ended)(struct kvbm_manager *m, void *operation),
               void *operation);

/** Milliseconds to a deadline of kv_now_ns' clock, as the blocking calls take them. */
static inline uint32_t kvbm_ms_until(uint64_t deadline_ns)
{
    return (uint32_t)KV_MIN(kv_ms_until(deadline_ns, kv_now_ns()), (int64_t)UINT32_MAX);
}

static inline bool kvbm_staging(const struct kvbm_manager *m)
{
    return !m->opts.host_bytes;
}

static inline void *kvbm_host_address(const struct kvbm_manager *m, uint32_t block)
{
    return (void *)(uintptr_t)(m->host_base +
                               block * m->stride); // NOLINT(performance-no-int-to-ptr)
}

/** True when no offload is queued or running. */
static inline bool kvbm_offload_idle(const struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        if (m->offload.queues[to].n || m->offload.queues[to].in_flight)
            return false;
    }
    return true;
}

/** Have STEP_END finish a job, which is in no list of waiting ones. */
static inline void kvbm_job_is_over(struct kvbm_manager *m, struct kvbm_job_ *job)
{
    job->next_wait = NULL;
    *m->jobs.over_tail = job;
    m->jobs.over_tail = &job->next_wait;
    kvbm_step_due(m, KVBM_STEP_END);
}

/** Take host_memory for @m. Returns 0; -EBUSY: another manager of this process has a part of it. */
int kvbm_memory_take(struct kvbm_manager *m);
/** Give host_memory back; no-op for a manager that hasn't taken it. */
void kvbm_memory_return(struct kvbm_manager *m);

/** End the thread that finishes holds of peers; none is left. No-op without a thread. */
void kvbm_lending_stop(struct kvbm_manager *m);

static inline uint64_t kvbm_key_hash(const struct kvbm_manager *m, uint32_t group, const void *key)
{
    return kv_xxh64(key, m->key_len, group + 1);
}

/** Return true while a pin fetches or stores a key into the host tier: nobody else does then. */
static inline bool kvbm_key_is_pending(const struct kvbm_manager *m, uint64_t hash)
{
    return kvbm_set_has(&m->pins.pending, hash);
}

static inline struct kvbm_pool *kvbm_target_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DISK ? m->disk : m->object;
}

static inline struct kvbm_tier_stats *kvbm_stats_of(struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DEVICE   ? &m->stats.cache
           : tier == KV_TIER_HOST   ? &m->stats.host
           : tier == KV_TIER_DISK   ? &m->stats.disk
           : tier == KVBM_TIER_PEER ? &m->stats.peer
                                    : &m->stats.object;
}

/* tiers.c */
/** Open all tiers of the options and start the mover. On failure call kvbm_manager_free. */
int kvbm_tiers_open(struct kvbm_manager *m);

/* end.c */
/** Free a manager with no running operation. Waits for calls that hang in the object store until
 * @deadline_ns. */
void kvbm_manager_free(struct kvbm_manager *m, uint64_t deadline_ns);

/* mover.c: with the lock, or before any other thread has the manager. */
int kvbm_mover_start(struct kvbm_manager *m);
/** Wait for running operations, then end the mover. -ETIMEDOUT: the mover goes on. */
int kvbm_mover_end(struct kvbm_manager *m, uint64_t deadline_ns);
/**
 * Wait until the manager signals a change. Takes the steps that are due first, and doesn't wait
 * then: they may be the change. Returns 0 or -ETIMEDOUT.
 */
int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns);
/** End the wait of one of n_waiters. Releases the lock; the manager may be freed by then. */
void kvbm_waiter_leaves(struct kvbm_manager *m);

/* where.c */
/** As kvbm_manager_lookup, of this node's own tiers, as far as they are known: asks none of them. */
long kvbm_lookup_own(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                     uint8_t *ret);

#endif
