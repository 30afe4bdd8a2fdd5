// SPDX-License-Identifier: Apache-2.0
/*
 * Random histories of a vLLM cache (models/vllm.h), announced as vLLM does: after each batch the
 * indexer's answers equal the cache's own lookups, for the prompts it has seen and for others.
 */
#include "models/follow.h"
#include "models/vllm.h"

struct run {
    uint64_t *random;
    struct prompts prompts;
    struct vllm vllm;
    struct follower f;
};

static struct vllm_request *any_request(struct run *run)
{
    struct vllm_request *r = &run->vllm.requests[unit_below(run->random, VLLM_MAX_REQUESTS)];

    return r->used ? r : NULL;
}

/* The engine publishes a batch with each of its steps. */
static void publish(struct run *run)
{
    struct kv_buf payload = vllm_take(&run->vllm);

    follow_apply(&run->f, &payload);
}

static void start(struct run *run)
{
    struct vllm *v = &run->vllm;

    for (uint64_t n = 1 + unit_below(run->random, 2); n > 0; n--) {
        struct prompt p = prompts_next(&run->prompts, run->f.block_size);

        bool report = v->opts.report_full && (v->opts.report_all || unit_below(run->random, 2)),
             skips = v->opts.skip_cache && unit_below(run->random, 4) == 0;

        if (vllm_start_any(v, &p, report, skips))
            prompts_remember(&run->prompts, &p);
    }
}

static void generate(struct run *run, struct vllm_request *r)
{
    for (uint64_t n = unit_below(run->random, 7); n > 0; n--) {
        vllm_generate(&run->vllm, r, (uint32_t)unit_below(run->random, 3));
        publish(run);
    }
    prompts_remember(&run->prompts, &r->prompt);
}

/* Resets of the device, of the host's pool, or of both, and what the same batch has beside them. */
static void reset(struct run *run)
{
    struct vllm *v = &run->vllm;

    if (unit_below(run->random, 4) == 0)
        start(run);
    for (uint64_t n = 1 + (unit_below(run->random, 4) == 0); n > 0; n--) {
        uint64_t what = unit_below(run->random, 4);

        if (what || !v->opts.host_pool)
            vllm_reset(v);
        if (what < 2)
            vllm_reset_host(v);
    }
    if (unit_below(run->random, 2) == 0)
        start(run);
}

static void step(struct run *run)
{
    struct vllm *v = &run->vllm;
    struct vllm_request *r = any_request(run);
    uint64_t what = unit_below(run->random, 100);

    if (what < 35 || !r) {
        start(run);
    } else if (what < 75) {
        generate(run, r);
    } else if (what < 85 && v->opts.host_blocks) {
        vllm_offload_request(v, r, run->random);
    } else if (what < 99 || unit_below(run->random, 4)) {
        vllm_finish(v, r);
    } else {
        reset(run);
    }
}

static void compare(struct run *run)
{
    for (int i = 0; i < 4; i++) {
        struct prompt p = prompts_next(&run->prompts, run->f.block_size);

        follow_compare(&run->f, &p, KV_TIER_DEVICE, vllm_lookup(&run->vllm, &p));
        if (run->vllm.opts.host_blocks)
            follow_compare(&run->f, &p, KV_TIER_HOST, vllm_host_lookup(&run->vllm, &p));
    }
}

/* An engine from its start on. */
static void live(struct run *run, const struct vllm_opts *opts)
{
    vllm_init(&run->vllm, opts);
    for (int i = 0; i < 200; i++) {
        step(run);
        publish(run);
        if (i % 50 == 49 && !opts->host_owner &&
            !opts->report_full) /* other owners' copies aren't told */
            follow_reload(&run->f);
        compare(run);
    }
    vllm_fini(&run->vllm);
}

