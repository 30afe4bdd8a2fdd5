// SPDX-License-Identifier: Apache-2.0
/*
 * Life of sessions: made with a connection, open after the handshake, ended by the event thread
 * alone, freed with the last reference.
 *
 *   newcomers ──handshake──► open ──► dead (until the end of the event thread's round) ──► freed
 */
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/log.h"
#include "peer/session/net.h"

const char *kvbm_words(int err)
{
    switch (err) {
    case -EPIPE:
        return "the connection is gone";
    case -EACCES:
        return "the peer refuses this agent's certificate";
    case -EPROTO:
        return "the peer breaks the protocol";
    case -ENOBUFS:
        return "bodies under way need more than max_received_bytes";
    case -ENOMEM:
        return "out of memory";
    default:
        return strerror(-err);
    }
}

bool kvbm_has_ended(const struct kvbm_session *session)
{
    return session->state == KVBM_ENDED; /* only this thread ends sessions */
}

/* ---- connections ---- */

static void conn_ready(struct kvbm_source *source, uint32_t events)
{
    struct kvbm_conn *conn = (struct kvbm_conn *)source;
    struct kvbm_session *session = conn->session;

    if (kvbm_has_ended(session))
        return;
    conn->turn = 0;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP))
        conn->readable = true;
    if (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
        conn->ending = true;
    if (!conn->secured) {
        kvbm_secure(conn);
        if (!conn->secured || kvbm_has_ended(session))
            return;
    }
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) {
        pthread_mutex_lock(&session->lock);
        conn->edges++;
        conn->blocked = false;
        kvbm_flush(conn);
        pthread_mutex_unlock(&session->lock);
    }
    if (!conn->waits) /* else the kick of this round reads: one turn a round */
        kvbm_receive(conn);
}

static struct kvbm_conn *conn_create(struct kvbm_session *session, int fd, bool is_unix,
                                     bool is_opener)
{
    struct kvbm_conn *conn = calloc(1, sizeof(*conn));

    if (!conn)
        return NULL;
    conn->source = (struct kvbm_source){.fd = fd, .ready = conn_ready};
    conn->session = session;
    conn->is_unix = is_unix;
    conn->is_opener = is_opener;
    conn->frame_fd = -1;
    TAILQ_INIT(&conn->urgent);
    return conn;
}

static void conn_free(struct kvbm_conn *conn)
{
    kv_buf_fini(&conn->body);
    free(conn);
}

/* Take all messages of a connection that is written no more. */
static void drain(struct kvbm_conn *conn, struct kvbm_outs *to)
{
    struct kvbm_out *out = KV_STEAL(conn->now.out);

    TAILQ_CONCAT(to, &conn->urgent, queue);
    if (!out)
        return;
    /* A bulk message is in the session's queue, too, unless this was its last chunk. */
    if (--out->n_flying == 0 && (out->cut || out->frame.offset == out->frame.total))
        TAILQ_INSERT_TAIL(to, out, queue);
}

/* Close a connection that is written no more. The event thread. */
static void conn_close(struct kvbm_conn *conn)
{
    struct kvbm_net *net = conn->session->net;

    if (conn->tls)
        net->auth.crypto->stream_destroy(KV_STEAL(conn->tls));
    for (unsigned i = 0; i < conn->n_fds; i++) {
        if (conn->fds[i] >= 0)
            close(conn->fds[i]);
    }
    conn->n_fds = 0;
    if (conn->frame_fd >= 0)
        close(conn->frame_fd);
    conn->frame_fd = -1;
    /* A child of this process may have a copy: a close alone leaves the connection, and its place in epoll. */
    (void)epoll_ctl(net->epoll, EPOLL_CTL_DEL, conn->source.fd, NULL);
    (void)shutdown(conn->source.fd, SHUT_RDWR);
    close(conn->source.fd);
    conn->source.fd = -1;
    net->in_bytes -= conn->counted;
    conn->counted = 0;
}

/* ---- creation ---- */

