// SPDX-License-Identifier: Apache-2.0
/* Blocks without places, beside a plain list of them. */
#include "base/unit.h"
#include "indexer/unplaced.h"

#define MODEL 4000 /* hashes that are used */

/* Some hashes have one home, so that slots are pushed away. */
static uint64_t hash_of(uint64_t i)
{
    return i % 3 ? i : i << 52;
}

static void test_against_a_list(void **state)
{
    static struct ki_unplaced table;
    static uint32_t model[MODEL];
    uint64_t seed = unit_seed();
    size_t n = 0;

    (void)state;
    for (size_t round = 0; round < unit_rounds(400000); round++) {
        uint64_t i = unit_below(&seed, MODEL);
        uint32_t tier = (uint32_t)unit_below(&seed, 4);
        uint32_t tiers = (uint32_t)unit_below(&seed, 16);

        if (unit_below(&seed, 3)) {
            bool room = model[i] || n < KI_UNPLACED_MAX;

            assert_int_equal(ki_unplaced_add(&table, hash_of(i), tier), room);
            n += room && !model[i];
            model[i] |= room ? 1u << tier : 0;
        } else {
            assert_int_equal(ki_unplaced_take(&table, hash_of(i), tiers), model[i] & tiers);
            n -= model[i] && !(model[i] & ~tiers);
            model[i] &= ~tiers;
        }
        assert_int_equal(table.n, n);
    }
    for (uint64_t i = 0; i < MODEL; i++)
        assert_int_equal(ki_unplaced_take(&table, hash_of(i), 15), model[i]);
    assert_int_equal(table.n, 0);
    assert_true(ki_unplaced_add(&table, 1, 0));
    ki_unplaced_clear(&table);
    assert_int_equal(ki_unplaced_take(&table, 1, 15), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_a_list)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
