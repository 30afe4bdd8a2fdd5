// SPDX-License-Identifier: Apache-2.0
/* Token hashes: values that other programs compute, and formulas computed byte by byte. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/xxh.h"
#include "base/unit.h"
#include "index/random.h"
#include "kvbm_tokens.h"

#define SALT_1337 1337

static void assert_hash(uint64_t got, uint64_t want)
{
    if (got != want)
        fail_msg("%llu is not %llu", (unsigned long long)got, (unsigned long long)want);
}

/* ---- what a token and a chain are ---- */

/* Tokens 1 to 12 in blocks of 4. */
static const struct {
    uint64_t salt_hash;
    uint64_t block[3], salted_chain[3], chain[3];
} vectors[] = {
    {SALT_1337,
     {UINT64_C(14643705804678351452), UINT64_C(16777012769546811212), UINT64_C(483935686894639516)},
     {UINT64_C(14643705804678351452), UINT64_C(4945711292740353085),
      UINT64_C(12583592247330656132)},
     {UINT64_C(14643705804678351452), UINT64_C(13257339816715102022),
      UINT64_C(18362646011897812054)}},
    {0,
     {UINT64_C(8052976908588476977), UINT64_C(13852901005659965728),
      UINT64_C(12087364272738490135)},
     {UINT64_C(8052976908588476977), UINT64_C(4185132130981121146), UINT64_C(9410009423372290283)},
     {UINT64_C(8052976908588476977), UINT64_C(4185132130981121146), UINT64_C(9410009423372290283)}},
};

static void test_vectors(void **state)
{
    static const uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    (void)state;

    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
        for (int salted = 0; salted < 2; salted++) {
            enum kvbm_chain_seed seed = salted ? KVBM_CHAIN_SEED_SALT : KVBM_CHAIN_SEED_ZERO;
            const uint64_t *chain = salted ? vectors[i].salted_chain : vectors[i].chain;
            uint64_t block[3], sequence[3], salt = vectors[i].salt_hash;

            assert_int_equal(kvbm_hash_tokens(tokens, 12, 4, salt, seed, NULL, block, sequence), 3);
            for (int b = 0; b < 3; b++) {
                assert_hash(block[b], vectors[i].block[b]);
                assert_hash(sequence[b], chain[b]);
                assert_hash(kvbm_block_hash(salt, tokens + (ptrdiff_t)4 * b, 4),
                            vectors[i].block[b]);
                assert_hash(kvbm_sequence_hash(b ? &chain[b - 1] : NULL, block[b], salt, seed),
                            chain[b]);
            }
        }
    }
}

static void test_salt_hash(void **state)
{
    (void)state;
    assert_hash(kvbm_salt_hash("", 0), UINT64_C(3244421341483603138));
    assert_hash(kvbm_salt_hash(NULL, 0), UINT64_C(3244421341483603138));
    assert_hash(kvbm_salt_hash("{}", 2), UINT64_C(1389868326933519382));
}

/* The formulas once more, over bytes that are put together one by one. */
static uint64_t naive_block_hash(uint64_t salt_hash, const uint32_t *tokens, size_t n)
{
    uint8_t bytes[4096];

    for (size_t i = 0; i < n; i++) {
        for (int b = 0; b < 4; b++)
            bytes[i * 4 + (size_t)b] = (uint8_t)(tokens[i] >> 8 * b);
    }
    return kv_xxh64(bytes, n * 4, salt_hash);
}

static uint64_t naive_chain(uint64_t parent, uint64_t block_hash, uint64_t seed)
{
    uint8_t bytes[16];

    for (int b = 0; b < 8; b++) {
        bytes[b] = (uint8_t)(parent >> 8 * b);
        bytes[8 + b] = (uint8_t)(block_hash >> 8 * b);
    }
    return kv_xxh64(bytes, 16, seed);
}