static void session_free(struct kvbm_session *session)
{
    for (uint32_t i = 0; i < session->n_conns; i++)
        conn_free(session->conns[i]);
    kv_buf_fini(&session->transcript);
    pthread_mutex_destroy(&session->lock);
    pthread_cond_destroy(&session->changed);
    free(session->requests);
    free(session);
}

int kvbm_session_create(struct kvbm_net *net, int fd, bool is_unix, bool is_opener,
                        const char *endpoint, struct kvbm_session **ret)
{
    struct kvbm_session *session = calloc(1, sizeof(*session));
    struct kvbm_conn *conn = session ? conn_create(session, fd, is_unix, is_opener) : NULL;

    if (!conn) {
        free(session);
        close(fd);
        return -ENOMEM;
    }
    atomic_init(&session->references, 1);
    atomic_init(&session->heard_ns, kv_now_ns());
    session->net = net;
    session->step = is_opener ? KVBM_WAIT_CHALLENGE : KVBM_WAIT_HELLO;
    snprintf(session->endpoint, sizeof(session->endpoint), "%s", endpoint);
    pthread_mutex_init(&session->lock, NULL);
    kv_cond_init(&session->changed);
    TAILQ_INIT(&session->bulk);
    session->conns[0] = conn;
    session->n_conns = 1;
    *ret = session;
    return 0;
}

struct kvbm_session *kvbm_session_get(struct kvbm_session *session)
{
    atomic_fetch_add_explicit(&session->references, 1, memory_order_relaxed);
    return session;
}

void kvbm_session_put(struct kvbm_session *session)
{
    /* acq_rel: whoever frees sees what all others have done before they let go */
    if (session && atomic_fetch_sub_explicit(&session->references, 1, memory_order_acq_rel) == 1)
        session_free(session);
}

