// SPDX-License-Identifier: Apache-2.0
/*
 * Shared by the manager's parts.
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
 *   direct.c         jobs between a cache and the tiers below, without host blocks
 *   onboard.c        blocking loads into a cache's pool, by hashes or handles
 *   offload.c        offloads: which blocks are offered, when a copy begins
 *   down_queue.c     offload queues: policies, heaps of weak handles
 *   once.c           staged blocks: one move of a key to a tier at a time
 *   offload_store.c  offload from a cache's pool into the host tier
 *   move.c           moves to disk and object store: which blocks, and their targets
 *   move_io.c        moves: reading, writing, completion
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
#include "tier/peer/peer.h"

#define KVBM_MAX_PIN (1u << 20)    /* keys of one pin */
#define KVBM_HOST_ALIGN 4096u      /* of host blocks: direct I/O */
#define KVBM_BATCH 32              /* blocks of one fetch or move */
#define KVBM_LET_GO_NS KV_NS_PER_S /* extra time that destroy gives to calls that hang */
#define KVBM_DOUBTS 8192           /* sets of KVBM_DOUBT_WAYS entries: 1.5 MiB */
#define KVBM_DOUBT_WAYS 8
#define KVBM_TIER_PEER \
    KV_N_TIERS                /* of fetches, and of an item's `tried`: peers are no tier of ours */
#define KVBM_MAX_PEER_ASKS 64 /* lookups at peers at a time */

/** End of an operation. run is called with the manager's lock. */
struct kvbm_note {
    struct kvbm_note *next;
    void (*run)(struct kvbm_manager *m, struct kvbm_note *note);
};

/** State of one key of a pin. */
enum kvbm_item_state {
    ITEM_MISS,
    ITEM_BUSY,     /* a tier has it, but no host block or queue place was free */
    ITEM_WAITS,    /* another pin fetches or stores it */
    ITEM_STARVED,  /* in the object store, but fetches already fill their share of host blocks */
    ITEM_FETCHED,  /* a fetch from a lower tier fills its host block */
    ITEM_RESERVED, /* store: the caller fills its host block */
    ITEM_STAGED,   /* its bytes are in a staging block, which isn't registered: no host tier */
    ITEM_HELD,     /* in a registered host block */
    ITEM_BELOW,    /* store without a host tier: a lower tier has it already */
    ITEM_LEASED    /* load in place: in a peer's memory, which jobs read. It has no host block */
};

/** One key of a pin. */
struct kvbm_item {
    uint8_t state;
    uint8_t tried;   /* bit per tier whose fetch did not find it */
    bool found;      /* counted as a hit */
    uint8_t n_peers; /* peers that said they have it, and didn't give it */
    uint64_t peer;   /* worker of the peer that has it; 0: not known */
    struct kvbm_handle host;
    struct kvbm_handle source; /* block of the disk pool, while it is read */
    const struct kvbm_lease
        *lease; /* LEASED: one of the pin's leases; the item is its key @place */
    uint32_t place;
};

/** A lease of a pin. */
struct kvbm_leased {
    struct kvbm_leased *next;
    struct kvbm_lease *lease;
    uint32_t n; /* blocks, as n_leased of struct kvbm_pins counts them */
};

