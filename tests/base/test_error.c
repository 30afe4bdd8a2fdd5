// SPDX-License-Identifier: Apache-2.0
#include "base/core/error.h"
#include "base/unit.h"

/* A value that another thread may change is looked at once: the result is one of those compared. */
static void test_min_max_evaluate_once(void **state)
{
    int a = 0, b = 10;

    (void)state;
    assert_int_equal(KV_MIN(a++, b++), 0);
    assert_int_equal(a, 1);
    assert_int_equal(b, 11);
    assert_int_equal(KV_MAX(a++, b++), 11);
    assert_int_equal(a, 2);
    assert_int_equal(b, 12);
    assert_int_equal(KV_MIN(KV_MAX(a++, 1), KV_MIN(b++, KV_MAX(3, a - a))), 2);
    assert_int_equal(a, 3);
    assert_int_equal(b, 13);
}

static void test_min_max_types(void **state)
{
    struct {
        unsigned bits : 3;
    } s = {.bits = 5};
    const uint8_t small[2] = {200, 100};
    const char *text = "text";

    (void)state;
    assert_int_equal(KV_MIN(s.bits, 7), 5);
    assert_int_equal(KV_MAX(small[0], small[1]) + KV_MIN(small[0], small[1]), 300);
    assert_true(KV_MAX(UINT64_MAX, (uint64_t)small[0]) == UINT64_MAX);
    assert_true(KV_MIN(INT64_MIN, INT64_C(0)) == INT64_MIN);
    assert_true(KV_MAX(text, text + 1) == text + 1);
    assert_true(KV_MIN(0.5, 1.5) < 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_min_max_evaluate_once),
        cmocka_unit_test(test_min_max_types),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
