// SPDX-License-Identifier: Apache-2.0
#include "extproc/arena.h"

#include <stdlib.h>

#include "base/core/error.h"

struct kx_arena_block {
    struct kx_arena_block *next;
    size_t size;
    max_align_t data[];
};

static void *take(void *arg, size_t size)
{
    struct kx_arena *a = arg;
    struct kx_arena_block *block = a->blocks;
    void *at;

    if (size > KX_ARENA_LIMIT)
        return NULL;
    size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!block || block->size - a->used < size) {
        size_t room = KV_MAX(size, KX_ARENA_KEEP);

        if (a->total + room > KX_ARENA_LIMIT)
            return NULL;
        block = malloc(sizeof(*block) + room);
        if (!block)
            return NULL;
        block->size = room;
        block->next = a->blocks;
        a->blocks = block;
        a->total += room;
        a->used = 0;
    }
    at = (char *)block->data + a->used;
    a->used += size;
    return at;
}

static void leave(void *arg, void *pointer)
{
    (void)arg, (void)pointer;
}

void kx_arena_init(struct kx_arena *arena)
{
    arena->allocator = (ProtobufCAllocator){.alloc = take, .free = leave, .allocator_data = arena};
}

void kx_arena_reset(struct kx_arena *arena)
{
    /* The oldest block stays, so that usual messages allocate nothing. */
    while (arena->blocks && (arena->blocks->next || arena->blocks->size > KX_ARENA_KEEP)) {
        struct kx_arena_block *block = arena->blocks;

        arena->blocks = block->next;
        arena->total -= block->size;
        free(block);
    }
    arena->used = 0;
}

void kx_arena_fini(struct kx_arena *arena)
{
    kx_arena_reset(arena);
    free(arena->blocks);
    arena->blocks = NULL;
    arena->total = 0;
}
