// SPDX-License-Identifier: Apache-2.0
/* Passes over the index: scans, moves, snapshots, statistics. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "advisor/index/impl.h"
#include "base/core/error.h"

/* -- scans ------------------------------------------------------------------------------------- */

int kva_index_scan_begin(struct kva_index *index)
{
    uint16_t *seen = calloc((size_t)index->n_records + 1, sizeof(*seen));

    if (!seen)
        return -ENOMEM;
    free(index->seen);
    index->seen = seen;
    index->n_seen = index->n_records;
    for (uint32_t at = 0; at < index->n_records; at++)
        kva_block_at(index, at)->flags &= (uint8_t)~KVA_NEW;
    return 0;
}

void kva_index_scan_end(struct kva_index *index, uint16_t members)
{
    uint16_t all = (uint16_t)((1u << index->opts.n_members) - 1);

    for (uint32_t at = 0; index->seen && at < index->n_seen; at++) {
        struct kva_block *b = kva_block_at(index, at);

        if (!b->units || b->flags & KVA_NEW)
            continue;
        for (unsigned m = 0; m < index->opts.n_members; m++)
            if (members >> m & 1 && !(index->seen[at] >> m & 1))
                kva_set_have(index, at, m, false);
        if (!b->have && (members & all) == all)
            kva_drop(index, at);
    }
    free(index->seen);
    index->seen = NULL;
    index->n_seen = 0;
}

/* -- moves ------------------------------------------------------------------------------------- */

static unsigned first_of(uint16_t members)
{
    return (unsigned)__builtin_ctz(members);
}

bool kva_index_is_left(const struct kva_block *block, uint32_t now_s, uint32_t left_s)
{
    return block->flags & KVA_LEFT && left_s && now_s >= block->used_s &&
           now_s - block->used_s >= left_s;
}

/* Return the step that the blob needs; false: none. */
static bool step_of(const struct kva_index *index, const struct kva_block *b, uint32_t now_s,
                    uint32_t left_s, struct kva_move *ret)
{
    uint16_t want = (uint16_t)(1u << b->want), fixed = index->opts.fixed, extra;

    memcpy(ret->key, b->key, KVA_KEY);
    ret->bytes = (uint64_t)b->units * KVA_UNIT;
    if (!b->have) {
        ret->kind = KVA_LOOK; /* what isn't new is left to the scan */
        return b->flags & KVA_NEW;
    }
    ret->from = (uint8_t)first_of(b->have);
    if (kva_index_is_left(b, now_s, left_s)) {
        ret->kind = KVA_DELETE;
        return b->have & (uint16_t)~fixed; /* what read-only members have stays there */
    }
    if (kva_is_sink(index, b->want) && b->have & fixed) /* a copy that stays is there already */
        want = (uint16_t)(1u << first_of(b->have & fixed));
    ret->to = (uint8_t)first_of(want);
    if (!(b->have & want)) {
        ret->kind = KVA_COPY;
        return true;
    }
    extra = b->have & (uint16_t) ~(fixed | want);
    if (!extra || b->flags & KVA_LINGER)
        return false;
    ret->kind = KVA_REMOVE;
    ret->from = (uint8_t)first_of(extra);
    return true;
}

size_t kva_index_moves(const struct kva_index *index, uint32_t *at, uint32_t now_s, uint32_t left_s,
                       struct kva_move *ret, size_t n)
{
    uint32_t end = KV_MIN(index->n_records, *at + KVA_PAGE);
    size_t found = 0;

    for (; *at < end && found < n; ++*at) {
        const struct kva_block *b = kva_block_at(index, *at);

        if (b->units && step_of(index, b, now_s, left_s, &ret[found]))
            found++;
    }
    if (*at >= index->n_records)
        *at = 0;
    return found;
}

/* -- packing ----------------------------------------------------------------------------------- */

static bool is_cold(const struct kva_index *index, const struct kva_block *b,
                    const struct kva_cold_opts *opts)
{
    unsigned sink = index->places[index->n_places - 1];

    return b->units && b->chain && b->want == sink && b->have == (uint16_t)(1u << sink) &&
           !(b->flags & (KVA_PACKED | KVA_LINGER | KVA_LEFT)) && b->used_s < opts->before_s &&
           (uint64_t)b->units * KVA_UNIT <= opts->max_bytes &&
           (b->chain ^ b->chain >> 16) % opts->parts == opts->part;
}

bool kva_index_is_cold(const struct kva_index *index, const uint8_t *key,
                       const struct kva_cold_opts *opts)
{
    const struct kva_block *b = kva_index_find(index, key);

    return b && is_cold(index, b, opts);
}

