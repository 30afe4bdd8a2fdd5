// SPDX-License-Identifier: Apache-2.0
/* Allocation of blocks from a pool, and the return of those that were never registered. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/pool/moves.h"

#define CHUNK 64 /* blocks per step, so that their cache misses overlap */

static size_t take_free(struct kvbm_pool *pool, uint32_t *ret, size_t n)
{
    n = KV_MIN(n, pool->n_free);
    for (size_t i = 0; i < n; i++) {
        ret[i] = pool->free[pool->free_head];
        kvbm_prefetch_slot(pool, ret[i]);
        pool->free_head = pool->free_head + 1 == pool->n_blocks ? 0 : pool->free_head + 1;
    }
    pool->n_free -= (uint32_t)n;
    pool->stats.allocations_from_reset += n;
    return n;
}

static void take(struct kvbm_pool *pool, size_t n, struct kvbm_mutable *ret, void *caller)
{
    uint32_t blocks[CHUNK];

    for (size_t done = 0, some; done < n; done += some) {
        some = KV_MIN(n - done, (size_t)CHUNK);
        size_t free = take_free(pool, blocks, some);

        kvbm_evict_blocks(pool, blocks + free, some - free);
        for (size_t i = 0; i < some; i++) {
            struct kvbm_slot *slot = &pool->slots[blocks[i]];

            slot->refs = 1;
            slot->generation++;
            kvbm_track(pool, blocks[i], caller);
            ret[done + i].handle = kvbm_handle_of(pool, blocks[i]);
        }
    }
    pool->n_mutable += n;
    pool->stats.allocations += n;
}

int kvbm_pool_allocate(struct kvbm_pool *pool, size_t n, struct kvbm_mutable *ret,
                       struct kvbm_shortage *shortage)
{
    void *caller = __builtin_return_address(0);
    uint64_t available;
    int err = 0;

    if (!pool || (n && !ret))
        return -EINVAL;
    kvbm_lock(pool->registry);
    available = pool->n_free + pool->n_inactive;
    if (n <= available) {
        take(pool, n, ret, caller);
    } else {
        pool->stats.allocation_failures++;
        err = -ENOSPC;
        if (shortage)
            *shortage = (struct kvbm_shortage){n, available};
    }
    kvbm_unlock(pool->registry);
    return err;
}

/* ---- releasing unregistered blocks ---- */

static void give_back(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];

    if (slot->entry)
        kvbm_entry_put(pool->registry, slot->entry);
    kvbm_slot_free(pool, i);
    pool->n_mutable--;
}

static int release(struct kvbm_pool *pool, struct kvbm_handle *handles, size_t n,
                   enum kvbm_state least, enum kvbm_state most)
{
    int err;

    if (!pool || (n && !handles))
        return -EINVAL;
    kvbm_lock(pool->registry);
    err = kvbm_claim(pool, handles, n, least, most, true);
    if (err == 0) {
        for (size_t i = 0; i < n; i++) {
            if (handles[i].pool)
                give_back(pool, handles[i].block + 1);
        }
    }
    kvbm_unlock(pool->registry);
    if (err == 0 && n)
        memset(handles, 0, n * sizeof(*handles));
    return err;
}

int kvbm_pool_release_mutable(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n)
{
    return release(pool, n && blocks ? &blocks->handle : NULL, n, KVBM_RESET, KVBM_PARTIAL);
}

int kvbm_pool_release_complete(struct kvbm_pool *pool, struct kvbm_complete *blocks, size_t n)
{
    return release(pool, n && blocks ? &blocks->handle : NULL, n, KVBM_COMPLETE, KVBM_COMPLETE);
}

int kvbm_mutable_release(struct kvbm_mutable *block)
{
    if (!block || !block->handle.pool)
        return 0;
    return kvbm_pool_release_mutable(block->handle.pool, block, 1);
}

int kvbm_complete_release(struct kvbm_complete *block)
{
    if (!block || !block->handle.pool)
        return 0;
    return kvbm_pool_release_complete(block->handle.pool, block, 1);
}
