// SPDX-License-Identifier: Apache-2.0
/* The stream rules: scripted cases for each rule of docs/kv-indexer-streams.md. At random:
 * test_stream_worlds.c. Streams that begin with batch 1: test_stream_first.c; that go on from a peer's
 * position: test_stream_recovered.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdbool.h>

#include "indexer/streams.h"

static unsigned live_new_connection(struct kh_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_live(s, &id, true, SECOND);
}

/* A stream that has got as far as @last of process 0. */
static void init_at(struct kh_stream *s, const struct ki_stream_opts *opts, uint64_t last)
{
    ki_stream_init(s, opts);
    for (uint64_t i = 0; i <= last; i++)
        assert_int_equal(live(s, 0, i), KI_STEP_APPLY);
}

static void in_order_is_applied(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 10);
    assert_int_equal(s.position, 10);
    assert_false(is_lossy(&s));
    assert_int_equal(s.stats.gaps + s.stats.missed + s.stats.restarts, 0);
}

/* A replay that begins with 1 has lost the batch 0 that comes live, or that the publisher began with
 * before. */
static void a_lost_zero_is_no_numbering_from_one(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 0), KI_STEP_DROP);
    assert_true(is_partial(&s));
    assert_int_equal(s.stats.missed, 1);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    /* A view from 1 on is no better one. */
    assert_int_equal(ki_stream_tick(&s, 40 * SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_DROP | KI_STEP_RESUME);
    assert_true(is_partial(&s));

    init_at(&s, &with_replay, 100);
    assert_int_equal(live(&s, 1, 3),
                     KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 1, 1), KI_STEP_PURGE | KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 1, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_true(is_partial(&s));

    init_at(&s, &without_replay, 100);
    assert_int_equal(live(&s, 1, 1), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_true(is_partial(&s));
    assert_int_equal(s.stats.missed, 1);
}

static void gap_without_replay_is_counted(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &without_replay, 2);
    assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
    assert_int_equal(s.stats.gaps, 1);
    assert_int_equal(s.stats.missed, 3);
    assert_true(is_lossy(&s));
}

static void gap_is_replayed(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 3);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 4), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(replayed(&s, 0, 5), KI_STEP_DROP); /* late: the replay is over */
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 5), KI_STEP_DROP);
    assert_int_equal(s.stats.gaps, 1);
    assert_int_equal(s.stats.missed, 0);
    assert_int_equal(s.stats.replayed, 2);
    assert_int_equal(s.stats.duplicates, 1);
    assert_false(is_lossy(&s));
}

static void initial_gap_is_replayed_from_the_beginning(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 2), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_false(is_lossy(&s));

    ki_stream_init(&s, &without_replay);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_true(is_lossy(&s));
    assert_int_equal(s.stats.missed, 2);
}

static void overrun_forgets_and_goes_on(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 2);
    assert_int_equal(live(&s, 0, 20), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 18), KI_STEP_PURGE | KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 19), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 20), KI_STEP_APPLY);
    assert_true(is_lossy(&s));
    assert_int_equal(s.stats.overruns, 1);
    assert_int_equal(s.stats.missed, 15);
}

static void dead_replay_service_is_given_up(void **state)
{
    struct kh_stream s;
    uint64_t now = SECOND;
    unsigned steps = 0;
    int requests = 1;

    (void)state;
    init_at(&s, &with_replay, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    while (!(steps & KI_STEP_RESUME)) {
        now = ki_stream_deadline(&s);
        assert_int_not_equal(now, 0);
        steps = ki_stream_tick(&s, now);
        requests += (steps & KI_STEP_REQUEST) != 0;
        assert_true(requests <= 3);
    }
    assert_int_equal(requests, 3);
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_int_equal(s.stats.gaps, 1);
    assert_int_equal(s.stats.missed, 2);
    assert_int_equal(s.stats.failed_replays, 1);
    assert_true(is_lossy(&s));
    /* While it cools down, a gap doesn't hold live batches up. */
    assert_int_equal(live(&s, 0, 9), KI_STEP_APPLY);
    /* Afterwards it tries to become whole again, without losing what it has before it can. */
    now = ki_stream_deadline(&s);
    assert_int_equal(ki_stream_tick(&s, now), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    for (uint64_t i = 1; i < 9; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 9), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, now), KI_STEP_RESUME);
    assert_false(is_lossy(&s));
    assert_int_equal(live(&s, 0, 10), KI_STEP_APPLY);
}

