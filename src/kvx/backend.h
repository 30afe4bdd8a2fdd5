// SPDX-License-Identifier: Apache-2.0
/**
 * backend.h: the table that libkvx_cuda exports, and how libkvx finds it.
 *
 * One symbol, kvx_backend_v1, returns the table. The backend gets validated plans with device = 1
 * and queues work on the stream. It must not wait, allocate device memory, or leave another current
 * device, so that a call can be captured into a CUDA graph. It has copied the whole plan when run
 * returns.
 */
#ifndef KVX_BACKEND_H
#define KVX_BACKEND_H

#include "kvx/plan.h"

#define KVX_BACKEND_ABI 1
#define KVX_BACKEND_SYMBOL "kvx_backend_v1"

struct kvx_backend {
    uint32_t size;      /* size of this table in the backend's version */
    uint32_t abi;       /* KVX_BACKEND_ABI */
    uint32_t plan_size; /* sizeof(struct kvx_plan) */
    const char *name;   /* "cuda" */
    /**
     * Queue @plan on @stream. Returns OK; UNSUPPORTED when this backend has no kernel for the plan
     * or finds no device; INTERNAL_ERROR when the launch failed. Any thread.
     */
    kvx_status_t (*run)(const struct kvx_plan *plan, void *stream);
};

typedef const struct kvx_backend *(*kvx_backend_fn)(void);

#ifdef __cplusplus
extern "C"
#endif
    KVX_API const struct kvx_backend *
    kvx_backend_v1(void);

/**
 * Return the backend for device memory, loaded on first use and kept. Looks for $KVX_CUDA_LIBRARY
 * (ignored in set-user-id programs), then libkvx_cuda.so.0 beside libkvx or the program that has
 * this code, then in ../lib beside it (neither in set-user-id programs, nor of a libkvx opened by a relative path), then along the dynamic
 * linker's path. NULL when there is none or its version doesn't fit; the reason is logged once.
 * Thread-safe.
 */
const struct kvx_backend *kvx_backend_get(void);

#endif
