// SPDX-License-Identifier: Apache-2.0
/* Replicas that recover from a dump in the middle of an engine's stream (models/vllm.h) and then
 * follow the stream. After each batch their answers, and their dumps, equal the origin's. */
#include <inttypes.h>

#include "models/replica.h"
#include "models/vllm.h"

#define RECENT 8u /* batches that a dump may take */

struct run {
    uint64_t *random;
    struct prompts prompts;
    struct vllm vllm;
    struct follower origin, replica;
    bool has_replica;
    struct kv_buf recent[RECENT]; /* since the reader's state was taken */
    size_t n_recent;
    struct follower *late; /* a replica whose dump takes as long as these batches */
    size_t over, under, asked;
};

static void apply(struct follower *f, const struct kv_buf *payload)
{
    assert_int_not_equal(ki_applier_apply(&f->applier, f->index, payload->data, payload->len),
                         KI_APPLIED_PART);
}

static void drop_late(struct run *run)
{
    while (run->n_recent)
        kv_buf_fini(&run->recent[--run->n_recent]);
    if (run->late)
        follow_fini(run->late);
    free(run->late);
    run->late = NULL;
}

static void publish(struct run *run)
{
    struct kv_buf payload = vllm_take(&run->vllm);

    apply(&run->origin, &payload);
    if (run->has_replica)
        apply(&run->replica, &payload);
    if (run->late && run->n_recent < RECENT) {
        run->recent[run->n_recent++] = payload;
        return;
    }
    kv_buf_fini(&payload);
}

static void recover(struct run *run)
{
    if (run->has_replica)
        follow_fini(&run->replica);
    follow_init(&run->replica, VLLM_BLOCK);
    run->replica.applier.habits.eagle_drop = run->vllm.opts.eagle_drop;
    replica_read(&run->replica, &run->origin);
    replica_load(&run->replica, &run->origin);
    run->has_replica = true;
    replica_expect_equal(&run->origin, &run->replica);
}

/* The stream's state is told now, the blocks some batches later. */
static void begin_late(struct run *run)
{
    drop_late(run);
    run->late = calloc(1, sizeof(*run->late));
    assert_non_null(run->late);
    follow_init(run->late, VLLM_BLOCK);
    run->late->applier.habits.eagle_drop = run->vllm.opts.eagle_drop;
    replica_read(run->late, &run->origin);
}

static void step(struct run *run)
{
    struct vllm *v = &run->vllm;
    struct vllm_request *r = &v->requests[unit_below(run->random, VLLM_MAX_REQUESTS)];
    uint64_t what = unit_below(run->random, 100);

    if (what < 35 || !r->used) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);

        if (vllm_start(v, &p, false))
            prompts_remember(&run->prompts, &p);
    } else if (what < 70) {
        vllm_generate(v, r, (uint32_t)unit_below(run->random, 3));
        prompts_remember(&run->prompts, &r->prompt);
    } else if (what < 82 && v->opts.host_blocks) {
        vllm_offload_request(v, r, run->random);
    } else if (what < 99 || unit_below(run->random, 3)) {
        vllm_finish(v, r);
    } else {
        vllm_reset(v, false);
    }
    publish(run);
}

static void compare(struct run *run)
{
    static const enum kv_tier tiers[] = {KV_TIER_DEVICE, KV_TIER_HOST};

    for (size_t i = 0; run->has_replica && i < 2 * KV_COUNT(tiers); i++) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);

        assert_int_equal(follow_ask(&run->origin, &p, tiers[i % 2]),
                         follow_ask(&run->replica, &p, tiers[i % 2]));
    }
}

/* Batches that the dump has in part are applied again: nothing is claimed that isn't there. */
static void end_late(struct run *run)
{
    replica_load(run->late, &run->origin);
    run->late->applier.overlaps = true;
    for (size_t i = 0; i < run->n_recent; i++)
        apply(run->late, &run->recent[i]);
    run->late->applier.overlaps = false;
    for (size_t i = 0; i < 12; i++) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);
        enum kv_tier tier = i % 2 ? KV_TIER_HOST : KV_TIER_DEVICE;
        size_t truth = follow_ask(&run->origin, &p, tier), got = follow_ask(run->late, &p, tier);

        run->asked++;
        run->over += got > truth;
        run->under += got < truth;
    }
    drop_late(run);
}

static void history(struct run *run, const struct vllm_opts *opts)
{
    vllm_init(&run->vllm, opts);
    follow_init(&run->origin, VLLM_BLOCK);
    run->origin.applier.habits.eagle_drop = opts->eagle_drop;
    for (int i = 0; i < 150; i++) {
        step(run);
        compare(run);
        if (unit_below(run->random, 25) == 0)
            recover(run);
        if (run->has_replica && i % 10 == 9)
            replica_expect_equal(&run->origin, &run->replica);
        if (run->late && run->n_recent == RECENT)
            end_late(run);
        else if (!run->late && unit_below(run->random, 20) == 0)
            begin_late(run);
    }
    drop_late(run);
    if (run->has_replica)
        follow_fini(&run->replica);
    run->has_replica = false;
    follow_fini(&run->origin);
    vllm_fini(&run->vllm);
}

static void run_histories(const char *what, const struct vllm_opts *opts)
{
    uint64_t random = unit_seed();
    struct run run = {.random = &random};

    for (size_t i = unit_rounds(20); i > 0; i--) {
        struct vllm_opts varied = *opts;

        run.prompts = (struct prompts){.random = &random, .namespaces = i % 2, .images = i % 2};
        varied.n_blocks = (uint16_t)(opts->n_groups * (24 + unit_below(&random, 30)));
        history(&run, &varied);
    }
    print_message("%-24s %zu asked after late dumps, %zu over, %zu under\n", what, run.asked,
                  run.over, run.under);
    assert_int_equal(run.over, 0);
    assert_true(run.under * 4 < run.asked);
}

#define FULL .n_groups = 1, .groups = {{VLLM_FULL, 0}}

static void test_copies_and_salts(void **state)
{
    (void)state;
    run_histories("full attention", &(struct vllm_opts){FULL});
    run_histories("lookahead", &(struct vllm_opts){FULL, .lookahead = 1});
    run_histories("block drop", &(struct vllm_opts){FULL, .eagle_drop = true});
}

static void test_owners(void **state)
{
    (void)state;
    run_histories("offload", &(struct vllm_opts){FULL, .host_blocks = 30});
    run_histories("two owners", &(struct vllm_opts){FULL, .host_blocks = 30, .host_owner = true});
    run_histories("two owners, by name",
                  &(struct vllm_opts){FULL, .host_blocks = 30, .host_owner = true,
                                      .host_placeholders = true});
}

static void test_windows(void **state)
{
    (void)state;
    run_histories("window", &(struct vllm_opts){.n_groups = 2,
                                                .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}});
    run_histories(
        "windows, block drop",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_SLIDING, 14}, {VLLM_FULL, 0}, {VLLM_SLIDING, 6}},
                            .eagle_drop = true});
    run_histories("window alone",
                  &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}});
    run_histories(
        "state and window",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}, {VLLM_SLIDING, 9}}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies_and_salts),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_windows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
