// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_transfer.h: copy blocks from one layout to another, in the background.
 *
 * A transfer is a job: pairs of blocks (or of ranges of their layers and heads) of two layouts. A copier
 * holds a bounded number of them and runs them with the executor that fits the two storages:
 *
 *   memory → memory     threads; bytes as they are, or through kvx_copy_blocks where order, dtype or heads
 *                       differ
 *   memory ↔ file       io_uring (O_DIRECT where the storage is), or threads where that isn't allowed
 *   device ↔ memory,    CUDA streams, one for each direction (the driver is opened on first use); converted
 *   device ↔ device     by libkvx_cuda, which wants the host's side pinned
 *
 * Files and devices meet in host memory (-ENOTSUP). Two layouts without memory (KVBM_STORAGE_NULL): a dry run.
 *
 * Order: onboarding jobs before offloading ones, then the higher priority, then the older. Pieces that lie
 * next to each other on both sides are copied as one. Nothing of a job is read before its ready event.
 *
 * A job is done in chunks of some 2 MiB: several threads share a large one, and a more urgent one waits for chunks.
 *
 * Threads: any function from any thread; done callbacks come from the copier's threads, one job at a time
 * each, and may submit, cancel and poll, not wait or destroy. While one runs, its thread copies nothing. A child after
 * fork() has none of the threads: submit is -ESHUTDOWN there, destroy leaves everything alone. Errors are negative
 * errno values.
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

struct kvbm_copier;

enum kvbm_io {
    KVBM_IO_AUTO,   /* io_uring, or threads where the kernel refuses it (said once in the log) */
    KVBM_IO_URING,  /* -ENOTSUP where it is refused */
    KVBM_IO_THREADS /* pread and pwrite */
};

/** Who moves what lies in pieces of less than 256 KiB between a GPU and pinned memory; larger ones: copy engines. */
enum kvbm_gpu_copy {
    KVBM_GPU_AUTO, /* libkvx_cuda's kernel, on the multiprocessors; without it as the next */
    KVBM_GPU_ENGINES, /* copy engines, many pieces a call; with a driver before CUDA 12.8 as the next */
    KVBM_GPU_SINGLE /* copy engines, a call each */
};

struct kvbm_copier_opts {
    size_t size;
    uint32_t n_threads;  /* that copy memory; 0: as many as there are cores, at most 8 */
    uint32_t max_jobs;   /* queued and running; 0: 1024 */
    uint32_t max_blocks; /* of all jobs together; 0: 65,536 */
    enum kvbm_io io;
    uint32_t io_depth; /* requests to the kernel at once; 0: 64 */
    enum kvbm_gpu_copy gpu_copy;
};

/** @opts may be NULL. Returns 0, -EINVAL (also: over 256 threads, 2^20 jobs, depth 4096), -ENOMEM, -EAGAIN (no
 * threads), -EMFILE, -ENOTSUP. */
KV_API int kvbm_copier_create(const struct kvbm_copier_opts *opts, struct kvbm_copier **ret);
/**
 * Stop the copier: refuse new jobs (-ESHUTDOWN), cancel those that wait, and wait up to @timeout_ms for those that run.
 *
 * Returns 0: no transfer uses any memory, and every done callback has returned; destroy won't wait. What poll tells
 * is still to be had. -ETIMEDOUT: a disk or a GPU hasn't answered, and the memory of its jobs' layouts is still in use;
 * or a callback hasn't returned, as when stop is called from one. Stop again later, or keep the copier and that
 * memory. -ECHILD in a fork's child. NULL is a no-op.
 */
KV_API int kvbm_copier_stop(struct kvbm_copier *copier, uint32_t timeout_ms);
/** Cancel what waits, finish what runs, however long that takes (kvbm_copier_stop), tell everybody, stop. NULL is a no-op. Not
 * from a callback. */
KV_API void kvbm_copier_destroy(struct kvbm_copier *copier);

enum kvbm_flow {
    KVBM_OFFLOAD, /* to a slower tier */
    KVBM_ONBOARD  /* somebody waits for it */
};

