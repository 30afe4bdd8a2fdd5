// SPDX-License-Identifier: Apache-2.0
/* Arrays of integers: the fast reader (each form that the machine has; this test compiles the
 * portable one itself) against the same text read item by item. Values, counts, errors and error
 * offsets must be the same. */
#include "base/json/json.h"

#define KV_JSON_PORTABLE
#define kv_json_u32_array portable_u32_array
#define kv_json_bits64_array portable_bits64_array
size_t portable_u32_array(struct kv_json *j, struct kv_buf *ret);
size_t portable_bits64_array(struct kv_json *j, struct kv_buf *ret);
#include "base/json/json_array.c" // NOLINT(bugprone-suspicious-include): on purpose, see above
#undef kv_json_u32_array
#undef kv_json_bits64_array

#include <inttypes.h>

#include "base/unit.h"

size_t kv_json_u32_array(struct kv_json *j, struct kv_buf *ret);
size_t kv_json_bits64_array(struct kv_json *j, struct kv_buf *ret);

static size_t items(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    size_t n = 0;

    kv_json_array(j);
    while (kv_json_next_item(j)) {
        uint64_t value = wide ? kv_json_bits64(j) : kv_json_u64(j, UINT32_MAX);
        uint32_t low = (uint32_t)value;

        if (kv_json_failed(j))
            break;
        kv_buf_append(ret, wide ? (void *)&value : (void *)&low,
                      wide ? sizeof(value) : sizeof(low));
        n++;
    }
    return n;
}

static struct kv_buf expected, actual;

/* Widths of the vectors that this machine has; 0: the portable form. */
static size_t vector_widths(unsigned ret[4])
{
    size_t n = 0;

    ret[n++] = 0;
#ifdef __x86_64__
    ret[n++] = 128;
    if (__builtin_cpu_supports("avx2"))
        ret[n++] = 256;
    if (__builtin_cpu_supports("avx512vbmi2"))
        ret[n++] = 512;
#endif
    return n;
}

static size_t read_vectors(unsigned width, struct kv_json *j, bool wide)
{
    if (!width)
        return wide ? portable_bits64_array(j, &actual) : portable_u32_array(j, &actual);
#ifdef __x86_64__
    kv_json_vector_bits_ = width;
#endif
    return wide ? kv_json_bits64_array(j, &actual) : kv_json_u32_array(j, &actual);
}

/* All ways read the array at @at of @text, and end in the same state. */
static void compare(const char *text, size_t len, size_t at, bool wide)
{
    struct kv_json model, j;
    unsigned widths[4];
    size_t n;

    kv_json_init(&model, text, len);
    model.p += at;
    kv_buf_clear(&expected);
    n = items(&model, &expected, wide);
    kv_json_finish(&model);
    for (size_t i = 0, n_widths = vector_widths(widths); i < n_widths; i++) {
        size_t got;

        kv_json_init(&j, text, len);
        j.p += at;
        kv_buf_clear(&actual);
        got = read_vectors(widths[i], &j, wide);
        kv_json_finish(&j);
        if (j.error.code != model.error.code || j.error.offset != model.error.offset)
            print_message("%.*s\n", (int)(len - at), text + at);
        assert_int_equal(j.error.code, model.error.code);
        assert_int_equal(j.error.offset, model.error.offset);
        assert_string_equal(j.error.text, model.error.text);
        assert_int_equal(got, n);
        assert_int_equal(actual.len, expected.len);
        if (n > 0)
            assert_memory_equal(actual.data, expected.data, expected.len);
    }
}

/* From a block of exactly that size, behind @before other bytes. */
static void compare_exact(const char *text, size_t len, size_t before, bool wide)
{
    char *copy = malloc(before + len + (before + len == 0));

    assert_non_null(copy);
    memset(copy, '7', before);
    memcpy(copy + before, text, len);
    compare(copy, before + len, before, wide);
    free(copy);
}

static void put_number(struct kv_buf *text, uint64_t *random, bool wide)
{
    switch (unit_below(random, 12)) {
    case 0:
        kv_buf_put_u64(text, unit_random(random)); /* too big for a u32 */
        break;
    case 1:
        kv_buf_put_u64(text, UINT32_MAX - unit_below(random, 3));
        break;
    case 2:
        kv_buf_put_u64(text, wide ? UINT64_MAX - unit_below(random, 3) : unit_below(random, 10));
        break;
    case 3:
        kv_buf_put_i64(text, wide ? INT64_MIN + (int64_t)unit_below(random, 3) : 0);
        break;
    case 4:
        kv_buf_put_i64(text, wide ? -(int64_t)unit_below(random, 100000) : 100000000);
        break;
    default:
        kv_buf_put_u64(text, unit_random(random) >> (wide ? 0 : 32) >> unit_below(random, 32));
    }
}

static void put_array(struct kv_buf *text, uint64_t *random, bool wide)
{
    static const char *const separators[] = {",", ", ", ",", ", ", ",\n", " ,", ",  "};
    size_t style = unit_below(random, KV_COUNT(separators) + 2);
    size_t n = unit_below(random, unit_below(random, 4) ? 40 : 400);

    kv_buf_putc(text, '[');
    for (size_t i = 0; i < n; i++) {
        size_t pick = style < KV_COUNT(separators) ? style : unit_below(random, 4);

        if (i > 0)
            kv_buf_puts(text, separators[pick]);
        if (!wide && unit_below(random, 50) > 0)
            kv_buf_put_u64(text, unit_below(random, 200000)); /* else few arrays would be valid */
        else
            put_number(text, random, wide);
    }
    kv_buf_putc(text, ']');
}

