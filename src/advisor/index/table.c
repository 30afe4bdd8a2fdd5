// SPDX-License-Identifier: Apache-2.0
/*
 * Records in pages, which never move, and a table of their numbers by key: open addressing, at most
 * seven eighths full.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "advisor/index/impl.h"
#include "base/core/error.h"
#include "base/core/mix.h"

enum { SLOTS_LEAST = 1024 };

struct kva_block *kva_block_at(const struct kva_index *index, uint32_t at)
{
    return &index->pages[at / KVA_PAGE][at % KVA_PAGE];
}

uint32_t kva_clock(const struct kva_index *index)
{
    return index->clock;
}

/* -- the table --------------------------------------------------------------------------------- */

static uint32_t home(const uint8_t *key, uint32_t n_slots)
{
    uint64_t head;

    memcpy(&head, key, sizeof(head));
    return (uint32_t)((kv_mix(head) >> 32) * n_slots >> 32);
}

static uint32_t next_slot(uint32_t slot, uint32_t n_slots)
{
    return slot + 1 == n_slots ? 0 : slot + 1;
}

/* Return the slot of @key, or the free one where it would be. */
static uint32_t find_slot(const struct kva_index *index, const uint8_t *key)
{
    uint32_t slot = home(key, index->n_slots);

    while (index->slots[slot] &&
           memcmp(kva_block_at(index, index->slots[slot] - 1)->key, key, KVA_KEY) != 0)
        slot = next_slot(slot, index->n_slots);
    return slot;
}

uint32_t kva_table_find(const struct kva_index *index, const uint8_t *key)
{
    return index->n_slots ? index->slots[find_slot(index, key)] - 1 : KVA_NONE;
}

void kva_index_prefetch(const struct kva_index *index, const uint8_t *key, bool record)
{
    uint32_t slot = index->n_slots ? home(key, index->n_slots) : 0;

    if (!index->n_slots)
        return;
    if (!record)
        __builtin_prefetch(&index->slots[slot]);
    else if (index->slots[slot])
        __builtin_prefetch(kva_block_at(index, index->slots[slot] - 1), 1);
}

static int grow(struct kva_index *index)
{
    uint64_t n = KV_MAX((uint64_t)index->n_slots + index->n_slots / 2, (uint64_t)SLOTS_LEAST);
    uint32_t *slots;

    if ((uint64_t)index->n_blocks + 1 <= (uint64_t)index->n_slots / 8 * 7)
        return 0;
    if (n > UINT32_MAX)
        return -ENOSPC;
    slots = calloc(n, sizeof(*slots));
    if (!slots)
        return -ENOMEM;
    for (uint32_t at = 0; at < index->n_records; at++) { /* in memory's order, unlike the slots' */
        const struct kva_block *b = kva_block_at(index, at);
        uint32_t slot;

        if (!b->units)
            continue;
        slot = home(b->key, (uint32_t)n);
        while (slots[slot])
            slot = next_slot(slot, (uint32_t)n);
        slots[slot] = at + 1;
    }
    free(index->slots);
    index->slots = slots;
    index->n_slots = (uint32_t)n;
    return 0;
}

/* Free a slot, and move those behind it that would no longer be found. */
static void clear_slot(struct kva_index *index, uint32_t hole)
{
    uint32_t n = index->n_slots, at = hole;

    for (;;) {
        uint32_t wanted, from_home, from_hole;

        at = next_slot(at, n);
        if (!index->slots[at])
            break;
        wanted = home(kva_block_at(index, index->slots[at] - 1)->key, n);
        from_home = at >= wanted ? at - wanted : at + (n - wanted);
        from_hole = at >= hole ? at - hole : at + (n - hole);
        if (from_home >= from_hole) {
            index->slots[hole] = index->slots[at];
            hole = at;
        }
    }
    index->slots[hole] = 0;
}

/* -- records ----------------------------------------------------------------------------------- */

static int add_page(struct kva_index *index)
{
    struct kva_block **pages;

    if (index->free != KVA_NONE || index->n_records < (uint64_t)index->n_pages * KVA_PAGE)
        return 0;
    pages = reallocarray(index->pages, (size_t)index->n_pages + 1, sizeof(struct kva_block *));
    if (!pages)
        return -ENOMEM;
    index->pages = pages;
    pages[index->n_pages] = calloc(KVA_PAGE, sizeof(struct kva_block));
    if (!pages[index->n_pages])
        return -ENOMEM;
    index->n_pages++;
    return 0;
}

int kva_table_add(struct kva_index *index, const uint8_t *key, uint32_t *ret)
{
    struct kva_block *b;
    uint32_t at;
    int rc = index->n_blocks >= index->opts.max_blocks ? -ENOSPC : grow(index);

    if (rc == 0)
        rc = add_page(index);
    if (rc < 0) {
        index->refused++;
        return rc;
    }
    at = index->free;
    if (at == KVA_NONE)
        at = index->n_records++;
    else
        index->free = kva_block_at(index, at)->next;
    b = kva_block_at(index, at);
    *b = (struct kva_block){.prev = KVA_NONE, .next = KVA_NONE, .parent = KVA_NONE};
    memcpy(b->key, key, KVA_KEY);
    index->slots[find_slot(index, key)] = at + 1;
    index->n_blocks++;
    *ret = at;
    return 0;
}

void kva_table_drop(struct kva_index *index, uint32_t at)
{
    struct kva_block *b = kva_block_at(index, at);

    clear_slot(index, find_slot(index, b->key));
    memset(b, 0, sizeof(*b));
    b->next = index->free;
    index->free = at;
    index->n_blocks--;
}

/* -- lists ------------------------------------------------------------------------------------- */

static void count(struct kva_order *order, struct kva_list *list, const struct kva_block *b)
{
    list->n++;
    list->units += b->units;
    order->n++;
    order->units += b->units;
}

void kva_list_push(struct kva_order *order, unsigned list, uint32_t at)
{
    struct kva_block *b = kva_block_at(order->index, at);
    struct kva_list *l = &order->lists[list];

    b->list = (uint8_t)list;
    b->prev = KVA_NONE;
    b->next = l->head;
    *(l->head == KVA_NONE ? &l->tail : &kva_block_at(order->index, l->head)->prev) = at;
    l->head = at;
    count(order, l, b);
}

void kva_list_push_old(struct kva_order *order, unsigned list, uint32_t at)
{
    struct kva_block *b = kva_block_at(order->index, at);
    struct kva_list *l = &order->lists[list];

    b->list = (uint8_t)list;
    b->next = KVA_NONE;
    b->prev = l->tail;
    *(l->tail == KVA_NONE ? &l->head : &kva_block_at(order->index, l->tail)->next) = at;
    l->tail = at;
    count(order, l, b);
}

void kva_list_take(struct kva_order *order, uint32_t at)
{
    struct kva_block *b = kva_block_at(order->index, at);
    struct kva_list *l = &order->lists[b->list];

    if (order->hand == at)
        order->hand = b->prev;
    *(b->prev == KVA_NONE ? &l->head : &kva_block_at(order->index, b->prev)->next) = b->next;
    *(b->next == KVA_NONE ? &l->tail : &kva_block_at(order->index, b->next)->prev) = b->prev;
    b->prev = b->next = KVA_NONE;
    l->n--;
    l->units -= b->units;
    order->n--;
    order->units -= b->units;
}
