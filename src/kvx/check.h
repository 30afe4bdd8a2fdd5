// SPDX-License-Identifier: Apache-2.0
/**
 * check.h: check the arrays of a HOST plan before the first byte moves.
 *
 * OUT_OF_RANGE: a slot or block id out of bounds, or a table that doesn't cover a sequence's
 * length. INVALID_ARGUMENT: negative lengths, an indptr that isn't a prefix sum over all indices.
 */
#ifndef KVX_CHECK_H
#define KVX_CHECK_H

#include "kvx/plan.h"

/**
 * Check the arrays. @drop: only INVALID_ARGUMENT is checked, since out-of-range entries are dropped
 * later.
 */
kvx_status_t kvx_check_arrays(const struct kvx_plan *plan, int drop);

#endif
