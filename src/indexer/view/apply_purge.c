// SPDX-License-Identifier: Apache-2.0
/*
 * Forget blocks that a stream has brought, of all its ranks or of some.
 *
 *     purge         a restart, or the stream's own decision     all its ranks
 *     purge_ranks   another stream brought the same ranks       some; the engine still has them
 *
 * Invariant: with the blocks go the notes about single ones (ranges.h, small.h, lacking
 * components), or later events would be judged by blocks that aren't there.
 */
#include "indexer/view/apply_impl.h"

bool ki_applier_brings(const struct ki_applier *a, uint32_t rank)
{
    uint32_t from = 0, to = a->n_ranks;

    if (a->unnamed && rank == a->rank)
        return false;
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;

        if (a->ranks[middle] == rank)
            return true;
        if (a->ranks[middle] < rank)
            from = middle + 1;
        else
            to = middle;
    }
    return false;
}

bool ki_applier_knows_ranks(const struct ki_applier *a)
{
    return !a->reader->names_ranks || ki_applier_n_brought(a) > 1;
}

uint64_t ki_applier_held_of_rank(const struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    if (kvi_get_holder(index, (struct kv_holder){a->instance, rank}, &info) < 0)
        return 0;
    return info.blocks + info.parked;
}

uint64_t ki_applier_held(const struct ki_applier *a, struct kvi_index *index)
{
    uint64_t held = a->run.n_blocks;

    for (uint32_t i = 0; i < a->n_ranks; i++)
        held += ki_applier_held_of_rank(a, index, a->ranks[i]);
    return held;
}

bool ki_applier_held_of(const struct ki_applier *a, struct kvi_index *index, const uint32_t *ranks,
                        uint32_t n, uint64_t *ret_held)
{
    bool any = false;

    *ret_held = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!ki_applier_brings(a, ranks[i]))
            continue;
        any = true;
        *ret_held += ki_applier_held_of_rank(a, index, ranks[i]);
    }
    return any;
}

/*
 * Add to the loss that the driver will tell other streams of the same ranks: the index is one for
 * all of them, so their blocks have gone, too.
 */
static void note_loss(struct ki_applier *a, enum ki_ranks of, uint32_t rank, uint64_t blocks)
{
    struct ki_loss *loss = &a->loss;

    if (!blocks)
        return;
    if (of == KI_RANKS_ONE && loss->of == KI_RANKS_ONE && loss->rank != rank)
        of = KI_RANKS_MANY;
    loss->of = KV_MAX(loss->of, of);
    loss->rank = rank;
    loss->blocks += blocks;
}

void ki_applier_note_clear(struct ki_applier *a, uint32_t rank, uint64_t n)
{
    note_loss(a, KI_RANKS_ONE, rank, n);
}

void ki_applier_purge(struct ki_applier *a, struct kvi_index *index, bool restarted)
{
    note_loss(a, KI_RANKS_MANY, 0, ki_applier_held(a, index));
    a->loss.own |= !restarted && a->loss.of;
    if (a->forgets)
        a->forgets(a->forgets_arg);
    (void)ki_applier_flush(a, index); /* the loss is counted */
    a->has_windows &= !restarted;
    a->retains &= !restarted;
    a->purged = !restarted && a->reader->salts.n;
    ki_ranges_clear(&a->ranges);
    a->reports.trusted &= !restarted;
    ki_small_clear(&a->small);
    ki_doubts_clear(&a->doubts);
    ki_doubts_clear(&a->incomplete);
    a->pool_clear.n = 0;
    a->losses_seen = UINT64_MAX;
    a->touched = KI_RANKS_MANY;
    a->reports.suspects = a->reports.misjudged = false;
    for (uint32_t i = 0; i < a->n_ranks; i++) {
        struct kv_holder holder = {.worker = a->instance, .rank = a->ranks[i]};

        if (restarted)
            (void)kvi_remove_holder(index, holder);
        else
            (void)kvi_clear(index, holder);
    }
    ki_applier_note_losses(a, index);
}

/* Doubts stay: another stream's events may be their reason. */
static void purge_rank(struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    ki_ranges_clear_rank(&a->ranges, rank);
    ki_small_clear_rank(&a->small, rank);
    ki_doubts_end_rank(&a->incomplete, rank, UINT32_MAX);
    (void)kvi_clear(index, (struct kv_holder){a->instance, rank});
}

void ki_applier_purge_ranks(struct ki_applier *a, struct kvi_index *index, const uint32_t *ranks,
                            uint32_t n)
{
    (void)ki_applier_flush(a, index); /* the loss is counted */
    a->purged |= a->reader->salts.n > 0;
    a->pool_clear.n = 0;
    a->losses_seen = UINT64_MAX;
    a->touched = KI_RANKS_MANY;
    for (uint32_t i = 0; i < n; i++)
        if (ki_applier_brings(a, ranks[i]))
            purge_rank(a, index, ranks[i]);
    ki_applier_note_losses(a, index);
}
