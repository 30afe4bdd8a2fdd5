// SPDX-License-Identifier: Apache-2.0
/*
 * Memory with a sliding window in blocks: a load ends wherever both caches have what it needs. The small
 * libllama refuses a state whose second cache lacks a token that the window reads, or has other bytes.
 */
#define URI "memory://windows"

enum { BLOCK = 16, N = 600 };

#include "base/core/cache_group.h"
#include "llama/cache_unit.h"

/* Layers that read 20 tokens, in a cache that keeps 60. */
static const struct toy_kind window = {
    .n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 60, .n_swa = 20};

static void open_cache(const char *fingerprint, uint32_t span)
{
    struct kvl_opts opts = {.size = sizeof(opts),
                            .fingerprint = fingerprint,
                            .block_tokens = BLOCK,
                            .window = span,
                            .libllama = &toy_table};

    kvl_close(t.cache);
    assert_int_equal(kvl_open(t.store, &opts, &t.cache), 0);
}

static int setup(void **state)
{
    (void)state;
    make_contexts();
    make_store(4711);
    open_cache("model", 0);
    return 0;
}

/* Compute @n tokens in a new memory of @kind and save them. */
static struct kvl_result save(const struct toy_kind *kind, const int32_t *tokens, size_t n)
{
    struct kvl_result r = KVL_RESULT_INIT;
    int64_t saved;

    toy_init(t.toy, kind);
    toy_decode(t.toy, 1, tokens, n);
    saved = kvl_save(t.cache, &t.ctx, 1, tokens, n, &r);
    assert_int_equal(saved, r.n_tokens);
    return r;
}

/* Load into another context, and check the first cache's rows. The toy checks those of the second. */
static void load(const struct toy_kind *kind, const int32_t *tokens, size_t n, size_t want)
{
    struct kvl_result r = KVL_RESULT_INIT;

    toy_init(t.other, kind);
    toy_init(t.toy, kind);
    toy_decode(t.toy, 1, tokens, n);
    assert_int_equal(kvl_find(t.cache, tokens, n), want);
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 2, tokens, n, &r), want);
    assert_int_equal(t.other->refused, 0);
    assert_int_equal(toy_pos_max(t.other, 2), (int)want - 1);
    for (int32_t i = 0; i < (int32_t)want; i++) {
        const struct toy_cell *is = toy_find(t.other, 2, i), *made = toy_find(t.toy, 1, i);

        assert_non_null(is);
        assert_memory_equal(is->extras, made->extras, kind->extras);
        for (uint32_t l = 0; l < kind->n_layers; l++) {
            assert_memory_equal(is->k[l], made->k[l], kind->k_row);
            assert_memory_equal(is->v[l], made->v[l], kind->v_row);
        }
    }
}

static void test_every_shape(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .old_prefix = true},
        {.n_streams = 1, .n_layers = 3, .k_row = 6, .v_row = 10, .v_trans = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 6, .v_row = 6, .v_trans = true, .scatter = true},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .v_row = 8, .v_trans = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .extras = 8},
        {.n_streams = 1, .n_layers = 2, .k_row = 9, .v_row = 9, .extras = 12, .scatter = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        struct toy_kind kind = kinds[i];
        struct kvl_result r;
        char name[40];

        kind.window = 60;
        kind.n_swa = 20;
        snprintf(name, sizeof(name), "kind %zu", i);
        open_cache(name, 0);
        r = save(&kind, t.tokens, 200); /* the second cache has tokens 140 to 199 */
        assert_int_equal(r.n_tokens, 192);
        assert_false(r.snapshot);
        assert_int_equal(r.new_blocks, 12 + 3);
        load(&kind, t.tokens, 200, 192);
        load(&kind, t.tokens, 191, 176);
        load(&kind, t.tokens, 175, 0); /* 160 needs tokens from 141 on, and so the block from 128 */
    }
}

/* Saves of one text complete each other, and blocks are stored once. */
static void test_saves_complete_each_other(void **state)
{
    struct kvl_result r;

    (void)state;
    save(&window, t.tokens, 100);
    r = save(&window, t.tokens, 200);
    assert_int_equal(r.new_blocks, 6 + 3);
    r = save(&window, t.tokens, 200);
    assert_int_equal(r.new_blocks, 0);
    assert_int_equal(r.blocks, 12 + 2);
    load(&window, t.tokens, 200, 192);
    load(&window, t.tokens, 150, 96);
    load(&window, t.tokens, 90, 80);
    load(&window, t.tokens, 79,
         0); /* 64 needs tokens from 45 on, so a block that no save had whole */
    save(&window, t.tokens, 40);
    load(&window, t.tokens, 79, 32);
    assert_int_equal(n_chunks('s'), 0);
    assert_int_equal(n_chunks('l'), 1);
}

