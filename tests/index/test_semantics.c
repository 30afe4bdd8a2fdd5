// SPDX-License-Identifier: Apache-2.0
/* The rules of kv_index.h, one by one; and the cases of other indexers' tests, under their
 * names. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/unit.h"
#include "fixture.h"
#include "random.h"
#include "skip.h"

static void store_and_find(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 3);
    assert_int_equal(f->matches.n, 1);
    assert_int_equal(f->matches.items[0].blocks, 3);
}

static uint64_t moved(struct fixture *f, struct kv_holder holder)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    struct kvi_stats stats = KVI_STATS_INIT;

    assert_int_equal(kvi_get_holder(f->ix, holder, &info), 0);
    assert_int_equal(kvi_get_stats(f->ix, &stats), 0);
    assert_int_equal(stats.moved, info.moved);
    return info.moved;
}

/* A name that a store gives another place is counted: names of one place each never are. */
static void names_that_move(void **state)
{
    static const struct kv_block a[] = {{11, 1}, {12, 2}}, b[] = {{21, 5}}, twelve[] = {{12, 2}};
    static const uint64_t eleven = 11, other = 21;
    struct fixture *f = *state;

    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_DEVICE, 0), NULL, a, 2, NULL), 0);
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_DEVICE, 0), NULL, b, 1, NULL), 0);
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_DEVICE, 0), &eleven, twelve, 1, NULL),
                     0);
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), NULL, a, 2, NULL), 0);
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), &eleven, twelve, 1, NULL),
                     0);
    assert_int_equal(moved(f, W0), 0);
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), &other, twelve, 1, NULL), 0);
    assert_int_equal(moved(f, W0), 1); /* it keeps its place */
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_DEVICE, 0), &other, twelve, 1, NULL),
                     0);
    assert_int_equal(moved(f, W0), 2);
    assert_null(kvi_check(f->ix));
}

/* Chains of one call: as single stores up to the first that isn't new. */
static void chains_of_new_blocks(void **state)
{
    static const struct kv_block a[] = {{11, 1}, {12, 2}, {13, 3}}, b[] = {{21, 4}},
                                 c[] = {{12, 2}};
    struct fixture *f = *state;
    struct kvi_new_chain chains[] = {
        {.holder = W0, .blocks = a, .n = 2},
        {.holder = W0, .has_parent = true, .parent = 12, .blocks = a + 2, .n = 1},
        {.holder = W1, .n = 0},
        {.holder = W1, .blocks = b, .n = 1},
        {.holder = W0, .has_parent = true, .parent = 11, .blocks = c, .n = 1}, /* is there */
        {.holder = W1, .has_parent = true, .parent = 99, .blocks = b, .n = 1}, /* no such parent */
    };
    int rc = 1;

    assert_int_equal(kvi_add_chains(f->ix, chains, 0, NULL, &rc), 0);
    assert_int_equal(rc, 0);
    assert_int_equal(kvi_add_chains(f->ix, chains, 5, NULL, &rc), 4);
    assert_int_equal(rc, -EEXIST);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 3);
    assert_int_equal(kvi_holder_blocks(f->ix, W1), 1);
    assert_int_equal(kvi_add_chains(f->ix, chains + 5, 1, NULL, &rc), 0);
    assert_int_equal(rc, -ENOENT);
    chains[5].blocks = NULL;
    assert_int_equal(kvi_add_chains(f->ix, chains + 5, 1, NULL, &rc), 0);
    assert_int_equal(rc, -EINVAL);
    assert_int_equal(kvi_holder_blocks(f->ix, W1), 1);
    assert_null(kvi_check(f->ix));
}

static void partial_match(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(score(f, W0, LOCALS(1, 2, 999)), 2);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 2);
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3, 4)), 3);
}

static void remove_all(void **state)
{
    struct fixture *f = *state;
    uint64_t hashes[3];

    store(f, W0, LOCALS(1, 2, 3));
    for (size_t i = 0; i < 3; i++)
        hashes[i] = f->blocks[i].hash;
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 3), 3); /* from the top */
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 0);
    assert_int_equal(f->matches.n, 0);
    assert_int_equal(n_blocks(f), 0);
    store(f, W0, LOCALS(1, 2, 3));
    for (size_t i = 0; i < 3; i++)
        hashes[i] = f->blocks[2 - i].hash;
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 3), 3);
    assert_int_equal(n_blocks(f), 0);
}

