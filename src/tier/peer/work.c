// SPDX-License-Identifier: Apache-2.0
/* Batches of the peer tier, on its threads: questions to several peers at once, blocks of one. */
#include <errno.h>

#include "tier/peer/impl.h"

#define THERE_NS (5 * KV_NS_PER_S) /* time for which an answer is believed */
#define ABSENT_NS KV_NS_PER_S
#define UNSURE_NS (50 * KV_NS_PER_MS)    /* nobody was there to be asked, or didn't answer */
#define PATIENCE_NS (100 * KV_NS_PER_MS) /* a call given up earlier says nothing of the peer */
#define MAX_LEASE_MS 60000

/* Name the session in which a thread is about to wait. Takes over a reference. */
static void enter_session(struct kvbm_peers *peers, struct kvbm_peer_slot *slot,
                          struct kvbm_session *session)
{
    struct kvbm_session *old;

    pthread_mutex_lock(&peers->lock);
    old = slot->session;
    slot->session = session;
    pthread_mutex_unlock(&peers->lock);
    kvbm_session_put(old);
}

/* True for errors that aren't the peer's: the session or its set has ended, this process lacks
 * something, or nobody wants the answer. */
static bool says_nothing(int err)
{
    static const int ours[] = {EPIPE,  ESTALE,    EAGAIN,    ENOMEM, EMFILE,
                               ENFILE, ECANCELED, ESHUTDOWN, EDEADLK};

    for (size_t i = 0; i < KV_COUNT(ours); i++) {
        if (err == -ours[i])
            return true;
    }
    return false;
}

static void tell_gate(struct kvbm_peers *peers, uint64_t worker, int err, uint64_t begun_ns)
{
    bool answers = err == 0 || err == -ENOENT || err == -ENOSPC;
    bool hard = err == -ETIMEDOUT && kv_now_ns() - begun_ns >= PATIENCE_NS;

    pthread_mutex_lock(&peers->lock);
    if (says_nothing(err))
        kvbm_gate_release(peers, worker);
    else
        kvbm_gate_tell(peers, worker, answers, hard);
    pthread_mutex_unlock(&peers->lock);
}

static void end_all(struct kvbm_peer_batch *batch, uint32_t from, int status)
{
    for (uint32_t i = from; i < batch->n; i++)
        batch->ios[i].status = status;
}

static void pack(const struct kvbm_peers *peers, const struct kvbm_peer_batch *batch, uint8_t *keys)
{
    for (uint32_t i = 0; i < batch->n; i++)
        memcpy(keys + (size_t)i * peers->opts.key_len, batch->ios[i].key, peers->opts.key_len);
}

/* ---- ASK ---- */

/* A question to one peer. The session is a reference. */
struct question {
    struct kvbm_session *session;
    struct kvbm_call *call; /* NULL: it couldn't be asked */
    uint64_t begun_ns;
    int err;
    uint8_t tiers[KVBM_PEER_ASKED];
};

/* Put the session with @worker first, if there is one. */
static void prefer(struct kvbm_session **sessions, size_t n, uint64_t worker)
{
    for (size_t i = 1; i < n && worker; i++) {
        struct kvbm_session *session = sessions[i];

        if (kvbm_session_peer(session)->worker != worker)
            continue;
        memmove(sessions + 1, sessions, i * sizeof(struct kvbm_session *));
        sessions[0] = session;
        return;
    }
}

/* Tell whether a peer may be asked: its blocks fit, and its breaker is closed. */
static bool may_ask(struct kvbm_peers *peers, struct kvbm_session *session)
{
    bool passes;

    if (!kvbm_peers_fit(peers, session))
        return false;
    pthread_mutex_lock(&peers->lock);
    passes = kvbm_gate_passes(peers, kvbm_session_peer(session)->worker, kv_now_ns());
    pthread_mutex_unlock(&peers->lock);
    return passes;
}

