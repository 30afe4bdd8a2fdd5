// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_manager.h: one node's tiers behind one handle. Store jobs copy blocks from the engine's
 * cache to the tiers; load jobs bring them back.
 *
 *      engine's cache (G1)          attached: the engine's tensors, numbered by it or by a pool
 *        │ store        ▲ load
 *        ▼              │
 *      host (G2)  ── a pool, found by key ──┐
 *        │ offload      ▲ fetch             │ offload (write-through or in the background)
 *        ▼              │                   ▼
 *      disk (G3)  ─ crash-safe slots ─    object store (G4), any kv_store URI
 *
 *      peers: other nodes' tiers, read into the host tier (kvbm_remote.h)
 *
 * Every tier but the cache is optional; without a host tier a few staging buffers take its place. A
 * lookup finds a block in any tier. kvbm_manager_prepare_load pins found blocks until the pin is
 * released: no block can be evicted between lookup and load. The copy between cache and host
 * converts between layouts (order of heads and tokens, another number of heads).
 *
 * The manager never waits for room: it drops and counts blocks that it can't keep. Bytes that don't
 * verify are a miss.
 *
 * Threads: any function from any thread. Functions that wait for I/O say so. In a child after
 * fork() calls return -ECHILD and destroy does nothing: create a manager after the fork. Touch
 * callbacks and attachments' destroy functions (kvbm_pool.h) run inside the manager and must not
 * call it. The manager has no callbacks into the engine.
 *
 * Deadlines are times of CLOCK_MONOTONIC; 0, and those of more than a century ahead (INT64_MAX): none.
 * One decades ahead is of another clock: -EINVAL.
 *
 * Positions count blocks: that of a chain is the number of blocks before its first key. A store of keys
 * that are known at other positions is -EINVAL; a load of them may miss. The log says which key it is.
 *
 * Sizes: structs that begin with `size` may be of an older (smaller) or a newer (larger) version.
 * Missing fields of options have their defaults; missing fields of results aren't written. Other
 * structs never change.
 */
#ifndef KVBM_MANAGER_H
#define KVBM_MANAGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_events.h"
#include "kvbm_layout.h"
#include "kvbm_lease.h"
#include "kvbm_pool.h"
#include "kvbm_remote.h"
#include "kvbm_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The tiers of one node. */
struct kvbm_manager;

/**
 * Choice of the blocks that are offloaded to a tier. Blocks that the tier has are never offloaded.
 */
enum kvbm_policy {
    KVBM_POLICY_DEFAULT,   /* PRESENCE */
    KVBM_POLICY_PRESENCE,  /* every block that the tier lacks */
    KVBM_POLICY_FREQUENCY, /* blocks offered for the threshold-th time (spares SSDs) */
    KVBM_POLICY_NEVER
};

/** Rule for offloading to a tier. */
struct kvbm_tier_policy {
    enum kvbm_policy policy;
    uint32_t threshold;    /* FREQUENCY: the offer at which a block is taken, 1 to 15; 0: 2 */
    uint32_t min_priority; /* retention priority a block must have, 0 to 100 */
};

/** Options of a manager; set size to sizeof(struct kvbm_manager_opts), zero means the default. */
struct kvbm_manager_opts {
    size_t size;
    /* Required. Form of a block in the host tier: layers, outer, page_size, inner_dim, dtype,
     * order. The manager sets kind, num_blocks, alignment and tensor_shape itself (fully
     * contiguous, multiples of 4096 bytes). */
    const struct kvbm_layout_config *block;
    /* Model, revision and, unless @shard tells it, parallel rank: all that makes equal keys mean equal
     * bytes. Required with a disk or object tier; at most 3800 bytes. */
    const char *fingerprint;
    uint32_t key_len;           /* bytes, 4 to 64; 0: 8 */
    struct kvbm_events *events; /* gets every change; outlives the manager. NULL: no events */

    uint64_t host_bytes;     /* host tier; 0: none, only staging buffers */
    uint32_t staging_blocks; /* without a host tier; 0: 64 */
    /* KVBM_EVICT_DEFAULT is KVBM_EVICT_LINEAGE here: a prompt's end is evicted before its beginning,
     * in whatever order its blocks entered a tier. LRU and LFU don't ensure that. */
    enum kvbm_eviction host_eviction;
    bool host_pinned; /* page-locked, for the GPU: needs CUDA */
    bool huge_pages;
    struct kvbm_tier_policy host_policy;

