// SPDX-License-Identifier: Apache-2.0
/*
 * Jobs: who is next, what of them is under way, how they end.
 *
 * A job's id names its slot, so that finding one takes no search, and grows with time, so that it is its age:
 *
 *   id = turn * max_jobs + slot + 1
 *
 * Four heaps hold jobs of which chunks are left, one a lane, by urgency; one more all that have a deadline and
 * haven't been begun wholly. All are as large as there may be jobs: nothing is allocated but the job itself.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "transfer.h"

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

/* Move @job from the hole @at to where it belongs. */
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

/* A callback waits for the threads that call them. */
static void wake_callers(struct kvbm_engine *engine)
{
    if (engine->calls.first)
        pthread_cond_signal(&engine->work[TIER_MEMORY]);
}

static void count(struct kvbm_engine_stats *stats, const struct kvbm_done *done)
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

static void end(struct kvbm_engine *engine, struct tier_job *job)
{
    uint64_t now = kv_now_ns(), began = job->started_ns ? job->started_ns : now;

    heap_remove(&engine->deadlines, job, earlier, deadline_at);
    job->state = TIER_ENDED;
    job->result = (struct kvbm_done){.id = job->id,
                                     .tag = job->tag,
                                     .status = job->status ? job->status : job->err,
                                     .n = job->plan.n,
                                     .n_ok = job->n_ok,
                                     .bytes = job->bytes,
                                     .wait_ns = began - job->submitted_ns,
                                     .run_ns = now - began};
    count(&engine->stats, &job->result);
    engine->stats.blocks_now -= job->plan.n;
    engine->n_live--;
    if (job->done) {
        tier_list_add(&engine->calls, job);
    } else {
        if (!engine->ended.first)
            kv_wake_signal(&engine->polled);
        tier_list_add(&engine->ended, job);
        pthread_cond_broadcast(&engine->told);
    }
    if (engine->stopping && !engine->n_live) { /* the last one: all threads may go */
        for (int lane = 0; lane < TIER_LANES; lane++)
            pthread_cond_broadcast(&engine->work[lane]);
    }
}

static void forget(struct kvbm_engine *engine, struct tier_job *job)
{
    engine->slots[job->slot] = NULL;
    engine->free_slots[engine->n_free++] = job->slot;
    engine->stats.jobs_now--;
    free(job);
}

static void call(struct kvbm_engine *engine, struct tier_job **at)
{
    struct tier_job *job = *at;
    struct kvbm_done done = job->result;
    kvbm_done_fn fn = job->done;
    void *arg = job->arg;

    tier_list_remove(&engine->calls, at);
    forget(engine, job); /* first: the callback may submit another */
    pthread_mutex_unlock(&engine->lock);
    fn(arg, &done);
    pthread_mutex_lock(&engine->lock);
}

bool tier_call_one(struct kvbm_engine *engine)
{
    if (!engine->calls.first)
        return false;
    call(engine, &engine->calls.first);
    return true;
}

void tier_call(struct kvbm_engine *engine, struct tier_job *job)
{
    struct tier_job **at = &engine->calls.first;

    while (*at != job)
        at = &(*at)->next;
    call(engine, at);
}

/* ---- work ---- */

static void wake_lane(struct kvbm_engine *engine, const struct tier_job *job)
{
    if (job->plan.n_chunks > 1)
        pthread_cond_broadcast(&engine->work[job->plan.lane]);
    else
        pthread_cond_signal(&engine->work[job->plan.lane]);
}

void tier_ready(struct kvbm_engine *engine, struct tier_job *job)
{
    job->state = TIER_QUEUED;
    heap_add(&engine->queue[job->plan.lane], job, more_urgent, queue_at);
    wake_lane(engine, job);
}

