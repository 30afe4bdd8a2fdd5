// SPDX-License-Identifier: Apache-2.0
/*
 * A free run keeps its list links and its size in its own first slot: engines[] holds next << 32 |
 * previous, locals[] the size. Sizes below 16 slots have a class each; above, every power of two
 * has eight.
 */
#include "index/memory/arena.h"

#include "base/core/error.h"

#define EXACT 16u
#define TRIES 4 /* runs of the size's own class to try before a larger class */

static uint32_t class_of(uint32_t n)
{
    uint32_t log2;

    if (n < EXACT)
        return n;
    log2 = 31 - (uint32_t)__builtin_clz(n);
    return EXACT + (log2 - 4) * 8 + ((n >> (log2 - 3)) & 7);
}

static bool bit_get(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> (i % 64) & 1;
}

static void bit_set(uint64_t *bits, uint32_t i)
{
    bits[i / 64] |= UINT64_C(1) << (i % 64);
}

static void bit_clear(uint64_t *bits, uint32_t i)
{
    bits[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

void kvi_arena_init(struct kvi_arena *arena, struct kvi_mem *mem, struct kv_limbo *limbo,
                    unsigned dir_kind)
{
    *arena = (struct kvi_arena){.mem = mem};
    kvi_dir_init(&arena->pages, mem, limbo, dir_kind);
    for (size_t i = 0; i < KVI_SIZE_CLASSES; i++)
        arena->heads[i] = KVI_NO_POS;
}

void kvi_arena_fini(struct kvi_arena *arena)
{
    for (uint32_t i = 0; i < arena->pages.n_used; i++) {
        struct kvi_page *page = kvi_dir_get(&arena->pages, i);

        if (page)
            kvi_mem_unmap(arena->mem, page, KVI_PAGE_BYTES);
    }
    kvi_dir_fini(&arena->pages);
}

uint32_t kvi_arena_size(const struct kvi_arena *arena, uint32_t pos)
{
    const struct kvi_page *page = kvi_arena_page(arena, pos);
    uint32_t slot = kvi_slot_of(pos), next = slot + 1, word = next / 64;
    uint64_t bits;

    if (next == KVI_PAGE_SLOTS)
        return 1;
    bits = page->starts[word] & (~UINT64_C(0) << (next % 64));
    while (!bits && ++word < KVI_PAGE_SLOTS / 64)
        bits = page->starts[word];
    return (bits ? word * 64 + (uint32_t)__builtin_ctzll(bits) : KVI_PAGE_SLOTS) - slot;
}

static void list_add(struct kvi_arena *arena, struct kvi_page *page, uint32_t pos, uint32_t n)
{
    uint32_t slot = kvi_slot_of(pos), list = class_of(n), next = arena->heads[list];

    page->engines[slot] = (uint64_t)next << 32 | KVI_NO_POS;
    page->locals[slot] = n;
    bit_set(page->starts, slot);
    bit_set(page->frees, slot);
    if (next != KVI_NO_POS) {
        uint64_t *links = kvi_arena_engines(arena, next);

        *links = (*links & ~UINT64_C(0xffffffff)) | pos;
    }
    arena->heads[list] = pos;
    bit_set(arena->filled, list);
    arena->n_empty += n == KVI_PAGE_SLOTS;
}

/* Unlink a free run; its bit in starts stays. Returns its size. */
static uint32_t list_remove(struct kvi_arena *arena, struct kvi_page *page, uint32_t pos)
{
    uint32_t slot = kvi_slot_of(pos), n = (uint32_t)page->locals[slot], list = class_of(n);
    uint32_t next = (uint32_t)(page->engines[slot] >> 32), prev = (uint32_t)page->engines[slot];

    if (next != KVI_NO_POS) {
        uint64_t *links = kvi_arena_engines(arena, next);

        *links = (*links & ~UINT64_C(0xffffffff)) | prev;
    }
    if (prev != KVI_NO_POS) {
        uint64_t *links = kvi_arena_engines(arena, prev);

        *links = (*links & 0xffffffff) | (uint64_t)next << 32;
    } else {
        arena->heads[list] = next;
        if (next == KVI_NO_POS)
            bit_clear(arena->filled, list);
    }
    bit_clear(page->frees, slot);
    arena->n_empty -= n == KVI_PAGE_SLOTS;
    return n;
}

static uint32_t find_run(const struct kvi_arena *arena, uint32_t n)
{
    uint32_t list = class_of(n), pos = arena->heads[list];
    uint64_t bits;

    for (int i = 0; i < TRIES && pos != KVI_NO_POS; i++) {
        if (*kvi_arena_locals(arena, pos) >= n)
            return pos;
        pos = (uint32_t)(*kvi_arena_engines(arena, pos) >> 32);
    }
    if (++list < 64) {
        bits = arena->filled[0] & (~UINT64_C(0) << list);
        if (bits)
            return arena->heads[__builtin_ctzll(bits)];
        list = 64;
    }
    bits = list - 64 < 64 ? arena->filled[1] & (~UINT64_C(0) << (list - 64)) : 0;
    return bits ? arena->heads[64 + __builtin_ctzll(bits)] : KVI_NO_POS;
}

static uint32_t add_page(struct kvi_arena *arena)
{
    struct kvi_page *page = kvi_mem_map(arena->mem, KVI_PAGE_BYTES);
    uint32_t number;

    if (!page)
        return KVI_NO_POS;
    if (kvi_dir_add(&arena->pages, page, KVI_MAX_PAGES, &number)) {
        kvi_mem_unmap(arena->mem, page, KVI_PAGE_BYTES);
        return KVI_NO_POS;
    }
    page->number = number;
    list_add(arena, page, number << KVI_PAGE_SHIFT, KVI_PAGE_SLOTS);
    return number << KVI_PAGE_SHIFT;
}

uint32_t kvi_arena_alloc(struct kvi_arena *arena, uint32_t n)
{
    uint32_t pos = find_run(arena, n), size;
    struct kvi_page *page;

    if (pos == KVI_NO_POS)
        pos = add_page(arena);
    if (pos == KVI_NO_POS)
        return pos;
    page = kvi_arena_page(arena, pos);
    size = list_remove(arena, page, pos);
    if (size > n)
        list_add(arena, page, pos + n, size - n);
    return pos;
}

void kvi_arena_free(struct kvi_arena *arena, uint32_t pos)
{
    struct kvi_page *page = kvi_arena_page(arena, pos);
    uint32_t slot = kvi_slot_of(pos), n = kvi_arena_size(arena, pos);

    if (slot + n < KVI_PAGE_SLOTS && bit_get(page->frees, slot + n)) {
        uint32_t more = list_remove(arena, page, pos + n);

        bit_clear(page->starts, slot + n);
        n += more;
    }
    if (slot > 0) {
        uint32_t before = kvi_arena_start(arena, pos - 1);

        if (bit_get(page->frees, kvi_slot_of(before))) {
            bit_clear(page->starts, slot);
            n += list_remove(arena, page, before);
            pos = before;
        }
    }
    list_add(arena, page, pos, n);
}

bool kvi_arena_extend(struct kvi_arena *arena, uint32_t end, uint32_t more)
{
    struct kvi_page *page;
    uint32_t n;

    if (kvi_slot_of(end) >= KVI_PAGE_SLOTS)
        return false;
    page = kvi_arena_page(arena, end);
    if (!bit_get(page->frees, kvi_slot_of(end)) || page->locals[kvi_slot_of(end)] < more)
        return false;
    n = list_remove(arena, page, end);
    bit_clear(page->starts, kvi_slot_of(end));
    if (n > more)
        list_add(arena, page, end + more, n - more);
    return true;
}

void kvi_arena_cut(struct kvi_arena *arena, uint32_t pos)
{
    bit_set(kvi_arena_page(arena, pos)->starts, kvi_slot_of(pos));
}

void kvi_arena_release(struct kvi_arena *arena, uint32_t keep)
{
    while (arena->n_empty > keep) {
        uint32_t pos = arena->heads[class_of(KVI_PAGE_SLOTS)];
        struct kvi_page *page;

        /* The last class also holds runs a little shorter than a page. */
        while (*kvi_arena_locals(arena, pos) != KVI_PAGE_SLOTS)
            pos = (uint32_t)(*kvi_arena_engines(arena, pos) >> 32);
        page = kvi_arena_page(arena, pos);
        list_remove(arena, page, pos);
        kvi_dir_remove(&arena->pages, page->number);
        kvi_mem_unmap(arena->mem, page, KVI_PAGE_BYTES);
    }
}
