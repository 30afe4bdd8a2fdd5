// SPDX-License-Identifier: Apache-2.0
/*
 * Two managers that load from each other at the same time, in one session: one reads the other's shared
 * memory in place, the other one has blocks sent. Each lends while it loads, so that threads which give
 * a lease back, with their manager's lock held, share a connection with blocks that are on their way.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>

#include "base/unit.h"
#include "tier/kitchen.h"

#define N 8u /* blocks of a load: their bytes are sent in one piece, and a peer leases as many */
#define OWNED (8 * N)

static struct node a, b;
static atomic_long loads_left, wrong;

struct side {
    struct node *node;
    uint64_t first; /* of the other one's keys */
    long right;
};

static void *load_often(void *arg)
{
    struct side *side = arg;
    struct kvbm_pool *host = kvbm_manager_pool(side->node->w.m, KV_TIER_HOST);

    while (atomic_fetch_sub(&loads_left, 1) > 0) {
        long n = world_load(&side->node->w, side->first, N); /* compares each byte */

        side->right += n;
        atomic_fetch_add(&wrong, n < 0);
        if (!side->node->w.in_place)
            (void)kvbm_pool_reset_keys(host, 0, (uint64_t[]){side->first}, 1, NULL);
    }
    return NULL;
}

static void test_both_at_once(void **state)
{
    struct side sides[] = {{&a, 2000, 0}, {&b, 1000, 0}};
    pthread_t threads[2];

    (void)state;
    node_init(&a, "a", OWNED, NULL, true, NULL);
    node_init(&b, "b", OWNED, NULL, false, a.at);
    kvbm_blockset_destroy(a.set);
    world_stop(&a.w);
    a.w.opts.agent = a.agent; /* it uses the session that the other one has opened */
    world_start(&a.w);
    world_attach(&a.w, false);
    node_export(&a, 100);
    wait_for_peers(&a.w, 1);
    wait_for_peers(&b.w, 1);
    b.w.in_place = true;
    assert_int_equal(world_store(&a.w, 1000, N), N);
    assert_int_equal(world_store(&b.w, 2000, N), N);
    loads_left = (long)unit_rounds(20000);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, load_often, &sides[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    print_message("right %ld, %ld\n", sides[0].right, sides[1].right);
    assert_int_equal(wrong, 0);
    assert_true(sides[0].right > 0 && sides[1].right > 0);
    kvbm_blockset_destroy(b.set);
    b.set = NULL;
    kvbm_blockset_destroy(a.set);
    a.set = NULL;
    world_stop(&b.w); /* closes the session */
    world_start(&b.w);
    world_attach(&b.w, false);
    node_export(&b, 100);
    node_fini(&b);
    node_fini(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_at_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
