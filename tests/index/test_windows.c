// SPDX-License-Identifier: Apache-2.0
/*
 * Windows beside a plain model of them: counts of copies by name, and the definition of a match
 * tried for every length.
 */
#include <errno.h>

#include "base/unit.h"
#include "index/tree/windows.h"
#include "random.h"

#define DEPTH 24u
#define SEGMENT 5u /* blocks between places where paths part */
#define N_WINDOWS 6u
#define N_IDS (64u * DEPTH)

static const struct kv_holder who = {3, 1}, other = {4, 0};
static const struct kvi_window descriptions[N_WINDOWS] = {
    {.group = 7, .window = 9, .need = 2, .stride = 1},
    {.group = 2, .window = 17, .need = 4, .stride = 1},
    {.group = 5, .window = 9, .need = 2, .stride = 1},
    {.group = 9, .need = 1, .stride = 1, .needs = KV_NEEDS_STATE},
    {.group = 1, .need = 1, .stride = 1, .needs = KV_NEEDS_ALL},
    {.group = 3, .window = 17, .need = 4, .stride = 1, .needs = KV_NEEDS_CHUNK},
};

struct world {
    struct rng rng;
    struct kvi_index *ix;
    struct kvi_matches matches;
    struct kvi_group_matches groups;
    uint32_t n_windows; /* declared */
    bool limited; /* stores may be refused, and blocks forgotten: the model has at least as many */
    long n_refused;
    uint32_t main[N_IDS], window[N_WINDOWS][N_IDS];
};

/* The block at @depth of the path that turns as the bits of @turns say. */
static uint32_t id_at(uint32_t turns, uint32_t depth)
{
    uint32_t segment = depth / SEGMENT;

    return (turns & ((2u << segment) - 1) & 63) * DEPTH + depth;
}

static uint64_t name_of(uint32_t id)
{
    return rng_scatter(id + UINT64_C(77));
}

static uint64_t local_at(uint32_t turns, uint32_t depth)
{
    return 1 + (turns >> (depth / SEGMENT) & 1);
}

static uint64_t refused(const struct world *w)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    struct kvi_stats stats = KVI_STATS_INIT;

    assert_int_equal(kvi_get_stats(w->ix, &stats), 0);
    (void)kvi_get_holder(w->ix, who, &info);
    assert_true(info.refused <= stats.refused);
    return info.refused;
}

/* Store new blocks. A refusal isn't counted: the caller tries again. */
static int add_chain(struct world *w, const uint64_t *parent, const struct kv_block *blocks,
                     size_t n)
{
    const struct kvi_new_chain chain = {.holder = who,
                                        .has_parent = parent,
                                        .parent = parent ? *parent : 0,
                                        .blocks = blocks,
                                        .n = n};
    uint64_t before = refused(w);
    int rc;
    size_t n_stored = kvi_add_chains(w->ix, &chain, 1, NULL, &rc);

    assert_int_equal(n_stored, rc == 0);
    assert_true(refused(w) >= before); /* more: parked blocks below that are refused */
    return rc;
}

static void store(struct world *w)
{
    uint32_t turns = rng_below(&w->rng, 32), from = rng_below(&w->rng, DEPTH);
    uint32_t n = 1 + rng_below(&w->rng, DEPTH - from);
    uint64_t parent = from ? name_of(id_at(turns, from - 1)) : 0;
    struct kv_block blocks[DEPTH];
    int rc;

    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = (struct kv_block){name_of(id_at(turns, from + i)), local_at(turns, from + i)};
    }
    rc = w->limited && rng_below(&w->rng, 2) ? add_chain(w, from ? &parent : NULL, blocks, n) : -1;
    if (rc)
        rc = kvi_add(w->ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), from ? &parent : NULL, blocks, n,
                     NULL);
    if (w->limited && rc == -ENOSPC) {
        w->n_refused++;
        return;
    }
    assert_int_equal(rc, 0);
    for (uint32_t i = 0; i < n; i++)
        w->main[id_at(turns, from + i)]++;
    if (from == 0 && !w->limited &&
        rng_below(&w->rng, 4) == 0) /* somebody else's part of it makes chains split */
        assert_int_equal(kvi_store(w->ix, other, KV_TIER_DEVICE, NULL, blocks, n, NULL), 0);
}

static void take(struct world *w)
{
    uint32_t id = id_at(rng_below(&w->rng, 32), rng_below(&w->rng, DEPTH));
    uint64_t name = name_of(id);

    long taken = kvi_remove(w->ix, who, KV_TIER_DEVICE, &name, 1);

    assert_true(taken == (w->main[id] > 0) || (w->limited && !taken));
    w->main[id] -= w->main[id] > 0;
}

