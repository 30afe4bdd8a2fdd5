// SPDX-License-Identifier: Apache-2.0
/** XXH3, inlined from the packaged header: short block hashes must not cost a call. */
#ifndef KV_BASE_XXH_H
#define KV_BASE_XXH_H

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
/*
 * Read memory by memcpy. With gcc, xxhash reads through 32-bit and 64-bit pointers, which the
 * aliasing rules forbid for keys that are stored as another type: gcc 14 saw an initialised
 * uint64_t as uninitialised.
 */
#ifndef XXH_FORCE_MEMORY_ACCESS
#define XXH_FORCE_MEMORY_ACCESS 0
#endif
#include <stddef.h>
#include <stdint.h>
#include <xxhash.h>

static inline uint64_t kv_xxh64(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

#endif
