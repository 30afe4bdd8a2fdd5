// SPDX-License-Identifier: Apache-2.0
/* List the blocks that a pool will evict next, so that write-back can copy them first. Eviction
 * never waits for write-back. */
#include <errno.h>

#include "base/core/error.h"
#include "bm/pool/moves.h"
#include "bm/pool/pool.h"

struct leaving {
    struct kvbm_weak *ret;
    size_t n, max;
};

void kvbm_pool_watch(struct kvbm_pool *pool, uint8_t tiers)
{
    kvbm_lock(pool->registry);
    pool->watched = tiers;
    kvbm_unlock(pool->registry);
}

static bool tell(struct kvbm_pool *pool, uint32_t i, void *arg)
{
    struct leaving *leaving = arg;
    struct kvbm_slot *slot = &pool->slots[i];

    if (slot->flags & SLOT_LEAVING || kvbm_slot_entry(pool, slot)->tiers & pool->watched)
        return true;
    if (leaving->n == leaving->max)
        return false;
    slot->flags |= SLOT_LEAVING;
    leaving->ret[leaving->n++].handle = (struct kvbm_handle){pool, i - 1, slot->life};
    return true;
}

size_t kvbm_pool_leaving(struct kvbm_pool *pool, size_t n, uint64_t *since, struct kvbm_weak *ret,
                         size_t max)
{
    struct leaving leaving = {.ret = ret, .max = max};
    uint64_t now;

    kvbm_lock(pool->registry);
    now = pool->stats.allocations;
    if (pool->n_free < n && (!*since || now - *since >= n / 4)) {
        *since = now;
        kvbm_evict_walk(pool, n - pool->n_free, tell, &leaving);
        if (leaving.n == max)
            *since = 0; /* there may be more */
    }
    kvbm_unlock(pool->registry);
    return leaving.n;
}

void kvbm_pool_release_oldest(struct kvbm_immutable *block, bool again)
{
    struct kvbm_pool *pool = block->handle.pool;
    uint8_t level;
    int64_t i;

    if (!pool)
        return;
    kvbm_lock(pool->registry);
    i = kvbm_slot_of(pool, &block->handle);
    level = i > 0 ? pool->slots[i].level : 0;
    if (i > 0 && pool->slots[i].state == KVBM_REGISTERED) {
        kvbm_slot_put(pool, (uint32_t)i);
        if (pool->slots[i].flags & SLOT_INACTIVE && pool->slots[i].flags & SLOT_LEAVING)
            kvbm_evict_first(pool, (uint32_t)i, level);
        if (again)
            pool->slots[i].flags &= (uint8_t)~SLOT_LEAVING;
    }
    kvbm_unlock(pool->registry);
    *block = (struct kvbm_immutable){0};
}

uint64_t kvbm_pool_lost(struct kvbm_pool *pool)
{
    uint64_t lost;

    kvbm_lock(pool->registry);
    lost = pool->n_lost;
    kvbm_unlock(pool->registry);
    return lost;
}
