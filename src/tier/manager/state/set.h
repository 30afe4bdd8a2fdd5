// SPDX-License-Identifier: Apache-2.0
/*
 * A multiset of 64-bit hashes: open addressing, no markers of deletion. 0 is not a member; a hash
 * of 0 counts as 1.
 *
 * Members can be awaited: waiters are counted where the member is, without memory of their own. The
 * cell of a hash stays until its last member and its last waiter are gone. Two keys of one hash
 * count as one: a pin waits longer than it has to then, and looks up again.
 */
#ifndef KVBM_TIER_MANAGER_SET_H
#define KVBM_TIER_MANAGER_SET_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct kvbm_set {
    struct kvbm_set_cell {
        uint64_t hash;  /* 0: empty */
        uint32_t count; /* 0: no member any more, and waiters are left */
        uint32_t waiters;
    } * cells;
    uint32_t n, mask;
};

/** Return the cell of a hash, or the empty one where it would be. At least half of them are empty. */
static inline uint32_t kvbm_set_at(const struct kvbm_set *set, uint64_t hash)
{
    uint32_t at = (uint32_t)hash & set->mask;

    while (set->cells[at].hash && set->cells[at].hash != hash)
        at = (at + 1) & set->mask;
    return at;
}

static inline bool kvbm_set_has(const struct kvbm_set *set, uint64_t hash)
{
    return set->cells && set->cells[kvbm_set_at(set, hash | !hash)].count;
}

/** Double the table. Returns 0, or -ENOMEM: the set is unchanged. */
static inline int kvbm_set_grow(struct kvbm_set *set)
{
    struct kvbm_set larger = {.n = set->n, .mask = set->cells ? set->mask * 2 + 1 : 63};

    larger.cells = calloc((size_t)larger.mask + 1, sizeof(*larger.cells));
    if (!larger.cells)
        return -ENOMEM;
    for (uint32_t i = 0; set->cells && i <= set->mask; i++) {
        if (set->cells[i].hash)
            larger.cells[kvbm_set_at(&larger, set->cells[i].hash)] = set->cells[i];
    }
    free(set->cells);
    *set = larger;
    return 0;
}

/** Reserve room so that the next @n adds succeed. Returns 0 or -ENOMEM. */
static inline int kvbm_set_reserve(struct kvbm_set *set, size_t n)
{
    while (!set->cells || (set->n + n) * 2 > set->mask) {
        if (kvbm_set_grow(set) < 0)
            return -ENOMEM;
    }
    return 0;
}

/** Add a hash. Call kvbm_set_reserve before. */
static inline void kvbm_set_add(struct kvbm_set *set, uint64_t hash)
{
    uint32_t at = kvbm_set_at(set, hash | !hash);

    set->n += !set->cells[at].hash;
    set->cells[at].hash = hash | !hash;
    set->cells[at].count++;
}

/* Empty the cell @gap. */
static inline void kvbm_set_remove(struct kvbm_set *set, uint32_t gap)
{
    uint32_t at;

    for (at = (gap + 1) & set->mask; set->cells[at].hash; at = (at + 1) & set->mask) {
        uint32_t home = (uint32_t)set->cells[at].hash & set->mask;

        if (((at - home) & set->mask) < ((at - gap) & set->mask))
            continue; /* its home slot lies behind the gap */
        set->cells[gap] = set->cells[at];
        gap = at;
    }
    set->cells[gap] = (struct kvbm_set_cell){0};
    set->n--;
}

/** Drop one count of a hash. The last one removes the hash. */
static inline void kvbm_set_drop(struct kvbm_set *set, uint64_t hash)
{
    uint32_t at = kvbm_set_at(set, hash | !hash);

    if (set->cells[at].count && !--set->cells[at].count && !set->cells[at].waiters)
        kvbm_set_remove(set, at);
}

/** Count a waiter of a hash, which must be a member. */
static inline void kvbm_set_await(struct kvbm_set *set, uint64_t hash)
{
    set->cells[kvbm_set_at(set, hash | !hash)].waiters++;
}

/** Drop a waiter of a hash, which may have left the set meanwhile. Returns true for the last one. */
static inline bool kvbm_set_await_no_more(struct kvbm_set *set, uint64_t hash)
{
    uint32_t at = kvbm_set_at(set, hash | !hash);
    bool last = !--set->cells[at].waiters;

    if (last && !set->cells[at].count)
        kvbm_set_remove(set, at);
    return last;
}

/** True while somebody waits for a hash, member or not. */
static inline bool kvbm_set_is_awaited(const struct kvbm_set *set, uint64_t hash)
{
    return set->cells && set->cells[kvbm_set_at(set, hash | !hash)].waiters;
}

#endif
