// SPDX-License-Identifier: Apache-2.0
/*
 * The event thread of an agent: epoll, kicks by other threads, and timers. Sessions are looked at in
 * turns of equal length, so the list of them is the timers' queue.
 */
#include <sys/epoll.h>
#include <unistd.h>

#include "base/core/log.h"
#include "peer/lease/lend.h"
#include "peer/session/net.h"

#define EVENTS 64

static _Thread_local const struct kvbm_net *served_here; /* NULL: not an event thread */

bool kvbm_on_event_thread(const struct kvbm_net *net)
{
    return served_here == net;
}

int kvbm_net_add(struct kvbm_net *net, struct kvbm_source *source, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = source};

    return epoll_ctl(net->epoll, EPOLL_CTL_ADD, source->fd, &event) < 0 ? -errno : 0;
}

/* ---- kicks ---- */

void kvbm_kick(struct kvbm_conn *conn)
{
    struct kvbm_net *net = conn->session->net;
    bool first;

    pthread_mutex_lock(&net->kicks_lock);
    first = TAILQ_EMPTY(&net->kicks);
    if (!conn->kicked) {
        conn->kicked = kvbm_session_get(conn->session);
        TAILQ_INSERT_TAIL(&net->kicks, conn, kicks);
    }
    pthread_mutex_unlock(&net->kicks_lock);
    if (first)
        kv_wake_signal(&net->wake);
}

void kvbm_kick_moves(struct kvbm_conn *conn, struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;
    struct kvbm_session *before;

    pthread_mutex_lock(&net->kicks_lock);
    before = conn->kicked;
    if (before)
        conn->kicked = kvbm_session_get(session);
    conn->session = session;
    pthread_mutex_unlock(&net->kicks_lock);
    kvbm_session_put(before); /* not the last one: the lists have theirs */
}

/*
 * A thread that sends may end a message of another one, and holds locks of its own meanwhile. `done`
 * takes locks of its program, too, so the event thread calls it.
 */
void kvbm_out_sent(struct kvbm_net *net, struct kvbm_out *out)
{
    bool first;

    pthread_mutex_lock(&net->kicks_lock);
    first = TAILQ_EMPTY(&net->sent);
    TAILQ_INSERT_TAIL(&net->sent, out, queue);
    pthread_mutex_unlock(&net->kicks_lock);
    if (first && !kvbm_on_event_thread(net)) /* which looks before it sleeps */
        kv_wake_signal(&net->wake);
}

static struct kvbm_out *take_sent(struct kvbm_net *net)
{
    struct kvbm_out *out;

    pthread_mutex_lock(&net->kicks_lock);
    out = TAILQ_FIRST(&net->sent);
    if (out)
        TAILQ_REMOVE(&net->sent, out, queue);
    pthread_mutex_unlock(&net->kicks_lock);
    return out;
}

/* End also the messages that these ends send. */
void kvbm_end_sent(struct kvbm_net *net)
{
    struct kvbm_out *out;

    while ((out = take_sent(net)))
        kvbm_out_end(out);
}

/* Write, read or end what a connection was kicked for. */
static void serve_kick(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    char why[sizeof(session->why)];
    int err;

    conn->turn = 0;
    if (!session->attached)
        kvbm_session_attach(session);
    pthread_mutex_lock(&session->lock);
    if (session->state != KVBM_ENDED)
        kvbm_flush(conn);
    err = session->err;
    memcpy(why, session->why, sizeof(why));
    pthread_mutex_unlock(&session->lock);
    if (err < 0)
        kvbm_session_end(session, err, why);
    else if (conn->readable || conn->waits)
        kvbm_receive(conn);
}

static void serve_kicks(struct kvbm_net *net)
{
    struct kvbm_conns kicks;

    pthread_mutex_lock(&net->kicks_lock);
    TAILQ_INIT(&kicks);
    TAILQ_CONCAT(&kicks, &net->kicks, kicks);
    pthread_mutex_unlock(&net->kicks_lock);
    while (!TAILQ_EMPTY(&kicks)) {
        struct kvbm_conn *conn = TAILQ_FIRST(&kicks);
        struct kvbm_session *session;

        TAILQ_REMOVE(&kicks, conn, kicks);
        pthread_mutex_lock(&net->kicks_lock);
        session = KV_STEAL(conn->kicked); /* a kick from here on counts anew */
        pthread_mutex_unlock(&net->kicks_lock);
        serve_kick(conn);
        kvbm_session_put(session);
    }
}

