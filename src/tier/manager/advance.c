// SPDX-License-Identifier: Apache-2.0
/*
 * The manager's advance: every step that a change makes necessary, in one fixed order.
 *
 *   a call, or the end of an operation ── changes state, sets bits ──► kvbm_advance
 *
 *   OFFER ► LOOK ► START ► END ► RETRY ► PUMP ─┐     a step may make others due; the first of the
 *     ▲                                        │     order goes next, so that the pump sees all the
 *     └───────────── until none is due ────────┘     room that ended jobs and fetches have left
 *
 * Each step ends: it consumes an entry of a queue or of a list, or finds nothing to do. RETRY is
 * made due by a thread that waited or by an end of an operation, never by another step.
 */
#include "tier/manager/jobs/job.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

static void retry(struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++)
        m->offload.queues[to].stalled = false;
    kvbm_jobs_retry(m);
    kvbm_step_due(m, KVBM_STEP_PUMP);
}

/* Begin what may begin. Blocks of caches' pools come last: a job of theirs needs room that the
 * moves below may give. */
static void pump(struct kvbm_manager *m)
{
    kvbm_offload_pump(m);
    kvbm_from_pools(m);
    if (kvbm_offload_idle(m)) /* idle after drops, perhaps: only this wakes drain */
        pthread_cond_broadcast(&m->changed);
}

bool kvbm_advance(struct kvbm_manager *m)
{
    static void (*const steps[KVBM_N_STEPS])(struct kvbm_manager *
                                             m) = {[KVBM_STEP_OFFER] = kvbm_offload_brought,
                                                   [KVBM_STEP_LOOK] = kvbm_pins_look,
                                                   [KVBM_STEP_START] = kvbm_jobs_start,
                                                   [KVBM_STEP_END] = kvbm_jobs_end,
                                                   [KVBM_STEP_RETRY] = retry,
                                                   [KVBM_STEP_PUMP] = pump};
    bool any = m->steps != 0;

    while (m->steps) {
        int first = __builtin_ctz(m->steps);

        m->steps &= ~(1u << first);
        steps[first](m);
    }
    return any;
}
