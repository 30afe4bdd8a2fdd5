// SPDX-License-Identifier: Apache-2.0
/*
 * Fetches: which blocks of a pin are fetched from which tier, and when.
 *
 *   disk          all at once: its batches end soon, and their blocks are known to be there
 *   peers         before the object store, for keys that the store isn't known to have (fetch_peers.c)
 *   object store  WINDOW batches run ahead, until one misses a key: a prompt can't use what is behind
 *
 * Fetches from the object store and from peers use only a share of the host blocks at a time. Host
 * blocks are allocated before the bytes come, so a store that hangs would otherwise evict the whole
 * host tier. Items beyond the share are STARVED. When a fetch ends, the starving pin of the highest
 * priority continues; of equal ones the oldest.
 *
 * Invariants: at most max_object_fetched host blocks wait for remote bytes. A pin starves only
 * while a remote fetch runs, whose end continues it; else its items become BUSY. An item's `tried`
 * has a bit for each tier that it won't be fetched from again, so every pin settles.
 */
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"

#define WINDOW 4 /* batches of the object store at a time */

bool kvbm_fetch_is_circle(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->lends && kvbm_set_has(&pin->manager->pins.at_peers, kvbm_pin_hash(pin, i));
}

bool kvbm_fetch_left_to_others(struct kvbm_pin *pin, uint32_t i)
{
    uint64_t hash = kvbm_pin_hash(pin, i);

    if (!kvbm_key_is_pending(pin->manager, hash))
        return false;
    /* no tier may be tried: the key is pending, and a second fetch of it would evict a
     * block more */
    if (kvbm_fetch_is_circle(pin, i)) {
        pin->items[i].tried = UINT8_MAX;
        return true;
    }
    pin->items[i].state = ITEM_WAITS;
    kvbm_set_await(&pin->manager->pins.pending, hash);
    if (!pin->n_waits++ && pin->deadline_ns)
        pthread_cond_signal(&pin->manager->work); /* the mover watches the deadline */
    return true;
}

/* Leave an item until a remote fetch ends: such fetches fill their share of host blocks. */
static void starve(struct kvbm_pin *pin, uint32_t i)
{
    pin->items[i].state = ITEM_STARVED;
    pin->n_starved++;
    if (!pin->n_waits++ && pin->deadline_ns)
        pthread_cond_signal(&pin->manager->work); /* the mover watches the deadline */
}

void kvbm_fetch_stop_starving(struct kvbm_pin *pin, uint32_t first)
{
    for (uint32_t i = first; pin->n_starved && i < pin->n; i++) {
        if (pin->items[i].state != ITEM_STARVED)
            continue;
        pin->items[i].state = ITEM_MISS;
        pin->n_starved--;
        pin->n_waits--;
    }
}

uint32_t kvbm_fetch_behind_gap(const struct kvbm_pin *pin, enum kv_tier tier, uint32_t end)
{
    const struct kvbm_item *items = pin->items;

    /* states from STAGED on have their bytes: another tier gave what this one lacks */
    if (end < pin->n && items[end].state < ITEM_STAGED)
        return end;
    while (end < pin->n && (items[end].state != ITEM_MISS || !(items[end].tried >> tier & 1)))
        end++;
    return end;
}

void kvbm_fetch_ends_at(struct kvbm_pin *pin, uint32_t i)
{
    if (kvbm_pin_is_prefix(pin))
        pin->object_end = KV_MIN(pin->object_end, i);
}

/* Pick up to KVBM_BATCH items from *@at on that are MISS and were not looked for in @tier.
 * Pack their keys into @keys unless that is NULL. Items that another pin fetches or stores
 * become WAITS. */
