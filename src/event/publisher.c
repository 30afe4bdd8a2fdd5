// SPDX-License-Identifier: Apache-2.0
/*
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
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "event/encode.h"
#include "event/frames.h"
#include "event/replay.h"

#define DEFAULT_BUFFER_BATCHES 10000
#define DEFAULT_BUFFER_BYTES (UINT64_C(256) << 20)
#define DEFAULT_QUEUE_EVENTS 100000
#define DEFAULT_BATCH_EVENTS 256
#define MAX_BATCH_EVENTS 65536            /* limit of subscribers (kve_reader_opts) */
#define MAX_BATCH_BYTES ((size_t)4 << 20) /* subscribers refuse much larger messages */
/* Limit of either queue; a record's length fits 32 bits */
#define MAX_QUEUE_BYTES ((size_t)256 << 20)
#define KEEP_BYTES ((size_t)4 << 20) /* queue memory above this is freed */
#define SEND_HWM 100000
#define REPLAY_HWM 1000
#define MAX_REQUEST_BYTES 4096
#define LINGER_MS 1000
#define BATCHES_A_TURN 64 /* batches sent before replays get a turn */
#define MAX_ENDPOINT 512

struct queue {
    struct kv_buf events;
    struct kv_buf lens; /* one uint32_t per event; room for one more is always reserved */
};

struct kve_publisher {
    enum kve_encoding encoding;
    uint32_t rank, batch_events;
    size_t queue_events;
    uint64_t linger_ns;
    char *topic;
    char endpoint[MAX_ENDPOINT], replay_endpoint[MAX_ENDPOINT];

    pthread_mutex_t lock; /* guards the fields down to the next comment */
    pthread_cond_t sent_more;
    struct queue pending;
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
    struct queue taken;
    size_t taken_record, taken_byte; /* position up to which the thread has sent taken */
    uint64_t sequence;
    struct kve_ring ring;
    struct kve_replay replay;
};

static size_t n_records(const struct queue *queue)
{
    return queue->lens.len / sizeof(uint32_t);
}

static uint32_t record(const struct queue *queue, size_t i)
{
    uint32_t len;

    memcpy(&len, queue->lens.data + i * sizeof(len), sizeof(len));
    return len;
}

/* -- publishing -------------------------------------------------------------------------------- */

static int queue_event(struct kve_publisher *p, const struct kve_event *event)
{
    struct queue *queue = &p->pending;
    size_t before = queue->events.len;
    uint32_t len;

    kve_event_encode(&queue->events, event, p->encoding);
    len = (uint32_t)(queue->events.len - before);
    kv_buf_append(&queue->lens, &len, sizeof(len));
    kv_buf_reserve(&queue->lens, sizeof(len));
    return queue->events.error ? queue->events.error : queue->lens.error;
}

/* Queue a gap. Consecutive drops, before the next queued event, share one gap and one number. */
static void queue_gap(struct kve_publisher *p)
{
    const uint32_t gap = 0;
    size_t n = n_records(&p->pending);

    if (!n || record(&p->pending, n - 1) != gap)
        kv_buf_append(&p->pending.lens, &gap, sizeof(gap));
    kv_buf_reserve(&p->pending.lens, sizeof(gap));
    p->pending.lens.error = 0;
}

static const struct kve_event *event_at(const struct kve_event *events, size_t i)
{
    return (const struct kve_event *)(const void *)((const char *)events + i * events->size);
}

static int drop(struct kve_publisher *p, size_t n)
{
    p->stats.dropped_events += n;
    queue_gap(p);
    return -EAGAIN;
}

/* Queue all events or none. Returns 0, -EAGAIN or -ENOMEM. */
static int queue_events(struct kve_publisher *p, const struct kve_event *events, size_t n)
{
    struct queue *queue = &p->pending;
    size_t events_len = queue->events.len, lens_len = queue->lens.len;
    int rc = 0;

    if (n > p->queue_events || p->n_queued > p->queue_events - n)
        return drop(p, n);
    for (size_t i = 0; i < n && !rc; i++)
        rc = queue_event(p, event_at(events, i));
    if (rc) {
        queue->events.len = events_len;
        queue->lens.len = lens_len;
        queue->events.error = queue->lens.error = 0;
        return rc == -EMSGSIZE ? drop(p, n) : -ENOMEM;
    }
    if (!lens_len && p->linger_ns)
        p->oldest_ns = kv_now_ns();
    p->n_queued += n;
    p->accepted += n;
    p->stats.events += n;
    return 0;
}

