// SPDX-License-Identifier: Apache-2.0
/**
 * Allocate all memory of an index. The count is what the allocator really uses. Tests can make the
 * n-th request fail.
 *
 * Threads: the owner's lock. Any thread may read the count at any time.
 */
#ifndef KV_INDEX_MEMORY_MEM_H
#define KV_INDEX_MEMORY_MEM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvi_mem {
    _Atomic uint64_t bytes;
    struct kvi_region *regions, *full_regions;
    uint32_t n_free; /* free pages in regions of huge pages */
    /* A region for later, whose memory the kernel has cleared already; NULL: none. */
    struct kvi_region *_Atomic spare;
    _Atomic bool wants_spare;
};

void *kvi_mem_alloc(struct kvi_mem *mem, size_t size); /* zeroed; NULL: out of memory */
/* Zeroed, on a 64-byte boundary; NULL: out of memory. */
void *kvi_mem_alloc_lines(struct kvi_mem *mem, size_t size);
/* Frees memory of either function; NULL is a no-op. */
void kvi_mem_free(struct kvi_mem *mem, void *memory);

/**
 * Map pages of 4 KiB, aligned to @size when that is a power of two (up to 256 KiB). The pages come
 * out of regions of 2 MiB that ask for huge pages, because random access shouldn't cost a page walk
 * each time.
 */
void *kvi_mem_map(struct kvi_mem *mem, size_t size); /* zeroed; NULL: out of memory */
void kvi_mem_unmap(struct kvi_mem *mem, void *memory, size_t size);

/**
 * Map the next region, if it will be needed soon. The kernel clears a huge page for 0.2 ms and more
 * on its first use: without the owner's lock nobody waits for that. Any thread.
 */
void kvi_mem_prepare(struct kvi_mem *mem);
/** Give back what kvi_mem_prepare has mapped. */
void kvi_mem_drop_spare(struct kvi_mem *mem);

/** Return the bytes in use, those of the region that kvi_mem_prepare has mapped, too. Any thread. */
uint64_t kvi_mem_bytes(const struct kvi_mem *mem);

/** Grow *@array to hold @n items of @item_size (doubling; never shrinks). Returns 0 or -ENOMEM. */
int kvi_mem_grow(struct kvi_mem *mem, void **array, size_t *capacity, size_t n, size_t item_size);

/**
 * Make the @n-th request of the process from now on (1: the next) fail once; 0: none. For tests.
 */
void kvi_mem_fail_at(long n);
/** Return true when the request of kvi_mem_fail_at has failed. */
int kvi_mem_failed(void);

/* -- for mem.c and pages.c --------------------------------------------------------------------- */

int kvi_mem_refused(void);
void kvi_mem_count(struct kvi_mem *mem, uint64_t more);

#endif
