// SPDX-License-Identifier: Apache-2.0
/* Handles on registered blocks: counted ones and weak ones. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/pool/moves.h"

/* Lock the pool of an immutable handle. Returns the slot's number, or an error without the lock. */
static int64_t lock_handle(const struct kvbm_handle *handle)
{
    int64_t i;

    if (!handle->pool)
        return -EINVAL;
    kvbm_lock(handle->pool->registry);
    i = kvbm_slot_of(handle->pool, handle);
    if (i > 0 && handle->pool->slots[i].state != KVBM_REGISTERED)
        i = -EBADFD;
    if (i < 0)
        kvbm_unlock(handle->pool->registry);
    return i;
}

int kvbm_immutable_clone(const struct kvbm_immutable *block, struct kvbm_immutable *ret)
{
    void *caller = __builtin_return_address(0);
    int64_t i = block && ret ? lock_handle(&block->handle) : -EINVAL;

    if (i < 0)
        return (int)i;
    block->handle.pool->slots[i].refs++;
    kvbm_track(block->handle.pool, (uint32_t)i, caller);
    *ret = *block;
    kvbm_unlock(block->handle.pool->registry);
    return 0;
}

/* Check an array that names a block more than once. Release each handle's reference meanwhile: a
 * handle that occurs more often than it was acquired is then -ESTALE. */
static int check_all(struct kvbm_pool *pool, const struct kvbm_immutable *blocks, size_t n)
{
    size_t i = 0;
    int err = 0;

    for (; i < n; i++) {
        int64_t slot = blocks[i].handle.pool ? kvbm_slot_of(pool, &blocks[i].handle) : 0;

        err = slot < 0 ? (int)slot : 0;
        if (slot > 0 && pool->slots[slot].state != KVBM_REGISTERED)
            err = -EBADFD;
        if (err < 0)
            break;
        if (slot > 0)
            pool->slots[slot].refs--;
    }
    while (i-- > 0) {
        if (blocks[i].handle.pool)
            pool->slots[blocks[i].handle.block + 1].refs++;
    }
    return err;
}

int kvbm_pool_release(struct kvbm_pool *pool, struct kvbm_immutable *blocks, size_t n)
{
    int err;

    if (!pool || (n && !blocks))
        return -EINVAL;
    kvbm_lock(pool->registry);
    err = kvbm_claim(pool, n ? &blocks->handle : NULL, n, KVBM_REGISTERED, KVBM_REGISTERED, true);
    if (err == -EINVAL) /* a block twice is allowed if it was acquired as often */
        err = check_all(pool, blocks, n);
    for (size_t i = n; err == 0 && i-- > 0;) {
        if (!blocks[i].handle.pool)
            continue;
        pool->slots[blocks[i].handle.block + 1].flags &= (uint8_t)~SLOT_CLAIMED;
        kvbm_slot_put(pool, blocks[i].handle.block + 1);
    }
    kvbm_unlock(pool->registry);
    if (err == 0 && n)
        memset(blocks, 0, n * sizeof(*blocks));
    return err;
}

int kvbm_immutable_release(struct kvbm_immutable *block)
{
    if (!block || !block->handle.pool)
        return 0;
    return kvbm_pool_release(block->handle.pool, block, 1);
}

int kvbm_immutable_try_return(struct kvbm_immutable *block)
{
    int64_t i = block ? lock_handle(&block->handle) : -EINVAL;
    struct kvbm_pool *pool;
    int err = -EBUSY;

    if (i < 0)
        return (int)i;
    pool = block->handle.pool;
    if (pool->slots[i].refs == 1) {
        kvbm_slot_put(pool, (uint32_t)i);
        block->handle = (struct kvbm_handle){0};
        err = 0;
    }
    kvbm_unlock(pool->registry);
    return err;
}

/* ---- weak ---- */

int kvbm_immutable_downgrade(const struct kvbm_immutable *block, struct kvbm_weak *ret)
{
    int64_t i = block && ret ? lock_handle(&block->handle) : -EINVAL;
    struct kvbm_pool *pool;
    uint32_t primary;

    if (i < 0)
        return (int)i;
    pool = block->handle.pool;
    primary = kvbm_primary_of(pool, (uint32_t)i);
    ret->handle = (struct kvbm_handle){pool, primary - 1, pool->slots[primary].life};
    kvbm_unlock(pool->registry);
    return 0;
}

/* Acquire the block of a weak handle if the handle still names it. The handle's number is in
 * range. */
static bool upgrade(struct kvbm_pool *pool, const struct kvbm_weak *block, void *caller,
                    struct kvbm_immutable *ret)
{
    uint32_t i = block->handle.block + 1;
    struct kvbm_slot *slot = &pool->slots[i];

