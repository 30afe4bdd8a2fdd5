// SPDX-License-Identifier: Apache-2.0
/* The hash table beside a plain array: random inserts, erasures and replacements, many under one key. */
#include <errno.h>
#include <inttypes.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "index/memory/table.h"
#include "random.h"

#define N_VALUES 40000u

struct world {
    struct kvi_mem mem;
    struct kvi_table table;
    struct rng rng;
    uint64_t key[N_VALUES]; /* by value; mixed */
    bool in[N_VALUES];
    uint32_t n;
};

static uint64_t mix_of(const void *arg, uint32_t value)
{
    return ((const struct world *)arg)->key[value];
}

static void prefetch(const void *arg, uint32_t value)
{
    (void)arg;
    (void)value;
}

/* Whether a search for the value's key comes by it, exactly once. */
static bool found(const struct world *world, uint32_t value)
{
    struct kvi_probe probe;
    uint32_t got, n = 0;

    kvi_probe_init(&probe, &world->table, world->key[value]);
    while (kvi_probe_next(&probe, &got)) {
        if (got >= N_VALUES || !world->in[got])
            fail_msg("a search met %u, which isn't there; seed %" PRIu64, got, test_seed());
        n += got == value;
    }
    assert_true(n <= 1);
    return n == 1;
}

/* Keys that agree in a part decide where entries crowd: the segment, the chunk, or the tag. */
static uint64_t make_key(struct rng *rng, uint32_t kind)
{
    uint64_t x = rng_next(rng);

    switch (kind) {
    case 0:
        return rng_scatter(rng_below(rng, N_VALUES / 8)); /* several values to a key */
    case 1:
        return x & ~UINT64_C(0xff00000000); /* one tag */
    case 2:
        return (x & ~UINT64_C(0xffffffff)) | rng_below(rng, 1u << 26); /* a few chunks */
    default:
        return x;
    }
}

static void check(const struct world *world)
{
    assert_int_equal(world->table.n, world->n);
    for (uint32_t v = 0; v < N_VALUES; v++)
        if (found(world, v) != world->in[v])
            fail_msg("value %u: %s; seed %" PRIu64, v, world->in[v] ? "lost" : "still there",
                     test_seed());
}

/* @grow percent of the steps insert. A value moves to the free one beside it now and then. */
static void play(struct world *world, uint32_t kind, uint32_t grow, long steps)
{
    for (long i = 0; i < steps; i++) {
        uint32_t v = rng_below(&world->rng, N_VALUES), other = v ^ 1;

        if (!world->in[v] && rng_below(&world->rng, 100) < grow) {
            world->key[v] = make_key(&world->rng, kind);
            assert_false(kvi_table_erase(&world->table, world->key[v], v));
            assert_int_equal(kvi_table_insert(&world->table, world->key[v], v), 0);
            world->in[v] = true;
            world->n++;
        } else if (world->in[v] && !world->in[other] && rng_below(&world->rng, 4) == 0) {
            world->key[other] = world->key[v];
            assert_true(kvi_table_replace(&world->table, world->key[v], v, other));
            assert_false(kvi_table_replace(&world->table, world->key[v], v, other));
            world->in[v] = false;
            world->in[other] = true;
        } else if (world->in[v] && rng_below(&world->rng, 100) >= grow) {
            assert_true(kvi_table_erase(&world->table, world->key[v], v));
            assert_false(kvi_table_erase(&world->table, world->key[v], v));
            world->in[v] = false;
            world->n--;
        }
    }
    check(world);
}

/* With room for @reserved entries at first. */
static void play_kind(uint32_t kind, uint64_t reserved)
{
    static struct world world;
    uint64_t empty;

    world = (struct world){.rng = {test_seed() + kind}};
    assert_int_equal(kvi_table_init(&world.table, &world.mem, mix_of, prefetch, &world), 0);
    empty = world.mem.bytes;
    assert_int_equal(kvi_table_reserve(&world.table, reserved), 0);
    check(&world);
    for (uint32_t shrink = 10; shrink <= 90; shrink += 20)
        play(&world, kind, 100 - shrink, test_rounds(100000));
    for (uint32_t v = 0; v < N_VALUES; v++) {
        if (world.in[v])
            assert_true(kvi_table_erase(&world.table, world.key[v], v));
        world.in[v] = false;
    }
    world.n = 0;
    check(&world);
    assert_true(reserved || world.mem.bytes <= empty + 4096); /* it has shrunk */
    kvi_table_fini(&world.table);
    assert_int_equal(world.mem.bytes, 0);
}

static void test_spread(void **state)
{
    (void)state;
    print_message("seed %" PRIu64 "\n", test_seed());
    play_kind(3, 0);
}

static void test_shared_keys(void **state)
{
    (void)state;
    play_kind(0, 0);
}

static void test_one_tag(void **state)
{
    (void)state;
    play_kind(1, 0);
}

static void test_few_chunks(void **state)
{
    (void)state;
    play_kind(2, 0);
}

/* Less than what comes, about as much, and more. */
static void test_reserved(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 1000000; n *= 10)
        play_kind(3, n);
}

/* Room for what was expected is enough: no segment grows meanwhile. A refused reservation changes nothing. */
static void test_reserved_room(void **state)
{
    static struct world world;
    uint64_t bytes;
    long n = 1;
    (void)state;

    world = (struct world){.rng = {test_seed()}};
    assert_int_equal(kvi_table_init(&world.table, &world.mem, mix_of, prefetch, &world), 0);
    for (;; n++) {
        int rc;

        bytes = world.mem.bytes;
        kvi_mem_fail_at(n);
        rc = kvi_table_reserve(&world.table, N_VALUES);
        kvi_mem_fail_at(0);
        if (rc == 0)
            break;
        assert_int_equal(rc, -ENOMEM);
        assert_int_equal(world.mem.bytes, bytes);
        check(&world);
    }
    assert_true(n > 3);
    bytes = world.mem.bytes;
    for (uint32_t v = 0; v < N_VALUES; v++) {
        world.key[v] = rng_next(&world.rng);
        assert_int_equal(kvi_table_insert(&world.table, world.key[v], v), 0);
        world.in[v] = true;
        world.n++;
    }
    assert_int_equal(world.mem.bytes, bytes);
    check(&world);
    kvi_table_fini(&world.table);
    assert_int_equal(world.mem.bytes, 0);
}

/* An insert that is refused its memory changes nothing. */
static void test_starved(void **state)
{
    static struct world world;
    long refused = 0;
    (void)state;

    world = (struct world){.rng = {test_seed()}};
    assert_int_equal(kvi_table_init(&world.table, &world.mem, mix_of, prefetch, &world), 0);
    for (uint32_t v = 0; v < N_VALUES / 2; v++) {
        int rc;

        world.key[v] = rng_next(&world.rng);
        for (long n = 1;; n++) {
            kvi_mem_fail_at(n);
            rc = kvi_table_insert(&world.table, world.key[v], v);
            kvi_mem_fail_at(0);
            if (rc == 0)
                break;
            assert_int_equal(rc, -ENOMEM);
            assert_false(found(&world, v));
            refused++;
        }
        world.in[v] = true;
        world.n++;
    }
    assert_true(refused > 10);
    check(&world);
    kvi_table_fini(&world.table);
    assert_int_equal(world.mem.bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spread),        cmocka_unit_test(test_shared_keys),
        cmocka_unit_test(test_one_tag),       cmocka_unit_test(test_few_chunks),
        cmocka_unit_test(test_starved),       cmocka_unit_test(test_reserved),
        cmocka_unit_test(test_reserved_room),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
