// SPDX-License-Identifier: Apache-2.0
/*
 * Fetch a pin's blocks from lower tiers and peers into its host blocks. All blocks of the disk are
 * fetched at once. Of the object store's, WINDOW batches run ahead, until one misses a key: a prompt can't use
 * blocks behind a miss.
 *
 * Fetches from the object store and from peers use only a share of the host blocks at a time. Host blocks are
 * allocated before the bytes come, so a store that hangs would otherwise evict the whole host tier.
 * Items beyond the share starve. When a fetch ends, the starving pin of the highest priority
 * continues; of equal ones the oldest.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/manager.h"

#define WINDOW 4 /* batches of the object store at a time */

/* ---- what to fetch ---- */

bool kvbm_fetch_is_circle(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->lends && kvbm_set_has(&pin->manager->pins.at_peers, kvbm_pin_hash(pin, i));
}

bool kvbm_fetch_left_to_others(struct kvbm_pin *pin, uint32_t i)
{
    if (!kvbm_set_has(&pin->manager->pins.pending, kvbm_pin_hash(pin, i)))
        return false;
    if (kvbm_fetch_is_circle(pin, i)) {
        pin->items[i].tried = UINT8_MAX;
        return true;
    }
    pin->items[i].state = ITEM_WAITS;
    if (!pin->n_waits++ && pin->deadline_ns)
        pthread_cond_signal(&pin->manager->work); /* the mover watches the deadline */
    return true;
}

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

/* Pick up to KVBM_BATCH items from *@at on that are MISS and were not looked for in @tier. Pack their
 * keys into @keys unless that is NULL. Items that another pin fetches or stores become WAITS. */
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

static struct kvbm_fetch *fetch_new(struct kvbm_pin *pin, enum kv_tier tier)
{
    struct kvbm_fetch *fetch = calloc(1, sizeof(*fetch));

    if (!fetch)
        return NULL;
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

/* Note that a key is pending, or no longer (@change -1). */
static void count_pending(const struct kvbm_fetch *fetch, uint32_t i, int change)
{
    const struct kvbm_pin *pin = fetch->pin;
    struct kvbm_pins *pins = &pin->manager->pins;
    uint64_t hash = kvbm_pin_hash(pin, i);
    bool shares = uses_share(fetch), peer = fetch->tier == KVBM_TIER_PEER;

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
    count_pending(fetch, i, 1);
    pin->n_fetched++;
}

static void fetch_done(struct kvbm_manager *m, struct kvbm_note *note);

static void disk_done(struct kvbm_disk_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, &fetch->note, fetch_done);
}

static void object_done(struct kvbm_object_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, &fetch->note, fetch_done);
}

static void peer_done(struct kvbm_peer_batch *batch)
{
    struct kvbm_fetch *fetch = batch->arg;

    kvbm_note(fetch->pin->manager, &fetch->note, fetch_done);
}

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

/* ---- results ---- */

static void source_released(struct kvbm_pin *pin, struct kvbm_item *item)
{
    if (item->source.pool)
        kvbm_pool_release(pin->manager->disk, (struct kvbm_immutable *)&item->source, 1);
    item->source = (struct kvbm_handle){0};
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

        if (kvbm_pool_adopt(m->host, (struct kvbm_mutable *)&item->host, 1,
                            pin->likes ? &pin->likes[i] : (struct kvbm_immutable *)&item->source,
                            &held) == 0) {
            item->host = held.handle;
            item->state = ITEM_HELD;
        } else {
            kvbm_pool_release_mutable(m->host, (struct kvbm_mutable *)&item->host, 1);
            item->state = ITEM_MISS;
            m->stats.host.failed++;
        }
    } else {
        kvbm_pin_register(pin, i, 1);
    }
    source_released(pin, item);
    return item->state != ITEM_MISS;
}

/* Note that the object store doesn't give item @i: a prompt can't use the items behind it. Items
 * before it are still fetched: some starve, or wait for another pin. */
