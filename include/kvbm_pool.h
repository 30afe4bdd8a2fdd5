// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_pool.h: blocks, who holds them, and what they are known as. A registry and the pools of its tiers.
 *
 * A pool is n_blocks blocks of one tier, numbered from 0. A block goes round:
 *
 *      allocate            init / add tokens           commit
 *   ┌─────────► mutable: Reset ─────────► Partial ─────────┐
 *   │                      │                               ▼
 *   │                      └── complete (a chain's key) ► Complete
 *   │                                                      │ register
 *   free ◄── reset ── inactive ◄─── last release ──── Registered: immutable, found by its key
 *                        └────────── match ──────────────►│
 *
 * A registered block that nobody holds is inactive: it keeps its bytes and its key and is found by match,
 * until an allocation needs room; blocks that never held anything go first, then the eviction policy
 * chooses. The registry knows each key once, with the tiers that hold it.
 *
 * Keys are key_len opaque bytes (by default 8, a sequence hash of kvbm_tokens.h) in a group: models with
 * several caches (full attention, sliding window, state) give each its own group, and the same key in
 * two groups is two keys. Arrays of keys are packed: n * key_len bytes, no alignment asked for.
 *
 * Handles are values: a mutable or complete one is the only one of its block, immutable ones are counted
 * (clone), weak ones hold nothing. They carry a generation, so that a handle used after its release is
 * told (-ESTALE) and one of another pool too (-EXDEV). A function that consumes handles zeroes them; a
 * failing one leaves them, and their blocks, as they were. Releasing a zeroed handle is a no-op, in an
 * array too. (What a generation can't tell: a copied immutable handle released once too often, while
 * others hold the block.)
 *
 * Threads. Any function from any thread. All pools of a registry share one lock, taken once per call (per
 * batch, not per block) for a time in proportion to the batch. Callbacks run without it, except where
 * said. Nothing waits, nothing spins: what can't be had is an error at once.
 *
 * Errors, besides those named: -EINVAL arguments that make no sense, NULL among them; -EBADFD the block is in another
 * state than the operation needs; -ESTALE; -EXDEV; -ERANGE an index that isn't; -ENOMEM.
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

#define KVBM_MAX_KEY 64
#define KVBM_MAX_GROUPS 64 /* groups are 0 to 63 */

struct kvbm_events; /* kvbm_events.h */
struct kvbm_registry;

struct kvbm_registry_opts {
    size_t size;
    uint32_t key_len;           /* bytes of a key, 4 to KVBM_MAX_KEY; 0: 8 */
    struct kvbm_events *events; /* told what comes and goes; outlives the registry. NULL: nobody */
};

/** @opts may be NULL: all defaults. Returns 0, -EINVAL (key_len), -ENOMEM. */
KV_API int kvbm_registry_create(const struct kvbm_registry_opts *opts, struct kvbm_registry **ret);
/** Returns 0; -EBUSY while it has pools (nothing is freed then). NULL is fine. */
KV_API int kvbm_registry_destroy(struct kvbm_registry *registry);

/** Which tiers hold each key: ret[i] gets bit (1 << tier) of every tier where keys[i] is registered,
 * 0: in none. Holds nothing: by the time this returns it may have changed. */
KV_API int kvbm_registry_locate(struct kvbm_registry *registry, uint32_t group, const void *keys,
                                size_t n, uint8_t *ret);

/**
 * Attachments: values of other parts of a program, tied to a key as long as it is registered anywhere. A
 * type has at most one value a key (unique) or any number (multiple). destroy (may be NULL) is called
 * without the lock, by the thread whose call took the key out of its last tier. Names up to 63 bytes.
 * Returns 0 and the type (the same one for the same name and kind), -EEXIST (other kind), -ENOSPC (64).
 */
KV_API int kvbm_attachment_type(struct kvbm_registry *registry, const char *name, bool multiple,
                                void (*destroy)(void *value), uint32_t *ret);
/** Returns 0: @value is the registry's now, until destroy; else the caller's: -ENOENT when the key isn't
 * registered, -EEXIST when a unique one has a value, -EINVAL for a type that isn't. */
KV_API int kvbm_registry_attach(struct kvbm_registry *registry, uint32_t group, const void *key,
                                uint32_t type, void *value);
/**
 * Values of a type, oldest first, at most @cap; returns how many there are (also when more than @cap), or
 * -ENOENT. They stay while the caller holds a handle on a block of that key.
 */
KV_API long kvbm_registry_attachments(struct kvbm_registry *registry, uint32_t group,
                                      const void *key, uint32_t type, void **ret, size_t cap);

/**
 * Called without the lock, by the thread that used keys (match and match_scattered without
 * KVBM_MATCH_NO_TOUCH, touch), so by several at once. @keys live during the call, packed. May call any function
 * here. At most 8 callbacks (-ENOSPC); they stay as long as the registry.
 */
typedef void (*kvbm_touch_fn)(void *arg, enum kv_tier tier, uint32_t group, const void *keys,
                              size_t n);
KV_API int kvbm_registry_on_touch(struct kvbm_registry *registry, kvbm_touch_fn fn, void *arg);

/* ---------------------------------------------------------------------------------------------
 * Pools.
 */

/** Which inactive block goes first. Lower priority before higher in all of them. */
enum kvbm_eviction {
    KVBM_EVICT_LRU, /* the one released longest ago */
    KVBM_EVICT_LFU, /* of the least used of four levels (TinyLFU counts), the longest ago */
    KVBM_EVICT_LINEAGE /* of those without inactive children (leaves), the longest ago: the oldest up to
                        * 1/1024 of the pool's releases, see docs/kvbm.md */
};

/** Retention priorities, 0 to 100 as TensorRT-LLM counts them. */
#define KVBM_PRIORITY_DEFAULT 35
#define KVBM_PRIORITY_MAX 100

struct kvbm_pool;

struct kvbm_pool_opts {
    size_t size;
    /* Label in logs and metrics: UTF-8, up to 31 bytes, different from the registry's other pools'. NULL: the
     * tier's name; of a pool that doesn't serve all groups with the first of them, "device-g2". */
    const char *name;
    enum kv_tier tier;
    uint64_t groups;     /* bit g: serves group g; 0: all. No two pools of one tier share one */
    uint32_t n_blocks;   /* required, 1 to 2^31 - 2, of all pools of a registry together */
    uint32_t block_size; /* required: tokens per block, a power of two, 1 to 1024 */
    enum kvbm_eviction eviction;
    uint8_t lfu_thresholds[3]; /* uses that make a block warm, hot, very hot: ascending, 1 to 15;
                                  zeros: 3, 8, 15 */
    /* A second block of a key: false, both are kept; true, it becomes free and register returns the first,
     * which has another number. */
    bool reject_duplicates;
    bool reset_on_release; /* forget blocks at their last release: no inactive ones */
    /* For kvbm_pool_view: of at least n_blocks, page_size is block_size, outlives the pool. NULL: the engine knows
     * where blocks are. */
    const struct kvbm_layout *layout;
    bool track_handles; /* remember who acquired last; a debug build (no NDEBUG) always does */
};

/** Returns 0; -EINVAL (the log says what is wrong); -EEXIST: that tier has a pool for one of the groups, or
 * the registry one of that name; -ENOMEM: also when its bookkeeping takes more than the machine, or the cgroup, has
 * left. */
KV_API int kvbm_pool_create(struct kvbm_registry *registry, const struct kvbm_pool_opts *opts,
                            struct kvbm_pool **ret);
/**
 * Forget all blocks (removals are published) and free the pool. -EBUSY while handles are held: nothing
 * is done, and their blocks (the first 100) are logged, with where they were acquired last if that is tracked:
 * file(function+offset), for addr2line. NULL is a no-op. No other call may be on its way, and weak handles of the pool,
 * which hold nothing, may not be used any more.
 */
KV_API int kvbm_pool_destroy(struct kvbm_pool *pool);

enum kvbm_state { KVBM_RESET, KVBM_PARTIAL, KVBM_COMPLETE, KVBM_REGISTERED };
/** "reset", "partial", "complete", "registered"; else "unknown". */
KV_API const char *kvbm_state_name(enum kvbm_state state);

/** What every handle is. A caller may read block: the number of the block whose bytes it may use. */
struct kvbm_handle {
    struct kvbm_pool *pool; /* NULL: holds nothing */
    uint32_t block;
    uint32_t generation;
};
struct kvbm_mutable {
    struct kvbm_handle handle; /* a block in state Reset or Partial, its only holder */
};
struct kvbm_complete {
    struct kvbm_handle handle; /* a block in state Complete, its only holder */
};
struct kvbm_immutable {
    struct kvbm_handle handle; /* a Registered block, one of its holders */
};
struct kvbm_weak {
    struct kvbm_handle handle; /* remembers a Registered block, holds nothing, needs no release */
};

/** KVBM_AUTO(immutable) struct kvbm_immutable block = {0}; is released when it leaves its scope. */
#define KVBM_AUTO(kind) __attribute__((cleanup(kvbm_##kind##_release)))

/** What there was when it wasn't enough. */
struct kvbm_shortage {
    size_t requested;
    size_t available; /* free + inactive */
};

/**
 * Take @n blocks, all or none: free ones first, then evicted ones. They are in state Reset; their bytes are
 * whatever they were. n = 0 is 0. Returns 0 or -ENOSPC; @shortage (may be NULL) is written then.
 */
KV_API int kvbm_pool_allocate(struct kvbm_pool *pool, size_t n, struct kvbm_mutable *ret,
                              struct kvbm_shortage *shortage);

/** Back to the free blocks, first in first out. Returns 0 or an error of the handle. */
KV_API int kvbm_mutable_release(struct kvbm_mutable *block);
KV_API int kvbm_complete_release(struct kvbm_complete *block);
/** @n blocks of one pool, one lock. All or (a bad handle, -EINVAL: the same one twice) none. */
KV_API int kvbm_pool_release_mutable(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n);
KV_API int kvbm_pool_release_complete(struct kvbm_pool *pool, struct kvbm_complete *blocks,
                                      size_t n);

/* Filling by tokens: the block keeps them and hashes them (kvbm_tokens.h, so key_len must be 8, else
 * -ENOTSUP). An engine that has hashes already uses kvbm_pool_complete. */

struct kvbm_block_start {
    size_t size;
    uint32_t group;
    uint64_t salt_hash;
    uint32_t chain;         /* enum kvbm_chain_seed */
    const uint64_t *parent; /* sequence hash of the block before; NULL: the first of its sequence */
    uint32_t position;      /* in blocks; 0 exactly when there is no parent */
};

/** Reset to Partial. @start may be NULL: a first block, group 0, salt hash 0. Also -ENOTSUP (key_len). */
KV_API int kvbm_mutable_init_sequence(const struct kvbm_mutable *block,
                                      const struct kvbm_block_start *start);
/** Partial. Returns 0 or -ENOSPC (full). */
KV_API int kvbm_mutable_add_token(const struct kvbm_mutable *block, uint32_t token);
/** Partial. Takes what fits; returns how many those were, 0 to n. */
KV_API long kvbm_mutable_add_tokens(const struct kvbm_mutable *block, const uint32_t *tokens,
                                    size_t n);
/** Partial. Take the last @n off. Returns 0 or -ENODATA (there are fewer). */
KV_API int kvbm_mutable_pop_tokens(const struct kvbm_mutable *block, size_t n);
/** Partial and full to Complete; consumes @block. Returns 0, -ENODATA (not full), -EEXIST (as complete). */
KV_API int kvbm_mutable_commit(struct kvbm_mutable *block, struct kvbm_complete *ret);
/** Partial back to Reset. A Reset block stays so. */
KV_API int kvbm_mutable_reset(const struct kvbm_mutable *block);
/** Complete back to Reset; consumes @block. */
KV_API int kvbm_complete_reset(struct kvbm_complete *block, struct kvbm_mutable *ret);

/**
 * State and fill of a block. Its tokens (of Partial, of Complete where they were given) are copied to @tokens, at
 * most @cap; @tokens may be NULL.
 */
struct kvbm_fill {
    enum kvbm_state state;
    uint32_t len;       /* Partial: tokens in it; Complete: block_size; else 0 */
    uint32_t remaining; /* Partial: block_size - len; else 0 */
};
KV_API int kvbm_mutable_fill(const struct kvbm_mutable *block, struct kvbm_fill *ret,
                             uint32_t *tokens, size_t cap);
KV_API int kvbm_complete_fill(const struct kvbm_complete *block, struct kvbm_fill *ret,
                              uint32_t *tokens, size_t cap);

/** n consecutive full blocks of one sequence, as an engine knows them. Borrowed for the call. */
struct kvbm_chain {
    size_t size;
    uint32_t group;
    const void *keys;       /* n * key_len */
    const void *parent;     /* key of the block before the first; NULL: the sequence starts here */
    uint32_t position;      /* of the first block, in blocks; 0 exactly when there is no parent */
    const uint32_t *tokens; /* n * block_size, copied, for events; NULL: events go without */
};

/**
 * Reset to Complete for @n blocks that now hold @chain; consumes @blocks. All or none.
 * -EEXIST: a key twice in the chain, or its parent in it, or one that the registry knows at another
 * position. (A key that it knows behind another parent stays there.) -EINVAL: a handle twice.
 */
KV_API int kvbm_pool_complete(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                              const struct kvbm_chain *chain, struct kvbm_complete *ret);

/**
 * Complete to Registered, in order; consumes @blocks, all or none. A key that is registered in this pool
 * already (active or inactive): the block becomes a duplicate that keeps the first one alive, or, with
 * reject_duplicates, goes back and the first one is returned. Stored events are published for those that
 * are first in this tier. -EINVAL for n = 0, and for a handle twice.
 */
KV_API int kvbm_pool_register(struct kvbm_pool *pool, struct kvbm_complete *blocks, size_t n,
                              struct kvbm_immutable *ret);

/**
 * Reset to Registered for @n blocks that now hold the same bytes as the registered blocks @like of any pools
 * of the registry: what moving between tiers ends with. Each gets the key, parent and position of its like, and the
 * key, unless it has one here already, the like's retention priority and the time when that ends; else as complete
 * and register, without tokens in the events.
 * Consumes @blocks, all or none; @like stay held. -EXDEV: a like of another registry; -EINVAL also when the
 * pool doesn't serve a like's group, or has blocks of another size.
 */
KV_API int kvbm_pool_adopt(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                           const struct kvbm_immutable *like, struct kvbm_immutable *ret);

/* Immutable handles. */

/** One more handle on the same block, to be released on its own. (A copy made with = is no second one.) */
KV_API int kvbm_immutable_clone(const struct kvbm_immutable *block, struct kvbm_immutable *ret);
/**
 * The last one of a block makes it inactive (of a duplicate: free). Of several, the last of the array goes
 * first: given in the order of their sequence, a leaf is released before its parent and evicted before it.
 * All or (a bad handle) none; -ESTALE also when a handle is in the array more often than it was acquired.
 */
KV_API int kvbm_immutable_release(struct kvbm_immutable *block);
KV_API int kvbm_pool_release(struct kvbm_pool *pool, struct kvbm_immutable *blocks, size_t n);
/** Release only if this is the block's last handle and no duplicate leans on it; else -EBUSY. */
KV_API int kvbm_immutable_try_return(struct kvbm_immutable *block);

/** Remember the block (of a duplicate: its primary) without holding it; @block stays held. */
KV_API int kvbm_immutable_downgrade(const struct kvbm_immutable *block, struct kvbm_weak *ret);
/** A new handle if the block is still registered (active or inactive) as what it was; else -ESTALE, for good:
 * also when the key has come back. Counts no use. */
KV_API int kvbm_weak_upgrade(const struct kvbm_weak *block, struct kvbm_immutable *ret);

struct kvbm_block_info {
    size_t size;      /* the caller's */
    uint32_t block;   /* number in its pool: where the bytes are */
    uint32_t primary; /* the block found under the key; another one for a duplicate */
    bool duplicate;
    uint32_t group;
    uint32_t position;
    uint8_t key[KVBM_MAX_KEY];
    uint8_t parent[KVBM_MAX_KEY]; /* key of the block before, when has_parent */
    bool has_parent;  /* and it is known: neither the first, nor a ghost's child any more */
    uint8_t tiers;    /* bit per tier in which the key is registered */
    uint8_t priority; /* of the primary */
    uint32_t handles; /* strong ones, of this block itself */
    uint64_t priority_until_ns; /* when the priority ends, by CLOCK_MONOTONIC; 0: never */
};
/** What a held block is, at this moment. -EINVAL also for a struct without its size. */
KV_API int kvbm_immutable_info(const struct kvbm_immutable *block, struct kvbm_block_info *ret);

/* Lookup. What is found is held: it can't be evicted until it is released. */

#define KVBM_MATCH_NO_TOUCH 1u /* don't count as a use */

/**
 * The longest prefix of @keys that is registered, one handle each in @ret (room for @n). Returns its length
 * 0..n. A use of each found key is counted once.
 */
KV_API long kvbm_pool_match(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                            unsigned flags, struct kvbm_immutable *ret);
/** Every registered one: ret[i] is keys[i]'s handle or zeroed. Returns how many were found. */
KV_API long kvbm_pool_match_scattered(struct kvbm_pool *pool, uint32_t group, const void *keys,
                                      size_t n, unsigned flags, struct kvbm_immutable *ret);
/** Length of the registered prefix; nothing is held or counted. */
KV_API long kvbm_pool_probe(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n);
/** Count a use of the registered prefix of @keys; its inactive blocks become the latest released. Returns its
 * length. */
KV_API long kvbm_pool_touch(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n);

/**
 * Keep @keys (those registered) at @priority, 0 to KVBM_PRIORITY_MAX; after @ttl_ms (0: for ever) back at
 * the default. A block that is reset forgets it. Among the inactive blocks of its new priority a block
 * comes last, as if released now (with lineage: in the place of its age). The last of @keys goes first, as with
 * kvbm_pool_release; of blocks whose time ends together, those later in their sequences go first. Returns how many
 * keys there were.
 */
KV_API long kvbm_pool_retain(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                             uint32_t priority, uint64_t ttl_ms);

/* Taking things out. */

struct kvbm_reset_result {
    size_t reset;
    size_t not_found;
    size_t held; /* registered, but somebody holds it: left alone */
};
/** Forget the inactive ones of @keys: they become free blocks. @ret (may be NULL) counts the keys; a key whose
 * duplicate is held is held. Returns 0 or -EINVAL. */
KV_API int kvbm_pool_reset_keys(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                                struct kvbm_reset_result *ret);
/** Forget all inactive blocks. Returns how many. */
KV_API long kvbm_pool_reset_inactive(struct kvbm_pool *pool);
/** Forget everything, or, while any handle is held, nothing: -EBUSY. */
KV_API int kvbm_pool_reset(struct kvbm_pool *pool);

/**
 * Where the bytes of (block, layer, outer) are: block is a handle's, of any kind, which should be held as long as
 * the bytes are used. Takes no lock. Returns 0, -ERANGE, -ENOTSUP without a layout.
 */
KV_API int kvbm_pool_view(const struct kvbm_pool *pool, uint32_t block, uint32_t layer,
                          uint32_t outer, struct kvbm_view *ret);

/* ---------------------------------------------------------------------------------------------
 * Looking at it.
 */

/** Counters since creation, and what is there now. Names in Prometheus: kvbm_<field>[_total]. */
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
    uint64_t metadata_bytes; /* of the pool, and its share of the registry */
};
/** All of one moment. Returns 0; -EINVAL also for a struct without its size: nothing is done then. */
KV_API int kvbm_pool_get_stats(struct kvbm_pool *pool, struct kvbm_pool_stats *ret);

