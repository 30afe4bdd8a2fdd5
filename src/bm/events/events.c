// SPDX-License-Identifier: Apache-2.0
/*
 * The event manager. Registries fill one buffer while its thread empties the other; then the two
 * are exchanged.
 *
 *   registries ──► filling (bounded) ⇄ draining ──► batches ──► sink, sink, ...
 *
 * A registry only appends, under a lock that the thread holds just for the exchange. Events that
 * don't fit are dropped and counted. The sinks get the count in front of the batch that follows the
 * gap, or alone when no event follows within the window.
 */
#include "bm/events/events.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "bm/events/event_record.h"

#define MAX_SINKS 16
#define MAX_BATCH 65536u
#define FIRST_BYTES ((size_t)64 << 10)

struct buffer {
    uint8_t *data;
    size_t len, capacity;
    size_t n;
    uint64_t lost;     /* events dropped right before the first one */
    uint64_t again;    /* of these, changes that were told again */
    uint64_t since_ns; /* time of the first event, or of the loss before it */
};

struct sink {
    int id; /* 0: none */
    enum kvbm_event_scope scope;
    struct kvbm_sink_ops ops;
    void *arg;
};

struct kvbm_events {
    uint32_t max_batch;
    uint64_t window_ns;
    size_t queue_bytes;

    pthread_mutex_t lock;
    pthread_cond_t work; /* signals the thread: a batch, a flush or the end */
    pthread_cond_t idle; /* signalled when the thread has handed out everything */
    struct buffer filling;
    uint64_t sequence;         /* number of the next event */
    uint64_t lost;             /* events dropped behind those in filling */
    uint64_t lost_again;       /* of these, changes that were told again */
    uint64_t wall_ns;          /* wall clock of the event being written */
    bool was_pending, was_due; /* state before that event */
    bool hurry;                /* a caller flushes */
    bool stop;
    struct kvbm_events_stats stats;
    uint64_t delivered;        /* events that were delivered, and losses told, of stats.written */
    uint64_t flushes, flushed; /* calls of flush; those of which all sinks know */
    uint64_t tick_ns;          /* when a sink is to be called without events */
    atomic_uint changing;      /* callers that want walk_lock to change sources: walks give way */
    pthread_mutex_t walk_lock; /* held while registries are walked; taken before theirs */
    LIST_HEAD(event_sources, kvbm_event_source)
    sources; /* registries that use the manager; both locks to change */

    struct buffer draining; /* used by the thread only */
    struct kvbm_event *batch, *scoped;
    bool told_again;            /* the batch has a change that is told again */
    pthread_mutex_t sinks_lock; /* held while sinks run */
    struct sink sinks[MAX_SINKS];
    int next_id;
    pthread_t thread;
};

/* ---- writing, inside the registry's lock ---- */

/* True when there is an event or a loss to deliver. */
static bool is_pending(const struct kvbm_events *events)
{
    return events->filling.n || events->filling.lost || events->lost;
}

/* True when a batch is due at once: it is full, or events were lost. */
static bool is_due(const struct kvbm_events *events)
{
    return events->filling.n >= events->max_batch || events->lost;
}

void kvbm_events_begin(struct kvbm_events *events)
{
    pthread_mutex_lock(&events->lock);
    events->was_pending = is_pending(events);
    events->was_due = is_due(events);
    events->wall_ns = kv_wall_ns();
}

