// SPDX-License-Identifier: Apache-2.0
/*
 * The beginning of a session (wire.h has the picture): who is there, do both know the token, do their
 * blocks fit. Each MAC covers both greetings with their nonces, names and incarnations, the role of
 * its sender, and the TLS connection, if any. So none can be replayed, reflected or relayed.
 *
 * A side that refuses says why in words, to its own log and to the peer's. Before the peer has shown
 * that it knows the token, the listener tells nothing of itself but its version.
 */
#include <stdarg.h>
#include <stdio.h>
#include <sys/random.h>

#include "base/core/log.h"
#include "peer/session/net.h"

/* ---- refusing ---- */

static void say(struct kvbm_session *session, const struct kvbm_frame *frame, const void *body,
                size_t len)
{
    struct kvbm_out *out = kvbm_out_copy(frame, body, len);

    pthread_mutex_lock(&session->lock);
    if (out)
        kvbm_send(session, out);
    else if (session->err == 0)
        session->err = -ENOMEM;
    pthread_mutex_unlock(&session->lock);
}

int kvbm_refuse(struct kvbm_session *session, int err, const char *fmt, ...)
{
    static struct kv_log_rate rate;
    const struct kvbm_frame frame = {.type = KVBM_REFUSE, .status = err};
    char text[KVBM_MAX_REASON + 1], quoted[2 * sizeof(text)];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a session is refused", "agent=%s peer=%s endpoint=%s why=%s",
                    session->net->agent->name,
                    session->peer.who.name[0] ? session->peer.who.name : "-", session->endpoint,
                    kv_log_quote(quoted, sizeof(quoted), text));
    say(session, &frame, text, strlen(text));
    session->step = KVBM_REFUSED;
    pthread_mutex_lock(&session->lock);
    snprintf(session->why, sizeof(session->why), "%s", text);
    pthread_mutex_unlock(&session->lock);
    /* A listener lets the opener read that and close: its own close could overtake the words. */
    return session->conns[0]->is_opener ? err : 0;
}

static int refused(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    int err = conn->frame.status < 0 ? conn->frame.status : -EPROTO;

    pthread_mutex_lock(&session->lock);
    snprintf(session->why, sizeof(session->why), "the peer refuses: %.*s",
             (int)KV_MIN(conn->body.len, (size_t)KVBM_MAX_REASON), conn->body.data);
    pthread_mutex_unlock(&session->lock);
    return err;
}

/* ---- proofs ---- */

static int draw(void *to, size_t len)
{
    return getrandom(to, len, 0) == (ssize_t)len ? 0 : -EAGAIN;
}

/* Compute the MAC of one side's proof; @hello (may be NULL) is the listener's. */
static int prove(struct kvbm_conn *conn, const char *role, const void *hello, size_t hello_len,
                 uint8_t ret[KVBM_MAC_BYTES])
{
    const struct kvbm_session *session = conn->session;
    const struct kvbm_auth *auth = &session->net->auth;
    uint8_t binding[32] = {0};
    const void *parts[] = {role, binding, session->transcript.data, hello};
    const size_t lens[] = {strlen(role) + 1, sizeof(binding), session->transcript.len, hello_len};
    int err = 0;

    memset(ret, 0, KVBM_MAC_BYTES);
    if (!auth->token)
        return 0;
    if (conn->tls)
        err = auth->crypto->binding(conn->tls, binding);
    return err < 0
               ? err
               : auth->crypto->mac(auth->token, auth->token_len, parts, lens, KV_COUNT(parts), ret);
}

static bool is_proof(struct kvbm_conn *conn, const char *role, const void *hello, size_t hello_len,
                     const void *mac)
{
    const struct kvbm_auth *auth = &conn->session->net->auth;
    uint8_t expected[KVBM_MAC_BYTES];

    if (!auth->token)
        return true;
    return prove(conn, role, hello, hello_len, expected) == 0 &&
           auth->crypto->equal(expected, mac, sizeof(expected));
}

#define OPENER "kvasir session opener"
#define LISTENER "kvasir session listener"

/* ---- the greeting ---- */

static void describe_self(const struct kvbm_session *session, struct kvbm_hello *ret)
{
    const struct kvbm_net *net = session->net;
    const struct kvbm_agent *agent = net->agent;

    *ret = (struct kvbm_hello){.oldest = KVBM_WIRE_VERSION,
                               .newest = KVBM_WIRE_VERSION,
                               .has_token = net->auth.token != NULL,
                               .key_len = agent->key_len,
                               .max_requests = net->max_requests,
                               .layers = net->layers,
                               .outer = net->outer,
                               .page_size = net->page_size};
    memcpy(ret->nonce, session->nonce, sizeof(ret->nonce));
    memcpy(ret->join, session->join, sizeof(ret->join));
    memcpy(ret->who.name, agent->name, sizeof(ret->who.name));
    ret->who.worker = agent->worker;
    ret->who.incarnation = agent->incarnation;
    memcpy(ret->fingerprint, agent->fingerprint, sizeof(ret->fingerprint));
}

