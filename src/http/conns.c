// SPDX-License-Identifier: Apache-2.0
#include "http/conns.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "http/budget.h"

struct kh_conns {
    pthread_mutex_t lock; /* guards the list and the counters */
    struct kh_conn list;  /* a ring */
    struct kh_conns_stats stats;
    uint64_t n_closing;  /* number of open connections that the janitor has shut down */
    uint64_t high_water; /* above this number, idle connections are closed to make room */
    uint64_t idle_timeout_ms;
    struct kh_budget *budget; /* counts connections by client */
    struct kv_wake wake;
    pthread_t janitor;
    bool started;
    atomic_bool stop;
};

static void hang_up(struct kh_conns *conns, struct kh_conn *conn, uint64_t *counter)
{
    if (conn->closing)
        return;
    conn->closing = true;
    conns->n_closing++;
    (*counter)++;
    shutdown(conn->fd, SHUT_RDWR);
}

/* Return the time at which the connection must be closed; 0: never. */
static uint64_t deadline_of(const struct kh_conn *conn)
{
    uint64_t pace = atomic_load_explicit(&conn->pace_ns, memory_order_relaxed);
    uint64_t end = atomic_load_explicit(&conn->end_ns, memory_order_relaxed);

    if (pace)
        pace += atomic_load_explicit(&conn->patience_ns, memory_order_relaxed);
    return !pace || (end && end < pace) ? end : pace;
}

static void expire(struct kh_conns *conns, uint64_t now)
{
    for (struct kh_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next) {
        uint64_t deadline = deadline_of(conn);

        if (deadline && now >= deadline)
            hang_up(conns, conn, &conns->stats.expired);
    }
}

/*
 * Return true when a connection may be closed to make room: its client has more than @share of
 * them.
 */
static bool is_candidate(const struct kh_conn *conn, uint32_t share, uint64_t now)
{
    uint64_t pace = atomic_load_explicit(&conn->pace_ns, memory_order_relaxed);

    return pace && pace < now && !conn->closing &&
           atomic_load_explicit(&conn->client->connections, memory_order_relaxed) > share;
}

/*
 * Return the time that separates the @n candidates with the oldest pace from the others; 0: there
 * are fewer than @n.
 */
static uint64_t nth_slowest(struct kh_conns *conns, uint64_t now, uint32_t share, size_t n)
{
    size_t older[64] = {0}; /* candidates by power of two of their lag in microseconds */
    size_t sum = 0;

    for (struct kh_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next)
        if (is_candidate(conn, share, now)) {
            uint64_t pace = atomic_load_explicit(&conn->pace_ns, memory_order_relaxed);

            older[63 - __builtin_clzll((now - KV_MIN(pace, now)) / 1000 + 1)]++;
        }
    for (int i = 63; i > 0; i--) {
        sum += older[i];
        if (sum >= n)
            return now - (UINT64_C(1000) << i) + 1000;
    }
    return sum + older[0] >= n ? now : 0;
}

/* Compare lags roughly, so that one pass is enough for any number of connections. */
static void make_room(struct kh_conns *conns, uint64_t now)
{
    uint64_t open = conns->stats.open - conns->n_closing, before;
    uint32_t share = (uint32_t)(conns->high_water / KV_MAX(kh_budget_clients(conns->budget), 1u));
    size_t n;

    if (open <= conns->high_water)
        return;
    n = (size_t)(open - conns->high_water + conns->high_water / 16);
    before = nth_slowest(conns, now, share, n);
    if (!before) {
        share = 0;
        before = nth_slowest(conns, now, share, n);
    }
    before = before ? before : now;
    for (struct kh_conn *conn = conns->list.next; conn != &conns->list && n > 0;
         conn = conn->next) {
        if (is_candidate(conn, share, now) &&
            atomic_load_explicit(&conn->pace_ns, memory_order_relaxed) <= before) {
            hang_up(conns, conn, &conns->stats.evicted);
            n--;
        }
    }
}

