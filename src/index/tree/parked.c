// SPDX-License-Identifier: Apache-2.0
#include "index/tree/parked.h"

#include "index/tree/tree.h"

static uint64_t mix_name(uint32_t holder, uint64_t hash)
{
    return kv_mix(kv_mix(hash) + holder);
}

static uint64_t name_mix(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    return mix_name(ix->parking.items[i].holder, ix->parking.items[i].hash);
}

static uint64_t parent_mix(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    return mix_name(ix->parking.items[i].holder, ix->parking.items[i].parent);
}

static void prefetch(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    __builtin_prefetch(&ix->parking.items[i]);
}

int kvi_parking_init(struct kvi_index *ix)
{
    int rc = kvi_table_init(&ix->parking.by_name, &ix->mem, name_mix, prefetch, ix);

    ix->parking.free_head = KVI_NO_RECORD;
    return rc ? rc : kvi_table_init(&ix->parking.by_parent, &ix->mem, parent_mix, prefetch, ix);
}

void kvi_parking_fini(struct kvi_index *ix)
{
    kvi_table_fini(&ix->parking.by_name);
    kvi_table_fini(&ix->parking.by_parent);
    kvi_mem_free(&ix->mem, ix->parking.items);
}

/* -- finding ----------------------------------------------------------------------------------- */

struct kvi_parked *kvi_parked_find(const struct kvi_index *ix, const struct kvi_holder *holder,
                                   uint64_t hash)
{
    struct kvi_probe probe;
    uint32_t i;

    if (!holder->n_parked)
        return NULL;
    kvi_probe_init(&probe, &ix->parking.by_name, mix_name(holder->id, hash));
    while (kvi_probe_next(&probe, &i)) {
        struct kvi_parked *parked = &ix->parking.items[i];

        if (parked->hash == hash && parked->holder == holder->id)
            return parked;
    }
    return NULL;
}

struct kvi_parked *kvi_parked_child(const struct kvi_index *ix, const struct kvi_holder *holder,
                                    uint64_t parent)
{
    struct kvi_probe probe;
    uint32_t i;

    if (!holder->n_parked)
        return NULL;
    kvi_probe_init(&probe, &ix->parking.by_parent, mix_name(holder->id, parent));
    while (kvi_probe_next(&probe, &i)) {
        struct kvi_parked *parked = &ix->parking.items[i];

        if (parked->parent == parent && parked->holder == holder->id)
            return parked;
    }
    return NULL;
}

/* -- links ------------------------------------------------------------------------------------- */

static uint32_t number_of(const struct kvi_index *ix, const struct kvi_parked *parked)
{
    return (uint32_t)(parked - ix->parking.items);
}

static void link_age(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked)
{
    uint32_t i = number_of(ix, parked);

    parked->newer = KVI_NO_RECORD;
    parked->older = holder->n_parked ? holder->newest : KVI_NO_RECORD;
    if (holder->n_parked)
        ix->parking.items[holder->newest].newer = i;
    else
        holder->oldest = i;
    holder->newest = i;
}

static void unlink_age(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked)
{
    if (parked->older == KVI_NO_RECORD)
        holder->oldest = parked->newer;
    else
        ix->parking.items[parked->older].newer = parked->newer;
    if (parked->newer == KVI_NO_RECORD)
        holder->newest = parked->older;
    else
        ix->parking.items[parked->newer].older = parked->older;
}

/* Append the record to its parent's children. Returns 0 or -ENOMEM. */
static int link_sibling(struct kvi_index *ix, const struct kvi_holder *holder,
                        struct kvi_parked *parked)
{
    uint32_t i = number_of(ix, parked);
    struct kvi_parked *first = kvi_parked_child(ix, holder, parked->parent);

    parked->next = KVI_NO_RECORD;
    parked->prev = i;
    if (!first)
        return kvi_table_insert(&ix->parking.by_parent, parent_mix(ix, i), i);
    parked->prev = first->prev;
    ix->parking.items[first->prev].next = i;
    first->prev = i;
    return 0;
}

static void unlink_sibling(struct kvi_index *ix, const struct kvi_holder *holder,
                           struct kvi_parked *parked)
{
    uint32_t i = number_of(ix, parked);
    struct kvi_parked *first = kvi_parked_child(ix, holder, parked->parent);

    if (first != parked) {
        ix->parking.items[parked->prev].next = parked->next;
        if (parked->next == KVI_NO_RECORD)
            first->prev = parked->prev;
        else
            ix->parking.items[parked->next].prev = parked->prev;
    } else if (parked->next == KVI_NO_RECORD) {
        kvi_table_erase(&ix->parking.by_parent, parent_mix(ix, i), i);
    } else {
        kvi_table_replace(&ix->parking.by_parent, parent_mix(ix, i), i, parked->next);
        ix->parking.items[parked->next].prev = parked->prev;
    }
}

