// SPDX-License-Identifier: Apache-2.0
/* Endpoints at which an agent listens. Loopback and unix sockets by default: see may_listen. */
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/le.h"
#include "base/core/log.h"
#include "peer/session/endpoints.h"
#include "peer/session/net.h"

#define BACKLOG 512
#define ACCEPTS 64 /* connections taken before others have their turn */
#define NAP_NS (UINT64_C(100) * KV_NS_PER_MS)

static int fail(const struct kvbm_net *net, const char *endpoint, int err, const char *what)
{
    kv_log_error("kvbm", "an agent can't listen", "agent=%s endpoint=%s step=%s error=\"%s\"",
                 net->agent->name, endpoint, what, strerror(-err));
    return err;
}

/* ---- accepting ---- */

/* Only processes of this user may come by a unix socket. Such a one is its own origin. */
static bool is_own_user(int fd, uint64_t *origin)
{
    struct ucred who;
    socklen_t len = sizeof(who);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) < 0 || who.uid != geteuid())
        return false;
    *origin = (uint64_t)who.pid;
    return true;
}

/* Name the origin of a connection by its address. Whoever has one of IPv6 has 2^64 of its network. */
static uint64_t origin_of(const struct sockaddr_storage *at)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff}; /* before an IPv4 address */
    struct sockaddr_in6 v6;

    if (at->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)at)->sin_addr.s_addr);
    memcpy(&v6, at, sizeof(v6));
    return kv_get_le64((const uint8_t *)&v6.sin6_addr +
                       (memcmp(&v6.sin6_addr, mapped, sizeof(mapped)) == 0 ? 8 : 0));
}

static void refuse_user(const struct kvbm_listener *listener, int fd)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a session is refused",
                    "agent=%s endpoint=%s why=\"a process of another user\"",
                    listener->net->agent->name, listener->endpoint);
    close(fd);
}

/* Tell whether a newcomer's handshake has begun, as far as this side can tell. */
static bool has_begun(const struct kvbm_session *session)
{
    return session->step == KVBM_WAIT_PROOF || session->step == KVBM_WAIT_READY ||
           (session->step == KVBM_WAIT_HELLO && session->conns[0]->greeted);
}

static bool is_of(const struct kvbm_session *session, uint64_t origin)
{
    return !session->conns[0]->is_opener && session->origin == origin;
}

/* Find the origin that has most newcomers. */
static uint64_t most_common_origin(const struct kvbm_net *net)
{
    const struct kvbm_session *session, *other;
    uint64_t origin = 0;
    uint32_t most = 0;

    for (session = TAILQ_FIRST(&net->newcomers); session; session = TAILQ_NEXT(session, list)) {
        uint32_t n = 0;

        for (other = TAILQ_FIRST(&net->newcomers); other; other = TAILQ_NEXT(other, list))
            n += is_of(other, session->origin);
        if (n > most)
            origin = session->origin;
        most = KV_MAX(most, n);
    }
    return origin;
}

/*
 * End a newcomer to a listener, of the origin that has most of them: so a stranger pushes its own out. Of
 * those it is the oldest that says nothing, unless that are fewer than half: an honest one is spared
 * once it has begun, and has its time to begin beside others that begin and go no further.
 */
static void push_out(const struct kvbm_net *net)
{
    uint64_t origin = most_common_origin(net);
    struct kvbm_session *session, *oldest[2] = {NULL, NULL};
    uint32_t n[2] = {0, 0};

    for (session = TAILQ_FIRST(&net->newcomers); session; session = TAILQ_NEXT(session, list)) {
        bool begun = has_begun(session);

        if (!is_of(session, origin))
            continue;
        n[begun]++;
        if (!oldest[begun])
            oldest[begun] = session;
    }
    session = oldest[n[1] > n[0]];
    if (session)
        kvbm_session_end(session, -EBUSY, "newer connections push it out");
}

static void take(struct kvbm_listener *listener, int fd, uint64_t origin)
{
    struct kvbm_net *net = listener->net;
    struct kvbm_session *session;
    int err = 0;

    if (listener->is_unix && !is_own_user(fd, &origin)) {
        refuse_user(listener, fd);
        return;
    }
    kvbm_tune(fd, listener->is_unix);
    if (net->n_newcomers == KVBM_MAX_NEWCOMERS)
        push_out(net);
    if (kvbm_session_create(net, fd, listener->is_unix, false, listener->endpoint, &session) < 0)
        return;
    session->origin = origin;
    if (!listener->is_unix && net->auth.tls)
        err = kvbm_conn_tls(session->conns[0], NULL);
    if (err < 0)
        close(fd);
    else
        kvbm_session_attach(session);
    kvbm_session_put(session); /* the lists have their own */
}

