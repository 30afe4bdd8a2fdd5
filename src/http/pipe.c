// SPDX-License-Identifier: Apache-2.0
#include "http/pipe.h"

#include <pthread.h>

#include "base/core/error.h"
#include "base/thread/thread.h"

struct kh_pipe {
    pthread_mutex_t lock;
    pthread_cond_t room;
    struct kh_pipe_reader reader;
    size_t capacity;
    size_t head, len; /* of the bytes in ring */
    bool ended, complete, cancelled, parked, nudged;
    char ring[];
};

int kh_pipe_create(size_t capacity, const struct kh_pipe_reader *reader, struct kh_pipe **ret)
{
    struct kh_pipe *pipe = malloc(sizeof(*pipe) + capacity);

    if (!pipe)
        return -ENOMEM;
    memset(pipe, 0, sizeof(*pipe));
    pthread_mutex_init(&pipe->lock, NULL);
    kv_cond_init(&pipe->room);
    pipe->reader = *reader;
    pipe->capacity = capacity;
    *ret = pipe;
    return 0;
}

void kh_pipe_destroy(struct kh_pipe *pipe)
{
    if (!pipe)
        return;
    pthread_cond_destroy(&pipe->room);
    pthread_mutex_destroy(&pipe->lock);
    free(pipe);
}

/* Wake the reader, outside the lock. The reader is parked until then, so it still exists. */
static void wake_after_unlock(struct kh_pipe *pipe)
{
    bool wake = pipe->parked;

    pipe->parked = false;
    pthread_mutex_unlock(&pipe->lock);
    if (wake)
        pipe->reader.wake(pipe->reader.arg);
}

/* Copy the bytes that fit without wrapping. Returns their number. */
static size_t put_some(struct kh_pipe *pipe, const char *data, size_t len)
{
    size_t tail = (pipe->head + pipe->len) % pipe->capacity;
    size_t room = KV_MIN(pipe->capacity - pipe->len, pipe->capacity - tail);
    size_t n = KV_MIN(room, len);

    memcpy(pipe->ring + tail, data, n);
    pipe->len += n;
    return n;
}

int kh_pipe_write(struct kh_pipe *pipe, const void *data, size_t len)
{
    const char *p = data;

    while (len > 0) {
        size_t n;

        pthread_mutex_lock(&pipe->lock);
        while (pipe->len == pipe->capacity && !pipe->cancelled)
            pthread_cond_wait(&pipe->room, &pipe->lock);
        if (pipe->cancelled) {
            pthread_mutex_unlock(&pipe->lock);
            return -EPIPE;
        }
        n = put_some(pipe, p, len);
        p += n;
        len -= n;
        wake_after_unlock(pipe);
    }
    return 0;
}

int kh_pipe_wait(struct kh_pipe *pipe, uint64_t deadline_ns)
{
    bool cancelled;
    int rc = 0;

    pthread_mutex_lock(&pipe->lock);
    while (!pipe->cancelled && !pipe->nudged && rc == 0)
        rc = kv_cond_wait_until(&pipe->room, &pipe->lock, deadline_ns);
    pipe->nudged = false;
    cancelled = pipe->cancelled;
    pthread_mutex_unlock(&pipe->lock);
    return cancelled ? -EPIPE : 0;
}

void kh_pipe_nudge(struct kh_pipe *pipe)
{
    pthread_mutex_lock(&pipe->lock);
    pipe->nudged = true;
    pthread_cond_signal(&pipe->room);
    pthread_mutex_unlock(&pipe->lock);
}

void kh_pipe_end(struct kh_pipe *pipe, bool complete)
{
    pthread_mutex_lock(&pipe->lock);
    pipe->ended = true;
    pipe->complete = complete;
    wake_after_unlock(pipe);
}

static size_t take_some(struct kh_pipe *pipe, char *data, size_t size)
{
    size_t n = KV_MIN(KV_MIN(pipe->len, pipe->capacity - pipe->head), size);

    memcpy(data, pipe->ring + pipe->head, n);
    pipe->head = (pipe->head + n) % pipe->capacity;
    pipe->len -= n;
    return n;
}

long kh_pipe_read(struct kh_pipe *pipe, void *data, size_t size)
{
    size_t n;
    long rc;

    pthread_mutex_lock(&pipe->lock);
    if (pipe->cancelled) {
        rc = -EIO;
    } else if (pipe->len > 0) {
        n = take_some(pipe, data, size);
        n += take_some(pipe, (char *)data + n, size - n);
        pthread_cond_signal(&pipe->room);
        rc = (long)n;
    } else if (pipe->ended) {
        rc = pipe->complete ? 0 : -EIO;
    } else {
        pipe->parked = true;
        pipe->reader.park(pipe->reader.arg);
        rc = -EAGAIN;
    }
    pthread_mutex_unlock(&pipe->lock);
    return rc;
}

void kh_pipe_cancel(struct kh_pipe *pipe)
{
    pthread_mutex_lock(&pipe->lock);
    pipe->cancelled = true;
    pthread_cond_broadcast(&pipe->room);
    wake_after_unlock(pipe);
}
