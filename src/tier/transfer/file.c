// SPDX-License-Identifier: Apache-2.0
/*
 * Copies between files and host memory. A thread walks chunks and hands each piece to the I/O
 * executor, at most io_depth at a time. A chunk is done when its last piece is. Two such threads,
 * for onboarding and for offloading, have requests of their own, so that urgent reads never queue
 * behind writes.
 *
 * O_DIRECT needs offsets, addresses and lengths in multiples of a page. Layouts should be aligned
 * to 4096; then all pieces are. Other pieces take the slow way, one at a time through a storage's
 * own copies. These read, change and write whole pages, so two at once would overwrite each other's
 * change. Pieces of whole pages share no page with them.
 *
 * Conversions go through a buffer that holds one chunk in the file's layout.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/storage/storage.h"
#include "tier/transfer/io.h"
#include "tier/transfer/transfer.h"

#define PAGE 4096
#define MAX_REQUEST (UINT64_C(64) << 20)

struct flight {
    struct flight *next; /* in the free list */
    struct tier_chunk chunk;
    uint32_t flying; /* requests running, and one for the walk */
};

struct request {
    struct kvbm_aio_req req;
    struct request *next; /* in the free list */
    struct lane *lane;
    struct flight *flight;
    uint32_t first, n; /* pairs of the chunk */
};

struct lane {
    struct kvbm_copier *copier;
    struct tier_file *file;
    enum tier_lane lane;
    pthread_t thread;
    bool runs, stop;
    struct request *requests, *free_requests; /* [io_depth]; with the copier's lock */
    struct flight *flights, *free_flights;    /* [io_depth] */
    uint32_t n_flying;                        /* flights in use */
    char *buffer;                             /* buffer of conversions */
    size_t buffer_len;
};

struct tier_file {
    struct kvbm_aio *aio;
    pthread_mutex_t slow; /* one thread at a time changes parts of pages */
    struct lane lanes[2];
    uint32_t numbers[TIER_CHUNK_PAIRS]; /* 0, 1, 2, ...: block ids of a buffer */
};

static bool reads(const struct tier_plan *p)
{
    return p->src->places[0].kind == KVBM_STORAGE_DISK;
}

/* ---- aligned pieces ---- */

/* Complete a flight whose requests have ended. With the lock. */
static void land(struct lane *lane, struct flight *flight)
{
    if (--flight->flying)
        return;
    tier_chunk_done(lane->copier, &flight->chunk);
    flight->next = lane->free_flights;
    lane->free_flights = flight;
    lane->n_flying--;
    pthread_cond_signal(&lane->copier->work[lane->lane]);
}

static void request_done(struct kvbm_aio_req *req)
{
    struct request *request = req->arg;
    struct lane *lane = request->lane;

    pthread_mutex_lock(&lane->copier->lock);
    if (req->status < 0)
        tier_fail_pairs(request->flight->chunk.job, request->first, request->n, req->status);
    request->next = lane->free_requests;
    lane->free_requests = request;
    pthread_cond_signal(&lane->copier->work[lane->lane]);
    land(lane, request->flight);
    pthread_mutex_unlock(&lane->copier->lock);
}

static void hand_over(struct lane *lane, struct kvbm_aio_req **list)
{
    if (*list)
        kvbm_aio_submit(lane->file->aio, *list);
    *list = NULL;
}

/* Get a free request, or wait for one. Submit those of @list before waiting, or the wait would
 * never end. */
static struct request *get_request(struct lane *lane, struct flight *flight,
                                   struct kvbm_aio_req **list)
{
    struct request *request;

    pthread_mutex_lock(&lane->copier->lock);
    while (!lane->free_requests) {
        pthread_mutex_unlock(&lane->copier->lock);
        hand_over(lane, list);
        pthread_mutex_lock(&lane->copier->lock);
        if (!lane->free_requests)
            pthread_cond_wait(&lane->copier->work[lane->lane], &lane->copier->lock);
    }
    request = lane->free_requests;
    lane->free_requests = request->next;
    flight->flying++;
    pthread_mutex_unlock(&lane->copier->lock);
    return request;
}

/* Queue the requests of a piece, in several parts when it exceeds the limit of one request. */
static void put_piece(struct lane *lane, struct flight *flight, const struct tier_piece *piece,
                      struct kvbm_aio_req **list)
{
    const struct tier_plan *p = &flight->chunk.job->plan;
    const struct kvbm_place *place =
        reads(p) ? &p->src->places[piece->src_place] : &p->dst->places[piece->dst_place];
    uint64_t offset = reads(p) ? piece->src : piece->dst, at = reads(p) ? piece->dst : piece->src;

