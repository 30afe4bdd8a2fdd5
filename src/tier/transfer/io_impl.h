// SPDX-License-Identifier: Apache-2.0
/** Shared by the executor's two backends: the queue, its order, and the meaning of results. */
#ifndef KVBM_TIER_TRANSFER_IO_IMPL_H
#define KVBM_TIER_TRANSFER_IO_IMPL_H

#include <pthread.h>
#include <sys/types.h>

#include "tier/transfer/io.h"

#define KVBM_AIO_MAX_TRIES 16 /* retries of a request after EAGAIN */
#define KVBM_AIO_FLUSH_FLAGS \
    (SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER)

struct kvbm_aio_queue {
    struct kvbm_aio_req *first, *last;
};

struct kvbm_aio_backend {
    enum kvbm_io kind;
    int (*start)(struct kvbm_aio *aio); /* frees its half-built state on failure */
    /* called after aio->stop was set: return when all requests are done */
    void (*stop)(struct kvbm_aio *aio);
    void (*wake)(struct kvbm_aio *aio); /* called with the lock held after a request was queued */
};
extern const struct kvbm_aio_backend kvbm_aio_uring, kvbm_aio_threads;

struct kvbm_aio {
    const struct kvbm_aio_backend *backend;
    void *own; /* state of the backend */
    pid_t process;
    uint32_t depth, n_threads;
    pthread_mutex_t lock; /* guards the fields below */
    struct kvbm_aio_queue urgent, rest;
    uint32_t in_flight;
    uint64_t writing;      /* bytes of writes at the kernel */
    uint64_t read_seen_ns; /* begin or end of the last urgent read */
    uint32_t turns;
    bool stop;
    uint8_t *memory; /* memory to register; constant */
    uint64_t memory_bytes;
    struct kvbm_aio_stats stats; /* registered_bytes: constant after start */
};

/* True for requests that move bytes between memory and file. */
static inline bool kvbm_aio_moves(const struct kvbm_aio_req *req)
{
    return req->op == KVBM_AIO_READ || req->op == KVBM_AIO_WRITE;
}

void kvbm_aio_append(struct kvbm_aio_queue *queue, struct kvbm_aio_req *req);
/**
 * Take the next request by priority and count it as in flight; NULL: none may begin now. With the
 * lock.
 */
struct kvbm_aio_req *kvbm_aio_take(struct kvbm_aio *aio);
/** Note that a request is no longer in flight. With the lock. */
void kvbm_aio_leave(struct kvbm_aio *aio, const struct kvbm_aio_req *req);
/**
 * Handle the kernel's @result of a request: bytes or a negative errno. Returns true when the
 * request is done, with its status set; false: submit again from moved_ on (after a pause if
 * *@pause).
 */
bool kvbm_aio_result(struct kvbm_aio_req *req, long result, bool *pause);
/** Make the system call of a request, from moved_ on, of at most @most bytes. */
long kvbm_aio_call(const struct kvbm_aio_req *req, uint64_t most);

#endif
