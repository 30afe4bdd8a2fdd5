// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of chains: slabs of 16 KiB hold a head and 255 chains of one cache line. Each slab is
 * aligned to its size, so that a chain's address leads to it. Full slabs have a list of their own;
 * empty slabs go back to the system at once.
 *
 * Holders of a chain: up to two entries inside the chain, else a list.
 */
#include <string.h>

#include "index/tree/kids.h"
#include "index/tree/tree.h"

#define SLAB_BYTES ((size_t)1 << 14)
#define SLAB_CHAINS 255u
#define LIST_INDEXED 16u /* lists larger than this have a hash index */

void (*kvi_step_hook)(void);

struct kvi_slab {
    struct kvi_slab *next, *prev;
    struct kvi_chain *free; /* free chains, linked by their parent pointers */
    uint32_t n_live;
    uint32_t n_fresh; /* chains at the end that were never used */
    uint64_t reserved[4];
    struct kvi_chain chain[SLAB_CHAINS];
};
_Static_assert(sizeof(struct kvi_slab) == SLAB_BYTES, "a slab is a power of two");

static bool slab_full(const struct kvi_slab *slab)
{
    return slab->n_live == SLAB_CHAINS;
}

static struct kvi_slab **list_for(struct kvi_index *ix, const struct kvi_slab *slab)
{
    return slab_full(slab) ? &ix->full_slabs : &ix->slabs;
}

static void slab_unlink(struct kvi_index *ix, struct kvi_slab *slab)
{
    if (slab->prev)
        slab->prev->next = slab->next;
    else
        *list_for(ix, slab) = slab->next;
    if (slab->next)
        slab->next->prev = slab->prev;
}

static void slab_link(struct kvi_index *ix, struct kvi_slab *slab)
{
    struct kvi_slab **list = list_for(ix, slab);

    slab->prev = NULL;
    slab->next = *list;
    if (slab->next)
        slab->next->prev = slab;
    *list = slab;
}

static void slab_count(struct kvi_index *ix, struct kvi_slab *slab, int more)
{
    bool was_full = slab_full(slab), is_full = slab->n_live + (uint32_t)more == SLAB_CHAINS;

    if (was_full != is_full)
        slab_unlink(ix, slab);
    slab->n_live += (uint32_t)more;
    if (was_full != is_full)
        slab_link(ix, slab);
}

struct kvi_chain *kvi_chain_new(struct kvi_index *ix)
{
    struct kvi_slab *slab = ix->slabs;
    struct kvi_chain *chain;

    if (!slab) {
        slab = kvi_mem_map(&ix->mem, SLAB_BYTES);
        if (!slab)
            return NULL;
        slab->n_fresh = SLAB_CHAINS;
        slab_link(ix, slab);
    }
    if (slab->free) {
        chain = slab->free;
        slab->free = chain->parent;
    } else {
        chain = &slab->chain[SLAB_CHAINS - slab->n_fresh--];
    }
    slab_count(ix, slab, 1);
    memset((void *)chain, 0, sizeof(*chain));
    return chain;
}

void kvi_chain_free(struct kvi_index *ix, struct kvi_chain *chain)
{
    struct kvi_slab *slab = (struct kvi_slab *)((uintptr_t)chain & ~(uintptr_t)(SLAB_BYTES - 1));

    slab_count(ix, slab, -1);
    chain->parent = slab->free;
    /* Lets kvi_slabs_fini recognise free chains. */
    atomic_store_explicit(&chain->version, 1, memory_order_relaxed);
    slab->free = chain;
    if (slab->n_live == 0) {
        slab_unlink(ix, slab);
        kvi_mem_unmap(&ix->mem, slab, SLAB_BYTES);
    }
}

/* -- who --------------------------------------------------------------------------------------- */

static struct kvi_list *list_of(const struct kvi_chain *chain)
{
    uint64_t word = atomic_load_explicit(&chain->who[0], memory_order_acquire);

    return word & KVI_ENTRY_VALID ? NULL : (struct kvi_list *)(uintptr_t)word;
}

static size_t list_bytes(uint32_t capacity)
{
    size_t bytes = sizeof(struct kvi_list) + capacity * sizeof(uint64_t);

    return capacity > LIST_INDEXED ? bytes + 2 * capacity * sizeof(uint32_t) : bytes;
}

