// SPDX-License-Identifier: Apache-2.0
/* Generations of block sets: what may be in one, and who still uses it. */
#include "peer/set/blockset.h"

#define MAX_RANKS 65536

bool kvbm_agent_name_is_valid(const char *name, size_t len)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

    return len >= 1 && len <= KVBM_MAX_AGENT_NAME && strspn(name, allowed) == len;
}

bool kvbm_shard_fits(const struct kvbm_shard *shard, const struct kvbm_layout_config *layout)
{
    for (size_t i = 0; i < KV_COUNT(shard->reserved); i++) {
        if (shard->reserved[i])
            return false;
    }
    if (shard->n_ranks > MAX_RANKS ||
        (shard->n_ranks ? shard->rank >= shard->n_ranks : shard->rank))
        return false;
    if (shard->axis == KVBM_SHARD_NONE)
        return !shard->first_head && !shard->total_heads;
    /* Some engines repeat heads when ranks outnumber them, so the shares needn't add up. */
    return shard->axis == KVBM_SHARD_HEADS && layout->num_heads && shard->n_ranks &&
           layout->num_heads <= shard->total_heads &&
           shard->first_head <= shard->total_heads - layout->num_heads;
}

struct kvbm_facts *kvbm_facts_get(struct kvbm_facts *facts)
{
    atomic_fetch_add_explicit(&facts->references, 1, memory_order_relaxed);
    return facts;
}

void kvbm_facts_put(struct kvbm_facts *facts)
{
    /* acq_rel: whoever frees sees what all others have read and written before they let go */
    if (!facts || atomic_fetch_sub_explicit(&facts->references, 1, memory_order_acq_rel) != 1)
        return;
    if (facts->mapped)
        kvbm_shared_unmap(facts->mapped);
    free(facts->mapped);
    kvbm_layout_destroy(facts->layout);
    free(facts->bytes);
    free(facts);
}

bool kvbm_shards_are_alike(const struct kvbm_shard *a, const struct kvbm_shard *b,
                           const struct kvbm_layout_config *like)
{
    bool a_parts = a->axis == KVBM_SHARD_HEADS, b_parts = b->axis == KVBM_SHARD_HEADS;

    return a->first_head == b->first_head && (a_parts ? a->total_heads : like->num_heads) ==
                                                 (b_parts ? b->total_heads : like->num_heads);
}
