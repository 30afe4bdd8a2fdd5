// SPDX-License-Identifier: Apache-2.0
/* Source of a pool: a hold is a handle on each block found. */
#include "base/core/error.h"
#include "bm/pool/pool.h"
#include "kvbm_lease.h"

struct hold {
    size_t n;
    struct kvbm_immutable handles[];
};

static void lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    struct kvbm_pool *pool = arg;
    uint8_t bit = (uint8_t)(1u << pool->tier);

    if (kvbm_registry_locate(pool->registry, group, keys, n, tiers) < 0) {
        memset(tiers, KVBM_NO_TIER, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        tiers[i] = tiers[i] & bit ? (uint8_t)pool->tier : KVBM_NO_TIER;
}

static void unhold(void *arg, void *held)
{
    struct hold *hold = held;

    if (!hold)
        return;
    (void)kvbm_pool_release(arg, hold->handles, hold->n);
    free(hold);
}

static void hold_keys(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                      void *to)
{
    struct hold *hold = calloc(1, sizeof(*hold) + n * sizeof(hold->handles[0]));
    uint32_t *blocks = malloc(n * sizeof(*blocks));
    long found =
        hold && blocks ? kvbm_pool_match_scattered(arg, group, keys, n, 0, hold->handles) : -ENOMEM;

    if (found < 0) {
        free(blocks);
        free(hold);
        held(to, (int)found, NULL, NULL);
        return;
    }
    hold->n = n;
    for (size_t i = 0; i < n; i++)
        blocks[i] = hold->handles[i].handle.pool ? hold->handles[i].handle.block : UINT32_MAX;
    held(to, 0, blocks, hold);
    free(blocks);
}

struct kvbm_block_source kvbm_pool_source(struct kvbm_pool *pool)
{
    return (struct kvbm_block_source){.size = sizeof(struct kvbm_block_source),
                                      .arg = pool,
                                      .lookup = lookup,
                                      .hold = hold_keys,
                                      .unhold = unhold,
                                      .registry = pool ? pool->registry : NULL};
}
