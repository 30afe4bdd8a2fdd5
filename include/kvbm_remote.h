// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_remote.h: blocks of other nodes. An agent is one process's identity among its peers; block
 * sets tell them where its blocks lie (docs/kvbm-remote.md). Their bytes come by leases
 * (kvbm_lease.h); plans fit tensor-parallel groups of unlike sizes (kvbm_plan.h).
 *
 *   owner                                            reader
 *   kvbm_blockset_export(layout) ─► serialise ─────► kvbm_blockset_import
 *            │ update: generation + 1  ─────────────► import again: earlier views are stale
 *            │ destroy                 ─────────────► kvbm_remote_set_invalidate
 *                                                     kvbm_remote_blocks_immutable / _mutable
 *                                                          └► kvbm_remote_blocks_view
 *
 * The bytes of a serialised set travel as the program likes: through its own control plane, a file,
 * or etcd. They are the specification's NixlBlockSet; lists of blocks in an imported set are its
 * RemoteBlocks. Format: docs/formats.md, "Block sets".
 *
 * Errors are negative errno values, with the reason in the log; a failing call changes nothing. A
 * NULL pointer that must not be NULL is -EINVAL. Threads: any function from any thread; nothing may
 * use an object while another thread destroys it.
 */
#ifndef KVBM_REMOTE_H
#define KVBM_REMOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_layout.h"
#include "kvbm_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Agents.
 */

/** Longest name of an agent, and longest fingerprint, in bytes. */
#define KVBM_MAX_AGENT_NAME 63
#define KVBM_MAX_FINGERPRINT 255

/** One process's identity among its peers, and the block sets that it knows of them. */
struct kvbm_agent;

/** Use of UCX for the bytes of leased blocks, beside shared memory and the session's sockets. */
enum kvbm_ucx_use {
    KVBM_UCX_OFF = 0,
    KVBM_UCX_IF_THERE = 1, /* where libkvbm_ucx can be opened; else a line in the log */
    KVBM_UCX_REQUIRED = 2  /* kvbm_agent_create is -ENOTSUP without libkvbm_ucx */
};

/** Use of NIXL for the bytes of leased blocks, where UCX isn't used. */
enum kvbm_nixl_use {
    KVBM_NIXL_OFF = 0,
    KVBM_NIXL_IF_THERE = 1, /* where libnixl_capi.so can be opened; else a line in the log */
    KVBM_NIXL_REQUIRED = 2  /* kvbm_agent_create is -ENOTSUP without libnixl_capi.so */
};

/** Options of an agent; set size to sizeof(struct kvbm_agent_opts), zero means the default. */
struct kvbm_agent_opts {
    size_t size;
    /* Required: 1 to KVBM_MAX_AGENT_NAME of A-Z a-z 0-9 . _ -; unique among agents that meet. */
    const char *name;
    /* Instance id by which routers know this worker; unique, too. 0: drawn, or that of worker_name. */
    uint64_t worker;
    /* Model, revision and whatever else makes two workers' blocks differ: UTF-8, at most
     * KVBM_MAX_FINGERPRINT bytes. Sets of another fingerprint are refused. NULL: "". */
    const char *fingerprint;
    uint32_t key_len;   /* bytes of a block's key, 4 to 64; 0: 8. Sets of another one are refused */
    uint32_t max_sets;  /* sets imported at a time; 0: 4096, at most 2^20 */
    uint64_t max_bytes; /* of sets imported at a time, as serialised; 0: 256 MiB */

