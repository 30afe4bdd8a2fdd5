// SPDX-License-Identifier: Apache-2.0
/* Threads that do the calls, and callers that wait for them. */
#include "tiered/bound.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tiered/bound_call.h"

enum { WORKERS = 256 }; /* calls at once; others wait for a worker, within their deadlines */

struct trd_bound {
    char *uri;
    bool existing;
    uint64_t deadline_ns;
    pid_t pid;               /* of the process that has the workers */
    pthread_mutex_t lock;    /* guards what follows */
    pthread_cond_t woken;    /* of workers */
    struct kvs_store *inner; /* NULL until it was opened */
    STAILQ_HEAD(trd_calls, trd_call) waiting;
    pthread_t workers[WORKERS];
    size_t n_workers, idle, n_waiting;
    size_t running; /* workers that haven't ended */
    size_t late;    /* calls that were given up and haven't ended */
    bool closed;
};

/* -- workers ----------------------------------------------------------------------------------- */

static void free_bound(struct trd_bound *bound)
{
    kvs_close(bound->inner);
    pthread_cond_destroy(&bound->woken);
    pthread_mutex_destroy(&bound->lock);
    free(bound->uri);
    free(bound);
}

/* Keep the store that an attempt has opened, also a late one: the next attempt finds it. */
static void keep_opened(struct trd_bound *bound, struct trd_call *call)
{
    struct kvs_store *extra = call->opened;

    pthread_mutex_lock(&bound->lock);
    if (!bound->inner)
        bound->inner = KV_STEAL(extra);
    kvs_publishes_by_hand(bound->inner); /* a late close flushes nothing */
    pthread_mutex_unlock(&bound->lock);
    kvs_close(extra);
    call->opened = NULL;
}

/* Return the store for a call, which has it for good when it closes it. */
static struct kvs_store *store_for(struct trd_bound *bound, const struct trd_call *call)
{
    struct kvs_store *store = call->op == TRD_OPEN ? NULL : bound->inner;

    if (call->op == TRD_CLOSE)
        bound->inner = NULL;
    return store;
}

static void do_call(struct trd_bound *bound, struct trd_call *call)
{
    bool late;
    int rc = -ETIMEDOUT;

    pthread_mutex_lock(&call->lock);
    late = call->given_up; /* before it began */
    pthread_mutex_unlock(&call->lock);
    if (!late)
        rc = trd_call_do(call, store_for(bound, call), bound->uri, bound->existing);
    if (call->op == TRD_OPEN && !late && rc == 0)
        keep_opened(bound, call);
    pthread_mutex_lock(&call->lock);
    call->rc = rc;
    call->done = true;
    late = call->given_up;
    if (!late)
        pthread_cond_signal(&call->ended); /* from here on the call is its caller's */
    pthread_mutex_unlock(&call->lock);
    if (!late)
        return;
    trd_call_free(call);
    pthread_mutex_lock(&bound->lock);
    bound->late--;
    pthread_mutex_unlock(&bound->lock);
}

static void *work(void *arg)
{
    struct trd_bound *bound = arg;
    bool last;

    pthread_mutex_lock(&bound->lock);
    for (;;) {
        struct trd_call *call = STAILQ_FIRST(&bound->waiting);

        if (call) {
            STAILQ_REMOVE_HEAD(&bound->waiting, entry);
            bound->n_waiting--;
            pthread_mutex_unlock(&bound->lock);
            do_call(bound, call);
            pthread_mutex_lock(&bound->lock);
            continue;
        }
        if (bound->closed)
            break;
        bound->idle++;
        pthread_cond_wait(&bound->woken, &bound->lock);
        bound->idle--;
    }
    last = --bound->running == 0 && bound->pid == 0;
    pthread_mutex_unlock(&bound->lock);
    if (last) /* trd_bound_destroy has left the rest to the late calls */
        free_bound(bound);
    return NULL;
}

/* Give the call to a worker. With the lock held. Returns 0, or why no thread can do it. */
static int hand_over(struct trd_bound *bound, struct trd_call *call)
{
    int rc = 0;

    if (bound->idle <= bound->n_waiting && bound->n_workers < WORKERS) {
        rc = kv_thread_start(&bound->workers[bound->n_workers], "kvs-bound", work, bound);
        if (rc == 0) {
            bound->n_workers++;
            bound->running++;
        } else if (bound->n_workers) {
            rc = 0; /* another one takes it, in time or not */
        }
    }
    if (rc < 0)
        return rc;
    STAILQ_INSERT_TAIL(&bound->waiting, call, entry);
    bound->n_waiting++;
    pthread_cond_signal(&bound->woken);
    return 0;
}

/* -- callers ----------------------------------------------------------------------------------- */

