// SPDX-License-Identifier: Apache-2.0
/**
 * The copier's internals (kvbm_transfer.h).
 *
 *   submit ─► check, plan ─► wait (ready_fd, ready_event) ─► a lane's queue ─► chunks ─► done
 *
 * A job's work is a grid: pairs of blocks by layers. A chunk is a rectangle of the grid, some MiB,
 * and the unit that a thread takes. So several threads share a large job, and a more urgent job
 * waits for chunks, not for jobs. Pieces (address, address, length) are computed while a chunk is
 * walked, not listed.
 *
 * A lane is a queue with its threads:
 *
 *   TIER_MEMORY                  n_threads threads, which also call done callbacks; and
 *                                callers that wait for a job
 *   TIER_FILE, TIER_FILE_LATER   a thread each, which hands requests to an I/O executor (io.h):
 *                                onboarding; offloading, which therefore never delays onboarding
 *   TIER_OUT, TIER_IN            a thread and a stream each: from device memory; to device memory
 *
 * The first job that needs one of the last two pairs starts it. One lock guards all state; no
 * thread holds it while bytes are copied or callbacks run. The waiter is a thread that watches
 * ready events and deadlines.
 */
#ifndef KVBM_TIER_TRANSFER_TRANSFER_H
#define KVBM_TIER_TRANSFER_TRANSFER_H

#include <pthread.h>
#include <sys/types.h>

#include "base/thread/thread.h"
#include "bm/storage/layout.h"
#include "kvbm_transfer.h"
#include "kvx_ext.h"

/* ---- the plan (plan.c) ---- */

enum tier_lane { TIER_MEMORY, TIER_FILE, TIER_FILE_LATER, TIER_OUT, TIER_IN, TIER_LANES };

/** Largest unit that is contiguous on both sides: a piece, before neighbours are joined. */
enum tier_grain {
    TIER_BLOCK,   /* all layers of a chunk */
    TIER_LAYER,   /* K and V */
    TIER_REGION,  /* K or V, or the requested heads of one */
    TIER_CONVERT, /* no contiguous unit: kvx_copy_blocks converts */
    TIER_NOTHING  /* both layouts have no memory */
};

#define TIER_CHUNK_PAIRS 1024u /* upper limit for a chunk's pairs */

struct tier_plan {
    const struct kvbm_layout *src, *dst;
    enum tier_lane lane;
    enum tier_grain grain;
    uint32_t n; /* pairs */
    uint32_t first_layer, n_layers;
    uint32_t src_head, dst_head, n_heads; /* 0 heads: all */
    bool bits;                            /* elements are copied unchanged */
    bool reached; /* one GPU can address both sides: no pageable memory, no other GPU's */
    bool kernel;  /* pieces too small for copy engines, which KVX can copy */
    uint64_t src_skip, dst_skip; /* bytes from a region's begin to the requested heads */
    uint64_t region_bytes;       /* bytes of the requested heads in the target */
    /* size of a chunk: */
    uint32_t pairs, layers;
    uint32_t n_groups; /* number of groups of layers */
    uint64_t n_chunks;
};

/**
 * Check @transfer (all fields present) and plan it. Returns 0, -EINVAL or -ENOTSUP; the log has the
 * reason.
 */
int tier_plan_make(const struct kvbm_transfer *transfer, struct tier_plan *ret);

/**
 * Check the block ids: all in range, no target twice, and within one layout no target that is also
 * a source. @table: room for kvbm_ids_slots(n) numbers. Returns 0 or -EINVAL.
 */
int tier_plan_check(const struct tier_plan *plan, const uint32_t *src, const uint32_t *dst,
                    uint32_t *table);

struct tier_chunk {
    struct tier_job *job;
    uint32_t first, n; /* pairs of the job */
    uint32_t first_layer, n_layers;
    uint64_t pieces; /* pieces copied, for the statistics */
    int err;         /* error of all its pairs */
};

struct tier_piece {
    uint64_t src, dst, len; /* src, dst: addresses or offsets in a file */
    uint32_t src_place, dst_place;
    uint32_t first, n; /* pairs that the piece has bytes of */
};

/** Walk over a chunk's pieces. Neighbours are joined up to @limit bytes (0: no limit). */
struct tier_walk {
    const struct tier_plan *plan;
    const uint32_t *src, *dst;
    struct tier_chunk chunk;
    uint64_t limit;
    uint32_t layer, outer, pair;
    bool ended;
};
void tier_walk_begin(struct tier_walk *walk, const struct tier_chunk *chunk, uint64_t limit);
bool tier_walk_next(struct tier_walk *walk, struct tier_piece *ret);

