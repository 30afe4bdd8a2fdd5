// SPDX-License-Identifier: Apache-2.0
/* Lookups: which tier has each key. */
#include <errno.h>

#include "tier/manager/manager.h"

#define LOOK 64
#define MAX_ASKED 256 /* keys asked for in one call */

/* Return the state of a key (KVBM_READY ... KVBM_MISS). @tiers: bit per tier that has it. Sets
 * @unknown when the object store was never asked for the key. */
static uint8_t where(const struct kvbm_manager *m, uint64_t hash, uint8_t tiers, bool *unknown)
{
    enum kvbm_presence presence;

    *unknown = false;
    if (tiers >> KV_TIER_HOST & 1)
        return KVBM_READY;
    if (kvbm_set_has(&m->pins.pending, hash))
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

/* Ask for the unknown keys of [i, i + LOOK) and for the keys between them, since keys come in
 * sequence. Returns the number of keys; 0 when the store can't be reached. */
static uint32_t ask_unknown(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                            uint8_t *at, uint64_t unknown)
{
    uint32_t first = (uint32_t)__builtin_ctzll(unknown);
    uint32_t end = LOOK - (uint32_t)__builtin_clzll(unknown), some;
    int rc = 0;

    for (uint32_t done = first; done < end; done += some) {
        uint64_t bits = unknown >> done;

        some = KV_MIN(end - done, (uint32_t)KVBM_BATCH);
        rc = kvbm_presence_ask(m, chain, i + done, some, (uint32_t)bits);
        for (uint32_t k = 0; k < some; k++) {
            const uint8_t *key = (const uint8_t *)chain->keys + (i + done + k) * m->key_len;

            /* The key can't be asked for now, or its query can't be noted: a miss, since
             * KVBM_PENDING would have no end. */
            if (bits >> k & 1 &&
                kvbm_presence_of(m, kvbm_key_hash(m, chain->group, key)) != KVBM_PRESENCE_ASKED)
                at[done + k] = KVBM_MISS;
        }
    }
    return rc == -EHOSTDOWN ? 0 : end - first;
}

/* Leave out unknown keys behind a miss: a prompt can't use them. */
static uint64_t before_the_gap(uint8_t at[LOOK], uint32_t n, uint64_t unknown, bool *missed)
{
    for (uint32_t k = 0; k < n; k++) {
        if (unknown >> k & 1 && *missed) {
            at[k] = KVBM_MISS;
            unknown &= ~(UINT64_C(1) << k);
        }
        *missed |= at[k] == KVBM_MISS;
    }
    return unknown;
}

long kvbm_manager_lookup(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                         uint8_t *ret)
{
    bool missed = false, scattered;
    uint32_t asked_for = 0, some;
    long prefix = 0, rc = kvbm_manager_usable(m);
    uint8_t at[LOOK];

    if (rc < 0)
        return rc;
    if (!kv_sized(chain, "kvbm_chain") || chain->size < offsetof(struct kvbm_chain, tokens) ||
        (n && !chain->keys) || chain->group >= KVBM_MAX_GROUPS ||
        !chain->parent != !chain->position || (kvbm_chain_scattered(chain) && chain->parent))
        return -EINVAL;
    scattered = kvbm_chain_scattered(chain);
    kvbm_manager_enter(m);
    for (size_t i = 0; i < n; i += some) {
        const uint8_t *key = (const uint8_t *)chain->keys + i * m->key_len;
        uint64_t unknown = 0;

        some = (uint32_t)KV_MIN(n - i, (size_t)LOOK);
        kvbm_registry_locate(m->registry, chain->group, key, some, at);
        for (uint32_t k = 0; k < some; k++) {
            bool one;

            at[k] = where(m, kvbm_key_hash(m, chain->group, key + k * m->key_len), at[k], &one);
            unknown |= (uint64_t)one << k;
        }
        if (!scattered)
            unknown = before_the_gap(at, some, unknown, &missed);
        if (unknown && asked_for < MAX_ASKED)
            asked_for += ask_unknown(m, chain, i, at, unknown);
        for (uint32_t k = 0; k < some && prefix == (long)(i + k); k++)
            prefix += at[k] != KVBM_MISS;
        if (ret)
            memcpy(ret + i, at, some);
    }
    kvbm_manager_leave(m);
    return prefix;
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
