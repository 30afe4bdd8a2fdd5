// SPDX-License-Identifier: Apache-2.0
/* Prompts, and the small helpers: histogram, figures as text. */
#include "base/unit.h"
#include "cli/replay/hist.h"
#include "cli/replay/prompt.h"
#include "cli/replay/random.h"
#include "cli/replay/trace.h"
#include "cli/show/format.h"

static void test_prompts_share_prefixes(void **state)
{
    const uint64_t a[] = {0, 1, 2}, b[] = {0, 1, 3};
    struct kc_prompt p = {0}, q = {0};

    (void)state;
    for (uint32_t size = 16; size <= 512; size *= 2) {
        size_t per_id = KC_TRACE_BLOCK / size;

        assert_int_equal(kc_prompt_expand(&p, a, 3, 0, size), 0);
        assert_int_equal(kc_prompt_expand(&q, b, 3, 0, size), 0);
        assert_int_equal(p.n_tokens, 3 * KC_TRACE_BLOCK);
        assert_int_equal(p.n_blocks, 3 * per_id);
        assert_int_equal(p.n_trace_blocks, 3);
        assert_memory_equal(p.chain, q.chain, 2 * per_id * sizeof(uint64_t));
        assert_memory_equal(p.trace_chain, q.trace_chain, 2 * sizeof(uint64_t));
        assert_memory_equal(p.tokens, q.tokens, 2 * KC_TRACE_BLOCK * sizeof(uint32_t));
        for (size_t i = 2 * per_id; i < 3 * per_id; i++)
            assert_true(p.chain[i] != q.chain[i]);
        assert_true(p.trace_chain[2] != q.trace_chain[2]);
        for (size_t i = 0; i < p.n_tokens; i++)
            assert_true(p.tokens[i] < KC_VOCABULARY);
    }
    /* Another pass shares nothing. */
    assert_int_equal(kc_prompt_expand(&q, a, 3, 1, 512), 0);
    for (size_t i = 0; i < 3; i++) {
        assert_true(p.chain[i] != q.chain[i]);
        assert_true(p.trace_chain[i] != q.trace_chain[i]);
    }
    kc_prompt_fini(&p);
    kc_prompt_fini(&q);
}

static void test_long_prompts(void **state)
{
    struct kc_prompt p = {0};
    uint64_t ids[500], last = 0;

    (void)state;
    for (size_t i = 0; i < 500; i++)
        ids[i] = i;
    for (size_t n = 1; n <= 500; n += 83) {
        assert_int_equal(kc_prompt_expand(&p, ids, n, 0, 16), 0);
        assert_int_equal(p.n_blocks, n * 32);
        assert_true(last == 0 || p.chain[31] == last); /* the first block never changes */
        last = p.chain[31];
    }
    kc_prompt_fini(&p);
}

static int compare(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return x < y ? -1 : x > y;
}

static void test_histogram(void **state)
{
    struct kc_hist *hist = calloc(1, sizeof(*hist));
    struct kc_rng rng = {.state = unit_seed()};
    uint64_t values[4001];
    const double quantiles[] = {0, .1, .5, .9, .99, 1};

    (void)state;
    assert_non_null(hist);
    assert_int_equal(kc_hist_quantile(hist, .5), 0);
    for (size_t i = 0; i < 4001; i++) {
        values[i] = kc_rng_u64(&rng) >> (kc_rng_below(&rng, 63) + 1);
        kc_hist_record(hist, values[i]);
    }
    qsort(values, 4001, sizeof(values[0]), compare);
    for (size_t i = 0; i < sizeof(quantiles) / sizeof(quantiles[0]); i++) {
        uint64_t exact = values[(size_t)(quantiles[i] * 4000)];
        uint64_t got = kc_hist_quantile(hist, quantiles[i]);

        assert_true(got >= exact);
        assert_true((double)got <= (double)exact * (1 + 1.0 / KC_HIST_STEPS) + 1);
    }
    assert_true(atomic_load(&hist->max) == values[4000]);
    free(hist);
}

static void test_figures(void **state)
{
    (void)state;
    assert_string_equal(kc_count(0).s, "0");
    assert_string_equal(kc_count(999).s, "999");
    assert_string_equal(kc_count(1000).s, "1,000");
    assert_string_equal(kc_count(1234567).s, "1,234,567");
    assert_string_equal(kc_count(UINT64_MAX).s, "18,446,744,073,709,551,615");
    assert_string_equal(kc_bytes(512).s, "512 B");
    assert_string_equal(kc_bytes(1536).s, "1.5 KiB");
    assert_string_equal(kc_duration(310000).s, "310 us");
    assert_string_equal(kc_duration(4210000).s, "4.21 ms");
    assert_string_equal(kc_duration(2500000000).s, "2.5 s");
    assert_string_equal(kc_span(3537).s, "59 min");
    assert_string_equal(kc_scaled(12345).s, "12.3 k");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_share_prefixes),
        cmocka_unit_test(test_long_prompts),
        cmocka_unit_test(test_histogram),
        cmocka_unit_test(test_figures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
