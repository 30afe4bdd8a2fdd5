// SPDX-License-Identifier: Apache-2.0
/*
 * Batches of fetches: made, counted, handed to the executor of their tier.
 *
 *   kvbm_fetch_some   take host blocks ─► add each item ─► launch: the executor fills the blocks
 *   kvbm_fetch_ask    no host blocks: which peer has the keys, or a lease of the blocks there
 *
 * Invariant: an item of a running fetch is FETCHED and its key pending; a fetch that can't be
 * launched ends as if its executor had refused each item, so the counts are right on both ways.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* Make a fetch of up to @max blocks. */
static struct kvbm_fetch *fetch_new(struct kvbm_pin *pin, enum kv_tier tier, uint32_t max)
{
    /* questions to peers are longer than a batch of blocks: their array lies behind the struct */
    size_t ios = tier == KVBM_TIER_PEER ? max * sizeof(struct kvbm_peer_io) : 0;
    struct kvbm_fetch *fetch = calloc(1, sizeof(*fetch) + ios + max * sizeof(uint32_t));

    if (!fetch)
        return NULL;
    if (ios)
        fetch->peer_ios = (struct kvbm_peer_io *)(fetch + 1);
    fetch->index = (uint32_t *)(void *)((char *)(fetch + 1) + ios);
    fetch->pin = pin;
    fetch->tier = tier;
    fetch->start_ns = kv_now_ns();
    return fetch;
}

/* True for fetches that count against the share of host blocks for what is remote. */
static bool uses_share(const struct kvbm_fetch *fetch)
{
    return fetch->tier != KV_TIER_DISK && !fetch->asks && !fetch->leases && !fetch->pin->direct;
}

void kvbm_fetch_count_pending(const struct kvbm_fetch *fetch, uint32_t i, int change)
{
    const struct kvbm_pin *pin = fetch->pin;
    struct kvbm_pins *pins = &pin->manager->pins;
    uint64_t hash = kvbm_pin_hash(pin, i);
    bool shares = uses_share(fetch), peer = fetch->tier == KVBM_TIER_PEER;

    /* at_peers, too: a hold for a peer mustn't wait for what comes from peers */
    (change < 0 ? kvbm_set_drop : kvbm_set_add)(&pins->pending, hash);
    if (peer)
        (change < 0 ? kvbm_set_drop : kvbm_set_add)(&pins->at_peers, hash);
    pins->n_object_fetched += (uint32_t)(shares ? change : 0);
    pins->n_peer_fetched += (uint32_t)(shares && peer ? change : 0);
}

/* Begin to fetch item @i into @block. */
static void add(struct kvbm_fetch *fetch, uint32_t i, const struct kvbm_mutable *block)
{
    struct kvbm_pin *pin = fetch->pin;
    struct kvbm_item *item = &pin->items[i];
    void *data;

    item->state = ITEM_FETCHED;
    item->host = block->handle;
    data = fetch->asks || fetch->leases ? NULL : kvbm_pin_data(pin, i);
    fetch->index[fetch->n] = i;
    if (fetch->tier == KVBM_TIER_PEER)
        fetch->peer_ios[fetch->n++] =
            (struct kvbm_peer_io){.key = kvbm_pin_key(pin, i),
                                  .hash = kvbm_pin_hash(pin, i),
                                  .block = pin->direct ? pin->blocks[i] : block->handle.block};
    else if (fetch->tier == KV_TIER_DISK)
        fetch->disk_ios[fetch->n++] = (struct kvbm_disk_io){.slot = item->source.block,
                                                            .group = pin->group,
                                                            .key = kvbm_pin_key(pin, i),
                                                            .data = data,
                                                            .len = pin->manager->stride};
    else
        fetch->object_ios[fetch->n++] =
            (struct kvbm_object_io){.group = pin->group, .key = kvbm_pin_key(pin, i), .data = data};
    kvbm_fetch_count_pending(fetch, i, 1);
    pin->n_fetched++;
}

/* ---- the executors ---- */

static void disk_done(struct kvbm_disk_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, kvbm_fetch_done, fetch);
}

static void object_done(struct kvbm_object_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, kvbm_fetch_done, fetch);
}

static void peer_done(struct kvbm_peer_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, kvbm_fetch_done, fetch);
}

