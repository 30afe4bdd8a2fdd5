// SPDX-License-Identifier: Apache-2.0
/* Jobs: copies between the host blocks of a pin and the blocks of a cache. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "tier/manager/manager.h"

/* ---- the end ---- */

static void unlink_job(struct kvbm_manager *m, struct kvbm_job_ *job)
{
    struct kvbm_job_ **at = &m->jobs.first;

    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    m->jobs.n--;
    job->cache->n_jobs--;
}

static void release_sources(struct kvbm_job_ *job)
{
    for (uint32_t i = job->pin->n; i-- > 0;)
        kvbm_pool_release(job->cache->pool, &job->sources[i], 1);
    free(job->sources);
}

void kvbm_job_finish(struct kvbm_job_ *job)
{
    struct kvbm_manager *m = job->pin->manager;

    unlink_job(m, job);
    if (job->pin->released && job->pin->refs == 1 + job->pin->n_fetches)
        kvbm_fetch_cancel(job->pin); /* only this job needed the fetches */
    m->stats.jobs++;
    m->stats.jobs_cancelled += job->done.status == -ECANCELED;
    m->stats.jobs_failed += job->done.status < 0 && job->done.status != -ECANCELED;
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
    pthread_cond_broadcast(&m->changed);
}

void kvbm_job_through(struct kvbm_job_ *job, bool arrived)
{
    if (!arrived && job->done.status == 0)
        job->done.status = -EREMOTEIO;
    if (--job->n_through == 0 && job->copied)
        kvbm_job_finish(job);
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
        kvbm_pin_commit_locked(job->pin, job->ok, through);
}

/* Fill the caller's bitmap: convert the copied pairs into key indices. */
static void tell_ok(struct kvbm_job_ *job)
{
    struct kvbm_pin *pin = job->pin;

    for (uint32_t i = 0; job->user_ok && i < pin->n; i++) {
        bool there = pin->store && !job->cache->partial ? pin->items[i].state >= ITEM_STAGED
                                                        : job->ok[i / 8] >> (i % 8) & 1;

        job->user_ok[i / 8] &= (uint8_t) ~(1u << (i % 8));
        if (there)
            set_bit(job->user_ok, i);
    }
}

static void job_over(struct kvbm_manager *m, struct kvbm_note *note)
{
    struct kvbm_job_ *job = (struct kvbm_job_ *)note;

    m->mover.running--;
    if (job->pin->store)
        commit(job, NULL); /* no block was copied: give the reserved ones back */
    tell_ok(job);
    kvbm_job_finish(job);
    kvbm_offload_pump(m);
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

static void drop_fd(struct kvbm_job_ *job)
{
    if (job->own_fd)
        close(job->ready_fd);
    job->own_fd = false;
    job->ready_fd = -1;
}

/* End a job without a copy. The mover completes it, because the caller may be walking a list of
 * jobs. */
static void over(struct kvbm_job_ *job, int status)
{
    struct kvbm_manager *m = job->pin->manager;

    job->done.status = status;
    memset(job->ok, 0, (job->pin->n + 7) / 8);
    drop_fd(job);
    m->mover.running++;
    kvbm_note_later(m, &job->note, job_over);
}

/* ---- the copy ---- */

static void spread_ok(struct kvbm_job_ *job)
{
    uint8_t *by_key = job->ok + (job->pin->n + 7) / 8;

    memset(by_key, 0, (job->pin->n + 7) / 8);
    for (uint32_t k = 0; k < job->n_pairs; k++) {
        if (job->ok[k / 8] >> (k % 8) & 1)
            set_bit(by_key, job->index[k]);
    }
    memcpy(job->ok, by_key, (job->pin->n + 7) / 8);
}

static void copied(struct kvbm_manager *m, struct kvbm_note *note)
{
    struct kvbm_job_ *job = (struct kvbm_job_ *)note;
    struct kvbm_pin *pin = job->pin;
    struct kvbm_tier_stats *stats = &m->stats.cache;
    uint64_t bytes = job->done.n_ok * m->block_bytes;

    m->mover.running--;
    job->copy_id = 0;
    spread_ok(job);
    job->done.bytes = bytes;
    if (pin->store) {
        stats->blocks_out += job->done.n_ok;
        stats->bytes_out += bytes;
        commit(job, m->opts.object_write_through ? job : NULL);
    } else {
        stats->blocks_in += job->done.n_ok;
        stats->bytes_in += bytes;
        m->stats.host.blocks_out += job->done.n_ok;
        m->stats.host.bytes_out += bytes;
    }
    tell_ok(job);
    job->copied = true;
    if (!job->n_through)
        kvbm_job_finish(job);
    kvbm_job_retry(m);
    kvbm_offload_pump(m);
}

static void copier_done(void *arg, const struct kvbm_done *done)
{
    struct kvbm_job_ *job = arg;

    job->done.status = done->status;
    job->done.n_ok = done->n_ok;
    job->done.wait_ns = kv_now_ns() - job->submit_ns - done->run_ns;
    job->done.run_ns = done->run_ns;
    kvbm_note(job->pin->manager, &job->note, copied);
}

static void collect(struct kvbm_job_ *job)
{
    const struct kvbm_pin *pin = job->pin;

    job->n_pairs = 0;
    job->done.n = 0;
    for (uint32_t i = 0; i < pin->n; i++) {
        const struct kvbm_item *item = &pin->items[i];
        bool mine = pin->store ? item->state == ITEM_RESERVED
                               : item->state == ITEM_HELD || item->state == ITEM_STAGED;

        if (job->blocks[i] == UINT32_MAX)
            continue;
        job->done.n += mine || !pin->store;
        if (!mine)
            continue;
        job->host[job->n_pairs] = item->host.block;
        job->other[job->n_pairs] = job->blocks[i];
        job->index[job->n_pairs++] = i;
    }
}

static struct kvbm_transfer transfer_of(struct kvbm_job_ *job)
{
    const struct kvbm_cache *cache = job->cache;
    bool store = job->pin->store;
    const struct kvbm_layout *host = job->pin->manager->layout;

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

void kvbm_job_start(struct kvbm_job_ *job)
{
    struct kvbm_manager *m = job->pin->manager;
    struct kvbm_transfer transfer;
    int64_t id;
    int rc;

    if (job->pin->direct) {
        kvbm_direct_settled(job);
        return;
    }
    collect(job);
    if (job->cancelled || !job->n_pairs) {
        over(job, job->cancelled ? -ECANCELED : job->done.n ? -ENOENT : 0);
        return;
    }
    transfer = transfer_of(job);
    m->mover.running++;
    id = kvbm_copier_submit(m->copier, &transfer);
    if (id > 0) {
        job->copy_id = (uint64_t)id;
        drop_fd(job);
        return;
    }
    m->mover.running--;
    if (id == -EAGAIN && job->deadline_ns && job->deadline_ns <= kv_now_ns())
        id = -ETIMEDOUT; /* the copier hasn't accepted the job yet */
    rc = id == -EAGAIN ? keep_fd(job) : (int)id;
    if (rc == 0) {
        job->next_wait = m->jobs.stalled;
        m->jobs.stalled = job;
        pthread_cond_signal(&m->work); /* wakes the mover, which then waits only briefly */
    } else {
        over(job, rc);
    }
}

void kvbm_job_retry(struct kvbm_manager *m)
{
    struct kvbm_job_ *job = m->jobs.stalled, *next;

    m->jobs.stalled = NULL;
    for (; job; job = next) {
        next = job->next_wait;
        kvbm_job_start(job);
    }
}

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
