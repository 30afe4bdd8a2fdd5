// SPDX-License-Identifier: Apache-2.0
/*
 * Without a host tier several stores of a key may be on their way at a time. One of them writes it:
 * a second copy in a tier would evict another block there.
 */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include "manager_shaky.h"

enum { N = 8, LONG_MS = 60000 };

static void start(struct world *w)
{
    shaky_start(w, 0);
    shaky->hang_puts = true;
}

/* Ends what hangs, and waits for all that is queued. */
static void let_go(struct world *w)
{
    shaky->hang_puts = false;
    assert_int_equal(kvbm_manager_drain(w->m, LONG_MS), 0);
}

static void test_one_writes(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    assert_int_equal(world_store(&w, 1, N), N);
    EXPECT_SOON(shaky->inside > 0);
    for (int i = 0; i < 5; i++)
        assert_int_equal(world_store(&w, 1, N), N);
    assert_int_equal(world_store(&w, 100, N), N); /* others aren't held up */
    assert_int_equal(world_stats(&w).object.queued, 5 * N);
    let_go(&w);
    assert_int_equal(world_stats(&w).object.blocks_in, 2 * N);
    assert_int_equal(world_stats(&w).object.queued, 0);
    assert_int_equal(world_load(&w, 1, N), N);
    world_fini(&w);
}

/* The first fails: the next one brings the blocks. */
static void test_the_next_one_writes(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    assert_int_equal(world_store(&w, 1, N), N);
    EXPECT_SOON(shaky->inside > 0);
    assert_int_equal(world_store(&w, 1, N), N);
    shaky->fail_publications = 1;
    let_go(&w);
    assert_int_equal(world_stats(&w).object.blocks_in, N);
    assert_int_equal(world_load(&w, 1, N), N);
    world_fini(&w);
}

/* Destroyed while one moves and others wait for it. */
static void test_destroyed(void **state)
{
    struct world w;
    int rc;

    (void)state;
    start(&w);
    for (int i = 0; i < 4; i++)
        assert_int_equal(world_store(&w, 1, N), N);
    EXPECT_SOON(shaky->inside > 0);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    rc = kvbm_manager_destroy(w.m, 1);
    shaky->hang_puts = false;
    if (rc == -ETIMEDOUT)
        rc = kvbm_manager_destroy(w.m, LONG_MS);
    assert_int_equal(rc, 0);
    w.m = NULL;
    w.cache = NULL;
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_writes),
        cmocka_unit_test(test_the_next_one_writes),
        cmocka_unit_test(test_destroyed),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
