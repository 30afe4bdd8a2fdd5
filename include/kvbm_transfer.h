// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_transfer.h: copy blocks from one layout to another, in the background.
 *
 * A transfer is a list of pairs of blocks (or of ranges of their layers and heads) of two layouts.
 * A job is one submitted transfer. A copier holds a bounded number of jobs, and runs each with the
 * executor for its two storages:
 *
 *   memory → memory     threads; plain copies, or kvx_copy_blocks where order, dtype or heads
 *                       differ
 *   memory ↔ file       io_uring (O_DIRECT where the storage uses it), else threads
 *   device ↔ memory,    CUDA streams, one for each direction (the driver is opened on first use);
 *   device ↔ device     libkvx_cuda converts, and needs pinned memory on the host's side
 *
 * File ↔ device is -ENOTSUP: copy through host memory. Two layouts without memory
 * (KVBM_STORAGE_NULL) make a dry run.
 *
 * Order: onboarding jobs before offloading ones, then the higher priority, then the older. The
 * copier copies pieces that are adjacent on both sides as one, and reads no byte of a job before
 * its ready event. It splits a job into chunks of about 2 MiB. Several threads share a large job,
 * and a more urgent job waits for running chunks only.
 *
 * Threads: any function from any thread. Done callbacks run on the copier's threads, which copy
 * nothing meanwhile. They may submit, cancel and poll, but must not wait or destroy. In a child
 * after fork() submit returns -ESHUTDOWN and destroy does nothing. Errors are negative errno
 * values.
 */
#ifndef KVBM_TRANSFER_H
#define KVBM_TRANSFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A copier: a bounded queue of transfers and the threads that run them. */
struct kvbm_copier;

/** Executor of transfers between memory and files. */
enum kvbm_io {
    /* io_uring; threads where the kernel refuses it (logged once), and for a disk tier in the page
     * cache, whose bytes io_uring would copy on one thread */
    KVBM_IO_AUTO,
    KVBM_IO_URING,  /* io_uring; -ENOTSUP where the kernel refuses it */
    KVBM_IO_THREADS /* pread and pwrite */
};

/**
 * Executor of pieces shorter than 32 KiB (256 KiB with a driver before CUDA 12.8) between a GPU and
 * pinned memory. The GPU's copy engines move longer pieces.
 */
enum kvbm_gpu_copy {
    KVBM_GPU_AUTO,    /* libkvx_cuda's kernel on the multiprocessors; without it KVBM_GPU_ENGINES */
    KVBM_GPU_ENGINES, /* many pieces a call; KVBM_GPU_SINGLE with a driver before CUDA 12.8 */
    KVBM_GPU_SINGLE   /* one call for each piece */
};

/** Options of a copier; set size to sizeof(struct kvbm_copier_opts), zero: the default. */
struct kvbm_copier_opts {
    size_t size;
    uint32_t n_threads;  /* threads that copy memory; 0: one per core, at most 8 */
    uint32_t max_jobs;   /* queued and running; 0: 1024 */
    uint32_t max_blocks; /* of all jobs together; 0: 65,536 */
    enum kvbm_io io;
    uint32_t io_depth; /* requests to the kernel at once; 0: 64 */
    enum kvbm_gpu_copy gpu_copy;
};
#define KVBM_COPIER_OPTS_INIT KV_INIT_(kvbm_copier_opts)

/**
 * Create a copier and start its threads. @opts may be NULL. The caller owns *@ret and frees it
 * with kvbm_copier_destroy. Returns 0; -EINVAL (also over 256 threads, 2^20 jobs or depth 4096);
 * -ENOMEM; -EAGAIN (no threads); -EMFILE; -ENOTSUP (KVBM_IO_URING refused).
 */
KV_API int kvbm_copier_create(const struct kvbm_copier_opts *opts, struct kvbm_copier **ret);

/**
 * Stop the copier: refuse new jobs (-ESHUTDOWN), cancel queued ones, wait up to @timeout_ms for
 * running ones. NULL is a no-op. kvbm_copier_poll still returns ended jobs afterwards. Returns
 *   0           no transfer uses any memory, and every done callback has returned; destroy won't
 *               wait
 *   -ETIMEDOUT  a disk or a GPU still uses memory of its jobs' layouts, or a callback hasn't
 *               returned (always when stop is called from one). Keep the copier and that memory;
 *               stop again later
 *   -ECHILD     in a child after fork()
 */
KV_API int kvbm_copier_stop(struct kvbm_copier *copier, uint32_t timeout_ms);

/**
 * Cancel queued jobs, wait for running ones without a limit, call the done callbacks, free the
 * copier. kvbm_copier_stop waits with a limit. NULL is a no-op. Must not be called from a callback.
 */
KV_API void kvbm_copier_destroy(struct kvbm_copier *copier);

/** Direction of a transfer between tiers. */
enum kvbm_flow {
    KVBM_OFFLOAD, /* to a tier further from the device */
    KVBM_ONBOARD  /* to a nearer tier: a request waits for it */
};

