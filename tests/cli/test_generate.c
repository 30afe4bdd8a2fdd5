// SPDX-License-Identifier: Apache-2.0
/* The generated workload: well formed, repeatable, and similar to the Mooncake conversation trace
 * (figures measured; docs/replay.md has the table). */
#include "base/unit.h"
#include "cli/replay/generate.h"
#include "cli/replay/replay.h"

static void make(uint64_t seed, size_t n, struct kc_trace *trace)
{
    const struct kc_generate_opts opts = {.seed = seed, .n_requests = n};

    assert_int_equal(kc_generate(&opts, trace), 0);
    assert_int_equal(trace->n_requests, n);
}

static void check_near(const char *what, double value, double wanted, double by)
{
    const double low = wanted - by, high = wanted + by;

    if (value < low || value > high)
        fail_msg("%s is %g, wanted %g .. %g", what, value, low, high);
}

/* @slack widens every range: one seed in forty is out of the narrow ones. */
static void check_statistics(uint64_t seed, double slack)
{
    /* blocks, what the conversation trace gives, and by how much one may differ */
    static const struct {
        uint64_t blocks;
        double real, tolerance;
    } hits[] = {{1000, .0445, .03}, {10000, .2112, .03}, {30000, .3257, .03}, {0, .3664, .03}};
    struct kc_trace trace = {0};
    struct kc_trace_stats stats;
    double fraction;

    make(seed, KC_GENERATE_REQUESTS, &trace);
    assert_int_equal(kc_trace_measure(&trace, &stats), 0);
    check_near("mean input", stats.mean_input, 12035, slack * .08 * 12035);
    check_near("median input", stats.median_input, 6909, slack * .15 * 6909);
    check_near("mean output", stats.mean_output, 343, slack * .05 * 343);
    check_near("span", (double)stats.span_ms, 3537e3, slack * .05 * 3537e3);
    assert_in_range(stats.max_input, 100000, 131072);
    for (size_t i = 0; i < KV_COUNT(hits); i++) {
        assert_int_equal(kc_hit_fraction(&trace, hits[i].blocks, KC_PLAIN_LRU, &fraction), 0);
        check_near("hit fraction", fraction, hits[i].real, slack * hits[i].tolerance);
        if (hits[i].blocks == 0)
            assert_true(fraction == stats.reuse);
    }
    kc_trace_fini(&trace);
}

static void test_statistics(void **state)
{
    (void)state;
    check_statistics(1, 1);
    check_statistics(2, 1);
    check_statistics(unit_seed(), 2.5);
}

static int compare_pairs(const void *a, const void *b)
{
    return memcmp(a, b, 2 * sizeof(uint64_t));
}

/* As in the real traces: times don't go back, each id has one predecessor, ceil(input / 512) ids.
 */
static void test_form(void **state)
{
    struct kc_trace trace = {0};
    uint64_t(*pairs)[2];
    size_t n = 0;

    (void)state;
    make(7, 3000, &trace);
    pairs = malloc(trace.n_ids * sizeof(*pairs));
    assert_non_null(pairs);
    for (size_t i = 0; i < trace.n_requests; i++) {
        const struct kc_request *r = &trace.requests[i];

        assert_int_equal(r->n, (r->input_length + KC_TRACE_BLOCK - 1) / KC_TRACE_BLOCK);
        assert_true(i == 0 || r->timestamp_ms >= trace.requests[i - 1].timestamp_ms);
        assert_int_equal(trace.ids[r->first], 0);
        for (uint32_t k = 0; k < r->n; k++, n++) {
            pairs[n][0] = trace.ids[r->first + k];
            pairs[n][1] = k ? trace.ids[r->first + k - 1] : UINT64_MAX;
        }
    }
    assert_int_equal(n, trace.n_ids);
    qsort(pairs, n, sizeof(*pairs), compare_pairs);
    for (size_t i = 1; i < n; i++)
        assert_true(pairs[i][0] != pairs[i - 1][0] || pairs[i][1] == pairs[i - 1][1]);
    free(pairs);
    kc_trace_fini(&trace);
}

static void test_repeatable(void **state)
{
    struct kc_trace a = {0}, b = {0}, c = {0};

    (void)state;
    make(3, 500, &a);
    make(3, 500, &b);
    make(4, 500, &c);
    assert_int_equal(a.n_ids, b.n_ids);
    assert_memory_equal(a.ids, b.ids, a.n_ids * sizeof(*a.ids));
    assert_memory_equal(a.requests, b.requests, a.n_requests * sizeof(*a.requests));
    assert_true(a.n_ids != c.n_ids || memcmp(a.ids, c.ids, a.n_ids * sizeof(*a.ids)) != 0);
    kc_trace_fini(&a);
    kc_trace_fini(&b);
    kc_trace_fini(&c);
}

static void test_sizes(void **state)
{
    const struct kc_generate_opts none = {.seed = 1};
    struct kc_trace trace = {0};

    (void)state;
    assert_int_equal(kc_generate(&none, &trace), -EINVAL);
    make(1, 1, &trace);
    kc_trace_fini(&trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_form),
        cmocka_unit_test(test_repeatable),
        cmocka_unit_test(test_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
