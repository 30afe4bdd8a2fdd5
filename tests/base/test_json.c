// SPDX-License-Identifier: Apache-2.0
#include "base/json/json.h"

#include <inttypes.h>
#include <math.h>

#include "base/core/ascii.h"
#include "base/json_model.h"
#include "base/unit.h"

static struct kv_json read_text(const char *text)
{
    struct kv_json j;

    kv_json_init(&j, text, strlen(text));
    return j;
}

static void reads_a_request(void **state)
{
    static const char text[] =
        " {\"model_name\": \"llama\\u002d3\" , \"block_size\":16,\"x\":{\"y\":[1,{}]},"
        "\"t\":[1,2 , 3],\"lora\":null,\"d\":-1.5e2,\"ok\":true,\"\\u0069d\":-7}\n";
    struct kv_buf scratch = KV_BUF_INIT, tokens = KV_BUF_INIT;
    struct kv_json j = read_text(text);
    struct kv_str key, name = {NULL, 0};
    uint64_t block_size = 0, sum = 0, n = 0;
    int64_t id = 0;
    double d = 0;
    bool ok = false, null = false;
    (void)state;

    assert_int_equal(kv_json_peek(&j), KV_JSON_OBJECT);
    assert_true(kv_json_object(&j));
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "model_name"))
            name = kv_json_str(&j, &scratch);
        else if (kv_str_eq(key, "block_size"))
            block_size = kv_json_u64(&j, UINT32_MAX);
        else if (kv_str_eq(key, "t"))
            n = kv_json_u32_array(&j, &tokens);
        else if (kv_str_eq(key, "lora"))
            null = kv_json_null(&j);
        else if (kv_str_eq(key, "d"))
            d = kv_json_double(&j);
        else if (kv_str_eq(key, "ok"))
            ok = kv_json_bool(&j);
        else if (kv_str_eq(key, "id"))
            id = kv_json_i64(&j);
        else
            kv_json_skip(&j);
    }
    assert_int_equal(kv_json_finish(&j), 0);
    assert_true(kv_str_eq(name, "llama-3"));
    assert_int_equal(block_size, 16);
    assert_int_equal(n, 3);
    for (size_t i = 0; i < n; i++)
        sum += ((uint32_t *)(void *)tokens.data)[i];
    assert_int_equal(sum, 6);
    assert_true(null && ok && d == -150.0);
    assert_int_equal(id, -7);
    kv_buf_fini(&scratch);
    kv_buf_fini(&tokens);
}

static void integers_are_exact(void **state)
{
    static const struct {
        const char *text;
        int u64, i64, bits; /* error codes */
        uint64_t value;
    } cases[] = {
        {"0", 0, 0, 0, 0},
        {"18446744073709551615", 0, -ERANGE, 0, UINT64_MAX},
        {"18446744073709551616", -ERANGE, -ERANGE, -ERANGE, 0},
        {"18446744073709551620", -ERANGE, -ERANGE, -ERANGE, 0},
        {"99999999999999999999", -ERANGE, -ERANGE, -ERANGE, 0},
        {"100000000000000000000", -ERANGE, -ERANGE, -ERANGE, 0},
        {"9223372036854775807", 0, 0, 0, INT64_MAX},
        {"9223372036854775808", 0, -ERANGE, 0, UINT64_C(1) << 63},
        {"-9223372036854775808", -ERANGE, 0, 0, UINT64_C(1) << 63},
        {"-9223372036854775809", -ERANGE, -ERANGE, -ERANGE, 0},
        {"-1", -ERANGE, 0, 0, UINT64_MAX},
        {"-0", -ERANGE, 0, 0, 0},
        {"1.0", -EINVAL, -EINVAL, -EINVAL, 0},
        {"1e3", -EINVAL, -EINVAL, -EINVAL, 0},
        {"01", -EBADMSG, -EBADMSG, -EBADMSG, 0},
        {"+1", -EBADMSG, -EBADMSG, -EBADMSG, 0},
        {"-", -EBADMSG, -EBADMSG, -EBADMSG, 0},
        {"1.", -EBADMSG, -EBADMSG, -EBADMSG, 0},
        {"1e", -EBADMSG, -EBADMSG, -EBADMSG, 0},
        {"1 2", -EBADMSG, -EBADMSG, -EBADMSG, 1},
        {"\"1\"", -EINVAL, -EINVAL, -EINVAL, 0},
        {"", -EBADMSG, -EBADMSG, -EBADMSG, 0},
    };
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        for (int how = 0; how < 3; how++) {
            struct kv_json j = read_text(cases[i].text);
            int code = how == 0 ? cases[i].u64 : how == 1 ? cases[i].i64 : cases[i].bits;
            uint64_t value = how == 0   ? kv_json_u64(&j, UINT64_MAX)
                             : how == 1 ? (uint64_t)kv_json_i64(&j)
                                        : kv_json_bits64(&j);

            assert_int_equal(kv_json_finish(&j), code);
            assert_int_equal(value, code ? (cases[i].value == 1) : cases[i].value);
        }
    }
    struct kv_json j = read_text("17");
    assert_int_equal(kv_json_u64(&j, 16), 0);
    assert_int_equal(j.error.code, -ERANGE);
}