static void healing_keeps_what_it_cannot_better(void **state)
{
    struct kh_stream s;
    uint64_t now;

    (void)state;
    init_at(&s, &with_replay, 2);
    live(&s, 0, 5);
    while (!(ki_stream_tick(&s, ki_stream_deadline(&s)) & KI_STEP_RESUME))
        ;
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    now = ki_stream_deadline(&s);
    assert_int_equal(ki_stream_tick(&s, now), KI_STEP_REQUEST);
    assert_int_equal(live(&s, 0, 6), KI_STEP_HOLD);
    assert_int_equal(replayed(&s, 0, 4), KI_STEP_DROP | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
    assert_int_equal(ki_stream_deadline(&s), 0);
    assert_true(is_lossy(&s));
}

static void early_end_is_tried_again(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 2);
    live(&s, 0, 5);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), 0);
    assert_int_equal(ki_stream_tick(&s, SECOND), 0);
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(s.request, 3); /* the last one too: is it still the same process? */
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 4), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_false(is_lossy(&s));
}

/* Nobody saw how it ends: what has come may be a part of it. */
static void a_replay_that_dies_is_not_whole(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    while (!(ki_stream_tick(&s, ki_stream_deadline(&s)) & KI_STEP_RESUME))
        ;
    assert_true(is_lossy(&s));
    /* The stream asks once more later. */
    s.idle_at_ns = 0;
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(is_lossy(&s));
}

/* Answers that never get anywhere, a moment apart each: live batches don't wait for ever. */
static void endless_replays_are_given_up(void **state)
{
    struct ki_batch_id id = batch(0, 1);
    struct kh_stream s;
    unsigned steps = 0;
    uint64_t now = SECOND;
    int requests = 0;

    (void)state;
    init_at(&s, &with_replay, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (int i = 0; i < 1000000 && !(steps & KI_STEP_RESUME); i++) {
        now += SECOND / 100;
        steps = ki_stream_replayed(&s, &id, now);
    }
    assert_true(steps & KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_true(is_lossy(&s));

    /* The same number, another content each time. */
    init_at(&s, &with_replay, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (steps = 0; !(steps & KI_STEP_RESUME); requests += (steps & KI_STEP_REQUEST) != 0) {
        assert_true(requests < 10);
        id = batch(0, 0);
        id.digest = (uint64_t)requests++;
        steps = ki_stream_replayed(&s, &id, SECOND);
    }
    live(&s, 0, 5);
    assert_true(is_lossy(&s));
}

static void lost_reply_is_asked_for_again(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 2);
    live(&s, 0, 9);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 5), KI_STEP_DROP | KI_STEP_REQUEST);
    assert_int_equal(s.request, 3);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    for (uint64_t i = 4; i < 8; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 8), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_false(is_lossy(&s));
}

static void restart_is_told_from_a_duplicate(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &without_replay, 300);
    assert_int_equal(live(&s, 0, 300), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 200), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 0), KI_STEP_DROP); /* out of the window, and older */
    assert_int_equal(s.stats.duplicates, 3);
    assert_int_equal(live(&s, 1, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 1);
    assert_false(is_lossy(&s));
    assert_int_equal(live(&s, 1, 1), KI_STEP_APPLY);
    /* First batches lost: the number is known, its content is not. */
    assert_int_equal(live(&s, 2, 1), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(live(&s, 2, 2), KI_STEP_APPLY);
}

static void restart_with_lost_beginning_is_replayed(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 100);
    assert_int_equal(live(&s, 1, 3),
                     KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 1, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 1, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 1, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 1, 3), KI_STEP_APPLY);
    assert_false(is_lossy(&s));
}

