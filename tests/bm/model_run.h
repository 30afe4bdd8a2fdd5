// SPDX-License-Identifier: Apache-2.0
/** A run of test_pool_model.c: the registry that it uses, its clock, its keys, its handles. */
#ifndef KV_TEST_BM_MODEL_RUN_H
#define KV_TEST_BM_MODEL_RUN_H

#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "bm.h"
#include "bm/pool/pool.h"
#include "model.h"

#define MAX_HELD 40
#define MAX_CHAIN 6

enum kind {
    ALLOCATE,
    COMPLETE,
    FILL, /* token by token: begun, added to, taken from, committed */
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
    CLOCK,
    ADOPT,
    N_KINDS
};
static const char *const kind_names[N_KINDS] = {
    "allocate", "complete", "fill", "register", "unstage", "give_back", "match",  "scatter",
    "release",  "clone",    "try",  "weaken",   "upgrade", "touch",     "retain", "reset_keys",
    "reset",    "locate",   "info", "stale",    "clock",   "adopt"};
static const uint8_t weights[N_KINDS] = {14, 16, 16, 16, 2, 3, 12, 5, 18, 4, 3,
                                         3,  4,  5,  5,  3, 1, 2,  3, 3,  4, 6};

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

/* Published events in the model's form. */
struct told {
    struct m_event *all;
    size_t n;
};

/* Configuration on which a list of operations is played. */
struct setup {
    const char *name;
    uint32_t key_len;
    bool hashed; /* keys are what the tokens give, so that blocks can be filled with them */
    size_t n_ops;
    struct kvbm_pool_opts pools[M_POOLS]; /* until one without blocks */
};

struct run {
    struct bm bm;
    const struct setup *setup;
    uint8_t names[M_KEYS][KVBM_MAX_KEY];
    struct kvbm_pool *pools[M_POOLS];
    struct model model;
    struct told told;
    struct list mutable, complete, immutable, weak;
    struct list gone; /* immutable handles after the last of their kind */
    uint64_t n_stale[M_POOLS];
    char wrong[200];
};

