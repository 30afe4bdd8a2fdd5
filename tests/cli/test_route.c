// SPDX-License-Identifier: Apache-2.0
#include "base/unit.h"
#include "cli/replay/route.h"

static void test_overlap_against_load(void **state)
{
    struct kc_belief beliefs[3] = {{0}, {.overlap = 6}, {.overlap = 8}};
    struct kc_router r;

    (void)state;
    kc_router_init(&r, KC_PREFIX, 3, 0.5, 1);
    assert_int_equal(kc_router_pick(&r, 0, 10, beliefs), 2); /* costs 10, 4, 2 */
    kc_router_assign(&r, 2, 0, 4);
    assert_int_equal(kc_router_pick(&r, 0, 10, beliefs), 1);   /* 10, 4, 2 + 4 */
    assert_int_equal(kc_router_pick(&r, 3.9, 10, beliefs), 1); /* 2 + 4 - 1.95 */
    assert_int_equal(kc_router_pick(&r, 4.1, 10, beliefs), 2); /* 2 + 4 - 2.05 */
    kc_router_assign(&r, 1, 4.1, 100);
    kc_router_assign(&r, 2, 4.1, 100);
    assert_int_equal(kc_router_pick(&r, 4.1, 10, beliefs), 0);
    /* An overlap longer than the prompt (nonsense from outside) doesn't make a cost negative. */
    beliefs[1].overlap = UINT32_MAX;
    assert_int_equal(kc_router_pick(&r, 4.1, 10, beliefs), 0);
}

static void test_backlog(void **state)
{
    struct kc_router r;

    (void)state;
    kc_router_init(&r, KC_PREFIX, 2, 0.5, 1);
    kc_router_assign(&r, 0, 100, 10);
    assert_true(kc_router_backlog(&r, 0, 100) == 10);
    assert_true(kc_router_backlog(&r, 0, 110) == 5);
    assert_true(kc_router_backlog(&r, 0, 200) == 0);
    assert_true(kc_router_backlog(&r, 1, 100) == 0);
    kc_router_assign(&r, 0, 110, 3);
    assert_true(kc_router_backlog(&r, 0, 110) == 8);
    /* Requests that come slightly out of order (several clients) neither add nor lose work. */
    kc_router_assign(&r, 0, 105, 2);
    assert_true(kc_router_backlog(&r, 0, 110) == 10);
}

static void test_ties_spread(void **state)
{
    struct kc_router r;
    uint32_t got[4] = {0};

    (void)state;
    kc_router_init(&r, KC_PREFIX, 4, 1, 1);
    for (int i = 0; i < 40; i++) {
        uint32_t w = kc_router_pick(&r, i * 1000.0, 5, NULL);

        kc_router_assign(&r, w, i * 1000.0, 5);
        got[w]++;
    }
    for (int w = 0; w < 4; w++)
        assert_int_equal(got[w], 10);
}

static void test_other_policies(void **state)
{
    struct kc_router robin, random, same;
    uint32_t got[4] = {0};

    (void)state;
    kc_router_init(&robin, KC_ROUND_ROBIN, 3, 1, 1);
    kc_router_init(&random, KC_RANDOM, 4, 1, 5);
    kc_router_init(&same, KC_RANDOM, 4, 1, 5);
    for (uint32_t i = 0; i < 4000; i++) {
        uint32_t w = kc_router_pick(&random, 0, 5, NULL);

        assert_int_equal(kc_router_pick(&robin, 0, 5, NULL), i % 3);
        assert_int_equal(kc_router_pick(&same, 0, 5, NULL), w);
        kc_router_assign(&robin, i % 3, 0, 5);
        kc_router_assign(&random, w, 0, 5);
        kc_router_assign(&same, w, 0, 5);
        got[w]++;
    }
    for (int w = 0; w < 4; w++)
        assert_true(got[w] > 850 && got[w] < 1150);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_overlap_against_load),
        cmocka_unit_test(test_backlog),
        cmocka_unit_test(test_ties_spread),
        cmocka_unit_test(test_other_policies),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
