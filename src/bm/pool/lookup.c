// SPDX-License-Identifier: Apache-2.0
/* Lookups of blocks by their keys, which hold the blocks found. */
#include "bm/pool/lookup.h"

#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/pool/moves.h"

/* ---- steps, of several keys each: a step's memory was fetched by the step before ---- */

/* Compute tags of keys. Inlined, so that the usual key length gets a loop of its own. */
static inline __attribute__((always_inline)) void hash(const struct kvbm_registry *r, uint64_t seed,
                                                       size_t len, const uint8_t *keys, size_t n,
                                                       uint32_t *tags)
{
    const struct kvbm_bucket *table = r->table;
    uint32_t shift = r->table_shift;

    for (size_t i = 0; i < n; i++) {
        uint32_t tag = kvbm_tag_of(keys + i * len, len, seed);

        tags[i] = tag;
        __builtin_prefetch(&table[tag >> shift], 1);
    }
}

void kvbm_hash_keys(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                    uint32_t *tags)
{
    if (r->key_len == 8)
        hash(r, r->seed + group, 8, keys, n, tags);
    else
        hash(r, r->seed + group, r->key_len, keys, n, tags);
}

/* Replace tags by guesses (registry.h), valid until an entry is added to the table. */
static void guess_entries(const struct kvbm_registry *r, uint32_t *tags, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        tags[i] = kvbm_guess(r, tags[i]);
        kvbm_prefetch_entry(r, tags[i]);
    }
}

void kvbm_fetch_entries(const struct kvbm_registry *r, const uint32_t *tags, size_t n)
{
    for (size_t i = 0; i < n; i++)
        kvbm_prefetch_entry(r, kvbm_guess(r, tags[i]));
}

/* Verify a guessed entry; look the key up when the guess is wrong. */
static inline uint32_t check_guess(const struct kvbm_registry *r, uint32_t group,
                                   const uint8_t *key, uint32_t entry)
{
    if (KV_UNLIKELY(entry && !kvbm_is_key(r, entry, group, key)))
        return kvbm_find(r, group, key, kvbm_tag(r, group, key));
    return entry;
}

/* Replace guesses by slots; 0 when the key isn't registered in @pool (entry 0 has no slot
 * either). */
static void slots_of(const struct kvbm_pool *pool, uint32_t group, const uint8_t *keys, size_t n,
                     uint32_t *guesses)
{
    const struct kvbm_registry *r = pool->registry;
    enum kv_tier tier = pool->tier;

    for (size_t i = 0; i < n; i++) {
        uint32_t entry = check_guess(r, group, keys + i * r->key_len, guesses[i]);

        guesses[i] = kvbm_entry(r, entry)->slot[tier];
        kvbm_prefetch_slot(pool, guesses[i]);
    }
}

/* Prefetch the neighbours of inactive slots: taking a slot out of its list writes to both. */
static void fetch_neighbours(const struct kvbm_pool *pool, const uint32_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        kvbm_prefetch_slot(pool, pool->slots[slots[i]].prev);
        kvbm_prefetch_slot(pool, pool->slots[slots[i]].next);
    }
}

/* ---- all steps ---- */

void kvbm_find_entries(const struct kvbm_registry *r, uint32_t group, const uint8_t *keys, size_t n,
                       uint32_t *ret)
{
    kvbm_hash_keys(r, group, keys, n, ret);
    guess_entries(r, ret, n);
    for (size_t i = 0; i < n; i++)
        ret[i] = check_guess(r, group, keys + i * r->key_len, ret[i]);
}

void kvbm_find_slots(const struct kvbm_pool *pool, uint32_t group, const uint8_t *keys, size_t n,
                     uint32_t *ret)
{
    kvbm_hash_keys(pool->registry, group, keys, n, ret);
    guess_entries(pool->registry, ret, n);
    slots_of(pool, group, keys, n, ret);
}

static bool serves(const struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n)
{
    return pool && group < KVBM_MAX_GROUPS && pool->groups >> group & 1 && (keys || !n);
}

/* Add a handle to a registered block. */
static void hold(struct kvbm_pool *pool, uint32_t i)
{
    if (pool->slots[i].refs)
        pool->slots[i].refs++;
    else
        kvbm_slot_revive(pool, i);
    pool->slots[i].flags &= (uint8_t)~SLOT_LEAVING;
}

static void use(struct kvbm_pool *pool, uint32_t i)
{
    if (pool->sketch.words)
        kvbm_sketch_use(&pool->sketch, kvbm_slot_entry(pool, &pool->slots[i])->tag);
}