void kvbm_session_attach(struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;
    struct kvbm_conn *conn = session->conns[0];
    int err;

    session->attached = session->in_newcomers = true;
    session->check_ns = kv_now_ns() + net->handshake_ns;
    kvbm_session_get(session); /* the lists' reference: bury drops it */
    TAILQ_INSERT_TAIL(&net->newcomers, session, list);
    net->n_newcomers += !conn->is_opener;
    err = kvbm_net_add(net, &conn->source, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    if (err < 0)
        kvbm_session_end(session, err, kvbm_words(err));
    else
        kvbm_secure(conn);
}

/* ---- begin ---- */

static void leave_newcomers(struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;

    TAILQ_REMOVE(&net->newcomers, session, list);
    net->n_newcomers -= !session->conns[0]->is_opener;
    session->in_newcomers = false;
}

static void run_watchers(struct kvbm_session *session, bool begun)
{
    struct kvbm_net *net = session->net;

    for (uint32_t i = 0; i < net->n_watchers; i++)
        net->watchers[i].fn(net->watchers[i].arg, session, begun);
    session->begun = begun;
}

void kvbm_session_begin(struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;

    leave_newcomers(session);
    run_watchers(session, true);
    session->check_ns = kv_now_ns() + net->keepalive_ns / 4;
    pthread_mutex_lock(&net->lock);
    TAILQ_INSERT_TAIL(&net->sessions, session, list);
    pthread_mutex_unlock(&net->lock);
    kv_log_info("kvbm", "a session begins", "agent=%s peer=%s worker=%llu endpoint=%s",
                net->agent->name, session->peer.who.name,
                (unsigned long long)session->peer.who.worker, session->endpoint);
    pthread_mutex_lock(&session->lock);
    session->state = KVBM_OPEN;
    pthread_cond_broadcast(&session->changed);
    pthread_mutex_unlock(&session->lock);
    kvbm_exchange_begin(session);
}

/* ---- end ---- */

/* Wait until no other thread writes, with the session locked. Short: sockets don't block. */
static void wait_for_writers(struct kvbm_session *session)
{
    for (uint32_t i = 0; i < session->n_conns; i++) {
        while (session->conns[i]->writing)
            pthread_cond_wait(&session->changed, &session->lock);
    }
}

static void log_end(struct kvbm_session *session, bool was_open, const char *why)
{
    static struct kv_log_rate rate;
    char quoted[2 * KVBM_MAX_REASON];

    kv_log_quote(quoted, sizeof(quoted), why);
    if (was_open)
        kv_log_info("kvbm", "a session ends", "agent=%s peer=%s endpoint=%s why=%s",
                    session->net->agent->name, session->peer.who.name, session->endpoint, quoted);
    else if (session->step != KVBM_REFUSED && kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "no session comes about", "agent=%s endpoint=%s why=%s",
                    session->net->agent->name, session->endpoint, quoted);
}

/* Take an ended session from its list to the dead ones. */
static void unlist(struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;

    if (session->in_newcomers) {
        leave_newcomers(session);
    } else {
        pthread_mutex_lock(&net->lock);
        TAILQ_REMOVE(&net->sessions, session, list);
        pthread_mutex_unlock(&net->lock);
    }
    if (session->counted) {
        session->counted = false;
        net->n_sessions--;
    }
    TAILQ_INSERT_TAIL(&net->dead, session, list);
}

static void mark_gone(struct kvbm_session *session)
{
    pthread_mutex_lock(&session->lock);
    session->gone = true;
    pthread_cond_broadcast(&session->changed);
    pthread_mutex_unlock(&session->lock);
}

void kvbm_session_move(struct kvbm_session *session, struct kvbm_session *other)
{
    struct kvbm_conn *conn = session->conns[0];
    uint64_t queued;

    pthread_mutex_lock(&session->lock);
    session->n_conns = 0;
    session->state = KVBM_ENDED;
    queued = session->queued;
    pthread_mutex_unlock(&session->lock);
    pthread_mutex_lock(&other->lock);
    kvbm_kick_moves(conn, other);
    other->conns[other->n_conns++] = conn;
    other->queued += queued;
    pthread_mutex_unlock(&other->lock);
    kvbm_kick(conn); /* replies may be waiting */
    unlist(session);
    mark_gone(session);
}

void kvbm_session_end(struct kvbm_session *session, int err, const char *why)
{
    struct kvbm_outs outs = TAILQ_HEAD_INITIALIZER(outs);
    struct kvbm_out *out;
    bool was_open;

    pthread_mutex_lock(&session->lock);
    if (session->state == KVBM_ENDED) {
        pthread_mutex_unlock(&session->lock);
        return;
    }
    was_open = session->state == KVBM_OPEN;
    session->state = KVBM_ENDED;
    session->err = err;
    if (why != session->why)
        snprintf(session->why, sizeof(session->why), "%s", why);
    wait_for_writers(session);
    for (uint32_t i = 0; i < session->n_conns; i++) {
        drain(session->conns[i], &outs);
        conn_close(session->conns[i]);
    }
    TAILQ_CONCAT(&outs, &session->bulk, queue);
    kvbm_calls_end(session);
    pthread_mutex_unlock(&session->lock);

    log_end(session, was_open, session->why);
    while ((out = TAILQ_FIRST(&outs))) {
        TAILQ_REMOVE(&outs, out, queue);
        kvbm_out_end(out);
    }
    unlist(session);
    if (session->begun)
        run_watchers(session, false);
    kvbm_exchange_end(session);
    mark_gone(session);
}

void kvbm_session_abort(struct kvbm_session *session, int err, const char *why)
{
    pthread_mutex_lock(&session->lock);
    if (session->state != KVBM_ENDED && session->err == 0) {
        session->err = err;
        snprintf(session->why, sizeof(session->why), "%s", why);
        kvbm_kick(session->conns[0]);
    }
    pthread_mutex_unlock(&session->lock);
}

/* ---- timers ---- */

static uint64_t silence_of(const struct kvbm_session *session, uint64_t now)
{
    return now - KV_MIN(now, session->heard_ns);
}

static void check_open(struct kvbm_session *session, uint64_t now)
{
    struct kvbm_net *net = session->net;
    const struct kvbm_frame ping = {.type = KVBM_PING};
    bool late = now - KV_MIN(now, session->check_ns) >= net->keepalive_ns / 8;
    uint64_t silent;

    /* A chunk that comes slowly is no silence. After a halt of this thread, or of its process, what the
     * peer has said meanwhile is still in the sockets. */
    if (!kvbm_receive_arrived(session, silence_of(session, now) >= net->keepalive_ns))
        return;
    silent = silence_of(session, now);
    pthread_mutex_lock(&net->lock); /* its next turn is the last of all */
    TAILQ_REMOVE(&net->sessions, session, list);
    session->check_ns = now + net->keepalive_ns / 4;
    TAILQ_INSERT_TAIL(&net->sessions, session, list);
    pthread_mutex_unlock(&net->lock);
    if (silent >= net->keepalive_ns) {
        kvbm_session_end(session, -ETIMEDOUT, "the peer is silent");
        return;
    }
    if (kvbm_drips(session->conns[0], now, late)) {
        kvbm_session_end(session, -ETIMEDOUT, "the peer sends a long body too slowly");
        return;
    }
    if (silent < net->keepalive_ns / 4)
        session->pinged = false;
    else if (!session->pinged) {
        pthread_mutex_lock(&session->lock);
        session->pinged = kvbm_send_small(session, &ping) == 0;
        pthread_mutex_unlock(&session->lock);
    }
}

/* End a handshake that takes too long. When this look at it is late, the thread stood still, and what
 * the peer has sent meanwhile is unread: then the handshake has its time once more. */
static void check_newcomer(struct kvbm_session *session, uint64_t now)
{
    struct kvbm_net *net = session->net;

    if (now - session->check_ns < net->handshake_ns / 8) {
        kvbm_session_end(session, -ETIMEDOUT, "the handshake takes too long");
        return;
    }
    TAILQ_REMOVE(&net->newcomers, session, list);
    session->check_ns = now + net->handshake_ns;
    TAILQ_INSERT_TAIL(&net->newcomers, session, list);
}

void kvbm_session_check(struct kvbm_session *session, uint64_t now)
{
    if (session->in_newcomers)
        check_newcomer(session, now);
    else
        check_open(session, now);
}

/* ---- for services ---- */

struct kvbm_session *kvbm_session_find(struct kvbm_agent *agent, uint64_t worker)
{
    struct kvbm_net *net = agent->net;
    struct kvbm_session *session;

    pthread_mutex_lock(&net->lock);
    for (session = TAILQ_FIRST(&net->sessions); session; session = TAILQ_NEXT(session, list)) {
        if (session->peer.who.worker == worker && kvbm_session_is_open(session))
            break;
    }
    if (session)
        kvbm_session_get(session);
    pthread_mutex_unlock(&net->lock);
    return session;
}

const struct kvbm_identity *kvbm_session_peer(const struct kvbm_session *session)
{
    return &session->peer.who;
}

struct kvbm_agent *kvbm_session_agent(const struct kvbm_session *session)
{
    return session->net->agent;
}

bool kvbm_session_takes_fds(const struct kvbm_session *session)
{
    return session->conns[0]->is_unix;
}

bool kvbm_session_is_open(const struct kvbm_session *session)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&session->lock; /* of an object that isn't const */
    bool open;

    pthread_mutex_lock(lock);
    open = session->state == KVBM_OPEN && session->err == 0;
    pthread_mutex_unlock(lock);
    return open;
}

void **kvbm_session_slot(struct kvbm_session *session, unsigned slot)
{
    return &session->slots[slot];
}

int kvbm_agent_watch(struct kvbm_agent *agent, kvbm_session_fn fn, void *arg)
{
    struct kvbm_net *net = agent->net;
    int err = -ENOSPC;

    pthread_mutex_lock(&net->lock);
    if (net->n_watchers < KVBM_MAX_WATCHERS) {
        net->watchers[net->n_watchers].fn = fn;
        net->watchers[net->n_watchers++].arg = arg;
        err = 0;
    }
    pthread_mutex_unlock(&net->lock);
    return err;
}
