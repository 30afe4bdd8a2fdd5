// SPDX-License-Identifier: Apache-2.0
#include "event/reader/groups.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "event/wire/raw_event.h"

void kve_groups_fini(struct kve_groups *groups)
{
    free(groups->items);
    free(groups->ranks);
    memset(groups, 0, sizeof(*groups));
}

int kve_groups_copy(const struct kve_groups *from, struct kve_groups *ret)
{
    struct kve_groups copy = {.n = from->n,
                              .n_ranks = from->n_ranks,
                              .n_below = from->n_below,
                              .n_chunked = from->n_chunked,
                              .n_mixed = from->n_mixed,
                              .moved = from->moved,
                              .unlearned = from->unlearned};

    if (kve_grow(&copy.items, &copy.capacity, from->n, sizeof(*copy.items)) < 0 ||
        kve_grow(&copy.ranks, &copy.ranks_capacity, from->n_ranks, sizeof(*copy.ranks)) < 0) {
        kve_groups_fini(&copy);
        return -ENOMEM;
    }
    if (from->n) {
        memcpy(copy.items, from->items, from->n * sizeof(*copy.items));
        memcpy(copy.ranks, from->ranks, from->n_ranks * sizeof(*copy.ranks));
    }
    *ret = copy;
    return 0;
}

void kve_groups_reset(struct kve_groups *groups)
{
    groups->n = groups->n_ranks = groups->n_below = groups->n_chunked = groups->n_mixed = 0;
    groups->unlearned = groups->moved = false;
}

