// SPDX-License-Identifier: Apache-2.0
/* States that aren't those of their tokens, and stores that hold states of several layouts. */
#define URI "memory://layouts"

enum { N = 200, DAY_S = 86400 };

#include "llama/cache_unit.h"

static const struct toy_kind plain = {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8};
static const struct toy_kind window = {
    .n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20};

static kv_store_ext ext;

/* Touch like a store whose clock tells every two touches apart. */
static int slow_touch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int found = 0;

    for (size_t i = 0; i < n; i++) {
        memory_space(URI)->now_s++;
        found += memory_touch_chunks(self, hashes + i * hash_len, hash_len, 1);
    }
    return found;
}

static void open_cache(void)
{
    struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "model", .block_tokens = 16};

    opts.libllama = &toy_table;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, URI, false, &t.store), 0);
    assert_int_equal(kvl_open(t.store, &opts, &t.cache), 0);
}

static int setup(void **state)
{
    (void)state;
    make_contexts();
    for (int32_t i = 0; i < N; i++)
        t.tokens[i] = i * i % 1000;
    ext = *memory_ext();
    ext.touch_chunks = slow_touch;
    open_cache();
    return 0;
}

/* Make @toy a memory of @kind that decoded the first @n tokens. */
static void decode(struct toy_memory *toy, const struct toy_kind *kind, size_t n)
{
    toy_init(toy, kind);
    toy_decode(toy, 0, t.tokens, n);
}

static int64_t save(size_t n)
{
    return kvl_save(t.cache, &t.ctx, 0, t.tokens, n, NULL);
}

static int64_t load(const struct toy_kind *kind, size_t n)
{
    struct kvl_result r = KVL_RESULT_INIT;
    int64_t got;

    toy_init(t.other, kind);
    got = kvl_load(t.cache, &t.ctx2, 0, t.tokens, n, &r);
    assert_int_equal(toy_pos_max(t.other, 0), got - 1);
    assert_int_equal(r.n_tokens, got);
    assert_int_equal(r.blocks != 0, got != 0);
    assert_true(got || !r.snapshot);
    return got;
}

static size_t collect(uint64_t age_s)
{
    const struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = DAY_S, .prefix_age_s = age_s};
    struct kvs_gc_result r = KVS_GC_RESULT_INIT;

    assert_int_equal(kvs_gc(t.store, &opts, &r), 0);
    return r.deleted_chunks;
}

/* -- not the state of the tokens ---------------------------------------------------------------- */

static void remove_tokens(int32_t from, int32_t to)
{
    for (int32_t i = from; i < to; i++)
        toy_find(t.toy, 0, i)->seq = -1;
}

/* Give positions as M-RoPE does: all cells of an image have one, and text goes on behind it. */
static void make_image(int32_t from, int32_t to, int32_t n)
{
    for (int32_t i = from; i < to; i++)
        toy_find(t.toy, 0, i)->position = -2;
    for (int32_t i = to; i < n; i++)
        toy_find(t.toy, 0, i)->position = from + 1 + i - to;
    for (int i = 0; i < TOY_CELLS; i++)
        if (t.toy->cells[0][i].position == -2)
            t.toy->cells[0][i].position = from;
}

/* Save the state as bytes: a caller can't know that its positions are others. */
static int64_t save_bytes(size_t n)
{
    size_t len = toy_get_size(&t.ctx, 0);
    uint8_t *state = malloc(len);
    int64_t saved;

    assert_non_null(state);
    assert_int_equal(toy_get_data(&t.ctx, state, len, 0), len);
    saved = kvl_save_state(t.cache, t.tokens, n, KVL_FORM_SEQUENCE, state, len, NULL);
    free(state);
    return saved;
}

static void test_other_positions_are_refused(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .old_prefix = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .extras = 8},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .v_row = 8, .extras = 12, .v_trans = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20},
        {.n_streams = 4, .n_layers = 2, .k_row = 12, .window = 20, .has_rotations = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20, .extras = 8},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        decode(t.toy, &kinds[i], 100);
        remove_tokens(10, 30);
        assert_int_equal(save(100), 0);
        for (size_t n = 80; n <= 100; n += 20)
            assert_int_equal(save_bytes(n), 0);
        decode(t.toy, &kinds[i], 130);
        make_image(10, 110, 130);
        assert_int_equal(toy_pos_max(t.toy, 0), 30);
        assert_int_equal(save(130), 0);
        assert_int_equal(save_bytes(130), 0);
        assert_int_equal(n_chunks(0), 0);
        decode(t.toy, &kinds[i], 100);
        assert_int_equal(save_bytes(101), kinds[i].window ? 100 : 96); /* one wasn't decoded */
        assert_int_equal(load(&kinds[i], 200), kinds[i].window ? 100 : 96);
        assert_int_equal(save_bytes(99), kinds[i].window ? 0 : 96);
        teardown(NULL);
        setup(NULL);
    }
}

