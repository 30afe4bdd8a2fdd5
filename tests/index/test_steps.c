// SPDX-License-Identifier: Apache-2.0
/* A reader between any two steps of a writer. The step hook looks the same prompts up after every
 * single step of a call. For each holder and tier, each answer must be the one before the call or
 * the one after it. The test doesn't depend on timing. */
#include "base/unit.h"
#include "ops.h"

#define PROMPTS 4
#define HOLDERS 64
#define SEEN 4 /* different values of one number that are remembered: two would do */

struct number {
    uint32_t value[SEEN];
    int n;
};

static struct look {
    struct ops *ops;
    struct kvi_matches matches;
    uint64_t prompt[PROMPTS][OPS_MAX_BLOCKS];
    size_t len[PROMPTS];
    struct number seen[PROMPTS][HOLDERS][KV_N_TIERS];
    long n_looks;
} look;

/* Holders are numbered by worker and rank. */
static size_t number_of(struct kv_holder key)
{
    return (key.worker * look.ops->profile->n_ranks + key.rank) % HOLDERS;
}

static void remember(struct number *number, uint32_t value)
{
    for (int i = 0; i < number->n; i++)
        if (number->value[i] == value)
            return;
    if (number->n < SEEN)
        number->value[number->n++] = value;
}

static void on_step(void)
{
    uint32_t reach[HOLDERS][KV_N_TIERS];

    look.n_looks++;
    for (int p = 0; p < PROMPTS; p++) {
        memset(reach, 0, sizeof(reach));
        if (kvi_find(look.ops->ix, look.prompt[p], look.len[p], &look.matches))
            abort();
        for (size_t i = 0; i < look.matches.n; i++)
            memcpy(reach[number_of(look.matches.items[i].holder)], look.matches.items[i].reach,
                   sizeof(reach[0]));
        for (size_t h = 0; h < HOLDERS; h++)
            for (int t = 0; t < KV_N_TIERS; t++)
                remember(&look.seen[p][h][t], reach[h][t]);
    }
}

static void model_answers(uint32_t ret[PROMPTS][HOLDERS][KV_N_TIERS])
{
    const struct model *m = look.ops->model;

    memset(ret, 0, sizeof(uint32_t[PROMPTS][HOLDERS][KV_N_TIERS]));
    for (int p = 0; p < PROMPTS; p++)
        for (size_t i = 0; i < m->n_holders; i++)
            model_find(look.ops->model, &m->holders[i], look.prompt[p], look.len[p],
                       ret[p][number_of(m->holders[i].key)]);
}

/* Prompts along what is held, so that something happens to them. */
static void choose_prompts(struct ops *ops)
{
    for (int p = 0; p < PROMPTS; p++) {
        (void)ops_query(ops);
        look.len[p] = KV_MIN(ops->prompt_len, (size_t)OPS_MAX_BLOCKS);
        memcpy(look.prompt[p], ops->prompt, look.len[p] * sizeof(uint64_t));
    }
}

static const char *judge(uint32_t before[PROMPTS][HOLDERS][KV_N_TIERS],
                         uint32_t after[PROMPTS][HOLDERS][KV_N_TIERS])
{
    for (int p = 0; p < PROMPTS; p++)
        for (size_t h = 0; h < HOLDERS; h++)
            for (int t = 0; t < KV_N_TIERS; t++)
                for (int i = 0; i < look.seen[p][h][t].n; i++) {
                    uint32_t value = look.seen[p][h][t].value[i];

                    if (value != before[p][h][t] && value != after[p][h][t])
                        return MODEL_DIFFERS("tier %d reached %u on the way from %u to %u", t,
                                             value, before[p][h][t], after[p][h][t]);
                }
    return NULL;
}

static void play(const struct ops_profile *profile, long rounds)
{
    static uint32_t before[PROMPTS][HOLDERS][KV_N_TIERS], after[PROMPTS][HOLDERS][KV_N_TIERS];
    struct ops *ops = ops_new(profile);

    ops->one_hash = true; /* a call with several does one after the other */
    ops->whole = ops->one_call = true;
    look.ops = ops;
    look.n_looks = 0;
    for (long i = 0; i < rounds; i++) {
        const char *wrong;

        if (i % 2000 == 0)
            ops_begin(ops);
        choose_prompts(ops);
        model_answers(before);
        memset(look.seen, 0, sizeof(look.seen));
        kvi_step_hook = on_step;
        wrong = ops_one(ops);
        kvi_step_hook = NULL;
        model_answers(after);
        if (!wrong)
            wrong = judge(before, after);
        ops_judge(ops, i, wrong);
    }
    print_message("%s: %ld operations, looked at %ld times\n", profile->name, rounds, look.n_looks);
    assert_true(look.n_looks > rounds);
    kvi_matches_fini(&look.matches);
    ops_free(ops);
}

static void test_colliding(void **state)
{
    static const struct ops_profile profile = {.name = "colliding",
                                               .n_workers = 4,
                                               .n_ranks = 2,
                                               .n_locals = 3,
                                               .n_hashes = 20,
                                               .max_blocks = 6,
                                               .n_hash_seeds = 2,
                                               .chaos = 30,
                                               .diverge = 40,
                                               .grow = 60,
                                               .n_tiers = 4,
                                               .forgets = true};
    (void)state;
    play(&profile, test_rounds(40000));
}

static void test_shared_trunk(void **state)
{
    static const struct ops_profile profile = {.name = "shared trunk",
                                               .n_workers = 12,
                                               .n_ranks = 1,
                                               .n_locals = 100,
                                               .n_hashes = 50,
                                               .max_blocks = 40,
                                               .n_hash_seeds = 1,
                                               .chaos = 0,
                                               .diverge = 3,
                                               .grow = 55,
                                               .n_tiers = 2,
                                               .forgets = true};
    (void)state;
    play(&profile, test_rounds(10000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_colliding),
        cmocka_unit_test(test_shared_trunk),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
