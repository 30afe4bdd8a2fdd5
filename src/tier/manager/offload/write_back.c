// SPDX-License-Identifier: Apache-2.0
/*
 * Write-back: copy blocks to the object store when the last tier above it is about to evict them.
 *
 *     free blocks │ next to be evicted ......................... latest
 *     ◄──────── the last quarter, at most 4096 ────────►
 *                  each listed once, written from its own memory
 *
 * Eviction happens inside allocations, under the registry's lock, and can't wait. So write-back
 * runs ahead of it: blocks that will be evicted next, and are in no other tier than the cache, are
 * queued as weak handles like other offloads. A block is held only while it is written; afterwards
 * it is the first to be evicted. A block evicted before its turn is lost and counted: evicting
 * faster than the store writes delays no caller. Copying each block at its eviction instead would
 * need a copy under that lock and memory beside the host tier. Blocks of the disk would each need a
 * read.
 *
 * Blocks of the disk are read into host blocks first, those of one move at a time.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/state/manager.h"

#define MAX_LEAVING 4096

static struct kvbm_pool *host_of(const struct kvbm_manager *m)
{
    return kvbm_staging(m) ? NULL : m->host;
}

static uint32_t ahead_of(const struct kvbm_pool *pool)
{
    return KV_MAX(KV_MIN(pool->n_blocks / 4, (uint32_t)MAX_LEAVING), 1u);
}

int kvbm_write_back_open(struct kvbm_manager *m)
{
    uint8_t host = 1u << KV_TIER_HOST, disk = 1u << KV_TIER_DISK, object = 1u << KV_TIER_EXTERNAL;

    m->write_back.max_leaving = MAX_LEAVING;
    m->write_back.leaving = calloc(m->write_back.max_leaving, sizeof(*m->write_back.leaving));
    if (!m->write_back.leaving)
        return -ENOMEM;
    if (host_of(m))
        kvbm_pool_watch(m->host, disk | object);
    if (m->disk)
        kvbm_pool_watch(m->disk, host | object);
    return 0;
}

/* Queue victims among the next @ahead blocks of @pool. Returns true when there may be more. */
static bool queue_leaving(struct kvbm_manager *m, struct kvbm_pool *pool, size_t ahead)
{
    struct kvbm_queue *q = &m->offload.queues[KV_TIER_EXTERNAL];
    uint32_t queued = KV_MIN(q->n + q->n_aside, m->opts.max_offload);
    uint32_t max = KV_MIN(m->write_back.max_leaving, m->opts.max_offload - queued);
    size_t n = max ? kvbm_pool_leaving(pool, ahead, &m->write_back.looked[pool->tier],
                                       m->write_back.leaving, max)
                   : 0;

    for (size_t i = 0; i < n; i++)
        kvbm_queue_push(m, KV_TIER_EXTERNAL, (struct kvbm_down){.weak = m->write_back.leaving[i]});
    return n && n == max;
}

void kvbm_write_back(struct kvbm_manager *m)
{
    if (!m->write_back.leaving || m->mover.ends)
        return;
    if (host_of(m))
        queue_leaving(m, m->host, ahead_of(m->host));
    if (m->disk)
        queue_leaving(m, m->disk, ahead_of(m->disk));
}

void kvbm_write_back_later(struct kvbm_manager *m, struct kvbm_pool *pool)
{
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    if (m->write_back.looked[pool->tier])
        return;
    kvbm_pool_get_stats(pool, &stats);
    m->write_back.looked[pool->tier] = stats.allocations;
}

void kvbm_write_back_all(struct kvbm_manager *m)
{
    if (!m->write_back.leaving || !host_of(m))
        return;
    m->write_back.looked[KV_TIER_HOST] = 0;
    while (queue_leaving(m, m->host, m->host->n_blocks))
        ;
    kvbm_step_due(m, KVBM_STEP_PUMP);
}

uint64_t kvbm_write_back_lost(const struct kvbm_manager *m)
{
    uint64_t lost = 0;

    if (!m->write_back.leaving)
        return 0;
    lost += host_of(m) ? kvbm_pool_lost(m->host) : 0;
    lost += m->disk ? kvbm_pool_lost(m->disk) : 0;
    return lost;
}