/* @ret gathers the tally of all histories. */
static void history(uint64_t *random, const struct vllm_opts *opts, bool namespaces,
                    struct follower *ret)
{
    struct run run = {.random = random,
                      .prompts = {.random = random,
                                  .namespaces = namespaces,
                                  .images = namespaces || opts->plain_images,
                                  .plain_images = opts->plain_images}};

    follow_init(&run.f, (uint32_t)(opts->parts ? opts->parts : 1) * VLLM_BLOCK);
    ki_applier_set_habits(
        &run.f.applier, &(struct ki_habits){.eagle_drop = opts->eagle_drop,
                                            .eagle_groups = opts->eagle_groups,
                                            .groups = vllm_told(opts),
                                            .report_mode = (enum ki_report_mode)opts->report_mode});
    run.f.keeps = opts->report_full || opts->skip_cache;
    run.f.unshown = opts->report_full && opts->report_mode == KI_REPORTS_UNKNOWN;
    live(&run, opts);
    follow_tally(ret, &run.f);
    follow_fini(&run.f);
}

/* The same seed always: shares are judged of these histories alone, so that no chance decides. */
#define FIXED_SEED 1

static struct follower run_seeded(const char *what, const struct vllm_opts *opts, uint64_t random)
{
    struct follower tally = {0};

    for (size_t i = unit_rounds(opts->report_full ? 16 : 40); i > 0; i--) {
        struct vllm_opts varied = *opts;

        varied.n_blocks = (uint16_t)(opts->n_groups * (24 + unit_below(&random, 30)));
        history(&random, &varied, i % 2, &tally);
    }
    follow_report(&tally, what);
    assert_int_equal(tally.over, 0);
    assert_int_equal(tally.under, 0);
    return tally;
}

static struct follower run_histories(const char *what, const struct vllm_opts *opts)
{
    return run_seeded(what, opts, unit_seed());
}

#define FULL .n_groups = 1, .groups = {{VLLM_FULL, 0}}

static void test_full_attention(void **state)
{
    (void)state;
    run_histories("full attention", &(struct vllm_opts){FULL});
}

/* The same image over the same tokens, at other offsets. */
static void test_moved_images(void **state)
{
    (void)state;
    run_histories("moved images", &(struct vllm_opts){FULL, .plain_images = true});
    run_histories("moved images, lookahead",
                  &(struct vllm_opts){FULL, .plain_images = true, .lookahead = 1});
}

/* A request computes the last block that it finds anew. */
static void test_block_drop(void **state)
{
    (void)state;
    run_histories("EAGLE, block drop", &(struct vllm_opts){FULL, .eagle_drop = true});
    run_histories("block drop, window",
                  &(struct vllm_opts){.n_groups = 2,
                                      .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}},
                                      .eagle_drop = true});
    run_histories(
        "block drop, windows",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_SLIDING, 14}, {VLLM_FULL, 0}, {VLLM_SLIDING, 6}},
                            .eagle_drop = true});
    run_histories(
        "block drop, window alone",
        &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}, .eagle_drop = true});
}

/* Only groups with draft layers drop, here full attention, a window beside it, and a window alone. */
static void test_block_drop_of_groups(void **state)
{
    struct vllm_opts opts = {.n_groups = 3,
                             .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 14}, {VLLM_SLIDING, 6}},
                             .eagle_drop = true,
                             .report_mode = KI_REPORTS_INCREMENTAL,
                             .eagle_groups = 1};

    (void)state;
    assert_int_equal(run_histories("full attention drops", &opts).unsure, 0);
    opts.eagle_groups = 5;
    assert_int_equal(run_histories("full and a window drop", &opts).unsure, 0);
    opts.groups[1] = opts.groups[2]; /* looked up together */
    assert_int_equal(run_histories("full and a window of two", &opts).unsure, 0);
    opts.parts = 2;
    assert_int_equal(run_histories("full alone, half blocks", &opts).unsure, 0);
    opts.parts = 1;
    opts.eagle_groups = 4;
    run_histories("a window alone drops", &opts);
}

