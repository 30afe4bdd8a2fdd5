// SPDX-License-Identifier: Apache-2.0
/*
 * Jobs: copies between the host blocks of a pin and the blocks of a cache.
 *
 *   submit ─► waits for its pin ─► copy ─► [the next copy] ─► [waits for its offloads] ─► over ─► finished
 *                    │ cancelled, late      │ the copier has no room: stalled, retried       (STEP_END)
 *                    └──────────────────────┴──► over, without a copy ───────────────────────────┘
 *
 * A load of blocks that its pin has left in peers' memory takes one copy more for each of these
 * peers, one after the other. A store with object_write_through waits for its offloads to the
 * object store.
 *
 * Invariant: a job is in at most one list beside the manager's: its pin's (waits), the stalled
 * jobs', or that of jobs that are over. It references its pin until it has finished, and finishes
 * exactly once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "tier/manager/jobs/job.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* ---- the end ---- */

/* Take a job out of the manager's list, and off its cache, which may be detached then. */
static void unlink_job(struct kvbm_manager *m, struct kvbm_job_ *job)
{
    struct kvbm_job_ **at = &m->jobs.first;

    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    m->jobs.n--;
    job->cache->n_jobs--;
}

/* Release the blocks of a cache's pool that an offload has read, children before their parents. */
static void release_sources(struct kvbm_job_ *job)
{
    for (uint32_t i = job->pin->n; i-- > 0;)
        kvbm_pool_release(job->cache->pool, &job->sources[i], 1);
    free(job->sources);
}

/* Put an ended job among those that poll or wait return, and free what it holds. */
static void finish(struct kvbm_job_ *job)
{
    struct kvbm_manager *m = job->pin->manager;

    unlink_job(m, job);
    kvbm_pin_unwanted(job->pin);
    m->stats.jobs++;
    m->stats.jobs_cancelled += job->done.status == -ECANCELED;
    m->stats.jobs_failed += job->done.status < 0 && job->done.status != -ECANCELED;
    /* an offload from a pool is nobody's job: no call asks for its end */
    if (job->sources) {
        release_sources(job);
        m->offload.queues[KV_TIER_HOST].in_flight--;
        kvbm_pin_put(job->pin);
        free(job);
    } else {
        kvbm_pin_put(job->pin);
        job->next = NULL;
        *m->jobs.done_tail = job;
        m->jobs.done_tail = &job->next;
        m->jobs.n_done += !job->own;
        if (!job->own)
            kv_wake_signal(&m->jobs.done_wake);
    }
    kvbm_step_due(m, KVBM_STEP_PUMP); /* an offload from a pool may have waited for a job's room */
    pthread_cond_broadcast(&m->changed);
}

static bool bit(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> (i % 8) & 1;
}

static void set_bit(uint8_t *bits, uint32_t i)
{
    bits[i / 8] |= (uint8_t)(1u << (i % 8));
}

/* Commit the copied blocks, unless the heads of other caches are missing. @through waits for their
 * offload. */
static void commit(struct kvbm_job_ *job, struct kvbm_job_ *through)
{
    job->pin->n_copying--;
    if (!job->cache->partial)
        kvbm_pin_commit_locked(job->pin, job->arrived, through);
}

/* Fill the caller's bitmap: convert the copied pairs into key indices. */
static void tell_ok(struct kvbm_job_ *job)
{
    struct kvbm_pin *pin = job->pin;

    for (uint32_t i = 0; job->user_ok && i < pin->n; i++) {
        /* of a store: what the host tier has now, copied by this job or there before */
        bool there = pin->store && !job->cache->partial ? pin->items[i].state >= ITEM_STAGED
                                                        : bit(job->arrived, i);

        job->user_ok[i / 8] &= (uint8_t) ~(1u << (i % 8));
        if (there)
            set_bit(job->user_ok, i);
    }
}