static void multiple_workers_shared_prefix(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2));
    store(f, W1, LOCALS(1, 3));
    assert_int_equal(score(f, W0, LOCALS(1)), 1);
    assert_int_equal(score(f, W1, LOCALS(1)), 1);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 2);
    assert_int_equal(score(f, W1, LOCALS(1, 2)), 1);
}

static void remove_worker(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2));
    store(f, W0R1, LOCALS(1, 2));
    store(f, W1, LOCALS(1, 2));
    assert_int_equal(kvi_remove_worker(f->ix, 0), 0);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 0);
    assert_int_equal(score(f, W0R1, LOCALS(1, 2)), 0);
    assert_int_equal(score(f, W1, LOCALS(1, 2)), 2);
    assert_int_equal(kvi_remove_worker(f->ix, 0), -ENOENT);
}

static void remove_worker_dp_rank_only_target(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2));
    store(f, W0R1, LOCALS(1, 2));
    assert_int_equal(kvi_remove_holder(f->ix, W0), 0);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 0);
    assert_int_equal(score(f, W0R1, LOCALS(1, 2)), 2);
    assert_int_equal(kvi_remove_holder(f->ix, W0), -ENOENT);
}

static void multiple_dp_ranks_separate(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    store(f, W0R1, LOCALS(1, 5));
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 3);
    assert_int_equal(score(f, W0R1, LOCALS(1, 2, 3)), 1);
    assert_int_equal(f->matches.n, 2);
}

static void clear_all_blocks(void **state)
{
    struct fixture *f = *state;
    struct kvi_stats stats = {.size = sizeof(stats)};

    store(f, W0, LOCALS(1, 2, 3));
    store(f, W0, LOCALS(7, 8));
    assert_int_equal(kvi_clear(f->ix, W0), 0);
    assert_int_equal(score(f, W0, LOCALS(1)), 0);
    assert_int_equal(score(f, W0, LOCALS(7)), 0);
    kvi_get_stats(f->ix, &stats);
    assert_int_equal(stats.holders, 1);
    assert_int_equal(stats.blocks, 0);
    assert_int_equal(kvi_clear(f->ix, W1), 0);
}

static void clear_only_target_dp_rank(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2));
    store(f, W0R1, LOCALS(1, 2));
    assert_int_equal(kvi_clear(f->ix, W0R1), 0);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 2);
    assert_int_equal(score(f, W0R1, LOCALS(1, 2)), 0);
}

static void clear_then_reuse(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(kvi_clear(f->ix, W0), 0);
    store(f, W0, LOCALS(1, 2));
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 2);
}

static void empty_and_miss_queries(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(score(f, W0, LOCALS(1)), 0);
    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(kvi_find(f->ix, NULL, 0, &f->matches), 0);
    assert_int_equal(f->matches.n, 0);
    assert_int_equal(score(f, W0, LOCALS(2, 3)), 0);
    assert_int_equal(f->matches.n, 0);
}

static void parent_hash_chains(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(5, 5, 0);

    store(f, W0, locals, 3);
    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 3, 5, NULL), 0);
    assert_int_equal(score(f, W0, locals, 5), 5);
}

static void partial_block_removal(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(remove_block(f, W0, LOCALS(1, 2, 3)), 1);
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 2);
}

static void remove_mid_chain(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(5, 5, 0);

    store(f, W0, locals, 5);
    assert_int_equal(remove_block(f, W0, locals, 3), 1);
    assert_int_equal(score(f, W0, locals, 5), 2);
    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 2, 3, NULL), 0);
    assert_int_equal(score(f, W0, locals, 5), 5); /* 4 and 5 were parked */
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 5);
}

/* A place that another holder keeps in the tree returns to a holder that lost it only by a
 * store. */
static void remove_mid_chain_shared(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(600, 600, 0);

    store(f, W0, locals, 600);
    store(f, W1, locals, 600);
    assert_int_equal(remove_block(f, W0, locals, 3), 1);
    assert_int_equal(score(f, W0, locals, 600), 2);
    assert_int_equal(score(f, W1, locals, 600), 600);
    assert_int_equal(remove_block(f, W0, locals, 300), 1); /* parked, and gone from there */
    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 2, 3, NULL), 0);
    assert_int_equal(score(f, W0, locals, 600), 299);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 299);
    assert_int_equal(n_blocks(f), 600);
}

