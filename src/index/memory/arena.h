// SPDX-License-Identifier: Apache-2.0
/**
 * Memory of blocks: 16-byte slots (tokens hash, engine hash) with 32-bit positions as names.
 *
 * An extent is a run of slots inside one page. Its first slot is a header: the engine-hash half of
 * it points to the owner, so that a position leads to its chain without a word per block:
 *
 *     page      locals[]   | .... |  ?  | l0 | l1 | l2 | l3 |  ?  | l0 | ...
 *               engines[]  | .... |own *| e0 | e1 | e2 | e3 |own *| e0 | ...
 *     bitmap    starts     |       1     0    0    0    0    1    0
 *                                  `-- found by scanning back from any position
 *
 * Lists by size class hold the free runs, with a bitmap of the non-empty lists (TLSF). A freed run
 * merges with its free neighbours; pages without an extent go back to the system. A page is exactly
 * 256 KiB.
 *
 * Threads: the owner's lock. Readers inside an epoch may call kvi_arena_locals on extents that they
 * can reach. The caller must let the grace period pass before kvi_arena_free; until then the locals
 * of the extent keep their values.
 */
#ifndef KV_INDEX_MEMORY_ARENA_H
#define KV_INDEX_MEMORY_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/memory/dir.h"

#define KVI_PAGE_SLOTS 16128u
#define KVI_PAGE_SHIFT 14
#define KVI_PAGE_BYTES ((size_t)1 << 18)
#define KVI_MAX_PAGES (1u << (32 - KVI_PAGE_SHIFT))
#define KVI_NO_POS UINT32_MAX
#define KVI_SIZE_CLASSES 96

struct kvi_page {
    uint64_t locals[KVI_PAGE_SLOTS];
    uint64_t engines[KVI_PAGE_SLOTS];
    uint64_t starts[KVI_PAGE_SLOTS / 64]; /* bit per slot: an extent or a free run begins here */
    uint64_t frees[KVI_PAGE_SLOTS / 64];  /* bit per slot: a free run begins here */
    uint32_t number;
    uint32_t reserved[15];
};
_Static_assert(sizeof(struct kvi_page) == KVI_PAGE_BYTES, "a page is a power of two");

struct kvi_arena {
    struct kvi_dir pages;
    struct kvi_mem *mem;
    uint32_t heads[KVI_SIZE_CLASSES]; /* first free run of each size class */
    uint64_t filled[2];               /* bit per size class: the class has a free run */
    uint32_t n_empty;                 /* number of pages without an extent */
};

void kvi_arena_init(struct kvi_arena *arena, struct kvi_mem *mem, struct kv_limbo *limbo,
                    unsigned dir_kind);
void kvi_arena_fini(struct kvi_arena *arena);

/** Allocate @n slots, header included. Returns the position of the header, or KVI_NO_POS. */
uint32_t kvi_arena_alloc(struct kvi_arena *arena, uint32_t n);
void kvi_arena_free(struct kvi_arena *arena, uint32_t pos);
/**
 * Extend the extent that ends before @end by @more slots. Returns false when the slots aren't free.
 */
bool kvi_arena_extend(struct kvi_arena *arena, uint32_t end, uint32_t more);
/** Make the slots from @pos to the end of its extent an extent of their own. */
void kvi_arena_cut(struct kvi_arena *arena, uint32_t pos);
/** Give empty pages back to the system, but keep @keep of them. */
void kvi_arena_release(struct kvi_arena *arena, uint32_t keep);

static inline struct kvi_page *kvi_arena_page(const struct kvi_arena *arena, uint32_t pos)
{
    return kvi_dir_at(&arena->pages, pos >> KVI_PAGE_SHIFT);
}

static inline uint32_t kvi_slot_of(uint32_t pos)
{
    return pos & ((1u << KVI_PAGE_SHIFT) - 1);
}

static inline uint64_t *kvi_arena_locals(const struct kvi_arena *arena, uint32_t pos)
{
    return kvi_arena_page(arena, pos)->locals + kvi_slot_of(pos);
}

static inline uint64_t *kvi_arena_engines(const struct kvi_arena *arena, uint32_t pos)
{
    return kvi_arena_page(arena, pos)->engines + kvi_slot_of(pos);
}

/** Return the page of an address inside its engines[]. */
static inline struct kvi_page *kvi_page_of(const void *address)
{
    return (struct kvi_page *)((uintptr_t)address & ~(uintptr_t)(KVI_PAGE_BYTES - 1));
}

/** Return the position of the header of the extent that contains @pos. */
static inline uint32_t kvi_arena_start(const struct kvi_arena *arena, uint32_t pos)
{
    const struct kvi_page *page = kvi_arena_page(arena, pos);
    uint32_t slot = kvi_slot_of(pos), word = slot / 64;
    uint64_t bits = page->starts[word] & (~UINT64_C(0) >> (63 - slot % 64));

    while (!bits)
        bits = page->starts[--word];
    return (pos - slot) + word * 64 + (63 - (uint32_t)__builtin_clzll(bits));
}

/** Return the number of slots of the extent or free run at @pos. */
uint32_t kvi_arena_size(const struct kvi_arena *arena, uint32_t pos);

#endif
