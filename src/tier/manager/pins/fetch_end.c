// SPDX-License-Identifier: Apache-2.0
/*
 * Ends of fetches, noted on the executor's thread.
 *
 *   status 0            register the block: HELD; STEP_OFFER offers it to the tiers below
 *   -ENOENT, -EBADMSG   the tier lacks the block, or its bytes are damaged: forgotten there (of the
 *                       disk -EIO, too), and not tried again
 *   overtaken, -ENOENT  the key was stored meanwhile: looked up once more
 *   other errors        the tier isn't tried again for this pin
 *
 * kvbm_fetch_start looks for the missing blocks in the next tier. An ended fetch keeps its
 * pin until its blocks have been offered: a released pin would else be freed with blocks that no
 * tier below ever gets.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"

void kvbm_fetch_source_released(struct kvbm_pin *pin, struct kvbm_item *item)
{
    if (item->source.pool)
        kvbm_pool_release(pin->manager->disk, (struct kvbm_immutable *)&item->source, 1);
    item->source = (struct kvbm_handle){0};
}

/*
 * Register item @i of a hold of a peer, whose bytes are in its host block. A peer names keys without
 * their places. The object pool may know the place; if not, the block stays unregistered, and goes
 * with its lease. Registered without its place, it would keep this node from registering the key
 * where it belongs.
 */
static void becomes_lent(struct kvbm_pin *pin, uint32_t i)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_immutable like, held;

    item->state = ITEM_STAGED;
    if (kvbm_pool_match(m->object, pin->group, kvbm_pin_key(pin, i), 1, KVBM_MATCH_NO_TOUCH,
                        &like) != 1)
        return;
    if (kvbm_pool_adopt(m->host, (struct kvbm_mutable *)&item->host, 1, &like, &held) == 0) {
        item->host = held.handle;
        item->state = ITEM_HELD;
    }
    kvbm_immutable_release(&like);
}

/* Register item @i, whose bytes are in its host block. False: its key is registered at another
 * position, and the item becomes a MISS. */
static bool becomes_held(struct kvbm_pin *pin, uint32_t i)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];

    if (kvbm_staging(m)) {
        item->state = ITEM_STAGED;
    } else if (item->source.pool || pin->likes) {
        struct kvbm_immutable held;

        /* adopt takes key, parent and position from the source, so that they needn't be
         * known here */
        if (kvbm_pool_adopt_tokens(m->host, (struct kvbm_mutable *)&item->host,
                                   pin->likes ? &pin->likes[i]
                                              : (struct kvbm_immutable *)&item->source,
                                   kvbm_pin_tokens(pin, i), &held) == 0) {
            item->host = held.handle;
            item->state = ITEM_HELD;
        } else {
            kvbm_pool_release_mutable(m->host, (struct kvbm_mutable *)&item->host, 1);
            item->state = ITEM_MISS;
            m->stats.host.failed++;
        }
    } else if (pin->lends) { /* from the object store: a hold asks no peer */
        becomes_lent(pin, i);
    } else {
        /* from the object store or a peer: the pin's chain names key, parent and position */
        kvbm_pin_register(pin, i, 1);
    }
    kvbm_fetch_source_released(pin, item);
    return item->state != ITEM_MISS;
}

/* Take block @k of a fetch, which has its bytes. */
static void arrived(struct kvbm_fetch *fetch, uint32_t k)
{
    struct kvbm_pin *pin = fetch->pin;
    uint32_t i = fetch->index[k];
    enum kv_tier tier = fetch->tier;
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_chain chain = kvbm_pin_chain(pin, i);

    kvbm_stats_of(m, tier)->blocks_out++;
    kvbm_stats_of(m, tier)->bytes_out += m->block_bytes;
    item->tried |= (uint8_t)(1u << tier);
    if (!becomes_held(pin, i)) { /* don't fetch it again: registering would fail each time */
        if (tier == KV_TIER_EXTERNAL)
            kvbm_fetch_ends_at(pin, i);
        return;
    }
    /* a put or delete of the key has told the object store's state since the fetch began */
    if (tier == KV_TIER_EXTERNAL && pin->lends)
        kvbm_presence_not_absent(m, pin->group, kvbm_pin_key(pin, i));
    else if (tier == KV_TIER_EXTERNAL && !(fetch->overtaken >> k & 1))
        kvbm_presence_add(m, &chain, pin->likes ? &pin->likes[i] : NULL);
    if (tier != KV_TIER_DISK && item->state == ITEM_HELD)
        fetch->brought |= 1u << k;
    item->found = true;
    if (!pin->direct) {
        m->stats.host.blocks_in++;
        m->stats.host.bytes_in += m->block_bytes;
    }
    kvbm_stats_of(m, tier)->hits++;
}

