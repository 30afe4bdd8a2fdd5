// SPDX-License-Identifier: Apache-2.0
#include "bm/pool/evict.h"

#include <errno.h>
#include <string.h>

#include "bm/pool/moves.h"
#include "bm/storage/memory.h"

#define N_PRIORITIES (KVBM_PRIORITY_MAX + 1)
/* not inlined: the common path then needs fewer registers */
#define APART __attribute__((noinline))
#define LINEAGE_LEVELS 4096 /* 64 words of 64: the summary is one word */

int kvbm_evict_init(struct kvbm_evict *evict, const struct kvbm_pool_opts *opts)
{
    static const uint8_t usual[3] = {3, 8, 15};

    evict->policy = opts->eviction;
    memcpy(evict->thresholds, opts->lfu_thresholds[0] ? opts->lfu_thresholds : usual, 3);
    evict->n_levels = opts->eviction == KVBM_EVICT_LRU   ? 1
                      : opts->eviction == KVBM_EVICT_LFU ? 4
                                                         : LINEAGE_LEVELS;
    evict->level_bits = (uint32_t)__builtin_ctz(evict->n_levels);
    evict->n_words = (evict->n_levels + 63) / 64;
    /* The ring of ages spans four pools' worth of releases, so that a class is 1/1024 of a pool. */
    while ((uint64_t)LINEAGE_LEVELS << evict->shift < (uint64_t)opts->n_blocks * 4)
        evict->shift++;
    evict->ends = opts->n_blocks + 1;
    evict->words = kvbm_map((size_t)N_PRIORITIES * evict->n_words * 8, &evict->words_mapped);
    evict->summary = kvbm_map((size_t)N_PRIORITIES * 8, &evict->summary_mapped);
    return evict->words && evict->summary ? 0 : -ENOMEM;
}

size_t kvbm_evict_ends(const struct kvbm_evict *evict)
{
    return (size_t)N_PRIORITIES * evict->n_levels;
}

