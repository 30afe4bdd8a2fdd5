// SPDX-License-Identifier: Apache-2.0
/* Blocks whose removal was lost, judged by ki_stream_judge. An engine's cache with
 * least-recently-used eviction loses batches; the index gets the remaining ones; the engine's
 * contents are the truth. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/streams.h"

static uint64_t random_state;

static uint64_t draw(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

#define MAX_ID 400000
#define CAPACITY 3200
#define CHAIN 16

/* Block i's parent is i - 1, but for each chain's first. Ids rise; the oldest are evicted, ends first. */
struct world {
    struct kh_stream s;
    bool held[MAX_ID]; /* by the index */
    uint64_t n_held;
    uint64_t next;              /* the engine's next block */
    uint64_t chains[CAPACITY];  /* first block of each chain it has, in order of age */
    uint64_t lengths[CAPACITY]; /* blocks left of each */
    size_t n_chains;
    uint64_t n_blocks; /* that it has */
    uint64_t sequence, now, most_held, most_phantoms;
    bool silent; /* lost batches take no number: the engine loses events before it numbers them */
    struct ki_evidence e;
};

static void index_store(struct world *w, uint64_t first, uint64_t n, bool applied)
{
    if (!applied)
        return;
    for (uint64_t i = first; i < first + n; i++) {
        w->n_held += !w->held[i];
        w->held[i] = true;
    }
}

static void index_remove(struct world *w, uint64_t id, bool applied)
{
    if (!applied)
        return;
    w->e.unknown += !w->held[id];
    w->e.removed += w->held[id];
    w->n_held -= w->held[id];
    w->held[id] = false;
}

static void index_purge(struct world *w)
{
    memset(w->held, 0, sizeof(w->held));
    w->n_held = 0;
}

/* A batch stores half a chain or a whole one, and removes what must make room. */
static void engine_batch(struct world *w, bool applied)
{
    uint64_t n = w->next % CHAIN ? CHAIN - w->next % CHAIN : draw(2) ? CHAIN : CHAIN / 2;

    while (w->n_blocks + n > CAPACITY) {
        uint64_t last = w->chains[0] + --w->lengths[0];

        index_remove(w, last, applied);
        w->n_blocks--;
        if (w->lengths[0] == 0) {
            memmove(w->chains, w->chains + 1, --w->n_chains * sizeof(*w->chains));
            memmove(w->lengths, w->lengths + 1, w->n_chains * sizeof(*w->lengths));
        }
    }
    if (w->next % CHAIN == 0) {
        w->chains[w->n_chains] = w->next;
        w->lengths[w->n_chains++] = 0;
    }
    w->lengths[w->n_chains - 1] += n;
    index_store(w, w->next, n, applied);
    w->next += n;
    w->n_blocks += n;
}

static uint64_t phantoms(const struct world *w)
{
    uint64_t real = 0;

    for (size_t i = 0; i < w->n_chains; i++)
        for (uint64_t k = 0; k < w->lengths[i]; k++)
            real += w->held[w->chains[i] + k];
    return w->n_held - real;
}

static void world_batch(struct world *w, bool lost)
{
    struct ki_batch_id id = batch(0, w->sequence);

    w->sequence += !lost || !w->silent;
    w->now += SECOND / 100;
    memset(&w->e, 0, sizeof(w->e));
    if (lost) {
        engine_batch(w, false);
        return;
    }
    assert_true(ki_stream_live(&w->s, &id, false, w->now) & KI_STEP_APPLY);
    engine_batch(w, true);
    w->e.held = w->n_held;
    w->e.capacity = w->s.opts.max_attempts == 1 ? CAPACITY : 0;
    if (ki_stream_judge(&w->s, &w->e, w->now) & KI_STEP_PURGE)
        index_purge(w);
    w->most_held = w->n_held > w->most_held ? w->n_held : w->most_held;
    if (w->sequence % 50 == 0) {
        uint64_t n = phantoms(w);

        w->most_phantoms = n > w->most_phantoms ? n : w->most_phantoms;
        if (!w->silent && (n || w->n_held != w->n_blocks))
            assert_true(is_partial(&w->s));
    }
}

static struct world *run(uint64_t loss_permille, uint64_t lost_at_first, bool known_capacity)
{
    static struct world w;
    const char *seed = getenv("KV_TEST_SEED");

