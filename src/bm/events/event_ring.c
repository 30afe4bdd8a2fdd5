// SPDX-License-Identifier: Apache-2.0
/* Ring buffer of the latest events, which callers poll. New records overwrite the oldest. A record
 * is never split: one that doesn't fit at the end starts at the beginning. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/core/error.h"
#include "bm/events/event_record.h"
#include "bm/events/events.h"

struct kvbm_event_ring {
    pthread_mutex_t lock;
    uint8_t *data, *drained;
    size_t capacity;
    size_t head, tail; /* head: oldest record; tail: behind the newest */
    size_t end;        /* end of the records behind head; at most capacity */
    size_t n;
    uint64_t lost;
};

static void drop_oldest(struct kvbm_event_ring *ring)
{
    struct kvbm_record r;

    memcpy(&r, ring->data + ring->head, sizeof(r));
    ring->head += r.bytes;
    ring->n--;
    if (ring->head == ring->end) {
        ring->head = 0;
        ring->end = ring->capacity;
    }
}

/* Make room for @bytes by dropping the oldest events. */
static uint8_t *place(struct kvbm_event_ring *ring, size_t bytes)
{
    for (;;) {
        if (!ring->n) {
            ring->head = ring->tail = 0;
            ring->end = ring->capacity;
        }
        if (ring->n && ring->tail <= ring->head) { /* wrapped: the room ends at head */
            if (ring->head - ring->tail >= bytes)
                return ring->data + ring->tail;
        } else if (ring->capacity - ring->tail >= bytes) {
            return ring->data + ring->tail;
        } else if (ring->n) {
            ring->end = ring->tail;
            ring->tail = 0;
            continue;
        }
        drop_oldest(ring);
        ring->lost++;
    }
}

static void keep(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct kvbm_event_ring *ring = arg;

    pthread_mutex_lock(&ring->lock);
    ring->lost += lost;
    for (size_t i = 0; i < n; i++) {
        size_t bytes = kvbm_record_bytes(&events[i]);

        if (bytes > ring->capacity) {
            ring->lost++;
            continue;
        }
        kvbm_record_put(place(ring, bytes), &events[i]);
        ring->tail += bytes;
        ring->n++;
    }
    pthread_mutex_unlock(&ring->lock);
}

static void ring_free(void *arg)
{
    struct kvbm_event_ring *ring = arg;

    pthread_mutex_destroy(&ring->lock);
    free(ring->data);
    free(ring->drained);
    free(ring);
}

int kvbm_events_add_ring(struct kvbm_events *events, enum kvbm_event_scope scope, uint64_t bytes,
                         struct kvbm_event_ring **ret)
{
    static const struct kvbm_sink_ops ops = {.fn = keep, .close = ring_free};
    struct kvbm_event_ring *ring;
    int id;

    if (!events || !ret)
        return -EINVAL;
    if (bytes > SIZE_MAX / 2)
        return -ENOMEM;
    ring = calloc(1, sizeof(*ring));
    if (!ring)
        return -ENOMEM;
    pthread_mutex_init(&ring->lock, NULL);
    ring->capacity = ring->end = kvbm_record_pad(bytes ? bytes : (uint64_t)1 << 20);
    ring->data = malloc(ring->capacity);
    ring->drained = malloc(ring->capacity);
    id = ring->data && ring->drained ? kvbm_events_add_sink(events, scope, &ops, ring) : -ENOMEM;
    if (id < 0)
        ring_free(ring);
    else
        *ret = ring;
    return id;
}

long kvbm_event_ring_drain(struct kvbm_event_ring *ring, struct kvbm_event *ret, size_t max,
                           uint64_t *lost)
{
    size_t at = 0, n = 0;

    if (!ring || (max && !ret))
        return -EINVAL;
    pthread_mutex_lock(&ring->lock);
    for (; n < max && ring->n; n++) {
        struct kvbm_record r;

        memcpy(&r, ring->data + ring->head, sizeof(r));
        memcpy(ring->drained + at, ring->data + ring->head, r.bytes);
        kvbm_record_get(ring->drained + at, &ret[n]);
        at += r.bytes;
        drop_oldest(ring);
    }
    if (lost)
        *lost = ring->lost;
    ring->lost = 0;
    pthread_mutex_unlock(&ring->lock);
    return (long)n;
}
