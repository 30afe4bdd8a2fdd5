// SPDX-License-Identifier: Apache-2.0
/*
 * Random operations on two pools of a registry, done to the model, too. Each operation says all of itself in
 * a few numbers, so that a list that fails can be cut down to the few that matter, and is printed.
 */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include <stdio.h>

#include "bm.h"
#include "bm/pool.h"
#include "index/random.h"
#include "model.h"

#define MAX_HELD 40
#define MAX_CHAIN 6

enum kind {
    ALLOCATE,
    COMPLETE,
    REGISTER,
    UNSTAGE, /* complete blocks back: released or reset */
    GIVE_BACK,
    MATCH,
    SCATTERED,
    RELEASE,
    CLONE,
    TRY_RETURN,
    WEAKEN,
    UPGRADE,
    TOUCH,
    RETAIN,
    RESET_KEYS,
    RESET_INACTIVE,
    LOCATE,
    INFO,
    STALE,
    N_KINDS
};
static const char *const kind_names[N_KINDS] = {
    "allocate",   "complete", "register", "unstage", "give_back", "match", "scatter",
    "release",    "clone",    "try",      "weaken",  "upgrade",   "touch", "retain",
    "reset_keys", "reset",    "locate",   "info",    "stale"};
static const uint8_t weights[N_KINDS] = {14, 16, 16, 2, 3, 12, 5, 18, 4, 3,
                                         3,  4,  5,  4, 3, 1,  2, 3,  3};

struct op {
    uint8_t kind, pool;
    uint32_t n, what, how;
};

struct held {
    struct kvbm_handle handle;
    int pool;
    uint64_t life; /* weak */
};

struct list {
    struct held all[MAX_HELD + MAX_CHAIN + 1];
    int n;
};

struct run {
    struct bm bm;
    struct kvbm_pool *pools[M_POOLS];
    struct model model;
    struct list mutable, complete, immutable, weak;
    struct list gone; /* immutable handles after the last of their kind */
    uint64_t n_stale[M_POOLS];
    char wrong[200];
};