/* Conversations of one system prompt begin where it ends. */
static void test_a_shared_beginning(void **state)
{
    int32_t fork[N];

    (void)state;
    memcpy(fork, t.tokens, sizeof(fork));
    fork[110] ^= 1;
    save(&window, t.tokens, 120);
    load(&window, fork, 200, 96); /* a snapshot of 120 tokens would be no use */
    save(&window, fork, 200);
    load(&window, fork, 220, 192);
    load(&window, t.tokens, 220, 112);
}

/* A cache that keeps what the window reads and no more: no load ends at a block, so a tail is saved. */
static void test_tails(void **state)
{
    struct toy_kind small = window;
    struct kvl_result r;
    int32_t fork[N];
    uint64_t first;

    (void)state;
    small.window = 22;
    r = save(&small, t.tokens, 200);
    assert_true(r.snapshot);
    assert_int_equal(r.n_tokens, 200);
    assert_int_equal(r.new_blocks, 12 + 1);
    assert_int_equal(r.blocks, 12 + 1);
    first = r.new_bytes;
    load(&small, t.tokens, 300, 200);
    load(&small, t.tokens, 199, 0);
    r = save(&small, t.tokens, 217); /* a turn later: one block, and a tail */
    assert_int_equal(r.new_blocks, 1 + 1);
    assert_true(r.new_bytes < first / 2);
    memcpy(fork, t.tokens, sizeof(fork));
    fork[205] ^= 1;
    assert_int_equal(save(&small, fork, 230).new_blocks, 2 + 1 + 1); /* another answer */
    load(&small, fork, 300, 230);
    load(&small, t.tokens, 300, 217);
    load(&small, t.tokens, 216, 200);
    assert_int_equal(kvl_discard(t.cache, t.tokens, 200, KVL_FORM_SEQUENCE), 1);
    assert_int_equal(kvl_discard(t.cache, t.tokens, 200, KVL_FORM_SEQUENCE), 0);
    load(&small, t.tokens, 216, 0);
    load(&small, t.tokens, 300, 217);
    small.window = 60; /* as with larger batches */
    assert_false(save(&small, t.tokens, 60).snapshot);
    load(&small, t.tokens, 199, 48);
    assert_int_equal(n_chunks('l'), 1);
}

/* Of more tokens than the caller names, the blocks before these are saved, and no tail. */
static void test_fewer_tokens_than_the_state(void **state)
{
    struct toy_kind small = window;

    (void)state;
    small.window = 22;
    toy_init(t.toy, &small);
    toy_decode(t.toy, 1, t.tokens, 200);
    assert_int_equal(kvl_save(t.cache, &t.ctx, 1, t.tokens, 150, NULL), 0);
    assert_int_equal(n_chunks('s'), 0);
    assert_int_equal(save(&small, t.tokens, 152).n_tokens, 152);
    load(&small, t.tokens, 160, 152);
}

/* -- states in memory --------------------------------------------------------------------------- */

static uint8_t *state_of(size_t n, size_t *ret_len)
{
    uint8_t *state;

    toy_init(t.toy, &window);
    toy_decode(t.toy, 0, t.tokens, n);
    *ret_len = toy_get_size(&t.ctx, 0);
    state = malloc(*ret_len);
    assert_non_null(state);
    assert_int_equal(toy_get_data(&t.ctx, state, *ret_len, 0), *ret_len);
    return state;
}

/* Without a context, the caller tells the window. Else the state is a snapshot. */
static void test_states(void **state)
{
    struct kvl_result r = KVL_RESULT_INIT;
    size_t len, got_len;
    uint8_t *bytes = state_of(200, &len);
    void *got;

    (void)state;
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 200, KVL_FORM_SEQUENCE, bytes, len, &r),
                     200);
    assert_true(r.snapshot);
    open_cache("told", 20);
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 200, KVL_FORM_SEQUENCE, bytes, len, &r),
                     192);
    assert_false(r.snapshot);
    open_cache("told", 0); /* a reader needn't know */
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 190, KVL_FORM_SEQUENCE, &got, &got_len, &r),
                     176);
    assert_int_equal(r.blocks, 11 + 2);
    toy_init(t.other, &window);
    assert_int_equal(toy_set_data(&t.ctx2, got, got_len, 0), got_len);
    assert_int_equal(toy_pos_max(t.other, 0), 175);
    free(got);
    free(bytes);
}