/** Result of a job. */
struct kvbm_done {
    uint64_t id, tag;
    /* 0: all blocks; -ECANCELED; -ETIMEDOUT (deadline); -EPIPE (ready_fd was hung up); else the
     * error of the first block that failed. */
    int status;
    uint32_t n;       /* blocks of the job */
    uint32_t n_ok;    /* blocks copied whole */
    uint64_t bytes;   /* bytes copied */
    uint64_t wait_ns; /* from submit to the first byte */
    uint64_t run_ns;  /* from the first byte to the end */
};

/** Take the result of a job, on one of the copier's threads. */
typedef void (*kvbm_done_fn)(void *arg, const struct kvbm_done *done);

/** A transfer; set size to sizeof(struct kvbm_transfer), zero means the default. */
struct kvbm_transfer {
    size_t size;
    /* Required. Layouts and their memory outlive the job; the memory doesn't overlap. Within one
     * layout no block may be source and target. num_heads or dtype that one layout doesn't know is
     * taken to be the other's. */
    const struct kvbm_layout *src, *dst;
    const uint32_t *src_blocks;     /* [n], copied by submit */
    const uint32_t *dst_blocks;     /* [n], each once, copied by submit */
    uint32_t n;                     /* 1 or more */
    uint32_t first_layer, n_layers; /* n_layers 0: all from first_layer on */
    uint32_t src_head, dst_head;    /* first head, in layouts with num_heads */
    uint32_t n_heads;               /* 0: all heads, whose number must be equal on both sides */
    enum kvbm_flow flow;
    int32_t priority;     /* higher ones first */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; chunks not begun by then are left out. 0: none */
    /* Descriptor that becomes readable when the source may be read (an eventfd). The copier keeps a
     * duplicate and doesn't read it. 0 or -1: at once. */
    int ready_fd;
    /* CUDA event (cudaEvent_t) of the source's device, recorded before submit, that must have
     * happened. The copier polls it every 50 us to 1 ms. NULL: none. */
    void *ready_event;
    /* [(n + 7) / 8] bit i: block i was copied whole. The caller's memory, valid until done. NULL:
     * not wanted. */
    uint8_t *ok;
    kvbm_done_fn done; /* gets the result; NULL: kvbm_copier_poll returns it */
    void *arg;         /* of done */
    uint64_t tag;      /* returned in the result */
};
#define KVBM_TRANSFER_INIT KV_INIT_(kvbm_transfer)

/**
 * Queue a job. Never blocks; one allocation, whatever n is.
 *
 * Returns its id > 0. On failure done is not called, and ok may have been cleared:
 *   -EAGAIN     max_jobs or max_blocks is reached
 *   -EINVAL     layouts of different blocks, ids or layers out of range, a target twice, n >
 *               max_blocks
 *   -EBADF      ready_fd
 *   -ENOTSUP    this pair of storages, a conversion that KVX lacks, or no CUDA
 *   -ENOMEM
 *   -ESHUTDOWN  the copier is stopped, or in a child after fork()
 */
KV_API int64_t kvbm_copier_submit(struct kvbm_copier *copier, const struct kvbm_transfer *transfer);

/**
 * Cancel a job: leave out its blocks that aren't begun. It ends when its running chunks have.
 * Returns 0; -ENOENT (no such job, or it has ended).
 */
KV_API int kvbm_copier_cancel(struct kvbm_copier *copier, uint64_t id);

/**
 * Take the results of at most @max ended jobs without a callback, oldest first. A job counts for
 * max_jobs until its result is taken. Returns their number.
 */
KV_API long kvbm_copier_poll(struct kvbm_copier *copier, struct kvbm_done *ret, size_t max);

/**
 * Return a descriptor that is readable while kvbm_copier_poll has results. The copier owns it.
 */
KV_API int kvbm_copier_fd(struct kvbm_copier *copier);

/**
 * Wait up to @timeout_ms for a job without a callback and take its result; @ret may be NULL.
 *
 * The calling thread helps with copies between memory, and so may return one chunk after the
 * timeout. Returns 0; -ETIMEDOUT; -ENOENT (no such job, or poll took its result).
 */
KV_API int kvbm_copier_wait(struct kvbm_copier *copier, uint64_t id, uint32_t timeout_ms,
                            struct kvbm_done *ret);

/** Counters of a copier since its creation. */
struct kvbm_copier_stats {
    size_t size;                                                /* the caller's */
    uint64_t submitted, refused, done, failed, cancelled, late; /* jobs */
    uint64_t blocks, bytes, pieces;                             /* copied; pieces after joining */
    uint64_t jobs_now, blocks_now;                              /* queued and running */
};
#define KVBM_COPIER_STATS_INIT KV_INIT_(kvbm_copier_stats)

/** Read the counters. Returns 0; -EINVAL (NULL, or ret->size is 0); -ECHILD after fork(). */
KV_API int kvbm_copier_get_stats(struct kvbm_copier *copier, struct kvbm_copier_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
