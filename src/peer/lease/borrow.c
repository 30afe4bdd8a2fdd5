// SPDX-License-Identifier: Apache-2.0
/* Leases, the reader's side: asking, renewing, giving back. */
#include "peer/lease/borrow.h"

#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "bm/ids.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend.h"
#include "peer/session/agent.h"

/* ---- asking ---- */

int kvbm_facts_of(struct kvbm_session *session, uint32_t id, struct kvbm_facts **ret)
{
    const struct kvbm_identity *peer = kvbm_session_peer(session);
    struct kvbm_agent *agent = kvbm_session_agent(session);
    const struct kvbm_remote_set *set;
    int err = 0;

    pthread_mutex_lock(&agent->lock);
    set = kvbm_find_set(agent, peer->worker, id);
    if (!set)
        err = -ENOENT;
    else if (set->facts->incarnation != peer->incarnation)
        err = -ESTALE;
    else
        *ret = kvbm_facts_get(set->facts);
    pthread_mutex_unlock(&agent->lock);
    if (err < 0 && !kvbm_session_is_open(session))
        return -EPIPE; /* its end has forgotten the sets */
    return err;
}

/* Ask about keys of a set. The caller ends @reply when the result is 0. */
static int ask(struct kvbm_session *session, uint16_t type, const struct kvbm_asked *asked,
               uint32_t key_len, uint64_t deadline_ns, struct kvbm_reply *reply)
{
    struct kv_buf body = KV_BUF_INIT;
    int err;

    kvbm_asked_write(&body, asked, key_len);
    err = body.error
              ? body.error
              : kvbm_session_call(session, type, body.data, body.len, -1, deadline_ns, reply);
    kv_buf_fini(&body);
    if (err == 0 && reply->status < 0) {
        err = reply->status;
        kvbm_reply_fini(reply);
    }
    return err;
}

bool kvbm_may_ask(const struct kvbm_session *session, uint32_t group, const void *keys, size_t n)
{
    return session && keys && n && n <= KVBM_MAX_ASKED && group < KVBM_MAX_GROUPS;
}

/* ---- shared memory ---- */

/* Find the key of a set's shared memory; NULL: it has none. */
static const uint8_t *shared_id(const struct kvbm_facts *facts)
{
    for (uint32_t i = 0; i < facts->n_transports; i++) {
        if (facts->transports[i].transport == KVBM_TRANSPORT_SHM &&
            facts->transports[i].len == KVBM_SHARED_ID)
            return facts->transports[i].key;
    }
    return NULL;
}

static int ask_memory(struct kvbm_session *session, const struct kvbm_facts *facts,
                      uint64_t deadline_ns, struct kvbm_mapped *ret)
{
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_reply reply = {.fd = -1};
    int err;

    kvbm_number_write(&body, facts->id);
    err = body.error ? body.error
                     : kvbm_session_call(session, KVBM_ASK_MEMORY, body.data, body.len, -1,
                                         deadline_ns, &reply);
    kv_buf_fini(&body);
    if (err < 0)
        return err;
    err = reply.status < 0 ? reply.status
          : reply.fd < 0   ? -EPROTO
                           : kvbm_shared_map(reply.fd, shared_id(facts), facts->layout, ret);
    kvbm_reply_fini(&reply);
    return err;
}

/*
 * Map the memory of a set, once. A refusal is remembered as long as this generation of the set: the
 * bytes come through the session then.
 */
static const struct kvbm_mapped *memory_of(struct kvbm_session *session, struct kvbm_facts *facts,
                                           uint64_t deadline_ns)
{
    struct kvbm_agent *agent = kvbm_session_agent(session);
    struct kvbm_mapped *mapped;
    bool asked;
    int err;

    if (!shared_id(facts) || !kvbm_session_takes_fds(session))
        return NULL;
    pthread_mutex_lock(&agent->lock);
    mapped = facts->mapped;
    asked = facts->asked_memory;
    pthread_mutex_unlock(&agent->lock);
    if (mapped || asked)
        return mapped;
    mapped = calloc(1, sizeof(*mapped));
    err = mapped ? ask_memory(session, facts, deadline_ns, mapped) : -ENOMEM;
    pthread_mutex_lock(&agent->lock);
    if (err == 0 && !facts->mapped)
        facts->mapped = KV_STEAL(mapped);
    facts->asked_memory = facts->asked_memory || facts->mapped || err == -EPROTO || err == -ENOENT;
    if (mapped && err == 0)
        kvbm_shared_unmap(mapped); /* another thread was first */
    free(mapped);
    mapped = facts->mapped;
    pthread_mutex_unlock(&agent->lock);
    return mapped;
}

/* ---- leases ---- */

/* Count a lease among the users of its agent, which stays as long as one exists. */
static void count_user(const struct kvbm_lease *lease, int change)
{
    struct kvbm_agent *agent = kvbm_session_agent(lease->session);

    pthread_mutex_lock(&agent->lock);
    agent->n_users += (uint32_t)change;
    pthread_mutex_unlock(&agent->lock);
}

