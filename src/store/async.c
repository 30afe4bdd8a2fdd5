// SPDX-License-Identifier: Apache-2.0
/*
 * Requests on threads: the calls. A request lies in one of two lists:
 *
 *     open   by priority, then age: has chunks that no thread has claimed, or that threads work on
 *     done   in the order of their ends: its result waits for poll
 *
 * Threads claim chunks of open requests and run them (async_run.c). One lock guards all of it.
 */
#include "store/async.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "store/backend/check.h"
#include "store/backend/parts.h"

enum { MIN_THREADS = 4, MAX_THREADS = 8, DEFAULT_REQUESTS = 1024, MAX_CHUNKS = 1 << 20 };

static void free_request(struct kvs_async_request *r)
{
    free(r->hashes);
    free(r->parts);
    free(r->n_parts);
    free(r);
}

/* With the lock. */
static void cancel(struct kvs_async *a, struct kvs_async_request *r)
{
    atomic_store_explicit(&r->cancelled, true, memory_order_relaxed);
    r->n_left_out += kvs_async_leave_out(r, -ECANCELED);
    if (!r->running)
        kvs_async_finish(a, r);
}

static int usable(const struct kvs_async *a)
{
    return !a ? -EINVAL : a->pid == getpid() ? 0 : -ECHILD;
}

static uint32_t threads_by_default(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;

    return (uint32_t)KV_MIN(KV_MAX(n, (int)MIN_THREADS), (int)MAX_THREADS); /* half of them write */
}

int kvs_async_open(struct kvs_store *store, const struct kvs_async_opts *opts,
                   struct kvs_async **ret)
{
    uint32_t n = KV_OPT(opts, threads, 0);
    struct kvs_async *a;
    int rc = 0;

    if (!store || !ret || !kv_sized_or_null(opts, "kvs_async_opts") || n > KVS_ASYNC_THREADS)
        return -EINVAL;
    a = calloc(1, sizeof(*a));
    if (!a)
        return -ENOMEM;
    n = n ? n : threads_by_default();
    a->pid = getpid();
    a->store = store;
    a->max_requests = KV_OPT(opts, max_requests, DEFAULT_REQUESTS);
    a->max_writing = KV_MAX(n / 2, 1u);
    a->done_tail = &a->done;
    pthread_mutex_init(&a->lock, NULL);
    kv_cond_init(&a->work);
    kv_cond_init(&a->ended);
    rc = kv_wake_open(&a->wake);
    while (rc == 0 && a->n_threads < n) {
        rc = kv_thread_start(&a->threads[a->n_threads], "kvs-async", kvs_async_run, a);
        a->n_threads += rc == 0;
    }
    if (rc < 0) {
        kvs_async_close(a, 0);
        return rc;
    }
    *ret = a;
    return 0;
}

