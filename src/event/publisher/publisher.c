// SPDX-License-Identifier: Apache-2.0
/* Calls of a publisher: encode events into the queue. */
#include "event/publisher/publisher.h"

#include "base/core/clock.h"
#include "event/wire/encode.h"

static int queue_event(struct kve_publisher *p, const struct kve_event *event)
{
    struct kve_queue *queue = &p->pending;
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
    size_t n = kve_queue_len(&p->pending);

    if (!n || kve_queue_record(&p->pending, n - 1) != gap)
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
    struct kve_queue *queue = &p->pending;
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

const char *kve_publisher_endpoint(const struct kve_publisher *publisher)
{
    return publisher->endpoint;
}

const char *kve_publisher_replay_endpoint(const struct kve_publisher *publisher)
{
    return publisher->router ? publisher->replay_endpoint : NULL;
}
