// SPDX-License-Identifier: Apache-2.0
/* Histories of real engines: several copies of a block, owners, lower tiers, gaps and their
 * filling. */
#include <errno.h>

#include "base/unit.h"
#include "index/tree/tree.h"

static const struct kv_holder W0 = {0, 0};
/* Names and tokens hashes of one prompt; the same prompt under a salt has other tokens hashes. */
static const struct kv_block CHAIN[] = {{101, 1}, {102, 2}, {103, 3}, {104, 4}, {105, 5}};
static const struct kv_block SALTED[] = {{101, 11}, {102, 12}, {103, 13}, {104, 14}, {105, 15}};

#define DEVICE KV_TIER_DEVICE
#define HOST KV_TIER_HOST

struct fixture {
    struct kvi_index *ix;
    struct kvi_matches matches;
};

static int setup(void **state)
{
    static struct fixture f;

    f = (struct fixture){0};
    *state = &f;
    return kvi_create(NULL, &f.ix);
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    const char *wrong = kvi_check(f->ix);

    if (wrong)
        print_error("%s\n", wrong);
    kvi_matches_fini(&f->matches);
    kvi_destroy(f->ix);
    return wrong != NULL;
}

/* Blocks from..to of a chain, a copy in the pool of @source. */
static struct kvi_stored add(struct fixture *f, enum kv_tier tier, uint32_t source,
                             const struct kv_block *chain, size_t from, size_t to)
{
    struct kvi_stored stored;

    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, tier, source),
                             from ? &chain[from - 1].hash : NULL, chain + from, to - from, &stored),
                     0);
    return stored;
}

static long take(struct fixture *f, enum kv_tier tier, uint32_t source, uint64_t hash)
{
    return kvi_take(f->ix, kvi_cache_of(W0, tier, source), &hash, NULL, 1);
}

static void assert_reach(struct fixture *f, const struct kv_block *chain, uint32_t device,
                         uint32_t host)
{
    uint64_t locals[KV_COUNT(CHAIN)];

    for (size_t i = 0; i < KV_COUNT(CHAIN); i++)
        locals[i] = chain[i].tokens_hash;
    assert_int_equal(kvi_find(f->ix, locals, KV_COUNT(locals), &f->matches), 0);
    assert_int_equal(f->matches.n ? f->matches.items[0].reach[DEVICE] : 0, device);
    assert_int_equal(f->matches.n ? f->matches.items[0].reach[HOST] : 0, host);
}

/* -- copies ------------------------------------------------------------------------------------ */

/* A prompt of exactly two blocks, the same again (its last block is computed anew), the conversation goes
 * on, and unrelated traffic evicts one of the two copies. */
static void one_copy_of_two_goes(void **state)
{
    struct fixture *f = *state;

    add(f, DEVICE, 0, CHAIN, 0, 2);
    assert_int_equal(add(f, DEVICE, 0, CHAIN, 1, 2).duplicate, 1);
    add(f, DEVICE, 0, CHAIN, 2, 5);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 5, 5);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 1, 1);
}

static void the_event_tells_what_is_left(void **state)
{
    struct fixture *f = *state;
    const uint64_t hashes[] = {102, 103};
    const uint32_t left[] = {2, 0};

    add(f, DEVICE, 0, CHAIN, 0, 3);
    assert_int_equal(kvi_take(f->ix, kvi_cache_of(W0, DEVICE, 0), hashes, left, 2), 2);
    assert_reach(f, CHAIN, 2, 2);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 2, 2);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 1, 1);
}

static uint64_t doubted(const struct fixture *f)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    assert_int_equal(kvi_get_holder(f->ix, W0, &info), 0);
    return info.doubted;
}

/*
 * An idle engine gets one prompt again and again: it evicts an old copy of the last block, and stores
 * a new one. Another kind of engine, which announces the last copy's removal only, says the same.
 */
static void one_prompt_for_ever(void **state)
{
    struct fixture *f = *state;

    add(f, DEVICE, 0, CHAIN, 0, 2);
    add(f, DEVICE, 0, CHAIN, 1, 2);
    for (int turn = 0; turn < 200; turn++) {
        assert_int_equal(doubted(f), turn >= 64);
        assert_int_equal(take(f, DEVICE, 0, 102), 1);
        assert_reach(f, CHAIN, 2, 2);
        add(f, DEVICE, 0, CHAIN, 1, 2);
    }
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 2, 2);
    assert_int_equal(doubted(f), 1);
    assert_int_equal(take(f, DEVICE, 0, 102), 1); /* twice in a row: each copy's removal is told */
    assert_reach(f, CHAIN, 1, 1);
    assert_int_equal(doubted(f), 0);
}

