// SPDX-License-Identifier: Apache-2.0
/*
 * Shared by the manager's parts: its lock, and what all of them call. Its structs are in types.h; the
 * parts' own calls are in pin.h, fetch.h, job.h, offload.h and presence.h.
 *
 *   manager.c        options, creation
 *   config.c         options from a file and the environment
 *   tiers.c          pools and stores of the tiers, and the copier
 *   lent.c           callers' memory in use as host tiers of this process
 *   end.c            destruction: checks for pins, handles and pools in use
 *   cache.c          attached caches
 *   pin.c            pins: a list of keys, some with a host block
 *   pin_store.c      pins of stores: blocks reserved, then registered
 *   fetch.c          disk and object blocks are read into a pin's host blocks
 *   fetch_io.c       batches of fetches, handed to the executors
 *   fetch_end.c      ends of fetches
 *   fetch_peers.c    which blocks of a pin peers are asked for, and when
 *   leased.c         blocks of peers that jobs copy from where they lie
 *   peers.c          the agent, its directory, lookups at peers
 *   job.c            jobs: copies between a pin's host blocks and a cache
 *   job_calls.c      connectors' calls on jobs: submit, cancel, poll, wait
 *   keys.c           blocking stores and loads by keys, over pins and jobs
 *   turn.c           blocking calls that wait for host blocks take turns
 *   direct.c         jobs between a cache and the tiers below, without host blocks
 *   onboard.c        blocking loads into a cache's pool, by hashes or handles
 *   offload.c        offloads: which blocks are offered, when a copy begins
 *   down_queue.c     offload queues: policies, heaps of weak handles
 *   once.c           staged blocks: one move of a key to a tier at a time
 *   offload_store.c  offload from a cache's pool into the host tier
 *   move.c           moves to disk and object store: which blocks, and their targets
 *   move_io.c        moves: reading, writing, completion
 *   promise.c        blocks of blocking stores are held until a tier below has them
 *   write_back.c     blocks are written to the object store before eviction
 *   presence.c       which keys the object store has, as far as known; EXISTS queries
 *   remove.c         keys removed from every tier
 *   where.c          which tier has each key
 *   source.c         blocks that peers lease: pins, with fetches first where they are below
 *   mover.c          next steps of ended operations; deadlines
 *   stats.c          statistics
 *
 * One lock guards the manager. The executors (copier, disk, object) call back on threads of their
 * own, which take the next step themselves: waking another thread would often take longer than the
 * step. No code waits for an executor with the lock held. Order of locks: the manager's, then the
 * registry's or an executor's.
 */
#ifndef KVBM_TIER_MANAGER_MANAGER_H
#define KVBM_TIER_MANAGER_MANAGER_H

#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/xxh.h"
#include "tier/manager/types.h"

static inline void kvbm_manager_enter(struct kvbm_manager *m)
{
    pthread_mutex_lock(&m->lock);
}

static inline void kvbm_manager_leave(struct kvbm_manager *m)
{
    pthread_mutex_unlock(&m->lock);
}

/** Check that calls may use @m. Returns 0; -EINVAL (NULL); -ECHILD (in a child after fork). */
int kvbm_manager_usable(const struct kvbm_manager *m);

/**
 * Report the end of an operation on an executor's thread, without the lock: takes the lock and
 * calls @run. The note may be freed by then.
 */
void kvbm_note(struct kvbm_manager *m, struct kvbm_note *note,
               void (*run)(struct kvbm_manager *m, struct kvbm_note *note));
/** Have the mover call @run. With the lock. */
void kvbm_note_later(struct kvbm_manager *m, struct kvbm_note *note,
                     void (*run)(struct kvbm_manager *m, struct kvbm_note *note));

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

/** Take host_memory for @m. Returns 0; -EBUSY: another manager of this process has a part of it. */
int kvbm_memory_lend(struct kvbm_manager *m);
/** Give host_memory back; no-op for a manager that hasn't taken it. */
void kvbm_memory_return(struct kvbm_manager *m);

/** End the thread that finishes holds of peers; none is left. No-op without a thread. */
void kvbm_lending_stop(struct kvbm_manager *m);

static inline uint64_t kvbm_key_hash(const struct kvbm_manager *m, uint32_t group, const void *key)
{
    return kv_xxh64(key, m->key_len, group + 1);
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

/* cache.c */
/** Check blocks of a cache as kvbm_ids_check. Returns 0; -EINVAL (the log says why); -ENOMEM. */
int kvbm_cache_check(const struct kvbm_cache *cache, const uint32_t *blocks, size_t n,
                     unsigned flags);

/** Leave the caches to their owners, who free them with kvbm_cache_detach after the manager's end. */
void kvbm_caches_orphan(struct kvbm_manager *m);

/* end.c */
/** Free a manager with no running operation. Waits for calls that hang in the object store until
 * @deadline_ns. */
void kvbm_manager_free(struct kvbm_manager *m, uint64_t deadline_ns);

/* mover.c: with the lock, or before any other thread has the manager. */
int kvbm_mover_start(struct kvbm_manager *m);
/** Wait for running operations, then end the mover. -ETIMEDOUT: the mover goes on. */
int kvbm_mover_end(struct kvbm_manager *m, uint64_t deadline_ns);
/** Wait until the manager signals a change. Returns 0 or -ETIMEDOUT. */
int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns);
/** End the wait of one of n_waiters. Releases the lock; the manager may be freed by then. */
void kvbm_waiter_leaves(struct kvbm_manager *m);

/* where.c */
/** As kvbm_manager_lookup, of this node's own tiers. */
long kvbm_lookup_own(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                     uint8_t *ret);

#endif
