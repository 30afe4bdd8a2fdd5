// SPDX-License-Identifier: Apache-2.0
/*
 * The registry's table: entries by the tags of their keys, in buckets of eight cells, each a cache
 * line.
 *
 *   ┌───────┬─ ─ ─┬───────┬─────────┬─ ─ ─┬─────────┐
 *   │ tag 0 │  …  │ tag 7 │ entry 0 │  …  │ entry 7 │    entry 0: the cell is empty
 *   └───────┴─ ─ ─┴───────┴─────────┴─ ─ ─┴─────────┘
 *
 * The upper bits of a tag are the number of its home bucket. An entry whose home is full goes to
 * the next bucket, and around the end. So a search continues behind a full bucket and ends at one
 * that isn't full. At half load that is mostly the first one, and no branch depends on the cell of
 * a key.
 */
#ifndef KVBM_BM_REGISTRY_TABLE_H
#define KVBM_BM_REGISTRY_TABLE_H

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

/** Return bit i set where words[i] is @value, for the words of a bucket. */
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

/**
 * Return bit i set where cell i is empty. 0: a search for an absent key continues in the next
 * bucket.
 */
static inline uint32_t kvbm_bucket_empty(const struct kvbm_bucket *bucket)
{
    return kvbm_bucket_match(bucket->entry, 0);
}

#endif
