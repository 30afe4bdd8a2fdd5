// SPDX-License-Identifier: Apache-2.0
/* The table of blocks with possible copies beside a plain list; and the effect of removals on
 * it. */
#include <stdlib.h>

#include "base/unit.h"

#include "base/core/error.h"
#include "indexer/view/unsure.h"

#define RANKS 3
#define NAMES 400

static const struct kv_holder holder = {.worker = 7, .rank = 0};

static struct kve_op store_of(const struct kv_block *blocks, size_t n, uint32_t rank)
{
    return (struct kve_op){.type = KVE_OP_STORE, .rank = rank, .blocks = blocks, .n = n};
}

static void check_against(const struct ki_unsure *u, uint32_t (*naive)[NAMES])
{
    size_t n = 0;

    for (uint32_t rank = 0; rank < RANKS; rank++) {
        for (uint64_t name = 0; name < NAMES; name++) {
            const struct ki_unsure_entry *e = ki_unsure_find(u, rank, KI_UNSURE_MAIN, name);

            assert_int_equal(e ? e->copies : 0, naive[rank][name]);
            n += e != NULL;
        }
    }
    assert_int_equal(u->n, n);
}

static bool is_open(const struct ki_unsure *u)
{
    return u->n_open || ki_doubts_any(&u->lost);
}

static void test_beside_a_list(void **state)
{
    uint64_t random = unit_seed();
    uint32_t naive[RANKS][NAMES] = {{0}};
    struct ki_unsure u = {0};

    (void)state;
    for (size_t i = 0; i < unit_rounds(20000); i++) {
        uint32_t rank = (uint32_t)unit_below(&random, RANKS);
        struct kv_block block = {.hash = unit_below(&random, NAMES)};
        uint64_t what = unit_below(&random, 1000);

        if (what < 500) {
            struct kve_op op = store_of(&block, 1, rank);

            ki_unsure_note(&u, &op);
            naive[rank][block.hash]++;
        } else if (what < 998) {
            ki_unsure_forget(&u, rank, KI_UNSURE_MAIN, block.hash);
            naive[rank][block.hash] = 0;
        } else {
            ki_unsure_clear_rank(&u, rank);
            memset(naive[rank], 0, sizeof(naive[rank]));
        }
        if (i % 500 == 0)
            check_against(&u, naive);
    }
    check_against(&u, naive);
    ki_unsure_fini(&u);
    assert_int_equal(u.n, 0);
}

struct world {
    struct kvi_index *index;
    struct ki_unsure u;
    struct kv_block blocks[3];
};

/* A chain of three blocks; the first may have @possible copies more. */
static void begin(struct world *w, unsigned possible)
{
    *w = (struct world){.blocks = {{11, 1}, {12, 2}, {13, 3}}};
    assert_int_equal(kvi_create(NULL, &w->index), 0);
    assert_int_equal(kvi_store(w->index, holder, KV_TIER_DEVICE, NULL, w->blocks, 3, NULL), 0);
    while (possible--) {
        struct kve_op op = store_of(w->blocks, 1, 0);

        ki_unsure_note(&w->u, &op);
    }
}

static void end(struct world *w)
{
    ki_unsure_fini(&w->u);
    kvi_destroy(w->index);
}

static long take(struct world *w, uint64_t hash)
{
    struct kve_op op = {.type = KVE_OP_REMOVE, .hashes = &hash, .n = 1};

    return ki_unsure_take(&w->u, w->index, holder, &op);
}

static size_t found(struct world *w)
{
    static const uint64_t prompt[] = {1, 2, 3};
    struct kvi_matches matches = {0};
    size_t n;

    assert_int_equal(kvi_find(w->index, prompt, 3, &matches), 0);
    n = matches.n ? matches.items[0].reach[KV_TIER_DEVICE] : 0;
    kvi_matches_fini(&matches);
    return n;
}

/* Engines evict children first: who still has some has a copy of the block. */
static void test_children_prove_a_copy(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 1);
    assert_int_equal(take(&w, 11), 1);
    assert_int_equal(found(&w), 3);
    assert_int_equal(w.u.n, 0);
    assert_int_equal(take(&w, 13) + take(&w, 12) + take(&w, 11), 3);
    assert_int_equal(found(&w), 0);
    assert_false(is_open(&w.u));
    end(&w);
}

static void test_open_until_the_last_possible_copy_goes(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 2);
    assert_int_equal(take(&w, 13) + take(&w, 12) + take(&w, 11), 3);
    assert_true(is_open(&w.u));
    assert_int_equal(found(&w), 0);
    assert_int_equal(take(&w, 11), 1);
    assert_true(is_open(&w.u));
    assert_int_equal(take(&w, 11), 1);
    assert_false(is_open(&w.u));
    assert_int_equal(take(&w, 11), 0);
    end(&w);
}

static void test_a_new_child_proves_a_copy(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 1);
    take(&w, 13), take(&w, 12), take(&w, 11);
    assert_true(is_open(&w.u));
    assert_int_equal(ki_unsure_restore(&w.u, w.index, holder, 11), 0);
    assert_false(is_open(&w.u));
    assert_int_equal(found(&w), 1);
    assert_int_equal(w.u.n, 0);
    end(&w);
}

