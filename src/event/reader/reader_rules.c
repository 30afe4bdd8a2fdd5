// SPDX-License-Identifier: Apache-2.0
/* Rules for stored and removed events: whose cache an event is about, and in which tier. */
#include "base/core/ascii.h"
#include "event/reader/reader.h"

static bool str_is(struct kv_str s, const char *text)
{
    return strlen(text) == s.len && kv_ncasecmp(s.p, text, s.len) == 0;
}

bool kve_is_connector_tier(const struct kve_medium *medium)
{
    return medium->tier != KV_TIER_DEVICE && medium->at_clear != KVE_CLEARED_TOO;
}

/*
 * Note tiers that the publisher's clear empties, too. vLLM's clear empties only its GPU pool; the
 * tiers of its connectors keep their blocks. Engines with other tier names (SGLang) clear all tiers.
 * Of some names no engine is known.
 */
static void note_medium(struct kve_reader *reader, const struct kve_medium *medium)
{
    uint32_t bit = 1u << medium->tier;

    if (medium->tier != KV_TIER_DEVICE && medium->at_clear == KVE_CLEARED_TOO)
        reader->engine_tiers |= bit;
    if (medium->at_clear == KVE_CLEAR_UNKNOWN)
        reader->unclear_tiers |= bit;
}

/*
 * Note which pool announces a vLLM tier. SimpleCPUOffloadConnector has a block pool like the
 * device's below the device and marks its blocks LOCAL; other connectors give no locality. vLLM
 * puts the connector's events behind all device events of a batch.
 */
static void note_pool(struct kve_reader *reader, const struct kve_raw_event *ev,
                      const struct kve_medium *medium)
{
    if (medium->tier == KV_TIER_DEVICE) {
        for (size_t i = 0; reader->n_clears && i < reader->n_ops; i++) {
            if (reader->ops[i].type != KVE_OP_CLEAR || !reader->ops[i].unsure)
                continue;
            reader->ops[i].tiers = 1u << KV_TIER_DEVICE | reader->engine_tiers;
            reader->ops[i].unsure = false; /* the pool's come behind all of the device's */
            reader->device_cleared = true;
        }
        reader->n_clears = 0;
        reader->pool_began = false;
    } else if (kve_is_connector_tier(medium) && !ev->ownership.len) {
        if (str_is(ev->locality, "LOCAL"))
            reader->pool_tiers |= 1u << medium->tier;
        else
            reader->saw_offload = true;
        reader->pool_began = true;
    }
}

int kve_find_medium(struct kve_reader *reader, struct kv_str name, const struct kve_medium **ret)
{
    *ret = kve_medium_find(name);
    if (*ret)
        return 0;
    kve_unknown_media_count(&reader->unknown_media, name, 1);
    return KVE_SKIP_RC(MEDIUM);
}

bool kve_is_elsewhere(const struct kve_raw_event *ev)
{
    return ev->locality.len && !str_is(ev->locality, "LOCAL");
}

/*
 * Note in which tier an event shows the group's blocks. First blocks on the device tell that it lives
 * there. What it has shown below before counted as offloaded, or, where it seemed at home there, as
 * on the device: then nothing tells what is.
 */
static void note_group(struct kve_reader *reader, const struct kve_raw_event *ev,
                       const struct kve_op *op, enum kv_tier tier)
{
    struct kve_group before;

    if (!kve_groups_note_tier(&reader->sources.groups, op->rank, (uint32_t)ev->group, tier,
                              &before))
        return;
    reader->saw_offload |= before.below != 0;
    if (!before.home)
        return;
    reader->event.tiers = 1u << KV_TIER_DEVICE | 1u << before.home;
    kve_note_lost(reader);
}

/*
 * Find the tier in which an event's blocks count: that of its medium. The blocks of a group count as
 * on the device where it lives, and tell nothing of a connector; nor do those of full attention that
 * may live there.
 */
static enum kv_tier place(struct kve_reader *reader, const struct kve_raw_event *ev,
                          const struct kve_op *op, const struct kve_medium *medium)
{
    const struct kve_group *g = NULL;

    if (ev->has_group && !ev->ownership.len) {
        if (ev->type == KVE_RAW_STORED)
            note_group(reader, ev, op, medium->tier);
        if (medium->tier != KV_TIER_DEVICE)
            g = kve_groups_find(&reader->sources.groups, op->rank, (uint32_t)ev->group);
    }
    if (g && g->home == (uint32_t)medium->tier)
        return KV_TIER_DEVICE;
    if (!g || !g->below || !kve_group_is_full(g))
        note_pool(reader, ev, medium);
    return medium->tier;
}

