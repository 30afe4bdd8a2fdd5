// SPDX-License-Identifier: Apache-2.0
/*
 * Shared by the manager's parts.
 *
 *   manager.c  a manager's options, making it
 *   tiers.c    its tiers' pools and stores, and the copier
 *   end.c      checks for pins, handles and pools in use; taking it apart
 *   cache.c    caches that are attached
 *   pin.c      pins: items, one a key, each with a host block or without
 *   pin_store.c  those of stores: reserved, then findable
 *   fetch.c    disk and object blocks come into host blocks of a pin
 *   job.c      copies between host blocks of a pin and a cache
 *   job_calls.c  calls of connectors on jobs: submit, cancel, poll, wait
 *   offload.c  offloads: which blocks are offered, and when a copy begins
 *   down_queue.c  offload queues: policies, heaps of weak handles
 *   offload_store.c  from a cache's pool into the host tier
 *   move.c, move_io.c  to disk and object store, some blocks at a time: how they begin, how they
 *                      end
 *   write_back.c  blocks go to the object store when they are about to be evicted
 *   presence.c which keys the object store has, as far as is known, and asking it
 *   where.c    which tier has what
 *   mover.c    next steps of ended operations; deadlines
 *
 * One lock guards all of it. The executors (copier, disk, object) call back from threads of their
 * own, and those go on with the next step: a thread that had to be woken for it would often take
 * longer than the step. Nothing under the lock waits for an executor.
 * Order of locks: the manager's, then the registry's or an executor's.
 */
#ifndef KVBM_TIER_MANAGER_MANAGER_H
#define KVBM_TIER_MANAGER_MANAGER_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "base/xxh.h"
#include "bm/pool.h"
#include "kvbm_manager.h"
#include "tier/disk/disk.h"
#include "tier/manager/set.h"
#include "tier/object/object.h"

#define KVBM_MAX_PIN (1u << 20)    /* keys */
#define KVBM_BATCH 32              /* blocks of one fetch or move */
#define KVBM_LET_GO_NS KV_NS_PER_S /* for what hangs when a manager ends, behind its time */
#define KVBM_DOUBTS 8192           /* sets of KVBM_DOUBT_WAYS: 1.5 MiB */
#define KVBM_DOUBT_WAYS 8

/** Something ended: run is called, with the lock. */
struct kvbm_note {
    struct kvbm_note *next;
    void (*run)(struct kvbm_manager *m, struct kvbm_note *note);
};

enum kvbm_item_state {
    ITEM_MISS,
    ITEM_BUSY,    /* to be had, but there was no host block or queue */
    ITEM_WAITS,   /* somebody else brings it */
    ITEM_STARVED, /* to be got from the object store, whose fetches have their share of host blocks */
    ITEM_FETCHED,  /* its host block is being filled from below */
    ITEM_RESERVED, /* store: its host block is the caller's to fill */
    ITEM_STAGED,   /* a host block with its bytes that isn't registered: no host tier */
    ITEM_HELD,     /* a registered host block */
    ITEM_BELOW     /* store, without a host tier: the tiers below have it already */
};

struct kvbm_item {
    uint8_t state;
    uint8_t tried; /* bit per tier that didn't have it after all */
    bool found;    /* counted as a hit */
    struct kvbm_handle host;
    struct kvbm_handle source; /* of the disk pool, while it is read */
};

struct kvbm_pin {
    struct kvbm_manager *manager;
    struct kvbm_pin *prev, *next;
    bool store, released, settled;
    uint32_t refs;      /* the caller's, fetches', jobs', offload entries' */
    uint32_t n_fetches; /* of the refs */
    uint32_t n_copying; /* store jobs that write into its blocks */
    uint32_t n_fetched;
    uint32_t n_waits;   /* items that WAIT or STARVE */
    uint32_t n_starved; /* of these, those that STARVE */
    uint32_t
        object_window; /* blocks of the window that is being got; object_missed: something wasn't there */
    bool object_missed, no_fetch;
    uint8_t retain;           /* store: retention priority of its blocks */
    uint64_t retain_until_ns; /* and its end, 0: none */
    uint64_t deadline_ns;
    int32_t priority; /* of its fetches */
    uint32_t group, position, n;
    bool has_parent;
    uint8_t *keys;          /* [n], behind the parent's */
    struct kvbm_job_ *jobs; /* that wait for it to settle */
    struct kvbm_fetch *fetches;
    struct kvbm_immutable *likes; /* [n] of prepare_load_blocks: what was given, held; else NULL */
    struct kvbm_item items[];
};

