// SPDX-License-Identifier: Apache-2.0
/**
 * unit.h: load, convert and store one unit (see job.h).
 *
 * On a GPU these functions are vector instructions and the hardware's conversions; on a CPU (the
 * emulator of the tests), plain C. Both give the bits that numeric.h defines. Arrays here are
 * registers: once loops are unrolled, all indices are constants.
 */
#ifndef KVX_CUDA_UNIT_H
#define KVX_CUDA_UNIT_H

#include <math.h>

#include "kvx/cuda/job.h"

#ifdef __CUDA_ARCH__
#define KVX_UNROLL _Pragma("unroll")
#else
#define KVX_UNROLL
#endif

/* sm_89 is the first that converts FP8. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVX_HARDWARE_FP8 1
#else
#define KVX_HARDWARE_FP8 0
#endif

/** 32-bit words of the largest unit: FP8 on one side, F32 on the other. */
enum { KVX_UNIT_WORDS = 16 };

/* --------------------------------------------------------------------------------------------- */
/* Memory: 16, 8, 4, 2 or 1 aligned bytes, in the low end of word[] */

/** Load @bytes aligned bytes. @once: the data won't be read again soon. */
KVX_HD void kvx_load(uint32_t *word, const char *from, uint32_t bytes, uint32_t once)
{
#ifdef __CUDA_ARCH__
    switch (bytes) {
    case 16: {
        uint4 v = once ? __ldcs((const uint4 *)from) : *(const uint4 *)from;

        word[0] = v.x;
        word[1] = v.y;
        word[2] = v.z;
        word[3] = v.w;
        break;
    }
    case 8: {
        uint2 v = once ? __ldcs((const uint2 *)from) : *(const uint2 *)from;

        word[0] = v.x;
        word[1] = v.y;
        break;
    }
    case 4:
        word[0] = once ? __ldcs((const unsigned int *)from) : *(const unsigned int *)from;
        break;
    case 2:
        word[0] = *(const unsigned short *)from;
        break;
    default:
        word[0] = *(const unsigned char *)from;
        break;
    }
#else
    (void)once;
    if ((uintptr_t)from % bytes) /* misaligned access: a fault on a GPU */
        __builtin_trap();
    if (bytes < 4)
        word[0] = 0;
    memcpy(word, from, bytes);
#endif
}

KVX_HD void kvx_store(char *to, const uint32_t *word, uint32_t bytes, uint32_t once)
{
#ifdef __CUDA_ARCH__
    switch (bytes) {
    case 16: {
        uint4 v = make_uint4(word[0], word[1], word[2], word[3]);

        if (once)
            __stcs((uint4 *)to, v);
        else
            *(uint4 *)to = v;
        break;
    }
    case 8: {
        uint2 v = make_uint2(word[0], word[1]);

        if (once)
            __stcs((uint2 *)to, v);
        else
            *(uint2 *)to = v;
        break;
    }
    case 4:
        if (once)
            __stcs((unsigned int *)to, word[0]);
        else
            *(unsigned int *)to = word[0];
        break;
    case 2:
        *(unsigned short *)to = (unsigned short)word[0];
        break;
    default:
        *(unsigned char *)to = (unsigned char)word[0];
        break;
    }
#else
    (void)once;
    if ((uintptr_t)to % bytes)
        __builtin_trap();
    memcpy(to, word, bytes);
#endif
}

/* Load @bytes (a constant) in accesses of 16 bytes. */
KVX_HD void kvx_load_whole(uint32_t *word, const char *from, uint32_t bytes, uint32_t once)
{
    KVX_UNROLL
    for (uint32_t at = 0; at < bytes; at += KVX_UNIT_BYTES)
        kvx_load(word + at / 4, from + at, KVX_UNIT_BYTES, once);
}

KVX_HD void kvx_store_whole(char *to, const uint32_t *word, uint32_t bytes, uint32_t once)
{
    KVX_UNROLL
    for (uint32_t at = 0; at < bytes; at += KVX_UNIT_BYTES)
        kvx_store(to + at, word + at / 4, KVX_UNIT_BYTES, once);
}