/* The new process's clock is behind the old one's: the connection tells. */
static void restart_with_the_clock_set_back(void **state)
{
    struct ki_batch_id id = batch(0, 5);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i <= 300; i++)
        assert_int_equal(live(&s, 1, i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_DROP);
    assert_int_equal(ki_stream_live(&s, &id, true, SECOND),
                     KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
}

/* The engine's clock goes back between a missed batch and the held one. */
static void gap_across_a_clock_set_back(void **state)
{
    struct ki_batch_id id = batch(0, 14);
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 10);
    id.timestamp -= 3600;
    assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 11);
    assert_int_equal(replayed(&s, 0, 11), KI_STEP_DROP | KI_STEP_REQUEST); /* whose is it? */
    assert_int_equal(s.request, 10);
    assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 11), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 12), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 13), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    assert_false(is_partial(&s));
    /* A newer process answers: its clock is right. */
    init_at(&s, &with_replay, 10);
    assert_int_equal(live(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 1, 11), KI_STEP_DROP | KI_STEP_REQUEST);
    assert_int_equal(s.request, 10);
    assert_int_equal(replayed(&s, 1, 10),
                     KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
    for (uint64_t i = 0; i <= 14; i++)
        assert_int_equal(replayed(&s, 1, i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 14), KI_STEP_DROP);
    assert_int_equal(s.stats.restarts, 1);
    assert_false(is_partial(&s));
}

static void restart_without_timestamps(void **state)
{
    struct kh_stream s;
    struct ki_batch_id id;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i <= 500; i++) {
        id = batch(0, i);
        id.timestamp = 0;
        assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_APPLY);
    }
    id = batch(1, 450);
    id.timestamp = 0; /* in the window, another content */
    assert_true(ki_stream_live(&s, &id, false, SECOND) & KI_STEP_PURGE);
    for (uint64_t i = 451; i <= 900; i++) {
        id = batch(1, i);
        id.timestamp = 0;
        ki_stream_live(&s, &id, false, SECOND);
    }
    id = batch(2, 5);
    id.timestamp = 0; /* far below */
    assert_true(ki_stream_live(&s, &id, false, SECOND) & KI_STEP_PURGE);
    assert_int_equal(s.stats.restarts, 2);
}

/* A replay overtakes what waits in our socket, by more than the window: that is no restart. */
static void backlog_without_timestamps(void **state)
{
    struct kh_stream s;

    (void)state;
    /* The ring begins behind the held batch. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live_untimed(&s, 0, 100), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed_untimed(&s, 0, 5000), KI_STEP_PURGE | KI_STEP_APPLY | KI_STEP_RESUME);
    for (uint64_t i = 100; i <= 5000; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live_untimed(&s, 0, 5001), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    /* A restart while the backlog is read is still one: through a proxy nothing else shows it. */
    assert_int_equal(live_untimed(&s, 1, 3) & KI_STEP_PURGE, KI_STEP_PURGE);

    /* A silent stream was asked, and speaks while the answer is still coming. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    for (uint64_t i = 0; i <= 1000; i++)
        assert_int_equal(replayed_untimed(&s, 0, i), KI_STEP_APPLY);
    for (uint64_t i = 500; i <= 1000; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live_untimed(&s, 0, 1001), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(s.stats.restarts, 0);
}

/* However far: a jump ahead is a gap. */
static void jump_ahead_is_no_restart(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i <= 10; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(live_untimed(&s, 0, UINT64_C(1) << 60), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    assert_int_equal(s.stats.gaps, 1);
    assert_true(is_lossy(&s));
}

/* The new process has already got as far as the old one when it is heard again. */
static void restart_hidden_behind_a_reconnect(void **state)
{
    struct kh_stream s;

    (void)state;
    for (uint64_t sequence = 11; sequence <= 13; sequence += 2) {
        init_at(&s, &with_replay, 10);
        assert_int_equal(live_new_connection(&s, 1, sequence), KI_STEP_HOLD | KI_STEP_REQUEST);
        is_replaced(&s, 10, sequence);
        assert_int_equal(s.stats.restarts, 1);
    }
}

/* Nothing shows whose batches these are: they are applied, and the view is called partial. */
static void overlap_that_is_gone(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 10);
    assert_int_equal(live_new_connection(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (uint64_t i = 11; i < 13; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 13), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(s.stats.overruns, 0);
    assert_true(is_lossy(&s));
    assert_int_not_equal(ki_stream_deadline(&s), 0);
}

static void reconnect_to_the_same_process(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &with_replay, 10);
    assert_int_equal(live_new_connection(&s, 0, 11), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 11), KI_STEP_APPLY);
    assert_int_equal(live_new_connection(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 11), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 12), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 13), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 14), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    assert_false(is_lossy(&s));
}