static void remove_nonexistent_is_harmless(void **state)
{
    struct fixture *f = *state;
    const uint64_t hashes[] = {77, 0, UINT64_MAX};

    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 3), 0);
    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 3), 0);
    assert_int_equal(kvi_remove(f->ix, W1, KV_TIER_DEVICE, &f->blocks[0].hash, 1), 0);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_HOST, &f->blocks[0].hash, 1), 0);
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 3);
}

/* An unknown hash never stops a batch half-way. */
static void remove_passes_over_unknown(void **state)
{
    struct fixture *f = *state;
    uint64_t hashes[3];

    store(f, W0, LOCALS(1, 2, 3));
    hashes[0] = f->blocks[2].hash;
    hashes[1] = 12345;
    hashes[2] = f->blocks[1].hash;
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 3), 2);
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 1);
}

static void multiple_disjoint_sequences(void **state)
{
    struct fixture *f = *state;

    store(f, W0, LOCALS(1, 2, 3));
    store(f, W0, LOCALS(4, 5));
    store(f, W0, LOCALS(6));
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 3);
    assert_int_equal(score(f, W0, LOCALS(4, 5, 3)), 2);
    assert_int_equal(score(f, W0, LOCALS(6, 5)), 1);
}

static void tree_size_accounting(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(5, 5, 0);
    uint64_t second = path_hash(locals, 4);
    struct kvi_stored stored;

    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 0, 3, &stored), 0);
    assert_int_equal(stored.added, 3);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 3);
    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 0, 3, &stored), 0);
    assert_int_equal(stored.added, 0);
    assert_int_equal(stored.duplicate, 3);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 3);
    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 3, 5, &stored), 0);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 5);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &second, 1), 1);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 3);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &second, 1), 0);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 3);
}

static void shared_prefix_branch_parks_below_foreign_parent(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(4, 4, 0);
    struct kvi_stored stored;

    store(f, W0, locals, 3);
    store(f, W1, locals, 2);
    assert_int_equal(store_part(f, W1, KV_TIER_DEVICE, locals, 3, 4, &stored), 0);
    assert_int_equal(stored.parked, 1);
    assert_int_equal(score(f, W1, locals, 4), 2);
    assert_int_equal(store_part(f, W1, KV_TIER_DEVICE, locals, 2, 3, &stored), 0);
    assert_int_equal(score(f, W1, locals, 4), 4);
}

static void prefix_suffix_reuse_then_tail_append(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(9, 9, 0);

    store(f, W0, locals, 6);
    store(f, W1, locals, 3);
    assert_int_equal(store_part(f, W1, KV_TIER_DEVICE, locals, 3, 6, NULL), 0);
    assert_int_equal(store_part(f, W1, KV_TIER_DEVICE, locals, 6, 9, NULL), 0);
    assert_int_equal(score(f, W1, locals, 9), 9);
    assert_int_equal(score(f, W0, locals, 9), 6);
    assert_int_equal(n_blocks(f), 9);
}

static void unknown_parent(void **state)
{
    struct fixture *f = *state;
    const uint64_t parent = 99;
    const struct kv_block block = {1, 1};
    struct kvi_stored stored;
    struct kvi_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, &parent, &block, 1, &stored), 0);
    assert_int_equal(stored.parked, 1);
    assert_int_equal(stored.added, 0);
    store(f, W0, LOCALS(1));
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, &parent, &block, 1, NULL), 0);
    assert_int_equal(n_blocks(f), 1);
    kvi_get_stats(f->ix, &stats);
    assert_int_equal(stats.parked, 1);
    assert_int_equal(kvi_clear(f->ix, W0), 0);
    kvi_get_stats(f->ix, &stats);
    assert_int_equal(stats.parked, 0);
}

static void self_reference(void **state)
{
    struct fixture *f = *state;
    const uint64_t parent = 5;
    const struct kv_block root[] = {{5, 1}, {6, 2}}, parent_among[] = {{7, 3}, {5, 4}},
                          twice[] = {{8, 1}, {9, 2}, {8, 3}}, above[] = {{5, 9}};
    const uint64_t deep = 6;

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, root, 2, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, &parent, parent_among, 2, NULL), -EINVAL);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, twice, 3, NULL), -EINVAL);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, &deep, above, 1, NULL), -EINVAL);
    assert_int_equal(n_blocks(f), 2);
}