static void doubles_are_exact(void **state)
{
    static const char *const texts[] = {"0",
                                        "-0.0",
                                        "1.7976931348623157e308",
                                        "5e-324",
                                        "1e-400",
                                        "0.1",
                                        "1E+2",
                                        "123456789012345678901234567890",
                                        "2.2250738585072011e-308",
                                        "9007199254740993"};
    char big[KV_JSON_MAX_DOUBLE + 3];
    struct kv_json j;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        double expected = strtod_l(texts[i], NULL, kv_c_locale()), value;

        j = read_text(texts[i]);
        value = kv_json_double(&j);
        assert_int_equal(kv_json_finish(&j), 0);
        assert_memory_equal(&value, &expected, sizeof(value));
    }
    j = read_text("1e999");
    kv_json_double(&j);
    assert_int_equal(j.error.code, -ERANGE);
    memset(big, '1', sizeof(big));
    big[1] = '.';
    kv_json_init(&j, big, KV_JSON_MAX_DOUBLE);
    assert_true(fabs(kv_json_double(&j) - 10.0 / 9) < 1e-9);
    kv_json_init(&j, big, KV_JSON_MAX_DOUBLE + 1);
    kv_json_double(&j);
    assert_int_equal(j.error.code, -ERANGE);
    kv_json_init(&j, big, sizeof(big));
    kv_json_skip(&j);
    assert_int_equal(kv_json_finish(&j), 0);
}

static void strings(void **state)
{
    static const struct {
        const char *text, *value;
        int code;
    } cases[] = {
        {"\"\"", "", 0},
        {"\"plain text that is longer than sixteen\"", "plain text that is longer than sixteen", 0},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 0},
        {"\"\\u0041\\u00e9\\u20AC\\ud83d\\uDE00\"", "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 0},
        {"\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"", "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 0},
        {"\"a\\u0000b\"", "", -EINVAL},
        {"\"\\ud83d\"", "", -EBADMSG},
        {"\"\\ud83dx\"", "", -EBADMSG},
        {"\"\\ud83d\\n\"", "", -EBADMSG},
        {"\"\\ud83d\\ud83d\"", "", -EBADMSG},
        {"\"\\ude00\"", "", -EBADMSG},
        {"\"\\x41\"", "", -EBADMSG},
        {"\"\\u00g0\"", "", -EBADMSG},
        {"\"\\u12", "", -EBADMSG},
        {"\"a\nb\"", "", -EBADMSG},
        {"\"\x7F\"", "\x7F", 0},
        {"\"\xC0\xAF\"", "", -EBADMSG},
        {"\"\xED\xA0\x80\"", "", -EBADMSG},
        {"\"\xF4\x90\x80\x80\"", "", -EBADMSG},
        {"\"\xE2\x82\"", "", -EBADMSG},
        {"\"\xFF\"", "", -EBADMSG},
        {"\"\xE2\x82", "", -EBADMSG},
        {"\"open", "", -EBADMSG},
        {"\"", "", -EBADMSG},
        {"'a'", "", -EBADMSG},
        {"12", "", -EINVAL},
    };
    struct kv_buf scratch = KV_BUF_INIT;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_json j = read_text(cases[i].text);
        struct kv_str value = kv_json_str(&j, &scratch);

        assert_int_equal(kv_json_finish(&j), cases[i].code);
        assert_true(kv_str_eq(value, cases[i].value));
    }
    scratch.limit = scratch.capacity;
    kv_buf_fini(&scratch);
    scratch.limit = 3;
    struct kv_json j = read_text("\"\\n123\"");
    kv_json_str(&j, &scratch);
    assert_int_equal(j.error.code, -EMSGSIZE);
    kv_buf_fini(&scratch);
}

