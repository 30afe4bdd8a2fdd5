// SPDX-License-Identifier: Apache-2.0
/**
 * numeric.h: the element types, one value at a time, for C and CUDA alike.
 *
 * The functions here define each conversion: SIMD and GPU code must give the same bits. Tests
 * compare all 2^16 F16 and BF16 values, all FP8 values, and F32 values around every rounding
 * boundary.
 *
 * Rules
 * - Narrowing rounds to nearest, ties to even. F16 and BF16 overflow to infinity; FP8 saturates to
 *   its largest finite value, infinities included.
 * - A NaN stays a NaN. A conversion doesn't keep its payload or sign: it becomes the pattern with
 *   all bits below the sign set (0x7f, 0x7fff, 0x7fffffff), which is what NVIDIA hardware produces.
 * - Subnormals are exact in both directions. Without scales they don't depend on flush-to-zero modes
 *   of the caller; products and quotients with a scale do.
 * - The caller's rounding mode is the default one.
 */
#ifndef KVX_NUMERIC_H
#define KVX_NUMERIC_H

#include <stdint.h>
#include <string.h>

#include "kvx_abi.h"

#ifdef __CUDACC__
#define KVX_HD static __host__ __device__ __forceinline__
#else
#define KVX_HD static inline
#endif

KVX_HD uint32_t kvx_float_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

KVX_HD float kvx_bits_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

KVX_HD float kvx_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;

    if (exponent == 31)
        return kvx_bits_float(mantissa ? 0x7fffffff : sign | 0x7f800000);
    if (exponent == 0) /* mantissa * 2^-24, exact */
        return kvx_bits_float(sign | kvx_float_bits((float)mantissa * 0x1p-24F));
    return kvx_bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

KVX_HD uint16_t kvx_f32_to_f16(float value)
{
    uint32_t bits = kvx_float_bits(value), sign = bits >> 16 & 0x8000,
             magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return 0x7fff;
    if (magnitude >= 0x477ff000) /* 65520 rounds to 2^16 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) /* below 2^-14: 0.5 has the ulp of the result, the adder rounds */
        return (uint16_t)(sign | (kvx_float_bits(kvx_bits_float(magnitude) + 0.5F) - 0x3f000000));
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

KVX_HD float kvx_bf16_to_f32(uint16_t brain)
{
    if ((brain & 0x7fff) > 0x7f80)
        return kvx_bits_float(0x7fffffff);
    return kvx_bits_float((uint32_t)brain << 16);
}

KVX_HD uint16_t kvx_f32_to_bf16(float value)
{
    uint32_t bits = kvx_float_bits(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

KVX_HD float kvx_e4m3_to_f32(uint8_t byte)
{
    uint32_t sign = (uint32_t)(byte & 0x80) << 24;
    uint32_t exponent = (byte >> 3) & 15, mantissa = byte & 7;

    if ((byte & 0x7f) == 0x7f)
        return kvx_bits_float(0x7fffffff);
    if (exponent == 0)
        return kvx_bits_float(sign | kvx_float_bits((float)mantissa * 0x1p-9F));
    return kvx_bits_float(sign | (exponent + 120) << 23 | mantissa << 20);
}

KVX_HD uint8_t kvx_f32_to_e4m3(float value)
{
    uint32_t bits = kvx_float_bits(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return 0x7f;
    if (magnitude > 0x43e00000) /* 448 */
        return (uint8_t)(sign | 0x7e);
    if (magnitude < 0x3c800000) /* below 2^-6: 2^14 has the ulp of the result, 2^-9 */
        return (uint8_t)(sign |
                         (kvx_float_bits(kvx_bits_float(magnitude) + 16384.0F) - 0x46800000));
    magnitude += 0x7ffff + (magnitude >> 20 & 1);
    return (uint8_t)(sign | (magnitude - 0x3c000000) >> 20);
}

KVX_HD float kvx_e5m2_to_f32(uint8_t byte)
{
    return kvx_f16_to_f32((uint16_t)(byte << 8));
}

KVX_HD uint8_t kvx_f32_to_e5m2(float value)
{
    uint32_t bits = kvx_float_bits(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return 0x7f;
    if (magnitude > 0x47600000) /* 57344 */
        return (uint8_t)(sign | 0x7b);
    if (magnitude < 0x38800000) /* below 2^-14: 2^7 has the ulp of the result, 2^-16 */
        return (uint8_t)(sign | (kvx_float_bits(kvx_bits_float(magnitude) + 128.0F) - 0x43000000));
    magnitude += 0xfffff + (magnitude >> 21 & 1);
    return (uint8_t)(sign | (magnitude - 0x38000000) >> 21);
}

/** Return the bytes of an element that caches and IO tensors may have; 0 for any other type. */
KVX_HD uint32_t kvx_float_size(kvx_dtype_t dtype)
{
    switch (dtype) {
    case KVX_DTYPE_F32:
        return 4;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
        return 2;
    case KVX_DTYPE_F8_E4M3:
    case KVX_DTYPE_F8_E5M2:
        return 1;
    default:
        return 0;
    }
}

KVX_HD int kvx_is_fp8(kvx_dtype_t dtype)
{
    return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2;
}

/** Return the value of one element at @from. */
KVX_HD float kvx_decode(kvx_dtype_t dtype, const void *from)
{
    uint16_t half;
    float value;

    switch (dtype) {
    case KVX_DTYPE_F32:
        memcpy(&value, from, sizeof(value));
        return value;
    case KVX_DTYPE_F16:
        memcpy(&half, from, sizeof(half));
        return kvx_f16_to_f32(half);
    case KVX_DTYPE_BF16:
        memcpy(&half, from, sizeof(half));
        return kvx_bf16_to_f32(half);
    case KVX_DTYPE_F8_E4M3:
        return kvx_e4m3_to_f32(*(const uint8_t *)from);
    default:
        return kvx_e5m2_to_f32(*(const uint8_t *)from);
    }
}

/** Store @value as one element at @to. */
KVX_HD void kvx_encode(kvx_dtype_t dtype, float value, void *to)
{
    uint32_t bits;
    uint16_t half;

    switch (dtype) {
    case KVX_DTYPE_F32:
        bits = kvx_float_bits(value);
        bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : bits;
        memcpy(to, &bits, sizeof(bits));
        break;
    case KVX_DTYPE_F16:
        half = kvx_f32_to_f16(value);
        memcpy(to, &half, sizeof(half));
        break;
    case KVX_DTYPE_BF16:
        half = kvx_f32_to_bf16(value);
        memcpy(to, &half, sizeof(half));
        break;
    case KVX_DTYPE_F8_E4M3:
        *(uint8_t *)to = kvx_f32_to_e4m3(value);
        break;
    default:
        *(uint8_t *)to = kvx_f32_to_e5m2(value);
        break;
    }
}

/**
 * Compute @value * @src_scale / @dst_scale, rounding each operation. Call it where one of them isn't
 * 1: clang 14 to 16 multiply by 1 rather than jump, and a caller's flush-to-zero mode then turns
 * subnormals into zeros.
 */
KVX_HD float kvx_scaled(float value, float src_scale, float dst_scale)
{
    if (src_scale != 1.0F)
        value *= src_scale;
    if (dst_scale != 1.0F)
        value /= dst_scale;
    return value;
}

#endif
