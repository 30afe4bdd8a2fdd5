// SPDX-License-Identifier: Apache-2.0
/**
 * Positions of streams that no listener follows: of past registrations, and of workers in a peer's
 * dump. Bounded; at the bound the oldest one without blocks is forgotten. Caller-locked.
 */
#ifndef KV_INDEXER_REGISTRY_POSITIONS_H
#define KV_INDEXER_REGISTRY_POSITIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "indexer/registry/registry.h"
#include "indexer/stream/snapshot.h"

#define KI_MAX_POSITIONS 65536

struct ki_position {
    struct ki_mark mark;
    bool has_blocks; /* the index still has the stream's blocks up to here (from a dump) */
    uint64_t noted_ns;
    struct ki_snapshot *snapshot; /* the stream's state there, or NULL */
    struct ki_position *next;     /* next one in the bucket */
    TAILQ_ENTRY(ki_position) age;
};

TAILQ_HEAD(ki_positions_by_age, ki_position);

/** A hash table by worker, so that the ranks of one are together. Zero-initialise. */
struct ki_positions {
    struct ki_position **buckets;
    /* By has_blocks; oldest first; valid once there are buckets. */
    struct ki_positions_by_age with_blocks, without_blocks;
    _Atomic size_t n_with_blocks; /* may be read without the caller's lock */
    size_t n;
    uint64_t secret; /* secret, so that a peer can't choose workers that collide */
};

void ki_positions_fini(struct ki_positions *p);
/**
 * Note a position in place of the holder's old one. Returns false when out of memory, when the
 * worker has KI_MAX_RANKS already, or when all KI_MAX_POSITIONS have blocks. A lost position costs
 * a replay, unless the caller needs it to find blocks again.
 */
bool ki_positions_note(struct ki_positions *p, const struct ki_mark *mark, bool has_blocks);
/**
 * Keep the stream's state beside its position. Returns false without a position; @snapshot stays
 * the caller's then.
 */
bool ki_positions_keep(struct ki_positions *p, struct kv_holder holder,
                       struct ki_snapshot *snapshot);
/** Take the state out; the caller frees it. NULL: none. */
struct ki_snapshot *ki_positions_take_snapshot(struct ki_positions *p, struct kv_holder holder);
/** Take a position out. Returns false when there is none. */
bool ki_positions_take(struct ki_positions *p, struct kv_holder holder, struct ki_mark *ret,
                       bool *ret_has_blocks);
/** Find a holder's position. NULL: there is none. */
const struct ki_position *ki_positions_find(const struct ki_positions *p, struct kv_holder holder);
/** Walk the positions of a worker: start with NULL; NULL at the end. */
const struct ki_position *ki_positions_next(const struct ki_positions *p, uint64_t worker,
                                            const struct ki_position *after);
/** Note that the blocks of @worker (of one rank, when @rank isn't NULL) have left the index. */
void ki_positions_blocks_left(struct ki_positions *p, uint64_t worker, const uint32_t *rank);

#endif
