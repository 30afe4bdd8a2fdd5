// SPDX-License-Identifier: Apache-2.0
/* The learned groups of many ranks against a plain table, and their limits. */
#include "base/unit.h"

#include <errno.h>

#include "event/reader/groups.h"

#define RANKS 40
#define GROUPS 5

/* Compare what is known of each group with the plain table, by its window; 0: not learned. */
static void compare(struct kve_groups *groups, uint32_t windows[RANKS][GROUPS],
                    const uint32_t mains[RANKS])
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        const struct kve_group *main = kve_groups_main(groups, rank);

        assert_int_equal(main ? main->group : GROUPS, mains[rank]);
        assert_int_equal(kve_groups_may_have_main(groups, rank), mains[rank] < GROUPS);
        for (uint32_t group = 0; group < GROUPS; group++) {
            const struct kve_group *got = kve_groups_find(groups, rank, group);

            assert_int_equal(got ? got->window : 0, windows[rank][group]);
        }
    }
}

static void test_against_a_table(void **state)
{
    uint64_t random = unit_seed();
    struct kve_groups groups = {0}, copy;

    (void)state;
    for (size_t round = 0; round < unit_rounds(20); round++) {
        uint32_t windows[RANKS][GROUPS] = {{0}}, mains[RANKS];

        for (uint32_t rank = 0; rank < RANKS; rank++)
            mains[rank] = GROUPS;
        for (uint32_t step = 1; step < 300; step++) {
            uint32_t rank = (uint32_t)unit_below(&random, RANKS);
            uint32_t group = (uint32_t)unit_below(&random, GROUPS);
            bool is_main =
                unit_below(&random, 3) == 0 && (mains[rank] == GROUPS || mains[rank] == group);
            const struct kve_group learned = {
                .rank = rank, .group = group, .is_main = is_main, .window = step};

            assert_int_equal(kve_groups_learn(&groups, &learned), 0);
            windows[rank][group] = step;
            if (is_main)
                mains[rank] = group;
            else if (mains[rank] == group)
                mains[rank] = GROUPS;
            if (step % 50 == 0)
                compare(&groups, windows, mains);
        }
        assert_int_equal(kve_groups_copy(&groups, &copy), 0);
        compare(&copy, windows, mains);
        kve_groups_fini(&copy);
        kve_groups_reset(&groups);
        assert_null(kve_groups_find(&groups, 0, 0));
    }
    kve_groups_fini(&groups);
}

/* The tiers of a group, written plainly. */
struct place {
    bool tiers[KV_N_TIERS]; /* it has shown blocks there */
    bool full, settled, offloads;
};

/* The tier in which a group lives: the device, or as it was settled the nearest one. */
static uint32_t nearest(const struct place *p)
{
    uint32_t t = 0;

    while (t < KV_N_TIERS && !p->tiers[t])
        t++;
    return t;
}

static void settle_plainly(struct place places[RANKS][GROUPS])
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        bool on_device = false;

        for (uint32_t g = 0; g < GROUPS; g++)
            on_device |= places[rank][g].tiers[KV_TIER_DEVICE];
        for (uint32_t g = 0; g < GROUPS; g++) {
            uint32_t t = nearest(&places[rank][g]);

            places[rank][g].settled |= on_device && places[rank][g].full && t && t < KV_N_TIERS;
        }
    }
}

static void compare_places(struct kve_groups *groups, struct place places[RANKS][GROUPS])
{
    size_t n_below = 0, n_mixed = 0;

    for (uint32_t rank = 0; rank < RANKS; rank++) {
        bool homes = false, offloads = false;

        for (uint32_t g = 0; g < GROUPS; g++) {
            const struct place *p = &places[rank][g];
            uint32_t t = nearest(p);
            bool below = !p->settled && t && t < KV_N_TIERS;

            assert_int_equal(kve_groups_lives_below(groups, rank, g), p->settled);
            n_below += below;
            homes |= p->settled;
            offloads |= p->offloads;
        }
        n_mixed += homes && offloads;
    }
    assert_int_equal(groups->n_below, n_below);
    assert_int_equal(groups->n_mixed, n_mixed);
}

