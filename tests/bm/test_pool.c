// SPDX-License-Identifier: Apache-2.0
/* Life of blocks in a pool: the cases of the tests of Dynamo's block manager, and more. */
#include <unistd.h>

#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"

static const uint64_t keys[8] = {100, 101, 102, 103, 104, 105, 106, 107};

static long match(struct kvbm_pool *pool, const uint64_t *what, size_t n,
                  struct kvbm_immutable *ret)
{
    return kvbm_pool_match(pool, 0, what, n, 0, ret);
}

/* How long a prefix of @what is there; nothing is held or touched by it. */
static long prefix(struct kvbm_pool *pool, const uint64_t *what, size_t n)
{
    return kvbm_pool_probe(pool, 0, what, n);
}

/* ---- allocation ---- */

static void test_state(void **state)
{
    static const uint32_t tokens[5] = {1, 2, 3, 4, 5};
    struct kvbm_mutable block;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(bm_available(bm.pool), 7);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(bm_available(bm.pool), 6);
    assert_int_equal(kvbm_mutable_init_sequence(&block, NULL), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(kvbm_mutable_add_token(&block, tokens[i]), 0);
    assert_int_equal(kvbm_mutable_add_token(&block, tokens[4]), -ENOSPC);
    assert_int_equal(kvbm_mutable_release(&block), 0);
    assert_int_equal(bm_available(bm.pool), 7);
    bm_close(&bm);
}

static void test_shortage(void **state)
{
    struct kvbm_shortage shortage = {99, 99};
    struct kvbm_mutable blocks[8], one;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, 1);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 0, NULL, NULL), 0);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 4, blocks, &shortage), 0);
    assert_int_equal(shortage.requested, 99); /* written on failure only */
    assert_int_equal(kvbm_pool_allocate(bm.pool, 4, blocks + 4, &shortage), -ENOSPC);
    assert_int_equal(shortage.requested, 4);
    assert_int_equal(shortage.available, 3);
    assert_int_equal(kvbm_pool_allocate(bm.pool, SIZE_MAX, blocks + 4, &shortage), -ENOSPC);
    assert_true(shortage.requested == SIZE_MAX);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 4, blocks + 4, NULL), -ENOSPC);
    assert_int_equal(bm_stats(bm.pool).allocation_failures, 3);
    assert_true(bm_has(bm.pool, 1)); /* nothing was evicted for it */
    assert_int_equal(kvbm_pool_allocate(bm.pool, 3, blocks + 4, NULL), 0);
    assert_false(bm_has(bm.pool, 1));
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &one, &shortage), -ENOSPC);
    assert_int_equal(shortage.available, 0);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 7), 0);
    bm_close(&bm);
}

/* Free blocks go round first in, first out; what fails doesn't turn the ring. */
static void test_fifo(void **state)
{
    struct kvbm_mutable a[3], b[5];
    struct kvbm_pool_stats before = {.size = sizeof(before)}, after = before;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 3, a, NULL), 0);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(a[i].handle.block, i);
    assert_int_equal(kvbm_mutable_release(&a[1]), 0);
    before = bm_stats(bm.pool);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 6, b, NULL), -ENOSPC);
    after = bm_stats(bm.pool);
    before.allocation_failures++;
    assert_memory_equal(&before, &after, sizeof(before));
    assert_int_equal(kvbm_pool_allocate(bm.pool, 5, b, NULL), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(b[i].handle.block, i < 4 ? 3 + i : 1);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, b, 5), 0);
    assert_int_equal(kvbm_mutable_release(&a[0]), 0);
    assert_int_equal(kvbm_mutable_release(&a[2]), 0);
    bm_close(&bm);
}

static void test_capacity(void **state)
{
    struct kvbm_complete staged[8];
    struct kvbm_immutable held[8];
    struct kvbm_mutable blocks[16];
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};
    uint64_t many[32];
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < 32; i++)
        many[i] = 1000 + i;
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 16});
    for (int i = 0; i < 32; i++) /* 16 fit, 16 evict */
        bm_leave(bm.pool, many[i]);
    stats = bm_stats(bm.pool);
    assert_int_equal(stats.allocations, 32);
    assert_int_equal(stats.evictions, 16);
    assert_int_equal(stats.allocations_from_reset, 16);
    assert_int_equal(stats.inactive_pool_size, 16);

    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 8, blocks, NULL), 0); /* three ways back */
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, many, 4, staged), 0);
    bm_put(bm.pool, many + 8, 4, held);
    assert_int_equal(bm_stats(bm.pool).inflight_mutable, 12);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 8), 0);
    assert_int_equal(kvbm_pool_release_complete(bm.pool, staged, 4), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), 0);
    stats = bm_stats(bm.pool);
    assert_int_equal(stats.reset_pool_size, 12);
    assert_int_equal(stats.inactive_pool_size, 4);
    assert_int_equal(stats.stagings, 32 + 8);
    assert_int_equal(stats.registrations, 32 + 4);
    bm_churn(bm.pool, 16);
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 16);
    bm_close(&bm);
}

