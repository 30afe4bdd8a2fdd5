// SPDX-License-Identifier: Apache-2.0
/*
 * Copies to and from GPU memory. Each direction has a thread, with a stream per device. So both
 * directions run at the same time, and urgent copies don't wait behind the other streams.
 *
 *   take a chunk ─► queue its copies on the stream, an event behind them ─► at most DEPTH of these
 *        ▲                                                                        │
 *        └──────────────── sleep until the oldest one's event happened ◄──────────┘
 *
 * Large pieces go to the copy engines, several in a call (cuda_copy.c). Pieces of less than 32 KiB
 * (plan.c) are copied by libkvx_cuda's kernel, all layers of some blocks per launch; the kernel
 * needs pinned host memory.
 *
 * The CUDA driver's library is loaded when the first job needs it, as in bm/storage/cuda.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/core/error.h"
#include "bm/storage/cuda.h"
#include "tier/transfer/cuda.h"

#ifndef TIER_CUDA_DEPTH /* benchmarks vary it */
#define TIER_CUDA_DEPTH 4
#endif
enum { DEPTH = TIER_CUDA_DEPTH };
#define NUMBERS_EACH ((size_t)TIER_CHUNK_PAIRS * 2)
#define MAX_DEVICES 64

#define STREAM_NON_BLOCKING 1u /* CU_STREAM_NON_BLOCKING: waits for no default stream */
#define EVENT_FLAGS 3u         /* CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING */
#define CUDA_NOT_READY 600

#define cuda tier_cuda_calls
#define check tier_cuda_check

/* Make a device current. Returns 0 or -ENOTSUP. */
static int enter(uint32_t device)
{
    return tier_cuda_usable() && kvbm_cuda_enter(device) == 0 ? 0 : -ENOTSUP;
}

/*
 * Return the GPU whose memory a plan uses; GPU 0 when it uses no GPU's (device_id may then be a
 * file's descriptor).
 */
static uint32_t device_of(const struct tier_plan *p)
{
    const struct kvbm_place *s = &p->src->places[0], *d = &p->dst->places[0];
    const struct kvbm_place *place = d->kind == KVBM_STORAGE_DEVICE ? d : s;

    return place->kind == KVBM_STORAGE_DEVICE ? (uint32_t)place->device_id : 0;
}

/* Query an event, in any context that exists: a job between host memories must not create a
 * context. */
int tier_cuda_happened(void *event, const struct tier_plan *plan)
{
    tier_cuda_result code;
    int err;

    if (!tier_cuda_usable() || kvbm_cuda_enter_any(device_of(plan), NULL) < 0)
        return -ENOTSUP;
    code = cuda.event_query(event);
    kvbm_cuda_leave();
    if (code == CUDA_NOT_READY)
        return 0;
    err = check("cuEventQuery", code);
    return err < 0 ? err : 1;
}

/* ---- a direction ---- */

struct flight {
    struct tier_chunk chunk;
    void *event;
    uint32_t *numbers; /* pinned: source blocks, target blocks */
    uint32_t device;
};

struct lane {
    struct kvbm_copier *copier;
    enum tier_lane lane;
    pthread_t thread;
    bool runs, stop;
    bool single;       /* the driver refuses batches of copies */
    uint32_t *numbers; /* pinned; a part for each place in the ring */
    void *streams[MAX_DEVICES];
    struct flight flights[MAX_DEVICES][DEPTH]; /* events belong to a device */
    struct flight *ring[DEPTH];                /* in the order of their begin */
    uint32_t n, first;
    uint32_t used[MAX_DEVICES]; /* number of flights in use, by device */
};

struct tier_cuda {
    struct lane lanes[2];
    uint32_t *numbers; /* of all flights, for the first device that used them */
    size_t mapped;
    uint32_t pinned_by;
    bool pinned;
};

/* Make the events and the stream of a device when it is first used. The device is current. */
static int prepare(struct lane *lane, uint32_t device)
{
    int err = 0;

    if (!lane->streams[device])
        err = check("cuStreamCreate",
                    cuda.stream_create(&lane->streams[device], STREAM_NON_BLOCKING));
    for (int i = 0; err == 0 && i < DEPTH; i++) {
        struct flight *flight = &lane->flights[device][i];

        if (!flight->event)
            err = check("cuEventCreate", cuda.event_create(&flight->event, EVENT_FLAGS));
    }
    return err;
}

/* ---- queueing on a stream ---- */

/* Queue a converting kernel. The block ids stay in memory that the GPU reads until the kernel has
 * ended. */
static int convert(struct flight *flight, void *stream)
{
    struct tier_chunk *chunk = &flight->chunk;
    const struct tier_job *job = chunk->job;
    uint32_t *src = flight->numbers, *dst = src + TIER_CHUNK_PAIRS;

    memcpy(src, job->src + chunk->first, chunk->n * sizeof(*src));
    memcpy(dst, job->dst + chunk->first, chunk->n * sizeof(*dst));
    chunk->pieces += (uint64_t)chunk->n * chunk->n_layers;
    return tier_convert_layers(&job->plan, chunk->first_layer, chunk->n_layers, src, dst, chunk->n,
                               stream);
}