/**
 * All pools of a registry as Prometheus text 0.0.4, label pool. Writes at most @cap bytes, always ended by a
 * NUL when cap > 0; returns the length it takes without it (so call again with more when that is >= @cap), or
 * -ENOMEM. Texts of several registries can't be put behind one another (they repeat the headings): kvbm_metrics.
 */
KV_API long kvbm_registry_metrics(struct kvbm_registry *registry, char *to, size_t cap);

struct kvbm_named_registry {
    struct kvbm_registry *registry;
    const char *name; /* UTF-8, no two the same */
};
/**
 * The same of @n registries in one text, with a label registry in front of pool: for a process that has several.
 * Their locks are taken one after the other. -EINVAL also for a name that isn't one.
 */
KV_API long kvbm_metrics(const struct kvbm_named_registry *registries, size_t n, char *to,
                         size_t cap);

/**
 * For people: a summary, and the first @max_blocks blocks that aren't free, a line each (state, handles, key,
 * priority, who acquired it last if that is tracked). The text may change from version to version. Blocks are
 * read a few at a time and written without the lock: a dump doesn't stop the pool, and isn't of one moment.
 * Returns 0 or -EIO.
 */
KV_API int kvbm_pool_dump(struct kvbm_pool *pool, FILE *to, size_t max_blocks);

/**
 * Check what must hold (total = free + mutable + immutable + inactive, each key at most one primary a tier,
 * counts, lists and table sound). Takes time in proportion to the pools, with the lock. Returns 0,
 * -EUCLEAN with the fault in the log, or -ENOMEM. (A library built without NDEBUG checks itself, and aborts:
 * what it can in constant time at the end of every call, everything now and then.)
 */
KV_API int kvbm_registry_check(struct kvbm_registry *registry);

#ifdef __cplusplus
}
#endif
#endif