    /* ---- sessions; all strings are read by kvbm_agent_create only ---- */
    /* Endpoints to listen at: "unix:/PATH", "tcp:HOST:PORT", "tcp:[V6]:PORT"; port 0: any. Unix
     * sockets admit processes of the same user only. HOST must be of this machine's loopback
     * unless peers have to show a token or a certificate of tls_ca, or `unprotected` is set. */
    const char *const *listen;
    uint32_t n_listen; /* at most 8 */
    bool unprotected;  /* listen beyond loopback without either: any program may come in */
    /* File with a secret of 16 to 4096 bytes that all agents share; a newline at the end doesn't
     * count. Only its owner (this user or root) and group may read it. Both sides of a session
     * prove that they know it, and never send it. NULL: none. */
    const char *token_file;
    /* PEM files: all tcp endpoints use TLS 1.3, also those that this agent connects to. Peers need a
     * certificate by tls_ca. NULL for tls_ca: certificates aren't looked at, and a token must say
     * who is who. NULL for tls_key: the key is in tls_cert. */
    const char *tls_cert, *tls_key, *tls_ca;
    uint32_t max_sessions; /* at a time, of both directions; 0: 1024, at most 65536 */
    uint32_t max_requests; /* that a peer may have open in a session; 0: 256, at most 4096 */
    /* Bytes that may wait in one session for a peer that doesn't read, and bodies of all sessions
     * that are being received; 0: 64 MiB, 256 MiB. A peer that lets more wait is cut off. */
    uint64_t max_queued_bytes, max_received_bytes;
    uint32_t keepalive_ms; /* silence after which a peer counts as dead; 0: 10000 */
    uint32_t handshake_ms; /* in which a newcomer must have shown who it is; 0: 5000 */
    /* Blocks of this agent, for comparison: peers whose blocks have other numbers of layers, of
     * parts (outer_dim) or of tokens (page_size) are refused. NULL: any. */
    const struct kvbm_layout_config *layout;
    uint32_t ucx;  /* enum kvbm_ucx_use; 0: KVBM_UCX_OFF */
    uint32_t nixl; /* enum kvbm_nixl_use; 0: KVBM_NIXL_OFF */
    /* Instance id as kv-indexer takes it: digits, or a name such as a pod's. `worker` must be 0 then.
     * A name's number, by which functions and peers know it, is XXH3-64 of its bytes, with the top bit
     * set. NULL: none. */
    const char *worker_name;
};
#define KVBM_AGENT_OPTS_INIT KV_INIT_(kvbm_agent_opts)

/**
 * Create an agent with a new random incarnation, which tells peers of a restart. The caller owns
 * *@ret and frees it with kvbm_agent_destroy. An agent that listens, and one that has opened a
 * session, has one thread of its own. Returns 0, or
 *   -EINVAL   a name, number or endpoint; a token too short or too long; no certificate
 *   -EAGAIN   no random numbers
 *   -EACCES   other users may read the token
 *   -EPERM    an endpoint beyond loopback, without token, tls_ca or `unprotected`
 *   -ENOTSUP  a token or TLS, without libkvbm_tls beside libkvbm; KVBM_UCX_REQUIRED, without
 *             libkvbm_ucx, or UCX finds no transport; KVBM_NIXL_REQUIRED, without NIXL's
 *             libnixl_capi.so or its UCX backend
 *   -ENOMEM, or an error of opening a file, binding or listening
 */
KV_API int kvbm_agent_create(const struct kvbm_agent_opts *opts, struct kvbm_agent **ret);

/**
 * End the sessions that peers have opened, and free an agent with the sets that it has imported.
 * NULL is a no-op. Returns 0; -EBUSY while exported sets, lists of remote blocks, leases or sessions
 * that this side has opened exist (nothing is freed).
 */
KV_API int kvbm_agent_destroy(struct kvbm_agent *agent);

/**
 * Copy endpoint @i as it was really bound, with a NUL: the port that "tcp:127.0.0.1:0" has become.
 * *@needed (may be NULL) becomes the length with the NUL. Returns the length without; -ENOENT (no
 * such endpoint); -ENOSPC (@cap is less).
 */
KV_API long kvbm_agent_endpoint(const struct kvbm_agent *agent, uint32_t i, char *to, size_t cap,
                                size_t *needed);

/* ---------------------------------------------------------------------------------------------
 * Sessions with peers.
 *
 * While a session lives, each side's exported sets are in the other's directory: those that exist
 * when it begins, and every update and withdrawal in its order. When the last session with a peer
 * ends, all sets of that peer are forgotten, whichever way they came.
 */

/** A session that this side has opened. */
struct kvbm_session;

