// SPDX-License-Identifier: Apache-2.0
/*
 * Lookups: which tier has each key. A lookup never waits for a store or a peer.
 *
 *   host ─► on its way ─► disk ─► object store, as far as known ─► peers, as far as known ─► unknown
 *   READY   PENDING       ON_DISK REMOTE                           ON_PEER                   PENDING, asked
 *
 * Keys that nobody has been asked for are asked for in the background: the next lookup knows more.
 * At most MAX_ASKED keys a call: a prompt of 10,000 blocks mustn't fill the executors with
 * questions.
 */
#include <errno.h>

#include "bm/registry/registry.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"
#include "tier/manager/where.h"

#define MAX_ASKED 256 /* keys asked for in one call */

/* Return the state of a key that this node's own tiers above the object store lack, as far as peers
 * are concerned. Sets @unknown when they weren't asked lately. */
static uint8_t at_peers(struct kvbm_manager *m, uint64_t hash, bool *unknown)
{
    uint64_t worker;

    switch (kvbm_peers_known(m->peers, hash, &worker)) {
    case KVBM_KNOWN_THERE:
        return KVBM_ON_PEER;
    case KVBM_KNOWN_ABSENT:
        return KVBM_MISS;
    case KVBM_KNOWN_NOT:
        *unknown = true;
        return KVBM_PENDING;
    default:
        return KVBM_PENDING;
    }
}

/* Return the state of a key (KVBM_READY ... KVBM_MISS). @tiers: bit per tier that has it. Sets
 * @unknown when the object store was never asked for the key. */
static uint8_t where(const struct kvbm_manager *m, uint64_t hash, uint8_t tiers, bool *unknown)
{
    enum kvbm_presence presence;

    if (tiers >> KV_TIER_HOST & 1)
        return KVBM_READY;
    if (kvbm_key_is_pending(m, hash))
        return KVBM_PENDING;
    if (tiers >> KV_TIER_DISK & 1)
        return KVBM_ON_DISK;
    if (tiers >> KV_TIER_EXTERNAL & 1)
        return KVBM_REMOTE;
    if (!m->object_store || m->stopping)
        return KVBM_MISS;
    presence = kvbm_presence_of(m, hash);
    *unknown = presence == KVBM_PRESENCE_UNKNOWN;
    return presence == KVBM_PRESENCE_ABSENT ? KVBM_MISS : KVBM_PENDING;
}

/* Ask for the unknown keys of [i, i + KVBM_LOOK) and for the keys between them, since keys come in
 * sequence. Returns the number of keys; 0 when the store can't be reached. */
static uint32_t ask_object(struct kvbm_look *look, size_t i)
{
    uint32_t first = (uint32_t)__builtin_ctzll(look->of_object);
    uint32_t end = KVBM_LOOK - (uint32_t)__builtin_clzll(look->of_object), some;
    const struct kvbm_chain *chain = look->chain;
    struct kvbm_manager *m = look->m;
    int rc = 0;

    for (uint32_t done = first; done < end; done += some) {
        uint64_t bits = look->of_object >> done;

        some = KV_MIN(end - done, (uint32_t)KVBM_BATCH);
        rc = kvbm_presence_ask(m, chain, i + done, some, (uint32_t)bits);
        for (uint32_t k = 0; k < some; k++) {
            const uint8_t *key = (const uint8_t *)chain->keys + (i + done + k) * m->key_len;

            /* The key can't be asked for now, or its query can't be noted: a miss, since
             * KVBM_PENDING would have no end. */
            if (bits >> k & 1 && !(look->asked_peers >> (done + k) & 1) &&
                kvbm_presence_of(m, kvbm_key_hash(m, chain->group, key)) != KVBM_PRESENCE_ASKED)
                look->at[done + k] = KVBM_MISS;
        }
    }
    return rc == -EHOSTDOWN ? 0 : end - first;
}

/* Ask peers for keys. Those that nobody can be asked for are misses, unless the object store is
 * asked for them. */
static uint32_t ask_peers(struct kvbm_look *look, size_t i)
{
    int rc = kvbm_peers_look(look->m, look->chain, i, look->of_peers);

    if (rc == 0)
        look->asked_peers |= look->of_peers;
    for (uint32_t k = 0; rc < 0 && k < KVBM_LOOK; k++) {
        if ((look->of_peers & ~(look->of_object | look->asked_object)) >> k & 1)
            look->at[k] = KVBM_MISS;
    }
    return rc < 0 ? 0 : (uint32_t)__builtin_popcountll(look->of_peers);
}

/* Leave out unknown keys behind a miss: a prompt can't use them. */
static void before_the_gap(struct kvbm_look *look, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++) {
        if ((look->of_object | look->of_peers) >> k & 1 && look->missed) {
            look->at[k] = KVBM_MISS;
            look->of_object &= ~(UINT64_C(1) << k);
            look->of_peers &= ~(UINT64_C(1) << k);
        }
        look->missed |= look->at[k] == KVBM_MISS;
    }
}

/* True for keys that no tier has, or that only the object store may have. */
static bool needs_peers(const struct kvbm_look *look, uint64_t hash, uint8_t at)
{
    return at == KVBM_MISS || (at == KVBM_PENDING && !kvbm_key_is_pending(look->m, hash));
}