static uint32_t pick(struct kvbm_pin *pin, enum kv_tier tier, uint32_t *at, uint32_t *index,
                     uint8_t *keys)
{
    struct kvbm_manager *m = pin->manager;
    uint32_t n = 0, stop = tier == KV_TIER_EXTERNAL ? pin->object_end : pin->n;

    for (; *at < stop && n < KVBM_BATCH; ++*at) {
        struct kvbm_item *item = &pin->items[*at];

        if (item->state != ITEM_MISS || item->tried >> tier & 1 ||
            kvbm_fetch_left_to_others(pin, *at) ||
            (tier == KV_TIER_EXTERNAL && kvbm_fetch_peers_first(pin, *at)))
            continue;
        if (tier == KV_TIER_EXTERNAL && pin->scattered &&
            kvbm_presence_known_absent(m, kvbm_pin_hash(pin, *at))) {
            item->tried |= (uint8_t)(1u << tier);
            continue;
        }
        if (keys)
            memcpy(keys + (size_t)n * m->key_len, kvbm_pin_key(pin, *at), m->key_len);
        index[n++] = *at;
    }
    return n;
}

/* Turn the items that starve into BUSY: no fetch is left whose end would continue the pin. */
static void give_up_starving(struct kvbm_pin *pin)
{
    for (uint32_t i = 0; pin->n_starved && i < pin->n; i++) {
        if (pin->items[i].state != ITEM_STARVED)
            continue;
        pin->items[i].state = ITEM_BUSY;
        kvbm_pin_drop(pin);
        pin->n_starved--;
        pin->n_waits--;
    }
}

/*
 * End the starving of holds (pins that lend to a peer) while fetches from peers use the share. Else
 * two nodes could wait for each other without end:
 *
 *   our fetch from P has our share ─► waits for P's hold ─► starves: P's fetch from us has P's share
 *   P's fetch from us has P's share ─► waits for our hold ─► starves: our fetch from P has our share
 *
 * The peer gets what a hold has by now, and treats the rest as missing.
 */
static void free_holds(struct kvbm_manager *m)
{
    for (struct kvbm_pin *pin = m->pins.first; pin && m->pins.n_peer_fetched; pin = pin->next) {
        if (!pin->lends || !pin->n_starved)
            continue;
        give_up_starving(pin);
        kvbm_pin_settle(pin);
    }
}

/* Fetch all items that the disk's pool has. Holding their disk blocks keeps the slots from being
 * written while they are read. */
static void from_disk(struct kvbm_pin *pin)
{
    uint8_t keys[KVBM_BATCH * KVBM_MAX_KEY];
    struct kvbm_immutable held[KVBM_BATCH];
    uint32_t index[KVBM_BATCH] = {0}, n;

    for (uint32_t at = 0; (n = pick(pin, KV_TIER_DISK, &at, index, keys)) > 0;) {
        uint32_t found = 0;

        kvbm_pool_match_scattered(pin->manager->disk, pin->group, keys, n, 0, held);
        for (uint32_t k = 0; k < n; k++) {
            struct kvbm_item *item = &pin->items[index[k]];

            item->tried |= 1u << KV_TIER_DISK;
            if (!held[k].handle.pool) {
                pin->manager->stats.disk.misses++;
                continue;
            }
            item->source = held[k].handle;
            index[found++] = index[k];
        }
        if (found)
            kvbm_fetch_some(pin, KV_TIER_DISK, index, found);
    }
}

/* Return how many host blocks more may wait for remote bytes. */
static uint32_t share_left(const struct kvbm_manager *m)
{
    return m->pins.max_object_fetched -
           KV_MIN(m->pins.n_object_fetched, m->pins.max_object_fetched);
}

void kvbm_fetch_by_share(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n)
{
    uint32_t got = pin->direct ? n : KV_MIN(n, share_left(pin->manager));

    if (got)
        kvbm_fetch_some(pin, tier, index, got);
    for (uint32_t k = got; k < n; k++)
        starve(pin, index[k]);
    free_holds(pin->manager);
}