    random_state = seed ? strtoull(seed, NULL, 10) : 20261122;
    memset(&w, 0, sizeof(w));
    ki_stream_init(&w.s, &without_replay);
    w.s.opts.max_attempts =
        known_capacity ? 1 : 3; /* a mark for world_batch: nobody is asked here */
    for (uint64_t i = 0; w.next + 2 * CHAIN < MAX_ID; i++)
        world_batch(&w, i < lost_at_first || (i && draw(1000) < loss_permille));
    print_message("seed %s, %" PRIu64 " of 1000 lost: at most %" PRIu64 " held of %d, %" PRIu64
                  " not real, %" PRIu64 " times forgotten\n",
                  seed ? seed : "20261122", loss_permille, w.most_held, CAPACITY, w.most_phantoms,
                  w.s.stats.resyncs);
    return &w;
}

static void nothing_is_forgotten_without_losses(void **state)
{
    struct world *w = run(0, 0, false);

    (void)state;
    assert_int_equal(w->s.stats.resyncs, 0);
    assert_int_equal(w->n_held, w->n_blocks);
    assert_false(is_partial(&w->s));
    /* Joined late: blocks from before are removed that we never had. None of ours is a phantom. */
    w = run(0, 150, false);
    assert_int_equal(w->s.stats.resyncs, 0);
    assert_int_equal(w->most_phantoms, 0);
}

static void losses_do_not_make_the_index_grow(void **state)
{
    (void)state;
    for (int known = 0; known < 2; known++)
        for (uint64_t loss = 1; loss <= 100; loss *= 10) {
            struct world *w = run(loss, 0, known);

            assert_in_range(w->most_held, 1, CAPACITY + CAPACITY / 3);
            assert_in_range(w->most_phantoms, 0, CAPACITY / 2);
            assert_true(w->s.stats.resyncs > 0 || loss == 1);
            assert_true(is_partial(&w->s));
        }
}

/* Batches that were lost without a gap in the numbers: the engine's removals contradict the view. */
static void a_view_that_lost_nothing_is_contradicted(void **state)
{
    static struct world w;

    (void)state;
    for (int healing = 0; healing < 2; healing++) {
        memset(&w, 0, sizeof(w));
        random_state = 7;
        ki_stream_init(&w.s, healing ? &with_replay : &without_replay);
        w.silent = true;
        for (int i = 0; i < 2000 && !w.s.stats.contradictions; i++)
            world_batch(&w, i >= 400 && i < 500);
        assert_int_equal(w.s.stats.contradictions, 1);
        assert_int_equal(w.s.stats.resyncs, 1);
        assert_true(is_partial(&w.s));
        assert_int_equal(w.n_held, 0);
        assert_int_equal(w.s.heal_at_ns > 0, healing);
        for (int i = 0; i < 2000 && !healing; i++)
            world_batch(&w, false);
        assert_int_equal(w.s.stats.resyncs, 1); /* removals of what was forgotten are excused */
        assert_int_equal(phantoms(&w), 0);
        ki_stream_mark_whole(&w.s);
        assert_false(is_partial(&w.s));
    }
}

/* A removal now and then that nothing explains is an engine's whim; so are all of a late follower. */
static void few_contradictions_do_not_count(void **state)
{
    struct ki_evidence few = {.held = 3000, .unknown = 1, .removed = 99};
    struct ki_evidence many = {.held = 3000, .unknown = 99, .removed = 1};
    struct ki_batch_id id = batch(0, 0);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    ki_stream_live(&s, &id, false, SECOND);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(ki_stream_judge(&s, &few, SECOND), 0);
    assert_false(is_partial(&s));
    for (int i = 0; i < 3; i++)
        assert_int_equal(ki_stream_judge(&s, &many, SECOND), 0);
    assert_int_equal(ki_stream_judge(&s, &many, SECOND), KI_STEP_PURGE);
    ki_stream_init(&s, &without_replay);
    id = batch(0, 7);
    ki_stream_live(&s, &id, false, SECOND);
    for (int i = 0; i < 100; i++)
        assert_int_equal(ki_stream_judge(&s, &many, SECOND), 0);
}

