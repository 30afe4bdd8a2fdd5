// SPDX-License-Identifier: Apache-2.0
#include "event/groups.h"

void kve_groups_reset(struct kve_groups *groups)
{
    groups->n = 0;
}

static bool is_main_kind(struct kv_str kind)
{
    return kv_str_eq(kind, "full_attention") || kv_str_eq(kind, "mla_attention") ||
           kv_str_eq(kind, "sink_full_attention");
}

static struct kve_group *find(struct kve_groups *groups, uint32_t rank, uint32_t group)
{
    for (size_t i = 0; i < groups->n; i++) {
        if (groups->known[i].group == group && groups->known[i].rank == rank)
            return &groups->known[i];
    }
    return NULL;
}

static void learn(struct kve_groups *groups, uint32_t rank, uint32_t group, bool is_main)
{
    struct kve_group *known = find(groups, rank, group);

    if (!known) {
        if (groups->n == KVE_MAX_GROUPS)
            return;
        known = &groups->known[groups->n++];
    }
    *known = (struct kve_group){rank, group, is_main};
}

bool kve_groups_is_main(struct kve_groups *groups, uint32_t rank, const struct kve_raw_event *ev)
{
    const struct kve_group *known;

    if (ev->kind.len) {
        bool is_main = is_main_kind(ev->kind);

        if (ev->has_group && ev->type == KVE_RAW_STORED)
            learn(groups, rank, (uint32_t)ev->group, is_main);
        return is_main;
    }
    if (!ev->has_group)
        return true;
    known = find(groups, rank, (uint32_t)ev->group);
    return known ? known->is_main : ev->group == 0;
}
