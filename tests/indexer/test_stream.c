// SPDX-License-Identifier: Apache-2.0
/*
 * The stream rules: scripted cases for each rule of docs/kv-indexer-streams.md, and a random world
 * of a publisher that restarts, a network that loses and repeats, and a replay service that fails,
 * against invariants that need no second implementation (what is applied is of one process,
 * in order, once, and whole unless the view is called partial).
 */
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

#include "indexer/stream.h"

#define SECOND UINT64_C(1000000000)

static const struct ki_stream_opts with_replay = {.can_replay = true,
                                                  .max_attempts = 3,
                                                  .timeout_ns = SECOND,
                                                  .retry_delay_ns = SECOND / 10,
                                                  .cooldown_ns = 30 * SECOND,
                                                  .idle_ns = 5 * SECOND};
static const struct ki_stream_opts without_replay = {.max_attempts = 3};

/* A batch of a process: content and time follow from both. */
static struct ki_batch_id batch(uint64_t process, uint64_t sequence)
{
    return (struct ki_batch_id){.sequence = sequence,
                                .digest = process * 1000003 + sequence * 7 + 1,
                                .timestamp = 1e9 + (double)process * 1e5 + (double)sequence};
}

static unsigned live(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_live(s, &id, false, SECOND);
}

static unsigned live_new_connection(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_live(s, &id, true, SECOND);
}

static unsigned replayed(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_replayed(s, &id, SECOND);
}

static void apply_up_to(struct ki_stream *s, uint64_t process, uint64_t last)
{
    for (uint64_t i = 0; i <= last; i++)
        assert_int_equal(live(s, process, i), KI_STEP_APPLY);
}

static void in_order_is_applied(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 10);
    assert_int_equal(s.position, 10);
    assert_false(s.partial);
    assert_int_equal(s.stats.gaps + s.stats.missed + s.stats.restarts, 0);
}

static void numbering_from_one_is_whole(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_false(s.partial);
    /* Where somebody can be asked, a lost 0 is told from a beginning. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_DROP);
    assert_int_equal(s.stats.gaps, 0);
    assert_false(s.partial);
    /* Also when it is what a replay from 0 begins with. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 3), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_false(s.partial);
    assert_int_equal(s.stats.overruns, 0);
}

static void gap_without_replay_is_counted(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    apply_up_to(&s, 0, 2);
    assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
    assert_int_equal(s.stats.gaps, 1);
    assert_int_equal(s.stats.missed, 3);
    assert_true(s.partial);
}

static void gap_is_replayed(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
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
    assert_false(s.partial);
}

static void initial_gap_is_replayed_from_the_beginning(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 2), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_false(s.partial);

    ki_stream_init(&s, &without_replay);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_true(s.partial);
    assert_int_equal(s.stats.missed, 2);
}

static void overrun_forgets_and_goes_on(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
    assert_int_equal(live(&s, 0, 20), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 18), KI_STEP_PURGE | KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 19), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 20), KI_STEP_APPLY);
    assert_true(s.partial);
    assert_int_equal(s.stats.overruns, 1);
    assert_int_equal(s.stats.missed, 15);
}

static void dead_replay_service_is_given_up(void **state)
{
    struct ki_stream s;
    uint64_t now = SECOND;
    unsigned steps = 0;
    int requests = 1;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
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
    assert_true(s.partial);
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
    assert_false(s.partial);
    assert_int_equal(live(&s, 0, 10), KI_STEP_APPLY);
}

static void healing_keeps_what_it_cannot_better(void **state)
{
    struct ki_stream s;
    uint64_t now;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
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
    assert_true(s.partial);
}

static void early_end_is_tried_again(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
    live(&s, 0, 5);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), 0);
    assert_int_equal(ki_stream_tick(&s, SECOND), 0);
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(s.request, 3); /* the last one too: is it still the same process? */
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 4), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_false(s.partial);
}

