// SPDX-License-Identifier: Apache-2.0
/**
 * Sizes of the chunks in which connectors hold blocks below the device. An engine loads a chunk as a
 * whole, from a multiple of its size on: of the blocks found in such a tier, those of a chunk that
 * isn't complete don't count.
 *
 * Any thread. A table without chunks costs a lookup one load.
 */
#ifndef KV_INDEXER_MODEL_CHUNKS_H
#define KV_INDEXER_MODEL_CHUNKS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_index.h"

/** Blocks of a chunk in each tier of a holder; 0 or 1: single blocks. */
struct ki_chunk {
    struct kv_holder holder;
    uint32_t blocks[KV_N_TIERS];
};

struct ki_chunks {
    pthread_rwlock_t lock;
    struct ki_chunk *items; /* by holder */
    size_t capacity;
    _Atomic size_t n; /* changes under the lock */
};

void ki_chunks_init(struct ki_chunks *c);
void ki_chunks_fini(struct ki_chunks *c);

/** Set the sizes of a holder. Returns 0 or -ENOMEM. */
int ki_chunks_set(struct ki_chunks *c, struct kv_holder holder, const uint32_t blocks[KV_N_TIERS]);

/** Cut the matches of holders with chunks. */
void ki_chunks_cut(struct ki_chunks *c, struct kvi_matches *matches);

#endif
