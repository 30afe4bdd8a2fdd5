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
 *
 * A group lives on the device, or in one tier below, its home (vLLM's HiSparse: attention in host
 * memory, its indexer on the device; the engine reads both where they are). Offloaded blocks were on
 * the device before, those of a group at home below never are:
 *
 *     it has shown blocks                   other groups of its rank    it lives
 *     on the device                                                     on the device
 *     below alone, full attention           on the device               below
 *     below alone                           below, too, or other kind   nobody knows yet
 *
 * A question settled at the end of a batch: a step's events may come in any order.
 */
#ifndef KV_EVENT_READER_GROUPS_H
#define KV_EVENT_READER_GROUPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"
#include "event/reader/told.h"
#include "kv_event.h"

/** Most ranks with groups, and most groups of a rank. Further groups aren't learned. */
#define KVE_MAX_GROUP_RANKS 1024
#define KVE_MAX_GROUPS 64

/** A cache group of one rank. */
struct kve_group {
    uint32_t rank, group;
    bool is_main, is_window;              /* neither: a kind that can't be followed */
    uint32_t window, need, stride, parts; /* of a window: as in struct kve_source */
    enum kv_needs needs;                  /* the same */
    enum kve_kind kind;                   /* as an event or a registration named it */
    bool on_device;                       /* it has shown blocks on the device */
    bool offloads;  /* it has shown blocks in tiers below the one in which it lives */
    bool waits;     /* below: since a batch before */
    uint32_t below; /* tier of its blocks, as long as nobody knows where it lives; else 0 */
    uint32_t home;  /* tier below the device in which it lives; 0: none */
    uint32_t next;  /* 1 + item of the next group of the rank; 0: none */
};

/** The groups of one rank. */
struct kve_group_rank {
    uint32_t rank;
    uint32_t n;
    uint32_t first, main;         /* 1 + item: newest group, and the main one; 0: none */
    uint32_t n_homes, n_offloads; /* groups at home below the device; groups that offload */
    bool on_device;               /* some group has shown blocks there */
    bool unlearned;               /* some group had no room: it may be the main one */
};

struct kve_groups {
    struct kve_group *items;
    struct kve_group_rank *ranks;
    size_t n, capacity, n_ranks, ranks_capacity;
    size_t n_below;   /* groups of which nobody knows where they live */
    size_t n_chunked; /* groups with chunks */
    size_t n_mixed;   /* ranks with groups at home below the device, and groups that offload */
    bool moved;       /* there may be groups to settle */
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

/** Return true for a group that lives below the device. */
bool kve_groups_lives_below(const struct kve_groups *groups, uint32_t rank, uint32_t group);

/** Return bit 1 << tier of each tier below the device in which groups of rank @of live. */
uint32_t kve_groups_homes(const struct kve_groups *groups, const struct kve_group_rank *of);

/** Return the main group of @rank, or NULL. Valid until the next group is learned. */
const struct kve_group *kve_groups_main(const struct kve_groups *groups, uint32_t rank);

/** Return true when @rank has a main group, or may have one for which there was no room. */
bool kve_groups_may_have_main(const struct kve_groups *groups, uint32_t rank);
/** Return true when some rank has a group with chunks, and no main group. */
bool kve_groups_chunked_alone(const struct kve_groups *groups);

/**
 * Learn a group, or what it is now. Returns 0; -ENOSPC (no room for it) or -ENOMEM, which are
 * remembered until the reset.
 */
int kve_groups_learn(struct kve_groups *groups, const struct kve_group *group);

/**
 * Note that blocks of a group are stored in a tier. Groups not learned are passed over. Returns true,
 * with the group as it was before in *@ret, when it shows its first blocks on the device.
 */
bool kve_groups_note_tier(struct kve_groups *groups, uint32_t rank, uint32_t group,
                          enum kv_tier tier, struct kve_group *ret);

/**
 * At the end of a batch: find the next group, from item *@at on, that turns out to be at home below
 * the device, and settle it there. Begin with 0 and call until it returns NULL.
 */
const struct kve_group *kve_groups_settle(struct kve_groups *groups, size_t *at);

/**
 * Learn a group of another reader, with the tiers in which it lives and has shown blocks. Returns as
 * kve_groups_learn.
 */
int kve_groups_restore(struct kve_groups *groups, const struct kve_group *group);

/** Return true for a group that needs every block. */
static inline bool kve_group_is_full(const struct kve_group *group)
{
    return group->is_main || (group->is_window && group->needs == KV_NEEDS_ALL);
}

#endif
