// SPDX-License-Identifier: Apache-2.0
/* Reading traces: accepted lines, refused lines, and the errors of these. */
#include <errno.h>
#include <unistd.h>

#include "base/unit.h"
#include "cli/replay/trace.h"

#define GOOD \
    "{\"timestamp\": 5, \"input_length\": 1024, \"output_length\": 7, \"hash_ids\": [3, 4]}"

/* A file with @text, read. */
static int read_text(const char *text, size_t len, struct kc_trace *trace, struct kv_error *error)
{
    char path[] = "/tmp/kvasir-test-trace-XXXXXX";
    int fd = mkstemp(path), rc;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, len), (ssize_t)len);
    close(fd);
    rc = kc_trace_read(path, trace, error);
    unlink(path);
    return rc;
}

static void test_lines(void **state)
{
    const char *text =
        "\n" GOOD "\r\n   \n"
        "{\"hash_ids\":[18446744073709551615],\"extra\":{\"a\":[1,null]},\"timestamp\":5.75,"
        "\"input_length\":1,\"output_length\":0}"; /* no newline at the end */
    struct kc_trace trace = {0};
    struct kv_error error = {0};

    (void)state;
    assert_int_equal(read_text(text, strlen(text), &trace, &error), 0);
    assert_int_equal(trace.n_requests, 2);
    assert_int_equal(trace.n_ids, 3);
    assert_int_equal(trace.requests[0].timestamp_ms, 5);
    assert_int_equal(trace.requests[0].input_length, 1024);
    assert_int_equal(trace.requests[0].output_length, 7);
    assert_int_equal(trace.requests[0].n, 2);
    assert_int_equal(trace.ids[trace.requests[0].first], 3);
    assert_int_equal(trace.ids[trace.requests[0].first + 1], 4);
    assert_int_equal(trace.requests[1].timestamp_ms, 5);
    assert_true(trace.ids[trace.requests[1].first] == UINT64_MAX);
    kc_trace_fini(&trace);
}

static void test_bad_lines(void **state)
{
    static const struct {
        const char *line, *why;
    } cases[] = {
        {"{", "byte 1"},
        {"[]", "byte 0"},
        {"nonsense", "byte 1"},
        {GOOD " x", "byte"},
        {"{\"timestamp\":1,\"input_length\":9,\"output_length\":1}", "hash_ids is missing"},
        {"{\"timestamp\":1,\"input_length\":9,\"hash_ids\":[1]}", "output_length is missing"},
        {"{\"timestamp\":1,\"output_length\":9,\"hash_ids\":[1]}", "input_length is missing"},
        {"{\"input_length\":1,\"output_length\":9,\"hash_ids\":[1]}", "timestamp is missing"},
        {"{\"timestamp\":1,\"input_length\":9,\"output_length\":1,\"hash_ids\":[]}", "empty"},
        {"{\"timestamp\":1,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1,2]}",
         "2 hash_ids for 9"},
        {"{\"timestamp\":1,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1.5]}", "byte"},
        {"{\"timestamp\":1,\"input_length\":9,\"output_length\":1,\"hash_ids\":\"1\"}", "byte"},
        {"{\"timestamp\":-1,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1]}", "timestamp"},
        {"{\"timestamp\":1e300,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1]}",
         "timestamp"},
        {"{\"timestamp\":1,\"input_length\":4294967296,\"output_length\":1,\"hash_ids\":[1]}",
         "byte"},
    };
    struct kc_trace trace = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_error error = {0};

        if (kc_trace_parse_line(&trace, cases[i].line, strlen(cases[i].line), &error) >= 0)
            fail_msg("accepted: %s", cases[i].line);
        assert_true(error.code < 0);
        if (!strstr(error.text, cases[i].why))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].line, error.text, cases[i].why);
        assert_int_equal(trace.n_requests, 0);
        assert_int_equal(trace.n_ids, 0);
    }
    kc_trace_fini(&trace);
}

static void test_line_numbers(void **state)
{
    struct kc_trace trace = {0};
    struct kv_error error = {0};
    const char *text = GOOD "\n\n" GOOD "\n{\"timestamp\": 4}\n" GOOD;
    const char *back =
        GOOD "\n{\"timestamp\":4,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1]}\n";

    (void)state;
    assert_true(read_text(text, strlen(text), &trace, &error) < 0);
    assert_non_null(strstr(error.text, ":4: "));
    assert_null(trace.requests);
    assert_true(read_text(back, strlen(back), &trace, &error) < 0);
    assert_non_null(strstr(error.text, ":2: timestamp goes back"));
    assert_int_equal(read_text("\n \n", 3, &trace, &error), -EPROTO);
    assert_non_null(strstr(error.text, "no requests"));
}

static void test_limits(void **state)
{
    struct kc_trace trace = {0};
    struct kv_error error = {0};
    size_t len = KC_TRACE_MAX_LINE + 100;
    char *text = malloc(len);

    (void)state;
    assert_non_null(text);
    memset(text, ' ', len);
    memcpy(text, GOOD "\n", sizeof(GOOD));
    assert_int_equal(read_text(text, len, &trace, &error), -EMSGSIZE);
    assert_non_null(strstr(error.text, ":2: line longer than"));
    /* A long line within the limit is fine. */
    assert_int_equal(read_text(text, KC_TRACE_MAX_LINE / 2, &trace, &error), 0);
    kc_trace_fini(&trace);
    free(text);
}

static void test_unreadable(void **state)
{
    struct kc_trace trace = {0};
    struct kv_error error = {0};

    (void)state;
    assert_int_equal(kc_trace_read("/nonexistent/trace.jsonl", &trace, &error), -ENOENT);
    assert_non_null(strstr(error.text, "/nonexistent/trace.jsonl"));
    assert_true(kc_trace_read("/tmp", &trace, &error) < 0);
}

static void test_measure(void **state)
{
    static const char *const lines[] = {
        "{\"timestamp\":0,\"input_length\":1500,\"output_length\":10,\"hash_ids\":[0,1,2]}",
        "{\"timestamp\":9,\"input_length\":1024,\"output_length\":20,\"hash_ids\":[0,1]}",
        /* the same id in another place is another prefix */
        "{\"timestamp\":12,\"input_length\":600,\"output_length\":30,\"hash_ids\":[5,1]}",
    };
    struct kc_trace trace = {0};
    struct kc_trace_stats stats;

    (void)state;
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(kc_trace_parse_line(&trace, lines[i], strlen(lines[i]), NULL), 0);
    assert_int_equal(kc_trace_measure(&trace, &stats), 0);
    assert_int_equal(stats.requests, 3);
    assert_int_equal(stats.ids, 7);
    assert_int_equal(stats.distinct, 5);
    assert_int_equal(stats.max_input, 1500);
    assert_int_equal(stats.median_input, 1024);
    assert_int_equal(stats.span_ms, 12);
    assert_true(stats.mean_output == 20);
    assert_true(stats.mean_input > 1041.3 && stats.mean_input < 1041.4);
    assert_true(stats.reuse > 0.2857 && stats.reuse < 0.2858);
    kc_trace_fini(&trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),        cmocka_unit_test(test_bad_lines),
        cmocka_unit_test(test_line_numbers), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_unreadable),   cmocka_unit_test(test_measure),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