/** Options of opening; set size to sizeof(struct kvbm_session_opts), zero means the default. */
struct kvbm_session_opts {
    size_t size;
    uint64_t timeout_ms; /* for all of it: name lookup, connection, handshake, sets; 0: 5000 */
    uint32_t n_data;     /* further connections for bulk data, 0 to 8 */
    /* Name that the listener's certificate must have; NULL: of the endpoint. */
    const char *tls_name;
    char *why; /* [why_size] gets the reason of a failure in words; NULL: only the log */
    size_t why_size;
};
#define KVBM_SESSION_OPTS_INIT KV_INIT_(kvbm_session_opts)

/**
 * Open a session with the agent that listens at @endpoint ("unix:/PATH", "tcp:HOST:PORT"). When the
 * call returns, the peer's sets are in this agent's directory. The caller ends it with
 * kvbm_session_close. Returns 0, or
 *   -EINVAL           the endpoint or an option
 *   -ECONNREFUSED, -ENOENT, -EHOSTUNREACH, ...  nobody listens there
 *   -ETIMEDOUT        not in time
 *   -EACCES           token, certificate, or another user's unix socket
 *   -EMEDIUMTYPE      another model (fingerprint), keys of another length, other blocks
 *   -EPROTONOSUPPORT  another version, or TLS on one side only
 *   -EEXIST           another peer has its name or worker; or an earlier incarnation still has a
 *                     session: try again
 *   -ELOOP            this agent itself
 *   -ENOSPC           too many sessions, on either side
 *   -EPROTO           nothing that speaks this protocol
 *   -EPIPE            the peer closed the connection
 *   -EDEADLK          called from a callback of the agent
 *   -ENOMEM, -EMFILE
 * The log of the side that refuses has the reason in words; so has @opts->why.
 */
KV_API int kvbm_session_open(struct kvbm_agent *agent, const char *endpoint,
                             const struct kvbm_session_opts *opts, struct kvbm_session **ret);

/**
 * End a session and free it. Calls that wait in it return -EPIPE. NULL is a no-op. Returns 0;
 * -EDEADLK (called from a callback of the agent: nothing is done).
 */
KV_API int kvbm_session_close(struct kvbm_session *session);

/** State of a session. */
struct kvbm_session_info {
    size_t size; /* the caller's */
    char agent[KVBM_MAX_AGENT_NAME + 1];
    uint64_t worker, incarnation; /* the peer's */
    char endpoint[128];           /* as it was opened */
    bool tls, open;
    uint32_t n_data; /* connections for bulk data */
    int err;         /* why it isn't open, a negative errno */
    bool ucx;        /* blocks that this side reads come by UCX */
    bool nixl;       /* blocks that this side reads come by NIXL, unless ucx */
};
#define KVBM_SESSION_INFO_INIT KV_INIT_(kvbm_session_info)

/** Read a session's state. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_session_get_info(struct kvbm_session *session, struct kvbm_session_info *ret);

/* ---------------------------------------------------------------------------------------------
 * Block sets of this agent.
 */

/** Axis that the ranks of a tensor-parallel group divide. The numbers are stable (wire). */
enum kvbm_shard_axis {
    KVBM_SHARD_NONE = 0, /* nothing: every rank holds whole blocks (MLA) */
    KVBM_SHARD_HEADS = 1 /* K/V heads */
};

/** Part of each block that one rank of a tensor-parallel group holds; zeros: all of it. */
struct kvbm_shard {
    uint32_t rank, n_ranks;           /* rank < n_ranks; 0, 0: one rank */
    uint32_t axis;                    /* enum kvbm_shard_axis; HEADS when n_ranks > 1 divide them */
    uint32_t first_head, total_heads; /* of the model; with KVBM_SHARD_HEADS, else 0 */
    uint32_t reserved[3];             /* zero */
};

/** Transports that can reach a set's memory. The numbers are stable (wire). */
enum kvbm_transport {
    KVBM_TRANSPORT_SHM = 1, /* key: how to ask the owner for the memory's descriptor */
    KVBM_TRANSPORT_TCP = 2, /* key: host:port of the owner */
    KVBM_TRANSPORT_UCX = 3, /* key: worker address and packed remote key */
    KVBM_TRANSPORT_NIXL = 4 /* key: the agent's metadata */
};
#define KVBM_MAX_TRANSPORTS 8
#define KVBM_MAX_TRANSPORT_KEY 65536

