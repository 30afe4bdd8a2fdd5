// SPDX-License-Identifier: Apache-2.0
/*
 * Hits of random prompts against a model: it tries every number of tokens from the top and goes
 * through all tokens before it. What is there is told by a lookup of each key alone.
 */
// clang-format off
#include "base/unit.h"
// clang-format on

#include "tier/hit_unit.h"

enum { TOKENS = 480 };

static uint64_t rng;

static struct kv_cache_group random_group(void)
{
    static const uint32_t sizes[] = {4, 8, 12, 16, 24};
    struct kv_cache_group g = {.needs = (enum kv_needs)unit_below(&rng, 4),
                               .block_size = sizes[unit_below(&rng, KV_COUNT(sizes))]};

    if (g.needs == KV_NEEDS_RUN)
        g.span = 1 + (uint32_t)unit_below(&rng, 100);
    if (g.needs == KV_NEEDS_CHUNK)
        g.span = 1 + (uint32_t)unit_below(&rng, 200); /* also no multiple of the block size */
    return g;
}

static void random_prompt(struct prompt *p, uint64_t number)
{
    uint32_t n = 1 + (uint32_t)unit_below(&rng, GROUPS);

    prompt_init(p, number);
    for (uint32_t i = 0; i < n; i++)
        prompt_add(p, random_group(), TOKENS - (uint32_t)unit_below(&rng, 100),
                   unit_below(&rng, 2));
}

/* Store most blocks of each group, in runs, with gaps of any length. */
static void store_some(struct world *w, const struct prompt *p)
{
    for (uint32_t i = 0; i < p->n_groups; i++) {
        bool is_full = p->groups[i].group.needs == KV_NEEDS_ALL;
        size_t first = 0, n = p->groups[i].n;

        while (first < n) {
            size_t run = 1 + unit_below(&rng, is_full ? n : 20), end = KV_MIN(n, first + run);

            prompt_store(w, p, i, first, end);
            first = end + unit_below(&rng, 5);
        }
    }
}

/* Fill @at with the place of each block, by a lookup of its own. */
static void look_alone(struct world *w, const struct prompt *p, uint8_t at[GROUPS][BLOCKS])
{
    for (uint32_t i = 0; i < p->n_groups; i++) {
        for (size_t k = 0; k < p->groups[i].n; k++) {
            struct kvbm_chain chain = prompt_chain(p, i, k);

            assert_true(kvbm_manager_lookup(w->m, &chain, 1, &at[i][k]) >= 0);
        }
    }
}

/* Return whether a hit of @n tokens has all that it needs beyond @computed. */
static bool is_hit(const struct prompt *p, uint8_t at[GROUPS][BLOCKS], uint64_t n,
                   uint64_t computed)
{
    for (uint32_t i = 0; i < p->n_groups; i++) {
        const struct kv_cache_group *g = &p->groups[i].group;

        if (n > p->groups[i].n * g->block_size)
            return false;
        for (uint64_t t = computed; t < n; t++)
            if (token_is_needed(g, n, t) && at[i][t / g->block_size] == KVBM_MISS)
                return false;
    }
    return true;
}

static uint64_t longest(const struct prompt *p, uint8_t at[GROUPS][BLOCKS],
                        const struct kvbm_hit_opts *opts)
{
    uint64_t n = opts->limit ? opts->limit : TOKENS;

    for (; n > opts->computed; n--) {
        bool ends = !opts->unit || n % opts->unit == 0;

        for (uint32_t i = 0; i < p->n_groups; i++)
            ends &= n % p->groups[i].group.block_size == 0;
        if (ends && is_hit(p, at, n, opts->computed))
            return n;
    }
    return opts->computed;
}

/* The blocks to load are those of needed tokens, no others, and the places are right. */
static void check_blocks(const struct prompt *p, uint8_t at[GROUPS][BLOCKS], uint64_t hit,
                         uint64_t computed)
{
    for (uint32_t i = 0; i < p->n_groups; i++) {
        const struct kv_cache_group *g = &p->groups[i].group;
        struct kvbm_hit_blocks again;

        for (size_t k = 0; k < p->groups[i].n; k++) {
            bool needed = false, told = k - p->need[i].first < p->need[i].n;

            for (uint64_t t = k * g->block_size; t < (k + 1) * g->block_size && t < hit; t++)
                needed |= t >= computed && token_is_needed(g, hit, t);
            assert_int_equal(told, needed);
            assert_true(!needed || p->where[i][k] != KVBM_NOT_LOOKED);
            if (p->where[i][k] != KVBM_NOT_LOOKED)
                assert_int_equal(p->where[i][k], at[i][k]);
        }
        if (hit % g->block_size == 0) {
            assert_int_equal(kvbm_hit_needs(g, hit, computed, &again), 0);
            assert_memory_equal(&again, &p->need[i], sizeof(again));
        }
    }
}

static uint32_t unit_of(const struct prompt *p)
{
    uint32_t unit = 1;

    for (bool ends = false; !ends; unit += !ends) {
        ends = true;
        for (uint32_t i = 0; i < p->n_groups; i++)
            ends &= unit % p->groups[i].group.block_size == 0;
    }
    return unit;
}

/* Compare hits with random options. Returns how many went beyond what was computed. */
static uint32_t compare(struct world *w, struct prompt *p)
{
    uint8_t at[GROUPS][BLOCKS];
    uint32_t n = 0, unit = unit_of(p);

    look_alone(w, p, at);
    for (int i = 0; i < 8; i++) {
        struct kvbm_hit_opts opts = KVBM_HIT_OPTS_INIT;
        struct kvbm_hit hit;

        if (i && unit_below(&rng, 2))
            opts.limit = 1 + unit_below(&rng, TOKENS + 50);
        if (i && unit_below(&rng, 2))
            opts.computed = unit_below(&rng, 3) * unit;
        if (unit_below(&rng, 4) == 0)
            opts.unit = unit * (1 + (uint32_t)unit_below(&rng, 3));
        hit = prompt_hit_of(w, p, &opts);
        assert_int_equal(hit.tokens, longest(p, at, &opts));
        assert_int_equal(hit.sure, hit.tokens);
        assert_int_equal(hit.pending, 0);
        check_blocks(p, at, hit.tokens, opts.computed);
        n += hit.tokens > opts.computed;
    }
    return n;
}

/* The host tier has room for few of the blocks; those of the last prompts are on the disk, and those of
 * prompts before in no tier. */
static void test_model(void **state)
{
    uint32_t hits = 0, rounds = (uint32_t)unit_rounds(150);
    struct prompt last[3];
    struct world w;

    (void)state;
    rng = unit_seed();
    world_init(&w, 64);
    world_with_disk(&w, 500);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t round = 0; round < rounds; round++) {
        struct prompt *p = &last[round % KV_COUNT(last)];

        random_prompt(p, round + 1);
        store_some(&w, p);
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
        if (round % 40 == 20) {
            world_stop(&w);
            world_start(&w);
            world_attach(&w, false);
        }
        hits += compare(&w, p);
        if (round >= KV_COUNT(last))
            hits += compare(&w, &last[unit_below(&rng, KV_COUNT(last))]);
    }
    print_message("%u hits in %u rounds\n", hits, rounds);
    assert_true(rounds < 20 || hits > rounds);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_model)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