/*
 * Load a unit in pieces of `bytes` (a constant): piece j is bytes [j * bytes, (j + 1) * bytes) of
 * the unit. The @n pieces start at dim @dim, @step dims apart.
 */
KVX_HD void kvx_load_pieces(uint32_t word[4], const char *row, const struct kvx_map *map,
                            uint32_t dim, uint32_t step, uint32_t n, uint32_t bytes)
{
    KVX_UNROLL
    for (uint32_t j = 0; j < KVX_UNIT_BYTES / bytes; j++) {
        uint32_t piece[4] = {0, 0, 0, 0};
        uint32_t at = j * bytes;

        if (j >= n)
            continue;
        kvx_load(piece, row + kvx_map_dim(map, dim + j * step), bytes, 0);
        if (bytes < 4) {
            word[at / 4] |= piece[0] << (at % 4 * 8);
        } else {
            word[at / 4] = piece[0];
            if (bytes == 8)
                word[at / 4 + 1] = piece[1];
        }
    }
}

KVX_HD void kvx_store_pieces(char *row, const struct kvx_map *map, uint32_t dim, uint32_t step,
                             uint32_t n, uint32_t bytes, const uint32_t word[4])
{
    KVX_UNROLL
    for (uint32_t j = 0; j < KVX_UNIT_BYTES / bytes; j++) {
        uint32_t at = j * bytes;
        uint32_t piece[2] = {word[at / 4] >> (at % 4 * 8), bytes == 8 ? word[at / 4 + 1] : 0};

        if (j < n)
            kvx_store(row + kvx_map_dim(map, dim + j * step), piece, bytes, 0);
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Values: two elements at a time, the way FP8 is converted */

KVX_HD void kvx_halves_decode(kvx_dtype_t dtype, uint32_t pair, float value[2])
{
#ifdef __CUDA_ARCH__
    if (dtype == KVX_DTYPE_BF16) { /* a NaN keeps its bits until it is encoded */
        value[0] = __uint_as_float(pair << 16);
        value[1] = __uint_as_float(pair & 0xffff0000U);
    } else {
        asm("{\n\t"
            ".reg .b16 low, high;\n\t"
            "mov.b32 {low, high}, %2;\n\t"
            "cvt.f32.f16 %0, low;\n\t"
            "cvt.f32.f16 %1, high;\n\t"
            "}"
            : "=f"(value[0]), "=f"(value[1])
            : "r"(pair));
    }
#else
    value[0] =
        dtype == KVX_DTYPE_BF16 ? kvx_bf16_to_f32((uint16_t)pair) : kvx_f16_to_f32((uint16_t)pair);
    value[1] = dtype == KVX_DTYPE_BF16 ? kvx_bf16_to_f32((uint16_t)(pair >> 16))
                                       : kvx_f16_to_f32((uint16_t)(pair >> 16));
#endif
}

KVX_HD uint32_t kvx_halves_encode(kvx_dtype_t dtype, const float value[2])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;

    if (dtype == KVX_DTYPE_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value[1]), "f"(value[0]));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value[1]), "f"(value[0]));
    return pair;
#else
    if (dtype == KVX_DTYPE_BF16)
        return kvx_f32_to_bf16(value[0]) | (uint32_t)kvx_f32_to_bf16(value[1]) << 16;
    return kvx_f32_to_f16(value[0]) | (uint32_t)kvx_f32_to_f16(value[1]) << 16;
#endif
}

KVX_HD void kvx_bytes_decode(kvx_dtype_t dtype, uint32_t pair, float value[2])
{
#if KVX_HARDWARE_FP8
    unsigned short two = (unsigned short)pair;
    uint32_t halves;

    if (dtype == KVX_DTYPE_F8_E4M3)
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    else
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
    kvx_halves_decode(KVX_DTYPE_F16, halves, value);
#else
    for (uint32_t i = 0; i < 2; i++) {
        uint8_t byte = (uint8_t)(pair >> (8 * i));

        value[i] = dtype == KVX_DTYPE_F8_E4M3 ? kvx_e4m3_to_f32(byte) : kvx_e5m2_to_f32(byte);
    }
#endif
}

