// SPDX-License-Identifier: Apache-2.0
#include "base/core/buf.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

#include "base/core/ascii.h"
#include "base/unit.h"

static void grows_and_keeps(void **state)
{
    struct kv_buf buf = KV_BUF_INIT;
    (void)state;

    assert_string_equal(kv_buf_cstr(&buf), "");
    for (int i = 0; i < 10000; i++)
        kv_buf_putc(&buf, (char)('a' + i % 26));
    assert_int_equal(buf.len, 10000);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(buf.data[i], 'a' + i % 26);
    assert_int_equal(strlen(kv_buf_cstr(&buf)), 10000);
    kv_buf_clear(&buf);
    kv_buf_puts(&buf, "one ");
    kv_buf_append(&buf, "two!", 3);
    kv_buf_append(&buf, NULL, 0);
    kv_buf_printf(&buf, " %d%s", 3, "");
    assert_string_equal(kv_buf_cstr(&buf), "one two 3");
    kv_buf_fini(&buf);
    kv_buf_fini(&buf);
    assert_string_equal(kv_buf_cstr(&buf), "");
}

static void printf_at_every_size(void **state)
{
    (void)state;
    for (size_t fill = 0; fill < 600; fill++) {
        struct kv_buf buf = KV_BUF_INIT;

        for (size_t i = 0; i < fill; i++)
            kv_buf_putc(&buf, 'x');
        kv_buf_printf(&buf, "%0100d|", 7);
        assert_int_equal(buf.error, 0);
        assert_int_equal(buf.len, fill + 101);
        assert_string_equal(kv_buf_cstr(&buf) + fill + 98, "07|");
        kv_buf_fini(&buf);
    }
}

static void limit_sticks(void **state)
{
    struct kv_buf buf = {.limit = 10};
    (void)state;

    kv_buf_puts(&buf, "0123456789");
    assert_int_equal(buf.error, 0);
    assert_string_equal(kv_buf_cstr(&buf), "0123456789");
    kv_buf_putc(&buf, 'x');
    assert_int_equal(buf.error, -EMSGSIZE);
    assert_int_equal(buf.len, 10);
    assert_memory_equal(buf.data, "0123456789", 10);
    kv_buf_clear(&buf);
    kv_buf_puts(&buf, "012345678");
    kv_buf_printf(&buf, "%d", 42);
    assert_int_equal(buf.error, -EMSGSIZE);
    assert_int_equal(buf.len, 9);
    kv_buf_putc(&buf, 'x'); /* would fit, but the error sticks */
    assert_int_equal(buf.len, 9);
    assert_string_equal(kv_buf_cstr(&buf), "");
    assert_int_equal(kv_buf_reserve(&buf, 1), -EMSGSIZE);
    kv_buf_clear(&buf);
    assert_int_equal(kv_buf_reserve(&buf, SIZE_MAX), -EMSGSIZE);
    kv_buf_fini(&buf);
    assert_int_equal(buf.limit, 10);
    kv_buf_puts(&buf, "again");
    assert_string_equal(kv_buf_cstr(&buf), "again");
    kv_buf_fini(&buf);
}

static void huge_request_fails(void **state)
{
    struct kv_buf buf = KV_BUF_INIT;
    (void)state;

    kv_buf_puts(&buf, "kept");
    assert_true(kv_buf_reserve(&buf, SIZE_MAX - 3) < 0);
    assert_memory_equal(buf.data, "kept", 4);
    kv_buf_fini(&buf);
}

static void numbers(void **state)
{
    static const int64_t edges[] = {0,   1,    9,         10,        99, 100, 101,
                                    999, 1000, INT64_MAX, INT64_MIN, -1, -10};
    struct kv_buf buf = KV_BUF_INIT;
    uint64_t random = unit_seed();
    char expected[32];
    (void)state;

    for (size_t i = 0; i < KV_COUNT(edges) + unit_rounds(100000); i++) {
        uint64_t value = i < KV_COUNT(edges) ? (uint64_t)edges[i]
                                             : unit_random(&random) >> unit_below(&random, 64);

        kv_buf_clear(&buf);
        kv_buf_put_u64(&buf, value);
        snprintf(expected, sizeof(expected), "%" PRIu64, value);
        assert_string_equal(kv_buf_cstr(&buf), expected);
        kv_buf_clear(&buf);
        kv_buf_put_i64(&buf, (int64_t)value);
        snprintf(expected, sizeof(expected), "%" PRId64, (int64_t)value);
        assert_string_equal(kv_buf_cstr(&buf), expected);
    }
    kv_buf_fini(&buf);
}

static void doubles(void **state)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, "0"},
        {1, "1"},
        {-1.5, "-1.5"},
        {0.0001, "0.0001"},
        {0.1, "0.1"},
        {52.4288, "52.4288"},
        {1e100, "1e+100"},
        {1700000000.25, "1700000000.25"},
        {0.1 + 0.2, "0.30000000000000004"},
        {5e-324, "5e-324"},
        {DBL_MAX, "1.7976931348623157e+308"},
        {3.0 / 10, "0.3"},
        {1e15, "1e+15"},
        {123456789012, "123456789012"},
    };
    struct kv_buf buf = KV_BUF_INIT;
    uint64_t random = unit_seed();
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        kv_buf_clear(&buf);
        kv_buf_put_double(&buf, cases[i].value);
        assert_string_equal(kv_buf_cstr(&buf), cases[i].text);
    }
    for (size_t i = 0; i < unit_rounds(100000); i++) {
        uint64_t bits = unit_random(&random);
        double value, back;

        memcpy(&value, &bits, sizeof(value));
        if (!isfinite(value))
            continue;
        kv_buf_clear(&buf);
        kv_buf_put_double(&buf, value);
        back = strtod_l(kv_buf_cstr(&buf), NULL, kv_c_locale());
        assert_memory_equal(&back, &value, sizeof(value));
    }
    kv_buf_fini(&buf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grows_and_keeps), cmocka_unit_test(printf_at_every_size),
        cmocka_unit_test(limit_sticks),    cmocka_unit_test(huge_request_fails),
        cmocka_unit_test(numbers),         cmocka_unit_test(doubles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