/* Hand a batch to the peers' executor. One worker has all of its items; a question names none. */
static int submit_to_peer(struct kvbm_fetch *fetch)
{
    const struct kvbm_pin *pin = fetch->pin;

    fetch->peer = (struct kvbm_peer_batch){
        .op = fetch->asks     ? KVBM_PEER_ASK
              : fetch->leases ? KVBM_PEER_LEASE
                              : KVBM_PEER_GET,
        .priority = pin->priority,
        .deadline_ns = pin->deadline_ns,
        .group = pin->group,
        .worker = fetch->asks ? pin->hinted : pin->items[fetch->index[0]].peer,
        .to = pin->direct ? pin->direct->layout : pin->manager->layout,
        .ios = fetch->peer_ios,
        .n = fetch->n,
        .done = peer_done,
        .arg = fetch};
    return kvbm_peers_submit(pin->manager->peers, &fetch->peer);
}

static int submit(struct kvbm_fetch *fetch)
{
    struct kvbm_pin *pin = fetch->pin;

    if (fetch->tier == KVBM_TIER_PEER)
        return submit_to_peer(fetch);

    if (fetch->tier == KV_TIER_DISK) {
        fetch->disk = (struct kvbm_disk_batch){.flow = KVBM_ONBOARD,
                                               .priority = pin->priority,
                                               .deadline_ns = pin->deadline_ns,
                                               .ios = fetch->disk_ios,
                                               .n = fetch->n,
                                               .done = disk_done,
                                               .arg = fetch};
        return kvbm_disk_submit(pin->manager->disk_store, &fetch->disk);
    }
    fetch->object = (struct kvbm_object_batch){.op = KVBM_OBJECT_GET,
                                               .flow = KVBM_ONBOARD,
                                               .priority = pin->priority,
                                               .deadline_ns = pin->deadline_ns,
                                               .ios = fetch->object_ios,
                                               .n = fetch->n,
                                               .done = object_done,
                                               .arg = fetch};
    return kvbm_object_submit(pin->manager->object_store, &fetch->object);
}

/* Submit a fetch, which then references its pin; or end it. Without room in the executor's queue
 * its items are BUSY: the tier has them, so they aren't misses. */
static void launch(struct kvbm_fetch *fetch)
{
    struct kvbm_pin *pin = fetch->pin;
    int rc = submit(fetch);

    if (rc < 0) {
        kvbm_fetch_end(fetch, rc);
        for (uint32_t k = 0; k < fetch->n && rc == -EAGAIN; k++)
            pin->items[fetch->index[k]].state = ITEM_BUSY;
        free(fetch);
        return;
    }
    pin->manager->mover.running++;
    fetch->next = pin->fetches;
    pin->fetches = fetch;
    pin->n_fetches++;
    pin->refs++;
}

/* ---- beginning ---- */

/* Make room in the sets of pending keys beforehand: counting a key there can't fail then. */
static bool reserve_pending(struct kvbm_manager *m, enum kv_tier tier, uint32_t n)
{
    return kvbm_set_reserve(&m->pins.pending, n) == 0 &&
           (tier != KVBM_TIER_PEER || kvbm_set_reserve(&m->pins.at_peers, n) == 0);
}

/* True when the block of held item @i isn't lost with it: a tier below has it, or won't get it
 * anyway. */
static bool is_safe(const struct kvbm_pin *pin, uint32_t i)
{
    const struct kvbm_manager *m = pin->manager;
    uint8_t tiers = 0;

    kvbm_registry_locate(m->registry, pin->group, kvbm_pin_key(pin, i), 1, &tiers);
    return tiers >> KV_TIER_DISK & 1 || tiers >> KV_TIER_EXTERNAL & 1 ||
           (kvbm_offload_idle(m) && !m->write_back.leaving);
}

/* Take the block of held item @i for another one. Returns false when it isn't to be had, as others
 * hold it, too: the item stays held then. */
