// SPDX-License-Identifier: Apache-2.0
/* Fill a held block token by token: Reset to Partial to Complete, and back. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/pool/moves.h"
#include "kvbm_tokens.h"

/* Lock the pool of a mutable block that is in state @least to @most. On success the lock is
 * held. */
static int lock_block(const struct kvbm_handle *handle, enum kvbm_state least, enum kvbm_state most,
                      struct kvbm_slot **ret)
{
    struct kvbm_pool *pool = handle ? handle->pool : NULL;
    int err;

    if (!pool)
        return -EINVAL;
    kvbm_lock(pool->registry);
    err = kvbm_claim(pool, handle, 1, least, most, false);
    if (err < 0) {
        kvbm_unlock(pool->registry);
        return err;
    }
    kvbm_unclaim(pool, handle, 1);
    *ret = &pool->slots[handle->block + 1];
    return 0;
}

static int check_start(const struct kvbm_pool *pool, const struct kvbm_block_start *start)
{
    uint32_t group = KV_OPT(start, group, 0);
    const uint64_t *parent = KV_OPT(start, parent, NULL);

    if (!kv_sized_or_null(start, "kvbm_block_start"))
        return -EINVAL;
    if (pool->registry->key_len != 8)
        return -ENOTSUP;
    if (group >= KVBM_MAX_GROUPS || !(pool->groups >> group & 1))
        return -EINVAL;
    if (KV_OPT(start, chain, 0) > KVBM_CHAIN_SEED_SALT)
        return -EINVAL;
    return !parent == !KV_OPT(start, position, 0) ? 0 : -EINVAL;
}

int kvbm_mutable_init_sequence(const struct kvbm_mutable *block,
                               const struct kvbm_block_start *start)
{
    struct kvbm_pool *pool = block ? block->handle.pool : NULL;
    const uint64_t *parent = KV_OPT(start, parent, NULL);
    struct kvbm_slot *slot;
    int err = pool ? check_start(pool, start) : -EINVAL;

    if (err == 0)
        err = lock_block(&block->handle, KVBM_RESET, KVBM_RESET, &slot);
    if (err < 0)
        return err;
    err = kvbm_slab_reserve(&pool->tokens, 1);
    if (err == 0) {
        slot->tokens = kvbm_slab_get(&pool->tokens);
        slot->state = KVBM_PARTIAL;
        *kvbm_slot_start(pool, slot) = (struct kvbm_start){
            .salt_hash = KV_OPT(start, salt_hash, 0),
            .parent = parent ? *parent : 0,
            .chain = KV_OPT(start, chain, 0),
            .position = KV_OPT(start, position, 0),
            .group = KV_OPT(start, group, 0),
            .has_parent = parent != NULL,
        };
    }
    kvbm_unlock(pool->registry);
    return err;
}

long kvbm_mutable_add_tokens(const struct kvbm_mutable *block, const uint32_t *tokens, size_t n)
{
    struct kvbm_pool *pool = block ? block->handle.pool : NULL;
    struct kvbm_slot *slot;
    uint32_t *n_tokens;
    int err = n && !tokens ? -EINVAL : 0;

    if (err == 0)
        err = lock_block(block ? &block->handle : NULL, KVBM_PARTIAL, KVBM_PARTIAL, &slot);
    if (err < 0)
        return err;
    n_tokens = &kvbm_slot_start(pool, slot)->n_tokens;
    n = KV_MIN(n, (size_t)(pool->block_size - *n_tokens));
    if (n)
        memcpy(kvbm_slot_tokens(pool, slot) + *n_tokens, tokens, n * sizeof(*tokens));
    *n_tokens += (uint32_t)n;
    kvbm_unlock(pool->registry);
    return (long)n;
}

int kvbm_mutable_add_token(const struct kvbm_mutable *block, uint32_t token)
{
    long n = kvbm_mutable_add_tokens(block, &token, 1);

    return n < 0 ? (int)n : n == 0 ? -ENOSPC : 0;
}

int kvbm_mutable_pop_tokens(const struct kvbm_mutable *block, size_t n)
{
    struct kvbm_slot *slot;
    uint32_t *n_tokens;
    int err = lock_block(block ? &block->handle : NULL, KVBM_PARTIAL, KVBM_PARTIAL, &slot);

    if (err < 0)
        return err;
    n_tokens = &kvbm_slot_start(block->handle.pool, slot)->n_tokens;
    if (n > *n_tokens)
        err = -ENODATA;
    else
        *n_tokens -= (uint32_t)n;
    kvbm_unlock(block->handle.pool->registry);
    return err;
}

