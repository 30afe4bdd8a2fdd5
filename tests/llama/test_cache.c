// SPDX-License-Identifier: Apache-2.0
/* The prefix cache for llama.cpp over a small libllama (toy_llama.h): what loads is what was computed. */
#include <pthread.h>

#define URI "memory://llama"

enum { BLOCK = 16, N = 600 };

#include "llama/cache_unit.h"

static struct kvl_cache *open_cache(const char *fingerprint)
{
    struct kvl_opts opts = {.size = sizeof(opts),
                            .fingerprint = fingerprint,
                            .block_tokens = BLOCK,
                            .libllama = &toy_table};
    struct kvl_cache *cache;

    assert_int_equal(kvl_open(t.store, &opts, &cache), 0);
    return cache;
}

static int setup(void **state)
{
    (void)state;
    make_contexts();
    make_store(12345);
    t.cache = open_cache("model");
    return 0;
}

static const struct toy_kind plain = {
    .n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true};

static void init_both(const struct toy_kind *kind)
{
    toy_init(t.toy, kind);
    toy_init(t.other, kind);
}

/* Check that sequence @seq of @toy holds what slot @slot computed for @n tokens. */
static void check_sequence(struct toy_memory *toy, int32_t seq, const int32_t *tokens, size_t n,
                           int32_t slot)
{
    static struct toy_memory computed;

    toy_init(&computed, &toy->kind);
    computed.kind.n_streams = TOY_SEQS; /* any slot may have computed it */
    toy_decode(&computed, slot, tokens, n);
    assert_int_equal(toy_pos_max(toy, seq), (int)n - 1);
    for (size_t i = 0; i < n; i++) {
        struct toy_cell *is = toy_find(toy, seq, (int32_t)i);
        struct toy_cell *want = toy_find(&computed, slot, (int32_t)i);

        assert_non_null(is);
        assert_memory_equal(is->extras, want->extras, toy->kind.extras);
        for (uint32_t l = 0; l < toy->kind.n_layers; l++) {
            assert_memory_equal(is->k[l], want->k[l], toy->kind.k_row);
            assert_memory_equal(is->v[l], want->v[l], toy->kind.v_row);
        }
    }
}

static struct kvl_result save(struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                              size_t n, size_t want)
{
    struct kvl_result r = KVL_RESULT_INIT;

    assert_int_equal(kvl_save(t.cache, ctx, seq, tokens, n, &r), want);
    assert_int_equal(r.n_tokens, want);
    return r;
}

static void load(struct llama_context *ctx, int32_t seq, const int32_t *tokens, size_t n,
                 size_t want, int32_t slot)
{
    struct kvl_result r = KVL_RESULT_INIT;

    assert_int_equal(kvl_find(t.cache, tokens, n), want);
    assert_int_equal(kvl_load(t.cache, ctx, seq, tokens, n, &r), want);
    assert_int_equal(r.n_tokens, want);
    if (want)
        check_sequence(ctx->memory, seq, tokens, want, slot);
    else
        assert_int_equal(toy_pos_max(ctx->memory, seq), -1);
}

static void test_every_shape(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
        {.n_streams = 1, .n_layers = 1, .k_row = 4, .v_row = 4},
        {.n_streams = 1, .n_layers = 1, .k_row = 4, .v_row = 4, .old_prefix = true},
        {.n_streams = 1, .n_layers = 3, .k_row = 6, .v_row = 10, .v_trans = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 6, .v_row = 6, .v_trans = true, .scatter = true},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .v_row = 8, .v_trans = true},
        {.n_streams = 1, .n_layers = 4, .k_row = 20, .has_rotations = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .extras = 8},
        {.n_streams = 1,
         .n_layers = 2,
         .k_row = 9,
         .v_row = 9,
         .extras = 12,
         .k_type = 8,
         .has_rotations = true,
         .rotations = {64, 64}},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .extras = 8, .scatter = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        char name[40];
        struct kvl_result r;

        snprintf(name, sizeof(name), "kind %zu", i);
        kvl_close(t.cache);
        t.cache = open_cache(name);
        init_both(&kinds[i]);
        toy_decode(t.toy, 1, t.tokens + 300, 40); /* another sequence beside it */
        toy_decode(t.toy, 2, t.tokens, 100);
        r = save(&t.ctx, 2, t.tokens, 100, 96);
        assert_int_equal(r.blocks, 6);
        assert_int_equal(r.new_blocks, 6);
        assert_false(r.snapshot);
        load(&t.ctx2, 2, t.tokens, 100, 96, 2);
        load(&t.ctx2, 3, t.tokens, 50, 48, 2); /* any prefix, into another slot */
        load(&t.ctx2, 2, t.tokens, 15, 0, 2);
        check_sequence(t.other, 3, t.tokens, 48, 2);
    }
}

