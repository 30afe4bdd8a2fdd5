// SPDX-License-Identifier: Apache-2.0
/*
 * The msgpack reader and writer. `test-base-msgpack transcode` reads msgpack from standard input
 * and writes the same values, shortest form, to standard output: tests/e2e/test_msgpack.py compares
 * that with another implementation.
 */
#include "base/unit.h"

#include "base/msgpack_copy.h"

#define BYTES(...) ((const uint8_t[]){__VA_ARGS__}), sizeof((const uint8_t[]){__VA_ARGS__})

static struct kv_msgpack reader(const uint8_t *bytes, size_t len)
{
    struct kv_msgpack m;

    kv_msgpack_init(&m, bytes, len);
    return m;
}

static bool done(const struct kv_msgpack *m)
{
    return !kv_msgpack_failed(m) && m->p == m->end;
}

/* -- scalars ----------------------------------------------------------------------------------- */

static void test_integers(void **state)
{
    static const struct {
        uint8_t bytes[9];
        size_t len;
        int64_t value;
    } cases[] = {
        {{0x00}, 1, 0},
        {{0x7f}, 1, 127},
        {{0xff}, 1, -1},
        {{0xe0}, 1, -32},
        {{0xcc, 0xff}, 2, 255},
        {{0xcc, 0x01}, 2, 1},
        {{0xcd, 0x01, 0x00}, 3, 256},
        {{0xce, 0xff, 0xff, 0xff, 0xff}, 5, UINT32_MAX},
        {{0xcf, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 9, INT64_MAX},
        {{0xd0, 0x80}, 2, -128},
        {{0xd0, 0x7f}, 2, 127},
        {{0xd1, 0x80, 0x00}, 3, -32768},
        {{0xd2, 0x80, 0x00, 0x00, 0x00}, 5, INT32_MIN},
        {{0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0}, 9, INT64_MIN},
        {{0xd3, 0, 0, 0, 0, 0, 0, 0, 5}, 9, 5},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_msgpack m = reader(cases[i].bytes, cases[i].len);

        assert_int_equal(kv_msgpack_peek(&m),
                         cases[i].value < 0 ? KV_MSGPACK_INT : KV_MSGPACK_UINT);
        assert_int_equal(kv_msgpack_i64(&m), cases[i].value);
        assert_true(done(&m));
        m = reader(cases[i].bytes, cases[i].len);
        assert_int_equal(kv_msgpack_bits64(&m), (uint64_t)cases[i].value);
        m = reader(cases[i].bytes, cases[i].len);
        if (cases[i].value < 0) {
            assert_int_equal(kv_msgpack_u64(&m), 0);
            assert_int_equal(m.error.code, -ERANGE);
            assert_int_equal(m.error.offset, 0);
        } else {
            assert_int_equal(kv_msgpack_u64(&m), cases[i].value);
        }
        m = reader(cases[i].bytes, cases[i].len);
        assert_true(kv_msgpack_double(&m) == (double)cases[i].value);
        for (size_t len = 0; len < cases[i].len; len++) {
            m = reader(cases[i].bytes, len);
            kv_msgpack_i64(&m);
            assert_int_equal(m.error.code, -EPROTO);
        }
    }
    struct kv_msgpack m = reader(BYTES(0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe));
    assert_int_equal(kv_msgpack_bits64(&m), UINT64_MAX - 1);
    m = reader(BYTES(0xcf, 0x80, 0, 0, 0, 0, 0, 0, 0));
    assert_int_equal(kv_msgpack_i64(&m), 0);
    assert_int_equal(m.error.code, -ERANGE);
}

static void test_other_scalars(void **state)
{
    struct kv_msgpack m = reader(BYTES(0xc0, 0xc2, 0xc3, 0xca, 0x3f, 0xc0, 0, 0, 0xcb, 0x40, 0x29,
                                       0, 0, 0, 0, 0, 0, 0xa2, 'h', 'i', 0xc4, 3, 1, 2, 3));
    struct kv_str s;

    (void)state;
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_NIL);
    assert_true(kv_msgpack_nil(&m));
    assert_false(kv_msgpack_nil(&m));
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_BOOL);
    assert_false(kv_msgpack_bool(&m));
    assert_true(kv_msgpack_bool(&m));
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_FLOAT);
    assert_true(kv_msgpack_double(&m) == 1.5);
    assert_true(kv_msgpack_double(&m) == 12.5);
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_STR);
    s = kv_msgpack_str(&m);
    assert_true(kv_str_eq(s, "hi"));
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_BIN);
    s = kv_msgpack_bin(&m);
    assert_int_equal(s.len, 3);
    assert_memory_equal(s.p, "\1\2\3", 3);
    assert_true(done(&m));
    assert_int_equal(kv_msgpack_peek(&m), KV_MSGPACK_NONE);
}

