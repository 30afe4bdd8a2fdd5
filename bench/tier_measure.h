// SPDX-License-Identifier: Apache-2.0
/* Helpers that the parts of tier_bench share: where they work, and medians of interleaved rounds. */
#ifndef KV_BENCH_TIER_MEASURE_H
#define KV_BENCH_TIER_MEASURE_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define TIER_MAX_ROUNDS 15

static inline void tier_die(const char *what, int rc)
{
    fprintf(stderr, "tier_bench: %s: %s\n", what, strerror(rc < 0 ? -rc : errno));
    exit(1);
}

struct tier_samples {
    double of[TIER_MAX_ROUNDS];
    int n;
};

static inline void tier_sample(struct tier_samples *s, double value)
{
    if (s->n < TIER_MAX_ROUNDS)
        s->of[s->n++] = value;
}

static inline int tier_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static inline double tier_median(struct tier_samples *s)
{
    qsort(s->of, (size_t)s->n, sizeof(s->of[0]), tier_by_value);
    return s->of[s->n / 2];
}

/* The part that measures the disk tier (tier_disk.h): works in @dir. */
void tier_bench_disk(const char *dir);

#endif
