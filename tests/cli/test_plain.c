// SPDX-License-Identifier: Apache-2.0
/* Text of others for a terminal. */
#include "base/core/utf8.h"
#include "base/unit.h"
#include "cli/show/plain.h"

static void check(const char *text, size_t len, const char *wanted)
{
    struct kv_buf out = KV_BUF_INIT;

    kc_put_plain(&out, text, len);
    assert_string_equal(kv_buf_cstr(&out), wanted);
    kv_buf_fini(&out);
}

static void test_texts(void **state)
{
    (void)state;
    check("", 0, "");
    check("kv-events", 9, "kv-events");
    check("a\\b", 3, "a\\\\b");
    check("\x1b[2J\n\t\x7f", 7, "\\u001b[2J\\u000a\\u0009\\u007f");
    check("a\0b", 3, "a\\u0000b");
    check("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", 9, "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80");
    check("\xc2\x9b"
          "31m",
          5, "\\u009b31m");
    check("\xe2\x80\xae", 3, "\\u202e");
    check("\xef\xbb\xbf", 3, "\\ufeff");
    check("\xff\xe2\x80", 3, "\\xff\\xe2\\x80");
}

/* No control character and no invalid UTF-8 leaves, whatever comes. */
static void test_random_bytes(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(20000); round++) {
        struct kv_buf out = KV_BUF_INIT;
        char text[24];

        for (size_t i = 0; i < sizeof(text); i++)
            text[i] = (char)unit_random(&seed);
        kc_put_plain(&out, text, unit_below(&seed, sizeof(text) + 1));
        for (size_t i = 0; i < out.len; i++)
            assert_true((unsigned char)out.data[i] >= ' ' && out.data[i] != 0x7f);
        assert_true(kv_utf8_valid(kv_buf_cstr(&out)));
        kv_buf_fini(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_random_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
