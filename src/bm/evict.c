// SPDX-License-Identifier: Apache-2.0
#include "evict.h"

#include <errno.h>
#include <string.h>

#include "memory.h"
#include "pool.h"

#define N_PRIORITIES (KVBM_PRIORITY_MAX + 1)
#define LINEAGE_LEVELS 4096 /* 64 words of 64: the summary is one word */

int kvbm_evict_init(struct kvbm_evict *evict, const struct kvbm_pool_opts *opts)
{
    static const uint8_t usual[3] = {3, 8, 15};

    evict->policy = opts->eviction;
    memcpy(evict->thresholds, opts->lfu_thresholds[0] ? opts->lfu_thresholds : usual, 3);
    evict->n_levels = opts->eviction == KVBM_EVICT_LRU   ? 1
                      : opts->eviction == KVBM_EVICT_LFU ? 4
                                                         : LINEAGE_LEVELS;
    evict->n_words = (evict->n_levels + 63) / 64;
    /* The ring of ages spans four pools' worth of releases, so that a class is 1/1024 of a pool. */
    while ((uint64_t)LINEAGE_LEVELS << evict->shift < (uint64_t)opts->n_blocks * 4)
        evict->shift++;
    evict->lists = kvbm_map((size_t)N_PRIORITIES * evict->n_levels * sizeof(*evict->lists),
                            &evict->lists_mapped);
    evict->words = kvbm_map((size_t)N_PRIORITIES * evict->n_words * 8, &evict->words_mapped);
    evict->summary = kvbm_map((size_t)N_PRIORITIES * 8, &evict->summary_mapped);
    return evict->lists && evict->words && evict->summary ? 0 : -ENOMEM;
}

void kvbm_evict_fini(struct kvbm_evict *evict)
{
    kvbm_unmap(evict->lists, evict->lists_mapped);
    kvbm_unmap(evict->words, evict->words_mapped);
    kvbm_unmap(evict->summary, evict->summary_mapped);
    kvbm_unmap(evict->children, evict->children_mapped);
}

int kvbm_evict_grow(struct kvbm_evict *evict, size_t max_entries)
{
    size_t mapped = 0;
    uint32_t *children;

    if (evict->policy != KVBM_EVICT_LINEAGE || max_entries <= evict->max_entries)
        return 0;
    children = kvbm_map((max_entries + 1) * sizeof(*children), &mapped);
    if (!children)
        return -ENOMEM;
    if (evict->children)
        memcpy(children, evict->children, (evict->max_entries + 1) * sizeof(*children));
    kvbm_unmap(evict->children, evict->children_mapped);
    evict->children = children;
    evict->children_mapped = mapped;
    evict->max_entries = max_entries;
    return 0;
}

/* ---- lists and bitmaps ---- */

static struct kvbm_list *list_of(struct kvbm_evict *evict, uint32_t priority, uint32_t level)
{
    return &evict->lists[(size_t)priority * evict->n_levels + level];
}

static void mark(struct kvbm_evict *evict, uint32_t priority, uint32_t level)
{
    evict->words[(size_t)priority * evict->n_words + level / 64] |= UINT64_C(1) << (level % 64);
    evict->summary[priority] |= UINT64_C(1) << (level / 64);
    evict->priorities[priority / 64] |= UINT64_C(1) << (priority % 64);
}

static void unmark(struct kvbm_evict *evict, uint32_t priority, uint32_t level)
{
    uint64_t *word = &evict->words[(size_t)priority * evict->n_words + level / 64];

    *word &= ~(UINT64_C(1) << (level % 64));
    if (*word)
        return;
    evict->summary[priority] &= ~(UINT64_C(1) << (level / 64));
    if (!evict->summary[priority])
        evict->priorities[priority / 64] &= ~(UINT64_C(1) << (priority % 64));
}

/* The level of a slot's list. What merge_oldest does moves lists, not the slots in them: so it is computed. */
static uint32_t level_of(const struct kvbm_evict *evict, const struct kvbm_slot *slot)
{
    uint64_t age;

    if (evict->policy != KVBM_EVICT_LINEAGE)
        return slot->level;
    age = slot->tick >> evict->shift;
    return (uint32_t)(KV_MAX(age, evict->base) % LINEAGE_LEVELS);
}

static void list_push(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t level = level_of(&pool->evict, slot);
    struct kvbm_list *list = list_of(&pool->evict, slot->priority, level);

    slot->flags |= SLOT_LISTED;
    slot->prev = list->tail;
    slot->next = 0;
    if (list->tail) {
        pool->slots[list->tail].next = i;
    } else {
        list->head = i;
        mark(&pool->evict, slot->priority, level);
    }
    list->tail = i;
}

static void list_remove(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t level = level_of(&pool->evict, slot);
    struct kvbm_list *list = list_of(&pool->evict, slot->priority, level);

    if (slot->prev)
        pool->slots[slot->prev].next = slot->next;
    else
        list->head = slot->next;
    if (slot->next)
        pool->slots[slot->next].prev = slot->prev;
    else
        list->tail = slot->prev;
    if (!list->head)
        unmark(&pool->evict, slot->priority, level);
    slot->next = 0;
    slot->flags &= (uint8_t)~SLOT_LISTED;
}

