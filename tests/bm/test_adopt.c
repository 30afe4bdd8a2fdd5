// SPDX-License-Identifier: Apache-2.0
/* Registering a block of one tier with the content of another tier's registered block. */
#include <errno.h>
#include <time.h>

#include "base/unit.h"
#include "bm.h"

struct two {
    struct bm bm; /* device */
    struct kvbm_pool *host;
};

static void open_two(struct two *two, bool reject)
{
    const struct kvbm_pool_opts host = {.tier = KV_TIER_HOST, .reject_duplicates = reject};

    bm_open(&two->bm, NULL);
    two->host = bm_pool(&two->bm, &host);
}

static void close_two(struct two *two)
{
    assert_int_equal(kvbm_registry_check(two->bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(two->host), 0);
    bm_close(&two->bm);
}

static const uint64_t keys[3] = {11, 12, 13};

/* An adopted block has the info of its like. */
static void test_identity(void **state)
{
    struct kvbm_immutable device[3], host[3];
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_mutable blocks[3];
    struct two two;
    uint64_t key;

    (void)state;
    open_two(&two, true);
    bm_put(two.bm.pool, keys, 3, device);
    assert_int_equal(kvbm_pool_retain(two.bm.pool, 0, &keys[1], 1, 80, 0), 1);
    assert_int_equal(kvbm_pool_allocate(two.host, 3, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 3, device, host), 0);
    assert_null(blocks[2].handle.pool);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(kvbm_immutable_info(&host[i], &info), 0);
        assert_memory_equal(info.key, &keys[i], 8);
        assert_int_equal(info.position, i);
        assert_int_equal(info.priority, i == 1 ? 80 : KVBM_PRIORITY_DEFAULT);
        assert_int_equal(info.tiers, 1 << KV_TIER_DEVICE | 1 << KV_TIER_HOST);
        assert_int_equal(info.has_parent, i > 0);
        memcpy(&key, info.parent, 8);
        assert_int_equal(key, i > 0 ? keys[i - 1] : 0);
    }
    assert_int_equal(bm_told(&two.bm), 6);
    for (size_t i = 3; i < 6; i++) {
        assert_int_equal(two.bm.told[i].type, KVBM_EVENT_STORED);
        assert_int_equal(two.bm.told[i].tier, KV_TIER_HOST);
        assert_false(two.bm.told[i].first);
    }
    /* An adopted block outlives its like. */
    assert_int_equal(kvbm_pool_release(two.bm.pool, device, 3), 0);
    assert_int_equal(kvbm_pool_reset(two.bm.pool), 0);
    assert_int_equal(kvbm_pool_probe(two.host, 0, keys, 3), 3);
    assert_int_equal(kvbm_pool_release(two.host, host, 3), 0);
    close_two(&two);
}

/* A key that the pool has already: the first one is returned, or a duplicate kept. */
static void test_again(void **state)
{
    for (int reject = 0; reject < 2; reject++) {
        struct kvbm_immutable device, first, second;
        struct kvbm_mutable block;
        struct two two;

        (void)state;
        open_two(&two, reject);
        bm_put(two.bm.pool, keys, 1, &device);
        assert_int_equal(kvbm_pool_allocate(two.host, 1, &block, NULL), 0);
        assert_int_equal(kvbm_pool_adopt(two.host, &block, 1, &device, &first), 0);
        assert_int_equal(kvbm_immutable_clone(&first, &second), 0);
        assert_int_equal(kvbm_immutable_release(&first), 0);
        assert_int_equal(kvbm_pool_allocate(two.host, 1, &block, NULL), 0);
        assert_int_equal(kvbm_pool_adopt(two.host, &block, 1, &device, &first), 0);
        assert_int_equal(first.handle.block == second.handle.block, reject);
        assert_int_equal(bm_stats(two.host).inflight_immutable, reject ? 1 : 2);
        assert_int_equal(kvbm_immutable_release(&first), 0);
        assert_int_equal(kvbm_immutable_release(&second), 0);
        assert_int_equal(kvbm_immutable_release(&device), 0);
        close_two(&two);
    }
}

/* The key's priority is the first block's, whichever is handed in. */
static void test_priority_again(void **state)
{
    for (int reject = 0; reject < 2; reject++) {
        struct kvbm_immutable device, first, second;
        struct kvbm_block_info info = {.size = sizeof(info)};
        struct kvbm_mutable block;
        struct two two;

        (void)state;
        open_two(&two, reject);
        bm_put(two.bm.pool, keys, 1, &device);
        assert_int_equal(kvbm_pool_allocate(two.host, 1, &block, NULL), 0);
        assert_int_equal(kvbm_pool_adopt(two.host, &block, 1, &device, &first), 0);
        assert_int_equal(kvbm_pool_retain(two.bm.pool, 0, keys, 1, 80, 0), 1);
        assert_int_equal(kvbm_pool_allocate(two.host, 1, &block, NULL), 0);
        assert_int_equal(kvbm_pool_adopt(two.host, &block, 1, &device, &second), 0);
        assert_int_equal(kvbm_immutable_info(&second, &info), 0);
        assert_int_equal(info.duplicate, !reject);
        assert_int_equal(info.priority, 80);
        assert_int_equal(kvbm_immutable_info(&first, &info), 0);
        assert_int_equal(info.priority, 80);
        assert_int_equal(kvbm_immutable_release(&first), 0);
        assert_int_equal(kvbm_immutable_release(&second), 0);
        assert_int_equal(kvbm_immutable_release(&device), 0);
        close_two(&two);
    }
}