static void errors_have_offsets(void **state)
{
    static const struct {
        const char *text;
        int code;
        size_t offset;
    } cases[] = {
        {"", -EBADMSG, 0},
        {"   ", -EBADMSG, 3},
        {"x", -EBADMSG, 0},
        {"tru", -EBADMSG, 3},
        {"trux", -EBADMSG, 3},
        {"nul ", -EBADMSG, 3},
        {"[1,]", -EBADMSG, 3},
        {"[1 2]", -EBADMSG, 3},
        {"[,1]", -EBADMSG, 1},
        {"[1,,2]", -EBADMSG, 3},
        {"[1", -EBADMSG, 2},
        {"[1,", -EBADMSG, 3},
        {"[1}", -EBADMSG, 2},
        {"[01]", -EBADMSG, 2},
        {"[1.]", -EBADMSG, 3},
        {"{\"a\"}", -EBADMSG, 4},
        {"{\"a\":}", -EBADMSG, 5},
        {"{\"a\":1,}", -EBADMSG, 7},
        {"{a:1}", -EBADMSG, 1},
        {"{\"a\":1 \"b\"}", -EBADMSG, 7},
        {"{1:2}", -EBADMSG, 1},
        {"{\"a\":1]", -EBADMSG, 6},
        {"\"ab\\q\"", -EBADMSG, 3},
        {"\"ab\x01\"", -EBADMSG, 3},
        {"1 1", -EBADMSG, 2},
        {"[] ]", -EBADMSG, 3},
        {"\xEF\xBB\xBF{}", -EBADMSG, 0},
        {"[1,2,-]", -EBADMSG, 6},
        {"{\"a\" 1}", -EBADMSG, 5},
        {"]", -EBADMSG, 0},
    };
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_json j = read_text(cases[i].text);

        kv_json_skip(&j);
        assert_int_equal(kv_json_finish(&j), cases[i].code);
        assert_int_equal(j.error.offset, cases[i].offset);
        assert_true(j.error.text[0] != '\0');
        kv_json_fail(&j, -EIO, "later");
        assert_int_equal(j.error.code, cases[i].code); /* the first one stays */
    }
}

static void types_are_checked(void **state)
{
    static const char *const values[] = {"null", "true", "12", "\"s\"", "[]", "{}"};
    struct kv_buf scratch = KV_BUF_INIT;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(values); i++) {
        for (size_t how = 0; how < KV_COUNT(values); how++) {
            struct kv_json j = read_text(values[i]);

            assert_int_equal(kv_json_peek(&j), KV_JSON_NULL + i);
            if (how == 0)
                assert_int_equal(kv_json_null(&j), i == 0);
            else if (how == 1)
                kv_json_bool(&j);
            else if (how == 2)
                kv_json_u64(&j, 100);
            else if (how == 3)
                kv_json_str(&j, &scratch);
            else if (how == 4)
                kv_json_u32_array(&j, &scratch);
            else
                kv_json_object(&j);
            if (how == 0)
                assert_int_equal(j.error.code, 0); /* not null: nothing was taken */
            else
                assert_int_equal(j.error.code, how == i ? 0 : -EINVAL);
        }
    }
    kv_buf_fini(&scratch);
}

