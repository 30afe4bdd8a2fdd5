// SPDX-License-Identifier: Apache-2.0
/*
 * Ends of operations, and the mover: a thread that keeps deadlines and retries what was refused.
 *
 *   executor's thread ── kvbm_note ──► the operation's end ──► kvbm_advance
 *   mover ── a deadline is over, or 10 ms with something refused ──► kvbm_advance
 *
 * A refused copy or move is retried when any operation ends: it may have left the room. The mover
 * retries, too: room may come without such an end, as when a caller releases host blocks.
 */
#include <errno.h>

#include "tier/manager/jobs/job.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define RETRY_NS (10 * KV_NS_PER_MS)

/* Return true while moves or copies that were refused for want of room are to be tried again. */
static bool stalled(const struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        if (m->offload.queues[to].stalled)
            return true;
    }
    return m->jobs.stalled != NULL;
}

void kvbm_note(struct kvbm_manager *m, void (*ended)(struct kvbm_manager *m, void *operation),
               void *operation)
{
    kvbm_manager_enter(m);
    ended(m, operation);
    if (stalled(m))
        kvbm_step_due(m, KVBM_STEP_RETRY);
    kvbm_advance(m);
    if (stalled(m) || m->mover.ends)
        pthread_cond_signal(&m->work);
    kvbm_manager_leave(m);
}

/* Wait for the next deadline, or for a while when something was refused. */
static void wait_for_work(struct kvbm_manager *m)
{
    uint64_t late_pin = kvbm_pin_late(m), late_job = kvbm_job_late(m);
    uint64_t deadline = KV_MIN(late_pin, late_job);
    bool again;

    if (kvbm_advance(m)) /* the steps may have set new deadlines */
        return;
    again = stalled(m);
    if (again)
        deadline = KV_MIN(deadline, kv_now_ns() + RETRY_NS);
    if (deadline == UINT64_MAX)
        pthread_cond_wait(&m->work, &m->lock);
    else if (kv_cond_wait_until(&m->work, &m->lock, deadline) == -ETIMEDOUT && again)
        kvbm_step_due(m, KVBM_STEP_RETRY);
}

/* The mover's thread. It outlives the request to end while an operation runs or waits for another
 * try: destroy frees memory once the thread has left, and a device may write there until then. */
static void *mover(void *arg)
{
    struct kvbm_manager *m = arg;

    kvbm_manager_enter(m);
    while (!m->mover.ends || m->mover.running || m->jobs.stalled)
        wait_for_work(m);
    m->mover.left = true;
    pthread_cond_broadcast(&m->changed);
    kvbm_manager_leave(m);
    return NULL;
}

int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns)
{
    if (kvbm_advance(m))
        return 0;
    return kv_cond_wait_until(&m->changed, &m->lock, deadline_ns);
}

void kvbm_waiter_leaves(struct kvbm_manager *m)
{
    if (!--m->n_waiters && m->mover.ends)
        pthread_cond_broadcast(&m->changed);
    kvbm_manager_leave(m);
}

int kvbm_mover_start(struct kvbm_manager *m)
{
    int rc;

    m->mover.ends = m->mover.left = false;
    rc = kv_thread_start(&m->mover.thread, "kvbm-mover", mover, m);
    m->mover.runs = rc == 0;
    return rc;
}

int kvbm_mover_end(struct kvbm_manager *m, uint64_t deadline)
{
    int rc = 0;

    m->mover.ends = true;
    kvbm_advance(m);
    pthread_cond_signal(&m->work);
    while (rc == 0 && m->mover.runs && !m->mover.left)
        rc = kvbm_manager_wait_change(m, deadline);
    if (m->mover.runs && !m->mover.left) {
        m->mover.ends = false;
        return rc;
    }
    if (m->mover.runs) /* the thread has released the lock and only returns */
        pthread_join(m->mover.thread, NULL);
    m->mover.runs = false;
    return 0;
}