/* ---- timers ---- */

/* Look at the sessions of a list whose turn has come. Returns when the next one's will. */
static uint64_t check_sessions(struct kvbm_sessions *list, uint64_t now)
{
    struct kvbm_session *session;

    while ((session = TAILQ_FIRST(list)) && session->check_ns <= now)
        kvbm_session_check(session, now); /* moves it to the end, or takes it out */
    return session ? session->check_ns : UINT64_MAX;
}

static uint64_t check_listeners(struct kvbm_net *net, uint64_t now)
{
    uint64_t next = UINT64_MAX;

    for (uint32_t i = 0; i < net->n_listeners; i++) {
        struct kvbm_listener *listener = &net->listeners[i];

        if (!listener->asleep)
            continue;
        if (listener->wake_ns <= now)
            kvbm_listener_wake(listener);
        if (listener->asleep)
            next = KV_MIN(next, listener->wake_ns);
    }
    return next;
}

/* Serve all timers. Returns the milliseconds until the next one, as epoll_wait takes them. */
static int check(struct kvbm_net *net)
{
    uint64_t now = kv_now_ns();
    uint64_t next = check_sessions(&net->newcomers, now);

    next = KV_MIN(next, check_sessions(&net->sessions, now));
    next = KV_MIN(next, check_listeners(net, now));
    return next == UINT64_MAX ? -1 : (int)KV_MIN(kv_ms_until(next, now), (int64_t)60000);
}

/* ---- the thread ---- */

/* Drop the sessions that have ended, once no event of this round can name them. */
static void bury(struct kvbm_net *net)
{
    struct kvbm_session *session;

    while ((session = TAILQ_FIRST(&net->dead))) {
        TAILQ_REMOVE(&net->dead, session, list);
        kvbm_session_put(session);
    }
}

static void end_all(struct kvbm_net *net)
{
    struct kvbm_session *session;

    serve_kicks(net);
    while ((session = TAILQ_FIRST(&net->newcomers)))
        kvbm_session_end(session, -ESHUTDOWN, "this agent ends");
    while ((session = TAILQ_FIRST(&net->sessions)))
        kvbm_session_end(session, -ESHUTDOWN, "this agent ends");
    serve_kicks(net);
    kvbm_end_sent(net); /* all sessions have ended: nothing is sent any more */
    bury(net);
}

static bool is_stopping(struct kvbm_net *net)
{
    bool stopping;

    pthread_mutex_lock(&net->lock);
    stopping = net->stopping;
    pthread_mutex_unlock(&net->lock);
    return stopping;
}

/* Wait for events for up to @ms, and serve them. Returns their number, or a negative number. */
static int serve_round(struct kvbm_net *net, int ms)
{
    struct epoll_event events[EVENTS];
    int n;

    kvbm_end_sent(net);
    n = epoll_wait(net->epoll, events, EVENTS, ms);
    for (int i = 0; i < n; i++) {
        struct kvbm_source *source = events[i].data.ptr;

        if (source)
            source->ready(source, events[i].events);
        else
            kv_wake_clear(&net->wake);
    }
    serve_kicks(net);
    bury(net);
    return n;
}

static void *net_main(void *arg)
{
    struct kvbm_net *net = arg;

    served_here = net;
    while (!is_stopping(net))
        (void)serve_round(net, check(net));
    end_all(net);
    return NULL;
}

bool kvbm_net_turn(struct kvbm_net *net)
{
    served_here = net;
    return serve_round(net, 0) > 0;
}

int kvbm_net_start(struct kvbm_net *net)
{
    int err = 0;

    pthread_mutex_lock(&net->lock);
    if (!net->running) {
        err = kv_thread_start(&net->thread, "kvbm-peer", net_main, net);
        net->running = err == 0;
    }
    pthread_mutex_unlock(&net->lock);
    return err;
}

