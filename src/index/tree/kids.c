// SPDX-License-Identifier: Apache-2.0
/* Find, add and remove children. kids_each.c walks over them. */
#include "index/tree/kids.h"
#include "index/tree/kids_set.h"

#define TABLE_MAX 1536u /* most children in a table; more become a fan */
#define FAN_MIN 256u    /* fewest children in a fan; fewer become a table again */

static void store(_Atomic uintptr_t *where, uintptr_t word)
{
    atomic_store_explicit(where, word, memory_order_release);
}

static size_t table_bytes(const struct kids_table *table)
{
    return sizeof(*table) + table->capacity * sizeof(table->slot[0]);
}

static struct kids_slot *table_find(const struct kids_table *table, uint64_t mix, uint64_t key)
{
    for (uint32_t i = (uint32_t)mix;; i++) {
        const struct kids_slot *slot = &table->slot[i & (table->capacity - 1)];
        const struct kvi_chain *kid = kids_slot_kid(slot);

        if (!kid)
            return NULL;
        if (kid != KIDS_GONE && kids_slot_key(slot) == key)
            return (struct kids_slot *)slot;
    }
}

struct kvi_chain *kvi_kids_find(const struct kvi_chain *parent, uint64_t key)
{
    uintptr_t word = kids_load(&parent->kids);
    const struct kids_slot *slot;
    uint64_t mix;
    int shift = 56;

    if (!(word & KIDS_TAGS))
        return (struct kvi_chain *)word;
    mix = kv_mix(key);
    for (; word & KIDS_TAG_FAN; shift -= 8)
        word = kids_load(&kids_as_fan(word)->sub[mix >> shift & (KIDS_FAN - 1)]);
    if (!(word & KIDS_TAG_TABLE))
        return (struct kvi_chain *)word;
    slot = table_find(kids_as_table(word), mix, key);
    if (slot) {
        struct kvi_chain *kid = kids_slot_kid(slot);

        return kid == KIDS_GONE ? NULL : kid;
    }
    return NULL;
}

/* -- changing ---------------------------------------------------------------------------------- */

static struct kids_table *table_new(struct kvi_index *ix, uint32_t n)
{
    uint32_t capacity = 4;
    struct kids_table *table;

    while (capacity * 3 < n * 4)
        capacity *= 2;
    table = kvi_mem_alloc(&ix->mem, sizeof(*table) + capacity * sizeof(table->slot[0]));
    if (table)
        table->capacity = capacity;
    return table;
}

static void table_put(struct kids_table *table, uint64_t key, struct kvi_chain *kid)
{
    uint32_t i = (uint32_t)kv_mix(key);
    struct kids_slot *slot = &table->slot[i & (table->capacity - 1)];

    while (kids_slot_live(slot))
        slot = &table->slot[++i & (table->capacity - 1)];
    table->n_used += kids_slot_kid(slot) != KIDS_GONE;
    table->n++;
    atomic_store_explicit(&slot->key, key, memory_order_release);
    atomic_store_explicit(&slot->kid, kid, memory_order_release);
}

static void table_copy(struct kids_table *to, const struct kids_table *from)
{
    for (uint32_t i = 0; i < from->capacity; i++)
        if (kids_slot_live(&from->slot[i]))
            table_put(to, kids_slot_key(&from->slot[i]), kids_slot_kid(&from->slot[i]));
}

static void free_sets(struct kvi_index *ix, uintptr_t word, bool retire)
{
    size_t bytes;

    if (word & KIDS_TAG_FAN) {
        bytes = sizeof(struct kids_fan);
        for (uint32_t i = 0; i < KIDS_FAN; i++)
            free_sets(ix, kids_load(&kids_as_fan(word)->sub[i]), retire);
    } else if (word & KIDS_TAG_TABLE) {
        bytes = table_bytes(kids_as_table(word));
    } else {
        return;
    }
    if (retire) /* both begin with their link */
        kvi_retire_memory(ix, (struct kv_retired *)(word & ~KIDS_TAGS), bytes);
    else
        kvi_mem_free(&ix->mem, (void *)(word & ~KIDS_TAGS));
}

