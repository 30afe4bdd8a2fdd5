// SPDX-License-Identifier: Apache-2.0
/* Memory that an index uses and frees. */
#include "base/unit.h"
#include "index/tree/tree.h"
#include "random.h"

#define PROMPT 64u

static struct kv_holder holder(uint64_t worker)
{
    return (struct kv_holder){worker, 0};
}

static void make_prompt(uint64_t id, uint32_t shared, struct kv_block *ret)
{
    for (uint32_t i = 0; i < PROMPT; i++) {
        ret[i].tokens_hash = rng_scatter((i < shared ? id & 0xffff : id) << 8 | (i + 1));
        ret[i].hash = rng_scatter(ret[i].tokens_hash);
    }
}

static void store(struct kvi_index *ix, uint64_t worker, uint64_t id, uint32_t shared)
{
    struct kv_block blocks[PROMPT];

    make_prompt(id, shared, blocks);
    assert_int_equal(kvi_store(ix, holder(worker), KV_TIER_DEVICE, NULL, blocks, PROMPT, NULL), 0);
}

static void drop(struct kvi_index *ix, uint64_t worker, uint64_t id, uint32_t shared)
{
    struct kv_block blocks[PROMPT];
    uint64_t hashes[PROMPT];

    make_prompt(id, shared, blocks);
    for (uint32_t i = 0; i < PROMPT; i++)
        hashes[i] = blocks[PROMPT - 1 - i].hash;
    assert_int_equal(kvi_remove(ix, holder(worker), KV_TIER_DEVICE, hashes, PROMPT), PROMPT);
}

static uint64_t bytes(struct kvi_index *ix)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    kvi_get_stats(ix, &stats);
    return stats.bytes;
}

/* Filled and emptied in every way there is, an index takes what an empty one takes. */
static void test_everything_returns(void **state)
{
    uint32_t n = (uint32_t)test_rounds(4000);
    struct kvi_index *ix;
    uint64_t empty, full;
    (void)state;

    assert_int_equal(kvi_create(NULL, &ix), 0);
    empty = bytes(ix);
    assert_true(empty < 8192);
    for (int way = 0; way < 3; way++) {
        for (uint32_t i = 0; i < n; i++)
            store(ix, i % 8, (uint64_t)i << 16 | i % 100, 19);
        full = bytes(ix);
        assert_true(full > (uint64_t)n * 45 * 16);
        for (uint32_t i = 0; way == 0 && i < n; i++) {
            struct kv_block blocks[PROMPT];

            make_prompt((uint64_t)i << 16 | i % 100, 19, blocks);
            (void)kvi_remove(ix, holder(i % 8), KV_TIER_DEVICE, &blocks[0].hash, 1);
        }
        for (uint64_t w = 0; way == 1 && w < 8; w++)
            assert_int_equal(kvi_clear(ix, holder(w)), 0);
        for (uint64_t w = 0; w < 8; w++)
            assert_int_equal(kvi_remove_worker(ix, w), 0);
        assert_null(kvi_check(ix));
        assert_true(bytes(ix) <= empty + 1024);
    }
    kvi_destroy(ix);
}

/* Memory of a large holder is freed when it leaves, not at the next write: there may be none. */
static void test_a_large_holder_leaves(void **state)
{
    struct kvi_index *ix;
    (void)state;

    for (int way = 0; way < 2; way++) {
        assert_int_equal(kvi_create(NULL, &ix), 0);
        store(ix, 9, 1, 0);
        for (uint64_t i = 0; i < 8000; i++)
            store(ix, 1, i << 16 | 2, 0);
        assert_true(bytes(ix) > 8000 * PROMPT * 16);
        if (way == 0)
            assert_int_equal(kvi_remove_worker(ix, 1), 0);
        else
            assert_int_equal(kvi_clear(ix, holder(1)), 0);
        assert_true(bytes(ix) < 3 << 20); /* one region of pages, small tables */
        assert_null(kvi_check(ix));
        kvi_destroy(ix);
    }
}

/* Coming and going for long doesn't wear it out: no more memory than the first filling took, or
 * little. */
static void test_churn_is_level(void **state)
{
    uint32_t n = (uint32_t)test_rounds(4000);
    struct kvi_index *ix;
    uint64_t first;
    (void)state;

    assert_int_equal(kvi_create(NULL, &ix), 0);
    for (uint32_t i = 0; i < n; i++)
        store(ix, i % 8, (uint64_t)i << 16, 0);
    first = bytes(ix);
    for (uint32_t i = 0; i < 4 * n; i++) {
        drop(ix, i % 8, (uint64_t)i << 16, 0);
        store(ix, (i + n) % 8, (uint64_t)(i + n) << 16, 0);
    }
    assert_null(kvi_check(ix));
    assert_true(bytes(ix) < first + first / 4);
    kvi_destroy(ix);
}

/* Chains that were split by passers-by grow together again. */
static void test_splits_heal(void **state)
{
    struct kv_block trunk[PROMPT], fork;
    struct kvi_stats stats = {.size = sizeof(stats)};
    struct kvi_index *ix;
    (void)state;

    assert_int_equal(kvi_create(NULL, &ix), 0);
    make_prompt(1, 0, trunk);
    store(ix, 1, 1, 0);
    for (uint32_t at = 1; at < PROMPT; at++) {
        fork = (struct kv_block){at, 1000 + at};
        assert_int_equal(kvi_store(ix, holder(2), KV_TIER_DEVICE, NULL, trunk, at, NULL), 0);
        assert_int_equal(
            kvi_store(ix, holder(2), KV_TIER_DEVICE, &trunk[at - 1].hash, &fork, 1, NULL), 0);
    }
    kvi_get_stats(ix, &stats);
    assert_int_equal(stats.chains, 2 * PROMPT - 1);
    assert_int_equal(kvi_clear(ix, holder(2)), 0);
    kvi_get_stats(ix, &stats);
    assert_int_equal(stats.chains, 1);
    assert_int_equal(stats.blocks, PROMPT);
    kvi_destroy(ix);
}

/* A region that is mapped for later counts from then on, and goes with the region before it. */
static void test_spare_region(void **state)
{
    enum { PAGE = 4096, REGION = 2 << 20, N_PAGES = 1000 };
    static void *pages[N_PAGES];
    struct kvi_mem mem = {0};
    uint32_t n = 0;
    uint64_t before;
    (void)state;

    for (; !mem.wants_spare; n++) {
        assert_true(n < N_PAGES);
        pages[n] = kvi_mem_map(&mem, PAGE);
        assert_non_null(pages[n]);
    }
    before = kvi_mem_bytes(&mem);
    kvi_mem_prepare(&mem);
    assert_int_equal(kvi_mem_bytes(&mem), before + REGION);
    kvi_mem_drop_spare(&mem);
    assert_int_equal(kvi_mem_bytes(&mem), before);
    mem.wants_spare = true;
    kvi_mem_prepare(&mem);
    while (n > 0)
        kvi_mem_unmap(&mem, pages[--n], PAGE);
    assert_null(mem.spare);
    assert_int_equal(kvi_mem_bytes(&mem), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything_returns), cmocka_unit_test(test_a_large_holder_leaves),
        cmocka_unit_test(test_churn_is_level),     cmocka_unit_test(test_splits_heal),
        cmocka_unit_test(test_spare_region),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
