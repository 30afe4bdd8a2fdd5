// SPDX-License-Identifier: Apache-2.0
/*
 * Histories of a vLLM cache (models/vllm.h) while memory runs out at random moments: a batch that is
 * applied only in part says so, and one that doesn't say so leaves exact answers.
 */
#include <stdlib.h>

#include "models/follow.h"
#include "models/vllm.h"
#include "starve.h"

struct run {
    uint64_t random;
    struct prompts prompts;
    struct vllm vllm;
    struct follower f;
    size_t starved, told; /* batches */
};

static void publish(struct run *run)
{
    struct kv_buf payload = vllm_take(&run->vllm);
    struct follower *f = &run->f;
    enum ki_applied applied;

    kv_buf_append(&f->past, &payload.len, sizeof(payload.len));
    kv_buf_append(&f->past, payload.data, payload.len);
    /* Otherwise the lookup of a possible report allocates once in a history, and never fails. */
    ki_reports_fini(&f->applier.reports);
    starve_at(1 + (long)unit_below(&run->random, 12));
    applied = ki_applier_apply(&f->applier, f->index, payload.data, payload.len);
    run->starved += starved();
    run->told += applied == KI_APPLIED_PART;
    starve_at(0);
    if (applied == KI_APPLIED_PART)
        follow_heal(f);
    kv_buf_fini(&payload);
}

static void step(struct run *run)
{
    struct vllm *v = &run->vllm;
    struct vllm_request *r = &v->requests[unit_below(&run->random, VLLM_MAX_REQUESTS)];
    uint64_t what = unit_below(&run->random, 100);

    if (what < 35 || !r->used) {
        struct prompt p = prompts_next(&run->prompts, run->f.block_size);

        if (vllm_start(v, &p, v->opts.report_full && unit_below(&run->random, 2)))
            prompts_remember(&run->prompts, &p);
    } else if (what < 75) {
        for (uint64_t n = unit_below(&run->random, 7); n > 0; n--)
            vllm_generate(v, r, (uint32_t)unit_below(&run->random, 3));
        prompts_remember(&run->prompts, &r->prompt);
    } else if (what < 99) {
        vllm_finish(v, r);
    } else {
        vllm_reset(v);
    }
}

/* Returns the number of batches that starved. */
static size_t run_history(const char *what, const struct vllm_opts *opts)
{
    /* One seed: allocations come in the same order every time. */
    struct run run = {.random = getenv("KV_TEST_SEED") ? unit_seed() : 1795421603};

    run.prompts.random = &run.random;
    follow_init(&run.f, (uint32_t)(opts->parts ? opts->parts : 1) * VLLM_BLOCK);
    ki_applier_set_habits(&run.f.applier, &(struct ki_habits){.eagle_drop = opts->eagle_drop,
                                                              .report_mode = opts->report_mode});
    vllm_init(&run.vllm, opts);
    for (size_t i = unit_rounds(1000); i > 0; i--) {
        step(&run);
        publish(&run);
        for (int k = 0; k < 3; k++) {
            struct prompt p = prompts_next(&run.prompts, run.f.block_size);

            follow_compare(&run.f, &p, KV_TIER_DEVICE, vllm_lookup(&run.vllm, &p));
        }
    }
    print_message("%zu batches starved, %zu said so\n", run.starved, run.told);
    follow_report(&run.f, what);
    assert_int_equal(run.f.over, 0);
    assert_int_equal(run.f.under, 0);
    vllm_fini(&run.vllm);
    follow_fini(&run.f);
    return run.starved;
}

static void test_starved(void **state)
{
    struct vllm_opts opts = {
        .n_blocks = 100, .n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}}};

    size_t starved = 0;

    (void)state;
    starved += run_history("starved, window", &opts);
    opts.parts = 2;
    starved += run_history("starved, half blocks", &opts);
    opts.parts = 1;
    opts.n_groups = 1;
    opts.n_blocks = 50;
    starved += run_history("starved, full attention", &opts);
    opts.report_full = true;
    opts.report_mode = KI_REPORTS_FULL;
    starved += run_history("starved, reports", &opts);
    assert_true(starved > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_starved),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
