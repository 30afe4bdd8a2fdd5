// SPDX-License-Identifier: Apache-2.0
/* Sequences: the effect of each call, and random sequences compared with an array that is hashed
 * anew each time. */
#include <errno.h>
#include <string.h>

#include "base/unit.h"
#include "index/random.h"
#include "kvbm_tokens.h"
#include "starve.h"

static struct kvbm_sequence *make(uint32_t block_size, size_t max_tokens)
{
    struct kvbm_sequence_opts opts = {.size = sizeof(opts),
                                      .block_size = block_size,
                                      .salt_hash = 1337,
                                      .max_tokens = max_tokens};
    struct kvbm_sequence *s = NULL;

    assert_int_equal(kvbm_sequence_create(&opts, &s), 0);
    return s;
}

static void test_options(void **state)
{
    static const uint32_t sizes[] = {0, 3, 5, 1000, 2048, UINT32_MAX};
    struct kvbm_sequence_opts opts = {.size = sizeof(opts), .block_size = 4};
    struct kvbm_sequence *s = NULL;
    (void)state;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        opts.block_size = sizes[i];
        assert_int_equal(kvbm_sequence_create(&opts, &s), -EINVAL);
    }
    opts.block_size = 4;
    opts.chain = (enum kvbm_chain_seed)2;
    assert_int_equal(kvbm_sequence_create(&opts, &s), -EINVAL);
    opts.chain = KVBM_CHAIN_SEED_ZERO;
    assert_int_equal(kvbm_sequence_create(NULL, &s), -EINVAL);
    assert_int_equal(kvbm_sequence_create(&opts, NULL), -EINVAL);
    opts.size = 0; /* a caller who has no field yet */
    assert_int_equal(kvbm_sequence_create(&opts, &s), -EINVAL);
    assert_null(s);
    opts.size = offsetof(struct kvbm_sequence_opts, salt_hash); /* nor these */
    opts.salt_hash = 99;
    opts.max_tokens = 1;
    assert_int_equal(kvbm_sequence_create(&opts, &s), 0);
    assert_int_equal(kvbm_sequence_extend(s, (uint32_t[]){1, 2, 3, 4}, 4), 1);
    assert_true(kvbm_sequence_hashes(s)[0] == UINT64_C(8052976908588476977));
    kvbm_sequence_destroy(s);
    kvbm_sequence_destroy(NULL);
    for (uint32_t size = 1; size <= KVBM_MAX_BLOCK_SIZE; size *= 2)
        kvbm_sequence_destroy(make(size, 0));
}

/* Each call in its turn, with what it answers and how long the sequence is then. */
static void test_table(void **state)
{
    enum call { APPEND, EXTEND, POP, TRUNCATE, UNWIND, CLEAR };
    static const struct {
        enum call call;
        size_t n;
        long answer;
        size_t len, blocks;
    } steps[] = {
        {POP, 0, -ENODATA, 0, 0},    {TRUNCATE, 0, 0, 0, 0},
        {UNWIND, 0, 0, 0, 0},        {TRUNCATE, 1, -ERANGE, 0, 0},
        {UNWIND, 1, -ERANGE, 0, 0},  {EXTEND, 0, 0, 0, 0},
        {APPEND, 0, 0, 1, 0},        {EXTEND, 2, 0, 3, 0},
        {APPEND, 0, 1, 4, 1},        {APPEND, 0, 0, 5, 1},
        {EXTEND, 11, 3, 16, 4},      {POP, 0, 0, 15, 3},
        {APPEND, 0, 1, 16, 4},       {EXTEND, 5, -ENOSPC, 16, 4},
        {EXTEND, 4, 1, 20, 5},       {APPEND, 0, -ENOSPC, 20, 5},
        {EXTEND, 0, 0, 20, 5},       {TRUNCATE, 21, -ERANGE, 20, 5},
        {TRUNCATE, 20, 0, 20, 5},    {TRUNCATE, 9, 0, 9, 2},
        {UNWIND, 10, -ERANGE, 9, 2}, {UNWIND, 1, 0, 8, 2},
        {UNWIND, 1, 0, 7, 1},        {EXTEND, 9, 3, 16, 4},
        {UNWIND, 16, 0, 0, 0},       {EXTEND, 20, 5, 20, 5},
        {CLEAR, 0, 0, 0, 0},         {CLEAR, 0, 0, 0, 0},
        {EXTEND, 21, -ENOSPC, 0, 0}, {EXTEND, SIZE_MAX, -ENOSPC, 0, 0},
    };
    static const uint32_t tokens[32] = {0};
    struct kvbm_sequence *s = make(4, 20);
    (void)state;

    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        uint32_t popped = 77;
        long got = 0;

        if (steps[i].call == APPEND)
            got = kvbm_sequence_append(s, 5);
        else if (steps[i].call == EXTEND)
            got = kvbm_sequence_extend(s, tokens, steps[i].n);
        else if (steps[i].call == POP)
            got = kvbm_sequence_pop(s, &popped);
        else if (steps[i].call == TRUNCATE)
            got = kvbm_sequence_truncate(s, steps[i].n);
        else if (steps[i].call == UNWIND)
            got = kvbm_sequence_unwind(s, steps[i].n);
        else
            kvbm_sequence_clear(s);
        if (got != steps[i].answer || kvbm_sequence_len(s) != steps[i].len ||
            kvbm_sequence_n_blocks(s) != steps[i].blocks)
            fail_msg("step %zu: %ld, %zu tokens, %zu blocks", i, got, kvbm_sequence_len(s),
                     kvbm_sequence_n_blocks(s));
        if (steps[i].call == POP)
            assert_int_equal(popped, got ? 77 : 0);
    }
    assert_int_equal(kvbm_sequence_extend(s, NULL, 1), -EINVAL);
    assert_int_equal(kvbm_sequence_extend(s, NULL, 0), 0);
    kvbm_sequence_destroy(s);
}

