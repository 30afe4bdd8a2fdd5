// SPDX-License-Identifier: Apache-2.0
/* Each allocation of each call refused in turn: the call fails and the index is unchanged. */
#include "base/unit.h"
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

static int count_extra(void *arg, const struct kvi_extra *extra)
{
    *(size_t *)arg += extra->kind == KVI_EXTRA_WINDOW_BLOCK;
    return 0;
}

/* A dump of windows has all their blocks, or fails. */
static void test_dump_of_windows(void **state)
{
    const struct kv_holder who = {1, 0};
    const struct kvi_window window = {.group = 1, .window = 9, .need = 2, .stride = 1};
    uint64_t hashes[500];
    size_t n_failed = 0;
    int rc = -ENOMEM;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(hashes); i++)
        hashes[i] = 1 + i;
    for (long n = 1; rc; n++) {
        struct kvi_index *ix;
        size_t told = 0;

        assert_int_equal(kvi_create(NULL, &ix), 0);
        assert_true(kvi_set_window(ix, who, &window) >= 0);
        assert_int_equal(
            kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), hashes, KV_COUNT(hashes)),
            KV_COUNT(hashes));
        kvi_mem_fail_at(n);
        rc = kvi_dump_extras(ix, count_extra, &told);
        kvi_mem_fail_at(0);
        assert_int_equal(rc, told == KV_COUNT(hashes) ? 0 : -ENOMEM);
        n_failed += rc != 0;
        kvi_destroy(ix);
    }
    assert_true(n_failed > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_colliding),
        cmocka_unit_test(test_wide),
        cmocka_unit_test(test_dump_of_windows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