/* -- in and out -------------------------------------------------------------------------------- */

static void release(struct kvi_index *ix, uint32_t i)
{
    struct kvi_parking *parking = &ix->parking;

    parking->items[i].next = parking->free_head;
    parking->free_head = i;
    if (--parking->n > 0)
        return;
    kvi_mem_free(&ix->mem, parking->items);
    parking->items = NULL;
    parking->n_used = parking->capacity = 0;
    parking->free_head = KVI_NO_RECORD;
}

/* Make room for one more record. At the holder's limit, forget its oldest one. */
static bool make_room(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_parking *parking = &ix->parking;

    if (holder->n_parked &&
        (holder->n_parked >= parking->max_holder || parking->n >= parking->max)) {
        const struct kvi_parked oldest = parking->items[holder->oldest];

        kvi_unpark(ix, holder, &parking->items[holder->oldest]);
        kvi_parking_lose(ix, holder, oldest.mask, oldest.hash);
    }
    if (parking->max_holder == 0 || parking->n >= parking->max)
        return false;
    return parking->free_head != KVI_NO_RECORD ||
           kvi_mem_grow(&ix->mem, (void **)&parking->items, &parking->capacity, parking->n_used + 1,
                        sizeof(parking->items[0])) == 0;
}

static bool add(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
                struct kv_block block, uint32_t mask)
{
    struct kvi_parking *parking = &ix->parking;
    struct kvi_parked *parked;
    uint32_t i;

    if (!make_room(ix, holder))
        return false;
    i = parking->free_head;
    if (i == KVI_NO_RECORD)
        i = (uint32_t)parking->n_used++;
    else
        parking->free_head = parking->items[i].next;
    parked = &parking->items[i];
    *parked = (struct kvi_parked){.hash = block.hash,
                                  .parent = parent,
                                  .local = block.tokens_hash,
                                  .holder = holder->id,
                                  .mask = mask};
    parking->n++;
    if (kvi_table_insert(&parking->by_name, name_mix(ix, i), i)) {
        release(ix, i);
        return false;
    }
    if (link_sibling(ix, holder, parked)) {
        kvi_table_erase(&parking->by_name, name_mix(ix, i), i);
        release(ix, i);
        return false;
    }
    link_age(ix, holder, parked);
    holder->n_parked++;
    return true;
}

/* Give a parked block a new place and age under its old name. */
static bool replace(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked,
                    uint64_t parent, struct kv_block block)
{
    unlink_sibling(ix, holder, parked);
    parked->parent = parent;
    parked->local = block.tokens_hash;
    if (link_sibling(ix, holder, parked)) {
        kvi_table_erase(&ix->parking.by_name, name_mix(ix, number_of(ix, parked)),
                        number_of(ix, parked));
        unlink_age(ix, holder, parked);
        holder->n_parked--;
        release(ix, number_of(ix, parked));
        return false;
    }
    if (holder->n_parked > 1) {
        unlink_age(ix, holder, parked);
        link_age(ix, holder, parked);
    }
    return true;
}

bool kvi_park(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
              struct kv_block block, uint32_t mask)
{
    struct kvi_parked *parked = kvi_parked_find(ix, holder, block.hash);

    if (parked) {
        parked->mask |= mask;
        mask = parked->mask;
        if (replace(ix, holder, parked, parent, block))
            return true;
    } else if (add(ix, holder, parent, block, mask)) {
        return true;
    }
    kvi_parking_lose(ix, holder, mask, block.hash);
    return false;
}

void kvi_parking_lose(struct kvi_index *ix, struct kvi_holder *holder, uint32_t mask, uint64_t hash)
{
    uint64_t n = kvi_copies_total(ix, holder, mask, hash);

    ix->parking.forgotten++;
    kvi_copies_forget(ix, holder, mask, hash);
    if (n)
        kvi_note_lost(holder, n);
    else
        kvi_note_lost_more(holder); /* a place, of which no removal tells */
}

void kvi_parking_lose_more(struct kvi_index *ix, struct kvi_holder *holder)
{
    ix->parking.forgotten++;
    kvi_note_lost_more(holder);
}

void kvi_unpark(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked)
{
    uint32_t i = number_of(ix, parked);

    unlink_sibling(ix, holder, parked);
    unlink_age(ix, holder, parked);
    kvi_table_erase(&ix->parking.by_name, name_mix(ix, i), i);
    holder->n_parked--;
    release(ix, i);
}

size_t kvi_parked_forget(struct kvi_index *ix, struct kvi_holder *holder, size_t n)
{
    for (; n && holder->n_parked; n--) {
        struct kvi_parked *parked = &ix->parking.items[holder->oldest];
        uint64_t hash = parked->hash;
        uint32_t mask = parked->mask;

        kvi_unpark(ix, holder, parked);
        kvi_copies_forget(ix, holder, mask, hash);
    }
    return holder->n_parked;
}