/* Two sequences of one context whose positions complete each other. */
static void test_two_sequences_are_no_prefix(void **state)
{
    size_t len;
    uint8_t *bytes;

    (void)state;
    decode(t.toy, &plain, 48);
    len = toy_get_size(&t.ctx, 0);
    bytes = malloc(len);
    assert_non_null(bytes);
    assert_int_equal(toy_get_data(&t.ctx, bytes, len, 0), len);
    for (size_t i = 0; i < 48; i += 2)
        bytes[16 + 12 * i + 8] = 1;
    assert_int_equal(kvl_save_state(t.cache, t.tokens, 48, KVL_FORM_SEQUENCE, bytes, len, NULL), 0);
    assert_int_equal(n_chunks(0), 0);
    free(bytes);
}

/* K and V of images are under negative tokens, which name no image. */
static void test_media_end_the_prefix(void **state)
{
    void *got;
    size_t len;

    (void)state;
    for (size_t i = 40; i < 100; i++)
        t.tokens[i] = -1;
    decode(t.toy, &plain, 150);
    assert_int_equal(save(150), 32);
    assert_int_equal(kvl_find(t.cache, t.tokens, 150), 32);
    assert_int_equal(load(&plain, 150), 32);
    assert_int_equal(kvl_load_state(t.cache, t.tokens, 150, KVL_FORM_SEQUENCE, &got, &len, NULL),
                     32);
    free(got);
    assert_int_equal(n_chunks('b'), 2);
    decode(t.toy, &window, 150);
    assert_int_equal(save(150), 0);
    assert_int_equal(save_bytes(150), 0);
    t.tokens[0] = -5;
    assert_int_equal(save(150), 0);
    assert_int_equal(save_bytes(150), 0);
    assert_int_equal(kvl_find(t.cache, t.tokens, 150), 0);
    assert_int_equal(n_chunks('s'), 0);
}

/* -- layouts ------------------------------------------------------------------------------------ */

/* A new llama.cpp writes states in another form: its saves load, with the blocks that are there. */
static void test_another_version(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .old_prefix = true},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .has_rotations = true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        size_t n = 100 + 32 * i;

        assert_int_equal(load(&kinds[i], 100), 0);
        decode(t.toy, &kinds[i], n);
        assert_int_equal(save(n), n / 16 * 16);
        assert_int_equal(load(&kinds[i], n), n / 16 * 16);
        assert_int_equal(n_chunks('l'), i + 1);
        assert_int_equal(n_chunks('b'), n / 16);
    }
    for (size_t i = 0; i < KV_COUNT(kinds); i++) /* and the old one's still load */
        assert_int_equal(load(&kinds[i], N), 160);
}

/* Of states that can't be cut: each layout finds its own, whatever others are longer. */
static void test_snapshots_of_another_layout(void **state)
{
    struct toy_kind kinds[7];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++)
        kinds[i] = window;
    kinds[0].k_type = 1;
    kinds[1].k_type = 8;
    kinds[2].v_row = 10;
    kinds[3].n_streams = 4;
    kinds[4].n_streams = 8;
    kinds[5].v_trans = true;
    kinds[6].has_rotations = true;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) { /* the longest comes first */
        decode(t.toy, &kinds[i], 150 - 10 * i);
        assert_int_equal(save(N), 150 - 10 * i);
        decode(t.toy, &kinds[i], 50);
        assert_int_equal(save(N), 50);
    }
    assert_int_equal(n_chunks('s'), 14);
    assert_int_equal(n_chunks('l'), 7);
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        assert_int_equal(load(&kinds[i], N), 150 - 10 * i);
        assert_int_equal(load(&kinds[i], 60), 50);
    }
}

/* Two memories that a state doesn't tell apart: a refused snapshot doesn't hide a shorter one. */
static void test_refused_snapshots(void **state)
{
    struct toy_kind one = {.n_streams = 1, .n_layers = 2, .recurrent = true}, two = one;

    (void)state;
    two.old_prefix = true;
    decode(t.toy, &two, 40);
    assert_int_equal(save(40), 40);
    decode(t.toy, &one, 100);
    assert_int_equal(save(100), 100);
    assert_int_equal(load(&two, 150), 40);
    assert_int_equal(load(&one, 150), 100);
    assert_int_equal(load(&one, 50), 0);
}

/* -- use ---------------------------------------------------------------------------------------- */

