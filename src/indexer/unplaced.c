// SPDX-License-Identifier: Apache-2.0
#include "indexer/unplaced.h"

#include <string.h>

#define MASK (KI_UNPLACED_SLOTS - 1)

/* Hashes may be small numbers of a publisher: spread them. */
static size_t home_of(uint64_t hash)
{
    return (size_t)(hash * UINT64_C(0x9e3779b97f4a7c15) >> 52) & MASK;
}

/* Return the slot of a block, or the empty one where it would be. */
static size_t find(const struct ki_unplaced *u, uint64_t hash)
{
    size_t at = home_of(hash);

    while (u->slots[at].tiers && u->slots[at].hash != hash)
        at = (at + 1) & MASK;
    return at;
}

bool ki_unplaced_add(struct ki_unplaced *u, uint64_t hash, unsigned tier)
{
    size_t at = find(u, hash);

    if (!u->slots[at].tiers) {
        if (u->n == KI_UNPLACED_MAX)
            return false;
        u->n++;
        u->slots[at].hash = hash;
    }
    u->slots[at].tiers |= 1u << tier;
    return true;
}

/* Empty a slot, and move those behind it that it had pushed away. */
static void close_gap(struct ki_unplaced *u, size_t gap)
{
    size_t at = gap;

    for (;;) {
        size_t home;

        at = (at + 1) & MASK;
        if (!u->slots[at].tiers)
            break;
        home = home_of(u->slots[at].hash);
        if (((at - home) & MASK) < ((at - gap) & MASK))
            continue; /* it is at home behind the gap */
        u->slots[gap] = u->slots[at];
        gap = at;
    }
    u->slots[gap].tiers = 0;
}

uint32_t ki_unplaced_take(struct ki_unplaced *u, uint64_t hash, uint32_t tiers)
{
    size_t at = u->n ? find(u, hash) : 0;
    uint32_t taken = u->n ? u->slots[at].tiers & tiers : 0;

    if (!taken)
        return 0;
    u->slots[at].tiers &= ~taken;
    if (!u->slots[at].tiers) {
        u->n--;
        close_gap(u, at);
    }
    return taken;
}

void ki_unplaced_clear(struct ki_unplaced *u)
{
    if (u->n)
        memset(u, 0, sizeof(*u));
}