/* ---- matching ---- */

static void test_blocking(void **state)
{
    static const uint32_t tokens[4] = {1, 2, 3, 4};
    const uint64_t hash = UINT64_C(14643705804678351452);
    struct kvbm_block_start start = {.size = sizeof(start), .salt_hash = 1337};
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, tokens, 4), 4);
    assert_int_equal(kvbm_mutable_commit(&block, &complete), 0);
    assert_int_equal(match(bm.pool, &hash, 1, &held), 0);
    assert_int_equal(kvbm_pool_register(bm.pool, &complete, 1, &held), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(match(bm.pool, &hash, 1, &held), 1);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(bm_told(&bm), 1);
    assert_int_equal(bm.told[0].n_tokens, 4);
    bm_close(&bm);
}

static void test_evict_leaves(void **state)
{
    struct kvbm_immutable held[4];
    struct kvbm_mutable blocks[4];
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 4});
    bm_put(bm.pool, keys, 4, held);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), 0);
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &blocks[n - 1], NULL), 0);
        assert_int_equal(match(bm.pool, keys, 4, held), 4 - n);
        assert_int_equal(kvbm_pool_release(bm.pool, held, (size_t)(4 - n)), 0);
    }
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 4), 0);
    bm_close(&bm);
}

static void test_match_return(void **state)
{
    struct kvbm_immutable held[3], found[4], some[4];
    uint64_t mixed[4] = {keys[0], 5, keys[2], keys[1]};
    struct kvbm_mutable blocks[7];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 3, held);
    assert_int_equal(match(bm.pool, keys, 4, found), 3); /* active ones */
    for (int i = 0; i < 3; i++)
        assert_memory_equal(&found[i], &held[i], sizeof(found[i]));
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(bm_stats(bm.pool).inflight_immutable, 3);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 5, blocks, NULL), -ENOSPC); /* they're held */
    assert_int_equal(kvbm_pool_release(bm.pool, found, 3), 0);
    assert_int_equal(match(bm.pool, mixed, 4, found), 1); /* stops at the first miss */
    assert_int_equal(kvbm_pool_match_scattered(bm.pool, 0, mixed, 4, 0, some), 3);
    assert_null(some[1].handle.pool);
    assert_int_equal(some[0].handle.block, found[0].handle.block);
    assert_int_equal(kvbm_pool_release(bm.pool, found, 1), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, some, 4), 0);
    assert_int_equal(match(bm.pool, NULL, 0, NULL), 0);
    assert_int_equal(kvbm_pool_match(bm.pool, 64, keys, 1, 0, found), -EINVAL);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 1, 2, found), -EINVAL);
    assert_int_equal(bm_stats(bm.pool).match_hashes_requested, 4 + 4);
    assert_int_equal(bm_stats(bm.pool).match_blocks_returned, 3 + 1);
    assert_int_equal(bm_stats(bm.pool).scan_hashes_requested, 4);
    assert_int_equal(bm_stats(bm.pool).scan_blocks_returned, 3);
    bm_close(&bm);
}

/* The same key several times in a call: one handle each. */
static void test_match_repeated(void **state)
{
    uint64_t same[3] = {keys[0], keys[0], keys[0]};
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held[3];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, keys[0]);
    assert_int_equal(match(bm.pool, same, 3, held), 3);
    assert_int_equal(kvbm_immutable_info(&held[2], &info), 0);
    assert_int_equal(info.handles, 3);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, same, 3), 3);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, same, 3, 40, 10000), 3);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, same, 3, 40, 0), 3);
    bm_close(&bm);
}

static void test_touch(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 3});
    for (int i = 0; i < 3; i++)
        bm_leave(bm.pool, keys[i]);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, keys, 1), 1);
    bm_churn(bm.pool, 1);
    assert_true(bm_has(bm.pool, keys[0]));
    assert_false(bm_has(bm.pool, keys[1]));
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, keys, 3), 1); /* stops at the miss */
    bm_close(&bm);
}

/* The last of several is touched first, as it is released first. */
static void test_touch_chain(void **state)
{
    struct kvbm_immutable held[3];
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 3});
    bm_put(bm.pool, keys, 3, held);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, keys, 3), 3);
    bm_churn(bm.pool, 1);
    assert_int_equal(prefix(bm.pool, keys, 3), 2);
    bm_close(&bm);
}

