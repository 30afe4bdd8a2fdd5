// SPDX-License-Identifier: Apache-2.0
/*
 * The executor by io_uring. One thread owns the ring; one system call submits all queued requests
 * and waits. A poll on an eventfd in the ring wakes the thread when requests are queued meanwhile.
 *
 * At most depth requests and the poll are at the kernel, and the completion ring has twice that
 * room, so it can't overflow.
 *
 * The memory given to aio is registered as buffers of a gigabyte, the kernel's limit for one.
 * Requests within one buffer use READ_FIXED and WRITE_FIXED. Files aren't registered: looking one
 * up costs a request almost nothing. The ring's own references would hold the files' locks until
 * the kernel has dismantled the ring, some time after close.
 */
#include <errno.h>
#include <inttypes.h>
#include <liburing.h>
#include <poll.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tier/transfer/io_impl.h"

enum { BATCH = 64 }; /* completions handled before new requests are submitted */
#define BUFFER_BYTES (UINT64_C(1) << 30)
#define MAX_BUFFERS (UINT64_C(1) << 14) /* the kernel's limit */

struct ring {
    struct io_uring ring;
    struct kv_wake wake;
    bool armed;  /* the poll on wake is at the kernel */
    bool asleep; /* asleep, or about to be; with aio->lock */
    bool broken; /* the ring has failed: serve requests one by one */
    /* requests to submit again for their rest; still counted as in flight */
    struct kvbm_aio_queue again;
    bool pause; /* wait before the next submission */
    pthread_t thread;
    sem_t started;
    int start_error;
};

static struct kvbm_aio_req *shift(struct kvbm_aio_queue *queue)
{
    struct kvbm_aio_req *req = queue->first;

    if (req) {
        queue->first = req->next;
        if (!queue->first)
            queue->last = NULL;
        req->next = NULL; /* done may submit it as a list of its own */
    }
    return req;
}

/* ---- submitting ---- */

/* Return the registered buffer that holds the rest of a request, or -1. */
static int buffer_of(const struct kvbm_aio *aio, const struct kvbm_aio_req *req)
{
    /* Memory below the registered one gives a huge offset. */
    uint64_t offset = (uintptr_t)req->data + req->moved_ - (uintptr_t)aio->memory;
    uint64_t len = req->len - req->moved_, end = aio->stats.registered_bytes;

    if (!kvbm_aio_moves(req) || !len || offset >= end || len > end - offset ||
        offset / BUFFER_BYTES != (offset + len - 1) / BUFFER_BYTES)
        return -1;
    return (int)(offset / BUFFER_BYTES);
}

static void prepare(const struct kvbm_aio *aio, struct io_uring_sqe *sqe, struct kvbm_aio_req *req)
{
    char *at = (char *)req->data + req->moved_;
    unsigned len = (unsigned)(req->len - req->moved_);
    uint64_t offset = req->offset + req->moved_;
    int buffer = buffer_of(aio, req);

    if (req->op == KVBM_AIO_SYNC)
        io_uring_prep_fsync(sqe, req->fd, IORING_FSYNC_DATASYNC);
    else if (req->op == KVBM_AIO_FLUSH)
        io_uring_prep_sync_file_range(sqe, req->fd, 0, 0, KVBM_AIO_FLUSH_FLAGS);
    else if (buffer >= 0 && req->op == KVBM_AIO_READ)
        io_uring_prep_read_fixed(sqe, req->fd, at, len, offset, buffer);
    else if (buffer >= 0)
        io_uring_prep_write_fixed(sqe, req->fd, at, len, offset, buffer);
    else if (req->op == KVBM_AIO_READ)
        io_uring_prep_read(sqe, req->fd, at, len, offset);
    else
        io_uring_prep_write(sqe, req->fd, at, len, offset);
    io_uring_sqe_set_data(sqe, req);
}

static void arm(struct ring *own)
{
    struct io_uring_sqe *sqe = own->armed ? NULL : io_uring_get_sqe(&own->ring);

    if (sqe) {
        io_uring_prep_poll_add(sqe, own->wake.fd, POLLIN);
        io_uring_sqe_set_data(sqe, NULL);
        own->armed = true;
    }
}

/* Collect the requests to submit now: first those to continue, then queued ones. Returns false when
 * all requests are done. */
