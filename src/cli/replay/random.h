// SPDX-License-Identifier: Apache-2.0
/** Seeded random numbers that are the same on every machine. */
#ifndef KV_CLI_REPLAY_RANDOM_H
#define KV_CLI_REPLAY_RANDOM_H

#include <stdint.h>

#define KC_GOLDEN UINT64_C(0x9e3779b97f4a7c15)

/** Spread every bit of @x: a bijection (the finaliser of splitmix64). */
static inline uint64_t kc_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

struct kc_rng {
    uint64_t state;
};

static inline uint64_t kc_rng_u64(struct kc_rng *rng)
{
    rng->state += KC_GOLDEN;
    return kc_mix(rng->state);
}

/** Return 0 .. n - 1; @n is below 2^32. */
static inline uint32_t kc_rng_below(struct kc_rng *rng, uint32_t n)
{
    return (uint32_t)(((kc_rng_u64(rng) >> 32) * n) >> 32);
}

/** Return a number uniform in (0, 1). */
static inline double kc_rng_unit(struct kc_rng *rng)
{
    return ((double)(kc_rng_u64(rng) >> 12) + 0.5) * 0x1p-52;
}

#endif