#define WRONG(...) (snprintf(run->wrong, sizeof(run->wrong), __VA_ARGS__), false)
#define MUST(condition) \
    if (!(condition))   \
    return WRONG("line %d: %s", __LINE__, #condition)

static uint64_t name_of(int key)
{
    return 0x1000 + (uint64_t)key;
}

/* A forest that is the same every time: most keys continue a chain, some branch off. */
static int parent_of(int key)
{
    return key % 16 == 0 ? -1 : key % 5 == 0 ? key - 3 : key - 1;
}

static uint32_t depth_of(int key)
{
    return parent_of(key) < 0 ? 0 : depth_of(parent_of(key)) + 1;
}

/* @n keys (fewer at a sequence's start) that end with @last. */
static int path_to(int last, int n, int *ret)
{
    int keys[MAX_CHAIN], i = MAX_CHAIN;

    for (int k = last; k >= 0 && i > 0 && MAX_CHAIN - i < n; k = parent_of(k))
        keys[--i] = k;
    memcpy(ret, keys + i, (size_t)(MAX_CHAIN - i) * sizeof(*ret));
    return MAX_CHAIN - i;
}

static void names_of(const int *keys, int n, uint64_t *ret)
{
    for (int i = 0; i < n; i++)
        ret[i] = name_of(keys[i]);
}

static void push(struct list *list, struct kvbm_handle handle, int pool, uint64_t life)
{
    list->all[list->n++] = (struct held){handle, pool, life};
}

/* Move up to @n handles of a pool out of a list, from a place that @how says. */
static int pull(struct list *list, int pool, int n, uint32_t how, struct held *ret)
{
    int taken = 0;

    for (int i = 0; i < list->n && taken < n;) {
        int at = (int)((how + (uint32_t)i) % (uint32_t)list->n);

        if (list->all[at].pool != pool) {
            i++;
            continue;
        }
        ret[taken++] = list->all[at];
        memmove(&list->all[at], &list->all[at + 1],
                (size_t)(--list->n - at) * sizeof(list->all[0]));
        i = 0;
    }
    return taken;
}

/* ---- operations ---- */

static bool allocate(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_shortage shortage = {0, 0};
    struct kvbm_mutable blocks[MAX_CHAIN];
    size_t available = (size_t)(pool->n_free + m_n_inactive(pool)), n = op->n;
    int rc;

    if (run->mutable.n + (int)n > MAX_HELD)
        return true;
    rc = kvbm_pool_allocate(run->pools[op->pool], n, blocks, &shortage);
    if (n > available) {
        MUST(rc == -ENOSPC && shortage.requested == n && shortage.available == available);
        return true;
    }
    MUST(rc == 0);
    for (size_t i = 0; i < n; i++) {
        if (!m_take(&run->model, op->pool, (int)blocks[i].handle.block))
            return WRONG("block %u was not the one to take", blocks[i].handle.block);
        push(&run->mutable, blocks[i].handle, op->pool, 0);
    }
    return true;
}

static bool complete(struct run *run, const struct op *op)
{
    struct held held[MAX_CHAIN];
    int keys[MAX_CHAIN], blocks[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), rc, want;
    uint64_t names[MAX_CHAIN] = {0}, above;
    struct kvbm_mutable in[MAX_CHAIN];
    struct kvbm_complete out[MAX_CHAIN];
    int parent;
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = names};

    n = pull(&run->mutable, op->pool, n, op->how, held);
    if (!n)
        return true;
    parent = parent_of(keys[0]);
    chain.position = depth_of(keys[0]);
    if (op->how % 10 == 0) { /* somebody is confused */
        parent = (int)(op->how / 10 % M_KEYS);
        chain.position = op->how % 20 ? depth_of(parent) + 1 : 1 + op->how / 1000 % 4;
    }
    above = name_of(parent);
    chain.parent = parent < 0 ? NULL : &above;
    names_of(keys, n, names);
    for (int i = 0; i < n; i++) {
        in[i].handle = held[i].handle;
        blocks[i] = (int)held[i].handle.block;
    }
    rc = kvbm_pool_complete(run->pools[op->pool], in, (size_t)n, &chain, out);
    want = m_complete(&run->model, op->pool, blocks, keys, n, parent, chain.position);
    for (int i = 0; i < n; i++)
        push(rc < 0 ? &run->mutable : &run->complete, rc < 0 ? in[i].handle : out[i].handle,
             op->pool, 0);
    if (rc != want)
        return WRONG("complete: %d, not %d", rc, want);
    return true;
}

static bool register_some(struct run *run, const struct op *op)
{
    struct held held[MAX_CHAIN];
    struct kvbm_complete in[MAX_CHAIN];
    struct kvbm_immutable out[MAX_CHAIN];
    int n = 0;

    if (run->immutable.n + MAX_CHAIN <= MAX_HELD)
        n = pull(&run->complete, op->pool, (int)op->n, op->how, held);
    for (int i = 0; i < n; i++)
        in[i].handle = held[i].handle;
    if (!n)
        return true;
    MUST(kvbm_pool_register(run->pools[op->pool], in, (size_t)n, out) == 0);
    for (int i = 0; i < n; i++) {
        int block = m_register(&run->model, op->pool, (int)held[i].handle.block);

        MUST(out[i].handle.block == (uint32_t)block);
        push(&run->immutable, out[i].handle, op->pool, 0);
    }
    return true;
}