/* Also when they are looked up in several goes: first to go is the last key, then the one before
 * it, and so on. */
static void test_touch_long_chain(void **state)
{
    enum { LONG = 200 };
    struct kvbm_immutable held[LONG];
    uint64_t chain[LONG];
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < LONG; i++)
        chain[i] = 5000 + i;
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = LONG + 1});
    bm_put(bm.pool, chain, LONG, held);
    for (size_t i = 0; i < LONG; i++) /* the wrong way round: the first would go first */
        assert_int_equal(kvbm_immutable_release(&held[i]), 0);
    bm_leave(bm.pool, 77);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, chain, LONG), LONG);
    bm_churn(bm.pool, 1);
    assert_false(bm_has(bm.pool, 77));
    for (size_t left = LONG; left-- > 0;) {
        bm_churn(bm.pool, LONG + 1 - left);
        assert_int_equal(prefix(bm.pool, chain, LONG), left);
        assert_int_equal(bm_stats(bm.pool).inactive_pool_size, left);
    }
    bm_close(&bm);
}

/* ---- duplicates ---- */

static void test_duplicates(void **state)
{
    struct kvbm_immutable first, second, clone;
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_mutable all[6];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 1, &first);
    bm_put(bm.pool, keys, 1, &second);
    assert_true(first.handle.block != second.handle.block);
    assert_int_equal(kvbm_immutable_info(&second, &info), 0);
    assert_true(info.duplicate);
    assert_int_equal(info.primary, first.handle.block);
    assert_int_equal(info.handles, 1);
    assert_int_equal(kvbm_immutable_info(&first, &info), 0);
    assert_false(info.duplicate);
    assert_int_equal(info.handles, 1); /* the duplicate that leans on it is no handle */
    assert_int_equal(bm_available(bm.pool), 5);
    assert_int_equal(kvbm_pool_reset(bm.pool), -EBUSY);
    assert_int_equal(kvbm_immutable_try_return(&first), -EBUSY);
    assert_non_null(first.handle.pool);
    assert_int_equal(kvbm_immutable_clone(&second, &clone), 0);
    assert_int_equal(kvbm_immutable_try_return(&second), -EBUSY);
    assert_int_equal(kvbm_immutable_release(&clone), 0);

    /* the duplicate keeps the first one from being evicted */
    assert_int_equal(kvbm_immutable_release(&first), 0);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 6, all, NULL), -ENOSPC);
    assert_int_equal(match(bm.pool, keys, 1, &first), 1);
    assert_int_equal(kvbm_immutable_try_return(&second), 0);
    assert_int_equal(kvbm_immutable_try_return(&first), 0);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 1);
    assert_int_equal(bm_stats(bm.pool).duplicate_blocks, 1);
    assert_int_equal(bm_stats(bm.pool).registration_dedup, 1);
    assert_int_equal(bm_stats(bm.pool).registrations, 1);
    assert_int_equal(bm_told(&bm), 1);
    bm_close(&bm);
}

/* A copy of a handle that was the last one, while only a duplicate keeps the block. */
static void test_stale_under_duplicate(void **state)
{
    struct kvbm_immutable first, copy, second, out;
    struct kvbm_weak weak;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 1, &first);
    bm_put(bm.pool, keys, 1, &second);
    copy = first;
    assert_int_equal(kvbm_immutable_release(&first), 0);
    assert_int_equal(kvbm_immutable_release(&copy), -ESTALE);
    assert_int_equal(kvbm_immutable_try_return(&copy), -ESTALE);
    assert_int_equal(kvbm_immutable_clone(&copy, &out), -ESTALE);
    assert_int_equal(kvbm_immutable_downgrade(&copy, &weak), -ESTALE);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(match(bm.pool, keys, 1, &out), 1); /* somebody else's doesn't make it good */
    assert_int_equal(kvbm_immutable_release(&copy), -ESTALE);
    assert_int_equal(kvbm_immutable_release(&out), 0);
    assert_int_equal(kvbm_immutable_release(&second), 0);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 1);
    bm_close(&bm);
}

static void test_duplicate_revives(void **state)
{
    struct kvbm_immutable second;
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, keys[0]);
    bm_put(bm.pool, keys, 1, &second);
    assert_int_equal(kvbm_immutable_info(&second, &info), 0);
    assert_true(info.duplicate);
    assert_int_equal(bm_stats(bm.pool).inflight_immutable, 2);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 0);
    assert_int_equal(kvbm_immutable_release(&second), 0);
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 6);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 1);
    bm_close(&bm);
}

