// SPDX-License-Identifier: Apache-2.0
/*
 * Exchange of block sets over sessions. A session that begins gets every exported set, then a mark,
 * then each change in its order. The agent's lock orders changes and begins, so no session misses a
 * change or sees two in the wrong order.
 *
 * The peer's sets stay in the directory until its last session ends.
 */
#include "base/core/le.h"
#include "base/core/log.h"
#include "peer/session/net.h"

#define GONE_BYTES 16

static void put_facts(void *arg)
{
    kvbm_facts_put(arg);
}

/* Queue a message for a peer that reads; cut off one that doesn't. Consumes @out. */
static void tell(struct kvbm_session *session, struct kvbm_out *out)
{
    bool fits = false;

    pthread_mutex_lock(&session->lock);
    if (out && session->state == KVBM_OPEN) {
        fits = session->queued + out->queued <= session->net->max_queued;
        if (fits)
            kvbm_send(session, KV_STEAL(out));
    } else {
        fits = out != NULL; /* the session has ended: nobody misses the message */
    }
    pthread_mutex_unlock(&session->lock);
    kvbm_out_end(out);
    if (!fits)
        kvbm_session_abort(session, -ENOBUFS, "the peer doesn't read what its sets have become");
}

static void tell_set(struct kvbm_session *session, struct kvbm_facts *facts)
{
    const struct kvbm_frame frame = {.type = KVBM_SET};
    const struct iovec bytes = {facts->bytes, facts->len};
    struct kvbm_out *out = kvbm_out_from(&frame, &bytes, 1);

    if (out) {
        out->queued = sizeof(*out) + facts->len;
        out->done = put_facts;
        out->arg = kvbm_facts_get(facts);
    }
    tell(session, out);
}

void kvbm_exchange_tell(struct kvbm_agent *agent, struct kvbm_facts *facts)
{
    struct kvbm_net *net = agent->net;
    struct kvbm_session *session;

    pthread_mutex_lock(&net->lock);
    for (session = TAILQ_FIRST(&net->sessions); session; session = TAILQ_NEXT(session, list)) {
        if (session->told)
            tell_set(session, facts);
    }
    pthread_mutex_unlock(&net->lock);
}

void kvbm_exchange_gone(struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    const struct kvbm_frame frame = {.type = KVBM_SET_GONE};
    struct kvbm_net *net = agent->net;
    struct kvbm_session *session;
    uint8_t body[GONE_BYTES];

    kv_put_le64(body, facts->id);
    kv_put_le64(body + 8, facts->generation);
    pthread_mutex_lock(&net->lock);
    for (session = TAILQ_FIRST(&net->sessions); session; session = TAILQ_NEXT(session, list)) {
        if (session->told)
            tell(session, kvbm_out_copy(&frame, body, sizeof(body)));
    }
    pthread_mutex_unlock(&net->lock);
}

void kvbm_exchange_begin(struct kvbm_session *session)
{
    const struct kvbm_frame told = {.type = KVBM_SETS_TOLD};
    struct kvbm_agent *agent = session->net->agent;
    long n;

    pthread_mutex_lock(&agent->lock);
    n = kvbm_drop_earlier(agent, &session->peer.who);
    session->told = true;
    for (uint32_t i = 0; i < agent->n_exports; i++) {
        if (agent->exports[i].set)
            tell_set(session, agent->exports[i].set->facts);
    }
    tell(session, kvbm_out_copy(&told, NULL, 0));
    pthread_mutex_unlock(&agent->lock);
    if (n)
        kv_log_info("kvbm", "a peer has restarted: its earlier sets are forgotten",
                    "agent=%s peer=%s sets=%ld", agent->name, session->peer.who.name, n);
}

/* Tell whether another session with the same peer is open, with the agent locked. */
static bool has_other(const struct kvbm_session *session)
{
    const struct kvbm_session *other;
    bool found = false;

    pthread_mutex_lock(&session->net->lock);
    for (other = TAILQ_FIRST(&session->net->sessions); other; other = TAILQ_NEXT(other, list)) {
        found = found || (other->told && other->peer.who.worker == session->peer.who.worker);
    }
    pthread_mutex_unlock(&session->net->lock);
    return found;
}

void kvbm_exchange_end(struct kvbm_session *session)
{
    struct kvbm_agent *agent = session->net->agent;

    pthread_mutex_lock(&agent->lock);
    if (session->told) {
        session->told = false;
        if (!has_other(session))
            (void)kvbm_drop_incarnation(agent, &session->peer.who);
    }
    pthread_mutex_unlock(&agent->lock);
}

/* ---- the peer's ---- */

static int take_set(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    const struct kvbm_identity *who = &session->peer.who;
    struct kvbm_facts *facts;
    int err = kvbm_facts_parse(conn->body.data, conn->body.len, &facts);

    if (err == -ENOMEM)
        return err;
    if (err < 0)
        return -EPROTO;
    if (facts->worker != who->worker || facts->incarnation != who->incarnation ||
        strcmp(facts->agent, who->name) != 0) {
        kvbm_facts_put(facts);
        return -EPROTO; /* a set of somebody else */
    }
    err = kvbm_import_facts(session->net->agent, facts, true, NULL);
    /* Other refusals are in the log; the peer's other sets are of use all the same. */
    return err == -ENOMEM ? err : 0;
}

static int take_gone(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    const uint8_t *body = (const uint8_t *)conn->body.data;
    uint64_t id;

    if (conn->body.len != GONE_BYTES)
        return -EPROTO;
    id = kv_get_le64(body);
    if (id > UINT32_MAX)
        return -EPROTO;
    kvbm_import_gone(session->net->agent, session->peer.who.worker, (uint32_t)id,
                     kv_get_le64(body + 8));
    return 0;
}

int kvbm_exchange_frame(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;

    if (conn->frame.id)
        return -EPROTO;
    if (conn->frame.type == KVBM_SET)
        return take_set(conn);
    if (conn->frame.type == KVBM_SET_GONE)
        return take_gone(conn);
    pthread_mutex_lock(&session->lock);
    session->filled = true;
    pthread_cond_broadcast(&session->changed);
    pthread_mutex_unlock(&session->lock);
    return 0;
}