static bool make_room(struct buffer *buffer, size_t bytes, size_t limit)
{
    size_t capacity = KV_MAX(buffer->capacity, FIRST_BYTES);
    uint8_t *data;

    if (buffer->len + bytes <= buffer->capacity)
        return true;
    while (capacity < buffer->len + bytes)
        capacity *= 2;
    capacity = KV_MIN(capacity, limit);
    if (buffer->len + bytes > capacity)
        return false;
    data = realloc(buffer->data, capacity);
    if (!data)
        return false;
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void kvbm_events_put(struct kvbm_events *events, const struct kvbm_event *event)
{
    struct buffer *filling = &events->filling;
    struct kvbm_event stamped = *event;
    size_t bytes = kvbm_record_bytes(event);

    events->stats.written++;
    stamped.sequence = events->sequence;
    events->sequence += !event->again;
    /* behind a loss no event is written until the thread has taken the events before the loss */
    if (events->lost || !make_room(filling, bytes, events->queue_bytes)) {
        events->lost++;
        events->lost_again += event->again;
        events->stats.dropped++;
        return;
    }
    if (!filling->n && !filling->lost)
        filling->since_ns = kv_now_ns();
    stamped.time_ns = events->wall_ns;
    kvbm_record_put(filling->data + filling->len, &stamped);
    filling->len += bytes;
    filling->n++;
}

uint64_t kvbm_events_capacity(const struct kvbm_events *events, uint32_t key_len, uint32_t n_tokens)
{
    const struct kvbm_event like = {.key_len = key_len, .parent = events, .n_tokens = n_tokens};

    return events->queue_bytes / kvbm_record_bytes(&like); /* reads no parent */
}

/* Wake the thread at the first event and when a batch is full; not in between. */
void kvbm_events_end(struct kvbm_events *events)
{
    if (is_pending(events) != events->was_pending || is_due(events) != events->was_due)
        pthread_cond_signal(&events->work);
    pthread_mutex_unlock(&events->lock);
}

/* ---- delivery ---- */

static bool is_for(const struct sink *sink, const struct kvbm_event *event)
{
    if (event->again)
        return sink->ops.again;
    return sink->scope == KVBM_EVENTS_PER_TIER || event->first || event->last;
}

/* Hand the batch to a sink, with the loss before it. A change told again is lost to those only that get
 * such changes: the others had it before. */
static void deliver_to(struct kvbm_events *events, const struct sink *sink, size_t n)
{
    const struct buffer *buffer = &events->draining;
    uint64_t lost = buffer->lost - (sink->ops.again ? 0 : buffer->again);
    const struct kvbm_event *batch = events->batch;
    size_t kept = 0;

    if (sink->scope == KVBM_EVENTS_CONSOLIDATED || (events->told_again && !sink->ops.again)) {
        for (size_t i = 0; i < n; i++) {
            if (is_for(sink, &batch[i]))
                events->scoped[kept++] = batch[i];
        }
        batch = events->scoped;
        n = kept;
    }
    if (n || lost)
        sink->ops.fn(sink->arg, batch, n, lost);
}

static void deliver(struct kvbm_events *events, size_t n)
{
    pthread_mutex_lock(&events->sinks_lock);
    for (size_t i = 0; i < MAX_SINKS; i++) {
        if (events->sinks[i].id)
            deliver_to(events, &events->sinks[i], n);
    }
    pthread_mutex_unlock(&events->sinks_lock);
    events->draining.lost = events->draining.again = 0;
}

static uint64_t drain(struct kvbm_events *events)
{
    struct buffer *buffer = &events->draining;
    uint64_t batches = 0;
    size_t at = 0;

    if (!buffer->n && buffer->lost)
        deliver(events, 0);
    while (at < buffer->len) {
        size_t n = 0;

        events->told_again = false;
        for (; n < events->max_batch && at < buffer->len; n++) {
            at += kvbm_record_get(buffer->data + at, &events->batch[n]);
            events->told_again |= events->batch[n].again;
        }
        deliver(events, n);
        batches++;
    }
    buffer->len = buffer->n = 0;
    return batches;
}

/* Let the sinks do what is due. Returns the time of the next call. */
static uint64_t tick(struct kvbm_events *events, bool now)
{
    uint64_t next = UINT64_MAX;

    pthread_mutex_lock(&events->sinks_lock);
    for (size_t i = 0; i < MAX_SINKS; i++) {
        if (events->sinks[i].id && events->sinks[i].ops.tick)
            next = KV_MIN(next, events->sinks[i].ops.tick(events->sinks[i].arg, now));
    }
    pthread_mutex_unlock(&events->sinks_lock);
    return next;
}

/* Wait until a batch is full, its window is over, it can't grow, or a sink has something to do. The
 * lock is held. */
static void wait_for_batch(struct kvbm_events *events)
{
    while (!events->stop && !events->hurry && !is_pending(events)) {
        if (kv_cond_wait_until(&events->work, &events->lock, events->tick_ns) == -ETIMEDOUT)
            return;
    }
    while (!events->stop && !events->hurry && !is_due(events)) {
        uint64_t due = events->filling.since_ns + events->window_ns;

        if (kv_cond_wait_until(&events->work, &events->lock, due) == -ETIMEDOUT)
            return;
    }
}

/* Take the events written so far. Returns how many of all events are out then; losses behind them go
 * out with the next batch. */
static uint64_t exchange(struct kvbm_events *events)
{
    uint64_t up_to = events->stats.written - events->lost;
    struct buffer full = events->filling;

    events->filling = events->draining;
    events->filling.lost = events->lost;
    events->filling.again = events->lost_again;
    if (events->lost)
        events->filling.since_ns = kv_now_ns();
    events->lost = events->lost_again = 0;
    events->draining = full;
    return up_to;
}

static void *run(void *arg)
{
    struct kvbm_events *events = arg;

    pthread_mutex_lock(&events->lock);
    while (!events->stop || is_pending(events)) {
        uint64_t up_to, batches, flushes, next;
        bool now;

        wait_for_batch(events);
        up_to = exchange(events);
        flushes = events->flushes;
        now = events->stop || flushes > events->flushed;
        events->tick_ns = UINT64_MAX; /* a sink that is added meanwhile sets it to 0 */
        pthread_mutex_unlock(&events->lock);
        batches = drain(events);
        next = tick(events, now);
        pthread_mutex_lock(&events->lock);
        events->tick_ns = KV_MIN(events->tick_ns, next);
        events->stats.batches += batches;
        events->delivered = up_to;
        events->flushed = flushes;
        events->hurry = false;
        pthread_cond_broadcast(&events->idle);
    }
    pthread_mutex_unlock(&events->lock);
    return NULL;
}

/* ---- creation and destruction ---- */

static void events_free(struct kvbm_events *events)
{
    pthread_cond_destroy(&events->work);
    pthread_cond_destroy(&events->idle);
    pthread_mutex_destroy(&events->lock);
    pthread_mutex_destroy(&events->sinks_lock);
    pthread_mutex_destroy(&events->walk_lock);
    free(events->filling.data);
    free(events->draining.data);
    free(events->batch);
    free(events->scoped);
    free(events);
}

int kvbm_events_create(const struct kvbm_events_opts *opts, struct kvbm_events **ret)
{
    struct kvbm_events *events;
    int err = -ENOMEM;

    if (!ret || !kv_sized_or_null(opts, "kvbm_events_opts") ||
        KV_OPT(opts, max_batch, 0) > MAX_BATCH)
        return -EINVAL;
    events = calloc(1, sizeof(*events));
    if (!events)
        return -ENOMEM;
    events->max_batch = KV_OPT(opts, max_batch, 1024);
    events->window_ns = KV_OPT(opts, window_us, 10000) * UINT64_C(1000);
    events->queue_bytes = KV_OPT(opts, queue_bytes, (uint64_t)16 << 20);
    pthread_mutex_init(&events->lock, NULL);
    pthread_mutex_init(&events->sinks_lock, NULL);
    pthread_mutex_init(&events->walk_lock, NULL);
    LIST_INIT(&events->sources);
    events->tick_ns = UINT64_MAX;
    kv_cond_init(&events->work);
    kv_cond_init(&events->idle);
    events->batch = calloc(events->max_batch, sizeof(*events->batch));
    events->scoped = calloc(events->max_batch, sizeof(*events->scoped));
    if (!events->batch || !events->scoped)
        goto fail;
    err = kv_thread_start(&events->thread, "kvbm-events", run, events);
    if (err < 0)
        goto fail;
    *ret = events;
    return 0;

fail:
    events_free(events);
    return err;
}

static bool is_mine(const struct kvbm_events *events)
{
    return pthread_equal(pthread_self(), events->thread);
}

int kvbm_events_destroy(struct kvbm_events *events)
{
    bool used;

    if (!events)
        return 0;
    if (is_mine(events))
        return -EDEADLK;
    pthread_mutex_lock(&events->lock);
    used = !LIST_EMPTY(&events->sources);
    events->stop = !used;
    pthread_cond_signal(&events->work);
    pthread_mutex_unlock(&events->lock);
    if (used)
        return -EBUSY;
    pthread_join(events->thread, NULL);
    for (size_t i = 0; i < MAX_SINKS; i++) {
        if (events->sinks[i].id && events->sinks[i].ops.close)
            events->sinks[i].ops.close(events->sinks[i].arg);
    }
    events_free(events);
    return 0;
}

/* ---- registries ---- */

static void change_sources(struct kvbm_events *events, struct kvbm_event_source *source, bool use)
{
    atomic_fetch_add_explicit(&events->changing, 1, memory_order_relaxed); /* a hint only */
    pthread_mutex_lock(&events->walk_lock);
    pthread_mutex_lock(&events->lock);
    if (use)
        LIST_INSERT_HEAD(&events->sources, source, list);
    else
        LIST_REMOVE(source, list);
    pthread_mutex_unlock(&events->lock);
    pthread_mutex_unlock(&events->walk_lock);
    atomic_fetch_sub_explicit(&events->changing, 1, memory_order_relaxed);
}

void kvbm_events_use(struct kvbm_events *events, struct kvbm_event_source *source)
{
    change_sources(events, source, true);
}

void kvbm_events_leave(struct kvbm_events *events, struct kvbm_event_source *source)
{
    change_sources(events, source, false);
}

bool kvbm_events_walk(struct kvbm_events *events,
                      bool (*fn)(void *arg, const struct kvbm_walked *blocks, size_t n), void *arg)
{
    struct kvbm_walked *blocks = calloc(KVBM_WALK, sizeof(*blocks));
    struct kvbm_event_source *source;
    bool on = blocks != NULL;

    pthread_mutex_lock(&events->walk_lock);
    LIST_FOREACH(source, &events->sources, list)
    {
        uint32_t at = 0;

        do {
            size_t n;

            on = on && !atomic_load_explicit(&events->changing, memory_order_relaxed);
            n = on ? source->walk(source, &at, blocks) : 0;

            on = on && (!n || fn(arg, blocks, n));
        } while (on && at);
    }
    pthread_mutex_unlock(&events->walk_lock);
    free(blocks);
    return on;
}

/* ---- sinks ---- */

int kvbm_events_add_sink(struct kvbm_events *events, enum kvbm_event_scope scope,
                         const struct kvbm_sink_ops *ops, void *arg)
{
    int id = -ENOSPC;

    if (!events || !ops->fn || (unsigned)scope > KVBM_EVENTS_CONSOLIDATED)
        return -EINVAL;
    if (is_mine(events))
        return -EDEADLK;
    pthread_mutex_lock(&events->sinks_lock);
    for (size_t i = 0; i < MAX_SINKS && id < 0; i++) {
        if (events->sinks[i].id)
            continue;
        id = ++events->next_id;
        events->sinks[i] = (struct sink){.id = id, .scope = scope, .ops = *ops, .arg = arg};
    }
    pthread_mutex_unlock(&events->sinks_lock);
    if (id > 0 && ops->tick) {
        pthread_mutex_lock(&events->lock);
        events->tick_ns = 0;
        pthread_cond_signal(&events->work);
        pthread_mutex_unlock(&events->lock);
    }
    return id;
}

int kvbm_events_add_callback(struct kvbm_events *events, enum kvbm_event_scope scope,
                             kvbm_event_fn fn, void *arg)
{
    return kvbm_events_add_sink(events, scope, &(struct kvbm_sink_ops){.fn = fn}, arg);
}

int kvbm_events_remove_sink(struct kvbm_events *events, int id)
{
    struct sink gone = {0};

    if (!events || id <= 0)
        return -EINVAL;
    if (is_mine(events))
        return -EDEADLK;
    pthread_mutex_lock(&events->sinks_lock);
    for (size_t i = 0; i < MAX_SINKS; i++) {
        if (events->sinks[i].id != id)
            continue;
        gone = events->sinks[i];
        events->sinks[i] = (struct sink){0};
    }
    pthread_mutex_unlock(&events->sinks_lock);
    if (gone.ops.close)
        gone.ops.close(gone.arg);
    return gone.id ? 0 : -ENOENT;
}

/* ---- waiting, statistics ---- */

int kvbm_events_flush(struct kvbm_events *events, uint32_t timeout_ms)
{
    uint64_t due = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    uint64_t up_to, flush;
    int err = 0;

    if (!events)
        return -EINVAL;
    if (is_mine(events))
        return -EDEADLK;
    pthread_mutex_lock(&events->lock);
    up_to = events->stats.written;
    flush = ++events->flushes;
    while ((events->delivered < up_to || events->flushed < flush) && err == 0) {
        events->hurry = true;
        pthread_cond_signal(&events->work);
        err = kv_cond_wait_until(&events->idle, &events->lock, due);
    }
    if (events->delivered >= up_to && events->flushed >= flush)
        err = 0;
    pthread_mutex_unlock(&events->lock);
    return err;
}

int kvbm_events_get_stats(struct kvbm_events *events, struct kvbm_events_stats *ret)
{
    struct kvbm_events_stats stats;

    if (!events || !kv_sized(ret, "kvbm_events_stats"))
        return -EINVAL;
    pthread_mutex_lock(&events->lock);
    stats = events->stats;
    stats.queued_bytes = events->filling.len;
    pthread_mutex_unlock(&events->lock);
    KV_GIVE(ret, &stats);
    return 0;
}
