// SPDX-License-Identifier: Apache-2.0
/*
 * One array of slots, linked newest to oldest through indices. An open-addressing table of slot
 * numbers finds a hash (linear probing, deletion by shifting back, so there are no tombstones).
 *
 *     table:  [ . | 3 | . | 1 | 2 | . | . | . ]        slot numbers, NONE = free
 *     slots:   1: hash, newer, older   ...             free slots are linked through `older`
 *     list:    newest -> 3 -> 1 -> 2 -> oldest
 *
 * Leaf-first order needs no tree. A prompt that uses a block uses all its ancestors, and its blocks
 * move to the front from its end to its root. In the list, an ancestor is therefore always newer
 * than its descendants, and the oldest slot is always a leaf.
 */
#include "cli/replay/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

struct slot {
    uint64_t hash;
    uint32_t newer, older;
};

struct kc_cache {
    uint64_t capacity; /* UINT32_MAX - 1 when unlimited */
    enum kc_cache_order order;
    struct slot *slots;
    uint32_t n_slots, n_used; /* slots allocated; slots used so far */
    uint32_t free;            /* list of free slots */
    uint32_t len;
    uint32_t newest, oldest;
    uint32_t *table;
    uint32_t mask;
    uint64_t *evicted;
    size_t evicted_capacity, n_evicted;
};