/** Key of one transport. In arrays; never grows. */
struct kvbm_transport_key {
    uint32_t transport; /* enum kvbm_transport; readers skip those that they don't know */
    uint32_t len;       /* 0 to KVBM_MAX_TRANSPORT_KEY */
    const void *key;
};

/** Blocks that an agent lets its peers see. */
struct kvbm_blockset;

struct kvbm_block_source; /* kvbm_lease.h */
struct kvbm_shared;

/** Options of a set; set size to sizeof(struct kvbm_blockset_opts), zero means the default. */
struct kvbm_blockset_opts {
    size_t size;
    /* Number of the set within its agent. By custom 0 is the device, 1 the host, 2 the disk. */
    uint32_t id;
    const struct kvbm_layout *layout; /* required; read by this call only */
    bool writable;                    /* peers may write: kvbm_remote_blocks_mutable */
    struct kvbm_shard shard;
    uint64_t lifetime_ms; /* how long a reader may use what it imported; 0: until told otherwise */
    const struct kvbm_transport_key *transports; /* [n_transports], copied; one per transport */
    uint32_t n_transports;                       /* at most KVBM_MAX_TRANSPORTS */
    /* Finds and holds the blocks that peers look up and lease; copied. NULL: they can do neither. */
    const struct kvbm_block_source *source;
    /* Memory that holds the layout, for readers of the same machine; outlives the set. It adds the
     * transport KVBM_TRANSPORT_SHM. NULL: they read through a socket. */
    const struct kvbm_shared *shared;
    uint32_t lease_share;  /* of the blocks that leases may hold at a time, in percent; 0: 25 */
    uint32_t max_lease_ms; /* longest time of a lease; 0: 60,000 */
};
#define KVBM_BLOCKSET_OPTS_INIT KV_INIT_(kvbm_blockset_opts)

/**
 * Export a set, with generation 1. The caller owns *@ret and frees it with kvbm_blockset_destroy.
 * With a source, the layout's memory stays until the set is destroyed. Returns 0, or
 *   -EINVAL  no layout, a deserialised one or one without memory; a shard that contradicts the
 *            layout; a transport twice; keys too long; a registry whose keys aren't of the agent's length
 *   -EEXIST  the agent exports a set of this id
 *   -ENOSPC  the agent has exported sets of 65,536 ids
 *   -ENOMEM
 */
KV_API int kvbm_blockset_export(struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                                struct kvbm_blockset **ret);

/**
 * Change what a set says; the id stays. Its generation grows by one, which makes every view of the
 * earlier generation stale once the reader has imported the new one. All leases end; the call waits
 * until their blocks are given back. Returns 0; -EINVAL (as export, or another id); -ENOMEM.
 */
KV_API int kvbm_blockset_update(struct kvbm_blockset *set, const struct kvbm_blockset_opts *opts);

/**
 * Withdraw a set, end its leases, and wait until the blocks are given back to the source. NULL is a
 * no-op. A later set of the same id begins above its generation. Not from a callback of the agent.
 */
KV_API void kvbm_blockset_destroy(struct kvbm_blockset *set);

/**
 * Tell peers that have looked up keys of a set that @n of them are gone, so that they don't ask for
 * those. For sources without a registry. Doesn't wait; more than 1 MiB of keys at a time are left out.
 * Returns 0; -EINVAL; -ENOENT (a set without a source).
 */
KV_API int kvbm_blockset_gone(struct kvbm_blockset *set, uint32_t group, const void *keys,
                              size_t n);

/** Return the generation of a set, from 1. */
KV_API uint64_t kvbm_blockset_generation(const struct kvbm_blockset *set);

/**
 * Serialise a set for peers (docs/formats.md, "Block sets"). *@needed (may be NULL) becomes the
 * length. Returns the length; -ENOSPC (@cap is less).
 */
KV_API long kvbm_blockset_serialise(const struct kvbm_blockset *set, void *to, size_t cap,
                                    size_t *needed);

/* ---------------------------------------------------------------------------------------------
 * Block sets of peers.
 */

/**
 * A peer's set that this agent has imported. The agent owns it. Sets of a peer with a session end on
 * the agent's own thread, when the peer withdraws them or its last session ends: programs with
 * sessions take references (kvbm_remote_set_find), or name blocks by worker and set
 * (kvbm_remote_blocks_immutable).
 */