void kvbm_fetch_nobody_feeds(struct kvbm_pin *pin)
{
    if (!pin->manager->pins.n_object_fetched)
        give_up_starving(pin);
}

/* Leave out the first item whose key is known to be absent, and those behind it. Returns how many
 * are left. */
static uint32_t before_absent(struct kvbm_pin *pin, const uint32_t *index, uint32_t n)
{
    for (uint32_t k = 0; k < n && kvbm_pin_is_prefix(pin); k++) {
        if (kvbm_presence_known_absent(pin->manager, kvbm_pin_hash(pin, index[k]))) {
            kvbm_fetch_ends_at(pin, index[k]);
            return k;
        }
    }
    return n;
}

static void from_object(struct kvbm_pin *pin)
{
    uint32_t index[KVBM_BATCH] = {0}, n, at = 0;

    pin->object_end = kvbm_fetch_behind_gap(pin, KV_TIER_EXTERNAL, pin->object_end);
    /* a batch at a time, so that the first absent key ends the window */
    for (int i = 0; i < WINDOW; i++) {
        n = pick(pin, KV_TIER_EXTERNAL, &at, index, NULL);
        n = before_absent(pin, index, n);
        if (!n)
            break;
        kvbm_fetch_by_share(pin, KV_TIER_EXTERNAL, index, n);
    }
    kvbm_fetch_nobody_feeds(pin);
}

void kvbm_fetch_start(struct kvbm_pin *pin)
{
    if (pin->no_fetch || pin->store || pin->manager->mover.ends)
        return;
    /* first, so that no tier is asked for keys that another pin brings anyway */
    for (uint32_t i = 0; i < pin->n; i++) {
        if (pin->items[i].state == ITEM_MISS)
            kvbm_fetch_left_to_others(pin, i);
    }
    if (pin->manager->disk_store)
        from_disk(pin);
    if (pin->manager->peers && !pin->no_peers && !pin->n_starved)
        kvbm_fetch_from_peers(pin);
    if (pin->manager->object_store && !pin->object_window && !pin->n_starved)
        from_object(pin);
}

/* Cancel a fetch's batch: what has begun goes on, and its end is noted as any other. */
static void cancel(struct kvbm_fetch *fetch)
{
    const struct kvbm_manager *m = fetch->pin->manager;

    if (fetch->tier == KVBM_TIER_PEER)
        kvbm_peers_cancel(m->peers, &fetch->peer);
    else if (fetch->tier == KV_TIER_DISK)
        kvbm_disk_cancel(m->disk_store, &fetch->disk);
    else
        kvbm_object_cancel(m->object_store, &fetch->object);
}

void kvbm_fetch_cancel(struct kvbm_pin *pin)
{
    for (struct kvbm_fetch *fetch = pin->fetches; fetch; fetch = fetch->next)
        cancel(fetch);
}

/* True when a pin waits for what a fetch brings into the host tier. */
static bool is_awaited(const struct kvbm_fetch *fetch)
{
    const struct kvbm_manager *m = fetch->pin->manager;

    if (fetch->asks || fetch->leases || kvbm_staging(m))
        return false;
    for (uint32_t k = 0; k < fetch->n; k++) {
        if (kvbm_set_is_awaited(&m->pins.pending, kvbm_pin_hash(fetch->pin, fetch->index[k])))
            return true;
    }
    return false;
}

void kvbm_fetch_cancel_unneeded(struct kvbm_pin *pin)
{
    for (struct kvbm_fetch *fetch = pin->fetches; fetch; fetch = fetch->next) {
        if (!is_awaited(fetch))
            cancel(fetch);
    }
}

void kvbm_fetch_cancel_left(struct kvbm_manager *m)
{
    for (struct kvbm_pin *pin = LIST_FIRST(&m->pins.left); pin; pin = LIST_NEXT(pin, left)) {
        if (pin->refs == pin->n_fetches)
            kvbm_fetch_cancel_unneeded(pin);
    }
}
