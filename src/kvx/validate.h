// SPDX-License-Identifier: Apache-2.0
/**
 * validate.h: check descriptors without reading the arrays that they point to.
 *
 * The statuses are those of the published implementation where it has one. All sizes are computed
 * in 64 bits with overflow checks; a tensor whose extent doesn't fit the address space is
 * malformed.
 */
#ifndef KVX_VALIDATE_H
#define KVX_VALIDATE_H

#include <stdbool.h>

#include "kvx_abi.h"
#include "kvx_ext.h"

/** The bytes [low, high) of an array or tensor; low == high when it has no element. */
struct kvx_hull {
    uintptr_t low, high;
};

/**
 * Return true when the two have a byte in common, or might: holes between strides count as
 * occupied.
 */
bool kvx_hulls_meet(const struct kvx_hull *a, const struct kvx_hull *b);

/**
 * Compute the hull of @count elements of @size bytes; INVALID_ARGUMENT when it leaves the address
 * space.
 */
kvx_status_t kvx_array_hull(const void *data, uint64_t count, uint32_t size, struct kvx_hull *ret);

/**
 * Check strides, alignment and extent of a tensor whose size, dtype, ndim and shape are valid.
 * @written: no zero stride may map two elements to one place.
 */
kvx_status_t kvx_check_extent(const kvx_tensor_desc_t *tensor, bool written, struct kvx_hull *ret);

/** Return 0 for HOST, 1 for DEVICE and UNIFIED, -1 for any other value. */
int kvx_memory_class(kvx_memory_type_t memory);

/** Check like kvx_validate_cache_desc, and compute the hulls of K and V. */
kvx_status_t kvx_check_cache(const kvx_cache_desc_t *cache, struct kvx_hull ret[2]);

/**
 * Check size, dtypes, heads and memory of an IO descriptor against its cache. The call checks
 * shapes.
 */
kvx_status_t kvx_check_io(const kvx_kv_io_desc_t *io, const kvx_cache_desc_t *cache);

/** Check that one IO tensor has exactly the @n dims of @shape. */
kvx_status_t kvx_check_io_tensor(const kvx_tensor_desc_t *tensor, uint32_t n, const int64_t *shape,
                                 bool written, struct kvx_hull *ret);

kvx_status_t kvx_check_slots(const kvx_slot_mapping_t *slots, uint32_t n_tokens);
kvx_status_t kvx_check_table(const kvx_block_table_t *table, const kvx_cache_desc_t *cache);
kvx_status_t kvx_check_lengths(const kvx_seq_lens_t *lengths, const kvx_block_table_t *table);

/** Check type, granularity and shape of a scale descriptor that has data. */
kvx_status_t kvx_check_scale(const kvx_scale_desc_t *scale, const kvx_cache_desc_t *cache);

/** Return the bytes of an index: 4 for S32, 8 for S64, 0 for any other type. */
uint32_t kvx_index_size(kvx_dtype_t dtype);

#endif