int kve_apply_rules(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const struct kve_medium *medium;
    int source, rc;

    if (!ev->has_hashes || (ev->has_group && ev->group > UINT32_MAX))
        return KVE_SKIP_RC(MALFORMED);
    source = kve_sources_of(&reader->sources, op->rank, ev, reader->block_size);
    if (source == -KVE_SKIP_RC(BLOCK_SIZE)) /* no query can ask for it: nothing is in doubt */
        reader->event.tiers = 0;
    if (source < 0)
        return -source;
    if (kve_is_elsewhere(ev))
        return KVE_SKIP_RC(REMOTE);
    reader->event.source = (uint32_t)source;
    rc = kve_find_medium(reader, ev->medium, &medium);
    if (rc && ev->type == KVE_RAW_REMOVED) /* of blocks that stores have put into doubt */
        reader->event.tiers = 0;
    if (rc)
        return rc;
    if (!source)
        note_medium(reader, medium);
    op->source = (uint32_t)source;
    op->tier = place(reader, ev, op, medium);
    reader->event.tiers = 1u << op->tier;
    return 0;
}

/* Return true for operations about the main cache of a group, or about its window. */
static bool is_about(const struct kve_reader *reader, const struct kve_op *op,
                     const struct kve_group *g)
{
    const struct kve_source *source = &reader->sources.items[op->source];

    if (op->rank != g->rank || !op->source)
        return op->rank == g->rank && g->is_main;
    return source->kind == KVE_SOURCE_WINDOW && source->group == g->group && !source->owner[0];
}

/* Of clears that the batch had before it was settled which pools there are: see clear_pools. */
static void pair_clears(struct kve_reader *reader, uint32_t rank)
{
    struct kve_op *last = NULL; /* a clear that has none behind it yet */

    for (size_t i = 0; i < reader->n_ops; i++) {
        struct kve_op *op = &reader->ops[i];
        bool clears = op->type == KVE_OP_CLEAR && op->rank == rank && !op->source &&
                      op->tiers & 1u << KV_TIER_DEVICE;

        if (clears)
            op->unsure = !last;
        if (clears && last)
            last->unsure = false;
        last = clears && op->unsure ? op : NULL;
    }
}

/*
 * A group lives below the device: there its blocks of this batch count as on the device. Nothing
 * tells what was offloaded where a batch before had blocks of it.
 */
static void move_home(struct kve_reader *reader, const struct kve_group *g)
{
    for (size_t i = 0; i < reader->n_ops; i++) {
        struct kve_op *op = &reader->ops[i];

        if (op->type != KVE_OP_CLEAR && op->tier == (enum kv_tier)g->home &&
            is_about(reader, op, g))
            op->tier = KV_TIER_DEVICE;
    }
    pair_clears(reader, g->rank);
    if (!g->waits)
        return;
    reader->event = (struct kve_lost){g->rank, 0, 1u << KV_TIER_DEVICE | 1u << g->home};
    kve_note_lost(reader);
}

void kve_settle_groups(struct kve_reader *reader)
{
    const struct kve_group *g;
    size_t at = 0;

    if (reader->sources.unnamed) /* stores that name no group may be of this one, on the device */
        return;
    while ((g = kve_groups_settle(&reader->sources.groups, &at)))
        move_home(reader, g);
}

bool kve_is_beside_main(const struct kve_reader *reader, const struct kve_op *op)
{
    return kve_is_window(reader, op) && kve_sources_has_main(&reader->sources, op->rank);
}

/*
 * A group that leaves blocks out gives no usable tokens. Its hashes place its blocks where a main
 * group has the same hashes.
 */
bool kve_places_window(const struct kve_reader *reader, const struct kve_raw_event *ev,
                       const struct kve_op *op)
{
    return kve_is_window(reader, op) && !kve_is_beside_main(reader, op) &&
           ev->block_size == reader->block_size &&
           ev->n_tokens / reader->block_size == ev->n_hashes;
}
