// SPDX-License-Identifier: Apache-2.0
#include "redis/conn.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/net/resolve.h"

#define IN_SIZE ((size_t)64 << 10)

void rds_conn_close(struct rds_conn *conn)
{
    SSL_free(conn->ssl); /* without a TLS close alert: sending it could block */
    if (conn->fd >= 0)
        close(conn->fd);
    resp_fini(&conn->parser);
    free(conn->in);
    *conn = (struct rds_conn)RDS_CONN_INIT;
}

int rds_conn_wait(struct rds_conn *conn, short events, uint64_t deadline_ns)
{
    struct pollfd fd = {conn->fd, (short)(events | conn->extra), 0};
    int n;

    do {
        n = poll(&fd, 1, (int)KV_MIN(kv_ms_until(deadline_ns, kv_now_ns()), 1000));
    } while (n <= 0 && kv_now_ns() < deadline_ns);
    return n > 0 ? 0 : -ETIMEDOUT;
}

/* -- opening ----------------------------------------------------------------------------------- */

static int connect_to(struct rds_conn *conn, const struct sockaddr *addr, socklen_t len,
                      uint64_t deadline_ns)
{
    int one = 1, err = 0;
    socklen_t err_len = sizeof(err);

    conn->fd = socket(addr->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (conn->fd < 0)
        return -errno;
    if (addr->sa_family != AF_UNIX) {
        setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        setsockopt(conn->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    }
    if (connect(conn->fd, addr, len) == 0)
        return 0;
    if (errno != EINPROGRESS)
        return -errno;
    if (rds_conn_wait(conn, POLLOUT, deadline_ns) < 0)
        return -ETIMEDOUT;
    if (getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &err, &err_len) < 0)
        return -errno;
    return -err;
}

static int open_unix(struct rds_conn *conn, const char *path, uint64_t deadline_ns)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    return connect_to(conn, (const struct sockaddr *)&addr, sizeof(addr), deadline_ns);
}

/* Connect to the first address of @found that answers. */
static int connect_any(struct rds_conn *conn, const struct kv_addresses *found, const char *port,
                       uint64_t deadline_ns)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    int err = -EHOSTUNREACH;

    for (unsigned i = 0; i < found->n && err != 0; i++) {
        struct addrinfo *address;

        if (getaddrinfo(found->items[i].text, port, &hints, &address) != 0)
            continue;
        err = connect_to(conn, address->ai_addr, address->ai_addrlen, deadline_ns);
        freeaddrinfo(address);
        if (err != 0)
            rds_conn_close(conn);
    }
    return err;
}

/* Resolve and connect. A thread resolves names, and may outlast the deadline (base/net/resolve.h). */
static int open_tcp(struct rds_conn *conn, const struct rds_address *address, uint64_t deadline_ns,
                    struct kv_error *error)
{
    struct kv_resolver *resolver = kv_resolver_shared();
    struct kv_addresses found;
    char port[8];
    int err;

    if (!resolver)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    snprintf(port, sizeof(port), "%u", (unsigned)address->port);
    err = kv_resolver_wait(resolver, address->host, 5000, deadline_ns, &found);
    if (err < 0)
        return kv_fail(error, err == -ENOMEM ? err : -EHOSTUNREACH, 0, "%s",
                       kv_resolver_strerror(err));
    err = connect_any(conn, &found, port, deadline_ns);
    return err == 0 ? 0 : kv_fail(error, err, 0, "%s", strerror(-err));
}

static int shake_hands(struct rds_conn *conn, const char *host, struct rds_tls *tls,
                       uint64_t deadline_ns, struct kv_error *error)
{
    char why[160];

    conn->ssl = rds_tls_session(tls, conn->fd, host);
    if (!conn->ssl)
        return kv_fail(error, -ENOMEM, 0, "no TLS session can be made");
    for (;;) {
        int n, wants;

        ERR_clear_error();
        n = SSL_do_handshake(conn->ssl);
        if (n == 1)
            return 0;
        wants = SSL_get_error(conn->ssl, n);
        if (wants != SSL_ERROR_WANT_READ && wants != SSL_ERROR_WANT_WRITE) {
            rds_tls_explain(conn->ssl, why, sizeof(why));
            return kv_fail(error, -EACCES, 0, "TLS: %s", why);
        }
        if (rds_conn_wait(conn, wants == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline_ns) < 0)
            return kv_fail(error, -ETIMEDOUT, 0, "TLS: timed out");
    }
}

int rds_conn_open(struct rds_conn *conn, const struct rds_address *address, const char *path,
                  struct rds_tls *tls, uint64_t deadline_ns, struct kv_error *error)
{
    int err =
        path[0] ? open_unix(conn, path, deadline_ns) : open_tcp(conn, address, deadline_ns, error);

