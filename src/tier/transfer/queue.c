// SPDX-License-Identifier: Apache-2.0
/*
 * Jobs: their order, their running chunks, their end.
 *
 * A job's id names its slot, so that no search is needed, and grows with time, so that it gives the
 * order of submission:
 *
 *   id = turn * max_jobs + slot + 1
 *
 * Each lane has a heap, by urgency, of the jobs with chunks left. One more heap holds all jobs that
 * have a deadline and chunks left. All heaps have room for max_jobs: a submit allocates only the
 * job.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "tier/transfer/transfer.h"

/* ---- heaps ---- */

typedef bool (*before_fn)(const struct tier_job *a, const struct tier_job *b);
typedef size_t *(*at_fn)(struct tier_job *job);

static bool more_urgent(const struct tier_job *a, const struct tier_job *b)
{
    if (a->flow != b->flow)
        return a->flow == KVBM_ONBOARD;
    return a->priority != b->priority ? a->priority > b->priority : a->id < b->id;
}

static bool earlier(const struct tier_job *a, const struct tier_job *b)
{
    return a->deadline_ns < b->deadline_ns;
}

static size_t *queue_at(struct tier_job *job)
{
    return &job->queue_at;
}

static size_t *deadline_at(struct tier_job *job)
{
    return &job->deadline_at;
}

int tier_heap_init(struct tier_heap *heap, size_t max)
{
    heap->jobs = calloc(max + 1, sizeof(struct tier_job *));
    return heap->jobs ? 0 : -ENOMEM;
}

static void heap_put(struct tier_heap *heap, size_t at, struct tier_job *job, at_fn at_of)
{
    heap->jobs[at] = job;
    *at_of(job) = at;
}

/* Move @job from the hole @at to its place. */
static void heap_sift(struct tier_heap *heap, size_t at, struct tier_job *job, before_fn before,
                      at_fn at_of)
{
    for (; at > 1 && before(job, heap->jobs[at / 2]); at /= 2)
        heap_put(heap, at, heap->jobs[at / 2], at_of);
    for (size_t child; (child = at * 2) <= heap->n; at = child) {
        if (child < heap->n && before(heap->jobs[child + 1], heap->jobs[child]))
            child++;
        if (!before(heap->jobs[child], job))
            break;
        heap_put(heap, at, heap->jobs[child], at_of);
    }
    heap_put(heap, at, job, at_of);
}

static void heap_add(struct tier_heap *heap, struct tier_job *job, before_fn before, at_fn at_of)
{
    heap->n++;
    heap_sift(heap, heap->n, job, before, at_of);
}

static void heap_remove(struct tier_heap *heap, struct tier_job *job, before_fn before, at_fn at_of)
{
    size_t at = *at_of(job);
    struct tier_job *last;

    if (!at)
        return;
    *at_of(job) = 0;
    last = heap->jobs[heap->n--];
    if (last != job)
        heap_sift(heap, at, last, before, at_of);
}

/* ---- lists ---- */

