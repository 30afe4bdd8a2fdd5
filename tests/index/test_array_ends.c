// SPDX-License-Identifier: Apache-2.0
/* Every call of an index reads its caller's arrays to their end and no further: they end where no
 * memory is. Prompts end inside chains, at their ends and behind them; holders have windows of larger
 * blocks and of parts of blocks. */
#include "fixture.h"
#include "guarded.h"

#define DEPTH 48u

static const struct kvi_window windows[] = {
    {.group = 1, .window = 9, .need = 3, .stride = 1},
    {.group = 2, .window = 32, .need = 2, .stride = 4},
    {.group = 3, .need = 1, .stride = 8, .needs = KV_NEEDS_STATE},
    {.group = 4, .window = 12, .need = 3, .stride = 1, .needs = KV_NEEDS_CHUNK},
    {.group = 5, .window = 5, .need = 3, .stride = 1, .part = 0, .parts = 2},
    {.group = 5, .window = 5, .need = 3, .stride = 1, .part = 1, .parts = 2},
};

static struct guarded arrays[3];

/* Put blocks into each window of a holder, by their names. */
static void fill_windows(struct fixture *f, struct kv_holder holder, const uint64_t *names,
                         size_t n)
{
    for (size_t w = 0; w < sizeof(windows) / sizeof(windows[0]); w++) {
        int number = kvi_set_window(f->ix, holder, &windows[w]);
        struct kvi_cache cache;

        assert_true(number >= 0);
        cache = kvi_cache_of(holder, KV_TIER_DEVICE, 0);
        cache.window = (uint32_t)number + 1;
        for (size_t done = 0; done < n; done += 7) {
            size_t some = n - done < 7 ? n - done : 7;
            const uint64_t *at = guard(&arrays[0], names + done, some * sizeof(*at));

            assert_int_equal(kvi_add_known(f->ix, cache, at, some), some);
        }
    }
}

/* Store a path piece by piece, from arrays that end with the piece. */
static void store_path(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n)
{
    const struct kvi_cache cache = kvi_cache_of(holder, KV_TIER_HOST, 0);
    uint64_t above = 0;

    for (size_t done = 0, some; done < n; done += some) {
        struct kv_block piece[5], *blocks;
        uint64_t names[5];
        struct kvi_stored stored;
        const uint64_t *parent;

        some = n - done < 5 ? n - done : 5;
        for (size_t i = 0; i < some; i++) {
            names[i] = path_hash(locals, done + i + 1);
            piece[i] = (struct kv_block){names[i], locals[done + i]};
        }
        parent = done ? guard(&arrays[1], &above, sizeof(above)) : NULL;
        blocks = guard(&arrays[0], piece, some * sizeof(*piece));
        assert_int_equal(kvi_store(f->ix, holder, KV_TIER_DEVICE, parent, blocks, some, &stored),
                         0);
        assert_int_equal(
            kvi_add_known(f->ix, cache, guard(&arrays[2], names, some * sizeof(names[0])), some),
            some);
        above = names[some - 1];
    }
}

static void ask(struct fixture *f, const uint64_t *locals, size_t n, const uint64_t *names)
{
    struct kvi_group_matches groups = {0};
    const uint64_t *at = guard(&arrays[0], locals, n * sizeof(*at));

    assert_int_equal(kvi_find(f->ix, at, n, &f->matches), 0);
    assert_int_equal(kvi_find_groups(f->ix, at, n, &f->matches, &groups), 0);
    kvi_group_matches_fini(&groups);
    at = guard(&arrays[1], names, n * sizeof(*at));
    assert_int_equal(kvi_find_named(f->ix, at, n, &f->matches), 0);
}

static void test_lookups(void **state)
{
    struct fixture *f = *state;
    uint64_t locals[3][DEPTH + 4], names[3][DEPTH + 4];

    for (size_t p = 0; p < 3; p++) {
        memcpy(locals[p], sequence(DEPTH + 4, p ? 16 * p + 1 : DEPTH + 4, 900 + p),
               sizeof(locals[p]));
        for (size_t i = 0; i < DEPTH + 4; i++)
            names[p][i] = path_hash(locals[p], i + 1);
        store_path(f, p == 1 ? W1 : W0, locals[p], DEPTH);
    }
    fill_windows(f, W0, names[0], DEPTH);
    for (size_t p = 0; p < 3; p++)
        for (size_t n = 0; n <= DEPTH + 4; n++)
            ask(f, locals[p], n, names[p]);
}

static void test_removals(void **state)
{
    struct fixture *f = *state;
    const struct kvi_cache cache = kvi_cache_of(W0, KV_TIER_HOST, 0);
    const uint64_t *locals = sequence(DEPTH, DEPTH, 0);

    store_path(f, W0, locals, DEPTH);
    for (size_t n = DEPTH, some; n > 0; n -= some) {
        static const uint32_t left[] = {0, 0, 0, 0};
        uint64_t names[4];
        const uint64_t *at;

        some = n < 4 ? n : 4;
        for (size_t i = 0; i < some; i++)
            names[i] = path_hash(locals, n - i);
        at = guard(&arrays[0], names, some * sizeof(*at));
        assert_int_equal(
            kvi_take(f->ix, cache, at, guard(&arrays[1], left, some * sizeof(left[0])), some),
            some);
        assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, at, some), some);
    }
    assert_int_equal(n_blocks(f), 0);
    for (size_t i = 0; i < 3; i++)
        unguard(&arrays[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {T(test_lookups), T(test_removals)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
