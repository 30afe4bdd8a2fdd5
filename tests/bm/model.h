// SPDX-License-Identifier: Apache-2.0
/**
 * A naive model of a registry with its pools: blocks in arrays, and every lookup a search of all
 * blocks. Keys are small numbers, M_GROUP of them to a group; blocks are numbered from 0. The
 * caller sets the time.
 */
#ifndef KV_TEST_BM_MODEL_H
#define KV_TEST_BM_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bm/pool/sketch.h"
#include "kvbm_events.h"
#include "kvbm_pool.h"

#define M_GROUPS 2
#define M_GROUP 32
#define M_KEYS (M_GROUPS * M_GROUP)
#define M_POOLS 3
#define M_BLOCKS 17 /* ends that the eviction of one block carries out, see retain.h */
#define M_EVENTS 65536
#define M_AGES 4096 /* releases that lineage tells apart, in pools as small as these */

enum m_state { M_FREE, M_MUTABLE, M_COMPLETE, M_REGISTERED };

struct m_block {
    enum m_state state;
    int key;
    uint32_t refs;
    int primary; /* of a duplicate, else -1 */
    uint32_t priority;
    uint32_t level;
    uint64_t tick;  /* release, counted by its pool */
    uint64_t order; /* release or change of priority */
    uint64_t life;  /* of a primary: which registration this is */
    uint64_t until; /* end of its priority, 0: none */
    int fill;       /* mutable: tokens in it, -1: Reset */
    int filling;    /* the key they are to give */
    uint32_t position;
    bool tokens; /* complete: to be told when it is registered */
};

struct m_pool {
    enum kvbm_eviction policy;
    bool reject, reset_on_release;
    enum kv_tier tier;
    uint64_t groups;
    int n_blocks;
    struct m_block blocks[M_BLOCKS];
    int free[M_BLOCKS], n_free;
    uint64_t tick;
    struct kvbm_sketch sketch;
    uint64_t evictions, registrations, duplicates;
};

struct m_key {
    int parent; /* -1: none; as it was first named */
    uint32_t position;
    uint32_t tag;
};

struct m_event {
    enum kvbm_event_type type;
    int tier, key, parent;
    uint32_t position;
    bool end; /* first or last */
    bool tokens;
};

struct model {
    struct m_pool pools[M_POOLS];
    int n_pools;
    struct m_key keys[M_KEYS];
    uint64_t order, lives;
    struct m_event events[M_EVENTS];
    size_t n_events;
};

static inline struct m_block m_blank(void)
{
    return (struct m_block){
        .primary = -1, .priority = KVBM_PRIORITY_DEFAULT, .key = -1, .fill = -1, .filling = -1};
}

static inline void m_init(struct model *m, const struct kvbm_pool_opts *opts, int n_pools)
{
    memset(m, 0, sizeof(*m));
    m->n_pools = n_pools;
    for (int p = 0; p < n_pools; p++) {
        struct m_pool *pool = &m->pools[p];

        pool->policy = opts[p].eviction;
        pool->reject = opts[p].reject_duplicates;
        pool->reset_on_release = opts[p].reset_on_release;
        pool->tier = opts[p].tier;
        pool->groups = opts[p].groups ? opts[p].groups : UINT64_MAX;
        pool->n_blocks = (int)opts[p].n_blocks;
        for (int i = 0; i < pool->n_blocks; i++) {
            pool->blocks[i] = m_blank();
            pool->free[pool->n_free++] = i;
        }
        kvbm_sketch_init(&pool->sketch, opts[p].n_blocks);
    }
}

static inline void m_fini(struct model *m)
{
    for (int p = 0; p < m->n_pools; p++)
        kvbm_sketch_fini(&m->pools[p].sketch);
}

/* ---- what is what ---- */

static inline int m_group(int key)
{
    return key / M_GROUP;
}

static inline bool m_serves(const struct m_pool *pool, int key)
{
    return pool->groups >> m_group(key) & 1;
}

static inline bool m_named(const struct model *m, int key)
{
    for (int p = 0; p < m->n_pools; p++) {
        for (int i = 0; i < m->pools[p].n_blocks; i++) {
            if (m->pools[p].blocks[i].state >= M_COMPLETE && m->pools[p].blocks[i].key == key)
                return true;
        }
    }
    return false;
}

static inline bool m_known(const struct model *m, int key)
{
    for (int k = 0; k < M_KEYS; k++) {
        if (m->keys[k].parent == key && m_named(m, k))
            return true;
    }
    return m_named(m, key);
}

/* The block found under a key, -1 when there is none. */
static inline int m_find(const struct m_pool *pool, int key)
{
    for (int i = 0; i < pool->n_blocks; i++) {
        const struct m_block *b = &pool->blocks[i];

        if (b->state == M_REGISTERED && b->key == key && b->primary < 0)
            return i;
    }
    return -1;
}