/* Any length, block size, salt, seed and parent. */
static void test_formulas(void **state)
{
    struct rng rng = {test_seed()};
    uint32_t tokens[600];
    uint64_t block[600], sequence[600];
    (void)state;

    for (long round = test_rounds(2000); round > 0; round--) {
        size_t n = rng_below(&rng, 600), want;
        uint32_t size = 1u << rng_below(&rng, 10);
        uint64_t salt = rng_below(&rng, 3) ? rng_next(&rng) : 0, above = rng_next(&rng);
        bool has_parent = rng_below(&rng, 2), salted = rng_below(&rng, 2), first = !has_parent;
        uint64_t parent = above;

        for (size_t i = 0; i < n; i++)
            tokens[i] = (uint32_t)rng_next(&rng);
        want = n / size;
        assert_int_equal(kvbm_hash_tokens(tokens, n, size, salt,
                                          salted ? KVBM_CHAIN_SEED_SALT : KVBM_CHAIN_SEED_ZERO,
                                          has_parent ? &parent : NULL,
                                          rng_below(&rng, 8) ? block : NULL, NULL),
                         want);
        assert_int_equal(kvbm_hash_tokens(tokens, n, size, salt,
                                          salted ? KVBM_CHAIN_SEED_SALT : KVBM_CHAIN_SEED_ZERO,
                                          has_parent ? &parent : NULL, NULL, sequence),
                         want);
        for (size_t b = 0; b < want; b++, first = false) {
            uint64_t hash = naive_block_hash(salt, tokens + b * size, size);

            above = first ? hash : naive_chain(above, hash, salted ? salt : 0);
            assert_hash(kvbm_block_hash(salt, tokens + b * size, size), hash);
            assert_hash(sequence[b], above);
        }
    }
}

static void test_no_full_block(void **state)
{
    static const uint32_t tokens[] = {1, 2, 3};
    uint64_t untouched = 77;
    (void)state;

    assert_int_equal(
        kvbm_hash_tokens(tokens, 3, 4, 0, KVBM_CHAIN_SEED_ZERO, NULL, &untouched, &untouched), 0);
    assert_int_equal(
        kvbm_hash_tokens(tokens, 3, 0, 0, KVBM_CHAIN_SEED_ZERO, NULL, &untouched, &untouched), 0);
    assert_int_equal(
        kvbm_hash_tokens(NULL, 0, 4, 0, KVBM_CHAIN_SEED_ZERO, NULL, &untouched, &untouched), 0);
    assert_int_equal(untouched, 77);
}

/* ---- salts as JSON ---- */

static uint64_t json_hash(const char *salt, const char *lora_name)
{
    uint64_t hash = 0;

    assert_int_equal(kvbm_salt_hash_json(salt, lora_name, &hash), 0);
    return hash;
}

static void test_json_vectors(void **state)
{
    (void)state;
    assert_hash(json_hash(NULL, NULL), UINT64_C(1389868326933519382));
    assert_hash(json_hash("", ""), UINT64_C(1389868326933519382));
    assert_hash(json_hash("a", NULL), UINT64_C(2170084917736942820));
    assert_hash(json_hash("a", ""), UINT64_C(2170084917736942820));
    assert_hash(json_hash(NULL, "my-lora"), UINT64_C(1285481999185759667));
    assert_hash(json_hash("a", "my-lora"), UINT64_C(4001330873901057181));
}

static void assert_json(const char *salt, const char *text)
{
    assert_hash(json_hash(salt, NULL), kvbm_salt_hash(text, strlen(text)));
}

/* Escapes are part of the hash: \b and \f are short, DEL and characters beyond ASCII stay. */
static void test_json_escapes(void **state)
{
    (void)state;
    assert_json("a\"b\\c/d", "{\"salt\":\"a\\\"b\\\\c/d\"}");
    assert_json("\b\f\n\r\t", "{\"salt\":\"\\b\\f\\n\\r\\t\"}");
    assert_json("\x01\x0b\x1f\x7f", "{\"salt\":\"\\u0001\\u000b\\u001f\x7f\"}");
    assert_json("\xC3\xA9\xE2\x80\xA8\xF0\x9F\x98\x80",
                "{\"salt\":\"\xC3\xA9\xE2\x80\xA8\xF0\x9F\x98\x80\"}");
}

