// SPDX-License-Identifier: Apache-2.0
/**
 * Functions of the CUDA driver for the GPU lanes, and queueing pieces on a stream (cuda_copy.c).
 * ABI: the driver API's public symbols, 64 bit.
 */
#ifndef KVBM_TIER_TRANSFER_CUDA_H
#define KVBM_TIER_TRANSFER_CUDA_H

#include "tier/transfer/transfer.h"

typedef int tier_cuda_result; /* CUresult */

/**
 * CUmemcpyAttributes. Locations are hints for memory that migrates; the copier's memory doesn't, so
 * all are zero.
 */
struct tier_cuda_attributes {
    int source_order;
    struct {
        int type, id;
    } source, target;
    unsigned flags;
};

struct tier_cuda_calls {
    tier_cuda_result (*stream_create)(void **ret, unsigned flags);
    tier_cuda_result (*stream_destroy)(void *stream);
    tier_cuda_result (*stream_sync)(void *stream);
    tier_cuda_result (*copy)(uint64_t to, uint64_t from, size_t len, void *stream);
    tier_cuda_result (*event_create)(void **ret, unsigned flags);
    tier_cuda_result (*event_destroy)(void *event);
    tier_cuda_result (*event_record)(void *event, void *stream);
    tier_cuda_result (*event_query)(void *event);
    tier_cuda_result (*event_sync)(void *event);
    /* Many copies in one call: CUDA 13 has `batch`, 12.8 and later the second form; NULL: older
     * driver. */
    tier_cuda_result (*batch)(uint64_t *to, uint64_t *from, size_t *len, size_t n,
                              struct tier_cuda_attributes *attributes, size_t *first,
                              size_t n_attributes, void *stream);
    tier_cuda_result (*batch_12)(uint64_t *to, uint64_t *from, size_t *len, size_t n,
                                 struct tier_cuda_attributes *attributes, size_t *first,
                                 size_t n_attributes, size_t *ret_failed, void *stream);
};
/** Valid once tier_cuda_usable() has returned true. */
extern struct tier_cuda_calls tier_cuda_calls;

/** Find the driver, once per process. False: none, or too old. */
bool tier_cuda_usable(void);

/** True when one call of the driver copies many pieces (CUDA 12.8). */
bool tier_cuda_batches(void);

/** Convert a driver result to 0, -ENOMEM or -EIO. Logs failures, at most 5 a second. */
int tier_cuda_check(const char *call, tier_cuda_result code);

/**
 * Queue a chunk's pieces on @stream: many per call, or one per call where batches are refused.
 * @single: use one per call; set when the driver has refused a batch. Returns 0 or an error; after
 * an error some copies may be running.
 */
int tier_cuda_copy_pieces(struct tier_chunk *chunk, void *stream, bool *single);

#endif