/* Nothing is there yet, and asking for it is no error. */
static void test_empty(void **state)
{
    struct kvbm_sequence *s = make(4, 0);
    struct kvbm_token_block block;
    size_t n = 77;
    (void)state;

    assert_non_null(kvbm_sequence_tail(s, &n));
    assert_int_equal(n, 0);
    assert_non_null(kvbm_sequence_tokens(s, 0, 0)); /* all zero of them are there */
    assert_null(kvbm_sequence_tokens(s, 0, 1));
    assert_null(kvbm_sequence_tokens(s, 1, 0));
    assert_int_equal(kvbm_sequence_block(s, 0, &block), -ERANGE);
    assert_int_equal(kvbm_sequence_pop(s, NULL), -ENODATA);
    kvbm_sequence_destroy(s);
}

/* ---- the model ---- */

struct model {
    uint32_t tokens[5000];
    size_t len;
    uint32_t block_size;
    uint64_t salt;
    enum kvbm_chain_seed chain;
};

static void compare_blocks(const struct kvbm_sequence *s, const struct model *m)
{
    static uint64_t blocks[5000], hashes[5000];
    size_t n =
        kvbm_hash_tokens(m->tokens, m->len, m->block_size, m->salt, m->chain, NULL, blocks, hashes);
    struct kvbm_token_block got;

    assert_int_equal(kvbm_sequence_n_blocks(s), n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(kvbm_sequence_block(s, i, &got), 0);
        assert_true(got.block_hash == blocks[i] && got.sequence_hash == hashes[i]);
        assert_true(got.parent == (i ? hashes[i - 1] : 0) && got.position == i);
        assert_memory_equal(got.tokens, m->tokens + i * m->block_size, 4 * m->block_size);
    }
    if (n)
        assert_memory_equal(kvbm_sequence_hashes(s), hashes, n * sizeof(hashes[0]));
    assert_int_equal(kvbm_sequence_block(s, n, &got), -ERANGE);
    assert_int_equal(kvbm_sequence_block(s, SIZE_MAX, &got), -ERANGE);
}

static void compare(const struct kvbm_sequence *s, const struct model *m)
{
    size_t n, full = m->len / m->block_size * m->block_size;
    const uint32_t *tail;

    assert_int_equal(kvbm_sequence_len(s), m->len);
    compare_blocks(s, m);
    tail = kvbm_sequence_tail(s, &n);
    assert_int_equal(n, m->len - full);
    assert_memory_equal(tail, m->tokens + full, n * 4);
    assert_memory_equal(kvbm_sequence_tokens(s, 0, m->len), m->tokens, m->len * 4);
    assert_null(kvbm_sequence_tokens(s, 0, m->len + 1));
    assert_null(kvbm_sequence_tokens(s, 1, SIZE_MAX));
    assert_non_null(kvbm_sequence_tokens(s, m->len, 0));
}

