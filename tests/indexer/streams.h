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

#endif
