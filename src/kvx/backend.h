// SPDX-License-Identifier: Apache-2.0
/**
 * backend.h: what libkvx_cuda exports, and how libkvx finds it.
 *
 * One symbol, kvx_backend_v1, returns a table. The backend gets validated plans with device = 1 and
 * queues work on the stream: it must not wait, allocate device memory, or change the current device
 * after returning, so that a call can be captured into a CUDA graph. Everything in the plan is
 * copied by the time run returns.
 */
#ifndef KVX_BACKEND_H
#define KVX_BACKEND_H

#include "kvx/plan.h"

#define KVX_BACKEND_ABI 1
#define KVX_BACKEND_SYMBOL "kvx_backend_v1"

struct kvx_backend {
    uint32_t size;      /* of this table, as the backend knows it */
    uint32_t abi;       /* KVX_BACKEND_ABI */
    uint32_t plan_size; /* sizeof(struct kvx_plan) */
    const char *name;   /* "cuda" */
    /**
     * Queue @plan on @stream. OK; UNSUPPORTED when this backend has no kernel for it or finds no
     * device; INTERNAL_ERROR when the launch failed. Any thread.
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
 * The backend for device memory, loaded on first use and kept: $KVX_CUDA_LIBRARY when set (ignored
 * in set-user-id programs), then libkvx_cuda.so.0 beside libkvx, then wherever the dynamic linker
 * looks. NULL when there is none or it doesn't fit; the reason is logged once. Thread-safe.
 */
const struct kvx_backend *kvx_backend_get(void);

#endif
