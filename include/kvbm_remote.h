// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_remote.h: blocks of other nodes. An agent is one process's identity among its peers; block
 * sets tell them where its blocks lie (docs/kvbm-remote.md).
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

/** Options of an agent; set size to sizeof(struct kvbm_agent_opts), zero means the default. */
struct kvbm_agent_opts {
    size_t size;
    /* Required: 1 to KVBM_MAX_AGENT_NAME of A-Z a-z 0-9 . _ -; unique among agents that meet. */
    const char *name;
    uint64_t worker; /* instance id by which routers know this worker; unique, too. 0: drawn */
    /* Model, revision and whatever else makes two workers' blocks differ: UTF-8, at most
     * KVBM_MAX_FINGERPRINT bytes. Sets of another fingerprint are refused. NULL: "". */
    const char *fingerprint;
    uint32_t key_len;   /* bytes of a block's key, 4 to 64; 0: 8. Sets of another one are refused */
    uint32_t max_sets;  /* sets imported at a time; 0: 4096, at most 2^20 */
    uint64_t max_bytes; /* of sets imported at a time, as serialised; 0: 256 MiB */
};
#define KVBM_AGENT_OPTS_INIT KV_INIT_(kvbm_agent_opts)

/**
 * Create an agent with a new random incarnation, which tells peers of a restart. The caller owns
 * *@ret and frees it with kvbm_agent_destroy. Returns 0; -EINVAL (name, fingerprint, key_len or
 * max_sets); -ENOMEM; -EAGAIN (no random numbers).
 */
KV_API int kvbm_agent_create(const struct kvbm_agent_opts *opts, struct kvbm_agent **ret);

/**
 * Free an agent with the sets that it has imported. NULL is a no-op. Returns 0; -EBUSY while
 * exported sets or lists of remote blocks exist (nothing is freed).
 */
KV_API int kvbm_agent_destroy(struct kvbm_agent *agent);

/** Return the incarnation of an agent; never 0. */
KV_API uint64_t kvbm_agent_incarnation(const struct kvbm_agent *agent);

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
};
#define KVBM_BLOCKSET_OPTS_INIT KV_INIT_(kvbm_blockset_opts)

/**
 * Export a set, with generation 1. The caller owns *@ret and frees it with kvbm_blockset_destroy.
 * Returns 0, or
 *   -EINVAL  no layout, a deserialised one or one without memory; a shard that contradicts the
 *            layout; a transport twice; keys too long
 *   -EEXIST  the agent exports a set of this id
 *   -ENOSPC  the agent has exported sets of 65,536 ids
 *   -ENOMEM
 */
KV_API int kvbm_blockset_export(struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                                struct kvbm_blockset **ret);

/**
 * Change what a set says; the id stays. Its generation grows by one, which makes every view of the
 * earlier generation stale once the reader has imported the new one. Returns 0; -EINVAL (as export,
 * or another id); -ENOMEM.
 */
KV_API int kvbm_blockset_update(struct kvbm_blockset *set, const struct kvbm_blockset_opts *opts);

/** Withdraw a set. NULL is a no-op. A later set of the same id begins above its generation. */
KV_API void kvbm_blockset_destroy(struct kvbm_blockset *set);

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

/** A peer's set that this agent has imported. The agent owns it. */
struct kvbm_remote_set;

/**
 * Import a peer's set, or a later generation of one that is known. @ret (may be NULL) gets the set,
 * valid until kvbm_remote_set_invalidate or the agent's end. Returns 0, or
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
 * Forget a set: all views of its blocks become stale. Frees @set. NULL is a no-op. Its generation is
 * remembered as long as the peer, so that an old copy isn't taken for a new set.
 */
KV_API void kvbm_remote_set_invalidate(struct kvbm_remote_set *set);

/**
 * Forget a peer, by the name of its agent: all its sets, and which generations it had. For peers
 * that have ended. Returns the number of sets.
 */
KV_API long kvbm_agent_forget(struct kvbm_agent *agent, const char *name);

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

/** Read what a set says now. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_remote_set_get_info(const struct kvbm_remote_set *set,
                                    struct kvbm_remote_set_info *ret);

/** Read the config of a set's layout. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_remote_set_layout(const struct kvbm_remote_set *set,
                                  struct kvbm_layout_config *ret);

/**
 * Copy the key of a transport. *@needed (may be NULL) becomes its length. Returns the length;
 * -ENOENT (the peer offers no such transport); -ENOSPC (@cap is less).
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

/** Return the number of blocks in a list. */
KV_API size_t kvbm_remote_blocks_count(const struct kvbm_remote_blocks *blocks);

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

#ifdef __cplusplus
}
#endif
#endif
