// SPDX-License-Identifier: Apache-2.0
#include "index/kids.h"

#include <string.h>

#define TABLE_MAX 1536u /* children; more become a fan */
#define FAN_MIN 256u    /* fewer become a table again */
#define FAN 256u
#define TAG_TABLE ((uintptr_t)1)
#define TAG_FAN ((uintptr_t)2)
#define TAGS ((uintptr_t)3)
#define GONE ((struct kvi_chain *)64) /* a slot that was used: searches go on behind it */

struct kids_slot {
    _Atomic uint64_t key;
    struct kvi_chain *_Atomic kid; /* written last, read first */
};

struct kids_table {
    struct kv_retired retired;
    uint32_t capacity; /* a power of two */
    uint32_t n;
    uint32_t n_used; /* with those gone */
    uint32_t reserved;
    struct kids_slot slot[];
};

struct kids_fan {
    struct kv_retired retired;
    uint32_t n; /* children in all of it */
    uint32_t reserved;
    _Atomic uintptr_t sub[FAN];
};

static struct kids_table *as_table(uintptr_t word)
{
    return (struct kids_table *)(word & ~TAGS);
}

static struct kids_fan *as_fan(uintptr_t word)
{
    return (struct kids_fan *)(word & ~TAGS);
}

static uintptr_t load(const _Atomic uintptr_t *where)
{
    return atomic_load_explicit(where, memory_order_acquire);
}

static void store(_Atomic uintptr_t *where, uintptr_t word)
{
    atomic_store_explicit(where, word, memory_order_release);
}

static struct kvi_chain *slot_kid(const struct kids_slot *slot)
{
    return atomic_load_explicit(&slot->kid, memory_order_acquire);
}

static uint64_t slot_key(const struct kids_slot *slot)
{
    return atomic_load_explicit(&slot->key, memory_order_acquire);
}

static bool slot_live(const struct kids_slot *slot)
{
    struct kvi_chain *kid = slot_kid(slot);

    return kid && kid != GONE;
}

static size_t table_bytes(const struct kids_table *table)
{
    return sizeof(*table) + table->capacity * sizeof(table->slot[0]);
}

static uint64_t key_of(const struct kvi_index *ix, const struct kvi_chain *chain)
{
    return *kvi_arena_locals(&ix->arena, kvi_chain_run(chain).pos);
}

static struct kids_slot *table_find(const struct kids_table *table, uint64_t mix, uint64_t key)
{
    for (uint32_t i = (uint32_t)mix;; i++) {
        const struct kids_slot *slot = &table->slot[i & (table->capacity - 1)];
        const struct kvi_chain *kid = slot_kid(slot);

        if (!kid)
            return NULL;
        if (kid != GONE && slot_key(slot) == key)
            return (struct kids_slot *)slot;
    }
}

struct kvi_chain *kvi_kids_find(const struct kvi_chain *parent, uint64_t key)
{
    uintptr_t word = load(&parent->kids);
    const struct kids_slot *slot;
    uint64_t mix;
    int shift = 56;

