// SPDX-License-Identifier: Apache-2.0
/* The bytes that the whole replay writes and compares: every flipped bit shows, rows differ, values are finite. */
#include "base/unit.h"
#include "cli/whole/content.h"
#include "cli/whole/plan.h"

enum { ROW = 2048 };

static void test_every_bit_is_compared(void **state)
{
    static char memory[ROW + 1];
    uint64_t seed = kc_content_seed(42, 3, 1, 7);

    (void)state;
    for (size_t shift = 0; shift < 2; shift++) { /* any alignment */
        char *row = memory + shift;

        kc_content_fill(row, ROW, seed);
        assert_true(kc_content_check(row, ROW, seed));
        for (size_t bit = 0; bit < (size_t)ROW * 8; bit++) {
            row[bit / 8] ^= (char)(1 << bit % 8);
            assert_false(kc_content_check(row, ROW, seed));
            row[bit / 8] ^= (char)(1 << bit % 8);
        }
        assert_true(kc_content_check(row, ROW, seed));
    }
}

/* A row of another key, layer, part or token is another row; so is a part of a row in another place. */
static void test_rows_differ(void **state)
{
    const uint64_t here = kc_content_seed(42, 3, 1, 7);
    const uint64_t others[] = {kc_content_seed(43, 3, 1, 7), kc_content_seed(42, 4, 1, 7),
                               kc_content_seed(42, 3, 0, 7), kc_content_seed(42, 3, 1, 8)};
    char row[ROW], other[ROW];

    (void)state;
    kc_content_fill(row, ROW, here);
    for (size_t i = 0; i < KV_COUNT(others); i++) {
        assert_false(kc_content_check(row, ROW, others[i]));
        kc_content_fill(other, ROW, others[i]);
        for (size_t at = 0; at < ROW; at += 64)
            assert_memory_not_equal(row + at, other + at, 64);
    }
    for (size_t at = 32; at < ROW; at += 32)
        assert_memory_not_equal(row, row + at, 32);
}

/* Neither BF16 nor F16 has an infinity or a NaN without the highest bit of its exponent. */
static void test_values_are_finite(void **state)
{
    uint16_t row[ROW / 2];

    (void)state;
    kc_content_fill(row, ROW, kc_content_seed(1, 2, 0, 3));
    for (size_t i = 0; i < KV_COUNT(row); i++)
        assert_int_equal(row[i] & 0x4000, 0);
}

static void test_shapes(void **state)
{
    static const struct {
        const char *name;
        uint64_t token_bytes;
    } shapes[] = {{"llama-3-8b", 128 << 10},
                  {"llama-3-70b", 320 << 10},
                  {"deepseek-v3", 61 * 576 * 2},
                  {"qwen3-8b", 144 << 10},
                  {"gpt-oss-20b", 48 << 10}};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(shapes); i++) {
        const struct kc_shape *shape = kc_shape_find(shapes[i].name);

        assert_non_null(shape);
        assert_int_equal(kc_shape_token_bytes(shape) * kc_shape_groups(shape),
                         shapes[i].token_bytes);
        assert_int_equal(kc_shape_row_bytes(shape) % 32, 0);
    }
    assert_null(kc_shape_find("gpt"));
}

/* A token sees itself and 127 before it: the last eight blocks of 16. */
static void test_windows(void **state)
{
    const struct kc_shape *full = kc_shape_find("tiny"), *shape = kc_shape_find("gpt-oss-20b");

    (void)state;
    assert_int_equal(kc_shape_groups(full), 1);
    assert_int_equal(kc_shape_first(full, 0, 100), 0);
    assert_int_equal(kc_shape_groups(shape), 2);
    assert_int_equal(kc_shape_first(shape, 0, 100), 0);
    assert_int_equal(kc_shape_first(shape, 1, 0), 0);
    assert_int_equal(kc_shape_first(shape, 1, 8), 0);
    assert_int_equal(kc_shape_first(shape, 1, 9), 1);
    assert_int_equal(kc_shape_first(shape, 1, 100), 92);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_bit_is_compared),
        cmocka_unit_test(test_rows_differ),
        cmocka_unit_test(test_values_are_finite),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_windows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
