// SPDX-License-Identifier: Apache-2.0
#include "base/core/log.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "base/unit.h"

static char last[KV_LOG_MAX_LINE + 1];
static size_t n_lines;

static void keep(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    (void)level;
    memcpy(last, line, len);
    last[len] = '\0';
    n_lines++;
}

static int setup(void **state)
{
    (void)state;
    kv_log_set_sink(keep, NULL);
    kv_log_set_level(KV_LOG_INFO);
    kv_log_set_format(KV_LOG_LOGFMT);
    n_lines = 0;
    last[0] = '\0';
    return 0;
}

/* Return the logged line without its timestamp. */
static const char *tail(void)
{
    const char *space = strstr(last, "level");

    assert_non_null(space);
    return space;
}

static void logfmt_line(void **state)
{
    (void)state;
    kv_log_warn("indexer", "gap in the event stream", "worker=%d missing=%d", 1, 7);
    assert_int_equal(n_lines, 1);
    assert_string_equal(tail(),
                        "level=warn component=indexer msg=\"gap in the event stream\" worker=1 "
                        "missing=7");
    /* time=2026-01-02T03:04:05.678Z */
    assert_memory_equal(last, "time=20", 7);
    assert_int_equal(last[15], 'T');
    assert_int_equal(last[24], '.');
    assert_int_equal(last[28], 'Z');
    kv_log_info("x", "plain", NULL);
    assert_string_equal(tail(), "level=info component=x msg=plain");
}

static void levels(void **state)
{
    (void)state;
    kv_log_debug("x", "quiet", NULL);
    assert_int_equal(n_lines, 0);
    kv_log_set_level(KV_LOG_DEBUG);
    kv_log_debug("x", "heard", NULL);
    kv_log_set_level(KV_LOG_ERROR);
    kv_log_warn("x", "quiet", NULL);
    kv_log_error("x", "heard", NULL);
    assert_int_equal(n_lines, 2);
    assert_int_equal(kv_log_parse_level("error"), KV_LOG_ERROR);
    assert_int_equal(kv_log_parse_level("trace"), KV_LOG_TRACE);
    assert_int_equal(kv_log_parse_level("loud"), -EINVAL);
    assert_int_equal(kv_log_parse_level(""), -EINVAL);
}

static void json_line(void **state)
{
    char quoted[64];
    (void)state;

    kv_log_set_format(KV_LOG_JSON);
    kv_log_error("http", "bad \"body\"",
                 "peer=%s n=%d f=0.5 neg=-3 ok=true id=007 s=\"12\" v=1.2.3 flag e=1e5 end=%s",
                 kv_log_quote(quoted, sizeof(quoted), "a b\n\"c\"\\\x01"), 42, "\"\"");
    assert_string_equal(tail() - 1,
                        "\"level\":\"error\",\"component\":\"http\",\"msg\":\"bad \\\"body\\\"\","
                        "\"peer\":\"a b\\n\\\"c\\\"\\\\\\u0001\",\"n\":42,\"f\":0.5,\"neg\":-3,"
                        "\"ok\":true,\"id\":\"007\",\"s\":\"12\",\"v\":\"1.2.3\",\"flag\":true,"
                        "\"e\":\"1e5\",\"end\":\"\"}");
    assert_memory_equal(last, "{\"time\":\"20", 11);
}

/* Nobody can forge a second line or break the JSON, even past a caller who forgot to quote. */
static void hostile_fields(void **state)
{
    (void)state;
    kv_log_info("x", "two\nlines", "a=%s",
                "1\nlevel=error msg=forged\x7f\x1b[31m b=\xff\xfe \"q=\"open");
    for (const char *p = last; *p; p++)
        assert_true((unsigned char)*p >= 0x20 && *p != 0x7F);
    kv_log_set_format(KV_LOG_JSON);
    kv_log_info("x", "two\nlines", "a=%s", "1\nb=\xff\xfe \"q=\"open \xe2\x82\xac=\xe2\x82\xac");
    assert_string_equal(
        tail() - 1, "\"level\":\"info\",\"component\":\"x\",\"msg\":\"two\\nlines\",\"a\":1,"
                    "\"b\":\"\xEF\xBF\xBD\xEF\xBF\xBD\",\"q\":\"open \xe2\x82\xac=\xe2\x82\xac\"}");
}

