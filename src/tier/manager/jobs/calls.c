// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of connectors on jobs: submit, cancel, poll, wait.
 *
 * submit refuses wrong arguments; wrong block numbers end the job, which is counted as failed. A
 * load may be submitted before its pin has settled: it waits. poll and wait return a job exactly
 * once; jobs that blocking calls submit (own) are left to their wait.
 */
#include <errno.h>
#include <stdlib.h>

#include "bm/deadline.h"
#include "bm/ids.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/state/manager.h"
#include "tier/transfer/transfer.h"

/* Make a job with its arrays behind it in one allocation: blocks, three lists of pairs, three
 * bitmaps. */
static struct kvbm_job_ *allocate(const struct kvbm_job *in)
{
    struct kvbm_pin *pin = in->pin;
    size_t bits = (pin->n + 7) / 8;
    struct kvbm_job_ *job =
        calloc(1, sizeof(*job) + (size_t)pin->n * 4 * sizeof(uint32_t) + 3 * bits);

    if (!job)
        return NULL;
    job->pin = pin;
    job->cache = in->cache;
    job->submit_ns = kv_now_ns();
    job->done = (struct kvbm_done){.tag = in->tag};
    job->first_layer = in->first_layer;
    job->n_layers = in->n_layers;
    job->priority = in->priority;
    job->deadline_ns = in->deadline_ns;
    job->ready_fd = in->ready_fd;
    job->ready_event = in->ready_event;
    job->user_ok = in->ok;
    job->blocks = (uint32_t *)(job + 1);
    job->host = job->blocks + pin->n;
    job->other = job->host + pin->n;
    job->index = job->other + pin->n;
    job->ok = (uint8_t *)(job->index + pin->n);
    job->arrived = job->ok + bits;
    job->handled = job->arrived + bits;
    if (pin->n)
        memcpy(job->blocks, in->blocks, pin->n * sizeof(uint32_t));
    return job;
}

int kvbm_job_room(const struct kvbm_manager *m)
{
    return m->stopping ? -ESHUTDOWN : m->jobs.n + m->jobs.n_done >= m->opts.max_jobs ? -EAGAIN : 0;
}

int kvbm_job_new(struct kvbm_manager *m, const struct kvbm_job *in, struct kvbm_job_ **ret)
{
    struct kvbm_job_ *job = allocate(in);

    if (!job)
        return -ENOMEM;
    job->done.id = ++m->jobs.next_id;
    job->next = m->jobs.first;
    m->jobs.first = job;
    m->jobs.n++;
    in->cache->n_jobs++;
    in->pin->refs++;
    *ret = job;
    return 0;
}

int64_t kvbm_job_submit(struct kvbm_manager *m, const struct kvbm_job *in,
                        struct kvbm_immutable *sources, bool own)
{
    struct kvbm_job_ *job;
    int rc = kvbm_job_room(m), wrong = 0;

    /* two stores at a time would write the same host blocks */
    if (rc == 0 && in->pin->store && in->pin->n_copying)
        rc = -EBUSY;
    if (rc == 0)
        rc = kvbm_job_new(m, in, &job);
    if (rc < 0)
        return rc;
    if (!own) /* others' blocks have been checked. A copy would check its own part alone */
        wrong = kvbm_cache_check(in->cache, in->blocks, in->pin->n,
                                 KVBM_IDS_GAPS | (in->pin->store ? 0 : KVBM_IDS_ONCE));
    job->sources = sources;
    job->own = own;
    in->pin->n_copying += in->pin->store;
    /* fetches that the pin begins from now on go at the priority of its most urgent job */
    in->pin->priority = KV_MAX(in->pin->priority, in->priority);
    /* wrong blocks end the job as a failed one: it has an id, and its reserved blocks are given
     * back */
    if (wrong < 0)
        kvbm_job_give_up(job, wrong);
    else if (!in->pin->store && !in->pin->settled && !own)
        kvbm_job_wait(job);
    else
        kvbm_job_start(job);
    return (int64_t)job->done.id;
}

int64_t kvbm_manager_submit(struct kvbm_manager *m, const struct kvbm_job *in)
{
    struct kvbm_job job = {0};
    int64_t id = kvbm_manager_usable(m);

    if (id < 0)
        return id;
    if (!kv_sized(in, "kvbm_job") || in->size < offsetof(struct kvbm_job, first_layer))
        return -EINVAL;
    memcpy(&job, in, KV_MIN(in->size, sizeof(job)));
    if (!job.pin || !job.cache || job.pin->manager != m || job.cache->manager != m ||
        (job.pin->n && !job.blocks) || (job.pin->store && (job.first_layer || job.n_layers)) ||
        kvbm_deadline_check(job.deadline_ns) < 0)
        return -EINVAL;
    kvbm_manager_enter(m);
    id = kvbm_job_submit(m, &job, NULL, false);
    kvbm_manager_leave(m);
    return id;
}

