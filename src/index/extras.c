// SPDX-License-Identifier: Apache-2.0
/*
 * Dumping what lies beside the tree, and restoring it. Records are told by their numbers, a slice
 * per lock: what stays is told; what comes, goes or moves meanwhile may be told or not.
 */
#include "index/windows.h"

#define SLICE 256u

struct slice {
    struct kvi_extra items[SLICE];
    uint32_t n;
};

static void add(struct slice *slice, struct kvi_extra extra)
{
    slice->items[slice->n++] = extra;
}

/* Parked records from number *@at on. Returns whether there are more. */
static bool copy_parked(const struct kvi_index *ix, size_t *at, struct slice *slice)
{
    for (; *at < ix->parking.n_used && slice->n < SLICE; ++*at) {
        const struct kvi_parked *parked = &ix->parking.items[*at];

        if (parked->mask && !kvi_holder_at(ix, parked->holder)->main)
            add(slice, (struct kvi_extra){.holder = kvi_holder_at(ix, parked->holder)->key,
                                          .hash = parked->hash,
                                          .parent = parked->parent,
                                          .tokens_hash = parked->local,
                                          .tiers = parked->mask});
    }
    return *at < ix->parking.n_used;
}

static bool copy_copies(const struct kvi_index *ix, size_t *at, struct slice *slice)
{
    for (; *at < ix->copies.n && slice->n < SLICE; ++*at) {
        const struct kvi_copy *copy = &ix->copies.items[*at];

        if (copy->count > 1 && kvi_copies_alone(ix, copy) && !kvi_holder_at(ix, copy->holder)->main)
            add(slice, (struct kvi_extra){.holder = kvi_holder_at(ix, copy->holder)->key,
                                          .hash = copy->hash,
                                          .tier = (enum kv_tier)copy->tier,
                                          .copies = copy->count});
    }
    return *at < ix->copies.n;
}

int kvi_dump_extras(struct kvi_index *index, kvi_extra_fn fn, void *arg)
{
    struct slice *slice = malloc(sizeof(*slice));
    size_t at = 0;
    int rc = 0;

    if (!slice)
        return -ENOMEM;
    for (int copies = 0; copies < 2 && !rc; copies += at == 0) {
        bool more;

        slice->n = 0;
        kvi_lock(index);
        more = copies ? copy_copies(index, &at, slice) : copy_parked(index, &at, slice);
        pthread_mutex_unlock(&index->lock);
        for (uint32_t i = 0; i < slice->n && !rc; i++)
            rc = fn(arg, &slice->items[i]);
        if (!more)
            at = 0;
    }
    free(slice);
    return rc ? rc : kvi_dump_windows(index, fn, arg);
}

static void set_copies(struct kvi_index *index, const struct kvi_extra *extra)
{
    struct kvi_holder *holder;

    kvi_lock(index);
    holder = kvi_holder_await(index, extra->holder);
    if (holder && kvi_tiers_of(index, holder, extra->hash) >> extra->tier & 1 && extra->copies)
        (void)kvi_copies_take(index, holder, extra->tier, 0, extra->hash, extra->copies);
    kvi_unlock(index);
}

int kvi_restore_extra(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    int rc = 0;

    if ((unsigned)extra->tier >= KV_N_TIERS || extra->tiers >> KV_N_TIERS)
        return -EINVAL;
    if (extra->kind != KVI_EXTRA_BLOCK)
        return kvi_restore_window(index, extra);
    for (uint32_t t = 0; t < KV_N_TIERS && !rc; t++)
        if (extra->tiers >> t & 1)
            rc = kvi_store(index, extra->holder, (enum kv_tier)t, &extra->parent, &block, 1, NULL);
    if (!extra->tiers)
        set_copies(index, extra);
    return rc;
}
