// SPDX-License-Identifier: Apache-2.0
/* The index against the naive model, over millions of random operations. */
#include "base/unit.h"
#include "ops.h"

static void play(const struct ops_profile *profile, long rounds, int check_every,
                 long restart_every)
{
    struct ops *ops = ops_new(profile);

    print_message("%s: %ld operations, KV_TEST_SEED=%" PRIu64 "\n", profile->name, rounds,
                  test_seed());
    for (long i = 0; i < rounds; i++) {
        const char *wrong;

        if (i % restart_every == 0)
            ops_begin(ops);
        wrong = ops_one(ops);
        if (!wrong && i % (check_every * 25L) == 0)
            wrong = ops_reload(ops);
        if (!wrong && (i % check_every == 0 || i == rounds - 1))
            wrong = ops_check(ops);
        ops_judge(ops, i, wrong);
    }
    ops_free(ops);
}

/* A handful of hashes and places: everything collides with everything. */
static void test_tiny_universe(void **state)
{
    static const struct ops_profile profile = {.name = "tiny",
                                               .n_workers = 3,
                                               .n_ranks = 2,
                                               .n_locals = 2,
                                               .n_hashes = 12,
                                               .max_blocks = 5,
                                               .n_hash_seeds = 2,
                                               .chaos = 60,
                                               .diverge = 50,
                                               .grow = 55,
                                               .n_tiers = 4,
                                               .copies = true};
    (void)state;
    play(&profile, test_rounds(250000), 7, 3000);
}

/* Engines with the same seed; ordinary life. */
static void test_same_seed(void **state)
{
    static const struct ops_profile profile = {.name = "same seed",
                                               .n_workers = 6,
                                               .n_ranks = 2,
                                               .n_locals = 40,
                                               .n_hashes = 1000,
                                               .max_blocks = 30,
                                               .n_hash_seeds = 1,
                                               .chaos = 0,
                                               .diverge = 4,
                                               .grow = 50,
                                               .n_tiers = 2,
                                               .copies = true};
    (void)state;
    play(&profile, test_rounds(60000), 20, 5000);
}

/* Every engine names every place in its own way. */
static void test_other_seeds(void **state)
{
    static const struct ops_profile profile = {.name = "other seeds",
                                               .n_workers = 30,
                                               .n_ranks = 1,
                                               .n_locals = 6,
                                               .n_hashes = 200,
                                               .max_blocks = 12,
                                               .n_hash_seeds = 30,
                                               .chaos = 2,
                                               .diverge = 8,
                                               .grow = 60,
                                               .n_tiers = 4};
    (void)state;
    play(&profile, test_rounds(60000), 20, 8000);
}

/* Nothing is parked: what can't be reached is forgotten. */
static void test_without_parking(void **state)
{
    static const struct ops_profile profile = {.name = "without parking",
                                               .n_workers = 4,
                                               .n_ranks = 2,
                                               .n_locals = 5,
                                               .n_hashes = 60,
                                               .max_blocks = 12,
                                               .n_hash_seeds = 3,
                                               .chaos = 10,
                                               .diverge = 20,
                                               .grow = 55,
                                               .n_tiers = 3,
                                               .copies = true,
                                               .forgets = true};
    (void)state;
    play(&profile, test_rounds(60000), 7, 4000);
}

/* Long chains, cut at the limit, split and joined. */
static void test_long_chains(void **state)
{
    static const struct ops_profile profile = {.name = "long",
                                               .n_workers = 3,
                                               .n_ranks = 1,
                                               .n_locals = 1000,
                                               .n_hashes = 1000,
                                               .max_blocks = 600,
                                               .n_hash_seeds = 2,
                                               .chaos = 0,
                                               .diverge = 1,
                                               .grow = 40,
                                               .n_tiers = 3};
    (void)state;
    play(&profile, test_rounds(1200), 5, 150);
}

/* One hash for many places: engines that number their blocks. */
static void test_counting_engines(void **state)
{
    static const struct ops_profile profile = {.name = "counting",
                                               .n_workers = 40,
                                               .n_ranks = 1,
                                               .n_locals = 50,
                                               .n_hashes = 60,
                                               .max_blocks = 10,
                                               .n_hash_seeds = 1,
                                               .chaos = 100,
                                               .diverge = 90,
                                               .grow = 70,
                                               .n_tiers = 1};
    (void)state;
    play(&profile, test_rounds(100000), 20, 10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiny_universe),    cmocka_unit_test(test_same_seed),
        cmocka_unit_test(test_other_seeds),      cmocka_unit_test(test_long_chains),
        cmocka_unit_test(test_counting_engines), cmocka_unit_test(test_without_parking),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