KVX_HD uint32_t kvx_bytes_encode(kvx_dtype_t dtype, const float value[2])
{
#if KVX_HARDWARE_FP8
    unsigned short two;

    if (dtype == KVX_DTYPE_F8_E4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(value[1]), "f"(value[0]));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(value[1]), "f"(value[0]));
    return two;
#else
    if (dtype == KVX_DTYPE_F8_E4M3)
        return kvx_f32_to_e4m3(value[0]) | (uint32_t)kvx_f32_to_e4m3(value[1]) << 8;
    return kvx_f32_to_e5m2(value[0]) | (uint32_t)kvx_f32_to_e5m2(value[1]) << 8;
#endif
}

/**
 * Decode the @n elements (4, 8 or 16; a constant) in word[], of a dtype with @size bytes (a
 * constant).
 */
KVX_HD void kvx_unit_decode(kvx_dtype_t dtype, uint32_t size, uint32_t n, const uint32_t *word,
                            float *value)
{
    KVX_UNROLL
    for (uint32_t e = 0; e < n; e += 2) {
        if (size == 4) {
            value[e] = kvx_bits_float(word[e]);
            value[e + 1] = kvx_bits_float(word[e + 1]);
        } else if (size == 2) {
            kvx_halves_decode(dtype, word[e / 2], value + e);
        } else {
            kvx_bytes_decode(dtype, word[e / 4] >> (e % 4 * 8), value + e);
        }
    }
}

