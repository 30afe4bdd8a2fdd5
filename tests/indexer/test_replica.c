// SPDX-License-Identifier: Apache-2.0
/* Replicas that recover from a dump in the middle of an engine's stream (models/vllm.h) and then
 * follow the stream. After each batch their answers, and their dumps, equal the origin's, also when
 * the engine goes on while the dump is written. */
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
    struct follower *replica; /* one that follows the stream, or NULL */
    bool replica_was_late;
    struct follower *late;        /* a replica whose dump is being written */
    struct kv_buf during[DURING]; /* batches since its beginning */
    size_t n_during;
    struct kv_buf ends; /* struct ki_end_copies, at its end */
    bool torn;
    size_t over, under, asked, dumps, n_torn;
};

static void apply(struct follower *f, const struct kv_buf *payload)
{
    assert_int_not_equal(ki_applier_apply(&f->applier, f->index, payload->data, payload->len),
                         KI_APPLIED_PART);
}

static void publish(struct run *run)
{
    struct kv_buf payload = vllm_take(&run->vllm);

    apply(&run->origin, &payload);
    if (run->replica)
        apply(run->replica, &payload);
    if (run->late)
        run->during[run->n_during++] = payload;
    else
        kv_buf_fini(&payload);
}

/* Follow the stream with @replica from here on; NULL: with none. */
static void go_on_with(struct run *run, struct follower *replica, bool was_late)
{
    if (run->replica)
        follow_fini(run->replica);
    free(run->replica);
    run->replica = replica;
    run->replica_was_late = was_late;
}

static struct follower *new_replica(const struct run *run)
{
    struct follower *replica = calloc(1, sizeof(*replica));

    assert_non_null(replica);
    follow_init(replica, VLLM_BLOCK);
    replica->applier.habits.eagle_drop = run->vllm.opts.eagle_drop;
    return replica;
}

static void recover(struct run *run)
{
    go_on_with(run, new_replica(run), false);
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
    run->torn |= stored.parked > 0;
    go_on(run);
    return 0;
}

/* Restore like dump_extras.c: facts about a window that the dump had passed before are left out. */
static int restore(struct run *run, const struct kvi_extra *extra)
{
    int rc = kvi_restore_extra(run->late->index, extra);

    return rc == -EINVAL ? 0 : rc;
}

static int late_extra(void *arg, const struct kvi_extra *extra)
{
    go_on(arg);
    return restore(arg, extra);
}

static int end_extra(void *arg, const struct kvi_extra *extra)
{
    struct run *run = arg;

    if (extra->kind == KVI_EXTRA_COPIES)
        ki_end_copies_add(&run->ends, extra);
    return restore(run, extra);
}

static uint64_t turns_of(const struct follower *from)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    (void)kvi_get_holder(from->index, (struct kv_holder){7, 0}, &info);
    return info.turns;
}

/* Write a dump of the origin, or of its replica, while the engine goes on. */
static void dump_late(struct run *run)
{
    struct follower *peer =
        run->replica && unit_below(run->random, 2) ? run->replica : &run->origin;
    struct kvi_index *from = peer->index;
    uint64_t turns = turns_of(peer);

    run->torn = false;
    kvi_keep_copies(from, true);
    replica_read(run->late, peer);
    go_on(run);
    assert_int_equal(kvi_dump_parked(from, late_extra, run), 0);
    assert_int_equal(kvi_dump(from, late_run, run), 0);
    assert_int_equal(kvi_dump_extras(from, late_extra, run), 0);
    assert_int_equal(kvi_dump_copies(from, (struct kv_holder){7, 0}, end_extra, run), 0);
    kvi_keep_copies(from, false);
    run->torn |= turns != turns_of(peer);
    run->late->applier.forms = peer->applier.forms;
}

/* Apply again what the dump has in part. */
static void catch_up(struct run *run)
{
    struct ki_applier *a = &run->late->applier;

    a->overlaps = true;
    ki_overlap_set(&a->overlap, (struct ki_end_copies *)(void *)run->ends.data,
                   run->ends.len / sizeof(struct ki_end_copies));
    run->ends = (struct kv_buf)KV_BUF_INIT;
    for (size_t i = 0; i < run->n_during; i++) {
        apply(run->late, &run->during[i]);
        kv_buf_fini(&run->during[i]);
    }
    ki_applier_end_overlap(a, run->late->index);
}

