// SPDX-License-Identifier: Apache-2.0
/*
 * Opening a session. The caller's thread resolves and connects; the event thread does the handshake.
 */
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/log.h"
#include "peer/session/endpoints.h"
#include "peer/session/net.h"

#define DEFAULT_TIMEOUT_MS 5000
#define MAX_TEXT 128

struct opening {
    struct kvbm_net *net;
    const char *endpoint, *tls_name;
    struct kvbm_endpoint place;
    uint64_t deadline_ns;
    char why[KVBM_MAX_REASON + 1];
};

static int fail(struct opening *o, int err, const char *why)
{
    static struct kv_log_rate rate;
    char quoted[2 * KVBM_MAX_REASON];

    snprintf(o->why, sizeof(o->why), "%s", why);
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "can't connect to a peer", "agent=%s endpoint=%s why=%s",
                    o->net->agent->name, o->endpoint, kv_log_quote(quoted, sizeof(quoted), why));
    return err;
}

/* ---- connecting ---- */

/* Wait for a connection that is being made. Returns 0 or why there is none. */
static int await_connection(int fd, uint64_t deadline_ns)
{
    struct pollfd polled = {.fd = fd, .events = POLLOUT};
    socklen_t len = sizeof(int);
    int n, err = 0;

    do {
        int64_t ms = kv_ms_until(deadline_ns, kv_now_ns());

        n = poll(&polled, 1, (int)KV_MIN(ms, (int64_t)INT32_MAX));
    } while (n < 0 && errno == EINTR);
    if (n == 0)
        return -ETIMEDOUT;
    if (n < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &len) < 0)
        return -errno;
    return -err;
}

static int connect_to(const struct sockaddr *at, socklen_t len, uint64_t deadline_ns)
{
    int fd = kvbm_socket(at->sa_family), err = 0;

    if (fd < 0)
        return fd;
    if (connect(fd, at, len) < 0)
        err = errno == EINPROGRESS ? await_connection(fd, deadline_ns) : -errno;
    if (err == 0)
        return fd;
    close(fd);
    return err;
}

/* Connect to a unix socket. A full backlog (-EAGAIN) may pass. */
static int connect_unix(struct opening *o)
{
    const struct sockaddr *at = (const struct sockaddr *)&o->place.path;
    struct ucred who;
    socklen_t len = sizeof(who);
    int fd;

    while ((fd = connect_to(at, sizeof(o->place.path), o->deadline_ns)) == -EAGAIN) {
        if (kv_now_ns() >= o->deadline_ns)
            return fail(o, -ETIMEDOUT, "the listener's queue is full");
        (void)poll(NULL, 0, 2);
    }
    if (fd < 0)
        return fail(o, fd, strerror(-fd));
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) < 0 || who.uid != geteuid()) {
        close(fd);
        return fail(o, -EACCES, "the listener is a process of another user");
    }
    return fd;
}

static int connect_tcp(struct opening *o)
{
    struct kv_resolver *resolver = kv_resolver_shared();
    const struct kv_endpoint *tcp = &o->place.tcp;
    struct kv_addresses found;
    int fd = -ENOMEM;
    int err = resolver ? kv_resolver_wait(resolver, tcp->host, 1000, o->deadline_ns, &found) : fd;

    if (err < 0)
        return fail(o, err == -ENOENT ? -EHOSTUNREACH : err, kv_resolver_strerror(err));
    for (unsigned i = 0; i < found.n; i++) {
        uint64_t now = kv_now_ns();
        struct sockaddr_storage at;
        socklen_t len = kvbm_address(&found.items[i], tcp->port, &at);

        if (now >= o->deadline_ns)
            return fail(o, -ETIMEDOUT, "nobody answers");
        fd = connect_to((struct sockaddr *)&at, len,
                        now + (o->deadline_ns - now) / (found.n - i)); /* each has its share */
        if (fd >= 0)
            return fd;
    }
    return fail(o, fd, fd == -ETIMEDOUT ? "nobody answers" : strerror(-fd));
}

/* Make a connection, with TLS if this agent uses it, as a session that isn't attached. */
static int make_session(struct opening *o, struct kvbm_session **ret)
{
    struct kvbm_net *net = o->net;
    bool is_unix = o->place.is_unix;
    int fd = is_unix ? connect_unix(o) : connect_tcp(o), err;

    if (fd < 0)
        return fd;
    kvbm_tune(fd, is_unix);
    err = kvbm_session_create(net, fd, is_unix, true, o->endpoint, ret);
    if (err < 0)
        return err;
    if (is_unix || !net->auth.tls)
        return 0;
    err = kvbm_conn_tls((*ret)->conns[0], o->tls_name);
    if (err == 0)
        return 0;
    close(fd);
    kvbm_session_put(*ret);
    return fail(o, err, "TLS can't begin");
}

/* ---- waiting ---- */

