// SPDX-License-Identifier: Apache-2.0
/* An engine's beginning and end, and the thread that looks after what isn't ready and what is late. */
#include "tier/transfer/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

#define DEFAULT_THREADS 8
#define MAX_THREADS 256
#define DEFAULT_JOBS 1024
#define DEFAULT_BLOCKS 65536
#define MAX_JOBS (1u << 20)
#define DEFAULT_DEPTH 64

/* ---- the waiter ---- */

/* What the descriptors of epoll stand for; ids begin at 1 and never get there. */
#define WAKE UINT64_MAX
#define TIMER (UINT64_MAX - 1)

/* How often CUDA events are asked for: there is no way to sleep on one that can be given up. */
#define PAUSE_MIN_NS (50 * UINT64_C(1000))
#define PAUSE_MAX_NS (1000 * UINT64_C(1000))

static void watch_event(struct kvbm_engine *engine, struct tier_job *job)
{
    tier_list_add(&engine->events, job);
    engine->pause_ns = PAUSE_MIN_NS;
    tier_rearm(engine);
}

static void unwatch_event(struct kvbm_engine *engine, struct tier_job *job)
{
    struct tier_job **at = &engine->events.first;

    while (*at && *at != job)
        at = &(*at)->next;
    if (*at)
        tier_list_remove(&engine->events, at);
}

/* One readable thing is as good as another: what epoll can't watch (a file) can be read at any time. */
static int watch_fd(struct kvbm_engine *engine, struct tier_job *job, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = job->id};
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3); /* so that several jobs can wait for one */
    int err;

    if (own < 0)
        return -errno;
    if (epoll_ctl(engine->epoll, EPOLL_CTL_ADD, own, &event) == 0) {
        job->ready_fd = own;
        return 0;
    }
    err = errno == EPERM ? 0 : -errno;
    close(own);
    return err;
}

int tier_watch(struct kvbm_engine *engine, struct tier_job *job, int ready_fd)
{
    int err = ready_fd > 0 ? watch_fd(engine, job, ready_fd) : 0;

    if (err == 0 && job->ready_event && job->ready_fd < 0)
        watch_event(engine, job);
    return err;
}

static void unwatch_fd(struct kvbm_engine *engine, struct tier_job *job)
{
    if (job->ready_fd < 0)
        return;
    epoll_ctl(engine->epoll, EPOLL_CTL_DEL, job->ready_fd,
              NULL); /* close() alone: not if it was dup'ed */
    close(job->ready_fd);
    job->ready_fd = -1;
}

void tier_unwatch(struct kvbm_engine *engine, struct tier_job *job)
{
    unwatch_fd(engine, job);
    if (job->ready_event)
        unwatch_event(engine, job);
}

static uint64_t next_look(const struct kvbm_engine *engine)
{
    uint64_t deadline = engine->deadlines.n ? engine->deadlines.jobs[1]->deadline_ns : UINT64_MAX;
    uint64_t events = engine->events.first ? kv_now_ns() + engine->pause_ns : UINT64_MAX;

    return KV_MIN(deadline, events);
}

