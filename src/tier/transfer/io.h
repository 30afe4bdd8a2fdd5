// SPDX-License-Identifier: Apache-2.0
/**
 * File I/O in the background: reads, writes and barriers of any number of files by one io_uring, or
 * by threads with pread and pwrite where the kernel refuses it (containers often do). Both do the
 * same, so callers never ask which.
 *
 * Order: urgent requests and barriers first, every eighth turn is the others'; within these first
 * come, first served, and several run at once, in any order: what must happen after something else
 * is submitted when that is done. While urgent reads come, only few bytes of writes are given to
 * the kernel at a time, because a device serves what it has been given.
 *
 * Short transfers are continued, EINTR and EAGAIN tried again. A request that has been submitted
 * can't be taken back: memory is the kernel's until done.
 *
 * With io_uring, memory given at creation is pinned once and used by READ_FIXED and WRITE_FIXED
 * instead of being pinned by each request. Where the kernel won't (RLIMIT_MEMLOCK, say), requests
 * are as any other.
 *
 * Threads: any. done callbacks come from the executor's threads (one with io_uring, several
 * otherwise), hold no lock, may submit, and should be short. A child after fork() has no such
 * threads: its submits end at once with -ESHUTDOWN, in the caller's thread, and its destroy frees
 * what it can.
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
    uint32_t depth;     /* requests with the kernel at once, at most 4096; 0: 64 */
    uint32_t n_threads; /* of KVBM_IO_THREADS, at most depth; 0: depth, but no more than 32 */
    void *
        memory; /* to be registered: where most requests' data lie. Mapped until destroy; NULL: none */
    uint64_t memory_bytes;
};

/**
 * @opts may be NULL. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no threads); -ENOTSUP (KVBM_IO_URING
 * refused).
 */
int kvbm_aio_create(const struct kvbm_aio_opts *opts, struct kvbm_aio **ret);
/** Waits until all that was submitted is done. NULL is a no-op. Not from a callback. */
void kvbm_aio_destroy(struct kvbm_aio *aio);
/** Return the executor in use: KVBM_IO_URING or KVBM_IO_THREADS. */
enum kvbm_io kvbm_aio_kind(const struct kvbm_aio *aio);

struct kvbm_aio_stats {
    uint64_t registered_bytes; /* of the memory given; 0: none, or the kernel wouldn't */
    uint64_t fixed;            /* reads and writes handed in that use it */
};
void kvbm_aio_get_stats(struct kvbm_aio *aio, struct kvbm_aio_stats *ret);

enum kvbm_aio_op {
    KVBM_AIO_READ,
    KVBM_AIO_WRITE,
    KVBM_AIO_SYNC /* fdatasync: of what was done before it was submitted */
};

/**
 * The caller's memory, from submit to done not to be touched; done may free it or submit it again.
 */
struct kvbm_aio_req {
    enum kvbm_aio_op op;
    bool urgent; /* somebody waits for it: reads that onboard */
    int fd; /* where it is O_DIRECT, data, len and offset are multiples of what the device asks for */
    void *data;
    uint64_t len; /* up to 1 GiB */
    uint64_t offset;
    int status; /* when done: 0: all of it; -EIO also for a file that ends before */
    bool ended; /* when done: it was the file's end, not the device */
    void (*done)(struct kvbm_aio_req *req);
    void *arg;                 /* the caller's */
    struct kvbm_aio_req *next; /* the list handed to submit; afterwards the executor's */
    uint64_t moved_;
    uint32_t tries_;
};

/** Queue a list of requests, linked by next; one wake-up for all of them. Never waits: how much is queued is the
 * callers' to bound, since it is their memory. */
void kvbm_aio_submit(struct kvbm_aio *aio, struct kvbm_aio_req *list);

#endif