    const char *disk; /* directories, one per volume, separated by ':'. NULL: no disk tier */
    uint64_t disk_bytes;
    enum kvbm_eviction disk_eviction;
    struct kvbm_tier_policy disk_policy;
    bool disk_buffered; /* no O_DIRECT */
    bool disk_volatile; /* no barriers: a power cut loses blocks (never makes wrong ones) */

    const char *object;         /* kv_store URI. NULL: no object tier */
    uint32_t object_blocks;     /* keys remembered as present in the store; 0: 100,000 */
    bool object_write_through;  /* a store job ends when the object store has its blocks, too */
    bool object_when_evicted;   /* offload only blocks about to leave the last tier above */
    uint32_t object_timeout_ms; /* 0: 10,000 */
    struct kvbm_tier_policy object_policy;

    uint32_t copy_threads; /* 0: one per core, at most 8 */
    enum kvbm_io io;
    uint32_t io_depth;    /* 0: 64 */
    uint32_t max_offload; /* queued blocks; 0: 16,384. Beyond: dropped and counted */
    uint32_t max_jobs;    /* 0: 1024 */
    bool io_registered;   /* lock and register host memory with io_uring, for the disk tier */
    enum kvbm_gpu_copy gpu_copy; /* executor of small pieces to and from a GPU */

    /* Host tier in memory of the caller: writable, aligned to 4096 bytes, host_bytes long, kept until
     * destroy has returned 0. Processes of one engine that map the same memory (memfd, /dev/shm) read
     * and write its blocks themselves: kvbm_pin_blocks gives the numbers, block i begins i times
     * kvbm_manager_host_layout's block stride behind host_memory. One manager has the memory at a
     * time: a second one of this process gets -EBUSY, one of another process isn't noticed. A new
     * manager finds none of its blocks.
     *
     * Create touches every page and changes no byte: -ENOSPC where a page can't be had (behind the
     * end of a file, a full tmpfs). Linux before 5.14 can't touch so, and a copy then ends in
     * SIGBUS: reserve the file by posix_fallocate, and never shrink it. Not with host_pinned and
     * huge_pages; with io_registered it must be a shared mapping. NULL: the manager allocates its
     * host tier. */
    void *host_memory;

    /* Host tier in shared memory of the manager's own (kvbm_lease.h): readers of the same machine
     * copy leased blocks from it without this process. Export kvbm_manager_host_layout with
     * kvbm_manager_shared. Not with host_memory and host_pinned. */
    bool host_shared;

    /* ---- peers: blocks that no tier of this node has are fetched from other nodes ---- */
    /* Agent whose sessions are used, whoever opened them; outlives the manager. Its fingerprint
     * tells models apart, and its key length must be the manager's. NULL: with peers, an agent of the
     * manager's own, which lends nothing; else no peers. */
    struct kvbm_agent *agent;
    /* Directory to follow, as kvbm_directory_opts.peers: a list of endpoints, "file:PATH" or
     * "etcd://...". NULL: only sessions that the program has opened. */
    const char *peers;
    const char *peer_token_file; /* of the manager's own agent, as kvbm_agent_opts.token_file */
    uint32_t peer_set;           /* id of the peers' sets of host blocks; 0: 1 */
    uint32_t peer_timeout_ms;    /* for a batch of blocks from a peer; 0: 2000 */

    /* kv-indexer that tells which peers to look at first, "http://HOST:PORT" or "https://...": it
     * follows the peers' events, under their agents' worker numbers. A hint: the peers' answers
     * decide, and a lookup waits for it indexer_timeout_ms at most. NULL: none. */
    const char *indexer;
    const char *indexer_model;      /* as registered there; required with indexer */
    const char *indexer_tenant;     /* NULL: "default" */
    const char *indexer_token_file; /* the first line is the bearer token, read at creation */
    const char *indexer_ca;         /* https: PEM file; NULL: the system's authorities */
    uint32_t indexer_timeout_ms;    /* 0: 100 */

    /* Heads of each block that this rank of a tensor-parallel group holds. It is part of the
     * fingerprint of the disk and object tiers, so ranks may share fingerprint, directory and store,
     * and peers with other heads are refused. Ranks of KVBM_SHARD_NONE share their blocks, which
     * must have the same bytes in each of them (MLA). Where heads are divided, give
     * KVBM_SHARD_HEADS: rank and n_ranks alone don't keep blocks apart. Zeros: one rank, or the
     * fingerprint names the rank. */
    struct kvbm_shard shard;
};
#define KVBM_MANAGER_OPTS_INIT KV_INIT_(kvbm_manager_opts)

