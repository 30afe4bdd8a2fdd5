// SPDX-License-Identifier: Apache-2.0
/* Before the greetings: TLS, and the ways in which one side alone wants it. */
#include <sys/socket.h>

#include "base/core/log.h"
#include "peer/session/net.h"

#define TLS_HANDSHAKE 0x16 /* first byte that an opener with TLS sends */

int kvbm_conn_tls(struct kvbm_conn *conn, const char *host)
{
    const struct kvbm_auth *auth = &conn->session->net->auth;
    struct kvbm_tls_stream *stream;
    int err =
        auth->crypto->stream_create(auth->tls, conn->source.fd, conn->is_opener, host, &stream);

    if (err < 0)
        return err;
    conn->tls = stream;
    conn->has_tls = true;
    return 0;
}

/*
 * Turn an opener away that can't be spoken to. The connection stays until the opener closes it, or
 * the handshake's time is over: a close with bytes unread would destroy what TLS has told it.
 */
static void turn_away(struct kvbm_conn *conn, const char *why)
{
    static struct kv_log_rate rate;
    struct kvbm_session *session = conn->session;
    char quoted[2 * KVBM_MAX_REASON];

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a session is refused", "agent=%s endpoint=%s why=%s",
                    session->net->agent->name, session->endpoint,
                    kv_log_quote(quoted, sizeof(quoted), why));
    if (conn->tls)
        session->net->auth.crypto->stream_destroy(KV_STEAL(conn->tls));
    (void)shutdown(conn->source.fd, SHUT_WR);
    conn->secured = true; /* the opener's bytes are thrown away */
    session->step = KVBM_REFUSED;
}

/* See by the first byte whether the opener speaks TLS. Returns false when nothing has come. */
static bool sound(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_net *net = session->net;
    uint8_t first;
    ssize_t n = recv(conn->source.fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    conn->greeted = true;
    if (n <= 0) {
        kvbm_session_end(session, -EPIPE, "the opener closed at once");
    } else if (!conn->tls && first == TLS_HANDSHAKE) {
        turn_away(conn, "the opener speaks TLS, this agent doesn't");
    } else if (conn->tls && first != TLS_HANDSHAKE) {
        net->auth.crypto->stream_destroy(KV_STEAL(conn->tls));
        conn->has_tls = false;
        conn->secured = true;
        (void)kvbm_refuse(session, -EPROTONOSUPPORT, "the listener wants TLS");
    }
    return !conn->secured && !kvbm_has_ended(session);
}

void kvbm_secure(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    char why[KVBM_MAX_REASON + 1] = "";
    int err = 0;

    if (!conn->is_opener && !conn->is_unix && !conn->greeted && !sound(conn))
        return;
    if (conn->tls)
        err = session->net->auth.crypto->handshake(conn->tls, why, sizeof(why));
    if (err == -EAGAIN)
        return;
    conn->secured = err == 0;
    conn->readable = true; /* TLS may have read more than its handshake, without an event */
    if (err == 0 && conn->is_opener)
        err = kvbm_greet(session);
    if (err < 0 && !conn->is_opener)
        turn_away(conn, why[0] ? why : kvbm_words(err));
    else if (err < 0)
        kvbm_session_end(session, err, why[0] ? why : kvbm_words(err));
}