static inline uint8_t m_tiers(const struct model *m, int key)
{
    uint8_t tiers = 0;

    for (int p = 0; p < m->n_pools; p++)
        tiers |= (uint8_t)((m_find(&m->pools[p], key) >= 0) << m->pools[p].tier);
    return tiers;
}

static inline int m_leaners(const struct m_pool *pool, int i)
{
    int n = 0;

    for (int j = 0; j < pool->n_blocks; j++)
        n += pool->blocks[j].state == M_REGISTERED && pool->blocks[j].primary == i;
    return n;
}

static inline bool m_inactive(const struct m_pool *pool, int i)
{
    const struct m_block *b = &pool->blocks[i];

    return b->state == M_REGISTERED && b->primary < 0 && !b->refs && !m_leaners(pool, i);
}

static inline bool m_leaf(const struct model *m, const struct m_pool *pool, int i)
{
    for (int j = 0; j < pool->n_blocks; j++) {
        if (m_inactive(pool, j) && m->keys[pool->blocks[j].key].parent == pool->blocks[i].key)
            return false;
    }
    return true;
}

static inline int m_count(const struct m_pool *pool, enum m_state state)
{
    int n = 0;

    for (int i = 0; i < pool->n_blocks; i++)
        n += pool->blocks[i].state == state;
    return n;
}

static inline int m_n_inactive(const struct m_pool *pool)
{
    int n = 0;

    for (int i = 0; i < pool->n_blocks; i++)
        n += m_inactive(pool, i);
    return n;
}

/* ---- moves ---- */

static inline void m_tell(struct model *m, enum kvbm_event_type type, int p, int key, bool end,
                          bool tokens)
{
    const struct m_key *k = &m->keys[key];

    if (m->n_events < M_EVENTS)
        m->events[m->n_events++] =
            (struct m_event){type,        m->pools[p].tier,
                             key,         type == KVBM_EVENT_STORED ? k->parent : -1,
                             k->position, end,
                             tokens};
}

static inline void m_free(struct m_pool *pool, int i)
{
    pool->blocks[i] = m_blank();
    pool->free[pool->n_free++] = i;
}

/* A primary without holders loses its key. */
static inline void m_unregister(struct model *m, int p, int i)
{
    struct m_block *b = &m->pools[p].blocks[i];
    int key = b->key;

    *b = m_blank();
    m_tell(m, KVBM_EVENT_REMOVED, p, key, !m_tiers(m, key), false);
}

static inline void m_forget(struct model *m, int p, int i)
{
    m_unregister(m, p, i);
    m_free(&m->pools[p], i);
}

/* Block @i is the latest of the inactive ones. */
static inline void m_latest(struct model *m, struct m_pool *pool, int i)
{
    static const uint32_t thresholds[3] = {3, 8, 15};
    struct m_block *b = &pool->blocks[i];
    uint32_t count = kvbm_sketch_count(&pool->sketch, m->keys[b->key].tag);

    b->tick = ++pool->tick;
    b->order = ++m->order;
    b->level = 0;
    for (int t = 0; t < 3; t++)
        b->level += pool->policy == KVBM_EVICT_LFU && count >= thresholds[t];
}

static inline void m_lost_one(struct model *m, int p, int i)
{
    struct m_pool *pool = &m->pools[p];

    if (!m_inactive(pool, i))
        return;
    if (pool->reset_on_release)
        m_forget(m, p, i);
    else
        m_latest(m, pool, i);
}

static inline void m_release(struct model *m, int p, int i)
{
    struct m_pool *pool = &m->pools[p];
    int primary = pool->blocks[i].primary;

    pool->blocks[i].refs--;
    if (primary < 0) {
        m_lost_one(m, p, i);
    } else if (!pool->blocks[i].refs) {
        m_free(pool, i);
        m_lost_one(m, p, primary);
    }
}

static inline void m_use(struct model *m, struct m_pool *pool, int key)
{
    if (pool->policy == KVBM_EVICT_LFU)
        kvbm_sketch_use(&pool->sketch, m->keys[key].tag);
}

/* Whether inactive block @a goes before @b (both leaves, with lineage); equal ages are equal. */
static inline bool m_before(const struct m_pool *pool, const struct m_block *a,
                            const struct m_block *b)
{
    uint64_t oldest = pool->tick >= M_AGES ? pool->tick - M_AGES + 1 : 0;

    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (pool->policy == KVBM_EVICT_LINEAGE)
        return (a->tick > oldest ? a->tick : oldest) < (b->tick > oldest ? b->tick : oldest);
    return a->level != b->level ? a->level < b->level : a->order < b->order;
}