/**
 * Fill @opts from "key = value" lines of @file (NULL: none), then from environment variables
 * KVBM_<KEY>, which win. docs/kvbm-tiers.md lists the keys; sizes are written as 10GiB.
 *
 * A '#' begins a comment at the start of a line and behind a blank. Keys that neither source names
 * keep their value in @opts. Where @opts is of an older version and too small for a key, a key of
 * the file is unknown and a variable is ignored. Strings of @opts point into *@ret_strings: free()
 * it once the manager is created. Returns 0. On failure nothing is changed: -EINVAL (the log names
 * the line or variable); -ENOENT, -EIO (file); -ENOMEM.
 */
KV_API int kvbm_manager_configure(struct kvbm_manager_opts *opts, const char *file,
                                  char **ret_strings);

/**
 * Create a manager and its tiers. Blocks of an existing disk tier are found at once. The caller
 * owns *@ret and frees it with kvbm_manager_destroy. Waits for I/O.
 *
 * The kernel may keep the files of a killed process locked for a moment: create retries for one
 * second, or for five while the files have no header yet, and logs a warning that it waits. Of
 * several disk directories those that can't be used are left out with an error in the log, and
 * counted in volumes_down; errors of the disk below mean that none can be used. Returns 0; -EINVAL; -ENOMEM; -ENOSPC (disk, or pages of
 * host_memory); -EBUSY (another process has the disk tier, or another manager host_memory);
 * -ENODEV; another error of the storages, the disk or the store.
 */
KV_API int kvbm_manager_create(const struct kvbm_manager_opts *opts, struct kvbm_manager **ret);

/**
 * Finish running jobs and queued offloads for up to @timeout_ms, cancel the rest, close the tiers,
 * free the manager. Requests that can't be cancelled get one second more at most. NULL is a no-op.
 * Waits for I/O.
 *
 * Threads in kvbm_manager_wait and kvbm_manager_drain return first; no other call may use the
 * manager. Its caches stay to be freed with kvbm_cache_detach, which may come before or after. A
 * hanging object store doesn't prevent destroy: its call is left behind with its thread and memory.
 * Returns
 *   0           the manager is freed
 *   -EBUSY      pins, handles of its pools, or pools of the caller exist (the log says which):
 *               nothing is done
 *   -ETIMEDOUT  a disk or a GPU still uses the host tier's memory and that of the caches. Jobs are
 *               cancelled and queued offloads dropped. Keep the caches' memory; destroy again later
 */
KV_API int kvbm_manager_destroy(struct kvbm_manager *manager, uint32_t timeout_ms);

/**
 * Return the registry: make pools for caches with it, attach values, locate keys. The manager owns
 * it.
 */
KV_API struct kvbm_registry *kvbm_manager_registry(struct kvbm_manager *manager);

/**
 * Return the pool of KV_TIER_HOST, _DISK or _EXTERNAL, to match, touch, retain and reset. The
 * manager owns it. NULL: no such tier.
 */
KV_API struct kvbm_pool *kvbm_manager_pool(struct kvbm_manager *manager, enum kv_tier tier);

/** Return the layout of host blocks, for engines that copy themselves (kvbm_pin_blocks). */
KV_API const struct kvbm_layout *kvbm_manager_host_layout(struct kvbm_manager *manager);

/**
 * Return the shared memory of a host tier with host_shared, for kvbm_blockset_export. The manager
 * owns it: destroy sets that were exported with it first. NULL: it has none.
 */
KV_API const struct kvbm_shared *kvbm_manager_shared(struct kvbm_manager *manager);

/**
 * Return the source of a manager, for a set of kvbm_manager_host_layout: peers look up and lease
 * blocks of every tier. Those that lie below the host tier are fetched into it before a lease is
 * granted, for 5 s at most. Keys that the object store wasn't asked for yet are looked up as missing.
 * The manager outlives the set.
 */
KV_API struct kvbm_block_source kvbm_manager_source(struct kvbm_manager *manager);

/* ---- caches: G1 ---- */

/** An engine's cache, attached to a manager. */
struct kvbm_cache;

