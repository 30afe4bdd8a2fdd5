// SPDX-License-Identifier: Apache-2.0
/**
 * Memory of one message: allocations that end together, with a limit. A client's message of a few
 * megabytes could else unfold to hundreds: an empty field of 2 bytes is an allocation of 100.
 */
#ifndef KV_EXTPROC_ARENA_H
#define KV_EXTPROC_ARENA_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>

#define KX_ARENA_LIMIT ((size_t)16 << 20)
#define KX_ARENA_KEEP ((size_t)64 << 10) /* bytes of the block that stays between messages */

struct kx_arena_block;

/** Zero-initialise, then kx_arena_init. Thread-confined. */
struct kx_arena {
    ProtobufCAllocator allocator; /* for protobuf-c: allocates here, frees nothing */
    struct kx_arena_block *blocks;
    size_t used; /* of the first block */
    size_t total;
};

void kx_arena_init(struct kx_arena *arena);
/** Free all allocations. */
void kx_arena_reset(struct kx_arena *arena);
void kx_arena_fini(struct kx_arena *arena);

#endif
