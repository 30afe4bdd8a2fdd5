// SPDX-License-Identifier: Apache-2.0
/**
 * File I/O in the background: reads, writes and barriers of any number of files. One io_uring
 * serves them, or threads with pread and pwrite where the kernel refuses io_uring (containers often
 * do). Both behave the same.
 *
 * Order: urgent requests and barriers go first; every eighth turn goes to the rest. Each group is
 * served in order of submission. Several requests run at once and end in any order: submit a
 * request that depends on another when the other is done. While urgent reads arrive, the kernel
 * gets only few bytes of writes at a time, since a device serves what it has accepted.
 *
 * The executor continues short transfers and retries EINTR and EAGAIN. A submitted request can't be
 * cancelled: its memory belongs to the kernel until done.
 *
 * With io_uring, memory given at creation is pinned once and used by READ_FIXED and WRITE_FIXED
 * instead of being pinned for each request. Where the kernel refuses (RLIMIT_MEMLOCK, for example),
 * such requests are ordinary ones.
 *
 * Threads: any. done callbacks come from the executor's threads (one with io_uring, several
 * otherwise), hold no lock, may submit, and should be short. A child after fork() has none of the
 * executor's threads: its submits end at once with -ESHUTDOWN, in the calling thread, and its
 * destroy frees what it can.
 */
#ifndef KVBM_TIER_TRANSFER_IO_H
#define KVBM_TIER_TRANSFER_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_transfer.h"

struct kvbm_aio;

struct kvbm_aio_opts {
    size_t size;
    enum kvbm_io io;
    uint32_t depth;     /* requests at the kernel at once, at most 4096; 0: 64 */
    uint32_t n_threads; /* with KVBM_IO_THREADS, at most depth; 0: depth, but at most 32 */
    /* memory to register: where most requests' data lie. Mapped until destroy; NULL: none */
    void *memory;
    uint64_t memory_bytes;
};

/**
 * Create an executor. @opts may be NULL. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no threads);
 * -ENOTSUP (KVBM_IO_URING refused).
 */
int kvbm_aio_create(const struct kvbm_aio_opts *opts, struct kvbm_aio **ret);
/**
 * Wait until all submitted requests are done, and free the executor. NULL is a no-op. Don't call
 * from a callback.
 */
void kvbm_aio_destroy(struct kvbm_aio *aio);
/** Return the executor in use: KVBM_IO_URING or KVBM_IO_THREADS. */
enum kvbm_io kvbm_aio_kind(const struct kvbm_aio *aio);

struct kvbm_aio_stats {
    /* registered part of the memory given; 0: none was given, or the kernel refused */
    uint64_t registered_bytes;
    uint64_t fixed; /* reads and writes that used registered memory */
};
void kvbm_aio_get_stats(struct kvbm_aio *aio, struct kvbm_aio_stats *ret);

enum kvbm_aio_op {
    KVBM_AIO_READ,
    KVBM_AIO_WRITE,
    KVBM_AIO_SYNC, /* fdatasync: covers requests that were done before this submit */
    /* sync_file_range: write the file's dirty pages and wait for them. No barrier: the device's cache
     * and the file's metadata may lack them */
    KVBM_AIO_FLUSH
};

/**
 * A request, in the caller's memory. Don't touch it from submit to done; done may free it or submit
 * it again.
 */
struct kvbm_aio_req {
    enum kvbm_aio_op op;
    bool urgent; /* a caller waits for it: reads that onboard */
    int fd;      /* with O_DIRECT, data, len and offset are multiples of the device's alignment */
    void *data;
    uint64_t len; /* at most 1 GiB */
    uint64_t offset;
    /* reads and writes with KVBM_IO_THREADS: done finds the XXH3-128 of the first sum_len bytes here,
     * if status is 0. io_uring has one thread, and leaves it to the caller. NULL: not wanted */
    uint8_t *sum;
    uint64_t sum_len; /* at most len */
    bool
        cached; /* the file's bytes are in the page cache: sum them in pieces, right behind a copy */
    int status; /* after done: 0: all bytes; -EIO also for a file that ends too early */
    bool ended; /* after done: the failure was the file's end, not the device */
    void (*done)(struct kvbm_aio_req *req);
    void *arg;                 /* for the caller */
    struct kvbm_aio_req *next; /* the list handed to submit; then used by the executor */
    uint64_t moved_;
    uint32_t tries_;
};

/**
 * Queue a list of requests, linked by next, with one wake-up. Never waits: callers bound the number
 * of requests, which are their memory.
 */
void kvbm_aio_submit(struct kvbm_aio *aio, struct kvbm_aio_req *list);

#endif
