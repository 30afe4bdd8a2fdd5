// SPDX-License-Identifier: Apache-2.0
/*
 * Matches that end inside of a group's blocks: states of larger blocks beside full attention of two
 * sizes, as vLLM looks them up, beside the definition tried for every length.
 */
#include "base/core/error.h"
#include "base/unit.h"
#include "kv_index.h"
#include "random.h"

#define DEPTH 24u

static const struct kv_holder who = {3, 1};

enum { STATE, SMALL_STATE, FULL, RUN, N_GROUPS };

struct world {
    struct kvi_index *ix;
    struct rng rng;
    uint32_t stride[N_GROUPS]; /* 0: the holder has no such group */
    uint32_t need;             /* of the run */
    uint32_t main;             /* blocks of the main cache, from the first on */
    bool has[N_GROUPS][DEPTH];
};

static uint64_t name_of(uint32_t i)
{
    return rng_scatter(i + UINT64_C(5));
}

static struct kvi_window description(const struct world *w, uint32_t group)
{
    static const enum kv_needs needs[] = {KV_NEEDS_STATE, KV_NEEDS_STATE, KV_NEEDS_ALL,
                                          KV_NEEDS_RUN};

    return (struct kvi_window){.group = group,
                               .window = group == RUN ? 40 : 0,
                               .need = group == RUN ? w->need : 1,
                               .stride = w->stride[group],
                               .needs = needs[group]};
}

/* Give the holder the group's window, at times as one of the registered size first. */
static void declare(struct world *w, uint32_t group)
{
    struct kvi_window window = description(w, group);
    int number;

    if (rng_below(&w->rng, 2)) {
        window.stride = 1;
        assert_true(kvi_set_window(w->ix, who, &window) >= 0);
    }
    window = description(w, group);
    number = kvi_set_window(w->ix, who, &window);
    assert_true(number >= 0);
    for (uint32_t i = 0; i < DEPTH; i++) {
        uint64_t name = name_of(i);

        w->has[group][i] = rng_below(&w->rng, 5) < (group == FULL ? 4 : 3);
        if (w->has[group][i])
            assert_int_equal(kvi_add_known(w->ix,
                                           kvi_window_of(who, KV_TIER_DEVICE, 0, (uint32_t)number),
                                           &name, 1),
                             1);
    }
}

static void begin(struct world *w)
{
    struct kv_block blocks[DEPTH];

    memset(w->stride, 0, sizeof(w->stride));
    memset(w->has, 0, sizeof(w->has));
    w->stride[STATE] = 2 + rng_below(&w->rng, 3);
    w->stride[SMALL_STATE] = rng_below(&w->rng, 2);
    w->stride[FULL] = rng_below(&w->rng, 4);
    w->stride[RUN] = rng_below(&w->rng, 2);
    w->need = 1 + rng_below(&w->rng, 2);
    w->main = rng_below(&w->rng, DEPTH + 1);
    assert_int_equal(kvi_create(NULL, &w->ix), 0);
    for (uint32_t i = 0; i < DEPTH; i++)
        blocks[i] = (struct kv_block){name_of(i), 1 + i};
    for (uint32_t group = 0; group < N_GROUPS; group++)
        if (w->stride[group])
            declare(w, group);
    if (w->main)
        assert_int_equal(kvi_store(w->ix, who, KV_TIER_DEVICE, NULL, blocks, w->main, NULL), 0);
}

/* The longest match of the other full attention: whole blocks, then one that ends inside of the next. */
static uint32_t full_match(const struct world *w, uint32_t max)
{
    uint32_t stride = w->stride[FULL], n = 0, inside = 0;

    if (!stride)
        return max;
    while (n + stride <= max && w->has[FULL][n + stride - 1])
        n += stride;
    for (uint32_t i = n + 1; i < n + stride && i <= max; i++)
        inside = w->has[FULL][i - 1] ? i : inside;
    return inside ? inside : n;
}

static bool serves(const struct world *w, uint32_t n)
{
    for (uint32_t group = STATE; n && group <= SMALL_STATE; group++)
        if (w->stride[group] && !w->has[group][n - 1])
            return false;
    for (uint32_t i = 0; w->stride[RUN] && i < KV_MIN(n, w->need); i++)
        if (!w->has[RUN][n - 1 - i])
            return false;
    return true;
}

static void test_matches_end_inside(void **state)
{
    struct world w = {.rng.state = test_seed()};
    uint32_t n_hits = 0, n_inside = 0;

    (void)state;
    for (long i = 0, rounds = test_rounds(4000); i < rounds; i++) {
        struct kvi_matches matches = {0};
        uint64_t prompt[DEPTH];
        uint32_t n, truth;

        begin(&w);
        n = rng_below(&w.rng, DEPTH + 1);
        for (uint32_t k = 0; k < n; k++)
            prompt[k] = 1 + k;
        truth = full_match(&w, KV_MIN(n, w.main));
        while (truth && !serves(&w, truth))
            truth--;
        assert_int_equal(kvi_find(w.ix, prompt, n, &matches), 0);
        assert_int_equal(matches.n ? matches.items[0].reach[KV_TIER_DEVICE] : 0, truth);
        n_hits += truth > 0;
        n_inside += truth % w.stride[STATE] > 0;
        kvi_matches_fini(&matches);
        kvi_destroy(w.ix);
    }
    assert_true(n_inside > 0 && n_hits > n_inside);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_matches_end_inside)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