void tier_rearm(struct kvbm_engine *engine)
{
    uint64_t at = next_look(engine);
    struct itimerspec when = {0};

    if (at < (uint64_t)INT64_MAX) { /* zero would disarm */
        when.it_value.tv_sec = (time_t)(at / KV_NS_PER_S);
        when.it_value.tv_nsec = (long)(at % KV_NS_PER_S + (at == 0));
    }
    timerfd_settime(engine->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static void look_for_late(struct kvbm_engine *engine)
{
    uint64_t now = kv_now_ns();

    while (engine->deadlines.n && engine->deadlines.jobs[1]->deadline_ns <= now)
        tier_stop(engine, engine->deadlines.jobs[1], -ETIMEDOUT);
}

static void look_for_events(struct kvbm_engine *engine)
{
    struct tier_job *next;
    bool any = false;

    for (struct tier_job *job = engine->events.first; job; job = next) {
        int rc = tier_cuda_happened(job->ready_event, &job->plan);

        next = job->next;
        if (rc == 0)
            continue;
        any = true;
        if (rc < 0) {
            tier_stop(engine, job, rc);
            continue;
        }
        unwatch_event(engine, job);
        job->ready_event = NULL;
        tier_ready(engine, job);
    }
    engine->pause_ns = any ? PAUSE_MIN_NS : KV_MIN(engine->pause_ns * 2, PAUSE_MAX_NS);
}

static void look_at_fd(struct kvbm_engine *engine, const struct epoll_event *event)
{
    struct tier_job *job = tier_find(engine, event->data.u64);

    if (!job || job->state != TIER_WAITING || job->ready_fd < 0)
        return;                       /* it was stopped meanwhile */
    if (!(event->events & EPOLLIN)) { /* its producer has gone without a word */
        tier_stop(engine, job, -EPIPE);
        return;
    }
    unwatch_fd(engine, job);
    if (job->ready_event)
        watch_event(engine, job);
    else
        tier_ready(engine, job);
}

static void *waiter_thread(void *arg)
{
    struct kvbm_engine *engine = arg;
    struct epoll_event events[64];
    uint64_t expired;

    pthread_mutex_lock(&engine->lock);
    while (!engine->waiter_stops) {
        int n;

        pthread_mutex_unlock(&engine->lock);
        n = epoll_wait(engine->epoll, events, KV_COUNT(events), -1);
        pthread_mutex_lock(&engine->lock);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == TIMER)
                (void)!read(engine->timer, &expired, sizeof(expired));
            else if (events[i].data.u64 != WAKE)
                look_at_fd(engine, &events[i]);
        }
        look_for_late(engine);
        look_for_events(engine);
        tier_rearm(engine);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* ---- lanes that are opened on demand ---- */

int tier_lane_open(struct kvbm_engine *engine, const struct tier_job *job)
{
    enum tier_lane lane = job->plan.lane;
    int err = 0;

    pthread_mutex_lock(&engine->open_lock);
    if ((lane == TIER_FILE || lane == TIER_FILE_LATER) && !engine->file)
        err = tier_file_open(engine, &engine->file);
    if (lane == TIER_OUT || lane == TIER_IN)
        err = tier_cuda_open(engine, &job->plan, &engine->cuda);
    pthread_mutex_unlock(&engine->open_lock);
    if (err == 0 && job->ready_event)
        err = KV_MIN(tier_cuda_happened(job->ready_event, &job->plan), 0);
    return err;
}

/* ---- creating ---- */

static int init_cond(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);

    if (rc != 0)
        return -rc;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return -rc;
}

static int init_tables(struct kvbm_engine *engine)
{
    int err = 0;

    engine->slots = calloc(engine->max_jobs, sizeof(struct tier_job *));
    engine->free_slots = calloc(engine->max_jobs, sizeof(*engine->free_slots));
    engine->threads = calloc(engine->n_threads, sizeof(*engine->threads));
    if (!engine->slots || !engine->free_slots || !engine->threads)
        return -ENOMEM;
    for (uint32_t i = 0; i < engine->max_jobs; i++)
        engine->free_slots[engine->n_free++] = engine->max_jobs - 1 - i;
    for (int lane = 0; err == 0 && lane < TIER_LANES; lane++)
        err = tier_heap_init(&engine->queue[lane], engine->max_jobs);
    return err < 0 ? err : tier_heap_init(&engine->deadlines, engine->max_jobs);
}

static int watch_own(struct kvbm_engine *engine, int fd, uint64_t what)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = what};

    return epoll_ctl(engine->epoll, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static int open_descriptors(struct kvbm_engine *engine)
{
    int err = kv_wake_open(&engine->polled);

    if (err == 0)
        err = kv_wake_open(&engine->wake);
    if (err < 0)
        return err;
    engine->epoll = epoll_create1(EPOLL_CLOEXEC);
    engine->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (engine->epoll < 0 || engine->timer < 0)
        return -errno;
    err = watch_own(engine, engine->wake.fd, WAKE);
    return err < 0 ? err : watch_own(engine, engine->timer, TIMER);
}

static int start_threads(struct kvbm_engine *engine)
{
    int err = kv_thread_start(&engine->waiter, "kvbm-wait", waiter_thread, engine);

    engine->waiter_runs = err == 0;
    while (err == 0 && engine->n_started < engine->n_threads) {
        err = kv_thread_start(&engine->threads[engine->n_started], "kvbm-copy", tier_memory_thread,
                              engine);
        engine->n_started += err == 0;
    }
    return err;
}

static uint32_t default_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);

    return n > DEFAULT_THREADS ? DEFAULT_THREADS : n > 0 ? (uint32_t)n : 1;
}

static int read_opts(const struct kvbm_engine_opts *opts, struct kvbm_engine *engine)
{
    engine->n_threads = KV_OPT(opts, n_threads, default_threads());
    engine->max_jobs = KV_OPT(opts, max_jobs, DEFAULT_JOBS);
    engine->max_blocks = KV_OPT(opts, max_blocks, DEFAULT_BLOCKS);
    engine->io = KV_OPT(opts, io, KVBM_IO_AUTO);
    engine->io_depth = KV_OPT(opts, io_depth, DEFAULT_DEPTH);
    engine->gpu_copy = KV_OPT(opts, gpu_copy, KVBM_GPU_AUTO);
    if (engine->n_threads > MAX_THREADS || engine->max_jobs > MAX_JOBS ||
        (unsigned)engine->io > KVBM_IO_THREADS || engine->io_depth > 4096 ||
        (unsigned)engine->gpu_copy > KVBM_GPU_SINGLE)
        return -EINVAL;
    return 0;
}

