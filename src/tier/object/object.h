// SPDX-License-Identifier: Apache-2.0
/**
 * The object tier: blocks as chunks of any kv_store backend (kv_store.h), behind a queue of its
 * own, so that a slow or dead store delays nobody else.
 *
 * The value of a chunk is the block with a header that repeats what it is and a checksum, the
 * chunk's key is a hash of that header (docs/formats.md, "Object tier"): what doesn't verify is a
 * miss.
 *
 * A PUT is done when its blocks are durable: each batch ends with a publication of the manifest
 * "kvbm-object-…", an empty snapshot. So no manifest names the blocks: a collection of the store's
 * chunks (kvs_gc) is how the tier forgets. What was put, was found by a put, or was got within the
 * grace time stays. When the store lost a block before it was durable, the batches that put over
 * the same handle fail (-EIO); later ones use a new handle.
 *
 * A breaker opens after so many failures in a row: while it is open, calls fail at once
 * (-EHOSTDOWN), and one is let through from time to time, over a new handle of the store, to see
 * whether it is back. Puts (of flow KVBM_OFFLOAD) that come while that one is under way wait for
 * it, up to their deadlines, and fail with it. A full or read-only store, and blocks that aren't
 * there, are no failures in this sense.
 *
 * A call that hangs in a backend beyond its batch's deadline is left behind with its thread and
 * copies of the bytes, and another thread takes its place. At most n_threads are replaced so; when
 * all hang, calls fail at once (-EHOSTDOWN) until one comes back.
 *
 * Memory: n_threads times 16 MiB (or a block, if that is more) for puts, as much for gets, and as
 * much for threads left behind.
 *
 * Threads: any; done callbacks come from the tier's own threads, hold none of its locks, may
 * submit, and must not block or close. After fork() the tier is of no use in the child: submit is
 * -ECHILD there, close does nothing.
 */
#ifndef KVBM_TIER_OBJECT_OBJECT_H
#define KVBM_TIER_OBJECT_OBJECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_pool.h"
#include "kvbm_transfer.h"

struct kvbm_object;

struct kvbm_object_opts {
    size_t size;
    const char *uri;         /* required, as kvs_open takes it */
    const char *fingerprint; /* of the model and the block layout; required, not empty */
    uint32_t key_len;
    uint64_t block_bytes;
    uint32_t n_threads;         /* 0: 4 */
    uint32_t max_queue;         /* batches; 0: 256 */
    uint32_t timeout_ms;        /* of a batch without a deadline; 0: 10,000 */
    uint32_t breaker_failures;  /* in a row; 0: 5 */
    uint32_t breaker_reopen_ms; /* until one is let through; 0: 1000, doubling up to 30,000 */
};

/**
 * Opens the store, in the background when it is slow (a second) or away: until then -EHOSTDOWN,
 * puts wait. -EINVAL for options or a URI that can't be; what kvs_open says of a plugin or
 * directory that can't be used; -ENOMEM,
 * -EAGAIN (no threads).
 */
int kvbm_object_open(const struct kvbm_object_opts *opts, struct kvbm_object **ret);
/**
 * Close the tier: end queued batches with -ECANCELED, wait up to timeout_ms for running calls. A
 * call that still hangs in a backend is left behind with its memory, and logged. NULL is a no-op.
 */
void kvbm_object_close(struct kvbm_object *object);
/** The same, but waits until then (monotonic) at most. */
void kvbm_object_close_by(struct kvbm_object *object, uint64_t deadline_ns);

enum kvbm_object_op { KVBM_OBJECT_EXISTS, KVBM_OBJECT_GET, KVBM_OBJECT_PUT };

struct kvbm_object_io {
    uint32_t group;
    const void *key;
    /* PUT: read. GET: block_bytes are written. Unless status is 0, its content is undefined. */
    void *data;
    int status; /* 0 (EXISTS: it is there), -ENOENT, -EBADMSG, -ETIMEDOUT, -EHOSTDOWN, -ECANCELED, -EIO.. */
};

/**
 * The caller's until done; but when a deadline passes while a backend hangs, done is called
 * (-ETIMEDOUT) and the hanging call works on copies of its own: nothing of the batch is touched
 * after done.
 */
struct kvbm_object_batch {
    enum kvbm_object_op op;
    enum kvbm_flow flow;  /* onboarding before offloading, which leaves one thread free for it */
    int32_t priority;     /* of those of one flow that wait: the higher first, then the older */
    uint64_t deadline_ns; /* monotonic; 0: timeout_ms from now */
    struct kvbm_object_io *ios;
    uint32_t n;
    void (*done)(struct kvbm_object_batch *batch);
    void *arg;
    struct kvbm_object_batch *next_; /* the tier's, like the rest */
    uint64_t until_;
    bool probe_; /* once submitted: the one that goes to see whether the store is back */
};

/**
 * Returns 0; -EAGAIN (queue full), -EHOSTDOWN (breaker open, or all threads hang), -ESHUTDOWN,
 * -EINVAL (nothing to do, no done, no key or data), -ECHILD: done isn't called then. What had been
 * done when a deadline, a cancellation or a failure came keeps its status; the rest has that.
 */
int kvbm_object_submit(struct kvbm_object *object, struct kvbm_object_batch *batch);
/**
 * End it soon, with -ECANCELED for what isn't done; done is called as always, by another thread. A
 * call that is under way is not waited for. A batch that has ended is left alone.
 */
void kvbm_object_cancel(struct kvbm_object *object, struct kvbm_object_batch *batch);
/**
 * End all batches soon, with -ECANCELED. No call is waited for: while all threads hang, and as many
 * in their places, submit is -EHOSTDOWN.
 */
void kvbm_object_cancel_all(struct kvbm_object *object);

struct kvbm_object_stats {
    uint64_t gets, hits;    /* blocks asked for and answered; of these, there and whole */
    uint64_t puts, already; /* blocks stored; there before, not stored again */
    uint64_t exists;        /* blocks looked for and answered */
    uint64_t bytes_read, bytes_written;
    uint64_t bad;             /* blocks that did not verify */
    uint64_t failed;          /* blocks that could not be had or put for another reason */
    uint64_t late, cancelled; /* blocks */
    uint64_t refused;         /* batches, by submit */
    uint64_t queued;          /* batches now */
    uint64_t left_behind;     /* threads now that hang in a call nobody waits for */
    bool open;                /* the breaker: no calls are made */
    uint64_t opened;
};
void kvbm_object_get_stats(struct kvbm_object *object, struct kvbm_object_stats *ret);

#endif