/** A pin: keys with their host blocks. Freed with its last reference. */
struct kvbm_pin {
    struct kvbm_manager *manager;
    struct kvbm_pin *prev, *next;
    bool store, released, settled;
    uint32_t refs;      /* references of the caller, fetches, jobs and offload entries */
    uint32_t n_fetches; /* the fetches among refs */
    uint32_t n_copying; /* store jobs that write into its blocks */
    uint32_t n_fetched;
    uint32_t n_waits;       /* items that are WAITS or STARVED */
    uint32_t n_starved;     /* the STARVED ones among n_waits */
    uint32_t object_window; /* blocks of the object store's window being fetched */
    uint32_t object_end;    /* prompts: item that the object store lacks; those behind aren't got */
    uint32_t peer_window;   /* blocks being fetched from peers, or asked for there */
    uint32_t peer_end;      /* prompts: item that no peer has; those behind aren't asked for */
    uint32_t n_asked;       /* keys of the last question to peers */
    bool no_fetch, no_peers;
    bool in_place;   /* blocks of peers stay where they are, if this process can read them there */
    bool lends;      /* a hold of a peer: never waits for what this node gets from peers */
    uint64_t hinted; /* worker of the peer that a hint names; 0: none */
    uint8_t retain;  /* store: retention priority of its blocks */
    uint64_t retain_until_ns; /* end of the retention; 0: none */
    uint64_t deadline_ns;
    int32_t priority; /* priority of its fetches */
    uint32_t group, position, n;
    bool has_parent;
    bool scattered;         /* keys of no sequence */
    uint8_t *keys;          /* [n], behind the parent's key */
    uint32_t *tokens;       /* [n * block_tokens], for events; NULL: none */
    struct kvbm_job_ *jobs; /* jobs that wait for the pin to settle */
    struct kvbm_fetch *fetches;
    struct kvbm_leased *leased;   /* the leases of LEASED items, and those that have ended */
    struct kvbm_immutable *likes; /* prepare_load_blocks: [n] the given blocks, held; else NULL */
    /* Direct job: its cache, whose blocks take the place of host blocks, and [n] their numbers, which
     * the job owns. Such items have no host handle. */
    struct kvbm_cache *direct;
    const uint32_t *blocks;
    struct kvbm_item items[];
};

/** Blocks of one pin, fetched from one tier in one batch. */
struct kvbm_fetch {
    struct kvbm_note note; /* must be first */
    struct kvbm_pin *pin;
    struct kvbm_fetch *next; /* next fetch of the pin */
    enum kv_tier tier;
    bool asks;                  /* peers: which of them has the blocks? No host block is filled */
    struct kvbm_leased *leases; /* peers: for the lease of the blocks. No host block is filled */
    uint64_t start_ns;
    uint32_t n;
    uint32_t overtaken; /* as in struct kvbm_ask */
    uint32_t *index;    /* [n] behind this struct, as peer_ios */
    union {
        struct kvbm_disk_batch disk;
        struct kvbm_object_batch object;
        struct kvbm_peer_batch peer;
    };
    union {
        struct kvbm_disk_io disk_ios[KVBM_BATCH];
        struct kvbm_object_io object_ios[KVBM_BATCH];
        struct kvbm_peer_io *peer_ios;
    };
};

/** A job: a copy between a pin's host blocks and a cache. */
struct kvbm_job_ {
    struct kvbm_note note;       /* must be first */
    struct kvbm_job_ *next;      /* in the manager's list */
    struct kvbm_job_ *next_wait; /* in the pin's list, or that of stalled jobs */
    struct kvbm_pin *pin;
    struct kvbm_cache *cache;
    struct kvbm_done done;
    uint64_t copy_id; /* id of the copy; 0: not begun */
    uint64_t submit_ns;
    bool cancelled, copied, waits;  /* waits: for its pin, in the pin's list */
    bool own;                       /* the manager's own job: poll doesn't return it */
    bool late;                      /* direct store: past its deadline */
    struct kvbm_immutable *sources; /* offload: [n] blocks of the cache's pool, held; else NULL */
    uint32_t first_layer, n_layers;
    int32_t priority;
    uint64_t deadline_ns;
    int ready_fd;
    /* ready_fd is a duplicate: the copier had no room, and the caller may close its own */
    bool own_fd;
    void *ready_event;
    uint8_t *user_ok;
    uint32_t n_pairs;
    /* Offloads that the job waits for: to the object store (write-through), or all (direct). */
    uint32_t n_through;
    uint32_t *blocks; /* [n] blocks of the cache; then pairs: source, target, index */
    uint32_t *host, *other, *index;
    const struct kvbm_layout *from; /* load: what host numbers, the host tier or a peer's memory */
    uint8_t *ok;                    /* bit per pair: copied */
    uint8_t *arrived;               /* bit per key: copied */
    uint8_t *handled;               /* bit per key: copied, or not to be tried again */
};