static void window_add(struct world *w)
{
    uint32_t turns = rng_below(&w->rng, 32), from = rng_below(&w->rng, DEPTH);
    uint32_t n = 1 + rng_below(&w->rng, DEPTH - from), number = rng_below(&w->rng, w->n_windows);
    uint64_t names[DEPTH];

    for (uint32_t i = 0; i < n; i++) {
        names[i] = name_of(id_at(turns, from + i));
        w->window[number][id_at(turns, from + i)]++;
    }
    assert_int_equal(kvi_add_known(w->ix, kvi_window_of(who, KV_TIER_DEVICE, 0, number), names, n),
                     n);
}

static void window_take(struct world *w)
{
    uint32_t id = id_at(rng_below(&w->rng, 32), rng_below(&w->rng, DEPTH));
    uint32_t number = rng_below(&w->rng, w->n_windows);
    uint64_t name = name_of(id);

    long taken = kvi_take(w->ix, kvi_window_of(who, KV_TIER_DEVICE, 0, number), &name, NULL, 1);

    assert_true(taken == (w->window[number][id] > 0) || (w->limited && !taken));
    w->window[number][id] -= w->window[number][id] > 0;
}

static void declare(struct world *w)
{
    if (w->n_windows == N_WINDOWS)
        return;
    assert_int_equal(kvi_set_window(w->ix, who, &descriptions[w->n_windows]), w->n_windows);
    w->n_windows++;
}

static void clear(struct world *w)
{
    memset(w->main, 0, sizeof(w->main));
    memset(w->window, 0, sizeof(w->window));
    if (rng_below(&w->rng, 2))
        assert_int_equal(kvi_clear(w->ix, who), 0);
    else
        assert_int_equal(kvi_clear_tiers(w->ix, who, 1, 0), 0);
}

/* How many blocks before its end a match of @n blocks needs of the window. */
static uint32_t needed(const struct kvi_window *window, uint32_t n)
{
    switch (window->needs) {
    case KV_NEEDS_RUN:
    case KV_NEEDS_STATE:
        return KV_MIN(n, window->need);
    case KV_NEEDS_CHUNK:
        return n % window->need;
    default:
        return n;
    }
}

#define ALL_WINDOWS UINT32_MAX

/* Whether a match of @n blocks can be served, if the windows of set @among (bit 1 << k) were all. */
static bool serves(const struct world *w, uint32_t turns, uint32_t n, uint32_t among)
{
    for (uint32_t i = 0; i < n; i++)
        if (!w->main[id_at(turns, i)])
            return false;
    for (uint32_t k = 0; k < w->n_windows; k++)
        for (uint32_t i = 0; among >> k & 1 && i < needed(&descriptions[k], n); i++)
            if (!w->window[k][id_at(turns, n - 1 - i)])
                return false;
    return true;
}

static uint32_t longest(const struct world *w, uint32_t turns, uint32_t n, uint32_t among)
{
    while (n && !serves(w, turns, n, among))
        n--;
    return n;
}

static void check_reach(const struct world *w, uint32_t got, uint32_t truth)
{
    if (w->limited)
        assert_true(got <= truth);
    else
        assert_int_equal(got, truth);
}

/* Compare what each group allows by itself. The test's groups have a window each. */
static void check_groups(struct world *w, uint32_t turns, uint32_t n)
{
    bool first_block = n && w->main[id_at(turns, 0)];
    size_t seen = 0;

    for (size_t i = 0; i < w->groups.n; i++) {
        const struct kvi_group_match *m = &w->groups.items[i];
        uint32_t k = 0;

        if (m->holder.worker != who.worker)
            continue;
        seen++;
        while (m->group != KVI_OWN_BLOCKS && descriptions[k].group != m->group)
            k++;
        check_reach(w, m->reach[KV_TIER_DEVICE],
                    longest(w, turns, n, m->group == KVI_OWN_BLOCKS ? 0 : 1u << k));
        assert_int_equal(m->needs,
                         m->group == KVI_OWN_BLOCKS ? KV_NEEDS_ALL : descriptions[k].needs);
    }
    if (!w->limited)
        assert_int_equal(seen, first_block && w->n_windows ? 1 + w->n_windows : 0);
}

