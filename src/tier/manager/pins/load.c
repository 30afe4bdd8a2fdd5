// SPDX-License-Identifier: Apache-2.0
/*
 * Loads: a pin holds what the host tier has, fetches what is below or at peers, and waits for keys
 * that another pin brings.
 *
 *   MISS ── fetch ─────────────► FETCHED ──► HELD         a fetch of this pin fills the host block
 *    │ another pin brings it ──► WAITS ── STEP_LOOK ──► HELD, or MISS and fetched by this pin
 *    └ too many fetches run ───► STARVED ── a fetch ends ──► MISS and fetched
 *
 * Invariant: each item that WAITS counts as a waiter of its key in the set of pending keys, so a
 * fetch knows whether anybody needs it. A pin settles when no item is FETCHED, WAITS or STARVED:
 * its jobs begin then (STEP_START), and callers in kvbm_pin_wait return. It settles anew each time
 * that leases of its items end.
 */
#include <errno.h>

#include "base/core/clock.h"
#include "bm/deadline.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define LOOK 64 /* keys looked up at a time */

void kvbm_pin_hold(struct kvbm_pin *pin)
{
    struct kvbm_immutable held[LOOK];

    if (kvbm_staging(pin->manager))
        return;
    for (uint32_t done = 0, some; done < pin->n; done += some) {
        some = KV_MIN(pin->n - done, (uint32_t)LOOK);
        kvbm_pool_match_scattered(pin->manager->host, pin->group, kvbm_pin_key(pin, done), some,
                                  pin->store ? KVBM_MATCH_NO_TOUCH : 0, held);
        for (uint32_t i = 0; i < some; i++) {
            if (!held[i].handle.pool)
                continue;
            pin->items[done + i].host = held[i].handle;
            pin->items[done + i].state = ITEM_HELD;
            pin->manager->stats.host.hits += !pin->store;
            pin->items[done + i].found = true;
        }
    }
}

/* Look up again the items that another pin fetched or stored, and fetch those that are still
 * missing. */
static void look(struct kvbm_pin *pin)
{
    struct kvbm_manager *m = pin->manager;
    bool missed = false;

    if (pin->store || !pin->n_waits)
        return;
    for (uint32_t i = 0; i < pin->n; i++) {
        struct kvbm_item *item = &pin->items[i];
        struct kvbm_immutable held;
        uint64_t hash;

        if (item->state != ITEM_WAITS)
            continue;
        hash = kvbm_pin_hash(pin, i);
        if (kvbm_key_is_pending(m, hash) && !kvbm_fetch_is_circle(pin, i))
            continue;
        /* the key has come or has been given up: hold its block, or fetch it now */
        (void)kvbm_set_await_no_more(&m->pins.pending, hash);
        pin->n_waits--;
        if (!kvbm_staging(m) &&
            kvbm_pool_match(m->host, pin->group, kvbm_pin_key(pin, i), 1, 0, &held) == 1) {
            item->host = held.handle;
            item->state = ITEM_HELD;
            item->found = true;
            m->stats.host.hits++;
        } else {
            item->state = ITEM_MISS;
            missed = true;
        }
    }
    /* a released pin fetches for its jobs alone */
    if (missed && (!pin->released || pin->jobs))
        kvbm_fetch_start(pin);
    kvbm_pin_settle(pin);
}

void kvbm_pins_look(struct kvbm_manager *m)
{
    for (struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next)
        look(pin);
}

void kvbm_pin_settle(struct kvbm_pin *pin)
{
    struct kvbm_manager *m = pin->manager;

    if (pin->n_fetched || pin->n_waits)
        return;
    /* a key counts once as a miss, however often the pin settles */
    for (uint32_t i = 0; !pin->store && !pin->settled && i < pin->n; i++)
        m->stats.host.misses += !pin->items[i].found;
    pin->settled = true;
    /* not begun here: callers walk lists of pins, and a job may change them */
    if (pin->jobs && !pin->is_ready) {
        pin->is_ready = true;
        TAILQ_INSERT_TAIL(&m->pins.ready, pin, ready);
        kvbm_step_due(m, KVBM_STEP_START);
    }
    pthread_cond_broadcast(&m->changed);
}