static void test_duplicates_rejected(void **state)
{
    struct kvbm_immutable first, second, third;
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.reject_duplicates = true});
    bm_put(bm.pool, keys, 1, &first);
    bm_put(bm.pool, keys, 1, &second);
    assert_int_equal(first.handle.block, second.handle.block);
    assert_int_equal(bm_available(bm.pool), 6);
    assert_int_equal(bm_stats(bm.pool).duplicate_blocks, 0);
    assert_int_equal(bm_stats(bm.pool).registration_dedup, 1);
    assert_int_equal(kvbm_immutable_release(&first), 0);
    assert_int_equal(kvbm_immutable_release(&second), 0);
    bm_put(bm.pool, keys, 1, &third); /* from inactive */
    assert_int_equal(bm_available(bm.pool), 6);
    assert_int_equal(kvbm_immutable_release(&third), 0);
    bm_close(&bm);
}

/* Two of one key in a call: the first is the primary, with either policy. */
static void test_duplicates_together(void **state)
{
    (void)state;
    for (int reject = 0; reject < 2; reject++) {
        struct kvbm_complete both[2];
        struct kvbm_immutable held[2];
        struct bm bm;

        bm_open(&bm, &(struct kvbm_pool_opts){.reject_duplicates = reject});
        assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 1, &both[0]), 0);
        assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 1, &both[1]), 0);
        assert_int_equal(kvbm_pool_register(bm.pool, both, 2, held), 0);
        assert_true((held[0].handle.block == held[1].handle.block) == reject);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        assert_int_equal(kvbm_pool_release(bm.pool, held, 2), 0);
        assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 1);
        bm_close(&bm);
    }
}

/* ---- resets ---- */

static void test_reset(void **state)
{
    struct kvbm_reset_result result;
    struct kvbm_immutable held;
    struct kvbm_mutable block;
    uint64_t some[4] = {keys[0], 9, keys[1], keys[0]};
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, keys[0]);
    bm_leave(bm.pool, keys[2]);
    bm_put(bm.pool, &keys[1], 1, &held);
    assert_int_equal(kvbm_pool_reset(bm.pool), -EBUSY);
    assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, some, 4, &result), 0);
    assert_int_equal(result.reset, 1);
    assert_int_equal(result.not_found, 2);
    assert_int_equal(result.held, 1);
    assert_int_equal(kvbm_pool_reset_inactive(bm.pool), 1);
    assert_int_equal(kvbm_pool_reset_inactive(bm.pool), 0);
    assert_true(bm_has(bm.pool, keys[1]));
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), -EBUSY);
    assert_int_equal(kvbm_mutable_release(&block), 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 7);
    assert_int_equal(bm_told(&bm), 6);
    for (int i = 0; i < 6; i++)
        assert_int_equal(bm.told[i].type, i < 3 ? KVBM_EVENT_STORED : KVBM_EVENT_REMOVED);
    bm_close(&bm);
}

static void test_reset_on_release(void **state)
{
    struct kvbm_immutable held, second;
    struct kvbm_weak weak;
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.reset_on_release = true});
    bm_put(bm.pool, keys, 1, &held);
    bm_put(bm.pool, keys, 1, &second);
    assert_int_equal(kvbm_immutable_downgrade(&held, &weak), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_true(bm_has(bm.pool, keys[0])); /* the duplicate leans on it */
    assert_int_equal(kvbm_immutable_release(&second), 0);
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 7);
    assert_false(bm_has(bm.pool, keys[0]));
    assert_int_equal(kvbm_weak_upgrade(&weak, &held), -ESTALE);
    assert_int_equal(bm_told(&bm), 2);
    assert_int_equal(bm.told[1].type, KVBM_EVENT_REMOVED);
    bm_close(&bm);
}

static void test_destroy_busy(void **state)
{
    struct kvbm_immutable held;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 1, &held);
    assert_int_equal(kvbm_pool_destroy(bm.pool), -EBUSY);
    assert_int_equal(kvbm_registry_destroy(bm.registry), -EBUSY);
    assert_int_equal(kvbm_immutable_release(&held), 0); /* it works on */
    assert_true(bm_has(bm.pool, keys[0]));
    bm_close(&bm);
}

/* ---- weak handles, last drops ---- */

