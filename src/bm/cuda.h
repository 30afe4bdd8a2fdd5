// SPDX-License-Identifier: Apache-2.0
/*
 * The few calls of the CUDA driver that storages need, found in libcuda.so.1 when the first of them
 * is wanted: nobody else needs CUDA, at build time or at run time. ABI: the driver API's public
 * symbols, 64 bit.
 */
#ifndef KVBM_BM_CUDA_H
#define KVBM_BM_CUDA_H

#include <stddef.h>
#include <stdint.h>

/**
 * Make @device's primary context current for this thread. 0, -ENODEV (no driver, no such device).
 * Until it is left, this thread's calls don't disturb a graph that another one captures.
 */
int kvbm_cuda_enter(uint32_t device);
/**
 * For what any context will do: the one of @device if this process uses that, else of one that it
 * uses, and only else a new one, which takes hundreds of MiB of a GPU that may be another
 * process's. Which one: @ret (may be NULL).
 */
int kvbm_cuda_enter_any(uint32_t device, uint32_t *ret);
void kvbm_cuda_leave(void);

/* Between enter and leave; 0, -ENOMEM, -EIO. */
int kvbm_cuda_alloc(size_t len, uint64_t *ret);
int kvbm_cuda_free(uint64_t addr);
int kvbm_cuda_pin(void *memory,
                  size_t len); /* whole pages, which children don't have after fork() */
int kvbm_cuda_unpin(void *memory);
int kvbm_cuda_zero(uint64_t addr, size_t len);
int kvbm_cuda_to_device(uint64_t to, const void *from, size_t len);
int kvbm_cuda_to_host(void *to, uint64_t from, size_t len);

#endif
