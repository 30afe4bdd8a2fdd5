// SPDX-License-Identifier: Apache-2.0
/* Cuts of llama.cpp states: a grown state shares all possible chunks, and other bytes do no
 * harm. */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include "cutting.h"
#include "llama_state.h"
#include "skip.h"

/* A small model's shape: 2 KiB of K and V per token and layer are what 8B models have. */
static const struct llama_state model = {
    .version = 3, .n_tokens = 2000, .n_layers = 4, .k_row = 512, .v_row = 512, .seed = 1};

static const struct kvs_save_opts small = {.size = sizeof(small), .chunk_tokens = 64};

static void cut_state(const struct llama_state *s, const struct kvs_save_opts *opts,
                      struct cutting *ret, size_t *ret_len)
{
    struct kv_buf b;

    llama_state_make(s, &b);
    assert_int_equal(b.error, 0);
    assert_true(cut_all((const uint8_t *)b.data, b.len, opts, NULL, ret));
    *ret_len = b.len;
    kv_buf_fini(&b);
}

/* Percent of @b that isn't in @a. */
static double written(const struct llama_state *a, const struct llama_state *b,
                      const struct kvs_save_opts *opts)
{
    struct cutting before, after;
    size_t len, bytes;

    cut_state(a, opts, &before, &len);
    cut_state(b, opts, &after, &len);
    bytes = new_bytes(&before, &after);
    cutting_drop(&before);
    cutting_drop(&after);
    return 100.0 * (double)bytes / (double)len;
}

static double written_grown(struct llama_state s, uint32_t tokens, const struct kvs_save_opts *opts)
{
    struct llama_state grown = s;
    double percent;

    grown.n_tokens += tokens;
    percent = written(&s, &grown, opts);
    print_message("%u + %u tokens%s%s: %.2f %% written\n", s.n_tokens, tokens,
                  s.v_trans ? ", V transposed" : "", s.second ? ", two caches" : "", percent);
    return percent;
}

/* The promise: 1 % more tokens write 5 % at most, where a range is a small part of the state. */
static void test_growth(void **state)
{
    struct llama_state s = model;
    (void)state;

#if defined(__SANITIZE_THREAD__)
    skip_because("one thread's work, at ten times the address sanitizer's price: asan has run it");
#endif
    for (uint32_t n = 1980; n < 2044; n += 21) { /* before, in and behind a range's end */
        s.n_tokens = n;
        s.k_row = s.v_row = 512;
        s.v_trans = false;
        assert_true(written_grown(s, n / 100, &small) <= 5);
        assert_true(written_grown(s, 100, &small) <= 9);
        s.v_trans = true;
        assert_true(written_grown(s, n / 100, &small) <= 5);
        s.v_trans = false;
        s.k_row = s.v_row = 34 * 16; /* q8_0: blocks of 34 bytes */
        assert_true(written_grown(s, n / 100, &small) <= 5);
        s.k_row = 18 * 32; /* K and V of different types */
        assert_true(written_grown(s, n / 100, &small) <= 5);
        s.v_row = 0; /* MLA: no V */
        assert_true(written_grown(s, n / 100, &small) <= 5);
    }
}

static void test_shapes(void **state)
{
    struct llama_state s = model;
    (void)state;

    s.version = 2;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.ext = true;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.streams = 4;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.second = 512; /* a sliding window: the second cache stays as it is */
    assert_true(written_grown(s, 20, &small) <= 5);
    s.v_trans = true;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.n_layers = 1;
    s.k_row = s.v_row = 8; /* tiny rows: more tokens to a chunk than asked for */
    written_grown(s, 20, &small);
}

/* A raw state has no magic number: it has to be told. */
static void test_raw(void **state)
{
    struct kvs_save_opts told = small;
    struct llama_state s = model, grown;
    struct cutting cut;
    size_t len;
    (void)state;

    s.version = 0;
    told.format = KVS_FORMAT_LLAMA;
    assert_true(written_grown(s, 20, &told) <= 5);
    cut_state(&s, &small, &cut, &len);
    assert_int_equal(cut.format, KVS_FORMAT_BYTES);
    cutting_drop(&cut);
    grown = model;
    cut_state(&grown, &small, &cut, &len);
    assert_int_equal(cut.format, KVS_FORMAT_LLAMA);
    cutting_drop(&cut);
}