/* A value of one type read as another is an error at its first byte, and stays the first error. */
static void test_wrong_types(void **state)
{
    struct kv_msgpack m = reader(BYTES(0x01, 0xa1, 'x'));

    (void)state;
    assert_int_equal(kv_msgpack_u64(&m), 1);
    kv_msgpack_u64(&m);
    assert_int_equal(m.error.code, -EPROTO);
    assert_int_equal(m.error.offset, 1);
    assert_string_equal(m.error.text, "not an integer");
    assert_int_equal(kv_msgpack_str(&m).len, 0);
    assert_int_equal(kv_msgpack_array(&m), 0);
    assert_string_equal(m.error.text, "not an integer");
    m = reader(BYTES(0xa1, 'x'));
    assert_int_equal(kv_msgpack_bin(&m).len, 0);
    assert_true(kv_msgpack_failed(&m));
    m = reader(BYTES(0xc4, 1, 'x'));
    assert_int_equal(kv_msgpack_str(&m).len, 0);
    assert_true(kv_msgpack_failed(&m));
    m = reader(BYTES(0x81, 1, 2));
    kv_msgpack_array(&m);
    assert_true(kv_msgpack_failed(&m));
    m = reader(BYTES(0x91, 1));
    kv_msgpack_map(&m);
    assert_true(kv_msgpack_failed(&m));
    m = reader(BYTES(0xc0));
    kv_msgpack_bool(&m);
    assert_true(kv_msgpack_failed(&m));
    m = reader(BYTES(0xc1));
    kv_msgpack_skip(&m);
    assert_true(kv_msgpack_failed(&m));
}

/* -- containers -------------------------------------------------------------------------------- */

static void test_counts_are_checked(void **state)
{
    static const struct {
        uint8_t bytes[6];
        size_t len;
    } bombs[] = {
        {{0xdd, 0xff, 0xff, 0xff, 0xff, 0x01}, 6},
        {{0xdf, 0xff, 0xff, 0xff, 0xff, 0x01}, 6},
        {{0xdc, 0xff, 0xff, 0x01}, 4},
        {{0xde, 0x00, 0x02, 0x01, 0x01, 0x01}, 6},
        {{0x92, 0x01}, 2},
        {{0x81, 0x01}, 2},
        {{0xdd, 0x00}, 2},
        {{0xdc}, 1},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bombs); i++) {
        struct kv_msgpack m = reader(bombs[i].bytes, bombs[i].len);
        bool map = kv_msgpack_peek(&m) == KV_MSGPACK_MAP;

        assert_int_equal(map ? kv_msgpack_map(&m) : kv_msgpack_array(&m), 0);
        assert_int_equal(m.error.code, -EPROTO);
        assert_int_equal(m.error.offset, 0);
        m = reader(bombs[i].bytes, bombs[i].len);
        kv_msgpack_skip(&m);
        assert_int_equal(m.error.code, -EPROTO);
    }
    struct kv_msgpack m = reader(BYTES(0xde, 0x00, 0x01, 0x01, 0x02));
    assert_int_equal(kv_msgpack_map(&m), 1);
    assert_int_equal(kv_msgpack_u64(&m), 1);
    assert_int_equal(kv_msgpack_u64(&m), 2);
    assert_true(done(&m));
}

