// SPDX-License-Identifier: Apache-2.0
/*
 * Destroy a manager.
 *
 *   in use? ─► -EBUSY          pins, handles or pools that the caller still has
 *   wind down                  no new jobs; what is queued is written until the deadline, then cancelled
 *   the mover ends             every operation has been noted: no executor touches host memory
 *   in use? ─► -EBUSY          by a call that was still running; the mover goes on
 *   free                       waiting calls have left; caches stay with their owners
 *
 * Invariant: memory is freed only when no device can write into it any more. A disk or GPU that
 * doesn't answer leaves the manager whole, and the call returns -ETIMEDOUT.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/core/log.h"
#include "bm/registry/registry.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/state/manager.h"

/* ---- pins, handles and pools in use ---- */

/* Count the handles on a pool that a pin has: not the caller's. */
static uint64_t of_pin(const struct kvbm_pin *pin, const struct kvbm_pool *pool)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < pin->n; i++) {
        const struct kvbm_item *item = &pin->items[i];

        n += item->state >= ITEM_FETCHED && item->host.pool == pool;
        n += item->source.pool == pool;
        n += pin->likes && pin->likes[i].handle.pool == pool;
    }
    return n;
}

/* Count the handles on a pool that a move has. */
static uint64_t of_move(const struct kvbm_move *move, const struct kvbm_pool *pool)
{
    uint64_t n = 0;

    for (uint32_t k = 0; k < move->n; k++)
        n += (uint64_t)(move->like[k].handle.pool == pool) + (move->target[k].handle.pool == pool) +
             (move->bounce[k].handle.pool == pool);
    return n;
}

/* True when the caller holds handles on the pool. */
static bool is_held(const struct kvbm_manager *m, struct kvbm_pool *pool)
{
    uint64_t n = pool ? kvbm_pool_handles(pool) : 0, own = pool == m->disk ? m->offload.n_quarantine
                                                           : pool == m->host ? m->promises.n
                                                                             : 0;

    if (!n)
        return false;
    for (const struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next)
        own += of_pin(pin, pool);
    for (const struct kvbm_move *move = m->offload.moves; move; move = move->next)
        own += of_move(move, pool);
    if (n > own)
        kv_log_warn("kvbm", "manager not destroyed: blocks of a pool are held",
                    "pool=%s handles=%" PRIu64, pool->name, n - own);
    return n > own;
}

/* True when the caller has made pools in the manager's registry, which would lose it. */
static bool has_pools(struct kvbm_manager *m)
{
    const struct kvbm_pool *pool;

    kvbm_lock(m->registry);
    for (pool = m->registry->pools; pool; pool = pool->next) {
        if (pool != m->host && pool != m->disk && pool != m->object)
            break;
    }
    if (pool)
        kv_log_warn("kvbm", "manager not destroyed: a pool of its registry exists", "pool=%s",
                    pool->name);
    kvbm_unlock(m->registry);
    return pool != NULL;
}

/* True while the caller has pins. */
static bool has_pins(const struct kvbm_manager *m)
{
    uint32_t n = 0;

    for (const struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next)
        n += !pin->released;
    if (n)
        kv_log_warn("kvbm", "manager not destroyed: pins are held", "pins=%" PRIu32, n);
    return n > 0;
}

/* True while the caller has pins, handles, or pools in the manager's registry. The log
 * says which. */
static bool in_use(struct kvbm_manager *m)
{
    return has_pins(m) || has_pools(m) || is_held(m, m->host) || is_held(m, m->disk) ||
           is_held(m, m->object);
}

/* ---- the end ---- */

