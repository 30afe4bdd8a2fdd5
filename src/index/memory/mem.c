// SPDX-License-Identifier: Apache-2.0
#include "index/memory/mem.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

#define CHUNK_HEADER 8 /* bytes that glibc adds in front of each allocation */

static _Atomic long countdown;

void kvi_mem_fail_at(long n)
{
    atomic_store_explicit(&countdown, n, memory_order_relaxed);
}

int kvi_mem_failed(void)
{
    return atomic_load_explicit(&countdown, memory_order_relaxed) < 0;
}

int kvi_mem_refused(void)
{
    long left = atomic_load_explicit(&countdown, memory_order_relaxed);

    if (KV_LIKELY(left <= 0))
        return 0;
    left = left == 1 ? -1 : left - 1;
    atomic_store_explicit(&countdown, left, memory_order_relaxed);
    return left < 0;
}

/* Only one writer at a time: no read-modify-write needed. */
void kvi_mem_count(struct kvi_mem *mem, uint64_t more)
{
    uint64_t now = atomic_load_explicit(&mem->bytes, memory_order_relaxed);

    atomic_store_explicit(&mem->bytes, now + more, memory_order_relaxed);
}

void *kvi_mem_alloc(struct kvi_mem *mem, size_t size)
{
    void *memory = kvi_mem_refused() ? NULL : calloc(1, size);

    if (memory)
        kvi_mem_count(mem, malloc_usable_size(memory) + CHUNK_HEADER);
    return memory;
}

void *kvi_mem_alloc_lines(struct kvi_mem *mem, size_t size)
{
    void *memory = kvi_mem_refused() ? NULL : aligned_alloc(64, (size + 63) & ~(size_t)63);

    if (memory) {
        memset(memory, 0, size);
        kvi_mem_count(mem, malloc_usable_size(memory) + CHUNK_HEADER);
    }
    return memory;
}

void kvi_mem_free(struct kvi_mem *mem, void *memory)
{
    if (memory)
        kvi_mem_count(mem, -(uint64_t)(malloc_usable_size(memory) + CHUNK_HEADER));
    free(memory);
}

int kvi_mem_grow(struct kvi_mem *mem, void **array, size_t *capacity, size_t n, size_t item_size)
{
    size_t more = KV_MAX(*capacity * 2, KV_MAX(n, (size_t)16));
    void *grown;

    if (n <= *capacity)
        return 0;
    grown = kvi_mem_alloc(mem, more * item_size);
    if (!grown)
        return -ENOMEM;
    if (*array)
        memcpy(grown, *array, *capacity * item_size);
    kvi_mem_free(mem, *array);
    *array = grown;
    *capacity = more;
    return 0;
}