/* Layouts that nobody saves or loads expire, and make room for others. */
static void test_dead_layouts_expire(void **state)
{
    struct toy_kind kind = plain;

    (void)state;
    for (kind.k_type = 1; kind.k_type <= 8; kind.k_type++) {
        decode(t.toy, &kind, 100);
        assert_int_equal(save(100), 96);
    }
    assert_int_equal(save(100), 96);
    decode(t.toy, &kind, 100);
    assert_int_equal(save(100), -ENOSPC);
    decode(t.toy, &plain, 100);
    t.toy->kind.k_type = 8;
    for (int i = 0; i < 4; i++) {
        memory_space(URI)->now_s += DAY_S / 2;
        assert_int_equal(save(100), 96);
        collect(DAY_S);
    }
    assert_int_equal(n_chunks('l'), 1);
    decode(t.toy, &kind, 100);
    assert_int_equal(save(100), 96);
}

/* A damaged layout that can't be deleted blocks its number, no more. */
static void test_a_damaged_layout_stays(void **state)
{
    (void)state;
    decode(t.toy, &plain, 100);
    assert_int_equal(save(100), 96);
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        o->data[o->len - 1] ^= o->hash[3] == 'l';
    ext.delete_chunk = NULL;
    kvl_close(t.cache);
    kvs_close(t.store);
    open_cache();
    assert_int_equal(load(&plain, 100), 0);
    assert_int_equal(save(100), 96);
    assert_int_equal(n_chunks('l'), 2);
    assert_int_equal(load(&plain, 100), 96);
}

/* Loads alone keep all that they need. */
static void test_loads_keep_what_they_need(void **state)
{
    static const struct toy_kind kinds[] = {
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8},
        {.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8, .window = 20},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        decode(t.toy, &kinds[i], 96);
        assert_int_equal(save(96), 96);
        for (int j = 0; j < 4; j++) {
            memory_space(URI)->now_s += DAY_S / 2;
            assert_int_equal(load(&kinds[i], 150), 96);
            assert_int_equal(collect(DAY_S), 0);
        }
        memory_space(URI)->now_s += 2 * DAY_S;
        assert_true(collect(DAY_S) > 0);
    }
}

static uint64_t used_s(uint32_t first_token)
{
    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next) {
        struct kv_prefix_header h;

        if (o->hash[3] == 'b' && kv_prefix_decode(o->hash, o->data, o->len, &h) == 0 &&
            h.first_token == first_token)
            return o->used_s;
    }
    fail_msg("no block is of token %u", first_token);
    return 0;
}

static void check_ends_are_oldest(uint32_t n)
{
    for (uint32_t i = 16; i < n; i += 16)
        assert_true(used_s(i) < used_s(i - 16));
}

/* Eviction takes the ends of chains first: what is left still loads. */
static void test_ends_are_evicted_first(void **state)
{
    (void)state;
    decode(t.toy, &plain, 100);
    assert_int_equal(save(100), 96);
    check_ends_are_oldest(96);
    toy_decode(t.toy, 0, t.tokens, 160);
    assert_int_equal(save(160), 160);
    check_ends_are_oldest(160);
    assert_int_equal(load(&plain, 70), 64);
    check_ends_are_oldest(160);
    assert_int_equal(load(&plain, N), 160);
    check_ends_are_oldest(160);
}

/* A reference of a few bytes asks for no more than a part may have. */
static void test_parts_have_a_limit(void **state)
{
    const uint8_t key[KV_PREFIX_KEY] = "KVPs";
    uint8_t head[KV_PREFIX_HEADER + KV_PREFIX_HASH + 8 + KV_PREFIX_PART_REF];
    uint8_t *payload = head + KV_PREFIX_HEADER + KV_PREFIX_HASH;
    struct kv_prefix_parts parts;

    (void)state;
    for (uint8_t more = 0; more < 2; more++) {
        struct kv_prefix_header h = {.payload_bytes = 8 + KV_PREFIX_PART_REF};

        memset(payload, 0, 8 + KV_PREFIX_PART_REF);
        payload[2] = payload[8 + KV_PREFIX_HASH + 2] = 0x10; /* 1 MiB, and a byte */
        payload[0] = payload[8 + KV_PREFIX_HASH] = more;
        memcpy(h.key, key, sizeof(h.key));
        kv_prefix_sum(payload, 8 + KV_PREFIX_PART_REF, h.payload_sum);
        kv_prefix_encode(&h, NULL, head);
        assert_int_equal(kv_prefix_check(key, head, sizeof(head)), more ? -EBADMSG : 0);
        assert_int_equal(kv_prefix_parts(head, sizeof(head), &parts), more ? -EBADMSG : 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_other_positions_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_two_sequences_are_no_prefix, setup, teardown),
        cmocka_unit_test_setup_teardown(test_media_end_the_prefix, setup, teardown),
        cmocka_unit_test_setup_teardown(test_another_version, setup, teardown),
        cmocka_unit_test_setup_teardown(test_snapshots_of_another_layout, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused_snapshots, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dead_layouts_expire, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_damaged_layout_stays, setup, teardown),
        cmocka_unit_test(test_parts_have_a_limit),
        cmocka_unit_test_setup_teardown(test_loads_keep_what_they_need, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ends_are_evicted_first, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