/* Nobody saw how it ends: what has come may be a part of it. */
static void a_replay_that_dies_is_not_whole(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    ki_stream_start(&s, SECOND);
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    while (!(ki_stream_tick(&s, ki_stream_deadline(&s)) & KI_STEP_RESUME))
        ;
    assert_true(s.partial);
    /* It asks once more later. */
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(s.partial);
}

/* Answers that never get anywhere, a moment apart each: live batches don't wait for ever. */
static void endless_replays_are_given_up(void **state)
{
    struct ki_batch_id id = batch(0, 1);
    struct ki_stream s;
    unsigned steps = 0;
    uint64_t now = SECOND;
    int requests = 0;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (int i = 0; i < 1000000 && !(steps & KI_STEP_RESUME); i++) {
        now += SECOND / 100;
        steps = ki_stream_replayed(&s, &id, now);
    }
    assert_true(steps & KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_true(s.partial);

    /* The same number, another content each time. */
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (steps = 0; !(steps & KI_STEP_RESUME); requests += (steps & KI_STEP_REQUEST) != 0) {
        assert_true(requests < 10);
        id = batch(0, 0);
        id.digest = (uint64_t)requests++;
        steps = ki_stream_replayed(&s, &id, SECOND);
    }
    live(&s, 0, 5);
    assert_true(s.partial);
}

static void lost_reply_is_asked_for_again(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 2);
    live(&s, 0, 9);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 5), KI_STEP_DROP | KI_STEP_REQUEST);
    assert_int_equal(s.request, 3);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    for (uint64_t i = 4; i < 8; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 8), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_false(s.partial);
}

static void restart_is_told_from_a_duplicate(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    apply_up_to(&s, 0, 300);
    assert_int_equal(live(&s, 0, 300), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 200), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 0), KI_STEP_DROP); /* out of the window, and older */
    assert_int_equal(s.stats.duplicates, 3);
    assert_int_equal(live(&s, 1, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 1);
    assert_false(s.partial);
    assert_int_equal(live(&s, 1, 1), KI_STEP_APPLY);
    /* First batches lost: the number is known, its content is not. */
    assert_int_equal(live(&s, 2, 1), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(live(&s, 2, 2), KI_STEP_APPLY);
}

static void restart_with_lost_beginning_is_replayed(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 100);
    assert_int_equal(live(&s, 1, 3),
                     KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 1, 0), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 1, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 1, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 1, 3), KI_STEP_APPLY);
    assert_false(s.partial);
}

