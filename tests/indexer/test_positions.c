// SPDX-License-Identifier: Apache-2.0
/* Positions at their bound: those with blocks stay, as nobody else finds these blocks again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "indexer/registry/positions.h"

static bool note(struct ki_positions *p, uint64_t worker, bool has_blocks)
{
    struct ki_mark mark = {.holder = {.worker = worker}};

    return ki_positions_note(p, &mark, has_blocks);
}

static void blocks_are_not_lost_sight_of(void **state)
{
    struct ki_positions p = {0};
    struct ki_mark mark;
    bool has_blocks;

    (void)state;
    assert_true(note(&p, 1, true));
    for (uint64_t i = 2; i <= KI_MAX_POSITIONS; i++)
        assert_true(note(&p, i, false));
    /* The oldest has blocks; the next ones haven't. */
    assert_true(note(&p, KI_MAX_POSITIONS + 1, false));
    assert_null(ki_positions_next(&p, 2, NULL));
    assert_true(note(&p, KI_MAX_POSITIONS + 2, true));
    assert_null(ki_positions_next(&p, 3, NULL));
    assert_non_null(ki_positions_next(&p, 1, NULL));
    assert_int_equal(p.n, KI_MAX_POSITIONS);
    /* All have blocks: a further one is refused, but not news of a known one. */
    for (uint64_t i = 4; i <= KI_MAX_POSITIONS + 2; i++)
        assert_true(note(&p, i, true));
    assert_false(note(&p, 2, true));
    assert_false(note(&p, 2, false));
    assert_true(note(&p, 1, true));
    ki_positions_blocks_left(&p, 7, NULL);
    assert_true(note(&p, 2, true));
    assert_null(ki_positions_next(&p, 7, NULL));
    assert_true(ki_positions_take(&p, (struct kv_holder){.worker = 2}, &mark, &has_blocks));
    assert_true(has_blocks);
    ki_positions_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_not_lost_sight_of),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
