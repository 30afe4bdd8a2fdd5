// SPDX-License-Identifier: Apache-2.0
/** XXH3-128 of the room's values, with the machine's best instructions. Any thread. */
#ifndef KV_BASE_HASH_H
#define KV_BASE_HASH_H

#include "base/xxh.h"

/** Of @data, canonical (big-endian). */
void kv_hash(const void *data, size_t len, uint8_t ret[16]);
/** The same by and by: after XXH3_INITSTATE and XXH3_128bits_reset; then kv_hash_done. */
void kv_hash_update(XXH3_state_t *state, const void *data, size_t len);
void kv_hash_done(const XXH3_state_t *state, uint8_t ret[16]);

#endif
