// SPDX-License-Identifier: Apache-2.0
/* Create and destroy a copier, and the thread that watches ready events and deadlines. */
#include "tier/transfer/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"

#define DEFAULT_THREADS 8
#define MAX_THREADS 256
#define DEFAULT_JOBS 1024
#define DEFAULT_BLOCKS 65536
#define MAX_JOBS (1u << 20)
#define DEFAULT_DEPTH 64

/* ---- the waiter ---- */

/* Data of epoll events that are not jobs. Job ids begin at 1 and never reach it. */
#define WAKE UINT64_MAX
#define TIMER (UINT64_MAX - 1)

/* Interval of polling CUDA events, since a thread can't be woken from waiting for one. */
#define PAUSE_MIN_NS (50 * UINT64_C(1000))
#define PAUSE_MAX_NS (1000 * UINT64_C(1000))

static void watch_event(struct kvbm_copier *copier, struct tier_job *job)
{
    tier_list_add(&copier->events, job);
    copier->pause_ns = PAUSE_MIN_NS;
    tier_rearm(copier);
}

static void unwatch_event(struct kvbm_copier *copier, struct tier_job *job)
{
    struct tier_job **at = &copier->events.first;

    while (*at && *at != job)
        at = &(*at)->next;
    if (*at)
        tier_list_remove(&copier->events, at);
}

/* Wait for a descriptor. One that epoll can't watch (a regular file) counts as ready. */
static int watch_fd(struct kvbm_copier *copier, struct tier_job *job, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = job->id};
    /* a duplicate, so that several jobs can wait for one descriptor */
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int err;

    if (own < 0)
        return -errno;
    if (epoll_ctl(copier->epoll, EPOLL_CTL_ADD, own, &event) == 0) {
        job->ready_fd = own;
        return 0;
    }
    err = errno == EPERM ? 0 : -errno;
    close(own);
    return err;
}

int tier_watch(struct kvbm_copier *copier, struct tier_job *job, int ready_fd)
{
    int err = ready_fd > 0 ? watch_fd(copier, job, ready_fd) : 0;

    if (err == 0 && job->ready_event && job->ready_fd < 0)
        watch_event(copier, job);
    return err;
}

static void unwatch_fd(struct kvbm_copier *copier, struct tier_job *job)
{
    if (job->ready_fd < 0)
        return;
    epoll_ctl(copier->epoll, EPOLL_CTL_DEL, job->ready_fd,
              NULL); /* close() alone keeps the event if the descriptor was dup'ed */
    close(job->ready_fd);
    job->ready_fd = -1;
}

void tier_unwatch(struct kvbm_copier *copier, struct tier_job *job)
{
    unwatch_fd(copier, job);
    if (job->ready_event)
        unwatch_event(copier, job);
}

static uint64_t next_look(const struct kvbm_copier *copier)
{
    uint64_t deadline = copier->deadlines.n ? copier->deadlines.jobs[1]->deadline_ns : UINT64_MAX;
    uint64_t events = copier->events.first ? kv_now_ns() + copier->pause_ns : UINT64_MAX;

    return KV_MIN(deadline, events);
}

