// SPDX-License-Identifier: Apache-2.0
/* Content-defined cuts: any object is restored, chunk lengths are bounded, and an edit changes few
 * chunks. */
#include "base/unit.h"
#include "cutting.h"

static const struct kvs_save_opts bytes_4k = {
    .size = sizeof(bytes_4k), .format = KVS_FORMAT_BYTES, .chunk_bytes = 4096};

static uint8_t *random_bytes(struct rng *rng, size_t len)
{
    uint8_t *data = malloc(len + 1);

    for (size_t i = 0; i < len; i++)
        data[i] = (uint8_t)rng_next(rng);
    return data;
}

static void test_any_length(void **state)
{
    struct rng rng = {test_seed()};
    (void)state;

    for (long i = test_rounds(300); i > 0; i--) {
        size_t len = rng_below(&rng, 3) ? rng_below(&rng, 200000) : rng_below(&rng, 20);
        uint8_t *data = random_bytes(&rng, len);
        struct cutting cut, again;

        if (rng_below(&rng, 4) == 0)
            memset(data, 0, len); /* no content to cut by */
        assert_true(cut_all(data, len, &bytes_4k, &rng, &cut));
        assert_true(cut.longest <= 4 * 4096);
        for (size_t c = 0; c + 1 < cut.manifest.n_chunks; c++)
            assert_true(cut.manifest.chunks[c].len >= 1024);
        /* How the bytes arrive changes nothing. */
        assert_true(cut_all(data, len, &bytes_4k, NULL, &again));
        assert_int_equal(cut.manifest.n_chunks, again.manifest.n_chunks);
        assert_int_equal(new_bytes(&cut, &again), 0);
        cutting_drop(&cut);
        cutting_drop(&again);
        free(data);
    }
}

static void test_average(void **state)
{
    struct rng rng = {test_seed() + 1};
    size_t len = 8u << 20;
    uint8_t *data = random_bytes(&rng, len);
    struct cutting cut;
    (void)state;

    assert_true(cut_all(data, len, &bytes_4k, NULL, &cut));
    assert_in_range(len / cut.manifest.n_chunks, 3500, 6000);
    assert_true(cut.window <= 16u * 4096);
    cutting_drop(&cut);
    free(data);
}

/* An insertion changes the chunks around it; those behind are found again. */
static void test_edits(void **state)
{
    struct rng rng = {test_seed() + 2};
    size_t len = 1u << 20;
    (void)state;

    for (long i = test_rounds(20); i > 0; i--) {
        uint8_t *data = random_bytes(&rng, len), *edited = malloc(len + 100);
        size_t at = rng_below(&rng, (uint32_t)len), n = 1 + rng_below(&rng, 99);
        struct cutting before, after;

        memcpy(edited, data, at);
        for (size_t j = 0; j < n; j++)
            edited[at + j] = (uint8_t)rng_next(&rng);
        memcpy(edited + at + n, data + at, len - at);
        assert_true(cut_all(data, len, &bytes_4k, NULL, &before));
        assert_true(cut_all(edited, len + n, &bytes_4k, NULL, &after));
        assert_true(new_bytes(&before, &after) <= 8 * 4 * 4096);
        cutting_drop(&before);
        cutting_drop(&after);
        free(data);
        free(edited);
    }
}

/* The rule steps by two bytes; an object that begins one byte later is cut at the same places. */
static void test_shifted(void **state)
{
    struct rng rng = {test_seed() + 3};
    size_t len = 1u << 20;
    uint8_t *data = random_bytes(&rng, len + 1);
    struct cutting even, odd;
    (void)state;

    assert_true(cut_all(data, len, &bytes_4k, NULL, &even));
    assert_true(cut_all(data + 1, len, &bytes_4k, NULL, &odd));
    assert_true(new_bytes(&even, &odd) <= 8 * 4 * 4096);
    cutting_drop(&even);
    cutting_drop(&odd);
    free(data);
}

/* Cuts are part of what is stored: another table or rule would share nothing with older saves. */
static void test_cuts_stay(void **state)
{
    struct rng rng = {1};
    static const uint32_t lengths[] = {6315, 9468, 5834, 5850, 4548, 7729, 256};
    uint8_t *data = random_bytes(&rng, 40000);
    struct cutting cut;
    (void)state;

    assert_true(cut_all(data, 40000, &bytes_4k, NULL, &cut));
    assert_int_equal(cut.manifest.n_chunks, KV_COUNT(lengths));
    for (size_t i = 0; i < KV_COUNT(lengths); i++)
        assert_int_equal(cut.manifest.chunks[i].len, lengths[i]);
    cutting_drop(&cut);
    free(data);
}

static void test_options(void **state)
{
    struct reading reading = {0};
    struct kvs_cutter c;
    struct kvs_save_opts opts = {.size = sizeof(opts)};
    (void)state;

    opts.chunk_bytes = 4095;
    assert_int_equal(kvs_cutter_init(&c, &opts, read_some, &reading), -EINVAL);
    kvs_cutter_fini(&c);
    opts.chunk_bytes = (16u << 20) + 1;
    assert_int_equal(kvs_cutter_init(&c, &opts, read_some, &reading), -EINVAL);
    kvs_cutter_fini(&c);
    opts.chunk_bytes = 0;
    opts.chunk_tokens = 65537;
    assert_int_equal(kvs_cutter_init(&c, &opts, read_some, &reading), -EINVAL);
    kvs_cutter_fini(&c);
    opts.chunk_tokens = 0;
    opts.format = (enum kvs_format)3;
    assert_int_equal(kvs_cutter_init(&c, &opts, read_some, &reading), -EINVAL);
    kvs_cutter_fini(&c);
}

static void test_read_error(void **state)
{
    uint8_t data[50000] = {0};
    struct reading reading = {.data = data, .len = sizeof(data), .fail_at = 40000};
    struct kvs_manifest m = {0};
    struct rng rng = {test_seed()};
    struct kvs_cutter c;
    const uint8_t *chunk;
    size_t len;
    int rc;
    (void)state;

    reading.rng = &rng;
    assert_int_equal(kvs_cutter_init(&c, &bytes_4k, read_some, &reading), 0);
    while ((rc = kvs_cutter_next(&c, &m, &chunk, &len)) == 1)
        ;
    assert_int_equal(rc, -EIO);
    assert_int_equal(kvs_cutter_next(&c, &m, &chunk, &len), -EIO);
    kvs_cutter_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_length), cmocka_unit_test(test_average),
        cmocka_unit_test(test_edits),      cmocka_unit_test(test_shifted),
        cmocka_unit_test(test_cuts_stay),  cmocka_unit_test(test_options),
        cmocka_unit_test(test_read_error),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
