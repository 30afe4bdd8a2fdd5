// SPDX-License-Identifier: Apache-2.0
#include "indexer/positions.h"

#include <stdlib.h>
#include <string.h>

void ki_positions_fini(struct ki_positions *p)
{
    free(p->items);
    memset(p, 0, sizeof(*p));
}

static bool is_before(struct kv_holder a, struct kv_holder b)
{
    return a.worker != b.worker ? a.worker < b.worker : a.rank < b.rank;
}

/* Index of the first item not before @holder. */
static size_t lower_bound(const struct ki_positions *p, struct kv_holder holder)
{
    size_t lo = 0, hi = p->n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (is_before(p->items[mid].mark.holder, holder))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool is_at(const struct ki_positions *p, size_t at, struct kv_holder holder)
{
    return at < p->n && !is_before(holder, p->items[at].mark.holder);
}

static void remove_at(struct ki_positions *p, size_t at)
{
    memmove(p->items + at, p->items + at + 1, (p->n - at - 1) * sizeof(*p->items));
    p->n--;
}

static void forget_oldest(struct ki_positions *p)
{
    size_t oldest = 0;

    for (size_t i = 1; i < p->n; i++)
        if (p->items[i].noted < p->items[oldest].noted)
            oldest = i;
    remove_at(p, oldest);
}

static bool make_room(struct ki_positions *p)
{
    struct ki_position *grown;
    size_t capacity;

    if (p->n == KI_MAX_POSITIONS)
        forget_oldest(p);
    if (p->n < p->capacity)
        return true;
    capacity = p->capacity ? p->capacity * 2 : 64;
    grown = realloc(p->items, capacity * sizeof(*grown));
    if (!grown)
        return false;
    p->items = grown;
    p->capacity = capacity;
    return true;
}

void ki_positions_note(struct ki_positions *p, const struct ki_watermark *mark, bool has_blocks)
{
    size_t at = lower_bound(p, mark->holder);

    if (!is_at(p, at, mark->holder)) {
        if (!make_room(p))
            return;
        at = lower_bound(p, mark->holder); /* one may have been forgotten */
        memmove(p->items + at + 1, p->items + at, (p->n - at) * sizeof(*p->items));
        p->n++;
    }
    p->items[at] =
        (struct ki_position){.mark = *mark, .has_blocks = has_blocks, .noted = ++p->clock};
}

bool ki_positions_take(struct ki_positions *p, struct kv_holder holder, struct ki_position *ret)
{
    size_t at = lower_bound(p, holder);

    if (!is_at(p, at, holder))
        return false;
    *ret = p->items[at];
    remove_at(p, at);
    return true;
}

void ki_positions_blocks_left(struct ki_positions *p, uint64_t worker, const uint32_t *rank)
{
    size_t at = lower_bound(p, (struct kv_holder){.worker = worker, .rank = rank ? *rank : 0});

    for (; at < p->n && p->items[at].mark.holder.worker == worker; at++) {
        if (rank && p->items[at].mark.holder.rank != *rank)
            return;
        p->items[at].has_blocks = false;
    }
}
