// SPDX-License-Identifier: Apache-2.0
/* Block sets of peers: the directory of what they have told. */
#include "agent.h"
#include "base/clock.h"
#include "base/log.h"

/* ---- the directory; the agent is locked ---- */

/* Return the number of peers with workers below @worker. */
static uint32_t peers_below(const struct kvbm_agent *agent, uint64_t worker)
{
    uint32_t low = 0, high = agent->n_peers;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (agent->peers[middle]->worker < worker)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct kvbm_peer *find_peer(const struct kvbm_agent *agent, uint64_t worker)
{
    uint32_t at = peers_below(agent, worker);

    return at < agent->n_peers && agent->peers[at]->worker == worker ? agent->peers[at] : NULL;
}

/* Return the number of sets of a peer with ids below @id. */
static uint32_t sets_below(const struct kvbm_peer *peer, uint32_t id)
{
    uint32_t low = 0, high = peer->n;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (peer->sets[middle]->facts->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct kvbm_remote_set *kvbm_find_set(const struct kvbm_agent *agent, uint64_t worker, uint32_t id)
{
    const struct kvbm_peer *peer = find_peer(agent, worker);
    uint32_t at = peer ? sets_below(peer, id) : 0;

    return peer && at < peer->n && peer->sets[at]->facts->id == id ? peer->sets[at] : NULL;
}

/* Return a peer's entry, made if necessary; NULL when out of memory. */
static struct kvbm_peer *peer_of(struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    struct kvbm_peer *peer = find_peer(agent, facts->worker), **more;
    uint32_t at = peers_below(agent, facts->worker);

    if (peer)
        return peer;
    more = realloc(agent->peers, (agent->n_peers + 1) * sizeof(struct kvbm_peer *));
    if (!more)
        return NULL;
    agent->peers = more;
    peer = calloc(1, sizeof(*peer));
    if (!peer)
        return NULL;
    peer->worker = facts->worker;
    peer->incarnation = facts->incarnation;
    memcpy(peer->name, facts->agent, sizeof(peer->name));
    memmove(more + at + 1, more + at, (agent->n_peers - at) * sizeof(struct kvbm_peer *));
    more[at] = peer;
    agent->n_peers++;
    return peer;
}

static void drop_peer(struct kvbm_agent *agent, struct kvbm_peer *peer)
{
    uint32_t at = peers_below(agent, peer->worker);

    memmove(agent->peers + at, agent->peers + at + 1,
            (--agent->n_peers - at) * sizeof(struct kvbm_peer *));
    free(peer->sets);
    free(peer);
}

/* Consumes @facts on success. */
static int add_set(struct kvbm_agent *agent, struct kvbm_facts *facts, struct kvbm_remote_set **ret)
{
    struct kvbm_remote_set *set = calloc(1, sizeof(*set)), **more = NULL;
    struct kvbm_peer *peer = set ? peer_of(agent, facts) : NULL;
    uint32_t at = peer ? sets_below(peer, facts->id) : 0;

    if (peer)
        more = realloc(peer->sets, (peer->n + 1) * sizeof(struct kvbm_remote_set *));
    if (!more) {
        if (peer && peer->n == 0)
            drop_peer(agent, peer);
        free(set);
        return -ENOMEM;
    }
    peer->sets = more;
    memmove(more + at + 1, more + at, (peer->n - at) * sizeof(struct kvbm_remote_set *));
    *set = (struct kvbm_remote_set){.agent = agent, .peer = peer, .facts = facts};
    more[at] = set;
    peer->n++;
    agent->n_sets++;
    *ret = set;
    return 0;
}

static void make_stale(struct kvbm_facts *facts)
{
    atomic_store_explicit(&facts->stale, true, memory_order_release);
    kvbm_facts_put(facts);
}

void kvbm_drop_set(struct kvbm_remote_set *set)
{
    struct kvbm_agent *agent = set->agent;
    struct kvbm_peer *peer = set->peer;
    uint32_t at = sets_below(peer, set->facts->id);

    memmove(peer->sets + at, peer->sets + at + 1,
            (--peer->n - at) * sizeof(struct kvbm_remote_set *));
    agent->n_sets--;
    make_stale(set->facts);
    free(set);
    if (peer->n == 0)
        drop_peer(agent, peer);
}

/* ---- importing ---- */

static int refuse(const struct kvbm_facts *facts, int err, const char *why)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a peer's block set is refused",
                    "agent=%s set=%u generation=%llu why=\"%s\"", facts->agent, facts->id,
                    (unsigned long long)facts->generation, why);
    return err;
}

/* Refuse what doesn't fit this agent: blocks of another model, keys of another length, own ones. */
static int check_kind(const struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    if (facts->worker == agent->worker || strcmp(facts->agent, agent->name) == 0)
        return refuse(facts, -ELOOP, "it is of this agent's own name or worker");
    if (strcmp(facts->fingerprint, agent->fingerprint) != 0)
        return refuse(facts, -EMEDIUMTYPE, "its blocks are of another model (fingerprint)");
    if (facts->key_len != agent->key_len)
        return refuse(facts, -EMEDIUMTYPE, "its keys have another length");
    return 0;
}

/* Compare with what is known of the peer; two peers share neither name nor worker. */
static int check_peer(const struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    for (uint32_t i = 0; i < agent->n_peers; i++) {
        const struct kvbm_peer *peer = agent->peers[i];
        bool same_name = strcmp(peer->name, facts->agent) == 0;

        if (same_name != (peer->worker == facts->worker))
            return refuse(facts, -EEXIST, "another peer has its name or worker");
        if (same_name && peer->incarnation != facts->incarnation)
            return refuse(facts, -EEXIST, "sets from before its restart weren't invalidated");
    }
    return 0;
}

/* Take the new generation of a set. Consumes @facts on success. */
static int take_facts(struct kvbm_agent *agent, struct kvbm_facts *facts,
                      struct kvbm_remote_set **ret)
{
    struct kvbm_remote_set *set = kvbm_find_set(agent, facts->worker, facts->id);
    int err = check_peer(agent, facts);

    if (err < 0)
        return err;
    if (!set)
        return agent->n_sets < agent->max_sets ? add_set(agent, facts, ret)
                                               : refuse(facts, -ENOSPC, "too many sets");
    if (facts->generation == set->facts->generation)
        return -EEXIST;
    if (facts->generation < set->facts->generation)
        return -ESTALE;
    make_stale(set->facts);
    set->facts = facts;
    *ret = set;
    return 0;
}

int kvbm_blockset_import(struct kvbm_agent *agent, const void *data, size_t len,
                         struct kvbm_remote_set **ret)
{
    struct kvbm_remote_set *set = NULL;
    struct kvbm_facts *facts;
    uint64_t now = kv_now_ns();
    int err = agent && data ? kvbm_facts_parse(data, len, &facts) : -EINVAL;

    if (err < 0)
        return err;
    if (facts->lifetime_ms && facts->lifetime_ms <= (UINT64_MAX - now) / KV_NS_PER_MS)
        facts->expires_ns = now + facts->lifetime_ms * KV_NS_PER_MS;
    err = check_kind(agent, facts);
    if (err == 0) {
        pthread_mutex_lock(&agent->lock);
        err = take_facts(agent, facts, &set);
        if (err == 0 && ret)
            *ret = set;
        pthread_mutex_unlock(&agent->lock);
    }
    if (err < 0)
        kvbm_facts_put(facts);
    return err;
}

void kvbm_remote_set_invalidate(struct kvbm_remote_set *set)
{
    struct kvbm_agent *agent = set ? set->agent : NULL;

    if (!set)
        return;
    pthread_mutex_lock(&agent->lock);
    kvbm_drop_set(set);
    pthread_mutex_unlock(&agent->lock);
}

long kvbm_agent_forget(struct kvbm_agent *agent, const char *name)
{
    long n = 0;

    if (!agent || !name)
        return -EINVAL;
    pthread_mutex_lock(&agent->lock);
    for (uint32_t i = 0; i < agent->n_peers; i++) {
        struct kvbm_peer *peer = agent->peers[i];

        if (strcmp(peer->name, name) != 0)
            continue;
        n = peer->n;
        for (uint32_t left = peer->n; left-- > 0;)
            kvbm_drop_set(peer->sets[left]); /* the last one frees the peer */
        break;
    }
    pthread_mutex_unlock(&agent->lock);
    return n;
}

/* ---- telling ---- */

int kvbm_remote_set_get_info(const struct kvbm_remote_set *set, struct kvbm_remote_set_info *ret)
{
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    const struct kvbm_facts *facts;

    if (!set || !kv_sized(ret, "kvbm_remote_set_info"))
        return -EINVAL;
    pthread_mutex_lock(&set->agent->lock);
    facts = set->facts;
    memcpy(info.agent, facts->agent, sizeof(info.agent));
    info.worker = facts->worker;
    info.incarnation = facts->incarnation;
    info.generation = facts->generation;
    info.id = facts->id;
    info.writable = facts->writable;
    info.expires_ns = facts->expires_ns;
    info.shard = facts->shard;
    info.layout = *kvbm_layout_get_config(facts->layout);
    info.n_transports = facts->n_transports;
    for (uint32_t i = 0; i < facts->n_transports; i++)
        info.transports[i] = facts->transports[i].transport;
    pthread_mutex_unlock(&set->agent->lock);
    KV_GIVE(ret, &info);
    return 0;
}

static long copy_key(const struct kvbm_facts *facts, enum kvbm_transport transport, void *to,
                     size_t cap, size_t *needed)
{
    for (uint32_t i = 0; i < facts->n_transports; i++) {
        const struct kvbm_transport_key *key = &facts->transports[i];

        if (key->transport != (uint32_t)transport)
            continue;
        if (needed)
            *needed = key->len;
        if (cap < key->len || (key->len && !to))
            return -ENOSPC;
        if (key->len)
            memcpy(to, key->key, key->len);
        return key->len;
    }
    return -ENOENT;
}

long kvbm_remote_set_transport(const struct kvbm_remote_set *set, enum kvbm_transport transport,
                               void *to, size_t cap, size_t *needed)
{
    long len;

    if (!set)
        return -EINVAL;
    pthread_mutex_lock(&set->agent->lock);
    len = copy_key(set->facts, transport, to, cap, needed);
    pthread_mutex_unlock(&set->agent->lock);
    return len;
}
