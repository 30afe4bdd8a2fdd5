// SPDX-License-Identifier: Apache-2.0
/* Guesses about keys at peers: a set-associative table, each entry with an end. */
#include "tier/peer/impl.h"

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

    if (!entry)
        entry = choose(peers, hash);
    *entry = (struct kvbm_knowledge){
        .hash = hash, .worker = worker, .until_ns = until_ns, .what = (uint8_t)what};
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
    return what;
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