static void test_weak(void **state)
{
    struct kvbm_immutable held, again, duplicate;
    struct kvbm_weak weak, of_duplicate, none = {0};
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 2});
    bm_put(bm.pool, keys, 1, &held);
    assert_int_equal(kvbm_immutable_downgrade(&held, &weak), 0);
    assert_int_equal(kvbm_weak_upgrade(&weak, &again), 0); /* active */
    assert_int_equal(kvbm_immutable_release(&again), 0);
    bm_put(bm.pool, keys, 1, &duplicate);
    assert_int_equal(kvbm_immutable_downgrade(&duplicate, &of_duplicate), 0);
    assert_int_equal(kvbm_immutable_release(&duplicate), 0);
    assert_int_equal(kvbm_weak_upgrade(&of_duplicate, &again), 0); /* what is found by the key */
    assert_int_equal(again.handle.block, held.handle.block);
    assert_int_equal(kvbm_immutable_release(&again), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_weak_upgrade(&weak, &again), 0); /* inactive */
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 0);
    assert_int_equal(kvbm_immutable_release(&again), 0);
    bm_churn(bm.pool, 2); /* evicted */
    assert_int_equal(kvbm_weak_upgrade(&weak, &again), -ESTALE);
    bm_leave(bm.pool, keys[0]); /* the same key, and soon the same block: another life */
    bm_leave(bm.pool, keys[1]);
    assert_int_equal(kvbm_weak_upgrade(&weak, &again), -ESTALE);
    assert_int_equal(kvbm_weak_upgrade(&of_duplicate, &again), -ESTALE);
    assert_int_equal(kvbm_weak_upgrade(&none, &again), -EINVAL);
    weak.handle.block = 2;
    assert_int_equal(kvbm_weak_upgrade(&weak, &again), -ERANGE);
    bm_close(&bm);
}

/* Found the moment after its last drop: the old handles stay dead. */
static void test_revive(void **state)
{
    struct kvbm_immutable held, old, again;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 1, &held);
    old = held;
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(match(bm.pool, keys, 1, &again), 1);
    assert_int_equal(again.handle.block, old.handle.block);
    assert_int_equal(kvbm_immutable_release(&old), -ESTALE); /* the late one does nothing */
    assert_int_equal(bm_stats(bm.pool).inflight_immutable, 1);
    assert_int_equal(kvbm_immutable_release(&again), 0);
    bm_close(&bm);
}

/* ---- retention ---- */

static uint8_t priority_of(struct kvbm_pool *pool, uint64_t key)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held;

    assert_int_equal(match(pool, &key, 1, &held), 1);
    assert_int_equal(kvbm_immutable_info(&held, &info), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    return info.priority;
}

static void test_retain(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 4});
    for (int i = 0; i < 4; i++)
        bm_leave(bm.pool, keys[i]);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[0], 1, 80, 0), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[2], 1, 0, 0), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[3], 3, 36, 0), 1); /* two are unknown */
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, 1, 101, 0), -EINVAL);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    bm_churn(bm.pool, 1);
    assert_false(bm_has(bm.pool, keys[2]));
    bm_churn(bm.pool, 2); /* the freed one, and one more */
    assert_false(bm_has(bm.pool, keys[1]));
    bm_churn(bm.pool, 3);
    assert_false(bm_has(bm.pool, keys[3]));
    assert_true(bm_has(bm.pool, keys[0]));
    assert_int_equal(priority_of(bm.pool, keys[0]), 80);
    bm_churn(bm.pool, 4);
    bm_leave(bm.pool, keys[0]); /* the next life is an ordinary one */
    assert_int_equal(priority_of(bm.pool, keys[0]), KVBM_PRIORITY_DEFAULT);
    bm_close(&bm);
}

static void test_retain_ends(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 3});
    for (int i = 0; i < 3; i++)
        bm_leave(bm.pool, keys[i]);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[0], 1, 100, 20), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[1], 1, 90, 60000), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[2], 1, 100, 20), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[2], 1, 95, 0), 1); /* for ever now */
    assert_int_equal(priority_of(bm.pool, keys[1]), 90);
    usleep(50000);
    assert_int_equal(priority_of(bm.pool, keys[0]), KVBM_PRIORITY_DEFAULT);
    assert_int_equal(priority_of(bm.pool, keys[2]), 95);
    bm_churn(bm.pool, 1);
    assert_false(bm_has(bm.pool, keys[0]));
    bm_churn(bm.pool, 2);
    assert_false(bm_has(bm.pool, keys[1]));
    bm_close(&bm);
}

/* The slot of a retained block goes to another: the old end doesn't end the new one's priority. */
static void test_retain_recycled(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 1});
    bm_leave(bm.pool, keys[0]);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[0], 1, 70, 20), 1);
    bm_leave(bm.pool, keys[1]);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &keys[1], 1, 60, 60000), 1);
    usleep(40000);
    assert_int_equal(priority_of(bm.pool, keys[1]), 60);
    assert_int_equal(bm.pool->retained.n, 1);
    bm_close(&bm);
}