/** An attached cache. */
struct kvbm_cache {
    struct kvbm_manager *manager;
    struct kvbm_cache *next;
    const struct kvbm_layout *layout;
    struct kvbm_pool *pool;
    uint32_t first_head, n_heads;
    bool partial;          /* holds a part of the heads, so its stores don't complete blocks */
    bool direct;           /* tiers below can read and write its blocks where they lie */
    uint64_t base, stride; /* direct: address of block 0, and bytes from block to block */
    uint32_t n_jobs;       /* jobs, and entries of offload queues */
};

/** Entry of an offload queue: a block that waits to be copied to a tier below. */
struct kvbm_down {
    int32_t priority;
    uint64_t number; /* the older one goes first */
    struct kvbm_weak weak;
    struct kvbm_cache *cache; /* source of the block, when that is a cache */
    struct kvbm_pin *pin;     /* staged block: item @index of this pin has its bytes */
    uint32_t index;
    uint8_t moving_to;         /* staged block: tier to which its move runs; 0: none */
    struct kvbm_job_ *through; /* write-through or direct job that waits for the block, or NULL */
};

/** Offload queue of one tier. */
struct kvbm_queue {
    struct kvbm_down *heap;
    uint32_t n, capacity;
    uint32_t in_flight, max_in_flight; /* moves running, and their limit */
    bool stalled; /* the executor's queue was full: retry when an operation ends */
    /* Staged keys whose moves run, and entries of the same keys: they wait for these moves' ends, since
     * a second copy of a key would evict another block. */
    struct kvbm_set moving;
    struct kvbm_down *aside;
    uint32_t n_aside, aside_capacity;
};