/* Wait until a session is open with the peer's sets, or a data connection has joined. */
static int await_opening(struct opening *o, struct kvbm_session *session)
{
    int err = 0;
    bool ended;

    kvbm_kick(session->conns[0]);
    pthread_mutex_lock(&session->lock);
    while (err == 0 && session->state != KVBM_ENDED && !session->filled)
        err = kv_cond_wait_until(&session->changed, &session->lock, o->deadline_ns);
    ended = session->state == KVBM_ENDED;
    if (ended) {
        err = session->err;
        snprintf(o->why, sizeof(o->why), "%s", session->why);
    }
    pthread_mutex_unlock(&session->lock);
    if (err != -ETIMEDOUT || ended)
        return err;
    kvbm_session_abort(session, err, "the peer doesn't answer in time");
    return fail(o, err, "the peer doesn't answer in time");
}

static int add_data_connections(struct opening *o, struct kvbm_session *session, uint32_t n)
{
    int err = 0;

    for (uint32_t i = 0; err == 0 && i < n; i++) {
        struct kvbm_session *data = NULL;

        err = make_session(o, &data);
        if (err < 0)
            break;
        data->is_data = true;
        memcpy(data->join, session->join, sizeof(data->join));
        err = await_opening(o, data);
        kvbm_session_put(data);
    }
    return err;
}

/* Let go of a session, and wait until its end is complete. */
static void end_and_wait(struct kvbm_session *session, int err, const char *why)
{
    kvbm_session_abort(session, err, why);
    pthread_mutex_lock(&session->lock);
    while (!session->gone)
        pthread_cond_wait(&session->changed, &session->lock);
    pthread_mutex_unlock(&session->lock);
    kvbm_session_put(session);
}

static int open_session(struct opening *o, uint32_t n_data, struct kvbm_session **ret)
{
    struct kvbm_session *session = NULL;
    int err = kvbm_net_start(o->net);

    if (err == 0)
        err = make_session(o, &session);
    if (err != 0)
        return err;
    err = await_opening(o, session);
    if (err == 0)
        err = add_data_connections(o, session, n_data);
    if (err == 0)
        *ret = session;
    else
        end_and_wait(session, err, o->why);
    return err;
}

/* Replace what a terminal would take for commands: the peer may have chosen the words. */
static void make_plain(char *text)
{
    uint8_t *at = (uint8_t *)text;

    for (; *at; at++) {
        if (*at < 0x20 || *at == 0x7f || (*at == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0))
            *at = '?';
        if (*at >= 0x80 && *at < 0xa0 && at > (uint8_t *)text && at[-1] == '?')
            *at = '?';
    }
}

/* ---- public ---- */

int kvbm_session_open(struct kvbm_agent *agent, const char *endpoint,
                      const struct kvbm_session_opts *opts, struct kvbm_session **ret)
{
    struct opening o = {.endpoint = endpoint};
    char *why = KV_OPT(opts, why, NULL);
    size_t why_size = KV_OPT(opts, why_size, 0);
    uint32_t n_data = KV_OPT(opts, n_data, 0);
    int err;

    if (!agent || !ret || !kv_sized_or_null(opts, "kvbm_session_opts") || n_data > KVBM_MAX_DATA)
        return -EINVAL;
    if (kvbm_on_event_thread(agent->net))
        return -EDEADLK;
    err = kvbm_endpoint_parse(endpoint, &o.place);
    if (err < 0)
        return err;
    o.net = agent->net;
    o.deadline_ns = kv_ns_after(kv_now_ns(), KV_OPT(opts, timeout_ms, DEFAULT_TIMEOUT_MS));
    o.tls_name = KV_OPT(opts, tls_name, o.place.tcp.host);
    err = open_session(&o, n_data, ret);
    if (err < 0 && why && why_size) {
        snprintf(why, why_size, "%s", o.why[0] ? o.why : kvbm_words(err));
        make_plain(why);
    }
    if (err == 0) {
        for (int by = 0; by < KVBM_N_CARRIERS; by++)
            (void)kvbm_link_agree(*ret, by, o.deadline_ns);
        pthread_mutex_lock(&agent->lock);
        agent->n_users++;
        pthread_mutex_unlock(&agent->lock);
    }
    return err;
}

int kvbm_session_close(struct kvbm_session *session)
{
    struct kvbm_agent *agent = session ? session->net->agent : NULL;

    if (!session)
        return 0;
    if (kvbm_on_event_thread(agent->net))
        return -EDEADLK;
    end_and_wait(session, -ESHUTDOWN, "closed by this agent");
    pthread_mutex_lock(&agent->lock);
    agent->n_users--;
    pthread_mutex_unlock(&agent->lock);
    return 0;
}

int kvbm_session_get_info(struct kvbm_session *session, struct kvbm_session_info *ret)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;

    if (!session || !kv_sized(ret, "kvbm_session_info"))
        return -EINVAL;
    memcpy(info.agent, session->peer.who.name, sizeof(info.agent));
    info.worker = session->peer.who.worker;
    info.incarnation = session->peer.who.incarnation;
    snprintf(info.endpoint, sizeof(info.endpoint), "%s", session->endpoint);
    pthread_mutex_lock(&session->lock);
    info.tls = session->conns[0]->has_tls;
    info.n_data = session->n_conns - 1;
    info.open = session->state == KVBM_OPEN && session->err == 0;
    info.err = session->err;
    info.ucx = session->links[KVBM_BY_UCX].on;
    info.nixl = session->links[KVBM_BY_NIXL].on;
    pthread_mutex_unlock(&session->lock);
    KV_GIVE(ret, &info);
    return 0;
}