size_t kva_index_cold(const struct kva_index *index, uint32_t *at, const struct kva_cold_opts *opts,
                      struct kva_cold *ret, size_t n)
{
    uint32_t end = KV_MIN(index->n_records, *at + KVA_PAGE);
    size_t found = 0;

    for (; *at < end && found < n; ++*at) {
        const struct kva_block *b = kva_block_at(index, *at), *parent;

        if (!is_cold(index, b, opts))
            continue;
        parent = kva_parent(index, b);
        ret[found] = (struct kva_cold){.at = *at,
                                       .parent = parent ? b->parent : KVA_NONE,
                                       .chain = b->chain,
                                       .bytes = (uint64_t)b->units * KVA_UNIT};
        memcpy(ret[found++].key, b->key, KVA_KEY);
    }
    if (*at >= index->n_records)
        *at = 0;
    return found;
}

/* -- snapshots --------------------------------------------------------------------------------- */

static int each_of_list(const struct kva_index *index, const struct kva_list *list, kva_each_fn fn,
                        void *arg)
{
    int rc = 0;

    for (uint32_t at = list->tail; at != KVA_NONE && rc == 0; at = kva_block_at(index, at)->prev)
        rc = fn(arg, kva_block_at(index, at));
    return rc;
}

int kva_index_each(const struct kva_index *index, kva_each_fn fn, void *arg)
{
    int rc = 0;

    for (uint32_t at = 0; at < index->n_records && rc == 0; at++) {
        const struct kva_block *b = kva_block_at(index, at);

        if (b->units && kva_is_sink(index, b->want))
            rc = fn(arg, b);
    }
    for (size_t i = index->n_places; i-- > 0 && rc == 0;)
        for (unsigned list = 0; list < KVA_LISTS && rc == 0; list++)
            rc = each_of_list(index, &index->orders[index->places[i]].lists[list], fn, arg);
    return rc;
}

static bool is_place(const struct kva_index *index, unsigned member)
{
    return member < index->opts.n_members && !kva_is_fixed(index, member);
}

int kva_index_restore(struct kva_index *index, const struct kva_block *block)
{
    struct kva_block *b;
    uint32_t at;
    int rc;

    if (!block->units || !is_place(index, block->want) || block->list >= index->opts.policy->lists)
        return -EINVAL;
    if (kva_table_find(index, block->key) != KVA_NONE)
        return -EEXIST;
    rc = kva_table_add(index, block->key, &at);
    if (rc < 0)
        return rc;
    b = kva_block_at(index, at);
    b->chain = block->chain;
    b->units = block->units;
    b->used_s = block->used_s;
    b->stamp = block->stamp;
    b->heat = block->heat;
    b->gap = block->gap;
    b->count = block->count;
    b->want = block->want;
    b->flags = block->flags & (KVA_VISITED | KVA_GHOST);
    index->bytes += (uint64_t)b->units * KVA_UNIT;
    index->members[b->want].want++;
    index->members[b->want].want_units += b->units;
    if (!kva_is_sink(index, b->want))
        kva_list_push(&index->orders[b->want], block->list, at);
    return 0;
}

void kva_index_set_clock(struct kva_index *index, uint32_t clock)
{
    index->clock = clock;
}

/* -- statistics -------------------------------------------------------------------------------- */

void kva_index_get_stats(const struct kva_index *index, struct kva_index_stats *ret)
{
    *ret = (struct kva_index_stats){.blocks = index->n_blocks,
                                    .bytes = index->bytes,
                                    .memory = (uint64_t)index->n_pages * KVA_PAGE *
                                                  sizeof(struct kva_block) +
                                              (uint64_t)index->n_slots * sizeof(uint32_t),
                                    .clock = index->references,
                                    .refused = index->refused,
                                    .bonus = index->orders[index->places[0]].bonus};
    for (unsigned m = 0; m < index->opts.n_members; m++) {
        ret->members[m].have = index->members[m].have;
        ret->members[m].have_bytes = index->members[m].have_units * KVA_UNIT;
        ret->members[m].want = index->members[m].want;
        ret->members[m].want_bytes = index->members[m].want_units * KVA_UNIT;
        ret->members[m].hits = index->members[m].hits;
        ret->members[m].reserved = index->members[m].reserved;
        ret->members[m].limit =
            kva_is_sink(index, m) || index->orders[m].limit > UINT64_MAX / KVA_UNIT
                ? UINT64_MAX
                : index->orders[m].limit * KVA_UNIT;
    }
}
