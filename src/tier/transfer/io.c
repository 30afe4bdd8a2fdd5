// SPDX-License-Identifier: Apache-2.0
/* The executor: its queue, and the choice between io_uring (io_uring.c) and threads
 * (io_threads.c). */
#include "tier/transfer/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "tier/transfer/io_impl.h"

enum {
    MAX_DEPTH = 4096,
    DEFAULT_DEPTH = 64,
    MAX_DEFAULT_THREADS = 32,
    /* every eighth turn goes to requests that aren't urgent, so that endless reads don't stop
     * writes */
    TURN_OF_REST = 8
};

/* Bytes being written while reads come: enough to keep a fast device busy, few enough that a read
 * waits only briefly. */
#define WRITING_BESIDE_READS (UINT64_C(2) << 20)
#define READS_STOPPED_NS (50 * KV_NS_PER_MS)

/* ---- the queue ---- */

void kvbm_aio_append(struct kvbm_aio_queue *queue, struct kvbm_aio_req *req)
{
    req->next = NULL;
    if (queue->last)
        queue->last->next = req;
    else
        queue->first = req;
    queue->last = req;
}

static struct kvbm_aio_req *take_first(struct kvbm_aio_queue *queue)
{
    struct kvbm_aio_req *req = queue->first;

    queue->first = req->next;
    if (!queue->first)
        queue->last = NULL;
    req->next = NULL;
    return req;
}

static bool is_urgent_read(const struct kvbm_aio_req *req)
{
    return req->urgent && req->op == KVBM_AIO_READ;
}

/* True when a write may begin now. With no write running the answer is yes, and a write's end asks
 * again. */
static bool write_may_go(const struct kvbm_aio *aio, const struct kvbm_aio_req *req, uint64_t now)
{
    return req->op != KVBM_AIO_WRITE || !aio->writing ||
           aio->writing + req->len <= WRITING_BESIDE_READS ||
           now - aio->read_seen_ns > READS_STOPPED_NS;
}

struct kvbm_aio_req *kvbm_aio_take(struct kvbm_aio *aio)
{
    struct kvbm_aio_req *req;
    bool rest;
    uint64_t now;

    if (aio->in_flight >= aio->depth || (!aio->urgent.first && !aio->rest.first))
        return NULL;
    now = kv_now_ns();
    rest = aio->rest.first && write_may_go(aio, aio->rest.first, now);
    if (aio->urgent.first && !(rest && aio->turns % TURN_OF_REST == TURN_OF_REST - 1))
        req = take_first(&aio->urgent);
    else if (rest)
        req = take_first(&aio->rest);
    else
        return NULL;
    aio->turns++;
    aio->in_flight++;
    if (req->op == KVBM_AIO_WRITE)
        aio->writing += req->len;
    if (is_urgent_read(req))
        aio->read_seen_ns = now;
    return req;
}

void kvbm_aio_leave(struct kvbm_aio *aio, const struct kvbm_aio_req *req)
{
    aio->in_flight--;
    if (req->op == KVBM_AIO_WRITE)
        aio->writing -= req->len;
    if (is_urgent_read(req))
        aio->read_seen_ns = kv_now_ns();
}

/* ---- requests ---- */

bool kvbm_aio_result(struct kvbm_aio_req *req, long result, bool *pause)
{
    if ((result == -EINTR || result == -EAGAIN) && req->tries_ < KVBM_AIO_MAX_TRIES) {
        req->tries_++;
        *pause = result == -EAGAIN;
        return false;
    }
    *pause = false;
    if (result < 0 || !kvbm_aio_moves(req)) {
        req->status = result < 0 ? (int)result : 0;
        return true;
    }
    req->moved_ += (uint64_t)result;
    req->tries_ = 0;
    req->ended = result == 0 && req->moved_ < req->len;
    req->status = req->ended ? -EIO : 0;
    return result == 0 || req->moved_ >= req->len;
}