/* Answers lack what a replay still has to bring. */
static void while_a_replay_runs(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_true(is_behind(&s)); /* how far, nobody knows before the end */
    assert_int_equal(ki_stream_tick(&s, s.deadline_ns), KI_STEP_REQUEST);
    assert_true(is_behind(&s));
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_true(is_behind(&s));
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(is_behind(&s) || is_partial(&s));
    assert_int_equal(live(&s, 0, 3), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_true(is_behind(&s));
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 3), KI_STEP_APPLY);
    assert_false(is_behind(&s) || is_partial(&s));
    /* Asked once more, in case something was lost: nothing is known to be missing. */
    assert_int_equal(ki_stream_connected(&s, false, SECOND), KI_STEP_REQUEST);
    assert_false(is_behind(&s) || is_partial(&s));
}

/* A publisher that was never heard may have published before: nothing tells what it has. */
static void before_the_first_batch(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    ki_stream_start(&s, SECOND);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_connected(&s, false, SECOND), 0);
    assert_true(is_partial(&s));
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    /* A replay service that has nothing tells that nothing was published. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(is_partial(&s));
    /* ... of this process: the next one is asked again. */
    ki_stream_disconnected(&s, SECOND);
    assert_int_equal(ki_stream_connected(&s, true, SECOND), KI_STEP_REQUEST);
    assert_true(is_partial(&s));
    nobody_answers(&s);
    assert_true(is_partial(&s));
}

static void registered_again(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    ki_stream_remember(&s, 40);
    assert_int_equal(live(&s, 0, 44), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(s.stats.gaps, 1);
    ki_stream_init(&s, &without_replay);
    ki_stream_remember(&s, 40);
    assert_int_equal(live(&s, 0, 44), KI_STEP_APPLY);
    assert_int_equal(s.stats.missed, 3);
    assert_true(is_lossy(&s));
}

static void a_new_connection_is_asked(void **state)
{
    struct kh_stream s;
    uint64_t at;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 4), KI_STEP_HOLD);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 4), KI_STEP_APPLY);
    assert_int_equal(ki_stream_deadline(&s), 0);
    /* A live beginning needs no replay. */
    ki_stream_init(&s, &with_replay);
    start_connected(&s);
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
    /* As long as nothing comes, a batch may have been published before the subscription arrived. */
    ki_stream_init(&s, &with_replay);
    start_connected(&s);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    at = ki_stream_deadline(&s);
    assert_int_equal(at, 6 * SECOND);
    assert_int_equal(ki_stream_tick(&s, at - 1), 0);
    assert_int_equal(ki_stream_tick(&s, at), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, at), KI_STEP_RESUME);
    assert_int_equal(ki_stream_deadline(&s), 0);
}

/* Batch 0 may have been lost before the subscription: the second question is for that. */
static void a_second_question_without_an_answer(void **state)
{
    struct kh_stream s;
    uint64_t at;

    (void)state;
    ki_stream_init(&s, &with_replay);
    start_connected(&s);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(is_partial(&s)); /* it has published nothing */
    at = nobody_answers(&s);
    assert_true(is_partial(&s));
    at += with_replay.cooldown_ns;
    assert_int_equal(ki_stream_deadline(&s), at);
    assert_int_equal(ki_stream_tick(&s, at), KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_end(&s, at), KI_STEP_RESUME);
    assert_false(is_partial(&s));
}

/* The indexer is up first: nobody is asked, and nothing counts as a failure, before the engine
 * is. */