static struct kvi_list *list_new(struct kvi_index *ix, uint32_t n)
{
    uint32_t capacity = 4;
    struct kvi_list *list;

    while (capacity < n)
        capacity *= 2;
    list = kvi_mem_alloc(&ix->mem, list_bytes(capacity));
    if (!list)
        return NULL;
    list->capacity = capacity;
    if (capacity > LIST_INDEXED)
        list->index = (uint32_t *)(void *)&list->entry[capacity];
    return list;
}

void kvi_chain_retire(struct kvi_index *ix, struct kvi_chain *chain)
{
    struct kvi_list *list = list_of(chain);

    atomic_store_explicit(&chain->version,
                          atomic_load_explicit(&chain->version, memory_order_relaxed) | 1,
                          memory_order_release);
    if (KV_UNLIKELY(kvi_step_hook != NULL))
        kvi_step_hook();
    if (list)
        kvi_retire_memory(ix, &list->retired, list_bytes(list->capacity));
    kv_limbo_retire(&ix->limbo, &chain->link, KVI_KIND_CHAIN, sizeof(*chain));
}

void kvi_chain_discard(struct kvi_index *ix, struct kvi_chain *chain)
{
    kvi_mem_free(&ix->mem, list_of(chain));
    kvi_chain_free(ix, chain);
}

/* Hash index of a list: linear probing over 2 * capacity slot numbers. */

static uint32_t index_home(const struct kvi_list *list, uint32_t holder)
{
    return (uint32_t)(holder * UINT32_C(0x9e3779b1)) >> (32 - __builtin_ctz(2 * list->capacity));
}

static uint32_t holder_in(const struct kvi_list *list, uint32_t i)
{
    return kvi_entry_holder(atomic_load_explicit(&list->entry[i], memory_order_relaxed));
}

/* Return the place of @holder in the index, or the empty place where it belongs. */
static uint32_t *index_find(const struct kvi_list *list, uint32_t holder)
{
    uint32_t i = index_home(list, holder), mask = 2 * list->capacity - 1;

    while (list->index[i] && holder_in(list, list->index[i] - 1) != holder)
        i = (i + 1) & mask;
    return &list->index[i];
}

static void index_remove(struct kvi_list *list, uint32_t holder)
{
    uint32_t mask = 2 * list->capacity - 1;
    uint32_t hole = (uint32_t)(index_find(list, holder) - list->index), i = hole;

    for (;;) { /* move up the entries that probed across the hole */
        uint32_t home;

        i = (i + 1) & mask;
        if (!list->index[i])
            break;
        home = index_home(list, holder_in(list, list->index[i] - 1));
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            list->index[hole] = list->index[i];
            hole = i;
        }
    }
    list->index[hole] = 0;
}

static void list_put(struct kvi_list *list, uint64_t entry)
{
    uint32_t n = atomic_load_explicit(&list->n, memory_order_relaxed);

    if (list->index)
        *index_find(list, kvi_entry_holder(entry)) = n + 1;
    atomic_store_explicit(&list->entry[n], entry, memory_order_release);
    atomic_store_explicit(&list->n, n + 1, memory_order_release);
}

uint32_t kvi_who_count(const struct kvi_chain *chain)
{
    const struct kvi_list *list = list_of(chain);

    if (list)
        return atomic_load_explicit(&list->n, memory_order_relaxed);
    return (uint32_t)(kvi_who_get(&chain->who[0]) != 0) +
           (uint32_t)(kvi_who_get(&chain->who[1]) != 0);
}

_Atomic uint64_t *kvi_who_at(const struct kvi_chain *chain, uint32_t i)
{
    struct kvi_list *list = list_of(chain);

    return list ? &list->entry[i] : (_Atomic uint64_t *)&chain->who[i];
}

_Atomic uint64_t *kvi_who_find(const struct kvi_chain *chain, uint32_t holder)
{
    struct kvi_list *list = list_of(chain);
    uint32_t n;

    if (list && list->index) {
        uint32_t i = *index_find(list, holder);

        return i ? &list->entry[i - 1] : NULL;
    }
    n = kvi_who_count(chain);
    for (uint32_t i = 0; i < n; i++) {
        _Atomic uint64_t *entry = kvi_who_at(chain, i);

        if (kvi_entry_holder(kvi_who_get(entry)) == holder)
            return entry;
    }
    return NULL;
}