static bool collect(struct kvbm_aio *aio, struct kvbm_aio_queue *ret)
{
    struct ring *own = aio->own;
    struct kvbm_aio_req *req;
    bool more;

    *ret = (struct kvbm_aio_queue){0};
    if (!own->pause) {
        *ret = own->again;
        own->again = (struct kvbm_aio_queue){0};
    }
    pthread_mutex_lock(&aio->lock);
    while ((req = kvbm_aio_take(aio))) {
        aio->stats.fixed += buffer_of(aio, req) >= 0;
        kvbm_aio_append(ret, req);
    }
    more = !aio->stop || aio->in_flight;
    own->asleep = true;
    pthread_mutex_unlock(&aio->lock);
    return more;
}

/* Take back entries that the kernel never took: those between the submission ring's head and
 * tail. */
static void take_back(struct ring *own)
{
    struct io_uring_sq *sq = &own->ring.sq;
    unsigned head = __atomic_load_n(sq->khead, __ATOMIC_ACQUIRE);

    for (; head != sq->sqe_tail; head++) {
        struct kvbm_aio_req *req =
            (struct kvbm_aio_req *)(uintptr_t)sq->sqes[head & sq->ring_mask].user_data;

        if (req)
            kvbm_aio_append(&own->again, req);
    }
}

/* Submit the prepared entries and wait for a completion; @brief: at most 1 ms. */
static void enter(struct ring *own, bool brief)
{
    struct __kernel_timespec soon = {.tv_nsec = 1000000};
    struct io_uring_cqe *cqe;
    int rc = brief ? io_uring_submit_and_wait_timeout(&own->ring, &cqe, 1, &soon, NULL)
                   : io_uring_submit_and_wait(&own->ring, 1);

    if (rc >= 0 || rc == -EINTR || rc == -ETIME)
        return;
    if (rc == -EAGAIN || rc == -EBUSY) { /* out of memory: the entries stay prepared */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        return;
    }
    kv_log_error("kvbm", "io_uring ended: files are read and written one by one", "errno=%d", -rc);
    own->broken = true; /* a sandbox may have forbidden the call */
    take_back(own);
}

/* ---- completions ---- */

struct ended {
    struct kvbm_aio_req *req[BATCH];
    size_t n;
};

static void settle(struct ring *own, struct ended *ended, struct kvbm_aio_req *req, long result)
{
    bool pause;

    if (kvbm_aio_result(req, result, &pause)) {
        ended->req[ended->n++] = req;
        return;
    }
    own->pause |= pause;
    kvbm_aio_append(&own->again, req);
}

static void tell(struct kvbm_aio *aio, struct ended *ended)
{
    pthread_mutex_lock(&aio->lock);
    for (size_t i = 0; i < ended->n; i++)
        kvbm_aio_leave(aio, ended->req[i]);
    pthread_mutex_unlock(&aio->lock);
    for (size_t i = 0; i < ended->n; i++)
        ended->req[i]->done(ended->req[i]);
    ended->n = 0;
}

/* Handle completions. Returns their number. */
static size_t reap(struct kvbm_aio *aio)
{
    struct ring *own = aio->own;
    struct ended ended = {.n = 0};
    struct io_uring_cqe *cqes[BATCH];
    size_t sum = 0;
    unsigned n;

    while ((n = io_uring_peek_batch_cqe(&own->ring, cqes, BATCH))) {
        for (unsigned i = 0; i < n; i++) {
            struct kvbm_aio_req *req = io_uring_cqe_get_data(cqes[i]);

            if (req) {
                settle(own, &ended, req, cqes[i]->res);
            } else {
                own->armed = false;
                kv_wake_clear(&own->wake);
            }
        }
        io_uring_cq_advance(&own->ring, n);
        tell(aio, &ended);
        sum += n;
    }
    return sum;
}

/* ---- the thread ---- */

static void submit(struct kvbm_aio *aio, struct kvbm_aio_queue *queue)
{
    struct ring *own = aio->own;
    struct kvbm_aio_req *req;

    arm(own);
    while ((req = shift(queue))) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&own->ring);

        if (!sqe) { /* the ring is full: arm the poll next time */
            kvbm_aio_append(&own->again, req);
            continue;
        }
        prepare(aio, sqe, req);
    }
}

/* Serve requests one by one after the ring has failed. Requests at the kernel still complete
 * through shared memory. */
static void run_broken(struct kvbm_aio *aio, struct kvbm_aio_queue *queue)
{
    struct ring *own = aio->own;
    struct ended ended = {.n = 0};
    struct kvbm_aio_req *req;

    while ((req = shift(queue))) {
        settle(own, &ended, req, kvbm_aio_call(req, UINT64_MAX));
        if (ended.n)
            tell(aio, &ended);
    }
    own->pause = false;
    if (!own->again.first)
        poll(&(struct pollfd){.fd = own->wake.fd, .events = POLLIN}, 1, 10);
    kv_wake_clear(&own->wake);
}