/* Renewing priorities over and over takes no more room than the blocks need. */
static void test_retain_bounded(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    for (int i = 0; i < 3; i++)
        bm_leave(bm.pool, keys[i]);
    for (uint64_t i = 0; i < 5000; i++)
        assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, 3, 50, 10000 + i % 50 * 10), 3);
    assert_true(bm.pool->retained.capacity <= 64);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    bm_close(&bm);
}

/* ---- keys, parents, positions ---- */

static void test_contradictions(void **state)
{
    uint64_t twice[3] = {1, 2, 1}, self[2] = {50, 51}, behind[2] = {51, 50}, other = 60;
    struct kvbm_complete staged[3];
    struct kvbm_immutable held[3];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, twice, 3, staged), -EEXIST);
    assert_int_equal(bm_complete_at(bm.pool, 0, &self[0], 1, self, 1, staged), -EEXIST);
    assert_int_equal(bm_complete_at(bm.pool, 0, &self[0], 1, behind, 2, staged), -EEXIST);
    assert_int_equal(bm.registry->live_entries, 0); /* nothing stays of them */
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 7);

    bm_put(bm.pool, keys, 3, held);
    assert_int_equal(bm_complete_at(bm.pool, 0, &other, 7, &keys[1], 1, staged), -EEXIST);
    assert_int_equal(bm_complete_at(bm.pool, 0, &keys[1], 3, &other, 1, staged), -EEXIST);
    assert_int_equal(bm.registry->live_entries, 3);
    /* behind another parent, at the same position: the first parent is believed, the other not
     * kept */
    assert_int_equal(bm_complete_at(bm.pool, 0, &other, 1, &keys[1], 1, staged), 0);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(bm.registry->live_entries, 3);
    assert_int_equal(kvbm_pool_release_complete(bm.pool, staged, 1), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    bm_close(&bm);
}

/* Facts about a parent before it is registered, and after it was evicted. */
static void test_ghosts(void **state)
{
    struct kvbm_reset_result result;
    struct kvbm_complete staged;
    struct kvbm_immutable held;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_put_at(bm.pool, 0, &keys[0], 1, &keys[1], 1, &held);
    assert_int_equal(bm.registry->live_entries, 2);
    assert_false(bm_has(bm.pool, keys[0]));
    assert_int_equal(bm_complete_at(bm.pool, 0, &keys[5], 3, &keys[0], 1, &staged), -EEXIST);
    bm_leave(bm.pool, keys[0]); /* it comes */
    assert_int_equal(bm.registry->live_entries, 2);
    assert_int_equal(prefix(bm.pool, keys, 2), 2);
    assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, keys, 1, &result), 0);
    assert_int_equal(result.reset, 1);
    assert_int_equal(bm.registry->live_entries, 2); /* a ghost again */
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(bm.registry->live_entries, 0);
    /* nobody remembers the position now */
    bm_put_at(bm.pool, 0, &keys[5], 3, &keys[0], 1, &held);
    assert_int_equal(bm_told(&bm), 5);
    assert_int_equal(bm.told[4].position, 3);
    assert_true((uintptr_t)bm.told[4].parent == keys[5]);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    bm_close(&bm);
}

/* ---- several pools ---- */

static void test_tiers(void **state)
{
    struct kvbm_pool *host;
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held;
    uint8_t where[3];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    host = bm_pool(&bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST, .n_blocks = 2});
    bm_leave(bm.pool, keys[0]);
    bm_leave(host, keys[0]);
    bm_leave(host, keys[1]);
    assert_int_equal(kvbm_registry_locate(bm.registry, 0, keys, 3, where), 0);
    assert_memory_equal(where, ((uint8_t[]){3, 2, 0}), 3);
    assert_int_equal(match(bm.pool, keys, 2, &held), 1); /* each pool finds its own */
    assert_int_equal(kvbm_immutable_info(&held, &info), 0);
    assert_int_equal(info.tiers, 3);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(kvbm_registry_locate(bm.registry, 0, keys, 3, where), 0);
    assert_memory_equal(where, ((uint8_t[]){2, 2, 0}), 3);
    assert_int_equal(kvbm_registry_locate(bm.registry, 5, keys, 1, where), 0);
    assert_int_equal(where[0], 0);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    assert_int_equal(bm_told(&bm), 6);
    for (size_t i = 0; i < 6; i++) {
        static const bool end[6] = {true, false, true, false, true, true};

        assert_int_equal(i < 3 ? bm.told[i].first : bm.told[i].last, end[i]);
        assert_int_equal(bm.told[i].tier, i == 0 || i == 3 ? KV_TIER_DEVICE : KV_TIER_HOST);
    }
    bm_close(&bm);
}

