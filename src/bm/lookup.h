// SPDX-License-Identifier: Apache-2.0
/* Several keys at once, so that their cache misses overlap. */
#ifndef KVBM_BM_LOOKUP_H
#define KVBM_BM_LOOKUP_H

#include "pool.h"

#define KVBM_LOOKUP 64 /* keys at a time */

/** Hash @n keys and fetch their places in the table. */
void kvbm_hash_keys(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                    uint32_t *tags);

/** Fetch the entries that there seem to be of hashed keys. */
void kvbm_fetch_entries(const struct kvbm_registry *r, const uint32_t *tags, size_t n);

/** ret[i]: entry of keys[i], 0 when there is none. */
void kvbm_find_entries(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                       uint32_t *ret);

/** ret[i]: slot of keys[i] in @pool, 0 when it isn't registered there; all of them fetched. */
void kvbm_find_slots(const struct kvbm_pool *pool, uint32_t group, const uint8_t *keys, size_t n,
                     uint32_t *ret);

#endif
