// SPDX-License-Identifier: Apache-2.0
/* The inner loops alone: every conversion against the reference for every value that can matter,
 * every instruction set against the portable one, and division by multiplication. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kvx/address.h"
#include "kvx/isa/isa.h"
#include "kvx/kvx_cases.h"
#include "skip.h"

static const kvx_dtype_t dtypes[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32,
                                     KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2};

static uint64_t seed(void)
{
    const char *text = getenv("KV_TEST_SEED");
    uint64_t value = text ? strtoull(text, NULL, 0) : (uint64_t)(uintptr_t)&text >> 4;

    printf("KV_TEST_SEED=%llu\n", (unsigned long long)value);
    return value;
}

/* --------------------------------------------------------------------------------------------- */
/* Numbers */

/* Every F32 from which some narrower type rounds differently than its neighbour, and a random rest.
 */
static size_t f32_values(float *to, size_t room, struct dice *d)
{
    size_t n = 0;

    for (unsigned k = 0; k < 5; k++) {
        unsigned bytes = ref_format(dtypes[k]).bytes;
        uint32_t step = dtypes[k] == KVX_DTYPE_F16 || dtypes[k] == KVX_DTYPE_BF16 ? 7 : 1;

        if (bytes == 4)
            continue;
        for (uint32_t code = 0; code < (1U << (bytes * 8)); code += step) {
            double a = ref_decode(dtypes[k], code), b = ref_decode(dtypes[k], code + 1);
            float middle = (float)((a + b) / 2);
            uint32_t bits;

            if (!isfinite(middle))
                continue;
            memcpy(&bits, &middle, 4);
            for (uint32_t i = 0; i < 3 && n < room; i++) {
                uint32_t near = bits + i - 1;

                memcpy(&to[n++], &near, 4);
            }
        }
    }
    while (n < room) {
        uint32_t bits = (uint32_t)roll(d);

        memcpy(&to[n++], &bits, 4);
    }
    return n;
}

static size_t values_of(kvx_dtype_t dtype, char *to, size_t room, struct dice *d)
{
    unsigned bytes = ref_format(dtype).bytes;
    size_t n = bytes == 1 ? 256 : 65536;

    if (bytes == 4)
        return f32_values((float *)(void *)to, room / 4, d);
    for (uint32_t i = 0; i < n; i++)
        memcpy(to + (size_t)i * bytes, &i, bytes);
    return n;
}

enum { ROOM = 1 << 20 };

static void check_convert(const struct kvx_isa *isa, kvx_dtype_t from, kvx_dtype_t to,
                          const char *in, size_t n, char *out, float s, float t)
{
    unsigned in_size = ref_format(from).bytes, out_size = ref_format(to).bytes;
    const float *src = s == 1.0F ? NULL : &s, *dst = t == 1.0F ? NULL : &t;

    isa->convert[from][to](out, in, n, s, t, n % 2);
    for (size_t i = 0; i < n; i++) {
        uint32_t expected = 0;

        ref_move(in + i * in_size, from, &expected, to, false, src, dst);
        if (ref_load(out + i * out_size, out_size) != expected)
            fail_msg("%s: dtype %d %#x to %d: %#x, expected %#x (scales %g, %g)", isa->name,
                     (int)from, ref_load(in + i * in_size, in_size), (int)to,
                     ref_load(out + i * out_size, out_size), expected, (double)s, (double)t);
    }
}

static size_t isas(struct kvx_isa *to)
{
    size_t n = 0;

    kvx_isa_scalar(&to[n++]);
    to[n] = to[0];
    n += kvx_isa_avx2(&to[n]);
    to[n] = to[0];
    n += kvx_isa_avx512(&to[n]);
    to[n] = to[0];
    n += kvx_isa_neon(&to[n]);
    return n;
}