static void step(struct rng *rng, struct kvbm_sequence *s, struct model *m)
{
    uint32_t what = rng_below(rng, 100), token = 0;
    size_t n = rng_below(rng, rng_below(rng, 4) ? 10 : 700);

    if (what < 40 && m->len < 4000) {
        m->tokens[m->len] = (uint32_t)rng_next(rng);
        assert_int_equal(kvbm_sequence_append(s, m->tokens[m->len]),
                         (m->len + 1) % m->block_size == 0);
        m->len++;
    } else if (what < 70 && m->len + n < 4000) {
        for (size_t i = 0; i < n; i++)
            m->tokens[m->len + i] = (uint32_t)rng_next(rng);
        assert_int_equal(kvbm_sequence_extend(s, m->tokens + m->len, n),
                         (m->len + n) / m->block_size - m->len / m->block_size);
        m->len += n;
    } else if (what < 80) {
        assert_int_equal(kvbm_sequence_pop(s, &token), m->len ? 0 : -ENODATA);
        if (m->len)
            assert_int_equal(token, m->tokens[--m->len]);
    } else if (what < 89) {
        assert_int_equal(kvbm_sequence_unwind(s, n), n > m->len ? -ERANGE : 0);
        m->len -= n > m->len ? 0 : n;
    } else if (what < 99) {
        n = rng_below(rng, (uint32_t)m->len + 10);
        assert_int_equal(kvbm_sequence_truncate(s, n), n > m->len ? -ERANGE : 0);
        m->len = n > m->len ? m->len : n;
    } else {
        kvbm_sequence_clear(s);
        m->len = 0;
    }
}

static void test_random(void **state)
{
    struct rng rng = {test_seed()};
    static struct model m;
    (void)state;

    for (long round = test_rounds(60); round > 0; round--) {
        struct kvbm_sequence_opts opts = {.size = sizeof(opts)};
        struct kvbm_sequence *s;

        m.len = 0;
        m.block_size = opts.block_size = 1u << rng_below(&rng, 11);
        m.salt = opts.salt_hash = rng_below(&rng, 3) ? rng_next(&rng) : 0;
        m.chain = opts.chain = rng_below(&rng, 2) ? KVBM_CHAIN_SEED_SALT : KVBM_CHAIN_SEED_ZERO;
        assert_int_equal(kvbm_sequence_create(&opts, &s), 0);
        for (int i = 0; i < 300; i++) {
            step(&rng, s, &m);
            compare(s, &m);
        }
        kvbm_sequence_destroy(s);
    }
}

/* ---- without memory ---- */

static void test_create_starved(void **state)
{
    struct kvbm_sequence_opts opts = {.size = sizeof(opts), .block_size = 16};
    struct kvbm_sequence *s = NULL;
    long n = 0;
    int rc;
    (void)state;

    do {
        starve_at(++n);
        rc = kvbm_sequence_create(&opts, &s);
        assert_int_equal(rc, starved() ? -ENOMEM : 0);
        assert_true(rc == 0 || !s);
    } while (rc);
    starve_at(0);
    assert_true(n > 1);
    kvbm_sequence_destroy(s);
}

/* Each allocation of a growing sequence refused in turn: it stays as it was, and goes on afterwards. */
static void test_extend_starved(void **state)
{
    struct rng rng = {test_seed() + 2};
    struct kvbm_sequence *s = make(4, 0);
    static struct model m = {.block_size = 4, .salt = 1337};
    long refused = 0;
    (void)state;

    while (m.len < 3500) {
        size_t n = 1 + rng_below(&rng, 300);
        long rc, at = 0;

        for (size_t i = 0; i < n; i++)
            m.tokens[m.len + i] = (uint32_t)rng_next(&rng);
        do {
            starve_at(++at);
            rc = kvbm_sequence_extend(s, m.tokens + m.len, n);
            assert_true(rc == -ENOMEM ? starved() : rc >= 0 && !starved());
            starve_at(0);
            refused += rc < 0;
            if (rc == -ENOMEM)
                compare(s, &m);
        } while (rc < 0);
        m.len += n;
        compare(s, &m);
    }
    assert_true(refused >=
                3 * 4); /* three arrays, and 512 tokens or fewer after the first growth */
    kvbm_sequence_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),        cmocka_unit_test(test_table),
        cmocka_unit_test(test_empty),          cmocka_unit_test(test_random),
        cmocka_unit_test(test_create_starved), cmocka_unit_test(test_extend_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