static void recover_late(struct run *run)
{
    struct follower *late = new_replica(run);

    run->n_during = 0;
    run->late = late;
    dump_late(run);
    catch_up(run);
    run->late = NULL;
    run->dumps++;
    run->n_torn += run->torn;
    if (!run->torn)
        replica_expect_the_same(&run->origin, late, true);
    for (size_t i = 0; i < 12 && !run->torn; i++) {
        struct prompt p = prompts_next(&run->prompts, VLLM_BLOCK);
        enum kv_tier tier = i % 2 ? KV_TIER_HOST : KV_TIER_DEVICE;
        size_t truth, got;

        run->asked++;
        ask(run, late, &p, tier, &truth, &got);
        run->over += got > truth;
        run->under += got < truth;
    }
    if (!run->torn && unit_below(run->random, 2)) {
        go_on_with(run, late, true);
        return;
    }
    follow_fini(late);
    free(late);
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
        if (run->replica && i % 10 == 9)
            replica_expect_the_same(&run->origin, run->replica, run->replica_was_late);
        if (unit_below(run->random, 20) == 0)
            recover_late(run);
    }
    go_on_with(run, NULL, false);
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
    print_message("%-24s %zu asked after %zu late dumps, %zu over, %zu under; %zu torn\n", what,
                  run.asked, run.dumps, run.over, run.under, run.n_torn);
    assert_int_equal(run.over + run.under, 0);
    assert_true(run.n_torn * 20 < run.dumps);
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
        "two windows alone",
        &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_SLIDING, 9}, {VLLM_SLIDING, 5}}});
    run_histories(
        "window alone, block drop",
        &(struct vllm_opts){.n_groups = 1, .groups = {{VLLM_SLIDING, 9}}, .eagle_drop = true});
    run_histories(
        "state and window",
        &(struct vllm_opts){.n_groups = 3,
                            .groups = {{VLLM_FULL, 0}, {VLLM_MAMBA, 0}, {VLLM_SLIDING, 9}}});
}

static void store(struct run *run, const struct prompt *p, size_t from, size_t to)
{
    uint64_t hashes[VLLM_MAX_CHAIN];
    struct vllm_range range = {.from = from, .to = to, .n = to - from};

    memset(range.picked, true, sizeof(range.picked));
    vllm_hashes(&run->vllm, p, hashes);
    vllm_stored(&run->vllm, p, hashes, 0, &range);
    publish(run);
}

static void take(struct run *run, const struct prompt *p, size_t i)
{
    uint64_t hashes[VLLM_MAX_CHAIN];

    vllm_hashes(&run->vllm, p, hashes);
    vllm_removed(&run->vllm, hashes[i], 0, "GPU", NULL);
    publish(run);
}

/*
 * Of a window alone, the only events tell where a block is. In the overlap the first removal of a
 * block counts as the last. One stored below it afterwards finds its place all the same.
 */
static void test_store_below_a_removed_block(void **state)
{
    const struct vllm_opts opts = {.n_groups = 1, .groups = {{VLLM_SLIDING, 5}}};
    struct prompt p = {.n = 3 * VLLM_BLOCK};
    struct run run = {0};
    struct follower *late = calloc(1, sizeof(*late));

    (void)state;
    assert_non_null(late);
    vllm_init(&run.vllm, &opts);
    follow_init(&run.origin, VLLM_BLOCK);
    follow_init(late, VLLM_BLOCK);
    store(&run, &p, 0, 2);
    kvi_keep_copies(run.origin.index, true);
    replica_read(late, &run.origin);
    replica_load(late, &run.origin);
    run.late = late;
    store(&run, &p, 1, 2); /* another copy */
    take(&run, &p, 1);
    store(&run, &p, 2, 3);
    take(&run, &p, 1);
    assert_int_equal(kvi_dump_copies(run.origin.index, (struct kv_holder){7, 0}, end_extra, &run),
                     0);
    kvi_keep_copies(run.origin.index, false);
    catch_up(&run);
    assert_int_equal(follow_ask(&run.origin, &p, KV_TIER_DEVICE), 3);
    assert_int_equal(follow_ask(late, &p, KV_TIER_DEVICE), 3);
    replica_expect_equal(&run.origin, late);
    follow_fini(late);
    free(late);
    follow_fini(&run.origin);
    vllm_fini(&run.vllm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies_and_salts),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_store_below_a_removed_block),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