static void test_lookahead(void **state)
{
    (void)state;
    run_histories("EAGLE, lookahead", &(struct vllm_opts){FULL, .lookahead = 1});
    run_histories("MTP, lookahead 5", &(struct vllm_opts){FULL, .lookahead = 5});
}

/*
 * Requests that report what they reuse, each of which may be one that skips the cache.
 * @opts->report_mode: registered, or seen in the stream.
 */
static void run_reports(const char *what, const struct vllm_opts *opts)
{
    struct vllm_opts full = *opts;
    struct follower tally;

    full.report_full = true;
    for (int i = 0; i < 4; i++) {
        full.report_mode = i & 1 ? KI_REPORTS_FULL : KI_REPORTS_UNKNOWN;
        full.report_all = i & 2;
        tally = run_histories(what, &full);
        if (opts->n_groups == 1 && opts->groups[0].kind == VLLM_FULL && !opts->eagle_drop &&
            full.report_mode)
            assert_int_equal(tally.unsure_over, 0);
    }
}

/* One full-attention group lives in host memory, first or last of the engine's. */
static const struct vllm_opts in_two_tiers[] = {
    {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}, .lives_below = 1},
    {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}, .lives_below = 2},
    {.n_groups = 3,
     .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}, {VLLM_SLIDING, 7}},
     .lives_below = 1},
    {.n_groups = 3, .groups = {{VLLM_MAMBA, 0}, {VLLM_FULL, 0}, {VLLM_FULL, 0}}, .lives_below = 2},
    {.n_groups = 2, .groups = {{VLLM_SLIDING, 9}, {VLLM_FULL, 0}}, .lives_below = 2},
};

static void test_groups_in_two_tiers(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(in_two_tiers); i++) {
        struct vllm_opts opts = in_two_tiers[i];

        run_histories("two tiers", &opts);
        opts.report_mode = KI_REPORTS_INCREMENTAL;
        assert_int_equal(run_histories("two tiers, registered", &opts).unsure, 0);
        opts.lookahead = 1;
        assert_int_equal(run_histories("two tiers, lookahead", &opts).unsure, 0);
        opts.lookahead = 0;
        opts.eagle_drop = true;
        run_histories("two tiers, block drop", &opts);
    }
}

static void test_reports_in_two_tiers(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(in_two_tiers); i++)
        run_reports("reports, two tiers", &in_two_tiers[i]);
}

static void test_full_reports(void **state)
{
    (void)state;
    run_reports("reports", &(struct vllm_opts){FULL});
}

/* Reports leave some answers whole, and copies are seldom trusted before the first report. */
static void test_shares_of_reports(void **state)
{
    struct vllm_opts opts[] = {
        {FULL, .report_full = true},
        {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}, .report_full = true}};
    struct follower tally;

    (void)state;
    for (size_t i = 0; i < 2 * KV_COUNT(opts); i++) {
        opts[i / 2].report_mode = i % 2 ? KI_REPORTS_FULL : KI_REPORTS_UNKNOWN;
        tally = run_seeded("shares of reports", &opts[i / 2], FIXED_SEED);
        assert_in_range(tally.unsure * 100, 0, tally.asked * 80);
        assert_in_range(tally.unshown_wrong * 1000, 0, tally.asked);
    }
}

/* Requests that compute all anew, as prompt logprobs do. Without reports these are copies. */
static void test_requests_that_skip_the_cache(void **state)
{
    struct vllm_opts opts[] = {
        {FULL},
        {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}},
        {.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}},
        {FULL, .eagle_drop = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(opts); i++) {
        opts[i].skip_cache = true;
        run_histories("some skip the cache", &opts[i]);
        opts[i].report_full = true;
        run_histories("... others report", &opts[i]);
        opts[i].report_mode = KI_REPORTS_FULL;
        run_histories("... it is registered", &opts[i]);
        opts[i].report_full = false;
        opts[i].report_mode = KI_REPORTS_INCREMENTAL;
        assert_int_equal(run_histories("... none, it is registered", &opts[i]).unsure, 0);
    }
}