void kvi_kids_free(struct kvi_index *ix, uintptr_t kids)
{
    free_sets(ix, kids, false);
}

static void put(_Atomic uintptr_t *where, uint64_t key, struct kvi_chain *kid)
{
    uintptr_t word = kids_load(where);

    if (word)
        table_put(kids_as_table(word), key, kid);
    else
        store(where, (uintptr_t)kid);
}

/* Spread a full table over a fan. */
static int make_fan(struct kvi_index *ix, _Atomic uintptr_t *where, int shift)
{
    uintptr_t word = kids_load(where);
    const struct kids_table *old = kids_as_table(word);
    struct kids_fan *fan = kvi_mem_alloc(&ix->mem, sizeof(*fan));
    uint32_t n[KIDS_FAN] = {0};

    if (!fan)
        return -ENOMEM;
    for (uint32_t i = 0; i < old->capacity; i++)
        if (kids_slot_live(&old->slot[i]))
            n[kv_mix(kids_slot_key(&old->slot[i])) >> shift & (KIDS_FAN - 1)]++;
    for (uint32_t i = 0; i < KIDS_FAN; i++) {
        struct kids_table *table = n[i] > 1 ? table_new(ix, n[i] + 1) : NULL;

        if (n[i] > 1 && !table) {
            free_sets(ix, (uintptr_t)fan | KIDS_TAG_FAN, false);
            return -ENOMEM;
        }
        if (table)
            store(&fan->sub[i], (uintptr_t)table | KIDS_TAG_TABLE);
    }
    fan->n = old->n;
    for (uint32_t i = 0; i < old->capacity; i++) {
        uint64_t key = kids_slot_key(&old->slot[i]);

        if (kids_slot_live(&old->slot[i]))
            put(&fan->sub[kv_mix(key) >> shift & (KIDS_FAN - 1)], key,
                kids_slot_kid(&old->slot[i]));
    }
    store(where, (uintptr_t)fan | KIDS_TAG_FAN);
    free_sets(ix, word, true);
    return 0;
}

/* Replace the set of children by a table with room for @n. */
static int reserve_table(struct kvi_index *ix, _Atomic uintptr_t *where, int shift, uint32_t n)
{
    uintptr_t word = kids_load(where);
    struct kids_table *table;

    if (n > TABLE_MAX && shift >= 8)
        return make_fan(ix, where, shift);
    table = table_new(ix, n);
    if (!table)
        return -ENOMEM;
    if (word & KIDS_TAG_TABLE) {
        table_copy(table, kids_as_table(word));
        free_sets(ix, word, true);
    } else {
        table_put(table, kids_key_of(ix, (struct kvi_chain *)word), (struct kvi_chain *)word);
    }
    store(where, (uintptr_t)table | KIDS_TAG_TABLE);
    return 0;
}

int kvi_kids_reserve(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key)
{
    _Atomic uintptr_t *where = &parent->kids;
    int shift = 56;

    for (;;) {
        uintptr_t word = kids_load(where);
        int rc;

        for (; word & KIDS_TAG_FAN; shift -= 8) {
            where = &kids_as_fan(word)->sub[kv_mix(key) >> shift & (KIDS_FAN - 1)];
            word = kids_load(where);
        }
        if (!word)
            return 0;
        if (word & KIDS_TAG_TABLE) {
            const struct kids_table *table = kids_as_table(word);

            if ((table->n_used + 1) * 4 <= table->capacity * 3)
                return 0;
            rc = reserve_table(ix, where, shift, table->n + 1 + table->n / 4);
        } else {
            rc = reserve_table(ix, where, shift, 2);
        }
        if (rc)
            return rc;
    }
}

void kvi_kids_add(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key,
                  struct kvi_chain *kid)
{
    _Atomic uintptr_t *where = &parent->kids;
    uint64_t mix = kv_mix(key);
    (void)ix;

    for (int shift = 56; kids_load(where) & KIDS_TAG_FAN; shift -= 8) {
        struct kids_fan *fan = kids_as_fan(kids_load(where));

        fan->n++;
        where = &fan->sub[mix >> shift & (KIDS_FAN - 1)];
    }
    put(where, key, kid);
}