static void test_a_chain_comes_back_from_its_top(void **state)
{
    struct world w;
    struct kve_op op;

    (void)state;
    begin(&w, 0);
    op = store_of(w.blocks, 3, 0);
    ki_unsure_note(&w.u, &op);
    take(&w, 13), take(&w, 12), take(&w, 11);
    assert_int_equal(w.u.n_open, 3);
    assert_int_equal(ki_unsure_restore(&w.u, w.index, holder, 12), 0);
    assert_int_equal(found(&w), 2);
    assert_int_equal(w.u.n_open, 1);
    ki_unsure_note(&w.u, &op); /* one event more: the third is there, others may have a copy more */
    assert_int_equal(w.u.n_open, 0);
    assert_int_equal(w.u.n, 3);
    end(&w);
}

static void test_windows_have_no_proof(void **state)
{
    const struct kvi_window window = {.group = 1, .window = 8, .need = 2, .stride = 1};
    uint64_t names[] = {11, 12};
    struct kve_op op = {.type = KVE_OP_REMOVE, .hashes = names, .n = 1};
    struct world w;

    (void)state;
    begin(&w, 0);
    assert_int_equal(kvi_set_window(w.index, holder, &window), 0);
    assert_int_equal(kvi_add_known(w.index, kvi_window_of(holder, KV_TIER_DEVICE, 0, 0), names, 1),
                     1);
    ki_unsure_note_window(&w.u, w.index, holder, 0, names, 2);
    assert_int_equal(w.u.n_open, 1);
    assert_int_equal(ki_unsure_take_window(&w.u, w.index, holder, 0, &op), 1);
    assert_int_equal(w.u.n_open, 2);
    assert_int_equal(kvi_get_block(w.index, kvi_window_of(holder, KV_TIER_DEVICE, 0, 0), 11).copies,
                     0);
    assert_int_equal(ki_unsure_take_window(&w.u, w.index, holder, 0, &op), 1);
    assert_int_equal(w.u.n_open, 1);
    ki_unsure_stored(&w.u, 0, 1, names, sizeof(names[0]), 2);
    assert_int_equal(w.u.n_open, 0);
    end(&w);
}

static void test_bounded(void **state)
{
    struct ki_unsure u = {0};

    (void)state;
    for (uint64_t i = 0; i <= KI_MAX_UNSURE; i++) {
        struct kv_block block = {.hash = i, .tokens_hash = i};
        struct kve_op op = store_of(&block, 1, 0);

        assert_false(is_open(&u));
        ki_unsure_note(&u, &op);
    }
    assert_int_equal(u.n, KI_MAX_UNSURE);
    assert_true(is_open(&u));
    ki_unsure_clear_rank(&u, 1);
    assert_true(is_open(&u));
    ki_unsure_clear_rank(&u, 0);
    assert_false(is_open(&u));
    ki_unsure_clear(&u);
}

/* Suspects beside the fewest and the most copies that a block can have. */
static void test_suspects(void **state)
{
    uint64_t random = unit_seed();
    struct {
        long least, most;
    } naive[NAMES] = {{0}}, *b;
    struct ki_unsure u = {0};
    uint32_t n_real = 0;

    (void)state;
    for (size_t i = 0; i < unit_rounds(20000); i++) {
        uint64_t name = unit_below(&random, NAMES);
        size_t n_open = 0;

        b = &naive[name];
        switch (unit_below(&random, 8)) {
        case 0:
        case 1:
            if (!b->most) /* the index knows of no copy that could be reported */
                break;
            ki_suspects_note(&u, 0, KI_UNSURE_MAIN, name, ++b->most);
            break;
        case 2:
            b->least++;
            ki_suspects_stored(&u, 0, KI_UNSURE_MAIN, name, ++b->most);
            break;
        case 3:
            if (!b->most)
                break;
            b->least = KV_MAX(b->least, 1L);
            ki_suspects_held(&u, 0, KI_UNSURE_MAIN, name, b->most);
            break;
        case 4:
            if (!b->most)
                break;
            b->least = --b->most; /* the engine tells how many are left */
            ki_suspects_removed(&u, 0, KI_UNSURE_MAIN, name, b->most, true);
            break;
        default:
            if (!b->most)
                break;
            n_real += !b->least && b->most == 1;
            b->least = KV_MAX(b->least, 1L) - 1;
            ki_suspects_removed(&u, 0, KI_UNSURE_MAIN, name, --b->most, false);
            break;
        }
        assert_int_equal(u.n_real, n_real);
        for (size_t k = 0; k < NAMES && i % 50 == 0; k++) {
            const struct ki_unsure_entry *e = ki_unsure_find(&u, 0, KI_UNSURE_MAIN, k);

            assert_int_equal(e ? e->copies : 0, naive[k].most - naive[k].least);
            assert_int_equal(e && e->open, naive[k].most && !naive[k].least);
            n_open += e && e->open;
        }
        if (i % 50 == 0)
            assert_int_equal(u.n_open, n_open);
    }
    assert_true(n_real > 10 || unit_rounds(20000) < 20000);
    ki_unsure_fini(&u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_suspects),
        cmocka_unit_test(test_beside_a_list),
        cmocka_unit_test(test_children_prove_a_copy),
        cmocka_unit_test(test_open_until_the_last_possible_copy_goes),
        cmocka_unit_test(test_a_new_child_proves_a_copy),
        cmocka_unit_test(test_a_chain_comes_back_from_its_top),
        cmocka_unit_test(test_windows_have_no_proof),
        cmocka_unit_test(test_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
