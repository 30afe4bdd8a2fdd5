// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/hist.h"

#include "base/core/error.h"

/*
 * Return the bucket of a value. Values below 32 have a bucket each; above, bucket = 32 * (power -
 * 4) + the five bits that follow the highest one: [32, 64) continues at 32, [64, 128) has steps of
 * 2, and so on.
 */
static unsigned bucket_of(uint64_t value)
{
    unsigned power;

    if (value < KC_HIST_STEPS)
        return (unsigned)value;
    power = 63 - (unsigned)__builtin_clzll(value);
    return KC_HIST_STEPS * (power - 4) + (unsigned)((value >> (power - 5)) - KC_HIST_STEPS);
}

/* Return the largest value of @bucket. */
static uint64_t bucket_top(unsigned bucket)
{
    unsigned power = bucket / KC_HIST_STEPS + 4;

    if (bucket < KC_HIST_STEPS)
        return bucket;
    return ((uint64_t)(bucket % KC_HIST_STEPS + KC_HIST_STEPS + 1) << (power - 5)) - 1;
}

void kc_hist_record(struct kc_hist *hist, uint64_t value)
{
    uint64_t max = atomic_load_explicit(&hist->max, memory_order_relaxed);

    atomic_fetch_add_explicit(&hist->buckets[bucket_of(value)], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&hist->n, 1, memory_order_relaxed);
    while (value > max && !atomic_compare_exchange_weak_explicit(
                              &hist->max, &max, value, memory_order_relaxed, memory_order_relaxed))
        ;
}

uint64_t kc_hist_quantile(struct kc_hist *hist, double q)
{
    uint64_t n = atomic_load_explicit(&hist->n, memory_order_relaxed);
    uint64_t max = atomic_load_explicit(&hist->max, memory_order_relaxed);
    uint64_t rank = (uint64_t)(q * (double)n), seen = 0;

    if (n == 0)
        return 0;
    for (unsigned i = 0; i < KC_HIST_BUCKETS; i++) {
        seen += atomic_load_explicit(&hist->buckets[i], memory_order_relaxed);
        if (seen > rank)
            return KV_MIN(bucket_top(i), max);
    }
    return max;
}