/* End a job that is over: it has copied, its offloads have ended, or it got no copy at all. */
static void end(struct kvbm_job_ *job)
{
    if (job->pin->direct) {
        kvbm_direct_count(job);
    } else if (!job->copied) {
        if (job->pin->store)
            commit(job, NULL); /* no block was copied: give the reserved ones back */
        tell_ok(job);
    }
    finish(job);
}

void kvbm_jobs_end(struct kvbm_manager *m)
{
    struct kvbm_job_ *job;

    while ((job = m->jobs.over) != NULL) {
        m->jobs.over = job->next_wait;
        if (!m->jobs.over)
            m->jobs.over_tail = &m->jobs.over;
        end(job);
    }
}

/* Keep a duplicate of ready_fd: the copier makes none while it has no room for the job, and the
 * caller may close its own after submit. */
static int keep_fd(struct kvbm_job_ *job)
{
    int own = job->ready_fd > 0 && !job->own_fd ? fcntl(job->ready_fd, F_DUPFD_CLOEXEC, 3) : 0;

    if (own < 0)
        return -errno;
    if (own) {
        job->ready_fd = own;
        job->own_fd = true;
    }
    return 0;
}

/* Close the duplicate of ready_fd, once the copier has one of its own or no copy comes. */
static void drop_fd(struct kvbm_job_ *job)
{
    if (job->own_fd)
        close(job->ready_fd);
    job->own_fd = false;
    job->ready_fd = -1;
}

/* Have a job end without a copy. */
static void over(struct kvbm_job_ *job, int status)
{
    job->done.status = status;
    drop_fd(job);
    kvbm_job_is_over(job->pin->manager, job);
}

/* ---- the copy ---- */

/* True when the bytes that were copied from item @i are right. A lease that another job of the pin
 * has found ended is gone from the item, and no other takes its place. */
static bool is_right(const struct kvbm_job_ *job, uint32_t i)
{
    const struct kvbm_item *item = &job->pin->items[i];

    return job->from == job->pin->manager->layout ||
           (item->state == ITEM_LEASED && kvbm_leased_is_intact(item));
}

/* Take the results of a copy: convert pairs into keys. A block in a peer's memory that has changed
 * meanwhile stays unhandled: it hasn't arrived, and is fetched. Returns how many have arrived. */
static uint32_t take_pairs(struct kvbm_job_ *job)
{
    uint32_t n = 0;

    for (uint32_t k = 0; k < job->n_pairs; k++) {
        uint32_t i = job->index[k];

        if (bit(job->ok, k) && !is_right(job, i))
            continue;
        set_bit(job->handled, i);
        if (!bit(job->ok, k))
            continue;
        set_bit(job->arrived, i);
        n++;
    }
    return n;
}

/* Count the blocks of one copy of a load, from the host tier or from a peer's memory. */
static void count_load(struct kvbm_job_ *job, uint32_t n)
{
    struct kvbm_manager *m = job->pin->manager;
    struct kvbm_tier_stats *from = job->from == m->layout ? &m->stats.host : &m->stats.peer;
    uint64_t bytes = n * m->block_bytes;

    m->stats.cache.blocks_in += n;
    m->stats.cache.bytes_in += bytes;
    from->blocks_out += n;
    from->bytes_out += bytes;
}

static bool begin(struct kvbm_job_ *job);

/* Return the status of a load of which nothing is left to copy. */
static int status_of(const struct kvbm_job_ *job)
{
    const struct kvbm_done *done = &job->done;

    return done->status                             ? done->status
           : job->cancelled && done->n_ok < done->n ? -ECANCELED
           : done->n && !done->n_ok                 ? -ENOENT
                                                    : 0;
}

