// SPDX-License-Identifier: Apache-2.0
/* Several keys at once, so that their cache misses overlap. */
#ifndef KVBM_BM_LOOKUP_H
#define KVBM_BM_LOOKUP_H

#include "pool.h"

#define KVBM_LOOKUP 64 /* keys at a time */

/** Hash @n keys and fetch what a lookup of them will touch in the table and the entries. */
void kvbm_hash_keys(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                    uint32_t *tags);

/** ret[i]: entry of keys[i], 0 when there is none. */
void kvbm_find_entries(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                       uint32_t *ret);

/** ret[i]: slot of keys[i] in @pool, 0 when it isn't registered there; all of them fetched. */
void kvbm_find_slots(const struct kvbm_pool *pool, uint32_t group, const uint8_t *keys, size_t n,
                     uint32_t *ret);

#endif
