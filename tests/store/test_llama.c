// SPDX-License-Identifier: Apache-2.0
/* Cuts of llama.cpp states: a grown state shares all possible chunks, and other bytes do no
 * harm. */
#include "base/unit.h"
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
    s.ext = 8;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.streams = 4;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.second = 512; /* a second cache that stays as it is */
    assert_true(written_grown(s, 20, &small) <= 5);
    s.v_trans = true;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.n_layers = 1;
    s.k_row = s.v_row = 8; /* tiny rows: more tokens to a chunk than asked for */
    written_grown(s, 20, &small);
}

/* Cut a state that must be understood to its last byte. */
static void expect_parsed(const struct llama_state *s, const struct kvs_save_opts *opts)
{
    struct cutting cut;
    size_t len;

    cut_state(s, opts, &cut, &len);
    if (cut.format != KVS_FORMAT_LLAMA || cut.parsed != len)
        fail_msg("kind %d version %u ext %u rotations %d transposed %d: %zu of %zu bytes parsed",
                 s->kind, s->version, s->ext, s->rotations, s->v_trans, (size_t)cut.parsed, len);
    cutting_drop(&cut);
}

/* Every version and kind of state that llama.cpp writes is read to its end. */
static void test_kinds(void **state)
{
    static const uint32_t exts[] = {0, 8, 12};
    struct kvs_save_opts told = small;
    (void)state;

    told.format = KVS_FORMAT_LLAMA;
    for (unsigned i = 0; i < LLAMA_KINDS * 3 * 2 * 2 * 2; i++) {
        struct llama_state s = {.kind = (enum llama_kind)(i % LLAMA_KINDS),
                                .n_tokens = 150,
                                .n_layers = 3,
                                .k_row = 136,
                                .v_row = i / LLAMA_KINDS % 5 ? 136 : 0,
                                .slot = i % 7,
                                .seed = i};

        s.ext = exts[i / LLAMA_KINDS % 3];
        s.rotations = i / LLAMA_KINDS / 3 % 2;
        s.v_trans = i / LLAMA_KINDS / 6 % 2;
        s.window = i / LLAMA_KINDS / 12 % 2 ? 40 : 0;
        s.recurrent = i % 11 ? 0 : 20000;
        s.streams = i % 13 ? 0 : 3;
        s.version = (s.kind == LLAMA_SESSION ? 10 : 3) + s.rotations;
        expect_parsed(&s, s.kind == LLAMA_BARE ? &told : &small);
    }
}

/* A bare state has no magic number: it has to be told. */
static void test_bare(void **state)
{
    struct kvs_save_opts told = small;
    struct llama_state s = model;
    struct cutting cut;
    size_t len;
    (void)state;

    s.kind = LLAMA_BARE;
    told.format = KVS_FORMAT_LLAMA;
    assert_true(written_grown(s, 20, &told) <= 5);
    cut_state(&s, &small, &cut, &len);
    assert_int_equal(cut.format, KVS_FORMAT_BYTES);
    assert_int_equal(cut.parsed, 0);
    cutting_drop(&cut);
}

/* A state without cells, as an empty slot has it. */
static void test_empty(void **state)
{
    struct llama_state s = {.version = 4, .n_layers = 2, .k_row = 64, .v_row = 64};
    (void)state;

    for (s.kind = 0; s.kind < LLAMA_KINDS; s.kind++)
        if (s.kind != LLAMA_BARE && s.kind != LLAMA_SESSION)
            expect_parsed(&s, &small);
}

/* Objects that aren't states say so, whatever they begin like; a state with more behind it says
 * how much of it was understood. */
static void test_unparsed(void **state)
{
    struct kvs_save_opts told = small;
    struct cutting cut;
    struct kv_buf b;
    (void)state;

    told.format = KVS_FORMAT_LLAMA;
    for (int i = 0; i < 5; i++) {
        struct llama_state s = model;
        size_t state_len;

        s.kind = i == 1 ? LLAMA_RAW : i == 2 ? LLAMA_WHOLE : LLAMA_FILE;
        llama_state_make(&s, &b);
        state_len = b.len;
        if (i < 3) /* a cell without a sequence, in the midst */
            memset(b.data + b.len - s.n_layers * 2 * (12 + 512u * s.n_tokens) - 600, 0, 100);
        else if (i == 3)
            memset(b.data, 'x', 12);
        else
            for (uint32_t n = 0; n < 3000; n++)
                llama_u32(&b, n * 77777);
        assert_true(cut_all((const uint8_t *)b.data, b.len, i == 3 ? &told : &small, NULL, &cut));
        assert_int_equal(cut.format, i == 4 ? KVS_FORMAT_LLAMA : KVS_FORMAT_BYTES);
        assert_int_equal(cut.parsed, i == 4 ? state_len : 0);
        cutting_drop(&cut);
        kv_buf_fini(&b);
    }
}

