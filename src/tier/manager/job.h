// SPDX-License-Identifier: Apache-2.0
/** Jobs: copies between caches and pins, or the tiers below. */
#ifndef KVBM_TIER_MANAGER_JOB_H
#define KVBM_TIER_MANAGER_JOB_H

#include "tier/manager/manager.h"

/* job.c */
/** Have a job wait until its pin has settled. */
void kvbm_job_wait(struct kvbm_job_ *job);
/** Submit the copy of a job whose pin has settled. */
void kvbm_job_start(struct kvbm_job_ *job);
/**
 * End a job that waits for its pin. Fetches that only this job needed of a released pin are
 * cancelled.
 */
void kvbm_job_give_up(struct kvbm_job_ *job, int status);
/** Put an ended job among those that poll or wait return, and free what it holds. */
void kvbm_job_finish(struct kvbm_job_ *job);
/** Note that a block of a write-through job is in the object store (@arrived), or was dropped. */
void kvbm_job_through(struct kvbm_job_ *job, bool arrived);
/** Return 0 when another job may begin; -ESHUTDOWN; -EAGAIN (max_jobs). */
int kvbm_job_room(const struct kvbm_manager *m);
/** Make a job, which holds its pin, and list it. Returns 0 or -ENOMEM. */
int kvbm_job_new(struct kvbm_manager *m, const struct kvbm_job *in, struct kvbm_job_ **ret);
/**
 * Make and queue a job (job_calls.c). @sources (may be NULL): blocks of the cache's pool, which the
 * job owns from here on. @own: only kvbm_manager_wait returns it. Returns its id or an error.
 */
int64_t kvbm_job_submit(struct kvbm_manager *m, const struct kvbm_job *job,
                        struct kvbm_immutable *sources, bool own);
/**
 * Submit @job and wait for it, past its deadline for its end. No transfer touches the job's blocks
 * on return. Takes the manager's lock.
 */
int kvbm_job_run(struct kvbm_manager *m, const struct kvbm_job *job);
/**
 * End the jobs that wait for their pins past their deadline. Returns the next one, or UINT64_MAX.
 */
uint64_t kvbm_job_late(struct kvbm_manager *m);
/** Submit again the jobs that the copier had no room for. */
void kvbm_job_retry(struct kvbm_manager *m);

/* direct.c */
/** True when tiers below can read and write a cache's blocks where they lie. */
bool kvbm_direct_fits(const struct kvbm_manager *m, const struct kvbm_layout *layout);
/** End a direct load whose pin has settled. */
void kvbm_direct_settled(struct kvbm_job_ *job);
/** Note that an offload of key @i of a direct store has ended. */
void kvbm_direct_through(struct kvbm_job_ *job, uint32_t i, bool arrived);
/** Cancel what has not begun of a direct job. */
void kvbm_direct_cancel(struct kvbm_job_ *job);
/**
 * Drop what has not begun of direct stores past their deadline. Returns the next one, or UINT64_MAX.
 */
uint64_t kvbm_direct_late(struct kvbm_manager *m, uint64_t now);

#endif