static void test_growth_writes_what_is_new(void **state)
{
    struct kvl_result r;

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 200);
    save(&t.ctx, 0, t.tokens, 200, 192);
    r = save(&t.ctx, 0, t.tokens, 200, 192);
    assert_int_equal(r.new_blocks, 0);
    assert_int_equal(r.new_bytes, 0);
    toy_decode(t.toy, 0, t.tokens, 230);
    r = save(&t.ctx, 0, t.tokens, 230, 224);
    assert_int_equal(r.new_blocks, 2);
    assert_int_equal(n_chunks('b'), 14);
    assert_int_equal(n_chunks('l'), 1);
}

/* The slot decides the last bits of K and V. Its second save shares all blocks nevertheless. */
static void test_slots_share(void **state)
{
    int32_t fork[N];
    struct kvl_result r;

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 160);
    save(&t.ctx, 0, t.tokens, 160, 160);
    memcpy(fork, t.tokens, sizeof(fork));
    fork[100] ^= 1;
    toy_decode(t.toy, 1, fork, 160);
    r = save(&t.ctx, 1, fork, 160, 160);
    assert_int_equal(r.new_blocks, 4); /* 96 of 160 tokens were there */
    toy_decode(t.toy, 3, t.tokens, 160);
    r = save(&t.ctx, 3, t.tokens, 160, 160);
    assert_int_equal(r.new_blocks, 0);
    load(&t.ctx2, 2, t.tokens, 160, 160, 0);
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 1, fork, 160, NULL), 160); /* of both slots */
    assert_int_equal(toy_pos_max(t.other, 1), 159);
}

/* Tokens that were sampled and not decoded yet, and tokens that the caller doesn't name. */
static void test_fewer_and_more_tokens(void **state)
{
    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 63);
    save(&t.ctx, 0, t.tokens, 64, 48);
    toy_decode(t.toy, 0, t.tokens, 100);
    save(&t.ctx, 0, t.tokens, 70, 64);
    load(&t.ctx2, 0, t.tokens, 100, 64, 0);
    save(&t.ctx2, 1, t.tokens, 100, 0); /* an empty sequence */
    save(&t.ctx, 0, t.tokens, 0, 0);
}

static void test_another_model_and_layout(void **state)
{
    struct toy_kind kind = plain;
    struct kvl_cache *first = t.cache;

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 100);
    save(&t.ctx, 0, t.tokens, 100, 96);
    t.cache = open_cache("another model");
    load(&t.ctx2, 0, t.tokens, 100, 0, 0);
    kvl_close(t.cache);
    t.cache = first;

    kind.k_type = 8; /* found under the fingerprint, and refused by libllama before it is read */
    toy_init(t.other, &kind);
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 0, t.tokens, 100, NULL), 0);
    assert_int_equal(t.other->refused, 1);
    toy_decode(t.other, 0, t.tokens, 60);
    save(&t.ctx2, 0, t.tokens, 60, 48);
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 0, t.tokens, 100, NULL), 48);
    check_sequence(t.other, 0, t.tokens, 48, 0);
    kind = plain;
    kind.n_streams = 4; /* slots of their own: other bits, so other blocks */
    toy_init(t.other, &kind);
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 0, t.tokens, 100, NULL), 0);
    kind = plain;
    toy_init(t.other, &kind);
    load(&t.ctx2, 0, t.tokens, 100, 96, 0);
}