static void test_json_refuses(void **state)
{
    static const char *const bad[] = {"\xFF",     "a\x80",        "\xC3",
                                      "\xE2\x80", "\xED\xA0\x80", "\xC0\x80"};
    uint64_t hash = 77;
    (void)state;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(kvbm_salt_hash_json(bad[i], NULL, &hash), -EINVAL);
        assert_int_equal(kvbm_salt_hash_json(NULL, bad[i], &hash), -EINVAL);
    }
    assert_int_equal(kvbm_salt_hash_json("a", NULL, NULL), -EINVAL);
    assert_int_equal(hash, 77);
}

/* ---- positional ---- */

static void assert_positional(uint64_t sequence, uint64_t block, uint64_t position, uint64_t high,
                              uint64_t low)
{
    struct kvbm_hash128 got;

    assert_int_equal(kvbm_positional_hash(sequence, block, position, &got), 0);
    assert_hash(got.high, high);
    assert_hash(got.low, low);
}

static void test_positional_vectors(void **state)
{
    const uint64_t *block = vectors[0].block, *chain = vectors[0].chain;
    (void)state;

    assert_positional(chain[0], block[0], 0, UINT64_C(0x0038e4d7fb2dca5c),
                      UINT64_C(0xcb38e4d7fb2dca5c));
    assert_positional(chain[1], block[1], 1, UINT64_C(0x0053ec39b907b74c),
                      UINT64_C(0xb7fb8852a9f22746));
    assert_positional(chain[2], block[2], 2, UINT64_C(0x00b748f1777d599c),
                      UINT64_C(0xfed5394223699456));
    assert_positional(UINT64_C(0x1234567890ABCDEF), UINT64_C(0xFEDCBA9876543210), 100000,
                      UINT64_C(0x8061a81876543210), UINT64_C(0x1234567890abcdef));
}

/* The first and last position of each mode: mode, position and hash where they belong. */
static void test_positional_modes(void **state)
{
    static const struct {
        uint64_t first, last;
        unsigned mode, hash_bits;
    } modes[] = {{0, 0xFF, 0, 54},
                 {0x100, 0xFFFF, 1, 46},
                 {0x10000, 0xFFFFFF, 2, 38},
                 {0x1000000, 0x7FFFFFFF, 3, 31}};
    struct kvbm_hash128 got = {77, 77};
    (void)state;

    for (size_t i = 0; i < 4; i++) {
        uint64_t mode = (uint64_t)modes[i].mode << 62;
        uint64_t ones = (UINT64_C(1) << modes[i].hash_bits) - 1;

        for (int ends = 0; ends < 2; ends++) {
            uint64_t position = ends ? modes[i].last : modes[i].first;

            assert_positional(5, UINT64_MAX, position, mode | position << modes[i].hash_bits | ones,
                              5);
            assert_positional(5, 0, position, mode | position << modes[i].hash_bits, 5);
        }
    }
    assert_int_equal(kvbm_positional_hash(1, 2, UINT64_C(1) << 31, &got), -EINVAL);
    assert_int_equal(kvbm_positional_hash(1, 2, UINT64_MAX, &got), -EINVAL);
    assert_int_equal(kvbm_positional_hash(1, 2, 0, NULL), -EINVAL);
    assert_int_equal(got.high, 77);
}

/* ---- multimodal ---- */

static uint64_t naive_mm(uint64_t salt, const uint32_t *tokens, size_t n, uint64_t first,
                         const struct kvbm_mm_run *runs, size_t n_runs)
{
    uint8_t bytes[256 * 13] = {0};
    bool any = false;

    for (size_t i = 0; i < n; i++) {
        const struct kvbm_mm_run *in = NULL;
        uint8_t *to = bytes + 13 * i;
        uint64_t number = tokens[i], hash;

        for (size_t r = 0; r < n_runs; r++) {
            for (uint64_t k = 0; !in && k < runs[r].n && k < 2000; k++) {
                if (runs[r].start + k == first + i)
                    in = &runs[r];
            }
        }
        any = any || in;
        if (in)
            number = first + i - in->start;
        hash = in ? in->hash : 0;
        to[0] = in ? 1 : 0;
        for (int b = 0; b < 4; b++)
            to[1 + b] = (uint8_t)(number >> 8 * b);
        for (int b = 0; b < 8; b++)
            to[5 + b] = (uint8_t)(hash >> 8 * b);
    }
    return any ? kv_xxh64(bytes, n * 13, salt) : naive_block_hash(salt, tokens, n);
}