static void ends_at(struct kvbm_pin *pin, uint32_t i)
{
    if (kvbm_pin_is_prefix(pin))
        pin->object_end = KV_MIN(pin->object_end, i);
}

/* @known: what the object store has of the key was told meanwhile */
static void arrived(struct kvbm_pin *pin, uint32_t i, enum kv_tier tier, bool known)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_chain chain = kvbm_pin_chain(pin, i);

    kvbm_stats_of(m, tier)->blocks_out++;
    kvbm_stats_of(m, tier)->bytes_out += m->block_bytes;
    item->tried |= (uint8_t)(1u << tier);
    if (!becomes_held(pin, i)) { /* don't fetch it again: registering would fail each time */
        if (tier == KV_TIER_EXTERNAL)
            ends_at(pin, i);
        return;
    }
    if (tier == KV_TIER_EXTERNAL && !known)
        kvbm_presence_add(m, &chain, pin->likes ? &pin->likes[i] : NULL);
    if (tier != KV_TIER_DISK && item->state == ITEM_HELD)
        kvbm_offload_items(pin, i, 1, NULL);
    item->found = true;
    if (!pin->direct) {
        m->stats.host.blocks_in++;
        m->stats.host.bytes_in += m->block_bytes;
    }
    kvbm_stats_of(m, tier)->hits++;
}

static void not_there(struct kvbm_pin *pin, uint32_t i, enum kv_tier tier, int why)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_item *item = &pin->items[i];
    struct kvbm_tier_stats *stats = kvbm_stats_of(m, tier);

    kvbm_pool_release_mutable(m->host, (struct kvbm_mutable *)&item->host, 1);
    source_released(pin, item);
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
        ends_at(pin, i);
        if (why == -ENOENT || why == -EBADMSG)
            kvbm_presence_absent(m, pin->group, kvbm_pin_key(pin, i), true);
    }
}

/* Look key @i up again: the store lacked it, but it may have been stored since. */
static void look_again(struct kvbm_pin *pin, uint32_t i)
{
    kvbm_pool_release_mutable(pin->manager->host, (struct kvbm_mutable *)&pin->items[i].host, 1);
    source_released(pin, &pin->items[i]);
    pin->items[i].state = ITEM_MISS;
}

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

