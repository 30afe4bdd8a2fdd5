// SPDX-License-Identifier: Apache-2.0
/** Repeatable random numbers: KV_TEST_SEED; KV_TEST_SCALE percent of the usual rounds. */
#ifndef KV_TEST_INDEX_RANDOM_H
#define KV_TEST_INDEX_RANDOM_H

#include <stdint.h>
#include <stdlib.h>

struct rng {
    uint64_t state;
};

/** Make different numbers of different numbers, the same in every run. */
static inline uint64_t rng_scatter(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline uint64_t rng_next(struct rng *rng)
{
    return rng_scatter(rng->state += UINT64_C(0x9e3779b97f4a7c15));
}

static inline uint32_t rng_below(struct rng *rng, uint32_t n)
{
    return (uint32_t)(rng_next(rng) % n);
}

static inline uint64_t test_seed(void)
{
    const char *text = getenv("KV_TEST_SEED");

    return text ? strtoull(text, NULL, 0) : 20260101;
}

/* Usual rounds, in percent; sanitizers make everything many times slower. */
static inline long test_rounds(long usual)
{
    const char *text = getenv("KV_TEST_SCALE");
    long percent = text ? strtol(text, NULL, 10) : 100;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    percent = text ? percent : 10;
#endif
    return usual * percent / 100 + 1;
}

#endif