/* A million arrays in one another: no recursion, no limit. */
static void test_deep_nesting(void **state)
{
    enum { DEPTH = 1000000 };
    uint8_t *bytes = malloc(DEPTH + 1);
    struct kv_msgpack m;

    (void)state;
    assert_non_null(bytes);
    memset(bytes, 0x91, DEPTH);
    bytes[DEPTH] = 0xc0;
    m = reader(bytes, DEPTH + 1);
    kv_msgpack_skip(&m);
    assert_true(done(&m));
    m = reader(bytes, DEPTH);
    kv_msgpack_skip(&m);
    assert_true(kv_msgpack_failed(&m));
    free(bytes);
}

static void test_skip_every_form(void **state)
{
    /* One of each first byte, with what belongs to it. */
    static const uint8_t bytes[] = {
        0x05, 0x81, 1,    2,    0x91, 1,    0xa1, 'x', 0xc0, 0xc2, 0xc3, 0xc4, 1, 0,    0xc5,
        0,    1,    0,    0xc6, 0,    0,    0,    1,   0,    0xc7, 1,    9,    0, 0xc8, 0,
        1,    9,    0,    0xc9, 0,    0,    0,    1,   9,    0,    0xca, 0,    0, 0,    0,
        0xcb, 0,    0,    0,    0,    0,    0,    0,   0,    0xcc, 0,    0xcd, 0, 0,    0xce,
        0,    0,    0,    0,    0xcf, 0,    0,    0,   0,    0,    0,    0,    0, 0xd0, 0,
        0xd1, 0,    0,    0xd2, 0,    0,    0,    0,   0xd3, 0,    0,    0,    0, 0,    0,
        0,    0,    0xd4, 9,    0,    0xd5, 9,    0,   0,    0xd6, 9,    0,    0, 0,    0,
        0xd7, 9,    0,    0,    0,    0,    0,    0,   0,    0,    0xd8, 9,    0, 0,    0,
        0,    0,    0,    0,    0,    0,    0,    0,   0,    0,    0,    0,    0, 0xd9, 1,
        'x',  0xda, 0,    1,    'x',  0xdb, 0,    0,   0,    1,    'x',  0xdc, 0, 1,    7,
        0xdd, 0,    0,    0,    1,    7,    0xde, 0,   1,    7,    7,    0xdf, 0, 0,    0,
        1,    7,    7,    0xe0,
    };
    struct kv_msgpack m = reader(bytes, sizeof(bytes));
    size_t n = 0;

    (void)state;
    while (m.p < m.end) {
        const uint8_t *before = m.p;

        kv_msgpack_skip(&m);
        assert_false(kv_msgpack_failed(&m));
        n++;
        /* Cut anywhere, the value is refused. */
        for (const uint8_t *cut = before; cut < m.p; cut++) {
            struct kv_msgpack part = reader(before, (size_t)(cut - before));

            kv_msgpack_skip(&part);
            assert_true(kv_msgpack_failed(&part));
        }
    }
    assert_int_equal(n, 36);
}

/* -- token ids --------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint64_t next_random(void)
{
    return unit_random(&random_state) >> 8;
}

/* A token in any form that holds it. */
static void put_any_form(struct kv_buf *out, uint32_t value)
{
    static const uint8_t codes[] = {0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd1, 0xd2, 0xd3};
    unsigned k = (unsigned)(next_random() % 24);
    unsigned width, bits;
    uint8_t bytes[9];

    if (k >= 8) {
        kv_msgpack_put_u64(out, value);
        return;
    }
    width = 1u << (k & 3);
    bits = 8 * width - (k >= 4);
    if (bits < 32 && value >> bits) {
        kv_msgpack_put_u64(out, value);
        return;
    }
    bytes[0] = codes[k];
    for (unsigned i = 0; i < width; i++)
        bytes[1 + i] = (uint8_t)((uint64_t)value >> (8 * (width - 1 - i)));
    kv_buf_append(out, bytes, 1 + width);
}