/**
 * One side of a conversion: blocks of one layer, as KVX sees them. Elements that are only moved are
 * bytes to KVX. Properties unknown in one layout are taken from the other.
 */
struct tier_side {
    const struct kvbm_layout_config *config;
    uint64_t addr, block_stride, outer_stride;
    uint32_t n_blocks, n_heads;
    kvx_memory_type_t memory;
    bool bits, halves;
};
void tier_plan_side(const struct tier_plan *plan, bool target, uint32_t layer,
                    struct tier_side *ret);
/** Describe a side as a KVX cache. Returns 0 or -ENOTSUP. */
int tier_side_cache(const struct tier_side *side, kvx_cache_desc_t *ret);
int tier_plan_caches(const struct tier_plan *plan, uint32_t layer, kvx_cache_desc_t *src,
                     kvx_cache_desc_t *dst);
/**
 * Convert the plan's heads of @n pairs on the calling thread, without the helper threads of
 * libkvbm's own copy of libkvx. Returns 0, -ENOTSUP, -EINVAL or -EIO.
 */
int tier_convert_caches(const struct tier_plan *plan, const kvx_cache_desc_t *src,
                        const kvx_cache_desc_t *dst, const uint32_t *src_blocks,
                        const uint32_t *dst_blocks, uint32_t n);
/**
 * The same for layers of the plan's own layouts. On a GPU the work is queued on @stream, up to 32
 * layers in a launch, and reads the block ids until it has ended; NULL: host memory.
 */
int tier_convert_layers(const struct tier_plan *plan, uint32_t first, uint32_t n_layers,
                        const uint32_t *src_blocks, const uint32_t *dst_blocks, uint32_t n,
                        void *stream);

/* ---- jobs (queue.c; calls.c: callers' calls) ---- */

enum tier_state {
    TIER_WAITING, /* until its source is ready */
    TIER_QUEUED,  /* in its lane's heap: has chunks left */
    TIER_RUNNING, /* all chunks are taken or skipped */
    TIER_ENDED    /* no transfer touches its blocks; its callback or poll comes next */
};

struct tier_job {
    struct tier_job *next; /* in a list of ended jobs */
    uint64_t id, tag, deadline_ns, submitted_ns, started_ns;
    uint32_t slot;
    enum tier_state state;
    enum kvbm_flow flow;
    int32_t priority;
    int status;                   /* reason for which it was stopped, or 0 */
    int err;                      /* error of the first block that failed */
    uint32_t err_pair;            /* pair of that block */
    int ready_fd;                 /* a duplicate; -1: none */
    void *ready_event;            /* NULL: none, or it has happened */
    size_t queue_at, deadline_at; /* places in the heaps, from 1; 0: not in */
    uint64_t next_chunk, n_flying, bytes;
    uint32_t n_ok;
    uint8_t *ok;
    kvbm_done_fn done;
    void *arg;
    struct kvbm_done result; /* valid once the job has ended */
    struct tier_plan plan;
    const uint32_t *src, *dst; /* in numbers */
    uint32_t *left;            /* chunks left of each pair, and TIER_FAILED */
    uint32_t numbers[];
};
#define TIER_FAILED (UINT32_C(1) << 31)

struct tier_heap {
    struct tier_job **jobs; /* from 1 */
    size_t n;
};

struct tier_list {
    struct tier_job *first, **last;
};

struct kvbm_copier {
    pid_t owner; /* a child after fork() has none of the threads */
    uint32_t max_jobs, max_blocks, n_threads;
    enum kvbm_io io;
    uint32_t io_depth;
    enum kvbm_gpu_copy gpu_copy;
    pthread_mutex_t lock;
    pthread_cond_t work[TIER_LANES]; /* wakes a lane's threads */
    pthread_cond_t told;             /* signals that a job ended or a waiter left */
    struct tier_job **slots;         /* [max_jobs] */
    uint32_t *free_slots;
    uint32_t n_free;
    uint64_t sequence;
    struct tier_heap queue[TIER_LANES], deadlines;
    struct tier_list calls;  /* ended jobs whose callbacks are due */
    struct tier_list ended;  /* ended jobs to be polled */
    struct tier_list events; /* jobs waiting for a CUDA event */
    uint64_t pause_ns;       /* interval of polling these events */
    uint32_t n_live;         /* jobs that haven't ended */
    uint32_t n_calling;      /* callbacks running */
    uint32_t n_waiters;      /* threads in kvbm_copier_wait */
    bool stopping;           /* submit refuses jobs */
    bool waiter_stops;
    struct kvbm_copier_stats stats;
    struct kv_wake polled; /* readable while `ended` has jobs */
    struct kv_wake wake;   /* wakes the waiter */
    int epoll, timer;
    pthread_t waiter;
    bool waiter_runs;
    pthread_t *threads; /* [n_threads] */
    uint32_t n_started;
    pthread_mutex_t open_lock; /* guards the two below: lanes that are opened */
    struct tier_file *file;
    struct tier_cuda *cuda;
};