/* The new process's clock is behind the old one's: the connection tells. */
static void restart_with_the_clock_set_back(void **state)
{
    struct ki_batch_id id = batch(0, 5);
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i <= 300; i++)
        assert_int_equal(live(&s, 1, i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_DROP);
    assert_int_equal(ki_stream_live(&s, &id, true, SECOND),
                     KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
}

static void restart_without_timestamps(void **state)
{
    struct ki_stream s;
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

static unsigned live_untimed(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    id.timestamp = 0;
    return ki_stream_live(s, &id, false, SECOND);
}

static unsigned replayed_untimed(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    id.timestamp = 0;
    return ki_stream_replayed(s, &id, SECOND);
}

/* A replay overtakes what waits in our socket, by more than the window: that is no restart. */
static void backlog_without_timestamps(void **state)
{
    struct ki_stream s;

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
    ki_stream_start(&s, SECOND);
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
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
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    for (uint64_t i = 0; i <= 10; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(live_untimed(&s, 0, UINT64_C(1) << 60), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    assert_int_equal(s.stats.gaps, 1);
    assert_true(s.partial);
}

/* A peer's position without a time: what waits in our socket is older, or another process's. */
static void recovered_without_timestamps(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    ki_stream_seed(&s, 500, 0, false);
    for (uint64_t i = 300; i <= 500; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live_untimed(&s, 0, 501), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    /* A beginning is a beginning. */
    ki_stream_init(&s, &without_replay);
    ki_stream_seed(&s, 500, 0, false);
    assert_int_equal(live_untimed(&s, 1, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    /* Whoever can be asked is asked, once. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, 0, false);
    assert_int_equal(live_untimed(&s, 0, 300), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 500);
    assert_int_equal(replayed_untimed(&s, 0, 500), KI_STEP_DROP | KI_STEP_RESUME);
    for (uint64_t i = 300; i <= 500; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live_untimed(&s, 0, 501), KI_STEP_APPLY);
    assert_false(s.partial);
    /* It hasn't got that far. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, 0, false);
    assert_int_equal(live_untimed(&s, 1, 300), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_end(&s, SECOND),
                     KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    for (uint64_t i = 0; i < 299; i++)
        assert_int_equal(replayed_untimed(&s, 1, i), KI_STEP_APPLY);
    assert_int_equal(replayed_untimed(&s, 1, 299), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live_untimed(&s, 1, 300), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 1);
    assert_false(s.partial);
}

/* The new process has already got as far as the old one when it is heard again. */
static void restart_hidden_behind_a_reconnect(void **state)
{
    struct ki_stream s;

    (void)state;
    for (uint64_t sequence = 11; sequence <= 13; sequence += 2) {
        ki_stream_init(&s, &with_replay);
        apply_up_to(&s, 0, 10);
        assert_int_equal(live_new_connection(&s, 1, sequence), KI_STEP_HOLD | KI_STEP_REQUEST);
        assert_int_equal(s.request, 10);
        assert_int_equal(replayed(&s, 1, 10),
                         KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
        assert_int_equal(s.request, 0);
        for (uint64_t i = 0; i + 1 < sequence; i++)
            assert_int_equal(replayed(&s, 1, i), KI_STEP_APPLY);
        assert_int_equal(replayed(&s, 1, sequence - 1), KI_STEP_APPLY | KI_STEP_RESUME);
        assert_int_equal(live(&s, 1, sequence), KI_STEP_APPLY);
        assert_false(s.partial);
        assert_int_equal(s.stats.restarts, 1);
    }
}

/* Nothing shows whose batches these are: they are applied, and the view is called partial. */
static void overlap_that_is_gone(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 10);
    assert_int_equal(live_new_connection(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
    for (uint64_t i = 11; i < 13; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 13), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(s.stats.overruns, 0);
    assert_true(s.partial);
    assert_int_not_equal(ki_stream_deadline(&s), 0);
}

static void reconnect_to_the_same_process(void **state)
{
    struct ki_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    apply_up_to(&s, 0, 10);
    assert_int_equal(live_new_connection(&s, 0, 11), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 11), KI_STEP_APPLY);
    assert_int_equal(live_new_connection(&s, 0, 14), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 11), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 12), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 13), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 14), KI_STEP_APPLY);
    assert_int_equal(s.stats.restarts, 0);
    assert_false(s.partial);
}

static void after_recovery_from_a_peer(void **state)
{
    struct ki_stream s;

    (void)state;
    /* The backlog of the socket begins before the peer's position and goes on beyond it. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, batch(0, 500).timestamp, false);
    for (uint64_t i = 300; i <= 500; i++)
        assert_int_equal(live(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 501), KI_STEP_APPLY);
    assert_false(s.partial);
    /* Only what is missing is replayed. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, batch(0, 500).timestamp, false);
    assert_int_equal(live(&s, 0, 503), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 501);
    /* The engine restarted since. */
    ki_stream_init(&s, &without_replay);
    ki_stream_seed(&s, 500, batch(0, 500).timestamp, false);
    assert_int_equal(live(&s, 1, 4), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    /* A view that was partial at the peer's gets its chance of becoming whole here. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, batch(0, 500).timestamp, true);
    ki_stream_start(&s, SECOND);
    assert_int_equal(live(&s, 0, 501), KI_STEP_APPLY);
    assert_true(s.partial);
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    /* A peer that says no position: go on with what comes. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed_cursorless(&s);
    assert_int_equal(live(&s, 0, 70), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 71), KI_STEP_APPLY);
    assert_false(s.partial);
}

static void registered_again(void **state)
{
    struct ki_stream s;

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
    assert_true(s.partial);
}

static void silent_stream_is_asked(void **state)
{
    struct ki_stream s;
    uint64_t at;

    (void)state;
    ki_stream_init(&s, &with_replay);
    ki_stream_start(&s, SECOND);
    at = ki_stream_deadline(&s);
    assert_int_equal(at, 6 * SECOND);
    assert_int_equal(ki_stream_tick(&s, at - 1), 0);
    assert_int_equal(ki_stream_tick(&s, at), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 4), KI_STEP_HOLD);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 4), KI_STEP_APPLY);
    /* A live beginning needs no replay. */
    ki_stream_init(&s, &with_replay);
    ki_stream_start(&s, SECOND);
    ki_stream_tick(&s, at);
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
}

static void two_publishers_behind_one_endpoint(void **state)
{
    struct ki_stream s;
    uint64_t purges = 0;

    (void)state;
    ki_stream_init(&s, &without_replay);
    apply_up_to(&s, 0, 100);
    for (uint64_t i = 1; i <= 200; i++) {
        purges += (live(&s, 1, 4 + i) & KI_STEP_PURGE) != 0;
        purges += (live(&s, 0, 100 + i) & KI_STEP_PURGE) != 0;
    }
    assert_true(s.merged);
    assert_true(s.partial);
    assert_in_range(purges, 1, 4);
}

/* -- a random world ---------------------------------------------------------------------------- */

static uint64_t random_state;

static uint64_t draw(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

#define QUEUE 4096

struct message {
    uint64_t process, sequence;
    uint32_t connection;
};

struct world {
    struct ki_stream s;
    uint64_t now;
    /* the publisher */
    uint64_t process, next, first, ring;
    uint32_t connection;
    bool router_alive, untimed;
    uint64_t router_loss; /* percent of replies */
    /* what is on its way to the subscriber */
    struct message queue[QUEUE];
    size_t head, tail;
    /* the driver */
    uint32_t last_connection;
    bool holding;
    struct message held;
    bool requested;
    uint64_t request;
    /* what the index would have: batches of one process, in order */
    bool any, contiguous, mixed;
    uint64_t applied_process, applied_first, applied_last;
    uint64_t applied_total;
};

static void world_apply(struct world *w, const struct message *m)
{
    if (!w->any) {
        w->any = w->contiguous = true;
        w->mixed = false;
        w->applied_process = m->process;
        w->applied_first = m->sequence;
    } else {
        /*
         * Never two processes' blocks, but for what can't be known yet: the news of a restart is
         * still in the queue behind this batch, or nobody could be asked and the view is partial.
         */
        if (w->applied_process != m->process) {
            assert_true(w->s.partial || m->connection != w->connection);
            w->mixed = true;
        }
        assert_true(m->sequence > w->applied_last); /* once, and in order */
        w->contiguous &= m->sequence == w->applied_last + 1;
    }
    w->applied_last = m->sequence;
    w->applied_total++;
}

static void world_check(struct world *w)
{
    if (!w->any || w->s.partial)
        return;
    assert_true(w->contiguous); /* whole, unless called partial */
    assert_true(w->applied_first <= 1);
    assert_true(w->s.has_position);
    assert_int_equal(w->s.position, w->applied_last);
}

static void world_do(struct world *w, unsigned steps, const struct message *m)
{
    if (steps & KI_STEP_PURGE)
        w->any = false;
    if (steps & KI_STEP_APPLY)
        world_apply(w, m);
    if (steps & KI_STEP_HOLD) {
        assert_false(w->holding);
        w->holding = true;
        w->held = *m;
    }
    if (steps & KI_STEP_REQUEST) {
        w->requested = true;
        w->request = w->s.request;
    }
    if (steps & KI_STEP_RESUME)
        w->requested = false;
    world_check(w);
}

static struct ki_batch_id world_batch(const struct world *w, const struct message *m)
{
    struct ki_batch_id id = batch(m->process, m->sequence);

    if (w->untimed)
        id.timestamp = 0;
    return id;
}

static void world_live(struct world *w, const struct message *m)
{
    struct ki_batch_id id = world_batch(w, m);
    bool reconnected = w->last_connection != m->connection;
    unsigned steps;

    w->last_connection = m->connection;
    steps = ki_stream_live(&w->s, &id, reconnected, w->now);
    assert_int_equal(
        !!(steps & KI_STEP_APPLY) + !!(steps & KI_STEP_DROP) + !!(steps & KI_STEP_HOLD), 1);
    world_do(w, steps, m);
}

static void world_resume(struct world *w, unsigned steps)
{
    struct message m = w->held;

    if (!(steps & KI_STEP_RESUME) || !w->holding)
        return;
    w->holding = false;
    world_live(w, &m);
}

/* The whole answer to a request, as the publisher's process is now. */
static void world_answer(struct world *w)
{
    uint64_t start = w->next > w->ring + w->first ? w->next - w->ring : w->first;
    unsigned steps = 0;

    w->requested = false;
    if (start < w->request)
        start = w->request;
    for (uint64_t i = start; i < w->next; i++) {
        struct message m = {w->process, i, w->connection};
        struct ki_batch_id id = world_batch(w, &m);

        if (draw(100) < w->router_loss)
            continue;
        steps = ki_stream_replayed(&w->s, &id, w->now);
        world_do(w, steps, &m);
        if (steps & (KI_STEP_RESUME | KI_STEP_REQUEST))
            break;
    }
    if (!(steps & (KI_STEP_RESUME | KI_STEP_REQUEST))) {
        steps = ki_stream_replay_end(&w->s, w->now);
        world_do(w, steps, NULL);
    }
    world_resume(w, steps);
}

static void world_step(struct world *w)
{
    uint64_t deadline = ki_stream_deadline(&w->s);
    unsigned steps;

    w->now += SECOND / 100;
    if (deadline && w->now >= deadline) {
        steps = ki_stream_tick(&w->s, w->now);
        world_do(w, steps, NULL);
        world_resume(w, steps);
    }
    if (w->requested && w->router_alive)
        world_answer(w);
    else if (!w->holding && w->head < w->tail)
        world_live(w, &w->queue[w->head++ % QUEUE]);
}

static void world_publish(struct world *w, bool lost)
{
    struct message m = {w->process, w->next++, w->connection};

    if (lost || w->tail - w->head >= QUEUE - 1)
        return;
    w->queue[w->tail++ % QUEUE] = m;
    if (draw(20) == 0)
        w->queue[w->tail++ % QUEUE] = m; /* twice */
}

static void world_restart(struct world *w)
{
    w->process++;
    w->connection++;
    w->next = w->first = draw(2);
    for (uint64_t lost = draw(4) ? 0 : draw(30); lost; lost--)
        world_publish(w, true); /* before the subscriber is back */
}

/* @untimed: nobody restarts, or the connection breaks, and nothing may look as if. */
static void world_round(bool can_replay, bool untimed)
{
    static struct world w;
    uint64_t loss = draw(3) ? draw(10) : 0;

    memset(&w, 0, sizeof(w));
    ki_stream_init(&w.s, can_replay ? &with_replay : &without_replay);
    ki_stream_start(&w.s, w.now);
    w.untimed = untimed;
    w.ring = draw(2) ? 1000000 : 1 + draw(40);
    w.router_alive = draw(4) != 0;
    w.router_loss = draw(2) ? 0 : draw(20);
    w.next = w.first = draw(2);
    for (int i = 0; i < 600; i++) {
        if (draw(4))
            world_publish(&w, draw(100) < loss);
        /* Without replay nothing can show a restart whose numbers go on from the old ones. */
        if (!untimed && draw(can_replay ? 150 : 1000000) == 0)
            world_restart(&w);
        if (!untimed && draw(200) == 0)
            w.connection++;
        if (draw(100) == 0)
            w.router_alive = !w.router_alive;
        if (w.tail - w.head > QUEUE - 100 || draw(3))
            world_step(&w);
    }
    /* Peace: what can be repaired must be. */
    w.router_alive = true;
    w.router_loss = 0;
    w.ring = can_replay ? w.ring : 0;
    for (int i = 0; i < 20000 && (w.head < w.tail || w.holding || ki_stream_deadline(&w.s)); i++)
        world_step(&w);
    world_publish(&w, false);
    for (int i = 0; i < 20000 && (w.head < w.tail || w.holding || ki_stream_deadline(&w.s)); i++)
        world_step(&w);
    assert_int_equal(w.head, w.tail);
    assert_false(w.holding);
    assert_int_equal(w.applied_last, w.next - 1);
    if (untimed)
        assert_int_equal(w.s.stats.restarts, 0);
    assert_true(w.mixed ? w.s.partial : w.applied_process == w.process);
    if (can_replay && w.ring == 1000000) {
        assert_true(w.any && w.contiguous);
        assert_true(w.applied_first <= 1); /* a lost batch 0 can't be told from numbering from 1 */
        assert_false(w.s.partial);
    }
}

static void random_worlds(void **state)
{
    const char *seed = getenv("KV_TEST_SEED"), *scale = getenv("KV_TEST_SCALE");
    uint64_t rounds = 4000 * (scale ? strtoull(scale, NULL, 10) : 100) / 100;

    (void)state;
    random_state = seed ? strtoull(seed, NULL, 10) : 20251120;
    print_message("seed %" PRIu64 ", %" PRIu64 " rounds\n", random_state, rounds);
    for (uint64_t i = 0; i < rounds; i++)
        world_round(i % 4 != 0, i % 5 == 0);
}

/* Nothing but noise: the machine must stay within its states and bounds. */
static void noise(void **state)
{
    struct ki_stream s;

    (void)state;
    random_state = 77;
    for (int round = 0; round < 300; round++) {
        bool holding = false;
        uint64_t now = 0;

        ki_stream_init(&s, round % 2 ? &with_replay : &without_replay);
        for (int i = 0; i < 2000; i++) {
            struct ki_batch_id id = {draw(4) ? draw(8) : UINT64_MAX - draw(3), draw(3),
                                     draw(2) ? 0 : (double)draw(5)};
            unsigned steps = 0;

            now += draw(SECOND);
            if (draw(3) == 0)
                steps = ki_stream_replayed(&s, &id, now);
            else if (draw(3) == 0)
                steps = ki_stream_replay_end(&s, now);
            else if (ki_stream_deadline(&s))
                steps = ki_stream_tick(&s, now);
            else if (!holding)
                steps = ki_stream_live(&s, &id, draw(10) == 0, now);
            holding |= (steps & KI_STEP_HOLD) != 0;
            if (steps & KI_STEP_RESUME)
                holding = false;
            assert_true(s.state != KI_STREAM_LIVE || !s.holding);
            assert_true(s.opts.can_replay || s.state == KI_STREAM_LIVE);
            assert_int_equal(s.holding, holding);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_is_applied),
        cmocka_unit_test(numbering_from_one_is_whole),
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
        cmocka_unit_test(restart_without_timestamps),
        cmocka_unit_test(backlog_without_timestamps),
        cmocka_unit_test(jump_ahead_is_no_restart),
        cmocka_unit_test(recovered_without_timestamps),
        cmocka_unit_test(restart_hidden_behind_a_reconnect),
        cmocka_unit_test(overlap_that_is_gone),
        cmocka_unit_test(reconnect_to_the_same_process),
        cmocka_unit_test(after_recovery_from_a_peer),
        cmocka_unit_test(registered_again),
        cmocka_unit_test(silent_stream_is_asked),
        cmocka_unit_test(two_publishers_behind_one_endpoint),
        cmocka_unit_test(random_worlds),
        cmocka_unit_test(noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
