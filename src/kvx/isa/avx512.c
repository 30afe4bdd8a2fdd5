// SPDX-License-Identifier: Apache-2.0
/* 16 elements at a time. */
#include "kvx/isa/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,avx2")))
#define INLINE static inline __attribute__((always_inline)) SIMD

enum { VECTOR = 64, STEP = 16 };
typedef __m512 floats;
typedef __m512i raw;

/* --------------------------------------------------------------------------------------------- */
/* Elements: to F32, and back to what is stored. NaNs become the canonical one. */

INLINE __m512 load_f32(const char *p)
{
    return _mm512_loadu_ps(p);
}

INLINE __m512 load_f16(const char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}

INLINE __m512 load_bf16(const char *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));

    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* E4M3's bits are an F16 that is 2^8 too small; no subnormal F32 occurs on the way. */
INLINE __m512 load_e4m3(const char *p)
{
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));
    __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(b, magnitude), 8);
    __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);

    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7fff));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
}

INLINE __m512 load_e5m2(const char *p)
{
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));

    return _mm512_cvtph_ps(_mm256_slli_epi16(b, 8));
}

INLINE __mmask16 nans(__m512 v)
{
    return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
}

INLINE __m512i pack_f32(__m512 v)
{
    return _mm512_mask_mov_epi32(_mm512_castps_si512(v), nans(v), _mm512_set1_epi32(0x7fffffff));
}

INLINE __m256i pack_f16(__m512 v)
{
    __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);

    return _mm256_mask_mov_epi16(half, nans(v), _mm256_set1_epi16(0x7fff));
}

INLINE __m256i pack_bf16(__m512 v)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m256i brain = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));

    return _mm256_mask_mov_epi16(brain, nans(v), _mm256_set1_epi16(0x7fff));
}

INLINE __m128i pack_fp8(__m512 v, const struct kvx_fp8 c)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i magic = _mm512_castps_si512(_mm512_set1_ps(c.magic)), odd, normal, tiny;
    __mmask16 small;

    size = _mm512_min_epu32(size, _mm512_set1_epi32((int)c.max));
    small = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32((int)c.smallest));
    odd = _mm512_and_si512(_mm512_srli_epi32(size, c.shift), _mm512_set1_epi32(1));
    normal = _mm512_add_epi32(size, _mm512_set1_epi32((int)(c.half - c.bias)));
    normal = _mm512_srli_epi32(_mm512_add_epi32(normal, odd), c.shift);
    tiny = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(c.magic)));
    tiny = _mm512_sub_epi32(tiny, magic);
    normal = _mm512_or_si512(_mm512_mask_mov_epi32(normal, small, tiny), sign);
    normal = _mm512_mask_mov_epi32(normal, nans(v), _mm512_set1_epi32(0x7f));
    return _mm512_cvtepi32_epi8(normal);
}

INLINE __m128i pack_e4m3(__m512 v)
{
    return pack_fp8(v, kvx_fp8_e4m3);
}

INLINE __m128i pack_e5m2(__m512 v)
{
    return pack_fp8(v, kvx_fp8_e5m2);
}

/* --------------------------------------------------------------------------------------------- */
/* Registers: a line of the target */

INLINE __m512 all(float x)
{
    return _mm512_set1_ps(x);
}

INLINE __m512i load(const char *p)
{
    return _mm512_loadu_si512(p);
}

INLINE void store(char *p, __m512i v, bool past_cache)
{
    if (past_cache)
        _mm512_stream_si512((void *)p, v);
    else
        _mm512_storeu_si512(p, v);
}

INLINE __m512i join_2(__m256i a, __m256i b)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

INLINE __m512i join_4(__m128i a, __m128i b, __m128i c, __m128i d)
{
    return join_2(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1),
                  _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1));
}

#define STORE_4(p, v) _mm512_storeu_si512(p, v)
#define STORE_2(p, v) _mm256_storeu_si256((void *)(p), v)
#define STORE_1(p, v) _mm_storeu_si128((void *)(p), v)

/* --------------------------------------------------------------------------------------------- */
/* Transposition of 16-byte units: source rows are contiguous along c, target rows along r. */

/* Transpose 4 rows of 4 units: whole lines in, whole lines out. */
INLINE void transpose_4x4(char *dst, int64_t dst_row, const char *src, int64_t src_row,
                          bool past_cache)
{
    __m512i a = load(src), b = load(src + src_row);
    __m512i c = load(src + 2 * src_row), d = load(src + 3 * src_row);
    __m512i ab01 = _mm512_shuffle_i64x2(a, b, 0x44), ab23 = _mm512_shuffle_i64x2(a, b, 0xee);
    __m512i cd01 = _mm512_shuffle_i64x2(c, d, 0x44), cd23 = _mm512_shuffle_i64x2(c, d, 0xee);

    store(dst, _mm512_shuffle_i64x2(ab01, cd01, 0x88), past_cache);
    store(dst + dst_row, _mm512_shuffle_i64x2(ab01, cd01, 0xdd), past_cache);
    store(dst + 2 * dst_row, _mm512_shuffle_i64x2(ab23, cd23, 0x88), past_cache);
    store(dst + 3 * dst_row, _mm512_shuffle_i64x2(ab23, cd23, 0xdd), past_cache);
}

INLINE void move_16(char *dst, const char *src)
{
    _mm_storeu_si128((void *)dst, _mm_loadu_si128((const void *)src));
}

static SIMD void transpose(const struct kvx_units *u, int64_t dst_row, int64_t src_row,
                           uint32_t n_r, uint32_t n_c)
{
    bool past_cache = u->stream && ((uintptr_t)u->dst | (uint64_t)dst_row) % 64 == 0;
    uint32_t r4 = n_r & ~3U, c4 = n_c & ~3U;

    for (uint32_t c = 0; c < c4; c += 4) {
        for (uint32_t r = 0; r < r4; r += 4)
            transpose_4x4(u->dst + c * dst_row + r * 16, dst_row, u->src + r * src_row + c * 16,
                          src_row, past_cache);
    }
    for (uint32_t c = 0; c < n_c; c++) {
        for (uint32_t r = c < c4 ? r4 : 0; r < n_r; r++)
            move_16(u->dst + c * dst_row + r * 16, u->src + r * src_row + c * 16);
    }
}

#include "kvx/isa/simd_x86.h"

bool kvx_isa_avx512(struct kvx_isa *isa)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return false;
    isa->name = "avx512";
    fill(isa);
    return true;
}

#else

bool kvx_isa_avx512(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}

#endif
