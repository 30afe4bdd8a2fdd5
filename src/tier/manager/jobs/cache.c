// SPDX-License-Identifier: Apache-2.0
/*
 * Attached caches: a caller's memory of blocks, with a layout whose blocks fit the host tier's.
 *
 * Jobs and entries of offload queues count in n_jobs: a cache is detached only when it is 0, so no
 * copy ever reads a layout that is gone. A cache may outlive its manager: its owner detaches it
 * then.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/core/log.h"
#include "bm/ids.h"
#include "bm/storage/layout.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/state/manager.h"

/* Say why a cache's blocks can't be converted into host blocks; NULL: they can, or are equal. */
static const char *what_differs(const struct kvbm_layout_config *host,
                                const struct kvbm_layout_config *cache, uint32_t n_heads,
                                uint32_t first_head)
{
    /* Elements of equal types are moved unchanged. An unknown dtype counts as the other
     * layout's. */
    bool same = cache->dtype_width_bytes == host->dtype_width_bytes &&
                (cache->dtype == host->dtype || !cache->dtype || !host->dtype);

    if (cache->num_layers != host->num_layers || cache->outer_dim != host->outer_dim ||
        cache->page_size != host->page_size)
        return "layers, outer or page_size differ";
    if (cache->inner_dim == host->inner_dim && cache->order == host->order && same && !n_heads &&
        !first_head)
        return NULL;
    if (!host->num_heads || !cache->num_heads)
        return "to be converted, both must say num_heads";
    if (!same && (!host->dtype || !cache->dtype))
        return "elements of different widths: both must say dtype";
    if (!same && (!kvbm_dtype_is_float(host->dtype) || !kvbm_dtype_is_float(cache->dtype)))
        return "integers aren't converted";
    if (cache->inner_dim / cache->num_heads != host->inner_dim / host->num_heads)
        return "head_dim differs";
    if (n_heads > cache->num_heads ||
        (uint64_t)first_head + (n_heads ? n_heads : cache->num_heads) > host->num_heads)
        return "heads beyond the host tier's";
    return NULL;
}

int kvbm_cache_attach(struct kvbm_manager *m, const struct kvbm_cache_opts *opts,
                      struct kvbm_cache **ret)
{
    int rc = kvbm_manager_usable(m);
    struct kvbm_cache *cache;
    const char *wrong;

    if (rc < 0)
        return rc;
    if (!kv_sized(opts, "kvbm_cache_opts") || !ret ||
        opts->size < offsetof(struct kvbm_cache_opts, pool) || !opts->layout)
        return -EINVAL;
    cache = calloc(1, sizeof(*cache));
    if (!cache)
        return -ENOMEM;
    cache->manager = m;
    cache->layout = opts->layout;
    cache->pool = KV_OPT(opts, pool, NULL);
    cache->first_head = KV_OPT(opts, first_head, 0);
    cache->n_heads = KV_OPT(opts, n_heads, 0);
    /* a cache of fewer heads (a tensor-parallel rank's) holds a part of each block */
    if (!cache->n_heads && kvbm_layout_get_config(opts->layout)->num_heads !=
                               kvbm_layout_get_config(m->layout)->num_heads)
        cache->n_heads = kvbm_layout_get_config(opts->layout)->num_heads;
    cache->partial =
        cache->n_heads && cache->n_heads != kvbm_layout_get_config(m->layout)->num_heads;
    cache->direct = kvbm_direct_fits(m, cache->layout);
    cache->base = cache->layout->places[0].addr;
    cache->stride = cache->layout->shape.block_stride;
    wrong = what_differs(kvbm_layout_get_config(m->layout), kvbm_layout_get_config(cache->layout),
                         cache->n_heads, cache->first_head);
    /* handles of another registry mean other blocks: a move between them couldn't name one */
    if (!wrong && cache->pool && cache->pool->registry != m->registry)
        wrong = "the pool is of another registry";
    if (wrong) {
        kv_log_warn("kvbm", "cache not attached", "reason=\"%s\"", wrong);
        free(cache);
        return -EINVAL;
    }
    kvbm_manager_enter(m);
    cache->next = m->caches;
    m->caches = cache;
    kvbm_manager_leave(m);
    *ret = cache;
    return 0;
}

int kvbm_cache_check(const struct kvbm_cache *cache, const uint32_t *blocks, size_t n,
                     unsigned flags)
{
    int rc = kvbm_ids_check(blocks, n, cache->layout->config.num_blocks, flags);

    /* callers know one error for blocks that aren't the cache's */
    return rc == -ERANGE ? -EINVAL : rc;
}

void kvbm_caches_orphan(struct kvbm_manager *m)
{
    for (struct kvbm_cache *cache = m->caches, *next; cache; cache = next) {
        next = cache->next;
        cache->manager = NULL;
        cache->next = NULL;
    }
    m->caches = NULL;
}

int kvbm_cache_detach(struct kvbm_cache *cache)
{
    struct kvbm_manager *m = cache ? cache->manager : NULL;
    int rc = m ? kvbm_manager_usable(m) : 0;
    struct kvbm_cache **at;

    if (!m) { /* its manager has been destroyed */
        free(cache);
        return 0;
    }
    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    if (cache->n_jobs) {
        rc = -EBUSY;
    } else {
        for (at = &m->caches; *at != cache; at = &(*at)->next)
            ;
        *at = cache->next;
        free(cache);
    }
    kvbm_manager_leave(m);
    return rc;
}
