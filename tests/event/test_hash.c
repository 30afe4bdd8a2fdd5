// SPDX-License-Identifier: Apache-2.0
/* Block hashing against published values and against a plain definition. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "kv_event.h"

static uint64_t seed_of(const char *lora, const char *salt)
{
    return kve_seed(lora, lora ? strlen(lora) : 0, salt, salt ? strlen(salt) : 0);
}

static void test_seeds(void **state)
{
    (void)state;
    assert_int_equal(XXH3_64bits_withSeed("test data", 9, KVE_SEED),
                     UINT64_C(13226331709069118873));
    assert_int_equal(seed_of(NULL, NULL), 1337);
    assert_int_equal(seed_of("", ""), 1337);
    assert_int_equal(seed_of("adapter-a", NULL), UINT64_C(8842669519798868182));
    assert_int_equal(seed_of(NULL, "tenant-a"), UINT64_C(1948188790972764086));
    assert_int_equal(seed_of("adapter-a", "tenant-a"), UINT64_C(10790858310771630931));
    assert_int_equal(seed_of("adapter-a", ""), seed_of("adapter-a", NULL));
    assert_int_not_equal(seed_of("x", NULL), seed_of(NULL, "x"));
    assert_int_not_equal(seed_of("a", NULL), seed_of("b", NULL));
}

static void test_blocks(void **state)
{
    static const uint32_t tokens[] = {0, 1, 2, 3};
    uint64_t mm = 42, hash;

    (void)state;
    assert_int_equal(kve_hash_block(1337, tokens, 4, NULL, 0), UINT64_C(9143094415614847814));
    assert_int_equal(kve_hash_block(seed_of("adapter-a", NULL), tokens, 4, NULL, 0),
                     UINT64_C(6665157333201000639));
    assert_int_equal(kve_hash_block(seed_of(NULL, "tenant-a"), tokens, 4, NULL, 0),
                     UINT64_C(17009624042690211646));
    assert_int_equal(kve_hash_block(seed_of("adapter-a", "tenant-a"), tokens, 4, NULL, 0),
                     UINT64_C(8269515957840517240));
    assert_int_equal(kve_hash_block(1337, tokens, 4, &mm, 1), UINT64_C(18280081842874931122));
    assert_int_equal(kve_hash_tokens(1337, tokens, 4, 4, false, &hash), 1);
    assert_int_equal(hash, UINT64_C(9143094415614847814));
}

static void test_prompts(void **state)
{
    uint32_t tokens[512];
    uint64_t local[2], sequence[3];

    (void)state;
    for (uint32_t i = 0; i < 32; i++)
        tokens[i] = i + 1;
    assert_int_equal(kve_hash_tokens(1337, tokens, 32, 16, false, local), 2);
    assert_int_equal(local[0], UINT64_C(16863443419780771464));
    assert_int_equal(local[1], UINT64_C(2287610619914608821));
    kve_sequence_hashes(local, 2, sequence);
    assert_int_equal(sequence[0], local[0]);
    assert_int_equal(sequence[1], UINT64_C(12466389667045779788));

    for (uint32_t i = 0; i < 512; i++)
        tokens[i] = 7;
    assert_int_equal(kve_hash_tokens(1337, tokens, 512, 512, false, local), 1);
    assert_int_equal(local[0], UINT64_C(10964166776106543217));

    kve_sequence_hashes((uint64_t[]){11, 22, 33}, 3, sequence);
    assert_int_equal(sequence[1], UINT64_C(750553365844651409));
    assert_int_equal(sequence[2], UINT64_C(3257565445809651757));
}

static void test_eagle(void **state)
{
    static const uint32_t tokens[] = {10, 11, 12, 13, 14};
    uint64_t local[2];

    (void)state;
    assert_int_equal(kve_hash_tokens(1337, tokens, 5, 2, true, local), 2);
    assert_int_equal(local[0], UINT64_C(5959138341449004422));
    assert_int_equal(local[1], UINT64_C(13917772031453556700));
    assert_int_equal(kve_hash_tokens(1337, tokens, 4, 2, true, local), 1);
    assert_int_equal(kve_hash_tokens(1337, tokens, 2, 2, true, local), 0);
}

/* How many blocks: the partial one at the end isn't one. */
static void test_counts(void **state)
{
    static const uint32_t sizes[] = {1, 11, 32, 64};
    uint32_t tokens[200] = {0};
    uint64_t local[200];

    (void)state;
    assert_int_equal(kve_hash_tokens(1337, tokens, 200, 0, false, local), 0);
    assert_int_equal(kve_hash_tokens(1337, NULL, 0, 16, false, local), 0);
    for (size_t s = 0; s < 4; s++) {
        for (size_t n = 0; n <= 200; n++)
            assert_int_equal(kve_hash_tokens(1337, tokens, n, sizes[s], false, local),
                             n / sizes[s]);
    }
    assert_int_equal(kve_hash_tokens(1337, tokens, 200, UINT32_MAX, true, local), 0);
}

/* The definition, with a copy of every block. */
static uint64_t plain_hash(uint64_t seed, const uint32_t *tokens, size_t n)
{
    uint8_t bytes[4 * 600];

    for (size_t i = 0; i < n; i++) {
        for (unsigned b = 0; b < 4; b++)
            bytes[4 * i + b] = (uint8_t)(tokens[i] >> (8 * b));
    }
    return XXH3_64bits_withSeed(bytes, 4 * n, seed);
}

/* Every path (short, constant, long, windows that overlap) is the same function. */
static void test_every_block_size(void **state)
{
    static const uint64_t seeds[] = {0, 1337, UINT64_C(0xfedcba9876543210), UINT64_MAX};
    uint32_t tokens[1200];
    uint64_t local[1200];
    uint64_t random = 88172645463325252u;

    (void)state;
    for (size_t i = 0; i < 1200; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        tokens[i] = (uint32_t)random;
    }
    for (uint32_t size = 1; size <= 530; size++) {
        for (unsigned eagle = 0; eagle < 2; eagle++) {
            uint64_t seed = seeds[size % 4];
            size_t n = kve_hash_tokens(seed, tokens, 1200, size, eagle, local);

            assert_int_equal(n, (1200 - eagle) / size);
            for (size_t i = 0; i < n; i++)
                assert_int_equal(local[i], plain_hash(seed, tokens + i * size, size + eagle));
        }
    }
}

static int compare(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return (x > y) - (x < y);
}

/* Identities are hashed in ascending order however many there are, equal ones each time. */
static void test_many_identities(void **state)
{
    static const size_t counts[] = {1, 2, 63, 64, 65, 129, 500};
    uint32_t tokens[16] = {1, 2, 3};
    uint64_t mm[500];
    uint8_t bytes[64 + 8 * 500];
    uint64_t random = 12345;

    (void)state;
    for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        size_t n = counts[c];

        for (size_t i = 0; i < n; i++) {
            random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
            mm[i] = i % 5 == 4 ? mm[i / 2] : random;
        }
        uint64_t hash = kve_hash_block(1337, tokens, 16, mm, n);

        memcpy(bytes, tokens, 64);
        memcpy(bytes + 64, mm, 8 * n);
        qsort(bytes + 64, n, 8, compare);
        assert_int_equal(hash, XXH3_64bits_withSeed(bytes, 64 + 8 * n, 1337));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds),           cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_prompts),         cmocka_unit_test(test_eagle),
        cmocka_unit_test(test_counts),          cmocka_unit_test(test_every_block_size),
        cmocka_unit_test(test_many_identities),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