void tier_rearm(struct kvbm_copier *copier)
{
    uint64_t at = next_look(copier);
    struct itimerspec when = {0};

    if (at < (uint64_t)INT64_MAX)
        when.it_value = kv_timespec(KV_MAX(at, UINT64_C(1))); /* zero would disarm the timer */
    timerfd_settime(copier->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static void look_for_late(struct kvbm_copier *copier)
{
    uint64_t now = kv_now_ns();

    while (copier->deadlines.n && copier->deadlines.jobs[1]->deadline_ns <= now)
        tier_stop(copier, copier->deadlines.jobs[1], -ETIMEDOUT);
}

static void look_for_events(struct kvbm_copier *copier)
{
    struct tier_job *next;
    bool any = false;

    for (struct tier_job *job = copier->events.first; job; job = next) {
        int rc = tier_cuda_happened(job->ready_event, &job->plan);

        next = job->next;
        if (rc == 0)
            continue;
        any = true;
        if (rc < 0) {
            tier_stop(copier, job, rc);
            continue;
        }
        unwatch_event(copier, job);
        job->ready_event = NULL;
        tier_ready(copier, job);
    }
    copier->pause_ns = any ? PAUSE_MIN_NS : KV_MIN(copier->pause_ns * 2, PAUSE_MAX_NS);
}

static void look_at_fd(struct kvbm_copier *copier, const struct epoll_event *event)
{
    struct tier_job *job = tier_find(copier, event->data.u64);

    if (!job || job->state != TIER_WAITING || job->ready_fd < 0)
        return;                       /* the job was stopped meanwhile */
    if (!(event->events & EPOLLIN)) { /* the producer closed its end without a signal */
        tier_stop(copier, job, -EPIPE);
        return;
    }
    unwatch_fd(copier, job);
    if (job->ready_event)
        watch_event(copier, job);
    else
        tier_ready(copier, job);
}

static void *waiter_thread(void *arg)
{
    struct kvbm_copier *copier = arg;
    struct epoll_event events[64];
    uint64_t expired;

    pthread_mutex_lock(&copier->lock);
    while (!copier->waiter_stops) {
        int n;

        pthread_mutex_unlock(&copier->lock);
        n = epoll_wait(copier->epoll, events, KV_COUNT(events), -1);
        pthread_mutex_lock(&copier->lock);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == TIMER)
                (void)!read(copier->timer, &expired, sizeof(expired));
            else if (events[i].data.u64 != WAKE)
                look_at_fd(copier, &events[i]);
        }
        look_for_late(copier);
        look_for_events(copier);
        tier_rearm(copier);
    }
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

/* ---- lanes opened on demand ---- */

int tier_lane_open(struct kvbm_copier *copier, const struct tier_job *job)
{
    enum tier_lane lane = job->plan.lane;
    int err = 0;

    pthread_mutex_lock(&copier->open_lock);
    if ((lane == TIER_FILE || lane == TIER_FILE_LATER) && !copier->file)
        err = tier_file_open(copier, &copier->file);
    if (lane == TIER_OUT || lane == TIER_IN)
        err = tier_cuda_open(copier, &job->plan, &copier->cuda);
    pthread_mutex_unlock(&copier->open_lock);
    if (err == 0 && job->ready_event)
        err = KV_MIN(tier_cuda_happened(job->ready_event, &job->plan), 0);
    return err;
}

/* ---- creating ---- */

static int init_tables(struct kvbm_copier *copier)
{
    int err = 0;

    copier->slots = calloc(copier->max_jobs, sizeof(struct tier_job *));
    copier->free_slots = calloc(copier->max_jobs, sizeof(*copier->free_slots));
    copier->threads = calloc(copier->n_threads, sizeof(*copier->threads));
    if (!copier->slots || !copier->free_slots || !copier->threads)
        return -ENOMEM;
    for (uint32_t i = 0; i < copier->max_jobs; i++)
        copier->free_slots[copier->n_free++] = copier->max_jobs - 1 - i;
    for (int lane = 0; err == 0 && lane < TIER_LANES; lane++)
        err = tier_heap_init(&copier->queue[lane], copier->max_jobs);
    return err < 0 ? err : tier_heap_init(&copier->deadlines, copier->max_jobs);
}

static int watch_own(struct kvbm_copier *copier, int fd, uint64_t what)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = what};

    return epoll_ctl(copier->epoll, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static int open_descriptors(struct kvbm_copier *copier)
{
    int err = kv_wake_open(&copier->polled);

    if (err == 0)
        err = kv_wake_open(&copier->wake);
    if (err < 0)
        return err;
    copier->epoll = epoll_create1(EPOLL_CLOEXEC);
    copier->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (copier->epoll < 0 || copier->timer < 0)
        return -errno;
    err = watch_own(copier, copier->wake.fd, WAKE);
    return err < 0 ? err : watch_own(copier, copier->timer, TIMER);
}

static int start_threads(struct kvbm_copier *copier)
{
    int err = kv_thread_start(&copier->waiter, "kvbm-wait", waiter_thread, copier);

    copier->waiter_runs = err == 0;
    while (err == 0 && copier->n_started < copier->n_threads) {
        err = kv_thread_start(&copier->threads[copier->n_started], "kvbm-copy", tier_memory_thread,
                              copier);
        copier->n_started += err == 0;
    }
    return err;
}

static uint32_t default_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);

    return n > DEFAULT_THREADS ? DEFAULT_THREADS : n > 0 ? (uint32_t)n : 1;
}

static int read_opts(const struct kvbm_copier_opts *opts, struct kvbm_copier *copier)
{
    copier->n_threads = KV_OPT(opts, n_threads, default_threads());
    copier->max_jobs = KV_OPT(opts, max_jobs, DEFAULT_JOBS);
    copier->max_blocks = KV_OPT(opts, max_blocks, DEFAULT_BLOCKS);
    copier->io = KV_OPT(opts, io, KVBM_IO_AUTO);
    copier->io_depth = KV_OPT(opts, io_depth, DEFAULT_DEPTH);
    copier->gpu_copy = KV_OPT(opts, gpu_copy, KVBM_GPU_AUTO);
    if (copier->n_threads > MAX_THREADS || copier->max_jobs > MAX_JOBS ||
        (unsigned)copier->io > KVBM_IO_THREADS || copier->io_depth > 4096 ||
        (unsigned)copier->gpu_copy > KVBM_GPU_SINGLE)
        return -EINVAL;
    return 0;
}