/* Call the touch callbacks, without the lock. */
static void touched(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n)
{
    struct kvbm_registry *r = pool->registry;
    uint32_t n_touch = atomic_load_explicit(&r->n_touch, memory_order_acquire); /* on_touch */

    for (uint32_t i = 0; n && i < n_touch; i++)
        r->touch[i].fn(r->touch[i].arg, pool->tier, group, keys, n);
}

/*
 * Many keys: each step works on one group of keys after the other, one group behind the step
 * before, so that memory accesses overlap.
 *
 *     groups of keys:   0    1    2    3    4    5 ...
 *                     visit  |    |    |   hash
 *                     neighbours  |  guess
 *                               slots
 */
#define STEP 8
#define STEPS 5

struct steps {
    const struct kvbm_pool *pool;
    const uint8_t *keys;
    size_t n;
    uint32_t group;
    uint32_t work[STEPS][STEP]; /* tags, guesses or slots of the groups in progress */
};

/* Return the number of keys of group @g: 0 beyond either end. */
static inline size_t group_len(const struct steps *s, size_t g)
{
    size_t begin = g * STEP;

    return g < SIZE_MAX / STEP && begin < s->n ? KV_MIN(s->n - begin, (size_t)STEP) : 0;
}

/* Run all steps but the visit: on group @g and on those before it. */
static void step(struct steps *s, size_t g)
{
    const struct kvbm_registry *r = s->pool->registry;
    size_t n = group_len(s, g);

    if (n)
        kvbm_hash_keys(r, s->group, s->keys + g * STEP * r->key_len, n, s->work[g % STEPS]);
    n = g < 1 ? 0 : group_len(s, g - 1);
    if (n)
        guess_entries(r, s->work[(g - 1) % STEPS], n);
    n = g < 2 ? 0 : group_len(s, g - 2);
    if (n)
        slots_of(s->pool, s->group, s->keys + (g - 2) * STEP * r->key_len, n,
                 s->work[(g - 2) % STEPS]);
    n = g < 3 ? 0 : group_len(s, g - 3);
    if (n)
        fetch_neighbours(s->pool, s->work[(g - 3) % STEPS], n);
}

/* Visit each key's slot (0: not found), until the visitor asks to stop. Returns the number of keys
 * visited. Inlined, so that each caller gets a loop of its own. A visitor may forget keys but add
 * none. */
typedef bool (*visit_fn)(struct kvbm_pool *pool, uint32_t slot, size_t i, void *arg);

static inline __attribute__((always_inline)) size_t
visit(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n, visit_fn fn, void *arg)
{
    struct steps steps;
    size_t done = 0;

    steps.pool = pool;
    steps.keys = keys;
    steps.n = n;
    steps.group = group;
    for (size_t g = 0; done < n; g++) {
        const uint32_t *slots = steps.work[(g + 1) % STEPS];
        size_t some;

        step(&steps, g);
        some = g < STEPS - 1 ? 0 : group_len(&steps, g - (STEPS - 1));
        for (size_t i = 0; i < some; i++) {
            if (!fn(pool, slots[i], done + i, arg))
                return done + i;
        }
        done += some;
    }
    return n;
}

/* ---- match ---- */

struct match {
    struct kvbm_immutable *ret;
    void *caller;
    bool touch;
    size_t found;
};

static void take(struct kvbm_pool *pool, uint32_t slot, size_t i, struct match *match)
{
    hold(pool, slot);
    if (match->touch)
        use(pool, slot);
    kvbm_track(pool, slot, match->caller);
    match->ret[i].handle = kvbm_handle_of(pool, slot);
    match->found++;
}

static bool match_prefix(struct kvbm_pool *pool, uint32_t slot, size_t i, void *arg)
{
    if (slot)
        take(pool, slot, i, arg);
    return slot != 0;
}

static bool match_any(struct kvbm_pool *pool, uint32_t slot, size_t i, void *arg)
{
    struct match *match = arg;

    if (slot)
        take(pool, slot, i, match);
    else
        match->ret[i].handle = (struct kvbm_handle){0};
    return true;
}

long kvbm_pool_match(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                     unsigned flags, struct kvbm_immutable *ret)
{
    struct match match = {ret, __builtin_return_address(0), !(flags & KVBM_MATCH_NO_TOUCH), 0};

    if (!serves(pool, group, keys, n) || (n && !ret) || flags & ~KVBM_MATCH_NO_TOUCH)
        return -EINVAL;
    kvbm_lock(pool->registry);
    visit(pool, group, keys, n, match_prefix, &match);
    pool->stats.match_hashes_requested += n;
    pool->stats.match_blocks_returned += match.found;
    kvbm_unlock(pool->registry);
    if (match.touch)
        touched(pool, group, keys, match.found);
    return (long)match.found;
}

