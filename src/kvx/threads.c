// SPDX-License-Identifier: Apache-2.0
#include "kvx/threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "kvx/log.h"
#include "kvx_ext.h"

#define MIN_BYTES (UINT64_C(1) << 20)
#define PATIENCE 1000

/* Set by the user, read by every call. Each value is meaningful alone, so no order is needed. */
static _Atomic uint32_t wanted = 1;
static _Atomic uint64_t min_bytes = MIN_BYTES;

/* The current job. All fields but `next` are written under `lock` before helpers wake. */
struct job {
    kvx_chunk_fn fn;
    void *arg;
    uint64_t n_chunks;
    _Atomic uint64_t next; /* taken with relaxed adds: chunks are independent */
};

/*
 * Locks. The one caller that uses the helpers holds `caller` (outer). `lock` guards the fields
 * below. Helpers see a job when `generation` changes, and have finished when `busy` is 0 again.
 */
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;
static pthread_t helpers[KVX_MAX_THREADS];
static uint32_t n_helpers; /* running helpers */
static uint32_t n_keep;    /* helpers with a number from n_keep on must end */
static uint32_t patience;  /* calls until helpers that couldn't be started are tried again */
static uint64_t generation;
static uint32_t busy;
static struct job job;
static bool fork_handled;

static void take_chunks(struct job *j)
{
    for (;;) {
        uint64_t chunk = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);

        if (chunk >= j->n_chunks)
            return;
        j->fn(j->arg, chunk);
    }
}

struct helper_arg {
    uint32_t number;
    uint64_t generation; /* jobs up to this one are not for this helper */
};

static struct helper_arg helper_args[KVX_MAX_THREADS];

static void *helper(void *arg)
{
    struct helper_arg self = *(struct helper_arg *)arg;

    pthread_mutex_lock(&lock);
    for (;;) {
        while (generation == self.generation && self.number < n_keep)
            pthread_cond_wait(&wake, &lock);
        if (generation == self.generation)
            break;
        self.generation = generation;
        pthread_mutex_unlock(&lock);
        take_chunks(&job);
        pthread_mutex_lock(&lock);
        if (--busy == 0)
            pthread_cond_signal(&done);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/*
 * Reset the state in the child of a fork: it has none of the threads, and maybe locks that one of
 * them held.
 */
static void after_fork(void)
{
    pthread_mutex_init(&caller, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&done, NULL);
    n_helpers = 0;
    n_keep = 0;
    patience = 0;
    busy = 0;
}

static bool start_helper(uint32_t number)
{
    sigset_t all, old;
    int err;

    helper_args[number] = (struct helper_arg){number, generation};
    sigfillset(&all); /* leave signals to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    err = pthread_create(&helpers[number], NULL, helper, &helper_args[number]);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
        kvx_log("can't start a helper thread (error %d): going on with %u", err, number + 1);
        return false;
    }
    (void)pthread_setname_np(helpers[number], "kvx-copy");
    return true;
}

/*
 * Start or end helpers until there are @n, or as many as the system allows. `caller` is held, and
 * no job runs.
 */
static void resize(uint32_t n)
{
    uint32_t old = n_helpers;

    if (!fork_handled) {
        pthread_atfork(NULL, NULL, after_fork);
        fork_handled = true;
    }
    pthread_mutex_lock(&lock);
    n_keep = n;
    if (n < old)
        pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    for (uint32_t i = n; i < old; i++)
        pthread_join(helpers[i], NULL);
    if (n < old)
        n_helpers = n;
    while (n_helpers < n && start_helper(n_helpers))
        n_helpers++;
    patience = n_helpers < n ? PATIENCE : 0;
}

static void run_with_helpers(kvx_chunk_fn fn, void *arg, uint64_t n_chunks)
{
    pthread_mutex_lock(&lock);
    job.fn = fn;
    job.arg = arg;
    job.n_chunks = n_chunks;
    atomic_store_explicit(&job.next, 0, memory_order_relaxed);
    busy = n_helpers;
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);

    take_chunks(&job);

    pthread_mutex_lock(&lock);
    while (busy)
        pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
}

void kvx_parallel(kvx_chunk_fn fn, void *arg, uint64_t n_chunks, uint64_t bytes)
{
    uint32_t n = atomic_load_explicit(&wanted, memory_order_relaxed);

    if (n_chunks > 1 && n > 1 && bytes >= atomic_load_explicit(&min_bytes, memory_order_relaxed) &&
        pthread_mutex_trylock(&caller) == 0) {
        if (n_helpers != n - 1 && (!patience || !--patience))
            resize(n - 1);
        run_with_helpers(fn, arg, n_chunks);
        pthread_mutex_unlock(&caller);
        return;
    }
    for (uint64_t chunk = 0; chunk < n_chunks; chunk++)
        fn(arg, chunk);
}

kvx_status_t kvx_set_threads(uint32_t n_threads, uint64_t bytes)
{
    if (n_threads == 0 || n_threads > KVX_MAX_THREADS)
        return KVX_STATUS_INVALID_ARGUMENT;
    atomic_store_explicit(&wanted, n_threads, memory_order_relaxed);
    atomic_store_explicit(&min_bytes, bytes ? bytes : MIN_BYTES, memory_order_relaxed);
    pthread_mutex_lock(&caller); /* surplus helpers end now, not at the next call */
    patience = 0;
    if (n_helpers > n_threads - 1)
        resize(n_threads - 1);
    pthread_mutex_unlock(&caller);
    return KVX_STATUS_OK;
}

uint32_t kvx_get_threads(void)
{
    return atomic_load_explicit(&wanted, memory_order_relaxed);
}

/* End the threads at dlclose(), before their code is unmapped. */
__attribute__((destructor)) static void stop_helpers(void)
{
    if (pthread_mutex_trylock(&caller) == 0) {
        if (n_helpers)
            resize(0);
        pthread_mutex_unlock(&caller);
    }
}
