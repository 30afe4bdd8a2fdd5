// SPDX-License-Identifier: Apache-2.0
/** Sums over registered workers and over models, for people: the overview and its history. */
#ifndef KV_INDEXER_FLEET_H
#define KV_INDEXER_FLEET_H

#include <stdint.h>

#include "indexer/registry/registry.h"

struct ki_fleet {
    uint64_t workers; /* instances */
    uint64_t ranks;   /* their event streams */
    uint64_t by_status[KI_WITHDRAWN + 1];
    uint64_t partial;     /* ranks with a partial view */
    uint64_t unconnected; /* ranks without a connection */
    uint64_t with_reason[KI_N_REASONS];
};

/** Return true when a rank's stream isn't active, or its view is partial. */
bool ki_needs_attention(const struct ki_worker_info *info);

/**
 * Compare two instances as people sort them: numbers first, then names, whose numbers count as such
 * (pod-9 before pod-10). Returns <0, 0, >0.
 */
int ki_compare_instances(const struct ki_worker_info *a, const struct ki_worker_info *b);

/** Sum up @n registrations, ordered by instance. */
void ki_fleet_sum(const struct ki_worker_info *infos, long n, struct ki_fleet *ret);

/** Sizes of all models' indexes together. */
struct ki_index_sums {
    uint64_t models, blocks, holder_blocks, bytes;
    uint64_t tier_blocks[KV_N_TIERS];
};

/** Read the sums. Zeros when out of memory. */
void ki_index_sum(struct ki_registry *registry, struct ki_index_sums *ret);

#endif
