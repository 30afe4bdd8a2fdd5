// SPDX-License-Identifier: Apache-2.0
/*
 * Doubts by rank and owner, in a sorted array: most streams have none, and the others a few.
 *
 * Invariant: a doubt that was added holds until it is ended, whatever memory there is. One without
 * an entry goes to `lost`, where it counts for every rank and owner, and only a clear of the whole
 * set ends it. So a stream at the limit is partial for too long, and never whole too early.
 */
#include "indexer/view/doubts.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

void ki_doubts_clear(struct ki_doubts *d)
{
    free(d->items);
    *d = (struct ki_doubts){0};
}

/* Return the number of entries before that of @rank and @owner. */
static size_t position(const struct ki_doubts *d, uint32_t rank, uint64_t owner)
{
    size_t low = 0, high = d->n;

    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct ki_doubt *at = &d->items[middle];

        if (at->rank < rank || (at->rank == rank && at->owner < owner))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(const struct ki_doubts *d, size_t at, uint32_t rank, uint64_t owner)
{
    return at < d->n && d->items[at].rank == rank && d->items[at].owner == owner;
}

static bool has_room(struct ki_doubts *d)
{
    size_t more = KV_MAX(2 * d->capacity, (size_t)4);
    struct ki_doubt *grown;

    if (d->n == KI_MAX_DOUBTS)
        return false;
    if (d->n < d->capacity)
        return true;
    grown = realloc(d->items, more * sizeof(*grown));
    if (!grown)
        return false;
    d->items = grown;
    d->capacity = more;
    return true;
}

void ki_doubts_add(struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits)
{
    size_t at = position(d, rank, owner);

    if (is_at(d, at, rank, owner)) {
        d->items[at].bits |= bits;
    } else if (has_room(d)) {
        memmove(d->items + at + 1, d->items + at, (d->n - at) * sizeof(d->items[0]));
        d->items[at] = (struct ki_doubt){.owner = owner, .rank = rank, .bits = bits};
        d->n++;
    } else {
        d->lost |= bits;
    }
}

/* `lost` stays: it may stand for other ranks and owners, too. */
void ki_doubts_end(struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits)
{
    size_t at = d->n ? position(d, rank, owner) : 0;

    if (!is_at(d, at, rank, owner))
        return;
    d->items[at].bits &= ~bits;
    if (d->items[at].bits)
        return;
    d->n--;
    memmove(d->items + at, d->items + at + 1, (d->n - at) * sizeof(d->items[0]));
}

void ki_doubts_end_rank(struct ki_doubts *d, uint32_t rank, uint32_t bits)
{
    size_t kept = 0;

    for (size_t i = 0; i < d->n; i++) {
        if (d->items[i].rank == rank)
            d->items[i].bits &= ~bits;
        if (d->items[i].bits)
            d->items[kept++] = d->items[i];
    }
    d->n = kept;
}

uint32_t ki_doubts_of(const struct ki_doubts *d, uint32_t rank, uint64_t owner, uint32_t bits)
{
    size_t at = position(d, rank, owner);

    return bits & (d->lost | (is_at(d, at, rank, owner) ? d->items[at].bits : 0));
}

uint32_t ki_doubts_all(const struct ki_doubts *d)
{
    uint32_t bits = d->lost;

    for (size_t i = 0; i < d->n; i++)
        bits |= d->items[i].bits;
    return bits;
}

bool ki_doubts_has(const struct ki_doubts *d, uint32_t bits)
{
    return ki_doubts_all(d) & bits;
}