long kvbm_aio_call(const struct kvbm_aio_req *req, uint64_t most)
{
    char *at = (char *)req->data + req->moved_;
    size_t len = (size_t)KV_MIN(req->len - req->moved_, most);
    off_t offset = (off_t)(req->offset + req->moved_);
    long rc;

    if (req->op == KVBM_AIO_SYNC)
        rc = fdatasync(req->fd);
    else if (req->op == KVBM_AIO_FLUSH)
        rc = sync_file_range(req->fd, 0, 0, KVBM_AIO_FLUSH_FLAGS);
    else
        rc = req->op == KVBM_AIO_READ ? pread(req->fd, at, len, offset)
                                      : pwrite(req->fd, at, len, offset);
    return rc < 0 ? -errno : rc;
}

static void refuse(struct kvbm_aio_req *list)
{
    while (list) {
        struct kvbm_aio_req *req = list;

        list = req->next;
        req->status = -ESHUTDOWN;
        req->done(req);
    }
}

void kvbm_aio_submit(struct kvbm_aio *aio, struct kvbm_aio_req *list)
{
    /* in a child: a thread of the parent may have held the lock at fork */
    if (getpid() != aio->process) {
        refuse(list);
        return;
    }
    if (!list)
        return;
    pthread_mutex_lock(&aio->lock);
    while (list) {
        struct kvbm_aio_req *req = list;

        list = req->next;
        req->moved_ = 0;
        req->tries_ = 0;
        kvbm_aio_append(req->urgent || !kvbm_aio_moves(req) ? &aio->urgent : &aio->rest, req);
    }
    aio->backend->wake(aio);
    pthread_mutex_unlock(&aio->lock);
}

/* ---- life ---- */

static int start(struct kvbm_aio *aio, enum kvbm_io io)
{
    static atomic_bool said;
    int err = -ENOTSUP;

    if (io != KVBM_IO_THREADS) {
        aio->backend = &kvbm_aio_uring;
        err = aio->backend->start(aio);
    }
    if (err != -ENOTSUP || io == KVBM_IO_URING)
        return err;
    if (io == KVBM_IO_AUTO && !atomic_exchange_explicit(&said, true, memory_order_relaxed))
        kv_log_warn("kvbm", "io_uring is refused here: files are read and written by threads",
                    "threads=%u", aio->n_threads);
    aio->backend = &kvbm_aio_threads;
    return aio->backend->start(aio);
}

int kvbm_aio_create(const struct kvbm_aio_opts *opts, struct kvbm_aio **ret)
{
    enum kvbm_io io = KV_OPT(opts, io, KVBM_IO_AUTO);
    uint32_t depth = KV_OPT(opts, depth, DEFAULT_DEPTH);
    uint32_t n_threads = KV_OPT(opts, n_threads, KV_MIN(depth, (uint32_t)MAX_DEFAULT_THREADS));
    struct kvbm_aio *aio;
    int err;

    if (io > KVBM_IO_THREADS || depth > MAX_DEPTH || n_threads > depth)
        return -EINVAL;
    aio = calloc(1, sizeof(*aio));
    if (!aio)
        return -ENOMEM;
    pthread_mutex_init(&aio->lock, NULL);
    aio->process = getpid();
    aio->depth = depth;
    aio->n_threads = n_threads;
    aio->memory = KV_OPT(opts, memory, NULL);
    aio->memory_bytes = aio->memory ? KV_OPT(opts, memory_bytes, 0) : 0;
    err = start(aio, io);
    if (err < 0) {
        pthread_mutex_destroy(&aio->lock);
        free(aio);
        return err;
    }
    *ret = aio;
    return 0;
}

void kvbm_aio_destroy(struct kvbm_aio *aio)
{
    if (!aio)
        return;
    if (getpid() == aio->process) {
        pthread_mutex_lock(&aio->lock);
        aio->stop = true;
        aio->backend->wake(aio);
        pthread_mutex_unlock(&aio->lock);
        aio->backend->stop(aio);
        pthread_mutex_destroy(&aio->lock);
    }
    free(aio);
}

enum kvbm_io kvbm_aio_kind(const struct kvbm_aio *aio)
{
    return aio->backend->kind;
}

void kvbm_aio_get_stats(struct kvbm_aio *aio, struct kvbm_aio_stats *ret)
{
    pthread_mutex_lock(&aio->lock);
    *ret = aio->stats;
    pthread_mutex_unlock(&aio->lock);
}