/* One that the first block has, but that is over, doesn't keep the like's away. */
static void test_priority_over(void **state)
{
    const struct timespec a_while = {.tv_nsec = 5000000};
    struct kvbm_immutable device, first, second;
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_mutable block;
    struct two two;

    (void)state;
    open_two(&two, true);
    bm_put(two.bm.pool, keys, 1, &device);
    assert_int_equal(kvbm_pool_retain(two.bm.pool, 0, keys, 1, 80, 0), 1);
    bm_put(two.host, keys, 1, &first);
    assert_int_equal(kvbm_pool_retain(two.host, 0, keys, 1, 90, 1), 1);
    nanosleep(&a_while, NULL);
    assert_int_equal(kvbm_pool_allocate(two.host, 1, &block, NULL), 0);
    assert_int_equal(kvbm_pool_adopt(two.host, &block, 1, &device, &second), 0);
    assert_int_equal(kvbm_immutable_info(&second, &info), 0);
    assert_int_equal(info.priority, 80);
    assert_int_equal(kvbm_immutable_release(&first), 0);
    assert_int_equal(kvbm_immutable_release(&second), 0);
    assert_int_equal(kvbm_immutable_release(&device), 0);
    close_two(&two);
}

/* All or none: nothing has changed after a refusal. */
static void test_refused(void **state)
{
    const struct kvbm_pool_opts other = {.tier = KV_TIER_DISK, .groups = 2};
    struct kvbm_immutable device[2], ret[2], foreign;
    struct kvbm_mutable blocks[2], copy[2];
    struct kvbm_pool *disk;
    struct two two;
    struct bm bm;

    (void)state;
    open_two(&two, true);
    bm_open(&bm, NULL);
    disk = bm_pool(&two.bm, &other);
    bm_put(bm.pool, keys, 1, &foreign);
    bm_put(two.bm.pool, keys, 2, device);
    assert_int_equal(kvbm_pool_allocate(two.host, 2, blocks, NULL), 0);
    memcpy(copy, blocks, sizeof(copy));

    struct kvbm_immutable likes[2] = {device[0], foreign};

    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, likes, ret), -EXDEV);
    likes[1] = (struct kvbm_immutable){0};
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, likes, ret), -EINVAL);
    likes[1].handle = blocks[0].handle;
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, likes, ret), -EBADFD);
    likes[1] = device[1];
    likes[1].handle.generation++;
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, likes, ret), -ESTALE);
    assert_int_equal(kvbm_pool_adopt(two.bm.pool, blocks, 2, device, ret), -EXDEV);
    assert_int_equal(kvbm_pool_adopt(NULL, blocks, 2, device, ret), -EINVAL);
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, NULL, ret), -EINVAL);
    blocks[1] = blocks[0];
    assert_int_equal(kvbm_pool_adopt(two.host, blocks, 2, device, ret), -EINVAL);
    memcpy(blocks, copy, sizeof(copy));
    assert_int_equal(kvbm_pool_release_mutable(two.host, blocks, 2), 0);
    assert_int_equal(kvbm_pool_allocate(disk, 1, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_adopt(disk, blocks, 1, device, ret),
                     -EINVAL); /* group 0 isn't served */
    assert_int_equal(kvbm_pool_release_mutable(disk, blocks, 1), 0);
    assert_int_equal(kvbm_pool_destroy(disk), 0);
    disk = bm_pool(&two.bm, &(struct kvbm_pool_opts){.tier = KV_TIER_DISK, .block_size = 8});
    assert_int_equal(kvbm_pool_allocate(disk, 1, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_adopt(disk, blocks, 1, device, ret),
                     -EINVAL); /* blocks of another size can't hold the same */
    assert_int_equal(kvbm_pool_release_mutable(disk, blocks, 1), 0);
    assert_int_equal(kvbm_pool_probe(two.host, 0, keys, 2), 0);
    assert_int_equal(kvbm_registry_check(two.bm.registry), 0);
    assert_int_equal(kvbm_pool_release(two.bm.pool, device, 2), 0);
    assert_int_equal(kvbm_pool_destroy(disk), 0);
    assert_int_equal(kvbm_immutable_release(&foreign), 0);
    close_two(&two);
    bm_close(&bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identity),       cmocka_unit_test(test_again),
        cmocka_unit_test(test_priority_again), cmocka_unit_test(test_priority_over),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