/** Options of a cache; set size to sizeof(struct kvbm_cache_opts), zero means the default. */
struct kvbm_cache_opts {
    size_t size;
    /* Required: from kvbm_layout_from_kvx, or made. Outlives the cache. */
    const struct kvbm_layout *layout;
    /* Pool of the manager's registry, over that layout. NULL: the engine numbers its blocks. */
    struct kvbm_pool *pool;
    /* First of the cache's heads within the host tier's blocks, when those have more heads. A store
     * job then copies its part and commits nothing. Once all parts are stored, kvbm_pin_commit
     * commits the blocks that are ok in every part. A part that failed, or was never stored, leaves
     * the previous bytes of the host block. */
    uint32_t first_head;
    uint32_t n_heads; /* 0: all */
};
#define KVBM_CACHE_OPTS_INIT KV_INIT_(kvbm_cache_opts)

/**
 * Attach a cache. The caller frees *@ret with kvbm_cache_detach.
 * Returns 0; -EINVAL (also: the manager can't convert its blocks into the host tier's); -ENOMEM.
 */
KV_API int kvbm_cache_attach(struct kvbm_manager *manager, const struct kvbm_cache_opts *opts,
                             struct kvbm_cache **ret);

/**
 * Detach and free a cache, before or after its manager's end. A cache whose manager has been destroyed
 * refuses other calls (-EINVAL). NULL is a no-op. Returns 0; -EBUSY while jobs use it; -ECHILD.
 */
KV_API int kvbm_cache_detach(struct kvbm_cache *cache);

/* ---- simple calls: store and load blocks of a cache by their keys, and wait ---- */

/**
 * Store blocks of @cache in the tiers and wait for it: blocks[i] of the cache holds key i of @chain,
 * UINT32_MAX: leave it out. Keys that are there already cost a lookup. Tokens of @chain, page_size a
 * block, go into the events of blocks that enter the host tier; they are for nothing else.
 *
 * Returns the number of keys, from the first on, that a tier has now. A key that counts is found until
 * the policy of its last tier evicts it: its block stays in the host tier until a tier below has it.
 * When all tiers below refuse it (policy) or fail, the host tier is its last one. So is the last tier
 * above the object store with object_when_evicted.
 *
 * A block without room waits, at most @timeout_ms, instead of being dropped. At most half of the host
 * tier waits for tiers below: more blocks go through it one part after the other, at the pace of the
 * disk or the object store. Without a host tier the call also waits until a lower tier has the blocks.
 * With a timeout of 0 it takes the room that there is, and waits for the copy alone.
 *
 * The number is less than @n when the time was over, a policy refused a block, or a tier failed.
 * Errors: -EINVAL (also: a block out of range); -ENOTSUP (a cache of some of the heads); -ENOMEM;
 * -ESHUTDOWN; -ECHILD; or the error of the copy. Nothing reads the cache's blocks on return. Any thread.
 */
KV_API long kvbm_cache_store(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                             const uint32_t *blocks, uint32_t timeout_ms);

/** Options of a store; set size to sizeof(struct kvbm_store_opts), zero means the default. */
struct kvbm_store_opts {
    size_t size;
    uint32_t timeout_ms; /* as of kvbm_cache_store */
    /* Wait until the disk or the object store has the blocks, and count only these: they survive
     * kill -9 of the process, and on the disk a power cut, too (not with disk_volatile). */
    bool durable;
};
#define KVBM_STORE_OPTS_INIT KV_INIT_(kvbm_store_opts)

/**
 * Store blocks as kvbm_cache_store, with options; NULL: the defaults. Returns as kvbm_cache_store;
 * -ENOTSUP also for a durable store of a manager without disk and object store.
 */
KV_API long kvbm_cache_store_with(struct kvbm_cache *cache, const struct kvbm_chain *chain,
                                  size_t n, const uint32_t *blocks,
                                  const struct kvbm_store_opts *opts);

/**
 * Load key i of @chain into block blocks[i] of @cache, from whatever tier has it, and wait for it.
 *
 * A block without a host block or staging buffer to be fetched into waits for one, at most
 * @timeout_ms; calls that wait take turns. Returns the number of keys, from the first on, whose
 * blocks are in the cache now: a prompt's usable prefix, 0 when no tier has the first key or there
 * was no room all the time. A block not fetched after three quarters of @timeout_ms counts as
 * missing. Errors: as kvbm_cache_store. Nothing writes into the cache's blocks on return. Any
 * thread.
 */
KV_API long kvbm_cache_load(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                            const uint32_t *blocks, uint32_t timeout_ms);

/* ---- where a block is ---- */