int kvi_who_reserve(struct kvi_index *ix, struct kvi_chain *chain, uint32_t n)
{
    struct kvi_list *old = list_of(chain), *list;
    uint32_t have = kvi_who_count(chain), need = have + n;

    if (need <= (old ? old->capacity : 2))
        return 0;
    list = list_new(ix, need);
    if (!list)
        return -ENOMEM;
    for (uint32_t i = 0; i < have; i++)
        list_put(list, kvi_who_get(kvi_who_at(chain, i)));
    atomic_store_explicit(&chain->who[0], (uintptr_t)list, memory_order_release);
    kvi_chain_bump(chain);
    if (old)
        kvi_retire_memory(ix, &old->retired, list_bytes(old->capacity));
    return 0;
}

void kvi_who_add(struct kvi_chain *chain, uint64_t entry)
{
    struct kvi_list *list = list_of(chain);

    if (list) {
        list_put(list, entry);
    } else {
        bool first = !kvi_who_get(&chain->who[0]);

        atomic_store_explicit(&chain->who[first ? 0 : 1], entry, memory_order_release);
    }
    kvi_chain_bump(chain);
}

/*
 * Fill the hole with the last entry. Readers may see that entry twice for a moment, which changes
 * no answer.
 */
void kvi_who_remove(struct kvi_chain *chain, _Atomic uint64_t *entry)
{
    struct kvi_list *list = list_of(chain);
    uint32_t n = kvi_who_count(chain);
    _Atomic uint64_t *last = kvi_who_at(chain, n - 1);
    uint64_t moved = kvi_who_get(last);

    if (list && list->index)
        index_remove(list, kvi_entry_holder(kvi_who_get(entry)));
    if (entry != last) {
        if (list && list->index)
            *index_find(list, kvi_entry_holder(moved)) = (uint32_t)(entry - list->entry) + 1;
        kvi_who_set(chain, entry, moved);
    }
    if (list)
        atomic_store_explicit(&list->n, n - 1, memory_order_release);
    else
        atomic_store_explicit(last, 0, memory_order_release);
    kvi_chain_bump(chain);
}

void kvi_who_shrink(struct kvi_index *ix, struct kvi_chain *chain)
{
    struct kvi_list *old = list_of(chain), *list;
    uint32_t n = kvi_who_count(chain);

    if (!old || (n > 1 && n * 4 > old->capacity))
        return;
    if (n <= 2) { /* readers ignore who[1] until who[0] is an entry */
        uint64_t first = n > 0 ? kvi_who_get(&old->entry[0]) : 0;

        atomic_store_explicit(&chain->who[1], n > 1 ? kvi_who_get(&old->entry[1]) : 0,
                              memory_order_release);
        atomic_store_explicit(&chain->who[0], first, memory_order_release);
    } else {
        list = list_new(ix, n + n / 2);
        if (!list)
            return;
        for (uint32_t i = 0; i < n; i++)
            list_put(list, kvi_who_get(&old->entry[i]));
        atomic_store_explicit(&chain->who[0], (uintptr_t)list, memory_order_release);
    }
    kvi_chain_bump(chain);
    kvi_retire_memory(ix, &old->retired, list_bytes(old->capacity));
}

void kvi_slabs_fini(struct kvi_index *ix)
{
    struct kvi_slab *slab;

    while ((slab = ix->slabs ? ix->slabs : ix->full_slabs) != NULL) {
        for (uint32_t i = 0; i < SLAB_CHAINS - slab->n_fresh; i++) {
            struct kvi_chain *chain = &slab->chain[i];

            if (atomic_load_explicit(&chain->version, memory_order_relaxed) & 1)
                continue;
            kvi_mem_free(&ix->mem, list_of(chain));
            kvi_kids_free(ix, atomic_load_explicit(&chain->kids, memory_order_relaxed));
        }
        slab_unlink(ix, slab);
        kvi_mem_unmap(&ix->mem, slab, SLAB_BYTES);
    }
    kvi_kids_free(ix, atomic_load_explicit(&ix->root.kids, memory_order_relaxed));
}