KVX_HD void kvx_unit_encode(kvx_dtype_t dtype, uint32_t size, uint32_t n, const float *value,
                            uint32_t *word)
{
    KVX_UNROLL
    for (uint32_t e = 0; e < n; e += 2) {
        if (size == 4) { /* every NaN becomes the canonical one */
            word[e] = value[e] == value[e] ? kvx_float_bits(value[e]) : 0x7fffffff;
            word[e + 1] = value[e + 1] == value[e + 1] ? kvx_float_bits(value[e + 1]) : 0x7fffffff;
        } else if (size == 2) {
            word[e / 2] = kvx_halves_encode(dtype, value + e);
        } else {
            uint32_t pair = kvx_bytes_encode(dtype, value + e);

            word[e / 4] = e % 4 ? word[e / 4] | pair << 16 : pair;
        }
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Scales */

/**
 * Return true when kvx_quotient may be used: a positive divisor well inside the range of F32 (not
 * NaN).
 */
KVX_HD int kvx_is_plain_divisor(float d)
{
    return d >= 0x1p-64F && d <= 0x1p64F;
}

/**
 * x / d for an FP8 target, from @reciprocal = 1 / d correctly rounded: a division costs four
 * multiplications instead of a subroutine. For |x| >= 2^-100 the remainders are exact and the
 * second correction rounds correctly (Markstein's theorem: the first leaves less than one ulp).
 * Smaller x give a quotient below 2^-36, which any FP8 rounds to zero. Signs of zeros are right
 * because the remainder is then +0 and is multiplied by something negative: adding -0 changes
 * nothing. (Not by negating the remainder: gcc 12 moves that into the fmaf, where hardware has it,
 * and a remainder of zero comes out with the other sign.) If the estimate is an infinity or NaN it
 * is the result: x was one, or the quotient is beyond what FP8 can hold.
 */
KVX_HD float kvx_quotient(float x, float d, float reciprocal)
{
    float estimate = x * reciprocal, negated = -reciprocal, q;

    q = fmaf(fmaf(estimate, d, -x), negated, estimate);
    q = fmaf(fmaf(q, d, -x), negated, q);
    return fabsf(estimate) < INFINITY ? q : estimate;
}

/**
 * Return true when no quotient of the values by a plain divisor can be an infinity: each is below
 * 2^64. One sum of their sizes serves all, since none makes it smaller. (A sum of smaller values
 * may reach 2^64, too. That costs time, never a wrong result.)
 */
KVX_HD int kvx_unit_is_tame(uint32_t n, const float *value)
{
    float sum = 0;

    KVX_UNROLL
    for (uint32_t e = 0; e < n; e++)
        sum += fabsf(value[e]);
    return sum < 0x1p64F; /* not when one is NaN */
}

/** True when @d is a power of two: multiplying by its reciprocal is dividing by it. */
KVX_HD int kvx_is_power(float d)
{
    return (kvx_float_bits(d) & 0x7fffff) == 0;
}

/* Divide by a plain divisor. Most of the time of a write to FP8 would be spent here. */
KVX_HD void kvx_unit_divide(uint32_t n, float *value, float d)
{
    float reciprocal = 1.0F / d;

    if (kvx_is_power(d)) {
        KVX_UNROLL
        for (uint32_t e = 0; e < n; e++)
            value[e] *= reciprocal;
    } else if (kvx_unit_is_tame(n, value)) { /* kvx_quotient without its last step */
        float negated = -reciprocal;

        KVX_UNROLL
        for (uint32_t e = 0; e < n; e++) {
            float x = value[e], q = x * reciprocal;

            q = fmaf(fmaf(q, d, -x), negated, q);
            value[e] = fmaf(fmaf(q, d, -x), negated, q);
        }
    } else {
        for (uint32_t e = 0; e < n; e++)
            value[e] = kvx_quotient(value[e], d, reciprocal);
    }
}

/** Compute value[] * *src_scale / *dst_scale; a NULL scale is left out. */
KVX_HD void kvx_unit_scale(uint32_t n, float *value, const float *src_scale, const float *dst_scale)
{
    if (src_scale) {
        float s = *src_scale;

        KVX_UNROLL
        for (uint32_t e = 0; e < n; e++)
            value[e] *= s;
    }
    if (dst_scale) {
        float d = *dst_scale;

        if (kvx_is_plain_divisor(d)) {
            kvx_unit_divide(n, value, d);
        } else {
            KVX_UNROLL
            for (uint32_t e = 0; e < n; e++)
                value[e] = value[e] / d;
        }
    }
}

/**
 * Convert one unit of @n elements. The number and the sizes are constants. The dtypes needn't be:
 * all threads take the same branch. Elements beyond the unit's are zero and stay zero, or aren't
 * stored.
 */
KVX_HD void kvx_unit_convert(uint32_t n, kvx_dtype_t from, uint32_t src_size, kvx_dtype_t to,
                             uint32_t dst_size, const float *src_scale, const float *dst_scale,
                             const uint32_t *source, uint32_t *target)
{
    float value[16];

    if (src_size == 2 && from == KVX_DTYPE_BF16)
        kvx_unit_decode(KVX_DTYPE_BF16, src_size, n, source, value);
    else if (src_size == 2)
        kvx_unit_decode(KVX_DTYPE_F16, src_size, n, source, value);
    else if (from == KVX_DTYPE_F8_E4M3)
        kvx_unit_decode(KVX_DTYPE_F8_E4M3, src_size, n, source, value);
    else
        kvx_unit_decode(KVX_DTYPE_F8_E5M2, src_size, n, source, value);
    kvx_unit_scale(n, value, src_scale, dst_scale);
    if (dst_size == 2 && to == KVX_DTYPE_BF16)
        kvx_unit_encode(KVX_DTYPE_BF16, dst_size, n, value, target);
    else if (dst_size == 2)
        kvx_unit_encode(KVX_DTYPE_F16, dst_size, n, value, target);
    else if (to == KVX_DTYPE_F8_E4M3)
        kvx_unit_encode(KVX_DTYPE_F8_E4M3, dst_size, n, value, target);
    else
        kvx_unit_encode(KVX_DTYPE_F8_E5M2, dst_size, n, value, target);
}

#endif
