// SPDX-License-Identifier: Apache-2.0
/*
 * Pins of stores: host blocks are reserved for keys that no tier has, filled by a job or by the
 * caller, and registered.
 *
 *   reserve   HELD: the host tier has it │ RESERVED: a new block │ WAITS: another pin brings it │
 *             MISS: the policy refuses it │ BUSY: no block is free
 *   commit    RESERVED ─► HELD, or STAGED without a host tier ─► offered to the tiers below
 *
 * Invariant: a block is findable only after commit, with all of its bytes. Keys that weren't
 * written give their blocks back.
 */
#include <errno.h>

#include "base/core/clock.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define LOOK 64 /* keys looked up at a time */

/* True when key @i needs a block. Holds an existing block; waits for another pin that fetches or
 * stores it. */
static bool wants_block(struct kvbm_pin *pin, uint32_t i, uint8_t tiers)
{
    struct kvbm_manager *m = pin->manager;
    uint64_t hash = kvbm_pin_hash(pin, i);
    /* without a host tier, a key is there when every tier below has it: else it is staged and
     * offered */
    bool there = kvbm_staging(m) ? (!m->disk || tiers >> KV_TIER_DISK & 1) &&
                                       (!m->object || tiers >> KV_TIER_EXTERNAL & 1)
                                 : pin->items[i].state == ITEM_HELD;

    if (there || pin->items[i].state == ITEM_HELD) {
        pin->items[i].state = kvbm_staging(m) ? ITEM_BELOW : ITEM_HELD;
        return false;
    }
    if (kvbm_key_is_pending(m, hash)) {
        pin->items[i].state = ITEM_WAITS;
        return false;
    }
    /* a blocking store tries keys again: the frequency policy counts each of its keys once */
    return i < pin->n_offered ? kvbm_policy_takes(m, KV_TIER_HOST, hash, pin->retain)
                              : kvbm_policy_passes(m, KV_TIER_HOST, hash, pin->retain);
}

/* Take blocks for the items of @index, as many as there are, and mark their keys as pending. */
static uint32_t reserve(struct kvbm_pin *pin, const uint32_t *index, uint32_t n)
{
    struct kvbm_mutable blocks[LOOK];
    uint32_t got = pin->direct ? n : kvbm_take_blocks(pin->manager->host, blocks, n);

    for (uint32_t i = 0; i < n; i++) {
        struct kvbm_item *item = &pin->items[index[i]];

        item->state = i < got ? ITEM_RESERVED : ITEM_BUSY;
        if (i >= got)
            continue;
        if (!pin->direct)
            item->host = blocks[i].handle;
        kvbm_set_add(&pin->manager->pins.pending, kvbm_pin_hash(pin, index[i]));
    }
    pin->manager->stats.host.dropped += n - got;
    return got;
}

long kvbm_pin_reserve(struct kvbm_pin *pin)
{
    uint32_t index[LOOK], n = 0;
    uint8_t tiers[LOOK];
    long reserved = 0;

    kvbm_pin_hold(pin);
    for (uint32_t i = 0; i < pin->n; i++) {
        if (i % LOOK == 0)
            kvbm_registry_locate(pin->manager->registry, pin->group, kvbm_pin_key(pin, i),
                                 KV_MIN(pin->n - i, (uint32_t)LOOK), tiers);
        if (wants_block(pin, i, tiers[i % LOOK]))
            index[n++] = i;
        if (n == LOOK || (n && i + 1 == pin->n)) {
            reserved += reserve(pin, index, n);
            n = 0;
        }
    }
    return n ? reserved + reserve(pin, index, n) : reserved;
}

long kvbm_pin_store(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                    const struct kvbm_pin_keeps *keeps, struct kvbm_pin **ret)
{
    struct kvbm_pin *pin;
    long rc = ret ? kvbm_manager_usable(m) : -EINVAL;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    rc = m->stopping ? -ESHUTDOWN : kvbm_pin_new(m, chain, n, true, &pin);
    if (rc == 0) {
        /* without @keeps nothing is promised: a connector lives with blocks that are lost */
        pin->keeps = keeps != NULL;
        pin->durable = keeps && keeps->durable;
        pin->n_offered = keeps ? keeps->n_offered : 0;
        rc = kvbm_pin_reserve(pin);
        if (keeps)
            kvbm_offload_again(pin);
        *ret = pin;
    }
    kvbm_manager_leave(m);
    return rc;
}

long kvbm_manager_prepare_store(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                                struct kvbm_pin **ret)
{
    return kvbm_pin_store(m, chain, n, NULL, ret);
}

/* Give items [i, i + n) the retention priority of their source, and its end. */
static void retain_run(struct kvbm_pin *pin, uint32_t i, uint32_t n)
{
    uint64_t now = kv_now_ns(), until = pin->retain_until_ns;
    uint64_t ttl_ms = until > now ? (until - now) / KV_NS_PER_MS + 1 : 0;

    if (pin->retain != KVBM_PRIORITY_DEFAULT && (!until || ttl_ms))
        kvbm_pool_retain(pin->manager->host, pin->group, kvbm_pin_key(pin, i), n, pin->retain,
                         ttl_ms);
}

/* Register the reserved items [i, i + n), which have their bytes. */
static long commit_run(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through)
{
    struct kvbm_manager *m = pin->manager;
    uint32_t held = n;

    /* no longer pending: STEP_LOOK lets the pins that wait find the blocks */
    for (uint32_t k = i; k < i + n; k++)
        kvbm_set_drop(&m->pins.pending, kvbm_pin_hash(pin, k));
    if (kvbm_staging(m)) {
        for (uint32_t k = i; k < i + n; k++)
            pin->items[k].state = ITEM_STAGED;
    } else {
        held = kvbm_pin_register(pin, i, n);
        retain_run(pin, i, n);
    }
    if (!pin->direct) {
        m->stats.host.blocks_in += held;
        m->stats.host.bytes_in += held * m->block_bytes;
    }
    kvbm_offload_items(pin, i, n, through);
    return held;
}

long kvbm_pin_commit_locked(struct kvbm_pin *pin, const uint8_t *ok, struct kvbm_job_ *through)
{
    struct kvbm_manager *m = pin->manager;
    long held = 0;
    uint32_t n;

    for (uint32_t i = 0; i < pin->n; i += n) {
        /* a run of written blocks is registered at once: one hold of the registry's lock */
        for (n = 0; i + n < pin->n && pin->items[i + n].state == ITEM_RESERVED &&
                    (!ok || ok[(i + n) / 8] >> ((i + n) % 8) & 1);)
            n++;
        if (n) {
            held += commit_run(pin, i, n, through);
        } else {
            if (pin->items[i].state == ITEM_RESERVED)
                kvbm_pin_let_go(pin, i);
            n = 1;
        }
    }
    kvbm_step_due(m, KVBM_STEP_LOOK);
    kvbm_step_due(m, KVBM_STEP_PUMP);
    return held;
}

long kvbm_pin_commit(struct kvbm_pin *pin, const uint8_t *ok)
{
    long rc = pin ? kvbm_manager_usable(pin->manager) : -EINVAL;

    if (rc < 0 || !pin->store)
        return rc < 0 ? rc : -EINVAL;
    kvbm_manager_enter(pin->manager);
    rc = pin->n_copying ? -EBUSY : kvbm_pin_commit_locked(pin, ok, NULL);
    kvbm_manager_leave(pin->manager);
    return rc;
}
