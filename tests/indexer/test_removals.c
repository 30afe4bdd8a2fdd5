// SPDX-License-Identifier: Apache-2.0
/* The table of removals beside an array with one version for each rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "base/core/clock.h"
#include "indexer/registry/removals.h"
#include "starve.h"

#define WORKERS 40
#define RANKS 5
#define BOUND 100

static bool note(struct ki_removals *r, uint64_t instance, uint32_t rank, uint64_t version)
{
    struct ki_removed removed = {
        .instance = instance, .rank = rank, .version = version, .by_peer = true};

    return ki_removals_note(r, &removed);
}

static void the_newest_counts(void **state)
{
    uint64_t now = kv_wall_ns() / 1000, truth[WORKERS][RANKS] = {0}, random = 20261128;
    struct ki_removals r = {.max = WORKERS * RANKS};

    (void)state;
    for (int i = 0; i < 5000; i++) {
        uint32_t w, k;
        uint64_t version;

        random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        w = (uint32_t)(random >> 33) % WORKERS;
        k = (uint32_t)(random >> 43) % RANKS;
        version = now + (random >> 50);
        assert_int_equal(note(&r, w, k, version), version > truth[w][k]);
        truth[w][k] = KV_MAX(truth[w][k], version);
    }
    for (uint32_t w = 0; w < WORKERS; w++)
        for (uint32_t k = 0; k < RANKS; k++) {
            const struct ki_removed *removed = ki_removals_find(&r, w, k);

            assert_int_equal(removed ? removed->version : 0, truth[w][k]);
        }
    assert_true(ki_removals_take_by_peer(&r, 1, NULL));
    assert_false(ki_removals_take_by_peer(&r, 1, NULL));
    ki_removals_fini(&r);
}

/* Beyond the bound the oldest go, also when they come last; after an hour all do. */
static void the_oldest_are_forgotten(void **state)
{
    uint64_t now = kv_wall_ns() / 1000, hour = UINT64_C(3600) * 1000000;
    struct ki_removals r = {.max = BOUND};
    struct ki_removed *list;

    (void)state;
    for (uint64_t i = 0; i < BOUND; i++)
        assert_true(note(&r, i, 0, now - i));
    assert_true(note(&r, BOUND, 0, now + 1));
    assert_in_range(r.n, BOUND * 9 / 10, BOUND);
    for (uint64_t i = 0; i < BOUND * 9 / 10; i++)
        assert_non_null(ki_removals_find(&r, i, 0));
    assert_non_null(ki_removals_find(&r, BOUND, 0));
    assert_null(ki_removals_find(&r, BOUND - 1, 0));
    for (uint64_t i = 0; i < 10 * BOUND; i++) {
        note(&r, i, 1, now - hour);
        assert_in_range(r.n, 1, BOUND);
    }
    assert_in_range(ki_removals_list(&r, &list), BOUND / 2, BOUND);
    for (size_t i = 0; i < r.n; i++)
        assert_int_equal(list[i].rank, 0);
    free(list);
    ki_removals_fini(&r);
}

/* Without memory for one more, the remembered ones stay. */
static void nothing_is_forgotten_without_memory(void **state)
{
    uint64_t now = kv_wall_ns() / 1000;
    struct ki_removals r = {.max = 1000};
    uint64_t refused = 0;

    (void)state;
    for (uint64_t i = 0; i < 500; i++) {
        for (long at = 1; at <= 2; at++) { /* both arrays */
            starve_at(at);
            if (!note(&r, i, 0, now) && starved())
                refused++;
            starve_at(0);
        }
        note(&r, i, 0, now);
        assert_int_equal(r.n, i + 1);
    }
    assert_in_range(refused, 4, 100);
    ki_removals_fini(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_newest_counts),
        cmocka_unit_test(the_oldest_are_forgotten),
        cmocka_unit_test(nothing_is_forgotten_without_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
