// SPDX-License-Identifier: Apache-2.0
/* Removed and cleared events. */
#include "event/reader/reader.h"

/*
 * Read the number of copies left into the array parallel to the scratch's hashes. Returns 0,
 * KVE_SKIP_RC(...) or -ENOMEM.
 */
static int take_remaining(struct kve_reader *reader, const struct kve_raw_event *ev,
                          struct kve_op *op)
{
    static const uint32_t told; /* placeholder: the array moves until set_pointers */
    size_t start = reader->scratch.n_hashes;

    if (!ev->remaining.p || !ev->n_hashes)
        return 0;
    if (kve_grow(&reader->remaining, &reader->remaining_capacity, start + ev->n_hashes,
                 sizeof(*reader->remaining)) < 0)
        return -ENOMEM;
    op->remaining = &told;
    return kve_raw_remaining(ev, reader->remaining + start);
}

int kve_add_removed(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = kve_event_hashes(reader);
    int rc = kve_apply_rules(reader, ev, op);

    op->type = KVE_OP_REMOVE;
    if (!rc)
        rc = take_remaining(reader, ev, op);
    if (rc)
        return rc;
    if (ev->components && !(ev->components & KVE_COMPONENT_FULL) &&
        reader->components & ~ev->components && !op->source) {
        op->type = KVE_OP_STORE_KNOWN;
        op->incomplete = true;
        op->remaining = NULL;
        return kve_add_hashes_op(reader, op, ev->n_hashes);
    }
    /*
     * A window's store that masks the first block of a chain shows no salt, so the table counts fewer
     * copies than there are. What forgets blocks of windows is a sweep: it asks who has them.
     */
    for (size_t i = 0; i < ev->n_hashes && reader->salts.n && !kve_is_window(reader, op); i++)
        kve_salts_remove(&reader->salts, op->rank, hashes[i], op->tier);
    return kve_add_hashes_op(reader, op, ev->n_hashes);
}

/*
 * Return true when a clear empties the connector's pool below the device. A clear that follows an
 * event of that pool in the same batch does. Any other may be of either pool, unless an event of the
 * device follows: *@ret_unsure is set. A reset of both clears the device first, so that the first
 * such clear of a batch counts as the device's, and each further one as the pool's.
 */
static bool is_pool_clear(struct kve_reader *reader, bool *ret_unsure)
{
    if (!reader->pool_tiers || reader->saw_offload)
        return false;
    if (reader->pool_began)
        return true;
    *ret_unsure = true;
    return ++reader->n_clears > 1 || reader->device_cleared;
}

/*
 * Add a clear of an engine some of whose groups live below the device. They have a pool of their own
 * there; a reset tells a clear of each pool that it could empty, without its name, one behind the
 * other. So of two both pools are empty, and nobody knows which one a single clear was.
 */
static int clear_pools(struct kve_reader *reader, const struct kve_group_rank *of,
                       struct kve_op *op)
{
    struct kve_op *last = reader->n_ops ? &reader->ops[reader->n_ops - 1] : NULL;

    if (last && last->type == KVE_OP_CLEAR && !last->source && last->unsure &&
        last->rank == op->rank) {
        last->unsure = false;
        if (!of->n_offloads) /* what was taken for offloaded blocks before it was settled */
            last->tiers |= kve_groups_homes(&reader->sources.groups, of);
        return 0;
    }
    op->unsure = true;
    op->tiers = 1u << KV_TIER_DEVICE | reader->engine_tiers;
    kve_salts_clear(&reader->salts, op->rank, false);
    return kve_add_op(reader, op, 0);
}

/* Add a clear of the one tier that the event names. */
static int clear_tier(struct kve_reader *reader, struct kv_str name, struct kve_op *op)
{
    const struct kve_medium *medium;
    int rc = kve_find_medium(reader, name, &medium);

    if (rc)
        return rc;
    op->tiers = 1u << medium->tier;
    if (!op->source && medium->tier == KV_TIER_DEVICE)
        kve_salts_clear(&reader->salts, op->rank, false);
    return kve_add_op(reader, op, 0);
}

/*
 * Add a clear. Another owner's clear empties all its tiers; the publisher's empties the tiers that
 * its engine means. Of an array's one field nothing tells whether it is an owner or a medium: a
 * medium's name is one, unless some event had it for its owner.
 */
int kve_add_cleared(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    bool names_medium = !ev->is_map && ev->ownership.len && kve_medium_find(ev->ownership) &&
                        !kve_sources_has_owner(&reader->sources, ev->ownership);
    int source = names_medium ? 0 : kve_sources_owner(&reader->sources, ev->ownership);
    const struct kve_group_rank *of = kve_groups_find_rank(&reader->sources.groups, op->rank);

    if (source < 0)
        return -source;
    if (kve_is_elsewhere(ev))
        return KVE_SKIP_RC(REMOTE);
    op->type = KVE_OP_CLEAR;
    op->source = (uint32_t)source;
    if (names_medium || ev->medium.len)
        return clear_tier(reader, names_medium ? ev->ownership : ev->medium, op);
    if (!source && of && of->n_homes)
        return clear_pools(reader, of, op);
    if (!source && reader->unclear_tiers) {
        reader->event.source = 0;
        reader->event.tiers = reader->unclear_tiers;
        kve_note_lost(reader);
    }
    op->tiers = source ? (1u << KV_N_TIERS) - 1 : 1u << KV_TIER_DEVICE | reader->engine_tiers;
    if (!source && is_pool_clear(reader, &op->unsure))
        op->tiers = reader->pool_tiers;
    else if (!source)
        kve_salts_clear(&reader->salts, op->rank, op->tiers == (1u << KV_N_TIERS) - 1);
    return kve_add_op(reader, op, 0);
}
