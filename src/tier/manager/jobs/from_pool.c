// SPDX-License-Identifier: Apache-2.0
/*
 * Offloads from a cache's pool into the host tier (kvbm_manager_offload): one store job for each
 * run of a sequence in the queue.
 *
 *   queue of weak handles ─► run: one block and those that follow it in its sequence ─► pin ─► job
 *
 * A run is stored as a caller's store would be; the job holds the blocks that it reads. Such jobs
 * count against max_jobs, so an engine that offloads much can't crowd out its loads: the rest stays
 * queued.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/jobs/job.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

struct run {
    struct kvbm_cache *cache;
    uint32_t n, group, position;
    bool has_parent;
    uint8_t priority;
    uint64_t priority_until_ns;
    struct kvbm_immutable sources[KVBM_BATCH];
    uint32_t blocks[KVBM_BATCH];
    uint8_t keys[(KVBM_BATCH + 1) * KVBM_MAX_KEY]; /* the parent's key, then the blocks' */
};

/* True when a block follows the run's last one. */
static bool continues(const struct kvbm_manager *m, const struct run *run,
                      const struct kvbm_down *down, const struct kvbm_block_info *info)
{
    return down->cache == run->cache && info->group == run->group && info->has_parent &&
           info->priority == run->priority && info->priority_until_ns == run->priority_until_ns &&
           info->position == run->position + run->n &&
           !memcmp(info->parent, run->keys + (size_t)run->n * m->key_len, m->key_len);
}

static void add_to_run(const struct kvbm_manager *m, struct run *run,
                       const struct kvbm_immutable *block, const struct kvbm_block_info *info)
{
    if (run->n == 0) {
        run->group = info->group;
        run->position = info->position;
        run->has_parent = info->has_parent;
        run->priority = info->priority;
        run->priority_until_ns = info->priority_until_ns;
        memcpy(run->keys, info->parent, m->key_len);
    }
    run->sources[run->n] = *block;
    run->blocks[run->n++] = info->block;
    memcpy(run->keys + (size_t)run->n * m->key_len, info->key, m->key_len);
}

/* Take the first block of the queue, and its continuation as far as that is next in the queue. */
static void gather_run(struct kvbm_manager *m, struct run *run)
{
    struct kvbm_queue *q = &m->offload.queues[KV_TIER_HOST];

    while (q->n && run->n < m->offload.move_blocks) {
        struct kvbm_down down = kvbm_queue_pop(q);
        struct kvbm_block_info info = {.size = sizeof(info)};
        struct kvbm_immutable block;

        /* evicted since it was queued: there is nothing left to copy */
        if (kvbm_weak_upgrade(&down.weak, &block) < 0) {
            m->stats.host.dropped++;
            kvbm_down_ended(m, &down, false);
            continue;
        }
        kvbm_immutable_info(&block, &info);
        /* it may have been stored by another way meanwhile */
        if (info.tiers >> KV_TIER_HOST & 1) {
            kvbm_immutable_release(&block);
            kvbm_down_ended(m, &down, true);
        } else if (run->n && !continues(m, run, &down, &info)) {
            kvbm_immutable_release(&block);
            kvbm_queue_push(m, KV_TIER_HOST, down);
            return;
        } else {
            run->cache = down.cache;
            add_to_run(m, run, &block, &info);
            kvbm_down_ended(m, &down, true); /* from here on the job waits for the block */
        }
    }
}

/* Store the run like a caller's store. The job holds the blocks that it reads. */
static int store_run(struct kvbm_manager *m, struct run *run)
{
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = run->group,
                               .keys = run->keys + m->key_len,
                               .parent = run->has_parent ? run->keys : NULL,
                               .position = run->position};
    struct kvbm_job job = {.size = sizeof(job), .cache = run->cache, .blocks = run->blocks};
    struct kvbm_immutable *sources = malloc(run->n * sizeof(*sources));
    struct kvbm_pin *pin = NULL;
    int64_t rc = sources ? 0 : -ENOMEM;

    if (rc == 0)
        rc = kvbm_pin_new(m, &chain, run->n, true, &pin);
    if (rc == 0) {
        /* no caller holds the pin: the job alone keeps it */
        pin->released = true;
        pin->retain = run->priority;
        pin->retain_until_ns = run->priority_until_ns;
        memcpy(sources, run->sources, run->n * sizeof(*sources));
        kvbm_pin_reserve(pin);
        job.pin = pin;
        rc = kvbm_job_submit(m, &job, sources, false);
        kvbm_pin_put(pin); /* the job references the pin */
    }
    if (rc < 0)
        free(sources);
    return rc < 0 ? (int)rc : 0;
}

static void store_some(struct kvbm_manager *m)
{
    struct run run = {0};

    gather_run(m, &run);
    if (!run.n)
        return;
    if (store_run(m, &run) < 0) {
        m->stats.host.dropped += run.n;
        for (uint32_t k = run.n; k-- > 0;)
            kvbm_immutable_release(&run.sources[k]);
    } else {
        m->offload.queues[KV_TIER_HOST].in_flight++;
    }
}

void kvbm_from_pools(struct kvbm_manager *m)
{
    /* A run becomes a job. While the manager stops there is none: then each run is dropped. */
    while (kvbm_queue_may_move(&m->offload.queues[KV_TIER_HOST]) && kvbm_job_room(m) != -EAGAIN)
        store_some(m);
}

long kvbm_manager_offload(struct kvbm_cache *cache, const struct kvbm_immutable *blocks, size_t n,
                          int32_t priority)
{
    struct kvbm_manager *m = cache ? cache->manager : NULL;
    long queued = cache ? kvbm_manager_usable(m) : -EINVAL;

    if (queued < 0)
        return queued;
    if (!cache->pool || (n && !blocks))
        return -EINVAL;
    if (cache->partial)
        return -ENOTSUP;
    kvbm_manager_enter(m);
    for (size_t i = 0; i < n; i++) {
        struct kvbm_down down = {.priority = priority, .cache = cache};

        /* a block of another pool isn't queued, and not counted */
        if (blocks[i].handle.pool != cache->pool ||
            kvbm_immutable_downgrade(&blocks[i], &down.weak) < 0)
            continue;
        cache->n_jobs++;
        queued += kvbm_queue_push(m, KV_TIER_HOST, down) == 0;
    }
    kvbm_step_due(m, KVBM_STEP_PUMP);
    kvbm_manager_leave(m);
    return queued;
}
