// SPDX-License-Identifier: Apache-2.0
/* Block sets of this agent: what it tells peers of its blocks. */
#include "base/core/log.h"
#include "peer/lease/lend.h"
#include "peer/session/agent.h"
#include "peer/session/net.h"

#define MAX_IDS 65536

/* Return the place of an id among the exports, made if necessary; NULL when out of room. */
static struct kvbm_exported *export_of(struct kvbm_agent *agent, uint32_t id)
{
    struct kvbm_exported *more;

    for (uint32_t i = 0; i < agent->n_exports; i++) {
        if (agent->exports[i].id == id)
            return &agent->exports[i];
    }
    if (agent->n_exports == MAX_IDS)
        return NULL;
    more = realloc(agent->exports, (agent->n_exports + 1) * sizeof(*more));
    if (!more)
        return NULL;
    agent->exports = more;
    more[agent->n_exports] = (struct kvbm_exported){.id = id};
    return &more[agent->n_exports++];
}

static bool has_memory(const struct kvbm_layout *layout)
{
    return layout && kvbm_layout_storage(layout, 0) && layout->places[0].kind != KVBM_STORAGE_NULL;
}

/* Add the transport that an offer of shared memory is. */
static int add_shared(const struct kvbm_offer *offer, struct kvbm_facts *facts)
{
    struct kvbm_transport_key key;

    if (!kvbm_offer_transport(offer, &key))
        return 0;
    for (uint32_t i = 0; i < facts->n_transports; i++) {
        if (facts->transports[i].transport == key.transport)
            return -EINVAL;
    }
    if (facts->n_transports == KVBM_MAX_TRANSPORTS)
        return -EINVAL;
    facts->transports[facts->n_transports++] = key;
    return 0;
}

/* Read a set's options into @facts, whose transport keys are borrowed until they are written. */
static int describe(const struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                    const struct kvbm_offer *offer, struct kvbm_facts *facts)
{
    const struct kvbm_transport_key *transports = KV_OPT(opts, transports, NULL);
    uint32_t n = KV_OPT(opts, n_transports, 0);

    *facts = (struct kvbm_facts){.worker = agent->worker,
                                 .incarnation = agent->incarnation,
                                 .key_len = agent->key_len,
                                 .id = KV_OPT(opts, id, 0),
                                 .writable = KV_OPT(opts, writable, false),
                                 .lifetime_ms = KV_OPT(opts, lifetime_ms, 0),
                                 .n_transports = n};
    memcpy(facts->agent, agent->name, sizeof(facts->agent));
    memcpy(facts->fingerprint, agent->fingerprint, sizeof(facts->fingerprint));
    if (opts->size >= offsetof(struct kvbm_blockset_opts, shard) + sizeof(opts->shard))
        facts->shard = opts->shard;
    if (!has_memory(opts->layout) || n > KVBM_MAX_TRANSPORTS || (n && !transports) ||
        !kvbm_shard_fits(&facts->shard, &opts->layout->config))
        return -EINVAL;
    for (uint32_t i = 0; i < n; i++) {
        facts->transports[i] = transports[i];
        if (!transports[i].transport || transports[i].len > KVBM_MAX_TRANSPORT_KEY ||
            (transports[i].len && !transports[i].key))
            return -EINVAL;
        for (uint32_t j = 0; j < i; j++) {
            if (transports[j].transport == transports[i].transport)
                return -EINVAL;
        }
    }
    return add_shared(offer, facts);
}

/* Make a generation of a set, as its readers will parse it. */
static int make_facts(const struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                      const struct kvbm_offer *offer, uint64_t generation, struct kvbm_facts **ret)
{
    struct kv_buf bytes = KV_BUF_INIT;
    struct kvbm_facts facts;
    int err = describe(agent, opts, offer, &facts);

    if (err < 0) {
        kv_log_error("kvbm", "a block set's options contradict themselves or its layout",
                     "agent=%s", agent->name);
        return err;
    }
    facts.generation = generation;
    err = kvbm_facts_write(&facts, opts->layout, &bytes);
    if (err == 0)
        err = kvbm_facts_parse(bytes.data, bytes.len, ret);
    kv_buf_fini(&bytes);
    return err;
}

static bool opts_are_complete(const struct kvbm_blockset_opts *opts)
{
    return kv_sized(opts, "kvbm_blockset_opts") &&
           opts->size >= offsetof(struct kvbm_blockset_opts, layout) + sizeof(opts->layout);
}

