// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_pool.h: a registry, the pools of its tiers, and handles on their blocks.
 *
 * A pool is n_blocks blocks of one tier, numbered from 0. A block's life:
 *
 *      allocate            init / add tokens           commit
 *   ┌─────────► mutable: Reset ─────────► Partial ─────────┐
 *   │                      │                               ▼
 *   │                      └── complete (a chain's key) ► Complete
 *   │                                                      │ register
 *   free ◄── reset ── inactive ◄─── last release ──── Registered: immutable, found by its key
 *                        └────────── match ──────────────►│
 *
 * A registered block without handles is inactive: it keeps its bytes and its key, and match finds
 * it. An allocation takes free blocks first; then the eviction policy chooses inactive ones. The
 * registry knows each key once, with the tiers that hold it.
 *
 * Keys are key_len opaque bytes (by default 8, a sequence hash of kvbm_tokens.h) in a group. Models
 * with several caches (full attention, sliding window, state) use one group for each; the same key
 * in two groups is two keys. Arrays of keys are packed: n * key_len bytes without alignment.
 *
 * Handles are values. A mutable or complete handle is the only one of its block. Immutable handles
 * are counted (clone). Weak handles hold nothing. A generation in each handle detects use after
 * release (-ESTALE); handles of another pool are -EXDEV. A function that consumes handles zeroes
 * them; a failing one leaves handles and blocks as they were. Releasing a zeroed handle is a no-op,
 * in an array too. Not detected: an immutable handle that was copied as bytes and released once too
 * often while others hold the block.
 *
 * Threads: any function from any thread. All pools of a registry share one lock, taken once per
 * call, for a time in proportion to the call's blocks. Callbacks run without the lock, except where
 * their comment says otherwise. No function waits: without a free block or a place the call fails
 * at once.
 *
 * Errors, besides those named at each function: -EINVAL (invalid arguments, NULL among them),
 * -EBADFD (the block is in another state than the operation needs), -ESTALE, -EXDEV, -ERANGE (no
 * such index), -ENOMEM.
 */
#ifndef KVBM_POOL_H
#define KVBM_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "kv_types.h"
#include "kvbm_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Registry.
 */

/** Longest key in bytes. */
#define KVBM_MAX_KEY 64

/** Number of groups: they are numbered 0 to 63. */
#define KVBM_MAX_GROUPS 64

struct kvbm_events; /* kvbm_events.h */

/** Registry of keys: each key once, with the tiers that hold it. One per model and worker. */
struct kvbm_registry;

/** Options of a registry; set size to sizeof(struct kvbm_registry_opts), zero: the default. */
struct kvbm_registry_opts {
    size_t size;
    uint32_t key_len;           /* bytes of a key, 4 to KVBM_MAX_KEY; 0: 8 */
    struct kvbm_events *events; /* gets every change; outlives the registry. NULL: no events */
};
#define KVBM_REGISTRY_OPTS_INIT KV_INIT_(kvbm_registry_opts)

/**
 * Create a registry. @opts may be NULL: all defaults. The caller owns *@ret and frees it with
 * kvbm_registry_destroy. Returns 0; -EINVAL (key_len); -ENOMEM.
 */
KV_API int kvbm_registry_create(const struct kvbm_registry_opts *opts, struct kvbm_registry **ret);

/** Free a registry. Returns 0; -EBUSY while it has pools (nothing is freed). NULL is a no-op. */
KV_API int kvbm_registry_destroy(struct kvbm_registry *registry);

/**
 * Tell which tiers hold each key: ret[i] gets bit (1 << tier) of every tier where keys[i] is
 * registered, 0 for none. Holds no block, so the answer may be out of date on return.
 */
KV_API int kvbm_registry_locate(struct kvbm_registry *registry, uint32_t group, const void *keys,
                                size_t n, uint8_t *ret);

/**
 * Create or find a type of attachments: values of other parts of a program, tied to a key as long
 * as it is registered in any tier.
 *
 * A key has at most one value of a unique type, any number of a @multiple one. The thread whose
 * call removes the key from its last tier calls @destroy (may be NULL) without the lock. @name has
 * at most 63 bytes. The same name and kind give the same type. Returns 0 and the type; -EEXIST
 * (that name with the other kind); -ENOSPC (64 types exist).
 */
KV_API int kvbm_attachment_type(struct kvbm_registry *registry, const char *name, bool multiple,
                                void (*destroy)(void *value), uint32_t *ret);

/**
 * Attach @value to a key. On success the registry owns it until the type's destroy; on failure it
 * stays the caller's. Returns 0; -ENOENT (key not registered); -EEXIST (unique type, has a value);
 * -EINVAL (no such type).
 */
KV_API int kvbm_registry_attach(struct kvbm_registry *registry, uint32_t group, const void *key,
                                uint32_t type, void *value);

/**
 * List the values of a type attached to a key, oldest first, at most @cap. They stay valid while
 * the caller holds a handle on a block of that key. Returns the number attached, also when it
 * exceeds @cap; -ENOENT (key not registered).
 */
KV_API long kvbm_registry_attachments(struct kvbm_registry *registry, uint32_t group,
                                      const void *key, uint32_t type, void **ret, size_t cap);

/**
 * Observe uses of keys: match and match_scattered without KVBM_MATCH_NO_TOUCH, and touch.
 *
 * Runs without the lock on the thread that used the keys, so possibly on several at once. @keys are
 * packed and valid during the call. The callback may call any function of this header.
 */
typedef void (*kvbm_touch_fn)(void *arg, enum kv_tier tier, uint32_t group, const void *keys,
                              size_t n);

/**
 * Add a touch callback. It stays as long as the registry. Returns 0; -ENOSPC (8 callbacks exist).
 */
KV_API int kvbm_registry_on_touch(struct kvbm_registry *registry, kvbm_touch_fn fn, void *arg);

/* ---------------------------------------------------------------------------------------------
 * Pools.
 */

/** Order of eviction of inactive blocks. Every policy evicts lower priorities first. */
enum kvbm_eviction {
    KVBM_EVICT_DEFAULT, /* LRU of a pool, LINEAGE of a manager's tiers */
    KVBM_EVICT_LRU,     /* the block released longest ago */
    KVBM_EVICT_LFU,     /* of the least used of four levels (TinyLFU counts), the one longest ago */
    /* Of the blocks without inactive children (leaves), the one released longest ago. Its age is
     * exact up to 1/1024 of the pool's releases (docs/kvbm.md). */
    KVBM_EVICT_LINEAGE
};

/** Retention priorities, 0 to 100 as TensorRT-LLM counts them. */
#define KVBM_PRIORITY_DEFAULT 35
#define KVBM_PRIORITY_MAX 100

/** Pool of blocks of one tier. */
struct kvbm_pool;

/** Options of a pool; set size to sizeof(struct kvbm_pool_opts), zero means the default. */
struct kvbm_pool_opts {
    size_t size;
    /* Label in logs and metrics: UTF-8, up to 31 bytes, unique in the registry. NULL: the tier's
     * name; a pool that doesn't serve all groups adds its first group: "device-g2". */
    const char *name;
    enum kv_tier tier;
    uint64_t groups;     /* bit g: serves group g; 0: all. No two pools of one tier share one */
    uint32_t n_blocks;   /* required, 1 to 2^31 - 2, of all pools of a registry together */
    uint32_t block_size; /* required: tokens per block, a power of two, 1 to 1024 */
    enum kvbm_eviction eviction;
    /* LFU: numbers of uses that make a block warm, hot, very hot: ascending, 1 to 15; zeros: 3, 8,
     * 15. */
    uint8_t lfu_thresholds[3];
    /* Second block of a key. false: the pool keeps both. true: the second becomes free, and
     * register returns the first, which has another number. */
    bool reject_duplicates;
    bool reset_on_release; /* forget a block at its last release: no inactive blocks */
    /* For kvbm_pool_view: at least n_blocks, page_size equal to block_size; outlives the pool.
     * NULL: the engine knows where its blocks are. */
    const struct kvbm_layout *layout;
    bool track_handles; /* remember who acquired last; a debug build (no NDEBUG) always does */
};
#define KVBM_POOL_OPTS_INIT KV_INIT_(kvbm_pool_opts)

/**
 * Create a pool of @registry. The caller owns *@ret and frees it with kvbm_pool_destroy.
 * Returns 0, or
 *   -EINVAL  invalid options (logged)
 *   -EEXIST  the tier has a pool for one of the groups, or the registry has a pool of that name
 *   -ENOMEM  also when the bookkeeping needs more than the machine or the cgroup has left
 */
KV_API int kvbm_pool_create(struct kvbm_registry *registry, const struct kvbm_pool_opts *opts,
                            struct kvbm_pool **ret);

/**
 * Forget all blocks, publish their removals and free the pool. NULL is a no-op.
 *
 * No other call may use the pool any more, nor its weak handles. Returns 0; -EBUSY while other
 * handles are held: nothing is done. The log then names the first 100 held blocks, and, with
 * track_handles, the code that acquired each: file(function+offset), for addr2line.
 */
KV_API int kvbm_pool_destroy(struct kvbm_pool *pool);

/** States of a block. */
enum kvbm_state { KVBM_RESET, KVBM_PARTIAL, KVBM_COMPLETE, KVBM_REGISTERED };

/** Return "reset", "partial", "complete", "registered", or "unknown"; a static string. */
KV_API const char *kvbm_state_name(enum kvbm_state state);

/** Common part of all handles. Callers may read block: the number of the block they may use. */
struct kvbm_handle {
    struct kvbm_pool *pool; /* NULL: holds nothing */
    uint32_t block;
    uint32_t generation;
};

/** Only handle on a block in state Reset or Partial. */
struct kvbm_mutable {
    struct kvbm_handle handle;
};

/** Only handle on a block in state Complete. */
struct kvbm_complete {
    struct kvbm_handle handle;
};

/** One of the handles on a Registered block. */
struct kvbm_immutable {
    struct kvbm_handle handle;
};

/** Memory of a Registered block. Holds nothing, needs no release. */
struct kvbm_weak {
    struct kvbm_handle handle;
};

/** KVBM_AUTO(immutable) struct kvbm_immutable block = {0}; releases it at the end of its scope. */
#define KVBM_AUTO(kind) __attribute__((cleanup(kvbm_##kind##_release)))

/** Numbers of a failed allocation, in blocks. */
struct kvbm_shortage {
    size_t requested;
    size_t available; /* free + inactive */
};

/**
 * Take @n blocks, all or none: free ones first, then evicted ones. They are in state Reset; their
 * bytes are undefined. @n may be 0.
 * Returns 0; -ENOSPC, which also fills @shortage (may be NULL).
 */
KV_API int kvbm_pool_allocate(struct kvbm_pool *pool, size_t n, struct kvbm_mutable *ret,
                              struct kvbm_shortage *shortage);

/** Return a mutable block to the free blocks (a FIFO). Returns 0 or an error of the handle. */
KV_API int kvbm_mutable_release(struct kvbm_mutable *block);

/** Return a complete block to the free blocks (a FIFO). Returns 0 or an error of the handle. */
KV_API int kvbm_complete_release(struct kvbm_complete *block);

/**
 * Release @n mutable blocks of one pool, all or none. Returns 0; an error of a handle; -EINVAL (one
 * block twice).
 */
KV_API int kvbm_pool_release_mutable(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n);

/**
 * Release @n complete blocks of one pool, all or none. Returns 0; an error of a handle; -EINVAL
 * (one block twice).
 */
KV_API int kvbm_pool_release_complete(struct kvbm_pool *pool, struct kvbm_complete *blocks,
                                      size_t n);

/* Filling by tokens: the pool keeps a block's tokens and hashes them (kvbm_tokens.h). key_len must
 * be 8, else -ENOTSUP. Engines that have hashes already use kvbm_pool_complete. */

/** Place of a block in its sequence; set size to sizeof(struct kvbm_block_start). */
struct kvbm_block_start {
    size_t size;
    uint32_t group;
    uint64_t salt_hash;
    uint32_t chain;         /* enum kvbm_chain_seed */
    const uint64_t *parent; /* sequence hash of the block before; NULL: the first of its sequence */
    uint32_t position;      /* in blocks; 0 exactly when there is no parent */
};
#define KVBM_BLOCK_START_INIT KV_INIT_(kvbm_block_start)

/**
 * Begin to fill a Reset block: it becomes Partial. @start may be NULL: a first block, group 0, salt
 * hash 0. Returns 0; -EBADFD (not Reset); -ENOTSUP (key_len).
 */
KV_API int kvbm_mutable_init_sequence(const struct kvbm_mutable *block,
                                      const struct kvbm_block_start *start);

/** Add a token to a Partial block. Returns 0; -ENOSPC (full); -EBADFD (not Partial). */
KV_API int kvbm_mutable_add_token(const struct kvbm_mutable *block, uint32_t token);

/**
 * Add those of @n tokens that fit into a Partial block. Returns their number, 0 to n; -EBADFD (not
 * Partial).
 */
KV_API long kvbm_mutable_add_tokens(const struct kvbm_mutable *block, const uint32_t *tokens,
                                    size_t n);

/**
 * Take the last @n tokens off a Partial block. Returns 0; -ENODATA (it has fewer); -EBADFD (not
 * Partial).
 */
KV_API int kvbm_mutable_pop_tokens(const struct kvbm_mutable *block, size_t n);

/**
 * Complete a full Partial block under the hash of its tokens. Consumes @block.
 * Returns 0; -ENODATA (not full); -EEXIST (as kvbm_pool_complete); -EBADFD (not Partial).
 */
KV_API int kvbm_mutable_commit(struct kvbm_mutable *block, struct kvbm_complete *ret);

/** Forget the tokens of a Partial block: it becomes Reset. A Reset block stays Reset. */
KV_API int kvbm_mutable_reset(const struct kvbm_mutable *block);

/** Turn a Complete block back to Reset. Consumes @block. */
KV_API int kvbm_complete_reset(struct kvbm_complete *block, struct kvbm_mutable *ret);

/** State and fill of a block. */
struct kvbm_fill {
    enum kvbm_state state;
    uint32_t len;       /* Partial: tokens in it; Complete: block_size; else 0 */
    uint32_t remaining; /* Partial: block_size - len; else 0 */
};

/**
 * Read state and fill of a mutable block, and copy at most @cap of its tokens (Partial) to @tokens,
 * which may be NULL. Returns 0 or an error of the handle.
 */
KV_API int kvbm_mutable_fill(const struct kvbm_mutable *block, struct kvbm_fill *ret,
                             uint32_t *tokens, size_t cap);

/**
 * Read state and fill of a complete block, and copy at most @cap of its tokens to @tokens, which
 * may be NULL. No tokens are copied when the block was completed without them. Returns 0 or an
 * error of the handle.
 */
KV_API int kvbm_complete_fill(const struct kvbm_complete *block, struct kvbm_fill *ret,
                              uint32_t *tokens, size_t cap);

/**
 * @n full blocks as an engine knows them: consecutive ones of one sequence, or (scattered) ones of
 * any sequences. Borrowed for the call.
 */
struct kvbm_chain {
    size_t size;
    uint32_t group;
    const void *keys;       /* n * key_len bytes */
    const void *parent;     /* key of the block before the first; NULL: the sequence starts here */
    uint32_t position;      /* of the first block, in blocks; 0 exactly when there is no parent */
    const uint32_t *tokens; /* n * block_size, copied, for events; NULL: events without tokens */
    /* The engine names no sequence: each key stands alone, as the first of its own, and a missing
     * key is no reason to leave out those behind it. parent is NULL and position 0. A key is either
     * always stored so, or always within its sequence: the other way is refused (-EEXIST). */
    bool scattered;
};
#define KVBM_CHAIN_INIT KV_INIT_(kvbm_chain)

/**
 * Complete @n Reset blocks that now hold @chain, all or none. Consumes @blocks. Returns 0; -EEXIST
 * when the chain names a key twice, contains its own parent, or names a key that the registry knows
 * at another position; -EINVAL (one handle twice); -EBADFD (not Reset). A key that the registry
 * knows behind another parent keeps that parent.
 */
KV_API int kvbm_pool_complete(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                              const struct kvbm_chain *chain, struct kvbm_complete *ret);

/**
 * Register @n Complete blocks in order, all or none. Consumes @blocks.
 *
 * A block whose key this pool has registered already (active or inactive) becomes a duplicate,
 * which keeps the first block registered. With reject_duplicates it becomes free instead, and
 * ret[i] is a handle on the first. Keys that are new in this tier are published as stored. Returns
 * 0; -EINVAL (n is 0, or one handle twice); -EBADFD (not Complete).
 */
KV_API int kvbm_pool_register(struct kvbm_pool *pool, struct kvbm_complete *blocks, size_t n,
                              struct kvbm_immutable *ret);

/**
 * Complete and register @n Reset blocks that now hold @chain, all or none, in one call:
 * kvbm_pool_complete and kvbm_pool_register. Consumes @blocks; @ret may be the same memory. Returns
 * as these two.
 */
KV_API int kvbm_pool_register_chain(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                                    const struct kvbm_chain *chain, struct kvbm_immutable *ret);

/**
 * Register @n Reset blocks that now hold the bytes of the registered blocks @like, all or none: the
 * end of a copy between tiers. Consumes @blocks; @like stay held, and may be of any pools of the
 * registry.
 *
 * Each block gets the key, parent and position of its like. A key that is new in this pool also
 * gets the like's retention priority with its end. Duplicates and events as kvbm_pool_register,
 * without tokens. Returns 0; -EXDEV (a like of another registry); -EINVAL (this pool doesn't serve
 * a like's group, or has blocks of another size).
 */
KV_API int kvbm_pool_adopt(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                           const struct kvbm_immutable *like, struct kvbm_immutable *ret);

/* Immutable handles. */

/**
 * Acquire one more handle on the same block, to be released on its own. A copy made with = is no
 * second handle. Returns 0 or an error of the handle.
 */
KV_API int kvbm_immutable_clone(const struct kvbm_immutable *block, struct kvbm_immutable *ret);

/**
 * Release a handle and zero it. A block without handles becomes inactive, a duplicate becomes free.
 * Returns 0 or an error of the handle.
 */
KV_API int kvbm_immutable_release(struct kvbm_immutable *block);

/**
 * Release @n handles of one pool and zero them, all or none.
 *
 * The last of the array is released first. Given in the order of their sequence, a leaf is so
 * released, and later evicted, before its parent. Returns 0; an error of a handle; -ESTALE also
 * when the array has a handle more often than acquired.
 */
KV_API int kvbm_pool_release(struct kvbm_pool *pool, struct kvbm_immutable *blocks, size_t n);

/**
 * Release a handle only if it is the last one of its block. Returns 0; -EBUSY when the block has
 * other handles, or duplicates keep it registered.
 */
KV_API int kvbm_immutable_try_return(struct kvbm_immutable *block);

/** Make a weak handle on the block (of a duplicate: on its primary). @block stays held. */
KV_API int kvbm_immutable_downgrade(const struct kvbm_immutable *block, struct kvbm_weak *ret);

/**
 * Acquire a handle on the block of a weak one, if it is still the registered block (active or
 * inactive) that it was. Counts no use. Returns 0; -ESTALE otherwise and ever after, also when its
 * key is registered again.
 */
KV_API int kvbm_weak_upgrade(const struct kvbm_weak *block, struct kvbm_immutable *ret);

/** State of a held block. */
struct kvbm_block_info {
    size_t size;      /* the caller's */
    uint32_t block;   /* number in its pool: where the bytes are */
    uint32_t primary; /* the block found under the key; another one for a duplicate */
    bool duplicate;
    uint32_t group;
    uint32_t position; /* in blocks */
    uint8_t key[KVBM_MAX_KEY];
    uint8_t parent[KVBM_MAX_KEY]; /* key of the block before, when has_parent */
    bool has_parent;  /* false: the first of its sequence, or the parent is no longer known */
    uint8_t tiers;    /* bit 1 << tier of each tier in which the key is registered */
    uint8_t priority; /* of the primary */
    uint32_t handles; /* immutable handles on this block itself */
    uint64_t priority_until_ns; /* when the priority ends, by CLOCK_MONOTONIC; 0: never */
};
#define KVBM_BLOCK_INFO_INIT KV_INIT_(kvbm_block_info)

/**
 * Read the state of a held block, as of one moment. Returns 0; -EINVAL (ret->size is 0); an error
 * of the handle.
 */
KV_API int kvbm_immutable_info(const struct kvbm_immutable *block, struct kvbm_block_info *ret);

/* Lookup. The functions return handles: found blocks can't be evicted until they are released. */

#define KVBM_MATCH_NO_TOUCH 1u /* don't count a use */

/**
 * Find the longest registered prefix of @keys, and return a handle on each of its blocks in @ret
 * (room for @n). Counts one use of each found key. Returns its length, 0 to n.
 */
KV_API long kvbm_pool_match(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                            unsigned flags, struct kvbm_immutable *ret);

/**
 * Find every registered key: ret[i] is a handle on the block of keys[i], or zeroed. Counts one use
 * of each found key. Returns the number found.
 */
KV_API long kvbm_pool_match_scattered(struct kvbm_pool *pool, uint32_t group, const void *keys,
                                      size_t n, unsigned flags, struct kvbm_immutable *ret);

/** Return the length of the registered prefix of @keys. Holds no block and counts no use. */
KV_API long kvbm_pool_probe(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n);

/**
 * Count one use of each key of the registered prefix of @keys. Its inactive blocks become the
 * latest released. Returns the prefix's length.
 */
KV_API long kvbm_pool_touch(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n);

/**
 * Keep the registered ones of @keys at @priority, 0 to KVBM_PRIORITY_MAX, for @ttl_ms (0: for
 * ever), then at the default again. A block that is reset forgets its priority.
 *
 * Each block becomes the last of the inactive blocks of its new priority, as if released now; with
 * KVBM_EVICT_LINEAGE it takes the place of its age. The last of @keys goes first, as in
 * kvbm_pool_release; also of blocks whose time ends together, the later in a sequence go first.
 * Returns the number of registered keys.
 */
KV_API long kvbm_pool_retain(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                             uint32_t priority, uint64_t ttl_ms);

/* Forgetting blocks. */

/** Numbers of keys of kvbm_pool_reset_keys. */
struct kvbm_reset_result {
    size_t reset;     /* forgotten */
    size_t not_found; /* not registered */
    size_t held;      /* left alone: the block, or a duplicate of it, has handles */
};

/**
 * Forget the inactive blocks of @keys: they become free. @ret may be NULL. Returns 0 or -EINVAL.
 */
KV_API int kvbm_pool_reset_keys(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                                struct kvbm_reset_result *ret);

/** Forget all inactive blocks. Returns their number. */
KV_API long kvbm_pool_reset_inactive(struct kvbm_pool *pool);

/** Forget all blocks. Returns 0; -EBUSY while any handle is held (nothing is forgotten). */
KV_API int kvbm_pool_reset(struct kvbm_pool *pool);

/**
 * Locate the bytes of (block, layer, outer). @block is the number in a handle of any kind; hold
 * that handle as long as you use the bytes. Takes no lock. Returns 0; -ERANGE; -ENOTSUP (no
 * layout).
 */
KV_API int kvbm_pool_view(const struct kvbm_pool *pool, uint32_t block, uint32_t layer,
                          uint32_t outer, struct kvbm_view *ret);

/* ---------------------------------------------------------------------------------------------
 * Statistics and checks.
 */

/**
 * Counters since creation, and sizes at this moment, in blocks unless another unit is given. Names
 * in Prometheus: kvbm_<field>[_total].
 */
struct kvbm_pool_stats {
    size_t size; /* the caller's */
    uint64_t allocations, allocations_from_reset, evictions;
    uint64_t registrations, duplicate_blocks, registration_dedup, stagings;
    uint64_t match_hashes_requested, match_blocks_returned;
    uint64_t scan_hashes_requested, scan_blocks_returned;
    uint64_t allocation_failures, stale_handles;
    uint64_t total_blocks;       /* = free + mutable + immutable + inactive */
    uint64_t reset_pool_size;    /* free */
    uint64_t inflight_mutable;   /* blocks held by mutable and complete handles */
    uint64_t inflight_immutable; /* registered blocks held, duplicates among them */
    uint64_t inactive_pool_size;
    uint64_t metadata_bytes; /* bytes of the pool, and its share of the registry */
};
#define KVBM_POOL_STATS_INIT KV_INIT_(kvbm_pool_stats)

/** Read the counters, all of one moment. Returns 0; -EINVAL (ret->size is 0). */
KV_API int kvbm_pool_get_stats(struct kvbm_pool *pool, struct kvbm_pool_stats *ret);

/**
 * Write the statistics of all pools of a registry as Prometheus text 0.0.4, with a label pool.
 *
 * Writes at most @cap bytes, ended by a NUL when @cap > 0. Texts of several registries must not be
 * joined, because each repeats the headings: use kvbm_metrics.
 * Returns the length of the whole text without the NUL (call again when it is >= @cap), or -ENOMEM.
 */
KV_API long kvbm_registry_metrics(struct kvbm_registry *registry, char *to, size_t cap);

/** A registry with its name in metrics. */
struct kvbm_named_registry {
    struct kvbm_registry *registry;
    const char *name; /* UTF-8, unique in the array */
};

/**
 * Write the statistics of @n registries as one Prometheus text, with a label registry before pool.
 * Takes the registries' locks one after the other. Writes and returns as kvbm_registry_metrics;
 * -EINVAL also for names that are not UTF-8 or not unique.
 */
KV_API long kvbm_metrics(const struct kvbm_named_registry *registries, size_t n, char *to,
                         size_t cap);

/**
 * Write a summary of a pool for people, and a line for each of the first @max_blocks blocks that
 * aren't free: state, handles, key, priority and, with track_handles, the code that acquired it
 * last.
 *
 * The text may change from version to version. The function reads a few blocks at a time and writes
 * without the lock: it doesn't stop the pool, and the text is not of one moment. Returns 0 or -EIO.
 */
KV_API int kvbm_pool_dump(struct kvbm_pool *pool, FILE *to, size_t max_blocks);

/**
 * Check the invariants of a registry and its pools: total = free + mutable + immutable + inactive,
 * each key with at most one primary a tier, sound counts, lists and tables.
 *
 * Holds the lock for a time in proportion to the pools. A library built without NDEBUG also checks
 * itself and aborts at a fault: constant-time checks after every call, this one now and then.
 * Returns 0; -EUCLEAN (the log has the fault); -ENOMEM.
 */
KV_API int kvbm_registry_check(struct kvbm_registry *registry);

#ifdef __cplusplus
}
#endif
#endif