static void invalid_arguments(void **state)
{
    struct fixture *f = *state;
    const struct kv_block block = {1, 1};
    const uint64_t hash = 1;
    struct kvi_index *ix;

    assert_int_equal(kvi_create(NULL, NULL), -EINVAL);
    assert_int_equal(kvi_create(&(struct kvi_opts){0}, &ix), -EINVAL);
    assert_int_equal(kvi_store(f->ix, W0, KV_N_TIERS, NULL, &block, 1, NULL), -EINVAL);
    assert_int_equal(kvi_remove(f->ix, W0, KV_N_TIERS, &hash, 1), -EINVAL);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_N_TIERS, 0), &hash, 1), -EINVAL);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, NULL, 0, NULL), 0);
    kvi_destroy(NULL);
}

static void block_limit(void **state)
{
    const struct kvi_opts opts = {.size = sizeof(opts), .max_blocks = 4};
    struct fixture *f = *state, small = {0};

    assert_int_equal(kvi_create(&opts, &small.ix), 0);
    store(&small, W0, LOCALS(1, 2, 3));
    assert_int_equal(store_part(&small, W0, KV_TIER_DEVICE, (const uint64_t[]){5, 6}, 0, 2, NULL),
                     -ENOSPC);
    assert_int_equal(store_part(&small, W1, KV_TIER_DEVICE, (const uint64_t[]){5, 6}, 0, 2, NULL),
                     -ENOSPC);
    assert_int_equal(kvi_remove_holder(small.ix, W1), -ENOENT);
    store(&small, W1, LOCALS(1, 2, 3, 4)); /* shared places don't count again */
    assert_int_equal(n_blocks(&small), 4);
    kvi_matches_fini(&small.matches);
    kvi_destroy(small.ix);
    (void)f;
}

/* -- tiers ------------------------------------------------------------------------------------- */

static void assert_reach(struct fixture *f, const uint64_t *locals, size_t n, uint32_t device,
                         uint32_t host, uint32_t disk, uint32_t external)
{
    const struct kvi_match *match = find(f, W0, locals, n);
    const uint32_t want[] = {device, host, disk, external};

    assert_non_null(match);
    assert_memory_equal(match->reach, want, sizeof(want));
}

static void tiers_are_cumulative(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(8, 8, 0);

    assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, 0, 2, NULL), 0);
    assert_int_equal(store_part(f, W0, KV_TIER_HOST, locals, 2, 3, NULL), 0);
    assert_reach(f, locals, 8, 2, 3, 3, 3);
    assert_int_equal(store_part(f, W0, KV_TIER_EXTERNAL, locals, 3, 5, NULL), 0);
    assert_reach(f, locals, 8, 2, 3, 3, 5);
    assert_int_equal(store_part(f, W0, KV_TIER_HOST, locals, 5, 6, NULL), 0);
    assert_reach(f, locals, 8, 2, 3, 3, 6);
    assert_int_equal(store_part(f, W0, KV_TIER_DISK, locals, 3, 5, NULL), 0);
    assert_reach(f, locals, 8, 2, 3, 6, 6);
}

/*
 * Engines look below the device for what follows its match, and there alone. vLLM copies blocks 3
 * and 4 to the host, and keeps them on the device until that is done. Meanwhile it evicts block 2,
 * which the host has already.
 */
static void the_device_counts_up_to_its_first_hole(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(5, 5, 0);
    uint64_t hashes[5];

    store(f, W0, locals, 5);
    for (size_t i = 0; i < 5; i++)
        hashes[i] = f->blocks[i].hash;
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), hashes + 1, 2), 2);
    assert_reach(f, locals, 5, 5, 5, 5, 5);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes + 2, 1), 1);
    assert_reach(f, locals, 5, 2, 3, 3, 3);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_DISK, 0), hashes + 3, 1), 1);
    assert_reach(f, locals, 5, 2, 3, 4, 4);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), hashes + 3, 2), 2);
    assert_reach(f, locals, 5, 2, 5, 5, 5);
    /* No other tier has the first block. */
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 1), 1);
    assert_int_equal(score(f, W0, locals, 5), 0);
}