static void compare(struct world *w)
{
    uint32_t turns = rng_below(&w->rng, 32), n = rng_below(&w->rng, DEPTH + 1), got = 0;
    uint64_t prompt[DEPTH];

    for (uint32_t i = 0; i < n; i++)
        prompt[i] = local_at(turns, i);
    if (rng_below(&w->rng, 2)) {
        assert_int_equal(kvi_find(w->ix, prompt, n, &w->matches), 0);
    } else {
        w->groups.n = 0;
        assert_int_equal(kvi_find_groups(w->ix, prompt, n, &w->matches, &w->groups), 0);
        check_groups(w, turns, n);
    }
    for (size_t i = 0; i < w->matches.n; i++)
        if (w->matches.items[i].holder.worker == who.worker)
            got = w->matches.items[i].reach[KV_TIER_DEVICE];
    check_reach(w, got, longest(w, turns, n, ALL_WINDOWS));
}

static int copy_run(void *arg, const struct kvi_dump_run *run)
{
    return kvi_store(arg, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static int copy_extra(void *arg, const struct kvi_extra *extra)
{
    return kvi_restore_extra(arg, extra);
}

static void reload(struct world *w)
{
    struct kvi_index *copy;

    assert_int_equal(kvi_create(NULL, &copy), 0);
    assert_int_equal(kvi_dump(w->ix, copy_run, copy), 0);
    assert_int_equal(kvi_dump_extras(w->ix, copy_extra, copy), 0);
    kvi_destroy(w->ix);
    w->ix = copy;
}

static void test_random_histories(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    (void)state;
    assert_non_null(w);
    w->rng.state = test_seed();
    assert_int_equal(kvi_create(NULL, &w->ix), 0);
    for (long i = 0, n = test_rounds(20000); i < n; i++) {
        uint32_t dice = rng_below(&w->rng, 1000);

        if (dice < 200)
            store(w);
        else if (dice < 500 || !w->n_windows)
            take(w);
        else if (dice < 750)
            window_add(w);
        else if (dice < 998)
            window_take(w);
        else
            clear(w);
        if (i % 500 == 100)
            declare(w);
        if (i % 1000 == 999)
            reload(w);
        if (i % 100 == 0)
            assert_null(kvi_check(w->ix));
        compare(w);
    }
    assert_int_equal(kvi_remove_worker(w->ix, who.worker), 0);
    assert_null(kvi_check(w->ix));
    kvi_matches_fini(&w->matches);
    kvi_group_matches_fini(&w->groups);
    kvi_destroy(w->ix);
    free(w);
}

static uint64_t places_of(struct kvi_index *ix)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    kvi_get_stats(ix, &stats);
    return stats.blocks;
}

/* All that is there goes, and as much as the limit allows can be stored anew. */
static void refill(struct world *w, uint32_t limit)
{
    uint64_t prompt[DEPTH];
    struct kv_block blocks[DEPTH];
    uint64_t names[DEPTH];
    struct kvi_stored stored;
    int tries = 0;

    for (uint32_t id = 0; id < N_IDS; id++) {
        uint64_t name = name_of(id);

        while (w->main[id] && kvi_remove(w->ix, who, KV_TIER_DEVICE, &name, 1))
            w->main[id]--;
        for (uint32_t k = 0; k < w->n_windows; k++)
            while (w->window[k][id] &&
                   kvi_take(w->ix, kvi_window_of(who, KV_TIER_DEVICE, 0, k), &name, NULL, 1))
                w->window[k][id]--;
    }
    assert_null(kvi_check(w->ix));
    assert_true(places_of(w->ix) <= 4 * limit);
    memset(w->main, 0, sizeof(w->main));
    memset(w->window, 0, sizeof(w->window));
    for (uint32_t i = 0; i < DEPTH; i++) {
        names[i] = name_of(id_at(0, i));
        blocks[i] = (struct kv_block){names[i], local_at(0, i)};
        prompt[i] = local_at(0, i);
    }
    do /* windows that lag learn the blocks with one of the next stores */
        assert_int_equal(kvi_store(w->ix, who, KV_TIER_DEVICE, NULL, blocks, DEPTH, &stored), 0);
    while (stored.lagging && ++tries < 100);
    assert_true(limit >= DEPTH && !stored.lagging);
    for (uint32_t k = 0; k < w->n_windows; k++)
        assert_int_equal(
            kvi_store_known(w->ix, kvi_window_of(who, KV_TIER_DEVICE, 0, k), names, DEPTH), DEPTH);
    assert_int_equal(kvi_find(w->ix, prompt, DEPTH, &w->matches), 0);
    assert_int_equal(w->matches.n ? w->matches.items[0].reach[0] : 0, DEPTH);
    clear(w);
}

static void play_limited(const struct kvi_opts *opts, uint32_t limit)
{
    struct world *w = calloc(1, sizeof(*w));

    assert_non_null(w);
    w->rng.state = test_seed();
    w->limited = true;
    assert_int_equal(kvi_create(opts, &w->ix), 0);
    for (long i = 0, n = test_rounds(8000); i < n; i++) {
        uint32_t dice = rng_below(&w->rng, 1000);

        if (dice < 350)
            store(w);
        else if (dice < 500 || !w->n_windows)
            take(w);
        else if (dice < 750)
            window_add(w);
        else if (dice < 997)
            window_take(w);
        else
            clear(w);
        if (i % 200 == 100)
            declare(w);
        if (i % 50 == 0 && kvi_check(w->ix))
            fail_msg("operation %ld: %s", i, kvi_check(w->ix));
        assert_true(kvi_holder_blocks(w->ix, who) <= limit);
        assert_true(places_of(w->ix) <= 5 * limit);
        compare(w);
        if (i % 1000 == 999)
            refill(w, limit);
    }
    assert_true(w->n_refused > 10);
    kvi_matches_fini(&w->matches);
    kvi_group_matches_fini(&w->groups);
    kvi_destroy(w->ix);
    free(w);
}

/* At limits of the holder, of the index and of parked blocks: answers are never too long, and nothing
 * adds up. */
static void test_limits(void **state)
{
    struct kvi_opts holder = KVI_OPTS_INIT, all = KVI_OPTS_INIT, parked = KVI_OPTS_INIT;

    (void)state;
    holder.max_holder_blocks = 60;
    play_limited(&holder, 60);
    all.max_blocks = 50;
    play_limited(&all, 50);
    parked.max_holder_blocks = 40;
    parked.max_parked_holder = 16;
    play_limited(&parked, 40);
}

/* Without a main group a window's events tell the places; they go with the last block below. */
static void test_alone(void **state)
{
    const struct kvi_window window = {.group = 0, .window = 9, .need = 2, .stride = 1};
    struct kvi_matches matches = {0};
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    struct kv_block blocks[DEPTH];
    uint64_t prompt[DEPTH], names[DEPTH];
    struct kvi_index *ix;

    (void)state;
    for (uint32_t i = 0; i < DEPTH; i++) {
        prompt[i] = local_at(0, i);
        names[i] = name_of(i);
        blocks[i] = (struct kv_block){names[i], prompt[i]};
    }
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    assert_int_equal(kvi_set_alone(ix, who, true), 0);
    assert_int_equal(
        kvi_add(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), NULL, blocks, DEPTH, NULL), 0);
    assert_int_equal(kvi_find(ix, prompt, DEPTH, &matches), 0);
    assert_int_equal(matches.n, 1);
    assert_int_equal(matches.items[0].reach[0], DEPTH);
    assert_int_equal(matches.items[0].blocks, DEPTH);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names, NULL, 10), 10);
    assert_int_equal(kvi_find(ix, prompt, DEPTH, &matches), 0);
    assert_int_equal(matches.items[0].reach[0], DEPTH);
    assert_int_equal(kvi_find(ix, prompt, 11, &matches), 0); /* one block of two */
    assert_int_equal(matches.n, 0);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names + 20, NULL, 4),
                     4);
    assert_null(kvi_check(ix));
    assert_int_equal(kvi_get_holder(ix, who, &info), 0);
    assert_int_equal(info.blocks, 20);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names + 10, NULL, 10),
                     10);
    assert_int_equal(kvi_get_holder(ix, who, &info), 0);
    assert_int_equal(info.blocks, 0);
    assert_null(kvi_check(ix));
    kvi_matches_fini(&matches);
    kvi_destroy(ix);
}

