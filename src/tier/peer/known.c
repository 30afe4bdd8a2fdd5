// SPDX-License-Identifier: Apache-2.0
/* Guesses about keys at peers: a set-associative table, each entry with an end. */
#include <errno.h>

#include "base/core/xxh.h"
#include "peer/lease/lease_wire.h"
#include "tier/peer/impl.h"

uint64_t kvbm_peer_hash(const void *key, uint32_t key_len, uint32_t group)
{
    return kv_xxh64(key, key_len, group + 1);
}

static struct kvbm_knowledge *find(struct kvbm_peers *peers, uint64_t hash)
{
    struct kvbm_knowledge *set = peers->known[hash % KVBM_KNOWN_SETS];

    for (uint32_t i = 0; i < KVBM_KNOWN_WAYS; i++) {
        if (set[i].hash == hash && set[i].until_ns)
            return &set[i];
    }
    return NULL;
}

/* Choose an entry to be written: an empty one, else the one that ends first. */
static struct kvbm_knowledge *choose(struct kvbm_peers *peers, uint64_t hash)
{
    struct kvbm_knowledge *set = peers->known[hash % KVBM_KNOWN_SETS], *first = &set[0];

    for (uint32_t i = 1; i < KVBM_KNOWN_WAYS; i++) {
        if (set[i].until_ns < first->until_ns)
            first = &set[i];
    }
    return first;
}

void kvbm_known_set(struct kvbm_peers *peers, uint64_t hash, enum kvbm_known what, uint64_t worker,
                    uint64_t until_ns)
{
    struct kvbm_knowledge *entry = find(peers, hash);

    if (!entry && !until_ns) /* nothing to forget */
        return;
    if (!entry)
        entry = choose(peers, hash);
    *entry = (struct kvbm_knowledge){
        .hash = hash, .worker = worker, .until_ns = until_ns, .what = (uint8_t)what};
}

void kvbm_known_unask(struct kvbm_peers *peers, uint64_t hash, uint64_t until_ns)
{
    struct kvbm_knowledge *entry = find(peers, hash);

    if (entry && entry->what == KVBM_KNOWN_ASKED && entry->until_ns <= until_ns)
        entry->until_ns = 0;
}

/* Tell whether there is a session with a peer, and its set. */
static bool still_lends(struct kvbm_peers *peers, uint64_t worker)
{
    struct kvbm_session *session = kvbm_session_find(peers->opts.agent, worker);
    bool lends = session && kvbm_peers_fit(peers, session);

    kvbm_session_put(session);
    return lends;
}

enum kvbm_known kvbm_peers_known(struct kvbm_peers *peers, uint64_t hash, uint64_t *worker)
{
    enum kvbm_known what = KVBM_KNOWN_NOT;
    const struct kvbm_knowledge *entry;

    pthread_mutex_lock(&peers->lock);
    entry = find(peers, hash);
    if (entry && entry->until_ns > kv_now_ns()) {
        what = (enum kvbm_known)entry->what;
        *worker = entry->worker;
    }
    pthread_mutex_unlock(&peers->lock);
    return what == KVBM_KNOWN_THERE && !still_lends(peers, *worker) ? KVBM_KNOWN_NOT : what;
}

/* Take a peer's note of keys that it has no longer. */
void kvbm_known_gone(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    uint64_t worker = kvbm_session_peer(session)->worker;
    struct kvbm_peers *peers = arg;
    struct kvbm_knowledge *entry;
    struct kvbm_asked gone;

    if (request->id)
        (void)kvbm_session_reply(session, request->id, -EOPNOTSUPP, NULL, 0, -1);
    if (kvbm_asked_read(request->body, request->len, peers->opts.key_len, &gone) < 0 ||
        gone.set != peers->opts.set)
        return;
    pthread_mutex_lock(&peers->lock);
    for (uint32_t i = 0; i < gone.n; i++) {
        const uint8_t *key = gone.keys + (size_t)i * peers->opts.key_len;

        entry = find(peers, kvbm_peer_hash(key, peers->opts.key_len, gone.group));
        if (entry && entry->what == KVBM_KNOWN_THERE && entry->worker == worker)
            entry->until_ns = 0;
    }
    peers->stats.gone += gone.n;
    pthread_mutex_unlock(&peers->lock);
}

void kvbm_peers_forget(struct kvbm_peers *peers, uint64_t hash)
{
    struct kvbm_knowledge *entry;

    pthread_mutex_lock(&peers->lock);
    entry = find(peers, hash);
    if (entry && entry->what != KVBM_KNOWN_ASKED)
        entry->until_ns = 0;
    pthread_mutex_unlock(&peers->lock);
}
