// SPDX-License-Identifier: Apache-2.0
/* The executor by threads, each making one system call at a time. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "base/core/error.h"
#include "base/core/xxh.h"
#include "base/hash/hash.h"
#include "base/thread/thread.h"
#include "tier/transfer/io_impl.h"

struct pool {
    pthread_cond_t work;
    uint32_t n, n_waiting;
    pthread_t threads[];
};

/* Add the @n bytes from moved_ on to the checksum, as far as it covers them. */
static void add_up(XXH3_state_t *state, const struct kvbm_aio_req *req, uint64_t n)
{
    if (req->moved_ < req->sum_len)
        kv_hash_update(state, (const char *)req->data + req->moved_,
                       (size_t)KV_MIN(n, req->sum_len - req->moved_));
}

static void run(struct kvbm_aio_req *req)
{
    uint64_t most = req->sum && req->cached ? kv_hash_piece() : UINT64_MAX;
    XXH3_state_t state;
    bool pause, done;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    do {
        long rc = kvbm_aio_call(req, most);

        if (req->sum && rc > 0)
            add_up(&state, req, (uint64_t)rc);
        done = kvbm_aio_result(req, rc, &pause);
        if (pause)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    } while (!done);
    if (req->sum)
        kv_hash_done(&state, req->sum);
}

static void *work(void *arg)
{
    struct kvbm_aio *aio = arg;
    struct pool *pool = aio->own;

    pthread_mutex_lock(&aio->lock);
    for (;;) {
        struct kvbm_aio_req *req = kvbm_aio_take(aio);

        if (!req && aio->stop && !aio->urgent.first && !aio->rest.first)
            break;
        if (!req) { /* with requests queued, wait for a write to end or for a place in the depth */
            pool->n_waiting++;
            pthread_cond_wait(&pool->work, &aio->lock);
            pool->n_waiting--;
            continue;
        }
        pthread_mutex_unlock(&aio->lock);
        run(req);
        pthread_mutex_lock(&aio->lock);
        kvbm_aio_leave(aio, req);
        pthread_mutex_unlock(&aio->lock);
        req->done(req);
        pthread_mutex_lock(&aio->lock);
        if (pool->n_waiting && (aio->urgent.first || aio->rest.first))
            pthread_cond_broadcast(&pool->work);
    }
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&aio->lock);
    return NULL;
}

static void threads_wake(struct kvbm_aio *aio)
{
    struct pool *pool = aio->own;

    if (pool->n_waiting)
        pthread_cond_broadcast(&pool->work);
}

static void threads_stop(struct kvbm_aio *aio)
{
    struct pool *pool = aio->own;

    for (uint32_t i = 0; i < pool->n; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    free(pool);
    aio->own = NULL;
}

static int threads_start(struct kvbm_aio *aio)
{
    struct pool *pool = calloc(1, sizeof(*pool) + aio->n_threads * sizeof(pool->threads[0]));
    int err = 0;

    if (!pool)
        return -ENOMEM;
    pthread_cond_init(&pool->work, NULL);
    aio->own = pool;
    for (; pool->n < aio->n_threads && err == 0; pool->n += err == 0)
        err = kv_thread_start(&pool->threads[pool->n], "kvbm-io", work, aio);
    if (err < 0 && pool->n == 0) { /* fewer threads than asked for are enough */
        threads_stop(aio);
        return err;
    }
    return 0;
}

const struct kvbm_aio_backend kvbm_aio_threads = {
    .kind = KVBM_IO_THREADS, .start = threads_start, .stop = threads_stop, .wake = threads_wake};