long kvbm_pool_match_scattered(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                               unsigned flags, struct kvbm_immutable *ret)
{
    struct match match = {ret, __builtin_return_address(0), !(flags & KVBM_MATCH_NO_TOUCH), 0};
    const uint8_t *key = keys;

    if (!serves(pool, group, keys, n) || (n && !ret) || flags & ~KVBM_MATCH_NO_TOUCH)
        return -EINVAL;
    kvbm_lock(pool->registry);
    visit(pool, group, keys, n, match_any, &match);
    pool->stats.scan_hashes_requested += n;
    pool->stats.scan_blocks_returned += match.found;
    kvbm_unlock(pool->registry);
    for (size_t i = 0; match.touch && i < n; i++) {
        if (ret[i].handle.pool)
            touched(pool, group, key + i * pool->registry->key_len, 1);
    }
    return (long)match.found;
}

static bool is_there(struct kvbm_pool *pool, uint32_t slot, size_t i, void *arg)
{
    (void)pool, (void)i, (void)arg;
    return slot != 0;
}

long kvbm_pool_probe(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n)
{
    size_t found;

    if (!serves(pool, group, keys, n))
        return -EINVAL;
    kvbm_lock(pool->registry);
    found = visit(pool, group, keys, n, is_there, NULL);
    kvbm_unlock(pool->registry);
    return (long)found;
}

/* ---- touch, retain ---- */

/* Renew uses in the order of a release: the last key first, so that a leaf stays older than its
 * parent. */
static void renew(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n)
{
    const uint8_t *key = keys;
    uint32_t slots[KVBM_LOOKUP];

    for (size_t left = n, some; left > 0; left -= some) {
        some = KV_MIN(left, (size_t)KVBM_LOOKUP);
        kvbm_find_slots(pool, group, key + (left - some) * pool->registry->key_len, some, slots);
        for (size_t i = some; i-- > 0;) {
            use(pool, slots[i]);
            pool->slots[slots[i]].flags &= (uint8_t)~SLOT_LEAVING;
            if (pool->slots[slots[i]].refs)
                continue;
            kvbm_evict_remove(pool, slots[i]);
            kvbm_evict_insert(pool, slots[i]);
        }
    }
}

long kvbm_pool_touch(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n)
{
    size_t found;

    if (!serves(pool, group, keys, n))
        return -EINVAL;
    kvbm_lock(pool->registry);
    found = visit(pool, group, keys, n, is_there, NULL);
    renew(pool, group, keys, found);
    kvbm_unlock(pool->registry);
    touched(pool, group, keys, found);
    return (long)found;
}

struct retain {
    uint8_t priority;
    uint64_t until_ns; /* 0: without end */
};

static void retain_one(struct kvbm_pool *pool, uint32_t i, const struct retain *retain)
{
    kvbm_evict_prioritise(pool, i, retain->priority);
    if (retain->until_ns)
        kvbm_retain_set(pool, i, retain->until_ns);
    else
        kvbm_retain_drop(pool, i);
}

/* Retain from the last key to the first, in the order of a release: the end of a prompt is evicted
 * before its beginning. Returns the number of blocks retained. */
static size_t retain_all(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                         const struct retain *retain)
{
    const uint8_t *key = keys;
    uint32_t slots[KVBM_LOOKUP];
    size_t found = 0;

    for (size_t left = n, some; left > 0; left -= some) {
        some = KV_MIN(left, (size_t)KVBM_LOOKUP);
        kvbm_find_slots(pool, group, key + (left - some) * pool->registry->key_len, some, slots);
        for (size_t i = some; i-- > 0;) {
            if (!slots[i])
                continue;
            found++;
            retain_one(pool, slots[i], retain);
        }
    }
    return found;
}

long kvbm_pool_retain(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                      uint32_t priority, uint64_t ttl_ms)
{
    struct retain retain = {(uint8_t)priority, 0};
    size_t found = 0;
    int err = 0;

    if (!serves(pool, group, keys, n) || priority > KVBM_PRIORITY_MAX)
        return -EINVAL;
    kvbm_lock(pool->registry);
    retain.until_ns = kvbm_retain_until(ttl_ms);
    if (retain.until_ns)
        err = kvbm_retain_reserve(pool, KV_MIN(n, (size_t)(pool->n_inactive + pool->n_immutable)));
    if (err == 0)
        found = retain_all(pool, group, keys, n, &retain);
    kvbm_unlock(pool->registry);
    return err < 0 ? err : (long)found;
}