static uint32_t some_token(size_t mix)
{
    uint64_t random = next_random();

    switch (mix % 4) {
    case 0:
        return (uint32_t)random >> (random >> 40) % 32;
    case 1:
        return (uint32_t)(random % 151936);
    case 2:
        return (uint32_t)(random % 200);
    default:
        return UINT32_MAX - (uint32_t)(random % 3);
    }
}

/* The vector path against the values that were written; buffers of exact size, so that asan sees
 * any byte read beyond. */
static void test_tokens(void **state)
{
    size_t rounds = unit_rounds(4000);
    uint32_t want[300], got[300];

    (void)state;
    for (size_t round = 0; round < rounds; round++) {
        uint32_t n = (uint32_t)(next_random() % 300);
        struct kv_buf out = KV_BUF_INIT;
        uint8_t *exact;
        struct kv_msgpack m;

        for (uint32_t i = 0; i < n; i++) {
            want[i] = some_token(round);
            if (round % 3)
                kv_msgpack_put_u64(&out, want[i]);
            else
                put_any_form(&out, want[i]);
        }
        exact = malloc(out.len + 1);
        assert_non_null(exact);
        if (n)
            memcpy(exact, out.data, out.len);
        exact[out.len] = 0xc0;
        m = reader(exact, out.len + round % 2);
        assert_true(kv_msgpack_u32s(&m, n, got));
        assert_int_equal(m.p - m.start, out.len);
        assert_memory_equal(got, want, n * sizeof(*got));
        free(exact);
        kv_buf_fini(&out);
    }
}

/* One wrong element at each position: refused there, with its offset. */
static void test_wrong_tokens(void **state)
{
    static const struct {
        uint8_t bytes[9];
        size_t len;
        int code;
    } wrong[] = {
        {{0xff}, 1, -ERANGE},
        {{0xc0}, 1, -EPROTO},
        {{0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, 9, -ERANGE},
        {{0xa1, 'x'}, 2, -EPROTO},
        {{0xcb, 0, 0, 0, 0, 0, 0, 0, 0}, 9, -EPROTO},
    };
    uint32_t got[64];

    (void)state;
    for (size_t w = 0; w < KV_COUNT(wrong); w++) {
        for (uint32_t at = 0; at < 64; at++) {
            struct kv_buf out = KV_BUF_INIT;
            struct kv_msgpack m;
            size_t offset = 0;

            for (uint32_t i = 0; i < 80; i++) {
                if (i == at) {
                    offset = out.len;
                    kv_buf_append(&out, wrong[w].bytes, wrong[w].len);
                } else {
                    kv_msgpack_put_u64(&out, 100 * i);
                }
            }
            m = reader((const uint8_t *)out.data, out.len);
            assert_false(kv_msgpack_u32s(&m, 64, got));
            assert_int_equal(m.error.code, wrong[w].code);
            assert_int_equal(m.error.offset, offset);
            kv_buf_fini(&out);
        }
    }
    struct kv_msgpack m = reader(BYTES(1, 2, 3));
    assert_false(kv_msgpack_u32s(&m, 4, got));
    assert_true(kv_msgpack_failed(&m));
}

/* -- writer ------------------------------------------------------------------------------------ */

static void test_writer_is_shortest(void **state)
{
    static const struct {
        uint64_t value;
        size_t len;
    } positive[] = {{0, 1},         {127, 1},        {128, 2},
                    {255, 2},       {256, 3},        {65535, 3},
                    {65536, 5},     {UINT32_MAX, 5}, {UINT64_C(1) << 32, 9},
                    {UINT64_MAX, 9}};
    static const struct {
        int64_t value;
        size_t len;
    } negative[] = {{-1, 1},     {-32, 1},    {-33, 2},       {-128, 2},     {-129, 3},
                    {-32768, 3}, {-32769, 5}, {INT32_MIN, 5}, {INT64_MIN, 9}};
    struct kv_buf out = KV_BUF_INIT;
    struct kv_msgpack m;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(positive); i++) {
        kv_buf_clear(&out);
        kv_msgpack_put_u64(&out, positive[i].value);
        assert_int_equal(out.len, positive[i].len);
        m = reader((const uint8_t *)out.data, out.len);
        assert_true(kv_msgpack_u64(&m) == positive[i].value);
        assert_true(done(&m));
    }
    for (size_t i = 0; i < KV_COUNT(negative); i++) {
        kv_buf_clear(&out);
        kv_msgpack_put_i64(&out, negative[i].value);
        assert_int_equal(out.len, negative[i].len);
        m = reader((const uint8_t *)out.data, out.len);
        assert_true(kv_msgpack_i64(&m) == negative[i].value);
        assert_true(done(&m));
    }
    kv_buf_fini(&out);
}

