// SPDX-License-Identifier: Apache-2.0

#include <errno.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "redis/resp.h"

static void *copy(const char *data, size_t len)
{
    void *memory = malloc(len ? len : 1); /* of its exact size, for sanitizers */

    assert_non_null(memory);
    memcpy(memory, data, len);
    return memory;
}

/* Feed @text in pieces of @step bytes; the result of the last one. */
static int parse(const char *text, size_t len, size_t step, struct resp_value *ret,
                 size_t *ret_used)
{
    struct resp_parser *parser = malloc(sizeof(*parser));
    int rc = 0;

    assert_non_null(parser);
    resp_init(parser);
    *ret_used = 0;
    while (rc == 0 && *ret_used < len) {
        size_t take = len - *ret_used < step ? len - *ret_used : step, used = 0;
        char *piece = copy(text + *ret_used, take);

        rc = resp_feed(parser, piece, take, &used, ret);
        free(piece);
        *ret_used += used;
        assert_true(rc != 0 || used == take);
    }
    resp_fini(parser);
    free(parser);
    return rc;
}

static void test_kinds(void **state)
{
    static const char text[] =
        "*6\r\n+OK\r\n-ERR no\r\n:-42\r\n$5\r\na\r\nbc\r\n$-1\r\n*2\r\n*0\r\n$0\r\n\r\n+next";
    struct resp_value v = {0};
    size_t used;

    (void)state;
    for (size_t step = 1; step < sizeof(text); step++) {
        assert_int_equal(parse(text, sizeof(text) - 1, step, &v, &used), 1);
        assert_int_equal(used, sizeof(text) - 1 - 5); /* what follows isn't touched */
        assert_int_equal(v.type, RESP_ARRAY);
        assert_int_equal(v.n, 6);
        assert_int_equal(v.items[0].type, RESP_STATUS);
        assert_string_equal(v.items[0].str, "OK");
        assert_int_equal(v.items[1].type, RESP_ERROR);
        assert_string_equal(v.items[1].str, "ERR no");
        assert_int_equal(v.items[2].num, -42);
        assert_int_equal(v.items[3].len, 5);
        assert_memory_equal(v.items[3].str, "a\r\nbc", 6);
        assert_int_equal(v.items[4].type, RESP_NULL);
        assert_int_equal(v.items[5].items[0].type, RESP_ARRAY);
        assert_int_equal(v.items[5].items[0].n, 0);
        assert_int_equal(v.items[5].items[1].type, RESP_BULK);
        assert_int_equal(v.items[5].items[1].len, 0);
        resp_value_fini(&v);
    }
}

static void test_direct(void **state)
{
    struct resp_parser *parser = malloc(sizeof(*parser));
    struct resp_value v = {0};
    size_t used;
    void *to;

    (void)state;
    assert_non_null(parser);
    resp_init(parser);
    assert_int_equal(resp_direct(parser, &to), 0);
    assert_int_equal(resp_feed(parser, "$6\r\nab", 6, &used, &v), 0);
    assert_int_equal(resp_direct(parser, &to), 6); /* cdef and the line's end */
    memcpy(to, "cdef", 4);
    assert_int_equal(resp_filled(parser, 4, &v), 0);
    assert_int_equal(resp_direct(parser, &to), 2);
    memcpy(to, "\r\n", 2);
    assert_int_equal(resp_filled(parser, 2, &v), 1);
    assert_string_equal(v.str, "abcdef");
    resp_value_fini(&v);
    free(parser);
}

static void test_refused(void **state)
{
    static const char *const cases[] = {"\r\n",
                                        "\n",
                                        "+OK\n",
                                        "%1\r\n",
                                        ":\r\n",
                                        ":1x\r\n",
                                        ":--1\r\n",
                                        ":+1\r\n",
                                        "$-2\r\n",
                                        "$536870913\r\n",
                                        "$1\r\nabc",
                                        "*-2\r\n",
                                        "*1048577\r\n",
                                        "*2\r\n*600000\r\n*0\r\n",
                                        "*2\r\n$1\r\na\r\n$536870912\r\n",
                                        "*2\r\n+a\r\n$536870912\r\n",
                                        "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
                                        ":9999999999999999999\r\n",
                                        "HTTP/1.1 400 Bad Request\r\n",
                                        "*1\r\n\r\n"};
    static const char nested[] = "*2\r\n*1048570\r\n:1\r\n";
    struct resp_value v = {0};
    size_t used;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        for (size_t step = 1; step < 20; step += 6) {
            int rc = parse(cases[i], strlen(cases[i]), step, &v, &used);

            if (i == 13) /* not too many yet: 600002 */
                assert_int_equal(rc, 0);
            else
                assert_int_equal(rc, -EPROTO);
        }
    assert_int_equal(parse(nested, sizeof(nested) - 1, 3, &v, &used), 0); /* freed half-parsed */
}

static void test_long_line(void **state)
{
    size_t len = RESP_MAX_LINE + 10, used;
    char *text = malloc(len);
    struct resp_value v = {0};

    (void)state;
    assert_non_null(text);
    memset(text, 'x', len);
    text[0] = '-';
    assert_int_equal(parse(text, len, 1000, &v, &used), -EPROTO);
    memcpy(text + RESP_MAX_LINE - 2, "\r\n", 2);
    assert_int_equal(parse(text, RESP_MAX_LINE, 1000, &v, &used), 1);
    assert_int_equal(v.len, RESP_MAX_LINE - 3);
    resp_value_fini(&v);
    free(text);
}

/* A reply without room is skipped: the caller gets its length, and the next reply is parsed. */
static void test_room(void **state)
{
    static const char text[] = "*4\r\n$3\r\nabc\r\n$6\r\nde\r\nfg\r\n$2\r\nhi\r\n:1\r\n";
    static const enum resp_type kinds[] = {RESP_BULK, RESP_SKIPPED, RESP_BULK, RESP_INT};
    static const size_t lens[] = {3, 6, 2, 0};

    (void)state;
    for (size_t step = 1; step < sizeof(text); step++) {
        struct resp_value v = {0};
        struct resp_parser *parser = malloc(sizeof(*parser));
        uint64_t room = 5;
        size_t at = 0, used;
        int rc = 0;

        assert_non_null(parser);
        resp_init(parser);
        parser->room = &room;
        for (; rc == 0 && at < sizeof(text) - 1; at += used) {
            size_t take = KV_MIN(step, sizeof(text) - 1 - at);
            char *piece = copy(text + at, take);

            rc = resp_feed(parser, piece, take, &used, &v);
            free(piece);
        }
        assert_int_equal(rc, 1);
        assert_int_equal(at, sizeof(text) - 1);
        assert_int_equal(room, 0);
        for (size_t i = 0; i < 4; i++) {
            assert_int_equal(v.items[i].type, kinds[i]);
            assert_int_equal(v.items[i].len, lens[i]);
        }
        resp_value_fini(&v);
        resp_init(parser);
        room = 0;
        parser->room = &room;
        assert_int_equal(resp_feed(parser, "$1\r\nab\n", 8, &used, &v), -EPROTO);
        resp_fini(parser);
        free(parser);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_room),      cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_direct),    cmocka_unit_test(test_refused),
        cmocka_unit_test(test_long_line),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
