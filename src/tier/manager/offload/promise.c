// SPDX-License-Identifier: Apache-2.0
/*
 * Promises: blocks that a blocking store reports as kept stay in the host tier until a tier below
 * has them, or none of these will: their policies refuse the block, or their writes failed.
 *
 *   store ─► host block, held ──┬─ entry of the disk's queue      the first one that arrives, or the
 *                               └─ entry of the object store's    last one that ends, lets it go
 *
 * A promise has the number of its host block: the block is held, so there is one promise of it. At
 * most half of the host tier is promised, so that loads find room beside a slow disk.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/state/manager.h"

#define LOOK 64 /* keys looked up at a time */

int kvbm_promises_open(struct kvbm_manager *m)
{
    if (kvbm_staging(m) || (!m->opts.disk && !m->opts.object))
        return 0;
    m->promises.blocks = calloc(m->host_blocks, sizeof(*m->promises.blocks));
    m->promises.max = (uint32_t)((m->host_blocks + 1) / 2);
    return m->promises.blocks ? 0 : -ENOMEM;
}

/* End a promise: its block may be evicted again, and stores that wait for room go on. */
static void let_go(struct kvbm_manager *m, struct kvbm_promise *promise)
{
    kvbm_set_drop(&m->promises.keys, promise->hash);
    kvbm_immutable_release(&promise->held);
    m->promises.n--;
    pthread_cond_broadcast(&m->changed);
}

uint64_t kvbm_promise_make(struct kvbm_manager *m, const struct kvbm_immutable *block,
                           uint64_t hash)
{
    struct kvbm_promise *promise = &m->promises.blocks[block->handle.block];

    if (promise->held.handle.pool || kvbm_set_reserve(&m->promises.keys, 1) < 0 ||
        kvbm_immutable_clone(block, &promise->held) < 0)
        return 0;
    /* a number of its own: entries of an earlier promise of the same host block mustn't end this
     * one */
    promise->number = ++m->promises.next_number;
    promise->hash = hash;
    promise->refs = 1;
    kvbm_set_add(&m->promises.keys, hash);
    m->promises.n++;
    return promise->number;
}

bool kvbm_promise_is_made(const struct kvbm_manager *m, uint32_t block)
{
    return m->promises.blocks[block].held.handle.pool != NULL;
}

void kvbm_promise_ref(struct kvbm_manager *m, uint32_t block)
{
    m->promises.blocks[block].refs++;
}

void kvbm_promise_put(struct kvbm_manager *m, uint32_t block, uint64_t number, bool arrived)
{
    struct kvbm_promise *promise = &m->promises.blocks[block];

    if (!promise->held.handle.pool || promise->number != number)
        return; /* another tier has the block already */
    if (--promise->refs == 0 || arrived)
        let_go(m, promise);
}

void kvbm_promise_end(struct kvbm_manager *m, const struct kvbm_down *down, bool arrived)
{
    if (down->promise)
        kvbm_promise_put(m, down->weak.handle.block, down->promise, arrived);
}

bool kvbm_promise_awaits(const struct kvbm_manager *m, uint32_t group, const void *key)
{
    return kvbm_set_has(&m->promises.keys, kvbm_key_hash(m, group, key)) &&
           kvbm_offload_awaits(m, group, key);
}

void kvbm_promise_forget(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, uint32_t n)
{
    struct kvbm_immutable held[LOOK];

    for (uint32_t i = 0, some; m->promises.n && i < n; i += some) {
        some = KV_MIN(n - i, (uint32_t)LOOK);
        memset(held, 0, sizeof(held));
        kvbm_pool_match_scattered(m->host, group, keys + (size_t)i * m->key_len, some,
                                  KVBM_MATCH_NO_TOUCH, held);
        for (uint32_t k = 0; k < some; k++) {
            if (!held[k].handle.pool)
                continue;
            if (kvbm_promise_is_made(m, held[k].handle.block))
                let_go(m, &m->promises.blocks[held[k].handle.block]);
            kvbm_immutable_release(&held[k]);
        }
    }
}

uint32_t kvbm_promises_room(const struct kvbm_manager *m)
{
    if (!m->promises.blocks)
        return (uint32_t)KV_MIN(m->host_blocks, (uint64_t)UINT32_MAX);
    return m->promises.max - KV_MIN(m->promises.n + m->promises.claimed, m->promises.max);
}

uint32_t kvbm_promises_claim(struct kvbm_manager *m, uint32_t n)
{
    n = m->promises.blocks ? n : 0;
    m->promises.claimed += n;
    m->n_waiters += n > 0; /* the manager stays until the claim is given back */
    return n;
}

void kvbm_promises_unclaim(struct kvbm_manager *m, uint32_t n)
{
    if (!n)
        return;
    kvbm_manager_enter(m);
    m->promises.claimed -= n;
    pthread_cond_broadcast(&m->changed);
    kvbm_waiter_leaves(m);
}