/* The same prompt in another slot: only what names the slot is written. */
static void test_slot(void **state)
{
    struct llama_state other = model;
    (void)state;

    other.slot = 3;
    assert_true(written(&model, &other, &small) <= 1);
    assert_true(written(&model, &other, &small) > 0);
    other.seed = 1000;
    assert_true(written(&model, &other, &small) > 99); /* the measure can fail */
}

/* A conversation that branches: what was before the branch is shared. */
static void test_truncated_conversation(void **state)
{
    struct llama_state shorter = model;
    (void)state;

    shorter.n_tokens = 1000;
    assert_true(written(&model, &shorter, &small) <= 8);
}

static void test_chunk_sizes(void **state)
{
    struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 4096};
    struct llama_state s = model;
    struct cutting cut;
    size_t len;
    (void)state;

    cut_state(&s, &opts, &cut, &len); /* 256 * 512 bytes don't fit: fewer tokens to a chunk */
    assert_true(cut.longest <= 4 * 4096);
    assert_int_equal(cut.format, KVS_FORMAT_LLAMA);
    cutting_drop(&cut);
    assert_true(written_grown(s, 20, &opts) <= 5);
    s.v_trans = true;
    assert_true(written_grown(s, 20, &opts) <= 5);
}

/* However large the state: the window, and of what is in it only what a decision needs. */
static void test_memory(void **state)
{
    struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 64 << 10, .chunk_tokens = 64};
    struct llama_state s = model;
    struct cutting cut;
    size_t len;
    (void)state;

    s.n_tokens = 8000;
    cut_state(&s, &opts, &cut, &len);
    assert_true(len > 30u << 20);
    assert_true(cut.window <= 8u * (64 << 10));
    cutting_drop(&cut);
}

/* Cut short anywhere, and with any bytes changed: the object all the same, memory bounded. */
static void test_hostile(void **state)
{
    struct rng rng = {test_seed()};
    struct llama_state s = {.version = 3, .n_tokens = 300, .n_layers = 3, .k_row = 64, .v_row = 64};
    (void)state;

    for (long i = test_rounds(600); i > 0; i--) {
        struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 4096, .chunk_tokens = 16};
        struct cutting cut;
        struct kv_buf b;

        s.v_trans = rng_below(&rng, 2);
        s.ext = rng_below(&rng, 2);
        s.second = rng_below(&rng, 2) ? 50 : 0;
        s.version = rng_below(&rng, 3) ? 3 : 0;
        opts.format = s.version ? KVS_FORMAT_AUTO : KVS_FORMAT_LLAMA;
        llama_state_make(&s, &b);
        for (uint32_t n = rng_below(&rng, 4); n > 0; n--) {
            static const uint32_t values[] = {0, 1, 2, 255, 256, 1u << 20, UINT32_MAX, 1u << 31};
            uint32_t at = rng_below(&rng, rng_below(&rng, 2) ? 64 : (uint32_t)b.len - 4) & ~3u;

            memcpy(b.data + at, &values[rng_below(&rng, KV_COUNT(values))], 4);
        }
        if (rng_below(&rng, 2))
            b.len = rng_below(&rng, (uint32_t)b.len + 1);
        if (!cut_all((const uint8_t *)b.data, b.len, &opts, &rng, &cut))
            fail_msg("not the object again; seed %lu", (unsigned long)test_seed());
        assert_true(cut.window <= 2u * KVS_WEAVE_MAX + (21u << 20));
        cutting_drop(&cut);
        kv_buf_fini(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_raw),
        cmocka_unit_test(test_slot),
        cmocka_unit_test(test_truncated_conversation),
        cmocka_unit_test(test_chunk_sizes),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_hostile),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
