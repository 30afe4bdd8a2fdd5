// SPDX-License-Identifier: Apache-2.0
/**
 * XXH3-128 with AVX2, so that hashing costs no more than reading the bytes. The packaged header
 * chooses instructions at compile time, and packages are built for machines without AVX2. So this
 * file compiles the header a second time, and hash.c chooses at run time.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#include <immintrin.h>
#define XXH_VECTOR 2 /* XXH_AVX2 */
#include "base/core/xxh.h"

void kv_hash_update_avx2(void *state, const void *data, size_t len);
void kv_hash_avx2(const void *data, size_t len, void *ret);

void kv_hash_update_avx2(void *state, const void *data, size_t len)
{
    XXH3_128bits_update((XXH3_state_t *)state, data, len);
}

void kv_hash_avx2(const void *data, size_t len, void *ret)
{
    *(XXH128_hash_t *)ret = XXH3_128bits(data, len);
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