/* -- what goes with the main group ------------------------------------------------------------- */

static const struct kvi_window two_blocks = {.group = 1, .window = 32, .need = 2, .stride = 1};

static void make_blocks(struct kv_block *ret, uint64_t *names, uint64_t *prompt, uint64_t from,
                        size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ret[i] = (struct kv_block){rng_scatter(from + i), rng_scatter(from + i + 500000)};
        names[i] = ret[i].hash;
        prompt[i] = ret[i].tokens_hash;
    }
}

static uint32_t reach_of(struct kvi_index *ix, const uint64_t *prompt, size_t n, uint32_t tier)
{
    struct kvi_matches matches = {0};
    uint32_t reach = 0;

    assert_int_equal(kvi_find(ix, prompt, n, &matches), 0);
    for (size_t i = 0; i < matches.n; i++)
        if (matches.items[i].holder.worker == who.worker)
            reach = matches.items[i].reach[tier];
    kvi_matches_fini(&matches);
    return reach;
}

/* A group of half blocks has two windows. A match needs the last three halves, and ends with a block. */
static void test_half_blocks(void **state)
{
    struct kvi_window halves[2] = {
        {.group = 1, .window = 7, .need = 3, .stride = 1, .part = 0, .parts = 2},
        {.group = 1, .window = 7, .need = 3, .stride = 1, .part = 1, .parts = 2}};
    struct kv_block blocks[5];
    uint64_t names[5], prompt[5];
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    make_blocks(blocks, names, prompt, 0, 5);
    assert_int_equal(kvi_set_window(ix, who, &halves[0]), 0);
    assert_int_equal(kvi_set_window(ix, who, &halves[1]), 1);
    halves[1].part = 2;
    assert_int_equal(kvi_set_window(ix, who, &halves[1]), -EINVAL);
    assert_int_equal(kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), NULL, blocks, 5, NULL), 0);
    assert_int_equal(reach_of(ix, prompt, 5, 0), 0);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names + 2, 2), 2);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 1), names + 1, 3), 3);
    assert_int_equal(reach_of(ix, prompt, 5, 0), 4);
    assert_int_equal(reach_of(ix, prompt, 3, 0), 3);
    assert_int_equal(reach_of(ix, prompt, 2, 0), 0);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names + 3, NULL, 1), 1);
    assert_int_equal(reach_of(ix, prompt, 5, 0), 3);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 1), names + 1, NULL, 1), 1);
    assert_int_equal(reach_of(ix, prompt, 5, 0), 0);
    /* A run from the start serves any match. */
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names, 1), 1);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 1), names, 1), 1);
    assert_int_equal(reach_of(ix, prompt, 5, 0), 1);
    kvi_destroy(ix);
}

