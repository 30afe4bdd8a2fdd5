// SPDX-License-Identifier: Apache-2.0
/* The reasons of POST /explain are those of their page; and quantiles of durations. */
#include <math.h>

#include "base/unit.h"
#include "indexer/api/why.h"
#include "indexer/telemetry.h"
#include "skip.h"

/* Each row of the page's table is a row of why.def, in the same order and words. */
static void test_page(void **state)
{
    static char text[1 << 16];
    const char *root = getenv("KV_SOURCE_DIR"), *end;
    char *at, *next;
    char path[512], row[512];
    FILE *file;

    (void)state;
    if (!root)
        skip_because("KV_SOURCE_DIR isn't set");
    snprintf(path, sizeof(path), "%s/docs/page.md", root);
    file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    at = strstr(text, "\n## Why a match ends\n");
    assert_non_null(at);
    next = strstr(at + 1, "\n## ");
    assert_non_null(next);
    *next = '\0'; /* the section ends here */
    for (int i = 0; i < KI_N_WHYS; i++) {
        const struct ki_why_info *info = ki_why_info((enum ki_why)i);

        snprintf(row, sizeof(row), "\n| `%s` | %s |", info->name, info->text);
        end = strstr(at, "\n| `");
        assert_non_null(end);
        if (strncmp(end, row, strlen(row)) != 0)
            fail_msg("docs/page.md has%.*s, not%s", (int)strcspn(end + 1, "\n") + 1, end, row);
        at += end + 1 - at;
    }
    assert_null(strstr(at, "\n| `"));
}

static void test_quantiles(void **state)
{
    uint64_t latency[KI_N_LATENCIES] = {0};

    (void)state;
    assert_true(ki_latency_quantile(latency, 0.5) < 0);
    latency[4] = 10; /* 50 to 100 µs */
    assert_true(fabs(ki_latency_quantile(latency, 0.5) - 0.000075) < 1e-9);
    assert_true(fabs(ki_latency_quantile(latency, 1) - 0.0001) < 1e-9);
    latency[0] = 10; /* up to 5 µs */
    assert_true(fabs(ki_latency_quantile(latency, 0.25) - 0.0000025) < 1e-9);
    latency[KI_N_LATENCIES - 1] = 1000; /* beyond the last bound: that one */
    assert_true(fabs(ki_latency_quantile(latency, 0.99) - 52.4288) < 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page),
        cmocka_unit_test(test_quantiles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
