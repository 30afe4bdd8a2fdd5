// SPDX-License-Identifier: Apache-2.0
/**
 * simd_x86.h: code that AVX2 and AVX-512 share, beside the conversions of simd.h, which this
 * includes.
 *
 * avx2.c and avx512.c include this file and define, beyond the macros for simd.h:
 *
 *   INLINE                     static, inlined, and SIMD
 *   floats, raw                a register of F32, of any bits
 *   all(x)                     floats that are all x
 *   load(p), store(p, v, past_cache)
 *                              raw from and to memory; past the cache, p is aligned to VECTOR
 *   pack_TO(v)                 STEP floats, as elements of type TO
 *   join_2(a, b), join_4(a, b, c, d)
 *                              raw, made of packs with 2 and with 1 byte an element
 *   STORE_4, _2, _1(p, v)      store packs with elements of 4, 2, 1 bytes
 *   transpose(u, dst_row, src_row, n_r, n_c)
 *                              16-byte units; source rows contiguous along c, target rows along r
 */
#ifndef KVX_ISA_SIMD_X86_H
#define KVX_ISA_SIMD_X86_H

#include <immintrin.h>

#include "kvx/isa/isa.h"

/* Distance in bytes that gives memory time to answer. Consecutive rows profit, too. */
#define AHEAD 2048

INLINE void fetch(const char *in, size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        _mm_prefetch(in + AHEAD + i, _MM_HINT_T0);
}

INLINE floats scaled(floats v, float src_scale, float dst_scale)
{
    if (src_scale != 1.0F)
        v = v * all(src_scale);
    if (dst_scale != 1.0F)
        v = v / all(dst_scale);
    return v;
}

#define STORE(p, to, size, v) STORE_##size(p, pack_##to(v))

/* A vector of the target, of elements of 4, 2 and 1 bytes. */
#define PART(k, from, size, to) pack_##to(VALUES(k, from, size))
#define LINE_4(...) PART(0, __VA_ARGS__)
#define LINE_2(...) join_2(PART(0, __VA_ARGS__), PART(1, __VA_ARGS__))
#define LINE_1(...) \
    join_4(PART(0, __VA_ARGS__), PART(1, __VA_ARGS__), PART(2, __VA_ARGS__), PART(3, __VA_ARGS__))

#define LINES(from, from_size, to, to_size)                                     \
    do {                                                                        \
        enum { LINE = VECTOR / (to_size) };                                     \
                                                                                \
        for (; n >= LINE; n -= LINE, in += LINE * (from_size), out += VECTOR) { \
            fetch(in, LINE *(from_size));                                       \
            store(out, LINE_##to_size(from, from_size, to), past_cache);        \
        }                                                                       \
    } while (0)

#include "kvx/isa/simd.h"

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
    for (; n >= 4 * VECTOR; n -= 4 * VECTOR, dst += 4 * VECTOR, src += 4 * VECTOR) {
        raw a = load(src), b = load(src + VECTOR);
        raw c = load(src + 2 * VECTOR), d = load(src + 3 * VECTOR);

        fetch(src, 4 * VECTOR);
        store(dst, a, true);
        store(dst + VECTOR, b, true);
        store(dst + 2 * VECTOR, c, true);
        store(dst + 3 * VECTOR, d, true);
    }
    /* Take one more at a time where it is a whole line. */
    for (; VECTOR == 64 && n >= 64; n -= 64, dst += 64, src += 64)
        store(dst, load(src), true);
    memcpy(dst, src, n);
}

static void fence(void)
{
    _mm_sfence();
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

static void fill(struct kvx_isa *isa)
{
    isa->stream = stream;
    isa->fence = fence;
    isa->units16 = units16;
    convert_with_these(isa);
}

#endif
