// SPDX-License-Identifier: Apache-2.0
/**
 * Structs of the manager: operations, one for each module, and the manager that owns these. All of
 * them are guarded by the manager's lock, but for the batches that an executor has.
 */
#ifndef KVBM_TIER_MANAGER_TYPES_H
#define KVBM_TIER_MANAGER_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "bm/pool/pool.h"
#include "kvbm_manager.h"
#include "tier/disk/disk.h"
#include "tier/manager/state/set.h"
#include "tier/object/object.h"
#include "tier/peer/peer.h"

#define KVBM_MAX_PIN (1u << 20)    /* keys of one pin */
#define KVBM_HOST_ALIGN 4096u      /* of host blocks: direct I/O */
#define KVBM_BATCH 32              /* blocks of one fetch or move */
#define KVBM_LET_GO_NS KV_NS_PER_S /* extra time that destroy gives to calls that hang */
#define KVBM_BELIEFS 8192          /* sets of KVBM_BELIEF_WAYS entries: 1.5 MiB */
#define KVBM_BELIEF_WAYS 8
#define KVBM_TIER_PEER \
    KV_N_TIERS                /* of fetches, and of an item's `tried`: peers are no tier of ours */
#define KVBM_MAX_PEER_ASKS 64 /* lookups at peers at a time */

/**
 * Steps that a change makes necessary, in the order in which kvbm_advance takes them: what brings
 * blocks and ends jobs comes before what begins new work with the room that this gives.
 */
enum kvbm_step {
    KVBM_STEP_OFFER, /* fetches brought blocks: offer these to the tiers below */
    KVBM_STEP_LOOK,  /* keys left the set of pending ones: pins that wait for them look again */
    KVBM_STEP_START, /* pins have settled: begin the jobs that wait for them */
    KVBM_STEP_END,   /* jobs are over: finish them */
    KVBM_STEP_RETRY, /* the copier or an executor had no room: ask it again */
    KVBM_STEP_PUMP,  /* an offload queue has entries or room: begin what may begin */
    KVBM_N_STEPS
};

/** State of one key of a pin. */
enum kvbm_item_state {
    ITEM_MISS,
    ITEM_BUSY,     /* a tier has it, but no host block or queue place was free */
    ITEM_WAITS,    /* another pin fetches or stores it */
    ITEM_STARVED,  /* in the object store, but fetches already fill their share of host blocks */
    ITEM_FETCHED,  /* a fetch from a lower tier fills its host block */
    ITEM_RESERVED, /* store: the caller fills its host block */
    /* The block of the host pool that has its bytes isn't registered: there is no host tier, or a
     * peer leases a key whose place isn't known. */
    ITEM_STAGED,
    ITEM_HELD,  /* in a registered host block */
    ITEM_BELOW, /* store without a host tier: a lower tier has it already */
    ITEM_LEASED /* load in place: in a peer's memory, which jobs read. It has no host block */
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
    LIST_ENTRY(kvbm_pin) left;   /* in the manager's list, if is_left */
    TAILQ_ENTRY(kvbm_pin) ready; /* in the manager's list, if is_ready */
    bool is_left;                /* released, and once only fetches referenced it */
    bool is_ready;               /* has settled, and jobs wait for that */
    bool store, released, settled;
    uint32_t refs;      /* references of the caller, fetches, jobs and offload entries */
    uint32_t n_fetches; /* the fetches among refs */
    uint32_t n_copying; /* store jobs that write into its blocks */
    uint32_t n_offered; /* store: items that its call has offered to the policy before */
    bool keeps;   /* store: its blocks are promised. Becomes false when there is no memory for it */
    bool durable; /* store: its blocks go to a tier below at once, whatever write-back does */
    uint32_t n_fetched;
    uint32_t n_dropped;     /* load: items without room, which the statistics count */
    uint32_t n_waits;       /* items that are WAITS or STARVED */
    uint32_t n_starved;     /* the STARVED ones among n_waits */
    uint32_t object_window; /* blocks of the object store's window being fetched */
    uint32_t object_end;    /* prompts: item that the object store lacks; those behind aren't got */
    uint32_t peer_window;   /* blocks being fetched from peers, or asked for there */
    uint32_t peer_end;      /* prompts: item that no peer has; those behind aren't asked for */
    uint32_t n_asked;       /* keys of the last question to peers */
    bool no_fetch, no_peers;
    bool is_new;     /* nobody has seen its blocks yet: it may give some up again */
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
    /* Direct job: its cache, whose blocks take the place of host blocks, and [n] their numbers,
     * which the job owns. Such items have no host handle. */
    struct kvbm_cache *direct;
    const uint32_t *blocks;
    struct kvbm_item items[];
};

