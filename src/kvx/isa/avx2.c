// SPDX-License-Identifier: Apache-2.0
/* 8 elements at a time. */
#include "kvx/isa/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define SIMD __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) SIMD

enum { VECTOR = 32, STEP = 8 };
typedef __m256 floats;
typedef __m256i raw;

/* --------------------------------------------------------------------------------------------- */
/* Elements: to F32, and back to what is stored. NaNs become the canonical one. */

INLINE __m256 load_f32(const char *p)
{
    return _mm256_loadu_ps((const void *)p);
}

INLINE __m256 load_f16(const char *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}

INLINE __m256 load_bf16(const char *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));

    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* E4M3's bits are an F16 that is 2^8 too small; no subnormal F32 occurs on the way. */
INLINE __m256 load_e4m3(const char *p)
{
    __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)p));
    __m128i magnitude = _mm_and_si128(b, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_sub_epi16(b, magnitude), 8);
    __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);

    half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7fff)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0F));
}

INLINE __m256 load_e5m2(const char *p)
{
    __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)p));

    return _mm256_cvtph_ps(_mm_slli_epi16(b, 8));
}

/* Set all bits of each lane where @v is a NaN. */
INLINE __m256i nans(__m256 v)
{
    return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

/* Narrow 8 values below 2^16 from 32-bit lanes to 16-bit ones. */
INLINE __m128i narrow(__m256i v)
{
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

INLINE __m256i pack_f32(__m256 v)
{
    return _mm256_blendv_epi8(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff), nans(v));
}

INLINE __m128i pack_f16(__m256 v)
{
    __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);

    return narrow(
        _mm256_blendv_epi8(_mm256_cvtepu16_epi32(half), _mm256_set1_epi32(0x7fff), nans(v)));
}

INLINE __m128i pack_bf16(__m256 v)
{
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));

    return narrow(
        _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fff), nans(v)));
}

/* Pack into the low half. */
INLINE __m128i pack_fp8(__m256 v, const struct kvx_fp8 c)
{
    __m256i bits = _mm256_castps_si256(v);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256 magic = _mm256_set1_ps(c.magic);
    __m256i small, odd, normal, tiny;
    __m128i words;

    size = _mm256_min_epi32(size, _mm256_set1_epi32(c.max));
    small = _mm256_cmpgt_epi32(_mm256_set1_epi32(c.smallest), size);
    odd = _mm256_and_si256(_mm256_srli_epi32(size, c.shift), _mm256_set1_epi32(1));
    normal = _mm256_add_epi32(size, _mm256_set1_epi32(c.half - c.bias));
    normal = _mm256_srli_epi32(_mm256_add_epi32(normal, odd), c.shift);
    tiny = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(size), magic));
    tiny = _mm256_sub_epi32(tiny, _mm256_castps_si256(magic));
    normal = _mm256_or_si256(_mm256_blendv_epi8(normal, tiny, small), sign);
    normal = _mm256_blendv_epi8(normal, _mm256_set1_epi32(0x7f), nans(v));
    words = narrow(normal);
    return _mm_packus_epi16(words, words);
}

INLINE __m128i pack_e4m3(__m256 v)
{
    return pack_fp8(v, kvx_fp8_e4m3);
}

INLINE __m128i pack_e5m2(__m256 v)
{
    return pack_fp8(v, kvx_fp8_e5m2);
}

/* --------------------------------------------------------------------------------------------- */
/* Registers: half a line of the target */

INLINE __m256 all(float x)
{
    return _mm256_set1_ps(x);
}

INLINE __m256i load(const char *p)
{
    return _mm256_loadu_si256((const void *)p);
}

INLINE void store(char *p, __m256i v, bool past_cache)
{
    if (past_cache)
        _mm256_stream_si256((void *)p, v);
    else
        _mm256_storeu_si256((void *)p, v);
}

INLINE __m256i join_2(__m128i a, __m128i b)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

INLINE __m256i join_4(__m128i a, __m128i b, __m128i c, __m128i d)
{
    return join_2(_mm_unpacklo_epi64(a, b), _mm_unpacklo_epi64(c, d));
}

#define STORE_4(p, v) _mm256_storeu_si256((void *)(p), v)
#define STORE_2(p, v) _mm_storeu_si128((void *)(p), v)
#define STORE_1(p, v) _mm_storel_epi64((void *)(p), v)

/* --------------------------------------------------------------------------------------------- */
/* Transposition of 16-byte units: source rows are contiguous along c, target rows along r. */

INLINE __m256i pair(const char *low, const char *high)
{
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const void *)low));

    return _mm256_inserti128_si256(v, _mm_loadu_si128((const void *)high), 1);
}

/* Collect 4 rows of one unit: a whole line of the target. */
INLINE void collect_4(char *dst, const char *src, int64_t src_row, bool past_cache)
{
    store(dst, pair(src, src + src_row), past_cache);
    store(dst + 32, pair(src + 2 * src_row, src + 3 * src_row), past_cache);
}

static SIMD void transpose(const struct kvx_units *u, int64_t dst_row, int64_t src_row,
                           uint32_t n_r, uint32_t n_c)
{
    bool past_cache = u->stream && ((uintptr_t)u->dst | (uint64_t)dst_row) % 64 == 0;
    uint32_t r4 = n_r & ~3U;

    for (uint32_t c = 0; c < n_c; c++) {
        char *dst = u->dst + c * dst_row;
        const char *src = u->src + c * 16;

        for (uint32_t r = 0; r < r4; r += 4)
            collect_4(dst + r * 16, src + r * src_row, src_row, past_cache);
        for (uint32_t r = r4; r < n_r; r++)
            memcpy(dst + r * 16, src + r * src_row, 16);
    }
}

#include "kvx/isa/simd_x86.h"

/* Every machine with AVX2 has F16C, but a hypervisor may hide either. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool kvx_isa_avx2(struct kvx_isa *isa)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !has_f16c())
        return false;
    isa->name = "avx2";
    fill(isa);
    return true;
}

#else

bool kvx_isa_avx2(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}

#endif