/* Allocate a copier and its parts. A failure leaves only memory to free. */
static int make(const struct kvbm_copier_opts *opts, struct kvbm_copier **ret)
{
    struct kvbm_copier *copier = calloc(1, sizeof(*copier));
    int err = copier ? read_opts(opts, copier) : -ENOMEM;

    if (err < 0) {
        free(copier);
        return err;
    }
    copier->owner = getpid();
    copier->polled.fd = copier->wake.fd = copier->epoll = copier->timer = -1;
    copier->calls.last = &copier->calls.first;
    copier->ended.last = &copier->ended.first;
    copier->events.last = &copier->events.first;
    copier->pause_ns = PAUSE_MAX_NS;
    pthread_mutex_init(&copier->lock, NULL);
    pthread_mutex_init(&copier->open_lock, NULL);
    for (int lane = 0; lane < TIER_LANES; lane++)
        kv_cond_init(&copier->work[lane]);
    kv_cond_init(&copier->told);
    *ret = copier;
    return 0;
}

int kvbm_copier_create(const struct kvbm_copier_opts *opts, struct kvbm_copier **ret)
{
    struct kvbm_copier *copier = NULL;
    int err = ret && kv_sized_or_null(opts, "kvbm_copier_opts") ? make(opts, &copier) : -EINVAL;

    if (err < 0)
        return err;
    err = init_tables(copier);
    if (err == 0)
        err = open_descriptors(copier);
    if (err == 0)
        err = start_threads(copier);
    if (err == 0 && copier->io == KVBM_IO_URING) /* report a refusal now */
        err = tier_file_open(copier, &copier->file);
    if (err < 0) {
        kvbm_copier_destroy(copier);
        return err;
    }
    *ret = copier;
    return 0;
}

/* ---- the end ---- */

static void stop_jobs(struct kvbm_copier *copier)
{
    pthread_mutex_lock(&copier->lock);
    copier->stopping = true;
    for (uint32_t i = 0; copier->slots && i < copier->max_jobs; i++) {
        if (copier->slots[i] && copier->slots[i]->state != TIER_ENDED)
            tier_stop(copier, copier->slots[i], -ECANCELED);
    }
    for (int lane = 0; lane < TIER_LANES; lane++)
        pthread_cond_broadcast(&copier->work[lane]);
    pthread_mutex_unlock(&copier->lock);
}

static void stop_waiter(struct kvbm_copier *copier)
{
    if (!copier->waiter_runs)
        return;
    pthread_mutex_lock(&copier->lock);
    copier->waiter_stops = true;
    pthread_mutex_unlock(&copier->lock);
    kv_wake_signal(&copier->wake);
    pthread_join(copier->waiter, NULL);
}

void tier_lane_join(struct kvbm_copier *copier, enum tier_lane lane, pthread_t thread, bool *stop)
{
    pthread_mutex_lock(&copier->lock);
    *stop = true;
    pthread_cond_broadcast(&copier->work[lane]);
    pthread_mutex_unlock(&copier->lock);
    pthread_join(thread, NULL);
}

/* Wait until the threads in kvbm_copier_wait have taken their results and returned. */
static void let_waiters_go(struct kvbm_copier *copier)
{
    pthread_mutex_lock(&copier->lock);
    while (copier->n_waiters)
        pthread_cond_wait(&copier->told, &copier->lock);
    pthread_mutex_unlock(&copier->lock);
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void release(struct kvbm_copier *copier)
{
    for (uint32_t i = 0; copier->slots && i < copier->max_jobs; i++)
        free(copier->slots[i]); /* ended, and not polled */
    for (int lane = 0; lane < TIER_LANES; lane++) {
        free(copier->queue[lane].jobs);
        pthread_cond_destroy(&copier->work[lane]);
    }
    pthread_cond_destroy(&copier->told);
    pthread_mutex_destroy(&copier->lock);
    pthread_mutex_destroy(&copier->open_lock);
    free(copier->deadlines.jobs);
    free(copier->slots);
    free(copier->free_slots);
    free(copier->threads);
    kv_wake_close(&copier->polled);
    kv_wake_close(&copier->wake);
    close_fd(copier->epoll);
    close_fd(copier->timer);
    free(copier);
}

int kvbm_copier_stop(struct kvbm_copier *copier, uint32_t timeout_ms)
{
    uint64_t until = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc = 0;

    if (!copier)
        return 0;
    if (copier->owner != getpid())
        return -ECHILD;
    stop_jobs(copier);
    pthread_mutex_lock(&copier->lock);
    while (!tier_is_quiet(copier) && rc == 0)
        rc = kv_cond_wait_until(&copier->told, &copier->lock, until);
    rc = tier_is_quiet(copier) ? 0 : -ETIMEDOUT;
    pthread_mutex_unlock(&copier->lock);
    return rc;
}

void kvbm_copier_destroy(struct kvbm_copier *copier)
{
    if (!copier)
        return;
    if (copier->owner != getpid()) {
        kv_log_warn("kvbm", "a copier of the parent process is left alone", NULL);
        return;
    }
    stop_jobs(copier);
    for (uint32_t i = 0; i < copier->n_started; i++)
        pthread_join(copier->threads[i], NULL);
    tier_file_close(copier->file); /* not earlier: a callback's submit may have opened a lane */
    tier_cuda_close(copier->cuda);
    stop_waiter(copier);
    let_waiters_go(copier);
    release(copier);
}
