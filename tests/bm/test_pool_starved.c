// SPDX-License-Identifier: Apache-2.0
/* Each allocation of each call refused in turn: the call reports it and changes nothing. */
#include "base/unit.h"
#include "bm/pool/pool.h"
#include "starve.h"

#define N 600 /* more than a chunk of token buffers, more than a first table holds */

static struct {
    struct kvbm_registry *registry;
    struct kvbm_pool *pool, *second;
    struct kvbm_pool_opts opts;
    uint64_t keys[N], parents[N];
    uint32_t tokens[N];
    struct kvbm_mutable mutable[N];
    struct kvbm_complete complete[N];
    struct kvbm_immutable held[N], adopted[N];
    size_t at;
    uint32_t type;
} w;

static void same(const struct kvbm_pool_stats *before)
{
    struct kvbm_pool_stats now = {.size = sizeof(now)};

    assert_int_equal(kvbm_registry_check(w.registry), 0);
    if (!w.pool)
        return;
    kvbm_pool_get_stats(w.pool, &now);
    now.metadata_bytes = before->metadata_bytes; /* room that was made may stay */
    assert_memory_equal(&now, before, sizeof(now));
}

/* Do it, with the first allocation refused, the second, ... Returns how many there are. */
static long starve(long (*call)(void))
{
    struct kvbm_pool_stats before = {.size = sizeof(before)};
    long n, rc;

    if (w.pool)
        kvbm_pool_get_stats(w.pool, &before);
    for (n = 1;; n++) {
        starve_at(n);
        rc = call();
        if (!starved())
            break;
        starve_at(0);
        assert_int_equal(rc, -ENOMEM);
        if (w.registry)
            same(&before);
    }
    starve_at(0);
    assert_true(rc >= 0);
    return n - 1;
}

static long create_registry(void)
{
    return kvbm_registry_create(NULL, &w.registry);
}

static long create_pool(void)
{
    return kvbm_pool_create(w.registry, &w.opts, w.pool ? &w.second : &w.pool);
}

static long init(void)
{
    return kvbm_mutable_init_sequence(&w.mutable[w.at], NULL);
}

/* One block behind a parent that nobody has: two entries each. */
static long complete_one(void)
{
    struct kvbm_chain chain = {
        .size = sizeof(chain), .keys = &w.keys[w.at], .parent = &w.parents[w.at], .position = 1};

    return kvbm_pool_complete(w.pool, &w.mutable[w.at], 1, &chain, &w.complete[w.at]);
}

static long complete_all(void)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = w.keys, .tokens = w.tokens};

    return kvbm_pool_complete(w.pool, w.mutable, N, &chain, w.complete);
}

static long commit(void)
{
    return kvbm_mutable_commit(&w.mutable[w.at], &w.complete[w.at]);
}

static long retain(void)
{
    return kvbm_pool_retain(w.pool, 0, w.keys, N, 80, 100000);
}

static long adopt(void)
{
    return kvbm_pool_adopt(w.second, w.mutable, N, w.held, w.adopted);
}

static long new_type(void)
{
    return kvbm_attachment_type(w.registry, "test", true, NULL, &w.type);
}

static long attach(void)
{
    return kvbm_registry_attach(w.registry, 0, &w.keys[w.at], w.type, &w);
}

static long metrics(void)
{
    char text[64];

    return kvbm_registry_metrics(w.registry, text, sizeof(text));
}

static long check(void)
{
    return kvbm_registry_check(w.registry);
}

