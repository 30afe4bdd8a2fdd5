// SPDX-License-Identifier: Apache-2.0
/*
 * Tell what each cache group allows of a match, for people who ask why it is short. The rule of cut.c
 * is applied to plans with one group each, or none: the holder's own blocks. Where matches end stays
 * that of all groups (kvi_windows.align and inside).
 */
#include "index/read/cut.h"

#define NO_KIND UINT8_MAX

/* Make the plan of the windows of one group alone. */
static void plan_group(struct kvi_windows *plan, const struct kvi_windows *all, uint32_t group)
{
    *plan = *all;
    plan->n_kinds = 0;
    for (uint32_t i = 0; i < all->n; i++) {
        plan->kind[i] = NO_KIND;
        if (all->items[all->order[i]].group != group)
            continue;
        if (!plan->n_kinds)
            plan->first[plan->n_kinds++] = (uint8_t)i;
        plan->kind[i] = 0;
    }
}

static int add_group(struct kvi_group_matches *groups, const struct kvi_view *view,
                     struct kvi_group_match *match)
{
    struct kvi_windows plan;
    struct kvi_view of = *view;

    if (groups->n == groups->capacity) {
        size_t capacity = KV_MAX(groups->capacity * 2, (size_t)16);
        struct kvi_group_match *items = realloc(groups->items, capacity * sizeof(*items));

        if (!items)
            return -ENOMEM;
        groups->items = items;
        groups->capacity = capacity;
    }
    plan_group(&plan, view->windows, match->group);
    of.windows = &plan;
    kvi_cut_reach(&of, match->reach);
    groups->items[groups->n++] = *match;
    return 0;
}

int kvi_add_groups(struct kvi_group_matches *groups, const struct kvi_view *view,
                   struct kv_holder holder, const uint32_t reach[KV_N_TIERS])
{
    const struct kvi_windows *windows = view->windows;
    struct kvi_group_match match = {
        .holder = holder, .group = KVI_OWN_BLOCKS, .needs = KV_NEEDS_ALL};
    int rc;

    memcpy(match.reach, reach, sizeof(match.reach));
    rc = add_group(groups, view, &match);
    for (uint32_t i = 0; i < windows->n && !rc; i++) {
        const struct kvi_window *w = &windows->items[windows->order[i]];

        if (i && windows->items[windows->order[i - 1]].group == w->group)
            continue;
        match.group = w->group;
        match.needs = w->needs;
        memcpy(match.reach, reach, sizeof(match.reach));
        rc = add_group(groups, view, &match);
    }
    return rc;
}

void kvi_group_matches_fini(struct kvi_group_matches *groups)
{
    free(groups->items);
    *groups = (struct kvi_group_matches){0};
}
