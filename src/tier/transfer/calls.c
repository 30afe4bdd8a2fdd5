// SPDX-License-Identifier: Apache-2.0
/* Calls on a copier's jobs: submit, cancel, take results. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "bm/deadline.h"
#include "bm/ids.h"
#include "tier/transfer/transfer.h"

/* ---- submitting ---- */

static bool forked(const struct kvbm_copier *copier)
{
    return copier->owner != getpid();
}

/* Convert the caller's struct to this build's: fields that an older caller lacks are zero. */
static int read_transfer(const struct kvbm_transfer *transfer, struct kvbm_transfer *ret)
{
    *ret = (struct kvbm_transfer){0};
    if (!kv_sized(transfer, "kvbm_transfer") ||
        transfer->size < offsetof(struct kvbm_transfer, first_layer))
        return -EINVAL;
    memcpy(ret, transfer, KV_MIN(transfer->size, sizeof(*ret)));
    return kvbm_deadline_check(ret->deadline_ns);
}

/* Allocate a job in one piece: the job, source and target ids, and a table that later counts the
 * chunks left. */
static int make_job(const struct kvbm_transfer *t, struct tier_job **ret)
{
    size_t slots = kvbm_ids_slots(t->n), n = t->n;
    struct tier_plan plan;
    struct tier_job *job;
    uint32_t *src, *dst;
    int err = tier_plan_make(t, &plan);

    if (err < 0)
        return err;
    job = malloc(sizeof(*job) + (n * 2 + slots) * sizeof(uint32_t));
    if (!job)
        return -ENOMEM;
    *job = (struct tier_job){.tag = t->tag,
                             .deadline_ns = t->deadline_ns,
                             .flow = t->flow,
                             .priority = t->priority,
                             .ready_fd = -1,
                             .ready_event = t->ready_event,
                             .ok = t->ok,
                             .done = t->done,
                             .arg = t->arg,
                             .plan = plan};
    src = job->numbers;
    dst = src + n;
    job->left = dst + n;
    memcpy(src, t->src_blocks, n * sizeof(*src));
    memcpy(dst, t->dst_blocks, n * sizeof(*dst));
    job->src = src;
    job->dst = dst;
    err = tier_plan_check(&plan, src, dst, job->left);
    if (err < 0) {
        free(job);
        return err;
    }
    for (size_t i = 0; i < n; i++)
        job->left[i] = plan.n_groups;
    if (t->ok)
        memset(t->ok, 0, (n + 7) / 8);
    *ret = job;
    return 0;
}

static int admit(struct kvbm_copier *copier, const struct kvbm_transfer *t)
{
    if (copier->stopping)
        return -ESHUTDOWN;
    if (t->n > copier->max_blocks)
        return -EINVAL; /* it won't fit, even after all other jobs have ended */
    if (!copier->n_free || t->n > copier->max_blocks - copier->stats.blocks_now) {
        copier->stats.refused++;
        return -EAGAIN;
    }
    return 0;
}

/* Give a new job its slot and id and queue it. With the lock. */
static int enter(struct kvbm_copier *copier, struct tier_job *job, int ready_fd)
{
    int err;

    job->slot = copier->free_slots[copier->n_free - 1];
    job->id = copier->sequence * copier->max_jobs + job->slot + 1;
    job->submitted_ns = kv_now_ns();
    err = tier_watch(copier, job, ready_fd);
    if (err < 0)
        return err;
    copier->sequence++;
    copier->n_free--;
    copier->slots[job->slot] = job;
    copier->n_live++;
    copier->stats.submitted++;
    copier->stats.jobs_now++;
    copier->stats.blocks_now += job->plan.n;
    if (job->deadline_ns) {
        tier_expect(copier, job);
    }
    if (job->ready_fd < 0 && !job->ready_event)
        tier_ready(copier, job);
    return 0;
}

