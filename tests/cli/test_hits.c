// SPDX-License-Identifier: Apache-2.0
/* Hit fractions of the published traces against the published table. The test looks for the traces
 * in $KV_TRACES, then in traces/ and ../shared/traces/mooncake of the source, and skips missing
 * ones. */
#include <unistd.h>

#include "base/unit.h"
#include "cli/replay/replay.h"
#include "skip.h"

static bool find_trace(const char *name, char *path, size_t size)
{
    const char *source = getenv("KV_SOURCE_DIR"), *traces = getenv("KV_TRACES");

    if (!source)
        source = ".";
    snprintf(path, size, "%s/%s", traces ? traces : "", name);
    if (traces && access(path, R_OK) == 0)
        return true;
    snprintf(path, size, "%s/traces/%s", source, name);
    if (access(path, R_OK) == 0)
        return true;
    snprintf(path, size, "%s/../shared/traces/mooncake/%s", source, name);
    return access(path, R_OK) == 0;
}

static void check(const char *name, const double *expected)
{
    static const uint64_t sizes[] = {1000, 5000, 10000, 30000, 50000, 100000, 0};
    struct kc_trace trace = {0};
    struct kc_trace_stats stats;
    struct kv_error error = {0};
    char path[4096];
    double fraction;

    if (!find_trace(name, path, sizeof(path)))
        skip_because("no %s: tools/get-traces.sh downloads it", name);
    if (kc_trace_read(path, &trace, &error) < 0)
        fail_msg("%s", error.text);
    assert_int_equal(kc_trace_measure(&trace, &stats), 0);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        char got[16], wanted[16];

        assert_int_equal(kc_hit_fraction(&trace, sizes[i], KC_PLAIN_LRU, &fraction), 0);
        snprintf(got, sizeof(got), "%.4f", fraction);
        snprintf(wanted, sizeof(wanted), "%.4f", expected[i]);
        assert_string_equal(got, wanted);
    }
    assert_true(fraction == stats.reuse);
    assert_int_equal(kc_hit_fraction(&trace, 0, KC_LEAF_FIRST, &fraction), 0);
    assert_true(fraction == stats.reuse);
    assert_int_equal(kc_check_hits(&trace, &stats, name), 0);
    kc_trace_fini(&trace);
}

static void test_conversation(void **state)
{
    static const double expected[] = {.0445, .1104, .2112, .3257, .3546, .3637, .3664};

    (void)state;
    check("conversation_trace.jsonl", expected);
}

static void test_synthetic(void **state)
{
    static const double expected[] = {.0825, .2791, .4235, .6242, .6396, .6396, .6396};

    (void)state;
    check("synthetic_trace.jsonl", expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conversation),
        cmocka_unit_test(test_synthetic),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