/* Make a set known, with the agent locked. */
static int publish(struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                   struct kvbm_blockset *set)
{
    struct kvbm_exported *place = export_of(agent, opts->id);
    int err;

    if (!place)
        return agent->n_exports == MAX_IDS ? -ENOSPC : -ENOMEM;
    if (place->set)
        return -EEXIST;
    err = make_facts(agent, opts, set->offer, place->generation + 1, &set->facts);
    if (err < 0)
        return err;
    place->set = set;
    place->generation++;
    agent->n_users++;
    kvbm_offer_begin(set->offer, set->facts); /* before a peer knows the set */
    kvbm_exchange_tell(agent, set->facts);
    return 0;
}

int kvbm_blockset_export(struct kvbm_agent *agent, const struct kvbm_blockset_opts *opts,
                         struct kvbm_blockset **ret)
{
    struct kvbm_blockset *set;
    int err;

    if (!agent || !ret || !opts_are_complete(opts))
        return -EINVAL;
    set = calloc(1, sizeof(*set));
    if (!set)
        return -ENOMEM;
    set->agent = agent;
    set->id = opts->id;
    err = kvbm_offer_create(agent->lender, opts, &set->offer);
    if (err == 0) {
        pthread_mutex_lock(&agent->lock);
        err = publish(agent, opts, set);
        pthread_mutex_unlock(&agent->lock);
    }
    if (err == 0) {
        *ret = set;
        return 0;
    }
    kvbm_offer_destroy(set->offer);
    free(set);
    return err;
}

/* Replace what a set says, with the agent locked. @offer becomes the set's, and its old one @offer. */
static int republish(struct kvbm_blockset *set, const struct kvbm_blockset_opts *opts,
                     struct kvbm_offer **offer)
{
    struct kvbm_offer *old = set->offer;
    struct kvbm_facts *facts;
    int err = opts->id == set->id
                  ? make_facts(set->agent, opts, *offer, set->facts->generation + 1, &facts)
                  : -EINVAL;

    if (err != 0)
        return err;
    kvbm_facts_put(set->facts);
    set->facts = facts;
    export_of(set->agent, opts->id)->generation = facts->generation;
    kvbm_offer_begin(*offer, facts);
    kvbm_exchange_tell(set->agent, facts);
    set->offer = *offer;
    *offer = old;
    return 0;
}

int kvbm_blockset_update(struct kvbm_blockset *set, const struct kvbm_blockset_opts *opts)
{
    struct kvbm_offer *offer = NULL;
    int err;

    if (!set || !opts_are_complete(opts))
        return -EINVAL;
    err = kvbm_offer_create(set->agent->lender, opts, &offer);
    if (err < 0)
        return err;
    pthread_mutex_lock(&set->agent->lock);
    err = republish(set, opts, &offer);
    pthread_mutex_unlock(&set->agent->lock);
    kvbm_offer_destroy(offer); /* the old one, or the one that wasn't taken */
    return err;
}

void kvbm_blockset_destroy(struct kvbm_blockset *set)
{
    struct kvbm_agent *agent = set ? set->agent : NULL;

    if (!set)
        return;
    pthread_mutex_lock(&agent->lock);
    export_of(agent, set->id)->set = NULL;
    kvbm_exchange_gone(agent, set->facts);
    pthread_mutex_unlock(&agent->lock);
    kvbm_offer_destroy(set->offer);
    pthread_mutex_lock(&agent->lock);
    agent->n_users--; /* the agent stays until the offer has ended */
    pthread_mutex_unlock(&agent->lock);
    kvbm_facts_put(set->facts);
    free(set);
}

uint64_t kvbm_blockset_generation(const struct kvbm_blockset *set)
{
    uint64_t generation;

    if (!set)
        return 0;
    pthread_mutex_lock(&set->agent->lock);
    generation = set->facts->generation;
    pthread_mutex_unlock(&set->agent->lock);
    return generation;
}

long kvbm_blockset_serialise(const struct kvbm_blockset *set, void *to, size_t cap, size_t *needed)
{
    long len;

    if (!set)
        return -EINVAL;
    pthread_mutex_lock(&set->agent->lock);
    len = (long)set->facts->len;
    if (needed)
        *needed = (size_t)len;
    if (!to || cap < (size_t)len)
        len = -ENOSPC;
    else
        memcpy(to, set->facts->bytes, (size_t)len);
    pthread_mutex_unlock(&set->agent->lock);
    return len;
}