/* Choose whom to ask, of all sessions. Returns their number. */
static uint32_t choose(struct kvbm_peers *peers, uint64_t first, struct question *questions)
{
    struct kvbm_session *sessions[1024];
    size_t n = kvbm_sessions_list(peers->opts.agent, sessions, KV_COUNT(sessions)), at;
    uint32_t chosen = 0;

    prefer(sessions, n, first);
    pthread_mutex_lock(&peers->lock);
    at = n > peers->opts.max_asked ? peers->turn++ % n : 0;
    pthread_mutex_unlock(&peers->lock);
    for (size_t i = 0; i < n; i++) {
        struct kvbm_session *session = sessions[i && at ? 1 + (i - 1 + at) % (n - 1) : i];

        if (chosen < peers->opts.max_asked && may_ask(peers, session))
            questions[chosen++] = (struct question){.session = session};
        else
            kvbm_session_put(session);
    }
    return chosen;
}

/* Choose whom to ask, of the peers that the indexer names. Returns their number. */
static uint32_t choose_named(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch,
                             const uint8_t *keys, struct question *questions)
{
    struct kvbm_session *named[KVBM_MAX_NAMED];
    uint32_t n = kvbm_peers_named(peers, batch, keys, named), chosen = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (may_ask(peers, named[i]))
            questions[chosen++] = (struct question){.session = named[i]};
        else
            kvbm_session_put(named[i]);
    }
    return chosen;
}

static void ask(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch, const uint8_t *keys,
                struct question *q)
{
    q->begun_ns = kv_now_ns();
    q->err = kvbm_lookup_start(q->session, peers->opts.set, batch->group, keys, batch->n, &q->call);
}

static void hear(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch, uint64_t until_ns,
                 struct question *q)
{
    if (q->err == 0)
        q->err = kvbm_lookup_wait(KV_STEAL(q->call), batch->n, until_ns, q->tiers);
    tell_gate(peers, kvbm_session_peer(q->session)->worker, q->err, q->begun_ns);
    if (q->err < 0)
        memset(q->tiers, KVBM_NO_TIER, sizeof(q->tiers));
}

/* Take the best answer for a key: the nearest tier of those before @end, of equal ones the first
 * peer's. */
static void decide(const struct question *questions, uint32_t n, uint8_t end, bool sure, uint32_t i,
                   struct kvbm_peer_io *io)
{
    uint8_t best = end;

    io->status = sure ? -ENOENT : -ETIMEDOUT;
    for (uint32_t k = 0; k < n; k++) {
        if (questions[k].tiers[i] >= best)
            continue;
        best = questions[k].tiers[i];
        io->worker = kvbm_session_peer(questions[k].session)->worker;
        io->status = 0;
    }
}

/* Remember the answers. @sure: those who were asked have answered. */
static void learn(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch, bool sure)
{
    uint64_t now = kv_now_ns();

    pthread_mutex_lock(&peers->lock);
    peers->stats.asked += batch->n;
    for (uint32_t i = 0; i < batch->n; i++) {
        const struct kvbm_peer_io *io = &batch->ios[i];

        peers->stats.found += io->status == 0;
        if (io->status == 0)
            kvbm_known_set(peers, io->hash, KVBM_KNOWN_THERE, io->worker, now + THERE_NS);
        else
            kvbm_known_set(peers, io->hash, KVBM_KNOWN_ABSENT, 0,
                           now + (sure ? ABSENT_NS : UNSURE_NS));
    }
    pthread_mutex_unlock(&peers->lock);
}

/* Ask the chosen peers, and drop their sessions. Returns how many keys one of them has. */
static uint32_t ask_all(struct kvbm_peers *peers, struct kvbm_peer_batch *batch,
                        const uint8_t *keys, struct question *questions, uint32_t n, bool *sure)
{
    uint64_t until = KV_MIN(batch->until_, kv_now_ns() + peers->opts.ask_ms * KV_NS_PER_MS);
    uint8_t end = peers->opts.has_object_store ? KV_TIER_EXTERNAL : KVBM_NO_TIER;
    uint32_t found = 0;

    for (uint32_t k = 0; k < n; k++)
        ask(peers, batch, keys, &questions[k]);
    for (uint32_t k = 0; k < n; k++) {
        hear(peers, batch, until, &questions[k]);
        *sure = *sure && questions[k].err != -ETIMEDOUT;
    }
    for (uint32_t i = 0; i < batch->n; i++) {
        decide(questions, n, end, *sure, i, &batch->ios[i]);
        found += batch->ios[i].status == 0;
    }
    for (uint32_t k = 0; k < n; k++)
        kvbm_session_put(questions[k].session);
    return found;
}