int64_t kvbm_copier_submit(struct kvbm_copier *copier, const struct kvbm_transfer *transfer)
{
    struct kvbm_transfer t;
    struct tier_job *job = NULL;
    int64_t id = -EINVAL;
    int err;

    if (!copier || read_transfer(transfer, &t) < 0)
        return -EINVAL;
    if (forked(copier))
        return -ESHUTDOWN;
    /* Check for a full queue before the work of planning, and again afterwards, when it may have
     * become full. */
    pthread_mutex_lock(&copier->lock);
    err = admit(copier, &t);
    pthread_mutex_unlock(&copier->lock);
    if (err == 0)
        err = make_job(&t, &job);
    if (err == 0)
        err = tier_lane_open(copier, job);
    if (err == 0) {
        pthread_mutex_lock(&copier->lock);
        err = admit(copier, &t);
        if (err == 0)
            err = enter(copier, job, t.ready_fd);
        id = (int64_t)job->id;
        if (err == 0)
            /* the copier owns the job, and may have freed it once the lock is released */
            job = NULL;
        pthread_mutex_unlock(&copier->lock);
    }
    free(job);
    return err < 0 ? err : id;
}

int kvbm_copier_cancel(struct kvbm_copier *copier, uint64_t id)
{
    struct tier_job *job;

    if (!copier || forked(copier))
        return -ENOENT;
    pthread_mutex_lock(&copier->lock);
    job = tier_find(copier, id);
    if (job)
        tier_stop(copier, job, -ECANCELED);
    pthread_mutex_unlock(&copier->lock);
    return job ? 0 : -ENOENT;
}

/* ---- taking ended jobs ---- */

/* Take an ended job and its result. With the lock. */
static void take_ended(struct kvbm_copier *copier, struct tier_job **at, struct kvbm_done *ret)
{
    struct tier_job *job = *at;

    tier_list_remove(&copier->ended, at);
    *ret = job->result;
    tier_forget(copier, job);
    if (!copier->ended.first)
        kv_wake_clear(&copier->polled);
}

long kvbm_copier_poll(struct kvbm_copier *copier, struct kvbm_done *ret, size_t max)
{
    size_t n = 0;

    if (!copier || (max && !ret))
        return -EINVAL;
    if (forked(copier))
        return 0;
    pthread_mutex_lock(&copier->lock);
    for (; n < max && n < LONG_MAX && copier->ended.first; n++)
        take_ended(copier, &copier->ended.first, &ret[n]);
    pthread_mutex_unlock(&copier->lock);
    return (long)n;
}

int kvbm_copier_fd(struct kvbm_copier *copier)
{
    return copier ? copier->polled.fd : -EINVAL;
}

/* Take job @id if it has ended: 0, -EAGAIN (not yet), -ENOENT. With the lock. */
static int try_take(struct kvbm_copier *copier, uint64_t id, struct kvbm_done *ret)
{
    struct tier_job **at = &copier->ended.first, *job = tier_job_of(copier, id);

    if (!job || job->done)
        return -ENOENT;
    if (job->state != TIER_ENDED)
        return -EAGAIN;
    while (*at != job)
        at = &(*at)->next;
    take_ended(copier, at, ret);
    return 0;
}

int kvbm_copier_wait(struct kvbm_copier *copier, uint64_t id, uint32_t timeout_ms,
                     struct kvbm_done *ret)
{
    uint64_t until = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    struct kvbm_done done;
    int err, rc = 0;

    if (!copier || forked(copier))
        return -ENOENT;
    pthread_mutex_lock(&copier->lock);
    copier->n_waiters++;
    err = try_take(copier, id, &done);
    if (err == -EAGAIN) { /* not for jobs with a callback, which would run on this thread */
        tier_help_locked(copier, id, until);
        while ((err = try_take(copier, id, &done)) == -EAGAIN && rc == 0)
            rc = kv_cond_wait_until(&copier->told, &copier->lock, until);
    }
    copier->n_waiters--;
    if (copier->stopping && !copier->n_waiters)
        pthread_cond_broadcast(&copier->told);
    pthread_mutex_unlock(&copier->lock);
    if (err == 0 && ret)
        *ret = done;
    return err == -EAGAIN ? -ETIMEDOUT : err;
}

int kvbm_copier_get_stats(struct kvbm_copier *copier, struct kvbm_copier_stats *ret)
{
    struct kvbm_copier_stats stats;

    if (!copier || !kv_sized(ret, "kvbm_copier_stats"))
        return -EINVAL;
    if (forked(copier))
        return -ECHILD;
    pthread_mutex_lock(&copier->lock);
    stats = copier->stats;
    pthread_mutex_unlock(&copier->lock);
    KV_GIVE(ret, &stats);
    return 0;
}