/** Blocks of one pin that come from one tier in one batch. */
struct kvbm_fetch {
    struct kvbm_note note; /* first */
    struct kvbm_pin *pin;
    struct kvbm_fetch *next; /* of the pin */
    enum kv_tier tier;
    uint64_t start_ns;
    uint32_t n;
    uint32_t overtaken; /* as of an ask */
    uint32_t index[KVBM_BATCH];
    union {
        struct kvbm_disk_batch disk;
        struct kvbm_object_batch object;
    };
    union {
        struct kvbm_disk_io disk_ios[KVBM_BATCH];
        struct kvbm_object_io object_ios[KVBM_BATCH];
    };
};

struct kvbm_job_ {
    struct kvbm_note note;       /* first */
    struct kvbm_job_ *next;      /* of the manager's */
    struct kvbm_job_ *next_wait; /* of the pin's, or of the stalled ones */
    struct kvbm_pin *pin;
    struct kvbm_cache *cache;
    struct kvbm_done done;
    uint64_t copy_id; /* of the copy; 0: not begun */
    uint64_t submit_ns;
    bool cancelled, copied, waits; /* waits: for its pin, in the pin's list */
    bool own;                      /* waited for by us: poll doesn't tell of it */
    struct kvbm_immutable
        *sources; /* [n] of the cache's pool, held: the job is offload's own, not polled */
    uint32_t first_layer, n_layers;
    int32_t priority;
    uint64_t deadline_ns;
    int ready_fd;
    bool own_fd; /* ready_fd is ours: the copier had no room, and the caller may have closed his */
    void *ready_event;
    uint8_t *user_ok;
    uint32_t n_pairs;
    uint32_t n_through; /* of its blocks, those that aren't in the object store yet */
    uint32_t *blocks;   /* [n] the cache's; then the pairs: src, dst, index */
    uint32_t *host, *other, *index;
    uint8_t *ok; /* by pair */
};

struct kvbm_cache {
    struct kvbm_manager *manager;
    struct kvbm_cache *next;
    const struct kvbm_layout *layout;
    struct kvbm_pool *pool;
    uint32_t first_head, n_heads;
    bool partial;    /* some of the heads: a store through it doesn't make blocks whole */
    uint32_t n_jobs; /* and entries that wait to be offloaded */
};

/** A block that waits to go down. */
struct kvbm_down {
    int32_t priority;
    uint64_t number; /* the older one first */
    struct kvbm_weak weak;
    struct kvbm_cache *cache; /* of the source, when that is a cache */
    struct kvbm_pin *pin;     /* a staged one: its bytes are item index of it */
    uint32_t index;
    struct kvbm_job_ *through; /* waits for it */
};

struct kvbm_queue {
    struct kvbm_down *heap;
    uint32_t n, capacity;
    uint32_t in_flight, max_in_flight; /* moves */
    bool stalled;                      /* the executor's queue was full; try when something ended */
};

/** Blocks on their way down, into one tier. */
struct kvbm_move {
    struct kvbm_note note; /* first */
    struct kvbm_manager *manager;
    struct kvbm_move *next; /* of the manager's */
    enum kv_tier to;
    uint32_t n;
    uint64_t start_ns;
    bool leaving; /* of blocks that are about to be evicted (write_back.c) */
    bool
        from_disk; /* of these, those that the disk has: they come into host blocks (bounce) first */
    bool reading;  /* that is under way */
    struct kvbm_down from[KVBM_BATCH];
    struct kvbm_immutable like[KVBM_BATCH];
    struct kvbm_mutable target[KVBM_BATCH];
    struct kvbm_mutable bounce[KVBM_BATCH];
    struct kvbm_block_info info[KVBM_BATCH];
    union {
        struct kvbm_disk_batch disk;
        struct kvbm_object_batch object;
    };
    union {
        struct kvbm_disk_io disk_ios[KVBM_BATCH];
        struct kvbm_object_io object_ios[KVBM_BATCH];
    };
};

/** The question which keys the object store has. */
struct kvbm_ask {
    struct kvbm_note note; /* first */
    struct kvbm_manager *manager;
    struct kvbm_ask *next; /* of the manager's */
    uint32_t
        overtaken; /* bit per key that was put since: it has come there, whatever the answer is */
    struct kvbm_object_batch batch;
    struct kvbm_object_io ios[KVBM_BATCH];
    uint32_t group, position, n;
    bool has_parent;
    uint8_t keys[(KVBM_BATCH + 1) * KVBM_MAX_KEY]; /* the parent's, theirs */
};

