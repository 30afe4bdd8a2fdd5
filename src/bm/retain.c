// SPDX-License-Identifier: Apache-2.0
#include "retain.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "pool.h"

#define UNIT_NS (10 * KV_NS_PER_MS)

static bool stale(const struct kvbm_pool *pool, const struct kvbm_retained_one *one)
{
    const struct kvbm_slot *slot = &pool->slots[one->slot];

    return slot->life != one->life || !(slot->flags & SLOT_RETAINED) || slot->retained != one->when;
}

static void sift_up(struct kvbm_retained_one *heap, size_t i)
{
    struct kvbm_retained_one one = heap[i];

    for (; i > 0 && heap[(i - 1) / 2].when > one.when; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = one;
}

static void sift_down(struct kvbm_retained_one *heap, size_t n, size_t i)
{
    struct kvbm_retained_one one = heap[i];

    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1].when < heap[child].when)
            child++;
        if (heap[child].when >= one.when)
            break;
        heap[i] = heap[child];
    }
    heap[i] = one;
}

static void drop_stale(struct kvbm_pool *pool)
{
    struct kvbm_retained *all = &pool->retained;
    size_t kept = 0;

    for (size_t i = 0; i < all->n; i++) {
        if (!stale(pool, &all->heap[i]))
            all->heap[kept++] = all->heap[i];
    }
    all->n = kept;
    for (size_t i = kept / 2; i-- > 0;)
        sift_down(all->heap, kept, i);
}

int kvbm_retain_reserve(struct kvbm_pool *pool, size_t n)
{
    struct kvbm_retained *all = &pool->retained;
    size_t capacity;
    void *heap;

    if (n <= all->capacity - all->n)
        return 0;
    drop_stale(pool);
    capacity = KV_MAX(2 * (all->n + n), (size_t)64); /* half of it free, so that this is rare */
    if (capacity <= all->capacity)
        return 0;
    heap = realloc(all->heap, capacity * sizeof(*all->heap));
    if (!heap)
        return -ENOMEM;
    all->heap = heap;
    all->capacity = capacity;
    return 0;
}

void kvbm_retain_add(struct kvbm_pool *pool, uint32_t slot, uint32_t when)
{
    struct kvbm_retained *all = &pool->retained;

    all->heap[all->n++] = (struct kvbm_retained_one){when, slot, pool->slots[slot].life};
    sift_up(all->heap, all->n - 1);
}

uint32_t kvbm_retain_when(const struct kvbm_pool *pool, uint64_t ttl_ms)
{
    uint64_t now = kv_now_ns() - pool->created_ns;
    uint64_t ttl = KV_MIN(ttl_ms, (uint64_t)UINT32_MAX * 10) * KV_NS_PER_MS;
    uint64_t when = (now + ttl + UNIT_NS - 1) / UNIT_NS;

    return when < UINT32_MAX ? (uint32_t)KV_MAX(when, UINT64_C(1)) : UINT32_MAX;
}

void kvbm_retain_expire(struct kvbm_pool *pool)
{
    struct kvbm_retained *all = &pool->retained;
    uint64_t now;

    if (!all->n)
        return;
    now = (kv_now_ns() - pool->created_ns) / UNIT_NS;
    while (all->n && all->heap[0].when <= now) {
        struct kvbm_retained_one one = all->heap[0];

        all->heap[0] = all->heap[--all->n];
        if (all->n)
            sift_down(all->heap, all->n, 0);
        if (stale(pool, &one))
            continue;
        pool->slots[one.slot].flags &= (uint8_t)~SLOT_RETAINED;
        kvbm_evict_prioritise(pool, one.slot, KVBM_PRIORITY_DEFAULT);
    }
}

void kvbm_retain_fini(struct kvbm_retained *retained)
{
    free(retained->heap);
}