    if (!(word & TAGS))
        return (struct kvi_chain *)word;
    mix = kvi_mix(key);
    for (; word & TAG_FAN; shift -= 8)
        word = load(&as_fan(word)->sub[mix >> shift & (FAN - 1)]);
    if (!(word & TAG_TABLE))
        return (struct kvi_chain *)word;
    slot = table_find(as_table(word), mix, key);
    if (slot) {
        struct kvi_chain *kid = slot_kid(slot);

        return kid == GONE ? NULL : kid;
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
    uint32_t i = (uint32_t)kvi_mix(key);
    struct kids_slot *slot = &table->slot[i & (table->capacity - 1)];

    while (slot_live(slot))
        slot = &table->slot[++i & (table->capacity - 1)];
    table->n_used += slot_kid(slot) != GONE;
    table->n++;
    atomic_store_explicit(&slot->key, key, memory_order_release);
    atomic_store_explicit(&slot->kid, kid, memory_order_release);
}

static void table_copy(struct kids_table *to, const struct kids_table *from)
{
    for (uint32_t i = 0; i < from->capacity; i++)
        if (slot_live(&from->slot[i]))
            table_put(to, slot_key(&from->slot[i]), slot_kid(&from->slot[i]));
}

static void free_sets(struct kvi_index *ix, uintptr_t word, bool retire)
{
    size_t bytes;

    if (word & TAG_FAN) {
        bytes = sizeof(struct kids_fan);
        for (uint32_t i = 0; i < FAN; i++)
            free_sets(ix, load(&as_fan(word)->sub[i]), retire);
    } else if (word & TAG_TABLE) {
        bytes = table_bytes(as_table(word));
    } else {
        return;
    }
    if (retire) /* both begin with their link */
        kvi_retire_memory(ix, (struct kv_retired *)(word & ~TAGS), bytes);
    else
        kvi_mem_free(&ix->mem, (void *)(word & ~TAGS));
}

void kvi_kids_free(struct kvi_index *ix, uintptr_t kids)
{
    free_sets(ix, kids, false);
}

static void put(_Atomic uintptr_t *where, uint64_t key, struct kvi_chain *kid)
{
    uintptr_t word = load(where);

    if (word)
        table_put(as_table(word), key, kid);
    else
        store(where, (uintptr_t)kid);
}

/* Spread a full table over a fan. */
static int make_fan(struct kvi_index *ix, _Atomic uintptr_t *where, int shift)
{
    uintptr_t word = load(where);
    const struct kids_table *old = as_table(word);
    struct kids_fan *fan = kvi_mem_alloc(&ix->mem, sizeof(*fan));
    uint32_t n[FAN] = {0};

    if (!fan)
        return -ENOMEM;
    for (uint32_t i = 0; i < old->capacity; i++)
        if (slot_live(&old->slot[i]))
            n[kvi_mix(slot_key(&old->slot[i])) >> shift & (FAN - 1)]++;
    for (uint32_t i = 0; i < FAN; i++) {
        struct kids_table *table = n[i] > 1 ? table_new(ix, n[i] + 1) : NULL;

        if (n[i] > 1 && !table) {
            free_sets(ix, (uintptr_t)fan | TAG_FAN, false);
            return -ENOMEM;
        }
        if (table)
            store(&fan->sub[i], (uintptr_t)table | TAG_TABLE);
    }
    fan->n = old->n;
    for (uint32_t i = 0; i < old->capacity; i++) {
        uint64_t key = slot_key(&old->slot[i]);

        if (slot_live(&old->slot[i]))
            put(&fan->sub[kvi_mix(key) >> shift & (FAN - 1)], key, slot_kid(&old->slot[i]));
    }
    store(where, (uintptr_t)fan | TAG_FAN);
    free_sets(ix, word, true);
    return 0;
}

/* A table with room for @n children in place of what is there. */
static int reserve_table(struct kvi_index *ix, _Atomic uintptr_t *where, int shift, uint32_t n)
{
    uintptr_t word = load(where);
    struct kids_table *table;

    if (n > TABLE_MAX && shift >= 8)
        return make_fan(ix, where, shift);
    table = table_new(ix, n);
    if (!table)
        return -ENOMEM;
    if (word & TAG_TABLE) {
        table_copy(table, as_table(word));
        free_sets(ix, word, true);
    } else {
        table_put(table, key_of(ix, (struct kvi_chain *)word), (struct kvi_chain *)word);
    }
    store(where, (uintptr_t)table | TAG_TABLE);
    return 0;
}

int kvi_kids_reserve(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key)
{
    _Atomic uintptr_t *where = &parent->kids;
    int shift = 56;

    for (;;) {
        uintptr_t word = load(where);
        int rc;

        for (; word & TAG_FAN; shift -= 8) {
            where = &as_fan(word)->sub[kvi_mix(key) >> shift & (FAN - 1)];
            word = load(where);
        }
        if (!word)
            return 0;
        if (word & TAG_TABLE) {
            const struct kids_table *table = as_table(word);

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
    uint64_t mix = kvi_mix(key);
    (void)ix;

    for (int shift = 56; load(where) & TAG_FAN; shift -= 8) {
        struct kids_fan *fan = as_fan(load(where));

        fan->n++;
        where = &fan->sub[mix >> shift & (FAN - 1)];
    }
    put(where, key, kid);
}

void kvi_kids_replace(struct kvi_chain *parent, uint64_t key, struct kvi_chain *kid)
{
    _Atomic uintptr_t *where = &parent->kids;
    uint64_t mix = kvi_mix(key);

    for (int shift = 56; load(where) & TAG_FAN; shift -= 8)
        where = &as_fan(load(where))->sub[mix >> shift & (FAN - 1)];
    if (load(where) & TAG_TABLE)
        atomic_store_explicit(&table_find(as_table(load(where)), mix, key)->kid, kid,
                              memory_order_release);
    else
        store(where, (uintptr_t)kid);
}

/* Best effort: a set that lost most of its children becomes a smaller one. */
static void table_shrink(struct kvi_index *ix, _Atomic uintptr_t *where)
{
    uintptr_t word = load(where);
    struct kids_table *table = as_table(word), *smaller;

    if (table->n <= 1) {
        struct kvi_chain *kid = NULL;

        for (uint32_t i = 0; i < table->capacity && !kid; i++)
            if (slot_live(&table->slot[i]))
                kid = slot_kid(&table->slot[i]);
        store(where, (uintptr_t)kid);
    } else {
        if (table->capacity <= 4 || table->n * 6 > table->capacity)
            return;
        smaller = table_new(ix, table->n * 2);
        if (!smaller)
            return;
        table_copy(smaller, table);
        store(where, (uintptr_t)smaller | TAG_TABLE);
    }
    free_sets(ix, word, true);
}

static void table_remove(struct kids_table *table, uint64_t key)
{
    struct kids_slot *slot = table_find(table, kvi_mix(key), key);
    struct kids_slot *next = slot + 1 == table->slot + table->capacity ? table->slot : slot + 1;

    table->n--;
    if (slot_kid(next)) {
        atomic_store_explicit(&slot->kid, GONE, memory_order_release);
    } else {
        table->n_used--;
        atomic_store_explicit(&slot->kid, NULL, memory_order_release);
    }
}

static void gather(uintptr_t word, struct kids_table *table, const struct kvi_index *ix)
{
    if (word & TAG_FAN) {
        for (uint32_t i = 0; i < FAN; i++)
            gather(load(&as_fan(word)->sub[i]), table, ix);
    } else if (word & TAG_TABLE) {
        table_copy(table, as_table(word));
    } else if (word) {
        table_put(table, key_of(ix, (struct kvi_chain *)word), (struct kvi_chain *)word);
    }
}

static void fan_shrink(struct kvi_index *ix, _Atomic uintptr_t *where)
{
    uintptr_t word = load(where);
    struct kids_fan *fan = as_fan(word);
    struct kids_table *table;

    if (fan->n > FAN_MIN)
        return;
    table = table_new(ix, fan->n + 1);
    if (!table)
        return;
    gather(word, table, ix);
    store(where, (uintptr_t)table | TAG_TABLE);
    free_sets(ix, word, true);
}

void kvi_kids_remove(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key)
{
    _Atomic uintptr_t *where = &parent->kids, *fans[8];
    uint64_t mix = kvi_mix(key);
    int n_fans = 0;

    for (int shift = 56; load(where) & TAG_FAN; shift -= 8) {
        struct kids_fan *fan = as_fan(load(where));

        fans[n_fans++] = where;
        fan->n--;
        where = &fan->sub[mix >> shift & (FAN - 1)];
    }
    if (load(where) & TAG_TABLE) {
        table_remove(as_table(load(where)), key);
        table_shrink(ix, where);
    } else {
        store(where, 0);
    }
    /* Innermost first: an outer one that shrinks takes those inside along. */
    while (n_fans--)
        fan_shrink(ix, fans[n_fans]);
}

/* -- looking ----------------------------------------------------------------------------------- */

struct kvi_chain *kvi_kids_only(const struct kvi_chain *parent)
{
    uintptr_t word = load(&parent->kids);

    return word & TAGS ? NULL : (struct kvi_chain *)word;
}

uint64_t kvi_kids_count(const struct kvi_chain *parent)
{
    uintptr_t word = load(&parent->kids);

    if (word & TAG_FAN)
        return as_fan(word)->n;
    return word & TAG_TABLE ? as_table(word)->n : word != 0;
}

static bool each(uintptr_t word, bool (*fn)(void *arg, struct kvi_chain *kid), void *arg)
{
    const struct kids_table *table;

    if (word & TAG_FAN) {
        for (uint32_t i = 0; i < FAN; i++)
            if (!each(load(&as_fan(word)->sub[i]), fn, arg))
                return false;
        return true;
    }
    if (!(word & TAG_TABLE))
        return !word || fn(arg, (struct kvi_chain *)word);
    table = as_table(word);
    for (uint32_t i = 0; i < table->capacity; i++) {
        if (i + 8 < table->capacity && slot_live(&table->slot[i + 8]))
            __builtin_prefetch(slot_kid(&table->slot[i + 8]));
        if (slot_live(&table->slot[i]) && !fn(arg, slot_kid(&table->slot[i])))
            return false;
    }
    return true;
}

void kvi_kids_each(const struct kvi_chain *parent, bool (*fn)(void *arg, struct kvi_chain *kid),
                   void *arg)
{
    (void)each(load(&parent->kids), fn, arg);
}

static struct kvi_chain *next_in_table(const struct kids_table *table, const uint64_t *order,
                                       uint64_t *ret_order)
{
    const struct kvi_chain *best = NULL;

    for (uint32_t i = 0; i < table->capacity; i++) {
        uint64_t mix;

        if (!slot_live(&table->slot[i]))
            continue;
        mix = kvi_mix(slot_key(&table->slot[i]));
        if ((!order || mix > *order) && (!best || mix < *ret_order)) {
            best = slot_kid(&table->slot[i]);
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

    if (word & TAG_FAN) {
        for (uint32_t i = order ? *order >> shift & (FAN - 1) : 0; i < FAN && !kid; i++) {
            kid = next_in(ix, load(&as_fan(word)->sub[i]), shift - 8, order, ret_order);
            order = NULL; /* all keys further on are above */
        }
        return kid;
    }
    if (word & TAG_TABLE)
        return next_in_table(as_table(word), order, ret_order);
    if (!word)
        return NULL;
    kid = (struct kvi_chain *)word;
    mix = kvi_mix(key_of(ix, kid));
    if (order && mix <= *order)
        return NULL;
    *ret_order = mix;
    return kid;
}

struct kvi_chain *kvi_kids_next(const struct kvi_index *ix, const struct kvi_chain *parent,
                                const uint64_t *order, uint64_t *ret_order)
{
    uint64_t found = 0;
    struct kvi_chain *kid = next_in(ix, load(&parent->kids), 56, order, &found);

    if (kid)
        *ret_order = found;
    return kid;
}
