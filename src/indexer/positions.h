// SPDX-License-Identifier: Apache-2.0
/**
 * Positions of streams that no listener follows: of registrations that left, and of workers that a
 * peer's dump told about. Bounded; at the bound the one noted longest ago is forgotten.
 * Caller-locked.
 */
#ifndef KV_INDEXER_POSITIONS_H
#define KV_INDEXER_POSITIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "indexer/registry.h"

#define KI_MAX_POSITIONS 65536

struct ki_position {
    struct ki_watermark mark;
    bool has_blocks; /* the index still has what the stream brought up to here (from a dump) */
    uint64_t noted;  /* order of noting */
};

/** Zero-initialise. */
struct ki_positions {
    struct ki_position *items; /* sorted by worker, rank */
    size_t n, capacity;
    uint64_t clock;
};

void ki_positions_fini(struct ki_positions *p);
/** Replaces what was noted for that holder. Silently does nothing when out of memory: a position
 * lost costs a replay, not correctness. */
void ki_positions_note(struct ki_positions *p, const struct ki_watermark *mark, bool has_blocks);
/** Take a position out. False: none. */
bool ki_positions_take(struct ki_positions *p, struct kv_holder holder, struct ki_position *ret);
/** The blocks of @worker (of one rank, when @rank isn't NULL) have left the index. */
void ki_positions_blocks_left(struct ki_positions *p, uint64_t worker, const uint32_t *rank);

#endif
