// SPDX-License-Identifier: Apache-2.0
/* Instance ids: digits are numbers, the rest are names with numbers that all versions agree on. */
#include <errno.h>

#include "base/args/instance.h"
#include "base/unit.h"

static char long_name[KV_INSTANCE_NAME_MAX + 2];

static void test_ids(void **state)
{
    static const struct {
        const char *text;
        int kind;
        uint64_t number;
    } cases[] = {
        {"0", KV_INSTANCE_NUMBER, 0},
        {"42", KV_INSTANCE_NUMBER, 42},
        {"18446744073709551615", KV_INSTANCE_NUMBER, UINT64_MAX},
        {"18446744073709551616", -EINVAL, 0},
        {"99999999999999999999999", -EINVAL, 0},
        {"00", -EINVAL, 0},
        {"042", -EINVAL, 0},
        {"", -EINVAL, 0},
        /* Replicas of all versions must find these numbers. */
        {"pod-a", KV_INSTANCE_NAME, UINT64_C(0x8646c1aac08e7b41)},
        {"vllm-7b-0.vllm.svc.cluster.local", KV_INSTANCE_NAME, UINT64_C(0xe9e88621dbce087f)},
        {"\u00e9", KV_INSTANCE_NAME, UINT64_C(0xf7940a006cf10cb3)},
        {"a\tb", -EINVAL, 0},
        {"a\x7f", -EINVAL, 0},
        {"a\xc2\x80", -EINVAL, 0}, /* U+0080 */
        {"a\xc2\x9f", -EINVAL, 0},
        {"a\xc2", -EINVAL, 0},
        {"\xff", -EINVAL, 0},
        {"\xed\xa0\x80", -EINVAL, 0}, /* a surrogate */
        {long_name, -EINVAL, 0},
    };
    static const char *const names[] = {"-1", "1.5", "1e5",    "0x1", " 1",
                                        "1 ", "a b", "\u00a0", "a:1"};

    (void)state;
    memset(long_name, 'a', sizeof(long_name) - 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t len = strlen(cases[i].text);
        const char *why = NULL;
        uint64_t number = 0;
        int kind = kv_instance_parse(cases[i].text, len, &number, &why);

        assert_int_equal(kind, cases[i].kind);
        assert_int_equal(number, cases[i].number);
        assert_int_equal(why != NULL, kind < 0);
        assert_int_equal(kv_instance_is(number, cases[i].text, len), kind == KV_INSTANCE_NAME);
        assert_false(kv_instance_is(number + 1, cases[i].text, len));
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        uint64_t number = 0;

        assert_int_equal(kv_instance_parse(names[i], strlen(names[i]), &number, NULL),
                         KV_INSTANCE_NAME);
        assert_true(number & KV_INSTANCE_NAMED);
    }
    long_name[KV_INSTANCE_NAME_MAX] = '\0';
    assert_int_equal(kv_instance_parse(long_name, KV_INSTANCE_NAME_MAX, &(uint64_t){0}, NULL),
                     KV_INSTANCE_NAME);
    assert_int_equal(kv_instance_parse("a\0b", 3, &(uint64_t){0}, NULL), -EINVAL);
}

static void test_text(void **state)
{
    char digits[KV_INSTANCE_DIGITS];

    (void)state;
    assert_string_equal(kv_instance_text(UINT64_MAX, NULL, digits), "18446744073709551615");
    assert_string_equal(kv_instance_text(7, "pod", digits), "pod");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ids), cmocka_unit_test(test_text)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
