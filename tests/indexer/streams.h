// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of the stream rules: two kinds of stream, and the batches of a process. */
#ifndef KV_TEST_INDEXER_STREAMS_H
#define KV_TEST_INDEXER_STREAMS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "indexer/stream/stream.h"

#define SECOND UINT64_C(1000000000)

static const struct ki_stream_opts with_replay = {.can_replay = true,
                                                  .max_attempts = 3,
                                                  .timeout_ns = SECOND,
                                                  .retry_delay_ns = SECOND / 10,
                                                  .cooldown_ns = 30 * SECOND,
                                                  .idle_ns = 5 * SECOND};
static const struct ki_stream_opts without_replay = {.max_attempts = 3};

/* A replay under way changes nothing of what has been applied: it doesn't count here. */
static inline bool is_partial(const struct kh_stream *s)
{
    return ki_stream_reasons(s) & ~KI_BECAUSE(REPLAYING);
}

static inline bool is_behind(const struct kh_stream *s)
{
    return ki_stream_reasons(s) & KI_BECAUSE(REPLAYING);
}

/* Something is missing that only a whole view brings back. */
static inline bool is_lossy(const struct kh_stream *s)
{
    return ki_stream_has(s, KI_REASONS_LOST);
}

/* A batch of a process: content and time follow from both. */
static inline struct ki_batch_id batch(uint64_t process, uint64_t sequence)
{
    return (struct ki_batch_id){.sequence = sequence,
                                .digest = process * 1000003 + sequence * 7 + 1,
                                .timestamp = 1e9 + (double)process * 1e5 + (double)sequence};
}

static inline unsigned live(struct kh_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_live(s, &id, false, SECOND);
}

static inline unsigned replayed(struct kh_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_replayed(s, &id, SECOND);
}

/* Reading starts, over a connection that was made before the state was taken over. */
static inline unsigned start_connected(struct kh_stream *s)
{
    ki_stream_start(s, SECOND);
    return ki_stream_connected(s, false, SECOND);
}

/* A stream that asked for batch @known of process 0 gets process 1's: all batches of process 1 up
 * to the @held one are replayed. */
static inline void is_replaced(struct kh_stream *s, uint64_t known, uint64_t held)
{
    assert_int_equal(s->request, known);
    assert_int_equal(replayed(s, 1, known),
                     KI_STEP_DROP | KI_STEP_PURGE | KI_STEP_RESET | KI_STEP_REQUEST);
    assert_int_equal(s->request, 0);
    for (uint64_t i = 0; i + 1 < held; i++)
        assert_int_equal(replayed(s, 1, i), KI_STEP_APPLY);
    assert_int_equal(replayed(s, 1, held - 1), KI_STEP_APPLY | KI_STEP_RESUME);
    assert_int_equal(live(s, 1, held), KI_STEP_APPLY);
    assert_false(is_lossy(s));
}

/* All attempts of a replay that nobody answers. Returns when it was given up. */
static inline uint64_t nobody_answers(struct kh_stream *s)
{
    uint64_t now_ns = 0;
    unsigned steps = 0;

    while (!(steps & KI_STEP_RESUME)) {
        now_ns = ki_stream_deadline(s);
        steps = ki_stream_tick(s, now_ns);
    }
    return now_ns;
}

static inline unsigned live_untimed(struct kh_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    id.timestamp = 0;
    return ki_stream_live(s, &id, false, SECOND);
}

static inline unsigned replayed_untimed(struct kh_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    id.timestamp = 0;
    return ki_stream_replayed(s, &id, SECOND);
}

#endif
