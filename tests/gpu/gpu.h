// SPDX-License-Identifier: Apache-2.0
/** gpu.h: shared by the programs that need a GPU. They exit with 77 without one. */
#ifndef GPU_H
#define GPU_H

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/kvx_cases.h"

#define GPU(call)                                                         \
    do {                                                                  \
        cudaError_t gpu_error = (call);                                   \
        if (gpu_error != cudaSuccess) {                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                    cudaGetErrorString(gpu_error));                       \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

#define MUST(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

/** Ends the program with "skipped" when there is no device to run on. */
static inline void gpu_need(void)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);

    if (error == cudaSuccess && n > 0)
        return;
    printf("skipped: no CUDA device (%s)\n",
           error == cudaSuccess ? "none found" : cudaGetErrorString(error));
    exit(77);
}

/* --------------------------------------------------------------------------------------------- */
/*
 * Memory for kvx_cases.h. Each arena is an allocation of its own, so that a sanitizer sees its end;
 * allocations are kept and reused by size class otherwise, because they are slow.
 */

static struct {
    kvx_memory_type_t memory;
    int exact;  /* no reuse: KVX_GPU_EXACT=1 */
    int pinned; /* UNIFIED: host memory that the device can address, instead of managed memory */
    cudaStream_t stream;
    struct {
        void *at;
        size_t n;
        int used;
    } slot[256];
} gpu_memory;

static inline void *gpu_allocate(size_t n)
{
    void *p = NULL;

    if (gpu_memory.memory == KVX_MEMORY_DEVICE)
        GPU(cudaMalloc(&p, n));
    else if (gpu_memory.pinned)
        GPU(cudaHostAlloc(&p, n, cudaHostAllocMapped));
    else
        GPU(cudaMallocManaged(&p, n, cudaMemAttachGlobal));
    return p;
}

static inline void gpu_free(void *p)
{
    if (gpu_memory.memory != KVX_MEMORY_DEVICE && gpu_memory.pinned)
        GPU(cudaFreeHost(p));
    else
        GPU(cudaFree(p));
}

static inline void *gpu_put(const void *bytes, size_t n)
{
    size_t want = 4096;
    unsigned empty = 256;
    void *p = NULL;

    while (want < n)
        want *= 2;
    for (unsigned i = 0; i < 256 && !gpu_memory.exact && !p; i++) {
        if (gpu_memory.slot[i].at && !gpu_memory.slot[i].used && gpu_memory.slot[i].n == want) {
            gpu_memory.slot[i].used = 1;
            p = gpu_memory.slot[i].at;
        } else if (!gpu_memory.slot[i].at && empty == 256) {
            empty = i;
        }
    }
    if (!p) {
        p = gpu_allocate(gpu_memory.exact ? n : want);
        if (!gpu_memory.exact && empty < 256) {
            gpu_memory.slot[empty].at = p;
            gpu_memory.slot[empty].n = want;
            gpu_memory.slot[empty].used = 1;
        }
    }
    GPU(cudaMemcpyAsync(p, bytes, n, cudaMemcpyDefault, gpu_memory.stream));
    GPU(cudaStreamSynchronize(gpu_memory.stream));
    return p;
}

static inline void gpu_get(void *bytes, const void *placed, size_t n)
{
    GPU(cudaMemcpyAsync(bytes, placed, n, cudaMemcpyDefault, gpu_memory.stream));
    GPU(cudaStreamSynchronize(gpu_memory.stream));
}

static inline void gpu_drop(void *placed)
{
    for (unsigned i = 0; i < 256; i++) {
        if (gpu_memory.slot[i].at == placed) {
            gpu_memory.slot[i].used = 0;
            return;
        }
    }
    gpu_free(placed);
}

/** From now on arenas are of this kind; whatever was kept is freed. */
static inline struct kvx_place_hooks gpu_hooks(kvx_memory_type_t memory, int pinned)
{
    for (unsigned i = 0; i < 256; i++) {
        if (gpu_memory.slot[i].at)
            gpu_free(gpu_memory.slot[i].at);
        gpu_memory.slot[i].at = NULL;
    }
    gpu_memory.memory = memory;
    gpu_memory.pinned = pinned;
    gpu_memory.exact = (int)case_setting("KVX_GPU_EXACT", 0);
    if (!gpu_memory.stream)
        GPU(cudaStreamCreateWithFlags(&gpu_memory.stream, cudaStreamNonBlocking));
    return (struct kvx_place_hooks){memory, gpu_memory.stream, gpu_put, gpu_get, gpu_drop};
}

/* --------------------------------------------------------------------------------------------- */
/* Device memory for several threads: each allocates for itself and copies on its own stream. */

static _Thread_local cudaStream_t gpu_thread_stream;

static inline void *gpu_thread_put(const void *bytes, size_t n)
{
    void *p = NULL;

    GPU(cudaMalloc(&p, n));
    GPU(cudaMemcpyAsync(p, bytes, n, cudaMemcpyDefault, gpu_thread_stream));
    GPU(cudaStreamSynchronize(gpu_thread_stream));
    return p;
}

static inline void gpu_thread_get(void *bytes, const void *from, size_t n)
{
    GPU(cudaMemcpyAsync(bytes, from, n, cudaMemcpyDefault, gpu_thread_stream));
    GPU(cudaStreamSynchronize(gpu_thread_stream));
}

static inline void gpu_thread_drop(void *p)
{
    GPU(cudaFree(p));
}

/** Return hooks whose calls and copies run on @stream. They belong to the calling thread. */
static inline struct kvx_place_hooks gpu_thread_hooks(cudaStream_t stream)
{
    gpu_thread_stream = stream;
    return (struct kvx_place_hooks){KVX_MEMORY_DEVICE, (void *)stream, gpu_thread_put,
                                    gpu_thread_get, gpu_thread_drop};
}

#endif
