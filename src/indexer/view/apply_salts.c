// SPDX-License-Identifier: Apache-2.0
/*
 * Salts of blocks that left in silence. The reader counts copies by the events alone, and so too many
 * where the index knows better: reports of held blocks, clears of the device, removals that tell the
 * copies left. Without sweeps its table would fill with such blocks until it has no room for others.
 * A sweep goes on with each batch, for a slice: the listener's other batches don't wait for the whole.
 */
#include "indexer/view/apply_impl.h"

struct look {
    const struct ki_applier *a;
    struct kvi_index *index;
};

/*
 * Return true when a sweep may find salts of blocks that the publisher no longer has. After a purge
 * the index lacks blocks that it has: their salts stay while there is room.
 */
static bool wants_sweep(const struct ki_applier *a)
{
    const struct kve_salts *salts = &a->reader->salts;

    return kve_salts_want_sweep(salts) && (!a->purged || kve_salts_are_crowded(salts));
}

/* Return true when the rank has the block, or may have it. */
static bool is_held(void *arg, uint32_t rank, uint64_t hash)
{
    const struct look *look = arg;
    struct kvi_cache cache =
        kvi_cache_of((struct kv_holder){look->a->instance, rank}, KV_TIER_DEVICE, 0);

    if (kvi_holds(look->index, cache.holder, hash))
        return true;
    for (; look->a->ranges.n_absent && cache.window <= KVI_MAX_WINDOWS; cache.window++)
        if (ki_ranges_find(&look->a->ranges, &cache, hash))
            return true;
    return false;
}

int ki_applier_sweep_salts(struct ki_applier *a, struct kvi_index *index)
{
    struct look look = {a, index};
    int rc;

    if (KV_LIKELY(!wants_sweep(a)))
        return 0;
    rc = ki_applier_end_run(a, index); /* whose blocks the index doesn't have yet */
    kve_salts_sweep(&a->reader->salts, ki_applier_held(a, index), is_held, &look);
    return rc;
}
