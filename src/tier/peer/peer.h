// SPDX-License-Identifier: Apache-2.0
/**
 * The peer tier: blocks of other nodes, through sessions of an agent (kvbm_remote.h).
 *
 *   ASK  keys ──► lookup at up to max_asked peers at once ──► who has each key
 *   GET  keys ──► lease at one peer ──► copy, verified (kvbm_lease_read) ──► lease released
 *   LEASE  keys ──► lease at one peer, whose memory this process maps: the caller copies
 *
 * The answers to an ASK are remembered for a time, by hashes of keys. They are guesses: only a GET
 * tells whether a peer has a block.
 *
 * With an indexer, an ASK of group 0 that names no worker asks it first: up to 4 of the workers that
 * it names are asked alone. All peers are asked in two cases: these have none of the keys, or the
 * indexer names no worker in time with which there is a session.
 *
 * Each peer has a breaker. It opens when a call to the peer isn't answered in time, and after three
 * other failures in a row. While it is open, only a probe is sent to that peer: after 1 s, 2 s, and
 * so on up to 30 s.
 *
 * Batches run on threads of the tier, half of them at most for one peer and half for ASKs: a frozen
 * peer delays no other one's blocks. A batch ends at its deadline at the latest, in the queue or
 * under way, and nothing writes into its blocks afterwards.
 *
 * Threads: any. done callbacks come from the tier's own threads, hold none of its locks, may submit,
 * and must not block or close.
 */
#ifndef KVBM_TIER_PEER_PEER_H
#define KVBM_TIER_PEER_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_lease.h"
#include "peer/directory/indexer.h"

#define KVBM_PEER_BATCH 64   /* most keys of a batch that brings blocks */
#define KVBM_PEER_ASKED 1024 /* most keys of an ASK: an answer has a byte for each */

struct kvbm_peers;

struct kvbm_peers_opts {
    size_t size;
    struct kvbm_agent *agent;       /* required; outlives the tier */
    const struct kvbm_layout *like; /* required: blocks of peers must have this form; outlives it */
    uint32_t key_len;
    uint32_t set;        /* id of the peers' sets; 0: 1 */
    uint32_t n_threads;  /* 0: 8 */
    uint32_t max_queue;  /* batches; 0: 1024 */
    uint32_t timeout_ms; /* of a batch, if its deadline isn't earlier; 0: 2000 */
    uint32_t ask_ms;     /* for the answers to an ASK; 0: 250 */
    uint32_t max_asked;  /* peers of an ASK, at most 16; 0: 16 */
    const struct kvbm_indexer_opts *indexer; /* NULL: none */
    const struct kvbm_shard *shard; /* heads that peers' blocks must have; outlives it. NULL: any */
    /* The node has an object store of its own: a block that a peer has only there counts as absent.
     * The peer would have to fetch it into its host tier first, where it evicts another block. */
    bool has_object_store;
};

/** Open the tier. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no threads); or as kvbm_indexer_open. */
int kvbm_peers_open(const struct kvbm_peers_opts *opts, struct kvbm_peers **ret);

/**
 * Close the tier: end queued batches with -ECANCELED, end the sessions in which a call hangs, wait
 * for running batches. NULL is a no-op.
 */
void kvbm_peers_close(struct kvbm_peers *peers);

enum kvbm_peer_op { KVBM_PEER_ASK, KVBM_PEER_GET, KVBM_PEER_LEASE };

struct kvbm_peer_io {
    const void *key;
    uint64_t hash;   /* kvbm_peer_hash */
    uint64_t worker; /* ASK: becomes the peer that has the key */
    uint32_t block;  /* GET: of the batch's layout */
    /* 0 (LEASE: key i of the lease has a block); -ENOENT, -EBADMSG (didn't verify), -ETIMEDOUT, -EHOSTDOWN (no session, breaker), -EPIPE,
     * -EAGAIN (the peer lends no more), -ECANCELED ... */
    int status;
};

/** A batch. The tier owns it until done. */
struct kvbm_peer_batch {
    enum kvbm_peer_op op;
    int32_t priority;     /* order of waiting batches: higher first, then older */
    uint64_t deadline_ns; /* monotonic; 0: timeout_ms from now */
    uint32_t group;
    uint64_t worker;              /* GET, LEASE: from this peer. ASK: ask this one, too; 0: any */
    const struct kvbm_layout *to; /* GET */
    /* LEASE: becomes a shared lease of all keys, which the caller releases; NULL: there is none. A
     * peer that would lease only the first keys, or isn't shared, gives none (-EAGAIN). */
    struct kvbm_lease *lease;
    struct kvbm_peer_io *ios;
    uint32_t n; /* 1 to KVBM_PEER_BATCH; ASK: to KVBM_PEER_ASKED */
    void (*done)(struct kvbm_peer_batch *batch);
    void *arg;
    struct kvbm_peer_batch *next_; /* used by the tier, like the fields below */
    uint64_t until_;
    bool cancelled_;
};

/**
 * Submit a batch. Returns 0; -EAGAIN (queue full); -EHOSTDOWN (no peers); -ESHUTDOWN; -EINVAL. After
 * an error done isn't called.
 */
int kvbm_peers_submit(struct kvbm_peers *peers, struct kvbm_peer_batch *batch);

/** End a batch soon, with -ECANCELED; one under way after the call that it waits for. */
void kvbm_peers_cancel(struct kvbm_peers *peers, struct kvbm_peer_batch *batch);

/**
 * End all batches soon, also by ending sessions in which they wait. Later ones are refused until
 * kvbm_peers_resume.
 */
void kvbm_peers_cancel_all(struct kvbm_peers *peers);

/** Take batches again after kvbm_peers_cancel_all: the manager wasn't destroyed. */
void kvbm_peers_resume(struct kvbm_peers *peers);

/** Tell whether there is a session with a peer that may be asked now. */
bool kvbm_peers_any(struct kvbm_peers *peers);

/**
 * Tell how many blocks a LEASE may hold at a peer, as far as is known: 0 when its memory isn't shared
 * with this process.
 */
uint64_t kvbm_peers_lendable(struct kvbm_peers *peers, uint64_t worker);

/** Hash a key and its group, for what is known of keys. */
uint64_t kvbm_peer_hash(const void *key, uint32_t key_len, uint32_t group);

/* ---- what is known ---- */

enum kvbm_known {
    KVBM_KNOWN_NOT, /* not asked lately */
    KVBM_KNOWN_ASKED,
    KVBM_KNOWN_ABSENT,
    KVBM_KNOWN_THERE
};

/** Tell what is known of a key by its hash. *@worker becomes the peer that has it. */
enum kvbm_known kvbm_peers_known(struct kvbm_peers *peers, uint64_t hash, uint64_t *worker);

/** Forget what is known of a key. */
void kvbm_peers_forget(struct kvbm_peers *peers, uint64_t hash);

struct kvbm_peers_stats {
    uint32_t sessions;                      /* peers with an open session, whose blocks fit */
    uint32_t down;                          /* peers whose breaker is open */
    uint64_t asked, found;                  /* keys of ASKs */
    uint64_t got, bytes, failed, late;      /* blocks of GETs */
    uint64_t opened;                        /* breakers, times */
    uint64_t gone;                          /* keys that peers told to be gone */
    uint64_t indexer_asked, indexer_failed; /* requests */
    uint64_t named;    /* keys of ASKs that a peer had which the indexer named */
    bool indexer_down; /* its breaker is open */
};
void kvbm_peers_get_stats(struct kvbm_peers *peers, struct kvbm_peers_stats *ret);

#endif
