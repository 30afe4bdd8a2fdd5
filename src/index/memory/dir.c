// SPDX-License-Identifier: Apache-2.0
#include "index/memory/dir.h"

#include <errno.h>

#include "base/core/error.h"

#define NO_FREE UINT32_MAX

void kvi_dir_init(struct kvi_dir *dir, struct kvi_mem *mem, struct kv_limbo *limbo, unsigned kind)
{
    *dir = (struct kvi_dir){.free_head = NO_FREE, .mem = mem, .limbo = limbo, .kind = kind};
}

void kvi_dir_fini(struct kvi_dir *dir)
{
    kvi_mem_free(dir->mem, atomic_load_explicit(&dir->array, memory_order_relaxed));
    atomic_store_explicit(&dir->array, NULL, memory_order_relaxed);
}

static int grow(struct kvi_dir *dir, struct kvi_dir_array *old)
{
    uint32_t capacity = old ? old->capacity * 2 : 4;
    struct kvi_dir_array *array;

    array = kvi_mem_alloc(dir->mem, sizeof(*array) + capacity * sizeof(array->item[0]));
    if (!array)
        return -ENOMEM;
    array->capacity = capacity;
    for (uint32_t i = 0; i < dir->n_used; i++)
        atomic_init(&array->item[i], atomic_load_explicit(&old->item[i], memory_order_relaxed));
    atomic_store_explicit(&dir->array, array, memory_order_release);
    if (old)
        kv_limbo_retire(dir->limbo, &old->retired, dir->kind, old->capacity * sizeof(old->item[0]));
    return 0;
}

int kvi_dir_add(struct kvi_dir *dir, void *pointer, uint32_t limit, uint32_t *ret)
{
    struct kvi_dir_array *array = atomic_load_explicit(&dir->array, memory_order_relaxed);
    uint32_t number = dir->free_head;

    if (number == NO_FREE) {
        if (dir->n_used >= limit)
            return -ENOSPC;
        if (!array || dir->n_used == array->capacity) {
            int rc = grow(dir, array);

            if (rc)
                return rc;
            array = atomic_load_explicit(&dir->array, memory_order_relaxed);
        }
        number = dir->n_used++;
    } else {
        dir->free_head =
            (uint32_t)(atomic_load_explicit(&array->item[number], memory_order_relaxed) >> 1);
    }
    dir->n_live++;
    atomic_store_explicit(&array->item[number], (uintptr_t)pointer, memory_order_release);
    *ret = number;
    return 0;
}

void kvi_dir_remove(struct kvi_dir *dir, uint32_t number)
{
    struct kvi_dir_array *array = atomic_load_explicit(&dir->array, memory_order_relaxed);

    if (--dir->n_live == 0) { /* start over, and free an array that once was large */
        dir->n_used = 0;
        dir->free_head = NO_FREE;
        atomic_store_explicit(&dir->array, NULL, memory_order_release);
        kv_limbo_retire(dir->limbo, &array->retired, dir->kind,
                        array->capacity * sizeof(array->item[0]));
        return;
    }
    atomic_store_explicit(&array->item[number], ((uintptr_t)dir->free_head << 1) | 1,
                          memory_order_release);
    dir->free_head = number;
}