/* ---- data connections ---- */

static bool joins(const struct kvbm_session *session)
{
    static const uint8_t none[KVBM_JOIN_BYTES];

    return memcmp(session->join, none, sizeof(none)) != 0;
}

/* Find the session that a data connection belongs to: of the same peer, with room for it. */
static struct kvbm_session *find_joined(const struct kvbm_session *session)
{
    const struct kvbm_identity *who = &session->peer.who;
    struct kvbm_session *other;

    for (other = TAILQ_FIRST(&session->net->sessions); other; other = TAILQ_NEXT(other, list)) {
        if (memcmp(other->join, session->join, sizeof(other->join)) == 0 &&
            other->peer.who.worker == who->worker &&
            other->peer.who.incarnation == who->incarnation &&
            other->n_conns < KV_COUNT(other->conns) &&
            other->conns[0]->is_opener == session->conns[0]->is_opener)
            return other;
    }
    return NULL;
}

/* Move the connection of @session to the session that it joins. */
static int join(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session, *other = find_joined(session);

    if (!other)
        return kvbm_refuse(session, -ENOENT, "no session for this data connection");
    kvbm_session_move(session, other);
    return 0;
}

/* ---- the steps ---- */

int kvbm_greet(struct kvbm_session *session)
{
    const struct kvbm_frame frame = {.type = KVBM_HELLO};
    struct kvbm_hello hello;
    int err = draw(session->nonce, sizeof(session->nonce));

    if (err < 0)
        return err;
    describe_self(session, &hello);
    kvbm_hello_write(&hello, &session->transcript);
    if (session->transcript.error)
        return session->transcript.error;
    say(session, &frame, session->transcript.data, session->transcript.len);
    return 0;
}

/* Tell a version that this side doesn't speak; only the first numbers of HELLO are understood. */
static bool is_other_version(const struct kv_buf *hello)
{
    const uint8_t *at = (const uint8_t *)hello->data;

    return hello->len >= 4 && (at[0] | at[1] << 8) > KVBM_WIRE_VERSION;
}

static int take_hello(struct kvbm_conn *conn)
{
    const struct kvbm_frame frame = {.type = KVBM_CHALLENGE};
    struct kvbm_session *session = conn->session;
    struct kvbm_challenge challenge = {.version = KVBM_WIRE_VERSION,
                                       .has_token = session->net->auth.token != NULL};
    uint8_t body[KVBM_CHALLENGE_BYTES];
    int err;

    if (is_other_version(&conn->body))
        return kvbm_refuse(session, -EPROTONOSUPPORT, "version %u of the protocol at most",
                           KVBM_WIRE_VERSION);
    err = kvbm_hello_parse(conn->body.data, conn->body.len, &session->peer);
    if (err == 0)
        err = draw(challenge.nonce, sizeof(challenge.nonce));
    if (err < 0)
        return err;
    if (challenge.has_token != session->peer.has_token)
        return kvbm_refuse(session, -EACCES, "%s has a token, %s has none",
                           challenge.has_token ? "the listener" : "the opener",
                           challenge.has_token ? "the opener" : "the listener");
    memcpy(session->nonce, challenge.nonce, sizeof(session->nonce));
    memcpy(session->join, session->peer.join, sizeof(session->join));
    session->is_data = joins(session);
    kvbm_challenge_write(&challenge, body);
    kv_buf_append(&session->transcript, conn->body.data, conn->body.len);
    kv_buf_append(&session->transcript, body, sizeof(body));
    session->step = KVBM_WAIT_PROOF;
    say(session, &frame, body, sizeof(body));
    return session->transcript.error;
}

