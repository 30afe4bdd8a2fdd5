// SPDX-License-Identifier: Apache-2.0
#include "indexer/fleet.h"

#include <stdlib.h>
#include <string.h>

#include "indexer/model/model.h"

bool ki_needs_attention(const struct ki_worker_info *info)
{
    return info->reasons != 0 || info->status != KI_ACTIVE;
}

int ki_compare_instances(const struct ki_worker_info *a, const struct ki_worker_info *b)
{
    if (a->name && b->name)
        return strverscmp(a->name, b->name);
    if (a->name || b->name)
        return a->name ? 1 : -1;
    return (a->instance > b->instance) - (a->instance < b->instance);
}

void ki_fleet_sum(const struct ki_worker_info *infos, long n, struct ki_fleet *ret)
{
    memset(ret, 0, sizeof(*ret));
    for (long i = 0; i < n; i++) {
        const struct ki_worker_info *info = &infos[i];

        ret->workers += i == 0 || info->instance != infos[i - 1].instance;
        ret->ranks++;
        ret->by_status[info->status]++;
        ret->partial += info->reasons != 0;
        ret->unconnected += !info->connected;
        for (ki_reasons left = info->reasons; left; left &= left - 1)
            ret->with_reason[__builtin_ctzll(left)]++;
    }
}

void ki_index_sum(struct ki_registry *registry, struct ki_index_sums *ret)
{
    struct ki_model **models;
    long n = ki_registry_models(registry, &models);

    memset(ret, 0, sizeof(*ret));
    for (long i = 0; i < n; i++) {
        struct kvi_stats stats = KVI_STATS_INIT;

        kvi_get_stats(models[i]->index, &stats);
        ret->models++;
        ret->blocks += stats.blocks;
        ret->holder_blocks += stats.holder_blocks;
        ret->bytes += stats.bytes;
        for (int t = 0; t < KV_N_TIERS; t++)
            ret->tier_blocks[t] += stats.tier_blocks[t];
        ki_model_release(models[i]);
    }
    if (n >= 0)
        free(models);
}
