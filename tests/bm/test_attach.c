// SPDX-License-Identifier: Apache-2.0
/* Values attached to keys, and callbacks for uses of keys. */
#include <stdio.h>

#include "base/core/clock.h"
#include "base/unit.h"
#include "bm.h"
#include "bm/registry/registry.h"

static const uint64_t keys[3] = {7, 8, 9};

static struct {
    struct kvbm_registry *registry;
    uint32_t type;
    int destroyed[512];
    size_t n;
    size_t n_calls;
} seen;

/* Calls back into what called it: it must not hold the lock. */
static void destroy(void *value)
{
    uint8_t where;

    assert_true(seen.n < KV_COUNT(seen.destroyed));
    seen.destroyed[seen.n++] = *(int *)value;
    assert_int_equal(kvbm_registry_locate(seen.registry, 0, &keys[0], 1, &where), 0);
    assert_int_equal(where, 0); /* the key has gone by then */
    assert_int_equal(kvbm_registry_attach(seen.registry, 0, &keys[0], seen.type, value), -ENOENT);
}

static uint32_t type(struct bm *bm, const char *name, bool multiple)
{
    uint32_t ret = 99;

    assert_int_equal(kvbm_attachment_type(bm->registry, name, multiple, destroy, &ret), 0);
    return ret;
}

static void open_it(struct bm *bm)
{
    bm_open(bm, NULL);
    memset(&seen, 0, sizeof(seen));
    seen.registry = bm->registry;
}

static void test_types(void **state)
{
    uint32_t one, other = 99;
    char name[64];
    struct bm bm;
    (void)state;

    open_it(&bm);
    one = type(&bm, "one", false);
    assert_int_equal(type(&bm, "one", false), one);
    assert_int_equal(kvbm_attachment_type(bm.registry, "one", true, NULL, &other), -EEXIST);
    assert_int_equal(kvbm_attachment_type(bm.registry, "", true, NULL, &other), -EINVAL);
    memset(name, 'x', 64);
    name[63] = 0;
    assert_true(type(&bm, name, true) != one);
    for (int i = 2; i < 64; i++) {
        snprintf(name, sizeof(name), "type %d", i);
        type(&bm, name, i % 2);
    }
    assert_int_equal(kvbm_attachment_type(bm.registry, "more", true, NULL, &other), -ENOSPC);
    assert_int_equal(other, 99);
    assert_int_equal(type(&bm, "one", false), one);
    bm_close(&bm);
}

static void test_values(void **state)
{
    int values[5] = {0, 1, 2, 3, 4};
    struct kvbm_complete staged;
    struct bm bm;
    uint32_t unique, many;
    void *got[3];
    (void)state;

    open_it(&bm);
    unique = type(&bm, "unique", false);
    many = seen.type = type(&bm, "many", true);
    assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], unique, &values[0]), -ENOENT);
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 1, &staged), 0);
    assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], unique, &values[0]), -ENOENT);
    assert_int_equal(kvbm_complete_release(&staged), 0);
    bm_leave(bm.pool, keys[0]);
    assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], unique, &values[0]), 0);
    assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], unique, &values[1]), -EEXIST);
    for (int i = 1; i < 5; i++)
        assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], many, &values[i]), 0);
    assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], 2, &values[0]), -EINVAL);
    assert_int_equal(kvbm_registry_attach(bm.registry, 64, &keys[0], many, &values[0]), -EINVAL);
    assert_int_equal(kvbm_registry_attach(bm.registry, 1, &keys[0], many, &values[0]), -ENOENT);

    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[0], unique, got, 3), 1);
    assert_ptr_equal(got[0], &values[0]);
    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[0], many, got, 3), 4);
    for (int i = 0; i < 3; i++)
        assert_ptr_equal(got[i], &values[i + 1]);
    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[0], many, NULL, 0), 4);
    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[1], many, got, 3), -ENOENT);
    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[0], 2, got, 3), -EINVAL);
    assert_int_equal(seen.n, 0);
    assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    assert_int_equal(seen.n, 5);
    bm_leave(bm.pool, keys[0]); /* the next life has none */
    assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[0], many, got, 3), 0);
    bm_close(&bm);
    assert_int_equal(seen.n, 5);
}

