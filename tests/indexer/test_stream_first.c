// SPDX-License-Identifier: Apache-2.0
/* Streams whose first batch is 1: whether it is known that no batch 0 preceded it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>

#include "indexer/streams.h"

/* A stream whose publisher's ring began with 1, and ended with @last. @more batches have come since. */
static void begin_at_one(struct kh_stream *s, uint64_t last, uint64_t more)
{
    ki_stream_init(s, &with_replay);
    assert_int_equal(start_connected(s), KI_STEP_REQUEST);
    for (uint64_t i = 1; i <= last; i++)
        assert_int_equal(replayed(s, 0, i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(s, SECOND), KI_STEP_RESUME);
    assert_true(is_partial(s));
    /* Nothing is behind its last batch. */
    assert_int_equal(ki_stream_tick(s, 2 * SECOND), KI_STEP_REQUEST);
    assert_int_equal(s->request, last + 1);
    assert_int_equal(ki_stream_replay_end(s, 2 * SECOND), KI_STEP_RESUME);
    assert_int_equal(ki_stream_tick(s, 3 * SECOND), 0);
    for (uint64_t i = 1; i <= more; i++)
        assert_int_equal(live(s, 0, last + i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_tick(s, 4 * SECOND), KI_STEP_REQUEST);
    assert_int_equal(s->request, 0);
    assert_true(is_partial(s));
}

static void numbering_from_one_is_proved(void **state)
{
    struct kh_stream s;

    (void)state;
    begin_at_one(&s, 3, 1); /* and still does, with a further batch */
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_DROP | KI_STEP_RESUME);
    assert_false(is_partial(&s));
    assert_int_equal(s.stats.overruns + s.stats.missed + s.stats.gaps, 0);
    assert_int_equal(ki_stream_deadline(&s), 0);

    begin_at_one(&s, 3, 1); /* a full ring: batch 1 goes, as 0 may have before */
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_DROP | KI_STEP_RESUME);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_deadline(&s), 0);

    begin_at_one(&s, 3, 3); /* batch 1 is gone, but from a ring of more than 3 */
    assert_int_equal(replayed(&s, 0, 3), KI_STEP_DROP | KI_STEP_RESUME);
    assert_false(is_partial(&s));

    begin_at_one(&s, 3, 1); /* a full ring of 3, which answered before it had 5 and 6 */
    assert_int_equal(live(&s, 0, 5), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_DROP | KI_STEP_RESUME);
    assert_true(is_partial(&s));

    begin_at_one(&s, 3, 1); /* there was a batch 0: everything is read anew */
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_APPLY);
    for (uint64_t i = 1; i <= 4; i++)
        assert_int_equal(replayed(&s, 0, i), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, 4 * SECOND), KI_STEP_RESUME);
    assert_false(is_partial(&s));

    begin_at_one(&s, 3, 3); /* another process's ring, whose connection is to come */
    assert_int_equal(replayed(&s, 1, 3), KI_STEP_DROP | KI_STEP_RESUME);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_deadline(&s), 31 * SECOND); /* which sends all that it has */

    begin_at_one(&s, 3, 1); /* an empty cache needs no batch 0 */
    ki_stream_mark_whole(&s);
    assert_false(is_partial(&s));
}

/* A publisher whose newest batches are always ahead of what has come. */
static void numbering_from_one_of_a_busy_publisher(void **state)
{
    struct kh_stream s;
    uint64_t now = SECOND;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    for (uint64_t i = 3; i < 7; i++) {
        assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
        assert_int_equal(s.request, i);
        assert_int_equal(replayed(&s, 0, i), KI_STEP_DROP | KI_STEP_RESUME);
        assert_int_equal(live(&s, 0, i), KI_STEP_APPLY);
    }
    assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 7 + 64);
    assert_int_equal(live(&s, 0, 7), KI_STEP_APPLY); /* which doesn't wait */
    assert_int_equal(ki_stream_replay_end(&s, now), KI_STEP_RESUME);
    for (uint64_t i = 8; i <= 71; i++)
        assert_int_equal(live(&s, 0, i), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    assert_int_equal(ki_stream_tick(&s, now += 2 * SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_DROP | KI_STEP_RESUME);
    assert_false(is_partial(&s));
}

/* ... and that becomes slow before the bound is reached: a nearer one is asked for. */
static void numbering_from_one_of_a_publisher_that_pauses(void **state)
{
    struct kh_stream s;
    uint64_t now = SECOND;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(start_connected(&s), KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(ki_stream_replay_end(&s, SECOND), KI_STEP_RESUME);
    for (uint64_t i = 2; i < 6; i++) {
        assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
        assert_int_equal(replayed(&s, 0, i), KI_STEP_DROP | KI_STEP_RESUME);
        assert_int_equal(live(&s, 0, i), KI_STEP_APPLY);
    }
    assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
    assert_int_equal(ki_stream_replay_end(&s, now), KI_STEP_RESUME);
    assert_int_equal(ki_stream_tick(&s, now + SECOND / 2), 0);
    assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 6);
    assert_int_equal(ki_stream_replay_end(&s, now), KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 6), KI_STEP_APPLY);
    assert_int_equal(ki_stream_tick(&s, now += SECOND), KI_STEP_REQUEST);
    assert_int_equal(s.request, 0);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_DROP | KI_STEP_RESUME);
    assert_false(is_partial(&s));
}

/* Without a replay service nothing tells, but timestamps that only the Mooncake master has. */
static void numbering_from_one_without_replay(void **state)
{
    struct ki_batch_id id = batch(0, 1);
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &without_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(live(&s, 0, 2), KI_STEP_APPLY);
    assert_true(is_partial(&s));
    ki_stream_mark_whole(&s);
    assert_false(is_partial(&s));
    ki_stream_init(&s, &without_replay);
    id.timestamp = 1757499967482;
    assert_int_equal(ki_stream_live(&s, &id, false, SECOND), KI_STEP_APPLY);
    assert_false(is_partial(&s));
}

static void first_batch_one_is_asked_about(void **state)
{
    struct kh_stream s;

    (void)state;
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 0), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_APPLY);
    assert_false(is_partial(&s));
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 1), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(&s, 0, 1), KI_STEP_DROP);
    assert_int_equal(s.stats.gaps, 0);
    assert_true(is_partial(&s));
    /* Also when it is what a replay from 0 begins with. */
    ki_stream_init(&s, &with_replay);
    assert_int_equal(live(&s, 0, 3), KI_STEP_HOLD | KI_STEP_REQUEST);
    assert_int_equal(replayed(&s, 0, 1), KI_STEP_APPLY);
    assert_int_equal(replayed(&s, 0, 2), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_true(is_partial(&s));
    assert_int_equal(s.stats.overruns, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbering_from_one_is_proved),
        cmocka_unit_test(numbering_from_one_of_a_busy_publisher),
        cmocka_unit_test(numbering_from_one_of_a_publisher_that_pauses),
        cmocka_unit_test(numbering_from_one_without_replay),
        cmocka_unit_test(first_batch_one_is_asked_about),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
