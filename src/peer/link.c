// SPDX-License-Identifier: Apache-2.0
/* Agreement of a session's two sides on a carrier, as the reader sees it. */
#include "base/core/log.h"
#include "peer/lease/lend.h"
#include "peer/session/agent.h"
#include "peer/session/net.h"

#define REST_NS (30 * KV_NS_PER_S) /* after a connection over which nothing came */

static const struct {
    uint16_t type;
    const char *refused, *fails; /* events of the log */
} kinds[KVBM_N_CARRIERS] = {
    [KVBM_BY_UCX] = {KVBM_ASK_UCX, "a peer has no UCX: its blocks come through the session",
                     "nothing comes by UCX: blocks come through the session for a while"},
    [KVBM_BY_NIXL] = {KVBM_ASK_NIXL, "a peer has no NIXL: its blocks come through the session",
                      "nothing comes by NIXL: blocks come through the session for a while"},
};

/* Ask the peer to connect. Returns 0 or why it doesn't. */
static int ask(struct kvbm_session *session, enum kvbm_by by, uint64_t deadline_ns)
{
    const struct kvbm_carrier *carrier = kvbm_agent_carrier(session->net->agent, by);
    struct kvbm_reply reply = {.fd = -1};
    size_t len;
    void *address = carrier->abi->node_address(carrier->node, &len);
    int err =
        address ? kvbm_session_call(session, kinds[by].type, address, len, -1, deadline_ns, &reply)
                : -ENOMEM;

    free(address);
    if (err < 0)
        return err;
    err = reply.status;
    kvbm_reply_fini(&reply);
    return err;
}

/* Take the peer's answer, with the session locked. Returns whether the peer refuses for ever. */
static bool take_answer(struct kvbm_link *link, int err)
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

uint64_t kvbm_link_agree(struct kvbm_session *session, enum kvbm_by by, uint64_t deadline_ns)
{
    struct kvbm_link *link = &session->links[by];
    bool ask_now, refused = false;
    uint64_t turn;

    if (!kvbm_agent_carrier(session->net->agent, by))
        return 0;
    pthread_mutex_lock(&session->lock);
    ask_now = !link->on && !link->asking && !link->refused && kv_now_ns() >= link->off_until_ns;
    link->asking = link->asking || ask_now;
    pthread_mutex_unlock(&session->lock);
    if (ask_now) {
        int err = ask(session, by, deadline_ns);

        pthread_mutex_lock(&session->lock);
        refused = take_answer(link, err);
        pthread_mutex_unlock(&session->lock);
    }
    if (refused)
        kv_log_warn("kvbm", kinds[by].refused, "agent=%s peer=%s", session->net->agent->name,
                    session->peer.who.name);
    pthread_mutex_lock(&session->lock);
    turn = link->on ? link->turn : 0;
    pthread_mutex_unlock(&session->lock);
    return turn;
}

bool kvbm_link_is_proven(struct kvbm_session *session, enum kvbm_by by, uint64_t turn)
{
    bool proven;

    pthread_mutex_lock(&session->lock);
    proven = session->links[by].turn == turn && session->links[by].proven;
    pthread_mutex_unlock(&session->lock);
    return proven;
}

void kvbm_link_worked(struct kvbm_session *session, enum kvbm_by by, uint64_t turn)
{
    pthread_mutex_lock(&session->lock);
    session->links[by].proven = session->links[by].proven || session->links[by].turn == turn;
    pthread_mutex_unlock(&session->lock);
}

void kvbm_link_failed(struct kvbm_session *session, enum kvbm_by by, uint64_t turn)
{
    struct kvbm_link *link = &session->links[by];
    bool ours, rests;

    pthread_mutex_lock(&session->lock);
    ours = link->on && link->turn == turn;
    rests = ours && !link->proven && session->state == KVBM_OPEN;
    if (ours) {
        link->on = false;
        link->asking = true; /* nobody asks before the note, which would end the new connection */
    }
    if (rests)
        link->off_until_ns = kv_now_ns() + REST_NS;
    pthread_mutex_unlock(&session->lock);
    if (!ours)
        return;
    (void)kvbm_session_note(session, kinds[by].type, NULL, 0);
    pthread_mutex_lock(&session->lock);
    link->asking = false;
    pthread_mutex_unlock(&session->lock);
    if (rests)
        kv_log_warn("kvbm", kinds[by].fails, "agent=%s peer=%s", session->net->agent->name,
                    session->peer.who.name);
}
