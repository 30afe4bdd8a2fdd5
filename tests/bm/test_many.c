// SPDX-License-Identifier: Apache-2.0
/* Calls on many weak handles (handle.c): each handle gets the result of a single call, whatever the
 * errors of other handles. */
#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"

#define N 6

static void same(const struct kvbm_block_info *a, const struct kvbm_block_info *b)
{
    assert_int_equal(a->block, b->block);
    assert_int_equal(a->primary, b->primary);
    assert_int_equal(a->duplicate, b->duplicate);
    assert_int_equal(a->group, b->group);
    assert_int_equal(a->position, b->position);
    assert_int_equal(a->tiers, b->tiers);
    assert_int_equal(a->priority, b->priority);
    assert_int_equal(a->priority_until_ns, b->priority_until_ns);
    assert_int_equal(a->handles, b->handles);
    assert_int_equal(a->has_parent, b->has_parent);
    assert_memory_equal(a->key, b->key, 8);
    if (a->has_parent)
        assert_memory_equal(a->parent, b->parent, 8);
}

static void chain_of(struct kvbm_pool *pool, const uint64_t *keys, struct kvbm_immutable *ret)
{
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_mutable blocks[N];
    struct kvbm_complete complete[N];

    assert_int_equal(kvbm_pool_allocate(pool, N, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_complete(pool, blocks, N, &chain, complete), 0);
    assert_int_equal(kvbm_pool_register(pool, complete, N, ret), 0);
}

static void test_each(enum kvbm_eviction eviction)
{
    const struct kvbm_pool_opts opts = {.n_blocks = 16, .eviction = eviction},
                                other = {.n_blocks = 16, .tier = KV_TIER_HOST};
    const uint64_t keys[N] = {11, 12, 13, 14, 15, 16};
    struct kvbm_immutable held[N], hosts[N], again[N], there;
    struct kvbm_weak weak[N], alone;
    struct kvbm_block_info info[N], one = {.size = sizeof(one)};
    struct kvbm_pool *host;
    struct bm bm;

    bm_open(&bm, &opts);
    host = bm_pool(&bm, &other);
    chain_of(bm.pool, keys, held);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, 2, 80, 100000), 2);
    chain_of(host, keys, hosts);
    there = held[4];
    held[4] = hosts[4]; /* another pool's */
    memset(info, 0xee, sizeof(info));
    kvbm_pool_downgrade(bm.pool, held, N, weak, info);
    held[4] = there;
    for (int i = 0; i < N; i++) {
        assert_ptr_equal(weak[i].handle.pool, i == 4 ? NULL : bm.pool);
        if (i == 4)
            continue;
        assert_int_equal(kvbm_immutable_downgrade(&held[i], &alone), 0);
        assert_memory_equal(&alone, &weak[i], sizeof(alone));
        assert_int_equal(kvbm_immutable_info(&held[i], &one), 0);
        same(&info[i], &one);
    }
    assert_int_equal(info[4].block, 0xeeeeeeee);

    /* Inactive ones come back, held ones are held once more; gone, zeroed, and another pool's: holes. */
    assert_int_equal(kvbm_pool_release(bm.pool, held + 2, N - 2), 0);
    assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, &keys[5], 1, NULL), 0);
    assert_int_equal(kvbm_immutable_downgrade(&hosts[3], &weak[3]), 0);
    memset(info, 0xee, sizeof(info));
    memset(again, 0xee, sizeof(again));
    kvbm_pool_upgrade(bm.pool, weak, N, again, info);
    for (int i = 0; i < N; i++) {
        assert_ptr_equal(again[i].handle.pool, i < 3 ? bm.pool : NULL);
        if (i >= 3) {
            assert_int_equal(info[i].block, 0xeeeeeeee);
            continue;
        }
        assert_int_equal(kvbm_immutable_info(&again[i], &one), 0);
        same(&info[i], &one);
        assert_int_equal(one.handles, i < 2 ? 2 : 1);
    }
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, again, N), 0); /* with holes */
    assert_int_equal(kvbm_pool_release(bm.pool, held, 2), 0);
    assert_int_equal(kvbm_pool_release(host, hosts, N), 0);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    bm_close(&bm);
}

static void test_lru(void **state)
{
    (void)state;
    test_each(KVBM_EVICT_LRU);
}

static void test_lineage(void **state)
{
    (void)state;
    test_each(KVBM_EVICT_LINEAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru),
        cmocka_unit_test(test_lineage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
