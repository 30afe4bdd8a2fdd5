// SPDX-License-Identifier: Apache-2.0
/* Find prompts by the hashes of engines, which may name the same blocks in different ways. */
#include "base/unit.h"
#include "fixture.h"
#include "random.h"

/* Find by engines' hashes: of the whole prompt, of its end, of a holder that names blocks otherwise. */
static void find_by_engines_hashes(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(700, 700, 0);
    uint64_t hashes[700], others[700], strange[] = {5, 6, 7};
    struct kv_block blocks[300];

    for (size_t i = 0; i < 700; i++) {
        hashes[i] = path_hash(locals, i + 1);
        others[i] = ~hashes[i];
    }
    assert_int_equal(kvi_find_named(f->ix, hashes, 700, &f->matches), 0);
    assert_int_equal(f->matches.n, 0);
    store(f, W0, locals, 650);
    for (size_t i = 0; i < 300; i++)
        blocks[i] = (struct kv_block){others[i], locals[i]};
    assert_int_equal(kvi_store(f->ix, W1, KV_TIER_HOST, NULL, blocks, 300, NULL), 0);
    for (size_t from = 0; from < 650; from += 50) {
        for (size_t n = 1; from + n <= 700; n += 33) {
            uint32_t known = (uint32_t)KV_MIN(from + n, (size_t)650);

            assert_int_equal(kvi_find_named(f->ix, hashes + from, n, &f->matches), 0);
            assert_int_equal(f->matches.n, 2);
            for (size_t k = 0; k < 2; k++) {
                const struct kvi_match *m = &f->matches.items[k];
                bool first = m->holder.worker == W0.worker;

                assert_int_equal(m->reach[KV_TIER_EXTERNAL], first ? known : KV_MIN(known, 300u));
                assert_int_equal(m->reach[KV_TIER_DEVICE], first ? known : 0);
            }
        }
    }
    for (size_t n = 1; n <= 700; n += 33) { /* the other holder's names: as far as it has them */
        assert_int_equal(kvi_find_named(f->ix, others, n, &f->matches), 0);
        assert_int_equal(f->matches.n, 2);
        assert_int_equal(f->matches.items[0].reach[KV_TIER_EXTERNAL], KV_MIN(n, (size_t)300));
    }
    assert_int_equal(kvi_find_named(f->ix, strange, 3, &f->matches), 0);
    assert_int_equal(f->matches.n, 0);
    assert_int_equal(kvi_find_named(f->ix, NULL, 0, &f->matches), 0);
    assert_int_equal(f->matches.n, 0);
    assert_int_equal(kvi_clear(f->ix, W0), 0);
    assert_int_equal(kvi_find_named(f->ix, others, 700, &f->matches), 0);
    assert_int_equal(f->matches.n, 1);
    assert_int_equal(f->matches.items[0].reach[KV_TIER_HOST], 300);
}

static uint32_t reach_of(const struct fixture *f, uint64_t worker)
{
    for (size_t i = 0; i < f->matches.n; i++)
        if (f->matches.items[i].holder.worker == worker)
            return f->matches.items[i].reach[KV_TIER_DEVICE];
    return 0;
}

/* One holder's names are the table's. Of many with other names, the last has most of the prompt. */
static void find_by_names_of_many(void **state)
{
    struct fixture *f = *state;
    struct kv_block blocks[10];
    uint64_t names[10];

    for (uint64_t seed = 0; seed <= 40; seed++) {
        for (uint64_t i = 0; i < 10; i++) {
            blocks[i] = (struct kv_block){(seed > 0) * 1000 + i, 1 + i};
            names[i] = blocks[i].hash;
        }
        assert_int_equal(kvi_store(f->ix, (struct kv_holder){seed, 0}, KV_TIER_DEVICE, NULL, blocks,
                                   seed % 40 == 0 ? 10 : 2, NULL),
                         0);
    }
    for (size_t n = 1; n <= 10; n++) {
        assert_int_equal(kvi_find_named(f->ix, names, n, &f->matches), 0);
        assert_int_equal(reach_of(f, 40), n);
        assert_int_equal(kvi_find_named(f->ix, names + n - 1, 1, &f->matches), 0);
        assert_int_equal(reach_of(f, 40), n);
    }
}

