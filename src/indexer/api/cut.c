// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/cut.h"

#include <string.h>

#include "indexer/api/body_groups.h"
#include "indexer/model/model.h"

#define MOST_CUT 16u /* ranks named in an answer */

/* Tiers by the names that /query has for them. */
static const struct {
    enum kv_tier tier;
    const char *name;
} tiers[] = {{KV_TIER_DEVICE, "gpu"}, {KV_TIER_HOST, "cpu"}, {KV_TIER_EXTERNAL, "disk"}};

/* The match of one rank, and what its groups allow: its own blocks first. */
struct rank_cut {
    const struct ki_worker_info *info;
    uint32_t reach[KV_N_TIERS];
    const struct kvi_group_match *groups;
    size_t n;
};

void ki_cut_fini(struct ki_cut *cut)
{
    ki_lookup_fini(&cut->lookup);
    kvi_group_matches_fini(&cut->groups);
}

void ki_cut_find(struct ki_cut *cut, const struct ki_model *model, const struct ki_explain_ask *ask)
{
    int rc = 0;

    cut->lookup.groups = &cut->groups;
    if (ask->prompt)
        rc = ki_lookup_prompt(&cut->lookup, model->index, ask->prompt);
    else if (!ask->named)
        rc = kvi_find_groups(model->index, ask->hashes, ask->n, &cut->lookup.matches, &cut->groups);
    if (rc < 0)
        cut->groups.n = 0;
}

bool ki_cut_is_all(const struct ki_cut *cut)
{
    bool found = false;

    for (size_t i = 0; i < cut->groups.n; i++)
        found |= cut->groups.items[i].reach[KV_N_TIERS - 1] > 0;
    return found && !cut->lookup.matches.n;
}

static bool is_of(struct kv_holder holder, const struct ki_worker_info *info)
{
    return holder.worker == info->instance && holder.rank == info->rank;
}

/*
 * Find the groups of a rank. Of those of several forms of hashing take those with the longest match of
 * the rank's own blocks. Returns false when it has none.
 */
static bool find_rank(const struct ki_cut *cut, const struct ki_worker_info *info,
                      struct rank_cut *ret)
{
    const struct kvi_matches *matches = &cut->lookup.matches;
    const struct kvi_group_matches *groups = &cut->groups;
    const struct kvi_group_match *end = groups->items + groups->n, *g, *next;

    *ret = (struct rank_cut){.info = info};
    for (g = groups->items; g < end; g = next) {
        for (next = g + 1; next < end && next->group != KVI_OWN_BLOCKS;)
            next++;
        if (!is_of(g->holder, info) ||
            (ret->n && g->reach[KV_N_TIERS - 1] <= ret->groups->reach[KV_N_TIERS - 1]))
            continue;
        ret->groups = g;
        ret->n = (size_t)(next - g);
    }
    for (size_t i = 0; ret->n && i < matches->n; i++)
        if (is_of(matches->items[i].holder, info))
            memcpy(ret->reach, matches->items[i].reach, sizeof(ret->reach));
    return ret->n > 0;
}

/* Return true when groups shorten the rank's match in @tier. */
static bool is_cut_in(const struct rank_cut *rank, enum kv_tier tier)
{
    return rank->reach[tier] < rank->groups[0].reach[tier];
}

static bool is_cut(const struct rank_cut *rank)
{
    bool found = false;

    for (int t = 0; t < KV_N_TIERS; t++)
        found |= is_cut_in(rank, (enum kv_tier)t);
    return found;
}

/* The group that ends the match in @tier; NULL: no length suits all of them together. */
static const struct kvi_group_match *ended_by(const struct rank_cut *rank, enum kv_tier tier)
{
    for (size_t i = 1; i < rank->n; i++)
        if (rank->groups[i].reach[tier] <= rank->reach[tier])
            return &rank->groups[i];
    return NULL;
}

/* Number and kind as in /workers, where the listener knows them. */
static void write_group(const struct rank_cut *rank, const struct kvi_group_match *match,
                        uint32_t block_size, struct kv_json_writer *w)
{
    const struct ki_worker_info *info = rank->info;
    bool own = match->group == KVI_OWN_BLOCKS;

    kv_json_begin_object(w);
    for (uint32_t i = 0; i < info->n_groups; i++) {
        const struct kve_group *g = &info->groups[i].is;

        if (own ? !g->is_main : g->group != match->group)
            continue;
        kv_json_member_u64(w, "group", g->group);
        kv_json_member_str(w, "kind", ki_group_kind_name(g));
        break;
    }
    for (size_t t = 0; t < KV_COUNT(tiers); t++)
        kv_json_member_u64(w, tiers[t].name, (uint64_t)match->reach[tiers[t].tier] * block_size);
    kv_json_end_object(w);
}

static void write_rank(const struct rank_cut *rank, uint32_t block_size, struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    if (rank->info->name)
        kv_json_member_str(w, "instance_id", rank->info->name);
    else
        kv_json_member_u64(w, "instance_id", rank->info->instance);
    kv_json_member_u64(w, "dp_rank", rank->info->rank);
    kv_json_key(w, "ended_by");
    kv_json_begin_object(w);
    for (size_t t = 0; t < KV_COUNT(tiers); t++) {
        const struct kvi_group_match *by = ended_by(rank, tiers[t].tier);

        if (!is_cut_in(rank, tiers[t].tier))
            continue;
        if (by)
            kv_json_member_u64(w, tiers[t].name, by->group);
        else
            kv_json_member_str(w, tiers[t].name, "together");
    }
    kv_json_end_object(w);
    kv_json_key(w, "groups");
    kv_json_begin_array(w);
    for (size_t i = 0; i < rank->n; i++)
        write_group(rank, &rank->groups[i], block_size, w);
    kv_json_end_array(w);
    kv_json_end_object(w);
}

bool ki_cut_write_one(const struct ki_cut *cut, const struct ki_worker_info *info,
                      uint32_t block_size, struct kv_json_writer *w)
{
    struct rank_cut rank;

    if (!find_rank(cut, info, &rank) || !is_cut(&rank))
        return false;
    kv_json_key(w, "cut");
    write_rank(&rank, block_size, w);
    return true;
}

void ki_cut_write(const struct ki_cut *cut, const struct ki_model *model,
                  const struct ki_worker_info *infos, long n, struct kv_json_writer *w)
{
    struct rank_cut rank;
    size_t n_cut = 0;

    for (long i = 0; i < n && cut->groups.n; i++) {
        if (strcmp(infos[i].model, model->name) != 0 ||
            strcmp(infos[i].tenant, model->tenant) != 0 || !find_rank(cut, &infos[i], &rank) ||
            !is_cut(&rank))
            continue;
        if (n_cut == 0) {
            kv_json_key(w, "cut");
            kv_json_begin_array(w);
        }
        if (n_cut++ < MOST_CUT)
            write_rank(&rank, model->block_size, w);
    }
    if (n_cut) {
        kv_json_end_array(w);
        kv_json_member_u64(w, "cut_ranks", n_cut);
    }
}
