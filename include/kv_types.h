// SPDX-License-Identifier: Apache-2.0
/**
 * kv_types.h: the few values that every part of Kvasir shares.
 *
 * Plain data of fixed width, no functions. An array of these types has the same meaning in the
 * event decoder, in the prefix index and in a dump.
 */
#ifndef KV_TYPES_H
#define KV_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Marks a symbol that a shared library exports. All other symbols are hidden. */
#define KV_API __attribute__((visibility("default")))

/**
 * Receives each log line of a library, without newline. @level: 0 error, 1 warning, 2 info, 3
 * debug.
 *
 * Every library takes one: kve_set_log, kvi_set_log, kvs_set_log, kvbm_set_log, kvx_set_log. A
 * program that links several libraries sets each once, before it calls anything else of them.
 * Several threads may call the function at once; it must not call the library.
 */
typedef void (*kv_log_fn)(void *arg, int level, const char *line);

/**
 * Initialiser of a struct that begins with `size_t size`, in C and in C++; each has its own:
 *
 *     struct kvs_gc_opts opts = KVS_GC_OPTS_INIT;
 *     opts.dry_run = true;
 *
 * In C `.size = sizeof(opts)` among other fields does the same. A function that gets such a struct
 * with an impossible size (0, a pointer's) returns -EINVAL, logs one line with the struct's name,
 * and does nothing.
 */
#ifdef __cplusplus
} /* extern "C": templates have C++ linkage */
template <class T> static inline T kv_init_()
{
    T fresh = T();

    fresh.size = sizeof(T);
    return fresh;
}
extern "C" {
#define KV_INIT_(type) (kv_init_<struct type>())
#else
#define KV_INIT_(type)              \
    {                               \
        .size = sizeof(struct type) \
    }
#endif

/**
 * Tier in which a block lies, nearest to the device first. The numbers are stable (dumps, wire).
 */
enum kv_tier {
    KV_TIER_DEVICE = 0,   /* G1: accelerator memory */
    KV_TIER_HOST = 1,     /* G2: pinned host memory */
    KV_TIER_DISK = 2,     /* G3: local disk */
    KV_TIER_EXTERNAL = 3, /* G4: shared or remote storage */
    KV_N_TIERS = 4
};

/**
 * Blocks of a cache group that a hit needs: of one that ends behind block l. The numbers are stable.
 */
enum kv_needs {
    KV_NEEDS_RUN = 0,   /* the last blocks before l: a sliding window */
    KV_NEEDS_STATE = 1, /* the recurrent state behind block l */
    KV_NEEDS_CHUNK = 2, /* chunked attention: those from the start of the chunk in which l lies */
    KV_NEEDS_ALL = 3    /* every block: full attention */
};

/**
 * One of the cache groups of a model. A hit of n tokens, a multiple of block_size, needs the group's
 * blocks of these tokens:
 *
 *     KV_NEEDS_ALL     [0, n)
 *     KV_NEEDS_RUN     [n - span + 1, n): the last ceil((span - 1) / block_size) blocks, or all
 *     KV_NEEDS_CHUNK   [start of the chunk in which n lies, n): none when a chunk ends at n
 *     KV_NEEDS_STATE   the block that ends at n: the state behind token n - 1
 */
struct kv_cache_group {
    enum kv_needs needs;
    uint32_t block_size; /* tokens, 1 or more */
    uint32_t span; /* tokens of the window (RUN) or of a chunk (CHUNK), 1 or more; else ignored */
};

/** One cached block under both of its names. */
struct kv_block {
    uint64_t hash;        /* block hash that the engine gave, an opaque 64-bit pattern */
    uint64_t tokens_hash; /* local hash of the block's own tokens (kve_hash_block) */
};

/** Holder of blocks: one data-parallel rank of one worker. */
struct kv_holder {
    uint64_t worker; /* instance_id */
    uint32_t rank;   /* data-parallel rank, from 0 */
};

#ifdef __cplusplus
}
#endif
#endif