static void depth_is_bounded(void **state)
{
    char text[2 * KV_JSON_MAX_DEPTH + 2];
    struct kv_json j;
    (void)state;

    for (size_t depth = 1; depth <= KV_JSON_MAX_DEPTH + 1; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        kv_json_init(&j, text, 2 * depth);
        kv_json_skip(&j);
        assert_int_equal(kv_json_finish(&j), depth > KV_JSON_MAX_DEPTH ? -E2BIG : 0);
        assert_int_equal(model_accepts(text, 2 * depth), depth <= KV_JSON_MAX_DEPTH);
    }
}

static void unfinished_reading_is_an_error(void **state)
{
    struct kv_json j = read_text("[1,2]");
    (void)state;

    kv_json_array(&j);
    kv_json_next_item(&j);
    kv_json_u64(&j, 9);
    assert_int_equal(kv_json_finish(&j), -EBADMSG);
    /* A caller that forgets to take a value isn't fooled into accepting bad text. */
    struct kv_str key;
    j = read_text("{\"a\"}");
    kv_json_object(&j);
    assert_true(kv_json_next_key(&j, &key));
    assert_false(kv_json_next_key(&j, &key));
    assert_int_equal(j.error.code, -EBADMSG);
}

static void escaped_keys(void **state)
{
    char text[3000];
    struct kv_json j;
    struct kv_str key;
    (void)state;

    for (size_t len = KV_JSON_MAX_ESCAPED_KEY - 10; len < KV_JSON_MAX_ESCAPED_KEY + 10; len++) {
        int n = snprintf(text, sizeof(text), "{\"\\n%0*d\":1}", (int)len - 2, 0);

        kv_json_init(&j, text, (size_t)n);
        kv_json_object(&j);
        assert_int_equal(kv_json_next_key(&j, &key), len <= KV_JSON_MAX_ESCAPED_KEY);
        if (len <= KV_JSON_MAX_ESCAPED_KEY)
            assert_true(key.len == len - 1 && key.p[0] == '\n' && key.p[1] == '0');
        else
            assert_int_equal(j.error.code, -EMSGSIZE);
    }
    j = read_text("{\"a\\u0000\":1}");
    kv_json_object(&j);
    assert_false(kv_json_next_key(&j, &key));
    assert_int_equal(j.error.code, -EINVAL);
    j = read_text("{\"a\\u0000\":1}");
    kv_json_skip(&j);
    assert_int_equal(kv_json_finish(&j), 0);
}

/* -- one buffer against streams ---------------------------------------------------------------- */

static const char *const documents[] = {
    "{\"token_ids\":[1, 22, 333,4444,55555,666666,7777777,88888888,999999999,4294967295],\"b\":16}",
    "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,4294967296]",
    "[18446744073709551615,-9223372036854775808,0,-1,12345678901234567890,99999999999999999999]",
    ("{\"a\\u0062c\":\"\\ud83d\\ude00\xF0\x9F\x98\x80 text\",\"\xE2\x82\xAC\" : [true , "
     "false,null],\n\t\"x\":-1.5e-3}"),
    "[[[[[]]]],{\"a\":{\"b\":[{}]}},\"\",0.5,[1,2,3],[ 1 , 2 ],[1.5],[01],[1,]]",
    "[100,200,300 ,400,  500,\n600,\r\n700,800]",
    "[1,2,3",
    "[1,2,3,",
    "\"\\ud83d\\u\"",
    "\"\xF0\x9F\x98",
    "{\"k\":tru}",
    "[-]",
    "12345678901234567890123",
};