/* Give the host block of an item back that didn't arrive, and note what that tells about
 * the tier. */
static void not_there(struct kvbm_pin *pin, uint32_t i, enum kv_tier tier, int why)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_tier_stats *stats = kvbm_stats_of(m, tier);

    kvbm_pool_release_mutable(m->host, (struct kvbm_mutable *)&item->host, 1);
    kvbm_fetch_source_released(pin, item);
    item->state = ITEM_MISS;
    stats->bad += why == -EBADMSG;
    stats->failed += why != -EBADMSG && why != -ENOENT && why != -ECANCELED;
    stats->misses += why == -ENOENT;
    if (tier == KVBM_TIER_PEER) {
        kvbm_fetch_not_at_peer(pin, i, false, why);
        return;
    }
    item->tried |= (uint8_t)(1u << tier);
    /* a damaged record or a failed volume: the disk doesn't have the block */
    if (tier == KV_TIER_DISK) {
        if (why == -EBADMSG || why == -ENOENT || why == -EIO)
            kvbm_pool_reset_keys(m->disk, pin->group, kvbm_pin_key(pin, i), 1, NULL);
    } else {
        kvbm_fetch_ends_at(pin, i);
        if (why == -ENOENT || why == -EBADMSG)
            kvbm_presence_absent(m, pin->group, kvbm_pin_key(pin, i), true);
    }
}

/* Look key @i up again: the store lacked it, but it may have been stored since. */
static void look_again(struct kvbm_pin *pin, uint32_t i)
{
    kvbm_pool_release_mutable(pin->manager->host, (struct kvbm_mutable *)&pin->items[i].host, 1);
    kvbm_fetch_source_released(pin, &pin->items[i]);
    pin->items[i].state = ITEM_MISS;
}

/* Count the time of a batch of blocks, in buckets of powers of two microseconds. */
static void count_latency(struct kvbm_manager *m, const struct kvbm_fetch *fetch)
{
    uint64_t us = (kv_now_ns() - fetch->start_ns) / 1000;
    uint32_t bucket = 0;

    while (bucket < 23 && us >> bucket)
        bucket++;
    if (fetch->asks || fetch->leases)
        return;
    kvbm_stats_of(m, fetch->tier)->latency_us[bucket]++;
    kvbm_stats_of(m, fetch->tier)->latency_sum_us += us;
}

/* Take the answer of peers for item @i: whom to get it from. */
static void answered(struct kvbm_pin *pin, uint32_t i, const struct kvbm_peer_io *io, int status)
{
    pin->items[i].state = ITEM_MISS;
    pin->items[i].peer = status == 0 ? io->worker : 0;
    pin->manager->stats.peer.misses += status == -ENOENT;
    if (status < 0)
        kvbm_fetch_not_at_peer(pin, i, true, status);
}

/* Take the answer of a peer for item @i, key @place of @lease. */
static void leased(struct kvbm_pin *pin, uint32_t i, const struct kvbm_lease *lease, uint32_t place,
                   int status)
{
    if (status == 0) {
        kvbm_leased_add(pin, i, lease, place);
    } else if (status == -EAGAIN) { /* the peer lends no more, or its memory can't be mapped */
        pin->items[i].n_peers++;
        pin->items[i].state = ITEM_MISS;
    } else {
        not_there(pin, i, KVBM_TIER_PEER, status);
    }
}

/* Give the lease of a fetch to its pin. */
static void keep_lease(struct kvbm_fetch *fetch)
{
    struct kvbm_pin *pin = fetch->pin;
    struct kvbm_leased *leases = KV_STEAL(fetch->leases);

    leases->lease = fetch->peer.lease;
    if (!leases->lease) {
        kvbm_leased_free(pin->manager, leases);
        return;
    }
    leases->next = pin->leased;
    pin->leased = leases;
}

