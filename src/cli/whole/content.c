// SPDX-License-Identifier: Apache-2.0
/*
 * Lane i of step k of a row has the number
 *
 *     x = low(seed) + (8 * k + i) * ODD        word = (x ^ x >> 15) + high(seed), bits 14 and 30 zero
 *
 * Additions, shifts and logic only, so that the compiler's vectors of 32 bytes run on every machine.
 * Bit 14 of each half word is the highest of a BF16's or F16's exponent: without it no value is
 * infinite or NaN, whatever converts it.
 */
#include "cli/whole/content.h"

#include <string.h>

#include "cli/replay/random.h"

#define ODD UINT32_C(0x9e3779b1)
#define FINITE UINT32_C(0xbfffbfff)
#define LANES 8u

typedef uint32_t lanes __attribute__((vector_size(LANES * sizeof(uint32_t))));

uint64_t kc_content_seed(uint64_t key, uint32_t layer, uint32_t part, uint32_t token)
{
    return kc_mix(key + KC_GOLDEN * ((uint64_t)layer << 32 | part << 16 | token));
}

#define FIRST(seed)                                                                         \
    ((lanes){0, ODD, ODD * 2, ODD * 3, ODD * 4, ODD * 5, ODD * 6, (uint32_t)(ODD * 7ull)} + \
     (uint32_t)(seed))
#define WORD(x, seed) ((((x) ^ ((x) >> 15)) + (uint32_t)((seed) >> 32)) & FINITE)

/* Inlined into a function for each instruction set. */
#define INLINE static inline __attribute__((always_inline))

INLINE void fill(char *to, size_t len, uint64_t seed)
{
    lanes x = FIRST(seed);

    for (size_t at = 0; at + sizeof(lanes) <= len; at += sizeof(lanes)) {
        lanes word = WORD(x, seed);

        memcpy(to + at, &word, sizeof(word));
        x += ODD * LANES;
    }
}

INLINE bool check(const char *from, size_t len, uint64_t seed)
{
    lanes x = FIRST(seed), wrong = {0};
    uint32_t any = 0;

    for (size_t at = 0; at + sizeof(lanes) <= len; at += sizeof(lanes)) {
        lanes word;

        memcpy(&word, from + at, sizeof(word));
        wrong |= word ^ WORD(x, seed);
        x += ODD * LANES;
    }
    for (unsigned i = 0; i < LANES; i++)
        any |= wrong[i];
    return any == 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void fill_avx2(char *to, size_t len, uint64_t seed)
{
    fill(to, len, seed);
}

__attribute__((target("avx2"))) static bool check_avx2(const char *from, size_t len, uint64_t seed)
{
    return check(from, len, seed);
}
#define HAS_AVX2() __builtin_cpu_supports("avx2")
#else
#define HAS_AVX2() false
#define fill_avx2 fill
#define check_avx2 check
#endif

void kc_content_fill(void *row, size_t len, uint64_t seed)
{
    if (HAS_AVX2())
        fill_avx2(row, len, seed);
    else
        fill(row, len, seed);
}

bool kc_content_check(const void *row, size_t len, uint64_t seed)
{
    return HAS_AVX2() ? check_avx2(row, len, seed) : check(row, len, seed);
}