#define WRONG(...) (snprintf(run->wrong, sizeof(run->wrong), __VA_ARGS__), false)
#define MUST(condition) \
    if (!(condition))   \
    return WRONG("line %d: %s", __LINE__, #condition)

/* ---- a clock that stands still, for this thread ---- */

static _Thread_local uint64_t fake_ns; /* 0: as others' */

/* Instead of the C library's: the block manager's clock is in this program. */
int clock_gettime(clockid_t clock, struct timespec *ret)
{
    if (!fake_ns || clock != CLOCK_MONOTONIC)
        return (int)syscall(SYS_clock_gettime, clock, ret);
    *ret = (struct timespec){(time_t)(fake_ns / KV_NS_PER_S), (long)(fake_ns % KV_NS_PER_S)};
    return 0;
}

/* ---- keys ---- */

/* A forest that is the same every time, in each group: most keys continue a chain, some branch
 * off. */
static inline int parent_of(int key)
{
    int local = key % M_GROUP;

    return local % 16 == 0 ? -1 : local % 5 == 0 ? key - 3 : key - 1;
}

static inline uint32_t depth_of(int key)
{
    return parent_of(key) < 0 ? 0 : depth_of(parent_of(key)) + 1;
}

/* @n keys (fewer at a sequence's start) that end with @last. */
static inline int path_to(int last, int n, int *ret)
{
    int keys[MAX_CHAIN], i = MAX_CHAIN;

    for (int k = last; k >= 0 && i > 0 && MAX_CHAIN - i < n; k = parent_of(k))
        keys[--i] = k;
    memcpy(ret, keys + i, (size_t)(MAX_CHAIN - i) * sizeof(*ret));
    return MAX_CHAIN - i;
}

/* Packed, and not aligned. */
struct names {
    uint8_t bytes[1 + M_GROUP * KVBM_MAX_KEY];
};

static inline const void *names_of(const struct run *run, const int *keys, int n, struct names *ret)
{
    uint32_t len = run->setup->key_len;

    memset(ret, 0, sizeof(*ret));
    for (int i = 0; i < n; i++)
        memcpy(ret->bytes + 1 + (size_t)i * len, run->names[keys[i]], len);
    return ret->bytes + 1;
}

/* The same in both groups. */
static inline void tokens_of(int key, uint32_t *ret)
{
    for (uint32_t i = 0; i < BM_BLOCK; i++)
        ret[i] = (uint32_t)(key % M_GROUP) * 100 + i;
}

enum { SALT = 1337 };

static inline void name_keys(struct run *run)
{
    uint32_t len = run->setup->key_len;

    for (int key = 0; key < M_KEYS; key++) {
        uint32_t tokens[BM_BLOCK];
        uint64_t parent, hash;

        if (!run->setup->hashed) { /* all alike but for the end */
            memset(run->names[key], 0xab, len);
            run->names[key][len - 1] = (uint8_t)(key % M_GROUP);
            continue;
        }
        tokens_of(key, tokens);
        if (parent_of(key) >= 0)
            memcpy(&parent, run->names[parent_of(key)], 8);
        hash =
            kvbm_sequence_hash(parent_of(key) >= 0 ? &parent : NULL,
                               kvbm_block_hash(SALT, tokens, BM_BLOCK), SALT, KVBM_CHAIN_SEED_SALT);
        memcpy(run->names[key], &hash, 8);
    }
}

static inline uint32_t group_of(const struct op *op)
{
    return (uint32_t)m_group((int)op->what);
}

static inline bool is_served(const struct run *run, const struct op *op)
{
    return m_serves(&run->model.pools[op->pool], (int)op->what);
}

/* A pool that doesn't serve the group of an operation's key refuses it, whatever it is. */
static inline bool refused(struct run *run, const struct op *op)
{
    struct kvbm_pool *pool = run->pools[op->pool];
    const void *key = run->names[op->what];
    struct kvbm_reset_result result;
    struct kvbm_immutable out;

    MUST(kvbm_pool_match(pool, group_of(op), key, 1, 0, &out) == -EINVAL);
    MUST(kvbm_pool_match_scattered(pool, group_of(op), key, 1, 0, &out) == -EINVAL);
    MUST(kvbm_pool_probe(pool, group_of(op), key, 1) == -EINVAL);
    MUST(kvbm_pool_touch(pool, group_of(op), key, 1) == -EINVAL);
    MUST(kvbm_pool_retain(pool, group_of(op), key, 1, 50, 0) == -EINVAL);
    MUST(kvbm_pool_reset_keys(pool, group_of(op), key, 1, &result) == -EINVAL);
    return true;
}

static inline void push(struct list *list, struct kvbm_handle handle, int pool, uint64_t life)
{
    list->all[list->n++] = (struct held){handle, pool, life};
}

/* Move up to @n handles of a pool out of a list, from a place that @how says. */
static inline int pull(struct list *list, int pool, int n, uint32_t how, struct held *ret)
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

/* ---- beginning and ending ---- */

/* Which key is called that? */
static inline int key_of(const struct run *run, uint32_t group, const void *name)
{
    for (int i = 0; name && i < M_GROUP; i++) {
        if (!memcmp(run->names[i], name, run->setup->key_len))
            return (int)group * M_GROUP + i;
    }
    return -1;
}

/* On the event manager's thread. */
static inline void record(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct run *run = arg;
    struct told *told = &run->told;

    assert_int_equal(lost, 0);
    told->all = realloc(told->all, (told->n + n) * sizeof(*told->all));
    assert_non_null(told->all);
    for (size_t i = 0; i < n; i++) {
        const struct kvbm_event *e = &events[i];
        int key = key_of(run, e->group, e->key);
        uint32_t tokens[BM_BLOCK];

        tokens_of(key, tokens);
        assert_int_equal(e->key_len, run->setup->key_len);
        assert_int_equal(e->sequence, told->n);
        assert_true(!e->tokens || !memcmp(e->tokens, tokens, sizeof(tokens)));
        assert_true((e->n_tokens == BM_BLOCK) == (e->tokens != NULL));
        told->all[told->n++] = (struct m_event){.type = e->type,
                                                .tier = (int)e->tier,
                                                .key = key,
                                                .parent = key_of(run, e->group, e->parent),
                                                .position = e->position,
                                                .end = e->first || e->last,
                                                .tokens = e->tokens != NULL};
    }
}

static inline struct run *begin(const struct setup *setup)
{
    struct kvbm_registry_opts opts = {.size = sizeof(opts), .key_len = setup->key_len};
    struct run *run = calloc(1, sizeof(*run));
    int n = 0;

    assert_non_null(run);
    run->setup = setup;
    name_keys(run);
    fake_ns = 0;
    fake_ns = kv_now_ns() + 3600 * KV_NS_PER_S; /* windows don't end, and time limits aren't over */
    assert_int_equal(kvbm_events_create(NULL, &run->bm.events), 0);
    assert_true(kvbm_events_add_callback(run->bm.events, KVBM_EVENTS_PER_TIER, record, run) >= 0);
    opts.events = run->bm.events;
    assert_int_equal(kvbm_registry_create(&opts, &run->bm.registry), 0);
    run->bm.registry->seed = 42; /* the same tags every time: the counts of uses depend on them */
    for (; n < M_POOLS && setup->pools[n].n_blocks; n++)
        run->pools[n] = bm_pool(&run->bm, &setup->pools[n]);
    m_init(&run->model, setup->pools, n);
    for (int i = 0; i < M_KEYS; i++)
        run->model.keys[i] =
            (struct m_key){-1, 0, kvbm_tag(run->bm.registry, (uint32_t)m_group(i), run->names[i])};
    return run;
}

static inline void end(struct run *run)
{
    for (int p = 0; p < run->model.n_pools; p++)
        assert_int_equal(kvbm_pool_destroy(run->pools[p]), 0);
    assert_int_equal(kvbm_registry_destroy(run->bm.registry), 0);
    kvbm_events_destroy(run->bm.events);
    fake_ns = 0;
    m_fini(&run->model);
    free(run->told.all);
    free(run);
}

#endif