/** Place of a block, nearest tier first. */
enum kvbm_where {
    KVBM_MISS = 0, /* in no tier, or not known to be in one */
    KVBM_READY,    /* in the host tier */
    KVBM_ON_DISK,  /* in the disk tier: fetch it */
    KVBM_REMOTE,   /* in the object store, as far as known */
    KVBM_PENDING,  /* being fetched, or being asked for: ask again */
    KVBM_BUSY,     /* in a tier, but without a buffer or queue place to fetch it: ask again */
    KVBM_ON_PEER   /* at another node, as far as known: between the disk and the object store */
};

/**
 * Tell where the keys of @chain are: ret[i] (@ret may be NULL) becomes an enum kvbm_where. Holds
 * and fetches nothing, and never waits.
 *
 * With an object tier or peers, keys of unknown presence are asked for in the background and answer
 * KVBM_PENDING. One call asks for the first 256 of them; later calls ask for later keys. Keys
 * behind a KVBM_MISS are not asked for, and are KVBM_MISS, unless @chain is scattered. After 2 s
 * without an answer (object_timeout_ms, if less) a key is KVBM_MISS. So are unknown keys while the
 * store's breaker is open, and while 65,536 keys are being asked for, unless peers are asked for them. Peers have a quarter of a second
 * to answer; what they say is believed for 5 s (there) or 1 s (not there). Returns the length of the
 * prefix without KVBM_MISS.
 */
KV_API long kvbm_manager_lookup(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                size_t n, uint8_t *ret);

/**
 * Count one use of each key, in every tier that has it. Returns the length of the prefix that some
 * tier has.
 */
KV_API long kvbm_manager_touch(struct kvbm_manager *manager, uint32_t group, const void *keys,
                               size_t n);

/**
 * Numbers of copies that kvbm_manager_remove found; set size to sizeof(struct kvbm_remove_result).
 */
struct kvbm_remove_result {
    size_t size;
    uint64_t host, disk; /* removed from this tier */
    uint64_t object;     /* removed from the object store, of those it was known to have */
    uint64_t held; /* left: a pin, a job or an offload under way holds the block in that tier */
};
#define KVBM_REMOVE_RESULT_INIT KV_INIT_(kvbm_remove_result)

/**
 * Remove @n keys of @group from every tier, durably: a restart finds none of them. Waits for I/O, for
 * the object store up to @timeout_ms. @ret may be NULL.
 *
 * Copies that are held stay whole, and so do blocks stored, fetched or offloaded during the call:
 * release pins and call kvbm_manager_drain before. Blocks of caches' own pools stay as well, and
 * those of a disk volume that is missing. A key may repeat. Searches the disk tier's index in memory
 * once for each 65,536 keys: remove many keys in one call.
 *
 * Returns 0; -EINVAL; -ECHILD; or the first error of a tier, in which keys may be left: -EHOSTDOWN,
 * -ETIMEDOUT, -EAGAIN (queue full), -ENOTSUP (a store that deletes no chunks), -EIO, -ENOMEM. The
 * other tiers are served in any case. Call again after an error, before destroy: -EIO stays while a
 * failed write of the disk tier, of any keys, leaves a record in the index file unknown. A manager
 * created after destroy no longer knows of it: a power cut may then bring the record back.
 */
KV_API int kvbm_manager_remove(struct kvbm_manager *manager, uint32_t group, const void *keys,
                               size_t n, uint32_t timeout_ms, struct kvbm_remove_result *ret);

/* ---- pins ---- */

/**
 * Blocks held in the host tier, for at most 2^20 keys (-EINVAL): found and fetched ones (load), or
 * reserved ones (store).
 */
struct kvbm_pin;

/** Options of prepare_load; set size to sizeof(struct kvbm_pin_opts), zero means the default. */
struct kvbm_pin_opts {
    size_t size;
    uint64_t deadline_ns; /* of fetching, CLOCK_MONOTONIC; 0: none */
    bool no_fetch;        /* only blocks of the host tier */
    uint32_t reserved;    /* 0 */
    /* Of fetching: higher first, then older. A load job with a higher priority raises it for blocks
     * not yet requested from the tier below. */
    int32_t priority;
    bool no_peers; /* only tiers of this node */
    /* A hint of the request (kvbm_hint_parse): look at this peer, too, and take its blocks rather than
     * another's. Counts if there is a session with an endpoint of that host and port. NULL: none. */
    const struct kvbm_hint *hint;
    /* Leave blocks of peers of this machine where they are, if this process can map their memory:
     * a load job copies them from there, without a copy in the host tier. They are READY, and have no
     * host block (kvbm_pin_blocks: UINT32_MAX). No tier of this node gets them. A block that its
     * owner gives away before the job has copied it is fetched as without the option. */
    bool in_place;
};
#define KVBM_PIN_OPTS_INIT KV_INIT_(kvbm_pin_opts)