/** A move: a batch of blocks being copied to one tier below. */
struct kvbm_move {
    struct kvbm_note note; /* must be first */
    struct kvbm_manager *manager;
    struct kvbm_move *next; /* next move of the manager */
    enum kv_tier to;
    uint32_t n;
    uint64_t start_ns;
    bool leaving;   /* its blocks will be evicted next (write_back.c) */
    bool from_disk; /* from the disk: read into host blocks (bounce) first */
    bool reading;   /* the read runs */
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

/** Query to the object store: which of these keys does it have? */
struct kvbm_ask {
    struct kvbm_note note; /* must be first */
    struct kvbm_manager *manager;
    struct kvbm_ask *next; /* next query of the manager */
    uint32_t overtaken;    /* bit per key put or deleted since the query began: ignore the answer */
    struct kvbm_object_batch batch;
    struct kvbm_object_io ios[KVBM_BATCH];
    uint32_t group, position, n;
    bool has_parent, scattered;
    uint8_t keys[(KVBM_BATCH + 1) * KVBM_MAX_KEY]; /* the parent's key, then the queried ones */
};

/** Question of a lookup to peers. */
struct kvbm_peer_ask {
    struct kvbm_note note; /* must be first */
    struct kvbm_manager *manager;
    struct kvbm_peer_batch batch;
    struct kvbm_peer_io ios[KVBM_PEER_BATCH];
    uint8_t keys[KVBM_PEER_BATCH * KVBM_MAX_KEY];
};

/** A key that the object store isn't known to have (presence.c). */
struct kvbm_doubt {
    uint64_t hash;
    uint64_t since_ns; /* time of the first query; 0: the key is absent */
    uint64_t until_ns; /* end of that belief, or of the pause before the next query; 0: no entry */
};

/** Thread that continues ended batches and copies, and keeps deadlines (mover.c). */
struct kvbm_mover {
    pthread_t thread;
    bool runs, ends, left; /* left: the thread has ended and must be joined */
    struct kvbm_note *inbox, **inbox_tail;
    uint32_t running; /* batches and copies whose end will enter the inbox */
};

/**
 * Pins of callers, and the keys that they bring into the host tier (pin.c, pin_store.c, fetch.c).
 */
struct kvbm_pins {
    struct kvbm_pin *first;
    uint32_t n;
    struct kvbm_set pending;  /* hashes of keys being fetched or stored into the host tier */
    struct kvbm_set at_peers; /* of these, keys that peers are asked for or give */
    /* Host blocks that fetches from the object store fill now, and their limit: a store that hangs
     * evicts no more than that. */
    uint32_t n_object_fetched, max_object_fetched;
    uint32_t n_peer_fetched; /* of n_object_fetched, blocks that come from peers */
    uint32_t n_leased;       /* blocks of leases that pins keep, and of such being asked for */
};

/** Copies between caches and pins (job.c, job_calls.c). */
struct kvbm_jobs {
    struct kvbm_job_ *first;             /* jobs that haven't ended */
    struct kvbm_job_ *stalled;           /* of these, jobs that the copier had no room for */
    struct kvbm_job_ *done, **done_tail; /* ended, to be polled */
    struct kv_wake done_wake;
    uint32_t n, n_done;
    uint64_t next_id;
};

/** Keys that the object store has or may have (presence.c). Known ones are in the object pool. */
struct kvbm_presences {
    struct kvbm_set asked; /* hashes of keys being queried */
    struct kvbm_ask *asks;
    uint32_t n_asks; /* queries running */
    struct kvbm_doubt doubts[KVBM_DOUBTS][KVBM_DOUBT_WAYS];
};

/** Offloads to lower tiers (offload.c, down_queue.c, offload_store.c, move.c, move_io.c). */
struct kvbm_offload {
    struct kvbm_queue queues[KV_N_TIERS];  /* blocks that wait for the tier */
    uint64_t next_number;                  /* number of the next entry: the older goes first */
    struct kvbm_sketch offers[KV_N_TIERS]; /* used by frequency policies */
    struct kvbm_move *moves;
    /* blocks of one move; all moves together hold a fraction of the host tier */
    uint32_t move_blocks;
    struct kvbm_mutable *quarantine; /* disk blocks of volumes out of use */
    uint32_t n_quarantine;
};

/** Blocks that the host and disk pools evict next (write_back.c). */
struct kvbm_write_backs {
    struct kvbm_weak *leaving; /* [max_leaving] victims being listed */
    uint32_t max_leaving;
    uint64_t looked[KV_N_TIERS]; /* kvbm_pool_leaving's `since`, by pool */
};

/** The caller's memory that a manager has as its host tier, in the process's list. */
struct kvbm_lent {
    struct kvbm_lent *next;
    uintptr_t begin;
    uint64_t bytes;
};

/** A manager: one lock over its tiers, and a struct for each module. */
/* Holds of peers that wait for fetches (source.c). */
struct kvbm_lending {
    struct kvbm_waiting *waiting;
    pthread_t thread;
    bool started, stopping;
};

struct kvbm_manager {
    pthread_mutex_t lock;
    pthread_cond_t work, changed; /* work wakes the mover; changed wakes callers */
    bool stopping;
    uint32_t forks;     /* forks counted at creation: a higher number means a child */
    uint32_t n_waiters; /* threads in kvbm_manager_wait and kvbm_manager_drain */

    struct kvbm_manager_opts opts;
    char *strings; /* strings of opts */
    uint32_t key_len;
    struct kvbm_registry *registry;
    struct kvbm_pool *host, *disk, *object; /* object: keys without bytes */
    struct kvbm_layout *layout;             /* of host blocks */
    struct kvbm_lent lent;                  /* host_memory */
    struct kvbm_shared *shared;             /* host_shared */
    struct kvbm_lending lending;
    uint64_t host_base, block_bytes, stride;
    uint32_t block_tokens;
    uint64_t host_blocks; /* blocks of the host tier, or staging blocks */
    struct kvbm_copier *copier;
    struct kvbm_disk *disk_store;
    struct kvbm_object *object_store;
    struct kvbm_peers *peers;       /* NULL: none */
    struct kvbm_agent *own_agent;   /* of peers; NULL: the caller's, or none */
    struct kvbm_follower *follower; /* of the option peers */
    uint32_t n_peer_asks;           /* lookups at peers that run */

