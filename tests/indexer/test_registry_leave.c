// SPDX-License-Identifier: Apache-2.0
/* One of an instance's streams leaves, beside others that bring the same ranks, and beside dumps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/registry/tables.h"
#include "indexer/replica/dump_copy.h"

#define RACES 400

static struct ki_registry *open_registry(uint64_t instances, uint32_t ranks)
{
    struct ki_registry_opts opts = {.start_held = true, .threads = 1};
    struct kv_error error;
    struct ki_registry *r;

    assert_int_equal(ki_registry_create(&opts, &r), 0);
    for (uint64_t i = 1; i <= instances; i++)
        for (uint32_t k = 0; k < ranks; k++) {
            struct ki_registration reg = {.instance = i,
                                          .rank = k,
                                          .block_size = 4,
                                          .endpoint = "ipc:///nobody/listens",
                                          .model = "m",
                                          .tenant = "default"};

            assert_int_equal(ki_registry_register(r, &reg, &error), 0);
        }
    return r;
}

/* The stream of @stream brings a block of @rank, as a batch does that names that rank. */
static void bring(struct ki_registry *r, uint32_t stream, uint32_t rank, uint64_t hash)
{
    struct ki_listener *l = ki_listener_find(r, 1, stream);
    struct ki_mark mark = {.holder = {1, rank}, .has_position = true, .stream_rank = rank};
    struct kv_block block = {hash, hash};

    ki_listener_adopt_rank(l, &mark);
    assert_true(kvi_store(l->model->index, mark.holder, KV_TIER_DEVICE, NULL, &block, 1, NULL) >=
                0);
}

/* The stream has brought a batch. */
static void begin(struct ki_registry *r, uint64_t instance, uint32_t stream)
{
    struct ki_listener *l = ki_listener_find(r, instance, stream);

    pthread_mutex_lock(&l->lock);
    l->stream.base = KI_BASE_OWN;
    pthread_mutex_unlock(&l->lock);
}

static bool is_partial(struct ki_registry *r, uint32_t stream)
{
    struct ki_listener *l = ki_listener_find(r, 1, stream);
    bool partial;

    pthread_mutex_lock(&l->lock);
    partial = ki_listener_reasons(l);
    pthread_mutex_unlock(&l->lock);
    return partial;
}

static uint64_t blocks_of(struct ki_registry *r, uint32_t rank)
{
    struct ki_model *model = ki_registry_model(r, "m", "default");
    uint64_t n = kvi_holder_blocks(model->index, (struct kv_holder){1, rank});

    ki_model_release(model);
    return n;
}

/*
 * Rank 5 is streams 0's and 1's, rank 6 stream 0's alone; stream 0 has brought a block of rank 1,
 * which has a stream of its own. When 0 leaves, no removals of its blocks will come any more.
 */
static void shared_ranks_are_learnt_anew(void **state)
{
    struct ki_registry *r = open_registry(1, 3);
    struct kv_error error;

    (void)state;
    for (uint32_t k = 0; k < 3; k++) {
        bring(r, k, k, 10 + k);
        begin(r, 1, k);
        assert_false(is_partial(r, k));
    }
    bring(r, 0, 5, 20);
    bring(r, 1, 5, 21);
    bring(r, 0, 6, 22);
    bring(r, 0, 1, 23);
    assert_int_equal(ki_registry_unregister(r, 1, "m", NULL, &(uint32_t){0}, &error), 0);
    assert_int_equal(blocks_of(r, 0), 0);
    assert_int_equal(blocks_of(r, 1), 0);
    assert_int_equal(blocks_of(r, 2), 1);
    assert_int_equal(blocks_of(r, 5), 0);
    assert_int_equal(blocks_of(r, 6), 0);
    assert_true(is_partial(r, 1));
    assert_false(is_partial(r, 2));
    ki_registry_destroy(r);
}

/* Streams 0 and 1 share rank 5, streams 1 and 2 rank 6. When 0 leaves, rank 5 alone is learnt anew. */
static void ranks_that_did_not_leave_stay(void **state)
{
    struct ki_registry *r = open_registry(1, 3);
    struct ki_listener *l = ki_listener_find(r, 1, 1);
    struct kv_error error;

    (void)state;
    for (uint32_t k = 0; k < 3; k++) {
        bring(r, k, k, 10 + k);
        begin(r, 1, k);
    }
    bring(r, 0, 5, 20);
    bring(r, 1, 5, 21);
    bring(r, 1, 6, 22);
    bring(r, 2, 6, 23);
    assert_int_equal(ki_registry_unregister(r, 1, "m", NULL, &(uint32_t){0}, &error), 0);
    assert_int_equal(blocks_of(r, 5), 0);
    assert_int_equal(blocks_of(r, 1), 1);
    assert_int_equal(blocks_of(r, 6), 2);
    assert_true(is_partial(r, 1));
    assert_false(is_partial(r, 2));
    assert_int_equal(l->stream.excused, 2); /* removals of rank 5's blocks may come */
    ki_registry_destroy(r);
}

/*
 * Streams 0 and 1 share rank 5. Stream 0's blocks leave, by a purge or a clear: stream 1 has lost
 * blocks, too. Stream 1 may be another registration of the same endpoint, which gets the same events.
 */
