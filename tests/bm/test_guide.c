// SPDX-License-Identifier: Apache-2.0
/* The steps of docs/kvbm.md for engine writers, carried out as printed there. */
#include <errno.h>

#include "base/unit.h"
#include "bm.h"
#include "kvbm.h"

#define N 6
#define WINDOW 2

static const uint64_t keys[N] = {101, 102, 103, 104, 105, 106};

/* "Several caches in one model": where can a prompt go on? */
static long resume_at(struct kvbm_pool *full, struct kvbm_pool *window)
{
    long end = kvbm_pool_probe(full, 0, keys, N);

    for (; end > 0; end--) {
        long need = end < WINDOW ? end : WINDOW;

        if (kvbm_pool_probe(window, 1, keys + end - need, (size_t)need) == need)
            break;
    }
    return end;
}

static void test_hybrid_model(void **state)
{
    struct bm bm;
    struct kvbm_pool *window;
    struct kvbm_immutable attention[N], state_of[N], found[WINDOW];
    struct kvbm_reset_result reset;

    (void)state;
    bm_open(&bm, &(struct kvbm_pool_opts){.name = "full", .groups = 1 << 0});
    window = bm_pool(&bm, &(struct kvbm_pool_opts){.name = "window", .groups = 1 << 1});
    assert_int_equal(resume_at(bm.pool, window), 0);
    bm_put_at(bm.pool, 0, NULL, 0, keys, N, attention);
    assert_int_equal(resume_at(bm.pool, window), 0);
    bm_put_at(window, 1, NULL, 0, keys, N, state_of);
    assert_int_equal(resume_at(bm.pool, window), N);
    assert_int_equal(kvbm_pool_release(window, state_of, N), 0);

    /* what lies before the window may go; the end of the sequence may not */
    assert_int_equal(kvbm_pool_reset_keys(window, 1, keys, 2, &reset), 0);
    assert_int_equal(reset.reset, 2);
    assert_int_equal(resume_at(bm.pool, window), N);
    assert_int_equal(kvbm_pool_reset_keys(window, 1, &keys[5], 1, &reset), 0);
    assert_int_equal(resume_at(bm.pool, window), N - 1);
    assert_int_equal(kvbm_pool_reset_keys(window, 1, &keys[3], 1, &reset), 0);
    assert_int_equal(resume_at(bm.pool, window), 0); /* no two neighbours are left */
    assert_int_equal(kvbm_pool_match(window, 1, &keys[2], WINDOW, 0, found), 1);
    assert_int_equal(kvbm_pool_match(window, 0, keys, N, 0, attention),
                     -EINVAL); /* not its group */

    assert_int_equal(kvbm_immutable_release(&found[0]), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, attention, N), 0);
    assert_int_equal(kvbm_pool_destroy(window), 0);
    bm_close(&bm);
}

/* "A parent may go before its child": what is found then, and again later. */
static void test_parent_goes_first(void **state)
{
    struct bm bm;
    struct kvbm_immutable held[3], found[3];
    struct kvbm_complete again;

    (void)state;
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 3, .eviction = KVBM_EVICT_LINEAGE});
    bm_put(bm.pool, keys, 3, held);
    assert_int_equal(kvbm_immutable_release(&held[0]),
                     0); /* the child is held: no pin on its parent */
    bm_churn(bm.pool, 1);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 3, 0, found), 0);
    assert_int_equal(kvbm_pool_match_scattered(bm.pool, 0, keys, 3, 0, found), 2);
    assert_null(found[0].handle.pool);
    assert_int_equal(found[2].handle.block, held[2].handle.block);
    assert_int_equal(kvbm_pool_release(bm.pool, found, 3), 0);

    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 1, &again), 0);
    assert_int_equal(kvbm_pool_register(bm.pool, &again, 1, &held[0]), 0);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 3, 0, found), 3);
    assert_int_equal(kvbm_pool_release(bm.pool, found, 3), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    bm_close(&bm);
}

/* "Lineage": idle prefixes are never stranded; every policy takes one sequence's leaf first. */
static void test_leaf_first(void **state)
{
    (void)state;
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        struct bm bm;
        struct kvbm_immutable held[N];
        struct kvbm_mutable taken[N];

        bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = N, .eviction = policy});
        bm_put(bm.pool, keys, N, held);
        assert_int_equal(kvbm_pool_release(bm.pool, held, N), 0); /* in the sequence's order */
        for (size_t gone = 1; gone <= N; gone++) {
            assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &taken[gone - 1], NULL), 0);
            assert_int_equal(kvbm_pool_probe(bm.pool, 0, keys, N), N - gone);
        }
        assert_int_equal(kvbm_pool_release_mutable(bm.pool, taken, N), 0);
        bm_close(&bm);
    }
}

