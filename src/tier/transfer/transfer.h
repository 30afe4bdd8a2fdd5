// SPDX-License-Identifier: Apache-2.0
/**
 * Inside of the copier (kvbm_transfer.h).
 *
 *   submit ─► checked, planned ─► waiting (ready_fd, ready_event) ─► a lane's queue ─► chunks ─►
 *   done
 *
 * A job's work is a grid: pairs of blocks by layers. A chunk is a rectangle of it, some MiB, and
 * what a thread takes at a time: several threads share a large job, and a more urgent one waits for
 * chunks, not for jobs. Nothing is listed: pieces (address, address, length) are worked out while a
 * chunk is walked.
 *
 * A lane is a queue with those who work on it:
 *
 *   TIER_MEMORY                  n_threads threads, which also call done callbacks; and whoever
 *                                waits for a job
 *   TIER_FILE, TIER_FILE_LATER   a thread each, which hand requests to an I/O executor (io.h):
 *                                onboarding, and offloading, which so never stands in its way
 *   TIER_OUT, TIER_IN            a thread and a stream each: from device memory; and to it
 *
 * The last two pairs are started by the first job that wants them. One lock for all of it; nobody
 * holds it while bytes move or callbacks run. The waiter is a thread that looks after what isn't
 * ready and what is late.
 */
#ifndef KVBM_TIER_TRANSFER_TRANSFER_H
#define KVBM_TIER_TRANSFER_TRANSFER_H

#include <pthread.h>
#include <sys/types.h>

#include "base/thread.h"
#include "bm/layout.h"
#include "kvbm_transfer.h"
#include "kvx_ext.h"

/* ---- what is to be copied (plan.c) ---- */

enum tier_lane { TIER_MEMORY, TIER_FILE, TIER_FILE_LATER, TIER_OUT, TIER_IN, TIER_LANES };

/** Largest unit that is contiguous on both sides: a piece, before neighbours are joined. */
enum tier_grain {
    TIER_BLOCK,   /* all layers of a chunk */
    TIER_LAYER,   /* K and V */
    TIER_REGION,  /* one of the two, or the heads wanted of it */
    TIER_CONVERT, /* nothing: kvx_copy_blocks moves it */
    TIER_NOTHING  /* two layouts without memory */
};

#define TIER_CHUNK_PAIRS 1024u /* at most */

struct tier_plan {
    const struct kvbm_layout *src, *dst;
    enum tier_lane lane;
    enum tier_grain grain;
    uint32_t n; /* pairs */
    uint32_t first_layer, n_layers;
    uint32_t src_head, dst_head, n_heads; /* 0 heads: all */
    bool bits;                            /* elements are copied as they are */
    bool reached; /* one GPU addresses both sides: no pageable memory, no other GPU's */
    bool kernel;  /* pieces too small for copy engines, which KVX can move */
    uint64_t src_skip, dst_skip; /* from a region's begin to the heads wanted */
    uint64_t region_bytes;       /* of the heads wanted, as the target has them */
    /* a chunk: */
    uint32_t pairs, layers;
    uint32_t n_groups; /* of layers */
    uint64_t n_chunks;
};

/**
 * Check @transfer (all of its fields present) and plan it. Returns 0, -EINVAL, -ENOTSUP; the log
 * says why.
 */
int tier_plan_make(const struct kvbm_transfer *transfer, struct tier_plan *ret);

/**
 * No target twice, all ids in range, and in one layout no target that is a source, too. @table is
 * room for tier_table_slots(n) numbers. Returns 0 or -EINVAL.
 */
int tier_plan_check(const struct tier_plan *plan, const uint32_t *src, const uint32_t *dst,
                    uint32_t *table);
size_t tier_table_slots(uint32_t n);

struct tier_chunk {
    struct tier_job *job;
    uint32_t first, n; /* pairs */
    uint32_t first_layer, n_layers;
    uint64_t pieces; /* that it took, for the statistics */
    int err;         /* of all its pairs */
};