/* The same where each block is a chain of its own: another holder has another block behind each. */
static void the_first_hole_between_chains(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(5, 5, 0);
    uint64_t hashes[5];

    store(f, W0, locals, 5);
    for (size_t i = 0; i < 5; i++)
        hashes[i] = f->blocks[i].hash;
    for (size_t i = 1; i < 5; i++)
        store(f, W1, sequence(5, i, 1), i + 1);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), hashes + 2, 1), 1);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes + 2, 1), 1);
    locals = sequence(5, 5, 0);
    assert_reach(f, locals, 5, 2, 3, 3, 3);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), hashes + 3, 1), 1);
    assert_reach(f, locals, 5, 2, 4, 4, 4);
}

static void losing_one_tier_keeps_the_block(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(4, 4, 0);
    uint64_t hashes[4];
    struct kvi_stats stats = {.size = sizeof(stats)};

    store(f, W0, locals, 4);
    for (size_t i = 0; i < 4; i++)
        hashes[i] = f->blocks[i].hash;
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), hashes, 2), 2);
    assert_int_equal(
        kvi_store_known(f->ix, kvi_cache_of(W0, KV_TIER_HOST, 0), (const uint64_t[]){999}, 1), 0);
    assert_int_equal(kvi_store_known(f->ix, kvi_cache_of(W1, KV_TIER_HOST, 0), hashes, 2), 0);
    kvi_get_stats(f->ix, &stats);
    assert_int_equal(stats.tier_blocks[KV_TIER_DEVICE], 4);
    assert_int_equal(stats.tier_blocks[KV_TIER_HOST], 2);
    assert_int_equal(stats.holder_blocks, 4);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 1), 1);
    assert_reach(f, locals, 4, 0, 2, 2, 2);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 1), 0);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_HOST, hashes, 1), 1); /* its last tier */
    assert_int_equal(score(f, W0, locals, 4), 0);
    assert_int_equal(n_blocks(f), 0);
}

/* -- names ------------------------------------------------------------------------------------- */

static void two_names_for_one_place(void **state)
{
    struct fixture *f = *state;
    const struct kv_block mine[] = {{11, 1}, {12, 2}}, theirs[] = {{21, 1}, {22, 2}};
    const uint64_t h12 = 12, h22 = 22;

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, mine, 2, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W1, KV_TIER_DEVICE, NULL, theirs, 2, NULL), 0);
    assert_int_equal(n_blocks(f), 2);
    assert_int_equal(kvi_remove(f->ix, W1, KV_TIER_DEVICE, &h12, 1), 0);
    assert_int_equal(kvi_remove(f->ix, W1, KV_TIER_DEVICE, &h22, 1), 1);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 2);
    assert_int_equal(score(f, W1, LOCALS(1, 2)), 1);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &h22, 1), 0);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &h12, 1), 1);
}

static void another_name_replaces_the_first(void **state)
{
    struct fixture *f = *state;
    const struct kv_block first = {11, 1}, second = {12, 1};
    const uint64_t h11 = 11, h12 = 12;
    struct kvi_stored stored;

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, &first, 1, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, &second, 1, &stored), 0);
    assert_int_equal(stored.renamed, 1);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &h11, 1), 0);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, &first, 1, &stored), 0);
    assert_int_equal(stored.renamed, 1);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &h12, 1), 0);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &h11, 1), 1);
    assert_int_equal(n_blocks(f), 0);
}

static void a_hash_moves(void **state)
{
    struct fixture *f = *state;
    const struct kv_block old[] = {{1, 1}, {2, 2}, {3, 3}}, moved[] = {{2, 8}};

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, old, 3, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, moved, 1, NULL), 0);
    assert_int_equal(score(f, W0, LOCALS(1, 2, 3)), 1);
    assert_int_equal(score(f, W0, LOCALS(8)), 1);
    assert_int_equal(kvi_holder_blocks(f->ix, W0), 2);
}

static void names_swap_in_one_store(void **state)
{
    struct fixture *f = *state;
    const struct kv_block first[] = {{1, 1}, {2, 2}}, swapped[] = {{2, 1}, {1, 2}};
    const uint64_t deep = 1;
    struct kvi_stored stored;

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, first, 2, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, swapped, 2, &stored), 0);
    assert_int_equal(stored.renamed, 2);
    assert_int_equal(stored.duplicate, 2);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &deep, 1), 1);
    assert_int_equal(score(f, W0, LOCALS(1, 2)), 1);
}