static int take_challenge(struct kvbm_conn *conn)
{
    const struct kvbm_frame frame = {.type = KVBM_PROOF};
    struct kvbm_session *session = conn->session;
    struct kvbm_challenge challenge;
    uint8_t mac[KVBM_MAC_BYTES];
    int err = kvbm_challenge_parse(conn->body.data, conn->body.len, &challenge);

    if (err < 0)
        return err;
    if (challenge.version != KVBM_WIRE_VERSION)
        return kvbm_refuse(session, -EPROTONOSUPPORT, "version %u of the protocol at most",
                           KVBM_WIRE_VERSION);
    if (challenge.has_token != (session->net->auth.token != NULL))
        return kvbm_refuse(session, -EACCES, "%s has a token, %s has none",
                           challenge.has_token ? "the listener" : "the opener",
                           challenge.has_token ? "the opener" : "the listener");
    kv_buf_append(&session->transcript, conn->body.data, conn->body.len);
    err = session->transcript.error;
    if (err == 0)
        err = prove(conn, OPENER, NULL, 0, mac);
    if (err < 0)
        return err;
    session->step = KVBM_WAIT_WELCOME;
    say(session, &frame, mac, sizeof(mac));
    return 0;
}

/* Say who this side is, with its proof. */
static int welcome(struct kvbm_conn *conn)
{
    const struct kvbm_frame frame = {.type = KVBM_WELCOME};
    struct kvbm_session *session = conn->session;
    struct kv_buf body = KV_BUF_INIT;
    uint8_t mac[KVBM_MAC_BYTES];
    struct kvbm_hello hello;
    int err = session->is_data ? 0 : draw(session->join, sizeof(session->join));

    describe_self(session, &hello);
    kvbm_hello_write(&hello, &body);
    if (err == 0)
        err = body.error ? body.error : prove(conn, LISTENER, body.data, body.len, mac);
    if (err == 0) {
        kv_buf_append(&body, mac, sizeof(mac));
        err = body.error;
    }
    if (err == 0) {
        session->step = KVBM_WAIT_READY;
        say(session, &frame, body.data, body.len);
    }
    kv_buf_fini(&body);
    return err;
}

static int take_proof(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    int err;

    if (conn->body.len != KVBM_MAC_BYTES)
        return -EPROTO;
    if (!is_proof(conn, OPENER, NULL, 0, conn->body.data))
        return kvbm_refuse(session, -EACCES, "the tokens differ");
    err = kvbm_fits(session);
    if (session->step != KVBM_REFUSED && session->is_data && !find_joined(session))
        err = kvbm_refuse(session, -ENOENT, "no session for this data connection");
    if (session->step != KVBM_REFUSED && !session->is_data)
        err = kvbm_admit(session);
    return session->step == KVBM_REFUSED ? err : welcome(conn);
}

static int take_welcome(struct kvbm_conn *conn)
{
    const struct kvbm_frame frame = {.type = KVBM_READY};
    struct kvbm_session *session = conn->session;
    size_t len = conn->body.len - KV_MIN(conn->body.len, (size_t)KVBM_MAC_BYTES);
    int err = kvbm_hello_parse(conn->body.data, len, &session->peer);

    if (err < 0)
        return err;
    if (!is_proof(conn, LISTENER, conn->body.data, len, conn->body.data + len))
        return kvbm_refuse(session, -EACCES, "the tokens differ");
    err = kvbm_fits(session);
    if (session->step != KVBM_REFUSED && !session->is_data)
        err = kvbm_admit(session);
    if (session->step == KVBM_REFUSED)
        return err;
    memcpy(session->join, session->peer.join, sizeof(session->join));
    say(session, &frame, NULL, 0);
    session->step = KVBM_OPENED;
    if (session->is_data)
        return join(conn);
    kvbm_session_begin(session);
    return 0;
}

static int take_ready(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    int err = 0;

    if (conn->body.len)
        return -EPROTO;
    if (!session->is_data)
        err = kvbm_admit(session); /* another one may have opened meanwhile */
    if (session->step == KVBM_REFUSED)
        return err;
    session->step = KVBM_OPENED;
    if (session->is_data)
        return join(conn);
    kvbm_session_begin(session);
    return 0;
}

int kvbm_greeted(struct kvbm_conn *conn)
{
    static const struct {
        enum kvbm_step step;
        uint16_t type;
        int (*take)(struct kvbm_conn *conn);
    } steps[] = {{KVBM_WAIT_HELLO, KVBM_HELLO, take_hello},
                 {KVBM_WAIT_CHALLENGE, KVBM_CHALLENGE, take_challenge},
                 {KVBM_WAIT_PROOF, KVBM_PROOF, take_proof},
                 {KVBM_WAIT_WELCOME, KVBM_WELCOME, take_welcome},
                 {KVBM_WAIT_READY, KVBM_READY, take_ready}};

    if (conn->frame.type == KVBM_REFUSE)
        return refused(conn);
    for (size_t i = 0; i < KV_COUNT(steps); i++) {
        if (conn->session->step == steps[i].step && conn->frame.type == steps[i].type)
            return steps[i].take(conn);
    }
    return -EPROTO;
}