static void streams_agree(void **state)
{
    struct kv_buf one = KV_BUF_INIT, other = KV_BUF_INIT;
    char buf[128];
    (void)state;

    for (size_t d = 0; d < KV_COUNT(documents) * N_WALKS; d++) {
        const char *text = documents[d / N_WALKS];
        enum walk walk = (enum walk)(d % N_WALKS);
        size_t len = strlen(text);
        struct kv_json j;

        kv_json_init(&j, text, len);
        kv_buf_clear(&one);
        walk_document(&j, walk, &one);
        for (size_t size = 40; size <= sizeof(buf); size += 11) {
            for (size_t piece = 0; piece <= 70; piece++) {
                struct pieces pieces = {text, len, piece, (uint32_t)size};

                kv_json_init_stream(&j, buf, size, next_piece, &pieces);
                kv_buf_clear(&other);
                walk_document(&j, walk, &other);
                assert_string_equal(kv_buf_cstr(&other), kv_buf_cstr(&one));
                assert_int_equal(other.len, one.len);
                assert_memory_equal(other.data, one.data, one.len);
            }
        }
    }
    kv_buf_fini(&one);
    kv_buf_fini(&other);
}

static void streams_need_room_only_for_what_is_read(void **state)
{
    struct kv_buf text = KV_BUF_INIT, scratch = KV_BUF_INIT, tokens = KV_BUF_INIT;
    struct pieces pieces;
    struct kv_json j;
    char buf[32];
    (void)state;

    kv_buf_puts(&text, "[\"");
    for (int i = 0; i < 1000; i++)
        kv_buf_puts(&text, "text \\n \xE2\x82\xAC ");
    kv_buf_puts(&text, "\",[");
    for (int i = 0; i < 5000; i++)
        kv_buf_printf(&text, "%d,", i);
    kv_buf_puts(&text, "0],\"short\"]");
    pieces = (struct pieces){text.data, text.len, 0, 1};
    kv_json_init_stream(&j, buf, sizeof(buf), next_piece, &pieces);
    kv_json_array(&j);
    kv_json_next_item(&j);
    kv_json_skip(&j); /* of any length */
    kv_json_next_item(&j);
    assert_int_equal(kv_json_u32_array(&j, &tokens), 5001);
    kv_json_next_item(&j);
    assert_true(kv_str_eq(kv_json_str(&j, &scratch), "short"));
    assert_false(kv_json_next_item(&j));
    assert_int_equal(kv_json_finish(&j), 0);

    pieces = (struct pieces){text.data, text.len, 0, 1};
    kv_json_init_stream(&j, buf, sizeof(buf), next_piece, &pieces);
    kv_json_array(&j);
    kv_json_next_item(&j);
    kv_json_str(&j, &scratch);
    assert_int_equal(kv_json_finish(&j), -EMSGSIZE);
    assert_int_equal(j.error.offset, 1);
    kv_buf_fini(&text);
    kv_buf_fini(&scratch);
    kv_buf_fini(&tokens);
}

static long failing(void *arg, char *data, size_t size)
{
    int *calls = arg;

    assert_true(size >= 2);
    if ((*calls)++ > 0)
        return -ECONNRESET;
    memcpy(data, "[1", 2);
    return 2;
}

static void stream_errors_stick(void **state)
{
    char buf[16];
    struct kv_json j;
    int calls = 0;
    (void)state;

    kv_json_init_stream(&j, buf, sizeof(buf), failing, &calls);
    kv_json_skip(&j);
    kv_json_skip(&j);
    assert_int_equal(kv_json_finish(&j), -ECONNRESET);
    assert_int_equal(calls, 2);
}

/* -- random documents against the model -------------------------------------------------------- */