    if (err < 0 && path[0])
        kv_fail(error, err, 0, "%s", strerror(-err));
    resp_init(&conn->parser);
    if (err == 0) {
        conn->in = malloc(IN_SIZE);
        if (!conn->in)
            err = kv_fail(error, -ENOMEM, 0, "out of memory");
    }
    if (err == 0 && tls)
        err = shake_hands(conn, address->host, tls, deadline_ns, error);
    if (err < 0)
        rds_conn_close(conn);
    return err;
}

/* -- bytes ------------------------------------------------------------------------------------- */

/* Translate the result of an SSL call: 0 for "not now", else a negative errno. */
static ssize_t tls_result(struct rds_conn *conn, int n)
{
    int wants = SSL_get_error(conn->ssl, n);

    if (wants == SSL_ERROR_WANT_READ || wants == SSL_ERROR_WANT_WRITE) {
        conn->extra = wants == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
        return 0;
    }
    ERR_clear_error();
    return -ECONNRESET;
}

ssize_t rds_conn_send(struct rds_conn *conn, const struct iovec *iov, int n)
{
    struct msghdr msg = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n};
    ssize_t sent;

    if (conn->ssl) {
        ERR_clear_error();
        sent = SSL_write(conn->ssl, iov[0].iov_base, (int)KV_MIN(iov[0].iov_len, 1U << 30));
        if (sent <= 0)
            sent = tls_result(conn, (int)sent);
    } else {
        sent = sendmsg(conn->fd, &msg, MSG_NOSIGNAL);
        if (sent < 0)
            sent = errno == EAGAIN || errno == EINTR ? 0 : -errno;
    }
    if (sent > 0)
        conn->sent += (uint64_t)sent;
    return sent;
}

/* Receive into the payload that is arriving and, behind it, into the buffer. */
static ssize_t receive(struct rds_conn *conn, void *direct, size_t direct_len)
{
    struct iovec iov[2] = {{direct, direct_len}, {conn->in, IN_SIZE}};
    struct msghdr msg = {.msg_iov = direct_len ? iov : iov + 1, .msg_iovlen = direct_len ? 2 : 1};
    ssize_t n;

    if (conn->ssl) {
        ERR_clear_error();
        n = direct_len ? SSL_read(conn->ssl, direct, (int)KV_MIN(direct_len, 1U << 30))
                       : SSL_read(conn->ssl, conn->in, (int)IN_SIZE);
        if (n <= 0)
            n = tls_result(conn, (int)n);
        return n;
    }
    n = recvmsg(conn->fd, &msg, 0);
    if (n == 0)
        return -ECONNRESET;
    return n > 0 ? n : errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

int rds_conn_recv(struct rds_conn *conn, struct resp_value *ret)
{
    for (;;) {
        size_t used, direct_len;
        void *direct = NULL;
        ssize_t n;
        int rc;

        if (conn->in_pos < conn->in_len) {
            rc = resp_feed(&conn->parser, conn->in + conn->in_pos, conn->in_len - conn->in_pos,
                           &used, ret);
            conn->in_pos += used;
            if (rc != 0)
                return rc;
        }
        direct_len = resp_direct(&conn->parser, &direct);
        n = receive(conn, direct, direct_len);
        if (n <= 0)
            return (int)n;
        conn->received += (uint64_t)n;
        used = KV_MIN((size_t)n, direct_len);
        conn->in_pos = 0;
        conn->in_len = (size_t)n - used;
        rc = used > 0 ? resp_filled(&conn->parser, used, ret) : 0;
        if (rc != 0)
            return rc;
    }
}

int rds_conn_talk(struct rds_conn *conn, const char *data, size_t len, struct resp_value *ret,
                  size_t n, uint64_t deadline_ns)
{
    size_t sent = 0, got = 0;
    int rc = 0;

    while (rc == 0 && got < n) {
        struct iovec iov = {(void *)(data + sent), len - sent};
        ssize_t more;

        conn->extra = 0;
        more = sent < len ? rds_conn_send(conn, &iov, 1) : 0;
        if (more < 0)
            rc = (int)more;
        else
            sent += (size_t)more;
        if (rc == 0) {
            rc = rds_conn_recv(conn, &ret[got]);
            got += rc == 1;
            if (rc == 1)
                rc = 0;
            else if (rc == 0)
                rc = rds_conn_wait(conn, (short)(POLLIN | (sent < len ? POLLOUT : 0)), deadline_ns);
        }
    }
    for (size_t i = 0; rc < 0 && i < got; i++)
        resp_value_fini(&ret[i]);
    return rc;
}