/**
 * Pin the blocks of @chain (n keys) in the host tier, and fetch the others from the tiers below.
 * Tokens of @chain, page_size a block, go into the events of blocks that enter the host tier.
 * When the host tier has no other room for the beginning of a sequence, blocks of its end make room,
 * and are KVBM_BUSY. @opts may be NULL. The caller frees *@ret with kvbm_pin_release. Returns the
 * length of the prefix that is READY or PENDING, with a pin also for length 0; -EINVAL; -ENOMEM;
 * -ECHILD.
 */
KV_API long kvbm_manager_prepare_load(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                      size_t n, const struct kvbm_pin_opts *opts,
                                      struct kvbm_pin **ret);

/**
 * Pin blocks as kvbm_manager_prepare_load does, named by handles that the caller holds.
 *
 * @blocks are handles of the manager's pools (kvbm_manager_pool), of any tiers, in any order, of
 * one group. Key i of the pin is the key of block i. Each block is fetched from the nearest tier
 * that has it, which may be above the handle's. A lost block does not stop those behind it. The pin
 * holds the blocks until it and its jobs end: the caller may release @blocks at once. Returns as
 * kvbm_manager_prepare_load; on failure nothing is held: -EXDEV (handle of another pool); -ESTALE;
 * -EINVAL (a zeroed handle, several groups).
 */
KV_API long kvbm_manager_prepare_load_blocks(struct kvbm_manager *manager,
                                             const struct kvbm_immutable *blocks, size_t n,
                                             const struct kvbm_pin_opts *opts,
                                             struct kvbm_pin **ret);

/**
 * Reserve host blocks for the keys of @chain that the host tier neither has nor has reserved. The
 * caller frees *@ret with kvbm_pin_release.
 *
 * Tokens of @chain, page_size a block, go into the events of the blocks.
 * Keys without room are left out and counted as dropped. kvbm_pin_commit or the end of a store job
 * makes reserved blocks findable. Returns the number of reserved blocks; -EINVAL; -ENOMEM; -ECHILD.
 */
KV_API long kvbm_manager_prepare_store(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                       size_t n, struct kvbm_pin **ret);

/**
 * Tell the state of a pin's keys: ret[i] becomes an enum kvbm_where. Of a load: READY, PENDING,
 * MISS or BUSY. Of a store: PENDING for reserved blocks, READY for blocks there already, BUSY
 * without room. Returns the length of the READY prefix.
 */
KV_API long kvbm_pin_state(struct kvbm_pin *pin, uint8_t *ret);

/**
 * Give the host blocks of a pin's keys (UINT32_MAX: none), for engines that copy themselves: of a
 * load the READY ones, of a store the reserved ones. Their bytes may be read (load) until release,
 * or written (store) until commit. Returns as kvbm_pin_state.
 */
KV_API long kvbm_pin_blocks(struct kvbm_pin *pin, uint32_t *ret);

/** Wait up to @timeout_ms until no key of the pin is PENDING. Returns 0 or -ETIMEDOUT. */
KV_API int kvbm_pin_wait(struct kvbm_pin *pin, uint32_t timeout_ms);

/**
 * Commit the reserved blocks of a store pin with bit i of @ok (NULL: all): the caller has written
 * the bytes of their keys. The other reserved blocks become free.
 *
 * On return committed blocks are findable, and are queued for the tiers below.
 * Returns their number; -EBUSY while a store job has the pin; -EINVAL (a pin of prepare_load).
 */
KV_API long kvbm_pin_commit(struct kvbm_pin *pin, const uint8_t *ok);

/**
 * Release a pin. Fetches that no other pin or job needs are cancelled; jobs go on. NULL is a no-op.
 */
KV_API void kvbm_pin_release(struct kvbm_pin *pin);

/* ---- jobs ---- */

/** A copy between a pin's host blocks and a cache; set size to sizeof(struct kvbm_job). */
struct kvbm_job {
    size_t size;
    struct kvbm_pin *pin;     /* of prepare_load: load; of prepare_store: store and commit */
    struct kvbm_cache *cache; /* required */
    /* [n of the pin] the cache's block for each key, copied by submit; UINT32_MAX: leave out. */
    const uint32_t *blocks;
    uint32_t first_layer; /* load: first layer to copy; store: 0 */
    uint32_t n_layers;    /* load: 0: all from first_layer on; store: 0 */
    int32_t priority;     /* higher ones first */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; chunks not begun by then are left out. 0: none */
    /* Store: descriptor that becomes readable when the cache's blocks may be read; the manager
     * keeps a duplicate. 0 or -1: at once. */
    int ready_fd;
    void *ready_event; /* store: a CUDA event */
    /* [(n + 7) / 8] bit i: the bytes of key i are there. The caller's memory, valid until done.
     * NULL: not wanted. */
    uint8_t *ok;
    uint64_t tag; /* returned in the result */
};
#define KVBM_JOB_INIT KV_INIT_(kvbm_job)