static void copied(struct kvbm_manager *m, void *operation)
{
    struct kvbm_job_ *job = operation;
    struct kvbm_pin *pin = job->pin;
    struct kvbm_tier_stats *stats = &m->stats.cache;
    uint32_t n = take_pairs(job);
    bool more = false;

    /* end the copy first: begin() below may submit the next one of this job */
    m->mover.running--;
    job->copy_id = 0;
    job->done.n_ok += n;
    job->done.bytes += n * m->block_bytes;
    if (pin->store) {
        stats->blocks_out += n;
        stats->bytes_out += n * m->block_bytes;
        /* n_through counts the offloads that are queued here; some may have failed already */
        commit(job, m->opts.object_write_through ? job : NULL);
    } else {
        count_load(job, n);
        more = pin->leased && begin(job);
        if (pin->leased && !more)
            job->done.status = status_of(job);
    }
    if (!more) {
        tell_ok(job);
        job->copied = true;
    }
    if (!more && !job->n_through)
        kvbm_job_is_over(m, job);
    kvbm_step_due(m, KVBM_STEP_PUMP);
}

/* The end of a copy, on a thread of the copier. Time in which no copy ran counts as waiting. */
static void copier_done(void *arg, const struct kvbm_done *done)
{
    struct kvbm_job_ *job = arg;

    if (!job->done.status)
        job->done.status = done->status;
    job->done.run_ns += done->run_ns;
    job->done.wait_ns = kv_now_ns() - job->submit_ns - job->done.run_ns;
    kvbm_note(job->pin->manager, copied, job);
}

/* Tell where the bytes of item @i are. Returns false when they are nowhere yet. */
static bool source_of(const struct kvbm_pin *pin, uint32_t i, const struct kvbm_layout **layout,
                      uint32_t *block)
{
    const struct kvbm_item *item = &pin->items[i];

    *layout = pin->manager->layout;
    *block = item->host.block;
    if (item->state == ITEM_LEASED)
        kvbm_leased_source(item, layout, block);
    return pin->store ? item->state == ITEM_RESERVED
                      : item->state == ITEM_HELD || item->state == ITEM_STAGED ||
                            item->state == ITEM_LEASED;
}

/* Choose the pairs of the next copy: all of one source. */
static void collect(struct kvbm_job_ *job)
{
    const struct kvbm_pin *pin = job->pin;

    job->n_pairs = 0;
    job->done.n = 0;
    for (uint32_t i = 0; i < pin->n; i++) {
        const struct kvbm_layout *from;
        uint32_t block;
        bool there;

        if (job->blocks[i] == UINT32_MAX)
            continue;
        there = source_of(pin, i, &from, &block);
        job->done.n += there || !pin->store;
        if (!there || bit(job->handled, i) || (job->n_pairs && from != job->from))
            continue;
        job->from = from;
        job->host[job->n_pairs] = block;
        job->other[job->n_pairs] = job->blocks[i];
        job->index[job->n_pairs++] = i;
    }
}

/* Describe the copy of the pairs collected: one layout to the other, and the heads of a partial
 * cache. */
static struct kvbm_transfer transfer_of(struct kvbm_job_ *job)
{
    const struct kvbm_cache *cache = job->cache;
    bool store = job->pin->store;
    const struct kvbm_layout *host = job->from;

    return (struct kvbm_transfer){
        .size = sizeof(struct kvbm_transfer),
        .src = store ? cache->layout : host,
        .dst = store ? host : cache->layout,
        .src_blocks = store ? job->other : job->host,
        .dst_blocks = store ? job->host : job->other,
        .n = job->n_pairs,
        .first_layer = job->first_layer,
        .n_layers = job->n_layers,
        .src_head = store ? 0 : cache->first_head,
        .dst_head = store ? cache->first_head : 0,
        .n_heads = cache->n_heads,
        .flow = store ? KVBM_OFFLOAD : KVBM_ONBOARD,
        .priority = job->priority,
        .deadline_ns = job->deadline_ns,
        .ready_fd = job->ready_fd,
        .ready_event = job->ready_event,
        .ok = job->ok,
        .done = copier_done,
        .arg = job,
    };
}

void kvbm_job_wait(struct kvbm_job_ *job)
{
    job->next_wait = job->pin->jobs;
    job->pin->jobs = job;
    job->waits = true;
    if (job->deadline_ns)
        pthread_cond_signal(&job->pin->manager->work); /* the mover watches its deadline */
}