static void long_line_is_cut_whole(void **state)
{
    char big[3 * KV_LOG_MAX_LINE];
    (void)state;

    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    for (int format = KV_LOG_LOGFMT; format <= KV_LOG_JSON; format++) {
        kv_log_set_format((enum kv_log_format)format);
        kv_log_info("x", "long", "a=1 b=%s c=2", big);
        assert_true(strlen(last) < KV_LOG_MAX_LINE);
        assert_null(strstr(last, "xxx"));
        assert_non_null(strstr(last, format == KV_LOG_JSON ? "\"a\":1,\"truncated\":true}"
                                                           : " a=1 truncated=true"));
    }
    for (size_t n = KV_LOG_MAX_LINE - 200; n < KV_LOG_MAX_LINE + 10; n++) {
        kv_log_info("x", "long", "b=%.*s", (int)n, big);
        assert_true(strlen(last) < KV_LOG_MAX_LINE);
        assert_int_equal(last[strlen(last) - 1], '}');
    }
}

static void quoting(void **state)
{
    char buf[16];
    (void)state;

    assert_string_equal(kv_log_quote(buf, sizeof(buf), "plain-1.2/x"), "plain-1.2/x");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), "two words"), "\"two words\"");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), "k=v"), "\"k=v\"");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), ""), "\"\"");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), NULL), "\"\"");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), "a\"b"), "\"a\\\"b\"");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), "aaaaaaaaaaaaaaaaaaaaaa"),
                        "aaaaaaaaaaaaaaa");
    assert_string_equal(kv_log_quote(buf, sizeof(buf), "a aaaaaaaaaaaaaaaaaaaa"),
                        "\"a aaaaaaaaaaa\"");
    assert_string_equal(kv_log_quote(buf, 6, "aaa\xe2\x82\xac"), "aaa");
    assert_string_equal(kv_log_quote(buf, 1, "x y"), "");
    assert_string_equal(kv_log_quote(buf, 2, "x y"), "x");
    assert_string_equal(kv_log_quote(buf, 2, " "), "");
}

static void rate_limit(void **state)
{
    struct kv_log_rate rate = {0};
    size_t allowed = 0, rounds = 0;
    uint64_t from = kv_now_ns();
    char expected[64];
    (void)state;

    for (int i = 0; i < 1000; i++)
        allowed += kv_log_allowed(&rate, 5);
    /* The burst once more with each second that began in between: on a busy machine, several. */
    assert_in_range(allowed, 5, 5 * (2 + (kv_now_ns() - from) / KV_NS_PER_S));
    while (!kv_log_allowed(&rate, 5)) { /* the next second */
        usleep(20000);
        assert_true(++rounds < 500);
    }
    kv_log_warn("x", "again", "a=1");
    snprintf(expected, sizeof(expected), " msg=again suppressed=%zu a=1", 1000 - allowed + rounds);
    assert_non_null(strstr(last, expected));
    kv_log_warn("x", "once", NULL);
    assert_null(strstr(last, "suppressed"));
    assert_false(kv_log_allowed(&rate, 0));
}

static struct kv_log_rate shared_rate;
static _Atomic size_t shared_allowed;

static void *hammer(void *arg)
{
    for (int i = 0; i < 20000; i++)
        if (kv_log_allowed(&shared_rate, 3))
            shared_allowed++;
    return arg;
}

static void rate_limit_is_shared(void **state)
{
    pthread_t threads[4];
    uint64_t begin = (uint64_t)time(NULL);
    (void)state;

    for (size_t i = 0; i < 4; i++)
        assert_int_equal(kv_thread_start(&threads[i], "hammer", hammer, NULL), 0);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_true(shared_allowed >= 3 && shared_allowed <= 3 * ((uint64_t)time(NULL) - begin + 2));
}

/* The default sink: whole lines, one write each. */
static void writes_to_stderr(void **state)
{
    int pipe_fds[2], saved = dup(STDERR_FILENO);
    char text[512] = "";
    ssize_t n;
    (void)state;

    assert_int_equal(pipe2(pipe_fds, O_DIRECT), 0); /* packets: a read returns one write */
    dup2(pipe_fds[1], STDERR_FILENO);
    kv_log_set_sink(NULL, NULL);
    kv_log_warn("x", "line", "a=1");
    dup2(saved, STDERR_FILENO);
    n = read(pipe_fds[0], text, sizeof(text) - 1);
    assert_true(n > 0);
    assert_string_equal(strstr(text, "level"), "level=warn component=x msg=line a=1\n");
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    close(saved);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(logfmt_line, setup),
        cmocka_unit_test_setup(levels, setup),
        cmocka_unit_test_setup(json_line, setup),
        cmocka_unit_test_setup(hostile_fields, setup),
        cmocka_unit_test_setup(long_line_is_cut_whole, setup),
        cmocka_unit_test_setup(quoting, setup),
        cmocka_unit_test_setup(rate_limit, setup),
        cmocka_unit_test_setup(rate_limit_is_shared, setup),
        cmocka_unit_test_setup(writes_to_stderr, setup),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
