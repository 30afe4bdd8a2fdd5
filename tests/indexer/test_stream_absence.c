// SPDX-License-Identifier: Apache-2.0
/* Streams without a connection: partial after a while, forgotten after a longer one, and exact again
 * when the publisher is back. All times are given. */
#include "indexer/streams.h"

static struct ki_stream_opts opts_of(bool can_replay)
{
    struct ki_stream_opts opts = can_replay ? with_replay : without_replay;

    opts.stale_ns = 5 * SECOND;
    opts.forget_ns = 60 * SECOND;
    return opts;
}

/* A stream connected at 1 s, with the batches 0 to @last of process 0. */
static void init_at(struct kh_stream *s, bool can_replay, uint64_t last)
{
    const struct ki_stream_opts opts = opts_of(can_replay);

    ki_stream_init(s, &opts);
    ki_stream_start(s, SECOND);
    ki_stream_reachable(s, SECOND);
    ki_stream_connected(s, true, SECOND);
    for (uint64_t i = 0; i <= last; i++)
        assert_true(live(s, 0, i) & KI_STEP_APPLY);
    assert_false(is_partial(s));
}

static void come_back(struct kh_stream *s, uint64_t now_ns)
{
    ki_stream_reachable(s, now_ns);
    assert_true(is_partial(s) || now_ns < 15 * SECOND);
    if (s->state == KI_STREAM_LIVE)
        ki_stream_connected(s, true, now_ns);
    assert_true(is_partial(s));
}

static void a_quiet_connection_is_not_stale(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, true, 3);
    assert_int_equal(ki_stream_absence_deadline(&s), 0);
    assert_int_equal(ki_stream_tick_absence(&s, 100000 * SECOND), 0);
    assert_false(ki_stream_is_absent(&s, 100000 * SECOND));
    assert_false(is_partial(&s));
}

static void a_lost_connection_is_stale_after_a_while(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, true, 3);
    ki_stream_disconnected(&s, 10 * SECOND);
    ki_stream_disconnected(&s, 12 * SECOND); /* another attempt failed: the time goes on */
    assert_int_equal(ki_stream_absence_deadline(&s), 15 * SECOND);
    assert_int_equal(ki_stream_tick_absence(&s, 15 * SECOND - 1), 0);
    assert_false(is_partial(&s));
    assert_int_equal(ki_stream_tick_absence(&s, 15 * SECOND), 0);
    assert_true(is_partial(&s));
    assert_true(ki_stream_is_absent(&s, 15 * SECOND));
    assert_false(
        (ki_stream_reasons(&s) & ~KI_BECAUSE(STALE))); /* a replica has a connection of its own */
    assert_int_equal(ki_stream_absence_deadline(&s), 70 * SECOND);
    /* Back: partial until the replay service has shown that it is the same process. */
    come_back(&s, 18 * SECOND);
    assert_int_equal(s.request, 3);
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
    assert_true(is_partial(&s) || s.state != KI_STREAM_LIVE);
    assert_int_equal(replayed(&s, 0, 4), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, 18 * SECOND), KI_STEP_RESUME);
    assert_false(is_partial(&s));
    assert_int_equal(ki_stream_absence_deadline(&s), 0);
}

static void who_may_be_back_is_partial_and_not_forgotten(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, true, 3);
    ki_stream_may_be_back(&s, 5 * SECOND); /* it isn't lost */
    ki_stream_disconnected(&s, 10 * SECOND);
    ki_stream_may_be_back(&s, 12 * SECOND);
    assert_int_equal(ki_stream_absence_deadline(&s), 15 * SECOND);
    for (uint64_t at = 15; at < 300; at++) {
        ki_stream_may_be_back(&s, at * SECOND);
        assert_int_equal(ki_stream_tick_absence(&s, at * SECOND), 0);
        assert_true(is_partial(&s));
    }
    assert_int_equal(ki_stream_absence_deadline(&s), (299 - 5 + 60) * SECOND);
    assert_int_equal(ki_stream_tick_absence(&s, 354 * SECOND), KI_STEP_PURGE | KI_STEP_RESET);
}