static bool give_up(struct kvbm_pin *pin, uint32_t i, struct kvbm_mutable *ret)
{
    struct kvbm_pool *host = pin->manager->host;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_immutable held;

    /* the pool has no other block to give: it gives this one, unless somebody else holds it, too */
    kvbm_pin_let_go(pin, i);
    item->state = ITEM_BUSY;
    if (kvbm_take_blocks(host, ret, 1) == 1) {
        kvbm_pin_drop(pin);
        return true;
    }
    if (kvbm_pool_match(host, pin->group, kvbm_pin_key(pin, i), 1, KVBM_MATCH_NO_TOUCH, &held) ==
        1) {
        item->host = held.handle;
        item->state = ITEM_HELD;
    }
    return false;
}

/* Take blocks from the pin's end for items @got to @n of @index; @safe: only blocks that aren't lost.
 * Returns how many items have a block now. */
static uint32_t take_own(struct kvbm_pin *pin, const uint32_t *index, struct kvbm_mutable *ret,
                         uint32_t got, uint32_t n, bool safe)
{
    for (uint32_t i = pin->n; got < n && i-- > index[got] + 1;)
        got += pin->items[i].state == ITEM_HELD && (!safe || is_safe(pin, i)) &&
               give_up(pin, i, &ret[got]);
    return got;
}

/* Take host blocks for items. A new pin of a prompt takes them from its own end when there are no
 * others: without its beginning the end is of no use, and asking again would hold it again. Blocks
 * that no tier below has go only when not a single one is to be had otherwise: an eviction would
 * lose them, too. */
static uint32_t take_blocks(struct kvbm_pin *pin, const uint32_t *index, struct kvbm_mutable *ret,
                            uint32_t n)
{
    uint32_t got = kvbm_take_blocks(pin->manager->host, ret, n);
    bool gives_up = pin->is_new && kvbm_pin_is_prefix(pin);

    if (gives_up)
        got = take_own(pin, index, ret, got, n, true);
    if (gives_up && !got)
        got = take_own(pin, index, ret, got, n, false);
    pin->is_new &= got == n; /* else the next batches find no more */
    return got;
}

void kvbm_fetch_some(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n)
{
    struct kvbm_mutable blocks[KVBM_BATCH] = {0};
    bool room = reserve_pending(pin->manager, tier, n);
    uint32_t got = !room ? 0 : pin->direct ? n : take_blocks(pin, index, blocks, n);
    struct kvbm_fetch *fetch = got ? fetch_new(pin, tier, got) : NULL;

    /* without memory for the fetch all items are left out, as if there were no host block */
    if (!fetch) {
        kvbm_pool_release_mutable(pin->manager->host, blocks, got);
        got = 0;
    }
    for (uint32_t k = 0; k < got; k++)
        add(fetch, index[k], &blocks[k]);
    for (uint32_t k = got; k < n; k++) {
        kvbm_fetch_source_released(pin, &pin->items[index[k]]);
        pin->items[index[k]].state = ITEM_BUSY;
        kvbm_pin_drop(pin);
    }
    /* before launch, which may end the fetch at once and count them off again */
    if (tier == KV_TIER_EXTERNAL)
        pin->object_window += got;
    if (tier == KVBM_TIER_PEER)
        pin->peer_window += got;
    if (fetch)
        launch(fetch);
}

/* Make a fetch that fills no host blocks. */
static struct kvbm_fetch *ask_new(struct kvbm_pin *pin, uint32_t n, bool leases)
{
    struct kvbm_fetch *fetch =
        reserve_pending(pin->manager, KVBM_TIER_PEER, n) ? fetch_new(pin, KVBM_TIER_PEER, n) : NULL;

    if (!fetch)
        return NULL;
    fetch->asks = !leases;
    fetch->leases = leases ? kvbm_leased_new(pin->manager, n) : NULL;
    if (leases && !fetch->leases)
        free(KV_STEAL(fetch));
    return fetch;
}

void kvbm_fetch_ask(struct kvbm_pin *pin, const uint32_t *index, uint32_t n, bool leases)
{
    const struct kvbm_mutable none = {0};
    struct kvbm_fetch *fetch = ask_new(pin, n, leases);

    for (uint32_t k = 0; !fetch && k < n; k++)
        pin->items[index[k]].state = ITEM_BUSY;
    if (!fetch)
        return;
    for (uint32_t k = 0; k < n; k++)
        add(fetch, index[k], &none);
    pin->peer_window += n;
    launch(fetch);
}