static void test_groups(void **state)
{
    struct kvbm_pool_opts opts = {
        .size = sizeof(opts), .n_blocks = 3, .block_size = 4, .groups = 6};
    struct kvbm_immutable a, b, found;
    struct kvbm_pool *other, *none;
    struct bm bm;
    uint8_t where;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.groups = 1});
    assert_int_equal(kvbm_pool_create(bm.registry, &opts, &other), 0);
    opts.groups = 4;
    assert_int_equal(kvbm_pool_create(bm.registry, &opts, &none), -EEXIST);
    opts.groups = 0;
    assert_int_equal(kvbm_pool_create(bm.registry, &opts, &none), -EEXIST);
    opts.tier = KV_TIER_DISK;
    assert_int_equal(kvbm_pool_create(bm.registry, &opts, &none), 0);
    assert_int_equal(kvbm_pool_destroy(none), 0);
    bm_put_at(bm.pool, 0, NULL, 0, keys, 1, &a);
    assert_int_equal(kvbm_registry_locate(bm.registry, 1, keys, 1, &where), 0);
    assert_int_equal(where, 0); /* the same bytes in another group are another key */
    bm_put_at(other, 1, NULL, 0, keys, 1, &b);
    assert_int_equal(kvbm_pool_match(other, 2, keys, 1, 0, &found), 0);
    assert_int_equal(kvbm_pool_match(other, 0, keys, 1, 0, &found), -EINVAL);
    assert_int_equal(kvbm_pool_match(bm.pool, 1, keys, 1, 0, &found), -EINVAL);
    assert_int_equal(kvbm_immutable_release(&a), 0);
    assert_int_equal(kvbm_immutable_release(&b), 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(kvbm_pool_match(other, 1, keys, 1, 0, &found), 1);
    assert_int_equal(kvbm_immutable_release(&found), 0);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(other), 0);
    bm_close(&bm);
}

/* A large pool goes, a small one comes, and the others' entries have numbers beyond what that
 * needs. */
static void test_pools_come_and_go(void **state)
{
    enum { BIG = 3000 };
    struct kvbm_immutable *held = calloc(BIG, sizeof(*held));
    struct kvbm_pool *big, *small;
    uint64_t *many = calloc(BIG, sizeof(*many));
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < BIG; i++)
        many[i] = 1 << 20 | i;
    for (int policy = KVBM_EVICT_LRU; policy <= (int)KVBM_EVICT_LINEAGE; policy++) {
        bm_open(&bm, &(struct kvbm_pool_opts){.eviction = (enum kvbm_eviction)policy});
        for (int round = 0; round < 3; round++) {
            struct kvbm_pool_opts opts = {
                .tier = KV_TIER_HOST, .n_blocks = BIG, .eviction = (enum kvbm_eviction)policy};

            big = bm_pool(&bm, &opts);
            bm_put(big, many, BIG, held);
            assert_int_equal(kvbm_pool_release(big, held, BIG), 0);
            bm_leave(bm.pool, keys[round]); /* its number lies behind the big pool's */
            assert_int_equal(kvbm_pool_destroy(big), 0);
            opts.tier = KV_TIER_DISK;
            opts.n_blocks = 2;
            small = bm_pool(&bm, &opts);
            bm_put_at(small, 0, &keys[round], 1, &keys[7], 1, held);
            assert_int_equal(kvbm_immutable_release(held), 0);
            bm_put_at(bm.pool, 0, &keys[round], 1, &keys[7], 1, held);
            assert_int_equal(kvbm_immutable_release(held), 0);
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
            assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, &keys[7], 1, NULL), 0);
            assert_int_equal(kvbm_pool_destroy(small), 0);
            assert_true(bm_has(bm.pool, keys[round]));
        }
        bm_close(&bm);
    }
    free(held);
    free(many);
}

