// SPDX-License-Identifier: Apache-2.0
/* 16 elements at a time; the last few of a row are done with masks. */
#include "kvx/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,avx2")))
#define INLINE static inline __attribute__((always_inline)) SIMD

/* --------------------------------------------------------------------------------------------- */
/* Elements: load to F32 and store from it. Stores make every NaN the canonical one. */

INLINE __m512 load_f32(const char *p, __mmask16 m)
{
    return _mm512_maskz_loadu_ps(m, p);
}

INLINE __m512 load_f16(const char *p, __mmask16 m)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p));
}

INLINE __m512 load_bf16(const char *p, __mmask16 m)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p));

    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* E4M3's bits are an F16 that is 2^8 too small; no subnormal F32 occurs on the way. */
INLINE __m512 load_e4m3(const char *p, __mmask16 m)
{
    __m256i b = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p));
    __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(b, magnitude), 8);
    __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);

    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7fff));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
}

INLINE __m512 load_e5m2(const char *p, __mmask16 m)
{
    __m256i b = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p));

    return _mm512_cvtph_ps(_mm256_slli_epi16(b, 8));
}

INLINE __mmask16 nans(__m512 v)
{
    return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
}

INLINE void store_f32(char *p, __mmask16 m, __m512 v)
{
    __m512i bits = _mm512_castps_si512(v);

    bits = _mm512_mask_mov_epi32(bits, nans(v), _mm512_set1_epi32(0x7fffffff));
    _mm512_mask_storeu_epi32(p, m, bits);
}

INLINE void store_f16(char *p, __mmask16 m, __m512 v)
{
    __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);

    half = _mm256_mask_mov_epi16(half, nans(v), _mm256_set1_epi16(0x7fff));
    _mm256_mask_storeu_epi16(p, m, half);
}

INLINE void store_bf16(char *p, __mmask16 m, __m512 v)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m256i brain = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));

    brain = _mm256_mask_mov_epi16(brain, nans(v), _mm256_set1_epi16(0x7fff));
    _mm256_mask_storeu_epi16(p, m, brain);
}

/* As kvx_f32_to_e4m3 and _e5m2, which differ in their constants only. */
struct fp8_constants {
    uint32_t max, smallest; /* F32 bits: of the largest value, of the smallest normal one */
    float magic;            /* has the ulp that subnormal results have */
    uint32_t half, bias;
    uint32_t shift;
};
static const struct fp8_constants e4m3 = {0x43e00000, 0x3c800000, 16384.0F,
                                          0x7ffff,    0x3c000000, 20};
static const struct fp8_constants e5m2 = {0x47600000, 0x38800000, 128.0F, 0xfffff, 0x38000000, 21};

INLINE void store_fp8(char *p, __mmask16 m, __m512 v, const struct fp8_constants c)
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
    _mm_mask_storeu_epi8(p, m, _mm512_cvtepi32_epi8(normal));
}

INLINE void store_e4m3(char *p, __mmask16 m, __m512 v)
{
    store_fp8(p, m, v, e4m3);
}

INLINE void store_e5m2(char *p, __mmask16 m, __m512 v)
{
    store_fp8(p, m, v, e5m2);
}

/* --------------------------------------------------------------------------------------------- */
/* Conversions */

#define CONVERT(from, from_size, to, to_size)                                              \
    static SIMD void from##_to_##to(void *dst, const void *src, size_t n, float src_scale, \
                                    float dst_scale)                                       \
    {                                                                                      \
        const __m512 mul = _mm512_set1_ps(src_scale), div = _mm512_set1_ps(dst_scale);     \
        const bool multiplies = src_scale != 1.0F, divides = dst_scale != 1.0F;            \
        const char *in = src;                                                              \
        char *out = dst;                                                                   \
                                                                                           \
        for (size_t i = 0; i < n; i += 16) {                                               \
            __mmask16 m = n - i < 16 ? (__mmask16)((1U << (n - i)) - 1) : 0xffff;          \
            __m512 v = load_##from(in + i * (from_size), m);                               \
                                                                                           \
            if (multiplies)                                                                \
                v = _mm512_mul_ps(v, mul);                                                 \
            if (divides)                                                                   \
                v = _mm512_div_ps(v, div);                                                 \
            store_##to(out + i * (to_size), m, v);                                         \
        }                                                                                  \
    }

