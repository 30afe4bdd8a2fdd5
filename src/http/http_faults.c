// SPDX-License-Identifier: Apache-2.0
/*
 * Answers to requests that the HTTP library refuses by itself: once their header is complete, and
 * those that come without TLS to a port that speaks it.
 *
 * Release 0.9.75 sends the header of such an answer twice (HTTP/1.1 without Host, a Content-Length that
 * is no number, cookies beyond its memory). Release 1.0 answers with a page of HTML. Both ask no
 * callback, but write a line of their log first. So the threads keep a list of the connections whose
 * header is coming in. One whose header is complete and was not handed over is the one that the line is
 * about. It gets its answer here, and nothing more can be sent to it.
 */
#include <errno.h>
#include <gnutls/gnutls.h>
#include <stdio.h>
#include <sys/socket.h>

#include "http/http_impl.h"

/* -- requests that are refused after their header ---------------------------------------------- */

LIST_HEAD(heads, kh_conn);

/* Connections of this thread that have sent a request line. */
static _Thread_local struct heads heads;

void kh_http_head_ended(struct kh_conn *conn)
{
    if (conn->head)
        LIST_REMOVE(conn, heads);
    conn->head = NULL;
}

void *kh_http_on_request_line(void *cls, const char *uri, struct MHD_Connection *connection)
{
    struct kh_conn *conn = kh_http_conn_of(connection);

    (void)cls;
    if (!conn)
        return NULL;
    conn->cut = uri && strstr(uri, "%00");
    kh_http_head_ended(conn);
    conn->head = connection;
    LIST_INSERT_HEAD(&heads, conn, heads);
    return NULL; /* the request's state, until kh_http_on_request sets it */
}

/* Return the connection of this thread whose complete header was refused, or NULL. */
static struct kh_conn *refused(void)
{
    struct kh_conn *conn;

    LIST_FOREACH(conn, &heads, heads)
    if (MHD_get_connection_info(conn->head, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE))
        return conn;
    return NULL;
}

static bool has(struct MHD_Connection *connection, const char *name, const char **ret)
{
    *ret = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
    return *ret != NULL;
}

/* True for decimal digits of 2^64 - 1, which the library takes for "unknown", or of more. */
static bool is_too_large(const char *digits)
{
    static const char most[] = "18446744073709551615";
    size_t len;

    digits += strspn(digits, "0");
    len = strspn(digits, "0123456789");
    return !digits[len] &&
           (len > sizeof(most) - 1 || (len == sizeof(most) - 1 && memcmp(digits, most, len) >= 0));
}

/* Find out why the library refuses the request. */
static void judge(struct MHD_Connection *connection, struct kh_reply *reply)
{
    const char *value;

    if (!has(connection, "Host", &value))
        kh_reply_error(reply, 400, "bad request: HTTP/1.1 without a Host header");
    else if (has(connection, "Cookie", &value) && strlen(value) > CONNECTION_MEMORY / 8)
        kh_reply_error(reply, 431, "the header is too large");
    else if (has(connection, "Transfer-Encoding", &value))
        kh_reply_error(reply, 400, "bad request: of Transfer-Encoding, chunked alone is taken");
    else if (has(connection, "Content-Length", &value) && is_too_large(value))
        kh_reply_error(reply, 413, "Content-Length is too large");
    else
        kh_reply_error(reply, 400, "bad request: Content-Length is no number, or there are two");
}

static void send_bytes(struct kh_conn *conn, const char *bytes, size_t len)
{
    const union MHD_ConnectionInfo *tls =
        MHD_get_connection_info(conn->head, MHD_CONNECTION_INFO_GNUTLS_SESSION);

    /* A few hundred bytes fit the socket, unless its client takes nothing. */
    if (tls && tls->tls_session)
        (void)gnutls_record_send(tls->tls_session, bytes, len);
    else
        (void)!send(conn->fd, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void kh_http_answer_refused(struct kh_http *http)
{
    struct kh_reply reply = {.body = KV_BUF_INIT};
    struct kv_buf text = KV_BUF_INIT;
    struct kh_conn *conn;

    conn = refused();
    if (!conn)
        return;
    judge(conn->head, &reply);
    kv_buf_printf(&text,
                  "HTTP/1.1 %u %s\r\nConnection: close\r\nContent-Type: application/json\r\n"
                  "Content-Length: %zu\r\n\r\n",
                  reply.status, MHD_get_reason_phrase_for(reply.status), reply.body.len);
    kv_buf_append(&text, reply.body.data, reply.body.len);
    if (!text.error)
        send_bytes(conn, text.data, text.len);
    shutdown(conn->fd, SHUT_WR); /* the library's own answer goes nowhere, and it hangs up */
    conn->linger = true;
    kh_http_head_ended(conn);
    atomic_fetch_add_explicit(&http->bad_framing, 1, memory_order_relaxed);
    kv_buf_fini(&text);
    kv_buf_fini(&reply.body);
}

/* -- plain HTTP to the TLS port ---------------------------------------------------------------- */

static const char plain_body[] = "{\"error\":\"this port speaks HTTPS only: use https://\"}";

static void answer_plain(struct kh_conn *conn)
{
    char text[300];
    int len = snprintf(text, sizeof(text),
                       "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: "
                       "application/json\r\nContent-Length: %zu\r\n\r\n%s",
                       sizeof(plain_body) - 1, plain_body);

    (void)!send(conn->fd, text, (size_t)len, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(conn->fd, SHUT_WR);
    conn->linger = true;
}

/* Read for the TLS library. A method begins with a letter, and a record of TLS with none. */
static ssize_t pull(gnutls_transport_ptr_t ptr, void *data, size_t len)
{
    struct kh_conn *conn = ptr;
    ssize_t n = recv(conn->fd, data, len, 0);

    if (conn->heard || n <= 0)
        return n;
    conn->heard = true;
    if (*(const char *)data < 'A' || *(const char *)data > 'Z')
        return n;
    answer_plain(conn);
    errno = ECONNRESET;
    return -1;
}

static int pull_timeout(gnutls_transport_ptr_t ptr, unsigned ms)
{
    return gnutls_system_recv_timeout((gnutls_transport_ptr_t)(intptr_t)((struct kh_conn *)ptr)->fd,
                                      ms);
}

void kh_http_watch_tls(struct MHD_Connection *connection, struct kh_conn *conn)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    gnutls_session_t session = info ? info->tls_session : NULL;

    if (!session)
        return;
    gnutls_transport_set_ptr2(session, conn, (gnutls_transport_ptr_t)(intptr_t)conn->fd);
    gnutls_transport_set_pull_function(session, pull);
    gnutls_transport_set_pull_timeout_function(session, pull_timeout);
}
