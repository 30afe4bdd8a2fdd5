// SPDX-License-Identifier: Apache-2.0
/**
 * Large zeroed arrays: reserved at once, backed by pages when touched, by huge pages where
 * available.
 */
#ifndef KVBM_BM_STORAGE_MEMORY_H
#define KVBM_BM_STORAGE_MEMORY_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

/**
 * Reserve @bytes of zeroed memory. The first @dense bytes will all be used, the rest sparsely.
 * @mapped: for kvbm_unmap. Returns NULL when out of address space.
 */
static inline void *kvbm_map_dense(size_t bytes, size_t dense, size_t *mapped)
{
    size_t len = (bytes + 4095) & ~(size_t)4095;
    void *memory =
        mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (memory == MAP_FAILED)
        return NULL;
    dense = (dense + 4095) & ~(size_t)4095;
    /* random access everywhere: without huge pages TLB misses are half the cost */
    if (dense >= 4u << 20)
        madvise(memory, dense, MADV_HUGEPAGE);
    *mapped = len;
    return memory;
}

static inline void *kvbm_map(size_t bytes, size_t *mapped)
{
    return kvbm_map_dense(bytes, bytes, mapped);
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/**
 * Touch memory before it is used, without a lock: a first touch of a huge page under the lock would
 * stop all callers for milliseconds. Changes no byte, even if another thread writes there. Kernels
 * before 5.14 can't; then the first users touch it. Returns 0 or -errno: -EINVAL (kernel),
 * -EFAULT (a later touch would be SIGBUS).
 */
static inline int kvbm_populate(void *memory, size_t bytes)
{
    size_t len = (bytes + 4095) & ~(size_t)4095;

    return bytes && madvise(memory, len, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
}

static inline void kvbm_unmap(void *memory, size_t mapped)
{
    if (memory)
        munmap(memory, mapped);
}

/**
 * Return the bytes that this process could touch now without being killed for lack of memory. The
 * least of two figures: the machine's available memory with swap, and the room of its cgroup and
 * the groups above (versions 1 and 2). Files that can't be read limit nothing. @root: where /proc
 * and /sys are, "" except in tests.
 */
uint64_t kvbm_memory_available(const char *root);

/**
 * Return the same estimate for a NUMA node: its free memory, reclaimable file pages and caches, and
 * swap. UINT64_MAX when the kernel has no figures.
 */
uint64_t kvbm_node_available(const char *root, uint32_t node);

/**
 * True when @bytes are available; otherwise log that, with @what as purpose. Small amounts always
 * pass, as checking would cost more. Reserves nothing: concurrent callers get the same answer.
 */
bool kvbm_memory_is_there(uint64_t bytes, const char *what);
/** As kvbm_memory_is_there, for a NUMA node. */
bool kvbm_node_has(uint64_t bytes, uint32_t node, const char *what);

#endif
