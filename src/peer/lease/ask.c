// SPDX-License-Identifier: Apache-2.0
/* Lookups, and what a reader sees of its peers: sessions, and sets whose blocks fit. */
#include "peer/lease/ask.h"

#include <inttypes.h>

#include "base/core/log.h"
#include "peer/lease/borrow.h"
#include "peer/lease/lease_wire.h"
#include "peer/session/agent.h"
#include "peer/session/net.h"

/* ---- peers ---- */

/* Find a listed session with the same peer. Returns @n when there is none. */
static size_t find_peer(struct kvbm_session *const *sessions, size_t n,
                        const struct kvbm_session *session)
{
    size_t i = 0;

    while (i < n && sessions[i]->peer.who.worker != session->peer.who.worker)
        i++;
    return i;
}

size_t kvbm_sessions_list(struct kvbm_agent *agent, struct kvbm_session **ret, size_t max)
{
    struct kvbm_net *net = agent->net;
    struct kvbm_session *session;
    size_t n = 0;

    pthread_mutex_lock(&net->lock);
    for (session = TAILQ_FIRST(&net->sessions); session; session = TAILQ_NEXT(session, list)) {
        size_t at = find_peer(ret, n, session);

        if (at == max || !kvbm_session_is_open(session) ||
            (at < n && (kvbm_session_takes_fds(ret[at]) || !kvbm_session_takes_fds(session))))
            continue;
        if (at < n) /* not the last reference: the list of sessions has one */
            kvbm_session_put(ret[at]);
        ret[at] = kvbm_session_get(session);
        n += at == n;
    }
    pthread_mutex_unlock(&net->lock);
    return n;
}

uint32_t kvbm_agent_key_len(const struct kvbm_agent *agent)
{
    return agent->key_len;
}

uint64_t kvbm_agent_worker_at(struct kvbm_agent *agent, const char *endpoint)
{
    struct kvbm_net *net = agent->net;
    const struct kvbm_session *session;
    uint64_t worker = 0;

    pthread_mutex_lock(&net->lock);
    for (session = TAILQ_FIRST(&net->sessions); session && !worker;
         session = TAILQ_NEXT(session, list)) {
        if (strcmp(session->endpoint, endpoint) == 0 && kvbm_session_is_open(session))
            worker = session->peer.who.worker;
    }
    pthread_mutex_unlock(&net->lock);
    return worker;
}

/* True when this agent exports the same set, of other heads: the peer is another rank. */
static bool is_of_another_rank(struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    bool other = false;

    pthread_mutex_lock(&agent->lock);
    for (uint32_t i = 0; i < agent->n_exports; i++) {
        const struct kvbm_exported *own = &agent->exports[i];

        if (own->id == facts->id && own->set)
            other = !kvbm_shards_are_alike(&own->set->facts->shard, &facts->shard,
                                           &facts->layout->config);
    }
    pthread_mutex_unlock(&agent->lock);
    return other;
}

/* Return why the blocks of @facts don't fit, as kvbm_session_fits; NULL: they fit. */
static const char *why_unfit(struct kvbm_agent *agent, const struct kvbm_facts *facts,
                             const struct kvbm_layout *like, const struct kvbm_shard *own)
{
    const struct kvbm_layout_config *config = &facts->layout->config;

    if (!kvbm_same_blocks(config, &like->config))
        return "blocks of another form";
    if (is_of_another_rank(agent, facts) ||
        (own && own->n_ranks && !kvbm_shards_are_alike(own, &facts->shard, config)))
        return "heads of another rank, under one fingerprint";
    return NULL;
}

int kvbm_session_fits(struct kvbm_session *session, uint32_t set, const struct kvbm_layout *like,
                      const struct kvbm_shard *own)
{
    struct kvbm_facts *facts;
    int err = kvbm_facts_of(session, set, &facts);
    const char *why;

    if (err < 0)
        return err;
    why = why_unfit(kvbm_session_agent(session), facts, like, own);
    if (why && !atomic_exchange(&facts->told, true))
        kv_log_warn("kvbm", "a peer's blocks don't fit", "peer=%s set=%" PRIu32 " why=\"%s\"",
                    facts->agent, set, why);
    kvbm_facts_put(facts);
    return why ? -EMEDIUMTYPE : 0;
}

/* ---- lookups ---- */

int kvbm_lookup_start(struct kvbm_session *session, uint32_t set, uint32_t group, const void *keys,
                      size_t n, struct kvbm_call **ret)
{
    struct kvbm_asked asked = {.set = set, .group = group, .n = (uint32_t)n, .keys = keys};
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_facts *facts = NULL;
    int err = kvbm_may_ask(session, group, keys, n) ? kvbm_facts_of(session, set, &facts) : -EINVAL;

    if (err < 0)
        return err;
    asked.generation = facts->generation;
    kvbm_asked_write(&body, &asked, facts->key_len);
    kvbm_facts_put(facts);
    err = body.error
              ? body.error
              : kvbm_call_start(session, KVBM_ASK_LOOKUP, body.data, body.len, -1, NULL, 0, ret);
    kv_buf_fini(&body);
    return err;
}

/* Tell whether an answer names tiers that there are. */
static bool are_tiers(const uint8_t *tiers, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (tiers[i] >= KV_N_TIERS && tiers[i] != KVBM_NO_TIER)
            return false;
    }
    return true;
}

int kvbm_lookup_wait(struct kvbm_call *call, size_t n, uint64_t deadline_ns, uint8_t *tiers)
{
    struct kvbm_reply reply = {.fd = -1};
    long len = kvbm_call_wait(call, deadline_ns, &reply);
    int err = len < 0 ? (int)len : KV_MIN(reply.status, 0);

    if (len < 0)
        return err;
    if (err == 0 && reply.len == n && are_tiers(reply.body, n))
        memcpy(tiers, reply.body, n);
    else if (err == 0)
        err = -EPROTO;
    kvbm_reply_fini(&reply);
    return err;
}

int kvbm_session_lookup(struct kvbm_session *session, uint32_t set, uint32_t group,
                        const void *keys, size_t n, uint64_t deadline_ns, uint8_t *tiers)
{
    struct kvbm_call *call = NULL;
    int err = tiers ? kvbm_lookup_start(session, set, group, keys, n, &call) : -EINVAL;

    return err < 0 ? err : kvbm_lookup_wait(call, n, deadline_ns, tiers);
}
