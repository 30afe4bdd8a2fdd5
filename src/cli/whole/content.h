// SPDX-License-Identifier: Apache-2.0
/**
 * The bytes that a block must contain: a function of the block's key, the layer, K or V, and the
 * token's place in the block. A row, which is one token's K or V in one layer, follows from a seed;
 * rows are made and compared at the speed of memory, and no copy of what was written is kept.
 */
#ifndef KV_CLI_WHOLE_CONTENT_H
#define KV_CLI_WHOLE_CONTENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Return the seed of a row. */
uint64_t kc_content_seed(uint64_t key, uint32_t layer, uint32_t part, uint32_t token);

/** Write a row of @len bytes, a multiple of 32, to @row, which may have any alignment. */
void kc_content_fill(void *row, size_t len, uint64_t seed);

/** Compare a row with what kc_content_fill writes. Returns true when all bytes are equal. */
bool kc_content_check(const void *row, size_t len, uint64_t seed);

#endif
