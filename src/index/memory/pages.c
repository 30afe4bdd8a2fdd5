// SPDX-License-Identifier: Apache-2.0
/*
 * Allocate runs of pages. A region is 2 MiB, aligned to its size; its first page keeps a bit for
 * each of its 512 pages. The first region of an index is backed page by page, so that small indexes
 * stay small. Later regions are huge pages, and count in full.
 */
#include <string.h>
#include <sys/mman.h>

#include "base/core/error.h"
#include "index/memory/mem.h"

#define PAGE_BYTES ((size_t)4096)
#define REGION_BYTES ((size_t)2 << 20)
#define REGION_PAGES 512u
#define FEW_PAGES 128u /* free pages below which the next region is prepared */
/* Longer runs of bytes go back to the system even while their region stays. */
#define DONT_KEEP ((size_t)1 << 18)

struct kvi_region {
    struct kvi_region *next, *prev;
    uint32_t n_used;
    uint32_t longest; /* upper bound of the longest free run */
    uint32_t huge;
    uint32_t n_touched; /* pages from this one on were never used: they are zero */
    uint64_t used[REGION_PAGES / 64];
};

static int page_used(const struct kvi_region *region, uint32_t i)
{
    return region->used[i / 64] >> (i % 64) & 1;
}

static void set_used(struct kvi_region *region, uint32_t from, uint32_t n, int used)
{
    for (uint32_t i = from; i < from + n; i++) {
        if (used)
            region->used[i / 64] |= UINT64_C(1) << (i % 64);
        else
            region->used[i / 64] &= ~(UINT64_C(1) << (i % 64));
    }
    region->n_used += used ? n : -n;
}

static void unlink_region(struct kvi_region **list, struct kvi_region *region)
{
    if (region->prev)
        region->prev->next = region->next;
    else
        *list = region->next;
    if (region->next)
        region->next->prev = region->prev;
}

static void link_region(struct kvi_region **list, struct kvi_region *region)
{
    region->prev = NULL;
    region->next = *list;
    if (region->next)
        region->next->prev = region;
    *list = region;
}

/*
 * Append the region: small runs first fill the holes in older regions before they break up a fresh
 * one.
 */
static void append_region(struct kvi_region **list, struct kvi_region *region)
{
    struct kvi_region *last = NULL;

    while (*list) {
        last = *list;
        list = &last->next;
    }
    *list = region;
    region->next = NULL;
    region->prev = last;
}

/* Map 2 MiB at a multiple of 2 MiB. Returns NULL without memory. */
static struct kvi_region *map_region(void)
{
    char *wide =
        mmap(NULL, 2 * REGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t before;

    if (wide == MAP_FAILED)
        return NULL;
    before = -(uintptr_t)wide & (REGION_BYTES - 1);
    if (before)
        munmap(wide, before);
    munmap(wide + before + REGION_BYTES, REGION_BYTES - before);
    return (struct kvi_region *)(void *)(wide + before);
}

static struct kvi_region *map_huge(void)
{
    struct kvi_region *region = map_region();

    if (region) /* the kernel may refuse huge pages; access is slower then */
        (void)madvise(region, REGION_BYTES, MADV_HUGEPAGE);
    return region;
}

static struct kvi_region *take_spare(struct kvi_mem *mem)
{
    return atomic_exchange_explicit(&mem->spare, NULL, memory_order_acquire);
}

void kvi_mem_prepare(struct kvi_mem *mem)
{
    struct kvi_region *none = NULL, *region;

    if (!atomic_load_explicit(&mem->wants_spare, memory_order_relaxed) ||
        !atomic_exchange_explicit(&mem->wants_spare, false, memory_order_relaxed))
        return;
    region = map_huge();
    if (!region)
        return;
    region->n_touched = 1; /* the first write, for which the kernel clears the page */
    if (!atomic_compare_exchange_strong_explicit(&mem->spare, &none, region, memory_order_release,
                                                 memory_order_relaxed))
        munmap(region, REGION_BYTES);
}

void kvi_mem_drop_spare(struct kvi_mem *mem)
{
    struct kvi_region *region = take_spare(mem);

    atomic_store_explicit(&mem->wants_spare, false, memory_order_relaxed);
    if (region)
        munmap(region, REGION_BYTES);
}

uint64_t kvi_mem_bytes(const struct kvi_mem *mem)
{
    const struct kvi_region *spare = atomic_load_explicit(&mem->spare, memory_order_relaxed);

    return atomic_load_explicit(&mem->bytes, memory_order_relaxed) + (spare ? REGION_BYTES : 0);
}

static struct kvi_region *new_region(struct kvi_mem *mem)
{
    bool huge = mem->regions || mem->full_regions;
    struct kvi_region *region = huge ? take_spare(mem) : map_region();