static bool unstage(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_complete block;
    struct kvbm_mutable back;
    struct held held;

    if (!pull(&run->complete, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    if (op->n % 2) {
        MUST(kvbm_complete_release(&block) == 0);
        m_free(pool, (int)held.handle.block);
    } else {
        MUST(kvbm_complete_reset(&block, &back) == 0);
        pool->blocks[held.handle.block].state = M_MUTABLE;
        pool->blocks[held.handle.block].key = -1;
        push(&run->mutable, back.handle, op->pool, 0);
    }
    return true;
}

static bool give_back(struct run *run, const struct op *op)
{
    struct kvbm_mutable blocks[MAX_CHAIN];
    struct held held[MAX_CHAIN];
    int n = pull(&run->mutable, op->pool, (int)op->n, op->how, held);

    for (int i = 0; i < n; i++) {
        blocks[i].handle = held[i].handle;
        m_free(&run->model.pools[op->pool], (int)held[i].handle.block);
    }
    MUST(kvbm_pool_release_mutable(run->pools[op->pool], blocks, (size_t)n) == 0);
    return true;
}

/* A match took key's block, as the model sees it. */
static bool found(struct run *run, const struct op *op, int key, struct kvbm_handle handle,
                  bool touch)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    int block = m_find(pool, key);

    MUST(block >= 0 && handle.block == (uint32_t)block);
    pool->blocks[block].refs++;
    if (touch)
        m_use(&run->model, pool, key);
    push(&run->immutable, handle, op->pool, 0);
    return true;
}

static bool match(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    const struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable out[MAX_CHAIN];
    uint64_t names[MAX_CHAIN] = {0};

    if (run->immutable.n + n > MAX_HELD)
        return true;
    names_of(keys, n, names);
    while (there < n && m_find(pool, keys[there]) >= 0)
        there++;
    MUST(kvbm_pool_probe(run->pools[op->pool], 0, names, (size_t)n) == there);
    MUST(kvbm_pool_match(run->pools[op->pool], 0, names, (size_t)n, op->how % 2, out) == there);
    for (int i = 0; i < there; i++) {
        if (!found(run, op, keys[i], out[i].handle, op->how % 2 == 0))
            return false;
    }
    return true;
}

static bool scattered(struct run *run, const struct op *op)
{
    struct kvbm_immutable out[MAX_CHAIN];
    uint64_t names[MAX_CHAIN] = {0};
    int keys[MAX_CHAIN];
    long n = 0, rc;

    if (run->immutable.n + MAX_CHAIN > MAX_HELD)
        return true;
    for (uint32_t i = 0; i < op->n; i++)
        keys[i] = (int)((op->what + i * op->how % 7) % M_KEYS);
    names_of(keys, (int)op->n, names);
    rc = kvbm_pool_match_scattered(run->pools[op->pool], 0, names, op->n, op->how % 2, out);
    for (uint32_t i = 0; i < op->n; i++) {
        if (m_find(&run->model.pools[op->pool], keys[i]) < 0) {
            MUST(!out[i].handle.pool);
            continue;
        }
        n++;
        if (!found(run, op, keys[i], out[i].handle, op->how % 2 == 0))
            return false;
    }
    MUST(rc == n);
    return true;
}

/* If that was the block's last handle, none like it opens the block ever again. */
static void forget_handle(struct run *run, const struct op *op, struct kvbm_handle handle)
{
    if (run->model.pools[op->pool].blocks[handle.block].refs)
        return;
    if (run->gone.n == MAX_HELD)
        run->gone.n = 0;
    push(&run->gone, handle, op->pool, 0);
}

static bool stale(struct run *run, const struct op *op)
{
    struct kvbm_immutable block, out;
    (void)op;

    for (int i = 0; i < run->gone.n; i++) {
        block.handle = run->gone.all[i].handle;
        MUST(kvbm_immutable_clone(&block, &out) == -ESTALE);
        run->n_stale[run->gone.all[i].pool]++;
    }
    return true;
}

static bool release(struct run *run, const struct op *op)
{
    struct kvbm_immutable blocks[MAX_CHAIN];
    struct held held[MAX_CHAIN];
    int n = pull(&run->immutable, op->pool, (int)op->n, op->how, held);

    for (int i = 0; i < n; i++)
        blocks[i].handle = held[i].handle;
    MUST(kvbm_pool_release(run->pools[op->pool], blocks, (size_t)n) == 0);
    for (int i = n; i-- > 0;) {
        m_release(&run->model, op->pool, (int)held[i].handle.block);
        forget_handle(run, op, held[i].handle);
    }
    return true;
}

static bool clone_one(struct run *run, const struct op *op)
{
    struct kvbm_immutable block, out;
    struct held held;

    if (run->immutable.n + 1 > MAX_HELD || !pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    MUST(kvbm_immutable_clone(&block, &out) == 0);
    run->model.pools[op->pool].blocks[held.handle.block].refs++;
    push(&run->immutable, held.handle, op->pool, 0);
    push(&run->immutable, out.handle, op->pool, 0);
    return true;
}

static bool try_return(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable block;
    struct held held;
    int rc, i;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    i = (int)held.handle.block;
    rc = kvbm_immutable_try_return(&block);
    if (pool->blocks[i].refs == 1 && !m_leaners(pool, i)) {
        MUST(rc == 0);
        m_release(&run->model, op->pool, i);
    } else {
        MUST(rc == -EBUSY);
        push(&run->immutable, held.handle, op->pool, 0);
    }
    return true;
}

static bool weaken(struct run *run, const struct op *op)
{
    const struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable block;
    struct kvbm_weak weak;
    struct held held;
    int i;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    push(&run->immutable, held.handle, op->pool, 0);
    block.handle = held.handle;
    MUST(kvbm_immutable_downgrade(&block, &weak) == 0);
    i = (int)held.handle.block;
    if (pool->blocks[i].primary >= 0)
        i = pool->blocks[i].primary;
    MUST(weak.handle.block == (uint32_t)i);
    if (run->weak.n == MAX_HELD)
        run->weak.n = 0;
    push(&run->weak, weak.handle, op->pool, pool->blocks[i].life);
    return true;
}

static bool upgrade(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable out;
    struct kvbm_weak weak;
    struct m_block *b;
    struct held held;
    int rc;

    if (run->immutable.n + 1 > MAX_HELD || !pull(&run->weak, op->pool, 1, op->how, &held))
        return true;
    weak.handle = held.handle;
    b = &pool->blocks[held.handle.block];
    rc = kvbm_weak_upgrade(&weak, &out);
    if (b->state != M_REGISTERED || b->life != held.life) {
        MUST(rc == -ESTALE);
        return true;
    }
    MUST(rc == 0 && out.handle.block == held.handle.block);
    b->refs++;
    push(&run->immutable, out.handle, op->pool, 0);
    push(&run->weak, held.handle, op->pool, held.life);
    return true;
}

static bool touch(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    struct m_pool *pool = &run->model.pools[op->pool];
    uint64_t names[MAX_CHAIN] = {0};

    names_of(keys, n, names);
    while (there < n && m_find(pool, keys[there]) >= 0)
        there++;
    MUST(kvbm_pool_touch(run->pools[op->pool], 0, names, (size_t)n) == there);
    for (int i = there; i-- > 0;) {
        int block = m_find(pool, keys[i]);

        m_use(&run->model, pool, keys[i]);
        if (m_inactive(pool, block))
            m_latest(&run->model, pool, block);
    }
    return true;
}

static bool retain(struct run *run, const struct op *op)
{
    static const uint32_t priorities[] = {0, 34, 35, 35, 35, 36, 63, 64, 100};
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    uint32_t priority = priorities[op->how % KV_COUNT(priorities)];
    uint64_t names[MAX_CHAIN] = {0};

    names_of(keys, n, names);
    for (int i = 0; i < n; i++)
        there += m_find(&run->model.pools[op->pool], keys[i]) >= 0;
    /* an end that this test doesn't live to see */
    MUST(kvbm_pool_retain(run->pools[op->pool], 0, names, (size_t)n, priority,
                          op->how % 3 ? 0 : 3600000 + op->how % 50 * 10) == there);
    for (int i = 0; i < n; i++)
        m_retain(&run->model, op->pool, keys[i], priority);
    return true;
}

static bool reset_keys(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys);
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_reset_result is, want = {0};
    uint64_t names[MAX_CHAIN] = {0};

    if (op->how % 4 == 0)
        keys[n - 1] = keys[0];
    names_of(keys, n, names);
    MUST(kvbm_pool_reset_keys(run->pools[op->pool], 0, names, (size_t)n, &is) == 0);
    for (int i = 0; i < n; i++) {
        int block = m_find(pool, keys[i]);

        if (block < 0) {
            want.not_found++;
        } else if (!m_inactive(pool, block)) {
            want.held++;
        } else {
            want.reset++;
            m_forget(&run->model, op->pool, block);
        }
    }
    MUST(is.reset == want.reset && is.held == want.held && is.not_found == want.not_found);
    return true;
}

/* Taken in the order of eviction: it shows in the free blocks. */
static bool reset_inactive(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_pool *real = run->pools[op->pool];
    int n = m_n_inactive(pool), was_free = pool->n_free;

    MUST(kvbm_pool_reset_inactive(real) == n);
    MUST(real->n_free == (uint32_t)(was_free + n));
    pool->n_free = 0; /* so that m_take looks at the inactive ones */
    for (int i = 0; i < n; i++) {
        uint32_t at = (real->free_head + (uint32_t)(was_free + i)) % real->n_blocks;

        MUST(m_take(&run->model, op->pool, (int)real->free[at] - 1));
    }
    pool->evictions -= (uint64_t)n;
    for (int i = 0; i < was_free + n; i++) {
        uint32_t at = (real->free_head + (uint32_t)i) % real->n_blocks;
        int block = (int)real->free[at] - 1;

        MUST(i >= was_free || pool->free[i] == block);
        pool->n_free = i;
        m_free(pool, block);
    }
    return true;
}

static bool locate(struct run *run, const struct op *op)
{
    uint64_t names[M_KEYS];
    uint8_t tiers[M_KEYS];
    (void)op;

    for (int i = 0; i < M_KEYS; i++)
        names[i] = name_of(i);
    MUST(kvbm_registry_locate(run->bm.registry, 0, names, M_KEYS, tiers) == 0);
    for (int i = 0; i < M_KEYS; i++)
        MUST(tiers[i] == m_tiers(&run->model, i));
    return true;
}

static bool info(struct run *run, const struct op *op)
{
    const struct m_pool *pool = &run->model.pools[op->pool];
    const struct m_block *b;
    struct kvbm_immutable block;
    struct kvbm_block_info is;
    struct held held;
    uint64_t key;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    push(&run->immutable, held.handle, op->pool, 0);
    block.handle = held.handle;
    b = &pool->blocks[held.handle.block];
    MUST(kvbm_immutable_info(&block, &is) == 0);
    memcpy(&key, is.key, 8);
    MUST(key == name_of(b->key));
    MUST(is.handles == b->refs);
    MUST(is.duplicate == (b->primary >= 0));
    MUST(is.primary == (b->primary >= 0 ? (uint32_t)b->primary : held.handle.block));
    MUST(is.position == run->model.keys[b->key].position);
    MUST(is.tiers == m_tiers(&run->model, b->key));
    MUST(is.priority == pool->blocks[is.primary].priority);
    return true;
}

static bool (*const ops[N_KINDS])(struct run *run, const struct op *op) = {
    allocate,   complete,       register_some, unstage, give_back, match, scattered,
    release,    clone_one,      try_return,    weaken,  upgrade,   touch, retain,
    reset_keys, reset_inactive, locate,        info,    stale};

/* ---- judging ---- */

static bool same_counts(struct run *run, int p)
{
    const struct m_pool *pool = &run->model.pools[p];
    struct kvbm_pool_stats is;
    int inactive = m_n_inactive(pool),
        mutable = m_count(pool, M_MUTABLE) + m_count(pool, M_COMPLETE);

    kvbm_pool_get_stats(run->pools[p], &is);
    MUST(is.reset_pool_size == (uint64_t)pool->n_free);
    MUST(is.inflight_mutable == (uint64_t) mutable);
    MUST(is.inactive_pool_size == (uint64_t)inactive);
    MUST(is.inflight_immutable == (uint64_t)(m_count(pool, M_REGISTERED) - inactive));
    MUST(is.evictions == pool->evictions);
    MUST(is.registrations == pool->registrations);
    MUST(is.duplicate_blocks == pool->duplicates);
    MUST(is.stale_handles == run->n_stale[p]);
    return true;
}

static bool same_events(struct run *run)
{
    const struct model *m = &run->model;

    if (bm_told(&run->bm) != m->n_events)
        return WRONG("%zu events, not %zu", run->bm.n_told, m->n_events);
    for (size_t i = 0; i < m->n_events; i++) {
        const struct kvbm_event *e = &run->bm.told[i];

        if (e->type != m->events[i].type || (int)e->tier != m->events[i].tier ||
            bm_told_key(&run->bm, i) != name_of(m->events[i].key) ||
            (e->first || e->last) != m->events[i].end || e->sequence != i)
            return WRONG("event %zu is another", i);
    }
    return true;
}

static bool judge(struct run *run)
{
    for (int p = 0; p < M_POOLS; p++) {
        if (!same_counts(run, p))
            return false;
    }
    MUST(kvbm_registry_check(run->bm.registry) == 0);
    return true;
}

/* All handles go, then all blocks; what was stored is removed. */
static bool wind_up(struct run *run)
{
    struct list *lists[] = {&run->mutable, &run->complete, &run->immutable};
    int balance = 0;

    for (int p = 0; p < M_POOLS; p++) {
        for (struct op op = {.pool = (uint8_t)p, .n = MAX_CHAIN}; run->mutable.n; op.pool ^= 1)
            give_back(run, &op);
        for (struct op op = {.pool = (uint8_t)p, .n = 1}; run->complete.n; op.pool ^= 1)
            unstage(run, &op);
        for (struct op op = {.pool = (uint8_t)p, .n = MAX_CHAIN}; run->immutable.n; op.pool ^= 1)
            release(run, &op);
        MUST(reset_inactive(run, &(struct op){.pool = (uint8_t)p}));
    }
    for (size_t i = 0; i < KV_COUNT(lists); i++)
        MUST(!lists[i]->n);
    if (!judge(run) || !same_events(run))
        return false;
    for (size_t i = 0; i < run->bm.n_told; i++)
        balance += run->bm.told[i].type == KVBM_EVENT_STORED ? 1 : -1;
    MUST(balance == 0 && run->bm.registry->live_entries == 0);
    return true;
}

/* ---- playing ---- */

static struct run *begin(const struct kvbm_pool_opts *opts)
{
    struct run *run = calloc(1, sizeof(*run));

    assert_non_null(run);
    bm_open(&run->bm, &opts[0]);
    run->bm.registry->seed = 42; /* the same tags every time: the counts of uses depend on them */
    run->pools[0] = run->bm.pool;
    run->pools[1] = bm_pool(&run->bm, &opts[1]);
    m_init(&run->model, opts);
    for (int i = 0; i < M_KEYS; i++) {
        uint64_t name[KVBM_MAX_KEY / 8] = {name_of(i)}; /* as long as a key may be */

        run->model.keys[i] = (struct m_key){-1, 0, kvbm_tag(run->bm.registry, 0, name)};
    }
    return run;
}

static void end(struct run *run)
{
    assert_int_equal(kvbm_pool_destroy(run->pools[1]), 0);
    bm_close(&run->bm);
    m_fini(&run->model);
    free(run);
}

/* Play a list; the number of the operation that went wrong, or -1. A broken world is left behind. */
static long play(const struct kvbm_pool_opts *opts, const struct op *list, size_t n, char *wrong)
{
    struct run *run = begin(opts);
    size_t i = 0;
    bool ok = true;

    for (; i < n && ok; i++)
        ok = ops[list[i].kind](run, &list[i]) && judge(run) && (i % 97 || same_events(run));
    if (ok && wind_up(run)) {
        end(run);
        return -1;
    }
    strcpy(wrong, run->wrong);
    return (long)(ok ? n : i - 1);
}

static struct op random_op(struct rng *rng)
{
    struct op op = {.pool = (uint8_t)rng_below(rng, M_POOLS),
                    .n = rng_below(rng, MAX_CHAIN) + 1,
                    .what = rng_below(rng, M_KEYS),
                    .how = rng_below(rng, 1u << 20)};
    uint32_t total = 0, at;

    for (int i = 0; i < N_KINDS; i++)
        total += weights[i];
    at = rng_below(rng, total);
    while (at >= weights[op.kind])
        at -= weights[op.kind++];
    return op;
}

/* Leave out what the failure doesn't need: halves, quarters, ... single operations. */
static size_t shrink(const struct kvbm_pool_opts *opts, struct op *list, size_t n, char *wrong)
{
    struct op *fewer = malloc(n * sizeof(*fewer));

    for (size_t chunk = n / 2; chunk > 0; chunk /= 2) {
        for (size_t at = 0; at + chunk <= n;) {
            memcpy(fewer, list, at * sizeof(*list));
            memcpy(fewer + at, list + at + chunk, (n - at - chunk) * sizeof(*list));
            if (play(opts, fewer, n - chunk, wrong) >= 0)
                memcpy(list, fewer, (n -= chunk) * sizeof(*list));
            else
                at += chunk;
        }
    }
    free(fewer);
    play(opts, list, n, wrong);
    return n;
}

static void play_random(const char *name, const struct kvbm_pool_opts *opts, size_t n)
{
    struct rng rng = {test_seed() ^ n};
    struct op *list = malloc(n * sizeof(*list));
    long rounds = test_rounds(20);
    char wrong[200] = "";

    print_message("%s: KV_TEST_SEED=%llu, %ld lists of %zu\n", name,
                  (unsigned long long)test_seed(), rounds, n);
    for (long round = 0; round < rounds; round++) {
        long bad;

        for (size_t i = 0; i < n; i++)
            list[i] = random_op(&rng);
        bad = play(opts, list, n, wrong);
        if (bad < 0)
            continue;
        print_message("list %ld, operation %ld: %s\n", round, bad, wrong);
        n = shrink(opts, list, KV_MIN(n, (size_t)bad + 1), wrong);
        for (size_t i = 0; i < n; i++)
            print_message("    {%s, %u, %u, %u, %u}\n", kind_names[list[i].kind], list[i].pool,
                          list[i].n, list[i].what, list[i].how);
        fail_msg("%s", wrong);
    }
    free(list);
}

static void test_lru(void **state)
{
    (void)state;
    play_random("lru, lru",
                (struct kvbm_pool_opts[]){{.n_blocks = 12}, {.tier = KV_TIER_HOST, .n_blocks = 20}},
                1500);
}

static void test_lfu(void **state)
{
    (void)state;
    play_random("lfu, lru that rejects",
                (struct kvbm_pool_opts[]){
                    {.n_blocks = 14, .eviction = KVBM_EVICT_LFU},
                    {.tier = KV_TIER_HOST, .n_blocks = 10, .reject_duplicates = true}},
                1500);
}

static void test_lineage(void **state)
{
    (void)state;
    play_random("lineage, lineage that rejects",
                (struct kvbm_pool_opts[]){{.n_blocks = 16, .eviction = KVBM_EVICT_LINEAGE},
                                          {.tier = KV_TIER_HOST,
                                           .n_blocks = 9,
                                           .eviction = KVBM_EVICT_LINEAGE,
                                           .reject_duplicates = true}},
                1500);
}

/* More releases than there are age classes. */
static void test_lineage_long(void **state)
{
    (void)state;
    play_random("lineage, nothing inactive",
                (struct kvbm_pool_opts[]){{.n_blocks = 20, .eviction = KVBM_EVICT_LINEAGE},
                                          {.tier = KV_TIER_HOST,
                                           .n_blocks = 9,
                                           .eviction = KVBM_EVICT_LINEAGE,
                                           .reset_on_release = true}},
                12000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru),
        cmocka_unit_test(test_lfu),
        cmocka_unit_test(test_lineage),
        cmocka_unit_test(test_lineage_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