/* Register all of the executor's memory, or none of it. */
static void register_memory(struct kvbm_aio *aio, struct ring *own)
{
    uint64_t n = (aio->memory_bytes + BUFFER_BYTES - 1) / BUFFER_BYTES;
    struct iovec *buffers = n && n <= MAX_BUFFERS ? calloc(n, sizeof(*buffers)) : NULL;
    int err = -ENOMEM;

    if (!n)
        return;
    for (uint64_t i = 0; buffers && i < n; i++)
        buffers[i] =
            (struct iovec){.iov_base = aio->memory + i * BUFFER_BYTES,
                           .iov_len = KV_MIN(aio->memory_bytes - i * BUFFER_BYTES, BUFFER_BYTES)};
    if (buffers)
        err = io_uring_register_buffers(&own->ring, buffers, (unsigned)n);
    free(buffers);
    if (err < 0)
        kv_log_warn("kvbm", "io_uring won't register the blocks' memory (RLIMIT_MEMLOCK?): slower",
                    "bytes=%" PRIu64 " errno=%d", aio->memory_bytes, -err);
    else
        aio->stats.registered_bytes = aio->memory_bytes;
}

static int open_ring(struct kvbm_aio *aio, struct ring *own)
{
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC,
                                 IORING_OP_SYNC_FILE_RANGE, IORING_OP_POLL_ADD};
    unsigned entries = aio->depth + 1;
    int err = io_uring_queue_init(entries, &own->ring,
                                  IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    struct io_uring_probe *probe;

    if (err == -EINVAL) /* before Linux 6.1 */
        err = io_uring_queue_init(entries, &own->ring, 0);
    if (err < 0) /* also -ENOMEM: some kernels count the ring as locked memory (RLIMIT_MEMLOCK) */
        return -ENOTSUP;
    probe = io_uring_get_probe_ring(&own->ring);
    for (size_t i = 0; i < KV_COUNT(needed) && err == 0; i++)
        err = probe && io_uring_opcode_supported(probe, needed[i]) ? 0 : -ENOTSUP;
    io_uring_free_probe(probe);
    if (err < 0 || !(own->ring.features & IORING_FEAT_NODROP)) {
        io_uring_queue_exit(&own->ring);
        return -ENOTSUP;
    }
    return 0;
}

static void run_ring(struct kvbm_aio *aio, struct kvbm_aio_queue *queue)
{
    struct ring *own = aio->own;
    bool brief = own->pause;

    own->pause = false;
    submit(aio, queue);
    enter(own, brief);
}

static void *work(void *arg)
{
    struct kvbm_aio *aio = arg;
    struct ring *own = aio->own;
    struct kvbm_aio_queue queue;

    own->start_error = open_ring(aio, own); /* a ring belongs to the thread that opens it */
    if (own->start_error == 0)
        register_memory(aio, own);
    sem_post(&own->started);
    if (own->start_error < 0)
        return NULL;
    while (collect(aio, &queue)) {
        if (own->broken)
            run_broken(aio, &queue);
        else
            run_ring(aio, &queue);
        pthread_mutex_lock(&aio->lock);
        own->asleep = false;
        pthread_mutex_unlock(&aio->lock);
        reap(aio);
    }
    io_uring_queue_exit(&own->ring);
    return NULL;
}

static void uring_wake(struct kvbm_aio *aio)
{
    struct ring *own = aio->own;

    if (own->asleep)
        kv_wake_signal(&own->wake);
    own->asleep = false; /* one wake-up is enough */
}

static void uring_stop(struct kvbm_aio *aio)
{
    struct ring *own = aio->own;

    pthread_join(own->thread, NULL);
    kv_wake_close(&own->wake);
    sem_destroy(&own->started);
    free(own);
    aio->own = NULL;
}

static int uring_start(struct kvbm_aio *aio)
{
    struct ring *own = calloc(1, sizeof(*own));
    int err;

    if (!own)
        return -ENOMEM;
    sem_init(&own->started, 0, 0);
    aio->own = own;
    err = kv_wake_open(&own->wake);
    if (err == 0)
        err = kv_thread_start(&own->thread, "kvbm-io", work, aio);
    if (err < 0) {
        kv_wake_close(&own->wake);
        sem_destroy(&own->started);
        free(own);
        return err;
    }
    while (sem_wait(&own->started) < 0) /* EINTR: a signal of the caller's process */
        ;
    err = own->start_error;
    if (err < 0)
        uring_stop(aio);
    return err;
}

const struct kvbm_aio_backend kvbm_aio_uring = {
    .kind = KVBM_IO_URING, .start = uring_start, .stop = uring_stop, .wake = uring_wake};
