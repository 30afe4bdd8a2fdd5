// SPDX-License-Identifier: Apache-2.0
/* The stream rules behind a recovery: streams that go on from a peer's position, or from its blocks
 * without one. */
#include "indexer/streams.h"

/* A stream that goes on from a peer's position: @last of process 0. */
static void init_recovered(struct kh_stream *s, const struct ki_stream_opts *opts, uint64_t last)
{
    ki_stream_init(s, opts);
    ki_stream_seed(s, last, batch(0, last).timestamp, false);
}

static void after_recovery_from_a_peer(void **state)
{
    struct kh_stream s;

    (void)state;
    /* The backlog of the socket begins before the peer's position and goes on beyond it. */
    init_recovered(&s, &with_replay, 500);
    for (uint64_t i = 300; i <= 500; i++)
        assert_int_equal(live(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live(&s, 0, 501), KI_STEP_APPLY);
    assert_false(is_lossy(&s));
    /* Only what is missing is replayed. */
    init_recovered(&s, &with_replay, 500);
    assert_int_equal(live(&s, 0, 503), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 500);
    assert_int_equal(replayed(&s, 0, 500), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 501), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 502), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 503), KI_STEP_APPLY);
    assert_false(is_lossy(&s));
    /* The engine restarted since. */
    init_recovered(&s, &without_replay, 500);
    assert_int_equal(live(&s, 1, 4), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    /* A view that was partial at the peer's gets its chance of becoming whole here. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, batch(0, 500).timestamp, true);
    ki_stream_start(&s, SECOND);
    assert_int_equal(live(&s, 0, 501), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 500), KI_STEP_DROP | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 501), KI_STEP_APPLY);
    assert_true(is_lossy(&s));
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
}

/* A peer that says no position: go on with what comes. Nothing tells whether the blocks are all, or
 * whose they are. */
static void after_a_dump_without_positions(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    ki_stream_seed_cursorless(&s);
    assert_true(is_partial(&s));
    assert_int_equal(live(&s, 0, 70), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 71), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    ki_stream_mark_whole(&s); /* the engine has cleared its cache */
    assert_false(is_partial(&s));
    /* Everything since the beginning of the process is read: blocks from before are another's. */
    ki_stream_init(&s, &without_replay);
    ki_stream_seed_cursorless(&s);
    assert_int_equal(live(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    /* A replay replaces what the peer had. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed_cursorless(&s);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(live(&s, 0, 2), KI_STEP_HOLD);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    /* Nobody answers it: later. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed_cursorless(&s);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    nobody_answers(&s);
    assert_int_equal(live(&s, 0, 70), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    assert_int_not_equal(ki_stream_deadline(&s), 0);
}

/* A peer's position without a time: what waits in our socket is older, or another process's. */
static void recovered_without_timestamps(void **state)
{
    struct kh_stream s;

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
    /* A publisher with a replay endpoint is asked once. */
    ki_stream_init(&s, &with_replay);
    ki_stream_seed(&s, 500, 0, false);
    assert_int_equal(live_untimed(&s, 0, 300), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(s.request, 500);
    assert_int_equal(replayed_untimed(&s, 0, 500), KI_STEP_DROP | KI_STEP_RESUME);
    for (uint64_t i = 300; i <= 500; i++)
        assert_int_equal(live_untimed(&s, 0, i), KI_STEP_DROP);
    assert_int_equal(live_untimed(&s, 0, 501), KI_STEP_APPLY);
    assert_false(is_lossy(&s));
    /* The publisher hasn't reached that position. */
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
    assert_false(is_lossy(&s));
}

/* Between the peer's dump and our connection the engine restarted and got as far as the old one. */
static void restart_hidden_behind_a_recovery(void **state)
{
    struct kh_stream s;

    (void)state;
    for (uint64_t sequence = 11; sequence <= 13; sequence += 2) {
        init_recovered(&s, &with_replay, 10);
        ki_stream_start(&s, SECOND);
        assert_int_equal(live(&s, 1, sequence), KI_STEP_HOLD | KI_STEP_REQUEST);
        is_replaced(&s, 10, sequence);
    }
    /* Nobody answers: not called whole. */
    init_recovered(&s, &with_replay, 10);
    s.cooldown_to_ns = 2 * SECOND;
    assert_int_equal(live(&s, 1, 11), KI_STEP_APPLY);
    assert_true(is_lossy(&s));
}

/* After a recovery nothing comes: what was published before we were connected is asked for at
 * once. */
static void silence_after_a_recovery(void **state)
{
    struct kh_stream s;

    (void)state;
    for (uint64_t process = 0; process < 2; process++) {
        init_recovered(&s, &with_replay, 10);
        assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
        assert_int_equal(s.request, 10);
        if (process == 0) {
            assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP);
            assert_int_equal(replayed(&s, 0, 11), KI_STEP_APPLY);
            assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
            assert_int_equal(s.position, 11);
        } else {
            /* it hasn't got that far: its beginning replaces what the peer had */
            assert_int_equal(ki_stream_replay_end(&s, SECOND),
                             KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
            assert_int_equal(s.request, 0);
            assert_int_equal(replayed(&s, 1, 0), KI_STEP_APPLY);
            assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
            assert_int_equal(s.position, 0);
        }
        assert_false(is_partial(&s));
    }
    /* A live batch while it is asked waits for the answer. */
    init_recovered(&s, &with_replay, 10);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(live(&s, 0, 11), KI_STEP_HOLD);
    assert_int_equal(replayed(&s, 0, 10), KI_STEP_DROP | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 11), KI_STEP_APPLY);
    /* The publisher has sent nothing: the peer's blocks were another process's. */
    init_recovered(&s, &with_replay, 10);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_true(ki_stream_replay_end(&s, SECOND) & KI_STEP_PURGE);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(ki_stream_has_position(&s));
    /* An answer that makes no sense says nothing of the kind. */
    init_recovered(&s, &with_replay, 10);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_failed(&s, SECOND), 0);
    nobody_answers(&s);
    assert_int_equal(s.position, 10);
    assert_true(is_partial(&s));
    /* Without a replay service the connection vouches for the position: it is older than the
     * dump. */
    init_recovered(&s, &without_replay, 10);
    assert_int_equal(start_connected(&s), 0);
    assert_false(is_partial(&s));
    /* A connection made since doesn't. */
    init_recovered(&s, &without_replay, 10);
    ki_stream_start(&s, SECOND);
    assert_int_equal(ki_stream_connected(&s, true, SECOND), 0);
    assert_true(is_partial(&s));
}

/* Batches for which there was no room are asked for, although none comes behind them. */
static void without_room(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_false(ki_stream_reasons(&s));
    ki_stream_dropped(&s, 3, SECOND);
    assert_true(is_behind(&s));
    assert_int_equal(ki_stream_deadline(&s), SECOND);
    assert_int_equal(ki_stream_tick(&s, SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), 0); /* the last reply was lost */
    assert_true(is_behind(&s));
    assert_int_equal(ki_stream_tick(&s, ki_stream_deadline(&s)), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_DROP);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    assert_false(ki_stream_reasons(&s));
    /* The next batch shows the gap, too. */
    ki_stream_dropped(&s, 5, SECOND);
    assert_int_equal(live(&s, 0, 5), KI_STEP_HOLD | KI_STEP_REQUEST);
    /* Nobody can be asked. */
    ki_stream_init(&s, &without_replay);
    assert_int_equal(start_connected(&s), 0);
    assert_int_equal(live(&s, 0, 0), KI_STEP_APPLY);
    ki_stream_dropped(&s, 3, SECOND);
    assert_true(is_lossy(&s));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(after_recovery_from_a_peer),
        cmocka_unit_test(after_a_dump_without_positions),
        cmocka_unit_test(recovered_without_timestamps),
        cmocka_unit_test(restart_hidden_behind_a_recovery),
        cmocka_unit_test(silence_after_a_recovery),
        cmocka_unit_test(without_room),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