/* One loss and no more evidence: its phantoms go with time. */
static void phantoms_grow_old(void **state)
{
    struct ki_evidence e = {.held = 100};
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    s.opts.resync_ns = 10 * SECOND;
    for (uint64_t i = 0; i < 40; i += i == 3 ? 2 : 1) {
        struct ki_batch_id id = batch(0, i);
        unsigned steps;

        assert_true(ki_stream_live(&s, &id, false, i * SECOND) & KI_STEP_APPLY);
        steps = ki_stream_judge(&s, &e, i * SECOND);
        assert_int_equal(steps, i == 15 ? KI_STEP_PURGE : 0);
    }
    assert_int_equal(s.stats.resyncs, 1);
    assert_true(is_partial(&s));
    /* Until the engine clears its cache, or is another process. */
    ki_stream_mark_whole(&s);
    assert_false(is_partial(&s));
}

static void a_full_index_gives_up_lossy_streams(void **state)
{
    struct ki_evidence e = {.held = 100, .full = true};
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i < 3; i++) {
        struct ki_batch_id id = batch(0, i);

        ki_stream_live(&s, &id, false, SECOND);
        assert_int_equal(ki_stream_judge(&s, &e, SECOND), 0); /* its blocks are real */
    }
    ki_stream_lose_contents(&s, SECOND);
    assert_int_equal(ki_stream_judge(&s, &e, SECOND), KI_STEP_PURGE);
    assert_int_equal(ki_stream_judge(&s, &e, SECOND), 0);
}

/* The driver forgot the blocks: all are asked for at once, and their removals contradict nothing. */
static void blocks_are_learnt_anew(void **state)
{
    struct ki_evidence e = {.held = 10, .unknown = 300};
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    start_connected(&s);
    replayed(&s, 0, 0);
    ki_stream_replay_end(&s, SECOND);
    assert_false(is_partial(&s));
    ki_stream_learn_anew(&s, 300, SECOND);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_judge(&s, &e, SECOND), 0);
    assert_int_equal(s.excused + s.unexplained, 0);
    assert_int_equal(ki_stream_deadline(&s), SECOND);
    assert_int_equal(ki_stream_tick(&s, SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    ki_stream_replay_end(&s, SECOND);
    assert_false(is_partial(&s));

    ki_stream_init(&s, &without_replay);
    start_connected(&s);
    live(&s, 0, 0);
    ki_stream_learn_anew(&s, 1, SECOND);
    live(&s, 0, 1);
    assert_true(is_partial(&s));
    ki_stream_mark_whole(&s); /* a clear */
    assert_false(is_partial(&s));
}

/* A stream that has brought no batch has no blocks to lose, whether its publisher is silent or hasn't
 * answered yet. */
static void nothing_is_learnt_anew(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    start_connected(&s);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    ki_stream_learn_anew(&s, 0, SECOND);
    assert_false(is_partial(&s));

    ki_stream_init(&s, &with_replay);
    ki_stream_learn_anew(&s, 0, SECOND);
    start_connected(&s);
    for (uint64_t i = 0; i < 3; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    ki_stream_replay_end(&s, SECOND);
    assert_false(is_partial(&s));

    ki_stream_init(&s, &without_replay);
    ki_stream_learn_anew(&s, 0, SECOND);
    live(&s, 0, 0);
    assert_false(is_partial(&s));
}

/* A view that was partial before the first batch: batches from the beginning make it whole. */
static void a_beginning_makes_whole(void **state)
{
    struct kh_stream s;

    (void)state;
    for (int answer = 0; answer < 3; answer++) {
        ki_stream_init(&s, &with_replay);
        s.reasons |= KI_BECAUSE(UNANSWERED); /* as after too many restarts within one replay */
        start_connected(&s);
        if (answer == 1)
            replayed(&s, 0, 0);
        if (answer == 2)
            live(&s, 0, 0);
        ki_stream_replay_end(&s, SECOND);
        assert_false(is_partial(&s));
    }
    /* A peer's state without a position goes when a whole view comes. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed_torn(&s);
    start_connected(&s);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    ki_stream_replay_end(&s, SECOND);
    assert_false(is_partial(&s));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_forgotten_without_losses),
        cmocka_unit_test(losses_do_not_make_the_index_grow),
        cmocka_unit_test(a_view_that_lost_nothing_is_contradicted),
        cmocka_unit_test(few_contradictions_do_not_count),
        cmocka_unit_test(phantoms_grow_old),
        cmocka_unit_test(a_full_index_gives_up_lossy_streams),
        cmocka_unit_test(blocks_are_learnt_anew),
        cmocka_unit_test(nothing_is_learnt_anew),
        cmocka_unit_test(a_beginning_makes_whole),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
