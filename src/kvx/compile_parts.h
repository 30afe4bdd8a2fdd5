// SPDX-License-Identifier: Apache-2.0
/** Parts of a plan that compile_write.c, compile_gather.c and compile_copy.c share. */
#ifndef KVX_COMPILE_PARTS_H
#define KVX_COMPILE_PARTS_H

#include "kvx/plan.h"
#include "kvx/validate.h"
#include "kvx_ext.h"

/** Return from a function that checks when @expression isn't OK. */
#define TRY(expression)                         \
    do {                                        \
        kvx_status_t try_status = (expression); \
        if (try_status != KVX_STATUS_OK)        \
            return try_status;                  \
    } while (0)

/**
 * Return the byte stride of dim @i. A stride that no access uses counts as 0 and can't reduce the
 * alignment. So does every stride of a tensor without tokens, which no function has checked.
 */
int64_t kvx_step(const kvx_tensor_desc_t *t, uint32_t i);

/** Map a paged tensor of a cache. */
struct kvx_map kvx_cache_map(const kvx_cache_desc_t *cache, const kvx_tensor_desc_t *t);

/** Map a write's input, or a gather's output of any rank; rows [n_sequences, n_beams, n_positions]. */
struct kvx_map kvx_io_map(const kvx_tensor_desc_t *t, const struct kvx_plan *p);

/** Fill in a plan what all operations have. */
void kvx_plan_start(struct kvx_plan *p, enum kvx_op op, const kvx_cache_desc_t *cache,
                    const kvx_options_t *options);

/** Map the scale of one cache side, from a descriptor, a plain pointer, or neither. */
kvx_status_t kvx_scale_map(const kvx_scale_desc_t *scale, const void *plain,
                           const kvx_cache_desc_t *cache, struct kvx_scale_map *map,
                           const char **base);

/**
 * Check that K and V aren't written to one address, unless both are read from one (a cache with one
 * tensor). Ranges may meet: engines weave K and V into each other.
 */
kvx_status_t kvx_check_two(const struct kvx_plan *plan);

/** Check that the memory read and the memory written have no byte in common. */
kvx_status_t kvx_check_apart(const struct kvx_hull *read, size_t n,
                             const struct kvx_hull written[2]);

#endif