/* Where there is no block, there is no doubt of copies; afterwards it takes as much to come back. */
static void a_clear_ends_doubt(void **state)
{
    struct fixture *f = *state;

    for (int life = 0; life < 2; life++) {
        add(f, DEVICE, 0, CHAIN, 0, 2);
        add(f, DEVICE, 0, CHAIN, 1, 2);
        for (int turn = 0; turn < 64; turn++) {
            assert_int_equal(doubted(f), 0);
            assert_int_equal(take(f, DEVICE, 0, 102), 1);
            add(f, DEVICE, 0, CHAIN, 1, 2);
        }
        assert_int_equal(doubted(f), 1);
        assert_int_equal(life ? kvi_clear(f->ix, W0) : kvi_clear_tiers(f->ix, W0, 1, 0), 0);
        assert_int_equal(doubted(f), 0);
    }
}

static void owners_are_kept_apart(void **state)
{
    struct fixture *f = *state;

    add(f, HOST, 0, CHAIN, 0, 2);
    assert_int_equal(take(f, HOST, 1, 101), 0); /* has none */
    assert_reach(f, CHAIN, 0, 2);
    add(f, HOST, 1, CHAIN, 0, 1);
    add(f, HOST, 1, CHAIN, 0, 1); /* a store keyed by hash: still one */
    assert_int_equal(take(f, HOST, 0, 101), 1);
    assert_reach(f, CHAIN, 0, 2);
    assert_int_equal(take(f, HOST, 1, 101), 1);
    assert_reach(f, CHAIN, 0, 0);
}

/* -- holes ------------------------------------------------------------------------------------- */

static void a_hole_is_filled(void **state)
{
    struct fixture *f = *state;
    const uint64_t third = 103;

    add(f, DEVICE, 0, CHAIN, 0, 3);
    assert_int_equal(kvi_add_known(f->ix, kvi_cache_of(W0, HOST, 0), &third, 1), 1);
    assert_int_equal(take(f, DEVICE, 0, 103), 1);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    assert_reach(f, CHAIN, 1, 1);
    add(f, DEVICE, 0, CHAIN, 1, 2);
    assert_reach(f, CHAIN, 2, 3);
}

static void a_child_before_its_parent(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(add(f, HOST, 0, CHAIN, 3, 5).parked, 2);
    assert_int_equal(add(f, HOST, 0, CHAIN, 1, 2).parked, 1);
    add(f, DEVICE, 0, CHAIN, 0, 1);
    assert_reach(f, CHAIN, 1, 2);
    assert_int_equal(take(f, HOST, 0, 105), 1); /* while it is parked */
    add(f, DEVICE, 0, CHAIN, 2, 3);
    assert_reach(f, CHAIN, 1, 2); /* the host's match ends where only the device goes on */
    add(f, HOST, 0, CHAIN, 2, 3);
    assert_reach(f, CHAIN, 1, 4);
}

static void copies_survive_parking(void **state)
{
    struct fixture *f = *state;

    add(f, DEVICE, 0, CHAIN, 0, 3);
    add(f, DEVICE, 0, CHAIN, 2, 3);
    assert_int_equal(take(f, DEVICE, 0, 102), 1);
    add(f, DEVICE, 0, CHAIN, 1, 3); /* a third copy of block 3 */
    for (int copies = 3; copies > 0; copies--) {
        assert_reach(f, CHAIN, 3, 3);
        assert_int_equal(take(f, DEVICE, 0, 103), 1);
    }
    assert_reach(f, CHAIN, 2, 2);
}

/* Pages of a node in page order, parents first: nothing is left parked. */
static void parents_first_in_one_call(void **state)
{
    struct fixture *f = *state;
    uint64_t hashes[KV_COUNT(CHAIN)];
    struct kvi_stats stats = {.size = sizeof(stats)};

    add(f, DEVICE, 0, CHAIN, 0, 5);
    for (size_t i = 0; i < KV_COUNT(CHAIN); i++)
        hashes[i] = CHAIN[i].hash;
    assert_int_equal(kvi_take(f->ix, kvi_cache_of(W0, DEVICE, 0), hashes, NULL, KV_COUNT(hashes)),
                     5);
    kvi_get_stats(f->ix, &stats);
    assert_int_equal(stats.blocks + stats.parked, 0);
}