/* ---- life ---- */

#define DEFAULT_SESSIONS 1024
#define MAX_SESSIONS 65536
#define DEFAULT_REQUESTS 256
#define MAX_REQUESTS 4096
#define DEFAULT_BYTES (UINT64_C(64) << 20)
#define DEFAULT_ALL_BYTES (UINT64_C(256) << 20)

static int read_opts(struct kvbm_net *net, const struct kvbm_agent_opts *opts)
{
    const struct kvbm_layout_config *layout = KV_OPT(opts, layout, NULL);

    net->max_sessions = KV_OPT(opts, max_sessions, DEFAULT_SESSIONS);
    net->max_requests = KV_OPT(opts, max_requests, DEFAULT_REQUESTS);
    net->max_queued = KV_OPT(opts, max_queued_bytes, DEFAULT_BYTES);
    net->max_in = KV_OPT(opts, max_received_bytes, DEFAULT_ALL_BYTES);
    net->keepalive_ns = KV_OPT(opts, keepalive_ms, 10000) * KV_NS_PER_MS;
    net->handshake_ns = KV_OPT(opts, handshake_ms, 5000) * KV_NS_PER_MS;
    if (layout && !kv_sized(layout, "kvbm_layout_config"))
        return -EINVAL;
    if (layout) {
        net->layers = layout->num_layers;
        net->outer = layout->outer_dim;
        net->page_size = layout->page_size;
    }
    if (net->max_sessions <= MAX_SESSIONS && net->max_requests <= MAX_REQUESTS)
        return 0;
    kv_log_error("kvbm", "an agent's options are out of range",
                 "agent=%s max_sessions=%u max_requests=%u", net->agent->name, net->max_sessions,
                 net->max_requests);
    return -EINVAL;
}

int kvbm_net_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts)
{
    struct kvbm_net *net = calloc(1, sizeof(*net));
    struct epoll_event event = {.events = EPOLLIN};
    int err;

    if (!net)
        return -ENOMEM;
    net->agent = agent;
    agent->net = net;
    net->wake.fd = -1;
    pthread_mutex_init(&net->lock, NULL);
    pthread_mutex_init(&net->kicks_lock, NULL);
    kv_cond_init(&net->served);
    TAILQ_INIT(&net->sessions);
    TAILQ_INIT(&net->kicks);
    TAILQ_INIT(&net->sent);
    TAILQ_INIT(&net->newcomers);
    TAILQ_INIT(&net->dead);
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    err = net->epoll < 0 ? -errno : kv_wake_open(&net->wake);
    if (err == 0 && epoll_ctl(net->epoll, EPOLL_CTL_ADD, net->wake.fd, &event) < 0)
        err = -errno;
    if (err == 0)
        err = read_opts(net, opts);
    if (err == 0)
        err = kvbm_auth_init(&net->auth, opts);
    if (err == 0)
        err = kvbm_lender_create(agent, &agent->lender); /* it sees the first session */
    if (err == 0)
        err = kvbm_listen(net, opts);
    if (err == 0 && net->n_listeners)
        err = kvbm_net_start(net);
    return err; /* the agent's destructor frees a net that is half built */
}

void kvbm_net_destroy(struct kvbm_net *net)
{
    if (!net)
        return;
    if (net->running) {
        pthread_mutex_lock(&net->lock);
        net->stopping = true;
        pthread_mutex_unlock(&net->lock);
        kv_wake_signal(&net->wake);
        pthread_join(net->thread, NULL);
    }
    kvbm_carriers_destroy(net->agent); /* sends in progress name sessions */
    for (uint32_t i = 0; i < net->n_listeners; i++)
        kvbm_listener_close(&net->listeners[i]);
    kvbm_auth_fini(&net->auth);
    kv_wake_close(&net->wake);
    if (net->epoll >= 0)
        close(net->epoll);
    pthread_cond_destroy(&net->served);
    pthread_mutex_destroy(&net->lock);
    pthread_mutex_destroy(&net->kicks_lock);
    free(net);
}
