// SPDX-License-Identifier: Apache-2.0
/*
 * 16 elements at a time; the last few of a row go through small buffers (masked stores of bytes and
 * words are slow on some machines that have them).
 */
#include "kvx/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,avx2")))
#define INLINE static inline __attribute__((always_inline)) SIMD

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

INLINE __m128i pack_fp8(__m512 v, const struct fp8_constants c)
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
    return pack_fp8(v, e4m3);
}

INLINE __m128i pack_e5m2(__m512 v)
{
    return pack_fp8(v, e5m2);
}

/* --------------------------------------------------------------------------------------------- */
/* Conversions: a line of the target at a time, then 16 elements, then the rest */

INLINE void store_line(char *p, __m512i v, bool past_cache)
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

INLINE __m512 scaled(__m512 v, float src_scale, float dst_scale)
{
    if (src_scale != 1.0F)
        v = _mm512_mul_ps(v, _mm512_set1_ps(src_scale));
    if (dst_scale != 1.0F)
        v = _mm512_div_ps(v, _mm512_set1_ps(dst_scale));
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
#define STORE_4(p, v) _mm512_storeu_si512(p, v)
#define STORE_2(p, v) _mm256_storeu_si256((void *)(p), v)
#define STORE_1(p, v) _mm_storeu_si128((void *)(p), v)

/*
 * The buffers' alignment is spelled out: GCC gives it to them anyway, and relies on it, but under
 * AddressSanitizer puts them where only what is declared is kept (GCC 14, frames in the heap).
 */
#define CONVERT(from, from_size, to, to_size)                                               \
    static SIMD void from##_to_##to(void *dst, const void *src, size_t n, float s, float t, \
                                    bool stream_it)                                         \
    {                                                                                       \
        enum { LINE = 64 / (to_size) };                                                     \
        _Alignas(64) char some_in[16 * (from_size)];                                        \
        _Alignas(64) char some_out[16 * (to_size)];                                         \
        const char *in = src;                                                               \
        char *out = dst;                                                                    \
        bool past_cache = stream_it && (uintptr_t)dst % 64 == 0;                            \
                                                                                            \
        for (; n >= LINE; n -= LINE, in += LINE * (from_size), out += 64) {                 \
            fetch(in, LINE *(from_size));                                                   \
            store_line(out, LINE_##to_size(PART_##from##_##to), past_cache);                \
        }                                                                                   \
        for (; n >= 16; n -= 16, in += 16 * (from_size), out += 16 * (to_size))             \
            STORE_##to_size(out, PART_##from##_##to(0));                                    \
        if (n == 0)                                                                         \
            return;                                                                         \
        memset(some_in, 0, sizeof(some_in));                                                \
        memcpy(some_in, in, n *(from_size));                                                \
        in = some_in;                                                                       \
        STORE_##to_size(some_out, PART_##from##_##to(0));                                   \
        memcpy(out, some_out, n *(to_size));                                                \
    }

/* Elements 16 * k to 16 * k + 15 of what the loop is at. */
#define PART(from, size, to, k) pack_##to(scaled(load_##from(in + 16 * (k) * (size)), s, t))
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
    for (; n >= 256; n -= 256, dst += 256, src += 256) {
        __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
        __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);

        fetch(src, 256);
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
