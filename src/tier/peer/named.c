// SPDX-License-Identifier: Apache-2.0
/* Peers that a kv-indexer names as holders of keys. */
#include "tier/peer/impl.h"

#define MAX_HOLDINGS 256u

/* Return when to give the indexer up: most of the batch's time is for the peers. */
static uint64_t patience(const struct kvbm_peer_batch *batch)
{
    uint64_t now = kv_now_ns();

    return batch->until_ > now ? now + (batch->until_ - now) / 4 : now;
}

uint32_t kvbm_peers_named(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch,
                          const uint8_t *keys, struct kvbm_session *ret[KVBM_MAX_NAMED])
{
    struct kvbm_holding holdings[MAX_HOLDINGS];
    uint32_t n = 0;
    long found;

    if (!peers->indexer || batch->group || batch->worker) /* a hint has named one */
        return 0;
    found = kvbm_indexer_ask(peers->indexer, keys, peers->opts.key_len, batch->n, patience(batch),
                             holdings, MAX_HOLDINGS);
    for (long i = 0; i < found && n < KVBM_MAX_NAMED; i++) {
        struct kvbm_session *session = kvbm_session_find(peers->opts.agent, holdings[i].worker);

        if (session)
            ret[n++] = session;
    }
    return n;
}