void kvi_kids_replace(struct kvi_chain *parent, uint64_t key, struct kvi_chain *kid)
{
    _Atomic uintptr_t *where = &parent->kids;
    uint64_t mix = kv_mix(key);

    for (int shift = 56; kids_load(where) & KIDS_TAG_FAN; shift -= 8)
        where = &kids_as_fan(kids_load(where))->sub[mix >> shift & (KIDS_FAN - 1)];
    if (kids_load(where) & KIDS_TAG_TABLE)
        atomic_store_explicit(&table_find(kids_as_table(kids_load(where)), mix, key)->kid, kid,
                              memory_order_release);
    else
        store(where, (uintptr_t)kid);
}

/* Replace a set that lost most of its children by a smaller one. Best effort. */
static void table_shrink(struct kvi_index *ix, _Atomic uintptr_t *where)
{
    uintptr_t word = kids_load(where);
    struct kids_table *table = kids_as_table(word), *smaller;

    if (table->n <= 1) {
        struct kvi_chain *kid = NULL;

        for (uint32_t i = 0; i < table->capacity && !kid; i++)
            if (kids_slot_live(&table->slot[i]))
                kid = kids_slot_kid(&table->slot[i]);
        store(where, (uintptr_t)kid);
    } else {
        if (table->capacity <= 4 || table->n * 6 > table->capacity)
            return;
        smaller = table_new(ix, table->n * 2);
        if (!smaller)
            return;
        table_copy(smaller, table);
        store(where, (uintptr_t)smaller | KIDS_TAG_TABLE);
    }
    free_sets(ix, word, true);
}

static void table_remove(struct kids_table *table, uint64_t key)
{
    struct kids_slot *slot = table_find(table, kv_mix(key), key);
    struct kids_slot *next = slot + 1 == table->slot + table->capacity ? table->slot : slot + 1;

    table->n--;
    if (kids_slot_kid(next)) {
        atomic_store_explicit(&slot->kid, KIDS_GONE, memory_order_release);
    } else {
        table->n_used--;
        atomic_store_explicit(&slot->kid, NULL, memory_order_release);
    }
}

static void gather(uintptr_t word, struct kids_table *table, const struct kvi_index *ix)
{
    if (word & KIDS_TAG_FAN) {
        for (uint32_t i = 0; i < KIDS_FAN; i++)
            gather(kids_load(&kids_as_fan(word)->sub[i]), table, ix);
    } else if (word & KIDS_TAG_TABLE) {
        table_copy(table, kids_as_table(word));
    } else if (word) {
        table_put(table, kids_key_of(ix, (struct kvi_chain *)word), (struct kvi_chain *)word);
    }
}

static void fan_shrink(struct kvi_index *ix, _Atomic uintptr_t *where)
{
    uintptr_t word = kids_load(where);
    struct kids_fan *fan = kids_as_fan(word);
    struct kids_table *table;

    if (fan->n > FAN_MIN)
        return;
    table = table_new(ix, fan->n + 1);
    if (!table)
        return;
    gather(word, table, ix);
    store(where, (uintptr_t)table | KIDS_TAG_TABLE);
    free_sets(ix, word, true);
}

void kvi_kids_remove(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key)
{
    _Atomic uintptr_t *where = &parent->kids, *fans[8];
    uint64_t mix = kv_mix(key);
    int n_fans = 0;

    for (int shift = 56; kids_load(where) & KIDS_TAG_FAN; shift -= 8) {
        struct kids_fan *fan = kids_as_fan(kids_load(where));

        fans[n_fans++] = where;
        fan->n--;
        where = &fan->sub[mix >> shift & (KIDS_FAN - 1)];
    }
    if (kids_load(where) & KIDS_TAG_TABLE) {
        table_remove(kids_as_table(kids_load(where)), key);
        table_shrink(ix, where);
    } else {
        store(where, 0);
    }
    /* Innermost first: an outer fan that shrinks takes the inner ones with it. */
    while (n_fans--)
        fan_shrink(ix, fans[n_fans]);
}