/* -- long sequences ---------------------------------------------------------------------------- */

static void long_branching(void **state)
{
    struct fixture *f = *state;
    const uint64_t *a = sequence(60, 30, 0), *b = sequence(60, 30, 1);

    store(f, W0, a, 60);
    store(f, W1, b, 60);
    assert_int_equal(score(f, W0, a, 60), 60);
    assert_int_equal(score(f, W1, a, 60), 30);
    assert_int_equal(score(f, W1, b, 60), 60);
    assert_int_equal(score(f, W0, b, 60), 30);
    assert_int_equal(n_blocks(f), 90);
}

static void long_partial_removal(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(100, 100, 0);

    store(f, W0, locals, 100);
    assert_int_equal(remove_block(f, W0, locals, 80), 1);
    assert_int_equal(score(f, W0, locals, 100), 79);
}

static void every_length(void **state)
{
    struct fixture *f = *state;

    for (size_t n = 31; n <= 96; n++) {
        store(f, W0, sequence(n, 0, n), n);
        assert_int_equal(score(f, W0, sequence(n, 0, n), n), n);
    }
}

static void every_divergence(void **state)
{
    struct fixture *f = *state;
    const size_t forks[] = {31, 32, 33, 63, 64, 65, 95, 96, 97, 255, 256, 257};

    store(f, W0, sequence(300, 300, 0), 300);
    for (size_t i = 0; i < KV_COUNT(forks); i++) {
        store(f, W1, sequence(300, forks[i], i + 1), 300);
        assert_int_equal(score(f, W1, sequence(300, forks[i], i + 1), 300), 300);
        assert_int_equal(score(f, W0, sequence(300, forks[i], i + 1), 300), forks[i]);
    }
    assert_int_equal(score(f, W0, sequence(300, 300, 0), 300), 300);
    assert_int_equal(score(f, W1, sequence(300, 300, 0), 300), 257);
}

static void continuation_chain(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(200, 200, 0);

    for (size_t i = 0; i < 200; i += 10)
        assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, i, i + 10, NULL), 0);
    assert_int_equal(score(f, W0, locals, 200), 200);
}

static void block_by_block(void **state)
{
    struct fixture *f = *state;
    const uint64_t *locals = sequence(1000, 1000, 0);
    struct kvi_stats stats = {.size = sizeof(stats)};

    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(store_part(f, W0, KV_TIER_DEVICE, locals, i, i + 1, NULL), 0);
    assert_int_equal(score(f, W0, locals, 1000), 1000);
    kvi_get_stats(f->ix, &stats);
    assert_true(stats.chains <= 5); /* they grow, up to the limit */
}

static void staggered(void **state)
{
    struct fixture *f = *state;
    const size_t lens[] = {10, 20, 35, 64, 100};
    const uint64_t *locals = sequence(100, 100, 0);

    for (uint64_t w = 0; w < KV_COUNT(lens); w++)
        store(f, (struct kv_holder){w, 0}, locals, lens[w]);
    for (uint64_t w = 0; w < KV_COUNT(lens); w++)
        assert_int_equal(score(f, (struct kv_holder){w, 0}, locals, 100), lens[w]);
    assert_int_equal(n_blocks(f), 100);
}

static void three_workers_diverging(void **state)
{
    struct fixture *f = *state;

    for (uint64_t w = 0; w < 3; w++)
        store(f, (struct kv_holder){w, 0}, sequence(80, 40, w), 80);
    for (uint64_t w = 0; w < 3; w++)
        for (uint64_t q = 0; q < 3; q++)
            assert_int_equal(score(f, (struct kv_holder){w, 0}, sequence(80, 40, q), 80),
                             w == q ? 80 : 40);
}

static void thousand_blocks(void **state)
{
    struct fixture *f = *state;

    store(f, W0, sequence(1000, 1000, 0), 1000);
    assert_int_equal(score(f, W0, sequence(1000, 1000, 0), 1000), 1000);
    assert_int_equal(score(f, W0, sequence(1000, 1000, 0), 500), 500);
    assert_int_equal(score(f, W0, sequence(1000, 499, 1), 1000), 499);
}

