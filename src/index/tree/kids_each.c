// SPDX-License-Identifier: Apache-2.0
/* Walk over the children of a chain: all, some, or one after the other in their own order. */
#include <stdlib.h>

#include "index/tree/kids.h"
#include "index/tree/kids_set.h"

#define KIDS_MANY 32u /* fewer children are searched each time instead of sorted */

struct kvi_chain *kvi_kids_only(const struct kvi_chain *parent)
{
    uintptr_t word = kids_load(&parent->kids);

    return word & KIDS_TAGS ? NULL : (struct kvi_chain *)word;
}

uint64_t kvi_kids_count(const struct kvi_chain *parent)
{
    uintptr_t word = kids_load(&parent->kids);

    if (word & KIDS_TAG_FAN)
        return kids_as_fan(word)->n;
    return word & KIDS_TAG_TABLE ? kids_as_table(word)->n : word != 0;
}

static bool each(uintptr_t word, bool (*fn)(void *arg, struct kvi_chain *kid), void *arg)
{
    const struct kids_table *table;

    if (word & KIDS_TAG_FAN) {
        for (uint32_t i = 0; i < KIDS_FAN; i++)
            if (!each(kids_load(&kids_as_fan(word)->sub[i]), fn, arg))
                return false;
        return true;
    }
    if (!(word & KIDS_TAG_TABLE))
        return !word || fn(arg, (struct kvi_chain *)word);
    table = kids_as_table(word);
    for (uint32_t i = 0; i < table->capacity; i++) {
        if (i + 8 < table->capacity && kids_slot_live(&table->slot[i + 8]))
            __builtin_prefetch(kids_slot_kid(&table->slot[i + 8]));
        if (kids_slot_live(&table->slot[i]) && !fn(arg, kids_slot_kid(&table->slot[i])))
            return false;
    }
    return true;
}

void kvi_kids_each(const struct kvi_chain *parent, bool (*fn)(void *arg, struct kvi_chain *kid),
                   void *arg)
{
    (void)each(kids_load(&parent->kids), fn, arg);
}

void kvi_kids_some(const struct kvi_chain *parent, uint64_t *order,
                   bool (*fn)(void *arg, struct kvi_chain *kid), void *arg)
{
    uintptr_t word = kids_load(&parent->kids);
    int shift = 64; /* the set contains all orders that agree with this one above the shift */

    while (word & KIDS_TAG_FAN) {
        shift -= 8;
        word = kids_load(&kids_as_fan(word)->sub[*order >> shift & (KIDS_FAN - 1)]);
    }
    if (each(word, fn, arg))
        *order = shift < 64 ? ((*order >> shift) + 1) << shift : 0;
}

static struct kvi_chain *next_in_table(const struct kids_table *table, const uint64_t *order,
                                       uint64_t *ret_order)
{
    const struct kvi_chain *best = NULL;

    for (uint32_t i = 0; i < table->capacity; i++) {
        uint64_t mix;

        if (!kids_slot_live(&table->slot[i]))
            continue;
        mix = kv_mix(kids_slot_key(&table->slot[i]));
        if ((!order || mix > *order) && (!best || mix < *ret_order)) {
            best = kids_slot_kid(&table->slot[i]);
            *ret_order = mix;
        }
    }
    return (struct kvi_chain *)best;
}

static struct kvi_chain *next_in(const struct kvi_index *ix, uintptr_t word, int shift,
                                 const uint64_t *order, uint64_t *ret_order)
{
    struct kvi_chain *kid = NULL;
    uint64_t mix;

    if (word & KIDS_TAG_FAN) {
        for (uint32_t i = order ? *order >> shift & (KIDS_FAN - 1) : 0; i < KIDS_FAN && !kid; i++) {
            kid = next_in(ix, kids_load(&kids_as_fan(word)->sub[i]), shift - 8, order, ret_order);
            order = NULL; /* all keys in later sets are above */
        }
        return kid;
    }
    if (word & KIDS_TAG_TABLE)
        return next_in_table(kids_as_table(word), order, ret_order);
    if (!word)
        return NULL;
    kid = (struct kvi_chain *)word;
    mix = kv_mix(kids_key_of(ix, kid));
    if (order && mix <= *order)
        return NULL;
    *ret_order = mix;
    return kid;
}

struct kvi_chain *kvi_kids_next(const struct kvi_index *ix, const struct kvi_chain *parent,
                                const uint64_t *order, uint64_t *ret_order)
{
    uint64_t found = 0;
    struct kvi_chain *kid = next_in(ix, kids_load(&parent->kids), 56, order, &found);

    if (kid)
        *ret_order = found;
    return kid;
}

static int compare_keys(const void *a, const void *b)
{
    const struct kvi_kid_key *x = a, *y = b;

    return (x->order > y->order) - (x->order < y->order);
}

/* Children above an order, from one set after the other. */
struct ahead {
    const struct kvi_index *ix;
    const uint64_t *order;
    struct kvi_kid_key *items;
    size_t n, max;
};

static void add_key(struct ahead *a, uint64_t key)
{
    uint64_t order = kv_mix(key);

    if (!a->order || order > *a->order)
        a->items[a->n++] = (struct kvi_kid_key){order, key};
}

/* Add the children of a set, unless they don't all find room: returns false then. */
static bool add_set(struct ahead *a, uintptr_t word)
{
    const struct kids_table *table = kids_as_table(word);

    if (!(word & KIDS_TAG_TABLE)) {
        if (word && a->n < a->max)
            add_key(a, kids_key_of(a->ix, (struct kvi_chain *)word));
        return !word || a->n < a->max;
    }
    if (table->n > a->max - a->n)
        return false;
    for (uint32_t i = 0; i < table->capacity; i++)
        if (kids_slot_live(&table->slot[i]))
            add_key(a, kids_slot_key(&table->slot[i]));
    return true;
}

/* Add the sets in @word from that of the order on, as long as there is room. */
static bool add_sets(struct ahead *a, uintptr_t word, int shift)
{
    uint32_t i = a->order ? *a->order >> shift & (KIDS_FAN - 1) : 0;
    bool fits = true;

    if (!(word & KIDS_TAG_FAN))
        return add_set(a, word);
    for (; i < KIDS_FAN && fits; i++) {
        fits = add_sets(a, kids_load(&kids_as_fan(word)->sub[i]), shift - 8);
        a->order = NULL; /* all keys in later sets are above */
    }
    return fits;
}

size_t kvi_kids_ahead(const struct kvi_index *ix, const struct kvi_chain *parent, uint64_t order,
                      struct kvi_kid_key *ret, size_t max)
{
    struct ahead a = {.ix = ix, .order = &order, .items = ret, .max = max};
    uintptr_t word = kids_load(&parent->kids);

    if (!(word & KIDS_TAGS) || kvi_kids_count(parent) < KIDS_MANY)
        return 0;
    (void)add_sets(&a, word, 56);
    if (a.n)
        qsort(ret, a.n, sizeof(ret[0]), compare_keys);
    return a.n;
}
