// SPDX-License-Identifier: Apache-2.0
/**
 * Policies: which blobs of a member leave it first. Each is a few functions on an order (block.h).
 *
 *     lru    the one used least recently
 *     lfu    of those with the fewest uses (in powers of two) the one used least recently
 *     sieve  SIEVE (Zhang et al., NSDI 2024): a queue, and a hand that spares what was used since
 *     s3fifo S3-FIFO (Yang et al., SOSP 2023): a small queue, a main one, and ghosts of the small one's
 *     cost   the least worth a byte: what its next miss costs, times the probability of a use
 *
 * "cost": the probability of a use halves with every `limit` references of age. A blob that was used
 * again counts as younger by a bonus. The best bonus differs between workloads by more than an order of
 * magnitude, and so it is learned: eight shadows, orders of a sample of the keys with a room scaled down
 * likewise, run beside, each with another bonus. The order takes the bonus of the one with most hits.
 */
#ifndef KV_ADVISOR_INDEX_POLICY_H
#define KV_ADVISOR_INDEX_POLICY_H

#include "advisor/index/block.h"

struct kva_policy {
    const char *name;
    unsigned lists; /* of an order that it uses, from 0 on: 1 to KVA_LISTS */
    /** Put a blob that isn't in the order into it; its stamp is still that of the use before. */
    void (*add)(struct kva_order *order, uint32_t at, enum kva_why why);
    /** Take note of a use of a blob in the order. */
    void (*use)(struct kva_order *order, uint32_t at);
    /** Return the blob that leaves first; KVA_NONE: the order is empty. May change the order of others. */
    uint32_t (*victim)(struct kva_order *order);
};

/** Return the policy called @name; NULL: there is none. */
const struct kva_policy *kva_policy_find(const char *name);
/** Names of all, separated by '|'. */
extern const char kva_policy_names[];

/* -- shadows (shadow.c) ------------------------------------------------------------------------ */

struct kva_shadows;
/** Create shadows. Memory: 1 MiB. Returns 0; -ENOMEM. */
int kva_shadows_create(struct kva_shadows **ret);
void kva_shadows_destroy(struct kva_shadows *shadows);
/**
 * Take note of reference number @clock, to the blob @key; @again: it was used before. The order that they
 * are shadows of holds @n blobs. Returns the bonus that is best now.
 */
uint32_t kva_shadows_use(struct kva_shadows *shadows, uint64_t key, bool again, uint32_t clock,
                         uint64_t n);

#endif
