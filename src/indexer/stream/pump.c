// SPDX-License-Identifier: Apache-2.0
/*
 * An event thread (pump.h). Each round of its loop, in this order:
 *
 *     epoll ─► mark      who has news?        ─► ready
 *              inbox     new listeners        ─► all
 *              tick      timers that are due, after a wake-up all listeners; retired ones leave
 *              serve     one turn for each that is ready; who has more goes to the end of the line
 *
 * Invariants:
 * - Only the thread touches `all`, `ready` and the listeners' sockets. Other threads leave word in
 *   the inbox, in a listener's fields under its lock, or in `stop`, and wake the thread.
 * - Events hold bare pointers. So nothing that an event may name is freed before all events of the
 *   round are marked: listeners leave in tick, and connections of hubs are freed there.
 * - An edge is reported once. So a listener with unread messages stays in `ready`: no event would
 *   bring it back.
 */
#include "indexer/stream/pump.h"

#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "indexer/stream/hub.h"

#define MAX_EVENTS 128
#define BURST_BYTES (4u << 20)

TAILQ_HEAD(listener_list, ki_listener);

struct ki_pump {
    pthread_t thread;
    int epoll_fd;
    struct kv_wake wake;
    _Atomic uint32_t load;

    pthread_mutex_t lock; /* guards the next two fields */
    struct listener_list inbox;
    bool stop;

    /* For the thread only. */
    struct listener_list all, ready;
    uint64_t deadline_ns;    /* earliest deadline of all listeners; 0: none */
    struct ki_sub_room room; /* for the connection that is being read */
    struct ki_hubs hubs;     /* addresses to which publishers connect */
    struct kv_wake *drained;
    size_t burst_bytes; /* bytes read since drained was signalled */
};

/* -- the thread -------------------------------------------------------------------------------- */

static void enqueue(struct ki_pump *p, struct ki_listener *l)
{
    if (l->queued)
        return;
    l->queued = true;
    TAILQ_INSERT_TAIL(&p->ready, l, ready);
}

/* Let a retired listener go. Its sockets close here: only this thread may use them. */
static void leave(struct ki_pump *p, struct ki_listener *l)
{
    ki_listener_close(l);
    if (l->queued)
        TAILQ_REMOVE(&p->ready, l, ready);
    TAILQ_REMOVE(&p->all, l, all);
    atomic_fetch_sub_explicit(&p->load, 1, memory_order_relaxed);
    ki_listener_release(l);
}

static void note_deadline(struct ki_pump *p, const struct ki_listener *l)
{
    if (l->deadline_ns && (!p->deadline_ns || l->deadline_ns < p->deadline_ns))
        p->deadline_ns = l->deadline_ns;
}

static bool is_due(const struct ki_listener *l, uint64_t now_ns)
{
    return l->deadline_ns && now_ns >= l->deadline_ns;
}

static void tick(struct ki_pump *p, struct ki_listener *l, uint64_t now_ns)
{
    if (!ki_listener_tick(l, now_ns)) {
        leave(p, l);
        return;
    }
    note_deadline(p, l);
    /* A tick may let messages be read that came while the listener was held: no edge tells them. */
    if (l->sub_ready || l->dealer_ready || !STAILQ_EMPTY(&l->backlog.items))
        enqueue(p, l);
}

/*
 * Tick the listeners whose time has come, or @all of them, and find the next deadline. A wake-up
 * doesn't say which listener it is about: that would need a queue, and such requests are rare.
 */
static void tick_listeners(struct ki_pump *p, bool all, uint64_t now_ns)
{
    struct ki_listener *l, *next;

    p->deadline_ns = ki_hubs_tick(&p->hubs, now_ns);
    for (l = TAILQ_FIRST(&p->all); l; l = next) {
        next = TAILQ_NEXT(l, all);
        if (all || is_due(l, now_ns))
            tick(p, l, now_ns);
        else
            note_deadline(p, l);
    }
}

/* Carry out the requests of other threads. Returns false to stop. */
static bool take_inbox(struct ki_pump *p)
{
    struct listener_list inbox = TAILQ_HEAD_INITIALIZER(inbox);
    struct ki_listener *l;
    bool stop;

    kv_wake_clear(&p->wake);
    pthread_mutex_lock(&p->lock);
    TAILQ_CONCAT(&inbox, &p->inbox, all);
    stop = p->stop;
    pthread_mutex_unlock(&p->lock);
    while ((l = TAILQ_FIRST(&inbox)) != NULL) {
        TAILQ_REMOVE(&inbox, l, all);
        TAILQ_INSERT_TAIL(&p->all, l, all);
        l->epoll_fd = p->epoll_fd;
        l->room = &p->room;
        l->hubs = &p->hubs;
    }
    return !stop;
}

/* Signal that no listener is ready: memory of the messages can be returned. */
static void note_drained(struct ki_pump *p)
{
    if (p->burst_bytes < BURST_BYTES)
        return;
    p->burst_bytes = 0;
    if (p->drained)
        kv_wake_signal(p->drained);
}

/*
 * One turn for each listener that is ready now. Those that have more wait for the next round, so
 * that sockets, requests and timers of the others come in between.
 */
