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

/*
 * Usual lengths: a few instructions each, but compilers judge XXH3 by its whole size and would call
 * it. In `flatten` they inline everything, then drop the branches of other lengths.
 */
#define KV_XXH64_OF(len)                                                                \
    __attribute__((flatten)) static inline uint64_t kv_xxh64_of_##len(const void *data, \
                                                                      uint64_t seed)    \
    {                                                                                   \
        return XXH3_64bits_withSeed(data, len, seed);                                   \
    }
KV_XXH64_OF(8)
KV_XXH64_OF(16)
KV_XXH64_OF(64)
KV_XXH64_OF(128)
#undef KV_XXH64_OF

__attribute__((always_inline)) static inline uint64_t kv_xxh64(const void *data, size_t len,
                                                               uint64_t seed)
{
    if (__builtin_constant_p(len) && len == 8)
        return kv_xxh64_of_8(data, seed);
    if (__builtin_constant_p(len) && len == 16)
        return kv_xxh64_of_16(data, seed);
    if (__builtin_constant_p(len) && len == 64)
        return kv_xxh64_of_64(data, seed);
    if (__builtin_constant_p(len) && len == 128)
        return kv_xxh64_of_128(data, seed);
    return XXH3_64bits_withSeed(data, len, seed);
}

#endif
