// SPDX-License-Identifier: Apache-2.0
/**
 * Jobs: copies between caches and pins (job.c), or the tiers below (direct.c); the calls on them
 * (calls.c); blocking calls over pins and jobs (keys.c, onboard.c); attached caches (cache.c).
 */
#ifndef KVBM_TIER_MANAGER_JOB_H
#define KVBM_TIER_MANAGER_JOB_H

#include "tier/manager/state/manager.h"

/* job.c */
/** Have a job wait until its pin has settled. */
void kvbm_job_wait(struct kvbm_job_ *job);
/** Submit the copy of a job whose pin has settled. */
void kvbm_job_start(struct kvbm_job_ *job);
/** STEP_START: begin the jobs of the pins that have settled. */
void kvbm_jobs_start(struct kvbm_manager *m);
/**
 * End a job that waits for its pin. Fetches that only this job needed of a released pin are
 * cancelled.
 */
void kvbm_job_give_up(struct kvbm_job_ *job, int status);
/** STEP_END: put the jobs that are over among those that poll or wait return. */
void kvbm_jobs_end(struct kvbm_manager *m);
/**
 * Return 0 when another job may begin; -ESHUTDOWN; -EAGAIN (max_jobs). Ended jobs that nobody has
 * polled yet count, too: they have memory.
 */
int kvbm_job_room(const struct kvbm_manager *m);
/** Make a job, which holds its pin, and list it. Returns 0 or -ENOMEM. */
int kvbm_job_new(struct kvbm_manager *m, const struct kvbm_job *in, struct kvbm_job_ **ret);
/**
 * Make and queue a job (calls.c). @sources (may be NULL): blocks of the cache's pool, which the
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
/** STEP_RETRY: submit again the jobs that the copier had no room for. */
void kvbm_jobs_retry(struct kvbm_manager *m);

/* from_pool.c */
/** STEP_PUMP: begin to copy blocks of caches' pools into the host tier, as many jobs as have room. */
void kvbm_from_pools(struct kvbm_manager *m);

/* cache.c */
/** Check blocks of a cache as kvbm_ids_check. Returns 0; -EINVAL (the log says why); -ENOMEM. */
int kvbm_cache_check(const struct kvbm_cache *cache, const uint32_t *blocks, size_t n,
                     unsigned flags);
/** Leave the caches to their owners, who free them with kvbm_cache_detach after the manager's end. */
void kvbm_caches_orphan(struct kvbm_manager *m);

/* direct.c */
/** True when tiers below can read and write a cache's blocks where they lie. */
bool kvbm_direct_fits(const struct kvbm_manager *m, const struct kvbm_layout *layout);
/** Have a direct load end whose pin has settled. */
void kvbm_direct_settled(struct kvbm_job_ *job);
/** Count what has arrived of a direct job that is over, and set its status. */
void kvbm_direct_count(struct kvbm_job_ *job);
/** Cancel what has not begun of a direct job. */
void kvbm_direct_cancel(struct kvbm_job_ *job);
/**
 * Drop what has not begun of direct stores past their deadline. Returns the next one, or
 * UINT64_MAX.
 */
uint64_t kvbm_direct_late(struct kvbm_manager *m, uint64_t now);

#endif
