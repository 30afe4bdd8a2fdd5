// SPDX-License-Identifier: Apache-2.0
#include "base/hash/hash.h"

#include "base/unit.h"

/* Any length, at any alignment, at once and in pieces: what the header computes for a plain machine. */
static void like_the_plain_one(void **state)
{
    static uint8_t data[70000];
    uint64_t rng = unit_seed();
    (void)state;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)unit_random(&rng);
    for (size_t i = 0; i < unit_rounds(20000); i++) {
        size_t len = i < 2000 ? i : unit_below(&rng, sizeof(data) - 64), at = unit_below(&rng, 64);
        size_t cut = len ? unit_below(&rng, len) : 0;
        uint8_t hash[16], by_and_by[16];
        XXH128_canonical_t want;
        XXH3_state_t stream;

        XXH128_canonicalFromHash(&want, XXH3_128bits(data + at, len));
        kv_hash(data + at, len, hash);
        assert_memory_equal(hash, want.digest, 16);
        XXH3_INITSTATE(&stream);
        XXH3_128bits_reset(&stream);
        kv_hash_update(&stream, data + at, cut);
        kv_hash_update(&stream, data + at + cut, len - cut);
        kv_hash_done(&stream, by_and_by);
        assert_memory_equal(by_and_by, want.digest, 16);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(like_the_plain_one)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