struct tier_piece {
    uint64_t src, dst, len; /* addresses or offsets */
    uint32_t src_place, dst_place;
    uint32_t first, n; /* the pairs that it has bytes of */
};

/**
 * Walks over a chunk's pieces, neighbours joined while they are at most @limit bytes (0: however
 * many).
 */
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
 * bytes to it, whatever they are and wherever they lie; what isn't known of one layout is as the
 * other has it.
 */
struct tier_side {
    const struct kvbm_layout_config *config;
    uint64_t addr, block_stride, outer_stride;
    uint32_t n_blocks, n_heads;
    kvx_memory_type_t memory;
    bool bits;
};
void tier_plan_side(const struct tier_plan *plan, bool target, uint32_t layer,
                    struct tier_side *ret);
/** Returns 0 or -ENOTSUP. */
int tier_side_cache(const struct tier_side *side, kvx_cache_desc_t *ret);
int tier_plan_caches(const struct tier_plan *plan, uint32_t layer, kvx_cache_desc_t *src,
                     kvx_cache_desc_t *dst);
/**
 * Copy the plan's heads of @n pairs. Libkvbm has a libkvx of its own, whose helper threads nobody
 * asked for: the calling thread does it. 0, -ENOTSUP, -EINVAL, -EIO.
 */
int tier_convert_caches(const struct tier_plan *plan, const kvx_cache_desc_t *src,
                        const kvx_cache_desc_t *dst, const uint32_t *src_blocks,
                        const uint32_t *dst_blocks, uint32_t n, void *stream);

/* ---- jobs (queue.c; calls.c: what callers do with them) ---- */

enum tier_state {
    TIER_WAITING, /* for its source to be ready */
    TIER_QUEUED,  /* in its lane's heap: has chunks that nobody took */
    TIER_RUNNING, /* all were taken, or are left out */
    TIER_ENDED    /* no byte of it moves; its callback or poll comes next */
};

struct tier_job {
    struct tier_job *next; /* in a list of ended ones */
    uint64_t id, tag, deadline_ns, submitted_ns, started_ns;
    uint32_t slot;
    enum tier_state state;
    enum kvbm_flow flow;
    int32_t priority;
    int status;                   /* why it was stopped, or 0 */
    int err;                      /* of the first block that failed */
    uint32_t err_pair;            /* which one */
    int ready_fd;                 /* ours; -1: none */
    void *ready_event;            /* NULL: none or happened */
    size_t queue_at, deadline_at; /* in the heaps, from 1; 0: not in */
    uint64_t next_chunk, n_flying, bytes;
    uint32_t n_ok;
    uint8_t *ok;
    kvbm_done_fn done;
    void *arg;
    struct kvbm_done result; /* once it ended */
    struct tier_plan plan;
    const uint32_t *src, *dst; /* in numbers */
    uint32_t *left;            /* chunks a pair still has, and TIER_FAILED */
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
    pthread_cond_t work[TIER_LANES]; /* there may be something to do */
    pthread_cond_t told;             /* a job ended, or a waiter left */
    struct tier_job **slots;         /* [max_jobs] */
    uint32_t *free_slots;
    uint32_t n_free;
    uint64_t sequence;
    struct tier_heap queue[TIER_LANES], deadlines;
    struct tier_list calls;  /* ended, to be called */
    struct tier_list ended;  /* ended, to be polled */
    struct tier_list events; /* waiting for a CUDA event */
    uint64_t pause_ns;       /* until these are asked again */
    uint32_t n_live;         /* jobs that haven't ended */
    uint32_t n_calling;      /* callbacks that run */
    uint32_t n_waiters;      /* threads in kvbm_copier_wait */
    bool stopping;           /* no more jobs */
    bool waiter_stops;
    struct kvbm_copier_stats stats;
    struct kv_wake polled; /* while ended has any */
    struct kv_wake wake;   /* the waiter */
    int epoll, timer;
    pthread_t waiter;
    bool waiter_runs;
    pthread_t *threads; /* [n_threads] */
    uint32_t n_started;
    pthread_mutex_t open_lock; /* of the two below: lanes that are opened */
    struct tier_file *file;
    struct tier_cuda *cuda;
};

