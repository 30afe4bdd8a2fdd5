// SPDX-License-Identifier: Apache-2.0
/* Doubts of ranks and owners, beside a naive model. */
#include "base/unit.h"

#include "indexer/view/doubts.h"

#define RANKS 5
#define OWNERS 3

static void test_any_doubts(void **state)
{
    uint32_t model[RANKS][OWNERS] = {{0}}, all;
    struct ki_doubts doubts = {0};
    uint64_t random = unit_seed();
    size_t n;

    (void)state;
    for (size_t i = 0; i < unit_rounds(20000); i++) {
        uint32_t rank = (uint32_t)unit_below(&random, RANKS);
        uint64_t owner = unit_below(&random, OWNERS);
        uint32_t bits = 1 + (uint32_t)unit_below(&random, 7),
                 what = (uint32_t)unit_below(&random, 500);

        if (!what) {
            ki_doubts_clear(&doubts);
            memset(model, 0, sizeof(model));
        } else if (what & 1) {
            ki_doubts_add(&doubts, rank, owner, bits);
            model[rank][owner] |= bits;
        } else {
            ki_doubts_end(&doubts, rank, owner, bits);
            model[rank][owner] &= ~bits;
        }
        n = all = 0;
        for (size_t k = 0; k < (size_t)RANKS * OWNERS; k++) {
            n += model[k / OWNERS][k % OWNERS] != 0;
            all |= model[k / OWNERS][k % OWNERS];
        }
        assert_int_equal(doubts.n, n);
        assert_int_equal(ki_doubts_any(&doubts), n > 0);
        for (uint32_t bit = 1; bit < 16; bit *= 2)
            assert_int_equal(ki_doubts_has(&doubts, bit), (all & bit) != 0);
    }
    ki_doubts_clear(&doubts);
}

/* Beyond the limit nothing is forgotten: the doubt lasts until all are. */
static void test_limit(void **state)
{
    struct ki_doubts doubts = {0};

    (void)state;
    for (uint32_t rank = 0; rank <= KI_MAX_DOUBTS; rank++)
        ki_doubts_add(&doubts, rank, 0, 1);
    for (uint32_t rank = 0; rank <= KI_MAX_DOUBTS; rank++) {
        assert_true(ki_doubts_any(&doubts));
        ki_doubts_end(&doubts, rank, 0, 1);
    }
    assert_int_equal(doubts.n, 0);
    assert_true(ki_doubts_has(&doubts, 1));
    assert_false(ki_doubts_has(&doubts, 2));
    ki_doubts_clear(&doubts);
    assert_false(ki_doubts_any(&doubts));
}

static void test_end_of_a_rank(void **state)
{
    struct ki_doubts doubts = {0};

    (void)state;
    for (uint64_t owner = 0; owner < 5; owner++)
        for (uint32_t rank = 0; rank < 3; rank++)
            ki_doubts_add(&doubts, rank, owner, owner == 3 ? 3 : 1);
    ki_doubts_end_rank(&doubts, 1, 1);
    assert_int_equal(doubts.n, 11);
    for (uint64_t owner = 0; owner < 5; owner++)
        for (uint32_t rank = 0; rank < 3; rank++)
            assert_int_equal(ki_doubts_of(&doubts, rank, owner, 3),
                             rank == 1 ? (owner == 3 ? 2 : 0) : (owner == 3 ? 3 : 1));
    ki_doubts_clear(&doubts);
    ki_doubts_end_rank(&doubts, 1, 1);
    assert_false(ki_doubts_any(&doubts));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_doubts),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_end_of_a_rank),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