static int put(struct lane *lane, struct flight *flight)
{
    const struct tier_plan *plan = &flight->chunk.job->plan;
    void *stream = lane->streams[flight->device];
    int err, rc;

    if (plan->grain == TIER_CONVERT) {
        err = convert(flight, stream);
    } else {
        err = plan->kernel && lane->copier->gpu_copy == KVBM_GPU_AUTO ? convert(flight, stream)
                                                                      : -ENOTSUP;
        if (err == -ENOTSUP) { /* without libkvx_cuda: slower, same bytes */
            flight->chunk.pieces = 0;
            err = tier_cuda_copy_pieces(&flight->chunk, stream, &lane->single);
        }
    }
    rc = check("cuEventRecord", cuda.event_record(flight->event, stream));
    if (rc < 0) /* pieces queued before must end before the chunk is given up */
        check("cuStreamSynchronize", cuda.stream_sync(stream));
    return err < 0 ? err : rc;
}

/* ---- the thread ---- */

/* Begin a chunk. Its flight is in the ring afterwards, also on failure. Without the lock. */
static void begin(struct lane *lane, const struct tier_chunk *chunk)
{
    uint32_t device = device_of(&chunk->job->plan);
    struct flight *flight = &lane->flights[device][lane->used[device]++ % DEPTH];
    uint32_t at = (lane->first + lane->n++) % DEPTH;
    int err = enter(device);

    lane->ring[at] = flight;
    flight->chunk = *chunk;
    flight->device = device;
    flight->numbers = lane->numbers + NUMBERS_EACH * at;
    if (err == 0) {
        err = prepare(lane, device);
        if (err == 0)
            err = put(lane, flight);
        kvbm_cuda_leave();
    }
    flight->chunk.err = err;
}

/* Wait for the oldest flight of a lane and return its chunk. Without the lock. */
static struct tier_chunk finish(struct lane *lane)
{
    struct flight *flight = lane->ring[lane->first++ % DEPTH];
    int err = enter(flight->device);

    lane->n--;
    if (err == 0) {
        if (flight->event)
            err = check("cuEventSynchronize", cuda.event_sync(flight->event));
        kvbm_cuda_leave();
    }
    if (!flight->chunk.err)
        flight->chunk.err = err;
    return flight->chunk;
}

static void *lane_thread(void *arg)
{
    struct lane *lane = arg;
    struct kvbm_copier *copier = lane->copier;
    struct tier_chunk chunk;

    pthread_mutex_lock(&copier->lock);
    for (;;) {
        if (lane->n < DEPTH && tier_take(copier, lane->lane, &chunk)) {
            pthread_mutex_unlock(&copier->lock);
            begin(lane, &chunk);
            pthread_mutex_lock(&copier->lock);
        } else if (lane->n) {
            pthread_mutex_unlock(&copier->lock);
            chunk = finish(lane);
            pthread_mutex_lock(&copier->lock);
            tier_chunk_done(copier, &chunk);
        } else if (lane->stop) {
            break;
        } else {
            pthread_cond_wait(&copier->work[lane->lane], &copier->lock);
        }
    }
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

/* ---- opening and closing ---- */

static int pin_numbers(struct tier_cuda *c, uint32_t device)
{
    size_t len = NUMBERS_EACH * sizeof(uint32_t) * DEPTH * 2;
    int err;

    c->numbers = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->numbers == MAP_FAILED) {
        c->numbers = NULL;
        return -ENOMEM;
    }
    c->mapped = len;
    err = kvbm_cuda_pin(c->numbers, len);
    c->pinned = err == 0;
    c->pinned_by = device;
    return err;
}

static void close_lane(struct lane *lane)
{
    if (lane->runs)
        tier_lane_join(lane->copier, lane->lane, lane->thread, &lane->stop);
    for (uint32_t device = 0; device < MAX_DEVICES; device++) {
        if (!lane->streams[device] || enter(device) < 0)
            continue;
        for (int i = 0; i < DEPTH; i++) {
            if (lane->flights[device][i].event)
                cuda.event_destroy(lane->flights[device][i].event);
        }
        cuda.stream_destroy(lane->streams[device]);
        kvbm_cuda_leave();
    }
}

void tier_cuda_close(struct tier_cuda *c)
{
    if (!c)
        return;
    for (int i = 0; i < 2; i++)
        close_lane(&c->lanes[i]);
    if (c->pinned && enter(c->pinned_by) == 0) {
        kvbm_cuda_unpin(c->numbers);
        kvbm_cuda_leave();
    }
    if (c->numbers)
        munmap(c->numbers, c->mapped);
    free(c);
}

int tier_cuda_open(struct kvbm_copier *copier, const struct tier_plan *plan, struct tier_cuda **ret)
{
    uint32_t device = device_of(plan);
    struct tier_cuda *c;
    int err;

    if (device >= MAX_DEVICES)
        return -ENOTSUP;
    if (*ret)
        return 0;
    err = enter(device);
    if (err < 0)
        return err;
    c = calloc(1, sizeof(*c));
    err = c ? pin_numbers(c, device) : -ENOMEM;
    kvbm_cuda_leave();
    for (int i = 0; err == 0 && i < 2; i++) {
        struct lane *lane = &c->lanes[i];

        lane->copier = copier;
        lane->single = copier->gpu_copy == KVBM_GPU_SINGLE;
        lane->lane = i ? TIER_IN : TIER_OUT;
        lane->numbers = c->numbers + NUMBERS_EACH * DEPTH * (size_t)i;
        err =
            kv_thread_start(&lane->thread, i ? "kvbm-to-gpu" : "kvbm-from-gpu", lane_thread, lane);
        lane->runs = err == 0;
    }
    if (err < 0) {
        tier_cuda_close(c);
        return err;
    }
    *ret = c;
    return 0;
}