/** A key that the object store isn't known to have (presence.c). */
struct kvbm_doubt {
    uint64_t hash;
    uint64_t since_ns; /* nobody knows, since then; 0: it isn't there */
    uint64_t until_ns; /* so long that is believed, or it isn't asked for again; 0: no entry */
};

struct kvbm_manager {
    pthread_mutex_t lock;
    pthread_cond_t work, changed; /* the mover waits for work, callers for changes */
    pthread_t mover;
    bool mover_runs, mover_ends, mover_left, stopping; /* left: and only needs to be joined */
    uint32_t forks; /* how many there had been when it was made */

    struct kvbm_manager_opts opts;
    char *strings; /* its */
    uint32_t key_len;
    struct kvbm_registry *registry;
    struct kvbm_pool *host, *disk, *object; /* object: only who is there */
    struct kvbm_layout *layout;             /* of host blocks */
    uint64_t host_base, block_bytes, stride;
    uint64_t host_blocks; /* of the host tier, or staging */
    struct kvbm_copier *copier;
    struct kvbm_disk *disk_store;
    struct kvbm_object *object_store;

    struct kvbm_cache *caches;
    struct kvbm_pin *pins;
    uint32_t n_pins, n_jobs, n_done;
    uint32_t n_waiters; /* threads in kvbm_manager_wait and kvbm_manager_drain */
    uint64_t next_id, next_number;
    struct kvbm_job_ *jobs;              /* not done */
    struct kvbm_job_ *stalled;           /* of these, those that the copier had no room for */
    struct kvbm_job_ *done, **done_tail; /* to be polled */
    struct kv_wake done_wake;
    struct kvbm_set pending; /* hashes of keys that come into the host tier, or are being stored */
    struct kvbm_set asked;   /* whose presence the object store is being asked for */
    struct kvbm_ask *asks;
    uint32_t n_asks; /* of running */
    /* Host blocks that fetches from the object store fill, and at most: a store that hangs evicts
     * no more. */
    uint32_t n_object_fetched, max_object_fetched;
    struct kvbm_doubt doubts[KVBM_DOUBTS][KVBM_DOUBT_WAYS];
    struct kvbm_queue down[KV_N_TIERS];
    struct kvbm_move *moves;
    struct kvbm_weak *leaving; /* [max_leaving] write_back.c's */
    uint32_t max_leaving;
    uint64_t looked[KV_N_TIERS]; /* kvbm_pool_leaving's since */
    uint32_t move_blocks; /* of one move: all of them hold a fraction of the host tier only */
    struct kvbm_sketch offers[KV_N_TIERS]; /* frequency policies */
    struct kvbm_note *inbox, **inbox_tail;
    uint32_t running;                /* batches and copies that will be noted in the inbox */
    struct kvbm_mutable *quarantine; /* disk blocks of volumes that are down */
    uint32_t n_quarantine;
    struct kvbm_manager_stats stats;
};

static inline void kvbm_manager_enter(struct kvbm_manager *m)
{
    pthread_mutex_lock(&m->lock);
}

static inline void kvbm_manager_leave(struct kvbm_manager *m)
{
    pthread_mutex_unlock(&m->lock);
}

/** 0, -EINVAL (NULL), -ECHILD (a fork's child). */
int kvbm_manager_usable(const struct kvbm_manager *m);

/**
 * From an executor's thread, without the lock: @run is called here. The note is gone when this
 * returns.
 */
void kvbm_note(struct kvbm_manager *m, struct kvbm_note *note,
               void (*run)(struct kvbm_manager *m, struct kvbm_note *note));
/** With the lock: the mover runs it. */
void kvbm_note_later(struct kvbm_manager *m, struct kvbm_note *note,
                     void (*run)(struct kvbm_manager *m, struct kvbm_note *note));

static inline bool kvbm_staging(const struct kvbm_manager *m)
{
    return !m->opts.host_bytes;
}

static inline void *kvbm_host_address(const struct kvbm_manager *m, uint32_t block)
{
    return (void *)(uintptr_t)(m->host_base +
                               block * m->stride); // NOLINT(performance-no-int-to-ptr)
}

static inline uint64_t kvbm_key_hash(const struct kvbm_manager *m, uint32_t group, const void *key)
{
    return kv_xxh64(key, m->key_len, group + 1);
}

static inline uint8_t *kvbm_pin_key(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->keys + (size_t)i * pin->manager->key_len;
}

static inline uint64_t kvbm_pin_hash(const struct kvbm_pin *pin, uint32_t i)
{
    return kvbm_key_hash(pin->manager, pin->group, kvbm_pin_key(pin, i));
}