/* Frames written down by hand: a run that came in from the block before, text, and one that goes
 * on. */
static void test_mm_frames(void **state)
{
    static const uint32_t tokens[] = {7, 8, 9, 10};
    static const struct kvbm_mm_run runs[] = {{UINT64_C(0x1122334455667788), 2, 3},
                                              {UINT64_C(0xFFEEDDCCBBAA9988), 7, 100}};
    static const uint8_t frames[] = {
        1, 2, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, /* position 4 */
        0, 8, 0, 0, 0, 0,    0,    0,    0,    0,    0,    0,    0,    /* 5 */
        0, 9, 0, 0, 0, 0,    0,    0,    0,    0,    0,    0,    0,    /* 6 */
        1, 0, 0, 0, 0, 0x88, 0x99, 0xAA, 0xBB, 0xCC, 0xDD, 0xEE, 0xFF, /* 7 */
    };
    (void)state;

    assert_hash(kvbm_block_hash_mm(42, tokens, 4, 4, runs, 2),
                kv_xxh64(frames, sizeof(frames), 42));
    assert_hash(kvbm_block_hash_mm(42, tokens, 4, 0, runs + 1, 1), kvbm_block_hash(42, tokens, 4));
    assert_hash(kvbm_block_hash_mm(42, tokens, 4, 5, runs, 1), kvbm_block_hash(42, tokens, 4));
    assert_hash(kvbm_block_hash_mm(42, tokens, 4, 0, NULL, 0), kvbm_block_hash(42, tokens, 4));
}

/* A run of no tokens is in no block, and one that never ends is in all of them. */
static void test_mm_odd_runs(void **state)
{
    static const uint32_t tokens[] = {7, 8, 9, 10};
    static const struct kvbm_mm_run empty = {5, 2, 0};
    static const struct kvbm_mm_run endless = {5, 2, UINT64_MAX};
    static const struct kvbm_mm_run both[] = {{5, 0, 0}, {5, 1, 0}, {9, 1, 1}, {6, 3, 0}};
    (void)state;

    assert_hash(kvbm_block_hash_mm(1, tokens, 4, 0, &empty, 1), kvbm_block_hash(1, tokens, 4));
    assert_hash(kvbm_block_hash_mm(1, tokens, 4, 0, &endless, 1),
                naive_mm(1, tokens, 4, 0, &endless, 1));
    assert_hash(kvbm_block_hash_mm(1, tokens, 4, 100, &endless, 1),
                naive_mm(1, tokens, 4, 100, &endless, 1));
    assert_hash(kvbm_block_hash_mm(1, tokens, 4, 0, both, 4), naive_mm(1, tokens, 4, 0, both, 4));
}

static void test_mm_random(void **state)
{
    struct rng rng = {test_seed() + 1};
    uint32_t tokens[256];
    (void)state;

    for (long round = test_rounds(3000); round > 0; round--) {
        struct kvbm_mm_run runs[6];
        size_t n = 1 + rng_below(&rng, 256), n_runs = rng_below(&rng, 7);
        uint64_t first = rng_below(&rng, 3) * n, at = 0, salt = rng_next(&rng);

        for (size_t i = 0; i < n; i++)
            tokens[i] = rng_below(&rng, 50000);
        for (size_t r = 0; r < n_runs; r++) {
            at += rng_below(&rng, 200);
            runs[r] = (struct kvbm_mm_run){rng_next(&rng), at, rng_below(&rng, 120)};
            at += runs[r].n;
        }
        assert_hash(kvbm_block_hash_mm(salt, tokens, n, first, runs, n_runs),
                    naive_mm(salt, tokens, n, first, runs, n_runs));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),          cmocka_unit_test(test_salt_hash),
        cmocka_unit_test(test_formulas),         cmocka_unit_test(test_no_full_block),
        cmocka_unit_test(test_json_vectors),     cmocka_unit_test(test_json_escapes),
        cmocka_unit_test(test_json_refuses),     cmocka_unit_test(test_positional_vectors),
        cmocka_unit_test(test_positional_modes), cmocka_unit_test(test_mm_frames),
        cmocka_unit_test(test_mm_odd_runs),      cmocka_unit_test(test_mm_random),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