/* A run that is removed in one call goes from the parts as well: nothing adds up against the limit. */
static void test_removed_runs_leave_nothing(void **state)
{
    const struct kvi_opts opts = {.size = sizeof(opts), .max_holder_blocks = 200};
    struct kv_block blocks[64];
    uint64_t names[64], prompt[64];
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(&opts, &ix), 0);
    assert_int_equal(kvi_set_window(ix, who, &two_blocks), 0);
    for (uint64_t round = 0; round < 12; round++) {
        struct kvi_stats stats = {.size = sizeof(stats)};

        make_blocks(blocks, names, prompt, 1000 * round, 64);
        assert_int_equal(kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), NULL, blocks, 64, NULL),
                         0);
        assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names, 64),
                         64);
        assert_int_equal(reach_of(ix, prompt, 64, 0), 64);
        for (size_t i = 0; i < 32; i++) { /* from the end on, as engines do */
            uint64_t name = names[i];

            names[i] = names[63 - i];
            names[63 - i] = name;
        }
        assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names, NULL, 64),
                         64);
        assert_int_equal(kvi_take(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), names, NULL, 64), 64);
        kvi_get_stats(ix, &stats);
        assert_int_equal(stats.blocks, 0);
    }
    assert_null(kvi_check(ix));
    kvi_destroy(ix);
}

/* One removal lets chains be joined; the next of the same call takes its own block only. */
static void test_removals_that_join_chains(void **state)
{
    const struct kv_block blocks[] = {{11, 101}, {12, 102}}, below = {21, 201};
    const uint64_t windows[] = {12, 11}, removed[] = {21, 11};
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_set_window(ix, who, &two_blocks), 0);
    assert_int_equal(kvi_store(ix, who, KV_TIER_DEVICE, NULL, blocks, 2, NULL), 0);
    assert_int_equal(kvi_store(ix, who, KV_TIER_DISK, NULL, blocks, 2, NULL), 0);
    assert_int_equal(kvi_store(ix, who, KV_TIER_DISK, &blocks[0].hash, &below, 1, NULL), 0);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), windows, 2), 2);
    assert_int_equal(kvi_take(ix, kvi_cache_of(who, KV_TIER_DISK, 0), removed, NULL, 2), 2);
    assert_null(kvi_check(ix));
    assert_int_equal(kvi_remove(ix, who, KV_TIER_DISK, &blocks[1].hash, 1), 1);
    kvi_destroy(ix);
}

struct declared {
    struct kvi_index *ix;
    const struct kv_block *blocks;
    int seen; /* chains */
};

/* At the walk's second chain: a first window, and blocks that it makes useless. */
static void declare_window(void *arg, const struct kvi_chain *chain)
{
    struct declared *d = arg;

    if (!chain || ++d->seen != 2)
        return;
    assert_int_equal(kvi_set_window(d->ix, who, &two_blocks), 0);
    assert_int_equal(kvi_add(d->ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), &d->blocks[9].hash,
                             d->blocks + 10, 10, NULL),
                     0);
}