    for (uint64_t done = 0, len; done < piece->len; done += len) {
        struct request *request = get_request(lane, flight, list);

        len = KV_MIN(piece->len - done, MAX_REQUEST);
        request->flight = flight;
        request->first = piece->first;
        request->n = piece->n;
        request->req = (struct kvbm_aio_req){.op = reads(p) ? KVBM_AIO_READ : KVBM_AIO_WRITE,
                                             .urgent = lane->lane == TIER_FILE && reads(p),
                                             .fd = place->storage->fd,
                                             .data = (void *)(uintptr_t)(at + done),
                                             .len = len,
                                             .offset = offset + done,
                                             .done = request_done,
                                             .arg = request,
                                             .next = *list};
        *list = &request->req;
    }
}

/* ---- the slow way ---- */

static int slow_copy(struct lane *lane, struct kvbm_storage *storage, bool reading, uint64_t offset,
                     void *memory, size_t len)
{
    int err;

    if (reading)
        return kvbm_storage_read(storage, offset, memory, len);
    pthread_mutex_lock(&lane->file->slow);
    err = kvbm_storage_write(storage, offset, memory, len);
    pthread_mutex_unlock(&lane->file->slow);
    return err;
}

static void slow_piece(struct lane *lane, struct flight *flight, const struct tier_piece *piece)
{
    struct tier_job *job = flight->chunk.job;
    const struct tier_plan *p = &job->plan;
    const struct kvbm_place *place =
        reads(p) ? &p->src->places[piece->src_place] : &p->dst->places[piece->dst_place];
    int err =
        slow_copy(lane, place->storage, reads(p), reads(p) ? piece->src : piece->dst,
                  (void *)(uintptr_t)(reads(p) ? piece->dst : piece->src), (size_t)piece->len);

    if (err == 0)
        return;
    pthread_mutex_lock(&lane->copier->lock);
    tier_fail_pairs(job, piece->first, piece->n, err);
    pthread_mutex_unlock(&lane->copier->lock);
}

static void copy_pieces(struct lane *lane, struct flight *flight)
{
    const struct tier_plan *p = &flight->chunk.job->plan;
    const struct kvbm_storage *file = (reads(p) ? p->src : p->dst)->places[0].storage;
    struct kvbm_aio_req *list = NULL;
    struct tier_walk walk;
    struct tier_piece piece;

    tier_walk_begin(&walk, &flight->chunk, 0);
    while (tier_walk_next(&walk, &piece)) {
        flight->chunk.pieces++;
        if (!file->direct || (piece.src | piece.dst | piece.len) % PAGE == 0)
            put_piece(lane, flight, &piece, &list);
        else
            slow_piece(lane, flight, &piece);
    }
    hand_over(lane, &list);
}

/* ---- conversions ---- */

static int make_buffer(struct lane *lane, size_t len)
{
    void *buffer;

    if (len <= lane->buffer_len)
        return 0;
    free(lane->buffer);
    lane->buffer = NULL;
    lane->buffer_len = 0;
    if (posix_memalign(&buffer, PAGE, len) != 0)
        return -ENOMEM;
    lane->buffer = buffer;
    lane->buffer_len = len;
    return 0;
}

/* Copy all regions of a chunk between its file and the buffer: [pair][layer][outer]. */
static int move_buffer(struct lane *lane, const struct tier_chunk *chunk)
{
    const struct tier_plan *p = &chunk->job->plan;
    const struct kvbm_layout *l = reads(p) ? p->src : p->dst;
    const uint32_t *blocks = (reads(p) ? chunk->job->src : chunk->job->dst) + chunk->first;
    uint32_t n_outer = l->config.outer_dim, n = chunk->n * chunk->n_layers * n_outer;
    int err = 0;

    for (uint32_t i = 0; err == 0 && i < n; i++) {
        uint32_t layer = chunk->first_layer + i / n_outer % chunk->n_layers;
        struct kvbm_view view;

        err =
            kvbm_layout_region(l, blocks[i / n_outer / chunk->n_layers], layer, i % n_outer, &view);
        if (err == 0)
            err = slow_copy(lane, l->places[view.storage].storage, reads(p), view.addr,
                            lane->buffer + i * view.len, (size_t)view.len);
    }
    return err;
}

