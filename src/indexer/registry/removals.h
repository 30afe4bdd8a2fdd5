// SPDX-License-Identifier: Apache-2.0
/**
 * Registrations that were removed within the last hour, for peers (registry_peers.c). Bounded; at
 * the bound the oldest are forgotten. Caller-locked.
 */
#ifndef KV_INDEXER_REGISTRY_REMOVALS_H
#define KV_INDEXER_REGISTRY_REMOVALS_H

#include <stdbool.h>
#include <stddef.h>

#include "indexer/registry/registry.h"

#define KI_REMOVED_US (UINT64_C(3600) * 1000000) /* a removal is remembered for an hour */
#define KI_MAX_REMOVED 65536                     /* what a peer reads */

/** A hash table by (instance, rank) over a dense array. Zero-initialise, then set max. */
struct ki_removals {
    struct ki_removal *items;
    uint32_t *buckets; /* as many as there is room for items; index of the first item, and 1 */
    size_t n, capacity;
    size_t max; /* bound of n; at least 16 */
};

void ki_removals_fini(struct ki_removals *r);
/** Find the removal of a rank; NULL: none is remembered. */
const struct ki_removed *ki_removals_find(const struct ki_removals *r, uint64_t instance,
                                          uint32_t rank);
/**
 * Remember a removal. Returns false when it changes nothing: one as new of that rank is known, or
 * out of memory.
 */
bool ki_removals_note(struct ki_removals *r, const struct ki_removed *removed);
/**
 * Return true when a peer has removed the rank (NULL: any of the instance) and no client has since.
 * A client has now.
 */
bool ki_removals_take_by_peer(struct ki_removals *r, uint64_t instance, const uint32_t *rank);
/** List the removals of the last hour; the caller frees *ret. Returns their number or -ENOMEM. */
long ki_removals_list(struct ki_removals *r, struct ki_removed **ret);

#endif
