// SPDX-License-Identifier: Apache-2.0
/* Listing of blocks about to be evicted (leave.c). Holding such a block doesn't make it younger. */
#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"
#include "index/random.h"

#define DISK (1u << KV_TIER_DISK)

static uint64_t key_of(const struct kvbm_immutable *block)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    uint64_t key;

    assert_int_equal(kvbm_immutable_info(block, &info), 0);
    memcpy(&key, info.key, 8);
    return key;
}

/* The keys that are told of now, their blocks left as they were. */
static size_t told(struct kvbm_pool *pool, size_t n, uint64_t *keys, size_t max)
{
    struct kvbm_weak *weak = calloc(max, sizeof(*weak));
    uint64_t since = 0;
    size_t found = kvbm_pool_leaving(pool, n, &since, weak, max);

    for (size_t i = 0; i < found; i++) {
        struct kvbm_immutable held;

        assert_int_equal(kvbm_weak_upgrade(&weak[i], &held), 0);
        keys[i] = key_of(&held);
        kvbm_pool_release_oldest(&held, false);
        assert_null(held.handle.pool);
    }
    free(weak);
    return found;
}

static void fill(struct bm *bm, uint64_t first, uint64_t n)
{
    for (uint64_t key = first; key < first + n; key++)
        bm_leave(bm->pool, key);
}

/* Free blocks come first; then the oldest; each once. */
static void test_told_once(void **state)
{
    const struct kvbm_pool_opts opts = {.n_blocks = 10};
    uint64_t keys[10];
    struct kvbm_immutable held;
    struct bm bm;

    (void)state;
    bm_open(&bm, &opts);
    kvbm_pool_watch(bm.pool, DISK);
    fill(&bm, 100, 6); /* 4 are free */
    assert_int_equal(told(bm.pool, 4, keys, 10), 0);
    assert_int_equal(told(bm.pool, 6, keys, 10), 2);
    assert_int_equal(keys[0], 100);
    assert_int_equal(keys[1], 101);
    assert_int_equal(told(bm.pool, 7, keys, 10), 1);
    assert_int_equal(keys[0], 102);
    assert_int_equal(told(bm.pool, 10, keys, 2), 2); /* no more than there is room for */
    assert_int_equal(keys[1], 104);
    /* A matched block is young again, and is listed again when its time comes. */
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &(uint64_t){100}, 1, 0, &held), 1);
    assert_int_equal(told(bm.pool, 10, keys, 10), 1);
    assert_int_equal(keys[0], 105);
    kvbm_immutable_release(&held);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, &(uint64_t){101}, 1), 1);
    assert_int_equal(told(bm.pool, 10, keys, 10), 2);
    assert_int_equal(keys[0], 100);
    assert_int_equal(keys[1], 101);
    bm_close(&bm);
}

/* kvbm_pool_leaving looks only now and then, and again at once when its last look was cut off. */
static void test_since(void **state)
{
    const struct kvbm_pool_opts opts = {.n_blocks = 16};
    struct kvbm_weak weak[16];
    uint64_t since = 0;
    struct bm bm;

    (void)state;
    bm_open(&bm, &opts);
    kvbm_pool_watch(bm.pool, DISK);
    fill(&bm, 100, 16);
    assert_int_equal(kvbm_pool_leaving(bm.pool, 8, &since, weak, 4), 4);
    assert_int_equal(kvbm_pool_leaving(bm.pool, 8, &since, weak, 16), 4);
    bm_leave(bm.pool, 200);
    assert_int_equal(kvbm_pool_leaving(bm.pool, 8, &since, weak, 16),
                     0); /* one allocation of two */
    bm_leave(bm.pool, 201);
    assert_int_equal(kvbm_pool_leaving(bm.pool, 8, &since, weak, 16), 2);
    assert_int_equal(kvbm_pool_lost(bm.pool), 0);
    bm_close(&bm);
}