static void free_lease(struct kvbm_lease *lease)
{
    if (!lease)
        return;
    count_user(lease, -1);
    kvbm_session_put(lease->session);
    kvbm_facts_put(lease->facts);
    free(lease->generations);
    free(lease->blocks);
    free(lease);
}

/* Read the answer to a request for a lease. */
static int take_blocks(struct kvbm_lease *lease, const struct kvbm_told *told)
{
    uint64_t num_blocks = lease->facts->layout->config.num_blocks;

    lease->n = told->n;
    lease->generations = malloc(told->n * sizeof(*lease->generations));
    lease->blocks = malloc(told->n * sizeof(*lease->blocks));
    if (told->n && (!lease->generations || !lease->blocks))
        return -ENOMEM;
    for (uint32_t i = 0; i < told->n; i++) {
        lease->generations[i] = kv_get_le64(told->generations + (size_t)i * 8);
        lease->blocks[i] = (uint32_t)kv_get_le(told->blocks + (size_t)i * 4, 4);
        if (lease->blocks[i] != KVBM_NO_BLOCK && lease->blocks[i] >= num_blocks)
            return -EPROTO;
    }
    return told->n ? 0 : -EPROTO;
}

static void tell_release(struct kvbm_session *session, uint64_t id)
{
    struct kv_buf body = KV_BUF_INIT;

    kvbm_number_write(&body, id);
    if (!body.error)
        (void)kvbm_session_note(session, KVBM_ASK_RELEASE, body.data, body.len);
    kv_buf_fini(&body);
}

/* Return the nanoseconds that a lease lasts. A read waits so long: an owner grants no more than asked. */
static uint64_t granted(uint32_t told_ms, uint32_t asked_ms)
{
    return KV_MIN(told_ms, asked_ms ? asked_ms : (uint32_t)KVBM_LEASE_MS) * KV_NS_PER_MS;
}

/* Make a lease of an answer. The time begins with the question: the owner's ends later. */
static int make_lease(struct kvbm_lease *lease, const struct kvbm_reply *reply, size_t n,
                      uint32_t time_ms, uint64_t asked_ns)
{
    struct kvbm_told told;
    int err = kvbm_told_read(reply->body, reply->len, (uint32_t)n, &told);

    if (err < 0)
        return err;
    lease->id = told.id;
    atomic_init(&lease->expires_ns, asked_ns + granted(told.time_ms, time_ms));
    err = take_blocks(lease, &told);
    if (err < 0)
        tell_release(lease->session, told.id);
    return err;
}

int kvbm_session_lease(struct kvbm_session *session, uint32_t set, uint32_t group, const void *keys,
                       size_t n, uint32_t time_ms, uint64_t deadline_ns, struct kvbm_lease **ret)
{
    struct kvbm_asked asked = {
        .set = set, .group = group, .n = (uint32_t)n, .keys = keys, .time_ms = time_ms};
    struct kvbm_lease *lease;
    struct kvbm_reply reply = {.fd = -1};
    uint64_t now;
    int err;

    if (!kvbm_may_ask(session, group, keys, n) || !ret)
        return -EINVAL;
    lease = calloc(1, sizeof(*lease));
    if (!lease)
        return -ENOMEM;
    lease->session = kvbm_session_get(session);
    count_user(lease, 1);
    err = kvbm_facts_of(session, set, &lease->facts);
    if (err == 0) {
        asked.generation = lease->facts->generation;
        lease->mapped = memory_of(session, lease->facts, deadline_ns);
        now = kv_now_ns();
        err = ask(session, KVBM_ASK_LEASE, &asked, lease->facts->key_len, deadline_ns, &reply);
    }
    if (err == 0) {
        err = make_lease(lease, &reply, n, time_ms, now);
        kvbm_reply_fini(&reply);
    }
    if (err == 0)
        *ret = KV_STEAL(lease);
    free_lease(lease);
    return err;
}

size_t kvbm_lease_count(const struct kvbm_lease *lease)
{
    return lease ? lease->n : 0;
}

int kvbm_lease_block(const struct kvbm_lease *lease, size_t i, struct kvbm_block_at *ret)
{
    if (!lease || !ret)
        return -EINVAL;
    if (i >= lease->n)
        return -ERANGE;
    if (lease->blocks[i] == KVBM_NO_BLOCK)
        return -ENOENT;
    *ret = (struct kvbm_block_at){
        .worker = lease->facts->worker, .set = lease->facts->id, .block = lease->blocks[i]};
    return 0;
}

uint64_t kvbm_lease_expires(struct kvbm_lease *lease)
{
    return lease ? atomic_load_explicit(&lease->expires_ns, memory_order_relaxed) : 0;
}

bool kvbm_lease_is_shared(const struct kvbm_lease *lease)
{
    return lease && lease->mapped;
}

uint64_t kvbm_session_shares(struct kvbm_session *session, uint32_t set)
{
    struct kvbm_agent *agent = kvbm_session_agent(session);
    struct kvbm_facts *facts = NULL;
    uint64_t n = 0;

    if (!kvbm_session_takes_fds(session) || kvbm_facts_of(session, set, &facts) < 0)
        return 0;
    pthread_mutex_lock(&agent->lock);
    if (shared_id(facts) && (facts->mapped || !facts->asked_memory))
        n = facts->layout->config.num_blocks;
    pthread_mutex_unlock(&agent->lock);
    kvbm_facts_put(facts);
    return n;
}

