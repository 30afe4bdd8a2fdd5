// SPDX-License-Identifier: Apache-2.0
/* Block sets of peers: the directory of what they have told. */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "peer/session/agent.h"
#include "peer/session/session.h"

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

/* Return the number of places of a peer with ids below @id. */
static uint32_t places_below(const struct kvbm_peer *peer, uint32_t id)
{
    uint32_t low = 0, high = peer->n;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (peer->places[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct kvbm_imported *find_place(const struct kvbm_agent *agent, uint64_t worker,
                                        uint32_t id)
{
    const struct kvbm_peer *peer = find_peer(agent, worker);
    uint32_t at = peer ? places_below(peer, id) : 0;

    return peer && at < peer->n && peer->places[at].id == id ? &peer->places[at] : NULL;
}

struct kvbm_remote_set *kvbm_find_set(const struct kvbm_agent *agent, uint64_t worker, uint32_t id)
{
    const struct kvbm_imported *place = find_place(agent, worker, id);

    return place ? place->set : NULL;
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

/* Make a place for a set that isn't known; NULL when out of memory. */
static struct kvbm_imported *add_place(struct kvbm_agent *agent, const struct kvbm_facts *facts)
{
    struct kvbm_peer *peer = peer_of(agent, facts);
    uint32_t at = peer ? places_below(peer, facts->id) : 0;
    struct kvbm_imported *more = peer ? realloc(peer->places, (peer->n + 1) * sizeof(*more)) : NULL;

    if (!more) {
        if (peer && peer->n == 0)
            (void)kvbm_drop_peer(agent, peers_below(agent, peer->worker));
        return NULL;
    }
    peer->places = more;
    memmove(more + at + 1, more + at, (peer->n - at) * sizeof(*more));
    more[at] = (struct kvbm_imported){.id = facts->id};
    peer->n++;
    agent->n_places++;
    return &more[at];
}

static void make_stale(struct kvbm_agent *agent, struct kvbm_facts *facts)
{
    agent->bytes -= facts->len;
    atomic_store_explicit(&facts->stale, true, memory_order_release);
}

static void free_set(struct kvbm_remote_set *set)
{
    kvbm_facts_put(set->facts);
    free(set);
}

/* Forget the set of a place. It stays for programs that hold a reference. */
static void drop_set(struct kvbm_agent *agent, struct kvbm_imported *place)
{
    struct kvbm_remote_set *set = KV_STEAL(place->set);

    make_stale(agent, set->facts);
    set->gone = true;
    if (!set->n_found)
        free_set(set);
}

long kvbm_drop_peer(struct kvbm_agent *agent, uint32_t at)
{
    struct kvbm_peer *peer = agent->peers[at];
    long n = 0;

    for (uint32_t i = 0; i < peer->n; i++) {
        if (!peer->places[i].set)
            continue;
        drop_set(agent, &peer->places[i]);
        n++;
    }
    agent->n_places -= peer->n;
    memmove(agent->peers + at, agent->peers + at + 1,
            (--agent->n_peers - at) * sizeof(struct kvbm_peer *));
    free(peer->places);
    free(peer);
    return n;
}

long kvbm_drop_incarnation(struct kvbm_agent *agent, const struct kvbm_identity *who)
{
    uint32_t at = peers_below(agent, who->worker);

    if (at == agent->n_peers || agent->peers[at]->worker != who->worker ||
        agent->peers[at]->incarnation != who->incarnation)
        return 0;
    return kvbm_drop_peer(agent, at);
}

long kvbm_drop_earlier(struct kvbm_agent *agent, const struct kvbm_identity *who)
{
    long n = 0;

    for (uint32_t i = agent->n_peers; i-- > 0;) {
        const struct kvbm_peer *peer = agent->peers[i];

        if ((peer->worker == who->worker || strcmp(peer->name, who->name) == 0) &&
            peer->incarnation != who->incarnation)
            n += kvbm_drop_peer(agent, i);
    }
    return n;
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
            return refuse(facts, -EEXIST, "it has restarted, and wasn't forgotten");
    }
    return 0;
}

/* Share of a peer in places and bytes, as far as it told the sets itself. */
struct part {
    uint64_t places, bytes;
};

static struct part part_of(const struct kvbm_peer *peer)
{
    struct part part = {0};

    for (uint32_t i = 0; peer && i < peer->n; i++) {
        const struct kvbm_imported *place = &peer->places[i];

        part.places += place->told;
        part.bytes += place->told && place->set ? place->set->facts->len : 0;
    }
    return part;
}

/* Find the peer that has most places, or most bytes. */
static struct kvbm_peer *greediest(const struct kvbm_agent *agent, bool by_bytes)
{
    struct kvbm_peer *worst = NULL;
    uint64_t most = 0;

    for (uint32_t i = 0; i < agent->n_peers; i++) {
        struct part part = part_of(agent->peers[i]);
        uint64_t n = by_bytes ? part.bytes : part.places;

        if (n > most) {
            worst = agent->peers[i];
            most = n;
        }
    }
    return worst;
}

/* Forget the last set that a peer has told, with its place. */
static void forget_last(struct kvbm_agent *agent, struct kvbm_peer *peer)
{
    static struct kv_log_rate rate;
    uint32_t at = peer->n;

    if (kv_log_allowed(&rate, 1))
        kv_log_warn("kvbm", "sets of the peer that has most are forgotten, for those of others",
                    "agent=%s peer=%s sets=%u", agent->name, peer->name, peer->n);
    do
        at--;
    while (!peer->places[at].told);
    if (peer->places[at].set)
        drop_set(agent, &peer->places[at]);
    peer->n--;
    memmove(&peer->places[at], &peer->places[at + 1], (peer->n - at) * sizeof(*peer->places));
    agent->n_places--;
    if (!peer->n)
        (void)kvbm_drop_peer(agent, peers_below(agent, peer->worker));
}

/*
 * Make room for a set. A peer that tells it gets room from the peer that has most, if that one has more.
 * Sets that the program itself has imported stay, and get nothing of others. Returns whether there is
 * room.
 */
static bool make_room(struct kvbm_agent *agent, const struct kvbm_facts *facts, bool told)
{
    for (;;) {
        const struct kvbm_imported *place = find_place(agent, facts->worker, facts->id);
        struct part own = part_of(find_peer(agent, facts->worker)), most;
        uint64_t freed = place && place->set ? place->set->facts->len : 0;
        bool many = !place && agent->n_places >= agent->max_sets;
        bool large = agent->bytes - freed + facts->len > agent->max_bytes;
        struct kvbm_peer *worst;

        if (!many && !large)
            return true;
        if (!told)
            return false;
        worst = greediest(agent, !many);
        most = part_of(worst);
        if (!worst || worst->worker == facts->worker ||
            (many ? most.places <= own.places + 1 : most.bytes <= own.bytes - freed + facts->len))
            return false;
        forget_last(agent, worst);
    }
}

/* Take the new generation of a set. Consumes @facts on success. */
static int take_facts(struct kvbm_agent *agent, struct kvbm_facts *facts, bool told,
                      struct kvbm_remote_set **ret)
{
    struct kvbm_imported *place = find_place(agent, facts->worker, facts->id);
    struct kvbm_remote_set *set;
    int err = check_peer(agent, facts);

    if (err < 0)
        return err;
    if (place && facts->generation <= place->generation)
        return place->set && facts->generation == place->generation ? -EEXIST : -ESTALE;
    if (!make_room(agent, facts, told))
        return refuse(facts, -ENOSPC, "too many sets, or too large ones");
    place = find_place(agent, facts->worker, facts->id); /* another one's end may have moved it */
    set = place && place->set ? place->set : calloc(1, sizeof(*set));
    if (set && !place)
        place = add_place(agent, facts);
    if (!place) {
        free(set);
        return -ENOMEM;
    }
    if (!set)
        return -ENOMEM;
    if (set->facts) {
        make_stale(agent, set->facts);
        kvbm_facts_put(set->facts);
    }
    set->agent = agent;
    set->facts = facts;
    *place = (struct kvbm_imported){
        .id = facts->id, .generation = facts->generation, .set = set, .told = told};
    agent->bytes += facts->len;
    *ret = set;
    return 0;
}

int kvbm_import_facts(struct kvbm_agent *agent, struct kvbm_facts *facts, bool told,
                      struct kvbm_remote_set **ret)
{
    struct kvbm_remote_set *set = NULL;
    uint64_t now = kv_now_ns();
    int err;

    if (facts->lifetime_ms && facts->lifetime_ms <= (UINT64_MAX - now) / KV_NS_PER_MS)
        facts->expires_ns = now + facts->lifetime_ms * KV_NS_PER_MS;
    err = check_kind(agent, facts);
    if (err == 0) {
        pthread_mutex_lock(&agent->lock);
        err = take_facts(agent, facts, told, &set);
        if (err == 0 && ret)
            *ret = set;
        pthread_mutex_unlock(&agent->lock);
    }
    if (err < 0)
        kvbm_facts_put(facts);
    return err;
}

int kvbm_blockset_import(struct kvbm_agent *agent, const void *data, size_t len,
                         struct kvbm_remote_set **ret)
{
    struct kvbm_facts *facts;
    int err = agent && data ? kvbm_facts_parse(data, len, &facts) : -EINVAL;

    return err < 0 ? err : kvbm_import_facts(agent, facts, false, ret);
}

void kvbm_import_gone(struct kvbm_agent *agent, uint64_t worker, uint32_t id, uint64_t generation)
{
    struct kvbm_imported *place;

    pthread_mutex_lock(&agent->lock);
    place = find_place(agent, worker, id);
    if (place && place->set && place->generation <= generation)
        drop_set(agent, place);
    pthread_mutex_unlock(&agent->lock);
}

void kvbm_remote_set_invalidate(struct kvbm_remote_set *set)
{
    struct kvbm_agent *agent = set ? set->agent : NULL;

    if (!set)
        return;
    pthread_mutex_lock(&agent->lock);
    if (!set->gone)
        drop_set(agent, find_place(agent, set->facts->worker, set->facts->id));
    pthread_mutex_unlock(&agent->lock);
}

int kvbm_remote_set_find(struct kvbm_agent *agent, uint64_t worker, uint32_t id,
                         struct kvbm_remote_set **ret)
{
    struct kvbm_remote_set *set;

    if (!agent || !ret)
        return -EINVAL;
    pthread_mutex_lock(&agent->lock);
    set = kvbm_find_set(agent, worker, id);
    if (set) {
        set->n_found++;
        agent->n_users++;
        *ret = set;
    }
    pthread_mutex_unlock(&agent->lock);
    return set ? 0 : -ENOENT;
}

void kvbm_remote_set_release(struct kvbm_remote_set *set)
{
    struct kvbm_agent *agent = set ? set->agent : NULL;

    if (!set)
        return;
    pthread_mutex_lock(&agent->lock);
    agent->n_users--;
    if (--set->n_found == 0 && set->gone)
        free_set(set);
    pthread_mutex_unlock(&agent->lock);
}

long kvbm_agent_forget(struct kvbm_agent *agent, const char *name)
{
    long n = 0;

    if (!agent || !name)
        return -EINVAL;
    pthread_mutex_lock(&agent->lock);
    for (uint32_t i = 0; i < agent->n_peers; i++) {
        if (strcmp(agent->peers[i]->name, name) == 0) {
            n = kvbm_drop_peer(agent, i);
            break;
        }
    }
    pthread_mutex_unlock(&agent->lock);
    return n;
}

/* ---- telling ---- */

int kvbm_remote_set_get_info(const struct kvbm_remote_set *set, struct kvbm_remote_set_info *ret)
{
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    const struct kvbm_facts *facts;
    bool gone;

    if (!set || !kv_sized(ret, "kvbm_remote_set_info"))
        return -EINVAL;
    pthread_mutex_lock(&set->agent->lock);
    gone = set->gone;
    facts = set->facts;
    memcpy(info.agent, facts->agent, sizeof(info.agent));
    info.worker = facts->worker;
    info.incarnation = facts->incarnation;
    info.generation = facts->generation;
    info.id = facts->id;
    info.writable = facts->writable;
    info.expires_ns = facts->expires_ns;
    info.shard = facts->shard;
    info.n_transports = facts->n_transports;
    for (uint32_t i = 0; i < facts->n_transports; i++)
        info.transports[i] = facts->transports[i].transport;
    pthread_mutex_unlock(&set->agent->lock);
    if (gone)
        return -ESTALE;
    KV_GIVE(ret, &info);
    return 0;
}

int kvbm_remote_set_layout(const struct kvbm_remote_set *set, struct kvbm_layout_config *ret)
{
    bool gone;

    if (!set || !kv_sized(ret, "kvbm_layout_config"))
        return -EINVAL;
    pthread_mutex_lock(&set->agent->lock);
    gone = set->gone;
    if (!gone)
        KV_GIVE(ret, kvbm_layout_get_config(set->facts->layout));
    pthread_mutex_unlock(&set->agent->lock);
    return gone ? -ESTALE : 0;
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
    len = set->gone ? -ESTALE : copy_key(set->facts, transport, to, cap, needed);
    pthread_mutex_unlock(&set->agent->lock);
    return len;
}
