// SPDX-License-Identifier: Apache-2.0
/* Shared by the queue's calls (async.c) and its threads (async_run.c). */
#ifndef KVS_ASYNC_H
#define KVS_ASYNC_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/thread/thread.h"
#include "kv_store_async.h"

enum { KVS_ASYNC_THREADS = 64 }; /* at most */

struct kvs_async_request {
    struct kvs_async_request *next;
    struct kvs_done done;
    int32_t priority;
    bool flush, only_flush, flushing; /* only_flush: it has no chunks; flushing: begun */
    atomic_bool cancelled;            /* read without the lock */
    int64_t *ret_each;                /* the caller's */
    uint8_t *hashes;
    size_t hash_len, n;
    struct iovec *parts;
    uint32_t *n_parts;
    size_t claimed, claimed_parts; /* chunks, and their parts, that threads work on or have ended */
    size_t running;                /* claims under way */
    size_t n_left_out;             /* chunks cancelled */
    size_t first_error;            /* chunk whose error is the status; SIZE_MAX: none */
    int lost; /* error of another's flush meanwhile: it may be about these chunks */
    uint64_t submit_ns, begin_ns;
};

struct kvs_async {
    pthread_mutex_t lock;
    pthread_cond_t work, ended;
    pid_t pid;
    struct kvs_store *store;
    uint32_t max_requests, n_requests; /* open and done */
    struct kvs_async_request *open;
    struct kvs_async_request *done, **done_tail;
    uint32_t writing, max_writing; /* threads that put, delete or flush */
    bool loose; /* there were puts without a flush, for which the next KVS_OP_FLUSH answers */
    int owed;   /* error of another flush, which may be about them */
    uint64_t next_id;
    bool stopping;
    struct kv_wake wake;
    uint32_t n_threads;
    pthread_t threads[KVS_ASYNC_THREADS];
};

/* A thread of the queue: run chunks of requests until the queue stops and is empty. @arg: the queue */
void *kvs_async_run(void *arg);

/* Move an open request to the done list. With the lock. */
void kvs_async_finish(struct kvs_async *a, struct kvs_async_request *r);

/* Give the chunks that aren't claimed this result. Returns their number. With the lock. */
size_t kvs_async_leave_out(struct kvs_async_request *r, int result);

#endif
