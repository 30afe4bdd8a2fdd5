// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/clock.h"

void bench_die(const char *what, int rc)
{
    if (rc < 0)
        fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(-rc));
    else
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
    exit(1);
}

int bench_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof(*values), bench_by_value);
    return values[n / 2];
}

void bench_sample(struct bench_samples *samples, double value)
{
    if (samples->n < BENCH_ROUNDS_MAX)
        samples->of[samples->n++] = value;
}

double bench_middle(struct bench_samples *samples)
{
    return bench_median(samples->of, (size_t)samples->n);
}

double bench_cpu_ns(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e9 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e3;
}

uint64_t bench_thread_cpu_ns(void)
{
    return kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID);
}
