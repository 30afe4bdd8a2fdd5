// SPDX-License-Identifier: Apache-2.0
#include "indexer/store_run.h"

#include <stdlib.h>
#include <string.h>

void ki_store_run_fini(struct ki_store_run *run)
{
    free(run->blocks);
    memset(run, 0, sizeof(*run));
}

void ki_store_run_begin(struct ki_store_run *run, struct kv_holder holder, uint64_t last)
{
    run->open = true;
    run->holder = holder;
    run->last = last;
    run->n_blocks = run->n_events = 0;
}

static bool continues(const struct ki_store_run *run, struct kv_holder holder,
                      const struct kve_op *op)
{
    return op->type == KVE_OP_STORE && op->has_parent && op->parent == run->last && op->n &&
           op->tier == KV_TIER_DEVICE && !op->source && holder.worker == run->holder.worker &&
           holder.rank == run->holder.rank;
}

bool ki_store_run_append(struct ki_store_run *run, struct kv_holder holder, const struct kve_op *op)
{
    if (!run->open || !continues(run, holder, op))
        return false;
    if (run->n_events == KI_RUN_EVENTS || op->n > KI_RUN_BLOCKS - run->n_blocks)
        return false;
    if (!run->blocks) {
        run->blocks = calloc(KI_RUN_BLOCKS, sizeof(*run->blocks));
        if (!run->blocks)
            return false;
    }
    if (!run->n_events)
        run->parent = run->last;
    memcpy(run->blocks + run->n_blocks, op->blocks, op->n * sizeof(*op->blocks));
    run->n_blocks += op->n;
    run->ends[run->n_events++] = run->n_blocks;
    run->last = op->blocks[op->n - 1].hash;
    return true;
}