static void test_too_many_layouts(void **state)
{
    struct toy_kind kind = plain;

    (void)state;
    for (uint32_t i = 0; i < 9; i++) {
        kind.k_type = i;
        toy_init(t.toy, &kind);
        toy_decode(t.toy, 0, t.tokens, 20);
        assert_int_equal(kvl_save(t.cache, &t.ctx, 0, t.tokens, 20, NULL), i < 8 ? 16 : -ENOSPC);
    }
    assert_int_equal(n_chunks('l'), 8);
}

static void test_whole_snapshots(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20},
        {.n_streams = 1, .n_layers = 2, .recurrent = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        struct kvl_result r;

        kvl_close(t.cache);
        t.cache = open_cache(i ? "recurrent" : "window");
        init_both(&kinds[i]);
        toy_decode(t.toy, 1, t.tokens, 50);
        r = save(&t.ctx, 1, t.tokens, 51, 50);
        assert_true(r.snapshot);
        assert_int_equal(r.new_blocks, 1);
        r = save(&t.ctx, 1, t.tokens, 50, 50);
        assert_int_equal(r.new_blocks, 0);
        toy_decode(t.toy, 1, t.tokens, 333);
        save(&t.ctx, 1, t.tokens, 300, 0); /* its 333 tokens aren't these 300 */
        save(&t.ctx, 1, t.tokens, 333, 333);
        assert_int_equal(kvl_find(t.cache, t.tokens, 49), 0);
        assert_int_equal(kvl_load(t.cache, &t.ctx2, 2, t.tokens, 49, NULL), 0);
        assert_int_equal(kvl_load(t.cache, &t.ctx2, 2, t.tokens, 332, NULL), 50);
        assert_int_equal(toy_pos_max(t.other, 2), 49);
        assert_int_equal(kvl_load(t.cache, &t.ctx2, 3, t.tokens, 600, NULL), 333);
        assert_int_equal(toy_pos_max(t.other, 3), 332);
        if (!i)
            check_sequence(t.other, 3, t.tokens, 333, 1);
    }
}

/* A plugin without extensions can't say what it has: gets tell, and puts that are hits. */
static void test_without_extensions(void **state)
{
    const struct toy_kind kinds[] = {
        plain, {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20}};

    (void)state;
    kvs_close(t.store);
    assert_int_equal(kvs_open_with(memory_vtable(), NULL, URI, false, &t.store), 0);
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        size_t n = i ? 100 : 96;

        kvl_close(t.cache);
        t.cache = open_cache(i ? "window" : "model");
        init_both(&kinds[i]);
        toy_decode(t.toy, 1, t.tokens, 100);
        load(&t.ctx2, 2, t.tokens, 100, 0, 1);
        for (int32_t again = 0; again < 2; again++) {
            save(&t.ctx, 1, t.tokens, 100, n);
            load(&t.ctx2, 2 + again, t.tokens, 200, n, 1);
        }
        assert_int_equal(n_chunks(i ? 's' : 'b'), i ? 1 : 6);
    }
    memory_space(URI)->fail_gets = -ENOENT; /* as a plugin without extensions reports an outage */
    assert_int_equal(kvl_find(t.cache, t.tokens, 100), 0);
}

/* -- damage ------------------------------------------------------------------------------------ */

/* The @n-th chunk of a kind, in the order of the space. */
static struct memory_object *chunk(char kind, size_t n)
{
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        if (o->hash_len == KV_PREFIX_KEY && o->hash[3] == (uint8_t)kind && !n--)
            return o;
    return NULL;
}

