// SPDX-License-Identifier: Apache-2.0
/**
 * Copies of live batches that wait while a replay runs or recovery holds the streams. Bounded in
 * bytes, per stream and over all streams.
 *
 * Beyond a bound the newest batch is dropped. Its number is then missing, so the rules of stream.h
 * find the gap and have it replayed. Thread-confined, except for the budget that all streams share.
 */
#ifndef KV_INDEXER_STREAM_BACKLOG_H
#define KV_INDEXER_STREAM_BACKLOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "indexer/stream/stream.h"

/** Shared by all streams. Zero-initialise @used. */
struct ki_backlog_budget {
    uint64_t max_bytes;        /* limit over all streams */
    uint64_t max_stream_bytes; /* limit of one stream */
    _Atomic uint64_t used;     /* relaxed: a bound, which publishes no other data */
};

struct ki_backlog_item {
    STAILQ_ENTRY(ki_backlog_item) next;
    struct ki_batch_id id;
    bool reconnected; /* came over another connection than the batch before */
    uint64_t bytes;   /* size as counted in the budget */
    size_t len;
    uint8_t data[];
};

struct ki_backlog {
    STAILQ_HEAD(ki_backlog_items, ki_backlog_item) items;
    uint64_t bytes;
    bool lost_reconnect; /* a dropped batch was the first of its connection */
    /* Number behind the newest batch, if that was dropped: no later one shows it as a gap. 0: it wasn't. */
    uint64_t dropped_next;
};

void ki_backlog_init(struct ki_backlog *b);
/** Append a batch. Returns 0; -ENOBUFS at a bound, -ENOMEM: the batch is dropped. */
int ki_backlog_put(struct ki_backlog *b, struct ki_backlog_budget *budget,
                   const struct ki_batch_id *id, bool reconnected, const void *data, size_t len);
/** Take out the oldest batch; NULL: none. Its bytes count until ki_backlog_free. */
struct ki_backlog_item *ki_backlog_take(struct ki_backlog *b);
void ki_backlog_free(struct ki_backlog *b, struct ki_backlog_budget *budget,
                     struct ki_backlog_item *item);
void ki_backlog_clear(struct ki_backlog *b, struct ki_backlog_budget *budget);

#endif
