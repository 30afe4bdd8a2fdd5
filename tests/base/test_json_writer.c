// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "base/core/utf8.h"
#include "base/json_model.h"
#include "base/unit.h"

static void writes_everything(void **state)
{
    struct kv_buf out = KV_BUF_INIT;
    struct kv_json_writer w;
    (void)state;

    kv_json_writer_init(&w, &out);
    kv_json_begin_object(&w);
    kv_json_key(&w, "scores");
    kv_json_begin_object(&w);
    kv_json_key_u64(&w, UINT64_MAX);
    kv_json_begin_object(&w);
    kv_json_key_u64(&w, 0);
    kv_json_put_u64(&w, 32);
    kv_json_key_u64(&w, 1);
    kv_json_put_i64(&w, INT64_MIN);
    kv_json_end_object(&w);
    kv_json_end_object(&w);
    kv_json_key(&w, "list");
    kv_json_begin_array(&w);
    kv_json_begin_array(&w);
    kv_json_end_array(&w);
    kv_json_begin_object(&w);
    kv_json_end_object(&w);
    kv_json_put_bool(&w, true);
    kv_json_put_bool(&w, false);
    kv_json_put_null(&w);
    kv_json_put_double(&w, 0.1);
    kv_json_put_double(&w, -1e300);
    kv_json_put_double(&w, NAN);
    kv_json_put_double(&w, -INFINITY);
    kv_json_put_raw(&w, "[1]", 3);
    kv_json_put_str(&w, "");
    kv_json_end_array(&w);
    kv_json_key(&w, "t\"ext");
    kv_json_put_str(&w, "a\"\\\b\f\n\r\t\x01\x1f\x7f\xC3\xA9/");
    kv_json_end_object(&w);
    assert_string_equal(
        kv_buf_cstr(&out),
        "{\"scores\":{\"18446744073709551615\":{\"0\":32,\"1\":-9223372036854775808}},"
        "\"list\":[[],{},true,false,null,0.1,-1e+300,null,null,[1],\"\"],"
        "\"t\\\"ext\":\"a\\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\xC3\xA9/\"}");
    assert_true(model_accepts(out.data, out.len));
    kv_buf_fini(&out);
}

static void a_scalar_alone(void **state)
{
    struct kv_buf out = KV_BUF_INIT;
    struct kv_json_writer w;
    (void)state;

    kv_json_writer_init(&w, &out);
    kv_json_put_str(&w, "x");
    assert_string_equal(kv_buf_cstr(&out), "\"x\"");
    kv_buf_fini(&out);
}

/* Any bytes become valid JSON; valid UTF-8 without NUL comes back as it was. */
static void strings_round_trip(void **state)
{
    struct kv_buf out = KV_BUF_INIT, scratch = KV_BUF_INIT;
    uint64_t random = unit_seed();
    (void)state;

    for (size_t round = 0; round < unit_rounds(50000); round++) {
        char text[40];
        size_t len = 0, n = unit_below(&random, 10);
        bool exact = round % 2;
        struct kv_json_writer w;
        struct kv_json j;
        struct kv_str back;

        for (size_t i = 0; i < n; i++) {
            unsigned code =
                1 + (unsigned)unit_below(&random, unit_below(&random, 2) ? 0x80 : 0x10FFFE);

            if (exact)
                len += (size_t)kv_utf8_encode(text + len,
                                              code >= 0xD800 && code < 0xE000 ? 'x' : code);
            else
                text[len++] = (char)unit_random(&random);
        }
        kv_buf_clear(&out);
        kv_json_writer_init(&w, &out);
        kv_json_put_strn(&w, text, len);
        assert_true(model_accepts(out.data, out.len));
        if (!exact)
            continue;
        kv_json_init(&j, out.data, out.len);
        back = kv_json_str(&j, &scratch);
        assert_int_equal(kv_json_finish(&j), 0);
        assert_int_equal(back.len, len);
        assert_memory_equal(back.p, text, len);
    }
    kv_buf_fini(&out);
    kv_buf_fini(&scratch);
}

/* The buffer may be emptied between any two calls. */
static void in_bounded_memory(void **state)
{
    struct kv_buf out = {.limit = 64}, whole = KV_BUF_INIT;
    struct kv_json_writer w;
    (void)state;

    kv_json_writer_init(&w, &out);
    kv_json_begin_array(&w);
    for (uint64_t i = 0; i < 1000; i++) {
        kv_json_put_u64(&w, i);
        kv_buf_append(&whole, out.data, out.len);
        kv_buf_clear(&out);
    }
    kv_json_end_array(&w);
    kv_buf_append(&whole, out.data, out.len);
    assert_true(model_accepts(whole.data, whole.len));
    assert_memory_equal(whole.data, "[0,1,2,", 7);
    for (int i = 0; i < 100; i++)
        kv_json_put_null(&w);
    assert_int_equal(out.error, -EMSGSIZE);
    kv_buf_fini(&out);
    kv_buf_fini(&whole);
}

static void put_raw_text(struct kv_json_writer *w, const char *text)
{
    size_t len = strlen(text);
    char *p = kv_json_raw_begin(w, len + 10); /* more than is used in the end */

    if (!p)
        return;
    memcpy(p, text, len);
    kv_json_raw_end(w, p + len);
}

static void raw_values(void **state)
{
    struct kv_buf out = KV_BUF_INIT, small = {.limit = 8};
    struct kv_json_writer w;
    (void)state;

    kv_json_writer_init(&w, &out);
    kv_json_begin_object(&w);
    kv_json_key(&w, "a");
    put_raw_text(&w, "{\"b\":1}");
    kv_json_key(&w, "c");
    kv_json_begin_array(&w);
    put_raw_text(&w, "2");
    put_raw_text(&w, "[]");
    kv_json_put_u64(&w, 3);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    assert_string_equal(kv_buf_cstr(&out), "{\"a\":{\"b\":1},\"c\":[2,[],3]}");
    kv_json_writer_init(&w, &small);
    put_raw_text(&w, "too long");
    assert_int_equal(small.error, -EMSGSIZE);
    assert_int_equal(small.len, 0);
    kv_buf_fini(&out);
    kv_buf_fini(&small);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(writes_everything),  cmocka_unit_test(a_scalar_alone),
        cmocka_unit_test(strings_round_trip), cmocka_unit_test(in_bounded_memory),
        cmocka_unit_test(raw_values),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
