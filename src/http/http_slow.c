// SPDX-License-Identifier: Apache-2.0
/*
 * Handlers that may take long run on threads of their own, so that the connections of an HTTP
 * thread don't wait:
 *
 *     HTTP thread    handler sets reply.rerun ──> connection suspended ─┐        ┌─> resumed: sent
 *     slow thread                                  queue ───────────────┴─> handler┘
 */
#include <errno.h>

#include "base/core/clock.h"
#include "base/thread/queue.h"
#include "base/thread/thread.h"
#include "http/http_impl.h"

#define THREADS 4
#define QUEUE 1024

struct kh_slow {
    struct kv_queue *queue; /* of struct kh_exchange * */
    atomic_bool stopping;
    pthread_t threads[THREADS];
    size_t n_threads;
};

static void refuse(struct kh_exchange *ex)
{
    kh_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE, "the server is about to end");
}

static void run(struct kh_slow *slow, struct kh_exchange *ex)
{
    ex->reply.rerun = false;
    ex->request.may_wait = true;
    if (atomic_load_explicit(&slow->stopping, memory_order_acquire))
        refuse(ex);
    else
        ex->request.route->handle(ex->http->opts.arg, &ex->request, &ex->reply);
    /*
     * Resume last: from here on the exchange belongs to the HTTP thread. MHD's lock publishes it.
     */
    MHD_resume_connection(ex->connection);
}

static void *slow_main(void *arg)
{
    struct kh_slow *slow = arg;
    struct kh_exchange *ex;

    for (;;) {
        long n = kv_queue_pop(slow->queue, &ex, 1, kv_now_ns() + 3600 * KV_NS_PER_S);

        if (n == -EPIPE)
            return NULL;
        if (n == 1)
            run(slow, ex);
    }
}

int kh_slow_create(struct kh_slow **ret)
{
    struct kh_slow *slow = calloc(1, sizeof(*slow));
    int rc;

    if (!slow)
        return -ENOMEM;
    rc = kv_queue_create(sizeof(struct kh_exchange *), QUEUE, &slow->queue);
    for (; rc == 0 && slow->n_threads < THREADS; slow->n_threads += rc == 0)
        rc = kv_thread_start(&slow->threads[slow->n_threads], "http-slow", slow_main, slow);
    if (rc < 0) {
        kh_slow_destroy(slow);
        return rc;
    }
    *ret = slow;
    return 0;
}

void kh_slow_stop(struct kh_slow *slow)
{
    atomic_store_explicit(&slow->stopping, true, memory_order_release);
    if (slow->queue)
        kv_queue_close(slow->queue);
    while (slow->n_threads)
        pthread_join(slow->threads[--slow->n_threads], NULL);
}

void kh_slow_destroy(struct kh_slow *slow)
{
    if (!slow)
        return;
    kh_slow_stop(slow);
    kv_queue_destroy(slow->queue);
    free(slow);
}

void kh_slow_defer(struct kh_slow *slow, struct kh_exchange *ex)
{
    int rc;

    MHD_suspend_connection(ex->connection);
    rc = kv_queue_push(slow->queue, &ex);
    if (rc == 0)
        return;
    ex->reply.rerun = false;
    if (rc == -EPIPE) {
        refuse(ex);
    } else {
        atomic_fetch_add_explicit(&ex->http->overloaded, 1, memory_order_relaxed);
        kh_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                       "too many long requests at a time, try again later");
        kh_reply_header(&ex->reply, "Retry-After", "1");
    }
    MHD_resume_connection(ex->connection);
}
