// SPDX-License-Identifier: Apache-2.0
/*
 * Stores that wait to enter the index together (store_run.h). Three arrays, each cut into pieces by
 * the one above it:
 *
 *     chains        [    chain 0     ] [ chain 1 ]      enter the index whole, or event by event
 *     event_ends    [ e0 ] [ e1 ] [ e2 ] [ e3 ]         to count each event's outcome
 *     blocks        [b b ] [b   ] [b b b] [b   ]
 *
 * Invariant: only the last chain grows, by blocks below its last one. So each chain is one run of
 * `blocks`, and nothing is moved.
 */
#include "indexer/view/store_run.h"

#include <stdlib.h>
#include <string.h>

void ki_store_run_fini(struct ki_store_run *run)
{
    free(run->room);
    memset(run, 0, sizeof(*run));
}

void ki_store_run_begin(struct ki_store_run *run, struct kv_holder holder, uint64_t last,
                        bool single)
{
    run->open = true;
    run->single = single;
    run->holder = holder;
    run->last = last;
}

/* Return true when the store goes on below the last block, in the device and the main cache. */
static bool continues(const struct ki_store_run *run, struct kv_holder holder,
                      const struct kve_op *op)
{
    return op->type == KVE_OP_STORE && op->has_parent && op->parent == run->last && op->n &&
           op->single == run->single && op->tier == KV_TIER_DEVICE && !op->source &&
           holder.worker == run->holder.worker && holder.rank == run->holder.rank;
}

/* Make room for a store of @n blocks. Most streams are quiet: they keep no memory for it. */
static bool has_room(struct ki_store_run *run, size_t n)
{
    if (run->n_events == KI_RUN_EVENTS || n > KI_RUN_BLOCKS - run->n_blocks)
        return false;
    if (!run->room)
        run->room = malloc(sizeof(*run->room));
    return run->room != NULL;
}

/* Add the event to the last chain. */
static void add(struct ki_store_run *run, const struct kve_op *op)
{
    struct ki_run_room *room = run->room;

    memcpy(room->blocks + run->n_blocks, op->blocks, op->n * sizeof(*op->blocks));
    run->n_blocks += op->n;
    room->event_ends[run->n_events++] = (uint32_t)run->n_blocks;
    room->chains[run->n_chains - 1].n += op->n;
    room->chain_ends[run->n_chains - 1] = (uint32_t)run->n_events;
    run->last = op->blocks[op->n - 1].hash;
}

bool ki_store_run_start(struct ki_store_run *run, struct kv_holder holder, const struct kve_op *op)
{
    if (run->n_chains == KI_RUN_CHAINS || !op->n || !has_room(run, op->n) ||
        (run->n_chains && op->single != run->single))
        return false;
    run->single = op->single;
    run->room->chains[run->n_chains++] =
        (struct kvi_new_chain){.holder = holder,
                               .has_parent = op->has_parent,
                               .parent = op->parent,
                               .blocks = run->room->blocks + run->n_blocks};
    run->open = true;
    run->holder = holder;
    add(run, op);
    return true;
}

bool ki_store_run_append(struct ki_store_run *run, struct kv_holder holder, const struct kve_op *op)
{
    if (!run->open || !continues(run, holder, op))
        return false;
    if (!run->room) /* nothing waits */
        return ki_store_run_start(run, holder, op);
    if (!has_room(run, op->n))
        return false;
    add(run, op);
    return true;
}

/*
 * A store from the root is judged by what the index has (reports.h). The waiting chains aren't
 * there yet: one of them might be what the event reports.
 */
bool ki_store_run_has_root(const struct ki_store_run *run, const struct kv_block *first)
{
    for (size_t i = 0; i < run->n_chains; i++) {
        const struct kvi_new_chain *chain = &run->room->chains[i];

        if (!chain->has_parent && chain->blocks[0].tokens_hash == first->tokens_hash)
            return true;
        for (size_t k = 0; chain->has_parent && k < chain->n; k++)
            if (chain->blocks[k].hash == first->hash)
                return true;
    }
    return false;
}