/* Find a job that hasn't ended; NULL: it has, or never was. */
static struct kvbm_job_ *find_job(const struct kvbm_manager *m, uint64_t id)
{
    struct kvbm_job_ *job = m->jobs.first;

    while (job && job->done.id != id)
        job = job->next;
    return job;
}

int kvbm_manager_cancel(struct kvbm_manager *m, uint64_t id)
{
    struct kvbm_job_ *job;
    uint64_t copy = 0;
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    job = find_job(m, id);
    if (!job || (job->copied && !job->pin->direct)) {
        rc = -ENOENT;
    } else if (!job->cancelled) {
        job->cancelled = true;
        copy = job->copy_id;
        if (job->pin->direct)
            kvbm_direct_cancel(job);
        else if (job->waits)
            kvbm_job_give_up(job, -ECANCELED);
    }
    kvbm_manager_leave(m);
    if (copy)
        kvbm_copier_cancel(m->copier, copy); /* the copy may have ended meanwhile */
    return rc;
}

/* Take job @id off the list of ended jobs; 0: the first that isn't the manager's own. */
static struct kvbm_job_ *take_done(struct kvbm_manager *m, uint64_t id)
{
    struct kvbm_job_ **at = &m->jobs.done, *job;

    while (*at && (id ? (*at)->done.id != id : (*at)->own))
        at = &(*at)->next;
    job = *at;
    if (!job)
        return NULL;
    *at = job->next;
    if (!*at)
        m->jobs.done_tail = at;
    /* the descriptor is readable while an ended job is to be polled */
    if (!job->own && --m->jobs.n_done == 0)
        kv_wake_clear(&m->jobs.done_wake);
    return job;
}

long kvbm_manager_poll(struct kvbm_manager *m, struct kvbm_done *ret, size_t max)
{
    long rc = max && !ret ? -EINVAL : kvbm_manager_usable(m);
    struct kvbm_job_ *job;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    while ((size_t)rc < max && (job = take_done(m, 0)) != NULL) {
        ret[rc++] = job->done;
        free(job);
    }
    if (rc) /* an offload's job may have room now */
        kvbm_step_due(m, KVBM_STEP_PUMP);
    kvbm_manager_leave(m);
    return rc;
}

int kvbm_manager_fd(struct kvbm_manager *m)
{
    int rc = kvbm_manager_usable(m);

    return rc < 0 ? rc : m->jobs.done_wake.fd;
}

/* Take part in a copy on this thread. False: no copy has begun, or this thread took part already
 * (*@helped). */
static bool help(struct kvbm_manager *m, const struct kvbm_job_ *job, uint64_t deadline,
                 uint64_t *helped)
{
    if (!job->copy_id || job->copy_id == *helped)
        return false;
    *helped = job->copy_id;
    kvbm_manager_leave(m);
    tier_help(m->copier, *helped, deadline);
    kvbm_manager_enter(m);
    return true;
}

int kvbm_manager_wait(struct kvbm_manager *m, uint64_t id, uint32_t timeout_ms,
                      struct kvbm_done *ret)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS, helped = 0;
    struct kvbm_job_ *job = NULL, *running;
    int rc = id ? kvbm_manager_usable(m) : -EINVAL;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    /* counted, so that destroy doesn't free the manager under this call */
    m->n_waiters++;
    while (rc == 0 && (job = take_done(m, id)) == NULL) {
        running = find_job(m, id);
        if (!running)
            rc = -ENOENT;
        else if (!help(m, running, deadline, &helped))
            rc = kvbm_manager_wait_change(m, deadline);
    }
    if (job && ret)
        *ret = job->done;
    if (job)
        kvbm_step_due(m, KVBM_STEP_PUMP);
    kvbm_waiter_leaves(m);
    free(job);
    return job ? 0 : rc;
}

int kvbm_job_run(struct kvbm_manager *m, const struct kvbm_job *job)
{
    int64_t id;
    int rc;

    kvbm_manager_enter(m);
    id = kvbm_job_submit(m, job, NULL, true);
    kvbm_manager_leave(m);
    if (id < 0)
        return (int)id;
    rc = kvbm_manager_wait(m, (uint64_t)id,
                           job->deadline_ns ? kvbm_ms_until(job->deadline_ns) : UINT32_MAX, NULL);
    /* the caller's memory is in the job: return only when nothing touches it any more */
    if (rc == -ETIMEDOUT) {
        kvbm_manager_cancel(m, (uint64_t)id);
        rc = kvbm_manager_wait(m, (uint64_t)id, UINT32_MAX, NULL);
    }
    return rc;
}