static void test_conversions(void **state)
{
    struct dice d = {seed() | 1};
    struct kvx_isa all[5];
    size_t n_isas = isas(all);
    char *in = malloc(ROOM), *out = malloc((size_t)ROOM * 4);

    (void)state;
    assert_non_null(in);
    assert_non_null(out);
    for (size_t k = 0; k < n_isas; k++) {
        for (unsigned a = 0; a < 5; a++) {
            size_t n = values_of(dtypes[a], in, ROOM, &d);

            for (unsigned b = 0; b < 5; b++) {
                check_convert(&all[k], dtypes[a], dtypes[b], in, n, out, 1.0F, 1.0F);
                check_convert(&all[k], dtypes[a], dtypes[b], in, n / 16, out, 0.37F, 1.0F);
                check_convert(&all[k], dtypes[a], dtypes[b], in + n / 2, n / 16, out, 1.0F, 0.011F);
                check_convert(&all[k], dtypes[a], dtypes[b], in, n / 16, out, 3.3F, 0.77F);
            }
        }
    }
    free(in);
    free(out);
}

/* Without scales nothing may depend on the caller's flush-to-zero mode (PyTorch can set it). */
static void test_flush_to_zero(void **state)
{
#if defined(__x86_64__)
    enum { FLUSH = 0x8040 };
    struct dice d = {seed() | 1};
    struct kvx_isa all[5];
    size_t n_isas = isas(all);
    char *in = malloc(ROOM), *out = malloc((size_t)ROOM * 4), *flushed = malloc((size_t)ROOM * 4);

    (void)state;
    assert_true(in && out && flushed);
    for (unsigned pair = 0; pair < 25; pair++) {
        kvx_dtype_t from = dtypes[pair % 5], to = dtypes[pair / 5];
        size_t n = values_of(from, in, ROOM, &d), bytes = n * ref_format(to).bytes;

        for (size_t k = 0; k < n_isas; k++) {
            unsigned before = _mm_getcsr();

            all[k].convert[from][to](out, in, n, 1.0F, 1.0F, false);
            _mm_setcsr(before | FLUSH);
            all[k].convert[from][to](flushed, in, n, 1.0F, 1.0F, false);
            _mm_setcsr(before);
            if (memcmp(out, flushed, bytes) != 0)
                fail_msg("%s: dtype %d to %d differs", all[k].name, (int)from, (int)to);
        }
    }
    free(in);
    free(out);
    free(flushed);
#else
    (void)state;
    skip_because("this machine's flush-to-zero mode is not ours to set");
#endif
}