static void nobody_is_asked_before_there_is_a_connection(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    ki_stream_start(&s, SECOND);
    assert_int_equal(ki_stream_deadline(&s), 0);
    assert_int_equal(ki_stream_tick(&s, 1000 * SECOND), 0);
    assert_int_equal(s.stats.replays + s.stats.failed_replays, 0);
    /* The publisher starts, and its first batch comes before the subscription. */
    assert_int_equal(ki_stream_connected(&s, true, 1000 * SECOND), KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_end(&s, 1000 * SECOND), KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    /* The publisher is gone again; the pending question waits for the next connection. */
    live(&s, 0, 5);
    s.heal_at_ns = nobody_answers(&s) + 1;
    s.reasons |= KI_BECAUSE(UNANSWERED);
    ki_stream_disconnected(&s, SECOND);
    assert_int_equal(ki_stream_deadline(&s), 0);
    assert_int_equal(ki_stream_tick(&s, 2000 * SECOND), 0);
}

/* An engine that was killed and is back says nothing: its replay service is asked whose position it
 * is. */
static void restart_without_a_batch(void **state)
{
    struct kh_stream s;

    (void)state;
    for (uint64_t process = 0; process < 2; process++) {
        init_at(&s, &with_replay, 10);
        ki_stream_disconnected(&s, SECOND);
        assert_int_equal(ki_stream_connected(&s, true, SECOND), KI_STEP_REQUEST);
        assert_int_equal(s.request, 10);
        assert_true(is_partial(&s)); /* until somebody has answered */
        if (process == 0) {
            assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP);
        } else {
            assert_int_equal(replayed(&s, 1, 10),
                             KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
            for (uint64_t i = 0; i <= 10; i++)
                assert_int_equal(replayed(&s, 1, i), KI_STEP_APPLY);
        }
        assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
        assert_int_equal(s.stats.restarts, process);
        assert_false(is_partial(&s));
    }
    /* The publisher has sent fewer batches than the old one, or none: it is another process. */
    init_at(&s, &with_replay, 10);
    assert_int_equal(ki_stream_connected(&s, true, SECOND), KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_end(&s, SECOND),
                     KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_int_equal(s.stats.restarts, 1);
    assert_false(is_partial(&s));
    assert_int_equal(live(&s, 1, 0), KI_STEP_APPLY);
}

/* Nobody can be asked: the view is partial until another process's beginning comes, or a clear. */
static void reconnect_without_a_replay_service(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, &without_replay, 10);
    ki_stream_disconnected(&s, SECOND);
    assert_int_equal(ki_stream_connected(&s, true, SECOND), 0);
    assert_true(is_partial(&s));
    /* A process that was restarted may have published as many, unheard. */
    assert_int_equal(live_new_connection(&s, 0, 11), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    assert_int_equal(live(&s, 0, 12), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    ki_stream_mark_whole(&s); /* the engine has cleared its cache */
    assert_false(is_partial(&s));
    ki_stream_connected(&s, true, SECOND);
    assert_true(live_new_connection(&s, 1, 0) & KI_STEP_PURGE);
    assert_false(is_partial(&s));
    ki_stream_connected(&s, true, SECOND);
    assert_int_equal(live_new_connection(&s, 1, 5), KI_STEP_APPLY);
    assert_true(is_partial(&s));
}

/* The replay service that didn't answer was the old process's: the new one's gaps are asked for. */
static void restart_during_a_replay(void **state)
{
    struct kh_stream s;
    struct ki_batch_id id;
    uint64_t now;

    (void)state;
    for (uint64_t lost = 1; lost <= 2; lost++) {
        init_at(&s, &with_replay, 10);
        assert_int_equal(live(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
        now = nobody_answers(&s);
        id = batch(0, 14);
        assert_int_equal(ki_stream_live(&s, &id, false, now), KI_STEP_APPLY);
        /* The first batches were lost while we connected; through a proxy the connection stays. */
        id = batch(1, lost);
        assert_int_equal(ki_stream_live(&s, &id, false, now),
                         KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_HOLD | KI_STEP_REQUEST);
        for (uint64_t i = 0; i + 1 < lost; i++)
            assert_int_equal(replayed(&s, 1, i), KI_STEP_APPLY);
        assert_int_equal(replayed(&s, 1, lost - 1), KI_STEP_APPLY | KI_STEP_RESUME);
        assert_int_equal(live(&s, 1, lost), KI_STEP_APPLY);
        assert_false(is_partial(&s));
    }
    /* The new engine's numbers go on from the old one's: the connection tells. */
    init_at(&s, &with_replay, 10);
    live(&s, 0, 14);
    nobody_answers(&s);
    live(&s, 0, 14);
    assert_int_equal(live_new_connection(&s, 1, 15), KI_STEP_HOLD | KI_STEP_REQUEST);
    is_replaced(&s, 14, 15);
    /* While the replay runs: the new connection's replay takes its place at once. */
    init_at(&s, &with_replay, 10);
    ki_stream_connected(&s, false, SECOND);
    assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    live(&s, 0, 14);
    ki_stream_tick(&s, ki_stream_deadline(&s));
    ki_stream_tick(&s, ki_stream_deadline(&s));
    ki_stream_reachable(&s, SECOND);
    assert_int_equal(ki_stream_tick(&s, SECOND), KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 14), KI_STEP_DROP);
    assert_true(is_behind(&s));
    assert_int_equal(ki_stream_connected(&s, true, SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 10);
    assert_int_equal(replayed(&s, 1, 10),
                     KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
    assert_int_equal(s.stats.failed_replays, 0);
}

/* A first batch 1 whose 0 can't be asked for just now isn't called whole. */
static void a_lost_beginning_is_asked_for_later(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    nobody_answers(&s);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    assert_int_not_equal(ki_stream_deadline(&s), 0);
}

static void two_publishers_behind_one_endpoint(void **state)
{
    struct kh_stream s;
    uint64_t purges = 0;

    (void)state;
    init_at(&s, &without_replay, 100);
    for (uint64_t i = 1; i <= 200; i++) {
        purges += (live(&s, 1, 4 + i) & KI_STEP_PURGE) != 0;
        purges += (live(&s, 0, 100 + i) & KI_STEP_PURGE) != 0;
    }
    assert_true(ki_stream_has(&s, KI_BECAUSE(TWO_PUBLISHERS)));
    assert_true(is_lossy(&s));
    assert_in_range(purges, 1, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_is_applied),
        cmocka_unit_test(a_lost_zero_is_no_numbering_from_one),
        cmocka_unit_test(gap_without_replay_is_counted),
        cmocka_unit_test(gap_is_replayed),
        cmocka_unit_test(initial_gap_is_replayed_from_the_beginning),
        cmocka_unit_test(overrun_forgets_and_goes_on),
        cmocka_unit_test(dead_replay_service_is_given_up),
        cmocka_unit_test(healing_keeps_what_it_cannot_better),
        cmocka_unit_test(early_end_is_tried_again),
        cmocka_unit_test(a_replay_that_dies_is_not_whole),
        cmocka_unit_test(endless_replays_are_given_up),
        cmocka_unit_test(lost_reply_is_asked_for_again),
        cmocka_unit_test(restart_is_told_from_a_duplicate),
        cmocka_unit_test(restart_with_lost_beginning_is_replayed),
        cmocka_unit_test(restart_with_the_clock_set_back),
        cmocka_unit_test(gap_across_a_clock_set_back),
        cmocka_unit_test(restart_without_timestamps),
        cmocka_unit_test(backlog_without_timestamps),
        cmocka_unit_test(jump_ahead_is_no_restart),
        cmocka_unit_test(restart_hidden_behind_a_reconnect),
        cmocka_unit_test(overlap_that_is_gone),
        cmocka_unit_test(reconnect_to_the_same_process),
        cmocka_unit_test(before_the_first_batch),
        cmocka_unit_test(while_a_replay_runs),
        cmocka_unit_test(registered_again),
        cmocka_unit_test(a_new_connection_is_asked),
        cmocka_unit_test(a_second_question_without_an_answer),
        cmocka_unit_test(nobody_is_asked_before_there_is_a_connection),
        cmocka_unit_test(restart_without_a_batch),
        cmocka_unit_test(reconnect_without_a_replay_service),
        cmocka_unit_test(restart_during_a_replay),
        cmocka_unit_test(a_lost_beginning_is_asked_for_later),
        cmocka_unit_test(two_publishers_behind_one_endpoint),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
