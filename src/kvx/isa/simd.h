// SPDX-License-Identifier: Apache-2.0
/**
 * simd.h: the conversions of a vector instruction set, written once for all of them.
 *
 * Included at the end of avx2.c, avx512.c (through simd_x86.h) and neon.c, inside their #if. Each
 * of these files first defines its vectors:
 *
 *   SIMD                   attribute: the instructions that its functions may use
 *   VECTOR                 bytes of a register
 *   STEP                   elements that are converted at a time
 *   load_FROM(p)           STEP elements of type FROM, as F32
 *   scaled(v, s, t)        kvx_scaled of each
 *   STORE(p, to, size, v)  store STEP elements as type `to`, `size` bytes each
 *   LINES(from, from_size, to, to_size)
 *                          a statement that may move `in`, `out` and `n` on by whole vectors of the
 *                          target, past the cache where `past_cache`
 */
#ifndef KVX_ISA_SIMD_H
#define KVX_ISA_SIMD_H

#include "kvx/isa/isa.h"

/* Elements STEP * k to STEP * (k + 1) - 1 of what a conversion is at. */
#define VALUES(k, from, size)                         \
    (is_plain ? load_##from(in + STEP * (k) * (size)) \
              : scaled(load_##from(in + STEP * (k) * (size)), s, t))

/*
 * Conversions without scales have code of their own (see kvx_scaled). They move as many elements as
 * LINES takes, then STEP at a time. The last few of a row go through small buffers: masked stores of
 * bytes and words are slow on some machines that have them.
 *
 * The buffers' alignment is spelled out: GCC gives it to them anyway, and relies on it, but under
 * AddressSanitizer puts them where only what is declared is kept (GCC 14, frames in the heap).
 */
#define CONVERT(from, from_size, to, to_size)                                               \
    INLINE void from##_as_##to(void *dst, const void *src, size_t n, float s, float t,      \
                               bool stream_it, bool is_plain)                               \
    {                                                                                       \
        _Alignas(VECTOR) char some_in[STEP * (from_size)];                                  \
        _Alignas(VECTOR) char some_out[STEP * (to_size)];                                   \
        const char *in = src;                                                               \
        char *out = dst;                                                                    \
        bool past_cache = stream_it && (uintptr_t)dst % 64 == 0;                            \
                                                                                            \
        LINES(from, from_size, to, to_size);                                                \
        for (; n >= STEP; n -= STEP, in += STEP * (from_size), out += STEP * (to_size))     \
            STORE(out, to, to_size, VALUES(0, from, from_size));                            \
        if (n == 0)                                                                         \
            return;                                                                         \
        memset(some_in, 0, sizeof(some_in));                                                \
        memcpy(some_in, in, n *(from_size));                                                \
        in = some_in;                                                                       \
        STORE(some_out, to, to_size, VALUES(0, from, from_size));                           \
        memcpy(out, some_out, n *(to_size));                                                \
    }                                                                                       \
                                                                                            \
    static SIMD void from##_to_##to(void *dst, const void *src, size_t n, float s, float t, \
                                    bool stream_it)                                         \
    {                                                                                       \
        if (s == 1.0F && t == 1.0F)                                                         \
            from##_as_##to(dst, src, n, s, t, stream_it, true);                             \
        else                                                                                \
            from##_as_##to(dst, src, n, s, t, stream_it, false);                            \
    }

#define CONVERT_FROM(from, size)                         \
    CONVERT(from, size, f16, 2)                          \
    CONVERT(from, size, bf16, 2)                         \
    CONVERT(from, size, f32, 4)                          \
    CONVERT(from, size, e4m3, 1)                         \
    CONVERT(from, size, e5m2, 1)                         \
    static void convert_from_##from(kvx_convert_fn *row) \
    {                                                    \
        row[KVX_DTYPE_F16] = from##_to_f16;              \
        row[KVX_DTYPE_BF16] = from##_to_bf16;            \
        row[KVX_DTYPE_F32] = from##_to_f32;              \
        row[KVX_DTYPE_F8_E4M3] = from##_to_e4m3;         \
        row[KVX_DTYPE_F8_E5M2] = from##_to_e5m2;         \
    }

CONVERT_FROM(f16, 2)
CONVERT_FROM(bf16, 2)
CONVERT_FROM(f32, 4)
CONVERT_FROM(e4m3, 1)
CONVERT_FROM(e5m2, 1)

/* Enter all 25 conversions into the table. */
static void convert_with_these(struct kvx_isa *isa)
{
    convert_from_f16(isa->convert[KVX_DTYPE_F16]);
    convert_from_bf16(isa->convert[KVX_DTYPE_BF16]);
    convert_from_f32(isa->convert[KVX_DTYPE_F32]);
    convert_from_e4m3(isa->convert[KVX_DTYPE_F8_E4M3]);
    convert_from_e5m2(isa->convert[KVX_DTYPE_F8_E5M2]);
}

#endif
