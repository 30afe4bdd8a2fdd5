// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_manager.h: one node's tiers behind one handle. Blocks go down when they are stored, and come back
 * when they are asked for.
 *
 *      engine's cache (G1)          attached: the engine's tensors, its block numbers or a pool of ours
 *        │ store        ▲ load
 *        ▼              │
 *      host (G2)  ── a pool, found by key ──┐
 *        │ offload      ▲ fetch             │ offload (write-through or in the background)
 *        ▼              │                   ▼
 *      disk (G3)  ─ crash-safe slots ─    object store (G4), any kv_store URI
 *
 * Each tier but the cache may be absent: without a host tier a few staging buffers take its place. A block
 * is found in whatever tier has it, and what is found by kvbm_manager_prepare_load is held until the pin is
 * let go: nothing can be evicted between lookup and load. Blocks of different layouts (order of heads and
 * tokens, another number of heads) are converted in the copy between cache and host.
 *
 * What can't be kept is dropped and counted, never waited for. Bytes that don't verify are a miss.
 *
 * Threads: any function from any thread; none waits for I/O but those that say so. After fork() a child may
 * not use its parent's manager: calls return -ECHILD (destroy does nothing); create one after the fork.
 * Touch callbacks and attachments' destroy functions (kvbm_pool.h) run inside and must not call the manager.
 * Structs are plain data that begin with their size (one of an older, smaller version does: what it lacks is at its
 * default, or isn't written; so does a newer, larger one); those without never change. Nothing calls back into the engine.
 */
#ifndef KVBM_MANAGER_H
#define KVBM_MANAGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_events.h"
#include "kvbm_layout.h"
#include "kvbm_pool.h"
#include "kvbm_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvbm_manager;

/** Which blocks go down to a tier. Those that are in it already never do. */
enum kvbm_policy {
    KVBM_POLICY_DEFAULT,   /* PRESENCE */
    KVBM_POLICY_PRESENCE,  /* all that aren't there yet */
    KVBM_POLICY_FREQUENCY, /* those offered for the threshold-th time (spares SSDs) */
    KVBM_POLICY_NEVER
};

struct kvbm_tier_policy {
    enum kvbm_policy policy;
    uint32_t threshold;    /* FREQUENCY: offers until it goes, 1 to 15; 0: 2 */
    uint32_t min_priority; /* retention priority a block must have, 0 to 100 */
};

struct kvbm_manager_opts {
    size_t size;
    /* What a block is in the host tier: layers, outer, page_size, inner_dim, dtype, order. kind, num_blocks,
     * alignment and tensor_shape are set by the manager (fully contiguous, multiples of 4096 bytes). Required. */
    const struct kvbm_layout_config *block;
    const char
        *fingerprint; /* model, revision, parallel rank: what makes equal keys equal bytes. Required
                              * with a disk or object tier; at most 3800 bytes. */
    uint32_t key_len; /* bytes, 4 to 64; 0: 8 */
    struct kvbm_events *events; /* outlives the manager. NULL: nobody is told */

    uint64_t host_bytes;     /* host tier; 0: none, only staging buffers */
    uint32_t staging_blocks; /* without a host tier; 0: 64 */
    /* KVBM_EVICT_LRU (the default) is of leaves here, as KVBM_EVICT_LINEAGE: a prompt's end goes before its beginning,
     * in whatever order its blocks came into a tier and were let go. LFU doesn't see to that. */
    enum kvbm_eviction host_eviction;
    bool host_pinned; /* page-locked, for the GPU: needs CUDA */
    bool huge_pages;
    struct kvbm_tier_policy host_policy;

    const char *
        disk; /* directories, one per volume, separated by ':' (no name has one). NULL: no disk tier */
    uint64_t disk_bytes;
    enum kvbm_eviction disk_eviction;
    struct kvbm_tier_policy disk_policy;
    bool disk_buffered; /* no O_DIRECT */
    bool disk_volatile; /* no barriers: a power cut loses blocks (never makes wrong ones) */

    const char *object;        /* kv_store URI. NULL: no object tier */
    uint32_t object_blocks;    /* how many of its keys are remembered as being there; 0: 100,000 */
    bool object_write_through; /* a store job ends when its blocks are in the object store, too */
    bool
        object_when_evicted; /* blocks go there only when they are about to leave the last tier above */
    uint32_t object_timeout_ms; /* 0: 10,000 */
    struct kvbm_tier_policy object_policy;

    uint32_t copy_threads; /* 0: as many as there are cores, at most 8 */
    enum kvbm_io io;
    uint32_t io_depth;    /* 0: 64 */
    uint32_t max_offload; /* blocks that wait to go down; 0: 16,384. Beyond: dropped and counted */
    uint32_t max_jobs;    /* 0: 1024 */
    bool
        io_registered; /* lock the host tier's memory and register it with io_uring, for the disk tier */
    enum kvbm_gpu_copy gpu_copy; /* who moves small pieces to and from a GPU */
};

/**
 * Fill @opts from "key = value" lines of @file (NULL: none; # begins a comment at the start of a line and
 * behind a blank, so a value can't have " #" in it), then from environment
 * variables KVBM_<KEY>, which win: host_bytes, disk, disk_bytes, object... (docs/kvbm-tiers.md lists them;
 * sizes as 10GiB). What neither names stays as it was; a key of the file for which @opts, of an older version, is too
 * small is one that isn't known, such a variable is left alone. Strings point into *@ret_strings, to be freed with
 * free() once the manager is created. Returns 0; -EINVAL (the log names the line or variable); -ENOENT, -EIO,
 * -ENOMEM: nothing is changed then.
 */
KV_API int kvbm_manager_configure(struct kvbm_manager_opts *opts, const char *file,
                                  char **ret_strings);

/**
 * Returns 0; -EINVAL, -ENOMEM, -ENOSPC, -EBUSY (another process has the disk tier), -ENODEV and what else
 * storages, the disk and the store say. Blocks of a disk tier that was there are found at once.
 *
 * The kernel may hold the files of a process that was killed for a moment: create tries for a second to lock them,
 * logs that it waits, and returns -EBUSY then.
 */
KV_API int kvbm_manager_create(const struct kvbm_manager_opts *opts, struct kvbm_manager **ret);
/**
 * Finish what runs (at most @timeout_ms: the rest is cancelled), let offloading go on as long as that
 * allows, close the tiers; what can't be cancelled gets a second more at most. Returns 0: it is gone. Else it is there, whole, and
 * goes on:
 *   -EBUSY      pins or handles of its pools are held, or pools of the caller's are there: nothing was done
 *   -ETIMEDOUT  a disk, or a GPU, hasn't answered a request, which can't be taken back: the host tier's memory, and
 *               that of the caches, is still theirs. Jobs were cancelled, and what waited to go down was dropped.
 *               Destroy it again later, or never, and then free none of the caches' memory either
 * An object store that hangs is no reason: its call is left behind with its thread and its own memory. Threads in
 * kvbm_manager_wait and kvbm_manager_drain have their answers by then; no other call may be on its way. NULL is a no-op.
 */
KV_API int kvbm_manager_destroy(struct kvbm_manager *manager, uint32_t timeout_ms);

/** The registry, to make pools for caches of our own, attach values, ask where keys are. The manager's. */
KV_API struct kvbm_registry *kvbm_manager_registry(struct kvbm_manager *manager);
/** The pool of KV_TIER_HOST, _DISK or _EXTERNAL, to look at, touch, retain and reset. NULL: no such tier. */
KV_API struct kvbm_pool *kvbm_manager_pool(struct kvbm_manager *manager, enum kv_tier tier);
/** Where host blocks' bytes are, for engines that copy themselves (kvbm_pin_blocks). */
KV_API const struct kvbm_layout *kvbm_manager_host_layout(struct kvbm_manager *manager);

/* ---- caches: G1 ---- */

struct kvbm_cache;

struct kvbm_cache_opts {
    size_t size;
    const struct kvbm_layout
        *layout; /* required (kvbm_layout_from_kvx, or made); outlives the cache */
    struct kvbm_pool
        *pool; /* of the manager's registry, over that layout; NULL: the engine numbers blocks */
    /* Its heads within the host tier's blocks, when those have more: a store job copies its part then and commits
     * nothing. Once all parts are there, kvbm_pin_commit does, of the blocks that are in every part's ok: a part that
     * failed, or was never stored, leaves what was in the host block before. */
    uint32_t first_head;
    uint32_t n_heads; /* 0: all */
};
/** Returns 0; -EINVAL: blocks that can't be converted into the host tier's. */
KV_API int kvbm_cache_attach(struct kvbm_manager *manager, const struct kvbm_cache_opts *opts,
                             struct kvbm_cache **ret);
/** -EBUSY while jobs use it. */
KV_API int kvbm_cache_detach(struct kvbm_cache *cache);

/* ---- where is it ---- */

enum kvbm_where {
    KVBM_MISS = 0,
    KVBM_READY,   /* in the host tier */
    KVBM_ON_DISK, /* to be fetched */
    KVBM_REMOTE,  /* in the object store, as far as is known */
    KVBM_PENDING, /* on its way to the host tier, or not known yet: ask again */
    KVBM_BUSY     /* to be had, but not now (no buffer, a queue is full): ask again */
};

/**
 * ret[i] (may be NULL) says where key i of @chain is; holds and fetches nothing. Returns the length of the prefix
 * that isn't MISS. With an object tier, keys whose presence isn't known are asked for in the background (the
 * first 256 of a call; those behind by later calls; none behind a MISS, which they are then, too) and are PENDING
 * until the answer is there. When the store doesn't answer for two seconds (object_timeout_ms, if that is less) they
 * are MISS, and at once while its breaker is open, or while some ten thousands of other keys are in doubt.
 */
KV_API long kvbm_manager_lookup(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                size_t n, uint8_t *ret);
/** A use of each key, in all tiers that have it. Returns how long the prefix is that any tier has. */
KV_API long kvbm_manager_touch(struct kvbm_manager *manager, uint32_t group, const void *keys,
                               size_t n);

/* ---- pins ---- */

/** Blocks held in the host tier: found and fetched ones (load), or reserved ones (store). Of at most 2^20 keys (-EINVAL). */
struct kvbm_pin;

struct kvbm_pin_opts {
    size_t size;
    uint64_t deadline_ns; /* monotonic, of fetching; 0: none */
    bool no_fetch;        /* only what the host tier has */
    uint32_t reserved;    /* 0 */
    int32_t
        priority; /* of fetching: the higher first, then the older. A load job with a higher one raises it for what
                       * hasn't been asked of the tier below yet */
};

/**
 * Hold what the host tier has of @chain (n keys; tokens are not looked at), and fetch the rest from the tiers
 * below. Returns the length of the prefix that is or may become READY (PENDING counts), and a pin, also
 * when that is 0; -EINVAL, -ENOMEM, -ECHILD.
 */
KV_API long kvbm_manager_prepare_load(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                      size_t n, const struct kvbm_pin_opts *opts,
                                      struct kvbm_pin **ret);

/**
 * The same for blocks that the caller holds already: @blocks are handles of the manager's pools (kvbm_manager_pool),
 * those of several tiers mixed, in any order, of one group. Key i of the pin is block i's. It comes from the
 * nearest tier that has it, be that above the handle's; one that is lost after all stops nothing behind
 * it. The pin holds the blocks until it and its jobs have ended, so @blocks may be released at once. Returns as
 * kvbm_manager_prepare_load; -EXDEV: a handle of another pool than the manager's; -ESTALE; -EINVAL: a zeroed one,
 * several groups. Nothing is held then.
 */
KV_API long kvbm_manager_prepare_load_blocks(struct kvbm_manager *manager,
                                             const struct kvbm_immutable *blocks, size_t n,
                                             const struct kvbm_pin_opts *opts,
                                             struct kvbm_pin **ret);

/**
 * Reserve host blocks for those of @chain that no reserved or registered host block has. Returns how many
 * those are; where there is no room the rest is left out (counted as dropped). They become findable by
 * kvbm_pin_commit or by the end of a store job.
 */
KV_API long kvbm_manager_prepare_store(struct kvbm_manager *manager, const struct kvbm_chain *chain,
                                       size_t n, struct kvbm_pin **ret);

/** ret[i] is an enum kvbm_where: of a load READY, PENDING, MISS or BUSY; of a store PENDING for reserved ones,
 * READY for those that are there already, BUSY without room. Returns the length of the READY prefix. */
KV_API long kvbm_pin_state(struct kvbm_pin *pin, uint8_t *ret);
/** Host blocks of the keys (UINT32_MAX: none), for engines that copy themselves: of a load the READY ones, of a
 * store the reserved ones. Their bytes may be read (load) or written (store) until release or commit. */
KV_API long kvbm_pin_blocks(struct kvbm_pin *pin, uint32_t *ret);
/** Wait until nothing is PENDING. Returns 0 or -ETIMEDOUT. */
KV_API int kvbm_pin_wait(struct kvbm_pin *pin, uint32_t timeout_ms);
/** The reserved blocks hold what their keys say: those with bit i of @ok (NULL: all). The others are given
 * back. They are findable when this returns, and go on to the tiers below. Returns how many; -EBUSY while a
 * store job has the pin, -EINVAL for one of prepare_load. */
KV_API long kvbm_pin_commit(struct kvbm_pin *pin, const uint8_t *ok);
/** Let go; fetches that only this pin wanted are cancelled, once no job waits for them. Jobs go on. NULL is a no-op. */
KV_API void kvbm_pin_release(struct kvbm_pin *pin);

/* ---- jobs ---- */

struct kvbm_job {
    size_t size;
    struct kvbm_pin
        *pin; /* of prepare_load: the job loads; of prepare_store: it stores, and commits */
    struct kvbm_cache *cache; /* required */
    const uint32_t
        *blocks; /* [n of the pin] the cache's blocks of its keys, copied; UINT32_MAX: leave out */
    uint32_t first_layer,
        n_layers; /* load: these only, 0 layers: all from the first on; store: 0, 0 */
    int32_t priority;
    uint64_t deadline_ns;
    int ready_fd; /* store: nothing is read before it is readable; duplicated. 0 or -1: at once */
    void *ready_event; /* store: a CUDA event */
    uint8_t *ok; /* [(n + 7) / 8] bit i: key i's bytes are there; the caller's until done. NULL */
    uint64_t tag;
};

/** Queue the copy; a load begins when its pin has nothing PENDING. The job holds the pin. Returns its id > 0;
 * -EAGAIN (max_jobs), -EBUSY (another store job has the pin), -EINVAL, -ENOMEM, -ESHUTDOWN (being destroyed).
 * What the copy itself is refused for (-ENOTSUP, -EINVAL: block numbers) is the job's status. */
KV_API int64_t kvbm_manager_submit(struct kvbm_manager *manager, const struct kvbm_job *job);
/** Copies not begun are left out. Returns 0 or -ENOENT. */
KV_API int kvbm_manager_cancel(struct kvbm_manager *manager, uint64_t id);
/**
 * Jobs that ended, oldest first. Of struct kvbm_done, n counts the blocks of the job that weren't left out (of a store: those
 * reserved), n_ok those copied. A load that finds only some of its keys has status 0 and n_ok < n, one that finds none
 * -ENOENT: the job's ok says which there are, as it does when something failed.
 */
KV_API long kvbm_manager_poll(struct kvbm_manager *manager, struct kvbm_done *ret, size_t max);
/** Readable while there are such. The manager's. */
KV_API int kvbm_manager_fd(struct kvbm_manager *manager);
/** Wait for one and take it; the calling thread copies along, from memory to memory. Returns 0, -ETIMEDOUT, -ENOENT. */
KV_API int kvbm_manager_wait(struct kvbm_manager *manager, uint64_t id, uint32_t timeout_ms,
                             struct kvbm_done *ret);

/* ---- caches with a pool of ours ---- */

/**
 * Queue registered blocks of a cache's pool to go down, higher @priority first, then older. The queue holds
 * weak references: what is evicted meanwhile was not kept. Returns how many were queued (the rest is
 * dropped, counted); -EINVAL without a pool; -ENOTSUP for a cache of some of the heads.
 */
KV_API long kvbm_manager_offload(struct kvbm_cache *cache, const struct kvbm_immutable *blocks,
                                 size_t n, int32_t priority);

/**
 * Bring the prefix of @chain into the cache's pool, from any tier, and wait for it, at most @timeout_ms. ret[i] for
 * i < the returned length are handles on registered blocks. What isn't in the host tier after three quarters of the
 * time is done without. Returns the length, 0 when nobody has the first block. When the first block was to be had and
 * couldn't be brought:
 *   -ENOSPC     the cache's pool has neither free nor inactive blocks
 *   -EBUSY      there was no host block or queue place to fetch into
 *   -ETIMEDOUT  the time was over
 *   -ENOMEM, -EAGAIN (max_jobs), -ESHUTDOWN, or an error of the copy
 * -EINVAL without a pool. Blocks the calling thread.
 */
KV_API long kvbm_manager_onboard(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                                 uint32_t timeout_ms, struct kvbm_immutable *ret);

/**
 * The same for blocks that are held: handles of the manager's pools, as kvbm_manager_prepare_load_blocks takes them, or
 * of the cache's own. All come in one batch. ret[i] is a handle on block i in the cache's pool, or zeroed: it did
 * not arrive in time, there was no room, or its bytes were lost. Returns how many arrived, or, when none did, what stood in
 * the way of all (-ENOSPC, -ETIMEDOUT ...); -EXDEV, -ESTALE, -EINVAL as there. @blocks stay held. Blocks the calling thread.
 */
KV_API long kvbm_manager_onboard_blocks(struct kvbm_cache *cache,
                                        const struct kvbm_immutable *blocks, size_t n,
                                        uint32_t timeout_ms, struct kvbm_immutable *ret);

/** Wait until nothing waits to go down (tests, shutdown). Returns 0 or -ETIMEDOUT. */
KV_API int kvbm_manager_drain(struct kvbm_manager *manager, uint32_t timeout_ms);

/* ---- looking at it ---- */

struct kvbm_tier_stats {
    uint64_t capacity, used; /* blocks; used: registered */
    uint64_t block_bytes;
    uint64_t hits,
        misses; /* keys asked for by prepare_load and found there, or nowhere above or in it */
    uint64_t blocks_in, bytes_in;   /* that came down or up into it */
    uint64_t blocks_out, bytes_out; /* read from it */
    uint64_t queued;                /* blocks that wait to go into it */
    uint64_t dropped;               /* not kept: no room, queue full, gone meanwhile */
    uint64_t filtered;              /* not kept: policy */
    uint64_t bad, failed;           /* bytes that did not verify; errors */
    uint64_t latency_sum_us;        /* of the batches read from it */
    /* These by time: bucket i has those that took less than 2^i microseconds, the last all above. */
    uint64_t latency_us[24];
};
struct kvbm_manager_stats {
    size_t size;
    struct kvbm_tier_stats cache, host, disk, object; /* of cache: blocks and bytes of jobs */
    uint64_t jobs, jobs_failed, jobs_cancelled, pins_now, jobs_now;
    bool object_down; /* its breaker is open */
    uint32_t volumes_down;
    uint64_t registered_bytes; /* io_registered; 0: no, or the kernel wouldn't */
    uint64_t
        object_unanswered; /* keys that are a MISS of lookup's because the object store was not asked
                                 * (its breaker is open) or did not answer (in time) */
};
/** -EINVAL for a struct without a size. */
KV_API int kvbm_manager_get_stats(struct kvbm_manager *manager, struct kvbm_manager_stats *ret);
/** The same, and that of its pools, as Prometheus text; as kvbm_registry_metrics. */
KV_API long kvbm_manager_metrics(struct kvbm_manager *manager, char *to, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
