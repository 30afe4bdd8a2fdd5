// SPDX-License-Identifier: Apache-2.0
/** XXH3-128 with the machine's best instructions. Callable from any thread. */
#ifndef KV_BASE_HASH_H
#define KV_BASE_HASH_H

#include "base/core/xxh.h"

/** Hash @data. @ret is in canonical (big-endian) form. */
void kv_hash(const void *data, size_t len, uint8_t ret[16]);
/**
 * Hash in pieces: XXH3_INITSTATE, XXH3_128bits_reset, kv_hash_update for each piece, then
 * kv_hash_done.
 */
void kv_hash_update(XXH3_state_t *state, const void *data, size_t len);
void kv_hash_done(const XXH3_state_t *state, uint8_t ret[16]);
/**
 * Return the number of bytes to copy before hashing them: half of the second-level cache, 128 to
 * 512 KiB. Longer pieces take fewer system calls; the kernel's pages for them are larger, too.
 */
size_t kv_hash_piece(void);

#endif
