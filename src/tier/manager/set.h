// SPDX-License-Identifier: Apache-2.0
/* A multiset of 64-bit hashes: open addressing, no markers of deletion. 0 is not a member; a hash
 * of 0 counts as 1. */
#ifndef KVBM_TIER_MANAGER_SET_H
#define KVBM_TIER_MANAGER_SET_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct kvbm_set {
    struct kvbm_set_cell {
        uint64_t hash; /* 0: empty */
        uint32_t count;
    } * cells;
    uint32_t n, mask;
};

static inline uint32_t kvbm_set_at(const struct kvbm_set *set, uint64_t hash)
{
    uint32_t at = (uint32_t)hash & set->mask;

    while (set->cells[at].hash && set->cells[at].hash != hash)
        at = (at + 1) & set->mask;
    return at;
}

static inline bool kvbm_set_has(const struct kvbm_set *set, uint64_t hash)
{
    return set->cells && set->cells[kvbm_set_at(set, hash | !hash)].hash;
}

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

/** Drop one count of a hash. The last one removes the hash. */
static inline void kvbm_set_drop(struct kvbm_set *set, uint64_t hash)
{
    uint32_t gap = kvbm_set_at(set, hash | !hash), at;

    if (!set->cells[gap].hash || --set->cells[gap].count)
        return;
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

#endif