static void sleep_a_while(struct kvbm_listener *listener)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 1))
        kv_log_warn("kvbm", "no descriptor is left for another session", "agent=%s endpoint=%s",
                    listener->net->agent->name, listener->endpoint);
    if (epoll_ctl(listener->net->epoll, EPOLL_CTL_DEL, listener->source.fd, NULL) < 0)
        return;
    listener->asleep = true;
    listener->wake_ns = kv_now_ns() + NAP_NS;
}

static void listener_ready(struct kvbm_source *source, uint32_t events)
{
    struct kvbm_listener *listener = (struct kvbm_listener *)source;

    (void)events;
    for (int i = 0; i < ACCEPTS; i++) {
        struct sockaddr_storage from = {0};
        socklen_t len = sizeof(from);
        int fd = accept4(source->fd, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            take(listener, fd, origin_of(&from));
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            sleep_a_while(listener);
            return;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

void kvbm_listener_wake(struct kvbm_listener *listener)
{
    if (kvbm_net_add(listener->net, &listener->source, EPOLLIN) == 0)
        listener->asleep = false;
    else
        listener->wake_ns = kv_now_ns() + NAP_NS;
}

/* ---- binding ---- */

static bool is_loopback(const struct sockaddr *at)
{
    if (at->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)at)->sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)at)->sin6_addr);
}

/* Without a secret, other machines may not come in unless the options ask for that. */
static bool may_listen(const struct kvbm_net *net, const struct kvbm_agent_opts *opts,
                       const struct sockaddr *at)
{
    bool verified = net->auth.tls && KV_OPT(opts, tls_ca, NULL);

    return is_loopback(at) || net->auth.token || verified || KV_OPT(opts, unprotected, false);
}

/* Write the address that was really bound. */
static int name_endpoint(struct kvbm_listener *listener)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at = {.v6 = {.sin6_port = 0}};
    socklen_t len = sizeof(at);
    char text[INET6_ADDRSTRLEN];

    if (getsockname(listener->source.fd, &at.any, &len) < 0)
        return -errno;
    if (at.any.sa_family == AF_INET)
        snprintf(listener->endpoint, sizeof(listener->endpoint), "tcp:%s:%u",
                 inet_ntop(AF_INET, &at.v4.sin_addr, text, sizeof(text)), ntohs(at.v4.sin_port));
    else
        snprintf(listener->endpoint, sizeof(listener->endpoint), "tcp:[%s]:%u",
                 inet_ntop(AF_INET6, &at.v6.sin6_addr, text, sizeof(text)), ntohs(at.v6.sin6_port));
    return 0;
}

static int listen_tcp(struct kvbm_listener *listener, const struct kvbm_agent_opts *opts,
                      const struct kvbm_endpoint *place, const char *text)
{
    struct kv_addresses found = {.n = 1, .items = {{.text = "::", .family = AF_INET6}}};
    struct sockaddr_storage at = {0};
    socklen_t len;
    const int on = 1;
    int err = place->tcp.wildcard ? 0 : kv_lookup_system(NULL, place->tcp.host, &found);

    if (err < 0)
        return fail(listener->net, text, err, "resolve");
    listener->source.fd = kvbm_socket(found.items[0].family);
    if (listener->source.fd < 0 && place->tcp.wildcard) { /* a machine without IPv6 */
        found.items[0] = (struct kv_address){.text = "0.0.0.0", .family = AF_INET};
        listener->source.fd = kvbm_socket(AF_INET);
    }
    if (listener->source.fd < 0)
        return fail(listener->net, text, listener->source.fd, "socket");
    len = kvbm_address(&found.items[0], place->tcp.port, &at);
    if (!may_listen(listener->net, opts, (struct sockaddr *)&at)) {
        kv_log_error("kvbm", "an agent listens beyond loopback with a token or tls_ca only",
                     "agent=%s endpoint=%s", listener->net->agent->name, text);
        return -EPERM;
    }
    (void)setsockopt(listener->source.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener->source.fd, (struct sockaddr *)&at, len) < 0)
        return fail(listener->net, text, -errno, "bind");
    return name_endpoint(listener);
}