void kvbm_pin_stop_waiting(struct kvbm_pin *pin)
{
    struct kvbm_set *pending = &pin->manager->pins.pending;
    bool last = false; /* of those that wait for some key */

    if (!pin->n_waits)
        return;
    for (uint32_t i = 0; i < pin->n; i++) {
        struct kvbm_item *item = &pin->items[i];

        if (item->state == ITEM_WAITS)
            last |= kvbm_set_await_no_more(pending, kvbm_pin_hash(pin, i));
        if (item->state == ITEM_WAITS || item->state == ITEM_STARVED)
            item->state = ITEM_MISS;
    }
    pin->n_waits = pin->n_starved = 0;
    /* fetches of pins that nobody holds went on only for those that waited */
    if (last)
        kvbm_fetch_cancel_left(pin->manager);
}

uint64_t kvbm_pin_late(struct kvbm_manager *m)
{
    uint64_t now = kv_now_ns(), next = UINT64_MAX;

    for (struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next) {
        if (!pin->n_waits || !pin->deadline_ns)
            continue;
        if (pin->deadline_ns > now) {
            next = KV_MIN(next, pin->deadline_ns);
            continue;
        }
        kvbm_pin_stop_waiting(pin);
        kvbm_pin_settle(pin);
    }
    return next;
}

/* ---- calls ---- */

long kvbm_pin_load(struct kvbm_pin *pin, const struct kvbm_pin_opts *opts)
{
    pin->deadline_ns = KV_OPT(opts, deadline_ns, 0);
    pin->no_fetch = KV_OPT(opts, no_fetch, false);
    pin->priority = KV_OPT(opts, priority, 0);
    pin->no_peers = pin->lends || KV_OPT(opts, no_peers, false);
    pin->in_place = KV_OPT(opts, in_place, false);
    pin->hinted = kvbm_peers_hinted(pin->manager, KV_OPT(opts, hint, NULL));
    /* while is_new, nobody has seen which blocks the pin holds: fetches may take some of
     * them again */
    kvbm_pin_hold(pin);
    pin->is_new = true;
    if (!pin->no_fetch)
        kvbm_fetch_start(pin);
    pin->is_new = false;
    kvbm_pin_settle(pin);
    return kvbm_pin_prefix(pin, false);
}

static long prepare(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                    const struct kvbm_pin_opts *opts, bool lends, struct kvbm_pin **ret)
{
    struct kvbm_pin *pin;
    long rc = ret && kv_sized_or_null(opts, "kvbm_pin_opts") ? kvbm_manager_usable(m) : -EINVAL;

    if (rc == 0)
        rc = kvbm_deadline_check(KV_OPT(opts, deadline_ns, 0));
    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    rc = m->stopping ? -ESHUTDOWN : kvbm_pin_new(m, chain, n, false, &pin);
    if (rc == 0) {
        pin->lends = lends;
        rc = kvbm_pin_load(pin, opts);
        *ret = pin;
    }
    kvbm_manager_leave(m);
    return rc;
}

long kvbm_manager_prepare_load(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                               const struct kvbm_pin_opts *opts, struct kvbm_pin **ret)
{
    return prepare(m, chain, n, opts, false, ret);
}

long kvbm_pin_lend(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                   const struct kvbm_pin_opts *opts, struct kvbm_pin **ret)
{
    return prepare(m, chain, n, opts, true, ret);
}

int kvbm_pin_wait(struct kvbm_pin *pin, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc = pin ? kvbm_manager_usable(pin->manager) : -EINVAL;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(pin->manager);
    while (rc == 0 && (pin->n_fetched || pin->n_waits))
        rc = kvbm_manager_wait_change(pin->manager, deadline);
    kvbm_manager_leave(pin->manager);
    return rc;
}