struct kvbm_remote_set;

/**
 * Import a peer's set, or a later generation of one that is known. @ret (may be NULL) gets the set,
 * valid until kvbm_remote_set_invalidate, kvbm_agent_forget, the end of the peer's last session, or
 * the agent's end. Returns 0, or
 *   -EPROTO           not a set: cut short, wrong checksum, contradictions
 *   -EPROTONOSUPPORT  a newer version
 *   -ELOOP            a set of this agent itself (its worker or its name)
 *   -EMEDIUMTYPE      blocks of another model (fingerprint), or keys of another length
 *   -EEXIST           this generation is known; or the peer has restarted, or another peer has its
 *                     name or worker, and kvbm_agent_forget wasn't called
 *   -ESTALE           a later generation was known, also of a set that was invalidated meanwhile
 *   -ENOSPC           max_sets or max_bytes
 *   -ENOMEM
 */
KV_API int kvbm_blockset_import(struct kvbm_agent *agent, const void *data, size_t len,
                                struct kvbm_remote_set **ret);

/**
 * Forget a set: all views of its blocks become stale. Frees @set, unless references of
 * kvbm_remote_set_find exist: then their last release does. NULL is a no-op. Its generation is
 * remembered as long as the peer, so that an old copy isn't taken for a new set.
 */
KV_API void kvbm_remote_set_invalidate(struct kvbm_remote_set *set);

/**
 * Forget a peer, by the name of its agent: all its sets, and which generations it had. For peers
 * that have ended. Returns the number of sets.
 */
KV_API long kvbm_agent_forget(struct kvbm_agent *agent, const char *name);

/**
 * Find set @id of the peer @worker. The caller drops the reference with kvbm_remote_set_release, and
 * the agent can't be destroyed before. When the set is invalidated, or the peer's last session ends,
 * *@ret stays valid and every call on it returns -ESTALE; a later set of that id is another one. Returns
 * 0; -ENOENT (no such set was imported); -EINVAL.
 */
KV_API int kvbm_remote_set_find(struct kvbm_agent *agent, uint64_t worker, uint32_t id,
                                struct kvbm_remote_set **ret);

/** Drop a reference of kvbm_remote_set_find. NULL is a no-op. */
KV_API void kvbm_remote_set_release(struct kvbm_remote_set *set);

/** Description of an imported set. */
struct kvbm_remote_set_info {
    size_t size; /* the caller's */
    char agent[KVBM_MAX_AGENT_NAME + 1];
    uint64_t worker, incarnation, generation;
    uint32_t id;
    bool writable;
    uint64_t expires_ns; /* CLOCK_MONOTONIC of this process; 0: never */
    struct kvbm_shard shard;
    uint32_t n_transports;
    uint32_t transports[KVBM_MAX_TRANSPORTS]; /* enum kvbm_transport */
};
#define KVBM_REMOTE_SET_INFO_INIT KV_INIT_(kvbm_remote_set_info)

/** Read what a set says now. Returns 0; -EINVAL (NULL, or ret->size); -ESTALE (it is gone). */
KV_API int kvbm_remote_set_get_info(const struct kvbm_remote_set *set,
                                    struct kvbm_remote_set_info *ret);

/** Read the config of a set's layout. Returns 0; -EINVAL (NULL, or ret->size); -ESTALE (gone). */
KV_API int kvbm_remote_set_layout(const struct kvbm_remote_set *set,
                                  struct kvbm_layout_config *ret);

/**
 * Copy the key of a transport. *@needed (may be NULL) becomes its length. Returns the length;
 * -ENOENT (the peer offers no such transport); -ENOSPC (@cap is less); -ESTALE (the set is gone).
 */
KV_API long kvbm_remote_set_transport(const struct kvbm_remote_set *set,
                                      enum kvbm_transport transport, void *to, size_t cap,
                                      size_t *needed);

/** A block of a peer, as programs name it to each other. In arrays; never grows. */
struct kvbm_block_at {
    uint64_t worker; /* instance id of the agent */
    uint32_t set;    /* id of the set within it */
    uint32_t block;  /* number in the set's layout */
};

