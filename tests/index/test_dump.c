// SPDX-License-Identifier: Apache-2.0
/* Dumps: complete, stopped, and beside writers. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/unit.h"
#include "fixture.h"

static int copy_run(void *arg, const struct kvi_dump_run *run)
{
    return kvi_store(arg, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static int count_run(void *arg, const struct kvi_dump_run *run)
{
    uint64_t *sum = arg;

    *sum =
        *sum * 31 + roll(run->n, run->blocks[run->n - 1].hash) + run->holder.worker * 7 + run->tier;
    return 0;
}

static void dump_and_restore(void **state)
{
    struct fixture *f = *state, copy = {0};
    uint64_t first = 0, again = 0, here = 0, there = 0;

    for (uint64_t w = 0; w < 100; w++) {
        store(f, (struct kv_holder){w, 0}, sequence(700, 100 + w, w % 9), 700);
        assert_int_equal(store_part(f, (struct kv_holder){w, 0}, KV_TIER_HOST,
                                    sequence(700, 100 + w, w % 9), 0, 50 + w, NULL),
                         0);
    }
    assert_int_equal(kvi_create(NULL, &copy.ix), 0);
    assert_int_equal(kvi_dump(f->ix, copy_run, copy.ix), 0);
    for (uint64_t w = 0; w < 100; w++) {
        const uint64_t *locals = sequence(700, 100 + w, w % 9);
        struct kvi_match a = *find(f, (struct kv_holder){w, 0}, locals, 700);
        struct kvi_match b = *find(&copy, (struct kv_holder){w, 0}, locals, 700);

        assert_memory_equal(a.reach, b.reach, sizeof(a.reach));
        assert_int_equal(a.blocks, b.blocks);
    }
    assert_null(kvi_check(copy.ix));
    assert_int_equal(kvi_dump(f->ix, sum_blocks, &here), 0);
    assert_int_equal(kvi_dump(copy.ix, sum_blocks, &there), 0);
    assert_true(here != 0 && here == there);
    assert_int_equal(kvi_dump(f->ix, count_run, &first), 0);
    assert_int_equal(kvi_dump(f->ix, count_run, &again), 0);
    assert_int_equal(first, again);
    kvi_matches_fini(&copy.matches);
    kvi_destroy(copy.ix);
}

static void duplicate_store_leaves_dump_unchanged(void **state)
{
    struct fixture *f = *state;
    uint64_t first = 0, again = 0;

    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(kvi_dump(f->ix, count_run, &first), 0);
    store(f, W0, LOCALS(1, 2, 3));
    assert_int_equal(kvi_dump(f->ix, count_run, &again), 0);
    assert_int_equal(first, again);
}

static int stop(void *arg, const struct kvi_dump_run *run)
{
    (void)run;
    ++*(int *)arg;
    return 42;
}

static void a_callback_stops_the_dump(void **state)
{
    struct fixture *f = *state;
    int calls = 0;

    assert_int_equal(kvi_dump(f->ix, stop, &calls), 0);
    store(f, W0, LOCALS(1, 2, 3));
    store(f, W1, LOCALS(1, 2, 3));
    assert_int_equal(kvi_dump(f->ix, stop, &calls), 42);
    assert_int_equal(calls, 1);
}

enum { WIDE = 6000 };

struct wide {
    struct kvi_index *ix;
    uint64_t next;      /* number of the next block that W1 stores */
    uint8_t told[WIDE]; /* how often each of W0's, by its number */
};

/* Children come and go while the dump stands among them: blocks above WIDE, and those that W1 had. */
static int crowd(void *arg, const struct kvi_dump_run *run)
{
    struct wide *wide = arg;
    uint64_t parent = run->parent ? *run->parent : 0, name = roll(parent, wide->next);
    const struct kv_block block = {name, wide->next};

    for (size_t i = 0; run->holder.worker == W0.worker && i < run->n; i++)
        wide->told[run->blocks[i].tokens_hash]++;
    if (wide->next % 3 == 0)
        (void)kvi_remove(wide->ix, W1, KV_TIER_DEVICE, &name, 1);
    else
        (void)kvi_store(wide->ix, W1, KV_TIER_DEVICE, run->parent, &block, 1, NULL);
    wide->next++;
    return 0;
}