/* As long as the key is in any tier; then once, whichever way it goes. */
static void test_last_tier(void **state)
{
    struct kvbm_pool *host;
    struct kvbm_immutable held;
    struct bm bm;
    int value = 5;
    (void)state;

    for (int way = 0; way < 4; way++) {
        open_it(&bm);
        seen.type = type(&bm, "t", false);
        host = bm_pool(&bm, &(struct kvbm_pool_opts){
                                .tier = KV_TIER_HOST, .n_blocks = 1, .reset_on_release = way == 3});
        bm_put(host, keys, 1, &held);
        bm_leave(bm.pool, keys[0]);
        assert_int_equal(kvbm_registry_attach(bm.registry, 0, &keys[0], seen.type, &value), 0);
        assert_int_equal(kvbm_pool_reset(bm.pool), 0);
        assert_int_equal(seen.n, 0);
        assert_int_equal(kvbm_immutable_release(&held), 0);
        if (way == 0)
            bm_churn(host, 1);
        else if (way == 1)
            assert_int_equal(kvbm_pool_reset_keys(host, 0, keys, 1, NULL), 0);
        assert_int_equal(seen.n, way != 2);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        assert_int_equal(kvbm_pool_destroy(host), 0);
        assert_int_equal(seen.n, 1);
        bm_close(&bm);
    }
}

/* More than the batch in which they are destroyed, of several keys in one call; their places are used again. */
static void test_many(void **state)
{
    static int values[120];
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};
    bool once[KV_COUNT(values)] = {false};
    struct bm bm;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(values); i++)
        values[i] = (int)i;
    open_it(&bm);
    seen.type = type(&bm, "t", true);
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < 3; k++)
            bm_leave(bm.pool, keys[k]);
        for (size_t i = 0; i < KV_COUNT(values); i++)
            assert_int_equal(
                kvbm_registry_attach(bm.registry, 0, &keys[i % 3], seen.type, &values[i]), 0);
        assert_int_equal(kvbm_registry_attachments(bm.registry, 0, &keys[1], seen.type, NULL, 0),
                         40);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        seen.n = 0;
        assert_int_equal(kvbm_pool_reset_inactive(bm.pool), 3);
        assert_int_equal(seen.n, KV_COUNT(values));
        memset(once, 0, sizeof(once));
        for (size_t i = 0; i < seen.n; i++) {
            assert_false(once[seen.destroyed[i]]);
            once[seen.destroyed[i]] = true;
        }
    }
    stats = bm_stats(bm.pool);
    assert_int_equal(stats.reset_pool_size, 7);
    bm_close(&bm);
}

/*
 * Types in any order on one key, a few of the values asked for, what is given back used again: in
 * the order in which they came, of each type.
 */
static void test_in_order(void **state)
{
    static int values[4 * 90];
    void *got[90];
    uint32_t types[4];
    struct bm bm;
    (void)state;

    open_it(&bm);
    for (int t = 0; t < 4; t++)
        types[t] = type(&bm, (char[]){(char)('a' + t), 0}, true);
    for (int round = 0; round < 2; round++) {
        bm_leave(bm.pool, keys[0]);
        for (int i = 0; i < 4 * 90; i++) {
            values[i] = i;
            assert_int_equal(
                kvbm_registry_attach(bm.registry, 0, keys, types[i * 7 % 4], &values[i]), 0);
        }
        for (int t = 0; t < 4; t++) {
            memset(got, 0, sizeof(got));
            assert_int_equal(kvbm_registry_attachments(bm.registry, 0, keys, types[t], got, 50),
                             90);
            assert_null(got[50]);
            assert_int_equal(kvbm_registry_attachments(bm.registry, 0, keys, types[t], got, 90),
                             90);
            for (int i = 0; i < 90; i++)
                assert_int_equal(*(int *)got[i], t * 7 % 4 + 4 * i); /* 7 is its own inverse */
        }
        seen.n = 0;
        assert_int_equal(kvbm_pool_reset(bm.pool), 0);
        assert_int_equal(seen.n, 4 * 90);
        assert_true(bm.registry->n_attachments <= 4 * 90 + 4);
    }
    bm_close(&bm);
}