static void test_full_reports_windows(void **state)
{
    (void)state;
    run_reports("reports, window",
                &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}});
    run_reports(
        "reports, windows",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_SLIDING, 10}, {VLLM_FULL, 0}, {VLLM_SLIDING, 6}}});
    run_reports("reports, window alone",
                &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}});
    run_reports("reports, state",
                &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}}});
}

/* The same with the default of vllm serve, which keeps few blocks of windows and states. */
static void test_full_reports_retention(void **state)
{
    struct vllm_opts opts[] = {
        {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}},
        {.n_groups = 3, .groups = {{VLLM_SLIDING, 10}, {VLLM_FULL, 0}, {VLLM_SLIDING, 6}}},
        {.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}},
        {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}}},
        {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}, .eagle_drop = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(opts); i++) {
        opts[i].retention = true;
        run_reports("reports, retention", &opts[i]);
    }
}

static void test_full_reports_block_drop(void **state)
{
    (void)state;
    run_reports("reports, block drop", &(struct vllm_opts){FULL, .eagle_drop = true});
    run_reports("reports, drop, window",
                &(struct vllm_opts){.n_groups = 2,
                                    .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}},
                                    .eagle_drop = true});
}

static void test_windows(void **state)
{
    (void)state;
    run_histories("window 7", &(struct vllm_opts){.n_groups = 2,
                                                  .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}});
    run_histories(
        "window 10, twice, first",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_SLIDING, 10}, {VLLM_SLIDING, 10}, {VLLM_FULL, 0}}});
    run_histories("window alone",
                  &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}});
    run_histories(
        "windows 5 and 16",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 5}, {VLLM_SLIDING, 16}}});
}

/* Whole, but for the time before the main group has shown a block: until then the window may be alone. */
static void whole_with_main(const char *name, const struct vllm_opts *opts)
{
    struct follower tally = run_histories(name, opts);

    assert_int_equal(tally.unsure, tally.unsure_before_main);
}

/* Windows whose blocks are halves, thirds or quarters of a full-attention block. */
static void test_small_window_blocks(void **state)
{
    struct vllm_opts two = {.n_groups = 2,
                            .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}},
                            .report_mode = KI_REPORTS_INCREMENTAL,
                            .parts = 2};
    struct vllm_opts more = {.n_groups = 3,
                             .groups = {{VLLM_SLIDING, 14}, {VLLM_FULL, 0}, {VLLM_SLIDING, 8}},
                             .report_mode = KI_REPORTS_INCREMENTAL,
                             .parts = 2};

    (void)state;
    whole_with_main("half blocks, window 10", &two);
    two.groups[1].window = 5; /* needs one half: the other isn't even announced */
    whole_with_main("half blocks, window 5", &two);
    two.groups[1].window = 33;
    two.lookahead = 1;
    whole_with_main("half blocks, lookahead", &two);
    two.parts = 3;
    two.lookahead = 0;
    two.groups[1].window = 9;
    whole_with_main("third blocks, window 9", &two);
    two.parts = 4;
    two.groups[1].window = 18;
    whole_with_main("quarter blocks", &two);
    whole_with_main("half blocks, windows", &more);
    more.groups[2].window = 14;
    whole_with_main("half blocks, twice", &more);
}

static void test_small_window_blocks_drop(void **state)
{
    struct vllm_opts opts = {.n_groups = 2,
                             .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}},
                             .parts = 2,
                             .report_mode = KI_REPORTS_INCREMENTAL,
                             .eagle_drop = true};
    struct follower tally;

    (void)state;
    for (opts.parts = 2; opts.parts <= 4; opts.parts++) {
        opts.groups[1].window = opts.parts < 4 ? 10 : 22; /* no shorter than a block and a part */
        run_histories("parts, block drop", &opts);
        tally = run_seeded("parts, block drop", &opts, FIXED_SEED);
        assert_in_range(tally.unsure * 100, 0, tally.asked);
    }
    opts.parts = 4;
    opts.groups[1].window = 10; /* parts leave the window before their block is announced */
    run_histories("quarter blocks, short", &opts);
}

