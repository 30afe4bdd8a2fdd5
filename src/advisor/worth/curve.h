// SPDX-License-Identifier: Apache-2.0
/**
 * Hit rate of a cache over its capacity, from one pass over the requests: a miss-ratio curve.
 *
 * A reuse distance is the number of other blocks used since a block was used last. In LRU order a
 * cache of c blocks finds a block exactly when its distance is less than c (Mattson et al., IBM
 * Systems Journal 9, 1970), so that the distances of all references are the hit rates of all
 * capacities. A request first looks its whole prompt up, then uses the prompt's blocks from the last to
 * the first: a block is used after those behind it, as engines do that evict leaves first. What is in
 * the cache is then always a set of prefixes, and each hit is one of a prefix.
 *
 * Memory is bounded by spatial sampling (SHARDS, Waldspurger et al., FAST 2015): only keys are followed
 * whose hash is below a threshold, which falls as more keys come than there is room for. Distances
 * count for 1 / (share of the keys) of themselves. The difference between the references that the share
 * lets expect and those that were sampled counts as hits of distance 0 (their SHARDS-adj).
 *
 * Threads: a curve is one thread's.
 */
#ifndef KV_ADVISOR_WORTH_CURVE_H
#define KV_ADVISOR_WORTH_CURVE_H

#include <stddef.h>
#include <stdint.h>

struct kva_curve;

/** Most samples of a curve. */
#define KVA_MAX_SAMPLES (UINT32_C(1) << 26)

/**
 * Create a curve that follows at most @samples keys at a time; 0: all, exactly, up to KVA_MAX_SAMPLES.
 * Memory: about 60 bytes a key followed. The caller frees *@ret with kva_curve_destroy. Returns 0;
 * -EINVAL; -ENOMEM.
 */
int kva_curve_create(uint32_t samples, struct kva_curve **ret);
void kva_curve_destroy(struct kva_curve *curve);

/**
 * Take a request in: @keys name its @n blocks, from the first one of the prompt on, each by the whole
 * prefix up to it, and none twice. Returns 0; -ENOMEM, or -ENOSPC (more keys than KVA_MAX_SAMPLES): the
 * request doesn't count.
 */
int kva_curve_use(struct kva_curve *curve, const uint64_t *keys, size_t n);

/**
 * Return the share of all references that a cache of @blocks blocks would have found, 0 to 1. Exact up
 * to 512 blocks where nothing is sampled; above, distances are kept to 1/256.
 */
double kva_curve_hits(const struct kva_curve *curve, double blocks);

/** Copy the figures of a curve, for questions alone: kva_curve_use isn't for copies. Returns 0 or -ENOMEM. */
int kva_curve_copy(const struct kva_curve *curve, struct kva_curve **ret);

struct kva_curve_info {
    uint64_t references;
    uint64_t followed; /* keys followed now */
    double share;      /* of all keys, that are followed: 1 without sampling */
    double distinct;   /* keys there were, estimated where share < 1 */
    double most;       /* capacity that finds all that any would: 1 + the longest distance */
};
void kva_curve_get(const struct kva_curve *curve, struct kva_curve_info *ret);

#endif
