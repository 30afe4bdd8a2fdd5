// SPDX-License-Identifier: Apache-2.0
/* List the keys that a pool has, for tools. */
#include "bm/pool/pool.h"

#define LOOKED_AT 16384 /* slots examined in one lock period */

/* The key of slot @i, when a caller of kvbm_pool_keys wants it; else NULL. */
static const uint8_t *wanted_key(const struct kvbm_pool *pool, uint32_t i, uint32_t group,
                                 uint32_t except)
{
    const struct kvbm_slot *slot = &pool->slots[i];
    const struct kvbm_entry *entry;

    if (slot->state != KVBM_REGISTERED || (slot->flags & SLOT_DUPLICATE) || !slot->entry)
        return NULL;
    entry = kvbm_slot_entry(pool, slot);
    return entry->group == group && !(entry->tiers & except) ? entry->key : NULL;
}

size_t kvbm_pool_keys(struct kvbm_pool *pool, uint32_t group, uint32_t except, uint32_t *at,
                      void *ret, size_t max)
{
    uint32_t len = pool->registry->key_len;
    size_t n = 0;

    while (n < max && *at < pool->n_blocks) {
        uint32_t end = (uint32_t)KV_MIN((uint64_t)*at + LOOKED_AT, (uint64_t)pool->n_blocks);

        kvbm_lock(pool->registry);
        for (; *at < end && n < max; ++*at) {
            const uint8_t *key = wanted_key(pool, *at + 1, group, except);

            if (key)
                memcpy((uint8_t *)ret + n++ * len, key, len);
        }
        kvbm_unlock(pool->registry);
    }
    return n;
}
