// SPDX-License-Identifier: Apache-2.0
/** Shared by all unit tests: cmocka's headers, a seeded generator, scaling of rounds. */
#ifndef KV_TESTS_BASE_UNIT_H
#define KV_TESTS_BASE_UNIT_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

/** KV_TEST_SEED, or one from the clock; printed, so that a failure can be repeated. */
static inline uint64_t unit_seed(void)
{
    const char *text = getenv("KV_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL);

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed * 2 + 1; /* the generator must not start from zero */
}

/** @rounds, times KV_TEST_SCALE percent (at least 1). */
static inline size_t unit_rounds(size_t rounds)
{
    const char *scale = getenv("KV_TEST_SCALE");
    size_t scaled = scale ? rounds * strtoul(scale, NULL, 10) / 100 : rounds;

    return scaled ? scaled : 1;
}

/** xorshift64*: good enough to choose test cases. */
static inline uint64_t unit_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static inline uint64_t unit_below(uint64_t *state, uint64_t n)
{
    return (unit_random(state) >> 11) % n;
}

/**
 * Freeze a child process and wait until all its threads are: the signal alone takes a moment, and longer
 * on a machine with other work. SIGCONT or SIGKILL ends it.
 */
static inline void unit_freeze(pid_t pid)
{
    int status;

    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
}

#endif