static void a_short_loss_is_not_stale(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, true, 3);
    for (uint64_t at = 10; at < 100; at += 4) { /* each loss counts for itself */
        ki_stream_disconnected(&s, at * SECOND);
        assert_int_equal(ki_stream_tick_absence(&s, (at + 3) * SECOND), 0);
        ki_stream_reachable(&s, (at + 3) * SECOND);
        assert_false(is_partial(&s));
        assert_int_equal(ki_stream_connected(&s, true, (at + 3) * SECOND), KI_STEP_REQUEST);
        assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
        assert_int_equal(ki_stream_replay_end(&s, (at + 3) * SECOND), KI_STEP_RESUME);
        assert_false(is_partial(&s));
    }
}

static void forget(struct kh_stream *s, uint64_t lost_ns)
{
    ki_stream_disconnected(s, lost_ns);
    assert_int_equal(ki_stream_tick_absence(s, lost_ns + 60 * SECOND - 1), 0);
    assert_int_equal(ki_stream_tick_absence(s, lost_ns + 60 * SECOND),
                     KI_STEP_PURGE | KI_STEP_RESET);
    assert_int_equal(ki_stream_tick_absence(s, lost_ns + 600 * SECOND), 0); /* once */
    assert_int_equal(ki_stream_absence_deadline(s), 0);
    assert_true(is_partial(s));
    assert_int_equal(s->stats.absences, 1);
}

static void forgotten_blocks_come_back_by_a_replay(void **state)
{
    struct kh_stream s;

    (void)state;
    for (uint64_t process = 0; process < 2; process++) {
        init_at(&s, true, 3);
        forget(&s, 10 * SECOND);
        come_back(&s, 700 * SECOND);
        assert_int_equal(s.state, KI_STREAM_REPLAYING);
        assert_int_equal(s.request, 0);
        for (uint64_t i = 0; i <= 5; i++)
            assert_int_equal(replayed(&s, process, i), KI_STEP_APPLY);
        assert_true(is_behind(&s) || is_partial(&s) || s.state != KI_STREAM_LIVE);
        assert_int_equal(ki_stream_replay_end(&s, 700 * SECOND), KI_STEP_RESUME);
        assert_false(is_partial(&s));
        assert_int_equal(live(&s, process, 6), KI_STEP_APPLY);
        assert_false(is_partial(&s));
    }
    /* The ring has lost the beginning: nothing proves that the view is whole. */
    init_at(&s, true, 9);
    forget(&s, 10 * SECOND);
    come_back(&s, 700 * SECOND);
    assert_true(replayed(&s, 0, 5) & KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, 700 * SECOND), KI_STEP_RESUME);
    assert_true(is_partial(&s));
}

static void forgotten_without_a_replay_service(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, false, 3);
    forget(&s, 10 * SECOND);
    come_back(&s, 700 * SECOND);
    assert_int_equal(live(&s, 0, 4), KI_STEP_APPLY);
    assert_true(is_partial(&s)); /* the engine may have kept the blocks of 0 to 3 */
    assert_int_equal(s.stats.missed, 0);
    /* A process that begins with 0 is another one, with an empty cache. */
    init_at(&s, false, 3);
    forget(&s, 10 * SECOND);
    come_back(&s, 700 * SECOND);
    assert_int_equal(live(&s, 1, 0), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    /* A 1 behind a forgotten 0 is no beginning, wherever the 0 came from. */
    init_at(&s, false, 0);
    forget(&s, 10 * SECOND);
    come_back(&s, 700 * SECOND);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_true(is_partial(&s));
}

/* A peer's position, and a publisher that is dead from the start. */
static void a_seeded_stream_is_forgotten(void **state)
{
    struct ki_stream_opts opts = opts_of(false);
    struct kh_stream s;

    (void)state;
    for (int cursorless = 0; cursorless < 2; cursorless++) {
        ki_stream_init(&s, &opts);
        if (cursorless)
            ki_stream_seed_cursorless(&s);
        else
            ki_stream_seed(&s, 0, 1e9, false);
        ki_stream_start(&s, SECOND);
        assert_int_equal(ki_stream_tick_absence(&s, SECOND), 0); /* it begins to count here */
        assert_int_equal(ki_stream_tick_absence(&s, 6 * SECOND), 0);
        assert_true(is_partial(&s));
        assert_int_equal(ki_stream_tick_absence(&s, 61 * SECOND), KI_STEP_PURGE | KI_STEP_RESET);
        assert_true(is_partial(&s));
        come_back(&s, 100 * SECOND);
        assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
        assert_true(is_partial(&s));
    }
}

