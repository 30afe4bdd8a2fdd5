// SPDX-License-Identifier: Apache-2.0
/**
 * Reasons for which answers about a rank may be wrong until the stream proves the contrary: a set of
 * bits for each rank and owner. Their meaning is the caller's.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_DOUBTS_H
#define KV_INDEXER_VIEW_DOUBTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ki_doubt {
    uint64_t owner; /* 0: the engine itself */
    uint32_t rank, bits;
};

/** Doubts of a stream. A zeroed struct has none. */
struct ki_doubts {
    struct ki_doubt *items; /* ordered by rank and owner; each has a bit */
    size_t n, capacity;
    uint32_t lost; /* bits of unknown ranks, or without memory: until ki_doubts_clear */
};

/** Most entries. The doubts of further ranks and owners last until ki_doubts_clear. */
#define KI_MAX_DOUBTS 4096

/** Forget all doubts, and free the memory. */
void ki_doubts_clear(struct ki_doubts *d);
/** Add bits to those of a rank and owner. */
void ki_doubts_add(struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits);
/** Take bits from those of a rank and owner. */
void ki_doubts_end(struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits);

/** Take bits from those of all owners of a rank. */
void ki_doubts_end_rank(struct ki_doubts *d, uint32_t rank, uint32_t bits);

/** Return those of the bits that are set for a rank and owner. */
uint32_t ki_doubts_of(const struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits);

/** Return true when a rank has any of the bits. */
bool ki_doubts_has(const struct ki_doubts *d, uint32_t bits);

/** Return the bits that any rank has. */
uint32_t ki_doubts_all(const struct ki_doubts *d);

/** Return true when there is any doubt. */
static inline bool ki_doubts_any(const struct ki_doubts *d)
{
    return d->n || d->lost;
}

#endif