/* Any byte of any chunk is wrong: loaded states are right, and the next save repairs the chunk. */
static void test_damage_is_a_miss(void **state)
{
    uint64_t random = unit_seed();
    size_t rounds = unit_rounds(300);

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 100);
    save(&t.ctx, 0, t.tokens, 100, 96);
    for (size_t i = 0; i < rounds; i++) {
        bool layout = unit_below(&random, 10) == 0;
        struct memory_object *o = chunk(layout ? 'l' : 'b', layout ? 0 : unit_below(&random, 6));
        size_t at, len = o->len;
        int64_t got;

        at = unit_below(&random, len);
        if (unit_below(&random, 4) == 0)
            o->len = at;
        else
            o->data[at] ^= (uint8_t)(1 + unit_below(&random, 255));
        got = kvl_load(t.cache, &t.ctx2, 0, t.tokens, 100, NULL);
        assert_in_range(got, 0, 80);
        if (got)
            check_sequence(t.other, 0, t.tokens, (size_t)got, 0);
        save(&t.ctx, 0, t.tokens, 100, 96);
        load(&t.ctx2, 0, t.tokens, 100, 96, 0);
    }
}

/* A whole and valid block under another block's key. */
static void test_misplaced_blocks(void **state)
{
    uint8_t key[KV_PREFIX_KEY];

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 96);
    save(&t.ctx, 0, t.tokens, 96, 96);
    memcpy(key, chunk('b', 0)->hash, sizeof(key));
    memcpy(chunk('b', 0)->hash, chunk('b', 3)->hash, sizeof(key));
    memcpy(chunk('b', 3)->hash, key, sizeof(key));
    assert_in_range(kvl_load(t.cache, &t.ctx2, 0, t.tokens, 96, NULL), 0, 80);
    if (toy_pos_max(t.other, 0) >= 0)
        check_sequence(t.other, 0, t.tokens, (size_t)toy_pos_max(t.other, 0) + 1, 0);
}

static void test_damaged_snapshots(void **state)
{
    static const struct toy_kind kind = {.n_streams = 1, .n_layers = 2, .recurrent = true};
    uint64_t random = unit_seed();

    (void)state;
    init_both(&kind);
    for (size_t i = 0; i < unit_rounds(100); i++) {
        struct memory_object *o;
        int64_t got;

        toy_init(t.toy, &kind);
        toy_decode(t.toy, 0, t.tokens, 30);
        save(&t.ctx, 0, t.tokens, 30, 30);
        toy_decode(t.toy, 0, t.tokens, 90);
        save(&t.ctx, 0, t.tokens, 90, 90);
        o = chunk("sp"[unit_below(&random, 2)], unit_below(&random, 2));
        o->data[unit_below(&random, o->len)] ^= 1;
        got = kvl_load(t.cache, &t.ctx2, 0, t.tokens, 90, NULL);
        assert_true(got == 0 || got == 30 || got == 90); /* 0: both, one of them rounds ago */
        assert_int_equal(toy_pos_max(t.other, 0), got - 1);
        if (got)
            assert_int_equal(toy_find(t.other, 0, (int32_t)got - 1)->chain,
                             got == 90 ? toy_find(t.toy, 0, 89)->chain
                                       : toy_find(t.toy, 0, 29)->chain);
    }
}

static void test_failing_store(void **state)
{
    struct memory_space *space = memory_space(URI);

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 96);
    space->fail_puts = -EIO;
    assert_int_equal(kvl_save(t.cache, &t.ctx, 0, t.tokens, 96, NULL), -EIO);
    space->fail_puts = 0;
    save(&t.ctx, 0, t.tokens, 96, 96);
    toy_decode(t.other, 0, t.tokens + 100, 50);
    space->fail_gets = -EIO;
    assert_int_equal(kvl_load(t.cache, &t.ctx2, 0, t.tokens, 96, NULL), -EIO);
    space->fail_gets = 0;
    load(&t.ctx2, 0, t.tokens, 96, 96, 0);
}

/* -- states in memory --------------------------------------------------------------------------- */

/* Make the whole-context state of sequence 0: the architecture's name in place of the prefix. */
static uint8_t *context_state(size_t *ret_len)
{
    size_t len = toy_get_size(&t.ctx, 0), own = toy_get_data(&t.ctx, NULL, 0, 0);
    uint8_t *state = malloc(len + 9), *raw = malloc(len);

    assert_int_equal(own, 0);
    assert_non_null(state);
    assert_non_null(raw);
    assert_int_equal(toy_get_data(&t.ctx, raw, len, 0), len);
    memcpy(state, "\5\0\0\0llama", 9);
    memcpy(state + 9, raw + 8, len - 8);
    free(raw);
    *ret_len = len + 1;
    return state;
}

