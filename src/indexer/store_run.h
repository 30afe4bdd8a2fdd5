// SPDX-License-Identifier: Apache-2.0
/**
 * Merge consecutive stores of one chain into one store.
 *
 * An engine that decodes announces its blocks one by one: each event stores one block below the one
 * before. Such a store costs the index three times a block of a long store, most of it to find the
 * place again. Events that continue the last store therefore wait here, as long as no other event
 * comes:
 *
 *     store a, b      at once: the run begins behind b
 *     store c         continues b: waits
 *     store d, e      continues c: waits
 *     remove x        first the run is flushed (one store: c, d, e below b), then x is removed
 *
 * Bounded by the constants below. Thread-confined or caller-locked.
 */
#ifndef KV_INDEXER_STORE_RUN_H
#define KV_INDEXER_STORE_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_event.h"
#include "kv_index.h"

#define KI_RUN_EVENTS 64
#define KI_RUN_BLOCKS 512u

/** A run of stores. Zero-initialise. */
struct ki_store_run {
    bool open;               /* the next store may continue the last one */
    struct kv_holder holder; /* holder of the run */
    uint64_t last;           /* hash of the block to continue */
    uint64_t parent;         /* parent of the first waiting block */
    /* Waiting blocks; room for KI_RUN_BLOCKS, NULL before the first one. */
    struct kv_block *blocks;
    size_t n_blocks, n_events;
    size_t ends[KI_RUN_EVENTS]; /* end of each waiting event, in blocks */
};

void ki_store_run_fini(struct ki_store_run *run);

/** Begin a run behind @last, the block that @holder stored last (parked or not). No event waits. */
void ki_store_run_begin(struct ki_store_run *run, struct kv_holder holder, uint64_t last);

/** Let the store @op wait. Returns false when it doesn't continue the run, or there is no room. */
bool ki_store_run_append(struct ki_store_run *run, struct kv_holder holder,
                         const struct kve_op *op);

/** Return the first block of event @i; *@ret_n is their number. */
static inline size_t ki_store_run_event(const struct ki_store_run *run, size_t i, size_t *ret_n)
{
    size_t first = i ? run->ends[i - 1] : 0;

    *ret_n = run->ends[i] - first;
    return first;
}

#endif