static void empty(struct kvbm_pool *pool, struct kvbm_slot *slot)
{
    kvbm_slab_put(&pool->tokens, slot->tokens);
    slot->tokens = 0;
    slot->state = KVBM_RESET;
}

int kvbm_mutable_reset(const struct kvbm_mutable *block)
{
    struct kvbm_slot *slot;
    int err = lock_block(block ? &block->handle : NULL, KVBM_RESET, KVBM_PARTIAL, &slot);

    if (err < 0)
        return err;
    empty(block->handle.pool, slot);
    kvbm_unlock(block->handle.pool->registry);
    return 0;
}

int kvbm_complete_reset(struct kvbm_complete *block, struct kvbm_mutable *ret)
{
    struct kvbm_pool *pool = block ? block->handle.pool : NULL;
    struct kvbm_slot *slot;
    int err = ret ? 0 : -EINVAL;

    if (err == 0)
        err = lock_block(block ? &block->handle : NULL, KVBM_COMPLETE, KVBM_COMPLETE, &slot);
    if (err < 0)
        return err;
    kvbm_entry_put(pool->registry, slot->entry);
    slot->entry = 0;
    empty(pool, slot);
    slot->generation++;
    ret->handle = kvbm_handle_of(pool, block->handle.block + 1);
    block->handle = (struct kvbm_handle){0};
    kvbm_unlock(pool->registry);
    return 0;
}

int kvbm_mutable_commit(struct kvbm_mutable *block, struct kvbm_complete *ret)
{
    struct kvbm_pool *pool = block ? block->handle.pool : NULL;
    struct kvbm_slot *slot;
    int err = ret ? 0 : -EINVAL;

    if (err == 0)
        err = lock_block(block ? &block->handle : NULL, KVBM_PARTIAL, KVBM_PARTIAL, &slot);
    if (err < 0)
        return err;
    if (kvbm_slot_start(pool, slot)->n_tokens < pool->block_size) {
        err = -ENODATA;
    } else {
        const struct kvbm_start *start = kvbm_slot_start(pool, slot);
        const uint64_t *parent = start->has_parent ? &start->parent : NULL;
        uint64_t hash =
            kvbm_block_hash(start->salt_hash, kvbm_slot_tokens(pool, slot), pool->block_size);
        uint64_t key = kvbm_sequence_hash(parent, hash, start->salt_hash, start->chain);

        err =
            kvbm_stage(pool, block->handle.block + 1, start->group, &key, parent, start->position);
    }
    if (err == 0) {
        ret->handle = kvbm_handle_of(pool, block->handle.block + 1);
        block->handle = (struct kvbm_handle){0};
    }
    kvbm_unlock(pool->registry);
    return err;
}

/* ---- accessors ---- */

static int fill(const struct kvbm_handle *handle, enum kvbm_state least, enum kvbm_state most,
                struct kvbm_fill *ret, uint32_t *tokens, size_t cap)
{
    struct kvbm_slot *slot;
    int err = ret ? lock_block(handle, least, most, &slot) : -EINVAL;

    if (err < 0)
        return err;
    *ret = (struct kvbm_fill){.state = slot->state};
    if (slot->state == KVBM_PARTIAL) {
        ret->len = kvbm_slot_start(handle->pool, slot)->n_tokens;
        ret->remaining = handle->pool->block_size - (uint32_t)ret->len;
    } else if (slot->state == KVBM_COMPLETE) {
        ret->len = handle->pool->block_size;
    }
    if (tokens && slot->tokens)
        memcpy(tokens, kvbm_slot_tokens(handle->pool, slot),
               KV_MIN(cap, (size_t)ret->len) * sizeof(*tokens));
    kvbm_unlock(handle->pool->registry);
    return 0;
}

int kvbm_mutable_fill(const struct kvbm_mutable *block, struct kvbm_fill *ret, uint32_t *tokens,
                      size_t cap)
{
    return fill(block ? &block->handle : NULL, KVBM_RESET, KVBM_PARTIAL, ret, tokens, cap);
}

int kvbm_complete_fill(const struct kvbm_complete *block, struct kvbm_fill *ret, uint32_t *tokens,
                       size_t cap)
{
    return fill(block ? &block->handle : NULL, KVBM_COMPLETE, KVBM_COMPLETE, ret, tokens, cap);
}