/**
 * Queue a job. A load begins when no key of its pin is PENDING. The job holds the pin.
 *
 * Returns its id > 0; -EAGAIN (max_jobs); -EBUSY (another store job has the pin); -EINVAL; -ENOMEM;
 * -ESHUTDOWN (being destroyed). An error of the copy itself (-ENOTSUP, -EINVAL for block numbers)
 * is the status of the job.
 */
KV_API int64_t kvbm_manager_submit(struct kvbm_manager *manager, const struct kvbm_job *job);

/**
 * Queue a store (@store) or a load of the keys of @chain as one job without a pin: the disk and the
 * object store read and write the cache's own memory, and no host block lies between.
 *
 * @job is as for kvbm_manager_submit, with these differences: pin is NULL; blocks[i] belongs to key
 * i, and none may be UINT32_MAX; no first_layer, n_layers, ready_fd and ready_event. The cache's
 * blocks belong to the job until it ends: don't change those of a store; those of a load that are not
 * ok may hold anything. A load that names a block for two keys is refused.
 *
 * A store ends once the tiers below have its blocks, or have failed. ok tells the keys that some tier
 * has; its status is -EREMOTEIO when that isn't all of them. deadline_ns ends a store's waiting for
 * its turn, and a load's fetching.
 *
 * Returns the job's id > 0; -ENOTSUP (a manager with a host tier; a cache whose blocks would have to
 * be copied: other order, not contiguous, or their addresses and bytes are no multiples of 4096);
 * -EAGAIN (max_jobs); -EINVAL; -ENOMEM; -ESHUTDOWN; -ECHILD.
 */
KV_API int64_t kvbm_manager_submit_keys(struct kvbm_manager *manager,
                                        const struct kvbm_chain *chain, size_t n, bool store,
                                        const struct kvbm_job *job);

/** Cancel a job: leave out copies not begun. Returns 0; -ENOENT (no such job, or ended). */
KV_API int kvbm_manager_cancel(struct kvbm_manager *manager, uint64_t id);

/**
 * Take the results of at most @max ended jobs, oldest first. Returns their number.
 *
 * n counts the blocks of the job that were not left out (of a store: reserved ones), n_ok those
 * copied. A load that finds only some of its keys has status 0 and n_ok < n; one that finds none
 * has -ENOENT. The job's ok tells which keys succeeded, also when status is an error.
 */
KV_API long kvbm_manager_poll(struct kvbm_manager *manager, struct kvbm_done *ret, size_t max);

/**
 * Return a descriptor that is readable while kvbm_manager_poll has results. The manager owns it.
 */
KV_API int kvbm_manager_fd(struct kvbm_manager *manager);

/**
 * Wait up to @timeout_ms for a job and take its result; @ret may be NULL. The calling thread helps
 * with copies between memory. Returns 0; -ETIMEDOUT; -ENOENT (no such job, or poll took its
 * result).
 */
KV_API int kvbm_manager_wait(struct kvbm_manager *manager, uint64_t id, uint32_t timeout_ms,
                             struct kvbm_done *ret);

/* ---- caches with a pool ---- */

/**
 * Queue registered blocks of a cache's pool for offloading: higher @priority first, then older.
 *
 * The queue holds weak handles: a block evicted before its copy is not offloaded.
 * Returns the number queued (the rest is dropped and counted); -EINVAL (a cache without a pool);
 * -ENOTSUP (a cache of some of the heads).
 */
KV_API long kvbm_manager_offload(struct kvbm_cache *cache, const struct kvbm_immutable *blocks,
                                 size_t n, int32_t priority);