/* What of the three fails leaves nothing to undo but memory. */
static int make(const struct kvbm_engine_opts *opts, struct kvbm_engine **ret)
{
    struct kvbm_engine *engine = calloc(1, sizeof(*engine));
    int err = engine ? read_opts(opts, engine) : -ENOMEM;

    if (err < 0) {
        free(engine);
        return err;
    }
    engine->owner = getpid();
    engine->polled.fd = engine->wake.fd = engine->epoll = engine->timer = -1;
    engine->calls.last = &engine->calls.first;
    engine->ended.last = &engine->ended.first;
    engine->events.last = &engine->events.first;
    engine->pause_ns = PAUSE_MAX_NS;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->open_lock, NULL);
    for (int lane = 0; lane < TIER_LANES; lane++)
        init_cond(&engine->work[lane]);
    init_cond(&engine->told);
    *ret = engine;
    return 0;
}

int kvbm_engine_create(const struct kvbm_engine_opts *opts, struct kvbm_engine **ret)
{
    struct kvbm_engine *engine = NULL;
    int err = ret ? make(opts, &engine) : -EINVAL;

    if (err < 0)
        return err;
    err = init_tables(engine);
    if (err == 0)
        err = open_descriptors(engine);
    if (err == 0)
        err = start_threads(engine);
    if (err == 0 && engine->io == KVBM_IO_URING) /* whether it is refused is to be said now */
        err = tier_file_open(engine, &engine->file);
    if (err < 0) {
        kvbm_engine_destroy(engine);
        return err;
    }
    *ret = engine;
    return 0;
}

/* ---- the end ---- */

static void stop_jobs(struct kvbm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stopping = true;
    for (uint32_t i = 0; engine->slots && i < engine->max_jobs; i++) {
        if (engine->slots[i] && engine->slots[i]->state != TIER_ENDED)
            tier_stop(engine, engine->slots[i], -ECANCELED);
    }
    for (int lane = 0; lane < TIER_LANES; lane++)
        pthread_cond_broadcast(&engine->work[lane]);
    pthread_mutex_unlock(&engine->lock);
}

static void stop_waiter(struct kvbm_engine *engine)
{
    if (!engine->waiter_runs)
        return;
    pthread_mutex_lock(&engine->lock);
    engine->waiter_stops = true;
    pthread_mutex_unlock(&engine->lock);
    kv_wake_signal(&engine->wake);
    pthread_join(engine->waiter, NULL);
}

/* Those in kvbm_engine_wait have what they waited for, and take it. */
static void let_waiters_go(struct kvbm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    while (engine->n_waiters)
        pthread_cond_wait(&engine->told, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void release(struct kvbm_engine *engine)
{
    for (uint32_t i = 0; engine->slots && i < engine->max_jobs; i++)
        free(engine->slots[i]); /* ended, and nobody asked */
    for (int lane = 0; lane < TIER_LANES; lane++) {
        free(engine->queue[lane].jobs);
        pthread_cond_destroy(&engine->work[lane]);
    }
    pthread_cond_destroy(&engine->told);
    pthread_mutex_destroy(&engine->lock);
    pthread_mutex_destroy(&engine->open_lock);
    free(engine->deadlines.jobs);
    free(engine->slots);
    free(engine->free_slots);
    free(engine->threads);
    kv_wake_close(&engine->polled);
    kv_wake_close(&engine->wake);
    close_fd(engine->epoll);
    close_fd(engine->timer);
    free(engine);
}

int kvbm_engine_stop(struct kvbm_engine *engine, uint32_t timeout_ms)
{
    uint64_t until = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    const struct timespec ts = {.tv_sec = (time_t)(until / KV_NS_PER_S),
                                .tv_nsec = (long)(until % KV_NS_PER_S)};
    int rc = 0;

    if (!engine)
        return 0;
    if (engine->owner != getpid())
        return -ECHILD;
    stop_jobs(engine);
    pthread_mutex_lock(&engine->lock);
    while (!tier_is_quiet(engine) && rc == 0)
        rc = pthread_cond_timedwait(&engine->told, &engine->lock, &ts);
    rc = tier_is_quiet(engine) ? 0 : -ETIMEDOUT;
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

void kvbm_engine_destroy(struct kvbm_engine *engine)
{
    if (!engine)
        return;
    if (engine->owner != getpid()) {
        kv_log_warn("kvbm", "a transfer engine of the parent process is left alone", NULL);
        return;
    }
    stop_jobs(engine);
    for (uint32_t i = 0; i < engine->n_started; i++)
        pthread_join(engine->threads[i], NULL);
    tier_file_close(
        engine->file); /* no sooner: until then a callback's submit may have opened one */
    tier_cuda_close(engine->cuda);
    stop_waiter(engine);
    let_waiters_go(engine);
    release(engine);
}