static void show(struct kve_groups *groups, struct place *p, uint32_t rank, uint32_t group,
                 uint32_t tier)
{
    bool first = tier == KV_TIER_DEVICE && !p->tiers[tier];
    uint32_t home = p->settled ? nearest(p) : 0;
    struct kve_group before;

    assert_int_equal(kve_groups_note_tier(groups, rank, group, (enum kv_tier)tier, &before), first);
    if (first)
        assert_int_equal(before.home, home);
    p->offloads |= tier && (p->tiers[KV_TIER_DEVICE] || (p->settled && tier != home));
    if (!p->settled || !tier)
        p->tiers[tier] = true;
    p->settled &= tier > 0;
}

/* Where groups live, against a plain table: batches of blocks in tiers, each settled at its end. */
static void test_homes(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(40); round++) {
        struct place places[RANKS][GROUPS] = {0};
        struct kve_groups groups = {0}, copy;

        for (uint32_t rank = 0; rank < RANKS; rank++)
            for (uint32_t g = 0; g < GROUPS; g++) {
                const struct kve_group group = {.rank = rank,
                                                .group = g,
                                                .is_main = !g,
                                                .is_window = g > 0,
                                                .need = g % 2 ? 1 : 3,
                                                .needs = g % 2 ? KV_NEEDS_ALL : KV_NEEDS_RUN};

                places[rank][g].full = !g || g % 2;
                assert_int_equal(kve_groups_learn(&groups, &group), 0);
            }
        for (uint32_t batch = 0; batch < 60; batch++) {
            size_t at = 0;

            for (uint64_t n = unit_below(&random, 8); n > 0; n--) {
                uint32_t rank = (uint32_t)unit_below(&random, RANKS),
                         g = (uint32_t)unit_below(&random, GROUPS),
                         tier = (uint32_t)unit_below(&random, unit_below(&random, 2) ? 2 : 3);

                show(&groups, &places[rank][g], rank, g, tier);
            }
            while (kve_groups_settle(&groups, &at))
                ;
            settle_plainly(places);
            compare_places(&groups, places);
        }
        assert_int_equal(kve_groups_copy(&groups, &copy), 0);
        compare_places(&copy, places);
        kve_groups_fini(&copy);
        kve_groups_fini(&groups);
    }
}

/* A rank whose groups weren't all learned may have a main one. */
static void test_limits(void **state)
{
    struct kve_groups groups = {0};
    struct kve_group group = {.is_window = true};

    (void)state;
    for (; group.group < KVE_MAX_GROUPS; group.group++)
        assert_int_equal(kve_groups_learn(&groups, &group), 0);
    assert_false(kve_groups_may_have_main(&groups, 0));
    assert_int_equal(kve_groups_learn(&groups, &group), -ENOSPC);
    assert_null(kve_groups_find(&groups, 0, KVE_MAX_GROUPS));
    assert_true(kve_groups_may_have_main(&groups, 0));

    kve_groups_reset(&groups);
    group.group = 1;
    for (group.rank = 0; group.rank < KVE_MAX_GROUP_RANKS; group.rank++)
        assert_int_equal(kve_groups_learn(&groups, &group), 0);
    assert_false(kve_groups_may_have_main(&groups, 7000));
    group.rank = 7000;
    assert_int_equal(kve_groups_learn(&groups, &group), -ENOSPC);
    assert_true(kve_groups_may_have_main(&groups, 7000));
    assert_false(kve_groups_may_have_main(&groups, 7)); /* known to have none */
    kve_groups_reset(&groups);
    assert_false(kve_groups_may_have_main(&groups, 7000));
    kve_groups_fini(&groups);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_table),
        cmocka_unit_test(test_homes),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
