// SPDX-License-Identifier: Apache-2.0
/*
 * Random histories of SGLang's radix cache (models/sglang.h), announced as SGLang does: after each
 * batch the indexer's answers equal the cache's own lookups.
 */
#include "models/follow.h"
#include "models/sglang.h"

struct run {
    uint64_t *random;
    struct prompts prompts;
    struct sglang sglang;
    struct follower f;
};

static void step(struct run *run)
{
    struct sglang *s = &run->sglang;
    struct sglang_request *r = &s->requests[unit_below(run->random, SGLANG_MAX_REQUESTS)];
    uint64_t what = unit_below(run->random, 100);

    if (!r->used && what < 60) {
        struct prompt p = prompts_next(&run->prompts, SGLANG_PAGE);

        if (sglang_start(s, &p))
            prompts_remember(&run->prompts, &p);
    } else if (r->used && what < 80) {
        prompt_extend(&run->prompts, &r->prompt, unit_below(run->random, 9));
        prompts_remember(&run->prompts, &r->prompt);
        sglang_finish(s, r);
    } else if (what < 98 && s->opts.host_pages && run->prompts.n) {
        sglang_back_up(s, &run->prompts.past[unit_below(run->random, run->prompts.n)]);
    } else if (what == 99 && unit_below(run->random, 4) == 0) {
        sglang_flush(s);
    }
}

static void compare(struct run *run)
{
    for (int i = 0; i < 3; i++) {
        struct prompt p = prompts_next(&run->prompts, SGLANG_PAGE);

        follow_compare(&run->f, &p, KV_TIER_DEVICE, sglang_lookup(&run->sglang, &p, false));
        if (run->sglang.opts.host_pages)
            follow_compare(&run->f, &p, KV_TIER_HOST, sglang_lookup(&run->sglang, &p, true));
    }
}

/* @ret gathers the tally of all histories. */
static void history(uint64_t *random, const struct sglang_opts *opts, bool namespaces,
                    struct follower *ret)
{
    struct run *run = calloc(1, sizeof(*run));

    assert_non_null(run);
    run->random = random;
    run->prompts = (struct prompts){.random = random, .namespaces = namespaces};
    sglang_init(&run->sglang, opts);
    follow_init(&run->f, SGLANG_PAGE);
    for (int i = 0; i < 200; i++) {
        struct kv_buf payload;

        step(run);
        payload = sglang_take(&run->sglang);
        follow_apply(&run->f, &payload);
        compare(run);
    }
    follow_tally(ret, &run->f);
    follow_fini(&run->f);
    sglang_fini(&run->sglang);
    free(run);
}

static void run_histories(const char *what, const struct sglang_opts *opts)
{
    uint64_t random = unit_seed();
    struct follower tally = {0};

    for (size_t i = unit_rounds(30); i > 0; i--) {
        struct sglang_opts varied = *opts;

        varied.device_pages = 20 + unit_below(&random, 60);
        varied.host_pages = opts->host_pages ? 20 + unit_below(&random, 120) : 0;
        history(&random, &varied, i % 2, &tally);
    }
    follow_report(&tally, what);
    assert_int_equal(tally.over, 0);
    assert_int_equal(tally.under, 0);
}

static void test_radix(void **state)
{
    (void)state;
    run_histories("radix cache", &(struct sglang_opts){.eagle = false});
}

static void test_eagle(void **state)
{
    (void)state;
    run_histories("EAGLE", &(struct sglang_opts){.eagle = true});
}

static void test_host_tier(void **state)
{
    (void)state;
    run_histories("HiCache", &(struct sglang_opts){.host_pages = 1});
    run_histories("HiCache, EAGLE", &(struct sglang_opts){.host_pages = 1, .eagle = true});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_radix),
        cmocka_unit_test(test_eagle),
        cmocka_unit_test(test_host_tier),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
