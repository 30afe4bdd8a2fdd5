// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of the stream rules: two kinds of stream, and the batches of a process. */
#ifndef KV_TEST_INDEXER_STREAMS_H
#define KV_TEST_INDEXER_STREAMS_H

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
static inline struct ki_batch_id batch(uint64_t process, uint64_t sequence)
{
    return (struct ki_batch_id){.sequence = sequence,
                                .digest = process * 1000003 + sequence * 7 + 1,
                                .timestamp = 1e9 + (double)process * 1e5 + (double)sequence};
}

static inline unsigned live(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_live(s, &id, false, SECOND);
}

static inline unsigned replayed(struct ki_stream *s, uint64_t process, uint64_t sequence)
{
    struct ki_batch_id id = batch(process, sequence);

    return ki_stream_replayed(s, &id, SECOND);
}

/* Reading starts, over a connection that was made before the state was taken over. */
static inline unsigned start_connected(struct ki_stream *s)
{
    ki_stream_start(s, SECOND);
    return ki_stream_connected(s, false, SECOND);
}

#endif