/* First list of a priority that isn't empty, from the oldest age class on and around; there is one. */
static uint32_t first_level(const struct kvbm_evict *evict, uint32_t priority)
{
    const uint64_t *words = &evict->words[(size_t)priority * evict->n_words];
    uint32_t start = (uint32_t)(evict->base % evict->n_levels), w = start / 64, turn = (w + 1) % 64;
    uint64_t later = words[w] & UINT64_MAX << (start % 64);
    uint64_t others = evict->summary[priority] & ~(UINT64_C(1) << w);

    if (later)
        return w * 64 + (uint32_t)__builtin_ctzll(later);
    if (others) {
        uint64_t rotated = others >> turn | (turn ? others << (64 - turn) : 0);

        w = (turn + (uint32_t)__builtin_ctzll(rotated)) % 64;
    }
    return w * 64 + (uint32_t)__builtin_ctzll(words[w]);
}

/* ---- lineage ---- */

/* The oldest age class loses its list: what is in it goes in front of the next one's. */
static void merge_oldest(struct kvbm_pool *pool, uint32_t priority)
{
    struct kvbm_evict *evict = &pool->evict;
    uint32_t from = (uint32_t)(evict->base % LINEAGE_LEVELS);
    uint32_t to = (uint32_t)((evict->base + 1) % LINEAGE_LEVELS);
    struct kvbm_list *old = list_of(evict, priority, from), *next = list_of(evict, priority, to);

    if (!old->head)
        return;
    pool->slots[old->tail].next = next->head;
    if (next->head)
        pool->slots[next->head].prev = old->tail;
    else
        next->tail = old->tail;
    next->head = old->head;
    *old = (struct kvbm_list){0, 0};
    unmark(evict, priority, from);
    mark(evict, priority, to);
}

static void move_on(struct kvbm_pool *pool)
{
    struct kvbm_evict *evict = &pool->evict;

    while (evict->tick >> evict->shift >= evict->base + LINEAGE_LEVELS) {
        for (uint32_t w = 0; w < 2; w++) {
            for (uint64_t left = evict->priorities[w]; left; left &= left - 1)
                merge_oldest(pool, w * 64 + (uint32_t)__builtin_ctzll(left));
        }
        evict->base++;
    }
}

/* The parent's block in this pool, if it is inactive; else 0. */
static uint32_t inactive_parent(const struct kvbm_pool *pool, uint32_t parent)
{
    uint32_t i = kvbm_entry(pool->registry, parent)->slot[pool->tier];

    return i && pool->slots[i].flags & SLOT_INACTIVE ? i : 0;
}

static void child_came(struct kvbm_pool *pool, uint32_t parent)
{
    uint32_t i;

    if (pool->evict.children[parent]++)
        return;
    i = inactive_parent(pool, parent);
    if (i)
        list_remove(pool, i); /* no leaf any more */
}

static void child_went(struct kvbm_pool *pool, uint32_t parent)
{
    uint32_t i;

    if (--pool->evict.children[parent])
        return;
    i = inactive_parent(pool, parent);
    if (i)
        list_push(pool, i); /* a leaf again, in the place of its age */
}

/* ---- what the pool calls ---- */

/* Slot @i is what the one that came KVBM_AHEAD before has ahead of it. */
static void remember(struct kvbm_pool *pool, uint32_t i)
{
    uint32_t *latest = &pool->evict.latest[pool->evict.tick % KVBM_AHEAD];

    if (pool->slots[*latest].flags & SLOT_INACTIVE)
        pool->slots[*latest].ahead = i;
    *latest = i;
}

static uint8_t lfu_level(const struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    uint32_t count = kvbm_sketch_count(&pool->sketch, kvbm_slot_entry(pool, slot)->tag);
    const uint8_t *t = pool->evict.thresholds;

    return (uint8_t)((count >= t[0]) + (count >= t[1]) + (count >= t[2]));
}

void kvbm_evict_insert(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t parent;

    slot->tick = ++pool->evict.tick;
    slot->flags |= SLOT_INACTIVE;
    remember(pool, i);
    if (pool->evict.policy == KVBM_EVICT_LFU)
        slot->level = lfu_level(pool, slot);
    if (pool->evict.policy != KVBM_EVICT_LINEAGE) {
        list_push(pool, i);
        return;
    }
    move_on(pool);
    if (!pool->evict.children[slot->entry])
        list_push(pool, i);
    parent = kvbm_slot_entry(pool, slot)->parent;
    if (parent)
        child_came(pool, parent);
}

void kvbm_evict_remove(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t parent;

    if (slot->flags & SLOT_LISTED)
        list_remove(pool, i);
    slot->flags &= (uint8_t)~SLOT_INACTIVE;
    slot->ahead = 0;
    if (pool->evict.policy != KVBM_EVICT_LINEAGE)
        return;
    parent = kvbm_slot_entry(pool, slot)->parent;
    if (parent)
        child_went(pool, parent);
}

uint32_t kvbm_evict_pop(struct kvbm_pool *pool)
{
    struct kvbm_evict *evict = &pool->evict;
    uint32_t priority = evict->priorities[0] ? (uint32_t)__builtin_ctzll(evict->priorities[0])
                                             : 64 + (uint32_t)__builtin_ctzll(evict->priorities[1]);
    uint32_t i = list_of(evict, priority, first_level(evict, priority))->head;

    kvbm_prefetch_slot(pool, pool->slots[i].ahead);
    kvbm_evict_remove(pool, i);
    return i;
}

void kvbm_evict_prioritise(struct kvbm_pool *pool, uint32_t i, uint8_t priority)
{
    struct kvbm_slot *slot = &pool->slots[i];
    bool listed = slot->flags & SLOT_LISTED;

    if (listed)
        list_remove(pool, i);
    slot->priority = priority;
    if (listed)
        list_push(pool, i);
}