/** How a job ended. */
struct kvbm_done {
    uint64_t id, tag;
    int status;     /* 0: all blocks; -ECANCELED, -ETIMEDOUT; -EPIPE: ready_fd was hung up; else the
                         first block's error */
    uint32_t n;     /* blocks asked for */
    uint32_t n_ok;  /* of which are whole on the other side */
    uint64_t bytes; /* moved */
    uint64_t wait_ns; /* from submit to the first byte */
    uint64_t run_ns;  /* from there to the end */
};

typedef void (*kvbm_done_fn)(void *arg, const struct kvbm_done *done);

struct kvbm_transfer {
    size_t size;
    /* Required; outlive the job, and so do their bytes, which don't overlap. In one and the same layout no target may
     * be a source, too. What a layout doesn't know (num_heads, dtype), it has like the other. */
    const struct kvbm_layout *src, *dst;
    const uint32_t *src_blocks;     /* [n], copied by submit */
    const uint32_t *dst_blocks;     /* [n], each once, copied by submit */
    uint32_t n;                     /* 1 or more */
    uint32_t first_layer, n_layers; /* 0 layers: all from the first on */
    uint32_t src_head, dst_head;    /* first head, of layouts with num_heads */
    uint32_t n_heads;               /* 0: all, which then are equally many */
    enum kvbm_flow flow;
    int32_t priority;     /* higher ones first */
    uint64_t deadline_ns; /* monotonic; what hasn't begun by then isn't done any more. 0: none */
    /* Not read before this descriptor is readable (an eventfd; the copier keeps a duplicate and doesn't read it);
     * 0 or -1: at once. */
    int ready_fd;
    /* A CUDA event (cudaEvent_t) of the source's device that must have happened, recorded before submit, asked for
     * every 50 us to 1 ms; NULL: none. */
    void *ready_event;
    uint8_t
        *ok; /* [(n + 7) / 8], bit i: block i is whole; the caller's until done. NULL: not told */
    kvbm_done_fn done; /* NULL: kvbm_copier_poll tells */
    void *arg;
    uint64_t tag; /* for the caller */
};

/**
 * Queue a job. Returns its id > 0; -EAGAIN when max_jobs or max_blocks are reached (nothing waits);
 * -EINVAL (layouts of different blocks, block ids or layers out of range, a target twice, more than max_blocks); -EBADF (ready_fd);
 * -ENOTSUP (the pair, a conversion that KVX has no words for, or without CUDA); -ENOMEM; -ESHUTDOWN. One
 * allocation, whatever n is. On failure done isn't called; ok may have been cleared.
 */
KV_API int64_t kvbm_copier_submit(struct kvbm_copier *copier, const struct kvbm_transfer *transfer);

/** Blocks not begun are left out; it is done once no byte of it moves any more. Returns 0 or -ENOENT. */
KV_API int kvbm_copier_cancel(struct kvbm_copier *copier, uint64_t id);

/** Jobs without a callback that ended, oldest first. They count for max_jobs until they are taken. */
KV_API long kvbm_copier_poll(struct kvbm_copier *copier, struct kvbm_done *ret, size_t max);
/** Readable while there are such. The copier's. */
KV_API int kvbm_copier_fd(struct kvbm_copier *copier);
/** Wait for a job without a callback and take it; @ret may be NULL. The calling thread copies along, from memory to
 * memory, and so may be a chunk late. Returns 0, -ETIMEDOUT (0 ms: it hasn't ended),
 * -ENOENT (also when it was polled away meanwhile). */
KV_API int kvbm_copier_wait(struct kvbm_copier *copier, uint64_t id, uint32_t timeout_ms,
                            struct kvbm_done *ret);

struct kvbm_copier_stats {
    size_t size;                                                /* the caller's */
    uint64_t submitted, refused, done, failed, cancelled, late; /* jobs */
    uint64_t blocks, bytes, pieces;                             /* moved; pieces after joining */
    uint64_t jobs_now, blocks_now;                              /* queued and running */
};
/** Returns 0; -EINVAL for a NULL, and for a struct without its size; -ECHILD in a fork's child. */
KV_API int kvbm_copier_get_stats(struct kvbm_copier *copier, struct kvbm_copier_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