    if (slot->state != KVBM_REGISTERED || slot->life != block->handle.generation ||
        slot->flags & SLOT_DUPLICATE)
        return false;
    if (slot->refs)
        slot->refs++;
    else
        kvbm_slot_revive(pool, i);
    kvbm_track(pool, i, caller);
    ret->handle = kvbm_handle_of(pool, i);
    return true;
}

int kvbm_weak_upgrade(const struct kvbm_weak *block, struct kvbm_immutable *ret)
{
    void *caller = __builtin_return_address(0);
    struct kvbm_pool *pool = block ? block->handle.pool : NULL;
    bool held;

    if (!pool || !ret)
        return -EINVAL;
    if (block->handle.block >= pool->n_blocks)
        return -ERANGE;
    kvbm_lock(pool->registry);
    held = upgrade(pool, block, caller, ret);
    kvbm_unlock(pool->registry);
    return held ? 0 : -ESTALE;
}

/* Describe slot @i, which the caller holds. */
static void tell(struct kvbm_pool *pool, uint32_t i, struct kvbm_block_info *ret)
{
    uint32_t primary = kvbm_primary_of(pool, i);
    const struct kvbm_entry *e = kvbm_slot_entry(pool, &pool->slots[i]);

    kvbm_retain_expire_one(pool, primary);
    *ret = (struct kvbm_block_info){
        .block = i - 1,
        .primary = primary - 1,
        .duplicate = primary != i,
        .group = e->group,
        .position = e->position,
        .tiers = e->tiers,
        .priority = pool->slots[primary].priority,
        .priority_until_ns = kvbm_retain_end(pool, primary),
        .handles = pool->slots[i].refs - pool->slots[i].next,
    };
    memcpy(ret->key, e->key, pool->registry->key_len);
    ret->has_parent = e->parent != 0;
    if (e->parent)
        memcpy(ret->parent, kvbm_entry(pool->registry, e->parent)->key, pool->registry->key_len);
}

int kvbm_immutable_info(const struct kvbm_immutable *block, struct kvbm_block_info *ret)
{
    int64_t i = block && kv_sized(ret, "kvbm_block_info") ? lock_handle(&block->handle) : -EINVAL;
    struct kvbm_block_info info;

    if (i < 0)
        return (int)i;
    tell(block->handle.pool, (uint32_t)i, &info);
    kvbm_unlock(block->handle.pool->registry);
    KV_GIVE(ret, &info);
    return 0;
}

/* ---- arrays of handles ---- */

void kvbm_pool_upgrade(struct kvbm_pool *pool, const struct kvbm_weak *blocks, size_t n,
                       struct kvbm_immutable *ret, struct kvbm_block_info *info)
{
    void *caller = __builtin_return_address(0);

    kvbm_lock(pool->registry);
    for (size_t k = 0; k < n; k++) {
        ret[k] = (struct kvbm_immutable){0};
        if (blocks[k].handle.pool == pool && blocks[k].handle.block < pool->n_blocks &&
            upgrade(pool, &blocks[k], caller, &ret[k]))
            tell(pool, blocks[k].handle.block + 1, &info[k]);
    }
    kvbm_unlock(pool->registry);
}

void kvbm_pool_downgrade(struct kvbm_pool *pool, const struct kvbm_immutable *blocks, size_t n,
                         struct kvbm_weak *ret, struct kvbm_block_info *info)
{
    kvbm_lock(pool->registry);
    for (size_t k = 0; k < n; k++) {
        int64_t i = blocks[k].handle.pool ? kvbm_slot_of(pool, &blocks[k].handle) : 0;
        uint32_t primary;

        ret[k] = (struct kvbm_weak){0};
        if (i <= 0 || pool->slots[i].state != KVBM_REGISTERED)
            continue;
        primary = kvbm_primary_of(pool, (uint32_t)i);
        ret[k].handle = (struct kvbm_handle){pool, primary - 1, pool->slots[primary].life};
        tell(pool, (uint32_t)i, &info[k]);
    }
    kvbm_unlock(pool->registry);
}

int kvbm_pool_view(const struct kvbm_pool *pool, uint32_t block, uint32_t layer, uint32_t outer,
                   struct kvbm_view *ret)
{
    if (!pool || !ret)
        return -EINVAL;
    if (!pool->layout)
        return -ENOTSUP;
    if (block >= pool->n_blocks)
        return -ERANGE;
    return kvbm_layout_region(pool->layout, block, layer, outer, ret);
}