/* Lengths around the vector width: right values, and nothing beside them touched. */
static void test_conversion_tails(void **state)
{
    struct dice d = {seed() | 1};
    struct kvx_isa all[5];
    size_t n_isas = isas(all);

    (void)state;
    for (size_t k = 0; k < n_isas; k++) {
        for (unsigned pair = 0; pair < 25; pair++) {
            kvx_dtype_t from = dtypes[pair % 5], to = dtypes[pair / 5];
            unsigned in_size = ref_format(from).bytes, out_size = ref_format(to).bytes;

            for (size_t n = 0; n < 200; n++) {
                char in[1024], out[1024], expected[1024];

                random_bytes(&d, in, sizeof(in));
                random_bytes(&d, out, sizeof(out));
                memcpy(expected, out, sizeof(out));
                all[k].convert[from][to](out + 7, in + in_size, n, 1.0F, 2.0F, false);
                all[k].fence();
                for (size_t i = 0; i < n; i++)
                    ref_move(in + (i + 1) * in_size, from, expected + 7 + i * out_size, to, false,
                             NULL, &(float){2.0F});
                assert_memory_equal(out, expected, sizeof(out));
            }
        }
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Copies */

static void test_stream(void **state)
{
    static char in[4096], out[4096 + 256], expected[sizeof(out)];
    struct dice d = {seed() | 1};
    struct kvx_isa all[5];
    size_t n_isas = isas(all);

    (void)state;
    for (size_t k = 0; k < n_isas; k++) {
        for (int i = 0; i < 3000; i++) {
            size_t n = below(&d, i % 3 ? 300 : 3800), to = below(&d, 130), from = below(&d, 70);

            random_bytes(&d, in, sizeof(in));
            random_bytes(&d, out, sizeof(out));
            memcpy(expected, out, sizeof(out));
            memcpy(expected + to, in + from, n);
            all[k].stream(out + to, in + from, n);
            all[k].fence();
            assert_memory_equal(out, expected, sizeof(out));
        }
    }
}

/* One side in rows of units, the other transposed; strides with room, any number of both. */
static void test_units(void **state)
{
    enum { BYTES = 1 << 16 };
    struct dice d = {seed() | 1};
    struct kvx_isa all[5];
    size_t n_isas = isas(all);
    char *in = aligned_alloc(64, BYTES), *out = aligned_alloc(64, BYTES);
    char *expected = aligned_alloc(64, BYTES);

    (void)state;
    for (int i = 0; i < 4000; i++) {
        uint32_t tokens = 1 + below(&d, 21), units = 1 + below(&d, 21);
        uint32_t more = 16 * below(&d, 5), align = below(&d, 2) ? 16 : 64;
        struct kvx_units u = {.n_tokens = tokens, .n_units = units, .size = 16};
        const struct kvx_isa *isa = &all[(size_t)i % n_isas];
        bool turn = below(&d, 2);
        int64_t rows = (int64_t)((units * 16 + more + 63) / 64 * 64);
        int64_t columns = (int64_t)((tokens * 16 + more + 63) / 64 * 64);

        u.stream = below(&d, 2);
        u.src_step = turn ? columns : 16;
        u.src_token = turn ? 16 : rows;
        u.dst_step = turn ? 16 : columns;
        u.dst_token = turn ? rows : 16;
        if (i % 7 == 0) /* neither: the general loop */
            u.src_step = u.dst_step = 32 * 21, u.src_token = u.dst_token = 32;
        random_bytes(&d, in, BYTES);
        random_bytes(&d, out, BYTES);
        memcpy(expected, out, BYTES);
        u.src = in + 16 * below(&d, 4);
        u.dst = out + align * below(&d, 4);
        for (uint32_t t = 0; t < tokens; t++) {
            for (uint32_t c = 0; c < units; c++)
                memcpy(expected + (u.dst - out) + t * u.dst_token + c * u.dst_step,
                       u.src + t * u.src_token + c * u.src_step, 16);
        }
        isa->units16(&u);
        isa->fence();
        assert_memory_equal(out, expected, BYTES);
    }
    free(in);
    free(out);
    free(expected);
}

/* --------------------------------------------------------------------------------------------- */
/* Addresses */

static void check_division(uint32_t divisor, uint64_t n, const struct kvx_divisor *d)
{
    n &= INT64_MAX;
    if (kvx_div(n, d) != n / divisor)
        fail_msg("%llu / %u", (unsigned long long)n, divisor);
    n &= INT32_MAX;
    if (kvx_div31((uint32_t)n, d) != (uint32_t)n / divisor)
        fail_msg("%llu / %u, 31 bits", (unsigned long long)n, divisor);
}

static void test_divisor(void **state)
{
    struct dice dice = {seed() | 1};

    (void)state;
    for (uint32_t i = 1; i < 40000; i++) {
        uint32_t divisor = i < 2000 ? i : (uint32_t)roll(&dice) >> below(&dice, 31);
        struct kvx_divisor d;

        if (i >= 39900)
            divisor = UINT32_MAX - (i - 39900);
        if (i >= 39800 && i < 39832)
            divisor = 1U << (i - 39800);
        if (divisor == 0)
            continue;
        d = kvx_divisor_make(divisor);
        for (uint32_t k = 0; k < 20; k++) {
            uint64_t multiple = (roll(&dice) >> below(&dice, 63)) / divisor * divisor;

            check_division(divisor, multiple, &d);
            check_division(divisor, multiple - 1, &d);
            check_division(divisor, multiple + divisor - 1, &d);
        }
        check_division(divisor, INT64_MAX, &d);
        check_division(divisor, INT64_MAX / divisor * divisor - 1, &d);
        check_division(divisor, INT32_MAX, &d);
        check_division(divisor, 0, &d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_conversions),
                                       cmocka_unit_test(test_flush_to_zero),
                                       cmocka_unit_test(test_conversion_tails),
                                       cmocka_unit_test(test_stream),
                                       cmocka_unit_test(test_units),
                                       cmocka_unit_test(test_divisor)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