static uint64_t cpu_ns(void)
{
    return kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID);
}

#define SOME 500

/* Nanoseconds for SOME more values on a key, the least of five times. */
static uint64_t attach_some(struct bm *bm, uint32_t type)
{
    static int value;
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < 5; i++) {
        uint64_t begin = cpu_ns();

        for (int k = 0; k < SOME; k++)
            assert_int_equal(kvbm_registry_attach(bm->registry, 0, keys, type, &value), 0);
        least = KV_MIN(least, cpu_ns() - begin);
    }
    return least;
}

/* One more value costs the same behind 20,000 as behind 2,000 (walked, it was ten times as much). */
static void test_constant_time(void **state)
{
    uint64_t few, many;
    struct bm bm;
    uint32_t t;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, keys[0]);
    assert_int_equal(kvbm_attachment_type(bm.registry, "t", true, NULL, &t), 0);
    attach_some(&bm, t);
    few = attach_some(&bm, t);
    for (int i = 0; i < 6; i++)
        attach_some(&bm, t);
    many = attach_some(&bm, t);
    assert_true(many < 3 * few);
    bm_close(&bm);
}

/* ---- uses ---- */

static struct {
    struct kvbm_pool *pool;
    uint64_t keys[32];
    size_t n, n_calls;
} used;

static void on_touch(void *arg, enum kv_tier tier, uint32_t group, const void *what, size_t n)
{
    assert_ptr_equal(arg, &used);
    assert_int_equal(tier, KV_TIER_DEVICE);
    assert_int_equal(group, 0);
    assert_true(used.n + n <= KV_COUNT(used.keys) && n > 0);
    memcpy(used.keys + used.n, what, n * 8);
    used.n += n;
    used.n_calls++;
    assert_true(kvbm_pool_probe(used.pool, 0, what, n) >= 0); /* without the lock */
}

static void test_touches(void **state)
{
    uint64_t mixed[4] = {keys[2], 1, keys[0], keys[0]};
    struct kvbm_immutable held[4];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    memset(&used, 0, sizeof(used));
    used.pool = bm.pool;
    assert_int_equal(kvbm_registry_on_touch(bm.registry, on_touch, &used), 0);
    bm_put(bm.pool, keys, 3, held);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(used.n, 0); /* a registration is no use by others */
    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 3, KVBM_MATCH_NO_TOUCH, held), 3);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(kvbm_pool_probe(bm.pool, 0, keys, 3), 3);
    assert_int_equal(used.n_calls, 0);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, keys, 3, 0, held), 3);
    assert_int_equal(used.n, 3);
    assert_int_equal(used.n_calls, 1);
    assert_memory_equal(used.keys, keys, sizeof(keys));
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, keys, 2), 2);
    assert_int_equal(used.n, 5);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    assert_int_equal(kvbm_pool_match_scattered(bm.pool, 0, mixed, 4, 0, held), 3);
    assert_int_equal(used.n, 8);
    assert_memory_equal(used.keys + 5, ((uint64_t[]){keys[2], keys[0], keys[0]}), 24);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), 0);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &mixed[1], 3, 0, held), 0);
    assert_int_equal(used.n, 8);
    for (int i = 1; i < 8; i++)
        assert_int_equal(kvbm_registry_on_touch(bm.registry, on_touch, &used), 0);
    assert_int_equal(kvbm_registry_on_touch(bm.registry, on_touch, &used), -ENOSPC);
    bm_close(&bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types),     cmocka_unit_test(test_values),
        cmocka_unit_test(test_last_tier), cmocka_unit_test(test_many),
        cmocka_unit_test(test_in_order),  cmocka_unit_test(test_constant_time),
        cmocka_unit_test(test_touches),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