/* With the lock: */
/** The next chunk of the most urgent job of a lane; of one job. False: there is none. */
bool tier_take(struct kvbm_copier *copier, enum tier_lane lane, struct tier_chunk *ret);
bool tier_take_of(struct kvbm_copier *copier, struct tier_job *job, struct tier_chunk *ret);
/** Pairs [first, first + n) of a chunk in flight aren't whole on the other side. */
void tier_fail_pairs(struct tier_job *job, uint32_t first, uint32_t n, int err);
void tier_chunk_done(struct kvbm_copier *copier, const struct tier_chunk *chunk);
void tier_stop(struct kvbm_copier *copier, struct tier_job *job, int status);
void tier_ready(struct kvbm_copier *copier, struct tier_job *job);
/** Its deadline is watched. */
void tier_expect(struct kvbm_copier *copier, struct tier_job *job);
/** With the lock: nothing is queued, runs, or is to be told by a callback. */
static inline bool tier_is_quiet(const struct kvbm_copier *copier)
{
    return !copier->n_live && !copier->n_calling && !copier->calls.first;
}
/** Free a job and its place, after its result was taken. */
void tier_forget(struct kvbm_copier *copier, struct tier_job *job);
/** Find a job by its id. NULL: no such job, or it has ended. */
struct tier_job *tier_job_of(struct kvbm_copier *copier, uint64_t id);
struct tier_job *tier_find(struct kvbm_copier *copier, uint64_t id);
/** Call one callback; false: there is none to call. The lock is left meanwhile. */
bool tier_call_one(struct kvbm_copier *copier);
/** Call that of a job that has just ended. The lock is left meanwhile. */
void tier_call(struct kvbm_copier *copier, struct tier_job *job);
void tier_list_add(struct tier_list *list, struct tier_job *job);
void tier_list_remove(struct tier_list *list, struct tier_job **at);

int tier_heap_init(struct tier_heap *heap, size_t max);

/* ---- the threads (transfer.c, memory.c, file.c, cuda.c) ---- */

void *tier_memory_thread(void *copier);
/**
 * The calling thread, which waits for a job, copies of it what nobody has taken yet, and calls its
 * callback when that was the last: on an idle machine a sleeping thread wakes later than a small
 * job takes. Nothing is begun after @until_ns.
 */
void tier_help(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns);
void tier_help_locked(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns);

/**
 * Make sure that somebody works on the job's lane, and its event can be asked. 0, -ENOTSUP,
 * -ENOMEM, -EAGAIN.
 */
int tier_lane_open(struct kvbm_copier *copier, const struct tier_job *job);

/* With the lock: */
/** Watch for a job's source to be ready. 0 or an error. */
int tier_watch(struct kvbm_copier *copier, struct tier_job *job, int ready_fd);
void tier_unwatch(struct kvbm_copier *copier, struct tier_job *job);
/** The earliest deadline is another one. */
void tier_rearm(struct kvbm_copier *copier);

int tier_file_open(struct kvbm_copier *copier, struct tier_file **ret);
void tier_file_close(struct tier_file *file); /* nothing is in flight; NULL is a no-op */
/** Open it if it isn't; -ENOTSUP also for a device that there can't be. */
int tier_cuda_open(struct kvbm_copier *copier, const struct tier_plan *plan,
                   struct tier_cuda **ret);
void tier_cuda_close(struct tier_cuda *cuda);
/** Whether the CUDA event that a job waits for has happened: 1, 0, or an error. */
int tier_cuda_happened(void *event, const struct tier_plan *plan);

/** memcpy; past the cache where it is large. */
void tier_copy(void *to, const void *from, size_t len);

#endif