static void test_small_window_blocks_reports(void **state)
{
    struct vllm_opts opts = {
        .n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}}, .parts = 2};

    (void)state;
    run_reports("half blocks, reports", &opts);
}

static void test_states(void **state)
{
    (void)state;
    run_histories("recurrent state",
                  &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}}});
    run_histories(
        "state and window",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}, {VLLM_SLIDING, 9}}});
}

/* A match needs the blocks from the start of the chunk in which it ends; the registration tells its length. */
static void test_chunks(void **state)
{
    static const struct {
        const char *name;
        struct vllm_opts opts;
    } cases[] = {
        {"chunks", {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 16}}}},
        {"chunks and window",
         {.n_groups = 3, .groups = {{VLLM_CHUNKED, 12}, {VLLM_FULL, 0}, {VLLM_SLIDING, 9}}}},
        {"chunks of two lengths",
         {.n_groups = 3, .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 8}, {VLLM_CHUNKED, 20}}}},
        {"chunks of one length",
         {.n_groups = 3, .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 12}, {VLLM_CHUNKED, 12}}}},
        {"chunks and state",
         {.n_groups = 3, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}, {VLLM_CHUNKED, 16}}}},
        {"chunks, retention",
         {.n_groups = 3,
          .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}, {VLLM_CHUNKED, 12}},
          .retention = true}},
        {"chunks, lookahead",
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 16}}, .lookahead = 1}},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct vllm_opts opts = cases[i].opts;

        run_histories(cases[i].name, &opts);
        opts.report_mode = KI_REPORTS_INCREMENTAL;
        assert_int_equal(run_histories(cases[i].name, &opts).unsure, 0);
    }
    run_reports("chunks, reports", &cases[0].opts);
}

/*
 * The default of vllm serve: windows and states keep the last blocks of a prompt alone. Full attention
 * tells the places of the rest; without, the view says that it's partial. So it does where a window's
 * smaller blocks are no whole number of the registered ones: then it keeps parts of a block.
 */
static void test_retention(void **state)
{
    static const struct {
        const char *name;
        bool whole;
        struct vllm_opts opts;
    } cases[] = {
        {"retention, window", true, {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}}},
        {"retention, windows",
         true,
         {.n_groups = 3, .groups = {{VLLM_SLIDING, 10}, {VLLM_SLIDING, 17}, {VLLM_FULL, 0}}}},
        {"retention, state", true, {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}}}},
        {"retention, state, window",
         true,
         {.n_groups = 3, .groups = {{VLLM_MAMBA, 0}, {VLLM_FULL, 0}, {VLLM_SLIDING, 9}}}},
        {"retention, lookahead",
         true,
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 9}}, .lookahead = 1}},
        {"retention, block drop",
         true,
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 9}}, .eagle_drop = true}},
        {"retention, window alone", false, {.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}}},
        {"retention, windows alone",
         false,
         {.n_groups = 2, .groups = {{VLLM_SLIDING, 9}, {VLLM_SLIDING, 14}}}},
        {"retention, state alone", false, {.n_groups = 1, .groups = {{VLLM_MAMBA, 0}}}},
        {"retention, half blocks",
         false,
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}}, .parts = 2}},
        {"retention, quarter blocks",
         false,
         {.n_groups = 2, .groups = {{VLLM_SLIDING, 18}, {VLLM_FULL, 0}}, .parts = 4}},
        {"retention, all halves",
         true,
         {.n_groups = 3,
          .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 8}, {VLLM_SLIDING, 16}},
          .parts = 2}},
        {"retention, all quarters",
         true,
         {.n_groups = 3,
          .groups = {{VLLM_SLIDING, 16}, {VLLM_SLIDING, 8}, {VLLM_FULL, 0}},
          .parts = 4}},
        {"retention, halves and states",
         true,
         {.n_groups = 3,
          .groups = {{VLLM_SLIDING, 8}, {VLLM_MAMBA, 0}, {VLLM_FULL, 0}},
          .parts = 2}},
        {"retention, sixteenths",
         true,
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 8}}, .parts = 16}},
        {"retention, offload",
         true,
         {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}, .host_blocks = 60}},
        {"retention, alone, offload",
         false,
         {.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}, .host_blocks = 30}},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct vllm_opts opts = cases[i].opts;
        struct follower tally;

        opts.retention = true;
        run_histories(cases[i].name, &opts);
        opts.report_mode = KI_REPORTS_INCREMENTAL;
        tally = run_histories(cases[i].name, &opts);
        assert_int_equal(tally.unsure == 0, cases[i].whole);
    }
}