static void run_ask(struct kvbm_peers *peers, struct kvbm_peer_batch *batch)
{
    struct question questions[KVBM_MAX_ASKED_PEERS] = {0};
    uint8_t keys[KVBM_PEER_ASKED * 64];
    uint32_t n, found = 0;
    bool sure = true;

    pack(peers, batch, keys);
    n = choose_named(peers, batch, keys, questions);
    if (n)
        found = ask_all(peers, batch, keys, questions, n, &sure);
    if (found) {
        pthread_mutex_lock(&peers->lock);
        peers->stats.named += found;
        pthread_mutex_unlock(&peers->lock);
    } else {
        n = choose(peers, batch->worker, questions);
        ask_all(peers, batch, keys, questions, n, &sure);
    }
    learn(peers, batch, n && sure);
}

/* ---- GET ---- */

static uint32_t lease_ms(uint64_t until_ns)
{
    int64_t left = kv_ms_until(until_ns, kv_now_ns());

    return (uint32_t)KV_MIN(KV_MAX(2 * left, (int64_t)1000), (int64_t)MAX_LEASE_MS);
}

/* Say why a leased block didn't arrive. */
static int why_not(const struct kvbm_lease *lease, const struct kvbm_session *session, uint32_t i,
                   uint64_t until_ns)
{
    struct kvbm_block_at at;

    if (kvbm_lease_block(lease, i, &at) < 0)
        return -ENOENT;
    if (!kvbm_lease_is_shared(lease) && !kvbm_session_is_open(session))
        return -EPIPE;
    if (kv_now_ns() >= until_ns)
        return -ETIMEDOUT;
    return kvbm_lease_is_shared(lease) ? -ENOENT : -EBADMSG; /* given away meanwhile; or altered */
}

/* Copy the blocks of a lease, which covers keys from @first on. Returns the number of those keys. */
static uint32_t read_leased(struct kvbm_lease *lease, const struct kvbm_session *session,
                            struct kvbm_peer_batch *batch, uint32_t first)
{
    uint32_t n = (uint32_t)KV_MIN(kvbm_lease_count(lease), (size_t)(batch->n - first));
    uint32_t blocks[KVBM_PEER_BATCH];
    uint8_t ok[KVBM_PEER_BATCH / 8] = {0};
    const struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                              .to = batch->to,
                                              .to_blocks = blocks,
                                              .n = n,
                                              .deadline_ns = batch->until_,
                                              .ok = ok};
    long rc;

    for (uint32_t i = 0; i < n; i++)
        blocks[i] = batch->ios[first + i].block;
    rc = kvbm_lease_read(lease, &opts);
    for (uint32_t i = 0; i < n; i++)
        batch->ios[first + i].status = rc < 0 ? (int)rc
                                       : ok[i / 8] >> i % 8 & 1
                                           ? 0
                                           : why_not(lease, session, i, batch->until_);
    return n;
}

/* Lease keys from @first on and copy their blocks. Returns how many are done, or an error. */
static long get_some(struct kvbm_peers *peers, struct kvbm_session *session,
                     struct kvbm_peer_batch *batch, const uint8_t *keys, uint32_t first)
{
    struct kvbm_lease *lease = NULL;
    int err = kvbm_session_lease(session, peers->opts.set, batch->group,
                                 keys + (size_t)first * peers->opts.key_len, batch->n - first,
                                 lease_ms(batch->until_), batch->until_, &lease);
    uint32_t n;

    if (err < 0)
        return err;
    n = read_leased(lease, session, batch, first);
    kvbm_lease_release(lease);
    return n;
}

static bool is_cancelled(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch)
{
    bool cancelled;

    pthread_mutex_lock(&peers->lock);
    cancelled = batch->cancelled_ || peers->ending;
    pthread_mutex_unlock(&peers->lock);
    return cancelled;
}

/* Get all blocks of a batch from a session; several leases when the peer lends few at a time. */
static int get_from(struct kvbm_peers *peers, struct kvbm_session *session,
                    struct kvbm_peer_batch *batch)
{
    uint8_t keys[KVBM_PEER_BATCH * 64];
    uint32_t first = 0;
    long n = 0;