static void *janitor_main(void *arg)
{
    struct kh_conns *conns = arg;

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

int kh_conns_create(uint64_t max, uint64_t idle_timeout_ms, struct kh_budget *budget,
                    struct kh_conns **ret)
{
    struct kh_conns *conns = calloc(1, sizeof(*conns));
    int rc;

    if (!conns)
        return -ENOMEM;
    pthread_mutex_init(&conns->lock, NULL);
    conns->list.prev = conns->list.next = &conns->list;
    conns->high_water = max - max / 8;
    conns->idle_timeout_ms = idle_timeout_ms;
    conns->budget = budget;
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
    kh_conns_destroy(conns);
    return rc;
}

void kh_conns_destroy(struct kh_conns *conns)
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

struct kh_conn *kh_conns_add(struct kh_conns *conns, int fd, bool loopback,
                             struct kh_client *client)
{
    struct kh_conn *conn = calloc(1, sizeof(*conn));
    bool crowded;

    if (!conn)
        return NULL;
    conn->fd = fd;
    conn->loopback = loopback;
    conn->client = client;
    kh_conn_idle(conns, conn);
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

void kh_conns_remove(struct kh_conns *conns, struct kh_conn *conn)
{
    pthread_mutex_lock(&conns->lock);
    conn->prev->next = conn->next;
    conn->next->prev = conn->prev;
    conns->stats.open--;
    conns->n_closing -= conn->closing;
    pthread_mutex_unlock(&conns->lock);
    free(conn);
}

/*
 * Set a time. Relaxed order is enough everywhere: an early or late pass of the janitor does no
 * harm.
 */
static void set(struct kh_conn *conn, uint64_t pace_ns, uint64_t patience_ms, uint64_t end_ns)
{
    atomic_store_explicit(&conn->patience_ns, patience_ms * KV_NS_PER_MS, memory_order_relaxed);
    atomic_store_explicit(&conn->pace_ns, pace_ns, memory_order_relaxed);
    atomic_store_explicit(&conn->end_ns, end_ns, memory_order_relaxed);
}

void kh_conn_start(struct kh_conn *conn, uint64_t patience_ms, uint64_t limit_ms)
{
    uint64_t now = kv_now_ns();

    set(conn, now, patience_ms, limit_ms ? now + limit_ms * KV_NS_PER_MS : 0);
}

void kh_conn_moved(struct kh_conn *conn, size_t n)
{
    uint64_t pace = atomic_load_explicit(&conn->pace_ns, memory_order_relaxed), now = kv_now_ns();

    atomic_store_explicit(&conn->pace_ns,
                          KV_MIN(now, pace + n * (KV_NS_PER_MS / KH_SLOWEST_BYTES_PER_MS)),
                          memory_order_relaxed);
}

void kh_conn_caught_up(struct kh_conn *conn)
{
    atomic_store_explicit(&conn->pace_ns, kv_now_ns(), memory_order_relaxed);
}

void kh_conn_wait(struct kh_conn *conn)
{
    atomic_store_explicit(&conn->pace_ns, 0, memory_order_relaxed);
}

void kh_conn_busy(struct kh_conn *conn)
{
    set(conn, 0, 0, 0);
}

void kh_conn_limit(struct kh_conn *conn, uint64_t limit_ms)
{
    atomic_store_explicit(&conn->end_ns, kv_now_ns() + limit_ms * KV_NS_PER_MS,
                          memory_order_relaxed);
}

uint64_t kh_conn_lag_ns(const struct kh_conn *conn, uint64_t now_ns)
{
    uint64_t pace = atomic_load_explicit(&conn->pace_ns, memory_order_relaxed);

    return pace && pace < now_ns ? now_ns - pace : 0;
}

void kh_conn_idle(struct kh_conns *conns, struct kh_conn *conn)
{
    set(conn, kv_now_ns(), conns->idle_timeout_ms, 0);
}

void kh_conns_hang_up(struct kh_conns *conns, struct kh_conn *conn)
{
    pthread_mutex_lock(&conns->lock);
    hang_up(conns, conn, &conns->stats.evicted);
    pthread_mutex_unlock(&conns->lock);
}

uint64_t kh_conns_hang_up_all(struct kh_conns *conns, uint64_t limit_ms)
{
    uint64_t deadline = kv_now_ns() + limit_ms * KV_NS_PER_MS, open, uncounted = 0;

    do {
        pthread_mutex_lock(&conns->lock);
        /* Each time: one that was accepted before may be added only now. */
        for (struct kh_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next)
            hang_up(conns, conn, &uncounted);
        open = conns->stats.open;
        pthread_mutex_unlock(&conns->lock);
        if (open)
            nanosleep(&(struct timespec){.tv_nsec = KV_NS_PER_MS}, NULL);
    } while (open && kv_now_ns() < deadline);
    return open;
}

bool kh_conns_drop_slowest(struct kh_conns *conns, const struct kh_client *client, uint64_t lag_ms)
{
    uint64_t now = kv_now_ns(), most = lag_ms * KV_NS_PER_MS;
    struct kh_conn *slowest = NULL;

    pthread_mutex_lock(&conns->lock);
    for (struct kh_conn *conn = conns->list.next; conn != &conns->list; conn = conn->next)
        if (conn->client == client && !conn->closing &&
            atomic_load_explicit(&conn->holds, memory_order_relaxed) &&
            kh_conn_lag_ns(conn, now) > most) {
            most = kh_conn_lag_ns(conn, now);
            slowest = conn;
        }
    if (slowest)
        hang_up(conns, slowest, &conns->stats.evicted);
    pthread_mutex_unlock(&conns->lock);
    return slowest != NULL;
}

void kh_conns_get_stats(struct kh_conns *conns, struct kh_conns_stats *ret)
{
    pthread_mutex_lock(&conns->lock);
    *ret = conns->stats;
    pthread_mutex_unlock(&conns->lock);
}