static void losses_leave_siblings_partial(void **state)
{
    static const struct {
        struct ki_loss loss;
        bool same_endpoint, partial;
    } cases[] = {
        {{.of = KI_RANKS_MANY, .blocks = 3}, false, true},
        {{.of = KI_RANKS_MANY, .blocks = 3}, true, false},
        {{.of = KI_RANKS_MANY, .own = true, .blocks = 3}, true, true},
        {{.of = KI_RANKS_ONE, .rank = 5, .blocks = 3}, false, true},
        {{.of = KI_RANKS_ONE, .rank = 0, .blocks = 3}, false, false},
        {{.of = KI_RANKS_ONE, .rank = 5, .blocks = 3}, true, false},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct ki_registry *r = open_registry(1, 3);
        struct ki_listener *sibling = ki_listener_find(r, 1, 1);

        for (uint32_t k = 0; k < 3; k++) {
            bring(r, k, k, 10 + k);
            begin(r, 1, k);
        }
        bring(r, 0, 5, 20);
        bring(r, 1, 5, 21);
        if (!cases[i].same_endpoint)
            *strchr(sibling->endpoint, 'n') = 'm';
        r->env.lost(r->env.lost_arg, ki_listener_find(r, 1, 0), &cases[i].loss);
        assert_false(is_partial(r, 0));
        assert_int_equal(is_partial(r, 1), cases[i].partial);
        assert_false(is_partial(r, 2));
        ki_registry_destroy(r);
    }
}

/* Stream 1 is registered for rank 1, and all its events name rank 6: a loss of rank 1 isn't its. */
static void a_rank_that_no_event_names(void **state)
{
    const struct ki_loss loss = {.of = KI_RANKS_ONE, .rank = 1, .blocks = 1};
    struct ki_registry *r = open_registry(1, 2);

    (void)state;
    bring(r, 1, 6, 10);
    begin(r, 1, 1);
    *strchr(ki_listener_find(r, 1, 1)->endpoint, 'n') = 'm';
    r->env.lost(r->env.lost_arg, ki_listener_find(r, 1, 0), &loss);
    assert_false(is_partial(r, 1));
    ki_registry_destroy(r);
}

/* Stream 0 once named rank 1, whose own stream has been silent. */
static void a_silent_stream_stays_whole(void **state)
{
    struct ki_registry *r = open_registry(1, 2);
    struct ki_batch_id first = {.digest = 1, .timestamp = 1000};
    struct ki_listener *l = ki_listener_find(r, 1, 1);
    struct kv_error error;

    (void)state;
    bring(r, 0, 1, 10);
    begin(r, 1, 0);
    assert_int_equal(ki_registry_unregister(r, 1, "m", NULL, &(uint32_t){0}, &error), 0);
    pthread_mutex_lock(&l->lock);
    assert_int_equal(ki_stream_live(&l->stream, &first, true, 1), KI_STEP_APPLY);
    pthread_mutex_unlock(&l->lock);
    assert_false(is_partial(r, 1));
    ki_registry_destroy(r);
}

/*
 * A peer's dump had rank 5 from a stream that isn't registered here. Stream 1 brings it now: when
 * the dump's blocks have been unfollowed for too long, it is learnt anew.
 */
static void unfollowed_blocks_of_a_followed_rank(void **state)
{
    struct ki_mark mark = {.holder = {1, 5}, .has_position = true, .stream_rank = 7};
    struct ki_registry *r = open_registry(1, 3);

    (void)state;
    for (uint32_t k = 0; k < 3; k++)
        begin(r, 1, k);
    assert_true(ki_positions_note(&r->positions, &mark, true));
    bring(r, 1, 5, 20);
    bring(r, 2, 6, 21);
    assert_int_equal(ki_registry_forget_unfollowed(r, 0), 1);
    assert_int_equal(blocks_of(r, 5), 0);
    assert_int_equal(blocks_of(r, 6), 1);
    assert_false(is_partial(r, 0));
    assert_true(is_partial(r, 1));
    assert_false(is_partial(r, 2));
    ki_registry_destroy(r);
}

struct dumper {
    struct ki_registry *r;
    _Atomic int stop;
};

static int pass_over(void *arg, const struct ki_copied *c)
{
    (void)arg;
    (void)c;
    return 0;
}

static void *dump(void *arg)
{
    struct dumper *d = arg;

    while (!d->stop) {
        struct ki_model *model = ki_registry_model(d->r, "m", "default");

        if (model)
            assert_int_equal(ki_dump_copy(d->r, model, pass_over, NULL), 0);
        ki_model_release(model);
    }
    return NULL;
}

/* For the thread sanitizer: a dump reads the ranks of a stream that is leaving. */
static void ranks_leave_beside_dumps(void **state)
{
    struct dumper d = {.r = open_registry(RACES, 2)};
    struct kv_error error;
    pthread_t thread;

    (void)state;
    for (uint64_t i = 1; i <= RACES; i++) {
        struct ki_listener *l = ki_listener_find(d.r, i, 0);

        begin(d.r, i, 0);
        for (uint32_t k = 2; k < 9; k++)
            ki_listener_adopt_rank(l, &(struct ki_mark){.holder = {i, k}});
    }
    assert_int_equal(pthread_create(&thread, NULL, dump, &d), 0);
    for (uint64_t i = 1; i <= RACES; i++)
        assert_int_equal(ki_registry_unregister(d.r, i, "m", NULL, &(uint32_t){0}, &error), 0);
    d.stop = 1;
    pthread_join(thread, NULL);
    ki_registry_destroy(d.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_ranks_are_learnt_anew),
        cmocka_unit_test(ranks_that_did_not_leave_stay),
        cmocka_unit_test(losses_leave_siblings_partial),
        cmocka_unit_test(a_rank_that_no_event_names),
        cmocka_unit_test(a_silent_stream_stays_whole),
        cmocka_unit_test(unfollowed_blocks_of_a_followed_rank),
        cmocka_unit_test(ranks_leave_beside_dumps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
