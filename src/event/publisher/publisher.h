// SPDX-License-Identifier: Apache-2.0
/**
 * Callers encode their events into a queue. One thread makes numbered batches of them, sends them,
 * keeps them for replay and answers replay requests. Only that thread uses the sockets.
 *
 *     publish() --> pending  --swap-->  taken --> batch --> PUB
 *      (any thread)  (lock)            (thread)     |
 *                                                  ring --> ROUTER, a slice at a time
 *
 * A queue holds encoded events end to end, and the length of each. Length 0 is a gap: the publisher
 * dropped events there. The thread spends a sequence number on the gap when it reaches it.
 */
#ifndef KV_EVENT_PUBLISHER_PUBLISHER_H
#define KV_EVENT_PUBLISHER_PUBLISHER_H

#include <pthread.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/thread/thread.h"
#include "event/publisher/replay.h"
#include "kv_event.h"

#define KVE_LINGER_MS 1000 /* for unsent events, when a publisher is destroyed */
#define KVE_MAX_ENDPOINT 512

struct kve_queue {
    struct kv_buf events;
    struct kv_buf lens; /* one uint32_t per event; room for one more is always reserved */
};

struct kve_publisher {
    enum kve_encoding encoding;
    uint32_t rank, batch_events;
    size_t queue_events;
    uint64_t linger_ns;
    char *topic;
    char endpoint[KVE_MAX_ENDPOINT], replay_endpoint[KVE_MAX_ENDPOINT];

    pthread_mutex_t lock; /* guards the fields down to the next comment */
    pthread_cond_t sent_more;
    struct kve_queue pending;
    uint64_t oldest_ns; /* time of the first pending event */
    size_t n_queued;    /* events pending or taken that aren't sent yet */
    uint64_t accepted, sent;
    uint64_t hurry; /* send without linger up to this event: a caller flushes */
    struct kve_publisher_stats stats;
    bool sleeping; /* the thread waits for a wake-up */
    bool stop;
    uint64_t stop_ns; /* time at which the thread stops, with or without unsent events */

    struct kv_wake wake;
    pthread_t thread;
    bool started;

    void *context, *pub, *router; /* from here on: fields of the thread */
    int timer;
    struct kve_queue taken;
    size_t taken_record, taken_byte; /* position up to which the thread has sent taken */
    uint64_t sequence;
    struct kve_ring ring;
    struct kve_replay replay;
};

static inline size_t kve_queue_len(const struct kve_queue *queue)
{
    return queue->lens.len / sizeof(uint32_t);
}

static inline uint32_t kve_queue_record(const struct kve_queue *queue, size_t i)
{
    uint32_t len;

    memcpy(&len, queue->lens.data + i * sizeof(len), sizeof(len));
    return len;
}

/** Run the thread of the publisher @arg until its stop is set. */
void *kve_publisher_run(void *arg);

#endif