static void random_documents(void **state)
{
    static const char *const parts[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"a\"",
                                        "\"\\u00e9\"",
                                        "\"\xC3\xA9\"",
                                        "1",
                                        "-2",
                                        "0.5",
                                        "1e5",
                                        "true",
                                        "null",
                                        " ",
                                        "\n",
                                        "{\"k\":1}",
                                        "[1,2]",
                                        "\"",
                                        "\\",
                                        "0",
                                        "[]",
                                        "\x80",
                                        "12345678901234567890",
                                        "{}"};
    struct kv_buf text = KV_BUF_INIT, log = KV_BUF_INIT, other = KV_BUF_INIT;
    uint64_t random = unit_seed();
    size_t accepted = 0;
    (void)state;

    for (size_t round = 0; round < unit_rounds(100000); round++) {
        size_t n = unit_below(&random, 12);
        enum walk walk = (enum walk)unit_below(&random, N_WALKS);
        char buf[256]; /* as long as the longest string can be */
        struct pieces pieces;
        struct kv_json j;
        char *exact;

        kv_buf_clear(&text);
        for (size_t i = 0; i < n; i++)
            kv_buf_puts(&text, parts[unit_below(&random, KV_COUNT(parts))]);
        exact = malloc(text.len + 1); /* so that the sanitizer sees a byte too far */
        assert_non_null(exact);
        memcpy(exact + 1, kv_buf_cstr(&text), text.len);
        kv_json_init(&j, exact + 1, text.len);
        kv_json_skip(&j);
        assert_int_equal(kv_json_finish(&j) == 0, model_accepts(exact + 1, text.len));
        accepted += j.error.code == 0;

        kv_json_init(&j, exact + 1, text.len);
        kv_buf_clear(&log);
        walk_document(&j, walk, &log);
        pieces = (struct pieces){exact + 1, text.len, 0, (uint32_t)round};
        kv_json_init_stream(&j, buf, sizeof(buf), next_piece, &pieces);
        kv_buf_clear(&other);
        walk_document(&j, walk, &other);
        assert_string_equal(kv_buf_cstr(&other), kv_buf_cstr(&log));
        assert_int_equal(other.len, log.len);
        assert_memory_equal(other.data, log.data, log.len);
        free(exact);
    }
    assert_true(accepted > unit_rounds(100000) / 100);
    kv_buf_fini(&text);
    kv_buf_fini(&log);
    kv_buf_fini(&other);
}

/* A string in memory of the caller's own; errors of another program's text. */
static void test_copied_and_foreign(void **state)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_json j;
    char text[4] = "old";

    (void)state;
    kv_json_init(&j, "\"a\\u0062c\"", 10);
    kv_json_copy_str(&j, &scratch, text, sizeof(text));
    assert_string_equal(text, "abc");
    assert_int_equal(kv_json_finish_foreign(&j), 0);
    kv_json_init(&j, "\"defg\"", 6);
    kv_json_copy_str(&j, &scratch, text, sizeof(text));
    assert_string_equal(text, "abc");
    assert_int_equal(kv_json_finish(&j), -EMSGSIZE);
    assert_int_equal(kv_json_finish_foreign(&j), -EPROTO);
    kv_json_init(&j, "1", 1);
    kv_json_fail(&j, -ENOMEM, "out of memory");
    assert_int_equal(kv_json_finish_foreign(&j), -ENOMEM);
    kv_buf_fini(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copied_and_foreign),
        cmocka_unit_test(reads_a_request),
        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(doubles_are_exact),
        cmocka_unit_test(strings),
        cmocka_unit_test(errors_have_offsets),
        cmocka_unit_test(types_are_checked),
        cmocka_unit_test(depth_is_bounded),
        cmocka_unit_test(unfinished_reading_is_an_error),
        cmocka_unit_test(escaped_keys),
        cmocka_unit_test(streams_agree),
        cmocka_unit_test(streams_need_room_only_for_what_is_read),
        cmocka_unit_test(stream_errors_stick),
        cmocka_unit_test(random_documents),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