static void run(enum kvbm_eviction eviction)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    long n = 0;

    w.pool = w.second = NULL;
    w.registry = NULL;
    assert_true(starve(create_registry) >= 1);
    w.opts = (struct kvbm_pool_opts){.size = sizeof(w.opts),
                                     .n_blocks = N,
                                     .block_size = 1,
                                     .eviction = eviction,
                                     .track_handles = true};
    assert_true(starve(create_pool) >= 8);
    w.opts.tier = KV_TIER_HOST;
    w.opts.n_blocks = 4 * N; /* the first one's entries move, and their table */
    assert_true(starve(create_pool) >= 8);
    assert_int_equal(kvbm_pool_destroy(w.second), 0);
    for (size_t i = 0; i < N; i++) {
        w.keys[i] = 1 + i;
        w.parents[i] = 1000000 + i;
        w.tokens[i] = (uint32_t)i;
    }

    assert_int_equal(kvbm_pool_allocate(w.pool, N, w.mutable, NULL), 0);
    for (w.at = 0; w.at < N; w.at++)
        n += starve(init);
    assert_true(n >= 3); /* chunks */
    for (w.at = 0; w.at < N; w.at++)
        assert_int_equal(kvbm_mutable_reset(&w.mutable[w.at]), 0);
    assert_int_equal(starve(complete_all), 0); /* they have buffers already */
    for (size_t i = 0; i < N; i++)
        assert_int_equal(kvbm_complete_reset(&w.complete[i], &w.mutable[i]), 0);
    for (n = 0, w.at = 0; w.at < N; w.at++)
        n += starve(complete_one);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(kvbm_complete_reset(&w.complete[i], &w.mutable[i]), 0);
    assert_int_equal(w.registry->live_entries, 0);
    w.at = 0;
    starve(init);
    assert_int_equal(kvbm_mutable_add_token(&w.mutable[0], 5), 0);
    starve(commit);
    assert_int_equal(kvbm_complete_reset(&w.complete[0], &w.mutable[0]), 0);

    starve(complete_all);
    assert_int_equal(kvbm_pool_register(w.pool, w.complete, N, w.held), 0);
    assert_int_equal(starve(retain), 2); /* the heap, and each block's end */
    assert_int_equal(kvbm_immutable_info(&w.held[N - 1], &info), 0);
    assert_int_equal(info.priority, 80);
    w.opts.n_blocks = N;
    assert_int_equal(kvbm_pool_create(w.registry, &w.opts, &w.second), 0);
    assert_int_equal(kvbm_pool_allocate(w.second, N, w.mutable, NULL), 0);
    assert_int_equal(starve(adopt), 2); /* the same there */
    assert_int_equal(kvbm_pool_release(w.second, w.adopted, N), 0);
    assert_int_equal(kvbm_pool_destroy(w.second), 0);
    starve(new_type);
    for (n = 0, w.at = 0; w.at < N; w.at++)
        n += starve(attach);
    assert_true(n >= 4);
    assert_true(starve(metrics) >= 1);
    assert_int_equal(kvbm_pool_release(w.pool, w.held, N), 0);
    starve_at(1);
    assert_int_equal(check(), -ENOMEM);
    starve_at(0);
    assert_int_equal(kvbm_pool_destroy(w.pool), 0);
    assert_int_equal(kvbm_registry_destroy(w.registry), 0);
}

static void test_lru(void **state)
{
    (void)state;
    run(KVBM_EVICT_LRU);
}

static void test_lfu(void **state)
{
    (void)state;
    run(KVBM_EVICT_LFU);
}

static void test_lineage(void **state)
{
    (void)state;
    run(KVBM_EVICT_LINEAGE);
}

/* More ghosts than the table was made for: it grows when they come, or not at all. */
static void test_table_grows(void **state)
{
    enum { MANY = 2600 };
    struct kvbm_pool_opts opts = {.size = sizeof(opts), .n_blocks = MANY, .block_size = 1};
    struct kvbm_mutable *blocks = calloc(MANY, sizeof(*blocks));
    struct kvbm_complete *staged = calloc(MANY, sizeof(*staged));
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    long refused = 0;
    uint32_t bits;
    (void)state;

    assert_int_equal(kvbm_registry_create(NULL, &registry), 0);
    assert_int_equal(kvbm_pool_create(registry, &opts, &pool), 0);
    bits = registry->table_bits;
    assert_int_equal(kvbm_pool_allocate(pool, MANY, blocks, NULL), 0);
    for (uint64_t i = 0; i < MANY; i++) {
        uint64_t key = i, parent = 1000000 + i;
        struct kvbm_chain chain = {
            .size = sizeof(chain), .keys = &key, .parent = &parent, .position = 1};

        starve_at(1);
        if (kvbm_pool_complete(pool, &blocks[i], 1, &chain, &staged[i]) < 0) {
            assert_true(starved());
            assert_int_equal(registry->live_entries, 2 * i);
            starve_at(0);
            refused++;
            assert_int_equal(kvbm_pool_complete(pool, &blocks[i], 1, &chain, &staged[i]), 0);
        }
        starve_at(0);
    }
    assert_int_equal(refused, 1);
    assert_int_equal(registry->table_bits, bits + 1);
    assert_int_equal(kvbm_registry_check(registry), 0);
    assert_int_equal(kvbm_pool_release_complete(pool, staged, MANY), 0);
    assert_int_equal(kvbm_pool_destroy(pool), 0);
    assert_int_equal(kvbm_registry_destroy(registry), 0);
    free(blocks);
    free(staged);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru),
        cmocka_unit_test(test_lfu),
        cmocka_unit_test(test_lineage),
        cmocka_unit_test(test_table_grows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