/* A lookup that began before never answers with the blocks of afterwards and no window. */
static void test_a_window_declared_under_a_lookup(void **state)
{
    struct kv_block blocks[20], branch[11];
    uint64_t names[20], prompt[20];
    struct kvi_index *ix;
    struct declared d;

    (void)state;
    make_blocks(blocks, names, prompt, 0, 20);
    memcpy(branch, blocks, 10 * sizeof(branch[0]));
    branch[10] = (struct kv_block){999, 998};
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(other, KV_TIER_DEVICE, 0), NULL, blocks, 20, NULL),
                     0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(other, KV_TIER_DEVICE, 0), NULL, branch, 11, NULL),
                     0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), NULL, blocks, 10, NULL), 0);
    d = (struct declared){ix, blocks, 0};
    ix->find_hook_arg = &d;
    ix->find_hook = declare_window;
    assert_int_equal(reach_of(ix, prompt, 20, 0), 0);
    assert_true(d.seen > 2); /* it was walked again */
    ix->find_hook = NULL;
    assert_null(kvi_check(ix));
    kvi_destroy(ix);
}

/* A window alone that comes to another tier by name finds the places that the first tier knows. */
static void test_alone_in_a_second_tier(void **state)
{
    const struct kvi_window window = {.group = 1, .window = 32, .need = 2, .stride = 1};
    struct kvi_matches matches = {0};
    struct kv_block blocks[DEPTH];
    uint64_t prompt[DEPTH], names[DEPTH];
    const uint64_t unplaced = name_of(DEPTH);
    struct kvi_index *ix;

    (void)state;
    for (uint32_t i = 0; i < DEPTH; i++) {
        prompt[i] = local_at(0, i);
        names[i] = name_of(i);
        blocks[i] = (struct kv_block){names[i], prompt[i]};
    }
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    assert_int_equal(kvi_set_alone(ix, who, true), 0);
    assert_int_equal(
        kvi_add(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), NULL, blocks, DEPTH, NULL), 0);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), &unplaced, 1), 1);
    assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_HOST, 0, 0), names, DEPTH),
                     DEPTH);
    assert_null(kvi_check(ix));
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), names, NULL, DEPTH),
                     DEPTH);
    assert_int_equal(kvi_find(ix, prompt, DEPTH, &matches), 0);
    assert_int_equal(matches.n, 1);
    assert_int_equal(matches.items[0].reach[KV_TIER_HOST], DEPTH);
    assert_null(kvi_check(ix));
    kvi_matches_fini(&matches);
    kvi_destroy(ix);
}

/* Windows alone, in several tiers and more than one part: places go with the last block that any of them
 * has there or below, and stay known to all until then. */
static void test_alone_leaves_no_places(void **state)
{
    struct kv_block blocks[DEPTH];
    uint64_t prompt[DEPTH], names[DEPTH];
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_set_alone(ix, who, true), 0);
    for (uint32_t i = 0; i < 4; i++) {
        const struct kvi_window window = {.group = i, .window = 9, .need = 2, .stride = 1};

        assert_int_equal(kvi_set_window(ix, who, &window), i);
    }
    for (uint64_t round = 0; round < 20; round++) {
        make_blocks(blocks, names, prompt, 1000 * round, DEPTH);
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(
                kvi_add(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, i), NULL, blocks, DEPTH, NULL),
                0);
        }
        assert_int_equal(reach_of(ix, prompt, DEPTH, KV_TIER_DEVICE), DEPTH);
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(
                kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, i), names, NULL, DEPTH), DEPTH);
        /* The last window still has them: others find their places by name. */
        for (uint32_t i = 0; i < 4 && round % 2 == 0; i++)
            assert_int_equal(
                kvi_add_known(ix, kvi_window_of(who, KV_TIER_HOST, 0, i), names, DEPTH), DEPTH);
        assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 3), names, NULL, DEPTH),
                         DEPTH);
        assert_int_equal(reach_of(ix, prompt, DEPTH, KV_TIER_HOST), round % 2 ? 0 : DEPTH);
        assert_null(kvi_check(ix));
        for (uint32_t i = 0; i < 4 && round % 2 == 0; i++)
            assert_int_equal(
                kvi_take(ix, kvi_window_of(who, KV_TIER_HOST, 0, i), names, NULL, DEPTH), DEPTH);
        assert_null(kvi_check(ix));
        assert_int_equal(places_of(ix), 0);
    }
    kvi_destroy(ix);
}