static void free_queue(struct kvs_async *a)
{
    for (uint32_t i = 0; i < a->n_threads; i++)
        pthread_join(a->threads[i], NULL);
    for (struct kvs_async_request *r = a->done, *next; r; r = next) {
        next = r->next;
        free_request(r);
    }
    kv_wake_close(&a->wake);
    pthread_cond_destroy(&a->work);
    pthread_cond_destroy(&a->ended);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

/* With the lock. */
static int wait_for_all(struct kvs_async *a, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc = 0;

    while (rc == 0 && a->open)
        rc = kv_cond_wait_until(&a->ended, &a->lock, deadline);
    return a->open ? rc : 0;
}

int kvs_async_close(struct kvs_async *a, uint32_t timeout_ms)
{
    int rc;

    if (!a || a->pid != getpid())
        return 0;
    pthread_mutex_lock(&a->lock);
    a->stopping = true;
    for (struct kvs_async_request *r = a->open, *next; r; r = next) {
        next = r->next;
        cancel(a, r);
    }
    rc = wait_for_all(a, timeout_ms);
    pthread_cond_broadcast(&a->work);
    pthread_mutex_unlock(&a->lock);
    if (rc == 0)
        free_queue(a);
    return rc;
}

static bool parts_ok(const struct kvs_request *q, size_t *ret_parts)
{
    size_t at = 0, len;

    for (size_t i = 0; i < q->n; i++) {
        size_t n = q->n_parts ? q->n_parts[i] : 1;

        if (n > KVS_PARTS_MAX || (n && !q->parts) ||
            !kvs_parts_len(q->parts ? q->parts + at : NULL, n, KVS_VALUE_MAX, &len))
            return false;
        at += n;
    }
    *ret_parts = at;
    return true;
}

/* Copy @n elements of @size bytes; NULL when there are none. */
static bool copy(void *ret, const void *from, size_t n, size_t size)
{
    void *to = from && n ? malloc(n * size) : NULL;

    if (to)
        memcpy(to, from, n * size);
    memcpy(ret, &to, sizeof(to));
    return to || !from || !n;
}

static int make_request(const struct kvs_request *q, struct kvs_async_request **ret)
{
    struct kvs_async_request *r;
    bool moves = q->op == KVS_OP_GET || q->op == KVS_OP_PUT, ok;
    size_t n = q->op == KVS_OP_FLUSH ? 0 : q->n, n_parts = 0;

    if (q->op < KVS_OP_GET || q->op > KVS_OP_FLUSH || n > MAX_CHUNKS ||
        !kvs_hashes_ok(q->hashes, q->hash_len, n) || (moves && !parts_ok(q, &n_parts)))
        return -EINVAL;
    r = calloc(1, sizeof(*r));
    if (!r)
        return -ENOMEM;
    r->done.tag = q->tag;
    r->done.op = q->op;
    r->done.n = r->n = n;
    r->priority = q->priority;
    r->flush = q->op == KVS_OP_FLUSH || (q->op == KVS_OP_PUT && q->flush);
    r->only_flush = r->flush && n == 0;
    r->ret_each = q->ret_each;
    r->hash_len = q->hash_len;
    r->first_error = SIZE_MAX;
    r->submit_ns = kv_now_ns();
    ok = copy(&r->hashes, q->hashes, n, q->hash_len) &&
         copy(&r->parts, moves ? q->parts : NULL, n_parts, sizeof(*q->parts)) &&
         copy(&r->n_parts, moves ? q->n_parts : NULL, n, sizeof(*q->n_parts));
    if (!ok) {
        free_request(r);
        return -ENOMEM;
    }
    *ret = r;
    return 0;
}

/* With the lock. */
static void enqueue(struct kvs_async *a, struct kvs_async_request *r)
{
    struct kvs_async_request **at = &a->open;

    while (*at && (*at)->priority >= r->priority)
        at = &(*at)->next;
    r->next = *at;
    *at = r;
    a->n_requests++;
    if (r->n || r->flush)
        pthread_cond_signal(&a->work);
    else
        kvs_async_finish(a, r);
}

int64_t kvs_async_submit(struct kvs_async *a, const struct kvs_request *request)
{
    struct kvs_request q = KVS_REQUEST_INIT;
    struct kvs_async_request *r;
    int64_t rc = usable(a);

    if (rc < 0 || !kv_sized(request, "kvs_request"))
        return rc < 0 ? rc : -EINVAL;
    memcpy(&q, request, KV_MIN(request->size, sizeof(q)) / 8 * 8); /* whole members */
    rc = make_request(&q, &r);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    if (a->stopping || a->n_requests >= a->max_requests) {
        rc = a->stopping ? -ESHUTDOWN : -EAGAIN;
        free_request(r);
    } else {
        r->done.id = ++a->next_id;
        rc = (int64_t)r->done.id;
        enqueue(a, r);
    }
    pthread_mutex_unlock(&a->lock);
    return rc;
}

int kvs_async_cancel(struct kvs_async *a, uint64_t id)
{
    struct kvs_async_request *r;
    int rc = usable(a);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    for (r = a->open; r && r->done.id != id; r = r->next)
        ;
    if (r)
        cancel(a, r);
    pthread_mutex_unlock(&a->lock);
    return r ? 0 : -ENOENT;
}

long kvs_async_poll(struct kvs_async *a, struct kvs_done *ret, size_t max)
{
    long n = usable(a);

    if (n < 0 || (max && !ret))
        return n < 0 ? n : -EINVAL;
    pthread_mutex_lock(&a->lock);
    for (struct kvs_async_request *r; (size_t)n < max && (r = a->done) != NULL; n++) {
        a->done = r->next;
        ret[n] = r->done;
        free_request(r);
    }
    a->n_requests -= (uint32_t)n;
    if (!a->done) {
        a->done_tail = &a->done;
        kv_wake_clear(&a->wake);
    }
    pthread_mutex_unlock(&a->lock);
    return n;
}

int kvs_async_fd(struct kvs_async *a)
{
    int rc = usable(a);

    return rc < 0 ? rc : a->wake.fd;
}

int kvs_async_drain(struct kvs_async *a, uint32_t timeout_ms)
{
    int rc = usable(a);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    rc = wait_for_all(a, timeout_ms);
    pthread_mutex_unlock(&a->lock);
    return rc;
}