/* Holding what is told of doesn't make it younger; asking for it does, also while it is held. */
static void test_place_is_kept(void **state)
{
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        const struct kvbm_pool_opts opts = {.n_blocks = 8, .eviction = (enum kvbm_eviction)policy};
        struct kvbm_immutable held[3], found;
        struct kvbm_weak weak[8];
        uint64_t since = 0;
        struct bm bm;

        (void)state;
        bm_open(&bm, &opts);
        kvbm_pool_watch(bm.pool, DISK);
        fill(&bm, 100, 8);
        assert_int_equal(kvbm_pool_leaving(bm.pool, 3, &since, weak, 8), 3);
        for (int i = 0; i < 3; i++)
            assert_int_equal(kvbm_weak_upgrade(&weak[i], &held[i]), 0);
        bm_churn(bm.pool, 1); /* others go meanwhile */
        assert_false(bm_has(bm.pool, 103));
        assert_int_equal(kvbm_pool_match(bm.pool, 0, &(uint64_t){101}, 1, 0, &found), 1);
        kvbm_immutable_release(&found);
        for (int i = 0; i < 3; i++)
            kvbm_pool_release_oldest(&held[i], false);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        bm_churn(bm.pool, 2); /* one is free */
        assert_false(bm_has(bm.pool, 100));
        assert_true(bm_has(bm.pool, 102));
        bm_churn(bm.pool, 3);
        assert_false(bm_has(bm.pool, 102));
        assert_true(bm_has(bm.pool, 104));
        bm_churn(bm.pool, 7);
        assert_true(bm_has(bm.pool, 101));
        assert_int_equal(kvbm_pool_lost(bm.pool), 5); /* 103 to 107: told of by nobody */
        bm_close(&bm);
    }
}

/* Of several, one after the other, the first stays the first. */
static void test_order(void **state)
{
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        const struct kvbm_pool_opts opts = {.n_blocks = 16, .eviction = (enum kvbm_eviction)policy};
        struct kvbm_immutable held;
        uint64_t keys[16];
        struct bm bm;

        (void)state;
        bm_open(&bm, &opts);
        kvbm_pool_watch(bm.pool, DISK);
        fill(&bm, 100, 16);
        for (size_t n = 2; n <= 8; n += 2)
            assert_int_equal(told(bm.pool, n, keys, 16), 2);
        /* The last of them is used: what comes next stays behind the others. */
        assert_int_equal(kvbm_pool_match(bm.pool, 0, &(uint64_t){107}, 1, 0, &held), 1);
        kvbm_immutable_release(&held);
        assert_int_equal(told(bm.pool, 9, keys, 16), 2);
        for (uint64_t key = 100; key < 110; key++) {
            if (key == 107)
                continue;
            assert_true(bm_has(bm.pool, key));
            bm_leave(bm.pool, 1000 + key);
            assert_false(bm_has(bm.pool, key));
        }
        assert_true(bm_has(bm.pool, 107));
        bm_close(&bm);
    }
}

/* Blocks that another tier has are not listed; a block given back is listed again. */
static void test_elsewhere_and_again(void **state)
{
    const struct kvbm_pool_opts opts = {.n_blocks = 4};
    const struct kvbm_pool_opts below = {.n_blocks = 4, .tier = KV_TIER_DISK};
    struct kvbm_immutable held;
    struct kvbm_weak weak[4];
    struct kvbm_pool *disk;
    uint64_t keys[4], since = 0;
    struct bm bm;

    (void)state;
    bm_open(&bm, &opts);
    disk = bm_pool(&bm, &below);
    kvbm_pool_watch(bm.pool, DISK);
    fill(&bm, 100, 4);
    bm_leave(disk, 101);
    assert_int_equal(told(bm.pool, 3, keys, 4), 2);
    assert_int_equal(keys[0], 100);
    assert_int_equal(keys[1], 102);
    assert_int_equal(kvbm_pool_leaving(bm.pool, 4, &since, weak, 4), 1);
    assert_int_equal(kvbm_weak_upgrade(&weak[0], &held), 0);
    assert_int_equal(key_of(&held), 103);
    kvbm_pool_release_oldest(&held, true);
    assert_int_equal(told(bm.pool, 4, keys, 4), 1);
    assert_int_equal(keys[0], 103);
    bm_churn(bm.pool, 4);
    assert_int_equal(kvbm_pool_lost(bm.pool), 0);
    assert_int_equal(kvbm_pool_destroy(disk), 0);
    bm_close(&bm);
}

