// SPDX-License-Identifier: Apache-2.0
/*
 * The registry's table: entries by the tags of their keys, in buckets of eight cells, each a cache
 * line.
 *
 *   ┌───────┬─ ─ ─┬───────┬─────────┬─ ─ ─┬─────────┐
 *   │ tag 0 │  …  │ tag 7 │ entry 0 │  …  │ entry 7 │    entry 0: the cell is empty
 *   └───────┴─ ─ ─┴───────┴─────────┴─ ─ ─┴─────────┘
 *
 * The upper bits of a tag say which bucket is its home. Who finds that full goes to the next one,
 * and around the end; so a search goes on from a full bucket and ends at one that isn't. At half
 * load that is the first one, most often, and no branch depends on where in it a key lies.
 */
#ifndef KVBM_BM_TABLE_H
#define KVBM_BM_TABLE_H

#include <stdint.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define KVBM_BUCKET 8
#define KVBM_BUCKET_BITS 3

struct kvbm_bucket {
    _Alignas(64) uint32_t tag[KVBM_BUCKET];
    uint32_t entry[KVBM_BUCKET];
};
_Static_assert(sizeof(struct kvbm_bucket) == 64, "a cache line");

/** Bit i: words[i] is @value. @words: of a bucket. */
static inline uint32_t kvbm_bucket_match(const uint32_t words[KVBM_BUCKET], uint32_t value)
{
#ifdef __SSE2__
    const __m128i *at = (const __m128i *)(const void *)words;
    __m128i same = _mm_set1_epi32((int)value);
    __m128i low = _mm_cmpeq_epi32(_mm_load_si128(at), same);
    __m128i high = _mm_cmpeq_epi32(_mm_load_si128(at + 1), same);

    return (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(low)) |
           (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(high)) << 4;
#else
    uint32_t hits = 0;

    for (uint32_t i = 0; i < KVBM_BUCKET; i++)
        hits |= (uint32_t)(words[i] == value) << i;
    return hits;
#endif
}

/** Bit i: cell i is empty. None: who looks for what isn't there goes on to the next bucket. */
static inline uint32_t kvbm_bucket_empty(const struct kvbm_bucket *bucket)
{
    return kvbm_bucket_match(bucket->entry, 0);
}

#endif