    struct kvbm_cache *caches;
    struct kvbm_mover mover;
    struct kvbm_pins pins;
    struct kvbm_jobs jobs;
    struct kvbm_presences presence;
    struct kvbm_offload offload;
    struct kvbm_write_backs write_back;
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

static inline uint8_t *kvbm_pin_key(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->keys + (size_t)i * pin->manager->key_len;
}

/** Return the address of item @i's bytes: its host block, or its block of a direct job's cache. */
static inline void *kvbm_pin_data(const struct kvbm_pin *pin, uint32_t i)
{
    if (!pin->direct)
        return kvbm_host_address(pin->manager, pin->items[i].host.block);
    return (void *)(uintptr_t)(pin->direct->base + // NOLINT(performance-no-int-to-ptr)
                               pin->blocks[i] * pin->direct->stride);
}

static inline uint64_t kvbm_pin_hash(const struct kvbm_pin *pin, uint32_t i)
{
    return kvbm_key_hash(pin->manager, pin->group, kvbm_pin_key(pin, i));
}

/** Return the key of the block before item @i; NULL: the item is the first of its sequence. */
static inline const uint8_t *kvbm_pin_parent(const struct kvbm_pin *pin, uint32_t i)
{
    return !pin->scattered && (i || pin->has_parent) ? kvbm_pin_key(pin, i) - pin->manager->key_len
                                                     : NULL;
}

static inline uint32_t kvbm_pin_position(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->scattered ? 0 : pin->position + i;
}

static inline const uint32_t *kvbm_pin_tokens(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->tokens ? pin->tokens + (size_t)i * pin->manager->block_tokens : NULL;
}

static inline struct kvbm_chain kvbm_pin_chain(const struct kvbm_pin *pin, uint32_t i)
{
    return (struct kvbm_chain){.size = sizeof(struct kvbm_chain),
                               .group = pin->group,
                               .keys = kvbm_pin_key(pin, i),
                               .parent = kvbm_pin_parent(pin, i),
                               .position = kvbm_pin_position(pin, i),
                               .tokens = kvbm_pin_tokens(pin, i),
                               .scattered = pin->scattered};
}

/** True when a missing key makes those behind it useless: the keys of a prompt. */
static inline bool kvbm_pin_is_prefix(const struct kvbm_pin *pin)
{
    return !pin->likes && !pin->scattered;
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
/** Wait until the manager signals a change. Returns 0 or -ETIMEDOUT. */
int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns);
/** End the wait of one of n_waiters. Releases the lock; the manager may be freed by then. */
void kvbm_waiter_leaves(struct kvbm_manager *m);

/* pin.c */
/** Make a pin of a chain with one reference. Returns 0, -EINVAL or -ENOMEM. */
int kvbm_pin_new(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool store,
                 struct kvbm_pin **ret);
/**
 * Cancel the fetches of a pin that is released and that no job but the caller's needs, and let go
 * what it holds already: a fetch that hangs holds only the blocks that it fills.
 */
void kvbm_pin_unwanted(struct kvbm_pin *pin);
/** Drop a reference; the last one frees the pin and its blocks. */
void kvbm_pin_put(struct kvbm_pin *pin);
/** Give back the host block of item @i, held or reserved. The item becomes a MISS. */
void kvbm_pin_let_go(struct kvbm_pin *pin, uint32_t i);
/** Hold the blocks of a pin that the host tier has. */
void kvbm_pin_hold(struct kvbm_pin *pin);
/** Begin to load a new pin. Returns as kvbm_manager_prepare_load. */
long kvbm_pin_load(struct kvbm_pin *pin, const struct kvbm_pin_opts *opts);
/** As kvbm_manager_prepare_load, for a hold of a peer: it asks no peer, and waits for none. */
long kvbm_pin_lend(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                   const struct kvbm_pin_opts *opts, struct kvbm_pin **ret);
/** Look the items that WAIT up again. */
void kvbm_pin_look(struct kvbm_pin *pin);
/** When no item is pending any more: start the jobs of the pin and wake its waiters. */
void kvbm_pin_settle(struct kvbm_pin *pin);
/** Turn the items that wait for another pin, or for their share, into MISS. */
void kvbm_pin_stop_waiting(struct kvbm_pin *pin);
/** End the waiting of pins past their deadline. Returns the next deadline, or UINT64_MAX. */
uint64_t kvbm_pin_late(struct kvbm_manager *m);
/** Allocate up to @n blocks of @pool, as many as there are. Returns their number. */
uint32_t kvbm_take_blocks(struct kvbm_pool *pool, struct kvbm_mutable *ret, uint32_t n);

/* pin_store.c */
/** Reserve host blocks for a store pin. Returns as kvbm_manager_prepare_store. */
long kvbm_pin_reserve(struct kvbm_pin *pin);
static inline struct kvbm_pool *kvbm_target_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DISK ? m->disk : m->object;
}

/**
 * Register the host blocks of items [i, i + n), all FETCHED or RESERVED with their bytes. Blocks
 * that can't be registered (their key is known at another position) are given back and MISS.
 * Returns the number HELD.
 */
uint32_t kvbm_pin_register(struct kvbm_pin *pin, uint32_t i, uint32_t n);
/** Commit as kvbm_pin_commit. @through, if not NULL, waits for the blocks' offload. */
long kvbm_pin_commit_locked(struct kvbm_pin *pin, const uint8_t *ok, struct kvbm_job_ *through);

/* fetch.c */
/** Start the fetches of a pin, as far as host blocks and queues have room. */
void kvbm_fetch_start(struct kvbm_pin *pin);
/** Cancel the running fetches of a pin. */
void kvbm_fetch_cancel(struct kvbm_pin *pin);
/** Turn the items from @first on that STARVE into MISS. */
void kvbm_fetch_stop_starving(struct kvbm_pin *pin, uint32_t first);
/**
 * Note that the object store doesn't give item @i: a prompt can't use the items behind it. Items
 * before it are still fetched: some starve, or wait for another pin.
 */
void kvbm_fetch_ends_at(struct kvbm_pin *pin, uint32_t i);
/**
 * Return the item at which fetches of a prompt from @tier end. That is @end, which @tier lacks; once
 * another tier has given that item, the next one that @tier lacks.
 */
uint32_t kvbm_fetch_behind_gap(const struct kvbm_pin *pin, enum kv_tier tier, uint32_t end);
/**
 * True when another pin fetches or stores the key, so that item @i waits for that pin. A hold of a
 * peer doesn't wait for a fetch from peers: its item stays MISS, and no tier is tried.
 */
bool kvbm_fetch_left_to_others(struct kvbm_pin *pin, uint32_t i);
/** True when a hold of a peer must not wait for a key: this node gets it from peers. */
bool kvbm_fetch_is_circle(const struct kvbm_pin *pin, uint32_t i);
/**
 * Begin to fetch items from a tier that is remote, as many as the share of host blocks for such
 * fetches allows. The others starve.
 */
void kvbm_fetch_by_share(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index,
                         uint32_t n);
/** Turn starving items into BUSY when no fetch is left whose end would continue them. */
void kvbm_fetch_nobody_feeds(struct kvbm_pin *pin);

/* fetch_io.c */
/** Begin to fetch the items of @index from @tier. Items without room become BUSY. */
void kvbm_fetch_some(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n);
/** Begin to ask peers for items, or (@leases) to lease them from the peer that has them. */
void kvbm_fetch_ask(struct kvbm_pin *pin, const uint32_t *index, uint32_t n, bool leases);
/** Note that a key is pending, or no longer (@change -1). */
void kvbm_fetch_count_pending(const struct kvbm_fetch *fetch, uint32_t i, int change);

/* fetch_end.c */
/** Take the results of a fetch; @all, unless 0: of all its items. */
void kvbm_fetch_end(struct kvbm_fetch *fetch, int all);
/** End a fetch whose batch has ended, and continue its pin and those that wait for it. */
void kvbm_fetch_done(struct kvbm_manager *m, struct kvbm_note *note);
/** Let the disk's block of an item go. */
void kvbm_fetch_source_released(struct kvbm_pin *pin, struct kvbm_item *item);

/* fetch_peers.c */
/** Ask peers for a pin's items, and fetch those that peers have. */
void kvbm_fetch_from_peers(struct kvbm_pin *pin);
/** True when item @i is left to peers for now: the object store isn't known to have it. */
bool kvbm_fetch_peers_first(const struct kvbm_pin *pin, uint32_t i);
/** Note that no peer had item @i, or that the one which had it didn't give it (@why). */
void kvbm_fetch_not_at_peer(struct kvbm_pin *pin, uint32_t i, bool asked, int why);

/* leased.c */
/** Return how many of items that one peer has may be leased now, to be copied from where they are. */
uint32_t kvbm_leased_room(const struct kvbm_pin *pin, const uint32_t *index, uint32_t n);
/** Make a place for a lease of @n blocks. NULL: no memory. */
struct kvbm_leased *kvbm_leased_new(struct kvbm_manager *m, uint32_t n);
/** Release a lease, and free its place. NULL is a no-op. */
void kvbm_leased_free(struct kvbm_manager *m, struct kvbm_leased *leased);
/** Make item @i LEASED: key @place of @lease. */
void kvbm_leased_add(struct kvbm_pin *pin, uint32_t i, const struct kvbm_lease *lease,
                     uint32_t place);
/** Tell where the bytes of a LEASED item are: a block of a layout, which lives as long as the pin. */
void kvbm_leased_source(const struct kvbm_item *item, const struct kvbm_layout **layout,
                        uint32_t *block);
/** True when what was copied from a LEASED item before this call is right. */
bool kvbm_leased_is_intact(const struct kvbm_item *item);
/**
 * Fetch the LEASED items whose leases have ended, as if the pin weren't in place. Returns true when
 * items are pending: the pin settles again, and starts its jobs then.
 */
bool kvbm_leased_renew(struct kvbm_pin *pin);

/* peers.c */
/** Open the tier of peers, if the options name any. */
int kvbm_manager_open_peers(struct kvbm_manager *m);
/** Close it, its directory and the manager's own agent. */
void kvbm_manager_close_peers(struct kvbm_manager *m);
/** Ask peers for those keys of [i, i + 64) of a chain that are set in @wanted. Returns 0 or an error. */
int kvbm_peers_look(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                    uint64_t wanted);
/** Find the peer that a hint names. Returns its worker; 0: no session with it. */
uint64_t kvbm_peers_hinted(struct kvbm_manager *m, const struct kvbm_hint *hint);

/* where.c */
/** As kvbm_manager_lookup, of this node's own tiers. */
long kvbm_lookup_own(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                     uint8_t *ret);

/* job.c */
/** Have a job wait until its pin has settled. */
void kvbm_job_wait(struct kvbm_job_ *job);
/** Submit the copy of a job whose pin has settled. */
void kvbm_job_start(struct kvbm_job_ *job);
/**
 * End a job that waits for its pin. Fetches that only this job needed of a released pin are
 * cancelled.
 */
void kvbm_job_give_up(struct kvbm_job_ *job, int status);
/** Put an ended job among those that poll or wait return, and free what it holds. */
void kvbm_job_finish(struct kvbm_job_ *job);
/** Note that a block of a write-through job is in the object store (@arrived), or was dropped. */
void kvbm_job_through(struct kvbm_job_ *job, bool arrived);
/** Return 0 when another job may begin; -ESHUTDOWN; -EAGAIN (max_jobs). */
int kvbm_job_room(const struct kvbm_manager *m);
/** Make a job, which holds its pin, and list it. Returns 0 or -ENOMEM. */
int kvbm_job_new(struct kvbm_manager *m, const struct kvbm_job *in, struct kvbm_job_ **ret);
/**
 * Make and queue a job (job_calls.c). @sources (may be NULL): blocks of the cache's pool, which the
 * job owns from here on. @own: only kvbm_manager_wait returns it. Returns its id or an error.
 */
int64_t kvbm_job_submit(struct kvbm_manager *m, const struct kvbm_job *job,
                        struct kvbm_immutable *sources, bool own);
/**
 * Submit @job and wait for it, past its deadline for its end. No transfer touches the job's blocks
 * on return. Takes the manager's lock.
 */
int kvbm_job_run(struct kvbm_manager *m, const struct kvbm_job *job);
/**
 * End the jobs that wait for their pins past their deadline. Returns the next one, or UINT64_MAX.
 */
uint64_t kvbm_job_late(struct kvbm_manager *m);
/** Submit again the jobs that the copier had no room for. */
void kvbm_job_retry(struct kvbm_manager *m);

/* direct.c */
/** True when tiers below can read and write a cache's blocks where they lie. */
bool kvbm_direct_fits(const struct kvbm_manager *m, const struct kvbm_layout *layout);
/** End a direct load whose pin has settled. */
void kvbm_direct_settled(struct kvbm_job_ *job);
/** Note that an offload of key @i of a direct store has ended. */
void kvbm_direct_through(struct kvbm_job_ *job, uint32_t i, bool arrived);
/** Cancel what has not begun of a direct job. */
void kvbm_direct_cancel(struct kvbm_job_ *job);
/**
 * Drop what has not begun of direct stores past their deadline. Returns the next one, or UINT64_MAX.
 */
uint64_t kvbm_direct_late(struct kvbm_manager *m, uint64_t now);

/* down_queue.c */
/** True when the policy of @tier takes a block that it lacks. Counts an offer. */
bool kvbm_policy_passes(struct kvbm_manager *m, enum kv_tier tier, uint64_t hash,
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
/** Finish an offload, successful or not: drop its pin and wake the jobs that wait for it. */
void kvbm_down_ended(struct kvbm_down *down, bool arrived);
/**
 * Mark a queue as stalled or not. The mover retries stalled queues when an operation ends, and
 * after a pause.
 */
void kvbm_queue_stall(struct kvbm_manager *m, struct kvbm_queue *q, bool stalled);

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

/* offload_store.c */
/** Begin to copy the first blocks of the host tier's queue from their cache into the host tier. */
void kvbm_offload_store(struct kvbm_manager *m);

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
/** Begin as many offloads as executors have room for. */
void kvbm_offload_pump(struct kvbm_manager *m);
/** Drop all queued offloads. */
void kvbm_offload_drop_all(struct kvbm_manager *m);
/** True when no offload is queued or running. */
bool kvbm_offload_idle(const struct kvbm_manager *m);

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

/* presence.c */
/** Knowledge about a key that the object store's pool lacks. */
enum kvbm_presence {
    KVBM_PRESENCE_UNKNOWN, /* not asked yet */
    KVBM_PRESENCE_ASKED,   /* an answer, or another question, will come */
    KVBM_PRESENCE_ABSENT   /* absent, or without an answer in time */
};
/**
 * Remember that the object store has the first key of @chain. @like (may be NULL) is a block with
 * that key. Returns false when it can't be remembered.
 */
bool kvbm_presence_add(struct kvbm_manager *m, const struct kvbm_chain *chain,
                       const struct kvbm_immutable *like);
/** Remember that the object store lacks a key; @sure false: it gave no answer in time. */
void kvbm_presence_absent(struct kvbm_manager *m, uint32_t group, const void *key, bool sure);
/** Forget that a key is absent from the object store: it has been put. */
void kvbm_presence_not_absent(struct kvbm_manager *m, uint32_t group, const void *key);
/**
 * Note that a key was put. A question or get under way may have looked before: ignore its "absent".
 */
void kvbm_presence_stored(struct kvbm_manager *m, uint32_t group, const void *key);
/**
 * Note that a key was deleted. A question or get under way may have looked before: ignore its
 * "present".
 */
void kvbm_presence_removed(struct kvbm_manager *m, uint32_t group, const void *key);
/** True when the object store was asked lately and lacks the key, or doesn't answer. */
bool kvbm_presence_known_absent(const struct kvbm_manager *m, uint64_t hash);
/** Return what is known of a key that the object store's pool lacks. */
enum kvbm_presence kvbm_presence_of(const struct kvbm_manager *m, uint64_t hash);
/**
 * Ask the object store for keys [i, i + n) of the chain. Bit k of @unknown: key i + k is unknown.
 * Returns 0; -EHOSTDOWN (breaker open); -EAGAIN, -ENOMEM and others: ask again later.
 */
int kvbm_presence_ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n,
                      uint32_t unknown);

#endif
