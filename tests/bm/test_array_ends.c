// SPDX-License-Identifier: Apache-2.0
/* Hash functions read callers' tokens to their end and no further, and write no hash too many: arrays
 * here end where no memory is. Numbers of tokens are no multiples of the block size. */
#include "base/core/error.h"
#include "guarded.h"
#include "kv_hash.h"
#include "kvbm_tokens.h"

#define MOST 600u

static uint32_t all[MOST];
static struct guarded tokens, hashes, chained, names;

static const uint32_t sizes[] = {1,  2,  3,  4,  7,  8,  15, 16,  17,  30,
                                 31, 32, 33, 59, 60, 61, 64, 100, 128, 130};

static void test_local_hashes(void **state)
{
    static const uint32_t lookaheads[] = {0, 1, 2, 16, 31};

    (void)state;
    for (size_t s = 0; s < KV_COUNT(sizes); s++)
        for (size_t l = 0; l < KV_COUNT(lookaheads); l++)
            for (uint32_t n = 0;
                 n <= 4 * sizes[s] + lookaheads[l] && n<MOST; n += n % sizes[s]> 2 && sizes[s] > 8
                     ? sizes[s] - 4
                     : 1) {
                const uint32_t size = sizes[s], ahead = lookaheads[l];
                const uint32_t *at = guard(&tokens, all, n * sizeof(*at));
                uint64_t *ret = guard(&hashes, NULL, n / size * sizeof(*ret));
                size_t got = kve_hash_tokens(7, at, n, size, ahead, ret);

                assert_int_equal(got, n < ahead ? 0 : (n - ahead) / size);
                for (size_t i = 0; i < got; i++)
                    assert_true(ret[i] == kve_hash_block(7, all + i * size, size + ahead, NULL, 0));
            }
}

static void test_one_block(void **state)
{
    static const uint64_t objects[] = {5, 4, 3, 2, 1};

    (void)state;
    for (uint32_t n = 0; n < 260; n++) {
        const uint32_t *at = guard(&tokens, all, n * sizeof(*at));
        const uint64_t *mm = guard(&names, objects, n % 6 * sizeof(*mm));
        struct kvbm_mm_run run = {.hash = 9, .start = 2, .n = n}; /* to behind the block's end */

        assert_true(kve_hash_block(7, at, n, mm, n % 6) ==
                    kve_hash_block(7, all, n, objects, n % 6));
        assert_true(kvbm_block_hash(7, at, n) == kvbm_block_hash(7, all, n));
        assert_true(kvbm_block_hash_mm(7, at, n, 1, &run, 1) ==
                    kvbm_block_hash_mm(7, all, n, 1, &run, 1));
    }
}

static void test_sequence_hashes(void **state)
{
    (void)state;
    for (size_t s = 0; s < KV_COUNT(sizes); s++)
        for (uint32_t n = 0; n <= 3 * sizes[s] + 1; n++) {
            const uint32_t *at = guard(&tokens, all, n * sizeof(*at));
            size_t n_blocks = n / sizes[s];
            uint64_t *blocks = guard(&hashes, NULL, n_blocks * sizeof(*blocks));
            uint64_t *sequence = guard(&chained, NULL, n_blocks * sizeof(*sequence));
            const uint64_t *parent = guard(&names, &(uint64_t){3}, sizeof(*parent));

            assert_int_equal(kvbm_hash_tokens(at, n, sizes[s], 7, KVBM_CHAIN_SEED_SALT, parent,
                                              blocks, sequence),
                             n_blocks);
            kve_sequence_hashes(blocks, n_blocks, blocks); /* in place */
        }
}

static void test_sequences(void **state)
{
    const struct kvbm_sequence_opts opts = {.size = sizeof(opts), .block_size = 16};
    struct kvbm_sequence *sequence;

    (void)state;
    assert_int_equal(kvbm_sequence_create(&opts, &sequence), 0);
    for (uint32_t n = 0; n < 70; n++) {
        const uint32_t *at = guard(&tokens, all, n * sizeof(*at));

        assert_true(kvbm_sequence_extend(sequence, at, n) >= 0);
        assert_memory_equal(kvbm_sequence_tokens(sequence, kvbm_sequence_len(sequence) - n, n), all,
                            n * sizeof(*at));
    }
    kvbm_sequence_destroy(sequence);
}

static int fill(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < MOST; i++)
        all[i] = i * 2654435761u;
    return 0;
}

static int end(void **state)
{
    (void)state;
    unguard(&tokens);
    unguard(&hashes);
    unguard(&chained);
    unguard(&names);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_local_hashes),
        cmocka_unit_test(test_one_block),
        cmocka_unit_test(test_sequence_hashes),
        cmocka_unit_test(test_sequences),
    };

    return cmocka_run_group_tests(tests, fill, end);
}
