// SPDX-License-Identifier: Apache-2.0
/**
 * Sets of block numbers: targets of a copy, each of which may be named once. A set is a table that
 * the caller allocates; open addressing. UINT32_MAX is no block and never a member.
 */
#ifndef KVBM_BM_IDS_H
#define KVBM_BM_IDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Return the length of a table for @n numbers: a power of two. */
size_t kvbm_ids_slots(size_t n);
/** Empty a table of kvbm_ids_slots numbers. */
void kvbm_ids_clear(uint32_t *table, size_t slots);
/** Add a number. Returns false when the set has it already. */
bool kvbm_ids_add(uint32_t *table, size_t slots, uint32_t id);
bool kvbm_ids_has(const uint32_t *table, size_t slots, uint32_t id);
/** Conditions on block numbers, of kvbm_ids_check. */
enum {
    KVBM_IDS_ONCE = 1, /* targets: each is named once */
    KVBM_IDS_GAPS = 2  /* UINT32_MAX leaves a block out */
};

/**
 * Check the blocks of a call: each is below @num_blocks, and as @flags say. Returns 0; -ERANGE;
 * -EINVAL (named twice); -ENOMEM. The log says which block is refused.
 */
int kvbm_ids_check(const uint32_t *ids, size_t n, uint64_t num_blocks, unsigned flags);

#endif
