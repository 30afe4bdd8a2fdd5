// SPDX-License-Identifier: Apache-2.0
/* Matches of holders whose lower tiers have chunks of several blocks. */
#include "base/unit.h"

#include "indexer/model/chunks.h"

static void expect(struct ki_chunks *c, uint64_t worker, const uint32_t reach[KV_N_TIERS],
                   const uint32_t wanted[KV_N_TIERS])
{
    struct kvi_match item = {.holder = {worker, 0}};
    struct kvi_matches matches = {.items = &item, .n = 1};

    memcpy(item.reach, reach, sizeof(item.reach));
    ki_chunks_cut(c, &matches);
    assert_int_equal(matches.n, wanted[KV_N_TIERS - 1] > 0);
    for (int t = 0; matches.n && t < KV_N_TIERS; t++)
        assert_int_equal(item.reach[t], wanted[t]);
}
#define R(...)                   \
    (const uint32_t[KV_N_TIERS]) \
    {                            \
        __VA_ARGS__              \
    }

static void test_cut(void **state)
{
    struct ki_chunks c;

    (void)state;
    ki_chunks_init(&c);
    expect(&c, 1, R(1, 7, 7, 7), R(1, 7, 7, 7));
    assert_int_equal(ki_chunks_set(&c, (struct kv_holder){1, 0}, R(0, 4, 8, 1)), 0);
    expect(&c, 2, R(1, 7, 7, 7), R(1, 7, 7, 7));
    expect(&c, 1, R(0, 8, 8, 8), R(0, 8, 8, 8));
    expect(&c, 1, R(0, 7, 7, 7), R(0, 4, 4, 4));
    expect(&c, 1, R(0, 3, 3, 3), R(0, 0, 0, 0)); /* nothing is left */
    expect(&c, 1, R(6, 7, 7, 7), R(6, 6, 6, 6)); /* the device's own blocks stay */
    expect(&c, 1, R(6, 9, 9, 9), R(6, 8, 8, 8));
    expect(&c, 1, R(0, 7, 18, 18), R(0, 4, 16, 16));
    expect(&c, 1, R(0, 7, 7, 9), R(0, 4, 4, 9));
    ki_chunks_fini(&c);
}

/* Set and reset in any order, beside a plain array. */
static void test_set(void **state)
{
    uint32_t model[8][2] = {{0}};
    struct ki_chunks c;

    (void)state;
    ki_chunks_init(&c);
    for (uint32_t i = 0; i < 500; i++) {
        uint32_t worker = i * 7 % 8, rank = i * 5 % 3 % 2, size = i * 11 % 5;

        assert_int_equal(ki_chunks_set(&c, (struct kv_holder){worker, rank}, R(0, size, 0, 0)), 0);
        model[worker][rank] = size;
        for (uint32_t k = 0; k < 16; k++) {
            struct kvi_match item = {.holder = {k / 2, k % 2}, .reach = {0, 7, 7, 7}};
            struct kvi_matches matches = {.items = &item, .n = 1};
            uint32_t of = model[k / 2][k % 2];

            ki_chunks_cut(&c, &matches);
            assert_int_equal(item.reach[1], of > 1 ? 7 - 7 % of : 7);
        }
    }
    ki_chunks_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_set),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