/* Return the number of ranks below @rank: its place among them. */
static size_t place_of(const struct kve_groups *groups, uint32_t rank)
{
    size_t from = 0, to = groups->n_ranks;

    while (from < to) {
        size_t middle = from + (to - from) / 2;

        if (groups->ranks[middle].rank < rank)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

static const struct kve_group_rank *find_rank(const struct kve_groups *groups, uint32_t rank)
{
    size_t at = groups->last;

    if (at >= groups->n_ranks || groups->ranks[at].rank != rank)
        at = place_of(groups, rank);
    return at < groups->n_ranks && groups->ranks[at].rank == rank ? &groups->ranks[at] : NULL;
}

const struct kve_group_rank *kve_groups_find_rank(struct kve_groups *groups, uint32_t rank)
{
    const struct kve_group_rank *of = find_rank(groups, rank);

    if (of)
        groups->last = (size_t)(of - groups->ranks);
    return of;
}

const struct kve_group *kve_groups_main(const struct kve_groups *groups, uint32_t rank)
{
    const struct kve_group_rank *of = find_rank(groups, rank);

    return of && of->main ? &groups->items[of->main - 1] : NULL;
}

bool kve_groups_may_have_main(const struct kve_groups *groups, uint32_t rank)
{
    const struct kve_group_rank *of = find_rank(groups, rank);

    return of ? of->main || of->unlearned : groups->unlearned;
}

bool kve_groups_chunked_alone(const struct kve_groups *groups)
{
    for (size_t i = 0; groups->n_chunked && i < groups->n; i++)
        if (groups->items[i].needs == KV_NEEDS_CHUNK &&
            !kve_groups_may_have_main(groups, groups->items[i].rank))
            return true;
    return false;
}

/* Return the rank's record, made if need be. NULL: no room or no memory. */
static struct kve_group_rank *add_rank(struct kve_groups *groups, uint32_t rank)
{
    size_t at = place_of(groups, rank);
    struct kve_group_rank *of;

    groups->last = at;
    if (at < groups->n_ranks && groups->ranks[at].rank == rank)
        return &groups->ranks[at];
    if (groups->n_ranks == KVE_MAX_GROUP_RANKS ||
        kve_grow(&groups->ranks, &groups->ranks_capacity, groups->n_ranks + 1, sizeof(*of)) < 0)
        return NULL;
    of = &groups->ranks[at];
    memmove(of + 1, of, (groups->n_ranks - at) * sizeof(*of));
    /* Before the rank had a record, what was left out could be one of its groups. */
    *of = (struct kve_group_rank){.rank = rank, .unlearned = groups->unlearned};
    groups->n_ranks++;
    return of;
}

/* Add an item for a group that isn't known. Returns 0, -ENOSPC or -ENOMEM. */
static int add_item(struct kve_groups *groups, struct kve_group_rank *of, uint32_t *ret)
{
    if (of->n == KVE_MAX_GROUPS)
        return -ENOSPC;
    if (kve_grow(&groups->items, &groups->capacity, groups->n + 1, sizeof(*groups->items)) < 0)
        return -ENOMEM;
    groups->items[groups->n++] = (struct kve_group){.next = of->first};
    of->first = *ret = (uint32_t)groups->n;
    of->n++;
    return 0;
}

static void copy_tiers(struct kve_group *to, const struct kve_group *from)
{
    to->on_device = from->on_device;
    to->offloads = from->offloads;
    to->waits = from->waits;
    to->below = from->below;
    to->home = from->home;
}

int kve_groups_learn(struct kve_groups *groups, const struct kve_group *group)
{
    struct kve_group_rank *of = add_rank(groups, group->rank);
    const struct kve_group *known = kve_groups_find(groups, group->rank, group->group);
    struct kve_group before = {0};
    uint32_t i = known ? (uint32_t)(known - groups->items) + 1 : 0;
    int rc = known ? 0 : !of ? -ENOSPC : add_item(groups, of, &i);

    if (rc) {
        groups->unlearned = true;
        if (of)
            of->unlearned = true;
        return rc;
    }
    before = groups->items[i - 1];
    groups->n_chunked -= before.needs == KV_NEEDS_CHUNK;
    groups->n_chunked += group->needs == KV_NEEDS_CHUNK;
    groups->items[i - 1] = *group;
    groups->items[i - 1].next = before.next;
    copy_tiers(&groups->items[i - 1], &before);
    if (group->is_main && !of->main)
        of->main = i;
    else if (!group->is_main && of->main == i)
        of->main = 0;
    return 0;
}

/* -- in which tier a group lives --------------------------------------------------------------- */

/* Give a group of rank @of the tiers of @now. */
static void set_tiers(struct kve_groups *groups, struct kve_group_rank *of, struct kve_group *g,
                      const struct kve_group *now)
{
    bool was_mixed = of->n_homes && of->n_offloads;

    of->n_homes += (uint32_t) !!now->home - (uint32_t) !!g->home;
    of->n_offloads += (uint32_t)now->offloads - (uint32_t)g->offloads;
    of->on_device |= now->on_device;
    groups->n_below += (size_t) !!now->below - (size_t) !!g->below;
    groups->n_mixed += (size_t)(of->n_homes && of->n_offloads) - (size_t)was_mixed;
    groups->moved = true;
    copy_tiers(g, now);
}

bool kve_groups_note_tier(struct kve_groups *groups, uint32_t rank, uint32_t group,
                          enum kv_tier tier, struct kve_group *ret)
{
    const struct kve_group *known = kve_groups_find(groups, rank, group);
    bool device = tier == KV_TIER_DEVICE;
    struct kve_group now;

    if (!known || (known->on_device && (device || known->offloads)) ||
        (!device && (known->home == (uint32_t)tier || known->below == (uint32_t)tier)))
        return false;
    *ret = now = *known;
    if (device) {
        now.on_device = true;
        now.below = now.home = 0;
    } else if (known->on_device || known->home) {
        now.offloads = true;
    } else {
        now.below = known->below ? KV_MIN(known->below, (uint32_t)tier) : (uint32_t)tier;
    }
    set_tiers(groups, &groups->ranks[groups->last], &groups->items[known - groups->items], &now);
    return device;
}

const struct kve_group *kve_groups_settle(struct kve_groups *groups, size_t *at)
{
    for (; groups->moved && groups->n_below && *at < groups->n; ++*at) {
        struct kve_group *g = &groups->items[*at], now = *g;
        const struct kve_group_rank *of;

        if (!g->below)
            continue;
        of = kve_groups_find_rank(groups, g->rank);
        if (!of || !of->on_device || !kve_group_is_full(g)) {
            g->waits = true;
            continue;
        }
        now.home = g->below;
        now.below = 0;
        set_tiers(groups, &groups->ranks[groups->last], g, &now);
        ++*at;
        return g;
    }
    groups->moved = false;
    return NULL;
}

bool kve_groups_lives_below(const struct kve_groups *groups, uint32_t rank, uint32_t group)
{
    const struct kve_group_rank *of = find_rank(groups, rank);
    uint32_t i = of && of->n_homes ? of->first : 0;

    while (i && groups->items[i - 1].group != group)
        i = groups->items[i - 1].next;
    return i && groups->items[i - 1].home;
}

uint32_t kve_groups_homes(const struct kve_groups *groups, const struct kve_group_rank *of)
{
    uint32_t tiers = 0;

    for (uint32_t i = of->first; i; i = groups->items[i - 1].next)
        tiers |= groups->items[i - 1].home ? 1u << groups->items[i - 1].home : 0;
    return tiers;
}

int kve_groups_restore(struct kve_groups *groups, const struct kve_group *group)
{
    int rc = kve_groups_learn(groups, group);
    const struct kve_group *known = rc ? NULL : kve_groups_find(groups, group->rank, group->group);

    if (known)
        set_tiers(groups, &groups->ranks[groups->last], &groups->items[known - groups->items],
                  group);
    return rc;
}