static inline struct kvbm_chain kvbm_pin_chain(const struct kvbm_pin *pin, uint32_t i)
{
    return (struct kvbm_chain){
        .size = sizeof(struct kvbm_chain),
        .group = pin->group,
        .keys = kvbm_pin_key(pin, i),
        .parent = i || pin->has_parent ? kvbm_pin_key(pin, i) - pin->manager->key_len : NULL,
        .position = pin->position + i};
}

static inline struct kvbm_tier_stats *kvbm_stats_of(struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DEVICE ? &m->stats.cache
           : tier == KV_TIER_HOST ? &m->stats.host
           : tier == KV_TIER_DISK ? &m->stats.disk
                                  : &m->stats.object;
}

/* tiers.c: all that the options say, and the mover. On failure kvbm_manager_free takes what there
 * is. */
int kvbm_tiers_open(struct kvbm_manager *m);

/* end.c: nothing runs any more; what hangs in the object store is waited for until @deadline_ns. */
void kvbm_manager_free(struct kvbm_manager *m, uint64_t deadline_ns);

/* mover.c; with the lock, or before anybody else has the manager */
int kvbm_mover_start(struct kvbm_manager *m);
/** End it once nothing is under way any more, which is waited for; -ETIMEDOUT: it goes on. */
int kvbm_mover_end(struct kvbm_manager *m, uint64_t deadline_ns);
/** Until something of what changed is for: 0 or -ETIMEDOUT. */
int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns);
/** One of n_waiters has what it waited for. The lock is left, and the manager may be gone then. */
void kvbm_waiter_leaves(struct kvbm_manager *m);

/* pin.c */
int kvbm_pin_new(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool store,
                 struct kvbm_pin **ret);
void kvbm_pin_put(struct kvbm_pin *pin);
/** Its host block, held or reserved, goes back: it is MISS. */
void kvbm_pin_let_go(struct kvbm_pin *pin, uint32_t i);
/** Hold the blocks of a pin that the host tier has. */
void kvbm_pin_hold(struct kvbm_pin *pin);
/** A new pin begins to load. Returns as kvbm_manager_prepare_load. */
long kvbm_pin_load(struct kvbm_pin *pin, const struct kvbm_pin_opts *opts);
void kvbm_pin_look(struct kvbm_pin *pin); /* items that WAIT look again */
void kvbm_pin_settle(struct kvbm_pin *pin);
/** End the waiting of pins past their deadline. Returns the next deadline, or UINT64_MAX. */
uint64_t kvbm_pin_late(struct kvbm_manager *m);
/** The number of @n blocks to be had in @pool, at most @n, written to ret. */
uint32_t kvbm_take_blocks(struct kvbm_pool *pool, struct kvbm_mutable *ret, uint32_t n);

/* pin_store.c */
long kvbm_pin_reserve(struct kvbm_pin *pin);
static inline struct kvbm_pool *kvbm_target_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DISK ? m->disk : m->object;
}

/** Register the host blocks of items [i, i + n), all in @from with their bytes, as what they are. Those that
 * can't be (another position was said before) are given back and MISS. Returns how many are
 * HELD. */
uint32_t kvbm_pin_register(struct kvbm_pin *pin, uint32_t i, uint32_t n);
long kvbm_pin_commit_locked(struct kvbm_pin *pin, const uint8_t *ok, struct kvbm_job_ *through);

/* fetch.c */
void kvbm_fetch_start(struct kvbm_pin *pin);
void kvbm_fetch_cancel(struct kvbm_pin *pin);
/** Items that STARVE are MISS. */
void kvbm_fetch_stop_starving(struct kvbm_pin *pin);

/* job.c */
void kvbm_job_start(struct kvbm_job_ *job);
/**
 * End a job that waits for its pin. Fetches that only this job needed of a released pin are
 * cancelled.
 */
void kvbm_job_give_up(struct kvbm_job_ *job, int status);
/** One of its blocks has arrived in the object store, or was given up. */
void kvbm_job_through(struct kvbm_job_ *job, bool arrived);
/** job_calls.c: a job whose pin's blocks come from @sources (the job's from here on, may be NULL). @own: only kvbm_manager_wait
 * takes it. Its id or an error. */
int64_t kvbm_job_submit(struct kvbm_manager *m, const struct kvbm_job *job,
                        struct kvbm_immutable *sources, bool own);
/**
 * End the jobs that wait for their pins past their deadline. Returns the next one, or UINT64_MAX.
 */
uint64_t kvbm_job_late(struct kvbm_manager *m);
/** Submit again the jobs that the copier had no room for. */
void kvbm_job_retry(struct kvbm_manager *m);

