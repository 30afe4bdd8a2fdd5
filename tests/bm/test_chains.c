// SPDX-License-Identifier: Apache-2.0
/* The table of chains beside a list: random sets, removals and lookups, with ids that collide. */
#include "base/unit.h"
#include "bm/events/chains.h"

#define MODEL 3000

static struct kvbm_chain_of model[MODEL];

/* A third of the ids share their home, at every size of the table here. */
static uint64_t id_of(uint64_t i)
{
    return i % 3 ? i : i << 12;
}

static void agree(const struct kvbm_chains *chains, uint64_t i)
{
    const struct kvbm_chain_of *found = kvbm_chains_find(chains, id_of(i));

    assert_int_equal(!found, !model[i].id);
    if (found) {
        assert_true(found->id == id_of(i) && found->prefix == model[i].prefix);
        assert_true(found->tokens_hash == model[i].tokens_hash);
    }
}

static void test_model(void **state)
{
    struct kvbm_chains chains = {.max = 2000};
    struct kvbm_chain_of taken;
    uint64_t seed = unit_seed();
    size_t n = 0;

    (void)state;
    assert_null(kvbm_chains_find(&chains, 5));
    assert_false(kvbm_chains_take(&chains, 5, &taken));
    for (size_t step = 0; step < unit_rounds(300000); step++) {
        uint64_t i = 1 + unit_below(&seed, MODEL - 1);
        if (unit_below(&seed, 2)) {
            struct kvbm_chain_of *slot = kvbm_chains_enter(&chains, id_of(i));
            bool there = model[i].id;

            assert_int_equal(slot != NULL, there || n < 2000);
            if (slot) {
                assert_true(slot->prefix == (there ? model[i].prefix : 0));
                slot->prefix = step;
                slot->tokens_hash = ~step;
                model[i] = *slot;
            }
            n += slot && !there;
        } else {
            assert_int_equal(kvbm_chains_take(&chains, id_of(i), &taken), model[i].id != 0);
            if (model[i].id)
                assert_true(taken.id == id_of(i) && taken.prefix == model[i].prefix);
            n -= model[i].id != 0;
            model[i].id = 0;
        }
        assert_int_equal(chains.n, n);
        agree(&chains, 1 + unit_below(&seed, MODEL - 1));
    }
    for (uint64_t i = 1; i < MODEL; i++)
        agree(&chains, i);
    kvbm_chains_fini(&chains);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_model)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