/* ---- forgetting ---- */

static bool reset_one(struct kvbm_pool *pool, uint32_t slot, size_t i, void *arg)
{
    struct kvbm_reset_result *result = arg;

    (void)i;
    if (!slot) {
        result->not_found++;
    } else if (pool->slots[slot].refs) {
        result->held++;
    } else if (pool->slots[slot].flags & SLOT_INACTIVE) {
        kvbm_evict_remove(pool, slot);
        pool->n_inactive--;
        kvbm_slot_forget(pool, slot);
        result->reset++;
    } else {
        result->not_found++; /* the same key twice in the call: reset a moment ago */
    }
    return true;
}

int kvbm_pool_reset_keys(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                         struct kvbm_reset_result *ret)
{
    struct kvbm_reset_result result = {0};

    if (!serves(pool, group, keys, n))
        return -EINVAL;
    kvbm_lock(pool->registry);
    visit(pool, group, keys, n, reset_one, &result);
    kvbm_unlock(pool->registry);
    if (ret)
        *ret = result;
    return 0;
}

long kvbm_pool_reset_inactive(struct kvbm_pool *pool)
{
    size_t n;

    if (!pool)
        return -EINVAL;
    kvbm_lock(pool->registry);
    n = kvbm_forget_inactive(pool);
    kvbm_unlock(pool->registry);
    return (long)n;
}

int kvbm_pool_reset(struct kvbm_pool *pool)
{
    int err = 0;

    if (!pool)
        return -EINVAL;
    kvbm_lock(pool->registry);
    if (pool->n_mutable || pool->n_immutable)
        err = -EBUSY;
    else
        kvbm_forget_inactive(pool);
    kvbm_unlock(pool->registry);
    return err;
}

int kvbm_registry_locate(struct kvbm_registry *r, uint32_t group, const void *keys, size_t n,
                         uint8_t *ret)
{
    const uint8_t *key = keys;
    uint32_t entries[KVBM_LOOKUP];

    if (!r || group >= KVBM_MAX_GROUPS || (n && (!keys || !ret)))
        return -EINVAL;
    kvbm_lock(r);
    for (size_t done = 0, some; done < n && r->pools; done += some) {
        some = KV_MIN(n - done, (size_t)KVBM_LOOKUP);
        kvbm_find_entries(r, group, key + done * r->key_len, some, entries);
        for (size_t i = 0; i < some; i++)
            ret[done + i] = entries[i] ? kvbm_entry(r, entries[i])->tiers : 0;
    }
    if (!r->pools && n)
        memset(ret, 0, n);
    kvbm_unlock(r);
    return 0;
}

/* True when a known entry has another position: blocks can't be registered under its key. */
static bool is_misplaced(const struct kvbm_registry *r, uint32_t entry, uint32_t position)
{
    const struct kvbm_entry *e = kvbm_entry(r, entry);

    return entry && (e->n_slots || e->n_children) && e->position != position;
}

bool kvbm_registry_misplaced(struct kvbm_registry *r, const struct kvbm_chain *chain, size_t n,
                             struct kvbm_misplaced *ret)
{
    bool scattered = kvbm_chain_scattered(chain), found = false;
    const uint8_t *key = chain->keys;
    uint32_t entries[KVBM_LOOKUP], position = chain->position;

    kvbm_lock(r);
    if (chain->parent) {
        kvbm_find_entries(r, chain->group, chain->parent, 1, entries);
        found = is_misplaced(r, entries[0], position - 1);
        if (found)
            *ret = (struct kvbm_misplaced){-1, position - 1, kvbm_entry(r, entries[0])->position};
    }
    for (size_t i = 0; i < n && !found; i++) {
        if (i % KVBM_LOOKUP == 0)
            kvbm_find_entries(r, chain->group, key + i * r->key_len,
                              KV_MIN(n - i, (size_t)KVBM_LOOKUP), entries);
        position = scattered ? 0 : chain->position + (uint32_t)i;
        found = is_misplaced(r, entries[i % KVBM_LOOKUP], position);
        if (found)
            *ret = (struct kvbm_misplaced){(int64_t)i, position,
                                           kvbm_entry(r, entries[i % KVBM_LOOKUP])->position};
    }
    kvbm_unlock(r);
    return found;
}