/** Blocks of one pin, fetched from one tier in one batch. */
struct kvbm_fetch {
    struct kvbm_pin *pin;
    struct kvbm_fetch *next; /* next fetch of the pin; of those that brought blocks, once ended */
    enum kv_tier tier;
    bool asks;                  /* peers: which of them has the blocks? No host block is filled */
    struct kvbm_leased *leases; /* peers: for the lease of the blocks. No host block is filled */
    uint64_t start_ns;
    uint32_t n;
    uint32_t overtaken; /* as in struct kvbm_ask */
    uint32_t brought;   /* ended: bit per block to be offered to the tiers below */
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
    struct kvbm_job_ *next;      /* in the manager's list */
    struct kvbm_job_ *next_wait; /* in the pin's list, or that of stalled jobs or of those over */
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
    struct kvbm_manager
        *manager; /* NULL: it has been destroyed, and the cache's owner has to free it */
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
    uint64_t promise;          /* number of the block's promise; 0: none */
    struct kvbm_job_ *through; /* write-through or direct job that waits for the block, or NULL */
};

/** Offload queue of one tier. */
struct kvbm_queue {
    struct kvbm_down *heap;
    uint32_t n, capacity;
    uint32_t in_flight, max_in_flight; /* moves running, and their limit */
    bool stalled; /* the executor's queue was full: retry when an operation ends */
    /* Staged keys whose moves run, and entries of the same keys: they wait for these moves' ends,
     * since a second copy of a key would evict another block. */
    struct kvbm_set moving;
    struct kvbm_down *aside;
    uint32_t n_aside, aside_capacity;
};

/** A move: a batch of blocks being copied to one tier below. */
struct kvbm_move {
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
    uint32_t tokens[]; /* of block k from k * block_tokens on, for the disk; empty without events */
};

/** Query to the object store: which of these keys does it have? */
struct kvbm_ask {
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
    struct kvbm_manager *manager;
    struct kvbm_peer_batch batch;
    struct kvbm_peer_io ios[KVBM_PEER_BATCH];
    uint8_t keys[KVBM_PEER_BATCH * KVBM_MAX_KEY];
};

/** Belief about a key that the object store isn't known to have (presence.c). */
struct kvbm_belief {
    uint64_t hash;
    uint64_t since_ns; /* time of the first query; 0: the key is absent */
    uint64_t until_ns; /* end of that belief, or of the pause before the next query; 0: no entry */
};

/** Thread that keeps deadlines and retries what was refused (mover.c). */
struct kvbm_mover {
    pthread_t thread;
    bool runs, ends, left; /* left: the thread has ended and must be joined */
    uint32_t running;      /* batches and copies whose end will be noted */
};

/**
 * Pins of callers, and the keys that they bring into the host tier (pins/).
 */
