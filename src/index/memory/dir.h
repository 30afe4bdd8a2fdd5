// SPDX-License-Identifier: Apache-2.0
/**
 * Numbers for pointers: a growing array that readers index without locks. Freed numbers are used
 * again.
 *
 * Threads: kvi_dir_get from readers inside an epoch; all other functions under the owner's lock.
 */
#ifndef KV_INDEX_MEMORY_DIR_H
#define KV_INDEX_MEMORY_DIR_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/thread/epoch.h"
#include "index/memory/mem.h"

struct kvi_dir_array {
    struct kv_retired retired;
    uint32_t capacity;
    _Atomic uintptr_t item[]; /* a pointer, or the next free number: n * 2 + 1 */
};

struct kvi_dir {
    struct kvi_dir_array *_Atomic array;
    uint32_t n_used; /* numbers handed out so far, freed ones included */
    uint32_t n_live;
    uint32_t free_head; /* UINT32_MAX: none */
    struct kvi_mem *mem;
    struct kv_limbo *limbo; /* retires outgrown arrays, as @kind */
    unsigned kind;
};

void kvi_dir_init(struct kvi_dir *dir, struct kvi_mem *mem, struct kv_limbo *limbo, unsigned kind);
void kvi_dir_fini(struct kvi_dir *dir);

/** Assign a number below @limit to @pointer. Returns 0, -ENOMEM or -ENOSPC. */
int kvi_dir_add(struct kvi_dir *dir, void *pointer, uint32_t limit, uint32_t *ret);
void kvi_dir_remove(struct kvi_dir *dir, uint32_t number);

/** Return the pointer of a number that is in use. */
static inline void *kvi_dir_at(const struct kvi_dir *dir, uint32_t number)
{
    const struct kvi_dir_array *array = atomic_load_explicit(&dir->array, memory_order_acquire);

    return (void *)atomic_load_explicit(&array->item[number], memory_order_acquire);
}

/**
 * Return the pointer of @number. NULL when the number is free: its pointer was removed after the
 * reader found the number.
 */
static inline void *kvi_dir_get(const struct kvi_dir *dir, uint32_t number)
{
    const struct kvi_dir_array *array = atomic_load_explicit(&dir->array, memory_order_acquire);
    uintptr_t item;

    if (!array || number >= array->capacity)
        return NULL;
    item = atomic_load_explicit(&array->item[number], memory_order_acquire);
    return item & 1 ? NULL : (void *)item;
}

#endif