/* A caller that looks n ahead before it takes n blocks has been told of all that go. */
static void random_rounds(enum kvbm_eviction eviction, bool chains)
{
    enum { BLOCKS = 200 };
    const struct kvbm_pool_opts opts = {.n_blocks = BLOCKS, .eviction = eviction};
    struct rng random = {test_seed()};
    uint64_t ignored[BLOCKS], next = 1;
    struct bm bm;

    bm_open(&bm, &opts);
    kvbm_pool_watch(bm.pool, DISK);
    for (long round = 0; round < test_rounds(4000); round++) {
        uint64_t keys[16], key = 1 + rng_below(&random, (uint32_t)next);
        uint32_t n = 1 + rng_below(&random, 16), what = rng_below(&random, 8);
        struct kvbm_immutable held[16];

        if (what == 0) {
            kvbm_pool_touch(bm.pool, 0, &key, 1);
        } else if (what == 1 && !chains) {
            kvbm_pool_retain(bm.pool, 0, &key, 1, rng_below(&random, 101), 0);
        } else if (what == 2) {
            if (kvbm_pool_match(bm.pool, 0, &key, 1, 0, held) == 1)
                kvbm_immutable_release(held);
        } else {
            for (uint32_t i = 0; i < n; i++)
                keys[i] = next++;
            told(bm.pool, n, ignored, BLOCKS);
            bm_put(bm.pool, keys, chains ? n : 1, held);
            assert_int_equal(kvbm_pool_release(bm.pool, held, chains ? n : 1), 0);
            assert_int_equal(kvbm_pool_lost(bm.pool), 0);
        }
        if (round % 64 == 0)
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    bm_close(&bm);
}

static void test_random(void **state)
{
    (void)state;
    random_rounds(KVBM_EVICT_LRU, false);
    random_rounds(KVBM_EVICT_LRU, true);
    random_rounds(KVBM_EVICT_LFU, false);
    random_rounds(KVBM_EVICT_LFU, true);
    random_rounds(KVBM_EVICT_LINEAGE, false);
}

/* With lineage it is nearly the order: of long sequences, released one after the other, all are
 * told of. */
static void test_lineage_sequences(void **state)
{
    const struct kvbm_pool_opts opts = {.n_blocks = 64, .eviction = KVBM_EVICT_LINEAGE};
    struct kvbm_immutable held[16];
    uint64_t keys[16], ignored[64], next = 1;
    struct bm bm;

    (void)state;
    bm_open(&bm, &opts);
    kvbm_pool_watch(bm.pool, DISK);
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < 16; i++)
            keys[i] = next++;
        told(bm.pool, 16, ignored, 64);
        bm_put(bm.pool, keys, 16, held);
        assert_int_equal(kvbm_pool_release(bm.pool, held, 16), 0);
        assert_int_equal(kvbm_pool_lost(bm.pool), 0);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    bm_close(&bm);
}

static void offload_one(struct kvbm_pool *pool, uint64_t expect)
{
    uint64_t keys[1];

    assert_int_equal(told(pool, 16, keys, 1), 1);
    assert_int_equal(keys[0], expect);
}

/* The first to go is registered again, or retained, and goes to the end: those told of next are
 * first all the same. */
static void test_first_goes_to_the_end(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        const struct kvbm_pool_opts opts = {.n_blocks = 16};
        struct bm bm;

        bm_open(&bm, &opts);
        kvbm_pool_watch(bm.pool, DISK);
        fill(&bm, 100, 15);
        offload_one(bm.pool, 100);
        if (how == 0)
            bm_leave(bm.pool, 100); /* a duplicate, released */
        else if (how == 1)
            assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){100}, 1, 35, 0), 1);
        for (uint64_t key = 101; key <= 103; key++)
            offload_one(bm.pool, key);
        bm_churn(bm.pool, 4); /* one is free, three go */
        for (uint64_t key = 101; key <= 103; key++)
            assert_int_equal(bm_has(bm.pool, key), how == 2 && key == 103);
        for (uint64_t key = 104; key < 115; key++)
            assert_true(bm_has(bm.pool, key));
        bm_close(&bm);
    }
}

/* One of those told of comes back before the others' turn has come. */
static void test_first_of_those_told_of(void **state)
{
    (void)state;
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LFU; policy++) {
        const struct kvbm_pool_opts opts = {.n_blocks = 16, .eviction = (enum kvbm_eviction)policy};
        struct kvbm_immutable held;
        struct kvbm_weak weak[8];
        uint64_t since = 0;
        struct bm bm;

        bm_open(&bm, &opts);
        kvbm_pool_watch(bm.pool, DISK);
        fill(&bm, 100, 16);
        assert_int_equal(kvbm_pool_leaving(bm.pool, 4, &since, weak, 8), 4);
        assert_int_equal(kvbm_weak_upgrade(&weak[0], &held), 0);
        kvbm_pool_release_oldest(&held, false);
        bm_churn(bm.pool, 1);
        assert_false(bm_has(bm.pool, 100));
        for (uint64_t key = 101; key < 116; key++)
            assert_true(bm_has(bm.pool, key));
        bm_close(&bm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_goes_to_the_end),
        cmocka_unit_test(test_first_of_those_told_of),
        cmocka_unit_test(test_told_once),
        cmocka_unit_test(test_since),
        cmocka_unit_test(test_place_is_kept),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_elsewhere_and_again),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_lineage_sequences),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
