// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of a pin from peers: first which peer has them, without host blocks, then the blocks.
 *
 *   MISS ── ask ──► FETCHED ── a peer has it ──► MISS with a peer ── get ──► FETCHED ──► HELD
 *                      │                              └── lease (leased.c) ──► FETCHED ──► LEASED
 *                      └────── no peer ────────► MISS, tried
 *
 * Peers come before the object store for keys that the store isn't known to have: an answer of a
 * peer takes less than a millisecond, that of a store many. Questions run ahead of the blocks, one
 * at a time, until no peer has one of the keys; of the blocks WINDOW batches are under way.
 */
#include <errno.h>

#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define WINDOW 4         /* batches of blocks at a time */
#define FIRST_ASKED 128u /* keys of the first question */
#define MAX_TRIES 3u     /* peers that say they have a block, and don't give it */

#define TRIED (1u << KVBM_TIER_PEER)

/* True when the object store is known to have item @i. */
static bool in_object_store(const struct kvbm_pin *pin, uint32_t i)
{
    const struct kvbm_manager *m = pin->manager;
    uint8_t tiers = 0;

    if (!m->object_store || pin->items[i].tried >> KV_TIER_EXTERNAL & 1)
        return false;
    kvbm_registry_locate(m->registry, pin->group, kvbm_pin_key(pin, i), 1, &tiers);
    return tiers >> KV_TIER_EXTERNAL & 1;
}

bool kvbm_fetch_peers_first(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->manager->peers && !pin->no_peers && i < pin->peer_end &&
           !(pin->items[i].tried & TRIED) && !in_object_store(pin, i);
}

static void not_at_peers(struct kvbm_pin *pin, uint32_t i)
{
    pin->items[i].tried |= TRIED;
    pin->items[i].peer = 0;
    if (kvbm_pin_is_prefix(pin))
        pin->peer_end = KV_MIN(pin->peer_end, i);
}

void kvbm_fetch_not_at_peer(struct kvbm_pin *pin, uint32_t i, bool asked, int why)
{
    struct kvbm_item *item = &pin->items[i];
    bool over = pin->deadline_ns && kv_now_ns() >= pin->deadline_ns;

    if (asked || over || why == -ECANCELED || ++item->n_peers >= MAX_TRIES)
        not_at_peers(pin, i);
    else /* another peer may have it */
        item->peer = 0;
}

/* Look which peer has item @i, as far as is known. Returns false when none has it. */
static bool find_peer(struct kvbm_pin *pin, uint32_t i)
{
    struct kvbm_item *item = &pin->items[i];
    uint64_t worker = 0;

    if (item->peer)
        return true;
    switch (kvbm_peers_known(pin->manager->peers, kvbm_pin_hash(pin, i), &worker)) {
    case KVBM_KNOWN_THERE:
        item->peer = worker;
        return true;
    case KVBM_KNOWN_ABSENT:
        if (pin->hinted) /* a router knows better */
            return true;
        not_at_peers(pin, i);
        return false;
    default:
        return true;
    }
}

/* Pick up to @max items from *@at on: items to be asked for (@asks), or such that one peer has.
 * Returns their number. */
static uint32_t pick(struct kvbm_pin *pin, bool asks, uint32_t max, uint32_t *at, uint32_t *index)
{
    uint32_t n = 0;

    for (; *at < pin->peer_end && n < max; ++*at) {
        const struct kvbm_item *item = &pin->items[*at];

        if (item->state != ITEM_MISS || item->tried & TRIED || asks == (item->peer != 0) ||
            in_object_store(pin, *at) || kvbm_fetch_left_to_others(pin, *at) ||
            !find_peer(pin, *at) || (asks && item->peer))
            continue;
        if (n && item->peer != pin->items[index[0]].peer)
            break;
        index[n++] = *at;
    }
    return n;
}

/* Count the questions to peers that run for a pin, or (@asks false) the batches of blocks. */
static uint32_t running(const struct kvbm_pin *pin, bool asks)
{
    uint32_t n = 0;

    for (const struct kvbm_fetch *fetch = pin->fetches; fetch; fetch = fetch->next)
        n += fetch->tier == KVBM_TIER_PEER && fetch->asks == asks;
    return n;
}

/* Ask for the next keys. A prompt is rarely longer at a peer than what was asked for at
 * first; if it is, a few questions are enough: a round trip for each batch would take longer
 * than the blocks. */
static void ask(struct kvbm_pin *pin)
{
    uint32_t index[KVBM_PEER_ASKED], n, at = 0;
    uint32_t max = KV_MIN(KV_MAX(4 * pin->n_asked, FIRST_ASKED), (uint32_t)KVBM_PEER_ASKED);

    n = pick(pin, true, max, &at, index);
    if (!n)
        return;
    pin->n_asked = n;
    kvbm_fetch_ask(pin, index, n, false);
}

/* Get items from the peer that has them: in place as far as that may be, else into host blocks. */
static void get(struct kvbm_pin *pin, const uint32_t *index, uint32_t n)
{
    uint32_t leased = kvbm_leased_room(pin, index, n);

    if (leased)
        kvbm_fetch_ask(pin, index, leased, true);
    if (leased < n)
        kvbm_fetch_by_share(pin, KVBM_TIER_PEER, index + leased, n - leased);
}

void kvbm_fetch_from_peers(struct kvbm_pin *pin)
{
    uint32_t index[KVBM_BATCH] = {0}, n, at = 0;
    bool any = kvbm_peers_any(pin->manager->peers);

    pin->peer_end = kvbm_fetch_behind_gap(pin, KVBM_TIER_PEER, pin->peer_end);
    if (any && !running(pin, true))
        ask(pin);
    while (any && !pin->n_starved && running(pin, false) < WINDOW &&
           (n = pick(pin, false, KVBM_BATCH, &at, index)) > 0)
        get(pin, index, n);
    if (!any && !pin->peer_window) /* nobody to ask: don't come back with each end of a fetch */
        pin->no_peers = true;
    kvbm_fetch_nobody_feeds(pin);
}