static void random_arrays(void **state)
{
    static const char garbage[] = ",,  ]][0019-+.eE\n\t\"x{}\xFF\x00";
    struct kv_buf text = KV_BUF_INIT;
    uint64_t random = unit_seed();
    size_t valid = 0;
    (void)state;

    for (size_t round = 0; round < unit_rounds(30000); round++) {
        bool wide = round & 1;
        size_t before = unit_below(&random, 40);

        kv_buf_clear(&text);
        put_array(&text, &random, wide);
        compare_exact(text.data, text.len, before, wide);
        valid += expected.len > 0;
        for (size_t i = unit_below(&random, 3); i > 0; i--) {
            char *at = text.data + unit_below(&random, text.len);

            if (unit_below(&random, 3)) {
                *at = garbage[unit_below(&random, sizeof(garbage) - 1)];
            } else {
                memmove(at, at + 1, text.len - (size_t)(at + 1 - text.data));
                text.len--;
            }
            if (text.len == 0)
                break;
        }
        compare_exact(text.data, text.len, before, wide);
        compare_exact(text.data, unit_below(&random, text.len + 1), before, wide);
    }
    assert_true(valid > unit_rounds(30000) / 2);
    kv_buf_fini(&text);
}

/* Every small change at every place of an array that spans blocks and stretches. */
static void every_place(void **state)
{
    static const char garbage[] = ", ]0-.e\n[";
    struct kv_buf text = KV_BUF_INIT;
    (void)state;

    for (int wide = 0; wide < 2; wide++) {
        kv_buf_clear(&text);
        kv_buf_putc(&text, '[');
        for (int i = 0; i < (wide ? 60 : 180); i++)
            kv_buf_printf(&text, "%s%" PRIu64, i ? (i % 3 ? "," : ", ") : "",
                          wide ? UINT64_MAX >> i : (uint64_t)(i * i * 37 % 200000));
        kv_buf_putc(&text, ']');
        for (size_t at = 0; at < text.len; at++) {
            char saved = text.data[at];

            for (const char *c = garbage; *c; c++) {
                text.data[at] = *c;
                compare(text.data, text.len, 0, wide);
            }
            text.data[at] = saved;
            compare_exact(text.data, at, 9, wide); /* cut off */
        }
    }
    kv_buf_fini(&text);
}

static void known_cases(void **state)
{
    static const struct {
        const char *text;
        int code;
        size_t offset, n;
    } cases[] = {
        {"[]", 0, 0, 0},
        {"[ ]", 0, 0, 0},
        {"[4294967295]", 0, 0, 1},
        {"[4294967296]", -ERANGE, 1, 0},
        {"[1,2,3,4,5,6,7,8,9,4294967296,1]", -ERANGE, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,00,1]", -EBADMSG, 20, 9},
        {"[1,2,3,4,5,6,7,8,9,01,1]", -EBADMSG, 20, 9},
        {"[1,2,3,4,5,6,7,8,9,+1,1]", -EBADMSG, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,-1,1]", -ERANGE, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,1.0,1]", -EINVAL, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,1e3,1]", -EINVAL, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,,1]", -EBADMSG, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,]", -EBADMSG, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,1 1]", -EBADMSG, 21, 10},
        {"[1,2,3,4,5,6,7,8,9,null]", -EINVAL, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,\"1\"]", -EINVAL, 19, 9},
        {"[1,2,3,4,5,6,7,8,9,[1]]", -EINVAL, 19, 9},
        {"[1,2,3,4,5,6,7,8,9", -EBADMSG, 18, 9},
        {"[1,2,3,4,5,6,7,8,9}", -EBADMSG, 18, 9},
        {"1,2", -EINVAL, 0, 0},
        {"{}", -EINVAL, 0, 0},
    };
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_buf out = KV_BUF_INIT;
        struct kv_json j;

        kv_json_init(&j, cases[i].text, strlen(cases[i].text));
        assert_int_equal(kv_json_u32_array(&j, &out), cases[i].n);
        assert_int_equal(kv_json_finish(&j), cases[i].code);
        assert_int_equal(j.error.offset, cases[i].offset);
        compare(cases[i].text, strlen(cases[i].text), 0, false);
        compare(cases[i].text, strlen(cases[i].text), 0, true);
        kv_buf_fini(&out);
    }
}

static void limits_hold(void **state)
{
    (void)state;
    for (size_t limit = 4; limit < 1200; limit += 4) {
        struct kv_buf text = KV_BUF_INIT, out = {.limit = limit};
        struct kv_json j;
        size_t n;

        kv_buf_puts(&text, "         [");
        for (int i = 0; i < 250; i++)
            kv_buf_printf(&text, "%s%d", i ? "," : "", i);
        kv_buf_putc(&text, ']');
        kv_json_init(&j, text.data, text.len);
        n = kv_json_u32_array(&j, &out);
        assert_int_equal(kv_json_finish(&j), limit < 1000 ? -EMSGSIZE : 0);
        assert_true(n * 4 == out.len && out.len <= limit);
        kv_buf_fini(&text);
        kv_buf_fini(&out);
    }
}

static int teardown(void **state)
{
    (void)state;
    kv_buf_fini(&expected);
    kv_buf_fini(&actual);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_cases),
        cmocka_unit_test(every_place),
        cmocka_unit_test(random_arrays),
        cmocka_unit_test(limits_hold),
    };

    return cmocka_run_group_tests(tests, NULL, teardown);
}