void kvbm_manager_free(struct kvbm_manager *m, uint64_t deadline)
{
    /* threads first, then stores, then pools, then the memory that all of them used */
    kvbm_lending_stop(m);
    kvbm_manager_close_peers(m);
    kvbm_copier_destroy(m->copier);
    kvbm_disk_close(m->disk_store);
    kvbm_object_close_by(m->object_store, deadline);
    for (uint32_t i = 0; i < m->offload.n_quarantine; i++)
        kvbm_mutable_release(&m->offload.quarantine[i]);
    kvbm_pool_destroy(m->object);
    kvbm_pool_destroy(m->disk);
    kvbm_pool_destroy(m->host);
    kvbm_registry_destroy(m->registry);
    kvbm_layout_destroy(m->layout);
    kvbm_memory_return(m);
    kvbm_shared_destroy(m->shared);
    for (enum kv_tier tier = KV_TIER_HOST; tier < KV_N_TIERS; tier++) {
        free(m->offload.queues[tier].heap);
        free(m->offload.queues[tier].aside);
        free(m->offload.queues[tier].moving.cells);
        kvbm_sketch_fini(&m->offload.offers[tier]);
    }
    for (struct kvbm_job_ *job = m->jobs.done, *next; job; job = next) {
        next = job->next;
        free(job);
    }
    kv_wake_close(&m->jobs.done_wake);
    free(m->offload.quarantine);
    free(m->write_back.leaving);
    free(m->promises.blocks);
    free(m->promises.keys.cells);
    free(m->pins.pending.cells);
    free(m->pins.at_peers.cells);
    free(m->presence.asked.cells);
    free(m->strings);
    pthread_cond_destroy(&m->changed);
    pthread_cond_destroy(&m->work);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* Wait for jobs and offloads until the deadline, then cancel the rest. */
static void wind_down(struct kvbm_manager *m, uint64_t deadline)
{
    uint64_t before = 0;
    int rc = 0;

    m->stopping = true;
    /* Flush twice: for offloads under way at the first call, and for blocks that found the queue
     * full. Continue while blocks arrive. */
    for (int round = 0; rc == 0 && (round < 2 || m->stats.object.blocks_in != before); round++) {
        before = m->stats.object.blocks_in;
        kvbm_write_back_all(m);
        kvbm_advance(m);
        while (rc == 0 && (m->jobs.n || m->mover.running > m->presence.n_asks + m->n_peer_asks ||
                           !kvbm_offload_idle(m)))
            rc = kvbm_manager_wait_change(m, deadline);
    }
    kvbm_offload_drop_all(m);
    /* EXISTS queries too: no lookup waits for their answers */
    kvbm_object_cancel_all(m->object_store);
    kvbm_peers_cancel_all(m->peers);
    for (struct kvbm_pin *pin = m->pins.first; pin; pin = pin->next)
        kvbm_fetch_cancel(pin);
    for (struct kvbm_job_ *job = m->jobs.first; job; job = job->next) {
        /* cancelling keeps the status of a job that has ended */
        if (job->copied && !job->n_through)
            continue; /* its last offload has just been dropped: it is over */
        job->cancelled = true;
        if (job->copy_id)
            kvbm_copier_cancel(m->copier, job->copy_id);
    }
}

/*
 * Stop the executors. A request that a disk or a GPU has can't be cancelled, and uses its memory
 * until it ends. When one doesn't end in time the manager stays whole: none of its memory may be
 * freed.
 */
static int stop(struct kvbm_manager *m, uint64_t deadline)
{
    int rc = in_use(m) ? -EBUSY : 0;

    if (rc < 0)
        return rc;
    wind_down(m, deadline);
    rc = kvbm_mover_end(m, KV_MAX(deadline, kv_now_ns() + KVBM_LET_GO_NS));
    if (rc < 0)
        kv_log_error("kvbm", "manager not destroyed: a disk or GPU doesn't answer",
                     "waiting=%" PRIu32, m->mover.running);
    else if (in_use(m)) /* of a call that was still running */
        rc = kvbm_mover_start(m) < 0 ? -EAGAIN : -EBUSY;
    if (rc < 0)
        kvbm_peers_resume(m->peers);
    m->stopping = rc == 0;
    return rc;
}

int kvbm_manager_destroy(struct kvbm_manager *m, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc;

    if (!m || kvbm_manager_usable(m) < 0)
        return 0;
    kvbm_manager_enter(m);
    rc = stop(m, deadline);
    /* Waiters were woken because their jobs ended, or because no offload is left; each leaves
     * soon. */
    while (rc == 0 && m->n_waiters)
        pthread_cond_wait(&m->changed, &m->lock);
    kvbm_manager_leave(m);
    if (rc < 0)
        return rc;
    kvbm_caches_orphan(m);
    kvbm_manager_free(m, KV_MAX(deadline, kv_now_ns() + KVBM_LET_GO_NS));
    return 0;
}
