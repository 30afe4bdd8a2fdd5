// SPDX-License-Identifier: Apache-2.0
/* The thread of a publisher: batches, replays. */
#include <sys/timerfd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "event/publisher/publisher.h"
#include "event/wire/encode.h"
#include "event/wire/frames.h"

#define MAX_BATCH_BYTES ((size_t)4 << 20) /* subscribers refuse much larger messages */
#define KEEP_BYTES ((size_t)4 << 20)      /* queue memory above this is freed */
#define BATCHES_A_TURN 64                 /* batches sent before replays get a turn */

/* -- batches ----------------------------------------------------------------------------------- */

static void send_batch(struct kve_publisher *p, zmq_msg_t *payload)
{
    uint8_t sequence[KVE_SEQUENCE_BYTES];
    zmq_msg_t copy;

    kve_sequence_put(sequence, p->sequence);
    if (p->router)
        kve_ring_push(&p->ring, p->sequence, payload);
    zmq_msg_init(&copy);
    zmq_msg_copy(&copy, payload);
    zmq_send(p->pub, p->topic, strlen(p->topic), ZMQ_SNDMORE);
    zmq_send(p->pub, sequence, sizeof(sequence), ZMQ_SNDMORE);
    if (zmq_msg_send(&copy, p->pub, 0) < 0)
        zmq_msg_close(&copy);
}

/* Make the next batch: events up to a gap, a limit or the end. */
static void make_batch(struct kve_publisher *p)
{
    uint8_t head[KVE_BATCH_HEAD], tail[KVE_BATCH_TAIL];
    size_t head_len, tail_len, bytes = 0;
    size_t end = p->taken_record;
    zmq_msg_t payload;
    char *to;

    while (end < kve_queue_len(&p->taken) && end - p->taken_record < p->batch_events &&
           kve_queue_record(&p->taken, end) &&
           (!bytes || bytes + kve_queue_record(&p->taken, end) <= MAX_BATCH_BYTES))
        bytes += kve_queue_record(&p->taken, end++);
    head_len = kve_batch_head(head, (double)kv_wall_ns() / 1e9, (uint32_t)(end - p->taken_record));
    tail_len = kve_batch_tail(tail, p->rank);
    if (zmq_msg_init_size(&payload, head_len + bytes + tail_len) < 0) {
        kv_log_error("events", "no memory for a batch, its events are lost", "bytes=%zu", bytes);
    } else {
        to = zmq_msg_data(&payload);
        memcpy(to, head, head_len);
        memcpy(to + head_len, p->taken.events.data + p->taken_byte, bytes);
        memcpy(to + head_len + bytes, tail, tail_len);
        send_batch(p, &payload);
        zmq_msg_close(&payload);
    }
    p->sequence++;
    p->taken_record = end;
    p->taken_byte += bytes;
}

static bool has_taken(const struct kve_publisher *p)
{
    return p->taken_record < kve_queue_len(&p->taken);
}

/* Send one turn's batches from taken. */
static void send_taken(struct kve_publisher *p)
{
    size_t events = 0, batches = 0;

    while (has_taken(p) && batches < BATCHES_A_TURN) {
        size_t first = p->taken_record;

        if (kve_queue_record(&p->taken, first)) {
            make_batch(p);
            events += p->taken_record - first;
            batches++;
        } else {
            p->sequence++;
            p->taken_record++;
        }
    }
    if (!events)
        return;
    pthread_mutex_lock(&p->lock);
    p->sent += events;
    p->n_queued -= events;
    p->stats.batches += batches;
    pthread_cond_broadcast(&p->sent_more);
    pthread_mutex_unlock(&p->lock);
}

static void reset_queue(struct kve_queue *queue)
{
    kv_buf_clear(&queue->events);
    kv_buf_clear(&queue->lens);
    if (queue->events.capacity > KEEP_BYTES)
        kv_buf_fini(&queue->events);
    kv_buf_reserve(&queue->lens, sizeof(uint32_t));
}

/*
 * Return how long the pending events may still linger, in nanoseconds; 0: take them now. The caller
 * holds the lock.
 */
static uint64_t linger_left(const struct kve_publisher *p)
{
    uint64_t now, end;

    if (!p->linger_ns || p->stop || p->sent < p->hurry || p->n_queued >= p->batch_events)
        return 0;
    now = kv_now_ns();
    end = p->oldest_ns + p->linger_ns;
    return now >= end ? 0 : end - now;
}

/*
 * Swap pending into taken, which must be empty. Returns the result of linger_left. The caller holds
 * the lock.
 */
static uint64_t take_pending(struct kve_publisher *p)
{
    uint64_t left = linger_left(p);
    struct kve_queue swap;

    if (left)
        return left;
    reset_queue(&p->taken);
    swap = p->pending;
    p->pending = p->taken;
    p->taken = swap;
    p->taken_record = p->taken_byte = 0;
    return 0;
}

/* -- waiting ----------------------------------------------------------------------------------- */

static void arm_timer(struct kve_publisher *p, uint64_t ns)
{
    struct itimerspec when = {.it_value = {(time_t)(ns / KV_NS_PER_S), (long)(ns % KV_NS_PER_S)}};

    timerfd_settime(p->timer, 0, &when, NULL);
}

/*
 * Wait until events are published, the linger time is over, a replay request arrives or a replay
 * can go on.
 */
static void wait_for_work(struct kve_publisher *p, uint64_t linger_ns)
{
    zmq_pollitem_t items[3] = {
        {.fd = p->wake.fd, .events = ZMQ_POLLIN},
        {.fd = p->timer, .events = ZMQ_POLLIN},
        {.socket = p->router, .events = ZMQ_POLLIN},
    };

    arm_timer(p, linger_ns);
    if (zmq_poll(items, p->router ? 3 : 2, kve_replay_timeout_ms(&p->replay)) > 0 &&
        items[0].revents)
        kv_wake_clear(&p->wake);
}

/* Take pending events. Returns false when the thread must end. *@ret_idle: nothing to send. */
static bool next_turn(struct kve_publisher *p, bool *ret_idle, uint64_t *ret_linger_ns)
{
    bool go_on = true;

    *ret_linger_ns = 0;
    pthread_mutex_lock(&p->lock);
    if (!has_taken(p) && p->pending.lens.len)
        *ret_linger_ns = take_pending(p);
    *ret_idle = !has_taken(p);
    if (p->stop && (*ret_idle || kv_now_ns() >= p->stop_ns))
        go_on = false;
    p->sleeping = *ret_idle;
    p->stats.replay_requests = p->replay.requests;
    p->stats.replayed_batches = p->replay.batches;
    pthread_mutex_unlock(&p->lock);
    return go_on;
}

void *kve_publisher_run(void *arg)
{
    struct kve_publisher *p = arg;
    uint64_t linger_ns;
    bool idle;

    while (next_turn(p, &idle, &linger_ns)) {
        if (idle)
            wait_for_work(p, linger_ns);
        else
            send_taken(p);
        kve_replay_receive(&p->replay, p->sequence);
        kve_replay_serve(&p->replay);
    }
    return NULL;
}
