// SPDX-License-Identifier: Apache-2.0
/* The bound for lines on standard error, under a clock of the test's own. */
#include "base/core/log_bound.h"

#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/unit.h"

static uint64_t now_ns = 1000 * KV_NS_PER_S;

int clock_gettime(clockid_t id, struct timespec *ret)
{
    (void)id;
    *ret = (struct timespec){(time_t)(now_ns / KV_NS_PER_S), (long)(now_ns % KV_NS_PER_S)};
    return 0;
}

static void pass_s(uint64_t seconds)
{
    now_ns += seconds * KV_NS_PER_S;
}

/* Number of lines that pass out of @n, each with another chunk. @ret_left_out: of the last one. */
static int passed(const char *format, int n, unsigned long *ret_left_out)
{
    int passed = 0;
    char line[300];

    for (int i = 0; i < n; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(line, sizeof(line), format, i);
#pragma GCC diagnostic pop
        passed += kv_log_bound(line, ret_left_out);
    }
    return passed;
}

static const char full[] = "time=1 level=error component=store msg=\"can't make a file\" dir=/a "
                           "name=c%d error=\"No space\"";
static const char full_b[] = "time=1 level=error component=store msg=\"can't make a file\" dir=/b "
                             "name=c%d error=\"No space\"";
static const char other_msg[] =
    "time=1 level=error component=store msg=\"can't sync\" dir=/a name=c%d";
static const char json[] =
    "{\"time\":\"1\",\"component\":\"s3\",\"msg\":\"request failed\",\"path\":%d}";

static void a_flood_is_bounded(void **state)
{
    unsigned long left_out = 99;
    (void)state;

    assert_int_equal(passed(full, 20000, &left_out), 10);
    assert_int_equal(left_out, 0);
    assert_int_equal(passed(full_b, 20000, &left_out), 10); /* another store */
    assert_int_equal(passed(other_msg, 20000, &left_out), 10);
    assert_int_equal(passed(json, 20000, &left_out), 10);
    for (int i = 0; i < 5; i++) { /* one each 10 s, while it lasts */
        pass_s(10);
        assert_int_equal(passed(full, 500, &left_out), 1);
        assert_int_equal(left_out, i ? 499 : 19990);
    }
    pass_s(30); /* quiet again */
    assert_int_equal(passed(full, 1, &left_out), 1);
    assert_int_equal(left_out, 499);
    assert_int_equal(passed(full, 9, &left_out), 9);
    assert_int_equal(left_out, 0);
}

static void a_trickle_is_not(void **state)
{
    unsigned long left_out;
    (void)state;

    pass_s(100);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(passed(full, 1, &left_out), 1);
        assert_int_equal(left_out, 0);
        pass_s(1);
    }
}

/* A table of kinds has an end: many stores at once are each bounded, or printed, never silent. */
static void every_store_is_heard(void **state)
{
    static const char format[] = "level=error component=store msg=m dir=/%d";
    unsigned long left_out;
    char line[100];
    (void)state;

    pass_s(100);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 2000; i++) {
            snprintf(line, sizeof(line), format, i);
            if (round == 0)
                assert_true(kv_log_bound(line, &left_out));
            else
                kv_log_bound(line, &left_out);
        }
}

/* Print through the log. */
static void the_log_says_how_many(void **state)
{
    int fds[2], saved = dup(STDERR_FILENO), n_lines = 0;
    char text[20000];
    ssize_t n;
    (void)state;

    pass_s(100);
    assert_int_equal(pipe2(fds, O_NONBLOCK), 0);
    dup2(fds[1], STDERR_FILENO);
    for (int i = 0; i < 1000; i++)
        kv_log_error("store", "can't write a file", "dir=/x name=%d", i);
    pass_s(10);
    for (int i = 0; i < 1000; i++)
        kv_log_error("store", "can't write a file", "dir=/x name=%d", i);
    dup2(saved, STDERR_FILENO);
    n = read(fds[0], text, sizeof(text) - 1);
    assert_true(n > 0);
    text[n] = '\0';
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        n_lines++;
    assert_int_equal(n_lines, 11);
    assert_non_null(strstr(text, "name=0 left_out=990\n"));
    close(fds[0]);
    close(fds[1]);
    close(saved);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flood_is_bounded),
        cmocka_unit_test(a_trickle_is_not),
        cmocka_unit_test(every_store_is_heard),
        cmocka_unit_test(the_log_says_how_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
