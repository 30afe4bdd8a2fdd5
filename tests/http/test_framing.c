// SPDX-License-Identifier: Apache-2.0
#include "http/framing.h"

#include "base/core/error.h"
#include "base/unit.h"

/* Header lines "Name: value|Name: value", as a reader of the wire has cut them. */
static const char *judge(const char *lines, const char *version)
{
    static char copy[512];
    struct kh_framing framing = {0};
    char *rest = copy, *line;

    snprintf(copy, sizeof(copy), "%s", lines);
    while ((line = strsep(&rest, "|"))) {
        char *colon = strchr(line, ':');

        assert_non_null(colon);
        *colon = '\0';
        colon += colon[1] == ' ' ? 2 : 1;
        kh_framing_header(&framing, line, strlen(line), colon, strlen(colon));
    }
    return kh_framing_problem(&framing, version);
}

static void clear_requests(void **state)
{
    static const char *const good[] = {
        "Host: a",
        "Host: a|Content-Length: 0",
        "Host: a|content-length: 007",
        "Host: a|Transfer-Encoding: chunked",
        "Host: a|TRANSFER-ENCODING: Chunked",
        "Host: a|X-Content-Length: 1|X-Content-Length: 2",
        "Host: a|Content-Length: 999999999999999999",
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(good); i++)
        if (judge(good[i], "HTTP/1.1"))
            fail_msg("%s: %s", good[i], judge(good[i], "HTTP/1.1"));
    assert_null(judge("Content-Length: 5", "HTTP/1.0"));
}

static void doubtful_requests(void **state)
{
    static const char *const bad[] = {
        "Content-Length: 1|Content-Length: 1",
        "Content-Length: 1|content-length: 2",
        "Content-Length: 1, 1",
        "Content-Length: 1 1",
        "Content-Length: +1",
        "Content-Length: -1",
        "Content-Length: 0x1",
        "Content-Length: 1.0",
        "Content-Length: 1e1",
        "Content-Length: ",
        "Content-Length: 1000000000000000000000",
        "Content-Length : 1",
        "Content-Length\t: 1",
        "Content Length: 1",
        ": 1",
        "Transfer-Encoding: chunked|Content-Length: 1",
        "Content-Length: 1|Transfer-Encoding: chunked",
        "Transfer-Encoding: chunked|Transfer-Encoding: chunked",
        "Transfer-Encoding: chunked|Transfer-Encoding: identity",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: \"chunked\"",
        "Transfer-Encoding: ",
        "Host: a|Host: a",
        "Authorization: a|Authorization: a",
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        if (!judge(bad[i], "HTTP/1.1"))
            fail_msg("accepted: %s", bad[i]);
    assert_non_null(judge("Transfer-Encoding: chunked", "HTTP/1.0"));
}

static void a_nul_in_a_value(void **state)
{
    struct kh_framing framing = {0};

    (void)state;
    kh_framing_header(&framing, "X", 1, "a\0b", 3);
    assert_non_null(kh_framing_problem(&framing, "HTTP/1.1"));
}

/* @text as a reader leaves it that cuts at ':' and at '|' (CRLF) or '^' (a bare LF), in place. */
static const char *judge_layout(const char *text)
{
    static char raw[512];
    struct kh_framing framing = {0};
    size_t len = 0;
    char *at, *version;

    for (const char *p = text; *p; p++) {
        raw[len++] = strchr("|^~", *p) ? '\0' : *p; /* ~: a NUL that was sent */
        if (*p == '|')
            raw[len++] = '\0';
    }
    version = raw + 6;
    kh_framing_expect_whole(&framing, raw, len, version);
    for (at = version + strlen(version); at < raw + len;) {
        char *name, *value;

        while (at < raw + len && *at == '\0')
            at++;
        name = at;
        at += strcspn(at, ":");
        if (at >= raw + len || *at != ':')
            break;
        *at++ = '\0';
        value = at + strspn(at, " ");
        at = value + strlen(value);
        kh_framing_header(&framing, name, strlen(name), value, strlen(value));
    }
    return kh_framing_problem(&framing, version);
}

static void gaps_between_lines(void **state)
{
    static const char *const good[] = {"GET / HTTP/1.1||", "GET / HTTP/1.1|Host: a||",
                                       "GET / HTTP/1.1|Host:a|X:|Y:   b c ||"};
    static const char *const bad[] = {"GET / HTTP/1.1^|",
                                      "GET / HTTP/1.1|^",
                                      "GET / HTTP/1.1^^",
                                      "GET / HTTP/1.1^Host: a||",
                                      "GET / HTTP/1.1|Host: a^|",
                                      "GET / HTTP/1.1|Host: a|^",
                                      "GET / HTTP/1.1|Host: a^X: b||",
                                      "GET / HTTP/1.1|Host: a~|X: b||",
                                      "GET / HTTP/1.1|Host: a~~|X: b||",
                                      "GET / HTTP/1.1|Host: a|Content-Length: 1~2||",
                                      "GET / HTTP/1.1|Host: a|X:~|Y: b||",
                                      "GET / HTTP/1.1|Host: a|",
                                      "GET / HTTP/1.1|Host: a|||"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(good); i++)
        if (judge_layout(good[i]))
            fail_msg("%s: %s", good[i], judge_layout(good[i]));
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        if (!judge_layout(bad[i]))
            fail_msg("accepted: %s", bad[i]);
}

static void a_line_that_lies_elsewhere(void **state)
{
    static const char raw[] = "GET\0/\0HTTP/1.1\0\0X\0a\0\0\0";
    struct kh_framing framing = {0};

    (void)state;
    kh_framing_expect_whole(&framing, raw, sizeof(raw), raw + 6);
    kh_framing_header(&framing, raw + 16, 1, raw + 18, 1);
    assert_null(kh_framing_problem(&framing, "HTTP/1.1"));
    memset(&framing, 0, sizeof(framing));
    kh_framing_expect_whole(&framing, raw, sizeof(raw), raw + 6);
    kh_framing_header(&framing, raw + 16, 1, "a", 1);
    assert_non_null(kh_framing_problem(&framing, "HTTP/1.1"));
}

static void what_it_keeps(void **state)
{
    struct kh_framing framing = {0};

    (void)state;
    kh_framing_header(&framing, "Content-Length", 14, "17", 2);
    kh_framing_header(&framing, "content-type", 12, "application/json", 16);
    kh_framing_header(&framing, "AUTHORIZATION", 13, "Bearer x", 8);
    kh_framing_header(&framing, "Expect", 6, "100-continue", 12);
    assert_null(kh_framing_problem(&framing, "HTTP/1.1"));
    assert_int_equal(framing.content_length, 17);
    assert_string_equal(framing.content_type, "application/json");
    assert_string_equal(framing.authorization, "Bearer x");
    assert_true(framing.expects);
    assert_false(kh_framing_chunked(&framing));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clear_requests),
        cmocka_unit_test(doubtful_requests),
        cmocka_unit_test(a_nul_in_a_value),
        cmocka_unit_test(gaps_between_lines),
        cmocka_unit_test(a_line_that_lies_elsewhere),
        cmocka_unit_test(what_it_keeps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