/** A list of blocks of one imported set. */
struct kvbm_remote_blocks;

/**
 * List @n blocks of a peer for reading. The caller frees *@ret with kvbm_remote_blocks_destroy.
 * Returns 0, or
 *   -EINVAL  @n is 0
 *   -EXDEV   blocks of several sets
 *   -ENOENT  no such set was imported
 *   -ERANGE  a block beyond the set
 *   -ESTALE  the set has expired
 *   -ENOMEM
 */
KV_API int kvbm_remote_blocks_immutable(struct kvbm_agent *agent,
                                        const struct kvbm_block_at *blocks, size_t n,
                                        struct kvbm_remote_blocks **ret);

/**
 * List blocks for writing. As kvbm_remote_blocks_immutable, and -EPERM unless the set was exported
 * writable; -EINVAL also for a block named twice.
 */
KV_API int kvbm_remote_blocks_mutable(struct kvbm_agent *agent, const struct kvbm_block_at *blocks,
                                      size_t n, struct kvbm_remote_blocks **ret);

/** Free a list. NULL is a no-op. */
KV_API void kvbm_remote_blocks_destroy(struct kvbm_remote_blocks *blocks);

/**
 * Tell whether a list may still be used: as far as this process was told, its set has neither
 * changed, nor expired, nor been invalidated. Says nothing of what a block holds now: the owner must
 * keep the blocks while they are read, or the reader must verify the bytes. Orders what the caller
 * read before the call before it. Returns 0 or -ESTALE.
 */
KV_API int kvbm_remote_blocks_check(const struct kvbm_remote_blocks *blocks);

/**
 * Locate a region of block @i of the list in the owner's memory. The address means nothing in this
 * process. Returns 0; -ERANGE (no such block, layer or outer); -ESTALE.
 */
KV_API int kvbm_remote_blocks_view(const struct kvbm_remote_blocks *blocks, size_t i,
                                   uint32_t layer, uint32_t outer, struct kvbm_view *ret);

/* ---------------------------------------------------------------------------------------------
 * Hints. A router that sends a request to a worker may name another worker that holds a part of the
 * prompt. Dynamo's router, vLLM and SGLang pass such hints on as the request's kv_hints:
 *
 *   {"protocol_version": "0.1", "message_id": "...", "actions": [
 *     {"action_id": "...", "action_type": "kv.fetch", "action_version": "1.0",
 *      "payload": {"source_control_endpoint": "tcp://10.0.0.7:25000",
 *                  "block_hashes": [15760518052499183552, -42, "a1b2..."], "mode": "copy"}}]}
 */

/** A kv.fetch hint: fetch these blocks from there. Advice, and from another process: verify. */
struct kvbm_hint {
    size_t size;    /* the caller's */
    char host[256]; /* name or address (IPv6 without brackets); "": any peer that has the blocks */
    uint16_t port;  /* 0 without a host */
    bool move;      /* mode "move": the source needs the blocks no longer */
    bool no_retain; /* the target needs them for this request only */
};
#define KVBM_HINT_INIT KV_INIT_(kvbm_hint)

/**
 * Parse the JSON of an envelope of hints, or of the bare payload of one kv.fetch. The first kv.fetch
 * of version 1 counts; other actions and unknown fields are skipped. Up to @cap hashes go to @hashes,
 * in the hint's order (from the root of the prompt), as the 64 bits that events carry: negative
 * numbers as two's complement, of hexadecimal strings the first 16 digits.
 *
 * Returns the number of hashes in the hint, 1 or more, also when @cap is less; or
 *   -EPROTO           not a hint: malformed JSON, a field missing or of another type, no hashes, an
 *                     endpoint that isn't tcp://HOST:PORT or that nobody can connect to
 *   -ENOENT           an envelope without kv.fetch
 *   -EPROTONOSUPPORT  another version of the envelope than 0.1, or of kv.fetch than 1.x
 *   -ENOMEM
 * Nothing is logged, since hints come with each request.
 */
KV_API long kvbm_hint_parse(const void *json, size_t len, struct kvbm_hint *ret, uint64_t *hashes,
                            size_t cap);

#ifdef __cplusplus
}
#endif
#endif
