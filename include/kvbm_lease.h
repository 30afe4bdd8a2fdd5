// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_lease.h: the bytes of other nodes' blocks (docs/kvbm-remote.md). An owner lends the blocks of
 * a source, from shared memory or through a session; a reader leases and copies them.
 *
 * A lease names blocks that the owner keeps, as they are, for a time. kvbm_lease_read copies them:
 * from shared memory where the set has some and the session is local, else through the session. A
 * block that the owner has given away meanwhile is a miss, whatever was copied.
 *
 * Errors are negative errno values, with the reason in the log; a failing call changes nothing. A
 * NULL pointer that must not be NULL is -EINVAL. Threads: any function from any thread; nothing may
 * use an object while another thread destroys it.
 */
#ifndef KVBM_LEASE_H
#define KVBM_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_layout.h"
#include "kvbm_pool.h"
#include "kvbm_remote.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- shared memory: peers of the same machine read it without the owner ---- */

/**
 * Memory in a sealed memfd (docs/formats.md, "Shared memory"). Its owner writes it; readers that the
 * owner lets map it can only read. Its pages outlive the owner as long as a reader has them mapped.
 */
struct kvbm_shared;

/** Options of shared memory; set size to sizeof(struct kvbm_shared_opts), zero: the default. */
struct kvbm_shared_opts {
    size_t size;
    /* Required. For a layout: n_storages times required_bytes of kvbm_layout_compute, each rounded up
     * to 64. */
    uint64_t bytes;
    uint32_t n_blocks;      /* required: blocks of the layout, each with a generation */
    bool huge_pages;        /* ask for transparent huge pages; a refusal is no error */
    uint32_t touch_threads; /* threads that reserve the pages; 0: 8 */
};
#define KVBM_SHARED_OPTS_INIT KV_INIT_(kvbm_shared_opts)

/**
 * Create zeroed shared memory, with all its pages. The caller owns *@ret and frees it with
 * kvbm_shared_destroy. Returns 0; -EINVAL; -ENOMEM; -ENOSPC (no pages); -EAGAIN (no random numbers);
 * or another error of the system.
 */
KV_API int kvbm_shared_create(const struct kvbm_shared_opts *opts, struct kvbm_shared **ret);

/**
 * Free shared memory: call it after the layouts in it, and the sets that were exported with it, are
 * destroyed. Readers keep what they have mapped. NULL is a no-op.
 */
KV_API void kvbm_shared_destroy(struct kvbm_shared *shared);

/**
 * Return an allocator that hands out pieces of @shared, for kvbm_layout_allocate: -ENOSPC when there
 * is too little left. Pieces aren't taken back. One thread at a time.
 */
KV_API struct kvbm_allocator kvbm_shared_allocator(struct kvbm_shared *shared);

/* ---- sources: how an owner finds and holds the blocks that its peers ask for ---- */

/** In an answer to a lookup: no tier has the key. */
#define KVBM_NO_TIER UINT8_MAX

/**
 * Take the result of a source's hold. @status 0: blocks[i] is the number of the block of key i, or
 * UINT32_MAX where the source has none, and all of them are held until unhold(@hold). @status
 * negative: nothing is held. @blocks is read during the call only.
 */
typedef void (*kvbm_held_fn)(void *to, int status, const uint32_t *blocks, void *hold);

/**
 * Functions of a source, given with a block set; set size to sizeof(struct kvbm_block_source). Threads of
 * the agent call them, several at a time. They must neither wait nor call the agent. Keys are packed.
 */
struct kvbm_block_source {
    size_t size;
    void *arg; /* handed to each function */
    /* Write to tiers[i] the nearest tier (enum kv_tier) from which hold could serve key i, or
     * KVBM_NO_TIER. Holds nothing, so that the answer may be stale. */
    void (*lookup)(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers);
    /* Hold the blocks of those keys that the set has, or can get (from the owner's disk), and call
     * held(to, ...) once: on any thread, before hold returns or later. */
    void (*hold)(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                 void *to);
    /* Give a hold back; from any thread. */
    void (*unhold)(void *arg, void *hold);
    /* Registry of the keys. Peers that have looked a key up are told when its last tier drops it.
     * Outlives the set. NULL: kvbm_blockset_gone tells them. Of one id, the sets of up to 16 agents
     * that share the registry do so; readers of further ones find out when they load. */
    struct kvbm_registry *registry;
};
#define KVBM_BLOCK_SOURCE_INIT KV_INIT_(kvbm_block_source)

/**
 * Return the source of a pool whose blocks have the numbers of the set's layout. A hold is a handle
 * on each block that the pool has registered under a key, and counts as a use. The pool outlives the
 * set.
 */
KV_API struct kvbm_block_source kvbm_pool_source(struct kvbm_pool *pool);

/* ---- leases ---- */

