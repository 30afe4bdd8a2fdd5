// SPDX-License-Identifier: Apache-2.0
/*
 * The event lag: the time from a worker's registration of a prompt's last block until the indexer
 * shows that block. A thread of its own, with a connection of its own, asks every 2 ms about one prompt
 * at a time. A prompt that doesn't show within 5 s (its blocks were evicted, or a fault) isn't counted.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "cli/whole/whole.h"

#define PATIENCE_NS (5 * KV_NS_PER_S)
#define EVERY_NS (2 * KV_NS_PER_MS)

struct kc_probe {
    struct kc_whole *whole;
    struct kc_client *client;
    struct kc_belief *beliefs;
    pthread_t thread;
    bool started;
    _Atomic bool stop;
    _Atomic bool busy; /* true: the fields below are the thread's */
    uint32_t *tokens;
    uint32_t n_tokens, worker;
    uint64_t since_ns;
};

static void sleep_ns(uint64_t ns)
{
    const struct timespec pause = kv_timespec(ns);

    nanosleep(&pause, NULL);
}

static bool shows(struct kc_probe *p)
{
    uint32_t n_blocks = p->n_tokens / p->whole->plan.shape.page_size;

    return kc_client_query(p->client, p->tokens, p->n_tokens, p->beliefs, NULL, NULL) == 0 &&
           p->beliefs[p->worker].longest >= n_blocks;
}

static void watch_one(struct kc_probe *p)
{
    while (!atomic_load(&p->stop) && kv_now_ns() < p->since_ns + PATIENCE_NS) {
        uint64_t asked_ns = kv_now_ns();

        if (shows(p)) {
            uint64_t lag = kv_now_ns() - p->since_ns;

            kc_hist_record(&p->whole->lag, lag);
            atomic_fetch_add(&p->whole->lag_sum_ns, lag);
            atomic_fetch_add(&p->whole->lag_n, 1);
            return;
        }
        if (kv_now_ns() < asked_ns + EVERY_NS)
            sleep_ns(asked_ns + EVERY_NS - kv_now_ns());
    }
}

static void *watch(void *arg)
{
    struct kc_probe *p = arg;

    while (!atomic_load(&p->stop)) {
        if (atomic_load_explicit(&p->busy, memory_order_acquire)) {
            watch_one(p);
            atomic_store_explicit(&p->busy, false, memory_order_release);
        }
        sleep_ns(EVERY_NS);
    }
    return NULL;
}

void kc_probe_offer(struct kc_whole *w, uint64_t number, uint32_t worker, uint64_t since_ns)
{
    struct kc_probe *p = w->probe;
    static struct kc_request_message request; /* the director's thread alone calls this */

    if (!p || atomic_load_explicit(&p->busy, memory_order_acquire))
        return;
    p->n_tokens = kc_run_tokens(w, number, &request);
    memcpy(p->tokens, w->tokens, p->n_tokens * sizeof(*p->tokens));
    p->worker = worker;
    p->since_ns = since_ns;
    atomic_store_explicit(&p->busy, true, memory_order_release);
}

int kc_probe_start(struct kc_whole *w, struct kv_error *error)
{
    struct kc_probe *p = w->probe = calloc(1, sizeof(*p));
    const struct kc_client_opts opts = {.url = w->plan.indexer,
                                        .model = KC_PLAN_MODEL,
                                        .tenant = KC_PLAN_TENANT,
                                        .first_instance = KC_PLAN_FIRST_INSTANCE,
                                        .block_size = w->plan.shape.page_size,
                                        .n_workers = w->plan.n_workers};
    int rc = p ? kc_client_create(&opts, &p->client, error) : -ENOMEM;

    if (rc < 0)
        return rc;
    p->whole = w;
    p->beliefs = calloc(w->plan.n_workers, sizeof(*p->beliefs));
    p->tokens = calloc((size_t)KC_PLAN_BLOCKS * w->plan.shape.page_size, sizeof(*p->tokens));
    if (!p->beliefs || !p->tokens)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    kc_http_set_timeout(kc_client_http(p->client), 1000);
    rc = kv_thread_start(&p->thread, "lag", watch, p);
    p->started = rc == 0;
    return rc < 0 ? kv_fail(error, rc, 0, "can't start a thread: %s", strerror(-rc)) : 0;
}

void kc_probe_stop(struct kc_whole *w)
{
    struct kc_probe *p = w->probe;

    if (!p)
        return;
    atomic_store(&p->stop, true);
    if (p->started)
        pthread_join(p->thread, NULL);
    kc_client_destroy(p->client);
    free(p->beliefs);
    free(p->tokens);
    free(p);
    w->probe = NULL;
}
