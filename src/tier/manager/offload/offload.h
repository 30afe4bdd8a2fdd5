// SPDX-License-Identifier: Apache-2.0
/** Offloads: which blocks are copied to which tier below, and when. */
#ifndef KVBM_TIER_MANAGER_OFFLOAD_H
#define KVBM_TIER_MANAGER_OFFLOAD_H

#include "tier/manager/state/manager.h"

/* queue.c */
/** True when the policy of @tier takes a block that it lacks. Counts an offer. */
bool kvbm_policy_passes(struct kvbm_manager *m, enum kv_tier tier, uint64_t hash,
                        uint32_t priority);
/** As kvbm_policy_passes, for a block that was offered before. Counts nothing. */
bool kvbm_policy_takes(const struct kvbm_manager *m, enum kv_tier tier, uint64_t hash,
                       uint32_t priority);
/**
 * Queue a block for offloading. When the queue is full or the manager ends, ends the offload
 * (kvbm_down_ended), counts a drop and returns an error.
 */
int kvbm_queue_push(struct kvbm_manager *m, enum kv_tier to, struct kvbm_down down);
/** Take the first entry out of a queue, which has one. */
struct kvbm_down kvbm_queue_pop(struct kvbm_queue *q);
/** Drop the queued offloads that a direct job waits for. */
void kvbm_queue_drop_of(struct kvbm_job_ *job);
/** Finish an offload, successful or not: drop its pin, and tell the job that waits for it. */
void kvbm_down_ended(struct kvbm_manager *m, struct kvbm_down *down, bool arrived);
/**
 * Mark a queue as stalled or not. The mover retries stalled queues when an operation ends, and
 * after a pause.
 */
void kvbm_queue_stall(struct kvbm_manager *m, struct kvbm_queue *q, bool stalled);

/* promise.c */
/** Allocate the promises of a host tier with tiers below. Returns 0 or -ENOMEM. */
int kvbm_promises_open(struct kvbm_manager *m);
/**
 * Promise a block: hold it until a tier below has it. Returns the promise's number, with one
 * reference; 0: it is promised already, or there is no memory.
 */
uint64_t kvbm_promise_make(struct kvbm_manager *m, const struct kvbm_immutable *block,
                           uint64_t hash);
bool kvbm_promise_is_made(const struct kvbm_manager *m, uint32_t block);
/** Count an offload that keeps the promise of a host block. */
void kvbm_promise_ref(struct kvbm_manager *m, uint32_t block);
/** Drop a reference. The last one, or a tier that has the block (@arrived), ends the promise. */
void kvbm_promise_put(struct kvbm_manager *m, uint32_t block, uint64_t number, bool arrived);
/** Drop the reference of an offload that has ended. */
void kvbm_promise_end(struct kvbm_manager *m, const struct kvbm_down *down, bool arrived);
/** True while a key is promised, and no tier below has it. */
bool kvbm_promise_awaits(const struct kvbm_manager *m, uint32_t group, const void *key);
/** End the promises of @n keys, which are to be removed. */
void kvbm_promise_forget(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, uint32_t n);
/** Number of blocks that may be promised now; without tiers below the size of the host tier. */
uint32_t kvbm_promises_room(const struct kvbm_manager *m);
/**
 * Claim room for @n promises, of kvbm_promises_room, that a store is going to make: other stores
 * get less meanwhile. Returns the number to give back.
 */
uint32_t kvbm_promises_claim(struct kvbm_manager *m, uint32_t n);
/**
 * Give a claim back when its store has made its promises. Takes the manager's lock; the manager may
 * be freed on return.
 */
void kvbm_promises_unclaim(struct kvbm_manager *m, uint32_t n);

/* once.c */
/**
 * Begin the move of an entry taken out of the queue of @to. False: its key moves already, and the
 * entry waits aside until that move ends.
 */
