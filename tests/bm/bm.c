// SPDX-License-Identifier: Apache-2.0
#include "bm.h"
#include "base/unit.h"

void bm_record(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct bm *bm = arg;

    assert_int_equal(lost, 0);
    bm->told = realloc(bm->told, (bm->n_told + n) * sizeof(*bm->told));
    assert_non_null(bm->told);
    for (size_t i = 0; i < n; i++) {
        struct kvbm_event *e = &bm->told[bm->n_told++];
        uint64_t key, parent = 0;

        *e = events[i];
        assert_int_equal(e->key_len, 8);
        memcpy(&key, e->key, 8);
        if (e->parent)
            memcpy(&parent, e->parent, 8);
        e->key = (const void *)(uintptr_t)key; /* the bytes are gone when this returns */
        e->parent = e->parent ? (const void *)(uintptr_t)parent : NULL;
        e->tokens = NULL;
    }
}

size_t bm_told(struct bm *bm)
{
    assert_int_equal(kvbm_events_flush(bm->events, 60000), 0);
    return bm->n_told;
}

uint64_t bm_told_key(const struct bm *bm, size_t i)
{
    return (uint64_t)(uintptr_t)bm->told[i].key;
}

struct kvbm_pool *bm_pool(struct bm *bm, const struct kvbm_pool_opts *more)
{
    struct kvbm_pool_opts opts = {.n_blocks = 7, .block_size = BM_BLOCK};
    struct kvbm_pool *pool = NULL;

    if (more)
        opts = *more;
    opts.size = sizeof(opts);
    opts.n_blocks = opts.n_blocks ? opts.n_blocks : 7;
    opts.block_size = opts.block_size ? opts.block_size : BM_BLOCK;
    assert_int_equal(kvbm_pool_create(bm->registry, &opts, &pool), 0);
    assert_non_null(pool);
    return pool;
}

void bm_open(struct bm *bm, const struct kvbm_pool_opts *opts)
{
    struct kvbm_registry_opts registry = {.size = sizeof(registry)};

    *bm = (struct bm){0};
    assert_int_equal(kvbm_events_create(NULL, &bm->events), 0);
    assert_true(kvbm_events_add_callback(bm->events, KVBM_EVENTS_PER_TIER, bm_record, bm) >= 0);
    registry.events = bm->events;
    assert_int_equal(kvbm_registry_create(&registry, &bm->registry), 0);
    bm->pool = bm_pool(bm, opts);
}

void bm_close(struct bm *bm)
{
    assert_int_equal(kvbm_registry_check(bm->registry), 0);
    assert_int_equal(kvbm_pool_destroy(bm->pool), 0);
    assert_int_equal(kvbm_registry_destroy(bm->registry), 0);
    kvbm_events_destroy(bm->events);
    free(bm->told);
}

struct kvbm_pool_stats bm_stats(struct kvbm_pool *pool)
{
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    kvbm_pool_get_stats(pool, &stats);
    assert_int_equal(stats.total_blocks, stats.reset_pool_size + stats.inflight_mutable +
                                             stats.inflight_immutable + stats.inactive_pool_size);
    return stats;
}

size_t bm_available(struct kvbm_pool *pool)
{
    struct kvbm_pool_stats stats = bm_stats(pool);

    return stats.reset_pool_size + stats.inactive_pool_size;
}

int bm_complete_at(struct kvbm_pool *pool, uint32_t group, const uint64_t *parent,
                   uint32_t position, const uint64_t *keys, size_t n, struct kvbm_complete *ret)
{
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = group,
                               .keys = keys,
                               .parent = parent,
                               .position = position};
    struct kvbm_mutable *blocks = calloc(n, sizeof(*blocks));
    int err = kvbm_pool_allocate(pool, n, blocks, NULL);

    if (err == 0) {
        err = kvbm_pool_complete(pool, blocks, n, &chain, ret);
        if (err < 0)
            assert_int_equal(kvbm_pool_release_mutable(pool, blocks, n), 0);
    }
    free(blocks);
    return err;
}

void bm_put_at(struct kvbm_pool *pool, uint32_t group, const uint64_t *parent, uint32_t position,
               const uint64_t *keys, size_t n, struct kvbm_immutable *ret)
{
    struct kvbm_complete *blocks = calloc(n, sizeof(*blocks));

    assert_int_equal(bm_complete_at(pool, group, parent, position, keys, n, blocks), 0);
    assert_int_equal(kvbm_pool_register(pool, blocks, n, ret), 0);
    free(blocks);
}

void bm_put(struct kvbm_pool *pool, const uint64_t *keys, size_t n, struct kvbm_immutable *ret)
{
    bm_put_at(pool, 0, NULL, 0, keys, n, ret);
}

void bm_leave(struct kvbm_pool *pool, uint64_t key)
{
    struct kvbm_immutable block;

    bm_put(pool, &key, 1, &block);
    assert_int_equal(kvbm_immutable_release(&block), 0);
}

bool bm_has(struct kvbm_pool *pool, uint64_t key)
{
    long n = kvbm_pool_probe(pool, 0, &key, 1);

    assert_true(n >= 0);
    return n == 1;
}

void bm_churn(struct kvbm_pool *pool, size_t n)
{
    struct kvbm_mutable *blocks = calloc(n, sizeof(*blocks));

    assert_int_equal(kvbm_pool_allocate(pool, n, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_release_mutable(pool, blocks, n), 0);
    free(blocks);
}