/* Registered long before the engine starts: nothing was forgotten, and nothing is in doubt. */
static void an_engine_that_starts_late(void **state)
{
    struct ki_stream_opts opts = opts_of(false);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &opts);
    ki_stream_start(&s, SECOND);
    for (uint64_t at = 1; at < 200; at++)
        assert_int_equal(ki_stream_tick_absence(&s, at * SECOND), 0);
    assert_true(ki_stream_is_absent(&s, 200 * SECOND));
    ki_stream_reachable(&s, 200 * SECOND);
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    assert_int_equal(s.stats.absences, 0);
}

/* "It has published nothing" is true while it can be heard. */
static void a_silent_engine_that_is_gone(void **state)
{
    struct ki_stream_opts opts = opts_of(true);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &opts);
    ki_stream_start(&s, SECOND);
    ki_stream_reachable(&s, SECOND);
    ki_stream_connected(&s, true, SECOND);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(is_partial(&s));
    ki_stream_disconnected(&s, 10 * SECOND);
    assert_int_equal(ki_stream_absence_deadline(&s), 15 * SECOND);
    assert_int_equal(ki_stream_tick_absence(&s, 15 * SECOND), 0);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_tick_absence(&s, 100 * SECOND), 0); /* there is nothing to forget */
}

/* The connection ends while a batch waits for a replay. */
static void forgotten_during_a_replay(void **state)
{
    struct kh_stream s;

    (void)state;
    init_at(&s, true, 3);
    assert_int_equal(live(&s, 0, 6), KI_STEP_HOLD | KI_STEP_REQUEST);
    forget(&s, 10 * SECOND);
    assert_int_equal(s.state, KI_STREAM_LIVE);
    assert_false(s.held);
    come_back(&s, 700 * SECOND);
    assert_int_equal(s.request, 0);
}

/* A gap waits for its replay, another one behind it, and the connection ends: the next one's replay has all. */
static void gaps_wait_for_the_next_connection(void **state)
{
    struct kh_stream s;

    (void)state;
    for (int answered = 0; answered < 2; answered++) {
        init_at(&s, true, 3);
        ki_stream_replay_end(&s, SECOND);
        assert_int_equal(live(&s, 0, 6), KI_STEP_HOLD | KI_STEP_REQUEST);
        ki_stream_disconnected(&s, 2 * SECOND);
        if (answered) {
            assert_int_equal(replayed(&s, 0, 4), KI_STEP_APPLY);
            assert_int_equal(replayed(&s, 0, 5), KI_STEP_APPLY | KI_STEP_RESUME);
            assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
            assert_false(is_behind(&s));
        } else {
            assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_RESUME);
            assert_true(is_behind(&s));
            assert_int_equal(live(&s, 0, 6), KI_STEP_DROP);
        }
        for (uint64_t i = 8; i <= 10; i++)
            assert_int_equal(live(&s, 0, i), KI_STEP_DROP);
        assert_true(is_behind(&s));
        assert_false(is_partial(&s));
        assert_int_equal(ki_stream_deadline(&s), 0);
        come_back(&s, 4 * SECOND);
        assert_int_equal(s.request, answered ? 6 : 3);
        for (uint64_t i = s.request; i <= 10; i++) {
            assert_int_equal(replayed(&s, 0, i), i == s.request ? KI_STEP_DROP : KI_STEP_APPLY);
            assert_true(is_behind(&s));
            if (i == 9) { /* the last reply is lost: asked again */
                assert_int_equal(ki_stream_replay_end(&s, 4 * SECOND), 0);
                assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
                assert_int_equal(replayed(&s, 0, 9), KI_STEP_DROP);
            }
        }
        assert_int_equal(ki_stream_replay_end(&s, 4 * SECOND), KI_STEP_RESUME);
        assert_int_equal(ki_stream_reasons(&s), 0);
        assert_int_equal(s.stats.missed + s.stats.failed_replays, 0);
    }
}