/* down_queue.c */
/** Whether a block that isn't there may go into a tier. Counts an offer. */
bool kvbm_policy_passes(struct kvbm_manager *m, enum kv_tier tier, uint64_t hash,
                        uint32_t priority);
/**
 * Dropped, and what waits for it told, when the queue is full or the manager ends: an error then.
 */
int kvbm_queue_push(struct kvbm_manager *m, enum kv_tier to, struct kvbm_down down);
struct kvbm_down kvbm_queue_pop(struct kvbm_queue *q);
/** Finish an offload, successful or not: drop its pin and wake the jobs that wait for it. */
void kvbm_down_ended(struct kvbm_down *down, bool arrived);
/** The mover tries again when something ends or a moment has passed, and has to know that. */
void kvbm_queue_stall(struct kvbm_manager *m, struct kvbm_queue *q, bool stalled);

/* offload_store.c */
/** The first of the queue, and what follows it, into the host tier. */
void kvbm_offload_store(struct kvbm_manager *m);

/* move.c */
/** A move of the first of a queue. */
void kvbm_move_some(struct kvbm_manager *m, enum kv_tier to);
/** Number @k becomes number @n, and @n one more: the others are left behind. */
void kvbm_move_keep(struct kvbm_move *move, uint32_t k, uint32_t *n);
/** A block of a disk volume that is left alone: taken out of the pool. */
void kvbm_quarantine(struct kvbm_manager *m, struct kvbm_mutable block);

/* move_io.c */
/**
 * On its way, or, when the executor has no room or refuses, back in the queue or dropped. The
 * move's from here on.
 */
void kvbm_move_launch(struct kvbm_manager *m, struct kvbm_move *move);
/** @again: what was leaving may be told of once more. */
void kvbm_move_release(const struct kvbm_move *move, struct kvbm_immutable *like, bool again);

/* offload.c */
/**
 * Of items [i, i + n), which have just come into the host tier, those that have go on down, by
 * policy.
 */
void kvbm_offload_items(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through);
void kvbm_offload_pump(struct kvbm_manager *m);
void kvbm_offload_drop_all(struct kvbm_manager *m);
bool kvbm_offload_idle(const struct kvbm_manager *m);

/* write_back.c */
int kvbm_write_back_open(struct kvbm_manager *m);
/** Queue for the object store the blocks that the host and disk pools will evict next. */
void kvbm_write_back(struct kvbm_manager *m);
/**
 * Retry write-back of @pool's next victims after further allocations: reading some of them failed.
 */
void kvbm_write_back_later(struct kvbm_manager *m, struct kvbm_pool *pool);
/** Queue for the object store every block that only the host tier holds. destroy calls this before it
 * frees host memory. */
void kvbm_write_back_all(struct kvbm_manager *m);
/** Number of blocks evicted before write-back could queue them. */
uint64_t kvbm_write_back_lost(const struct kvbm_manager *m);

/* presence.c */
enum kvbm_presence {
    KVBM_PRESENCE_UNKNOWN, /* to be asked for */
    KVBM_PRESENCE_ASKED,   /* there will be an answer, or another question */
    KVBM_PRESENCE_ABSENT /* it isn't there; or nobody could say in time, which is the same to a scheduler */
};
/** The object store has (or hasn't: @sure, or for the moment) this key, which is @like's, if that isn't NULL. False:
 * it can't be remembered. */
bool kvbm_presence_add(struct kvbm_manager *m, const struct kvbm_chain *chain,
                       const struct kvbm_immutable *like);
void kvbm_presence_absent(struct kvbm_manager *m, uint32_t group, const void *key, bool sure);
/** Forget that a key is absent from the object store: it has been put. */
void kvbm_presence_not_absent(struct kvbm_manager *m, uint32_t group, const void *key);
/**
 * Note that a key was put. A question or get under way may have looked before: ignore its "absent".
 */
void kvbm_presence_stored(struct kvbm_manager *m, uint32_t group, const void *key);
/** True when the object store was asked lately and lacks the key, or doesn't answer. */
bool kvbm_presence_known_absent(const struct kvbm_manager *m, uint64_t hash);
/** Of a key that the object store isn't known to have. */
enum kvbm_presence kvbm_presence_of(const struct kvbm_manager *m, uint64_t hash);
/** Keys [i, i + n) of the chain are asked for; bit k of @unknown: nobody knows of key i + k. Returns 0; -EHOSTDOWN: the
 * store is away; -EAGAIN, -ENOMEM...: not now, they are to be asked for again. */
int kvbm_presence_ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n,
                      uint32_t unknown);

#endif