void tier_stop(struct kvbm_engine *engine, struct tier_job *job, int status)
{
    if (job->state != TIER_WAITING && job->state != TIER_QUEUED)
        return; /* all of it is under way */
    if (job->state == TIER_WAITING)
        tier_unwatch(engine, job);
    heap_remove(&engine->queue[job->plan.lane], job, more_urgent, queue_at);
    heap_remove(&engine->deadlines, job, earlier, deadline_at);
    job->state = TIER_RUNNING;
    job->status = status;
    if (job->n_flying)
        return;
    end(engine, job);
    wake_callers(engine);
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

bool tier_take_of(struct kvbm_engine *engine, struct tier_job *job, struct tier_chunk *ret)
{
    uint64_t now = job->deadline_ns || !job->started_ns ? kv_now_ns() : 0;

    if (job->state != TIER_QUEUED)
        return false;
    if (job->deadline_ns && now >= job->deadline_ns) {
        tier_stop(engine, job, -ETIMEDOUT);
        return false;
    }
    if (!job->started_ns)
        job->started_ns = now;
    cut_chunk(job, ret);
    job->n_flying++;
    if (job->next_chunk == job->plan.n_chunks) {
        heap_remove(&engine->queue[job->plan.lane], job, more_urgent, queue_at);
        heap_remove(&engine->deadlines, job, earlier, deadline_at);
        job->state = TIER_RUNNING;
    }
    return true;
}

bool tier_take(struct kvbm_engine *engine, enum tier_lane lane, struct tier_chunk *ret)
{
    while (engine->queue[lane].n) {
        if (tier_take_of(engine, engine->queue[lane].jobs[1], ret))
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

void tier_chunk_done(struct kvbm_engine *engine, const struct tier_chunk *chunk)
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
        job->n_ok++; /* its last part, and none failed */
        if (job->ok)
            job->ok[i / 8] |= (uint8_t)(1u << i % 8);
    }
    engine->stats.pieces += chunk->pieces;
    job->n_flying--;
    if (job->n_flying || job->state != TIER_RUNNING)
        return;
    end(engine, job);
    if (job->plan.lane != TIER_MEMORY) /* whose threads look themselves */
        wake_callers(engine);
}

/* ---- ids ---- */

static struct tier_job *job_of(struct kvbm_engine *engine, uint64_t id)
{
    struct tier_job *job = id ? engine->slots[(id - 1) % engine->max_jobs] : NULL;

    return job && job->id == id ? job : NULL;
}

struct tier_job *tier_find(struct kvbm_engine *engine, uint64_t id)
{
    struct tier_job *job = job_of(engine, id);

    return job && job->state != TIER_ENDED ? job : NULL;
}

/* ---- submitting ---- */

static bool forked(const struct kvbm_engine *engine)
{
    return engine->owner != getpid();
}

/* The caller's struct in today's form; what an older one doesn't have is zero. */
static int read_transfer(const struct kvbm_transfer *transfer, struct kvbm_transfer *ret)
{
    *ret = (struct kvbm_transfer){0};
    if (!transfer || transfer->size < offsetof(struct kvbm_transfer, first_layer))
        return -EINVAL;
    memcpy(ret, transfer, KV_MIN(transfer->size, sizeof(*ret)));
    return 0;
}

/* One allocation: the job, source and target ids, and a table that later counts what is left. */
static int make_job(const struct kvbm_transfer *t, struct tier_job **ret)
{
    size_t slots = tier_table_slots(t->n), n = t->n;
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

static int admit(struct kvbm_engine *engine, const struct kvbm_transfer *t)
{
    if (engine->stopping)
        return -ESHUTDOWN;
    if (!engine->n_free || t->n > engine->max_blocks - engine->stats.blocks_now) {
        engine->stats.refused++;
        return -EAGAIN;
    }
    return 0;
}

/* With the lock; the job isn't known to anybody yet. */
static int enter(struct kvbm_engine *engine, struct tier_job *job, int ready_fd)
{
    int err;

    job->slot = engine->free_slots[engine->n_free - 1];
    job->id = engine->sequence * engine->max_jobs + job->slot + 1;
    job->submitted_ns = kv_now_ns();
    err = tier_watch(engine, job, ready_fd);
    if (err < 0)
        return err;
    engine->sequence++;
    engine->n_free--;
    engine->slots[job->slot] = job;
    engine->n_live++;
    engine->stats.submitted++;
    engine->stats.jobs_now++;
    engine->stats.blocks_now += job->plan.n;
    if (job->deadline_ns) {
        heap_add(&engine->deadlines, job, earlier, deadline_at);
        if (job->deadline_at == 1)
            tier_rearm(engine);
    }
    if (job->ready_fd < 0 && !job->ready_event)
        tier_ready(engine, job);
    return 0;
}

int64_t kvbm_engine_submit(struct kvbm_engine *engine, const struct kvbm_transfer *transfer)
{
    struct kvbm_transfer t;
    struct tier_job *job = NULL;
    int64_t id = -EINVAL;
    int err;

    if (!engine || read_transfer(transfer, &t) < 0)
        return -EINVAL;
    if (forked(engine))
        return -ESHUTDOWN;
    /* Full is said before the work of looking at it, and again behind it, when it may have become so. */
    pthread_mutex_lock(&engine->lock);
    err = admit(engine, &t);
    pthread_mutex_unlock(&engine->lock);
    if (err == 0)
        err = make_job(&t, &job);
    if (err == 0)
        err = tier_lane_open(engine, job);
    if (err == 0) {
        pthread_mutex_lock(&engine->lock);
        err = admit(engine, &t);
        if (err == 0)
            err = enter(engine, job, t.ready_fd);
        id = (int64_t)job->id;
        if (err == 0)
            job = NULL; /* the engine's, and perhaps gone already once the lock is */
        pthread_mutex_unlock(&engine->lock);
    }
    free(job);
    return err < 0 ? err : id;
}

int kvbm_engine_cancel(struct kvbm_engine *engine, uint64_t id)
{
    struct tier_job *job;

    if (!engine || forked(engine))
        return -ENOENT;
    pthread_mutex_lock(&engine->lock);
    job = tier_find(engine, id);
    if (job)
        tier_stop(engine, job, -ECANCELED);
    pthread_mutex_unlock(&engine->lock);
    return job ? 0 : -ENOENT;
}

/* ---- taking what ended ---- */

/* With the lock. */
static void take_ended(struct kvbm_engine *engine, struct tier_job **at, struct kvbm_done *ret)
{
    struct tier_job *job = *at;

    tier_list_remove(&engine->ended, at);
    *ret = job->result;
    forget(engine, job);
    if (!engine->ended.first)
        kv_wake_clear(&engine->polled);
}

long kvbm_engine_poll(struct kvbm_engine *engine, struct kvbm_done *ret, size_t max)
{
    size_t n = 0;

    if (!engine || (max && !ret))
        return -EINVAL;
    if (forked(engine))
        return 0;
    pthread_mutex_lock(&engine->lock);
    for (; n < max && n < LONG_MAX && engine->ended.first; n++)
        take_ended(engine, &engine->ended.first, &ret[n]);
    pthread_mutex_unlock(&engine->lock);
    return (long)n;
}

int kvbm_engine_fd(struct kvbm_engine *engine)
{
    return engine ? engine->polled.fd : -EINVAL;
}

/* With the lock: 0, -EAGAIN (not yet), -ENOENT. */
static int try_take(struct kvbm_engine *engine, uint64_t id, struct kvbm_done *ret)
{
    struct tier_job **at = &engine->ended.first, *job = job_of(engine, id);

    if (!job || job->done)
        return -ENOENT;
    if (job->state != TIER_ENDED)
        return -EAGAIN;
    while (*at != job)
        at = &(*at)->next;
    take_ended(engine, at, ret);
    return 0;
}

int kvbm_engine_wait(struct kvbm_engine *engine, uint64_t id, uint32_t timeout_ms,
                     struct kvbm_done *ret)
{
    uint64_t until = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    struct timespec ts = {.tv_sec = (time_t)(until / KV_NS_PER_S),
                          .tv_nsec = (long)(until % KV_NS_PER_S)};
    struct kvbm_done done;
    int err, rc = 0;

    if (!engine || forked(engine))
        return -ENOENT;
    pthread_mutex_lock(&engine->lock);
    engine->n_waiters++;
    tier_help_locked(engine, id, until);
    while ((err = try_take(engine, id, &done)) == -EAGAIN && rc == 0)
        rc = pthread_cond_timedwait(&engine->told, &engine->lock, &ts);
    engine->n_waiters--;
    if (engine->stopping && !engine->n_waiters)
        pthread_cond_broadcast(&engine->told);
    pthread_mutex_unlock(&engine->lock);
    if (err == 0 && ret)
        *ret = done;
    return err == -EAGAIN ? -ETIMEDOUT : err;
}

void kvbm_engine_get_stats(struct kvbm_engine *engine, struct kvbm_engine_stats *ret)
{
    *ret = (struct kvbm_engine_stats){0};
    if (!engine || forked(engine))
        return;
    pthread_mutex_lock(&engine->lock);
    *ret = engine->stats;
    pthread_mutex_unlock(&engine->lock);
}