/* Observe a holder with windows as another call would. */
static void look(struct kvi_index *ix, const uint64_t *prompt, size_t n, uint64_t ret[4])
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    (void)kvi_get_holder(ix, who, &info);
    ret[0] = info.blocks;
    ret[1] = info.copies;
    ret[2] = reach_of(ix, prompt, n, KV_TIER_DEVICE);
    ret[3] = info.tier_blocks[KV_TIER_DEVICE];
}

/* Store the blocks of @n but the first @held in one of three ways: with those, below them, together. */
static int store_more(struct kvi_index *ix, int way, const struct kv_block *blocks, size_t held,
                      size_t n, struct kvi_stored *ret)
{
    const struct kvi_new_chain chains[] = {
        {.holder = who,
         .has_parent = true,
         .parent = blocks[held - 1].hash,
         .blocks = blocks + held,
         .n = 1},
        {.holder = who,
         .has_parent = true,
         .parent = blocks[held].hash,
         .blocks = blocks + held + 1,
         .n = n - held - 1},
    };
    int rc;

    if (way == 0)
        return kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), NULL, blocks, n, ret);
    if (way == 1)
        return kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), &chains[0].parent, blocks + held,
                       n - held, ret);
    (void)kvi_add_chains(ix, chains, KV_COUNT(chains), ret, &rc);
    return rc;
}

/* Refuse the @at-th request for memory of a store. Returns false when it has fewer. */
static bool starve_store(int way, long at, long *n_failures, long *n_lagging)
{
    struct kv_block blocks[DEPTH];
    uint64_t prompt[DEPTH], names[DEPTH], before[4], after[4];
    struct kvi_stored stored = {0};
    struct kvi_index *ix;
    bool failed;
    int rc;

    make_blocks(blocks, names, prompt, 0, DEPTH);
    assert_int_equal(kvi_create(NULL, &ix), 0);
    for (uint32_t i = 0; i < N_WINDOWS; i++) {
        assert_int_equal(kvi_set_window(ix, who, &descriptions[i]), i);
        assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, i), names, DEPTH),
                         DEPTH);
    }
    assert_int_equal(kvi_add(ix, kvi_cache_of(who, KV_TIER_DEVICE, 0), NULL, blocks, 8, NULL), 0);
    look(ix, prompt, DEPTH, before);
    kvi_mem_fail_at(at);
    rc = store_more(ix, way, blocks, 8, DEPTH, &stored);
    failed = kvi_mem_failed();
    kvi_mem_fail_at(0);
    look(ix, prompt, DEPTH, after);
    assert_null(kvi_check(ix));
    if (rc) {
        assert_int_equal(rc, -ENOMEM);
        if (way < 2)
            assert_memory_equal(after, before, sizeof(after));
        else
            assert_int_equal(after[0], 8 + stored.added);
        ++*n_failures;
    } else {
        assert_int_equal(after[0], DEPTH);
        assert_true(after[2] == DEPTH || stored.lagging);
        *n_lagging += stored.lagging > 0;
        assert_int_equal(kvi_add(ix, kvi_cache_of(who, KV_TIER_HOST, 0), NULL, blocks, 1, &stored),
                         0);
        assert_int_equal(stored.lagging, 0);
        assert_int_equal(reach_of(ix, prompt, DEPTH, KV_TIER_DEVICE), DEPTH);
    }
    kvi_destroy(ix);
    return failed;
}

/* A store that fails for want of memory changed nothing; one that succeeds is whole, or its windows make
 * matches shorter until the next store. */
static void test_stores_without_memory(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) {
        long failures = 0, lagging = 0;

        for (long at = 1; starve_store(way, at, &failures, &lagging);)
            at++;
        print_message("way %d: %ld failures, %ld lagged\n", way, failures, lagging);
        assert_true(failures > 0 && lagging > 0);
    }
}

/* The blocks of a group keep their meaning: its windows can't get blocks of another size. */
static void test_sizes_of_groups(void **state)
{
    struct kvi_window window = {.group = 1, .need = 1, .stride = 1, .parts = 2};
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    window.need = 2;
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    window.parts = 4;
    assert_int_equal(kvi_set_window(ix, who, &window), -EEXIST);
    window.parts = 0;
    assert_int_equal(kvi_set_window(ix, who, &window), -EEXIST);
    window.stride = 2;
    assert_int_equal(kvi_set_window(ix, who, &window), -EEXIST);
    assert_int_equal(kvi_remove_holder(ix, who), 0);
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    window = (struct kvi_window){
        .group = 2, .need = UINT32_MAX - 1, .stride = 1, .parts = KVI_MAX_WINDOW_PARTS + 1};
    assert_int_equal(kvi_set_window(ix, who, &window), -EINVAL);
    kvi_destroy(ix);
}