#define CONVERT_FROM(from, size) \
    CONVERT(from, size, f16, 2)  \
    CONVERT(from, size, bf16, 2) \
    CONVERT(from, size, f32, 4)  \
    CONVERT(from, size, e4m3, 1) \
    CONVERT(from, size, e5m2, 1)

CONVERT_FROM(f16, 2)
CONVERT_FROM(bf16, 2)
CONVERT_FROM(f32, 4)
CONVERT_FROM(e4m3, 1)
CONVERT_FROM(e5m2, 1)

/* --------------------------------------------------------------------------------------------- */
/* Copies */

static SIMD void stream(char *dst, const char *src, size_t n)
{
    size_t head = (size_t) - (uintptr_t)dst & 63;

    if (head) {
        head = head < n ? head : n;
        memcpy(dst, src, head);
        dst += head;
        src += head;
        n -= head;
    }
    for (; n >= 256; n -= 256, dst += 256, src += 256) {
        __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
        __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);

        _mm512_stream_si512((void *)dst, a);
        _mm512_stream_si512((void *)(dst + 64), b);
        _mm512_stream_si512((void *)(dst + 128), c);
        _mm512_stream_si512((void *)(dst + 192), d);
    }
    for (; n >= 64; n -= 64, dst += 64, src += 64)
        _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
    memcpy(dst, src, n);
}

static void fence(void)
{
    _mm_sfence();
}

/* --------------------------------------------------------------------------------------------- */
/* Transposition of 16-byte units: source rows are contiguous along c, target rows along r. */

INLINE void store_line(char *p, __m512i v, bool past_cache)
{
    if (past_cache)
        _mm512_stream_si512((void *)p, v);
    else
        _mm512_storeu_si512(p, v);
}

/* 4 rows of 4 units: whole lines in, whole lines out. */
INLINE void transpose_4x4(char *dst, int64_t dst_row, const char *src, int64_t src_row,
                          bool past_cache)
{
    __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + src_row);
    __m512i c = _mm512_loadu_si512(src + 2 * src_row), d = _mm512_loadu_si512(src + 3 * src_row);
    __m512i ab01 = _mm512_shuffle_i64x2(a, b, 0x44), ab23 = _mm512_shuffle_i64x2(a, b, 0xee);
    __m512i cd01 = _mm512_shuffle_i64x2(c, d, 0x44), cd23 = _mm512_shuffle_i64x2(c, d, 0xee);

    store_line(dst, _mm512_shuffle_i64x2(ab01, cd01, 0x88), past_cache);
    store_line(dst + dst_row, _mm512_shuffle_i64x2(ab01, cd01, 0xdd), past_cache);
    store_line(dst + 2 * dst_row, _mm512_shuffle_i64x2(ab23, cd23, 0x88), past_cache);
    store_line(dst + 3 * dst_row, _mm512_shuffle_i64x2(ab23, cd23, 0xdd), past_cache);
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

static SIMD void units16(const struct kvx_units *u)
{
    if (u->src_step == 16 && u->dst_token == 16)
        transpose(u, u->dst_step, u->src_token, u->n_tokens, u->n_units);
    else if (u->src_token == 16 && u->dst_step == 16)
        transpose(u, u->dst_token, u->src_step, u->n_units, u->n_tokens);
    else
        kvx_units_scalar(u);
}

#define FROM(row, from)                                        \
    do {                                                       \
        isa->convert[row][KVX_DTYPE_F16] = from##_to_f16;      \
        isa->convert[row][KVX_DTYPE_BF16] = from##_to_bf16;    \
        isa->convert[row][KVX_DTYPE_F32] = from##_to_f32;      \
        isa->convert[row][KVX_DTYPE_F8_E4M3] = from##_to_e4m3; \
        isa->convert[row][KVX_DTYPE_F8_E5M2] = from##_to_e5m2; \
    } while (0)

bool kvx_isa_avx512(struct kvx_isa *isa)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return false;
    isa->name = "avx512";
    isa->stream = stream;
    isa->fence = fence;
    isa->units16 = units16;
    FROM(KVX_DTYPE_F16, f16);
    FROM(KVX_DTYPE_BF16, bf16);
    FROM(KVX_DTYPE_F32, f32);
    FROM(KVX_DTYPE_F8_E4M3, e4m3);
    FROM(KVX_DTYPE_F8_E5M2, e5m2);
    return true;
}

#else

bool kvx_isa_avx512(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}

#endif
