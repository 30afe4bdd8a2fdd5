// SPDX-License-Identifier: Apache-2.0
/**
 * Main blocks that a batch stores, by rank and hash. An engine tells one step of all its cache groups
 * in one batch, in the order of the groups: a group's event may name a block before the main group's
 * event has brought it to the index.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_SMALL_MAIN_NAMES_H
#define KV_INDEXER_VIEW_SMALL_MAIN_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_event.h"

/** Zeroed: of no batch. */
struct ki_main_names {
    const struct kve_batch *batch; /* valid while it is applied */
    uint64_t *items;               /* ordered; made at the first question about the batch */
    size_t n, capacity;
    bool made;
};

/** Begin with @batch; NULL: it ends, and its pointers with it. */
void ki_main_names_begin(struct ki_main_names *names, const struct kve_batch *batch);
void ki_main_names_fini(struct ki_main_names *names);

/** Return true when the batch stores the block @hash of @rank's main cache. False for want of memory. */
bool ki_main_names_has(struct ki_main_names *names, uint32_t rank, uint64_t hash);

#endif