const struct kvbm_layout *kvbm_lease_layout(const struct kvbm_lease *lease)
{
    return lease->mapped ? lease->mapped->layout : NULL;
}

bool kvbm_lease_is_intact(const struct kvbm_lease *lease, size_t i)
{
    /* Pairs with the release fence of the owner, which changes the generation before anyone may
     * write into the block: a copy that has a new byte sees a new generation here. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&lease->mapped->table[lease->blocks[i]], memory_order_relaxed) ==
           lease->generations[i];
}

/* Set an end unless it is later already. */
static void set_later(_Atomic uint64_t *at_ns, uint64_t ns)
{
    uint64_t known = atomic_load_explicit(at_ns, memory_order_relaxed);

    while (known < ns && !atomic_compare_exchange_weak_explicit(
                             at_ns, &known, ns, memory_order_relaxed, memory_order_relaxed))
        ;
}

int kvbm_lease_renew(struct kvbm_lease *lease, uint32_t time_ms, uint64_t deadline_ns)
{
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_reply reply = {.fd = -1};
    uint64_t now = kv_now_ns(), id;
    uint32_t told_ms = 0;
    int err;

    if (!lease)
        return -EINVAL;
    kvbm_renewal_write(&body, lease->id, time_ms);
    err = body.error ? body.error
                     : kvbm_session_call(lease->session, KVBM_ASK_RENEW, body.data, body.len, -1,
                                         deadline_ns, &reply);
    kv_buf_fini(&body);
    if (err < 0)
        return err;
    err = reply.status < 0 ? reply.status : kvbm_renewal_read(reply.body, reply.len, &id, &told_ms);
    kvbm_reply_fini(&reply);
    if (err == 0)
        set_later(&lease->expires_ns, now + granted(told_ms, time_ms));
    return err;
}

void kvbm_lease_release(struct kvbm_lease *lease)
{
    if (!lease)
        return;
    tell_release(lease->session, lease->id);
    free_lease(lease);
}

/* ---- reading ---- */

bool kvbm_same_blocks(const struct kvbm_layout_config *a, const struct kvbm_layout_config *b)
{
    return a->num_layers == b->num_layers && a->outer_dim == b->outer_dim &&
           a->page_size == b->page_size && a->inner_dim == b->inner_dim &&
           a->dtype_width_bytes == b->dtype_width_bytes && a->order == b->order &&
           (!a->num_heads || !b->num_heads || a->num_heads == b->num_heads);
}

static bool is_memory(const struct kvbm_layout *layout)
{
    enum kvbm_storage_kind kind = layout->places[0].kind;

    return kvbm_layout_storage(layout, 0) &&
           (kind == KVBM_STORAGE_SYSTEM || kind == KVBM_STORAGE_PINNED);
}

/* Check what to read. Returns 0, -EINVAL, -ERANGE or -ENOMEM. */
static int check_pairs(const struct kvbm_reading *reading)
{
    const struct kvbm_lease *lease = reading->lease;

    if (!reading->to || !reading->to_blocks || !reading->n || !is_memory(reading->to) ||
        !kvbm_same_blocks(&reading->to->config, &lease->facts->layout->config))
        return -EINVAL;
    for (uint32_t i = 0; i < reading->n; i++) {
        if ((reading->places ? reading->places[i] : i) >= lease->n)
            return -ERANGE;
    }
    return kvbm_ids_check(reading->to_blocks, reading->n, reading->to->config.num_blocks,
                          KVBM_IDS_ONCE);
}

long kvbm_lease_read(struct kvbm_lease *lease, const struct kvbm_lease_read_opts *opts)
{
    struct kvbm_reading reading = {.lease = lease};
    uint64_t expires;
    int err;

    if (!lease || !kv_sized(opts, "kvbm_lease_read_opts"))
        return -EINVAL;
    expires = kvbm_lease_expires(lease);
    reading.places = KV_OPT(opts, keys, NULL);
    reading.to = KV_OPT(opts, to, NULL);
    reading.to_blocks = KV_OPT(opts, to_blocks, NULL);
    reading.n = KV_OPT(opts, n, 0);
    reading.deadline_ns = KV_OPT(opts, deadline_ns, expires);
    reading.ok = KV_OPT(opts, ok, NULL);
    reading.sums = !KV_OPT(opts, no_checksums, false);
    err = check_pairs(&reading);
    if (err < 0)
        return err;
    if (reading.ok)
        memset(reading.ok, 0, (reading.n + 7) / 8);
    if (kv_now_ns() >= expires)
        return 0;
    if (lease->mapped && !KV_OPT(opts, no_shared, false))
        return kvbm_read_shared(&reading);
    reading.without = (KV_OPT(opts, no_ucx, false) ? 1u << KVBM_BY_UCX : 0) |
                      (KV_OPT(opts, no_nixl, false) ? 1u << KVBM_BY_NIXL : 0);
    return kvbm_read_best(&reading);
}
