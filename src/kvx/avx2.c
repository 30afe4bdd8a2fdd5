// SPDX-License-Identifier: Apache-2.0
/* 8 elements at a time; the last few of a row go through small buffers. */
#include "kvx/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define SIMD __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) SIMD

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

/* All ones where @v is a NaN. */
INLINE __m256i nans(__m256 v)
{
    return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

/* 8 values below 2^16, each in a 32-bit lane, to 8 16-bit ones. */
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

/* As kvx_f32_to_e4m3 and _e5m2, which differ in their constants only. */
struct fp8_constants {
    int max, smallest; /* F32 bits: of the largest value, of the smallest normal one */
    float magic;       /* has the ulp that subnormal results have */
    int half, bias;
    int shift;
};
static const struct fp8_constants e4m3 = {0x43e00000, 0x3c800000, 16384.0F,
                                          0x7ffff,    0x3c000000, 20};
static const struct fp8_constants e5m2 = {0x47600000, 0x38800000, 128.0F, 0xfffff, 0x38000000, 21};

/* In the low half. */
INLINE __m128i pack_fp8(__m256 v, const struct fp8_constants c)
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
    return pack_fp8(v, e4m3);
}

INLINE __m128i pack_e5m2(__m256 v)
{
    return pack_fp8(v, e5m2);
}

/* --------------------------------------------------------------------------------------------- */
/* Conversions: half a line of the target at a time, then 8 elements, then the rest */

INLINE void store_half_line(char *p, __m256i v, bool past_cache)
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

INLINE __m256 scaled(__m256 v, float src_scale, float dst_scale)
{
    if (src_scale != 1.0F)
        v = _mm256_mul_ps(v, _mm256_set1_ps(src_scale));
    if (dst_scale != 1.0F)
        v = _mm256_div_ps(v, _mm256_set1_ps(dst_scale));
    return v;
}

/* Far enough ahead for memory to answer; rows that are read one after the other profit, too. */
#define AHEAD 2048

INLINE void fetch(const char *in, size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        _mm_prefetch(in + AHEAD + i, _MM_HINT_T0);
}

#define LINE_4(part) part(0)
#define LINE_2(part) join_2(part(0), part(1))
#define LINE_1(part) join_4(part(0), part(1), part(2), part(3))
#define STORE_4(p, v) _mm256_storeu_si256((void *)(p), v)
#define STORE_2(p, v) _mm_storeu_si128((void *)(p), v)
#define STORE_1(p, v) _mm_storel_epi64((void *)(p), v)