/* Remove the socket file of a process that has ended. Returns false when somebody listens. */
static bool remove_stale(const struct sockaddr_un *path)
{
    int fd = kvbm_socket(AF_UNIX);
    struct stat st;
    bool stale;

    if (fd < 0)
        return false;
    stale = connect(fd, (const struct sockaddr *)path, sizeof(*path)) < 0 && errno == ECONNREFUSED;
    close(fd);
    return stale && lstat(path->sun_path, &st) == 0 && S_ISSOCK(st.st_mode) &&
           st.st_uid == geteuid() && unlink(path->sun_path) == 0;
}

static int listen_unix(struct kvbm_listener *listener, const struct kvbm_endpoint *place,
                       const char *text)
{
    const struct sockaddr *at = (const struct sockaddr *)&place->path;
    struct stat st;
    int fd = kvbm_socket(AF_UNIX);

    if (fd < 0)
        return fail(listener->net, text, fd, "socket");
    listener->source.fd = fd;
    (void)fchmod(fd, 0600); /* of the file that bind will make */
    if (bind(fd, at, sizeof(place->path)) < 0 &&
        (errno != EADDRINUSE || !remove_stale(&place->path) ||
         bind(fd, at, sizeof(place->path)) < 0))
        return fail(listener->net, text, errno ? -errno : -EADDRINUSE, "bind");
    if (lstat(place->path.sun_path, &st) == 0) {
        listener->device = st.st_dev;
        listener->inode = st.st_ino;
    }
    snprintf(listener->endpoint, sizeof(listener->endpoint), "%s", text);
    return 0;
}

static int listen_at(struct kvbm_net *net, const struct kvbm_agent_opts *opts, const char *text)
{
    struct kvbm_listener *listener = &net->listeners[net->n_listeners];
    struct kvbm_endpoint place;
    int err = kvbm_endpoint_parse(text, &place);

    if (err < 0)
        return err;
    *listener = (struct kvbm_listener){
        .source = {.fd = -1, .ready = listener_ready}, .net = net, .is_unix = place.is_unix};
    net->n_listeners++; /* kvbm_net_destroy closes it */
    err = place.is_unix ? listen_unix(listener, &place, text)
                        : listen_tcp(listener, opts, &place, text);
    if (err < 0)
        return err;
    if (listen(listener->source.fd, BACKLOG) < 0)
        return fail(net, text, -errno, "listen");
    err = kvbm_net_add(net, &listener->source, EPOLLIN);
    return err < 0 ? fail(net, text, err, "epoll") : 0;
}

int kvbm_listen(struct kvbm_net *net, const struct kvbm_agent_opts *opts)
{
    const char *const *at = KV_OPT(opts, listen, NULL);
    uint32_t n = KV_OPT(opts, n_listen, 0);
    int err = 0;

    if (n > KVBM_MAX_LISTENERS || (n && !at)) {
        kv_log_error("kvbm", "an agent listens at 8 endpoints at most", "agent=%s n_listen=%u",
                     net->agent->name, n);
        return -EINVAL;
    }
    for (uint32_t i = 0; err == 0 && i < n; i++)
        err = listen_at(net, opts, at[i]);
    return err;
}

void kvbm_listener_close(struct kvbm_listener *listener)
{
    const char *path = listener->endpoint + strlen("unix:");
    struct stat st;

    if (listener->source.fd >= 0) {
        /* A child of this process may have a copy, at which it would go on listening. */
        (void)shutdown(listener->source.fd, SHUT_RDWR);
        close(listener->source.fd);
    }
    listener->source.fd = -1;
    /* Another agent may have put its own socket there. */
    if (listener->is_unix && listener->inode && lstat(path, &st) == 0 &&
        st.st_ino == listener->inode && st.st_dev == listener->device)
        (void)unlink(path);
}

long kvbm_agent_endpoint(const struct kvbm_agent *agent, uint32_t i, char *to, size_t cap,
                         size_t *needed)
{
    size_t len;

    if (!agent)
        return -EINVAL;
    if (i >= agent->net->n_listeners)
        return -ENOENT;
    len = strlen(agent->net->listeners[i].endpoint) + 1;
    if (needed)
        *needed = len;
    if (!to || cap < len)
        return -ENOSPC;
    memcpy(to, agent->net->listeners[i].endpoint, len);
    return (long)len - 1;
}
