// SPDX-License-Identifier: Apache-2.0
/**
 * All memory of an index comes from here: counted as the allocator really spends it, and refusable
 * at the n-th request so that tests can try every failure.
 *
 * Threads: the owner's lock. The count may be read at any time.
 */
#ifndef KV_INDEX_MEM_H
#define KV_INDEX_MEM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct kvi_mem {
    _Atomic uint64_t bytes;
    struct kvi_region *regions, *full_regions;
};

void *kvi_mem_alloc(struct kvi_mem *mem, size_t size);       /* zeroed; NULL when there is none */
void *kvi_mem_alloc_lines(struct kvi_mem *mem, size_t size); /* the same, on a 64-byte boundary */
void kvi_mem_free(struct kvi_mem *mem, void *memory);        /* either of them; NULL is a no-op */

/**
 * Whole pages of 4 KiB, aligned to @size when that is a power of two (up to 256 KiB), out of
 * regions of 2 MiB that ask for huge pages: what is looked up at random shouldn't cost a page walk
 * each time.
 */
void *kvi_mem_map(struct kvi_mem *mem, size_t size); /* zeroed; NULL when there is none */
void kvi_mem_unmap(struct kvi_mem *mem, void *memory, size_t size);

/** Grow *@array to hold @n items of @item_size (doubling; never shrinks). Returns 0 or -ENOMEM. */
int kvi_mem_grow(struct kvi_mem *mem, void **array, size_t *capacity, size_t n, size_t item_size);

/** For tests: the @n-th request from now (1: the next) fails, once; 0: none. Of the whole process.
 */
void kvi_mem_fail_at(long n);
/** Whether that failure has happened. */
int kvi_mem_failed(void);

/* -- for mem.c and pages.c --------------------------------------------------------------------- */

int kvi_mem_refused(void);
void kvi_mem_count(struct kvi_mem *mem, uint64_t more);

#endif
