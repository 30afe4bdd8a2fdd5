// SPDX-License-Identifier: Apache-2.0
/*
 * Pins: a list of keys, some with a host block that the pin keeps from eviction.
 *
 *   load    prepare_load ─► HELD, or on its way (load.c, fetch.c) ─► jobs copy ─► release
 *   store   prepare_store ─► RESERVED (offload/store.c) ─► jobs copy ─► commit ─► HELD ─► release
 *
 * Each of these has a reference: the caller until release, a fetch, a job, an entry of an offload
 * queue whose block no pool knows. The last reference frees the pin and gives its blocks back.
 *
 * Invariants: an item has a host block exactly while it is FETCHED, RESERVED, STAGED or HELD.
 * Exceptions: FETCHED items of questions to peers, and a direct job's items, whose blocks are the
 * cache's. The key of each FETCHED and RESERVED item is in the set of pending keys, so that no
 * second pin brings the same key. n_fetched, n_waits and n_starved count the items of these states;
 * the pin has settled once the first two are 0.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "bm/deadline.h"
#include "bm/registry/registry.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define LOOK 64 /* keys looked up at a time */

/* Copy the tokens of a chain, for the events of its blocks. */
static int copy_tokens(struct kvbm_pin *pin, const struct kvbm_chain *chain)
{
    const uint32_t *tokens = KV_OPT(chain, tokens, NULL);
    size_t bytes = (size_t)pin->n * pin->manager->block_tokens * sizeof(*tokens);

    if (!tokens || !bytes || !pin->manager->opts.events || !pin->manager->host)
        return 0;
    pin->tokens = malloc(bytes);
    if (!pin->tokens)
        return -ENOMEM;
    memcpy(pin->tokens, tokens, bytes);
    return 0;
}

bool kvbm_pin_tells(struct kvbm_manager *m)
{
    uint64_t now = kv_now_ns();

    if (m->pins.told_ns && now - m->pins.told_ns < KV_NS_PER_S)
        return false;
    m->pins.told_ns = now;
    return true;
}

bool kvbm_pin_misplaced(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n)
{
    struct kvbm_misplaced at;

    if (!kvbm_registry_misplaced(m->registry, chain, n, &at))
        return false;
    if (kvbm_pin_tells(m))
        kv_log_warn("kvbm",
                    "a key is known at another position: positions count blocks, not tokens",
                    "%s=%" PRId64 " position=%" PRIu32 " known=%" PRIu32,
                    at.index < 0 ? "parent_of" : "key", KV_MAX(at.index, INT64_C(0)), at.position,
                    at.known);
    return true;
}

/* Say what is wrong with the keys of a pin; NULL: nothing. A caller that counts tokens in place of
 * blocks is found here: its blocks would be registered where no lookup expects them. */
static const char *fault_of(const struct kvbm_chain *chain, size_t n)
{
    if (n && !chain->keys)
        return "no keys";
    if (n > KVBM_MAX_PIN)
        return "more than 2^20 keys";
    if (chain->group >= KVBM_MAX_GROUPS)
        return "no such group";
    if (kvbm_chain_scattered(chain) && chain->parent)
        return "scattered keys have no parent";
    if (!chain->parent != !chain->position)
        return "a position counts the blocks before the first key: 0 without a parent, else more";
    return n > UINT32_MAX - chain->position ? "positions beyond 32 bits" : NULL;
}

/* Check the keys of a pin; a store's also against the positions that are known. Returns 0 or
 * -EINVAL. */
static int check_chain(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool store)
{
    const char *fault;

    if (!kv_sized(chain, "kvbm_chain") || chain->size < offsetof(struct kvbm_chain, tokens))
        return -EINVAL;
    fault = fault_of(chain, n);
    if (fault && kvbm_pin_tells(m))
        kv_log_warn("kvbm", "keys refused", "reason=\"%s\"", fault);
    return fault || (store && kvbm_pin_misplaced(m, chain, n)) ? -EINVAL : 0;
}

int kvbm_pin_new(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool store,
                 struct kvbm_pin **ret)
{
    size_t items = sizeof(struct kvbm_pin) + n * sizeof(struct kvbm_item);
    struct kvbm_pin *pin;

    if (check_chain(m, chain, n, store) < 0)
        return -EINVAL;
    if (kvbm_set_reserve(&m->pins.pending, n) < 0)
        return -ENOMEM;
    pin = calloc(1, items + (n + 1) * m->key_len);
    if (!pin)
        return -ENOMEM;
    pin->manager = m;
    pin->store = store;
    pin->retain = KVBM_PRIORITY_DEFAULT;
    pin->refs = 1;
    pin->group = chain->group;
    pin->position = chain->position;
    pin->n = pin->peer_end = pin->object_end = (uint32_t)n;
    pin->has_parent = chain->parent != NULL;
    pin->scattered = kvbm_chain_scattered(chain);
    pin->keys = (uint8_t *)pin + items + m->key_len;
    if (chain->parent)
        memcpy(pin->keys - m->key_len, chain->parent, m->key_len);
    if (n)
        memcpy(pin->keys, chain->keys, n * m->key_len);
    if (copy_tokens(pin, chain) < 0) {
        free(pin);
        return -ENOMEM;
    }
    kvbm_registry_tell(m->registry, chain, n, m->block_tokens);
    /* newest first: hungriest() prefers the older of two pins by this order */
    pin->next = m->pins.first;
    if (pin->next)
        pin->next->prev = pin;
    m->pins.first = pin;
    m->pins.n++;
    *ret = pin;
    return 0;
}

