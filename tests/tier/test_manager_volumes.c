// SPDX-License-Identifier: Apache-2.0
/* A manager whose disk volumes come in another order, or are missing when it starts. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <sys/stat.h>

#include "base/core/log.h"
#include "tier/kitchen.h"

enum { PROMPTS = 6, EACH = 4, BLOCKS = 32 };

static char dirs[2][140];
static char list[300];

static void name_volumes(struct world *w, int first, int second)
{
    snprintf(list, sizeof(list), "%s:%s", dirs[first], dirs[second]);
    w->opts.disk = list;
}

static void begin(struct world *w)
{
    world_init(w, 16);
    for (int i = 0; i < 2; i++) {
        snprintf(dirs[i], sizeof(dirs[i]), "%s/volume%d", w->dir, i);
        assert_int_equal(mkdir(dirs[i], 0700), 0);
    }
    name_volumes(w, 0, 1);
    w->opts.disk_bytes = (uint64_t)BLOCKS * HOST_STRIDE;
    world_start(w);
    world_attach(w, false);
    for (uint64_t i = 1; i <= PROMPTS; i++) {
        assert_int_equal(world_store(w, 1000 * i, EACH), EACH);
        assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    }
    world_stop(w);
}

/* Key by key: how many are there. */
static long loaded(struct world *w)
{
    long n = 0;

    for (uint64_t i = 1; i <= PROMPTS; i++)
        for (uint64_t k = 0; k < EACH; k++)
            n += world_load(w, 1000 * i + k, 1);
    return n;
}

static void test_other_order(void **state)
{
    struct world w;

    (void)state;
    begin(&w);
    name_volumes(&w, 1, 0);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(loaded(&w), PROMPTS * EACH);
    assert_int_equal(world_stats(&w).volumes_down, 0);
    world_fini(&w);
}

/* The half that is there serves and takes new blocks; the other half is found when it is back. */
static void test_missing(void **state)
{
    char away[160];
    struct world w;

    (void)state;
    begin(&w);
    snprintf(away, sizeof(away), "%s.away", dirs[0]);
    assert_int_equal(rename(dirs[0], away), 0);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_stats(&w).volumes_down, 1);
    assert_int_equal(loaded(&w), PROMPTS * EACH / 2);
    for (uint64_t i = 1; i <= 8; i++) { /* more than the volume holds */
        assert_int_equal(world_store(&w, 100000 * i, EACH), EACH);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    assert_int_equal(world_stats(&w).disk.failed, 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 800000, EACH), EACH);
    world_stop(&w);
    assert_int_equal(rename(away, dirs[0]), 0);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_stats(&w).volumes_down, 0);
    assert_int_equal(world_load(&w, 800000, EACH), EACH);
    assert_true(loaded(&w) >= PROMPTS * EACH / 2);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_order),
        cmocka_unit_test(test_missing),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
