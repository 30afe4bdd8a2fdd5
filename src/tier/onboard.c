// SPDX-License-Identifier: Apache-2.0
/* A prompt's prefix comes into a cache's pool: what that has is held, the rest is loaded and registered. */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager.h"

struct onboard {
    struct kvbm_cache *cache;
    struct kvbm_pin *pin;
    uint64_t deadline_ns;
    uint32_t n; /* keys of the pin that are READY */
    struct kvbm_mutable *targets;
    uint32_t n_targets;
    uint32_t *blocks; /* [n of the pin] */
    uint8_t *ok;
};

static uint32_t ms_left(const struct onboard *o)
{
    return (uint32_t)KV_MIN(kv_ms_until(o->deadline_ns, kv_now_ns()), (int64_t)UINT32_MAX);
}

static int prepare(struct onboard *o, uint32_t n)
{
    o->targets = calloc(n, sizeof(*o->targets));
    o->blocks = malloc((size_t)o->pin->n * sizeof(*o->blocks));
    o->ok = calloc((o->pin->n + 7) / 8, 1);
    if (!o->targets || !o->blocks || !o->ok)
        return -ENOMEM;
    o->n_targets = kvbm_take_blocks(o->cache->pool, o->targets, n);
    if (!o->n_targets)
        return -ENOSPC;
    for (uint32_t i = 0; i < o->pin->n; i++)
        o->blocks[i] = i < o->n_targets ? o->targets[i].handle.block : UINT32_MAX;
    return 0;
}

/* Wait for the copy. Nobody writes into the targets when this returns. */
static int load(struct onboard *o)
{
    struct kvbm_manager *m = o->cache->manager;
    const struct kvbm_job job = {.size = sizeof(job),
                                 .pin = o->pin,
                                 .cache = o->cache,
                                 .blocks = o->blocks,
                                 .deadline_ns = o->deadline_ns,
                                 .ok = o->ok};
    int64_t id;
    int rc;

    kvbm_manager_enter(m);
    id = kvbm_job_submit(m, &job, NULL, true);
    kvbm_manager_leave(m);
    if (id < 0)
        return (int)id;
    rc = kvbm_manager_wait(m, (uint64_t)id, ms_left(o), NULL);
    if (rc == -ETIMEDOUT) {
        kvbm_manager_cancel(m, (uint64_t)id);
        rc = kvbm_manager_wait(m, (uint64_t)id, UINT32_MAX, NULL);
    }
    return rc;
}

static int register_one(struct onboard *o, uint32_t i, struct kvbm_immutable *ret)
{
    const struct kvbm_item *item = &o->pin->items[i];
    struct kvbm_chain chain = kvbm_pin_chain(o->pin, i);
    struct kvbm_complete complete;
    int rc;

    if (item->state == ITEM_HELD)
        return kvbm_pool_adopt(o->cache->pool, &o->targets[i], 1,
                               (const struct kvbm_immutable *)&item->host, ret);
    rc = kvbm_pool_complete(o->cache->pool, &o->targets[i], 1, &chain, &complete);
    return rc < 0 ? rc : kvbm_pool_register(o->cache->pool, &complete, 1, ret);
}

/* The prefix that arrived. */
static long register_all(struct onboard *o, struct kvbm_immutable *ret)
{
    uint32_t n = 0;

    while (n < o->n_targets && o->ok[n / 8] >> (n % 8) & 1 && register_one(o, n, &ret[n]) == 0)
        n++;
    return n;
}

static long bring(struct onboard *o, const struct kvbm_chain *chain, size_t n,
                  struct kvbm_immutable *ret)
{
    struct kvbm_manager *m = o->cache->manager;
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = o->deadline_ns};
    long rc = kvbm_manager_prepare_load(m, chain, n, &opts, &o->pin), ready;

    if (rc <= 0)
        return rc;
    kvbm_pin_wait(o->pin, ms_left(o));
    ready = kvbm_pin_state(o->pin, NULL);
    if (ready <= 0)
        return ready;
    rc = prepare(o, (uint32_t)ready);
    if (rc == 0)
        rc = load(o);
    return rc < 0 ? rc : register_all(o, ret);
}

long kvbm_manager_onboard(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                          uint32_t timeout_ms, struct kvbm_immutable *ret)
{
    struct onboard o = {.cache = cache, .deadline_ns = kv_now_ns() + timeout_ms * KV_NS_PER_MS};
    long found = cache ? kvbm_manager_usable(cache->manager) : -EINVAL, more = 0;
    struct kvbm_chain rest;

    if (found < 0)
        return found;
    if (!cache->pool || !chain || chain->size < offsetof(struct kvbm_chain, tokens) ||
        (n && (!chain->keys || !ret)))
        return -EINVAL;
    found = kvbm_pool_match(cache->pool, chain->group, chain->keys, n, 0, ret);
    if (found < 0 || (size_t)found == n)
        return found;
    rest = (struct kvbm_chain){.size = sizeof(rest),
                               .group = chain->group,
                               .keys = (const uint8_t *)chain->keys +
                                       (size_t)found * cache->manager->key_len,
                               .parent = chain->parent,
                               .position = chain->position + (uint32_t)found};
    if (found)
        rest.parent = (const uint8_t *)rest.keys - cache->manager->key_len;
    more = bring(&o, &rest, n - (size_t)found, ret + found);
    if (o.targets)
        kvbm_pool_release_mutable(cache->pool, o.targets, o.n_targets); /* holes are fine */
    kvbm_pin_release(o.pin);
    free(o.targets);
    free(o.blocks);
    free(o.ok);
    return found || more > 0 ? found + KV_MAX(more, 0L) : more;
}
