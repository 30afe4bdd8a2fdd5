// SPDX-License-Identifier: Apache-2.0
#include "selector/notices.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

void ksel_notices_init(struct ksel_notices *n, size_t size)
{
    *n = (struct ksel_notices){.size = size};
    pthread_mutex_init(&n->lock, NULL);
}

void ksel_notices_fini(struct ksel_notices *n)
{
    free(n->ring);
    pthread_mutex_destroy(&n->lock);
}

/* Copy @len bytes to the ring at position @at. */
static void put(struct ksel_notices *n, uint64_t at, const char *data, size_t len)
{
    size_t start = at % n->size, first = KV_MIN(len, n->size - start);

    memcpy(n->ring + start, data, first);
    memcpy(n->ring, data + first, len - first);
}

static void nudge_parked(struct ksel_notices *n)
{
    for (struct ksel_follower *f = n->followers; f; f = f->next)
        if (f->parked) {
            f->parked = false;
            kh_pipe_nudge(f->pipe);
        }
}

void ksel_notices_add(struct ksel_notices *n, const char *line, size_t len)
{
    pthread_mutex_lock(&n->lock);
    if (n->followers) {
        if (len <= n->size)
            put(n, n->head, line, len);
        n->head += len; /* a line that is too long cuts all followers off */
        nudge_parked(n);
    }
    pthread_mutex_unlock(&n->lock);
}

int ksel_notices_join(struct ksel_notices *n, struct ksel_follower *follower)
{
    int rc = 0;

    pthread_mutex_lock(&n->lock);
    if (!n->ring)
        n->ring = malloc(n->size);
    if (!n->ring) {
        rc = -ENOMEM;
    } else {
        follower->at = n->head;
        follower->parked = false;
        follower->next = n->followers;
        n->followers = follower;
    }
    pthread_mutex_unlock(&n->lock);
    return rc;
}

void ksel_notices_leave(struct ksel_notices *n, struct ksel_follower *follower)
{
    struct ksel_follower **at = &n->followers;

    pthread_mutex_lock(&n->lock);
    while (*at != follower)
        at = &(*at)->next;
    *at = follower->next;
    pthread_mutex_unlock(&n->lock);
}

size_t ksel_notices_followers(struct ksel_notices *n)
{
    size_t count = 0;

    pthread_mutex_lock(&n->lock);
    for (const struct ksel_follower *f = n->followers; f; f = f->next)
        count++;
    pthread_mutex_unlock(&n->lock);
    return count;
}

static long take(struct ksel_notices *n, struct ksel_follower *f, struct kv_buf *out, size_t max)
{
    size_t len = (size_t)KV_MIN(n->head - f->at, max), start, first;

    if (n->head - f->at > n->size)
        return -EOVERFLOW;
    if (len == 0) {
        f->parked = true;
        return n->ended ? -EPIPE : 0;
    }
    start = f->at % n->size;
    first = KV_MIN(len, n->size - start);
    kv_buf_append(out, n->ring + start, first);
    kv_buf_append(out, n->ring, len - first);
    f->at += len;
    return out->error ? -ENOMEM : (long)len;
}

long ksel_notices_take(struct ksel_notices *n, struct ksel_follower *follower, struct kv_buf *out,
                       size_t max)
{
    long rc;

    pthread_mutex_lock(&n->lock);
    rc = take(n, follower, out, max);
    pthread_mutex_unlock(&n->lock);
    return rc;
}

void ksel_notices_end(struct ksel_notices *n)
{
    pthread_mutex_lock(&n->lock);
    n->ended = true;
    nudge_parked(n);
    pthread_mutex_unlock(&n->lock);
}