static int convert_layer(struct lane *lane, const struct tier_chunk *chunk, uint32_t i)
{
    const struct tier_plan *p = &chunk->job->plan;
    struct tier_side side[2];
    kvx_cache_desc_t cache[2];
    const uint32_t *blocks[2] = {chunk->job->src + chunk->first, chunk->job->dst + chunk->first};
    int file = reads(p) ? 0 : 1, err = 0;

    for (int k = 0; err == 0 && k < 2; k++) {
        tier_plan_side(p, k == 1, chunk->first_layer + i, &side[k]);
        if (k == file) {
            uint64_t region = (k ? p->dst : p->src)->shape.region_bytes;
            uint64_t layer = region * side[k].config->outer_dim;

            side[k].addr = (uintptr_t)lane->buffer + i * layer;
            side[k].block_stride = layer * chunk->n_layers;
            side[k].outer_stride = region;
            side[k].n_blocks = chunk->n;
            blocks[k] = lane->file->numbers;
        }
        err = tier_side_cache(&side[k], &cache[k]);
    }
    return err < 0 ? err
                   : tier_convert_caches(p, &cache[0], &cache[1], blocks[0], blocks[1], chunk->n);
}

static int convert(struct lane *lane, struct tier_chunk *chunk)
{
    const struct tier_plan *p = &chunk->job->plan;
    const struct kvbm_layout *l = reads(p) ? p->src : p->dst;
    int err = make_buffer(
        lane, (size_t)(l->shape.region_bytes * l->config.outer_dim * chunk->n_layers * chunk->n));

    if (err == 0 && reads(p))
        err = move_buffer(lane, chunk);
    for (uint32_t i = 0; err == 0 && i < chunk->n_layers; i++)
        err = convert_layer(lane, chunk, i);
    if (err == 0 && !reads(p))
        err = move_buffer(lane, chunk);
    chunk->pieces += (uint64_t)chunk->n * chunk->n_layers;
    return err;
}

/* ---- the threads ---- */

static void *lane_thread(void *arg)
{
    struct lane *lane = arg;
    struct kvbm_copier *copier = lane->copier;

    pthread_mutex_lock(&copier->lock);
    for (;;) {
        struct flight *flight = lane->free_flights;

        if (flight && tier_take(copier, lane->lane, &flight->chunk)) {
            lane->free_flights = flight->next;
            lane->n_flying++;
            flight->flying = 1;
            pthread_mutex_unlock(&copier->lock);
            if (flight->chunk.job->plan.grain == TIER_CONVERT)
                flight->chunk.err = convert(lane, &flight->chunk);
            else
                copy_pieces(lane, flight);
            pthread_mutex_lock(&copier->lock);
            land(lane, flight);
        } else if (lane->stop && !lane->n_flying) {
            break;
        } else {
            pthread_cond_wait(&copier->work[lane->lane], &copier->lock);
        }
    }
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

static int open_lane(struct kvbm_copier *copier, struct tier_file *file, int i)
{
    struct lane *lane = &file->lanes[i];
    int err;

    lane->copier = copier;
    lane->file = file;
    lane->lane = i ? TIER_FILE_LATER : TIER_FILE;
    lane->requests = calloc(copier->io_depth, sizeof(*lane->requests));
    lane->flights = calloc(copier->io_depth, sizeof(*lane->flights));
    if (!lane->requests || !lane->flights)
        return -ENOMEM;
    for (uint32_t k = 0; k < copier->io_depth; k++) {
        lane->requests[k].lane = lane;
        lane->requests[k].next = lane->free_requests;
        lane->free_requests = &lane->requests[k];
        lane->flights[k].next = lane->free_flights;
        lane->free_flights = &lane->flights[k];
    }
    err = kv_thread_start(&lane->thread, i ? "kvbm-file-later" : "kvbm-file", lane_thread, lane);
    lane->runs = err == 0;
    return err;
}

int tier_file_open(struct kvbm_copier *copier, struct tier_file **ret)
{
    struct kvbm_aio_opts opts = {.size = sizeof(opts), .io = copier->io, .depth = copier->io_depth};
    struct tier_file *file = calloc(1, sizeof(*file));
    int err;

    if (!file)
        return -ENOMEM;
    pthread_mutex_init(&file->slow, NULL);
    for (uint32_t i = 0; i < TIER_CHUNK_PAIRS; i++)
        file->numbers[i] = i;
    err = kvbm_aio_create(&opts, &file->aio);
    for (int i = 0; err == 0 && i < 2; i++)
        err = open_lane(copier, file, i);
    if (err < 0) {
        tier_file_close(file);
        return err;
    }
    *ret = file;
    return 0;
}

void tier_file_close(struct tier_file *file)
{
    if (!file)
        return;
    for (int i = 0; i < 2; i++) {
        struct lane *lane = &file->lanes[i];

        if (lane->runs)
            tier_lane_join(lane->copier, lane->lane, lane->thread, &lane->stop);
        free(lane->requests);
        free(lane->flights);
        free(lane->buffer);
    }
    kvbm_aio_destroy(file->aio);
    pthread_mutex_destroy(&file->slow);
    free(file);
}
