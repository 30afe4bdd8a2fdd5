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

/* A sweep in pieces, between which blocks come and go: what was neither seen nor entered is gone. */
static void test_sweep(void **state)
{
    struct kvbm_chains chains = {.max = MODEL};
    struct kvbm_chain_of taken;
    uint64_t seed = unit_seed();
    bool lives[MODEL] = {false};
    size_t at = 0;

    (void)state;
    kvbm_chains_sweep(&chains, &at, 10);
    assert_int_equal(at, 0);
    for (size_t round = 0; round < unit_rounds(50); round++) {
        size_t n = 0;

        for (uint64_t i = 1; i < MODEL; i++) {
            assert_non_null(kvbm_chains_enter(&chains, id_of(i)));
            lives[i] = false;
        }
        kvbm_chains_begin_sweep(&chains);
        kvbm_chains_see(&chains, id_of(MODEL)); /* not there */
        for (size_t k = 0; k < MODEL / 3; k++) {
            uint64_t i = 1 + unit_below(&seed, MODEL - 1), j = 1 + unit_below(&seed, MODEL - 1);

            kvbm_chains_see(&chains, id_of(i));
            lives[i] = true;
            (void)kvbm_chains_take(&chains, id_of(j), &taken);
            assert_non_null(kvbm_chains_enter(&chains, id_of(j)));
            lives[j] = true;
        }
        do
            kvbm_chains_sweep(&chains, &at, 1 + unit_below(&seed, 100));
        while (at);
        for (uint64_t i = 1; i < MODEL; i++) {
            n += lives[i];
            assert_int_equal(kvbm_chains_find(&chains, id_of(i)) != NULL, lives[i]);
        }
        assert_int_equal(chains.n, n);
    }
    kvbm_chains_fini(&chains);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_sweep),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