    pack(peers, batch, keys);
    while (first < batch->n && !is_cancelled(peers, batch)) {
        n = get_some(peers, session, batch, keys, first);
        if (n <= 0)
            break;
        first += (uint32_t)n;
    }
    end_all(batch, first, n == -ENOSPC ? -EAGAIN : n < 0 ? (int)n : -ECANCELED);
    for (uint32_t i = 0; i < batch->n && n >= 0; i++)
        n = batch->ios[i].status == -ETIMEDOUT ? -ETIMEDOUT : n;
    return n < 0 ? (int)n : 0;
}

/* Lease all blocks of a batch. The lease is given back where the caller couldn't use it, or where it
 * might take the last block that the peer lends: a GET of the same keys then needs it. */
static int lease_all(struct kvbm_peers *peers, struct kvbm_session *session,
                     struct kvbm_peer_batch *batch)
{
    uint8_t keys[KVBM_PEER_BATCH * 64];
    struct kvbm_lease *lease = NULL;
    struct kvbm_block_at at;
    int err;

    pack(peers, batch, keys);
    err = kvbm_session_lease(session, peers->opts.set, batch->group, keys, batch->n, 0,
                             batch->until_, &lease);
    if (err == 0 && (kvbm_lease_count(lease) < batch->n || !kvbm_lease_is_shared(lease))) {
        kvbm_lease_release(lease);
        err = -EAGAIN;
    }
    end_all(batch, 0, err == -ENOSPC ? -EAGAIN : err);
    for (uint32_t i = 0; i < batch->n && err == 0; i++)
        batch->ios[i].status = kvbm_lease_block(lease, i, &at);
    if (err == 0)
        batch->lease = lease;
    return err;
}

/* Count what came, and believe no longer what turned out wrong. */
static void count(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(peers->opts.like);
    uint64_t block = c->num_layers;

    block = block * c->outer_dim * c->page_size * c->inner_dim * c->dtype_width_bytes;
    pthread_mutex_lock(&peers->lock);
    for (uint32_t i = 0; i < batch->n; i++) {
        int status = batch->ios[i].status;
        bool refused = batch->op == KVBM_PEER_LEASE && status == -EAGAIN;
        bool got = batch->op == KVBM_PEER_GET && status == 0;

        peers->stats.got += got;
        peers->stats.bytes += got ? block : 0;
        peers->stats.failed += status != 0 && status != -ENOENT && status != -ECANCELED && !refused;
        peers->stats.late += status == -ETIMEDOUT;
        if (status != 0 && status != -ECANCELED && !refused)
            kvbm_known_set(peers, batch->ios[i].hash, KVBM_KNOWN_NOT, 0, 0);
    }
    pthread_mutex_unlock(&peers->lock);
}

/* Run a GET or a LEASE. */
static void run_get(struct kvbm_peers *peers, struct kvbm_peer_slot *slot,
                    struct kvbm_peer_batch *batch)
{
    struct kvbm_session *session = kvbm_session_find(peers->opts.agent, batch->worker);
    uint64_t begun = kv_now_ns();
    bool passes;

    pthread_mutex_lock(&peers->lock);
    passes = session && kvbm_gate_passes(peers, batch->worker, begun);
    pthread_mutex_unlock(&peers->lock);
    if (!passes) {
        kvbm_session_put(session);
        end_all(batch, 0, -EHOSTDOWN);
    } else {
        enter_session(peers, slot, session);
        tell_gate(peers, batch->worker,
                  batch->op == KVBM_PEER_LEASE ? lease_all(peers, session, batch)
                                               : get_from(peers, session, batch),
                  begun);
        enter_session(peers, slot, NULL);
    }
    count(peers, batch);
}

void kvbm_peers_run(struct kvbm_peers *peers, struct kvbm_peer_slot *slot,
                    struct kvbm_peer_batch *batch)
{
    if (kv_now_ns() >= batch->until_)
        end_all(batch, 0, -ETIMEDOUT);
    else if (batch->group >= KVBM_MAX_GROUPS) /* no peer has it: the mistake is this process's */
        end_all(batch, 0, -EINVAL);
    else if (batch->op == KVBM_PEER_ASK)
        run_ask(peers, batch);
    else
        run_get(peers, slot, batch);
}