bool kvbm_once_begin(struct kvbm_queue *q, enum kv_tier to, struct kvbm_down *down);
/** End the move of an entry, if it has begun: queue the entries of its key that waited aside. */
void kvbm_once_end(struct kvbm_down *down);
/** Drop the entries aside that @job waits for; NULL: all. */
void kvbm_once_drop(struct kvbm_manager *m, enum kv_tier to, const struct kvbm_job_ *job);

/* store.c */
/** Wishes of a blocking store for its pin. */
struct kvbm_pin_keeps {
    uint32_t
        n_offered; /* keys offered to the policy by the same call before: it counts them once */
    bool durable;  /* the blocks go to a tier below at once */
};
/** As kvbm_manager_prepare_store, of a blocking store: the blocks are promised (promise.c). */
long kvbm_pin_store(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                    const struct kvbm_pin_keeps *keeps, struct kvbm_pin **ret);
/** Reserve host blocks for a store pin. Returns as kvbm_manager_prepare_store. */
long kvbm_pin_reserve(struct kvbm_pin *pin);
/** Commit as kvbm_pin_commit. @through, if not NULL, waits for the blocks' offload. */
long kvbm_pin_commit_locked(struct kvbm_pin *pin, const uint8_t *ok, struct kvbm_job_ *through);

/* move.c */
/** Begin a move of the first blocks of a tier's queue. */
void kvbm_move_some(struct kvbm_manager *m, enum kv_tier to);
/** Keep block @k of a move: put it at *@n and count *@n up. The caller drops the others. */
void kvbm_move_keep(struct kvbm_move *move, uint32_t k, uint32_t *n);
/** Keep a block of a disk volume that is out of use from being allocated again. */
void kvbm_quarantine(struct kvbm_manager *m, struct kvbm_mutable block);

/* move_io.c */
/**
 * Submit a move to its executor. When that has no room or refuses, the blocks return to the queue
 * or are dropped. Takes the move over.
 */
void kvbm_move_launch(struct kvbm_manager *m, struct kvbm_move *move);
/** Release @like of a move. @again: kvbm_pool_leaving may list it once more. */
void kvbm_move_release(const struct kvbm_move *move, struct kvbm_immutable *like, bool again);

/* offload.c */
/**
 * Queue items [i, i + n), which have just entered the host tier, for the tiers below, as the
 * policies choose. @through (may be NULL) waits for them.
 */
void kvbm_offload_items(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through);
/** Queue the blocks of a store pin that were in the host tier before it, and that no tier below has. */
void kvbm_offload_again(struct kvbm_pin *pin);
/** STEP_OFFER: queue the blocks that ended fetches have brought, and free these fetches. */
void kvbm_offload_brought(struct kvbm_manager *m);
/** True when an offload to @to may begin: the queue has an entry, and there is room for a move. */
static inline bool kvbm_queue_may_move(const struct kvbm_queue *q)
{
    return q->n && !q->stalled && q->in_flight < q->max_in_flight;
}
/** STEP_PUMP: begin as many moves to the disk and the object store as these have room for. */
void kvbm_offload_pump(struct kvbm_manager *m);
/** Drop all queued offloads. */
void kvbm_offload_drop_all(struct kvbm_manager *m);
/** True when the host tier has a key, and no tier below has it. With or without the lock. */
bool kvbm_offload_awaits(const struct kvbm_manager *m, uint32_t group, const void *key);

/* write_back.c */
/** Allocate the buffers of write-back. Returns 0 or -ENOMEM. */
int kvbm_write_back_open(struct kvbm_manager *m);
/** Queue for the object store the blocks that the host and disk pools will evict next. */
void kvbm_write_back(struct kvbm_manager *m);
/**
 * Retry write-back of @pool's next victims after further allocations: reading some of them failed.
 */
void kvbm_write_back_later(struct kvbm_manager *m, struct kvbm_pool *pool);
/**
 * Queue for the object store every block that only the host tier holds. destroy calls this before
 * it frees host memory.
 */
void kvbm_write_back_all(struct kvbm_manager *m);
/** Number of blocks evicted before write-back could queue them. */
uint64_t kvbm_write_back_lost(const struct kvbm_manager *m);

#endif
