// SPDX-License-Identifier: Apache-2.0
/*
 * Offloads: which blocks are offered to the tiers below, and when their moves begin.
 *
 *   a block enters the host tier ─► offered to each tier that lacks it ─► its policy takes it?
 *       ─► entry of the tier's queue (queue.c) ─► move (move.c), when STEP_PUMP finds room
 *
 * An entry is a weak handle: it keeps no block from eviction, so a slow tier can't fill the host
 * tier with blocks that wait for it. A block is held from the beginning of its move, or from the
 * offer when a blocking store has promised it (promise.c). Without a host tier the block is a
 * staging buffer, which no pool knows: its pin holds it until the entry ends.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* ---- blocks to offload ---- */

/* True when a block is to be offered to a tier. @again: it was offered before. */
static bool is_for(const struct kvbm_pin *pin, uint32_t i, enum kv_tier to,
                   const struct kvbm_block_info *info, bool again)
{
    struct kvbm_manager *m = pin->manager;

    if (!(to == KV_TIER_DISK ? m->disk : m->object) || info->tiers >> to & 1)
        return false;
    if (to == KV_TIER_EXTERNAL && m->write_back.leaving && (m->disk || !pin->durable))
        return false; /* write-back offers the block before its eviction instead */
    return again ? kvbm_policy_takes(m, to, kvbm_pin_hash(pin, i), info->priority)
                 : kvbm_policy_passes(m, to, kvbm_pin_hash(pin, i), info->priority);
}

static void offer(struct kvbm_pin *pin, uint32_t i, struct kvbm_job_ *through,
                  const struct kvbm_weak *weak, const struct kvbm_block_info *info, bool again)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_immutable block = {.handle = pin->items[i].host};
    uint64_t promise = pin->keeps && weak->handle.pool && m->promises.blocks
                           ? kvbm_promise_make(m, &block, kvbm_pin_hash(pin, i))
                           : 0;

    /* another store's promise keeps the block, too; without memory for one, the call fails */
    if (pin->keeps && !promise && weak->handle.pool && m->promises.blocks)
        pin->keeps = kvbm_promise_is_made(m, block.handle.block);
    /* kvbm_queue_push may end an entry at once: all counts are up before it */
    for (enum kv_tier to = KV_TIER_DISK; to <= KV_TIER_EXTERNAL; to++) {
        struct kvbm_down down = {.priority = info->priority, .weak = *weak, .promise = promise};

        if (!is_for(pin, i, to, info, again))
            continue;
        if (!weak->handle.pool) { /* staged */
            down.pin = pin;
            down.index = i;
            pin->refs++;
        }
        if (promise)
            kvbm_promise_ref(m, block.handle.block);
        if (through && (to == KV_TIER_EXTERNAL || pin->direct)) {
            down.through = through;
            through->n_through++;
        }
        kvbm_queue_push(m, to, down);
    }
    /* the reference of this function: without any entry, no tier will have the block, and
     * it ends */
    if (promise)
        kvbm_promise_put(m, block.handle.block, promise, false);
}

static void offer_some(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through,
                       bool again)
{
    const uint8_t below = 1u << KV_TIER_DISK | 1u << KV_TIER_EXTERNAL;
    struct kvbm_manager *m = pin->manager;
    struct kvbm_immutable held[KVBM_BATCH] = {0};
    struct kvbm_block_info info[KVBM_BATCH];
    struct kvbm_weak weak[KVBM_BATCH] = {0};
    uint8_t tiers[KVBM_BATCH];

    if (kvbm_staging(m)) {
        kvbm_registry_locate(m->registry, pin->group, kvbm_pin_key(pin, i), n, tiers);
    } else {
        for (uint32_t k = 0; k < n; k++) {
            if (pin->items[i + k].state == ITEM_HELD)
                held[k].handle = pin->items[i + k].host;
        }
        kvbm_pool_downgrade(m->host, held, n, weak, info);
    }
    for (uint32_t k = 0; k < n; k++) {
        if (pin->items[i + k].state == ITEM_STAGED)
            info[k] = (struct kvbm_block_info){.priority = pin->retain, .tiers = tiers[k]};
        else if (!weak[k].handle.pool)
            continue;
        /* a block that was there before: it needs no second offer if it is safe */
        if (again &&
            (info[k].tiers & below || kvbm_promise_is_made(m, pin->items[i + k].host.block)))
            continue;
        offer(pin, i + k, through, &weak[k], &info[k], again);
    }
}

/* Offer items [i, i + n), a batch at a time. */
static void offer_all(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through,
                      bool again)
{
    const struct kvbm_manager *m = pin->manager;

    /* no lower tier, or write-back offers the blocks later */
    if (!m->disk && (!m->object || (m->write_back.leaving && !pin->durable)))
        return;
    for (uint32_t done = 0, some; done < n; done += some) {
        some = KV_MIN(n - done, (uint32_t)KVBM_BATCH);
        offer_some(pin, i + done, some, through, again);
    }
}

void kvbm_offload_items(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through)
{
    offer_all(pin, i, n, through, false);
}

void kvbm_offload_again(struct kvbm_pin *pin)
{
    if (!pin->manager->promises.blocks)
        return;
    offer_all(pin, 0, pin->n, NULL, true);
    kvbm_step_due(pin->manager, KVBM_STEP_PUMP);
}

void kvbm_offload_brought(struct kvbm_manager *m)
{
    struct kvbm_fetch *fetch;

    while ((fetch = m->pins.brought) != NULL) {
        m->pins.brought = fetch->next;
        for (uint32_t k = 0; k < fetch->n; k++) {
            if (fetch->brought >> k & 1)
                kvbm_offload_items(fetch->pin, fetch->index[k], 1, NULL);
        }
        kvbm_pin_put(fetch->pin);
        free(fetch);
    }
}

/* ---- the pump ---- */

void kvbm_offload_pump(struct kvbm_manager *m)
{
    kvbm_write_back(m);
    for (enum kv_tier to = KV_TIER_DISK; to <= KV_TIER_EXTERNAL; to++) {
        while (kvbm_queue_may_move(&m->offload.queues[to]))
            kvbm_move_some(m, to);
    }
}

void kvbm_offload_drop_all(struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        while (m->offload.queues[to].n) {
            struct kvbm_down down = kvbm_queue_pop(&m->offload.queues[to]);

            kvbm_stats_of(m, to)->dropped++;
            kvbm_down_ended(m, &down, false);
        }
        kvbm_once_drop(m, to, NULL);
    }
    /* running moves end as cancelled, or with what their executor has done by then */
    for (struct kvbm_move *move = m->offload.moves; move; move = move->next) {
        if (move->to == KV_TIER_DISK || move->reading)
            kvbm_disk_cancel(m->disk_store, &move->disk);
        else
            kvbm_object_cancel(m->object_store, &move->object);
    }
}

bool kvbm_offload_awaits(const struct kvbm_manager *m, uint32_t group, const void *key)
{
    uint8_t tiers = 0;

    kvbm_registry_locate(m->registry, group, key, 1, &tiers);
    return tiers >> KV_TIER_HOST & 1 && !(tiers >> KV_TIER_DISK & 1) &&
           !(tiers >> KV_TIER_EXTERNAL & 1);
}

int kvbm_manager_drain(struct kvbm_manager *m, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    m->n_waiters++;
    while (rc == 0 && !kvbm_offload_idle(m))
        rc = kvbm_manager_wait_change(m, deadline);
    kvbm_waiter_leaves(m);
    return rc;
}
