// SPDX-License-Identifier: Apache-2.0
/** Helpers of the benchmarks: arguments, lines of JSON, ends, medians, clocks. */
#ifndef KV_BENCH_SUPPORT_H
#define KV_BENCH_SUPPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Print the usage and end the program where an argument is --help or -h (status 0), and where one
 * can't be right (status 2). @args: what may follow the program's name; NULL: nothing; with
 * "[a|b]..." every argument is one of these names.
 */
void bench_usage(int argc, char **argv, const char *args);

/** Return argument @i as a number, or @fallback when there are fewer. Ends the program if it is none. */
uint64_t bench_number(int argc, char **argv, int i, uint64_t fallback);
/** True when an argument is @name, or when there are no arguments. */
bool bench_chosen(int argc, char **argv, const char *name);

/**
 * Print a figure: one line of JSON with the member "bench" and those of @members, a printf format in
 * which single quotes stand for double ones. In pieces: begin, more, end.
 */
void bench_line(const char *bench, const char *members, ...) __attribute__((format(printf, 2, 3)));
void bench_begin(const char *bench, const char *members, ...) __attribute__((format(printf, 2, 3)));
void bench_more(const char *members, ...) __attribute__((format(printf, 1, 2)));
void bench_end(void);

/** Print "PROGRAM: WHAT" and, unless @rc is 0, the error (@rc: a negative errno); exit with 1. */
_Noreturn void bench_die(const char *what, int rc);

/** Compare doubles, for qsort. */
int bench_by_value(const void *a, const void *b);
/** Sort @values and return the median. */
double bench_median(double *values, size_t n);

/** Rounds of one figure. */
enum { BENCH_ROUNDS_MAX = 15 };
struct bench_samples {
    double of[BENCH_ROUNDS_MAX]; /* sorted after the median was computed */
    int n;
};
/** Add a value; those beyond BENCH_ROUNDS_MAX are dropped. */
void bench_sample(struct bench_samples *samples, double value);
double bench_middle(struct bench_samples *samples);

/** CPU time of this process in nanoseconds, kernel included. */
double bench_cpu_ns(void);
/** CPU time of the calling thread in nanoseconds. */
uint64_t bench_thread_cpu_ns(void);

#endif