/* Thousands of children of the root, and of a chain below it, told once each in spite of others. */
static void a_wide_dump_tells_all_once(void **state)
{
    struct fixture *f = *state;
    struct wide wide = {.ix = f->ix, .next = WIDE};
    const struct kv_block first = {roll(0, 1), 1};

    assert_int_equal(kvi_store(f->ix, W0, KV_TIER_DEVICE, NULL, &first, 1, NULL), 0);
    assert_int_equal(kvi_store(f->ix, W1, KV_TIER_DEVICE, NULL, &first, 1, NULL), 0);
    for (uint64_t i = 2; i < 2 * WIDE; i++) {
        const uint64_t *parent = i % 3 ? NULL : &first.hash;
        const struct kv_block block = {roll(parent ? *parent : 0, i), i};

        assert_int_equal(
            kvi_store(f->ix, i < WIDE ? W0 : W1, KV_TIER_DEVICE, parent, &block, 1, NULL), 0);
    }
    assert_int_equal(kvi_dump(f->ix, crowd, &wide), 0);
    for (uint64_t i = 1; i < WIDE; i++)
        if (wide.told[i] != 1)
            fail_msg("block %" PRIu64 " was told %u times", i, wide.told[i]);
    assert_true(wide.next > 2 * WIDE);
    assert_null(kvi_check(f->ix));
}

static int count_extra(void *arg, const struct kvi_extra *extra)
{
    struct wide *wide = arg;

    wide->told[extra->hash == roll(0, 1) ? 0 : 1] += extra->holder.worker == W0.worker ? 100 : 1;
    return 0;
}

/* The same of one of two holders, with its copies: beside writes of the other it is told as it was. */
static void chosen_holders_are_told_alone(void **state)
{
    const struct kv_holder chosen[] = {W0, {99, 0}};
    const struct kv_block first = {roll(0, 1), 1}, parked = {7, 7};
    struct fixture *f = *state;
    struct wide wide = {.ix = f->ix, .next = WIDE};
    uint64_t none = 8;

    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvi_add(f->ix, kvi_cache_of(W0, KV_TIER_DEVICE, 0), NULL, &first, 1, NULL),
                         0);
        assert_int_equal(kvi_add(f->ix, kvi_cache_of(W1, KV_TIER_DEVICE, 0), NULL, &first, 1, NULL),
                         0);
    }
    assert_int_equal(kvi_add(f->ix, kvi_cache_of(W1, KV_TIER_DEVICE, 0), &none, &parked, 1, NULL),
                     0);
    for (uint64_t i = 2; i < 2 * WIDE; i++) {
        const uint64_t *parent = i % 3 ? NULL : &first.hash;
        const struct kv_block block = {roll(parent ? *parent : 0, i), i};

        assert_int_equal(
            kvi_store(f->ix, i < WIDE ? W0 : W1, KV_TIER_DEVICE, parent, &block, 1, NULL), 0);
    }
    assert_int_equal(kvi_dump_holders(f->ix, chosen, 2, crowd, count_extra, &wide), 0);
    assert_int_equal(wide.told[0], 100); /* two copies of the first block */
    for (uint64_t i = 1; i < WIDE; i++)
        if (wide.told[i] != 1)
            fail_msg("block %" PRIu64 " was told %u times", i, wide.told[i]);
    assert_int_equal(wide.next, 2 * WIDE - 1); /* a run for each of its blocks */
    assert_null(kvi_check(f->ix));
}

struct leaving {
    struct kvi_index *ix;
    struct kv_holder who;
    uint64_t last; /* @who leaves when this block of its is told */
    uint64_t told; /* blocks of W0 */
};

static int leave_at(void *arg, const struct kvi_dump_run *run)
{
    struct leaving *leaving = arg;

    if (run->holder.worker == W0.worker)
        leaving->told += run->n;
    else if (run->blocks[run->n - 1].tokens_hash == leaving->last)
        (void)kvi_remove_holder(leaving->ix, leaving->who);
    return 0;
}

/*
 * Two chains become one while a dump stands between them, among the upper one's children: it goes
 * on with the lower blocks and with all of the children below. Which of them come after the fork
 * that leaves depends on their hashes, so many forks are tried.
 */
static void chains_join_under_a_dump(void **state)
{
    struct fixture *f = *state;
    const struct kv_holder guest = {9, 0};
    uint64_t trunk[41], fork[31];

    for (uint64_t i = 0; i < 41; i++)
        trunk[i] = i + 1;
    store(f, W0, trunk, 41);
    for (uint64_t below = 0; below < 4; below++) { /* the trunk has a seam at 30, too */
        memcpy(fork, trunk, sizeof(fork));
        fork[30] = 5000 + below;
        store(f, W1, fork, 31);
    }
    for (uint64_t last = 1000; last < 1200; last++) {
        struct leaving leaving = {f->ix, guest, last, 0};

        memcpy(fork, trunk, sizeof(fork));
        fork[20] = last;
        store(f, guest, fork, 21);
        assert_int_equal(kvi_dump(f->ix, leave_at, &leaving), 0);
        assert_int_equal(leaving.told, 41);
        assert_int_equal(kvi_holder_blocks(f->ix, guest), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(dump_and_restore),
        T(duplicate_store_leaves_dump_unchanged),
        T(a_callback_stops_the_dump),
        T(a_wide_dump_tells_all_once),
        T(chosen_holders_are_told_alone),
        T(chains_join_under_a_dump),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
