// SPDX-License-Identifier: Apache-2.0
/* The CUDA driver's functions that storages need. libcuda.so.1 is loaded at the first call: nothing
 * else needs CUDA, at build time or at run time. ABI: the driver API's public symbols, 64 bit. */
#ifndef KVBM_BM_STORAGE_CUDA_H
#define KVBM_BM_STORAGE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/**
 * Make @device's primary context current for this thread. Returns 0 or -ENODEV (no driver, no such
 * device). Until kvbm_cuda_leave, this thread's calls don't disturb a graph that another thread
 * captures.
 */
int kvbm_cuda_enter(uint32_t device);
/**
 * Enter a context for calls that any context can serve. Prefer @device's if this process uses it,
 * then any other that the process uses. Only else make a new one, which takes hundreds of MiB of a
 * GPU. @ret (may be NULL) gets the device.
 */
int kvbm_cuda_enter_any(uint32_t device, uint32_t *ret);
void kvbm_cuda_leave(void);

/* Call between enter and leave. Return 0, -ENOMEM or -EIO. */
int kvbm_cuda_alloc(size_t len, uint64_t *ret);
int kvbm_cuda_free(uint64_t addr);
int kvbm_cuda_pin(void *memory, size_t len); /* whole pages, which children lose at fork() */
int kvbm_cuda_unpin(void *memory);
int kvbm_cuda_zero(uint64_t addr, size_t len);
int kvbm_cuda_to_device(uint64_t to, const void *from, size_t len);
int kvbm_cuda_to_host(void *to, uint64_t from, size_t len);

#endif
