// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of peers that a pin leaves where they are (kvbm_pin_opts.in_place), in memory that the
 * peer shares with this process. A job copies them from there.
 *
 *   MISS with a peer ── lease ──► FETCHED ──► LEASED ── job ──► copied, and intact afterwards
 *     ▲                    │                    │ the lease has ended
 *     └── refused: get ────┘                    └──► MISS: got as without the option
 *
 * A pin keeps its leases until it ends, and renews none. No clock is looked at: the owner changes a
 * block's generation in the shared memory before it lets anyone write into the block. So a block
 * whose generation is the leased one is right, however old the lease is, and after its owner's
 * death.
 */
#include <errno.h>
#include <stdlib.h>

#include "peer/lease/ask.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/state/manager.h"

uint32_t kvbm_leased_room(const struct kvbm_pin *pin, const uint32_t *index, uint32_t n)
{
    const struct kvbm_manager *m = pin->manager;
    uint64_t most;

    for (uint32_t k = 0; k < n; k++) {
        if (!pin->in_place || pin->items[index[k]].n_peers)
            return 0;
    }
    most = kvbm_peers_lendable(m->peers, pin->items[index[0]].peer);
    return (uint32_t)KV_MIN((uint64_t)n, most - KV_MIN(most, (uint64_t)m->pins.n_leased));
}

struct kvbm_leased *kvbm_leased_new(struct kvbm_manager *m, uint32_t n)
{
    struct kvbm_leased *leased = calloc(1, sizeof(*leased));

    if (!leased)
        return NULL;
    leased->n = n;
    m->pins.n_leased += n;
    return leased;
}

void kvbm_leased_free(struct kvbm_manager *m, struct kvbm_leased *leased)
{
    if (!leased)
        return;
    m->pins.n_leased -= leased->n;
    kvbm_lease_release(leased->lease);
    free(leased);
}

void kvbm_leased_add(struct kvbm_pin *pin, uint32_t i, const struct kvbm_lease *lease,
                     uint32_t place)
{
    struct kvbm_item *item = &pin->items[i];

    item->state = ITEM_LEASED;
    item->lease = lease;
    item->place = place;
    item->found = true;
    pin->manager->stats.peer.hits++;
}

void kvbm_leased_source(const struct kvbm_item *item, const struct kvbm_layout **layout,
                        uint32_t *block)
{
    struct kvbm_block_at at = {0};

    (void)kvbm_lease_block(item->lease, item->place, &at);
    *layout = kvbm_lease_layout(item->lease);
    *block = (uint32_t)at.block;
}

bool kvbm_leased_is_intact(const struct kvbm_item *item)
{
    return kvbm_lease_is_intact(item->lease, item->place);
}

bool kvbm_leased_renew(struct kvbm_pin *pin)
{
    bool lost = false;

    if (!pin->leased)
        return false;
    for (uint32_t i = 0; i < pin->n; i++) {
        struct kvbm_item *item = &pin->items[i];

        if (item->state != ITEM_LEASED || kvbm_leased_is_intact(item))
            continue;
        item->state = ITEM_MISS;
        item->lease = NULL;
        kvbm_fetch_not_at_peer(pin, i, false, -ESTALE);
        lost = true;
    }
    if (lost)
        kvbm_fetch_start(pin);
    return pin->n_fetched || pin->n_waits;
}
