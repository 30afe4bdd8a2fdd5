// SPDX-License-Identifier: Apache-2.0
/* Agreement of a session's two sides on UCX, as the reader sees it. */
#include "base/log.h"
#include "lend.h"
#include "net.h"
#include "ucx.h"

#define REST_NS (30 * KV_NS_PER_S) /* after a connection over which nothing came */

/* Ask the peer to connect. Returns 0 or why it doesn't. */
static int ask(struct kvbm_session *session, uint64_t deadline_ns)
{
    const struct kvbm_ucx *ucx = session->net->agent->ucx;
    struct kvbm_reply reply = {.fd = -1};
    size_t len;
    const void *address = ucx->abi->node_address(ucx->node, &len);
    int err = kvbm_session_call(session, KVBM_ASK_UCX, address, len, -1, deadline_ns, &reply);

    if (err < 0)
        return err;
    err = reply.status;
    kvbm_reply_fini(&reply);
    return err;
}

/* Take the peer's answer, with the session locked. Returns whether the peer refuses for ever. */
static bool take_answer(struct kvbm_ucx_link *link, int err)
{
    link->asking = false;
    if (err == 0) {
        link->on = true;
        link->proven = false;
        link->turn++;
    } else if (err == -EOPNOTSUPP) {
        link->refused = true;
    } else {
        link->off_until_ns = kv_now_ns() + REST_NS;
    }
    return link->refused;
}

uint64_t kvbm_ucx_agree(struct kvbm_session *session, uint64_t deadline_ns)
{
    struct kvbm_ucx_link *link = &session->ucx;
    bool ask_now, refused = false;
    uint64_t turn;

    if (!session->net->agent->ucx)
        return 0;
    pthread_mutex_lock(&session->lock);
    ask_now = !link->on && !link->asking && !link->refused && kv_now_ns() >= link->off_until_ns;
    link->asking = link->asking || ask_now;
    pthread_mutex_unlock(&session->lock);
    if (ask_now) {
        int err = ask(session, deadline_ns);

        pthread_mutex_lock(&session->lock);
        refused = take_answer(link, err);
        pthread_mutex_unlock(&session->lock);
    }
    if (refused)
        kv_log_warn("kvbm", "a peer has no UCX: its blocks come through the session",
                    "agent=%s peer=%s", session->net->agent->name, session->peer.who.name);
    pthread_mutex_lock(&session->lock);
    turn = link->on ? link->turn : 0;
    pthread_mutex_unlock(&session->lock);
    return turn;
}

bool kvbm_ucx_is_proven(struct kvbm_session *session, uint64_t turn)
{
    bool proven;

    pthread_mutex_lock(&session->lock);
    proven = session->ucx.turn == turn && session->ucx.proven;
    pthread_mutex_unlock(&session->lock);
    return proven;
}

void kvbm_ucx_worked(struct kvbm_session *session, uint64_t turn)
{
    pthread_mutex_lock(&session->lock);
    session->ucx.proven = session->ucx.proven || session->ucx.turn == turn;
    pthread_mutex_unlock(&session->lock);
}

void kvbm_ucx_failed(struct kvbm_session *session, uint64_t turn)
{
    struct kvbm_ucx_link *link = &session->ucx;
    bool ours, rests;

    pthread_mutex_lock(&session->lock);
    ours = link->on && link->turn == turn;
    rests = ours && !link->proven && session->state == KVBM_OPEN;
    if (ours)
        link->on = false;
    if (rests)
        link->off_until_ns = kv_now_ns() + REST_NS;
    pthread_mutex_unlock(&session->lock);
    if (!ours)
        return;
    (void)kvbm_session_note(session, KVBM_ASK_UCX, NULL, 0);
    if (rests)
        kv_log_warn("kvbm", "nothing comes by UCX: blocks come through the session for a while",
                    "agent=%s peer=%s", session->net->agent->name, session->peer.who.name);
}