/* A window that slides shares all but its ends, wherever the ring begins. */
static void test_window(void **state)
{
    struct llama_state s = model;
    double percent;
    (void)state;

    s.window = 512;
    s.n_layers = 2;
    s.version = 4;
    for (uint32_t n = 1000; n < 2500; n += 487) {
        s.n_tokens = n;
        percent = written_grown(s, n / 100, &small);
        assert_true(percent <= 12);
    }
}

/* Tokens of an image have one position: they are cut by their number, text behind them by
 * position. */
static void test_image(void **state)
{
    struct llama_state s = model, other;
    struct cutting cut;
    size_t len;
    (void)state;

    s.version = 4;
    s.ext = 12;
    s.image = 700;
    assert_true(written_grown(s, 20, &small) <= 5);
    cut_state(&s, &small, &cut, &len);
    assert_true(cut.longest <= 64 * 512 + 12);
    assert_true(cut.manifest.n_chunks <= 8 * (2000 / 64 + 4) + 10);
    cutting_drop(&cut);
    other = s;
    other.n_tokens = 900;
    assert_true(written(&s, &other, &small) <= 10);
}

/* The recurrent state of a hybrid is written anew each time, the caches before it are shared. */
static void test_recurrent(void **state)
{
    struct llama_state s = model;
    (void)state;

    s.recurrent = 4000;
    assert_true(written_grown(s, 20, &small) <= 5);
    s.recurrent = 300 << 10;
    s.kind = LLAMA_WHOLE;
    expect_parsed(&s, &small);
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
        s.ext = (uint32_t[]){0, 8, 12}[rng_below(&rng, 3)];
        s.second = rng_below(&rng, 2) ? 50 : 0;
        s.window = rng_below(&rng, 2) ? 50 : 0;
        s.recurrent = rng_below(&rng, 2) ? 100 : 0;
        s.image = rng_below(&rng, 2) ? 100 : 0;
        s.rotations = rng_below(&rng, 2);
        s.version = 3 + s.rotations;
        s.kind = (enum llama_kind)rng_below(&rng, LLAMA_KINDS);
        opts.format = rng_below(&rng, 2) ? KVS_FORMAT_AUTO : KVS_FORMAT_LLAMA;
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

/* Cells far apart in layers of tiny rows: pieces don't become as many as cells. */
static void test_scattered_cells(void **state)
{
    enum { CELLS = 64, LAYERS = 16, ROW = 2 };
    struct rng rng = {1};
    struct cutting cut;
    struct kv_buf b = KV_BUF_INIT;
    (void)state;

    llama_u32(&b, 0xaf143cd8u);
    llama_u32(&b, 0);
    llama_u32(&b, 1);
    llama_u32(&b, CELLS);
    for (uint32_t i = 0; i < CELLS; i++) {
        llama_u32(&b, i * 1000 + 63); /* each the last of a range */
        llama_u32(&b, 1);
        llama_u32(&b, 0);
    }
    llama_u32(&b, 0);
    llama_u32(&b, LAYERS);
    llama_u32(&b, 0);
    llama_u32(&b, 0);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        llama_u32(&b, 1);
        llama_u32(&b, ROW);
        llama_u32(&b, 0);
        llama_row(&b, i, CELLS * ROW);
    }
    assert_true(cut_all((const uint8_t *)b.data, b.len, &small, &rng, &cut));
    assert_int_equal(cut.parsed, b.len);
    assert_true(cut.manifest.n_chunks <= 2 * 2 * LAYERS + 2); /* a row's header is one of its own */
    cutting_drop(&cut);
    kv_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_bare),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_unparsed),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_image),
        cmocka_unit_test(test_recurrent),
        cmocka_unit_test(test_slot),
        cmocka_unit_test(test_truncated_conversation),
        cmocka_unit_test(test_chunk_sizes),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_scattered_cells),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