/* "What generations can tell", and what they can't. */
static void test_copied_handles(void **state)
{
    struct bm bm;
    struct kvbm_immutable mine, theirs, copy;

    (void)state;
    bm_open(&bm, NULL);
    bm_put(bm.pool, keys, 1, &mine);
    copy = mine;
    assert_int_equal(kvbm_immutable_release(&mine), 0);
    assert_int_equal(kvbm_immutable_release(&copy), -ESTALE); /* the last one was released: told */

    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 1, 0, &mine), 1);
    assert_int_equal(kvbm_immutable_clone(&mine, &theirs), 0);
    copy = mine;
    assert_int_equal(kvbm_immutable_release(&mine), 0);
    assert_int_equal(kvbm_immutable_release(&copy), 0); /* theirs, in truth */
    assert_int_equal(kvbm_immutable_release(&theirs), -ESTALE);
    bm_close(&bm);
}

/* "Weak handles" remember the registered block, not the handle, and not the key. */
static void test_weak_handles(void **state)
{
    struct bm bm;
    struct kvbm_immutable held, twin, found;
    struct kvbm_weak weak;

    (void)state;
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 2});
    bm_put(bm.pool, keys, 1, &held);
    bm_put(bm.pool, keys, 1, &twin);
    assert_int_equal(kvbm_immutable_downgrade(&twin, &weak), 0);
    assert_int_equal(kvbm_immutable_release(&twin), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_weak_upgrade(&weak, &found), 0); /* inactive, and the primary */
    assert_int_equal(found.handle.block, 0);
    assert_int_equal(kvbm_immutable_release(&found), 0);

    bm_churn(bm.pool, 2);
    bm_leave(bm.pool, keys[0]); /* the key is back */
    assert_true(bm_has(bm.pool, keys[0]));
    assert_int_equal(kvbm_weak_upgrade(&weak, &found), -ESTALE);
    bm_close(&bm);
}

/* "Retention" is about order, not a pin. */
static void test_retained_goes_last(void **state)
{
    struct bm bm;
    struct kvbm_mutable blocks[3];

    (void)state;
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 3});
    for (size_t i = 0; i < 3; i++)
        bm_leave(bm.pool, keys[i]);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, 1, 90, 60000), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys + 2, 1, 0, 0), 1);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, blocks, NULL), 0);
    assert_true(bm_has(bm.pool, keys[0]) && bm_has(bm.pool, keys[1]) && !bm_has(bm.pool, keys[2]));
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, blocks + 1, NULL), 0);
    assert_true(bm_has(bm.pool, keys[0]) && !bm_has(bm.pool, keys[1]));
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, blocks + 2, NULL), 0);
    assert_false(bm_has(bm.pool, keys[0]));
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 3), 0);
    bm_close(&bm);
}

/* "Where the bytes are": addresses within the engine's own tensors. */
static void test_view_of_tensors(void **state)
{
    static _Alignas(
        64) float layer[2][2][4][BM_BLOCK][8]; /* [layer][K, V][block][token][element] */
    struct kvbm_storage *storages[2];
    struct kvbm_layout_config config = {.size = sizeof(config),
                                        .kind = KVBM_LAYER_SEPARATE,
                                        .num_blocks = 4,
                                        .num_layers = 2,
                                        .outer_dim = 2,
                                        .page_size = BM_BLOCK,
                                        .inner_dim = 8,
                                        .dtype_width_bytes = 4,
                                        .tensor_shape = {2, 4}};
    struct kvbm_pool_opts opts = {.size = sizeof(opts), .tier = KV_TIER_HOST, .n_blocks = 4};
    struct kvbm_pool *none = NULL;
    struct kvbm_layout *layout;
    struct kvbm_view view;
    struct bm bm;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct kvbm_storage_opts tensor = {.size = sizeof(tensor),
                                           .kind = KVBM_STORAGE_EXTERNAL,
                                           .bytes = sizeof(layer[i]),
                                           .memory = layer[i]};

        assert_int_equal(kvbm_storage_create(&tensor, &storages[i]), 0);
    }
    assert_int_equal(kvbm_layout_create(&config, storages, 2, &layout), 0);
    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 4, .layout = layout});
    opts.layout = layout;
    for (opts.block_size = 1; opts.block_size <= 1024; opts.block_size *= 2) {
        if (opts.block_size != BM_BLOCK) /* its blocks hold other tokens than the layout's */
            assert_int_equal(kvbm_pool_create(bm.registry, &opts, &none), -EINVAL);
    }
    for (uint32_t i = 0; i < 2 * 2 * 4; i++) {
        assert_int_equal(kvbm_pool_view(bm.pool, i % 4, i / 8, i / 4 % 2, &view), 0);
        assert_int_equal(view.addr, (uintptr_t)layer[i / 8][i / 4 % 2][i % 4]);
        assert_int_equal(view.len, sizeof(layer[0][0][0]));
    }
    assert_int_equal(kvbm_pool_view(bm.pool, 4, 0, 0, &view), -ERANGE);
    assert_int_equal(kvbm_pool_view(bm.pool, 0, 2, 0, &view), -ERANGE);
    bm_close(&bm);
    kvbm_layout_destroy(layout);
    kvbm_storage_destroy(storages[0]);
    kvbm_storage_destroy(storages[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hybrid_model),    cmocka_unit_test(test_parent_goes_first),
        cmocka_unit_test(test_leaf_first),      cmocka_unit_test(test_copied_handles),
        cmocka_unit_test(test_weak_handles),    cmocka_unit_test(test_retained_goes_last),
        cmocka_unit_test(test_view_of_tensors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
