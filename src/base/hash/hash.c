// SPDX-License-Identifier: Apache-2.0
#include "base/hash/hash.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/core/error.h"

#if defined(__x86_64__) && defined(__GNUC__)
void kv_hash_update_avx2(void *state, const void *data, size_t len); /* hash_avx2.c */
void kv_hash_avx2(const void *data, size_t len, void *ret);
#define HAVE_AVX2 __builtin_cpu_supports("avx2")
#else
#define HAVE_AVX2 false
#define kv_hash_update_avx2(state, data, len) ((void)0)
#define kv_hash_avx2(data, len, ret) ((void)0)
#endif

enum { PIECE_MIN = 128 << 10, PIECE_MAX = 512 << 10, PAGE = 4096 };

static void canonical(uint8_t ret[16], XXH128_hash_t hash)
{
    XXH128_canonical_t bytes;

    XXH128_canonicalFromHash(&bytes, hash);
    memcpy(ret, bytes.digest, 16);
}

void kv_hash(const void *data, size_t len, uint8_t ret[16])
{
    XXH128_hash_t hash = {0};

    if (HAVE_AVX2)
        kv_hash_avx2(data, len, &hash);
    else
        hash = XXH3_128bits(data, len);
    canonical(ret, hash);
}

size_t kv_hash_piece(void)
{
    static _Atomic size_t known; /* 0: not asked yet, as that takes microseconds */
    size_t piece = atomic_load_explicit(&known, memory_order_relaxed);
    long cache = -1;

    if (piece)
        return piece;
#ifdef _SC_LEVEL2_CACHE_SIZE
    cache = sysconf(_SC_LEVEL2_CACHE_SIZE); /* 0 or -1: unknown */
#endif
    piece = cache > 0 ? (size_t)cache / 2 : PIECE_MIN;
    piece = KV_MIN(KV_MAX(piece, (size_t)PIECE_MIN), (size_t)PIECE_MAX) / PAGE * PAGE;
    atomic_store_explicit(&known, piece, memory_order_relaxed);
    return piece;
}

/* The state has the same layout for all instruction sets. */
void kv_hash_update(XXH3_state_t *state, const void *data, size_t len)
{
    if (HAVE_AVX2)
        kv_hash_update_avx2(state, data, len);
    else
        XXH3_128bits_update(state, data, len);
}

void kv_hash_done(const XXH3_state_t *state, uint8_t ret[16])
{
    canonical(ret, XXH3_128bits_digest(state));
}