static void parking_is_bounded(void **state)
{
    const struct kvi_opts opts = {
        .size = sizeof(opts), .max_parked = 150, .max_parked_holder = 100, .max_copies = 10};
    struct kvi_index *ix;
    struct kvi_stats stats = {.size = sizeof(stats)};
    (void)state;

    assert_int_equal(kvi_create(&opts, &ix), 0);
    for (uint64_t w = 0; w < 3; w++) {
        for (uint64_t i = 0; i < 200; i++) {
            const uint64_t parent = 5000 + i;
            const struct kv_block block = {1000 + i, i};
            const struct kv_holder holder = {w, 0};

            assert_int_equal(kvi_add(ix, kvi_cache_of(holder, DEVICE, 0), &parent, &block, 1, NULL),
                             0);
            assert_int_equal(kvi_add(ix, kvi_cache_of(holder, DEVICE, 0), &parent, &block, 1, NULL),
                             0);
        }
    }
    kvi_get_stats(ix, &stats);
    assert_int_equal(stats.parked, 150);
    assert_true(stats.parked_forgotten >= 450);
    assert_int_equal(stats.copies, 10);
    assert_true(stats.copies_uncounted > 0);
    assert_null(kvi_check(ix));
    kvi_destroy(ix);
}

static uint64_t lost_of(struct kvi_index *ix)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    assert_int_equal(kvi_get_holder(ix, W0, &info), 0);
    return info.lost;
}

/* Without room for records nothing claims a block that no removal would end; and the holder says so. */
static void copies_without_room(void **state)
{
    const struct kvi_opts opts = {.size = sizeof(opts), .max_copies = 1};
    const uint32_t left = 3;
    struct kvi_index *ix;
    struct fixture f;

    (void)state;
    assert_int_equal(kvi_create(&opts, &ix), 0);
    f = (struct fixture){.ix = ix};
    add(&f, HOST, 0, CHAIN, 0, 2); /* the main source is implied */
    assert_int_equal(lost_of(ix), 0);
    add(&f, HOST, 1, CHAIN, 2, 5);
    assert_reach(&f, CHAIN, 0, 2);
    assert_int_equal(lost_of(ix), 3);
    add(&f, DEVICE, 0, CHAIN, 0, 5);
    for (size_t i = 2; i < 5; i++) { /* the second of them has no room */
        assert_int_equal(kvi_add_known(ix, kvi_cache_of(W0, HOST, 1), &CHAIN[i].hash, 1), 1);
        assert_reach(&f, CHAIN, 5, 5);
    }
    assert_int_equal(lost_of(ix), 5);
    assert_int_equal(kvi_take(ix, kvi_cache_of(W0, DEVICE, 0), &CHAIN[4].hash, NULL, 1), 1);
    assert_reach(&f, CHAIN, 4, 4);
    assert_int_equal(kvi_take(ix, kvi_cache_of(W0, DEVICE, 0), &CHAIN[0].hash, &left, 1), 1);
    assert_int_equal(lost_of(ix), 6);
    assert_int_equal(kvi_clear_tiers(ix, W0, 1u << DEVICE, 0), 0);
    assert_int_equal(lost_of(ix), 6);
    assert_int_equal(kvi_clear(ix, W0), 0);
    assert_int_equal(lost_of(ix), 0);
    assert_null(kvi_check(ix));
    kvi_matches_fini(&f.matches);
    kvi_destroy(ix);
}

static void a_holder_is_bounded(void **state)
{
    const struct kvi_opts opts = {.size = sizeof(opts), .max_holder_blocks = 3};
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    struct kvi_stats stats = {.size = sizeof(stats)};
    struct kvi_index *ix;
    (void)state;

    assert_int_equal(kvi_create(&opts, &ix), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 4, NULL),
                     -ENOSPC); /* not known yet */
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 3, NULL), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 3, NULL),
                     0); /* gains nothing */
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 4, NULL), -ENOSPC);
    assert_int_equal(kvi_holder_blocks(ix, W0), 3);
    assert_int_equal(kvi_take(ix, kvi_cache_of(W0, DEVICE, 0), &CHAIN[2].hash, NULL, 1), 1);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 3, NULL),
                     0); /* there is room again */
    assert_int_equal(kvi_get_holder(ix, W0, &info), 0);
    assert_int_equal(info.blocks, 3);
    assert_int_equal(info.refused, 1);
    kvi_get_stats(ix, &stats);
    assert_int_equal(stats.refused, 2);
    assert_null(kvi_check(ix));
    kvi_destroy(ix);
}