int kve_publisher_publish(struct kve_publisher *publisher, const struct kve_event *events, size_t n)
{
    bool wake;
    int rc;

    if (!n)
        return 0;
    if (!publisher || !kv_sized(events, "kve_event"))
        return -EINVAL;
    for (size_t i = 0; i < n; i++) {
        if (event_at(events, i)->size != events->size || kve_event_check(event_at(events, i)) < 0)
            return -EINVAL;
    }
    pthread_mutex_lock(&publisher->lock);
    rc = queue_events(publisher, events, n);
    wake = publisher->sleeping;
    publisher->sleeping = false;
    pthread_mutex_unlock(&publisher->lock);
    if (wake)
        kv_wake_signal(&publisher->wake);
    return rc;
}

int kve_publisher_lost(struct kve_publisher *publisher, uint64_t n)
{
    bool wake;

    if (!publisher || !n)
        return publisher ? 0 : -EINVAL;
    pthread_mutex_lock(&publisher->lock);
    drop(publisher, n);
    wake = publisher->sleeping;
    publisher->sleeping = false;
    pthread_mutex_unlock(&publisher->lock);
    if (wake)
        kv_wake_signal(&publisher->wake);
    return 0;
}

int kve_publisher_flush(struct kve_publisher *publisher, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS, target;
    bool wake;
    int rc = 0;

    pthread_mutex_lock(&publisher->lock);
    target = publisher->hurry = publisher->accepted;
    wake = publisher->sleeping;
    publisher->sleeping = false;
    if (wake)
        kv_wake_signal(&publisher->wake);
    while (publisher->sent < target && rc != -ETIMEDOUT)
        rc = kv_cond_wait_until(&publisher->sent_more, &publisher->lock, deadline);
    rc = publisher->sent < target ? -ETIMEDOUT : 0;
    pthread_mutex_unlock(&publisher->lock);
    return rc;
}

int kve_publisher_get_stats(struct kve_publisher *publisher, struct kve_publisher_stats *ret)
{
    struct kve_publisher_stats stats;

    if (!publisher || !kv_sized(ret, "kve_publisher_stats"))
        return -EINVAL;
    pthread_mutex_lock(&publisher->lock);
    stats = publisher->stats;
    pthread_mutex_unlock(&publisher->lock);
    KV_GIVE(ret, &stats);
    return 0;
}

/* -- the thread: batches ----------------------------------------------------------------------- */

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

    while (end < n_records(&p->taken) && end - p->taken_record < p->batch_events &&
           record(&p->taken, end) && (!bytes || bytes + record(&p->taken, end) <= MAX_BATCH_BYTES))
        bytes += record(&p->taken, end++);
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
    return p->taken_record < n_records(&p->taken);
}

/* Send one turn's batches from taken. */
static void send_taken(struct kve_publisher *p)
{
    size_t events = 0, batches = 0;

    while (has_taken(p) && batches < BATCHES_A_TURN) {
        size_t first = p->taken_record;

        if (record(&p->taken, first)) {
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

static void reset_queue(struct queue *queue)
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
    struct queue swap;

    if (left)
        return left;
    reset_queue(&p->taken);
    swap = p->pending;
    p->pending = p->taken;
    p->taken = swap;
    p->taken_record = p->taken_byte = 0;
    return 0;
}

/* -- the thread: waiting ----------------------------------------------------------------------- */

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

static void *run(void *arg)
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

/* -- life -------------------------------------------------------------------------------------- */

static int zmq_failure(void)
{
    int error = zmq_errno();

    return error > 0 && error < ZMQ_HAUSNUMERO ? -error : -EIO;
}

static int set_option(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof(value)) < 0 ? zmq_failure() : 0;
}

static int open_socket(struct kve_publisher *p, int type, const char *endpoint, bool connect,
                       void **ret_socket, char *ret_endpoint)
{
    size_t len = MAX_ENDPOINT;
    int rc = 0;
    void *socket;

    *ret_socket = socket = zmq_socket(p->context, type);
    if (!socket)
        return zmq_failure();
    if (strchr(endpoint, '['))
        rc = set_option(socket, ZMQ_IPV6, 1);
    if (!rc)
        rc = set_option(socket, ZMQ_LINGER, type == ZMQ_PUB ? LINGER_MS : 0);
    if (!rc)
        rc = set_option(socket, ZMQ_SNDHWM, type == ZMQ_PUB ? SEND_HWM : REPLAY_HWM);
    if (!rc)
        rc = set_option(socket, ZMQ_TCP_KEEPALIVE, 1);
    if (!rc && type == ZMQ_ROUTER) {
        int64_t most = MAX_REQUEST_BYTES;

        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof(most));
        rc = set_option(socket, ZMQ_ROUTER_MANDATORY, 1);
    }
    if (!rc && (connect ? zmq_connect : zmq_bind)(socket, endpoint) < 0)
        rc = zmq_failure();
    if (!rc && zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, ret_endpoint, &len) < 0)
        rc = zmq_failure();
    return rc;
}