void tier_list_add(struct tier_list *list, struct tier_job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

void tier_list_remove(struct tier_list *list, struct tier_job **at)
{
    struct tier_job *job = *at;

    *at = job->next;
    if (!job->next)
        list->last = at;
}

/* ---- the end of a job ---- */

/* Wake a thread of the memory lane when a done callback is due: these threads call callbacks. */
static void wake_callers(struct kvbm_copier *copier)
{
    if (copier->calls.first)
        pthread_cond_signal(&copier->work[TIER_MEMORY]);
}

static void count(struct kvbm_copier_stats *stats, const struct kvbm_done *done)
{
    if (done->status == 0)
        stats->done++;
    else if (done->status == -ECANCELED)
        stats->cancelled++;
    else if (done->status == -ETIMEDOUT)
        stats->late++;
    else
        stats->failed++;
    stats->blocks += done->n_ok;
    stats->bytes += done->bytes;
}

static void end(struct kvbm_copier *copier, struct tier_job *job)
{
    uint64_t now = kv_now_ns(), began = job->started_ns ? job->started_ns : now;

    heap_remove(&copier->deadlines, job, earlier, deadline_at);
    job->state = TIER_ENDED;
    job->result = (struct kvbm_done){.id = job->id,
                                     .tag = job->tag,
                                     .status = job->status ? job->status : job->err,
                                     .n = job->plan.n,
                                     .n_ok = job->n_ok,
                                     .bytes = job->bytes,
                                     .wait_ns = began - job->submitted_ns,
                                     .run_ns = now - began};
    count(&copier->stats, &job->result);
    copier->stats.blocks_now -= job->plan.n;
    copier->n_live--;
    if (job->done) {
        tier_list_add(&copier->calls, job);
    } else {
        if (!copier->ended.first)
            kv_wake_signal(&copier->polled);
        tier_list_add(&copier->ended, job);
        pthread_cond_broadcast(&copier->told);
    }
    if (copier->stopping && !copier->n_live) { /* the last job: all threads may end */
        for (int lane = 0; lane < TIER_LANES; lane++)
            pthread_cond_broadcast(&copier->work[lane]);
        pthread_cond_broadcast(&copier->told);
    }
}

void tier_forget(struct kvbm_copier *copier, struct tier_job *job)
{
    copier->slots[job->slot] = NULL;
    copier->free_slots[copier->n_free++] = job->slot;
    copier->stats.jobs_now--;
    free(job);
}

static void call(struct kvbm_copier *copier, struct tier_job **at)
{
    struct tier_job *job = *at;
    struct kvbm_done done = job->result;
    kvbm_done_fn fn = job->done;
    void *arg = job->arg;

    tier_list_remove(&copier->calls, at);
    tier_forget(copier, job); /* first, since the callback may submit another job */
    copier->n_calling++;
    pthread_mutex_unlock(&copier->lock);
    fn(arg, &done);
    pthread_mutex_lock(&copier->lock);
    copier->n_calling--;
    if (tier_is_quiet(copier))
        pthread_cond_broadcast(&copier->told);
}

bool tier_call_one(struct kvbm_copier *copier)
{
    if (!copier->calls.first)
        return false;
    call(copier, &copier->calls.first);
    return true;
}

void tier_call(struct kvbm_copier *copier, struct tier_job *job)
{
    struct tier_job **at = &copier->calls.first;

    while (*at != job)
        at = &(*at)->next;
    call(copier, at);
}

/* ---- work ---- */

static void wake_lane(struct kvbm_copier *copier, const struct tier_job *job)
{
    if (job->plan.n_chunks > 1)
        pthread_cond_broadcast(&copier->work[job->plan.lane]);
    else
        pthread_cond_signal(&copier->work[job->plan.lane]);
}

void tier_ready(struct kvbm_copier *copier, struct tier_job *job)
{
    job->state = TIER_QUEUED;
    heap_add(&copier->queue[job->plan.lane], job, more_urgent, queue_at);
    wake_lane(copier, job);
}

void tier_stop(struct kvbm_copier *copier, struct tier_job *job, int status)
{
    if (job->state != TIER_WAITING && job->state != TIER_QUEUED)
        return; /* all its chunks are running */
    if (job->state == TIER_WAITING)
        tier_unwatch(copier, job);
    heap_remove(&copier->queue[job->plan.lane], job, more_urgent, queue_at);
    heap_remove(&copier->deadlines, job, earlier, deadline_at);
    job->state = TIER_RUNNING;
    job->status = status;
    if (job->n_flying)
        return;
    end(copier, job);
    wake_callers(copier);
}

static void cut_chunk(struct tier_job *job, struct tier_chunk *ret)
{
    const struct tier_plan *p = &job->plan;
    uint64_t at = job->next_chunk++;
    uint32_t group = (uint32_t)(at % p->n_groups);

    *ret = (struct tier_chunk){.job = job,
                               .first = (uint32_t)(at / p->n_groups) * p->pairs,
                               .first_layer = p->first_layer + group * p->layers};
    ret->n = KV_MIN(p->pairs, p->n - ret->first);
    ret->n_layers = KV_MIN(p->layers, p->first_layer + p->n_layers - ret->first_layer);
}

bool tier_take_of(struct kvbm_copier *copier, struct tier_job *job, struct tier_chunk *ret)
{
    uint64_t now = job->deadline_ns || !job->started_ns ? kv_now_ns() : 0;

    if (job->state != TIER_QUEUED)
        return false;
    if (job->deadline_ns && now >= job->deadline_ns) {
        tier_stop(copier, job, -ETIMEDOUT);
        return false;
    }
    if (!job->started_ns)
        job->started_ns = now;
    cut_chunk(job, ret);
    job->n_flying++;
    if (job->next_chunk == job->plan.n_chunks) {
        heap_remove(&copier->queue[job->plan.lane], job, more_urgent, queue_at);
        heap_remove(&copier->deadlines, job, earlier, deadline_at);
        job->state = TIER_RUNNING;
    }
    return true;
}

bool tier_take(struct kvbm_copier *copier, enum tier_lane lane, struct tier_chunk *ret)
{
    while (copier->queue[lane].n) {
        if (tier_take_of(copier, copier->queue[lane].jobs[1], ret))
            return true;
    }
    return false;
}

void tier_fail_pairs(struct tier_job *job, uint32_t first, uint32_t n, int err)
{
    if (!job->err || first < job->err_pair) {
        job->err = err;
        job->err_pair = first;
    }
    for (uint32_t i = 0; i < n; i++)
        job->left[first + i] |= TIER_FAILED;
}

void tier_chunk_done(struct kvbm_copier *copier, const struct tier_chunk *chunk)
{
    struct tier_job *job = chunk->job;
    uint64_t bytes = job->plan.region_bytes * job->plan.dst->config.outer_dim * chunk->n_layers;

    if (chunk->err < 0)
        tier_fail_pairs(job, chunk->first, chunk->n, chunk->err);
    for (uint32_t i = chunk->first; i < chunk->first + chunk->n; i++) {
        bool failed = job->left[i] & TIER_FAILED;

        job->bytes += failed ? 0 : bytes;
        if (--job->left[i])
            continue;
        job->n_ok++; /* last chunk of the pair, and none failed */
        if (job->ok)
            job->ok[i / 8] |= (uint8_t)(1u << i % 8);
    }
    copier->stats.pieces += chunk->pieces;
    job->n_flying--;
    if (job->n_flying || job->state != TIER_RUNNING)
        return;
    end(copier, job);
    if (job->plan.lane != TIER_MEMORY) /* the memory lane's threads check by themselves */
        wake_callers(copier);
}

/* ---- ids ---- */

struct tier_job *tier_job_of(struct kvbm_copier *copier, uint64_t id)
{
    struct tier_job *job = id ? copier->slots[(id - 1) % copier->max_jobs] : NULL;

    return job && job->id == id ? job : NULL;
}

struct tier_job *tier_find(struct kvbm_copier *copier, uint64_t id)
{
    struct tier_job *job = tier_job_of(copier, id);

    return job && job->state != TIER_ENDED ? job : NULL;
}

void tier_expect(struct kvbm_copier *copier, struct tier_job *job)
{
    heap_add(&copier->deadlines, job, earlier, deadline_at);
    if (job->deadline_at == 1)
        tier_rearm(copier);
}