/* The state of a context with one sequence. Both forms have one tail. */
static void test_both_forms_share(void **state)
{
    static const char begin[] = "\5\0\0\0llama";
    struct kvl_result r = KVL_RESULT_INIT;
    struct toy_kind small = window;
    size_t len, got_len;
    uint8_t *bytes, *whole;
    void *got;

    (void)state;
    small.window = 22;
    toy_init(t.toy, &small);
    toy_decode(t.toy, 0, t.tokens, 200);
    len = toy_get_size(&t.ctx, 0);
    bytes = malloc(len);
    whole = malloc(len + 1);
    assert_non_null(bytes);
    assert_non_null(whole);
    assert_int_equal(toy_get_data(&t.ctx, bytes, len, 0), len);
    memcpy(whole, begin, 9);
    memcpy(whole + 9, bytes + 8, len - 8);
    open_cache("both", 20);
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 200, KVL_FORM_SEQUENCE, bytes, len, &r),
                     200);
    assert_int_equal(r.new_blocks, 12 + 1);
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 200, KVL_FORM_CONTEXT, whole, len + 1, &r),
                     200);
    assert_int_equal(r.new_blocks, 0);
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 210, KVL_FORM_CONTEXT, &got, &got_len, NULL),
                     200);
    assert_int_equal(got_len, len + 1);
    assert_memory_equal(got, whole, got_len);
    free(got);
    assert_int_equal(
        kvl_load_state(t.cache, t.tokens, 210, KVL_FORM_SEQUENCE, &got, &got_len, NULL), 200);
    assert_memory_equal(got, bytes, len);
    free(got);
    free(bytes);
    free(whole);
}

/* Bytes of a pair that aren't one: whatever is changed, a load gives a state that libllama checks. */
static void test_bent_states(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t i = 0; i < unit_rounds(300); i++) {
        struct kvl_result r = KVL_RESULT_INIT;
        size_t len, at, got_len;
        uint8_t *bytes;
        char name[40];
        int64_t saved;
        void *got;

        snprintf(name, sizeof(name), "bent %zu", i);
        open_cache(name, 20);
        bytes = state_of(20 + unit_below(&random, 80), &len);
        at = unit_below(&random, 2) ? unit_below(&random, KV_MIN(len, (size_t)300))
                                    : len - 1 - unit_below(&random, KV_MIN(len, (size_t)1900));
        if (unit_below(&random, 4) == 0)
            len = at + 1;
        else
            bytes[at] ^= (uint8_t)(1 + unit_below(&random, 255));
        saved = kvl_save_state(t.cache, t.tokens, 100, KVL_FORM_SEQUENCE, bytes, len, &r);
        assert_in_range(saved, 0, 100);
        assert_int_equal(kvl_find(t.cache, t.tokens, 100), saved);
        if (saved) {
            assert_int_equal(
                kvl_load_state(t.cache, t.tokens, 100, KVL_FORM_SEQUENCE, &got, &got_len, NULL),
                saved);
            if (r.snapshot)
                assert_int_equal(got_len, len);
            free(got);
        }
        free(bytes);
    }
}

/* -- damage ------------------------------------------------------------------------------------ */

/* Any byte of any block is wrong: loaded states are right, and the next save repairs the block. */
static void damage(const struct toy_kind *of, size_t want)
{
    const struct toy_kind kind = *of;
    uint64_t random = unit_seed();
    size_t n = 0;

    assert_int_equal(save(&kind, t.tokens, 200).n_tokens, want);
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        n++;
    for (size_t i = 0; i < unit_rounds(200); i++) {
        struct memory_object *o = memory_space(URI)->chunks;
        size_t skip = unit_below(&random, KV_MAX(n, (size_t)1));
        int64_t got;

        while (skip--)
            o = o->next;
        if (o->hash_len != KV_PREFIX_KEY || o->hash[3] == 'l')
            continue;
        o->data[unit_below(&random, o->len)] ^= (uint8_t)(1 + unit_below(&random, 255));
        toy_init(t.other, &kind);
        got = kvl_load(t.cache, &t.ctx2, 0, t.tokens, 200, NULL);
        assert_in_range(got, 0, 200);
        assert_int_equal(t.other->refused, 0);
        assert_int_equal(toy_pos_max(t.other, 0), got - 1);
        assert_int_equal(save(&kind, t.tokens, 200).n_tokens, want);
        load(&kind, t.tokens, 200, want);
    }
}