struct kvbm_pins {
    struct kvbm_pin *first;
    uint32_t n;
    LIST_HEAD(kvbm_left_pins, kvbm_pin) left;    /* pins that their fetches alone keep */
    TAILQ_HEAD(kvbm_ready_pins, kvbm_pin) ready; /* pins for STEP_START */
    struct kvbm_fetch *brought;                  /* fetches for STEP_OFFER; each keeps its pin */
    /* hashes of keys being fetched or stored into the host tier; waiters: items of load pins that
     * are WAITS */
    struct kvbm_set pending;
    struct kvbm_set at_peers; /* of these, keys that peers are asked for or give */
    /* Host blocks that fetches from the object store fill now, and their limit: a store that hangs
     * evicts no more than that. */
    uint32_t n_object_fetched, max_object_fetched;
    uint32_t n_peer_fetched; /* of n_object_fetched, blocks that come from peers */
    uint64_t told_ns;        /* time of the last line about keys that make no sense */
    uint32_t n_leased;       /* blocks of leases that pins keep, and of such being asked for */
    TAILQ_HEAD(kvbm_turns, kvbm_turn)
    turns; /* blocking calls that wait for host blocks (jobs/turn.c) */
};

/** Copies between caches and pins (jobs/). */
struct kvbm_jobs {
    struct kvbm_job_ *first;             /* jobs that haven't ended */
    struct kvbm_job_ *stalled;           /* of these, jobs that the copier had no room for */
    struct kvbm_job_ *over, **over_tail; /* of these, jobs for STEP_END, the oldest end first */
    struct kvbm_job_ *done, **done_tail; /* ended, to be polled */
    struct kv_wake done_wake;
    uint32_t n, n_done;
    uint64_t next_id;
};

/** Keys that the object store has or may have (pins/presence.c). Known ones are in the object pool. */
struct kvbm_presences {
    struct kvbm_set asked; /* hashes of keys being queried */
    struct kvbm_ask *asks;
    uint32_t n_asks; /* queries running */
    struct kvbm_belief beliefs[KVBM_BELIEFS][KVBM_BELIEF_WAYS];
};

/** Offloads to lower tiers (offload/). */
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

/** Host block that a blocking store has reported as kept, while no tier below has it (promise.c). */
struct kvbm_promise {
    struct kvbm_immutable held; /* zeroed: no promise */
    uint64_t hash, number;
    uint32_t refs; /* entries of offload queues */
};

/** Promises of a host tier that has tiers below. */
struct kvbm_promises {
    struct kvbm_promise *blocks; /* [host_blocks]; NULL: no tiers below, or no host tier */
    struct kvbm_set keys;        /* hashes of promised keys */
    uint32_t n, max;
    uint32_t claimed; /* promises that stores under way are going to make */
    uint64_t next_number;
};

/** Blocks that the host and disk pools evict next (write_back.c). */
struct kvbm_write_backs {
    struct kvbm_weak *leaving; /* [max_leaving] victims being listed */
    uint32_t max_leaving;
    uint64_t looked[KV_N_TIERS]; /* kvbm_pool_leaving's `since`, by pool */
};

/** The caller's memory that a manager has taken as its host tier, in the process's list. */
struct kvbm_taken {
    struct kvbm_taken *next;
    uintptr_t begin;
    uint64_t bytes;
};

/** Holds of peers that wait for fetches (source.c). */
struct kvbm_lending {
    struct kvbm_waiting *waiting;
    pthread_t thread;
    bool started, stopping;
};

/** A manager: one lock over its tiers, and a struct for each module. */
struct kvbm_manager {
    pthread_mutex_t lock;
    pthread_cond_t work, changed; /* work wakes the mover; changed wakes callers */
    bool stopping;
    unsigned steps; /* bit per enum kvbm_step that is due. 0 whenever the lock is free */
    uint32_t forks; /* forks counted at creation: a higher number means a child */
    /* threads in kvbm_manager_wait, kvbm_manager_drain and kvbm_turn_wait, and claims
     * of promises */
    uint32_t n_waiters;

    struct kvbm_manager_opts opts;
    char *strings; /* strings of opts */
    uint32_t key_len;
    struct kvbm_registry *registry;
    struct kvbm_pool *host, *disk, *object; /* object: keys without bytes */
    struct kvbm_layout *layout;             /* of host blocks */
    struct kvbm_taken taken;                /* host_memory */
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
    struct kvbm_promises promises;
    struct kvbm_write_backs write_back;
    struct kvbm_manager_stats stats;
};

#endif
