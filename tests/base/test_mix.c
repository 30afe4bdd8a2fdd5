// SPDX-License-Identifier: Apache-2.0
/*
 * kv_mix: whatever 20,000 keys somebody chooses, with whatever secret is drawn, none of 1024 cells
 * gets many more than by chance, by whichever ten bits.
 */
#include "base/core/mix.h"

#include "unit.h"

#define KEYS 20000u
#define CELLS 1024u
#define MOST 64u /* by chance: 20 on average, 37 in the fullest cell; 64 once in 10^12 cells */

/* The inverse of (x ^ x >> 32) * factor, a good hash that has no secret. */
static uint64_t undo(uint64_t x)
{
    const uint64_t factor = UINT64_C(0xd6e8feb86659fd93);
    uint64_t inverse = factor;

    for (int i = 0; i < 6; i++)
        inverse *= 2 - factor * inverse;
    x *= inverse;
    return x ^ x >> 32;
}

static uint64_t sequence(uint64_t i)
{
    return i;
}

static uint64_t high_half(uint64_t i)
{
    return i << 32;
}

static uint64_t highest_bits(uint64_t i)
{
    return i << 49;
}

static uint64_t far_apart(uint64_t i)
{
    return ~i << 16;
}

static uint64_t both_ends(uint64_t i)
{
    return (i & 127) << 57 | i >> 7;
}

static uint64_t golden(uint64_t i)
{
    return i * UINT64_C(0xd6e8feb86659fd93);
}

/* Keys that a known hash puts into one cell of most tables. */
static uint64_t chosen(uint64_t i)
{
    uint64_t x = i << 40 | UINT64_C(1) << 20;

    return undo(undo(x ^ x >> 32));
}

static size_t fullest(uint64_t (*key)(uint64_t i), int shift)
{
    unsigned cells[CELLS] = {0}, most = 0;

    for (uint64_t i = 0; i < KEYS; i++) {
        unsigned *cell = &cells[kv_mix(key(i)) >> shift & (CELLS - 1)];

        *cell += 1;
        most = *cell > most ? *cell : most;
    }
    return most;
}

static void test_chosen_keys(void **state)
{
    static uint64_t (*const keys[])(uint64_t) = {sequence,  high_half, highest_bits, far_apart,
                                                 both_ends, golden,    chosen};
    static const int shifts[] = {0, 22, 32, 54}; /* bits that tables use */
    uint64_t random = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(40); round++) {
        kv_mix_secret = (struct kv_mix_secret){unit_random(&random), unit_random(&random) | 1};
        for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++)
            for (size_t s = 0; s < sizeof(shifts) / sizeof(shifts[0]); s++)
                assert_in_range(fullest(keys[k], shifts[s]), 1, MOST);
    }
}

extern struct kv_mix_secret drawn_secret;

static void test_other_secret(void **state)
{
    struct kv_mix_secret one;

    (void)state;
    assert_int_equal(drawn_secret.factor & 1, 1);
    assert_int_not_equal(drawn_secret.factor, 1);
    assert_int_not_equal(drawn_secret.flip, 0);
    assert_int_not_equal(drawn_secret.flip, drawn_secret.factor);
    assert_int_not_equal(kv_secret(), kv_secret());
    assert_int_equal(kv_secret() & 1, 1);
    for (uint64_t i = 0; i < 64; i++) {
        uint64_t mixed;

        one = kv_mix_secret = (struct kv_mix_secret){kv_secret(), kv_secret()};
        mixed = kv_mix(i);
        assert_int_equal(kv_mix(i), mixed);
        kv_mix_secret.flip = kv_secret();
        assert_int_not_equal(kv_mix(i), mixed);
        kv_mix_secret = (struct kv_mix_secret){one.flip, kv_secret()};
        assert_int_not_equal(kv_mix(i), mixed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_secret),
        cmocka_unit_test(test_chosen_keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
