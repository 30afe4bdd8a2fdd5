// SPDX-License-Identifier: Apache-2.0
/**
 * kv_types.h: the few values that every part of Kvasir shares.
 *
 * Plain data, fixed width, no functions: an array of these means the same in the event decoder, the
 * prefix index and a dump.
 */
#ifndef KV_TYPES_H
#define KV_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Marks what a shared library exports; everything else in it is hidden. */
#define KV_API __attribute__((visibility("default")))

/** Where a block's bytes lie, nearest first. The numbers are stable (dumps, wire). */
enum kv_tier {
    KV_TIER_DEVICE = 0,   /* G1: accelerator memory */
    KV_TIER_HOST = 1,     /* G2: pinned host memory */
    KV_TIER_DISK = 2,     /* G3: local disk */
    KV_TIER_EXTERNAL = 3, /* G4: shared or remote storage */
    KV_N_TIERS = 4
};

/** One cached block, named twice. */
struct kv_block {
    uint64_t hash;        /* the engine's own block hash: an opaque 64-bit pattern */
    uint64_t tokens_hash; /* local hash of the block's tokens alone (kve_hash_block) */
};

/** Who holds a block: one data-parallel rank of one worker instance. */
struct kv_holder {
    uint64_t worker;
    uint32_t rank;
};

#ifdef __cplusplus
}
#endif
#endif
