// SPDX-License-Identifier: Apache-2.0
#include "indexer/view/overlap.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"

#define SLICE 64 /* removals that enter the index at once */

static int compare(const void *a, const void *b)
{
    const struct ki_end_copies *x = a, *y = b;

    if (x->hash != y->hash)
        return x->hash < y->hash ? -1 : 1;
    if (x->holder.worker != y->holder.worker)
        return x->holder.worker < y->holder.worker ? -1 : 1;
    if (x->holder.rank != y->holder.rank)
        return x->holder.rank < y->holder.rank ? -1 : 1;
    if (x->in_window != y->in_window)
        return x->in_window ? 1 : -1;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->part != y->part)
        return x->part < y->part ? -1 : 1;
    return (x->tier > y->tier) - (x->tier < y->tier);
}

void ki_end_copies_add(struct kv_buf *records, const struct kvi_extra *extra)
{
    struct ki_end_copies record = {
        .holder = extra->holder,
        .hash = extra->hash,
        .tier = (uint8_t)extra->tier,
        .in_window = extra->in_window,
        .group = extra->in_window ? extra->window.group : 0,
        .part = (uint8_t)(extra->in_window ? extra->window.part : 0),
    };

    for (size_t i = 0; i < extra->n_sources; i++) {
        if (extra->sources[i].source || !extra->sources[i].copies)
            continue;
        record.copies = extra->sources[i].copies;
        record.taken = extra->sources[i].taken;
        kv_buf_append(records, &record, sizeof(record));
    }
}

void ki_overlap_set(struct ki_overlap *o, struct ki_end_copies *items, size_t n)
{
    free(o->items);
    o->known = true;
    o->items = items;
    o->n = n;
    if (n)
        qsort(items, n, sizeof(*items), compare);
}

void ki_overlap_clear(struct ki_overlap *o)
{
    free(o->items);
    kv_buf_fini(&o->doubts.items);
    memset(o, 0, sizeof(*o));
}

static const struct ki_end_copies *find(const struct ki_overlap *o, struct kv_holder holder,
                                        enum kv_tier tier, const struct kvi_window *window,
                                        uint64_t hash)
{
    struct ki_end_copies key = {
        .holder = holder, .hash = hash, .tier = (uint8_t)tier, .in_window = window != NULL};

    if (window) {
        key.group = window->group;
        key.part = (uint8_t)window->part;
    }
    return o->n ? bsearch(&key, o->items, o->n, sizeof(key), compare) : NULL;
}

long ki_overlap_take(const struct ki_overlap *o, struct kvi_index *index, struct kv_holder holder,
                     const struct kve_op *op, const struct kvi_window *window, uint32_t number)
{
    static const uint32_t none[SLICE];
    uint64_t hashes[SLICE];
    long found = 0, rc = 0;

    for (size_t i = 0; i < op->n && rc >= 0;) {
        size_t n = 0;

        for (; n < SLICE && i < op->n; i++)
            if (!find(o, holder, op->tier, window, op->hashes[i]))
                hashes[n++] = op->hashes[i];
        rc = window ? kvi_window_take(index, holder, op->tier, number, 0, hashes, none, n)
                    : kvi_take(index, holder, op->tier, 0, hashes, none, n);
        found += KV_MAX(rc, 0L);
    }
    return rc < 0 ? rc : found;
}

void ki_overlap_stored(const struct ki_overlap *o, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_op *op, const struct kvi_window *window)
{
    for (size_t i = 0; o->n && i < op->n; i++) {
        uint64_t hash = op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];
        const struct ki_end_copies *record = find(o, holder, op->tier, window, hash);
        struct kvi_source_copies own = {0};
        struct kvi_extra extra = {.kind = KVI_EXTRA_OWN_COPIES,
                                  .holder = holder,
                                  .tier = op->tier,
                                  .hash = hash,
                                  .in_window = window != NULL,
                                  .sources = &own,
                                  .n_sources = 1};

        if (!record)
            continue;
        own.copies = record->copies;
        own.taken = record->taken;
        if (window)
            extra.window = *window;
        (void)kvi_restore_extra(index, &extra); /* can't lack memory for long: a count is short */
    }
}
