// SPDX-License-Identifier: Apache-2.0
/* The portable inner loops, and the choice between instruction sets. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/isa/isa.h"
#include "kvx_ext.h"

/*
 * Write along the smaller target stride in the inner loop. Consecutive stores that fill a line
 * combine, and loads come from lines that stay in L1.
 */
#define UNITS(name, bytes)                                         \
    static void name(const struct kvx_units *u)                    \
    {                                                              \
        bool by_token = u->dst_token < u->dst_step;                \
        uint32_t n_outer = by_token ? u->n_units : u->n_tokens;    \
        uint32_t n_inner = by_token ? u->n_tokens : u->n_units;    \
        int64_t dst_inner = by_token ? u->dst_token : u->dst_step; \
        int64_t src_inner = by_token ? u->src_token : u->src_step; \
        int64_t dst_outer = by_token ? u->dst_step : u->dst_token; \
        int64_t src_outer = by_token ? u->src_step : u->src_token; \
                                                                   \
        for (uint32_t i = 0; i < n_outer; i++) {                   \
            const char *src = u->src + i * src_outer;              \
            char *dst = u->dst + i * dst_outer;                    \
                                                                   \
            for (uint32_t j = 0; j < n_inner; j++) {               \
                memcpy(dst, src, bytes);                           \
                dst += dst_inner;                                  \
                src += src_inner;                                  \
            }                                                      \
        }                                                          \
    }

UNITS(units1, 1)
UNITS(units2, 2)
UNITS(units4, 4)
UNITS(units8, 8)
UNITS(units16, 16)
UNITS(units32, 32)
UNITS(units64, 64)
UNITS(units_any, u->size)

void kvx_units_scalar(const struct kvx_units *units)
{
    switch (units->size) {
    case 1:
        units1(units);
        break;
    case 2:
        units2(units);
        break;
    case 4:
        units4(units);
        break;
    case 8:
        units8(units);
        break;
    case 16:
        units16(units);
        break;
    case 32:
        units32(units);
        break;
    case 64:
        units64(units);
        break;
    default:
        units_any(units);
        break;
    }
}

static void stream(char *dst, const char *src, size_t n)
{
    memcpy(dst, src, n);
}

static void fence(void)
{
}

/* The dtype is a constant in each instance, so the switches in decode and encode fold away. */
#define CONVERT(name, from, from_size, to, to_size)                                              \
    static void name(void *dst, const void *src, size_t n, float src_scale, float dst_scale,     \
                     bool stream_it)                                                             \
    {                                                                                            \
        const char *in = src;                                                                    \
        char *out = dst;                                                                         \
                                                                                                 \
        (void)stream_it;                                                                         \
        if (src_scale == 1.0F && dst_scale == 1.0F) {                                            \
            for (size_t i = 0; i < n; i++)                                                       \
                kvx_encode(to, kvx_decode(from, in + i * (from_size)), out + i * (to_size));     \
            return;                                                                              \
        }                                                                                        \
        for (size_t i = 0; i < n; i++)                                                           \
            kvx_encode(to,                                                                       \
                       kvx_scaled(kvx_decode(from, in + i * (from_size)), src_scale, dst_scale), \
                       out + i * (to_size));                                                     \
    }

#define CONVERT_FROM(tag, from, size)                                                     \
    CONVERT(tag##_to_f16, from, size, KVX_DTYPE_F16, 2)                                   \
    CONVERT(tag##_to_bf16, from, size, KVX_DTYPE_BF16, 2)                                 \
    CONVERT(tag##_to_f32, from, size, KVX_DTYPE_F32, 4)                                   \
    CONVERT(tag##_to_e4m3, from, size, KVX_DTYPE_F8_E4M3, 1)                              \
    CONVERT(tag##_to_e5m2, from, size, KVX_DTYPE_F8_E5M2, 1)                              \
    static const kvx_convert_fn tag##_to[] = {NULL,         tag##_to_f16,  tag##_to_bf16, \
                                              tag##_to_f32, tag##_to_e4m3, tag##_to_e5m2};

CONVERT_FROM(f16, KVX_DTYPE_F16, 2)
CONVERT_FROM(bf16, KVX_DTYPE_BF16, 2)
CONVERT_FROM(f32, KVX_DTYPE_F32, 4)
CONVERT_FROM(e4m3, KVX_DTYPE_F8_E4M3, 1)
CONVERT_FROM(e5m2, KVX_DTYPE_F8_E5M2, 1)

void kvx_isa_scalar(struct kvx_isa *isa)
{
    isa->name = "scalar";
    isa->stream = stream;
    isa->fence = fence;
    isa->units16 = units16;
    memset(isa->convert[KVX_DTYPE_INVALID], 0, sizeof(isa->convert[KVX_DTYPE_INVALID]));
    memcpy(isa->convert[KVX_DTYPE_F16], f16_to, sizeof(f16_to));
    memcpy(isa->convert[KVX_DTYPE_BF16], bf16_to, sizeof(bf16_to));
    memcpy(isa->convert[KVX_DTYPE_F32], f32_to, sizeof(f32_to));
    memcpy(isa->convert[KVX_DTYPE_F8_E4M3], e4m3_to, sizeof(e4m3_to));
    memcpy(isa->convert[KVX_DTYPE_F8_E5M2], e5m2_to, sizeof(e5m2_to));
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct kvx_isa chosen;

static void choose(void)
{
    const char *limit = getenv("KVX_ISA");

    kvx_isa_scalar(&chosen);
    if (limit && strcmp(limit, "scalar") == 0)
        return;
    kvx_isa_neon(&chosen);
    if (kvx_isa_avx2(&chosen) && !(limit && strcmp(limit, "avx2") == 0))
        kvx_isa_avx512(&chosen);
}

const struct kvx_isa *kvx_isa_get(void)
{
    pthread_once(&once, choose);
    return &chosen;
}

const char *kvx_host_isa(void)
{
    return kvx_isa_get()->name;
}