static void clear_and_rebuild(void **state)
{
    struct fixture *f = *state;

    for (int i = 0; i < 5; i++) {
        store(f, W0, sequence(500, 500, 0), 500);
        assert_int_equal(score(f, W0, sequence(500, 500, 0), 500), 500);
        assert_int_equal(kvi_clear(f->ix, W0), 0);
        assert_int_equal(n_blocks(f), 0);
    }
}

/* A tree much deeper than any stack: 200,000 chains below one another. */
static void very_deep(void **state)
{
    struct fixture *f = *state;
    size_t n = 200000;
    struct kv_block pair[2];
    uint64_t parent = 0, first = 2;
    struct kvi_stats stats = {.size = sizeof(stats)};

#if defined(__SANITIZE_THREAD__)
    skip_because("one thread's work, at ten times the address sanitizer's price: asan has run it");
#endif
    for (uint64_t i = 0; i < n; i++) { /* a fork at each block keeps the chains short */
        pair[0] = (struct kv_block){2 * i + 2, 1};
        pair[1] = (struct kv_block){2 * i + 3, 2};
        assert_int_equal(
            kvi_store(f->ix, W0, KV_TIER_DEVICE, i ? &parent : NULL, &pair[0], 1, NULL), 0);
        assert_int_equal(
            kvi_store(f->ix, W0, KV_TIER_DEVICE, i ? &parent : NULL, &pair[1], 1, NULL), 0);
        parent = 2 * i + 2;
    }
    kvi_get_stats(f->ix, &stats);
    assert_true(stats.chains >= n);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, &first, 1), 1);
    assert_int_equal(n_blocks(f), 1);
}

/* -- removals in runs --------------------------------------------------------------------------- */

enum { TWIN_BLOCKS = 40, TWIN_PROMPTS = 12 };

/* Two indexes: one is told of many blocks in a call, the other of one after the other. */
struct twins {
    struct kvi_index *many, *single;
    struct rng rng;
};

/* A prompt of the holder: the first blocks are those of every fourth prompt. */
static void twin_prompt(struct kv_holder who, uint64_t prompt, struct kv_block *ret)
{
    uint64_t above = 0;

    if (who.worker < 3 && prompt % 4 == 3) /* where another's names come first */
        prompt--;
    for (uint64_t i = 0; i < TWIN_BLOCKS; i++) {
        uint64_t local = i + (i < 10 ? prompt % 4 : i < 25 ? prompt % 8 : prompt) * 1000;

        above = roll(above, local) + (who.worker == 3 && prompt % 4 == 3 ? 7 : 0);
        ret[i] = (struct kv_block){above, local};
    }
}

static void twin_store(struct twins *twins, struct kv_holder who, const struct kv_block *blocks)
{
    size_t n = 1 + rng_below(&twins->rng, TWIN_BLOCKS);
    enum kv_tier tier =
        who.worker == 4 && !rng_below(&twins->rng, 8) ? KV_TIER_HOST : KV_TIER_DEVICE;
    struct kvi_stored a = {0}, b = {0};
    bool counted = who.worker == 2 && rng_below(&twins->rng, 8) == 0;

    for (int i = 0; i < 2; i++) {
        struct kvi_index *ix = i ? twins->single : twins->many;
        struct kvi_stored *ret = i ? &b : &a;

        assert_int_equal(counted ? kvi_add(ix, kvi_cache_of(who, tier, 0), NULL, blocks, n, ret)
                                 : kvi_store(ix, who, tier, NULL, blocks, n, ret),
                         0);
    }
    assert_memory_equal(&a, &b, sizeof(a));
}

static void twin_remove(struct twins *twins, struct kv_holder who, const struct kv_block *blocks)
{
    uint32_t from = rng_below(&twins->rng, TWIN_BLOCKS), to = TWIN_BLOCKS;
    uint64_t hashes[TWIN_BLOCKS];
    size_t n = 0;
    long got = 0;

    for (uint32_t i = to; i-- > from;)
        if (rng_below(&twins->rng, 50)) /* one is left out now and then */
            hashes[n++] = blocks[i].hash;
    for (size_t i = 0; i < n; i++)
        got += kvi_remove(twins->single, who, KV_TIER_DEVICE, &hashes[i], 1);
    assert_int_equal(kvi_remove(twins->many, who, KV_TIER_DEVICE, hashes, n), got);
}