/**
 * Ask which tier of a peer holds each key of a set that it has exported: tiers[i] becomes an enum
 * kv_tier, or KVBM_NO_TIER. The answer may be stale on return; a lease isn't. @n is 1 to 16,384 (of
 * keys of 64 bytes 16,383), keys are packed. Waits until @deadline_ns (CLOCK_MONOTONIC). Returns 0;
 * -EINVAL; -ENOENT (this agent hasn't imported the set, or the peer lends nothing of it); -ESTALE
 * (the set has changed); or an error of the session (-ETIMEDOUT, -EPIPE, -EAGAIN, -ENOMEM, -EPROTO).
 */
KV_API int kvbm_session_lookup(struct kvbm_session *session, uint32_t set, uint32_t group,
                               const void *keys, size_t n, uint64_t deadline_ns, uint8_t *tiers);

/** Blocks of one set that a peer holds for this agent. */
struct kvbm_lease;

/**
 * Lease the blocks of keys for @time_ms (0: 10,000; the owner may grant less). Keys without a block
 * are left out, and so are those beyond the owner's share: ask again for keys behind the lease. A
 * lease of the first keys may hold no block. The caller frees *@ret with kvbm_lease_release. Waits
 * until @deadline_ns. Returns 0, or
 *   -ENOENT  the peer has none of the keys; or, as kvbm_session_lookup, no such set
 *   -ENOSPC  as many blocks are leased as the peer lends
 *   -ESTALE  the set has changed
 *   -EPROTO  the answer contradicts the set
 *   and as kvbm_session_lookup
 */
KV_API int kvbm_session_lease(struct kvbm_session *session, uint32_t set, uint32_t group,
                              const void *keys, size_t n, uint32_t time_ms, uint64_t deadline_ns,
                              struct kvbm_lease **ret);

/**
 * Return the number of keys that a lease covers, from the first asked on: those behind have no
 * block, or were beyond the owner's share. Of those within some may have none (kvbm_lease_block).
 */
KV_API size_t kvbm_lease_count(const struct kvbm_lease *lease);

/** Tell the block of key @i. Returns 0; -ENOENT (the key has none); -ERANGE. */
KV_API int kvbm_lease_block(const struct kvbm_lease *lease, size_t i, struct kvbm_block_at *ret);

/** Return the moment (CLOCK_MONOTONIC) at which a lease ends; 0 for NULL. */
KV_API uint64_t kvbm_lease_expires(struct kvbm_lease *lease);

/** Tell whether kvbm_lease_read copies from shared memory, without the owner. */
KV_API bool kvbm_lease_is_shared(const struct kvbm_lease *lease);

/**
 * Let a lease last at least @time_ms from now (0: 10,000; the owner may grant less). It never ends
 * earlier for that. Returns 0; -ESTALE (it has ended: its blocks are misses); or an error of the
 * session, and nothing has changed: the owner takes back a renewal that this side has given up.
 */
KV_API int kvbm_lease_renew(struct kvbm_lease *lease, uint32_t time_ms, uint64_t deadline_ns);

/**
 * Give a lease back and free it; no other call may use it. Doesn't wait: the owner gives back at the
 * session's end, or at the lease's, what this doesn't reach. NULL is a no-op.
 */
KV_API void kvbm_lease_release(struct kvbm_lease *lease);

/** Request of kvbm_lease_read; set size to sizeof(struct kvbm_lease_read_opts), zero means the default. */
struct kvbm_lease_read_opts {
    size_t size;
    const uint32_t *keys; /* [n] numbers of keys of the lease; NULL: 0, 1, 2 ... */
    /* Required: blocks of the same layers, outer, page_size, inner_dim, width and order, in memory
     * that the CPU may write. */
    const struct kvbm_layout *to;
    const uint32_t *to_blocks; /* required: [n] blocks of to, each once */
    uint32_t n;                /* required */
    uint64_t deadline_ns;      /* CLOCK_MONOTONIC; 0: until the lease ends */
    uint8_t *ok; /* [(n + 7) / 8] bit i: to_blocks[i] holds the bytes of its key; may be NULL */
    bool no_checksums; /* through a session: trust the socket, don't verify each block's XXH3-128 */
    bool no_shared;    /* through the session, though there is shared memory */
    bool no_ucx;       /* not by UCX, though both sides have it */
    bool no_nixl;      /* not by NIXL, though both sides have it */
};
#define KVBM_LEASE_READ_OPTS_INIT KV_INIT_(kvbm_lease_read_opts)

/**
 * Copy leased blocks into @opts->to and wait for it. A block whose bit is 0 in ok is a miss: its bytes
 * in to are undefined. Not one byte there changes after the call has returned, whatever arrives late.
 * Several threads may read by one lease.
 *
 * Returns the number of blocks that are right, 0 and more, also when the lease has ended, the owner
 * has died, or the time was over; -EINVAL (also: a block twice); -ERANGE (a key or block beyond the
 * lease or to); -ENOMEM.
 */
KV_API long kvbm_lease_read(struct kvbm_lease *lease, const struct kvbm_lease_read_opts *opts);

#ifdef __cplusplus
}
#endif
#endif
