// SPDX-License-Identifier: Apache-2.0
/*
 * Records of registered blocks and of their parts, and the links between them (parts.h).
 *
 *     buckets[hash] ─► items[3] ─next─► items[0]         records of one bucket
 *     free          ─► items[1] ─next─► items[5]         records to be used again
 *     parts.items[p].first ─► slots[4] ⇄ slots[9]        registered blocks that have part p
 *
 * Invariants: a record keeps its number as long as it lives, and links hold numbers. Arrays move
 * when they grow, so no pointer into one is kept across an addition. Slot k belongs to the
 * registered block k / (n_parts - 1), whether that block lives or not. A part lives as long as it
 * has copies or links.
 */
#include "indexer/view/small/parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/mix.h"

#define NONE KI_NO_PART
#define MIN_CAPACITY 64u

/* -- records ----------------------------------------------------------------------------------- */

static size_t bucket_of(const struct ki_blocks *set, uint64_t hash)
{
    return (size_t)kv_mix(hash) & (set->n_buckets - 1);
}

static uint32_t find(const struct ki_blocks *set, uint64_t hash)
{
    uint32_t at = set->n ? set->buckets[bucket_of(set, hash)] : NONE;

    while (at != NONE && set->items[at].hash != hash)
        at = set->items[at].next;
    return at;
}

static void into_bucket(struct ki_blocks *set, uint32_t at)
{
    uint32_t *bucket = &set->buckets[bucket_of(set, set->items[at].hash)];

    set->items[at].next = *bucket;
    *bucket = at;
}

static bool grow_buckets(struct ki_blocks *set)
{
    size_t n = KV_MAX(2 * set->n_buckets, (size_t)MIN_CAPACITY);
    uint32_t *buckets = malloc(n * sizeof(*buckets));

    if (!buckets)
        return false;
    free(set->buckets);
    set->buckets = buckets;
    set->n_buckets = n;
    memset(buckets, 0xff, n * sizeof(*buckets));
    for (uint32_t i = 0; i < set->n_used; i++)
        if (set->items[i].used)
            into_bucket(set, i);
    return true;
}

static bool grow(void **items, size_t *capacity, size_t n, size_t bytes)
{
    size_t more = KV_MAX(KV_MAX(2 * *capacity, n), (size_t)MIN_CAPACITY);
    void *grown;

    if (n <= *capacity)
        return true;
    grown = realloc(*items, more * bytes);
    if (!grown)
        return false;
    *items = grown;
    *capacity = more;
    return true;
}

/*
 * Return the number that the next record will have, or NONE: out of memory. Nothing changes before
 * `put`, so that a caller that lacks memory for its slots can give up.
 */
static uint32_t reserve(struct ki_blocks *set)
{
    if (set->n >= set->n_buckets && !grow_buckets(set))
        return NONE;
    if (set->free != NONE)
        return set->free;
    return grow((void **)(void *)&set->items, &set->capacity, set->n_used + 1, sizeof(*set->items))
               ? (uint32_t)set->n_used
               : NONE;
}

static void put(struct ki_blocks *set, uint32_t at, const struct ki_block *block)
{
    if (at == set->free)
        set->free = set->items[at].next;
    else
        set->n_used++;
    set->items[at] = *block;
    into_bucket(set, at);
    set->n++;
}

static void drop(struct ki_blocks *set, uint32_t at)
{
    uint32_t *from = &set->buckets[bucket_of(set, set->items[at].hash)];

    while (*from != at)
        from = &set->items[*from].next;
    *from = set->items[at].next;
    set->items[at] = (struct ki_block){.next = set->free};
    set->free = at;
    set->n--;
}

static void fini(struct ki_blocks *set)
{
    free(set->items);
    free(set->buckets);
}

void ki_parts_init(struct ki_parts *p, uint32_t n_parts)
{
    *p = (struct ki_parts){.n_parts = n_parts, .wholes.free = NONE, .parts.free = NONE};
}

void ki_parts_fini(struct ki_parts *p)
{
    fini(&p->wholes);
    fini(&p->parts);
    free(p->slots);
    ki_parts_init(p, p->n_parts);
}

uint32_t ki_whole_find(const struct ki_parts *p, uint64_t hash)
{
    return find(&p->wholes, hash);
}

uint32_t ki_part_find(const struct ki_parts *p, uint64_t hash)
{
    return find(&p->parts, hash);
}

uint32_t ki_whole_add(struct ki_parts *p, uint64_t hash)
{
    uint32_t at = reserve(&p->wholes), slot;

    if (at == NONE)
        return NONE;
    slot = ki_whole_slot(p, at);
    if (!grow((void **)(void *)&p->slots, &p->slots_capacity, (size_t)slot + p->n_parts - 1,
              sizeof(*p->slots)))
        return NONE;
    put(&p->wholes, at, &(struct ki_block){.hash = hash, .first = NONE, .used = true});
    for (uint32_t i = 0; i < p->n_parts - 1; i++)
        p->slots[slot + i] = (struct ki_slot){NONE, NONE, NONE};
    return at;
}

uint32_t ki_part_add(struct ki_parts *p, uint64_t hash, uint64_t above, uint32_t index)
{
    uint32_t at = reserve(&p->parts);
    struct ki_block block = {
        .hash = hash, .above = above, .first = NONE, .index = (uint8_t)index, .used = true};

    if (at != NONE)
        put(&p->parts, at, &block);
    return at;
}

/* -- links ------------------------------------------------------------------------------------- */

int ki_part_link(struct ki_parts *p, uint32_t part, uint32_t whole)
{
    struct ki_block *block = &p->parts.items[part];
    uint32_t at = ki_whole_slot(p, whole) + block->index;
    struct ki_slot *slot = &p->slots[at];

    if (slot->part != NONE)
        return slot->part == part ? 0 : -ENOENT;
    *slot = (struct ki_slot){.part = part, .prev = NONE, .next = block->first};
    if (block->first != NONE)
        p->slots[block->first].prev = at;
    block->first = at;
    return 0;
}

static void unlink_slot(struct ki_parts *p, uint32_t at)
{
    struct ki_slot *slot = &p->slots[at];
    uint32_t part = slot->part;

    if (part == NONE)
        return;
    if (slot->prev == NONE)
        p->parts.items[part].first = slot->next;
    else
        p->slots[slot->prev].next = slot->next;
    if (slot->next != NONE)
        p->slots[slot->next].prev = slot->prev;
    slot->part = NONE;
    ki_part_tidy(p, part);
}

void ki_whole_remove(struct ki_parts *p, uint32_t whole)
{
    uint32_t slot = ki_whole_slot(p, whole);

    for (uint32_t i = 0; i < p->n_parts - 1; i++)
        unlink_slot(p, slot + i);
    drop(&p->wholes, whole);
}

void ki_part_tidy(struct ki_parts *p, uint32_t part)
{
    if (!p->parts.items[part].copies && p->parts.items[part].first == NONE)
        drop(&p->parts, part);
}
