// SPDX-License-Identifier: Apache-2.0
/*
 * Clears.
 *
 * Some may be of the device or of a connector's pool below it (kve_op.unsure). A reset of both
 * clears the device, and the pool behind all of the device's events:
 *
 *     clear   blocks of the device   clear
 *
 * The second clear counts as the pool's. It might be the device's again: then these blocks are gone.
 * An event that the engine still has one of them, a removal or a block below it, proves the clear
 * to be the pool's, unless the block was stored anew in between.
 */
#include "indexer/view/apply_impl.h"

#include <string.h>

static void clear_blocks(struct ki_applier *a, uint32_t rank)
{
    ki_ranges_clear_rank(&a->ranges, rank);
    ki_small_clear_rank(&a->small, rank);
}

/*
 * End the doubts about tiers that a clear empties. One that may be of the device or of a pool below
 * it leaves both in doubt; a pool in which a group lives counts as the device.
 */
static void clear_doubts(struct ki_applier *a, const struct kve_op *op, uint64_t owner)
{
    bool device = op->tiers & 1u << KV_TIER_DEVICE;

    if (!owner && op->unsure) {
        ki_doubts_add(&a->doubts, op->rank, 0,
                      KI_WHY_DEVICE_CLEAR | (a->reader->pool_tiers ? KI_WHY_CLEAR : 0u));
        return;
    }
    ki_doubts_end(&a->doubts, op->rank, owner, op->tiers & KI_WHY_TIERS);
    if (owner)
        return;
    ki_doubts_end_rank(&a->incomplete, op->rank, op->tiers & KI_WHY_TIERS);
    if (device)
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_REPORTS | KI_WHY_DEVICE_CLEAR);
    else if (!(a->reader->pool_tiers & ~op->tiers))
        ki_doubts_end(&a->doubts, op->rank, 0, KI_WHY_CLEAR);
}

static int clear(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                 const struct kve_op *op)
{
    struct kve_source owner = {.owner = ""}, other;
    int rc = kvi_clear_tiers(index, holder, op->tiers, op->source);

    if (op->source && kve_reader_source(a->reader, op->source, &owner) < 0)
        return rc;
    clear_doubts(a, op, ki_owner_id(&owner));
    if (!op->source && op->tiers & 1u << KV_TIER_DEVICE)
        clear_blocks(a, op->rank);
    if (!op->source)
        return rc;
    for (uint32_t i = 1; !rc && kve_reader_source(a->reader, i, &other) == 0; i++)
        if (other.kind == KVE_SOURCE_WINDOW && strcmp(other.owner, owner.owner) == 0)
            rc = kvi_clear_tiers(index, holder, op->tiers, i);
    return rc;
}

int ki_applier_clear(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                     const struct kve_op *op)
{
    uint64_t before = ki_applier_held_of_rank(a, index, op->rank);
    int rc = clear(a, index, holder, op);

    ki_applier_note_clear(a, op->rank, before - ki_applier_held_of_rank(a, index, op->rank));
    return rc;
}

/* -- whose a clear was ------------------------------------------------------------------------- */

static bool is_device(const struct kve_op *op)
{
    return op->tier == KV_TIER_DEVICE && !op->source;
}

static bool forget(struct ki_pool_clear *c, uint64_t hash)
{
    for (uint32_t i = 0; i < c->n; i++) {
        if (c->hashes[i] != hash)
            continue;
        c->hashes[i] = c->hashes[--c->n];
        return true;
    }
    return false;
}

/* Remember blocks that the batch has stored on the device since the clear before @at. */
static void remember(struct ki_applier *a, const struct kve_batch *batch, size_t at)
{
    struct ki_pool_clear *c = &a->pool_clear;
    const struct kve_op *clear = &batch->ops[at];

    c->rank = clear->rank;
    c->knew_device = !ki_doubts_of(&a->doubts, clear->rank, 0, KI_WHY_DEVICE_CLEAR);
    while (at-- > 0 && batch->ops[at].type != KVE_OP_CLEAR) {
        const struct kve_op *op = &batch->ops[at];

        if (op->type == KVE_OP_REMOVE) /* perhaps of one of them */
            break;
        for (size_t i = op->n; i-- > 0 && op->type == KVE_OP_STORE && is_device(op) &&
                               op->rank == c->rank && c->n < KV_COUNT(c->hashes);)
            c->hashes[c->n++] = op->blocks[i].hash;
    }
}

/* Return true when the engine still has a block from before the clear. */
static bool is_proof(struct ki_pool_clear *c, const struct kve_op *op)
{
    bool proof = op->type == KVE_OP_STORE && op->has_parent && forget(c, op->parent);

    for (size_t i = 0; i < op->n && !proof; i++) {
        if (op->type == KVE_OP_REMOVE)
            proof = forget(c, op->hashes[i]);
        else if (op->type == KVE_OP_STORE)
            forget(c, op->blocks[i].hash);
    }
    return proof;
}

void ki_applier_look_for_pool(struct ki_applier *a, const struct kve_batch *batch, size_t at)
{
    struct ki_pool_clear *c = &a->pool_clear;
    const struct kve_op *op = &batch->ops[at];

    if (op->type == KVE_OP_CLEAR && !op->source) {
        c->n = 0;
        if (op->unsure && !(op->tiers & 1u << KV_TIER_DEVICE))
            remember(a, batch, at);
    } else if (c->n && op->rank == c->rank && is_device(op) && is_proof(c, op)) {
        ki_doubts_end(&a->doubts, c->rank, 0,
                      KI_WHY_CLEAR | (c->knew_device ? KI_WHY_DEVICE_CLEAR : 0));
        c->n = 0;
    }
}
