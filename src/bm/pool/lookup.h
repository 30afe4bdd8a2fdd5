// SPDX-License-Identifier: Apache-2.0
/* Lookups of several keys at once, so that their cache misses overlap. */
#ifndef KVBM_BM_POOL_LOOKUP_H
#define KVBM_BM_POOL_LOOKUP_H

#include "bm/pool/pool.h"

#define KVBM_LOOKUP 64 /* keys at a time */

/** Hash @n keys and prefetch their places in the table. */
void kvbm_hash_keys(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                    uint32_t *tags);

/** Prefetch the entries that hashed keys most likely have. */
void kvbm_fetch_entries(const struct kvbm_registry *r, const uint32_t *tags, size_t n);

/** Find entries: ret[i] is the entry of keys[i], 0 when there is none. */
void kvbm_find_entries(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                       uint32_t *ret);

/**
 * Find slots: ret[i] is the slot of keys[i] in @pool, 0 when the key isn't registered there. The
 * slots are prefetched.
 */
void kvbm_find_slots(const struct kvbm_pool *pool, uint32_t group, const uint8_t *keys, size_t n,
                     uint32_t *ret);

#endif
