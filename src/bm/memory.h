// SPDX-License-Identifier: Apache-2.0
/** Large zeroed arrays: reserved at once, given pages as they are touched, huge ones where there are any. */
#ifndef KVBM_BM_MEMORY_H
#define KVBM_BM_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

/**
 * NULL when out of address space. *@mapped is what kvbm_unmap wants to know. Of the @bytes, the
 * first @dense will all be used, the rest here and there.
 */
static inline void *kvbm_map_dense(size_t bytes, size_t dense, size_t *mapped)
{
    size_t len = (bytes + 4095) & ~(size_t)4095;
    void *memory =
        mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (memory == MAP_FAILED)
        return NULL;
    dense = (dense + 4095) & ~(size_t)4095;
    if (dense >= 4u << 20) /* random access all over it: misses of the TLB are half the cost */
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
 * Touch it now, without a lock: a huge page that is touched first under the lock stops all for
 * milliseconds. Changes no byte of it, nor of what may lie there by now. A kernel that can't
 * (before 5.14) leaves it to those who come.
 */
static inline void kvbm_populate(void *memory, size_t bytes)
{
    if (bytes)
        madvise(memory, (bytes + 4095) & ~(size_t)4095, MADV_POPULATE_WRITE);
}

static inline void kvbm_unmap(void *memory, size_t mapped)
{
    if (memory)
        munmap(memory, mapped);
}

/**
 * Bytes that this process could touch now without a visit of the out-of-memory killer: the least of
 * what the machine has available (and swap), and of what its cgroup and those above leave it,
 * versions 1 and 2. What can't be read limits nothing. @root: where /proc and /sys are, "" but in
 * tests.
 */
uint64_t kvbm_memory_available(const char *root);

/**
 * The same of what is bound to a NUMA node: free there, or file pages and caches that give way, and
 * swap. The kernel tells no better estimate of a node. UINT64_MAX when it tells nothing.
 */
uint64_t kvbm_node_available(const char *root, uint32_t node);

/**
 * Whether @bytes can be had, @what for; if not, the log says so. What is little is never refused:
 * to ask costs more. Nothing is reserved by it: who comes at the same time is told the same.
 */
bool kvbm_memory_is_there(uint64_t bytes, const char *what);
/** The same on a node. */
bool kvbm_node_has(uint64_t bytes, uint32_t node, const char *what);

#endif
