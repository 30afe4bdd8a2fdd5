// SPDX-License-Identifier: Apache-2.0
/* Each allocation of each call refused in turn: the call fails and the index is unchanged. */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include "ops.h"

static void play(const struct ops_profile *profile, long rounds)
{
    struct ops *ops = ops_new(profile);

    ops->starve = ops->whole = true;
    ops_begin(ops);
    for (long i = 0; i < rounds; i++) {
        const char *wrong = ops_one(ops);

        if (!wrong && i % 50 == 0)
            wrong = i % 1000 ? ops_check(ops) : ops_reload(ops);
        ops_judge(ops, i, wrong);
    }
    print_message("%s: %ld operations, %ld failures\n", profile->name, rounds, ops->n_starved);
    assert_true(ops->n_starved > rounds / 20);
    ops_free(ops);
}

static void test_colliding(void **state)
{
    static const struct ops_profile profile = {.name = "colliding",
                                               .n_workers = 4,
                                               .n_ranks = 2,
                                               .n_locals = 3,
                                               .n_hashes = 20,
                                               .max_blocks = 6,
                                               .n_hash_seeds = 3,
                                               .chaos = 40,
                                               .diverge = 40,
                                               .grow = 60,
                                               .n_tiers = 4,
                                               .forgets = true};
    (void)state;
    play(&profile, test_rounds(20000));
}

static void test_wide(void **state)
{
    static const struct ops_profile profile = {.name = "wide",
                                               .n_workers = 40,
                                               .n_ranks = 1,
                                               .n_locals = 300,
                                               .n_hashes = 500,
                                               .max_blocks = 40,
                                               .n_hash_seeds = 4,
                                               .chaos = 0,
                                               .diverge = 10,
                                               .grow = 75,
                                               .n_tiers = 2,
                                               .forgets = true};
    (void)state;
    play(&profile, test_rounds(6000));
}

static void test_create(void **state)
{
    struct kvi_index *ix = NULL;
    long n = 0;
    int rc;
    (void)state;

    do {
        kvi_mem_fail_at(++n);
        rc = kvi_create(NULL, &ix);
        assert_true(rc == 0 || (rc == -ENOMEM && !ix));
    } while (rc);
    assert_true(n > 5);
    kvi_mem_fail_at(0);
    kvi_destroy(ix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_colliding),
        cmocka_unit_test(test_wide),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
