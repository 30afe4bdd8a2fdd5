// SPDX-License-Identifier: Apache-2.0
#include "bm/pool/retain.h"

#include <errno.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "bm/pool/pool.h"
#include "bm/storage/memory.h"

#define CHILDREN ((size_t)KVBM_RETAIN_CHILDREN)
#define NEVER_MS (((uint64_t)1 << 63) / KV_NS_PER_MS)

static void put(struct kvbm_pool *pool, size_t at, struct kvbm_retained_one one)
{
    pool->retained.heap[at] = one;
    pool->retained.place[one.slot] = (uint32_t)at;
}

static bool is_before(const struct kvbm_retained_one *a, const struct kvbm_retained_one *b)
{
    if (a->when_ns != b->when_ns)
        return a->when_ns < b->when_ns;
    if (a->position != b->position)
        return a->position > b->position;
    return (int32_t)(a->order - b->order) < 0;
}

static size_t first_child(const struct kvbm_retained *all, size_t at)
{
    size_t first = at * CHILDREN + 1, best = first;

    for (size_t i = first + 1; i < all->n && i < first + CHILDREN; i++) {
        if (is_before(&all->heap[i], &all->heap[best]))
            best = i;
    }
    return best;
}

/* Put @one into the heap: at @at, or above or below it. The other entries are in heap order. */
static void sift(struct kvbm_pool *pool, size_t at, struct kvbm_retained_one one)
{
    struct kvbm_retained *all = &pool->retained;
    size_t child, above;

    for (; at > 0 && is_before(&one, &all->heap[above = (at - 1) / CHILDREN]); at = above)
        put(pool, at, all->heap[above]);
    for (; at * CHILDREN + 1 < all->n; at = child) {
        child = first_child(all, at);
        if (!is_before(&all->heap[child], &one))
            break;
        put(pool, at, all->heap[child]);
    }
    put(pool, at, one);
}

int kvbm_retain_reserve(struct kvbm_pool *pool, size_t n)
{
    struct kvbm_retained *all = &pool->retained;
    size_t capacity = KV_MIN(all->n + n, (size_t)pool->n_blocks);
    void *heap;

    if (!all->place)
        all->place =
            kvbm_map(((size_t)pool->n_blocks + 1) * sizeof(*all->place), &all->place_mapped);
    if (!all->place)
        return -ENOMEM;
    if (capacity <= all->capacity)
        return 0;
    capacity = KV_MAX(capacity + capacity / 2, (size_t)16);
    heap = realloc(all->heap, capacity * sizeof(*all->heap));
    if (!heap)
        return -ENOMEM;
    all->heap = heap;
    all->capacity = capacity;
    return 0;
}

uint64_t kvbm_retain_until(uint64_t ttl_ms)
{
    return !ttl_ms || ttl_ms > NEVER_MS ? 0 : kv_now_ns() + ttl_ms * KV_NS_PER_MS;
}

static void set(struct kvbm_pool *pool, uint32_t i, uint64_t when_ns, uint32_t order)
{
    struct kvbm_slot *slot = &pool->slots[i];
    size_t at = slot->flags & SLOT_RETAINED ? pool->retained.place[i] : pool->retained.n++;

    slot->flags |= SLOT_RETAINED;
    sift(pool, at,
         (struct kvbm_retained_one){when_ns, i, kvbm_slot_entry(pool, slot)->position, order});
}

void kvbm_retain_set(struct kvbm_pool *pool, uint32_t i, uint64_t when_ns)
{
    set(pool, i, when_ns, pool->retained.order++);
}

void kvbm_retain_adopt(struct kvbm_pool *pool, uint32_t i, const struct kvbm_pool *from,
                       uint32_t source)
{
    struct kvbm_retained_one one = from->retained.heap[from->retained.place[source]];

    set(pool, i, one.when_ns, one.order);
}

void kvbm_retain_drop(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_retained *all = &pool->retained;
    struct kvbm_slot *slot = &pool->slots[i];

    if (!(slot->flags & SLOT_RETAINED))
        return;
    slot->flags &= (uint8_t)~SLOT_RETAINED;
    if (all->place[i] != --all->n)
        sift(pool, all->place[i], all->heap[all->n]);
}

static void end(struct kvbm_pool *pool, uint32_t i)
{
    kvbm_retain_drop(pool, i);
    kvbm_evict_prioritise(pool, i, KVBM_PRIORITY_DEFAULT);
}

void kvbm_retain_expire(struct kvbm_pool *pool, size_t max)
{
    struct kvbm_retained *all = &pool->retained;
    uint64_t now;

    if (!all->n)
        return;
    now = kv_now_ns();
    for (; max > 0 && all->n && all->heap[0].when_ns <= now; max--)
        end(pool, all->heap[0].slot);
}

void kvbm_retain_expire_one(struct kvbm_pool *pool, uint32_t i)
{
    uint64_t when = kvbm_retain_end(pool, i);

    if (when && when <= kv_now_ns())
        end(pool, i);
}

uint64_t kvbm_retain_end(const struct kvbm_pool *pool, uint32_t i)
{
    const struct kvbm_slot *slot = &pool->slots[i];

    return slot->flags & SLOT_RETAINED ? pool->retained.heap[pool->retained.place[i]].when_ns : 0;
}

void kvbm_retain_fini(struct kvbm_retained *retained)
{
    free(retained->heap);
    kvbm_unmap(retained->place, retained->place_mapped);
}