/* Note that the copier took no copy of a job (@err): it has no room, or refuses. */
static void not_taken(struct kvbm_job_ *job, int err)
{
    struct kvbm_manager *m = job->pin->manager;

    if (err == -EAGAIN && job->deadline_ns && job->deadline_ns <= kv_now_ns())
        err = -ETIMEDOUT; /* the copier hasn't accepted the job yet */
    if (err == -EAGAIN)
        err = keep_fd(job);
    if (err < 0) {
        over(job, err);
        return;
    }
    job->next_wait = m->jobs.stalled;
    m->jobs.stalled = job;
    pthread_cond_signal(&m->work); /* wakes the mover, which then waits only briefly */
}

/* Begin the next copy of a job, or wait for its pin. Returns false when nothing is left to copy. */
static bool begin(struct kvbm_job_ *job)
{
    struct kvbm_manager *m = job->pin->manager;
    struct kvbm_transfer transfer;
    int64_t id;

    if (job->cancelled)
        return false;
    if (kvbm_leased_renew(job->pin)) {
        kvbm_job_wait(job);
        return true;
    }
    collect(job);
    if (!job->n_pairs)
        return false;
    transfer = transfer_of(job);
    /* counted before: another thread may note the end of the copy as soon as it is submitted */
    m->mover.running++;
    id = kvbm_copier_submit(m->copier, &transfer);
    if (id > 0) {
        job->copy_id = (uint64_t)id;
        drop_fd(job);
    } else {
        m->mover.running--;
        not_taken(job, (int)id);
    }
    return true;
}

void kvbm_job_start(struct kvbm_job_ *job)
{
    if (job->pin->direct)
        kvbm_direct_settled(job);
    else if (!begin(job))
        over(job, job->cancelled ? -ECANCELED : status_of(job));
}

void kvbm_jobs_start(struct kvbm_manager *m)
{
    struct kvbm_pin *pin;
    struct kvbm_job_ *job;

    while ((pin = TAILQ_FIRST(&m->pins.ready)) != NULL) {
        TAILQ_REMOVE(&m->pins.ready, pin, ready);
        pin->is_ready = false;
        /* a job whose leases have ended makes items pending again */
        while (!pin->n_fetched && !pin->n_waits && (job = pin->jobs) != NULL) {
            pin->jobs = job->next_wait;
            job->waits = false;
            kvbm_job_start(job);
        }
    }
}

void kvbm_jobs_retry(struct kvbm_manager *m)
{
    struct kvbm_job_ *job = m->jobs.stalled, *next;

    /* a job that is refused again goes to the new list */
    m->jobs.stalled = NULL;
    for (; job; job = next) {
        next = job->next_wait;
        kvbm_job_start(job);
    }
}

/* Take a job out of a list of jobs that wait, if it is in it. */
static void take_waiting(struct kvbm_job_ **list, struct kvbm_job_ *job)
{
    while (*list && *list != job)
        list = &(*list)->next_wait;
    if (*list)
        *list = job->next_wait;
}

void kvbm_job_give_up(struct kvbm_job_ *job, int status)
{
    struct kvbm_pin *pin = job->pin;

    take_waiting(&pin->jobs, job);
    job->waits = false;
    over(job, status);
}

/* A job past its deadline waits no longer for its pin. A copy that runs has the deadline itself. */
uint64_t kvbm_job_late(struct kvbm_manager *m)
{
    uint64_t now = kv_now_ns(), next = UINT64_MAX;

    for (struct kvbm_job_ *job = m->jobs.first; job; job = job->next) {
        if (!job->waits || !job->deadline_ns)
            continue;
        if (job->deadline_ns > now) {
            next = KV_MIN(next, job->deadline_ns);
            continue;
        }
        kvbm_job_give_up(job, -ETIMEDOUT);
    }
    return KV_MIN(next, kvbm_direct_late(m, now));
}
