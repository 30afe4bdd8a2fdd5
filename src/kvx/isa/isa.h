// SPDX-License-Identifier: Apache-2.0
/**
 * isa.h: the inner loops of the CPU path, once per instruction set.
 *
 * Each set fills a struct kvx_isa; kvx_isa_get picks the machine's best one, once. All sets give
 * the bits that numeric.h defines. A set only replaces functions in which it beats scalar.c.
 */
#ifndef KVX_ISA_ISA_H
#define KVX_ISA_ISA_H

#include <stdbool.h>
#include <stddef.h>

#include "kvx/numeric.h"

/**
 * Convert @n elements: dst = encode(decode(src) * src_scale / dst_scale). Scales of 1 change
 * nothing. @stream: whole lines of the target bypass the cache where possible.
 */
typedef void (*kvx_convert_fn)(void *dst, const void *src, size_t n, float src_scale,
                               float dst_scale, bool stream);

/**
 * A rectangle of units, `size` contiguous bytes each. Unit (u, t) of n_units x n_tokens is at u *
 * step + t * token on either side. Packed layouts are such transpositions.
 */
struct kvx_units {
    char *dst;
    const char *src;
    int64_t dst_step, dst_token;
    int64_t src_step, src_token;
    uint32_t n_units, n_tokens;
    uint32_t size;
    bool stream; /* the target bypasses the cache */
};

struct kvx_isa {
    const char *name;
    /**
     * Copy bytes past the cache: full aligned lines of the target are written without reading them.
     */
    void (*stream)(char *dst, const char *src, size_t n);
    /** Order streamed stores before all later accesses. */
    void (*fence)(void);
    /** Move rectangles of 16-byte units; scalar.c moves other sizes. */
    void (*units16)(const struct kvx_units *units);
    /** [src][dst], indexed by kvx_dtype_t; NULL where the dtypes are equal and no FP8. */
    kvx_convert_fn convert[KVX_DTYPE_F8_E5M2 + 1][KVX_DTYPE_F8_E5M2 + 1];
};

/** Constants of kvx_f32_to_e4m3 or kvx_f32_to_e5m2; one vector function serves both. */
struct kvx_fp8 {
    uint32_t max, smallest; /* F32 bits of the largest value, and of the smallest normal one */
    float magic;            /* its ulp is that of subnormal results */
    uint32_t half, bias;
    uint32_t shift;
};
static const struct kvx_fp8 kvx_fp8_e4m3 = {0x43e00000, 0x3c800000, 16384.0F,
                                            0x7ffff,    0x3c000000, 20};
static const struct kvx_fp8 kvx_fp8_e5m2 = {0x47600000, 0x38800000, 128.0F,
                                            0xfffff,    0x38000000, 21};

/** Fill the whole table with portable code. */
void kvx_isa_scalar(struct kvx_isa *isa);

/**
 * Replace the functions in which this set is better. Returns false when the set isn't built in, or
 * the machine lacks it.
 */
bool kvx_isa_avx2(struct kvx_isa *isa);
bool kvx_isa_avx512(struct kvx_isa *isa);
bool kvx_isa_neon(struct kvx_isa *isa);

/**
 * Return the machine's best set. $KVX_ISA = scalar, avx2 or avx512 selects a lesser one (read once,
 * for tests and measurements). Thread-safe.
 */
const struct kvx_isa *kvx_isa_get(void);

/** Move a rectangle with any unit size and strides. */
void kvx_units_scalar(const struct kvx_units *units);

#endif