    if (huge && !region)
        region = map_huge();
    if (!region)
        return NULL;
    region->huge = huge;
    kvi_mem_count(mem, huge ? REGION_BYTES : PAGE_BYTES);
    mem->n_free += huge ? REGION_PAGES - 1 : 0;
    region->n_touched = 1;
    region->longest = REGION_PAGES;
    set_used(region, 0, 1, 1);
    append_region(&mem->regions, region);
    return region;
}

/* Note that @n more pages of the region are used. */
static void note_used(struct kvi_mem *mem, const struct kvi_region *region, uint32_t n)
{
    if (!region->huge) {
        kvi_mem_count(mem, n * PAGE_BYTES);
        return;
    }
    mem->n_free -= n;
    if (mem->n_free < FEW_PAGES && !atomic_load_explicit(&mem->spare, memory_order_relaxed))
        atomic_store_explicit(&mem->wants_spare, true, memory_order_relaxed);
}

/* Return the first free run of @n pages at a multiple of @align, or 0. */
static uint32_t find_run(struct kvi_region *region, uint32_t n, uint32_t align)
{
    uint32_t longest = 0, free = 0;

    if (n > region->longest)
        return 0;
    for (uint32_t i = 0; i < REGION_PAGES; i++) {
        if (region->used[i / 64] == ~UINT64_C(0)) {
            free = 0;
            i |= 63;
            continue;
        }
        free = page_used(region, i) ? 0 : free + 1;
        longest = KV_MAX(longest, free);
        if (free >= n && (i + 1 - n) % align == 0)
            return i + 1 - n;
    }
    region->longest = longest; /* ignores alignment: an upper bound is enough */
    return 0;
}

void *kvi_mem_map(struct kvi_mem *mem, size_t size)
{
    uint32_t n = (uint32_t)((size + PAGE_BYTES - 1) / PAGE_BYTES), at = 0;
    uint32_t align = n && (n & (n - 1)) == 0 ? n : 1;
    struct kvi_region *region;
    char *memory;

    if (kvi_mem_refused())
        return NULL;
    for (region = mem->regions; region; region = region->next)
        if ((at = find_run(region, n, align)) != 0)
            break;
    if (!region) {
        region = new_region(mem);
        if (!region)
            return NULL;
        at = find_run(region, n, align);
    }
    memory = (char *)region + at * PAGE_BYTES;
    if (at < region->n_touched)
        memset(memory, 0, (KV_MIN(at + n, region->n_touched) - at) * PAGE_BYTES);
    region->n_touched = KV_MAX(region->n_touched, at + n);
    set_used(region, at, n, 1);
    note_used(mem, region, n);
    if (region->n_used == REGION_PAGES) {
        unlink_region(&mem->regions, region);
        link_region(&mem->full_regions, region);
    }
    return memory;
}

void kvi_mem_unmap(struct kvi_mem *mem, void *memory, size_t size)
{
    struct kvi_region *region =
        (struct kvi_region *)((uintptr_t)memory & ~(uintptr_t)(REGION_BYTES - 1));
    uint32_t at = (uint32_t)(((uintptr_t)memory - (uintptr_t)region) / PAGE_BYTES);
    uint32_t n = (uint32_t)((size + PAGE_BYTES - 1) / PAGE_BYTES);

    if (region->n_used == REGION_PAGES) {
        unlink_region(&mem->full_regions, region);
        link_region(&mem->regions, region);
    }
    set_used(region, at, n, 0);
    region->longest = REGION_PAGES;
    if (region->huge)
        mem->n_free += n;
    else
        kvi_mem_count(mem, -(uint64_t)(n * PAGE_BYTES));
    if (region->n_used == 1) {
        if (region->huge) /* a whole region is free: nobody needs another one soon */
            kvi_mem_drop_spare(mem);
        mem->n_free -= region->huge ? REGION_PAGES - 1 : 0;
        kvi_mem_count(mem, -(uint64_t)(region->huge ? REGION_BYTES : PAGE_BYTES));
        unlink_region(&mem->regions, region);
        munmap(region, REGION_BYTES);
    } else if (!region->huge || size >= DONT_KEEP) {
        (void)madvise(memory, size, MADV_DONTNEED);
    }
}