/* Find the state of one key, whose bit is @k. */
static void look_at(struct kvbm_look *look, const uint8_t *key, uint32_t k)
{
    uint64_t hash = kvbm_key_hash(look->m, look->chain->group, key);
    bool unknown_there = false, unknown = false;
    uint8_t at = where(look->m, hash, look->at[k], &unknown), there;

    if (look->peers && needs_peers(look, hash, at)) {
        there = at_peers(look->m, hash, &unknown_there);
        look->asked_object |= (uint64_t)(at == KVBM_PENDING && !unknown) << k;
        look->asked_peers |= (uint64_t)(there == KVBM_PENDING && !unknown_there) << k;
        if (there == KVBM_ON_PEER || at == KVBM_MISS)
            at = there;
        unknown = unknown && there != KVBM_ON_PEER;
    }
    look->at[k] = at;
    look->of_object |= (uint64_t)unknown << k;
    look->of_peers |= (uint64_t)unknown_there << k;
}

void kvbm_look_at(struct kvbm_look *look, size_t i, uint32_t n)
{
    const struct kvbm_manager *m = look->m;
    const uint8_t *key = (const uint8_t *)look->chain->keys + i * m->key_len;

    look->of_object = look->of_peers = look->asked_object = look->asked_peers = 0;
    kvbm_registry_locate(m->registry, look->chain->group, key, n, look->at);
    for (uint32_t k = 0; k < n; k++)
        look_at(look, key + k * m->key_len, k);
    if (!look->past_gaps)
        before_the_gap(look, n);
    if (look->asked_for >= MAX_ASKED)
        return;
    if (look->of_peers)
        look->asked_for += ask_peers(look, i);
    if (look->of_object)
        look->asked_for += ask_object(look, i);
}

bool kvbm_look_is_valid(const struct kvbm_chain *chain, size_t n)
{
    return kv_sized(chain, "kvbm_chain") && chain->size >= offsetof(struct kvbm_chain, tokens) &&
           (!n || chain->keys) && chain->group < KVBM_MAX_GROUPS &&
           !chain->parent == !chain->position && (!kvbm_chain_scattered(chain) || !chain->parent);
}

void kvbm_look_begin(struct kvbm_look *look, struct kvbm_manager *m, bool own)
{
    *look =
        (struct kvbm_look){.m = m,
                           .peers = !own && m->peers && !m->stopping && kvbm_peers_any(m->peers),
                           /* a peer's: what it finds would be of no known place */
                           .asked_for = own ? MAX_ASKED : 0};
}

void kvbm_look_in(struct kvbm_look *look, const struct kvbm_chain *chain, bool past_gaps)
{
    look->chain = chain;
    look->past_gaps = past_gaps;
    look->missed = false;
}

static long lookup(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, uint8_t *ret,
                   bool own)
{
    struct kvbm_look look;
    long prefix = 0, rc = kvbm_manager_usable(m);
    uint32_t some;

    if (rc < 0)
        return rc;
    if (!kvbm_look_is_valid(chain, n))
        return -EINVAL;
    kvbm_registry_tell(m->registry, chain, n, m->block_tokens);
    /* one hold of the lock for all keys: they are of one moment */
    kvbm_manager_enter(m);
    kvbm_look_begin(&look, m, own);
    kvbm_look_in(&look, chain, kvbm_chain_scattered(chain));
    for (size_t i = 0; i < n; i += some) {
        some = (uint32_t)KV_MIN(n - i, (size_t)KVBM_LOOK);
        kvbm_look_at(&look, i, some);
        for (uint32_t k = 0; k < some && prefix == (long)(i + k); k++)
            prefix += look.at[k] != KVBM_MISS;
        if (ret)
            memcpy(ret + i, look.at, some);
    }
    kvbm_manager_leave(m);
    return prefix;
}

long kvbm_manager_lookup(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                         uint8_t *ret)
{
    return lookup(m, chain, n, ret, false);
}

long kvbm_lookup_own(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, uint8_t *ret)
{
    return lookup(m, chain, n, ret, true);
}

/* Touch all registered keys, also behind a gap: a tier may have lost the first of a sequence
 * only. */
static long touch(const struct kvbm_manager *m, struct kvbm_pool *pool, uint32_t group,
                  const uint8_t *keys, size_t n)
{
    long prefix = kvbm_pool_touch(pool, group, keys, n);

    for (size_t i = (size_t)prefix + 1; prefix >= 0 && i < n; i++)
        i += (size_t)kvbm_pool_touch(pool, group, keys + i * m->key_len, n - i);
    return prefix;
}

long kvbm_manager_touch(struct kvbm_manager *m, uint32_t group, const void *keys, size_t n)
{
    struct kvbm_pool *const pools[] = {m ? m->host : NULL, m ? m->disk : NULL,
                                       m ? m->object : NULL};
    long longest = kvbm_manager_usable(m);

    for (size_t i = 0; longest >= 0 && i < KV_COUNT(pools); i++) {
        long found = pools[i] ? touch(m, pools[i], group, keys, n) : 0;

        longest = found < 0 ? found : KV_MAX(longest, found);
    }
    return longest;
}
