// SPDX-License-Identifier: Apache-2.0
/* Next steps of ended operations, on the thread that reports the end. The mover retries refused
 * steps, checks deadlines, and does work that can't be done on other threads. */
#include <errno.h>

#include "tier/manager/job.h"
#include "tier/manager/manager.h"
#include "tier/manager/offload.h"
#include "tier/manager/pin.h"

#define RETRY_NS (10 * KV_NS_PER_MS)

void kvbm_note_later(struct kvbm_manager *m, struct kvbm_note *note,
                     void (*run)(struct kvbm_manager *m, struct kvbm_note *note))
{
    note->run = run;
    note->next = NULL;
    *m->mover.inbox_tail = note;
    m->mover.inbox_tail = &note->next;
    pthread_cond_signal(&m->work);
}

static bool stalled(const struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        if (m->offload.queues[to].stalled)
            return true;
    }
    return m->jobs.stalled != NULL;
}

/* Retry steps that were refused for lack of room. Called when an operation has ended or some time
 * has passed. */
static void try_again(struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++)
        m->offload.queues[to].stalled = false;
    kvbm_job_retry(m);
    kvbm_offload_pump(m);
}

void kvbm_note(struct kvbm_manager *m, struct kvbm_note *note,
               void (*run)(struct kvbm_manager *m, struct kvbm_note *note))
{
    kvbm_manager_enter(m);
    run(m, note);
    if (stalled(m))
        try_again(m);
    if (stalled(m) || m->mover.ends)
        pthread_cond_signal(&m->work);
    kvbm_manager_leave(m);
}

static void wait_for_work(struct kvbm_manager *m)
{
    uint64_t late_pin = kvbm_pin_late(m), late_job = kvbm_job_late(m);
    uint64_t deadline = KV_MIN(late_pin, late_job);
    bool again = stalled(m); /* includes steps begun just now */

    if (m->mover.inbox) /* ends of operations that were late */
        return;
    if (again)
        deadline = KV_MIN(deadline, kv_now_ns() + RETRY_NS);
    if (deadline == UINT64_MAX) {
        pthread_cond_wait(&m->work, &m->lock);
        return;
    }
    if (kv_cond_wait_until(&m->work, &m->lock, deadline) == -ETIMEDOUT && again)
        try_again(m);
}

static void *mover(void *arg)
{
    struct kvbm_manager *m = arg;

    kvbm_manager_enter(m);
    while (!m->mover.ends || m->mover.inbox || m->mover.running || m->jobs.stalled) {
        struct kvbm_note *note = m->mover.inbox, *next;

        if (!note) {
            wait_for_work(m);
            continue;
        }
        m->mover.inbox = NULL;
        m->mover.inbox_tail = &m->mover.inbox;
        for (; note; note = next) {
            next = note->next; /* run frees the note */
            note->run(m, note);
        }
        if (stalled(m))
            try_again(m);
    }
    m->mover.left = true;
    pthread_cond_broadcast(&m->changed);
    kvbm_manager_leave(m);
    return NULL;
}

int kvbm_manager_wait_change(struct kvbm_manager *m, uint64_t deadline_ns)
{
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