/* The rest of a stream is missing until the next connection's replay has ended. */
static void a_beginning_is_broken_off(void **state)
{
    const struct ki_stream_opts opts = opts_of(true);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &opts);
    ki_stream_start(&s, SECOND);
    ki_stream_reachable(&s, SECOND);
    assert_int_equal(ki_stream_connected(&s, true, SECOND), KI_STEP_REQUEST);
    ki_stream_disconnected(&s, SECOND);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY); /* it was under way */
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_RESUME);
    assert_true(is_behind(&s));
    assert_int_equal(ki_stream_tick_absence(&s, 7 * SECOND), 0);
    assert_true(is_partial(&s)); /* stale, although the position came without a connection */
    come_back(&s, 8 * SECOND);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_DROP);
    assert_true(is_behind(&s));
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, 8 * SECOND), KI_STEP_RESUME);
    assert_int_equal(ki_stream_reasons(&s), 0);
}

/* A heal that brought nothing before the connection ended is tried again. */
static void healing_is_broken_off(void **state)
{
    struct kh_stream s;

    (void)state;
    for (int paused = 0; paused < 2; paused++) {
        init_at(&s, true, 3);
        ki_stream_replay_end(&s, SECOND);
        ki_stream_learn_anew(&s, 1, SECOND);
        assert_int_equal(ki_stream_tick(&s, SECOND), KI_STEP_REQUEST);
        if (paused) {
            ki_stream_detach(&s);
        } else {
            ki_stream_disconnected(&s, SECOND);
            assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_RESUME);
        }
        come_back(&s, 4 * SECOND);
        assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP);
        assert_int_equal(ki_stream_replay_end(&s, 4 * SECOND), KI_STEP_RESUME);
        assert_true(is_partial(&s));
        assert_int_equal(ki_stream_tick(&s, 4 * SECOND), KI_STEP_REQUEST);
        assert_int_equal(s.request, 0);
        for (uint64_t i = 0; i <= 3; i++)
            assert_true(replayed(&s, 0, i) & KI_STEP_APPLY);
        assert_int_equal(ki_stream_replay_end(&s, 4 * SECOND), KI_STEP_RESUME);
        assert_int_equal(ki_stream_reasons(&s), 0);
    }
}

static void zero_is_never(void **state)
{
    struct ki_stream_opts opts = opts_of(true);
    struct kh_stream s;

    (void)state;
    for (int which = 0; which < 3; which++) {
        opts = opts_of(true);
        opts.stale_ns = which != 1 ? 0 : opts.stale_ns;
        opts.forget_ns = which != 2 ? 0 : opts.forget_ns;
        init_at(&s, true, 3);
        s.opts = opts;
        ki_stream_disconnected(&s, 10 * SECOND);
        assert_int_equal(ki_stream_tick_absence(&s, 1000 * SECOND),
                         which == 2 ? KI_STEP_PURGE | KI_STEP_RESET : 0);
        assert_int_equal(is_partial(&s), which > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_quiet_connection_is_not_stale),
        cmocka_unit_test(a_lost_connection_is_stale_after_a_while),
        cmocka_unit_test(who_may_be_back_is_partial_and_not_forgotten),
        cmocka_unit_test(a_short_loss_is_not_stale),
        cmocka_unit_test(forgotten_blocks_come_back_by_a_replay),
        cmocka_unit_test(forgotten_without_a_replay_service),
        cmocka_unit_test(a_seeded_stream_is_forgotten),
        cmocka_unit_test(an_engine_that_starts_late),
        cmocka_unit_test(a_silent_engine_that_is_gone),
        cmocka_unit_test(forgotten_during_a_replay),
        cmocka_unit_test(gaps_wait_for_the_next_connection),
        cmocka_unit_test(a_beginning_is_broken_off),
        cmocka_unit_test(healing_is_broken_off),
        cmocka_unit_test(zero_is_never),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
