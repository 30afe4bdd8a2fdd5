// SPDX-License-Identifier: Apache-2.0
/* Where keys are. */
#include <errno.h>

#include "tier/manager.h"

#define LOOK 64
#define MAX_ASKED 256 /* keys of one call */

static uint8_t where(const struct kvbm_manager *m, uint64_t hash, uint8_t tiers)
{
    if (tiers >> KV_TIER_HOST & 1)
        return KVBM_READY;
    if (kvbm_set_has(&m->pending, hash))
        return KVBM_PENDING;
    if (tiers >> KV_TIER_DISK & 1)
        return KVBM_ON_DISK;
    if (tiers >> KV_TIER_EXTERNAL & 1)
        return KVBM_REMOTE;
    return kvbm_set_has(&m->asked, hash) ? KVBM_PENDING : KVBM_MISS;
}

static bool to_be_asked(const struct kvbm_manager *m, uint64_t hash, uint8_t at)
{
    return m->object_store && at == KVBM_MISS && !kvbm_object_known_absent(m, hash);
}

/* What isn't known of [i, i + n) is asked for: all from the first such on, since they come as a sequence. */
static uint32_t ask_unknown(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                            uint8_t *at, uint32_t n)
{
    const uint8_t *keys = chain->keys;
    uint32_t first = 0, last, some;

    while (
        first < n &&
        !to_be_asked(m, kvbm_key_hash(m, chain->group, keys + (i + first) * m->key_len), at[first]))
        first++;
    for (last = first; last < n; last += some) {
        some = KV_MIN(n - last, (uint32_t)KVBM_BATCH);
        if (!kvbm_object_ask(m, chain, i + last, some))
            break;
        for (uint32_t k = last; k < last + some; k++)
            at[k] = at[k] == KVBM_MISS ? KVBM_PENDING : at[k];
    }
    return last - first;
}

long kvbm_manager_lookup(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                         uint8_t *ret)
{
    const uint8_t *keys = chain ? chain->keys : NULL;
    uint32_t asked_for = 0, some;
    long prefix = 0, rc = kvbm_manager_usable(m);
    uint8_t at[LOOK];

    if (rc < 0)
        return rc;
    if (!chain || chain->size < offsetof(struct kvbm_chain, tokens) || (n && !keys) ||
        chain->group >= KVBM_MAX_GROUPS || !chain->parent != !chain->position)
        return -EINVAL;
    kvbm_manager_enter(m);
    for (size_t i = 0; i < n; i += some) {
        const uint8_t *key = keys + i * m->key_len;

        some = (uint32_t)KV_MIN(n - i, (size_t)LOOK);
        kvbm_registry_locate(m->registry, chain->group, key, some, at);
        for (uint32_t k = 0; k < some; k++)
            at[k] = where(m, kvbm_key_hash(m, chain->group, key + k * m->key_len), at[k]);
        if (asked_for < MAX_ASKED && m->object_store && !m->stopping)
            asked_for += ask_unknown(m, chain, i, at, some);
        for (uint32_t k = 0; k < some && prefix == (long)(i + k); k++)
            prefix += at[k] != KVBM_MISS;
        if (ret)
            memcpy(ret + i, at, some);
    }
    kvbm_manager_leave(m);
    return prefix;
}

/* Those behind a gap, too: a tier may have lost the first of a sequence and have the rest. */
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
