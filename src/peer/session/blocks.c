// SPDX-License-Identifier: Apache-2.0
/* Lists of blocks of one imported set: bounds are checked once, staleness at every use. */
#include "base/core/clock.h"
#include "bm/ids.h"
#include "peer/session/agent.h"

struct kvbm_remote_blocks {
    struct kvbm_agent *agent;
    struct kvbm_facts *facts; /* the generation that was asked */
    size_t n;
    uint32_t blocks[];
};

static int check_facts(const struct kvbm_facts *facts)
{
    /* The caller's reads of the blocks come before the look at the mark, not after it. */
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&facts->stale, memory_order_acquire) ||
        (facts->expires_ns && kv_now_ns() >= facts->expires_ns))
        return -ESTALE;
    return 0;
}

/* Check the blocks against their set, with the agent locked, and take a reference to its facts. */
static int take_set(struct kvbm_agent *agent, const struct kvbm_block_at *at, bool writable,
                    struct kvbm_remote_blocks *list)
{
    const struct kvbm_remote_set *set = kvbm_find_set(agent, at->worker, at->set);
    int err = set ? check_facts(set->facts) : -ENOENT;
    uint64_t num_blocks;

    if (err < 0)
        return err;
    if (writable && !set->facts->writable)
        return -EPERM;
    num_blocks = kvbm_layout_get_config(set->facts->layout)->num_blocks;
    for (size_t i = 0; i < list->n; i++) {
        if (list->blocks[i] >= num_blocks)
            return -ERANGE;
    }
    list->facts = kvbm_facts_get(set->facts);
    list->agent = agent;
    agent->n_users++;
    return 0;
}

static int list_blocks(struct kvbm_agent *agent, const struct kvbm_block_at *blocks, size_t n,
                       bool writable, struct kvbm_remote_blocks **ret)
{
    struct kvbm_remote_blocks *list;
    int err;

    if (!agent || !blocks || !ret || n == 0)
        return -EINVAL;
    for (size_t i = 1; i < n; i++) {
        if (blocks[i].worker != blocks->worker || blocks[i].set != blocks->set)
            return -EXDEV;
    }
    if (n > (SIZE_MAX - sizeof(*list)) / sizeof(list->blocks[0]))
        return -ENOMEM;
    list = malloc(sizeof(*list) + n * sizeof(list->blocks[0]));
    if (!list)
        return -ENOMEM;
    list->n = n;
    for (size_t i = 0; i < n; i++)
        list->blocks[i] = blocks[i].block;
    err = kvbm_ids_check(list->blocks, n, UINT64_MAX, writable ? KVBM_IDS_ONCE : 0);
    if (err == 0) {
        pthread_mutex_lock(&agent->lock);
        err = take_set(agent, blocks, writable, list);
        pthread_mutex_unlock(&agent->lock);
    }
    if (err == 0)
        *ret = KV_STEAL(list);
    free(list);
    return err;
}

int kvbm_remote_blocks_immutable(struct kvbm_agent *agent, const struct kvbm_block_at *blocks,
                                 size_t n, struct kvbm_remote_blocks **ret)
{
    return list_blocks(agent, blocks, n, false, ret);
}

int kvbm_remote_blocks_mutable(struct kvbm_agent *agent, const struct kvbm_block_at *blocks,
                               size_t n, struct kvbm_remote_blocks **ret)
{
    return list_blocks(agent, blocks, n, true, ret);
}

void kvbm_remote_blocks_destroy(struct kvbm_remote_blocks *blocks)
{
    if (!blocks)
        return;
    pthread_mutex_lock(&blocks->agent->lock);
    blocks->agent->n_users--;
    pthread_mutex_unlock(&blocks->agent->lock);
    kvbm_facts_put(blocks->facts);
    free(blocks);
}

int kvbm_remote_blocks_check(const struct kvbm_remote_blocks *blocks)
{
    return blocks ? check_facts(blocks->facts) : -EINVAL;
}

int kvbm_remote_blocks_view(const struct kvbm_remote_blocks *blocks, size_t i, uint32_t layer,
                            uint32_t outer, struct kvbm_view *ret)
{
    int err = blocks && ret ? check_facts(blocks->facts) : -EINVAL;

    if (err < 0)
        return err;
    if (i >= blocks->n)
        return -ERANGE;
    return kvbm_layout_region(blocks->facts->layout, blocks->blocks[i], layer, outer, ret);
}