/* ---- with the lock ---- */
/**
 * Take the next chunk of a lane's most urgent job, or of one job. Returns false when there is none.
 */
bool tier_take(struct kvbm_copier *copier, enum tier_lane lane, struct tier_chunk *ret);
bool tier_take_of(struct kvbm_copier *copier, struct tier_job *job, struct tier_chunk *ret);
/** Record that pairs [first, first + n) of a chunk in flight weren't copied completely. */
void tier_fail_pairs(struct tier_job *job, uint32_t first, uint32_t n, int err);
void tier_chunk_done(struct kvbm_copier *copier, const struct tier_chunk *chunk);
void tier_stop(struct kvbm_copier *copier, struct tier_job *job, int status);
void tier_ready(struct kvbm_copier *copier, struct tier_job *job);
/** Watch a job's deadline. */
void tier_expect(struct kvbm_copier *copier, struct tier_job *job);
/** True when no job is queued or running and no callback is due. With the lock. */
static inline bool tier_is_quiet(const struct kvbm_copier *copier)
{
    return !copier->n_live && !copier->n_calling && !copier->calls.first;
}
/** Free a job and its slot, after its result was taken. */
void tier_forget(struct kvbm_copier *copier, struct tier_job *job);
/** Find a job by its id. NULL: no such job, or it has ended. */
struct tier_job *tier_job_of(struct kvbm_copier *copier, uint64_t id);
struct tier_job *tier_find(struct kvbm_copier *copier, uint64_t id);
/** Call one callback; false: none is due. Releases the lock during the call. */
bool tier_call_one(struct kvbm_copier *copier);
/** Call the callback of a job that has just ended. Releases the lock during the call. */
void tier_call(struct kvbm_copier *copier, struct tier_job *job);
void tier_list_add(struct tier_list *list, struct tier_job *job);
void tier_list_remove(struct tier_list *list, struct tier_job **at);

int tier_heap_init(struct tier_heap *heap, size_t max);

/* ---- the threads (transfer.c, memory.c, file.c, cuda.c) ---- */

void *tier_memory_thread(void *copier);
/**
 * Help with a job that the calling thread waits for: copy chunks that no thread has taken, and call
 * the callback when the job ends by that. On an idle machine a sleeping thread wakes later than a
 * small job takes. Begins no chunk after @until_ns.
 */
void tier_help(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns);
void tier_help_locked(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns);

/**
 * Start the threads of the job's lane, and make its event pollable. Returns 0, -ENOTSUP, -ENOMEM or
 * -EAGAIN.
 */
int tier_lane_open(struct kvbm_copier *copier, const struct tier_job *job);

/* ---- with the lock ---- */
/** Watch for a job's source to become ready. Returns 0 or an error. */
int tier_watch(struct kvbm_copier *copier, struct tier_job *job, int ready_fd);
void tier_unwatch(struct kvbm_copier *copier, struct tier_job *job);
/** Set the timer to a new earliest deadline. */
void tier_rearm(struct kvbm_copier *copier);

/** Stop the thread of a lane, which returns when it finds @stop set (with the lock), and join it. */
void tier_lane_join(struct kvbm_copier *copier, enum tier_lane lane, pthread_t thread, bool *stop);
int tier_file_open(struct kvbm_copier *copier, struct tier_file **ret);
void tier_file_close(struct tier_file *file); /* call with no request in flight; NULL is a no-op */
/** Open the CUDA lanes unless they are open. -ENOTSUP also for a device that can't exist. */
int tier_cuda_open(struct kvbm_copier *copier, const struct tier_plan *plan,
                   struct tier_cuda **ret);
void tier_cuda_close(struct tier_cuda *cuda);
/** Query the CUDA event that a job waits for: 1 (happened), 0, or an error. */
int tier_cuda_happened(void *event, const struct tier_plan *plan);

/** Copy as memcpy does; large copies bypass the cache. */
void tier_copy(void *to, const void *from, size_t len);

#endif