static void test_damage_is_a_miss(void **state)
{
    (void)state;
    damage(&window, 192);
}

static void test_damaged_tails(void **state)
{
    struct toy_kind small = window;

    (void)state;
    small.window = 22;
    damage(&small, 200);
}

/* A plugin that can't tell what it has, and can't delete what is damaged. */
static void test_without_extensions(void **state)
{
    (void)state;
    kvs_close(t.store);
    assert_int_equal(kvs_open_with(memory_vtable(), NULL, URI, false, &t.store), 0);
    open_cache("plain", 0);
    load(&window, t.tokens, 200, 0);
    assert_int_equal(save(&window, t.tokens, 200).n_tokens, 192);
    load(&window, t.tokens, 200, 192);
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        if (o->hash[3] == 'b' && o->len > 400)
            o->data[o->len - 1] ^= 1;
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 2, t.tokens, 200, NULL), 0);
}

/* -- all at random ----------------------------------------------------------------------------- */

/* Stored tokens of the second cache of a text, its tails, and the longest save of it. */
struct kept {
    bool window[N + BLOCK], tail[N];
    size_t whole;
};

/* Return the longest load of @n tokens in blocks, found token by token. */
static size_t in_blocks(const struct kept *kept, size_t n, size_t span)
{
    for (size_t l = KV_MIN(n, kept->whole) / BLOCK * BLOCK; l; l -= BLOCK) {
        bool has = true;

        for (size_t i = l; has && i > 0 && i + span > l + 1; i--)
            has = kept->window[i - 1];
        if (has)
            return l;
    }
    return 0;
}

/* Return the longest load of @n tokens. */
static size_t longest(const struct kept *kept, size_t n, size_t span)
{
    size_t tail = n;

    while (tail && !kept->tail[tail])
        tail--;
    return KV_MAX(tail, in_blocks(kept, n, span));
}

static void test_random_saves(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(30); round++) {
        struct toy_kind kind = window;
        struct kept kept = {.whole = 0};
        char name[40];

        kind.n_swa = 2 + (uint32_t)unit_below(&random, 70);
        kind.window = kind.n_swa + (uint32_t)unit_below(&random, 50);
        kind.scatter = unit_below(&random, 2) != 0;
        snprintf(name, sizeof(name), "random %zu", round);
        open_cache(name, 0);
        for (int step = 0; step < 12; step++) {
            size_t n = 1 + unit_below(&random, 300);
            size_t from = n > kind.window ? n - kind.window : 0;

            if (unit_below(&random, 3) == 0) {
                for (size_t b = (from + BLOCK - 1) / BLOCK; b < n / BLOCK; b++)
                    memset(&kept.window[b * BLOCK], true, BLOCK);
                kept.whole = KV_MAX(kept.whole, n / BLOCK * BLOCK);
                kept.tail[n] |= in_blocks(&kept, n, kind.n_swa) < n / BLOCK * BLOCK;
                assert_int_equal(save(&kind, t.tokens, n).n_tokens, longest(&kept, n, kind.n_swa));
            }
            load(&kind, t.tokens, n, longest(&kept, n, kind.n_swa));
        }
    }
}

/* The rule itself: the longest hit of each kind of group, against every hit tried from the end. */
static void test_longest(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t i = 0; i < unit_rounds(2000); i++) {
        struct kv_cache_group group = {.needs = (enum kv_needs)unit_below(&random, 4),
                                       .block_size = 1 + (uint32_t)unit_below(&random, 20),
                                       .span = 1 + (uint32_t)unit_below(&random, 90)};
        uint64_t n = unit_below(&random, 40), want = n;
        uint8_t there[40] = {0};

        for (size_t k = 0; k < n; k++)
            there[k] = unit_below(&random, 4) != 0;
        for (; want; want--) {
            uint64_t k = kv_cache_group_first(&group, want);

            while (k < want && there[k])
                k++;
            if (k == want)
                break;
        }
        assert_int_equal(kv_cache_group_longest(&group, there, n), want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_shape, setup, teardown),
        cmocka_unit_test_setup_teardown(test_saves_complete_each_other, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_shared_beginning, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fewer_tokens_than_the_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_states, setup, teardown),
        cmocka_unit_test_setup_teardown(test_both_forms_share, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bent_states, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damage_is_a_miss, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_tails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_without_extensions, setup, teardown),
        cmocka_unit_test_setup_teardown(test_random_saves, setup, teardown),
        cmocka_unit_test(test_longest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