static void twin_compare(const struct twins *twins)
{
    struct kvi_stats a = {.size = sizeof(a)}, b = {.size = sizeof(b)};
    uint64_t sum_a = 0, sum_b = 0;

    assert_int_equal(kvi_dump(twins->many, sum_blocks, &sum_a), 0);
    assert_int_equal(kvi_dump(twins->single, sum_blocks, &sum_b), 0);
    assert_true(sum_a == sum_b);
    kvi_get_stats(twins->many, &a);
    kvi_get_stats(twins->single, &b);
    assert_int_equal(a.holder_blocks, b.holder_blocks);
    assert_int_equal(a.parked, b.parked);
    assert_int_equal(a.copies, b.copies);
    assert_memory_equal(a.tier_blocks, b.tier_blocks, sizeof(a.tier_blocks));
    assert_null(kvi_check(twins->many));
}

/* Blocks that one call removes from the end on go as if each had been removed by itself. */
static void a_run_is_removed_as_its_blocks_are(void **state)
{
    struct fixture *f = *state;
    struct twins twins = {.many = f->ix, .rng = {test_seed()}};
    struct kv_block blocks[TWIN_BLOCKS];
    long rounds = test_rounds(3000);

    assert_int_equal(kvi_create(NULL, &twins.single), 0);
    for (long i = 0; i < rounds; i++) {
        struct kv_holder who = {1 + rng_below(&twins.rng, 4), 0};

        twin_prompt(who, rng_below(&twins.rng, TWIN_PROMPTS), blocks);
        if (rng_below(&twins.rng, 2))
            twin_store(&twins, who, blocks);
        else
            twin_remove(&twins, who, blocks);
        if (i % 50 == 0 || i + 1 == rounds)
            twin_compare(&twins);
    }
    kvi_destroy(twins.single);
}

/* A holder's run ends where the next hash is another holder's name for the place. */
static void a_run_ends_at_another_name(void **state)
{
    struct fixture *f = *state;
    const struct kv_block theirs[] = {{1, 11}, {2, 12}, {3, 13}},
                          ours[] = {{1, 11}, {5, 12}, {3, 13}};
    const uint64_t hashes[] = {3, 2};

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, theirs, 3, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W1, KV_TIER_DEVICE, NULL, ours, 3, NULL), 0);
    assert_int_equal(kvi_remove(f->ix, W1, KV_TIER_DEVICE, hashes, 2), 1);
    assert_int_equal(kvi_holder_blocks(f->ix, W1), 2);
    assert_int_equal(kvi_remove(f->ix, W0, KV_TIER_DEVICE, hashes, 2), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(store_and_find),
        T(chains_of_new_blocks),
        T(names_that_move),
        T(partial_match),
        T(remove_all),
        T(multiple_workers_shared_prefix),
        T(remove_worker),
        T(remove_worker_dp_rank_only_target),
        T(multiple_dp_ranks_separate),
        T(clear_all_blocks),
        T(clear_only_target_dp_rank),
        T(clear_then_reuse),
        T(empty_and_miss_queries),
        T(parent_hash_chains),
        T(partial_block_removal),
        T(remove_mid_chain),
        T(remove_mid_chain_shared),
        T(remove_nonexistent_is_harmless),
        T(remove_passes_over_unknown),
        T(multiple_disjoint_sequences),
        T(tree_size_accounting),
        T(shared_prefix_branch_parks_below_foreign_parent),
        T(prefix_suffix_reuse_then_tail_append),
        T(unknown_parent),
        T(self_reference),
        T(invalid_arguments),
        T(block_limit),
        T(tiers_are_cumulative),
        T(the_device_counts_up_to_its_first_hole),
        T(the_first_hole_between_chains),
        T(losing_one_tier_keeps_the_block),
        T(two_names_for_one_place),
        T(another_name_replaces_the_first),
        T(a_hash_moves),
        T(names_swap_in_one_store),
        T(long_branching),
        T(long_partial_removal),
        T(every_length),
        T(every_divergence),
        T(continuation_chain),
        T(block_by_block),
        T(staggered),
        T(three_workers_diverging),
        T(thousand_blocks),
        T(clear_and_rebuild),
        T(very_deep),
        T(a_run_is_removed_as_its_blocks_are),
        T(a_run_ends_at_another_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