static void serve(struct ki_pump *p)
{
    struct listener_list turn = TAILQ_HEAD_INITIALIZER(turn);
    struct ki_listener *l;

    TAILQ_CONCAT(&turn, &p->ready, ready);
    while ((l = TAILQ_FIRST(&turn)) != NULL) {
        uint64_t now_ns = kv_now_ns();
        bool more;

        TAILQ_REMOVE(&turn, l, ready);
        l->queued = false;
        more = ki_listener_service(l, now_ns);
        p->burst_bytes += l->turn_bytes;
        if (more)
            enqueue(p, l);
        note_deadline(p, l);
    }
}

/* Handle news of an address to which publishers connect, or of a connection that waits there. */
static void mark_hub(struct ki_pump *p, const struct epoll_event *event, uint64_t now_ns)
{
    void *about = (void *)(uintptr_t)(event->data.u64 & ~UINT64_C(3));
    bool ended = event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    struct ki_listener *l = NULL;

    if (event->data.u64 & 1)
        l = ki_hub_read(about, ended, now_ns);
    else
        ki_hub_accept(about, now_ns);
    if (l)
        enqueue(p, l);
    p->deadline_ns = now_ns; /* a connection's timers have changed */
}

static void mark(struct ki_pump *p, const struct epoll_event *event, uint64_t now_ns)
{
    uint64_t data = event->data.u64;
    struct ki_listener *l;

    if (data == 0)
        return; /* woken by a request of another thread */
    if (data & 2) {
        mark_hub(p, event, now_ns);
        return;
    }
    l = (struct ki_listener *)(uintptr_t)(data & ~UINT64_C(1));
    if (data & 1) {
        l->dealer_ready = l->dealer != NULL;
    } else {
        l->sub_ready = true;
        ki_sub_ready(&l->sub, event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
    }
    enqueue(p, l);
}

static int timeout_ms(const struct ki_pump *p)
{
    if (!TAILQ_EMPTY(&p->ready))
        return 0;
    if (!p->deadline_ns)
        return -1;
    return (int)KV_MIN(kv_ms_until(p->deadline_ns, kv_now_ns()), 60000);
}

static void *run(void *arg)
{
    struct epoll_event events[MAX_EVENTS];
    struct ki_pump *p = arg;
    bool going = true;

    while (going) {
        bool woken = false;
        int n = epoll_wait(p->epoll_fd, events, MAX_EVENTS, timeout_ms(p));
        uint64_t now_ns = kv_now_ns();

        for (int i = 0; i < n; i++) {
            woken |= events[i].data.u64 == 0;
            mark(p, &events[i], now_ns);
        }
        if (woken)
            going = take_inbox(p);
        if (woken || (p->deadline_ns && now_ns >= p->deadline_ns))
            tick_listeners(p, woken, now_ns);
        serve(p);
        if (TAILQ_EMPTY(&p->ready))
            note_drained(p);
    }
    while (!TAILQ_EMPTY(&p->all))
        leave(p, TAILQ_FIRST(&p->all));
    return NULL;
}

/* -- other threads ----------------------------------------------------------------------------- */

static void pump_free(struct ki_pump *p)
{
    kv_wake_close(&p->wake);
    if (p->epoll_fd >= 0)
        close(p->epoll_fd);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

int ki_pump_create(const char *name, struct kv_wake *drained, struct ki_pump **ret)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    struct ki_pump *p = calloc(1, sizeof(*p));
    int rc;

    if (!p)
        return -ENOMEM;
    p->drained = drained;
    pthread_mutex_init(&p->lock, NULL);
    TAILQ_INIT(&p->inbox);
    TAILQ_INIT(&p->all);
    TAILQ_INIT(&p->ready);
    p->wake.fd = -1;
    p->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    ki_hubs_init(&p->hubs, p->epoll_fd, &p->room);
    rc = p->epoll_fd < 0 ? -errno : kv_wake_open(&p->wake);
    if (rc == 0 && epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, p->wake.fd, &event) < 0)
        rc = -errno;
    if (rc == 0)
        rc = kv_thread_start(&p->thread, name, run, p);
    if (rc < 0) {
        pump_free(p);
        return rc;
    }
    *ret = p;
    return 0;
}

void ki_pump_destroy(struct ki_pump *pump)
{
    if (!pump)
        return;
    pthread_mutex_lock(&pump->lock);
    pump->stop = true;
    pthread_mutex_unlock(&pump->lock);
    kv_wake_signal(&pump->wake);
    pthread_join(pump->thread, NULL);
    pump_free(pump);
}

void ki_pump_add(struct ki_pump *pump, struct ki_listener *l)
{
    atomic_fetch_add_explicit(&pump->load, 1, memory_order_relaxed);
    l->pump = pump;
    pthread_mutex_lock(&pump->lock);
    TAILQ_INSERT_TAIL(&pump->inbox, l, all);
    pthread_mutex_unlock(&pump->lock);
    kv_wake_signal(&pump->wake);
}

void ki_pump_wake(struct ki_pump *pump)
{
    kv_wake_signal(&pump->wake);
}

uint32_t ki_pump_load(const struct ki_pump *pump)
{
    return atomic_load_explicit(&pump->load, memory_order_relaxed);
}
