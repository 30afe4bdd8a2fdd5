// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store_async.h: requests on batches of chunks that run on threads of the library, for engines
 * whose scheduler must not wait.
 *
 *     submit ──▶ queue (by priority, then age) ──▶ threads, some chunks at a time
 *                                                     │
 *     poll  ◀── results, oldest first ◀── eventfd ◀───┘
 *
 * Several threads share the chunks of one request. Requests have no order among each other: a get
 * submitted before a put has ended may miss its chunks. At most half of the threads (at least one)
 * work on puts, deletes and flushes, so that gets don't wait behind these; with a single thread they
 * do. Once the connection to a server is lost, the later chunks of a request get that error without
 * being asked for.
 *
 * Errors are negative errno values, as kv_store.h says. Threads: any function from any thread,
 * unless its comment says otherwise. In a child after fork() calls return -ECHILD, and close does
 * nothing: open a queue after the fork. The child shares the descriptor, and should not use it.
 */
#ifndef KV_STORE_ASYNC_H
#define KV_STORE_ASYNC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_store;

/** A queue of requests on one store, with its threads. Any thread. */
struct kvs_async;

/** Options of kvs_async_open; set size to sizeof(struct kvs_async_opts), zero means the default. */
struct kvs_async_opts {
    size_t size;
    uint32_t threads;      /* 1 to 64; 0: one per core, 4 to 8 */
    uint32_t max_requests; /* not yet polled; 0: 1024 */
};
#define KVS_ASYNC_OPTS_INIT KV_INIT_(kvs_async_opts)

/**
 * Make a queue of requests on @store, which must outlive it. @opts may be NULL. The caller owns *@ret
 * and closes it with kvs_async_close. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no thread); -EMFILE.
 */
KV_API int kvs_async_open(struct kvs_store *store, const struct kvs_async_opts *opts,
                          struct kvs_async **ret);

/**
 * Cancel what has not begun, wait up to @timeout_ms for the rest, and free the queue. Results that
 * were not polled are lost. NULL is a no-op. No other call may use the queue during the call, nor
 * after it returned 0.
 *
 * Returns 0: the library uses no memory of any request any more; -ETIMEDOUT: the store still works
 * on some. Keep the requests' memory then, and close again later.
 */
KV_API int kvs_async_close(struct kvs_async *async, uint32_t timeout_ms);

/** Operation of a request. */
enum kvs_op {
    KVS_OP_GET = 1, /* kvs_get_chunks_into */
    KVS_OP_PUT,     /* kvs_put_chunks_from */
    KVS_OP_EXISTS,  /* kvs_exists */
    KVS_OP_DELETE,  /* kvs_delete_chunk */
    KVS_OP_FLUSH    /* kvs_flush, which ends no save; no chunks */
};

/** A request; set size to sizeof(struct kvs_request), zero means the default. */
struct kvs_request {
    size_t size;
    enum kvs_op op;     /* required */
    int32_t priority;   /* higher ones first, then older ones */
    const void *hashes; /* n keys of hash_len bytes, one after the other; copied by submit */
    size_t hash_len;
    size_t n; /* at most 2^20 */
    /* Get and put: as kvs_get_chunks_into takes them. submit copies both arrays. The memory that the
     * parts name stays the caller's, and must stay valid, for a put also unchanged, until done. */
    const struct iovec *parts;
    const uint32_t *n_parts; /* NULL: one part each */
    /* [n] result of each chunk. The caller's memory, valid until done; written only before the
     * request is done. NULL: not wanted.
     *   get     its length in bytes, -ENOENT (missing), -EBADMSG (did not verify), -EMSGSIZE
     *   put     0 (stored) or 1 (was there)
     *   exists  1 (there) or 0 (missing)
     *   delete  0
     * or another error of the store; -ECANCELED for a chunk that was not begun. */
    int64_t *ret_each;
    uint64_t tag; /* returned in the result */
    bool flush;   /* put: make the chunks durable before the request is done, as kvs_flush does */
};
#define KVS_REQUEST_INIT KV_INIT_(kvs_request)

/** Result of a request. */
struct kvs_done {
    uint64_t id, tag;
    /* 0: each chunk was there, missing, stored or deleted. Else -ECANCELED, the error of the flush, or
     * of another flush since the request began, which may be about its chunks (whether these are
     * durable isn't known then), or the first error of a chunk, in the order
     * of keys, other than a missing one's -ENOENT (of a put, -ENOENT is an error: a folder is gone). */
    int32_t status;
    uint32_t op;      /* enum kvs_op */
    uint64_t n, n_ok; /* chunks of the request; with a result of 0 or more (exists: there) */
    uint64_t bytes;   /* got or put */
    uint64_t wait_ns; /* from submit to the first chunk's begin */
    uint64_t run_ns;  /* from there to the end */
    uint64_t reserved[2];
};

/**
 * Queue a request. Never waits for the store. Returns its id > 0; -EINVAL (arguments); -EAGAIN
 * (max_requests: poll results first); -ENOMEM; -ESHUTDOWN (being closed); -ECHILD.
 */
KV_API int64_t kvs_async_submit(struct kvs_async *async, const struct kvs_request *request);

/**
 * Leave out the chunks of a request that are not begun, and its flush. What the store has begun ends:
 * one chunk of each thread, or a batch of up to 256 of a store with batches. The result comes by poll
 * as ever, with status -ECANCELED when chunks or the flush were left out. Returns 0; -ENOENT (no such
 * request, or ended); -ECHILD.
 */
KV_API int kvs_async_cancel(struct kvs_async *async, uint64_t id);

/** Take the results of at most @max ended requests, oldest first. Returns their number; -ECHILD. */
KV_API long kvs_async_poll(struct kvs_async *async, struct kvs_done *ret, size_t max);

/**
 * Return an eventfd that is readable while kvs_async_poll has results; -EINVAL; -ECHILD. The queue
 * owns it: wait for it, and neither read nor close it, which would hide results.
 */
KV_API int kvs_async_fd(struct kvs_async *async);

/**
 * Wait up to @timeout_ms until every request submitted so far, and those submitted meanwhile, has
 * ended. Their results stay to be polled. Returns 0; -ETIMEDOUT; -ECHILD.
 */
KV_API int kvs_async_drain(struct kvs_async *async, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
