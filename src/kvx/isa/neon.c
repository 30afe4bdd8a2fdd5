// SPDX-License-Identifier: Apache-2.0
/*
 * AArch64: 8 elements at a time. Copies are the C library's, which is tuned for these machines.
 * scalar.c already moves units of 16 bytes in one register.
 */
#include "kvx/isa/isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define SIMD /* every AArch64 has it */
#define INLINE static inline __attribute__((always_inline))

enum { VECTOR = 16, STEP = 8 };

struct eight {
    float32x4_t low, high;
};

/* --------------------------------------------------------------------------------------------- */
/* Elements: to F32, and back to what is stored. NaNs become the canonical one. */

INLINE struct eight load_f32(const char *p)
{
    return (struct eight){vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)p)),
                          vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)p + 16))};
}

INLINE struct eight from_half(uint16x8_t half)
{
    float16x8_t h = vreinterpretq_f16_u16(half);

    return (struct eight){vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}

INLINE uint16x8_t load_u16(const char *p)
{
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)p));
}

INLINE struct eight load_f16(const char *p)
{
    return from_half(load_u16(p));
}

INLINE struct eight load_bf16(const char *p)
{
    uint16x8_t v = load_u16(p);

    return (struct eight){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)),
                          vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
}

/* E4M3's bits are an F16 that is 2^8 too small; no subnormal F32 occurs on the way. */
INLINE struct eight load_e4m3(const char *p)
{
    uint16x8_t b = vmovl_u8(vld1_u8((const uint8_t *)p));
    uint16x8_t magnitude = vandq_u16(b, vdupq_n_u16(0x7f));
    uint16x8_t sign = vshlq_n_u16(vsubq_u16(b, magnitude), 8);
    uint16x8_t nan = vceqq_u16(magnitude, vdupq_n_u16(0x7f));
    uint16x8_t half = vorrq_u16(vshlq_n_u16(magnitude, 7), sign);
    struct eight v = from_half(vbslq_u16(nan, vdupq_n_u16(0x7fff), half));

    return (struct eight){vmulq_n_f32(v.low, 256.0F), vmulq_n_f32(v.high, 256.0F)};
}

INLINE struct eight load_e5m2(const char *p)
{
    return from_half(vshll_n_u8(vld1_u8((const uint8_t *)p), 8));
}

INLINE uint32x4_t nans(float32x4_t v)
{
    return vmvnq_u32(vceqq_f32(v, v));
}

INLINE uint32x4_t quiet(float32x4_t v)
{
    return vbslq_u32(nans(v), vdupq_n_u32(0x7fffffff), vreinterpretq_u32_f32(v));
}

INLINE void store_f32(char *p, struct eight v)
{
    vst1q_u8((uint8_t *)p, vreinterpretq_u8_u32(quiet(v.low)));
    vst1q_u8((uint8_t *)p + 16, vreinterpretq_u8_u32(quiet(v.high)));
}

INLINE uint16x8_t nans_16(struct eight v)
{
    return vcombine_u16(vmovn_u32(nans(v.low)), vmovn_u32(nans(v.high)));
}

INLINE void store_u16(char *p, struct eight v, uint16x8_t bits)
{
    bits = vbslq_u16(nans_16(v), vdupq_n_u16(0x7fff), bits);
    vst1q_u8((uint8_t *)p, vreinterpretq_u8_u16(bits));
}

INLINE void store_f16(char *p, struct eight v)
{
    store_u16(p, v, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high)));
}

INLINE uint16x4_t round_bf16(float32x4_t v)
{
    uint32x4_t bits = vreinterpretq_u32_f32(v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));

    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}

INLINE void store_bf16(char *p, struct eight v)
{
    store_u16(p, v, vcombine_u16(round_bf16(v.low), round_bf16(v.high)));
}

INLINE uint16x4_t round_fp8(float32x4_t v, const struct kvx_fp8 c)
{
    uint32x4_t bits = vreinterpretq_u32_f32(v), odd, normal, tiny;
    uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
    uint32x4_t size = vminq_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)), vdupq_n_u32(c.max));
    int32x4_t right = vdupq_n_s32(-(int32_t)c.shift);
    float32x4_t sum = vaddq_f32(vreinterpretq_f32_u32(size), vdupq_n_f32(c.magic));

    odd = vandq_u32(vshlq_u32(size, right), vdupq_n_u32(1));
    normal = vshlq_u32(vaddq_u32(vaddq_u32(size, vdupq_n_u32(c.half - c.bias)), odd), right);
    tiny = vsubq_u32(vreinterpretq_u32_f32(sum), vreinterpretq_u32_f32(vdupq_n_f32(c.magic)));
    normal = vbslq_u32(vcltq_u32(size, vdupq_n_u32(c.smallest)), tiny, normal);
    normal = vbslq_u32(nans(v), vdupq_n_u32(0x7f), vorrq_u32(normal, sign));
    return vmovn_u32(normal);
}

INLINE void store_e4m3(char *p, struct eight v)
{
    vst1_u8((uint8_t *)p, vmovn_u16(vcombine_u16(round_fp8(v.low, kvx_fp8_e4m3),
                                                 round_fp8(v.high, kvx_fp8_e4m3))));
}

INLINE void store_e5m2(char *p, struct eight v)
{
    vst1_u8((uint8_t *)p, vmovn_u16(vcombine_u16(round_fp8(v.low, kvx_fp8_e5m2),
                                                 round_fp8(v.high, kvx_fp8_e5m2))));
}

INLINE struct eight scaled(struct eight v, float s, float t)
{
    if (s != 1.0F)
        v = (struct eight){vmulq_n_f32(v.low, s), vmulq_n_f32(v.high, s)};
    if (t != 1.0F)
        v = (struct eight){vdivq_f32(v.low, vdupq_n_f32(t)), vdivq_f32(v.high, vdupq_n_f32(t))};
    return v;
}

#define STORE(p, to, size, v) store_##to(p, v)
#define LINES(from, from_size, to, to_size) (void)past_cache

#include "kvx/isa/simd.h"

bool kvx_isa_neon(struct kvx_isa *isa)
{
    isa->name = "neon";
    convert_with_these(isa);
    return true;
}

#else

bool kvx_isa_neon(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}

#endif