#define CONVERT(from, from_size, to, to_size)                                               \
    static SIMD void from##_to_##to(void *dst, const void *src, size_t n, float s, float t, \
                                    bool stream_it)                                         \
    {                                                                                       \
        enum { LINE = 32 / (to_size) };                                                     \
        char some_in[8 * (from_size)], some_out[8 * (to_size)];                             \
        const char *in = src;                                                               \
        char *out = dst;                                                                    \
        bool past_cache = stream_it && (uintptr_t)dst % 64 == 0;                            \
                                                                                            \
        for (; n >= LINE; n -= LINE, in += LINE * (from_size), out += 32) {                 \
            fetch(in, LINE *(from_size));                                                   \
            store_half_line(out, LINE_##to_size(PART_##from##_##to), past_cache);           \
        }                                                                                   \
        for (; n >= 8; n -= 8, in += 8 * (from_size), out += 8 * (to_size))                 \
            STORE_##to_size(out, PART_##from##_##to(0));                                    \
        if (n == 0)                                                                         \
            return;                                                                         \
        memset(some_in, 0, sizeof(some_in));                                                \
        memcpy(some_in, in, n *(from_size));                                                \
        in = some_in;                                                                       \
        STORE_##to_size(some_out, PART_##from##_##to(0));                                   \
        memcpy(out, some_out, n *(to_size));                                                \
    }

/* Elements 8 * k to 8 * k + 7 of what the loop is at. */
#define PART(from, size, to, k) pack_##to(scaled(load_##from(in + 8 * (k) * (size)), s, t))
#define PART_f16_f16(k) PART(f16, 2, f16, k)
#define PART_f16_bf16(k) PART(f16, 2, bf16, k)
#define PART_f16_f32(k) PART(f16, 2, f32, k)
#define PART_f16_e4m3(k) PART(f16, 2, e4m3, k)
#define PART_f16_e5m2(k) PART(f16, 2, e5m2, k)
#define PART_bf16_f16(k) PART(bf16, 2, f16, k)
#define PART_bf16_bf16(k) PART(bf16, 2, bf16, k)
#define PART_bf16_f32(k) PART(bf16, 2, f32, k)
#define PART_bf16_e4m3(k) PART(bf16, 2, e4m3, k)
#define PART_bf16_e5m2(k) PART(bf16, 2, e5m2, k)
#define PART_f32_f16(k) PART(f32, 4, f16, k)
#define PART_f32_bf16(k) PART(f32, 4, bf16, k)
#define PART_f32_f32(k) PART(f32, 4, f32, k)
#define PART_f32_e4m3(k) PART(f32, 4, e4m3, k)
#define PART_f32_e5m2(k) PART(f32, 4, e5m2, k)
#define PART_e4m3_f16(k) PART(e4m3, 1, f16, k)
#define PART_e4m3_bf16(k) PART(e4m3, 1, bf16, k)
#define PART_e4m3_f32(k) PART(e4m3, 1, f32, k)
#define PART_e4m3_e4m3(k) PART(e4m3, 1, e4m3, k)
#define PART_e4m3_e5m2(k) PART(e4m3, 1, e5m2, k)
#define PART_e5m2_f16(k) PART(e5m2, 1, f16, k)
#define PART_e5m2_bf16(k) PART(e5m2, 1, bf16, k)
#define PART_e5m2_f32(k) PART(e5m2, 1, f32, k)
#define PART_e5m2_e4m3(k) PART(e5m2, 1, e4m3, k)
#define PART_e5m2_e5m2(k) PART(e5m2, 1, e5m2, k)

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
    for (; n >= 128; n -= 128, dst += 128, src += 128) {
        __m256i a = _mm256_loadu_si256((const void *)src);
        __m256i b = _mm256_loadu_si256((const void *)(src + 32));
        __m256i c = _mm256_loadu_si256((const void *)(src + 64));
        __m256i d = _mm256_loadu_si256((const void *)(src + 96));

        fetch(src, 128);
        _mm256_stream_si256((void *)dst, a);
        _mm256_stream_si256((void *)(dst + 32), b);
        _mm256_stream_si256((void *)(dst + 64), c);
        _mm256_stream_si256((void *)(dst + 96), d);
    }
    memcpy(dst, src, n);
}

static void fence(void)
{
    _mm_sfence();
}

/* --------------------------------------------------------------------------------------------- */
/* Transposition of 16-byte units: source rows are contiguous along c, target rows along r. */

INLINE __m256i pair(const char *low, const char *high)
{
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const void *)low));

    return _mm256_inserti128_si256(v, _mm_loadu_si128((const void *)high), 1);
}

/* 4 rows of one unit: a whole line of the target. */
INLINE void collect_4(char *dst, const char *src, int64_t src_row, bool past_cache)
{
    store_half_line(dst, pair(src, src + src_row), past_cache);
    store_half_line(dst + 32, pair(src + 2 * src_row, src + 3 * src_row), past_cache);
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

static SIMD void units16(const struct kvx_units *u)
{
    if (u->src_step == 16 && u->dst_token == 16)
        transpose(u, u->dst_step, u->src_token, u->n_tokens, u->n_units);
    else if (u->src_token == 16 && u->dst_step == 16)
        transpose(u, u->dst_token, u->src_step, u->n_units, u->n_tokens);
    else
        kvx_units_scalar(u);
}

/* Every machine with AVX2 has F16C, but a hypervisor may hide one of them. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#define FROM(row, from)                                        \
    do {                                                       \
        isa->convert[row][KVX_DTYPE_F16] = from##_to_f16;      \
        isa->convert[row][KVX_DTYPE_BF16] = from##_to_bf16;    \
        isa->convert[row][KVX_DTYPE_F32] = from##_to_f32;      \
        isa->convert[row][KVX_DTYPE_F8_E4M3] = from##_to_e4m3; \
        isa->convert[row][KVX_DTYPE_F8_E5M2] = from##_to_e5m2; \
    } while (0)

bool kvx_isa_avx2(struct kvx_isa *isa)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !has_f16c())
        return false;
    isa->name = "avx2";
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

bool kvx_isa_avx2(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}

#endif