static int open_sockets(struct kve_publisher *p, const struct kve_publisher_opts *opts)
{
    const char *replay_endpoint = KV_OPT(opts, replay_endpoint, NULL);
    int rc;

    p->context = zmq_ctx_new();
    if (!p->context)
        return zmq_failure();
    rc =
        open_socket(p, ZMQ_PUB, opts->endpoint, KV_OPT(opts, connect, false), &p->pub, p->endpoint);
    if (rc || !replay_endpoint)
        return rc;
    rc = open_socket(p, ZMQ_ROUTER, replay_endpoint, false, &p->router, p->replay_endpoint);
    if (rc)
        return rc;
    return kve_ring_init(&p->ring, KV_OPT(opts, buffer_batches, DEFAULT_BUFFER_BATCHES),
                         KV_OPT(opts, buffer_bytes, DEFAULT_BUFFER_BYTES));
}

static struct kve_publisher *allocate(const struct kve_publisher_opts *opts)
{
    struct kve_publisher *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->wake.fd = p->timer = -1;
    p->encoding = KV_OPT(opts, encoding, KVE_ENCODING_MAP);
    p->rank = KV_OPT(opts, rank, 0);
    p->batch_events = KV_OPT(opts, batch_events, DEFAULT_BATCH_EVENTS);
    p->batch_events = KV_MIN(p->batch_events, (uint32_t)MAX_BATCH_EVENTS);
    p->queue_events = KV_OPT(opts, queue_events, DEFAULT_QUEUE_EVENTS);
    p->linger_ns = (uint64_t)KV_OPT(opts, linger_us, 0) * 1000;
    p->sequence = KV_OPT(opts, first_sequence, 0);
    p->pending.events.limit = p->taken.events.limit = MAX_QUEUE_BYTES;
    pthread_mutex_init(&p->lock, NULL);
    kv_cond_init(&p->sent_more);
    return p;
}

int kve_publisher_create(const struct kve_publisher_opts *opts, struct kve_publisher **ret)
{
    const char *topic = KV_OPT(opts, topic, "");
    struct kve_publisher *p;
    int rc = -ENOMEM;

    if (!ret || !kv_sized(opts, "kve_publisher_opts") || !KV_OPT(opts, endpoint, NULL))
        return -EINVAL;
    p = allocate(opts);
    if (!p)
        return -ENOMEM;
    p->topic = strdup(topic);
    if (!p->topic || kv_buf_reserve(&p->pending.lens, 4) < 0 ||
        kv_buf_reserve(&p->taken.lens, 4) < 0)
        goto fail;
    rc = kv_wake_open(&p->wake);
    if (rc)
        goto fail;
    p->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (p->timer < 0) {
        rc = -errno;
        goto fail;
    }
    rc = open_sockets(p, opts);
    if (rc)
        goto fail;
    kve_replay_init(&p->replay, p->router, &p->ring,
                    KV_OPT(opts, replay_framing, KVE_REPLAY_WITH_TOPIC), p->topic);
    rc = kv_thread_start(&p->thread, "kve-publisher", run, p);
    if (rc)
        goto fail;
    p->started = true;
    *ret = p;
    return 0;
fail:
    kve_publisher_destroy(p);
    return rc;
}

static void stop_thread(struct kve_publisher *p)
{
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    p->stop_ns = kv_now_ns() + LINGER_MS * KV_NS_PER_MS;
    pthread_mutex_unlock(&p->lock);
    kv_wake_signal(&p->wake);
    pthread_join(p->thread, NULL);
    kve_replay_fini(&p->replay);
}

static void free_queue(struct queue *queue)
{
    kv_buf_fini(&queue->events);
    kv_buf_fini(&queue->lens);
}

void kve_publisher_destroy(struct kve_publisher *publisher)
{
    struct kve_publisher *p = publisher;

    if (!p)
        return;
    if (p->started)
        stop_thread(p);
    kve_ring_fini(&p->ring);
    if (p->pub)
        zmq_close(p->pub);
    if (p->router)
        zmq_close(p->router);
    if (p->context)
        zmq_ctx_term(p->context);
    kv_wake_close(&p->wake);
    if (p->timer >= 0)
        close(p->timer);
    free_queue(&p->pending);
    free_queue(&p->taken);
    pthread_cond_destroy(&p->sent_more);
    pthread_mutex_destroy(&p->lock);
    free(p->topic);
    free(p);
}

const char *kve_publisher_endpoint(const struct kve_publisher *publisher)
{
    return publisher->endpoint;
}

const char *kve_publisher_replay_endpoint(const struct kve_publisher *publisher)
{
    return publisher->router ? publisher->replay_endpoint : NULL;
}
