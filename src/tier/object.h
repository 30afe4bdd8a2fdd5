// SPDX-License-Identifier: Apache-2.0
/**
 * The object tier: blocks as chunks of any kv_store backend (kv_store.h), behind a queue of its own, so that a
 * slow or dead store delays nobody else.
 *
 * Chunk key: XXH3-128 of (fingerprint, group, key); the value is the block with a header that repeats
 * what it is and a checksum (docs/formats.md, "Object tier"): what doesn't verify is a miss.
 *
 * A breaker opens after so many failures in a row: while it is open, calls fail at once (-EHOSTDOWN), and one
 * is let through from time to time to see whether the store is back.
 *
 * Threads: any; done callbacks come from the tier's workers.
 */
#ifndef KVBM_TIER_OBJECT_H
#define KVBM_TIER_OBJECT_H

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

/** Opens the store (in the background when it is slow: until then -EHOSTDOWN). -EINVAL for a URI that can't be. */
int kvbm_object_open(const struct kvbm_object_opts *opts, struct kvbm_object **ret);
/** What waits ends with -ECANCELED. Waits for calls that run at most timeout_ms; what still hangs in a
 * backend then is left behind with its memory, and logged. */
void kvbm_object_close(struct kvbm_object *object);

enum kvbm_object_op { KVBM_OBJECT_EXISTS, KVBM_OBJECT_GET, KVBM_OBJECT_PUT };

struct kvbm_object_io {
    uint32_t group;
    const void *key;
    void *data; /* GET: block_bytes are written, only when all verified; PUT: read */
    int status; /* 0 (EXISTS: it is there), -ENOENT, -EBADMSG, -ETIMEDOUT, -EHOSTDOWN, -ECANCELED, -EIO.. */
};

/**
 * The caller's until done; but when a deadline passes while a backend hangs, done is called (-ETIMEDOUT) and
 * the hanging call works on copies of its own: nothing of the batch is touched after done.
 */
struct kvbm_object_batch {
    enum kvbm_object_op op;
    enum kvbm_flow flow;
    uint64_t deadline_ns;
    struct kvbm_object_io *ios;
    uint32_t n;
    void (*done)(struct kvbm_object_batch *batch);
    void *arg;
    struct kvbm_object_batch *next_;
};

/** Returns 0, -EAGAIN (queue full), -EHOSTDOWN (breaker open), -ESHUTDOWN. done isn't called then. */
int kvbm_object_submit(struct kvbm_object *object, struct kvbm_object_batch *batch);
void kvbm_object_cancel(struct kvbm_object *object, struct kvbm_object_batch *batch);

struct kvbm_object_stats {
    uint64_t gets, hits, puts, already, exists; /* blocks; already: was there, not put again */
    uint64_t bytes_read, bytes_written, bad, failed, late, refused;
    uint64_t queued;
    bool open; /* the breaker: no calls are made */
    uint64_t opened;
};
void kvbm_object_get_stats(struct kvbm_object *object, struct kvbm_object_stats *ret);

#endif
