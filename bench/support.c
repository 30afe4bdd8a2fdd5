// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/core/clock.h"

/* True when @arg is one of the names in "[name|name]...". */
static bool is_named(const char *args, const char *arg)
{
    size_t len = strlen(arg);

    for (const char *at = args + 1; len && (at = strstr(at, arg)); at++)
        if (strchr("[|", at[-1]) && strchr("|]", at[len]))
            return true;
    return false;
}

void bench_usage(int argc, char **argv, const char *args)
{
    bool help = false, wrong = !args && argc > 1;
    bool names = args && strstr(args, "]...") && !strchr(args, '='); /* fixed ones, no NAME=VALUE */

    for (int i = 1; i < argc; i++) {
        help |= !strcmp(argv[i], "--help") || !strcmp(argv[i], "-h");
        wrong |= names && !is_named(args, argv[i]);
    }
    if (!help && !wrong)
        return;
    fprintf(help ? stdout : stderr, "usage: %s %s\n", program_invocation_short_name,
            args ? args : "");
    exit(help ? 0 : 2);
}

uint64_t bench_number(int argc, char **argv, int i, uint64_t fallback)
{
    char *end;
    uint64_t value;

    if (i >= argc)
        return fallback;
    errno = 0;
    value = strtoull(argv[i], &end, 10);
    if (errno || end == argv[i] || *end || argv[i][0] == '-')
        bench_die(argv[i], -EINVAL);
    return value;
}

bool bench_chosen(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc < 2;
}

__attribute__((format(printf, 1, 0))) static void put(const char *members, va_list args)
{
    char fmt[1024];
    size_t len = strlen(members);

    if (len >= sizeof(fmt))
        bench_die("a line's format is too long", 0);
    for (size_t i = 0; i <= len; i++)
        fmt[i] = members[i] == '\'' ? '"' : members[i];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* @members is one, but for its quotes */
    vprintf(fmt, args);
#pragma GCC diagnostic pop
}

void bench_line(const char *bench, const char *members, ...)
{
    va_list args;

    printf("{\"bench\":\"%s\",", bench);
    va_start(args, members);
    put(members, args);
    va_end(args);
    bench_end();
}

void bench_begin(const char *bench, const char *members, ...)
{
    va_list args;

    printf("{\"bench\":\"%s\",", bench);
    va_start(args, members);
    put(members, args);
    va_end(args);
}

void bench_more(const char *members, ...)
{
    va_list args;

    putchar(',');
    va_start(args, members);
    put(members, args);
    va_end(args);
}

void bench_end(void)
{
    puts("}");
    fflush(stdout);
}

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