static int note_implied(void *arg, const struct kvi_extra *extra)
{
    if (extra->kind == KVI_EXTRA_TIER && extra->tier == DEVICE)
        *(uint32_t *)arg = extra->implied;
    return 0;
}

/* A store that is refused doesn't decide on the source of an empty tier. */
static void a_refused_store_changes_no_source(void **state)
{
    const struct kv_block above = {CHAIN[0].hash, 77};
    uint32_t implied = 99;
    struct kvi_index *ix;
    (void)state;

    assert_int_equal(kvi_create(NULL, &ix), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, KV_TIER_HOST, 0), NULL, CHAIN, 2, NULL), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 2), &CHAIN[1].hash, &above, 1, NULL),
                     -EINVAL);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 0), NULL, CHAIN, 1, NULL), 0);
    assert_int_equal(kvi_add(ix, kvi_cache_of(W0, DEVICE, 2), NULL, CHAIN, 1, NULL), 0);
    assert_int_equal(kvi_dump_extras(ix, note_implied, &implied), 0);
    assert_int_equal(implied, 99); /* 0, which a dump needn't tell */
    kvi_destroy(ix);
}

/* -- what a dump tells beside the tree ----------------------------------------------------------- */

static int restore_run(void *arg, const struct kvi_dump_run *run)
{
    return kvi_store(arg, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static int restore_extra(void *arg, const struct kvi_extra *extra)
{
    return kvi_restore_extra(arg, extra);
}

static void a_copy_is_as_exact(void **state)
{
    struct fixture *f = *state, copy = {0};

    add(f, DEVICE, 0, CHAIN, 0, 5);
    add(f, DEVICE, 0, CHAIN, 0, 1);
    add(f, HOST, 0, CHAIN, 3, 4);
    add(f, DEVICE, 0, CHAIN, 4, 5);
    assert_int_equal(take(f, DEVICE, 0, 103), 1); /* parks 4 and 5, which has two copies */
    assert_int_equal(kvi_create(NULL, &copy.ix), 0);
    assert_int_equal(kvi_dump(f->ix, restore_run, copy.ix), 0);
    assert_int_equal(kvi_dump_extras(f->ix, restore_extra, copy.ix), 0);
    assert_reach(&copy, CHAIN, 2, 2);
    assert_int_equal(take(&copy, DEVICE, 0, 101), 1);
    add(&copy, DEVICE, 0, CHAIN, 2, 3);
    assert_reach(&copy, CHAIN, 5, 5);
    assert_int_equal(take(&copy, DEVICE, 0, 105), 1);
    assert_reach(&copy, CHAIN, 5, 5);
    assert_int_equal(take(&copy, DEVICE, 0, 104), 1);
    assert_reach(&copy, CHAIN, 3, 4);
    assert_null(kvi_check(copy.ix));
    kvi_matches_fini(&copy.matches);
    kvi_destroy(copy.ix);
}

/* -- lower tiers name no place ----------------------------------------------------------------- */

static void an_offload_moves_nothing(void **state)
{
    struct fixture *f = *state;

    add(f, DEVICE, 0, SALTED, 0, 4);
    add(f, HOST, 0, CHAIN, 0, 4); /* the same hashes, told without the salt */
    assert_reach(f, SALTED, 4, 4);
    assert_reach(f, CHAIN, 0, 0);
    assert_int_equal(take(f, DEVICE, 0, 104), 1);
    assert_reach(f, SALTED, 3, 4);
}

static void an_offload_goes_on_below(void **state)
{
    struct fixture *f = *state;
    const struct kv_block more[] = {{101, 1}, {102, 2}, {103, 13}};

    add(f, DEVICE, 0, SALTED, 0, 2);
    add(f, HOST, 0, more, 0, 3);
    assert_reach(f, SALTED, 2, 3);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(one_copy_of_two_goes),
        T(the_event_tells_what_is_left),
        T(one_prompt_for_ever),
        T(a_clear_ends_doubt),
        T(owners_are_kept_apart),
        T(a_hole_is_filled),
        T(a_child_before_its_parent),
        T(copies_survive_parking),
        T(parents_first_in_one_call),
        cmocka_unit_test(copies_without_room),
        T(parking_is_bounded),
        T(a_holder_is_bounded),
        T(a_refused_store_changes_no_source),
        T(a_copy_is_as_exact),
        T(an_offload_moves_nothing),
        T(an_offload_goes_on_below),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
