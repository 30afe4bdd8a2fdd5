// SPDX-License-Identifier: Apache-2.0
#include "base/thread/queue.h"

#include <pthread.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"

struct kv_queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty;
    size_t element_bytes, capacity;
    size_t head, len; /* a ring: the oldest element is at head */
    bool closed;
    char *ring;
};

int kv_queue_create(size_t element_bytes, size_t capacity, struct kv_queue **ret)
{
    struct kv_queue *queue;

    if (element_bytes == 0 || capacity == 0 || capacity > SIZE_MAX / element_bytes)
        return -EINVAL;
    queue = calloc(1, sizeof(*queue));
    if (!queue)
        return -ENOMEM;
    queue->ring = malloc(element_bytes * capacity);
    if (!queue->ring) {
        free(queue);
        return -ENOMEM;
    }
    queue->element_bytes = element_bytes;
    queue->capacity = capacity;
    pthread_mutex_init(&queue->lock, NULL);
    kv_cond_init(&queue->not_empty);
    *ret = queue;
    return 0;
}

void kv_queue_destroy(struct kv_queue *queue)
{
    if (!queue)
        return;
    pthread_cond_destroy(&queue->not_empty);
    pthread_mutex_destroy(&queue->lock);
    free(queue->ring);
    free(queue);
}

int kv_queue_push(struct kv_queue *queue, const void *element)
{
    int rc = 0;

    pthread_mutex_lock(&queue->lock);
    if (queue->closed) {
        rc = -EPIPE;
    } else if (queue->len == queue->capacity) {
        rc = -EAGAIN;
    } else {
        size_t at = (queue->head + queue->len) % queue->capacity;

        memcpy(queue->ring + at * queue->element_bytes, element, queue->element_bytes);
        queue->len++;
        pthread_cond_signal(&queue->not_empty);
    }
    pthread_mutex_unlock(&queue->lock);
    return rc;
}

/*
 * Wait, with the lock held, until an element is there, the queue is closed, or the deadline has
 * passed.
 */
static int wait_not_empty(struct kv_queue *queue, uint64_t deadline_ns)
{
    while (queue->len == 0) {
        if (queue->closed)
            return -EPIPE;
        if (deadline_ns == 0 ||
            kv_cond_wait_until(&queue->not_empty, &queue->lock, deadline_ns) == -ETIMEDOUT)
            return queue->len ? 0 : -ETIMEDOUT;
    }
    return 0;
}

long kv_queue_pop(struct kv_queue *queue, void *elements, size_t max, uint64_t deadline_ns)
{
    char *out = elements;
    size_t taken = 0;
    int rc;

    pthread_mutex_lock(&queue->lock);
    rc = wait_not_empty(queue, deadline_ns);
    while (rc == 0 && taken < max && queue->len > 0) {
        memcpy(out + taken * queue->element_bytes, queue->ring + queue->head * queue->element_bytes,
               queue->element_bytes);
        queue->head = (queue->head + 1) % queue->capacity;
        queue->len--;
        taken++;
    }
    pthread_mutex_unlock(&queue->lock);
    return rc ? rc : (long)taken;
}

void kv_queue_close(struct kv_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    pthread_cond_broadcast(&queue->not_empty);
    pthread_mutex_unlock(&queue->lock);
}

size_t kv_queue_len(struct kv_queue *queue)
{
    size_t len;

    pthread_mutex_lock(&queue->lock);
    len = queue->len;
    pthread_mutex_unlock(&queue->lock);
    return len;
}