/* A number that no window has is no cache, also -1: above all not the main one. */
static void test_numbers_of_no_window(void **state)
{
    static const uint32_t numbers[] = {1, KVI_MAX_WINDOWS, UINT32_MAX - 1, UINT32_MAX};
    const struct kvi_window window = {.group = 1, .need = 1, .stride = 1};
    const struct kv_block block = {1, 1};
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_store(ix, who, KV_TIER_DEVICE, NULL, &block, 1, NULL), 0);
    assert_int_equal(kvi_set_window(ix, who, &window), 0);
    for (size_t i = 0; i < KV_COUNT(numbers); i++) {
        const struct kvi_cache none = kvi_window_of(who, KV_TIER_DEVICE, 0, numbers[i]);

        assert_int_equal(kvi_add_known(ix, none, &block.hash, 1), -EINVAL);
        assert_int_equal(kvi_add(ix, none, NULL, &block, 1, NULL), -EINVAL);
        assert_true(kvi_take(ix, none, &block.hash, NULL, 1) <= 0);
    }
    assert_int_equal(kvi_holder_blocks(ix, who), 1);
    kvi_destroy(ix);
}

/* Which groups give up the last matched block, and that a rule can be taken back. */
static void test_keeps(void **state)
{
    static const struct {
        bool main;
        uint64_t groups;
        uint32_t reach;
    } rules[] = {{true, ~UINT64_C(0), 6},  /* none drops */
                 {false, 0, 5},            /* all do */
                 {true, 1u << 7, 6},       /* bits of some groups: 70 keeps, too */
                 {true, ~(1ull << 7), 5},  /* window 7 does */
                 {true, 0, 5},             /* both windows do */
                 {false, ~UINT64_C(0), 5}, /* the main group does */
                 {true, ~UINT64_C(0), 6}};
    const struct kvi_window windows[] = {{.group = 7, .window = 9, .need = 2, .stride = 1},
                                         {.group = 70, .window = 17, .need = 3, .stride = 1}};
    struct kv_block blocks[6];
    uint64_t hashes[6], locals[6];
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(kvi_create(NULL, &ix), 0);
    for (uint32_t i = 0; i < 6; i++) {
        blocks[i] = (struct kv_block){10 + i, 20 + i};
        hashes[i] = 10 + i;
        locals[i] = 20 + i;
    }
    assert_int_equal(kvi_store(ix, who, KV_TIER_DEVICE, NULL, blocks, 6, NULL), 0);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(kvi_set_window(ix, who, &windows[i]), i);
        assert_int_equal(kvi_add_known(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, i), hashes, 6), 6);
    }
    assert_int_equal(reach_of(ix, locals, 6, KV_TIER_DEVICE), 6);
    for (size_t i = 0; i < KV_COUNT(rules); i++) {
        assert_int_equal(kvi_set_keeps(ix, who, rules[i].main, rules[i].groups), 0);
        assert_int_equal(reach_of(ix, locals, 6, KV_TIER_DEVICE), rules[i].reach);
    }
    /* Unless every group drops, those without a bit of their own don't. */
    assert_int_equal(kvi_set_keeps(ix, who, true, ~(UINT64_C(1) << 7)), 0);
    assert_int_equal(kvi_take(ix, kvi_window_of(who, KV_TIER_DEVICE, 0, 0), hashes + 5, NULL, 1),
                     1);
    assert_int_equal(reach_of(ix, locals, 6, KV_TIER_DEVICE), 4);
    assert_int_equal(kvi_set_keeps(ix, who, true, ~UINT64_C(0)), 0);
    assert_int_equal(reach_of(ix, locals, 6, KV_TIER_DEVICE), 5);
    kvi_destroy(ix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_half_blocks),
        cmocka_unit_test(test_sizes_of_groups),
        cmocka_unit_test(test_numbers_of_no_window),
        cmocka_unit_test(test_keeps),
        cmocka_unit_test(test_random_histories),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_alone_in_a_second_tier),
        cmocka_unit_test(test_alone_leaves_no_places),
        cmocka_unit_test(test_stores_without_memory),
        cmocka_unit_test(test_removed_runs_leave_nothing),
        cmocka_unit_test(test_removals_that_join_chains),
        cmocka_unit_test(test_a_window_declared_under_a_lookup),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