/* Spread the hashes: chain hashes are random already, but trace ids are small integers. */
static uint32_t home(const struct kc_cache *cache, uint64_t hash)
{
    return (uint32_t)((hash * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & cache->mask;
}

static uint32_t find(const struct kc_cache *cache, uint64_t hash)
{
    for (uint32_t i = home(cache, hash);; i = (i + 1) & cache->mask) {
        uint32_t slot = cache->table[i];

        if (slot == NONE || cache->slots[slot].hash == hash)
            return slot;
    }
}

static void table_put(struct kc_cache *cache, uint32_t slot)
{
    uint32_t i = home(cache, cache->slots[slot].hash);

    while (cache->table[i] != NONE)
        i = (i + 1) & cache->mask;
    cache->table[i] = slot;
}

static void table_drop(struct kc_cache *cache, uint32_t slot)
{
    uint32_t hole = home(cache, cache->slots[slot].hash), i;

    while (cache->table[hole] != slot)
        hole = (hole + 1) & cache->mask;
    for (i = (hole + 1) & cache->mask; cache->table[i] != NONE; i = (i + 1) & cache->mask) {
        uint32_t wish = home(cache, cache->slots[cache->table[i]].hash);

        /* Move an entry into the hole when its home is not behind the hole, around the circle. */
        if (((i - wish) & cache->mask) >= ((i - hole) & cache->mask)) {
            cache->table[hole] = cache->table[i];
            hole = i;
        }
    }
    cache->table[hole] = NONE;
}

static void unlink_slot(struct kc_cache *cache, uint32_t slot)
{
    struct slot *s = &cache->slots[slot];

    if (s->newer == NONE)
        cache->newest = s->older;
    else
        cache->slots[s->newer].older = s->older;
    if (s->older == NONE)
        cache->oldest = s->newer;
    else
        cache->slots[s->older].newer = s->newer;
}

static void link_newest(struct kc_cache *cache, uint32_t slot)
{
    struct slot *s = &cache->slots[slot];

    s->newer = NONE;
    s->older = cache->newest;
    if (cache->newest == NONE)
        cache->oldest = slot;
    else
        cache->slots[cache->newest].newer = slot;
    cache->newest = slot;
}

static void touch(struct kc_cache *cache, uint32_t slot)
{
    if (cache->newest == slot)
        return;
    unlink_slot(cache, slot);
    link_newest(cache, slot);
}

static void insert(struct kc_cache *cache, uint64_t hash)
{
    uint32_t slot = cache->free;

    if (slot == NONE)
        slot = cache->n_used++;
    else
        cache->free = cache->slots[slot].older;
    cache->slots[slot].hash = hash;
    table_put(cache, slot);
    link_newest(cache, slot);
    cache->len++;
}

static void evict_oldest(struct kc_cache *cache)
{
    uint32_t slot = cache->oldest;

    cache->evicted[cache->n_evicted++] = cache->slots[slot].hash;
    table_drop(cache, slot);
    unlink_slot(cache, slot);
    cache->slots[slot].older = cache->free;
    cache->free = slot;
    cache->len--;
}

/* Make room for @more blocks: slots, and a table at most 5/8 full. */
static int reserve(struct kc_cache *cache, size_t more)
{
    uint64_t want = (uint64_t)cache->len + more;
    uint64_t n_slots = cache->n_slots ? cache->n_slots : 1024;
    uint64_t n_table = (uint64_t)cache->mask + 1;
    struct slot *slots;
    uint32_t *table;

    if (want >= NONE / 2)
        return -ENOMEM;
    while (n_slots < want)
        n_slots *= 2;
    if (n_slots > cache->n_slots) {
        slots = realloc(cache->slots, n_slots * sizeof(*slots));
        if (!slots)
            return -ENOMEM;
        cache->slots = slots;
        cache->n_slots = (uint32_t)n_slots;
    }
    while (n_table * 5 < want * 8)
        n_table *= 2;
    if (n_table == (uint64_t)cache->mask + 1)
        return 0;
    table = malloc(n_table * sizeof(*table));
    if (!table)
        return -ENOMEM;
    memset(table, 0xff, n_table * sizeof(*table));
    free(cache->table);
    cache->table = table;
    cache->mask = (uint32_t)(n_table - 1);
    for (uint32_t s = cache->newest; s != NONE; s = cache->slots[s].older)
        table_put(cache, s);
    return 0;
}

static int reserve_evicted(struct kc_cache *cache, size_t n)
{
    uint64_t *evicted;

    cache->n_evicted = 0;
    if (n <= cache->evicted_capacity)
        return 0;
    evicted = realloc(cache->evicted, n * sizeof(*evicted));
    if (!evicted)
        return -ENOMEM;
    cache->evicted = evicted;
    cache->evicted_capacity = n;
    return 0;
}

size_t kc_cache_lookup(const struct kc_cache *cache, const uint64_t *chain, size_t n)
{
    size_t i = 0;

    while (i < n && find(cache, chain[i]) != NONE)
        i++;
    return i;
}

static void use_leaf_first(struct kc_cache *cache, const uint64_t *chain, struct kc_cache_use *use)
{
    size_t i;

    /* Touch the held blocks first, so that making room for the others doesn't evict them. */
    for (i = use->held; i-- > 0;)
        touch(cache, find(cache, chain[i]));
    while (cache->len + (use->end - use->held) > cache->capacity)
        evict_oldest(cache);
    for (i = use->end; i-- > use->held;)
        insert(cache, chain[i]);
    for (i = use->held; i-- > 0;)
        touch(cache, find(cache, chain[i]));
}

static void use_plain(struct kc_cache *cache, const uint64_t *chain, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t slot = find(cache, chain[i]);

        if (slot != NONE) {
            touch(cache, slot);
            continue;
        }
        if (cache->len == cache->capacity)
            evict_oldest(cache);
        insert(cache, chain[i]);
    }
}

int kc_cache_use(struct kc_cache *cache, const uint64_t *chain, size_t n, struct kc_cache_use *ret)
{
    struct kc_cache_use use = {.end = n};
    int rc;

    use.held = kc_cache_lookup(cache, chain, n);
    if (cache->order == KC_LEAF_FIRST && use.end > cache->capacity)
        use.end = cache->capacity;
    if (use.held > use.end) /* always true: the held blocks fit */
        use.held = use.end;
    rc = reserve(cache, use.end - use.held);
    if (rc == 0)
        rc = reserve_evicted(cache, n);
    if (rc < 0)
        return rc;
    if (cache->order == KC_LEAF_FIRST)
        use_leaf_first(cache, chain, &use);
    else
        use_plain(cache, chain, n);
    use.evicted = cache->evicted;
    use.n_evicted = cache->n_evicted;
    *ret = use;
    return 0;
}

void kc_cache_clear(struct kc_cache *cache)
{
    memset(cache->table, 0xff, ((size_t)cache->mask + 1) * sizeof(*cache->table));
    cache->newest = cache->oldest = cache->free = NONE;
    cache->len = cache->n_used = 0;
}

uint64_t kc_cache_len(const struct kc_cache *cache)
{
    return cache->len;
}

int kc_cache_create(uint64_t capacity, enum kc_cache_order order, struct kc_cache **ret)
{
    struct kc_cache *cache = calloc(1, sizeof(*cache));

    if (!cache)
        return -ENOMEM;
    cache->capacity = capacity == 0 || capacity >= NONE ? NONE - 1 : capacity;
    cache->order = order;
    cache->mask = 1023;
    cache->table = malloc(1024 * sizeof(*cache->table));
    if (!cache->table) {
        free(cache);
        return -ENOMEM;
    }
    kc_cache_clear(cache);
    *ret = cache;
    return 0;
}

void kc_cache_destroy(struct kc_cache *cache)
{
    if (!cache)
        return;
    free(cache->slots);
    free(cache->table);
    free(cache->evicted);
    free(cache);
}
