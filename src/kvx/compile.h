// SPDX-License-Identifier: Apache-2.0
/**
 * compile.h: compile descriptors into a plan.
 *
 * Each function validates one layer's call and fills a plan for it. None reads the contents of the
 * descriptors' arrays, which may be on a device. Returns OK, or the status for the caller.
 */
#ifndef KVX_COMPILE_H
#define KVX_COMPILE_H

#include <stdbool.h>

#include "kvx/plan.h"
#include "kvx_ext.h"

/** Copy the options and fill in defaults. Fields that a caller's shorter struct lacks are zero. */
kvx_status_t kvx_read_options(const kvx_options_t *options, kvx_options_t *ret);

kvx_status_t kvx_compile_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                               const kvx_options_t *options, struct kvx_plan *ret);

/** Compile a gather. @layer selects the scales of the options. */
kvx_status_t kvx_compile_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                const kvx_options_t *options, uint32_t layer, struct kvx_plan *ret);

kvx_status_t kvx_compile_copy(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                              const kvx_block_copy_t *copy, const kvx_options_t *options,
                              struct kvx_plan *ret);

/**
 * Add the one layer of @layer to @plan if the two differ only in base pointers (and the counter).
 * Returns false when they differ in more, or @plan is full; @plan is then unchanged. @layer isn't
 * valid any more: compile it again.
 */
bool kvx_plan_merge(struct kvx_plan *plan, struct kvx_plan *layer);

/** Return true when there is nothing to move. A gather always has rows. */
bool kvx_plan_is_empty(const struct kvx_plan *plan);

#endif
