// SPDX-License-Identifier: Apache-2.0
#include "indexer/conns.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

struct ki_conns {
    pthread_mutex_t lock; /* the list and the counters */
    struct ki_conn list;  /* ring */
    struct ki_conns_stats stats;
    uint64_t n_closing;  /* of those open, shut down by the janitor */
    uint64_t high_water; /* above it, idle connections make room */
    uint64_t idle_timeout_ms;
    struct kv_wake wake;
    pthread_t janitor;
    bool started;
    atomic_bool stop;
};

static void hang_up(struct ki_conns *conns, struct ki_conn *conn, uint64_t *counter)
{
    if (conn->closing)
        return;
    conn->closing = true;
    conns->n_closing++;
    (*counter)++;
    shutdown(conn->fd, SHUT_RDWR);
}

static void expire(struct ki_conns *conns, uint64_t now)
{
    for (struct ki_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next) {
        uint64_t deadline = atomic_load_explicit(&conn->deadline_ns, memory_order_relaxed);

        if (deadline && now >= deadline)
            hang_up(conns, conn, &conns->stats.expired);
    }
}

/* The time before which a connection must have become idle to be among the oldest @n. */
static uint64_t nth_oldest(struct ki_conns *conns, uint64_t now, size_t n)
{
    size_t older[64] = {0}; /* idle connections by power of two of their age in microseconds */
    size_t sum = 0;

    for (struct ki_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next) {
        uint64_t since = atomic_load_explicit(&conn->idle_since, memory_order_relaxed);

        if (since && !conn->closing && since < now)
            older[63 - __builtin_clzll((now - since) / 1000 + 1)]++;
    }
    for (int i = 63; i > 0; i--) {
        sum += older[i];
        if (sum >= n)
            return now - (UINT64_C(1000) << i) + 1000;
    }
    return now;
}

/* Ages are compared roughly, so that one pass suffices whatever the number of connections. */
static void make_room(struct ki_conns *conns, uint64_t now)
{
    uint64_t open = conns->stats.open - conns->n_closing, before;
    size_t n;

    if (open <= conns->high_water)
        return;
    n = (size_t)(open - conns->high_water + conns->high_water / 16);
    before = nth_oldest(conns, now, n);
    for (struct ki_conn *conn = conns->list.next; conn != &conns->list && n > 0;
         conn = conn->next) {
        uint64_t since = atomic_load_explicit(&conn->idle_since, memory_order_relaxed);

        if (since && since <= before && !conn->closing) {
            hang_up(conns, conn, &conns->stats.evicted);
            n--;
        }
    }
}

static void *janitor_main(void *arg)
{
    struct ki_conns *conns = arg;

    while (!atomic_load_explicit(&conns->stop, memory_order_acquire)) {
        struct pollfd pfd = {.fd = conns->wake.fd, .events = POLLIN};
        uint64_t now;

        if (poll(&pfd, 1, 1000) > 0)
            kv_wake_clear(&conns->wake);
        now = kv_now_ns();
        pthread_mutex_lock(&conns->lock);
        expire(conns, now);
        make_room(conns, now);
        pthread_mutex_unlock(&conns->lock);
    }
    return NULL;
}

int ki_conns_create(uint64_t max, uint64_t idle_timeout_ms, struct ki_conns **ret)
{
    struct ki_conns *conns = calloc(1, sizeof(*conns));
    int rc;

    if (!conns)
        return -ENOMEM;
    pthread_mutex_init(&conns->lock, NULL);
    conns->list.prev = conns->list.next = &conns->list;
    conns->high_water = max - max / 8;
    conns->idle_timeout_ms = idle_timeout_ms;
    conns->wake.fd = -1;
    rc = kv_wake_open(&conns->wake);
    if (rc < 0)
        goto fail;
    rc = kv_thread_start(&conns->janitor, "http-janitor", janitor_main, conns);
    if (rc < 0)
        goto fail;
    conns->started = true;
    *ret = conns;
    return 0;
fail:
    ki_conns_destroy(conns);
    return rc;
}

void ki_conns_destroy(struct ki_conns *conns)
{
    if (!conns)
        return;
    if (conns->started) {
        atomic_store_explicit(&conns->stop, true, memory_order_release);
        kv_wake_signal(&conns->wake);
        pthread_join(conns->janitor, NULL);
    }
    kv_wake_close(&conns->wake);
    pthread_mutex_destroy(&conns->lock);
    free(conns);
}

struct ki_conn *ki_conns_add(struct ki_conns *conns, int fd, bool loopback)
{
    struct ki_conn *conn = calloc(1, sizeof(*conn));
    bool crowded;

    if (!conn)
        return NULL;
    conn->fd = fd;
    conn->loopback = loopback;
    ki_conn_idle(conns, conn);
    pthread_mutex_lock(&conns->lock);
    conn->prev = conns->list.prev;
    conn->next = &conns->list;
    conn->prev->next = conn->next->prev = conn;
    conns->stats.accepted++;
    crowded = ++conns->stats.open > conns->high_water;
    pthread_mutex_unlock(&conns->lock);
    if (crowded)
        kv_wake_signal(&conns->wake);
    return conn;
}

void ki_conns_remove(struct ki_conns *conns, struct ki_conn *conn)
{
    pthread_mutex_lock(&conns->lock);
    conn->prev->next = conn->next;
    conn->next->prev = conn->prev;
    conns->stats.open--;
    conns->n_closing -= conn->closing;
    pthread_mutex_unlock(&conns->lock);
    free(conn);
}

/* Relaxed is enough in all three: the janitor may see either value, a pass early or late does no harm.
 */
void ki_conn_busy(struct ki_conn *conn, uint64_t limit_ms)
{
    uint64_t deadline = limit_ms ? kv_now_ns() + limit_ms * KV_NS_PER_MS : 0;

    atomic_store_explicit(&conn->idle_since, 0, memory_order_relaxed);
    atomic_store_explicit(&conn->deadline_ns, deadline, memory_order_relaxed);
}

void ki_conn_limit(struct ki_conn *conn, uint64_t limit_ms)
{
    atomic_store_explicit(&conn->deadline_ns, kv_now_ns() + limit_ms * KV_NS_PER_MS,
                          memory_order_relaxed);
}

void ki_conn_idle(struct ki_conns *conns, struct ki_conn *conn)
{
    uint64_t now = kv_now_ns();

    atomic_store_explicit(&conn->deadline_ns, now + conns->idle_timeout_ms * KV_NS_PER_MS,
                          memory_order_relaxed);
    atomic_store_explicit(&conn->idle_since, now, memory_order_relaxed);
}

void ki_conns_get_stats(struct ki_conns *conns, struct ki_conns_stats *ret)
{
    pthread_mutex_lock(&conns->lock);
    *ret = conns->stats;
    pthread_mutex_unlock(&conns->lock);
}
