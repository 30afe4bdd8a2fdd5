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
    groups->n = groups->n_ranks = groups->n_below = 0;
    groups->unlearned = false;
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
    groups->items[i - 1] = *group;
    groups->items[i - 1].next = before.next;
    groups->items[i - 1].on_device = before.on_device;
    groups->items[i - 1].below = before.below;
    if (group->is_main && !of->main)
        of->main = i;
    else if (!group->is_main && of->main == i)
        of->main = 0;
    return 0;
}

void kve_groups_note_tier(struct kve_groups *groups, uint32_t rank, uint32_t group, bool device)
{
    const struct kve_group *known = kve_groups_find(groups, rank, group);
    struct kve_group *g = known ? &groups->items[known - groups->items] : NULL;
    bool below;

    if (!g || g->on_device)
        return;
    below = !device;
    groups->n_below += (size_t)below - (size_t)g->below;
    g->below = below;
    g->on_device = device;
}