/* May an allocation return block @i now? Then it has. */
static inline bool m_take(struct model *m, int p, int i)
{
    struct m_pool *pool = &m->pools[p];

    if (i < 0 || i >= pool->n_blocks)
        return false;
    if (pool->n_free) {
        if (pool->free[0] != i)
            return false;
        memmove(pool->free, pool->free + 1, (size_t)--pool->n_free * sizeof(*pool->free));
    } else {
        if (!m_inactive(pool, i) || (pool->policy == KVBM_EVICT_LINEAGE && !m_leaf(m, pool, i)))
            return false;
        for (int j = 0; j < pool->n_blocks; j++) {
            if (m_inactive(pool, j) && m_before(pool, &pool->blocks[j], &pool->blocks[i]) &&
                (pool->policy != KVBM_EVICT_LINEAGE || m_leaf(m, pool, j)))
                return false;
        }
        m_unregister(m, p, i);
        pool->evictions++;
    }
    pool->blocks[i].state = M_MUTABLE;
    pool->blocks[i].refs = 1;
    return true;
}

/* Blocks get the keys of a chain; all or none. */
static inline int m_complete(struct model *m, int p, const int *blocks, const int *keys, int n,
                             int parent, uint32_t position)
{
    struct m_pool *pool = &m->pools[p];
    int err = 0, i;

    if (parent >= 0 && m_known(m, parent) && m->keys[parent].position != position - 1)
        return -EEXIST;
    if (parent >= 0 && keys[0] == parent)
        return -EEXIST;
    if (parent >= 0 && !m_known(m, parent))
        m->keys[parent].position = position - 1;
    for (i = 0; i < n && err == 0; i += err == 0) {
        int key = keys[i], above = i ? keys[i - 1] : parent;

        if (m_known(m, key) && m->keys[key].position != position + (uint32_t)i) {
            err = -EEXIST;
            continue;
        }
        if (!m_named(m, key)) {
            m->keys[key].parent = above;
            m->keys[key].position = position + (uint32_t)i;
        }
        pool->blocks[blocks[i]].key = key;
        pool->blocks[blocks[i]].state = M_COMPLETE;
    }
    while (err < 0 && i-- > 0) {
        pool->blocks[blocks[i]].key = -1;
        pool->blocks[blocks[i]].state = M_MUTABLE;
    }
    return err;
}

/* The block that the caller holds in the end. */
static inline int m_register(struct model *m, int p, int i)
{
    struct m_pool *pool = &m->pools[p];
    int key = pool->blocks[i].key, primary = m_find(pool, key);

    m_use(m, pool, key);
    if (primary < 0) {
        m_tell(m, KVBM_EVENT_STORED, p, key, !m_tiers(m, key), pool->blocks[i].tokens);
        pool->blocks[i].state = M_REGISTERED;
        pool->blocks[i].life = ++m->lives;
        pool->registrations++;
        return i;
    }
    if (pool->reject) {
        m_free(pool, i);
        pool->blocks[primary].refs++;
        return primary;
    }
    pool->blocks[i].state = M_REGISTERED;
    pool->blocks[i].primary = primary;
    pool->duplicates++;
    return i;
}

/* The blocks latest in their sequences of those whose priority ends then. Returns whether there were any. */
static inline bool m_expire_last(struct model *m, struct m_pool *pool, uint64_t when)
{
    uint32_t position = 0;
    bool any = false;

    for (int i = 0; i < pool->n_blocks; i++) {
        const struct m_block *b = &pool->blocks[i];

        if (b->until != when)
            continue;
        any = true;
        position = m->keys[b->key].position > position ? m->keys[b->key].position : position;
    }
    m->order += any;
    for (int i = 0; i < pool->n_blocks; i++) {
        struct m_block *b = &pool->blocks[i];

        if (b->until != when || m->keys[b->key].position != position)
            continue;
        b->until = 0;
        b->priority = KVBM_PRIORITY_DEFAULT;
        b->order = m->order;
    }
    return any;
}

/* Priorities that end by now; of those that end together, the later in their sequences first. */
static inline void m_expire(struct model *m, int p, uint64_t now)
{
    struct m_pool *pool = &m->pools[p];

    for (;;) {
        uint64_t next = now + 1;

        for (int i = 0; i < pool->n_blocks; i++) {
            if (pool->blocks[i].until && pool->blocks[i].until < next)
                next = pool->blocks[i].until;
        }
        if (next > now)
            return;
        while (m_expire_last(m, pool, next))
            ;
    }
}

/* The same for block @i alone. */
static inline void m_expire_one(struct model *m, int p, int i, uint64_t now)
{
    struct m_block *b = &m->pools[p].blocks[i];

    if (!b->until || b->until > now)
        return;
    b->until = 0;
    b->priority = KVBM_PRIORITY_DEFAULT;
    b->order = ++m->order;
}

static inline void m_retain(struct model *m, int p, int key, uint32_t priority, uint64_t until)
{
    int i = m_find(&m->pools[p], key);

    if (i < 0)
        return;
    m->pools[p].blocks[i].priority = priority;
    m->pools[p].blocks[i].until = until;
    m->pools[p].blocks[i].order = ++m->order;
}

#endif
