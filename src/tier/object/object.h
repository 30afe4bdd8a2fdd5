// SPDX-License-Identifier: Apache-2.0
/**
 * The object tier: blocks as chunks of any kv_store backend (kv_store.h), behind a queue of its
 * own, so that a slow or dead store delays no other tier.
 *
 * The value of a chunk is a header and the block. The header repeats the block's identity and has a
 * checksum; the chunk's key is a hash of that header (docs/formats.md, "Object tier"). A value that
 * doesn't verify is a miss.
 *
 * A PUT is done when its blocks are durable: each batch ends with a publication of the manifest
 * "kvbm-object-…", an empty snapshot. No manifest names the blocks, so a collection of the store's
 * chunks (kvs_gc) removes old ones. It keeps blocks that were put, found by a put, or got within
 * the grace time. When the store lost a block before it was durable, the batches that put over the
 * same handle fail (-EIO); later ones use a new handle.
 *
 * A breaker opens after breaker_failures failures in a row. While it is open, calls fail at once
 * (-EHOSTDOWN). From time to time one call, the probe, is let through over a new handle of the
 * store. Puts (of flow KVBM_OFFLOAD) that come during a probe wait for it, up to their deadlines,
 * and fail with it. A full or read-only store, and missing blocks, are no failures in this sense.
 * Nor are calls whose deadline comes before the store has been silent for 2 s, or for half of
 * timeout_ms if that is less.
 *
 * A call that hangs in a backend beyond its batch's deadline is left behind, with its thread and
 * copies of the bytes. Another thread takes its place. At most n_threads threads are replaced. When
 * all hang, calls fail at once (-EHOSTDOWN) until one returns.
 *
 * Memory: n_threads times 16 MiB (or a block, if that is larger) for puts, as much for gets, and as
 * much for threads left behind.
 *
 * Threads: any. done callbacks come from the tier's own threads, hold none of its locks, may
 * submit, and must not block or close. After fork() the tier is unusable in the child: submit
 * returns -ECHILD, close does nothing.
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
    uint32_t timeout_ms;        /* for batches without a deadline; 0: 10,000 */
    uint32_t breaker_failures;  /* in a row; 0: 5 */
    uint32_t breaker_reopen_ms; /* time to the first probe; 0: 1000; doubles up to 30,000 */
};

/**
 * Open the store. When that takes longer than a second, or the store is unreachable, opening
 * continues in the background; until then gets fail with -EHOSTDOWN and puts wait. Returns 0;
 * -EINVAL: bad options or URI; the error of kvs_open when a plugin or directory can't be used;
 * -ENOMEM; -EAGAIN (no threads).
 */
int kvbm_object_open(const struct kvbm_object_opts *opts, struct kvbm_object **ret);
/**
 * Close the tier: end queued batches with -ECANCELED, wait up to timeout_ms for running calls. A
 * call that still hangs in a backend is left behind with its memory, and logged. NULL is a no-op.
 */
void kvbm_object_close(struct kvbm_object *object);
/** Close as kvbm_object_close does, but wait for running calls until @deadline_ns (monotonic). */
void kvbm_object_close_by(struct kvbm_object *object, uint64_t deadline_ns);

enum kvbm_object_op { KVBM_OBJECT_EXISTS, KVBM_OBJECT_GET, KVBM_OBJECT_PUT, KVBM_OBJECT_DELETE };

struct kvbm_object_io {
    uint32_t group;
    const void *key;
    /* PUT: read. GET: block_bytes are written; undefined unless status is 0. */
    void *data;
    /* 0 (EXISTS: present), -ENOENT, -EBADMSG, -ETIMEDOUT, -EHOSTDOWN, -ECANCELED, -EIO... */
    int status;
};

/**
 * A batch. The tier owns it until done. When a deadline passes while a backend hangs, done is
 * called (-ETIMEDOUT) and the hanging call works on copies of its own: the tier touches nothing of
 * the batch after done.
 */
struct kvbm_object_batch {
    enum kvbm_object_op op;
    /* onboarding goes before offloading, which leaves one thread free for it */
    enum kvbm_flow flow;
    int32_t priority;     /* order of waiting batches of one flow: higher first, then older */
    uint64_t deadline_ns; /* monotonic; 0: timeout_ms from now */
    struct kvbm_object_io *ios;
    uint32_t n;
    void (*done)(struct kvbm_object_batch *batch);
    void *arg;
    struct kvbm_object_batch *next_; /* used by the tier, like the fields below */
    uint64_t until_;
    bool probe_; /* once submitted: this batch is the breaker's probe */
};

/**
 * Submit a batch. Returns 0; -EAGAIN (queue full), -EHOSTDOWN (breaker open, or all threads hang),
 * -ESHUTDOWN, -EINVAL (no blocks, no done, no key or data), -ECHILD. After an error done isn't
 * called. A deadline, cancellation or failure is the status of all blocks that had none by then.
 */
int kvbm_object_submit(struct kvbm_object *object, struct kvbm_object_batch *batch);
/**
 * End a batch soon: blocks without a result get -ECANCELED. Another thread calls done as always.
 * Doesn't wait for a running call. A no-op for a batch that has ended.
 */
void kvbm_object_cancel(struct kvbm_object *object, struct kvbm_object_batch *batch);
/**
 * End all batches soon, with -ECANCELED. Waits for no call: while all threads and their
 * replacements hang, submit returns -EHOSTDOWN.
 */
void kvbm_object_cancel_all(struct kvbm_object *object);

struct kvbm_object_stats {
    uint64_t gets, hits;    /* blocks asked for and answered; of these, present and valid */
    uint64_t puts, already; /* blocks stored; blocks that existed before */
    uint64_t exists;        /* blocks looked for and answered */
    uint64_t bytes_read, bytes_written;
    uint64_t bad;             /* blocks that did not verify */
    uint64_t failed;          /* blocks not got or put for another reason */
    uint64_t late, cancelled; /* blocks */
    uint64_t refused;         /* batches refused by submit */
    uint64_t queued;          /* batches queued now */
    uint64_t left_behind;     /* threads that now hang in an abandoned call */
    bool open;                /* the breaker is open: no calls are made */
    uint64_t opened;
};
void kvbm_object_get_stats(struct kvbm_object *object, struct kvbm_object_stats *ret);

#endif
