// SPDX-License-Identifier: Apache-2.0
#include "event/reader/told.h"

#include <string.h>

#include "base/core/error.h"

_Static_assert(KVE_MAX_TOLD == 32, "kve_told_add names the number");

static const char *const names[KVE_N_KINDS] = {
    [KVE_KIND_FULL] = "full_attention",
    [KVE_KIND_MLA] = "mla_attention",
    [KVE_KIND_SINK_FULL] = "sink_full_attention",
    [KVE_KIND_SLIDING] = "sliding_window",
    [KVE_KIND_SLIDING_MLA] = "sliding_window_mla",
    [KVE_KIND_MAMBA] = "mamba",
    [KVE_KIND_CHUNKED] = "chunked_local_attention",
};

enum kve_kind kve_kind_of(struct kv_str name)
{
    for (int kind = KVE_KIND_UNKNOWN + 1; kind < KVE_N_KINDS; kind++)
        if (kv_str_eq(name, names[kind]))
            return (enum kve_kind)kind;
    return KVE_KIND_UNKNOWN;
}

const char *kve_kind_name(enum kve_kind kind)
{
    return kind < KVE_N_KINDS ? names[kind] : NULL;
}

const struct kve_told_group *kve_told_find(const struct kve_told *told, uint64_t group,
                                           enum kve_kind kind)
{
    for (uint32_t i = 0; i < told->n; i++) {
        const struct kve_told_group *g = &told->items[i];

        if (g->group == KVE_ANY_GROUP ? kind && g->kind == kind : g->group == group)
            return g; /* those with numbers come first */
    }
    return NULL;
}

/* Compare what names a group: its number or, where every one is meant, the kind. */
static int compare_names(const struct kve_told_group *a, const struct kve_told_group *b)
{
    if (a->group != b->group)
        return a->group < b->group ? -1 : 1;
    if (a->group != KVE_ANY_GROUP)
        return 0;
    return (a->kind > b->kind) - (a->kind < b->kind);
}

const char *kve_told_add(struct kve_told *told, const struct kve_told_group *group)
{
    uint32_t at = told->n;

    if (told->n == KVE_MAX_TOLD)
        return "more than 32 groups";
    while (at && compare_names(group, &told->items[at - 1]) < 0)
        at--;
    if (at && compare_names(group, &told->items[at - 1]) == 0)
        return "a group is told twice";
    memmove(told->items + at + 1, told->items + at, (told->n - at) * sizeof(*group));
    told->items[at] = *group;
    told->n++;
    return NULL;
}

const char *kve_told_problem(const struct kve_told_group *group, uint32_t block_size)
{
    uint32_t size = group->block_size ? group->block_size : block_size;

    if (group->kind == KVE_KIND_UNKNOWN || group->kind >= KVE_N_KINDS)
        return "a group without a kind: full_attention, mla_attention, sink_full_attention, "
               "sliding_window, sliding_window_mla, mamba or chunked_local_attention";
    if ((group->window > 0) != kve_kind_is_sliding((enum kve_kind)group->kind))
        return "a sliding window has to have its window in tokens, and no other kind has one";
    if ((group->chunk > 0) != (group->kind == KVE_KIND_CHUNKED))
        return "chunked_local_attention has to have its chunk in tokens, and no other kind has one";
    if (group->chunk && size && group->chunk % size)
        return "a chunk has to be a whole number of blocks";
    return NULL;
}