/* Wait for the call's end. Returns false when it is late, and the worker's from here on. */
static bool await(struct trd_bound *bound, struct trd_call *call)
{
    bool done;

    pthread_mutex_lock(&call->lock);
    while (!call->done && kv_now_ns() < call->progress_ns + bound->deadline_ns)
        (void)kv_cond_wait_until(&call->ended, &call->lock, call->progress_ns + bound->deadline_ns);
    done = call->done;
    if (!done) {
        pthread_mutex_lock(&bound->lock); /* counted before the worker can end it */
        bound->late++;
        pthread_mutex_unlock(&bound->lock);
        call->given_up = true;
    }
    pthread_mutex_unlock(&call->lock);
    return done;
}

int trd_bound_run(struct trd_bound *bound, struct trd_call **call)
{
    int rc;

    if (!*call)
        return -ENOMEM;
    if (bound->pid != getpid())
        return -ECHILD; /* its workers are the parent's */
    (*call)->progress_ns = kv_now_ns();
    pthread_mutex_lock(&bound->lock);
    rc = bound->late ? -EHOSTDOWN : hand_over(bound, *call);
    pthread_mutex_unlock(&bound->lock);
    if (rc < 0)
        return rc;
    if (await(bound, *call))
        return (*call)->rc;
    *call = NULL;
    return -ETIMEDOUT;
}

/* -- life -------------------------------------------------------------------------------------- */

static int create(const char *uri, bool existing, uint64_t deadline_ns, struct trd_bound **ret)
{
    struct trd_bound *bound = calloc(1, sizeof(*bound));

    if (!bound)
        return -ENOMEM;
    bound->uri = strdup(uri);
    if (!bound->uri) {
        free(bound);
        return -ENOMEM;
    }
    bound->existing = existing;
    bound->deadline_ns = deadline_ns;
    bound->pid = getpid();
    pthread_mutex_init(&bound->lock, NULL);
    kv_cond_init(&bound->woken);
    STAILQ_INIT(&bound->waiting);
    *ret = bound;
    return 0;
}

static int open_in_time(struct trd_bound *bound, struct kvs_store **ret)
{
    struct trd_call *call;
    struct kvs_store *inner;
    int rc;

    pthread_mutex_lock(&bound->lock);
    inner = bound->inner;
    rc = bound->late ? -EHOSTDOWN : 0;
    pthread_mutex_unlock(&bound->lock);
    if (rc < 0)
        return rc;
    if (!inner) {
        call = trd_call_make(TRD_OPEN, NULL, 0, 0);
        rc = trd_bound_run(bound, &call);
        trd_call_free(call);
        pthread_mutex_lock(&bound->lock);
        inner = bound->inner;
        pthread_mutex_unlock(&bound->lock);
    }
    return rc < 0 ? rc : trd_bound_wrap(bound, inner, ret);
}

int trd_open(const char *uri, bool existing, uint64_t deadline_ms, struct trd_bound **bound,
             struct kvs_store **ret)
{
    int rc = 0;

    if (!deadline_ms)
        return existing ? kvs_open_existing(uri, ret) : kvs_open(uri, ret);
    if (!*bound)
        rc = create(uri, existing, deadline_ms * KV_NS_PER_MS, bound);
    return rc < 0 ? rc : open_in_time(*bound, ret);
}

/* Close the store by the last call, in time. One that wasn't closed is left to free_bound. */
static void close_inner(struct trd_bound *bound)
{
    struct trd_call *call;
    bool opened;

    pthread_mutex_lock(&bound->lock);
    opened = bound->inner != NULL;
    pthread_mutex_unlock(&bound->lock);
    call = opened ? trd_call_make(TRD_CLOSE, NULL, 0, 0) : NULL;
    (void)trd_bound_run(bound, &call);
    trd_call_free(call);
}

/* Keep this library loaded: threads that nobody can wait for run its code. */
static void stay_loaded(void)
{
    Dl_info info;

    if (dladdr((void *)(uintptr_t)work, &info) && info.dli_fname)
        (void)dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

void trd_bound_destroy(struct trd_bound *bound)
{
    pthread_t workers[WORKERS];
    size_t n_workers, late;

    if (!bound)
        return;
    if (bound->pid != getpid()) { /* the workers are the parent's; its locks may be held for ever */
        kvs_close(bound->inner);
        free(bound->uri);
        free(bound);
        return;
    }
    close_inner(bound);
    pthread_mutex_lock(&bound->lock);
    late = bound->late;
    n_workers = bound->n_workers;
    memcpy(workers, bound->workers, n_workers * sizeof(*workers));
    bound->closed = true;
    if (late)
        bound->pid = 0; /* the last worker frees it, which this thread doesn't touch any more */
    pthread_cond_broadcast(&bound->woken);
    pthread_mutex_unlock(&bound->lock);
    if (late)
        stay_loaded();
    for (size_t i = 0; i < n_workers; i++)
        (void)(late ? pthread_detach(workers[i]) : pthread_join(workers[i], NULL));
    if (late)
        kv_log_warn("tiered", "a member is left as it is: calls to it don't end", "calls=%zu",
                    late);
    else
        free_bound(bound);
}
