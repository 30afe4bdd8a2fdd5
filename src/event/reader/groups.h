// SPDX-License-Identifier: Apache-2.0
/**
 * Remember the cache groups of each rank, as stored events have described them.
 *
 *     ranks    0         1         5          sorted by rank
 *              |         |         |
 *     items    0:0  0:1  1:0  5:0  5:1  1:1   rank:group, in the order of learning
 *                                             the items of a rank are linked
 *
 * A stream may multiplex 1024 ranks, and most events name a group: a lookup is a binary search of
 * the rank and a walk over its few groups.
 */
#ifndef KV_EVENT_READER_GROUPS_H
#define KV_EVENT_READER_GROUPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

/** Most ranks with groups, and most groups of a rank. Further groups aren't learned. */
#define KVE_MAX_GROUP_RANKS 1024
#define KVE_MAX_GROUPS 64

/** A cache group of one rank. */
struct kve_group {
    uint32_t rank, group;
    bool is_main, is_window;              /* neither: a kind that can't be followed */
    uint32_t window, need, stride, parts; /* of a window: as in struct kve_source */
    bool on_device, below; /* it has shown blocks on the device; in tiers below, and none there */
    uint32_t next;         /* 1 + item of the next group of the rank; 0: none */
};

/** The groups of one rank. */
struct kve_group_rank {
    uint32_t rank;
    uint32_t n;
    uint32_t first, main; /* 1 + item: newest group, and the main one; 0: none */
    bool unlearned;       /* some group had no room: it may be the main one */
};

struct kve_groups {
    struct kve_group *items;
    struct kve_group_rank *ranks;
    size_t n, capacity, n_ranks, ranks_capacity;
    size_t n_below; /* groups that have shown blocks below the device alone */
    size_t last; /* place in ranks of the one that was asked for last: the next is often the same */
    bool unlearned; /* some group of some rank had no room */
};

void kve_groups_fini(struct kve_groups *groups);

/** Copy @from to *@ret, which kve_groups_fini frees. Returns 0 or -ENOMEM. */
int kve_groups_copy(const struct kve_groups *from, struct kve_groups *ret);

/** Forget all groups. */
void kve_groups_reset(struct kve_groups *groups);

/** Find the groups of a rank that isn't the last one; NULL: none is known. */
const struct kve_group_rank *kve_groups_find_rank(struct kve_groups *groups, uint32_t rank);

/** Return a group as it was learned, or NULL. Valid until the next group is learned. */
static inline const struct kve_group *kve_groups_find(struct kve_groups *groups, uint32_t rank,
                                                      uint32_t group)
{
    const struct kve_group_rank *of =
        groups->last < groups->n_ranks ? &groups->ranks[groups->last] : NULL;
    uint32_t i;

    if (KV_UNLIKELY(!of || of->rank != rank))
        of = kve_groups_find_rank(groups, rank);
    i = of ? of->first : 0;
    while (i && groups->items[i - 1].group != group)
        i = groups->items[i - 1].next;
    return i ? &groups->items[i - 1] : NULL;
}

/** Return the main group of @rank, or NULL. Valid until the next group is learned. */
const struct kve_group *kve_groups_main(const struct kve_groups *groups, uint32_t rank);

/** Return true when @rank has a main group, or may have one for which there was no room. */
bool kve_groups_may_have_main(const struct kve_groups *groups, uint32_t rank);

/**
 * Learn a group, or what it is now. Returns 0; -ENOSPC (no room for it) or -ENOMEM, which are
 * remembered until the reset.
 */
int kve_groups_learn(struct kve_groups *groups, const struct kve_group *group);

/** Note that blocks of a group are stored on the device, or below it. Groups not learned are passed over. */
void kve_groups_note_tier(struct kve_groups *groups, uint32_t rank, uint32_t group, bool device);

#endif