static void test_states(void **state)
{
    size_t len, got_len, short_len;
    uint8_t *whole, *half;
    void *got;

    (void)state;
    init_both(&plain);
    toy_decode(t.toy, 0, t.tokens, 48);
    half = context_state(&short_len);
    toy_decode(t.toy, 0, t.tokens, 96);
    whole = context_state(&len);
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 97, KVL_FORM_CONTEXT, whole, len, NULL), 96);
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 200, KVL_FORM_CONTEXT, &got, &got_len, NULL),
                     96);
    assert_int_equal(got_len, len);
    assert_memory_equal(got, whole, len);
    free(got);
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 60, KVL_FORM_CONTEXT, &got, &got_len, NULL),
                     48);
    assert_int_equal(got_len, short_len);
    assert_memory_equal(got, half, short_len);
    free(got);
    /* Forms share blocks, once a save has told how the other form begins. */
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 96, KVL_FORM_SEQUENCE, &got, &got_len, NULL),
                     0);
    assert_int_equal(save(&t.ctx, 0, t.tokens, 96, 96).new_blocks, 0);
    load(&t.ctx2, 1, t.tokens, 96, 96, 0);
    free(whole);
    free(half);
}

static void test_any_bytes_as_a_state(void **state)
{
    uint8_t noise[3000];
    uint64_t random = unit_seed();
    size_t len;
    void *got;

    (void)state;
    for (size_t i = 0; i < unit_rounds(200); i++) {
        size_t n = 1 + unit_below(&random, sizeof(noise));

        for (size_t j = 0; j < n; j++)
            noise[j] = (uint8_t)unit_random(&random);
        t.tokens[0] = (int32_t)i;
        assert_int_equal(kvl_save_state(t.cache, t.tokens, 20, KVL_FORM_SEQUENCE, noise, n, NULL),
                         20);
        assert_int_equal(kvl_load_state(t.cache, t.tokens, 25, KVL_FORM_SEQUENCE, &got, &len, NULL),
                         20);
        assert_int_equal(len, n);
        assert_memory_equal(got, noise, n);
        free(got);
    }
}

/* -- the rest ------------------------------------------------------------------------------------ */

static void test_arguments(void **state)
{
    struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "", .libllama = &toy_table};
    struct kvl_libllama lacking = toy_table;
    struct kvl_cache *cache;
    char text[KVL_FILE_FINGERPRINT];

    (void)state;
    init_both(&plain);
    assert_int_equal(kvl_open(t.store, &opts, &cache), -EINVAL);
    assert_int_equal(kvl_open(t.store, NULL, &cache), -EINVAL);
    opts.fingerprint = "m";
    assert_int_equal(kvl_open(NULL, &opts, &cache), -EINVAL);
    opts.block_tokens = KVL_BLOCK_TOKENS_MAX + 1;
    assert_int_equal(kvl_open(t.store, &opts, &cache), -EINVAL);
    opts.block_tokens = 0;
    lacking.memory_seq_rm = NULL;
    opts.libllama = &lacking;
    assert_int_equal(kvl_open(t.store, &opts, &cache), 0);
    assert_int_equal(kvl_load(cache, &t.ctx, 0, t.tokens, 5, NULL), -ENOSYS);
    assert_int_equal(kvl_save(cache, &t.ctx, 0, t.tokens, 5, NULL), -ENOSYS);
    kvl_close(cache);
    kvl_close(NULL);
    assert_int_equal(kvl_load(t.cache, &t.ctx, -1, t.tokens, 5, NULL), -EINVAL);
    assert_int_equal(kvl_load(t.cache, &t.ctx, 0, NULL, 5, NULL), -EINVAL);
    assert_int_equal(kvl_save(t.cache, NULL, 0, t.tokens, 5, NULL), -EINVAL);
    assert_int_equal(kvl_find(t.cache, t.tokens, KVL_TOKENS_MAX + 1), -EINVAL);
    assert_int_equal(kvl_fingerprint_file("/nowhere/at/all", text), -ENOENT);
    assert_int_equal(kvl_fingerprint_file("/dev/null", text), 0);
    assert_string_equal(text, "99aa06d3014798d86001c324468d497f"); /* XXH3-128 of nothing */
}