void kvbm_evict_fini(struct kvbm_evict *evict)
{
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

static APART void mark(struct kvbm_evict *evict, uint32_t priority, uint32_t level)
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

/* Choose the level of the list for a slot. */
static uint32_t level_of(const struct kvbm_evict *evict, const struct kvbm_slot *slot)
{
    uint32_t base = (uint32_t)evict->base;

    if (evict->policy != KVBM_EVICT_LINEAGE)
        return slot->level;
    /* Ages wrap around: one older than the oldest class belongs to it. */
    return ((int32_t)(slot->age - base) > 0 ? slot->age : base) % LINEAGE_LEVELS;
}

void kvbm_list_started(struct kvbm_pool *pool, uint32_t at, uint32_t i)
{
    struct kvbm_evict *evict = &pool->evict;

    pool->slots[at].prev = pool->slots[at].next = i;
    at -= evict->ends;
    mark(evict, at >> evict->level_bits, at & (evict->n_levels - 1));
}

void kvbm_list_emptied(struct kvbm_pool *pool, uint32_t at)
{
    struct kvbm_evict *evict = &pool->evict;

    pool->slots[at].prev = pool->slots[at].next = 0;
    at -= evict->ends;
    unmark(evict, at >> evict->level_bits, at & (evict->n_levels - 1));
}

static void list_push(struct kvbm_pool *pool, uint32_t i)
{
    kvbm_list_push(pool, i, level_of(&pool->evict, &pool->slots[i]));
}

/* Return the slot behind which list_unshift inserts a block. SLOT_FIRST marks blocks that it
 * inserted at the front before; these keep their places. */
static uint32_t behind_front(const struct kvbm_pool *pool, uint32_t at)
{
    const struct kvbm_slot *slots = pool->slots, *front = &slots[pool->evict.front];
    uint32_t i = at;

    if (front->flags & SLOT_FIRST &&
        kvbm_list_end(&pool->evict, front->priority, level_of(&pool->evict, front)) == at)
        return pool->evict.front;
    while (slots[i].next != at && slots[slots[i].next].flags & SLOT_FIRST)
        i = slots[i].next;
    return i;
}

static void list_unshift(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slots = pool->slots, *slot = &slots[i];
    uint32_t at = kvbm_list_end(&pool->evict, slot->priority, level_of(&pool->evict, slot)), before;

    if (!slots[at].prev) {
        list_push(pool, i);
        return;
    }
    before = behind_front(pool, at);
    slot->flags |= SLOT_LISTED;
    slot->prev = before;
    slot->next = slots[before].next;
    slots[slot->next].prev = i;
    slots[before].next = i;
}

/* Find the first non-empty list of a priority, from the oldest age class on. One exists. */
static uint32_t first_level(const struct kvbm_evict *evict, uint32_t priority)
{
    const uint64_t *words = &evict->words[(size_t)priority * evict->n_words];
    uint32_t start = (uint32_t)evict->base & (evict->n_levels - 1), w = start / 64;
    uint32_t turn = (w + 1) % 64;
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

/* Merge the oldest age class into the next one, at its front. */
static void merge_oldest(struct kvbm_pool *pool, uint32_t priority)
{
    struct kvbm_evict *evict = &pool->evict;
    struct kvbm_slot *slots = pool->slots;
    uint32_t from = kvbm_list_end(evict, priority, (uint32_t)(evict->base % LINEAGE_LEVELS));
    uint32_t level = (uint32_t)((evict->base + 1) % LINEAGE_LEVELS);
    uint32_t to = kvbm_list_end(evict, priority, level), first = slots[from].next,
             last = slots[from].prev;

    if (!first)
        return;
    if (!slots[to].next)
        slots[to].next = slots[to].prev = to;
    slots[last].next = slots[to].next;
    slots[slots[to].next].prev = last;
    slots[to].next = first;
    slots[first].prev = to;
    kvbm_list_emptied(pool, from);
    mark(evict, priority, level);
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

/* Return the parent's block in this pool when it is inactive, else 0. */
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
        kvbm_list_remove(pool, i); /* no longer a leaf */
}

static void child_went(struct kvbm_pool *pool, uint32_t parent)
{
    uint32_t i;

    if (--pool->evict.children[parent])
        return;
    i = inactive_parent(pool, parent);
    if (i)
        list_push(pool, i); /* a leaf again: insert it by its age */
}

/* Prefetch an ancestor. A chain gives one generation after the other, and each costs a cache miss.
 * Keys registered together mostly have consecutive entries: then the entry KVBM_CHASE generations
 * up is found by its position. */
static inline void chase_neighbours(const struct kvbm_registry *r, uint32_t entry, uint32_t parent)
{
    uint32_t there = entry + (parent - entry) * KVBM_CHASE; /* up or down */

    if (parent - entry + 1 <= 2 && there <= r->n_entries)
        kvbm_prefetch_entry(r, there);
}

/* Prefetch the ancestors of block @i, which is being evicted: they follow soon. */
static void chase(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_registry *r = pool->registry;
    struct kvbm_evict *evict = &pool->evict;
    const struct kvbm_entry *e = kvbm_slot_entry(pool, &pool->slots[i]);

    kvbm_prefetch_slot(pool, pool->slots[i].next); /* next leaf, for when this one's chain ends */
    if (pool->slots[i].entry != evict->expected || !evict->n_chased) {
        evict->chased = e->parent;
        evict->n_chased = 0;
    } else {
        evict->n_chased--;
    }
    evict->expected = e->parent;
    for (unsigned step = 0; step < 2 && evict->chased && evict->n_chased < KVBM_CHASE; step++) {
        e = kvbm_entry(r, evict->chased);
        kvbm_prefetch_slot(pool, e->slot[pool->tier]);
        kvbm_prefetch_home(r, e->tag);
        __builtin_prefetch(&evict->children[e->parent], 1);
        kvbm_prefetch_entry(r, e->parent);
        chase_neighbours(r, evict->chased, e->parent);
        evict->chased = e->parent;
        evict->n_chased++;
    }
}

/* ---- calls of the pool ---- */

static uint8_t lfu_level(const struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    uint32_t count = kvbm_sketch_count(&pool->sketch, kvbm_slot_entry(pool, slot)->tag);
    const uint8_t *t = pool->evict.thresholds;

    return (uint8_t)((count >= t[0]) + (count >= t[1]) + (count >= t[2]));
}

static void lineage_insert(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t parent = kvbm_slot_entry(pool, slot)->parent;

    slot->age = (uint32_t)(pool->evict.tick >> pool->evict.shift);
    move_on(pool);
    if (!pool->evict.children[slot->entry])
        list_push(pool, i);
    if (parent)
        child_came(pool, parent);
}

void kvbm_lineage_remove(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t parent = kvbm_slot_entry(pool, slot)->parent;

    if (slot->flags & SLOT_LISTED)
        kvbm_list_remove(pool, i);
    slot->age = 0;
    slot->flags &= (uint8_t)~SLOT_INACTIVE;
    if (parent)
        child_went(pool, parent);
}

void kvbm_evict_insert_ranked(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];

    pool->evict.tick++;
    slot->flags |= SLOT_INACTIVE;
    if (pool->evict.policy == KVBM_EVICT_LINEAGE) {
        lineage_insert(pool, i);
        return;
    }
    slot->level = lfu_level(pool, slot);
    kvbm_remember(pool, i);
    kvbm_list_push(pool, i, slot->level);
}

/* Return the end of the first non-empty list; one exists. */
static uint32_t first_list(const struct kvbm_evict *evict)
{
    uint32_t priority = evict->priorities[0] ? (uint32_t)__builtin_ctzll(evict->priorities[0])
                                             : 64 + (uint32_t)__builtin_ctzll(evict->priorities[1]);

    return kvbm_list_end(evict, priority, first_level(evict, priority));
}

/* Remove up to @n blocks from the front of one list. */
static size_t list_pop(struct kvbm_pool *pool, uint32_t at, uint32_t *ret, size_t n)
{
    uint32_t i = pool->slots[at].next;
    size_t done = 0;

    while (done < n && i != at) {
        struct kvbm_slot *slot = &pool->slots[i];

        kvbm_prefetch_slot(pool, slot->ahead);
        ret[done++] = i;
        i = slot->next;
        slot->next = 0;
        slot->ahead = 0;
        slot->flags &= (uint8_t) ~(SLOT_LISTED | SLOT_INACTIVE | SLOT_FIRST);
    }
    pool->slots[at].next = i;
    pool->slots[i].prev = at;
    if (i == at)
        kvbm_list_emptied(pool, at);
    return done;
}

void kvbm_evict_pop(struct kvbm_pool *pool, uint32_t *ret, size_t n)
{
    for (size_t done = 0, some; done < n; done += some) {
        uint32_t at = first_list(&pool->evict);

        if (pool->evict.policy == KVBM_EVICT_LINEAGE) {
            ret[done] = pool->slots[at].next;
            chase(pool, ret[done]);
            kvbm_lineage_remove(pool, ret[done]);
            some = 1;
        } else {
            some = list_pop(pool, at, ret + done, n - done);
        }
    }
}

/* Prefetch the entries of the @n slots that the next eviction takes; the previous eviction has
 * fetched their slots. Fetch no further: a block released twice in between knows its successor only
 * half as far ahead. */
void kvbm_evict_fetch(const struct kvbm_pool *pool, size_t n)
{
    const struct kvbm_slot *slots = pool->slots;
    uint32_t at, i;

    if (pool->evict.policy == KVBM_EVICT_LINEAGE) /* chase() has fetched them */
        return;
    at = first_list(&pool->evict);
    i = slots[at].next;
    n = n < KVBM_AHEAD / 2 ? n : KVBM_AHEAD / 2;
    for (size_t k = 0; k < n && i != at; k++, i = slots[i].next)
        kvbm_prefetch_entry(pool->registry, slots[i].entry);
}

void kvbm_evict_prioritise(struct kvbm_pool *pool, uint32_t i, uint8_t priority)
{
    struct kvbm_slot *slot = &pool->slots[i];
    bool listed = slot->flags & SLOT_LISTED;

    if (listed)
        kvbm_list_remove(pool, i);
    slot->priority = priority;
    if (listed)
        list_push(pool, i);
}

void kvbm_evict_first(struct kvbm_pool *pool, uint32_t i, uint8_t level)
{
    struct kvbm_slot *slot = &pool->slots[i];
    bool listed = slot->flags & SLOT_LISTED;

    if (listed)
        kvbm_list_remove(pool, i);
    slot->level = level;
    if (pool->evict.policy == KVBM_EVICT_LINEAGE)
        slot->age = (uint32_t)pool->evict.base;
    if (listed) {
        list_unshift(pool, i);
        slot->flags |= SLOT_FIRST;
    }
    pool->evict.front = i;
}

/* ---- looking ahead ---- */

struct walk {
    size_t left;
    bool (*visit)(struct kvbm_pool *pool, uint32_t i, void *arg);
    void *arg;
};

static bool step(struct kvbm_pool *pool, struct walk *walk, uint32_t i)
{
    return walk->left && walk->left-- && walk->visit(pool, i, walk->arg);
}

/* Visit slot @i, and with lineage the parents that become leaves without it. */
static bool walk_slot(struct kvbm_pool *pool, struct walk *walk, uint32_t i)
{
    bool more = step(pool, walk, i);
    uint32_t parent;

    if (pool->evict.policy != KVBM_EVICT_LINEAGE)
        return more;
    for (parent = kvbm_slot_entry(pool, &pool->slots[i])->parent;
         more && parent && pool->evict.children[parent] == 1;
         parent = kvbm_entry(pool->registry, parent)->parent) {
        i = inactive_parent(pool, parent);
        if (!i)
            break;
        more = step(pool, walk, i);
    }
    return more;
}

static bool walk_list(struct kvbm_pool *pool, struct walk *walk, uint32_t at)
{
    bool more = true;

    for (uint32_t i = pool->slots[at].next; more && i != at; i = pool->slots[i].next) {
        kvbm_prefetch_slot(pool, pool->slots[i].ahead);
        more = walk_slot(pool, walk, i);
    }
    return more;
}

/* Visit the lists of a priority, from the oldest age class on. */
static bool walk_priority(struct kvbm_pool *pool, struct walk *walk, uint32_t priority)
{
    const struct kvbm_evict *evict = &pool->evict;
    const uint64_t *words = &evict->words[(size_t)priority * evict->n_words];
    uint32_t start = (uint32_t)(evict->base % evict->n_levels);
    uint64_t later = UINT64_MAX << (start % 64);
    bool more = true;

    for (uint32_t k = 0; more && k <= evict->n_words; k++) {
        uint32_t w = (start / 64 + k) % evict->n_words;
        uint64_t bits = words[w] & (k == 0 ? later : k == evict->n_words ? ~later : UINT64_MAX);

        for (; more && bits; bits &= bits - 1)
            more =
                walk_list(pool, walk,
                          kvbm_list_end(evict, priority, w * 64 + (uint32_t)__builtin_ctzll(bits)));
    }
    return more;
}

void kvbm_evict_walk(struct kvbm_pool *pool, size_t n,
                     bool (*visit)(struct kvbm_pool *pool, uint32_t i, void *arg), void *arg)
{
    struct walk walk = {n, visit, arg};
    bool more = true;

    for (uint32_t w = 0; w < 2; w++) {
        for (uint64_t bits = pool->evict.priorities[w]; more && bits; bits &= bits - 1)
            more = walk_priority(pool, &walk, w * 64 + (uint32_t)__builtin_ctzll(bits));
    }
}