static int status_of(const struct kvbm_fetch *fetch, uint32_t k)
{
    return fetch->tier == KVBM_TIER_PEER ? fetch->peer_ios[k].status
           : fetch->tier == KV_TIER_DISK ? fetch->disk_ios[k].status
                                         : fetch->object_ios[k].status;
}

void kvbm_fetch_end(struct kvbm_fetch *fetch, int all)
{
    struct kvbm_pin *pin = fetch->pin;

    for (uint32_t k = 0; k < fetch->n; k++) {
        uint32_t i = fetch->index[k];
        int status = all ? all : status_of(fetch, k);

        kvbm_fetch_count_pending(fetch, i, -1);
        pin->n_fetched--;
        if (fetch->asks)
            answered(pin, i, &fetch->peer_ios[k], status);
        else if (fetch->leases)
            leased(pin, i, fetch->peer.lease, k, status);
        else if (status == 0)
            arrived(fetch, k);
        else if (fetch->overtaken >> k & 1 && status == -ENOENT)
            look_again(pin, i);
        else
            not_there(pin, i, fetch->tier, status);
    }
    if (fetch->tier == KV_TIER_EXTERNAL)
        pin->object_window -= fetch->n;
    if (fetch->tier == KVBM_TIER_PEER)
        pin->peer_window -= fetch->n;
    if (fetch->leases)
        keep_lease(fetch);
}

/* Take an ended fetch out of its pin's list. Its reference of the pin stays. */
static void unlink_fetch(struct kvbm_fetch *fetch)
{
    struct kvbm_fetch **at = &fetch->pin->fetches;

    while (*at != fetch)
        at = &(*at)->next;
    *at = fetch->next;
    fetch->pin->n_fetches--;
}

/* True when a holder or a job needs the pin, apart from the ended fetch that still references
 * it. */
static bool is_wanted(const struct kvbm_pin *pin)
{
    return !pin->released || pin->refs > 1 + pin->n_fetches;
}

/* Find, among pins that starve without a running fetch, the one of the highest priority; of equal
 * ones the oldest. */
static struct kvbm_pin *hungriest(const struct kvbm_manager *m)
{
    struct kvbm_pin *best = NULL;

    for (struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next) { /* newest first */
        if (pin->n_starved && !pin->object_window && !pin->peer_window &&
            (!best || pin->priority >= best->priority))
            best = pin;
    }
    return best;
}

/* Continue starving pins, because fetches of what is remote have ended. */
static void feed(struct kvbm_manager *m)
{
    struct kvbm_pin *pin;

    while (m->pins.n_object_fetched < m->pins.max_object_fetched && (pin = hungriest(m)) != NULL) {
        kvbm_fetch_stop_starving(pin, 0);
        if (!pin->released || pin->jobs)
            kvbm_fetch_start(pin);
        kvbm_pin_settle(pin);
    }
}

/* Free an ended fetch, and drop its reference of the pin; first the blocks that it brought are
 * offered to the tiers below. */
static void release(struct kvbm_fetch *fetch)
{
    struct kvbm_manager *m = fetch->pin->manager;

    if (!fetch->brought) {
        kvbm_pin_put(fetch->pin);
        free(fetch);
        return;
    }
    fetch->next = m->pins.brought;
    m->pins.brought = fetch;
    kvbm_step_due(m, KVBM_STEP_OFFER);
}

void kvbm_fetch_done(struct kvbm_manager *m, void *operation)
{
    struct kvbm_fetch *fetch = operation;
    struct kvbm_pin *pin = fetch->pin;

    /* the order matters: items first, then the share that they leave, then the pin's
     * next fetches */
    m->mover.running--;
    count_latency(m, fetch);
    unlink_fetch(fetch);
    kvbm_fetch_end(fetch, 0);
    /* a prompt doesn't starve for items behind the first that the store lacks */
    kvbm_fetch_stop_starving(pin, is_wanted(pin) ? pin->object_end : 0);
    feed(m);
    if (is_wanted(pin))
        kvbm_fetch_start(pin);
    kvbm_pin_settle(pin);
    release(fetch);
    kvbm_step_due(m, KVBM_STEP_LOOK);
    kvbm_step_due(m, KVBM_STEP_PUMP);
}