static void test_writer_lengths(void **state)
{
    static const size_t lengths[] = {0, 31, 32, 255, 256, 65535, 65536};
    static const size_t str_heads[] = {1, 1, 2, 2, 3, 3, 5}, bin_heads[] = {2, 2, 2, 2, 3, 3, 5};
    static const uint32_t counts[] = {0, 15, 16, 65535, 65536};
    static const size_t count_heads[] = {1, 1, 3, 3, 5};
    char *text = calloc(1, 65536);
    struct kv_buf out = KV_BUF_INIT;
    struct kv_msgpack m;

    (void)state;
    assert_non_null(text);
    for (size_t i = 0; i < KV_COUNT(lengths); i++) {
        kv_buf_clear(&out);
        kv_msgpack_put_strn(&out, text, lengths[i]);
        assert_int_equal(out.len, str_heads[i] + lengths[i]);
        kv_msgpack_put_bin(&out, text, lengths[i]);
        assert_int_equal(out.len, str_heads[i] + bin_heads[i] + 2 * lengths[i]);
        m = reader((const uint8_t *)out.data, out.len);
        assert_int_equal(kv_msgpack_str(&m).len, lengths[i]);
        assert_int_equal(kv_msgpack_bin(&m).len, lengths[i]);
        assert_true(done(&m));
    }
    for (size_t i = 0; i < KV_COUNT(counts); i++) {
        kv_buf_clear(&out);
        kv_msgpack_put_array(&out, counts[i]);
        assert_int_equal(out.len, count_heads[i]);
        kv_msgpack_put_map(&out, counts[i]);
        assert_int_equal(out.len, 2 * count_heads[i]);
    }
    kv_buf_clear(&out);
    kv_msgpack_put_nil(&out);
    kv_msgpack_put_bool(&out, true);
    kv_msgpack_put_bool(&out, false);
    kv_msgpack_put_double(&out, 12.5);
    kv_msgpack_put_str(&out, "hi");
    assert_int_equal(out.len, 15);
    assert_memory_equal(out.data, "\xc0\xc3\xc2\xcb\x40\x29\0\0\0\0\0\0\xa2hi", 15);
    kv_buf_fini(&out);
    free(text);
}

/* -- transcode --------------------------------------------------------------------------------- */

static int transcode(void)
{
    struct kv_buf in = KV_BUF_INIT, out = KV_BUF_INIT;
    struct kv_msgpack m;
    char chunk[4096];
    size_t got;
    bool good = true;

    while ((got = fread(chunk, 1, sizeof(chunk), stdin)) > 0)
        kv_buf_append(&in, chunk, got);
    kv_msgpack_init(&m, in.data, in.len);
    while (good && m.p < m.end)
        good = msgpack_copy(&m, &out) && !out.error;
    if (good)
        good = fwrite(out.data, 1, out.len, stdout) == out.len;
    kv_buf_fini(&in);
    kv_buf_fini(&out);
    return good ? 0 : 1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_other_scalars),
        cmocka_unit_test(test_wrong_types),
        cmocka_unit_test(test_counts_are_checked),
        cmocka_unit_test(test_deep_nesting),
        cmocka_unit_test(test_skip_every_form),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_wrong_tokens),
        cmocka_unit_test(test_writer_is_shortest),
        cmocka_unit_test(test_writer_lengths),
    };

    if (argc > 1 && strcmp(argv[1], "transcode") == 0)
        return transcode();
    random_state = unit_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
