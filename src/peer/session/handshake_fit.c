// SPDX-License-Identifier: Apache-2.0
/* Whether two agents fit: models, keys and blocks; names and workers among the sessions. */
#include "peer/session/net.h"

static int check_dimension(struct kvbm_session *session, const char *what, uint32_t theirs,
                           uint32_t ours)
{
    if (theirs == ours || !theirs || !ours)
        return 0;
    return kvbm_refuse(session, -EMEDIUMTYPE, "blocks of %s differ: %u by %.63s, %u by %s", what,
                       theirs, session->peer.who.name, ours, session->net->agent->name);
}

int kvbm_fits(struct kvbm_session *session)
{
    const struct kvbm_net *net = session->net;
    const struct kvbm_agent *agent = net->agent;
    const struct kvbm_hello *peer = &session->peer;
    int err;

    if (peer->who.worker == agent->worker || strcmp(peer->who.name, agent->name) == 0)
        return kvbm_refuse(session, -ELOOP, "both sides have the name or worker of %s",
                           agent->name);
    if (strcmp(peer->fingerprint, agent->fingerprint) != 0)
        return kvbm_refuse(session, -EMEDIUMTYPE,
                           "another model: fingerprint \"%.50s\" by %s, \"%.50s\" by %s",
                           peer->fingerprint, peer->who.name, agent->fingerprint, agent->name);
    if (peer->key_len != agent->key_len)
        return kvbm_refuse(session, -EMEDIUMTYPE, "keys of %u bytes by %s, of %u by %s",
                           peer->key_len, peer->who.name, agent->key_len, agent->name);
    err = check_dimension(session, "so many layers", peer->layers, net->layers);
    if (session->step != KVBM_REFUSED)
        err = check_dimension(session, "so many parts (K, V)", peer->outer, net->outer);
    if (session->step != KVBM_REFUSED)
        err = check_dimension(session, "so many tokens", peer->page_size, net->page_size);
    return err;
}

int kvbm_admit(struct kvbm_session *session)
{
    struct kvbm_net *net = session->net;
    const struct kvbm_identity *who = &session->peer.who;
    const struct kvbm_session *other;

    if (!session->counted && net->n_sessions >= net->max_sessions)
        return kvbm_refuse(session, -ENOSPC, "%s has %u sessions, as many as it may",
                           net->agent->name, net->n_sessions);
    for (other = TAILQ_FIRST(&net->sessions); other; other = TAILQ_NEXT(other, list)) {
        const struct kvbm_identity *known = &other->peer.who;
        bool same_name = strcmp(known->name, who->name) == 0;

        if (same_name != (known->worker == who->worker))
            return kvbm_refuse(session, -EEXIST, "another peer of %s has that name or worker",
                               net->agent->name);
        if (same_name && known->incarnation != who->incarnation)
            return kvbm_refuse(session, -EEXIST,
                               "a session of an earlier %s is open; try again once it has ended",
                               who->name);
    }
    net->n_sessions += !session->counted;
    session->counted = true;
    return 0;
}