/**
 * Onboard the prefix of @chain into the cache's pool, from any tier. Blocks the caller for up to
 * @timeout_ms. ret[i] is a handle on a registered block, for i below the returned length. Tokens of
 * @chain, page_size a block, go into the events of blocks that enter the pool or the host tier.
 *
 * Blocks that reach the host tier later than three quarters of the time are left out. Returns the
 * length, 0 when no tier has the first block. When a tier has it and it can't be onboarded:
 *   -ENOSPC     the cache's pool has neither free nor inactive blocks
 *   -EBUSY      no host block or queue place to fetch into
 *   -ETIMEDOUT  the time is over
 *   -ENOMEM, -EAGAIN (max_jobs), -ESHUTDOWN, or an error of the copy
 * -EINVAL: a cache without a pool.
 */
KV_API long kvbm_manager_onboard(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                                 uint32_t timeout_ms, struct kvbm_immutable *ret);

/**
 * Onboard held blocks into the cache's pool, all in one batch. Blocks the caller for up to
 * @timeout_ms.
 *
 * @blocks are handles as kvbm_manager_prepare_load_blocks takes them, or of the cache's own pool;
 * they stay held. ret[i] is a handle on block i in the cache's pool. It is zeroed for a block that
 * came too late, found no room, or had lost its bytes. Returns the number onboarded. When there is
 * none, the error that stopped all (-ENOSPC, -ETIMEDOUT ...), -EXDEV, -ESTALE or -EINVAL, as
 * kvbm_manager_onboard and kvbm_manager_prepare_load_blocks.
 */
KV_API long kvbm_manager_onboard_blocks(struct kvbm_cache *cache,
                                        const struct kvbm_immutable *blocks, size_t n,
                                        uint32_t timeout_ms, struct kvbm_immutable *ret);

/**
 * Wait up to @timeout_ms until no block is queued for offloading (tests, shutdown). Returns 0 or
 * -ETIMEDOUT.
 */
KV_API int kvbm_manager_drain(struct kvbm_manager *manager, uint32_t timeout_ms);

/* ---- statistics ---- */

/** Sizes now and counters since creation of one tier. */
struct kvbm_tier_stats {
    uint64_t capacity, used; /* blocks; used: registered */
    uint64_t block_bytes;
    uint64_t hits;                  /* keys of prepare_load that this tier had */
    uint64_t misses;                /* keys of prepare_load in neither this tier nor one above */
    uint64_t blocks_in, bytes_in;   /* written to it, from above or below */
    uint64_t blocks_out, bytes_out; /* read from it */
    uint64_t queued;                /* blocks queued to be written to it */
    uint64_t dropped;               /* blocks not kept: no room, queue full, evicted meanwhile */
    uint64_t filtered;              /* blocks not kept: policy */
    uint64_t bad, failed;           /* blocks that did not verify; errors */
    uint64_t latency_sum_us;        /* of the batches read from it */
    /* Batches by time: bucket i counts those below 2^i microseconds, the last all longer ones. */
    uint64_t latency_us[24];
    uint64_t reserved[8]; /* 0: room for further counters; kvbm_manager_stats keeps its shape */
};

/** Statistics of a manager. */
struct kvbm_manager_stats {
    size_t size;
    struct kvbm_tier_stats cache, host, disk, object; /* of cache: blocks and bytes of jobs */
    uint64_t jobs, jobs_failed, jobs_cancelled, pins_now, jobs_now;
    bool object_down; /* the breaker of the object store is open */
    uint32_t volumes_down;
    uint64_t registered_bytes; /* io_registered; 0: not wanted, or refused by the kernel */
    /* Keys that lookup answered with MISS because the object store was not asked (breaker open) or
     * did not answer in time. */
    uint64_t object_unanswered;
    struct kvbm_tier_stats peer; /* of blocks that came from peers; without capacity */
    uint32_t peers_now;          /* peers with an open session */
    uint32_t peers_down;         /* peers whose breaker is open: nothing is asked of them */
    uint64_t peer_asked;         /* keys that peers were asked for */
    uint64_t indexer_asked;      /* requests to kv-indexer */
    uint64_t indexer_failed;     /* of these, without an answer in time, or with one of no sense */
    uint64_t indexer_named;      /* keys of peer_asked that a peer has which kv-indexer named */
    bool indexer_down;           /* its breaker is open: nothing is asked of it */
};
#define KVBM_MANAGER_STATS_INIT KV_INIT_(kvbm_manager_stats)

/** Read the statistics. Returns 0; -EINVAL (ret->size is 0). */
KV_API int kvbm_manager_get_stats(struct kvbm_manager *manager, struct kvbm_manager_stats *ret);

/**
 * Write the statistics of the manager and its pools as Prometheus text. Writes and returns as
 * kvbm_registry_metrics.
 */
KV_API long kvbm_manager_metrics(struct kvbm_manager *manager, char *to, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