/* Two holders agree on the first name only. Of the second block, the table has the one's. */
static void find_by_names_that_part(void **state)
{
    struct fixture *f = *state;
    const struct kv_block one[] = {{1, 1}, {12, 2}};
    const struct kv_block other[] = {{1, 1}, {22, 2}, {23, 3}, {24, 4}};
    const struct kv_block third[] = {{1, 1}, {12, 2}, {33, 3}, {34, 4}};
    const uint64_t names[] = {1, 22, 23, 24, 25}, thirds[] = {1, 12, 33, 34};

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, one, 2, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W1, KV_TIER_DEVICE, NULL, other, 4, NULL), 0);
    assert_int_equal(
        kvi_store(f->ix, (struct kv_holder){9, 0}, KV_TIER_DEVICE, NULL, third, 4, NULL), 0);
    for (size_t n = 1; n <= 5; n++) {
        for (size_t from = 0; from < KV_MIN(n, (size_t)4); from++) {
            assert_int_equal(kvi_find_named(f->ix, names + from, n - from, &f->matches), 0);
            assert_int_equal(reach_of(f, W1.worker), KV_MIN(n, (size_t)4));
        }
    }
    for (size_t n = 1; n <= 4; n++) {
        assert_int_equal(kvi_find_named(f->ix, thirds, n, &f->matches), 0);
        assert_int_equal(reach_of(f, 9), n);
    }
}

#define SEEDS 5
#define DEPTH 12

/* The name that a seed gives block @i: seeds agree on some blocks at the prompt's start. */
static uint64_t name_of(uint64_t seed, const size_t agree[SEEDS], size_t i)
{
    return (i < agree[seed] ? 1 : 2 + seed) * 100 + i;
}

/* Prompts of one branch, held by many to different depths, against all that the holders call blocks. */
static void find_by_random_names(void **state)
{
    struct fixture *f = *state;
    struct rng rng = {test_seed()};

    for (long round = 0; round < test_rounds(300); round++) {
        size_t agree[SEEDS], n_holders = 1 + (size_t)rng_below(&rng, 30);
        size_t deepest[SEEDS] = {0}, all = 0;
        struct kv_block blocks[DEPTH];

        for (size_t seed = 0; seed < SEEDS; seed++)
            agree[seed] = (size_t)rng_below(&rng, 4);
        for (uint64_t h = 0; h < n_holders; h++) {
            uint64_t seed = rng_below(&rng, SEEDS);
            size_t n = 1 + (size_t)rng_below(&rng, DEPTH);

            for (size_t i = 0; i < n; i++)
                blocks[i] = (struct kv_block){name_of(seed, agree, i), 1 + i};
            assert_int_equal(
                kvi_store(f->ix, (struct kv_holder){h, 0}, KV_TIER_DEVICE, NULL, blocks, n, NULL),
                0);
            for (size_t s = 0; s < SEEDS; s++)
                for (size_t i = 0; i < n; i++)
                    if (blocks[i].hash == name_of(s, agree, i))
                        deepest[s] = KV_MAX(deepest[s], i + 1);
            all = KV_MAX(all, n);
        }
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            size_t n = 1 + (size_t)rng_below(&rng, DEPTH), got = 0;
            uint64_t names[DEPTH];

            for (size_t i = 0; i < n; i++)
                names[i] = name_of(seed, agree, i);
            assert_int_equal(kvi_find_named(f->ix, names, n, &f->matches), 0);
            for (size_t i = 0; i < f->matches.n; i++)
                got = KV_MAX(got, (size_t)f->matches.items[i].reach[KV_TIER_DEVICE]);
            assert_int_equal(got, KV_MIN(n, deepest[seed]));
        }
        for (uint64_t h = 0; h < n_holders; h++)
            assert_int_equal(kvi_remove_holder(f->ix, (struct kv_holder){h, 0}), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(find_by_engines_hashes),
        T(find_by_names_of_many),
        T(find_by_names_that_part),
        T(find_by_random_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