static void test_options(void **state)
{
    static const struct kvbm_pool_opts wrong[] = {
        {.n_blocks = 0, .block_size = 4},
        {.n_blocks = INT32_MAX, .block_size = 4},
        {.n_blocks = 1, .block_size = 0},
        {.n_blocks = 1, .block_size = 3},
        {.n_blocks = 1, .block_size = 2048},
        {.n_blocks = 1, .block_size = 4, .tier = KV_N_TIERS},
        {.n_blocks = 1, .block_size = 4, .eviction = (enum kvbm_eviction)4},
        {.n_blocks = 1, .block_size = 4, .lfu_thresholds = {3, 3, 4}},
        {.n_blocks = 1, .block_size = 4, .lfu_thresholds = {0, 3, 4}},
        {.n_blocks = 1, .block_size = 4, .lfu_thresholds = {3, 8, 16}},
        {.n_blocks = 1, .block_size = 4, .name = "a name of more than thirty-one bytes"},
    };
    struct kvbm_registry_opts narrow = {.size = sizeof(narrow), .key_len = 3};
    struct kvbm_registry *registry = NULL;
    struct kvbm_pool *pool = NULL;
    uint8_t where = 9;
    (void)state;

    assert_int_equal(kvbm_registry_create(&narrow, &registry), -EINVAL);
    narrow.key_len = 65;
    assert_int_equal(kvbm_registry_create(&narrow, &registry), -EINVAL);
    assert_int_equal(kvbm_registry_create(NULL, &registry), 0);
    assert_int_equal(kvbm_registry_locate(registry, 0, keys, 1, &where), 0); /* no pool yet */
    assert_int_equal(where, 0);
    for (size_t i = 0; i < KV_COUNT(wrong); i++) {
        struct kvbm_pool_opts opts = wrong[i];

        opts.size = sizeof(opts);
        assert_int_equal(kvbm_pool_create(registry, &opts, &pool), -EINVAL);
        assert_null(pool);
    }
    assert_int_equal(kvbm_registry_check(registry), 0);
    assert_int_equal(kvbm_registry_destroy(registry), 0);
    assert_int_equal(kvbm_registry_destroy(NULL), 0);
    assert_int_equal(kvbm_pool_destroy(NULL), 0);
}

/* Keys of other lengths, all of their bytes counting. */
static void test_key_lengths(void **state)
{
    static const uint32_t lengths[] = {4, 5, 16, 63, 64};
    (void)state;

    for (size_t l = 0; l < KV_COUNT(lengths); l++) {
        struct kvbm_registry_opts opts = {.size = sizeof(opts), .key_len = lengths[l]};
        struct kvbm_pool_opts small = {.size = sizeof(small), .n_blocks = 4, .block_size = 1};
        uint8_t packed[4 * KVBM_MAX_KEY] = {0};
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = packed};
        struct kvbm_registry *registry;
        struct kvbm_pool *pool;
        struct kvbm_mutable blocks[4];
        struct kvbm_complete staged[4];
        struct kvbm_immutable held[4];
        struct kvbm_block_info info = {.size = sizeof(info)};

        for (size_t i = 0; i < 4; i++)
            packed[(i + 1) * lengths[l] - 1] = (uint8_t)(i + 1); /* only their last bytes differ */
        assert_int_equal(kvbm_registry_create(&opts, &registry), 0);
        assert_int_equal(kvbm_pool_create(registry, &small, &pool), 0);
        assert_int_equal(kvbm_pool_allocate(pool, 4, blocks, NULL), 0);
        assert_int_equal(kvbm_pool_complete(pool, blocks, 4, &chain, staged), 0);
        assert_int_equal(kvbm_pool_register(pool, staged, 4, held), 0);
        assert_int_equal(kvbm_pool_release(pool, held, 4), 0);
        assert_int_equal(kvbm_pool_match(pool, 0, packed, 4, 0, held), 4);
        assert_int_equal(kvbm_immutable_info(&held[3], &info), 0);
        assert_memory_equal(info.key, packed + (size_t)3 * lengths[l], lengths[l]);
        assert_int_equal(kvbm_pool_release(pool, held, 4), 0);
        assert_int_equal(kvbm_registry_check(registry), 0);
        assert_int_equal(kvbm_pool_destroy(pool), 0);
        assert_int_equal(kvbm_registry_destroy(registry), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_state),
        cmocka_unit_test(test_shortage),
        cmocka_unit_test(test_fifo),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_blocking),
        cmocka_unit_test(test_evict_leaves),
        cmocka_unit_test(test_match_return),
        cmocka_unit_test(test_match_repeated),
        cmocka_unit_test(test_touch),
        cmocka_unit_test(test_touch_chain),
        cmocka_unit_test(test_touch_long_chain),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_stale_under_duplicate),
        cmocka_unit_test(test_duplicate_revives),
        cmocka_unit_test(test_duplicates_rejected),
        cmocka_unit_test(test_duplicates_together),
        cmocka_unit_test(test_reset),
        cmocka_unit_test(test_reset_on_release),
        cmocka_unit_test(test_destroy_busy),
        cmocka_unit_test(test_weak),
        cmocka_unit_test(test_revive),
        cmocka_unit_test(test_retain),
        cmocka_unit_test(test_retain_ends),
        cmocka_unit_test(test_retain_recycled),
        cmocka_unit_test(test_retain_bounded),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_ghosts),
        cmocka_unit_test(test_tiers),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_pools_come_and_go),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_key_lengths),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