void kvbm_pin_let_go(struct kvbm_pin *pin, uint32_t i)
{
    struct kvbm_item *item = &pin->items[i];

    if (item->state == ITEM_HELD)
        kvbm_pool_release(pin->manager->host, (struct kvbm_immutable *)&item->host, 1);
    else if (item->state == ITEM_RESERVED || item->state == ITEM_STAGED)
        kvbm_pool_release_mutable(pin->manager->host, (struct kvbm_mutable *)&item->host, 1);
    /* another pin may bring the key from now on */
    if (item->state == ITEM_RESERVED)
        kvbm_set_drop(&pin->manager->pins.pending, kvbm_pin_hash(pin, i));
    if (item->state == ITEM_WAITS && !pin->store)
        (void)kvbm_set_await_no_more(&pin->manager->pins.pending, kvbm_pin_hash(pin, i));
    item->state = ITEM_MISS;
}

/* Release the caller's blocks of prepare_load_blocks, children before their parents. */
static void let_likes_go(struct kvbm_pin *pin)
{
    for (uint32_t i = pin->n; pin->likes && i-- > 0;)
        kvbm_immutable_release(&pin->likes[i]);
    free(pin->likes);
}

/* Release held blocks from the last to the first, so that leaves are older than their parents. */
static void let_held_go(struct kvbm_pin *pin)
{
    struct kvbm_immutable held[LOOK];

    for (uint32_t end = pin->n, start; end > 0; end = start) {
        uint32_t n = 0;

        start = end > LOOK ? end - LOOK : 0;
        for (uint32_t i = start; i < end; i++) {
            if (pin->items[i].state != ITEM_HELD)
                continue;
            held[n++].handle = pin->items[i].host;
            pin->items[i].state = ITEM_MISS;
        }
        kvbm_pool_release(pin->manager->host, held, n);
    }
}

/* Release the leases of blocks in peers' memory. No item may be LEASED, or the pin is freed. */
static void let_leases_go(struct kvbm_pin *pin)
{
    struct kvbm_leased *leased;

    while ((leased = pin->leased) != NULL) {
        pin->leased = leased->next;
        kvbm_leased_free(pin->manager, leased);
    }
}

void kvbm_pin_unwanted(struct kvbm_pin *pin)
{
    if (!pin->released || pin->refs != 1 + pin->n_fetches)
        return;
    /* nobody will read what this pin brings; other pins may wait for some of its fetches */
    kvbm_pin_stop_waiting(pin);
    kvbm_fetch_cancel_unneeded(pin);
    let_held_go(pin);
    for (uint32_t i = pin->n; pin->leased && i-- > 0;) {
        if (pin->items[i].state == ITEM_LEASED)
            pin->items[i].state = ITEM_MISS;
    }
    let_leases_go(pin);
}

void kvbm_pin_put(struct kvbm_pin *pin)
{
    struct kvbm_manager *m = pin->manager;
    bool reserved = false;

    if (--pin->refs > 0) {
        if (pin->store && pin->refs == 1 && !pin->released) /* its blocks have been written */
            pthread_cond_broadcast(&m->changed);
        /* listed, so that the end of a wait elsewhere finds the fetches that nobody needs
         * any more */
        if (pin->released && pin->refs == pin->n_fetches && !pin->is_left) {
            pin->is_left = true;
            LIST_INSERT_HEAD(&m->pins.left, pin, left);
        }
        return;
    }
    if (pin->is_left)
        LIST_REMOVE(pin, left);
    if (pin->is_ready)
        TAILQ_REMOVE(&m->pins.ready, pin, ready);
    let_held_go(pin);
    for (uint32_t i = pin->n; i-- > 0;) {
        reserved |= pin->items[i].state == ITEM_RESERVED;
        kvbm_pin_let_go(pin, i);
    }
    let_likes_go(pin);
    let_leases_go(pin);
    if (pin->prev)
        pin->prev->next = pin->next;
    else
        m->pins.first = pin->next;
    if (pin->next)
        pin->next->prev = pin->prev;
    m->pins.n--;
    free(pin->tokens);
    free(pin);
    /* pins that waited for a store which has been given up have to fetch the key themselves */
    if (reserved)
        kvbm_step_due(m, KVBM_STEP_LOOK);
    pthread_cond_broadcast(&m->changed);
}