static void test_second_full_group(void **state)
{
    (void)state;
    run_histories("two full groups",
                  &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}});
}

/* The next process at the endpoint may be started with other options, or another version. */
static void test_restart_with_other_groups(void **state)
{
    static const struct vllm_opts lives[] = {
        {.n_blocks = 80, .n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}},
        {.n_blocks = 40, FULL},
        {.n_blocks = 40, .n_groups = 1, .groups = {{VLLM_SLIDING, 9}}},
        {.n_blocks = 40, FULL},
    };
    uint64_t random = unit_seed();
    struct run run = {.random = &random, .prompts = {.random = &random}};

    (void)state;
    follow_init(&run.f, VLLM_BLOCK);
    for (size_t i = 0; i < KV_COUNT(lives); i++) {
        ki_applier_purge(&run.f.applier, run.f.index, true);
        kve_reader_renew(run.f.applier.reader);
        live(&run, &lives[i]);
    }
    follow_report(&run.f, "restarts");
    assert_int_equal(run.f.over, 0);
    assert_int_equal(run.f.under, 0);
    follow_fini(&run.f);
}

/* SimpleCPUOffloadConnector: two clears in a row are of the device and the host, or both of the device. */
static void test_offload_to_a_pool(void **state)
{
    (void)state;
    run_histories("offload to a pool",
                  &(struct vllm_opts){FULL, .host_blocks = 30, .host_pool = true});
}

static void test_offload(void **state)
{
    (void)state;
    run_histories("offload", &(struct vllm_opts){FULL, .host_blocks = 30});
    run_histories("offload, placeholders",
                  &(struct vllm_opts){FULL, .host_blocks = 30, .host_placeholders = true});
    run_histories("offload, two owners",
                  &(struct vllm_opts){FULL, .host_blocks = 30, .host_owner = true});
}

/* Below the device's hit, every group has to have its blocks in the tiers below. */
static void test_offload_of_groups(void **state)
{
    static const struct {
        const char *name;
        struct vllm_opts opts;
    } cases[] = {
        {"offload, block drop", {FULL, .eagle_drop = true}},
        {"offload, window", {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}}},
        {"offload, windows, drop",
         {.n_groups = 3,
          .groups = {{VLLM_SLIDING, 14}, {VLLM_FULL, 0}, {VLLM_SLIDING, 6}},
          .eagle_drop = true}},
        {"offload, main drops",
         {.n_groups = 2,
          .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 10}},
          .eagle_drop = true,
          .eagle_groups = 1}},
        {"offload, state", {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}}}},
        {"offload, two full groups", {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}}},
        {"offload, chunks", {.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 12}}}},
        {"offload, window alone", {.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}}},
    };

    (void)state;
    for (size_t i = 0; i < 3 * KV_COUNT(cases); i++) {
        struct vllm_opts opts = cases[i / 3].opts;
        struct follower tally;

        opts.report_mode = KI_REPORTS_INCREMENTAL;
        opts.host_blocks = (uint16_t)(30 * opts.n_groups);
        opts.host_owner = i % 3 == 1;
        opts.host_pool = i % 3 == 2;
        tally = run_histories(cases[i / 3].name, &opts);
        if (!opts.host_pool)
            assert_int_equal(tally.unsure, 0);
    }
}