/* Stored prefixes against a list of them. */
static void test_find_like_a_list(void **state)
{
    enum { CHAINS = 12, LENGTH = 200 };
    static int32_t chains[CHAINS][LENGTH];
    size_t stored[CHAINS] = {0};
    uint64_t random = unit_seed();

    (void)state;
    for (size_t i = 0; i < CHAINS; i++) { /* each branches off an earlier one */
        size_t from = i ? unit_below(&random, i) : 0, keep = i ? unit_below(&random, LENGTH) : 0;

        for (size_t j = 0; j < LENGTH; j++)
            chains[i][j] = j < keep ? chains[from][j] : (int32_t)unit_below(&random, 3);
    }
    for (size_t round = 0; round < unit_rounds(100); round++) {
        size_t i = unit_below(&random, CHAINS), n = unit_below(&random, LENGTH + 1), longest = 0;

        if (unit_below(&random, 3) == 0) {
            toy_init(t.toy, &plain);
            toy_decode(t.toy, 0, chains[i], n);
            save(&t.ctx, 0, chains[i], n, n / BLOCK * BLOCK);
            stored[i] = KV_MAX(stored[i], n / BLOCK * BLOCK);
        }
        for (size_t j = 0; j < CHAINS; j++) {
            size_t same = 0;

            while (same < KV_MIN(n, stored[j]) && chains[i][same] == chains[j][same])
                same++;
            longest = KV_MAX(longest, same / BLOCK * BLOCK);
        }
        toy_init(t.other, &plain);
        load(&t.ctx2, 0, chains[i], n, longest, 0);
    }
}

static void *work(void *arg)
{
    uint64_t random = (uintptr_t)arg;
    struct toy_memory *toy = malloc(sizeof(*toy));
    struct llama_context ctx = {toy};

    for (int i = 0; i < 20 && toy; i++) {
        size_t n = unit_below(&random, 120);
        int64_t got;

        toy_init(toy, &plain);
        got = kvl_load(t.cache, &ctx, 0, t.tokens, n, NULL);
        if (got < 0 || got != toy_pos_max(toy, 0) + 1)
            break;
        toy_init(toy, &plain);
        toy_decode(toy, 0, t.tokens, n);
        if (kvl_save(t.cache, &ctx, 0, t.tokens, n, NULL) != (int64_t)(n / BLOCK * BLOCK))
            break;
        arg = i == 19 ? NULL : arg;
    }
    free(toy);
    return arg; /* NULL: all went well */
}

static void test_threads(void **state)
{
    pthread_t threads[3];
    void *rc;

    (void)state;
    for (uintptr_t i = 0; i < KV_COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work, (void *)(i * 77 + 5)), 0);
    for (size_t i = 0; i < KV_COUNT(threads); i++) {
        assert_int_equal(pthread_join(threads[i], &rc), 0);
        assert_null(rc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_shape, setup, teardown),
        cmocka_unit_test_setup_teardown(test_growth_writes_what_is_new, setup, teardown),
        cmocka_unit_test_setup_teardown(test_slots_share, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fewer_and_more_tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(test_another_model_and_layout, setup, teardown),
        cmocka_unit_test_setup_teardown(test_too_many_layouts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_whole_snapshots, setup, teardown),
        cmocka_unit_test_setup_teardown(test_without_extensions, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damage_is_a_miss, setup, teardown),
        cmocka_unit_test_setup_teardown(test_misplaced_blocks, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_snapshots, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failing_store, setup, teardown),
        cmocka_unit_test_setup_teardown(test_states, setup, teardown),
        cmocka_unit_test_setup_teardown(test_any_bytes_as_a_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_arguments, setup, teardown),
        cmocka_unit_test_setup_teardown(test_find_like_a_list, setup, teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