/* The pool allocates all or nothing, and says how many it could have given. */
uint32_t kvbm_take_blocks(struct kvbm_pool *pool, struct kvbm_mutable *ret, uint32_t n)
{
    struct kvbm_shortage shortage;

    for (int tries = 0; n && tries < 3; tries++) { /* other threads allocate blocks meanwhile */
        int err = kvbm_pool_allocate(pool, n, ret, &shortage);

        if (err == 0)
            return n;
        if (err != -ENOSPC)
            return 0;
        n = (uint32_t)KV_MIN((size_t)n, shortage.available);
    }
    return 0;
}

/* ---- registering ---- */

/* Register a run of blocks that have their bytes: all at once, or, when that is refused, one by
 * one. */
static uint32_t register_run(struct kvbm_pin *pin, uint32_t i, uint32_t n)
{
    struct kvbm_pool *host = pin->manager->host;
    struct kvbm_chain chain = kvbm_pin_chain(pin, i);
    struct kvbm_mutable blocks[LOOK];
    struct kvbm_complete complete[LOOK];
    struct kvbm_immutable held[LOOK];

    /* complete refuses all blocks or none; register can't fail after it */
    for (uint32_t k = 0; k < n; k++)
        blocks[k].handle = pin->items[i + k].host;
    if (kvbm_pool_complete(host, blocks, n, &chain, complete) < 0)
        return 0;
    kvbm_pool_register(host, complete, n, held);
    for (uint32_t k = 0; k < n; k++) {
        pin->items[i + k].host = held[k].handle;
        pin->items[i + k].state = ITEM_HELD;
    }
    return n;
}

uint32_t kvbm_pin_register(struct kvbm_pin *pin, uint32_t i, uint32_t n)
{
    struct kvbm_chain chain;
    uint32_t held = 0;

    for (uint32_t done = 0, some; done < n; done += some) {
        some = KV_MIN(n - done, (uint32_t)LOOK);
        if (register_run(pin, i + done, some) == some) {
            held += some;
            continue;
        }
        for (uint32_t k = i + done; k < i + done + some; k++) {
            struct kvbm_item *item = &pin->items[k];

            if (register_run(pin, k, 1) == 1) {
                held++;
                continue;
            }
            kvbm_pool_release_mutable(pin->manager->host, (struct kvbm_mutable *)&item->host, 1);
            item->state = ITEM_MISS;
            pin->manager->stats.host.failed++;
            chain = kvbm_pin_chain(pin, k);
            (void)kvbm_pin_misplaced(pin->manager, &chain,
                                     1); /* of a load: a miss, which the log tells */
        }
    }
    return held;
}

/* ---- accessors ---- */

/* Return the state of an item as callers see it (KVBM_READY ... KVBM_MISS). */
static uint8_t where(const struct kvbm_item *item)
{
    switch (item->state) {
    case ITEM_MISS:
        return KVBM_MISS;
    case ITEM_BUSY:
        return KVBM_BUSY;
    case ITEM_STAGED:
    case ITEM_HELD:
    case ITEM_BELOW:
    case ITEM_LEASED:
        return KVBM_READY;
    default:
        return KVBM_PENDING;
    }
}

long kvbm_pin_prefix(const struct kvbm_pin *pin, bool ready)
{
    uint32_t n = 0;

    for (; n < pin->n; n++) {
        uint8_t at = where(&pin->items[n]);

        if (at != KVBM_READY && (ready || at != KVBM_PENDING))
            break;
    }
    return n;
}

long kvbm_pin_state(struct kvbm_pin *pin, uint8_t *ret)
{
    long rc = pin ? kvbm_manager_usable(pin->manager) : -EINVAL;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(pin->manager);
    for (uint32_t i = 0; ret && i < pin->n; i++)
        ret[i] = where(&pin->items[i]);
    rc = kvbm_pin_prefix(pin, true);
    kvbm_manager_leave(pin->manager);
    return rc;
}

long kvbm_pin_blocks(struct kvbm_pin *pin, uint32_t *ret)
{
    long rc = pin && ret ? kvbm_manager_usable(pin->manager) : -EINVAL, n = 0;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(pin->manager);
    for (uint32_t i = 0; i < pin->n; i++) {
        uint8_t state = pin->items[i].state;
        /* blocks that the caller may use: a store's that it fills, a load's that it reads */
        bool mine =
            pin->store ? state == ITEM_RESERVED : state == ITEM_HELD || state == ITEM_STAGED;

        ret[i] = mine ? pin->items[i].host.block : UINT32_MAX;
        n += mine;
    }
    kvbm_manager_leave(pin->manager);
    return n;
}

void kvbm_pin_release(struct kvbm_pin *pin)
{
    struct kvbm_manager *m = pin ? pin->manager : NULL;

    if (!pin || kvbm_manager_usable(m) < 0)
        return;
    kvbm_manager_enter(m);
    pin->released = true;
    kvbm_pin_unwanted(pin);
    kvbm_pin_put(pin);
    kvbm_manager_leave(m);
}