static void end(struct kvbm_fetch *fetch, int all)
{
    struct kvbm_pin *pin = fetch->pin;

    for (uint32_t k = 0; k < fetch->n; k++) {
        uint32_t i = fetch->index[k];
        int status = all ? all : status_of(fetch, k);

        count_pending(fetch, i, -1);
        pin->n_fetched--;
        if (fetch->asks)
            answered(pin, i, &fetch->peer_ios[k], status);
        else if (fetch->leases)
            leased(pin, i, fetch->peer.lease, k, status);
        else if (status == 0)
            arrived(pin, i, fetch->tier, fetch->overtaken >> k & 1);
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

static void fetch_done(struct kvbm_manager *m, struct kvbm_note *note)
{
    struct kvbm_fetch *fetch = (struct kvbm_fetch *)note;
    struct kvbm_pin *pin = fetch->pin;

    m->mover.running--;
    count_latency(m, fetch);
    unlink_fetch(fetch);
    end(fetch, 0);
    free(fetch);
    kvbm_fetch_stop_starving(pin, is_wanted(pin) ? pin->object_end : 0);
    feed(m);
    if (is_wanted(pin))
        kvbm_fetch_start(pin);
    for (struct kvbm_pin *other = m->pins.first; other; other = other->next)
        kvbm_pin_look(other);
    kvbm_pin_settle(pin);
    kvbm_pin_put(pin);
    kvbm_offload_pump(m);
}

/* ---- starting ---- */

static void launch(struct kvbm_fetch *fetch)
{
    struct kvbm_pin *pin = fetch->pin;
    int rc = submit(fetch);

    if (rc < 0) {
        end(fetch, rc);
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

static bool reserve_pending(struct kvbm_manager *m, enum kv_tier tier, uint32_t n)
{
    return kvbm_set_reserve(&m->pins.pending, n) == 0 &&
           (tier != KVBM_TIER_PEER || kvbm_set_reserve(&m->pins.at_peers, n) == 0);
}

/* Leave out the items that starve: no fetch continues the pin in time. */
static void give_up_starving(struct kvbm_pin *pin)
{
    for (uint32_t i = 0; pin->n_starved && i < pin->n; i++) {
        if (pin->items[i].state != ITEM_STARVED)
            continue;
        pin->items[i].state = ITEM_BUSY;
        pin->manager->stats.host.dropped++;
        pin->n_starved--;
        pin->n_waits--;
    }
}

/* Let no hold starve that waits for a share which peers have: they may wait for that hold. */
static void free_holds(struct kvbm_manager *m)
{
    for (struct kvbm_pin *pin = m->pins.first; pin && m->pins.n_peer_fetched; pin = pin->next) {
        if (!pin->lends || !pin->n_starved)
            continue;
        give_up_starving(pin);
        kvbm_pin_settle(pin);
    }
}

/* Begin to fetch the items of @index from @tier. Items without room keep their state. */
static void fetch_some(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n)
{
    struct kvbm_mutable blocks[KVBM_BATCH] = {0};
    bool room = reserve_pending(pin->manager, tier, n);
    uint32_t got = !room ? 0 : pin->direct ? n : kvbm_take_blocks(pin->manager->host, blocks, n);
    struct kvbm_fetch *fetch = got ? fetch_new(pin, tier) : NULL;

    if (!fetch) {
        kvbm_pool_release_mutable(pin->manager->host, blocks, got);
        got = 0;
    }
    for (uint32_t k = 0; k < got; k++)
        add(fetch, index[k], &blocks[k]);
    for (uint32_t k = got; k < n; k++) {
        source_released(pin, &pin->items[index[k]]);
        pin->items[index[k]].state = ITEM_BUSY;
        pin->manager->stats.host.dropped++;
    }
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
        reserve_pending(pin->manager, KVBM_TIER_PEER, n) ? fetch_new(pin, KVBM_TIER_PEER) : NULL;

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
            fetch_some(pin, KV_TIER_DISK, index, found);
    }
}

static uint32_t share_left(const struct kvbm_manager *m)
{
    return m->pins.max_object_fetched -
           KV_MIN(m->pins.n_object_fetched, m->pins.max_object_fetched);
}

void kvbm_fetch_by_share(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n)
{
    uint32_t got = pin->direct ? n : KV_MIN(n, share_left(pin->manager));

    if (got)
        fetch_some(pin, tier, index, got);
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
            ends_at(pin, index[k]);
            return k;
        }
    }
    return n;
}

static void from_object(struct kvbm_pin *pin)
{
    uint32_t index[KVBM_BATCH] = {0}, n, at = 0;

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
    for (uint32_t i = 0; i < pin->n; i++) {
        if (pin->items[i].state == ITEM_MISS)
            kvbm_fetch_left_to_others(pin, i);
    }
    if (pin->manager->disk_store)
        from_disk(pin);
    if (pin->manager->peers && !pin->no_peers && !pin->peer_window && !pin->n_starved)
        kvbm_fetch_from_peers(pin);
    if (pin->manager->object_store && !pin->object_window && !pin->n_starved)
        from_object(pin);
}

void kvbm_fetch_cancel(struct kvbm_pin *pin)
{
    for (struct kvbm_fetch *fetch = pin->fetches; fetch; fetch = fetch->next) {
        if (fetch->tier == KVBM_TIER_PEER)
            kvbm_peers_cancel(pin->manager->peers, &fetch->peer);
        else if (fetch->tier == KV_TIER_DISK)
            kvbm_disk_cancel(pin->manager->disk_store, &fetch->disk);
        else
            kvbm_object_cancel(pin->manager->object_store, &fetch->object);
    }
}
