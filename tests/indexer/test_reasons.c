// SPDX-License-Identifier: Apache-2.0
/* The reasons for which a view is partial: their page, their names in dumps, and one way to each. */
#include "base/unit.h"
#include "indexer/view/apply.h"
#include "skip.h"

/* Return the contents of docs/exactness.md, static. */
static const char *page(void)
{
    static char text[1 << 16];
    const char *root = getenv("KV_SOURCE_DIR");
    char path[512];
    FILE *file;

    if (!root)
        skip_because("KV_SOURCE_DIR isn't set");
    snprintf(path, sizeof(path), "%s/docs/exactness.md", root);
    file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

/* Each row of the page's table is a row of reasons.def, in the same order and words. */
static void test_page(void **state)
{
    static const char *const told[] = {
        [KI_TOLD_ALWAYS] = "yes", [KI_TOLD_BLOCKS] = "as blocks", [KI_TOLD_NEVER] = "no"};
    const char *at = strstr(page(), "\n## Reasons\n"), *end;

    (void)state;
    assert_non_null(at);
    for (int i = 0; i < KI_N_REASONS; i++) {
        const struct ki_reason_info *info = ki_reason_info((enum ki_reason)i);
        char row[512];

        snprintf(row, sizeof(row), "\n| `%s` | %s | %s | %s |", info->name, info->set_by,
                 info->ended_by, told[info->told]);
        end = strstr(at, "\n| `");
        assert_non_null(end);
        if (strncmp(end, row, strlen(row)) != 0)
            fail_msg("docs/exactness.md has%.*s, not%s", (int)strcspn(end + 1, "\n") + 1, end, row);
        at = end + 1;
    }
    assert_null(strstr(at, "\n| `"));
}

static void test_names(void **state)
{
    struct kv_buf text = KV_BUF_INIT;
    struct kv_json_writer w;
    struct kv_json json;
    ki_reasons all = (UINT64_C(1) << KI_N_REASONS) - 1;

    (void)state;
    kv_json_writer_init(&w, &text);
    ki_reasons_write(&w, all);
    kv_json_init(&json, text.data, text.len);
    assert_true(ki_reasons_read(&json) == all);
    assert_int_equal(kv_json_finish(&json), 0);
    kv_json_init(&json, "[\"stale\",\"of a later version\"]", 30);
    assert_true(ki_reasons_read(&json) == (KI_BECAUSE(STALE) | KI_BECAUSE(PEER)));
    assert_int_equal(kv_json_finish(&json), 0);
    kv_buf_fini(&text);
}

/* Every reason is told in one of three ways, and those that a whole view ends come first. */
static void test_sets(void **state)
{
    ki_reasons all = (UINT64_C(1) << KI_N_REASONS) - 1;
    ki_reasons always = ki_reasons_told(all, KI_TOLD_ALWAYS);

    (void)state;
    assert_true((always | ki_reasons_told(all, KI_TOLD_BLOCKS) |
                 ki_reasons_told(all, KI_TOLD_NEVER)) == all);
    assert_true((always & KI_REASONS_LOST) == KI_REASONS_LOST);
    for (int i = 0; i < KI_N_REASONS; i++)
        assert_int_equal(strcmp(ki_reason_info((enum ki_reason)i)->ended_by, "a whole view") == 0,
                         (KI_REASONS_LOST >> i) & 1);
}

/* A change to an applier that gives a reason. */
static void doubt(struct ki_applier *a, enum ki_reason reason)
{
    switch (reason) {
    case KI_REASON_SILENT_WINDOWS:
        a->habits.silent_windows = true;
        break;
    case KI_REASON_UNNUMBERED:
        a->unnumbered = true;
        break;
    case KI_REASON_UNKNOWN_BLOCKS:
        ki_doubts_add(&a->doubts, 3, 0, 1u << KV_TIER_HOST);
        break;
    case KI_REASON_WINDOWS_FULL:
        ki_doubts_add(&a->doubts, 3, 0, KI_WHY_CROWDED);
        break;
    case KI_REASON_BLOCK_DROP:
        ki_doubts_add(&a->doubts, 3, 0, KI_WHY_DROPS);
        break;
    case KI_REASON_POOL_CLEAR:
        ki_doubts_add(&a->doubts, 3, 0, KI_WHY_DEVICE_CLEAR);
        break;
    case KI_REASON_REPORTED_PARTS:
        ki_doubts_add(&a->doubts, 3, 0, KI_WHY_REPORTS);
        break;
    case KI_REASON_UNPLACED:
        ki_doubts_add(&a->doubts, 3, 0, KI_WHY_PLACES);
        break;
    case KI_REASON_COMPONENT:
        ki_doubts_add(&a->incomplete, 3, 1234, 1);
        break;
    case KI_REASON_LEFT_OUT:
        a->left_out = 1;
        break;
    case KI_REASON_MAYBE_REPORT:
        a->ranges.n_open = 1;
        break;
    case KI_REASON_MAYBE_MORE:
        ki_doubts_add(&a->ranges.lost, 3, 0, KI_LOST_FEWER);
        break;
    case KI_REASON_SMALL_LOST:
        ki_doubts_add(&a->small.lost, 3, 0, 1);
        break;
    case KI_REASON_SPARSE_REPORTS:
        a->retains = a->reports.seen = true;
        break;
    default: /* the stream's, the registry's, and those that test_small.c brings about */
        break;
    }
}

/* Each reason shows as itself alone. */
static void test_each_alone(void **state)
{
    size_t n = 0;

    (void)state;
    for (int i = 0; i < KI_N_REASONS; i++) {
        struct ki_applier a;
        ki_reasons reasons;

        assert_int_equal(ki_applier_init(&a, 7, 0, 16, KI_MM_PLACED), 0);
        assert_true(ki_applier_reasons(&a) == 0);
        doubt(&a, (enum ki_reason)i);
        reasons = ki_applier_reasons(&a);
        assert_true(reasons == 0 || reasons == UINT64_C(1) << i);
        assert_true(ki_applier_reasons_of_replicas(&a) == reasons);
        n += reasons != 0;
        ki_applier_fini(&a);
    }
    assert_int_equal(n, 14);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_sets),
        cmocka_unit_test(test_each_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