/* Limits of the index leave copies out; their removals end the doubts, without a clear. */
static size_t run_limited(const char *what, const struct vllm_opts *opts)
{
    static const struct kvi_opts limits = {
        .size = sizeof(limits), .max_copies = 4, .max_parked_holder = 4};
    uint64_t random = unit_seed();
    struct follower tally = {0};
    size_t ended = 0;

    for (size_t i = unit_rounds(40); i > 0; i--) {
        struct run run = {.random = &random, .prompts = {.random = &random}};
        uint64_t before = 0;

        follow_init(&run.f, VLLM_BLOCK);
        kvi_destroy(run.f.index);
        assert_int_equal(kvi_create(&limits, &run.f.index), 0);
        ki_applier_set_habits(
            &run.f.applier,
            &(struct ki_habits){.groups = vllm_told(opts), .report_mode = KI_REPORTS_INCREMENTAL});
        vllm_init(&run.vllm, opts);
        for (int k = 0; k < 200; k++) {
            struct vllm_request *r = any_request(&run);

            if (!r || unit_below(&random, 3) == 0)
                start(&run);
            else if (unit_below(&random, 2))
                generate(&run, r);
            else if (unit_below(&random, 2) && opts->host_blocks)
                vllm_offload_request(&run.vllm, r, &random);
            else
                vllm_finish(&run.vllm, r);
            publish(&run);
            ended += before && !run.f.applier.left_out;
            before = run.f.applier.left_out;
            compare(&run);
        }
        follow_tally(&tally, &run.f);
        follow_fini(&run.f);
        vllm_fini(&run.vllm);
    }
    follow_report(&tally, what);
    print_message("%zu times whole again\n", ended);
    assert_int_equal(tally.over, 0);
    assert_int_equal(tally.under, 0);
    return ended;
}

static void test_limits(void **state)
{
    size_t ended = run_limited("limits", &(struct vllm_opts){.n_blocks = 40, FULL});

    (void)state;
    ended += run_limited("limits, offload",
                         &(struct vllm_opts){.n_blocks = 40, FULL, .host_blocks = 30});
    ended += run_limited("limits, window",
                         &(struct vllm_opts){.n_blocks = 80,
                                             .n_groups = 2,
                                             .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}});
    if (unit_rounds(40) >=
        40) /* of a few histories there may be none; of all, once in 10^12 runs */
        assert_true(ended > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_attention),
        cmocka_unit_test(test_moved_images),
        cmocka_unit_test(test_block_drop),
        cmocka_unit_test(test_block_drop_of_groups),
        cmocka_unit_test(test_lookahead),
        cmocka_unit_test(test_full_reports),
        cmocka_unit_test(test_shares_of_reports),
        cmocka_unit_test(test_requests_that_skip_the_cache),
        cmocka_unit_test(test_full_reports_windows),
        cmocka_unit_test(test_full_reports_retention),
        cmocka_unit_test(test_full_reports_block_drop),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_small_window_blocks),
        cmocka_unit_test(test_small_window_blocks_drop),
        cmocka_unit_test(test_small_window_blocks_reports),
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_retention),
        cmocka_unit_test(test_second_full_group),
        cmocka_unit_test(test_restart_with_other_groups),
        cmocka_unit_test(test_groups_in_two_tiers),
        cmocka_unit_test(test_reports_in_two_tiers),
        cmocka_unit_test(test_offload),
        cmocka_unit_test(test_offload_to_a_pool),
        cmocka_unit_test(test_offload_of_groups),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
