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
    uint64_t seed = unit_seed();
    size_t n = 0;

    (void)state;
    assert_null(kvbm_chains_find(&chains, 5));
    kvbm_chains_remove(&chains, 5);
    for (size_t step = 0; step < unit_rounds(300000); step++) {
        uint64_t i = 1 + unit_below(&seed, MODEL - 1);
        struct kvbm_chain_of block = {.id = id_of(i), .prefix = step, .tokens_hash = ~step};

        if (unit_below(&seed, 2)) {
            bool there = model[i].id, ok = kvbm_chains_set(&chains, &block);

            assert_int_equal(ok, there || n < 2000);
            if (ok)
                model[i] = block;
            n += ok && !there;
        } else {
            kvbm_chains_remove(&chains, id_of(i));
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
