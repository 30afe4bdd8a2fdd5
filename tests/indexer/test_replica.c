// SPDX-License-Identifier: Apache-2.0
/* Replicas that recover from a dump in the middle of an engine's stream (models/vllm.h) and then
 * follow the stream. After each batch their answers, and their dumps, equal the origin's, also when
 * the engine goes on while the peer's stream is held for the dump. */
#include <errno.h>
#include <inttypes.h>

#include "models/replica.h"
#include "models/vllm.h"

#define DURING 24u /* batches that a dump may take */

struct run {
    uint64_t *random;
    struct prompts prompts;
    struct vllm vllm;
    struct follower origin;
    struct follower *replica;     /* one that follows the stream, or NULL */
    struct follower *held;        /* the one whose blocks a dump copies, or NULL */
    struct follower *late;        /* the replica that recovers from that dump */
    struct kv_buf during[DURING]; /* batches that wait meanwhile */
    size_t n_during;
    size_t over, under, asked, dumps, waited;
};

static void apply(struct follower *f, const struct kv_buf *payload)
{
    assert_int_not_equal(ki_applier_apply(&f->applier, f->index, payload->data, payload->len),
                         KI_APPLIED_PART);
}

static void publish(struct run *run)
{
    struct kv_buf payload = vllm_take(&run->vllm);

    if (run->held != &run->origin)
        apply(&run->origin, &payload);
    if (run->replica && run->held != run->replica)
        apply(run->replica, &payload);
    if (run->held)
        run->during[run->n_during++] = payload;
    else
        kv_buf_fini(&payload);
}

/* Follow the stream with @replica from here on; NULL: with none. */
static void go_on_with(struct run *run, struct follower *replica)
{
    if (run->replica)
        follow_fini(run->replica);
    free(run->replica);
    run->replica = replica;
}

/* Tell what the registrations of the origin and of its replicas tell alike. */
static void tell(struct follower *f, const struct vllm_opts *opts)
{
    ki_applier_set_habits(&f->applier, &(struct ki_habits){.eagle_drop = opts->eagle_drop,
                                                           .groups = vllm_told(opts)});
}

static struct follower *new_replica(const struct run *run)
{
    struct follower *replica = calloc(1, sizeof(*replica));

    assert_non_null(replica);
    follow_init(replica, VLLM_BLOCK);
    tell(replica, &run->vllm.opts);
    return replica;
}

static void recover(struct run *run)
{
    go_on_with(run, new_replica(run));
    replica_read(run->replica, &run->origin);
    replica_load(run->replica, &run->origin);
    replica_expect_equal(&run->origin, run->replica);
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
        vllm_reset(v);
    }
    publish(run);
}

/* Ask the replica @f, and the origin for the truth. */
static bool ask(struct run *run, struct follower *f, const struct prompt *p, enum kv_tier tier,
                size_t *ret_truth, size_t *ret)
{
    *ret_truth = follow_ask(&run->origin, p, tier);
    *ret = follow_ask(f, p, tier);
    record_answer(prompt_check(p) + tier, *ret, *ret_truth, ki_applier_reasons(&f->applier));
    return *ret == *ret_truth;
}

static void compare(struct run *run)
{
    static const enum kv_tier tiers[] = {KV_TIER_DEVICE, KV_TIER_HOST};

    for (size_t i = 0; run->replica && i < 2 * KV_COUNT(tiers); i++) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);
        size_t truth, got;

        assert_true(ask(run, run->replica, &p, tiers[i % 2], &truth, &got));
    }
}

/* -- a dump that takes its time ---------------------------------------------------------------- */

/* The engine may go on at any moment of the dump. */
static void go_on(struct run *run)
{
    while (run->n_during < DURING && unit_below(run->random, 8) == 0)
        step(run);
}

static int late_run(void *arg, const struct kvi_dump_run *told)
{
    struct run *run = arg;
    struct kvi_stored stored = {0};

    assert_int_equal(kvi_store(run->late->index, told->holder, told->tier, told->parent,
                               told->blocks, told->n, &stored),
                     0);
    assert_false(stored.parked);
    go_on(run);
    return 0;
}

static int late_extra(void *arg, const struct kvi_extra *extra)
{
    struct run *run = arg;

    assert_int_equal(kvi_restore_extra(run->late->index, extra), 0);
    go_on(run);
    return 0;
}

/* Copy the origin, or its replica, at its last batch, while the engine goes on. */
static void dump_late(struct run *run)
{
    static const struct kv_holder holder = {7, 0};

    run->held = run->replica && unit_below(run->random, 2) ? run->replica : &run->origin;
    run->n_during = 0;
    replica_read(run->late, run->held);
    go_on(run);
    assert_int_equal(kvi_dump_holders(run->held->index, &holder, 1, late_run, late_extra, run), 0);
    run->late->applier.forms = run->held->applier.forms;
}

/* The batches that waited, for the peer and for its replica. */
static void catch_up(struct run *run)
{
    replica_expect_equal(run->held, run->late);
    for (size_t i = 0; i < run->n_during; i++) {
        apply(run->held, &run->during[i]);
        apply(run->late, &run->during[i]);
        kv_buf_fini(&run->during[i]);
    }
    run->waited += run->n_during;
    run->held = NULL;
}

static void recover_late(struct run *run)
{
    struct follower *late = run->late = new_replica(run);

    dump_late(run);
    catch_up(run);
    run->dumps++;
    replica_expect_equal(&run->origin, late);
    for (size_t i = 0; i < 12; i++) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);
        enum kv_tier tier = i % 2 ? KV_TIER_HOST : KV_TIER_DEVICE;
        size_t truth, got;

        run->asked++;
        ask(run, late, &p, tier, &truth, &got);
        run->over += got > truth;
        run->under += got < truth;
    }
    if (unit_below(run->random, 2)) {
        go_on_with(run, late);
        return;
    }
    follow_fini(late);
    free(late);
}

static void history(struct run *run, const struct vllm_opts *opts)
{
    vllm_init(&run->vllm, opts);
    follow_init(&run->origin, VLLM_BLOCK);
    tell(&run->origin, opts);
    for (int i = 0; i < 150; i++) {
        step(run);
        compare(run);
        if (unit_below(run->random, 25) == 0)
            recover(run);
        if (run->replica && i % 10 == 9)
            replica_expect_equal(&run->origin, run->replica);
        if (unit_below(run->random, 20) == 0)
            recover_late(run);
    }
    go_on_with(run, NULL);
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
    print_message("%-24s %zu asked after %zu late dumps, %zu batches waited, %zu over, %zu under\n",
                  what, run.asked, run.dumps, run.waited, run.over, run.under);
    assert_int_equal(run.over + run.under, 0);
    assert_true(run.waited > run.dumps);
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
    run_histories("a group in host memory",
                  &(struct vllm_opts){
                      .n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}, .lives_below = 1});
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
        "two windows alone",
        &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_SLIDING, 9}, {VLLM_SLIDING, 5}}});
    run_histories(
        "window alone, block drop",
        &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}, .eagle_drop = true});
    run_histories(
        "state and window",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}, {VLLM_SLIDING, 9}}});
    run_histories(
        "chunks, two full groups",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_CHUNKED, 12}, {VLLM_FULL, 0}}});
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
