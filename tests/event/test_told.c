// SPDX-License-Identifier: Apache-2.0
/* Cache groups that a registration tells, and what readers make of them. */
#include "event/reader_unit.h"

#include <string.h>

#include "base/core/cache_group.h"
#include "event/reader/reader.h"
#include "event/reader/reader_state.h"

#define CHUNKED "'kv_cache_spec_kind': 'chunked_local_attention'"

static void tell(const struct kve_told_group *groups, size_t n)
{
    memset(&reader->sources.told, 0, sizeof(reader->sources.told));
    for (size_t i = 0; i < n; i++)
        assert_null(kve_told_add(&reader->sources.told, &groups[i]));
}

static struct kve_source source_of(const struct kve_reader *of, uint32_t number)
{
    struct kve_source source;

    assert_int_equal(kve_reader_source(of, number, &source), 0);
    return source;
}

static void expect_source(const struct kve_reader *of, uint32_t number, enum kv_needs needs,
                          uint32_t need, uint32_t window, uint32_t stride)
{
    struct kve_source source = source_of(of, number);

    assert_int_equal(source.kind, KVE_SOURCE_WINDOW);
    assert_int_equal(source.needs, needs);
    assert_int_equal(source.need, need);
    assert_int_equal(source.window, window);
    assert_int_equal(source.stride, stride);
}

static void sorted_lists(void **state)
{
    static const struct kve_told_group groups[] = {
        {.group = KVE_ANY_GROUP, .kind = KVE_KIND_CHUNKED, .chunk = 64},
        {.group = 7, .kind = KVE_KIND_MAMBA},
        {.group = KVE_ANY_GROUP, .kind = KVE_KIND_SLIDING, .window = 9},
        {.group = 2, .kind = KVE_KIND_CHUNKED, .chunk = 32}};
    static const struct kve_told_group *const order[] = {&groups[3], &groups[1], &groups[2],
                                                         &groups[0]};
    struct kve_told told = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(groups); i++)
        assert_null(kve_told_add(&told, &groups[i]));
    for (size_t i = 0; i < KV_COUNT(groups); i++) {
        assert_memory_equal(&told.items[i], order[i], sizeof(*order[i]));
        assert_non_null(kve_told_add(&told, &groups[i])); /* twice */
        if (groups[i].group == KVE_ANY_GROUP)
            continue;
        for (uint32_t kind = 0; kind < KVE_N_KINDS; kind++) { /* a number has one kind */
            const struct kve_told_group other = {.group = groups[i].group, .kind = kind};

            assert_non_null(kve_told_add(&told, &other));
        }
    }
    assert_ptr_equal(kve_told_find(&told, 2, KVE_KIND_CHUNKED), &told.items[0]);
    assert_ptr_equal(kve_told_find(&told, 2, KVE_KIND_UNKNOWN), &told.items[0]);
    assert_ptr_equal(kve_told_find(&told, 3, KVE_KIND_CHUNKED), &told.items[3]);
    assert_ptr_equal(kve_told_find(&told, 3, KVE_KIND_SLIDING), &told.items[2]);
    assert_null(kve_told_find(&told, 3, KVE_KIND_UNKNOWN));
    assert_null(kve_told_find(&told, 3, KVE_KIND_MAMBA));
    for (uint32_t i = 10; told.n < KVE_MAX_TOLD; i++)
        assert_null(kve_told_add(&told, &(struct kve_told_group){i, KVE_KIND_MAMBA, 0, 0, 0}));
    assert_non_null(kve_told_add(&told, &(struct kve_told_group){9, KVE_KIND_MAMBA, 0, 0, 0}));
}

static void impossible_groups(void **state)
{
    static const struct {
        struct kve_told_group group; /* number, kind, block size, window, chunk */
        bool possible;
    } cases[] = {
        {{1, KVE_KIND_CHUNKED, 0, 0, 64}, true},    {{1, KVE_KIND_CHUNKED, 32, 0, 64}, true},
        {{1, KVE_KIND_CHUNKED, 128, 0, 64}, false}, {{1, KVE_KIND_CHUNKED, 0, 0, 40}, false},
        {{1, KVE_KIND_CHUNKED, 0, 0, 0}, false},    {{1, KVE_KIND_CHUNKED, 0, 40, 64}, false},
        {{1, KVE_KIND_SLIDING, 0, 40, 0}, true},    {{1, KVE_KIND_SLIDING_MLA, 4, 40, 0}, true},
        {{1, KVE_KIND_SLIDING, 0, 0, 0}, false},    {{1, KVE_KIND_SLIDING, 0, 40, 64}, false},
        {{1, KVE_KIND_FULL, 0, 0, 0}, true},        {{1, KVE_KIND_MAMBA, 64, 0, 0}, true},
        {{1, KVE_KIND_MAMBA, 0, 0, 64}, false},     {{1, KVE_KIND_UNKNOWN, 0, 0, 0}, false},
        {{1, KVE_N_KINDS, 0, 0, 0}, false},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++)
        if ((kve_told_problem(&cases[i].group, 16) == NULL) != cases[i].possible)
            fail_msg("case %zu", i);
    for (int kind = KVE_KIND_UNKNOWN + 1; kind < KVE_N_KINDS; kind++) {
        const char *name = kve_kind_name((enum kve_kind)kind);

        assert_int_equal(kve_kind_of((struct kv_str){name, strlen(name)}), kind);
    }
    assert_int_equal(kve_kind_of((struct kv_str){"chunked", 7}), KVE_KIND_UNKNOWN);
}

/* Events don't tell a chunk's length. Where the registration does, the group is a window. */
static void chunks(void **state)
{
    static const struct kve_told_group one = {1, KVE_KIND_CHUNKED, 0, 0, 16};
    static const struct kve_told_group odd = {1, KVE_KIND_CHUNKED, 0, 0, 20};
    static const struct kve_told_group every = {KVE_ANY_GROUP, KVE_KIND_CHUNKED, 0, 0, 24};

    (void)state;
    event(MAP_1 ", 'group_idx': 1, " CHUNKED "}");
    expect_none(KVE_SKIP_GROUP);
    assert_true(kve_reader_skips_group(reader));

    use_reader(NULL);
    tell(&one, 1);
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    event(MAP_1 ", 'group_idx': 1, " CHUNKED "}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_CHUNK, 4, 16, 1);
    assert_false(kve_reader_skips_group(reader));
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 1}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_CHUNK, 4, 16, 1);
    kve_reader_reset(reader); /* another process of the engine: the registration stays */
    event("{'type': 'BlockStored', 'block_hashes': [1], 'block_size': 8, 'token_ids': "
          "[1,2,3,4,5,6,7,8], 'group_idx': 1, " CHUNKED "}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_CHUNK, 2, 16, 2);

    use_reader(NULL);
    tell(&odd, 1); /* no whole number of the event's blocks */
    event("{'type': 'BlockStored', 'block_hashes': [1], 'block_size': 8, 'token_ids': "
          "[1,2,3,4,5,6,7,8], 'group_idx': 1, " CHUNKED "}");
    expect_none(KVE_SKIP_GROUP);
    event("{'type': 'BlockStored', 'block_hashes': [1], 'block_size': 2, 'token_ids': "
          "[1,2], 'group_idx': 1, " CHUNKED "}"); /* smaller blocks of chunks aren't followed */
    expect_none(KVE_SKIP_GROUP);

    use_reader(NULL);
    tell(&every, 1);
    event(MAP_1 ", 'group_idx': 5, " CHUNKED "}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_CHUNK, 6, 24, 1);
    assert_true(kve_reader_skips_group(reader)); /* as long as there is no main group */
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    assert_false(kve_reader_skips_group(reader));
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention', 'medium': 'CPU', "
                "'locality': 'LOCAL'}"); /* a connector's block pool looks chunks up otherwise */
    assert_true(kve_reader_skips_group(reader));
}

/* Kind, window and size of the registration count where events have none, and not before them. */
static void what_events_lack(void **state)
{
    static const struct kve_told_group groups[] = {
        {0, KVE_KIND_SLIDING, 8, 20, 0}, {2, KVE_KIND_FULL, 0, 0, 0}, {3, KVE_KIND_MAMBA, 8, 0, 0}};

    (void)state;
    tell(groups, 3);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 3}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_STATE, 1, 0, 2);
    event(MAP_1 ", 'group_idx': 2}"); /* without a kind only group 0 is full attention otherwise */
    assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->source, 0);
    event("{'type': 'BlockStored', 'block_hashes': [1], 'block_size': 8, 'token_ids': "
          "[1,2,3,4,5,6,7,8], 'group_idx': 0}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_RUN, 3, 20, 2);
    assert_int_equal(reader->sources.differs, 0);
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'sliding_window', "
                "'kv_cache_spec_sliding_window': 10}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_RUN, 3, 10, 1);
    assert_int_equal(reader->sources.differs, 1);
    event(MAP_1 ", 'group_idx': 2, 'kv_cache_spec_kind': 'mamba'}");
    assert_int_equal(reader->sources.differs, 1 | 2);
}

/* A key inside of a block doesn't tell that the group's blocks have another size than was told. */
static void keys_inside_of_blocks(void **state)
{
    static const struct kve_told_group groups[] = {{3, KVE_KIND_MAMBA, 16, 0, 0}};

    (void)state;
    tell(groups, 1);
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    event(
        "{'type': 'BlockStored', 'block_hashes': [4], 'block_size': 16, 'token_ids': "
        "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16], 'group_idx': 3, 'kv_cache_spec_kind': 'mamba'}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_STATE, 1, 0, 4);
    event(MAP_1 ", 'group_idx': 3, 'kv_cache_spec_kind': 'mamba'}");
    expect_source(reader, batch.ops[0].source, KV_NEEDS_STATE, 1, 0, 4);
    assert_int_equal(reader->sources.differs, 0);
}

static void lists(void **state)
{
    static const struct kve_told_group groups[] = {{1, KVE_KIND_CHUNKED, 0, 0, 16},
                                                   {3, KVE_KIND_SLIDING, 0, 9, 0},
                                                   {KVE_ANY_GROUP, KVE_KIND_CHUNKED, 0, 0, 24}};
    struct kve_listed_group list[KVE_MAX_LISTED];

    (void)state;
    tell(groups, 3);
    assert_int_equal(kve_sources_list(&reader->sources, 0, 4, list), 2);
    event(MAP_1 ", 'group_idx': 2, 'kv_cache_spec_kind': 'full_attention'}");
    event(MAP_1 ", 'group_idx': 1, " CHUNKED "}");
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'unknown'}");
    assert_int_equal(kve_sources_list(&reader->sources, 0, 4, list), 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(list[i].is.group, i);
        assert_int_equal(list[i].seen, i < 3);
    }
    assert_false(list[0].is.is_main || list[0].is.is_window);
    assert_int_equal(list[1].is.needs, KV_NEEDS_CHUNK);
    assert_int_equal(list[1].is.need, 4);
    assert_true(list[2].is.is_main);
    assert_int_equal(list[3].is.needs, KV_NEEDS_RUN);
    assert_int_equal(list[3].is.need, 2);
    assert_int_equal(kve_sources_list(&reader->sources, 8, 4, list), 2); /* another rank */
}

/* Return how many of a group's blocks a match behind its block @m needs, as kve_source has it. */
static uint32_t needed_of(const struct kve_group *g, uint32_t m)
{
    if (g->needs == KV_NEEDS_CHUNK)
        return m % g->need;
    return KV_MIN(m, g->need); /* of a state 1 */
}

/* The needs that readers tell of a group follow the formula of struct kv_cache_group. */
static void one_formula(void **state)
{
    static const enum kv_needs needs[] = {[KVE_KIND_SLIDING] = KV_NEEDS_RUN,
                                          [KVE_KIND_MAMBA] = KV_NEEDS_STATE,
                                          [KVE_KIND_CHUNKED] = KV_NEEDS_CHUNK};
    static const uint8_t kinds[] = {KVE_KIND_SLIDING, KVE_KIND_MAMBA, KVE_KIND_CHUNKED};
    uint64_t rng = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(300); round++) {
        static const uint32_t sizes[] = {1, 2, 4, 8, 12}; /* the registered size is 4 */
        uint8_t kind = kinds[unit_below(&rng, KV_COUNT(kinds))];
        uint32_t size = sizes[unit_below(&rng, KV_COUNT(sizes))], span = 0;
        struct kve_listed_group list[KVE_MAX_LISTED];
        struct kv_cache_group group;

        if (kind == KVE_KIND_SLIDING)
            span = 2 + (uint32_t)unit_below(&rng, 100);
        else if (kind == KVE_KIND_CHUNKED)
            span = KV_MAX(size, 4u) * (1 + (uint32_t)unit_below(&rng, 20));
        group = (struct kv_cache_group){needs[kind], size, span};
        tell(&(struct kve_told_group){1, kind, size, kind == KVE_KIND_SLIDING ? span : 0,
                                      kind == KVE_KIND_CHUNKED ? span : 0},
             1);
        assert_int_equal(kve_sources_list(&reader->sources, 0, 4, list), 1);
        if (!list[0].is.is_window) { /* smaller blocks of chunks aren't followed */
            assert_true(kind == KVE_KIND_CHUNKED && size < 4);
            continue;
        }
        assert_int_equal(list[0].is.needs, group.needs);
        assert_int_equal(list[0].is.stride * 4, size * list[0].is.parts);
        for (uint32_t m = 0; m < 60; m++)
            assert_int_equal(needed_of(&list[0].is, m), m - kv_cache_group_first(&group, m));
    }
}

/* A replica's reader learns from a dump what a match needs of each group; its own registration stays. */
static void replicas(void **state)
{
    static const struct kve_told_group chunk = {1, KVE_KIND_CHUNKED, 0, 0, 16};
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4};
    struct kv_buf text = KV_BUF_INIT;
    struct kve_reader *other;
    struct kv_json_writer w;
    struct kv_json json;
    struct kv_str key;

    (void)state;
    tell(&chunk, 1);
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    event(MAP_1 ", 'group_idx': 1, " CHUNKED "}");
    event(MAP_1 ", 'group_idx': 2, 'kv_cache_spec_kind': 'full_attention'}");
    event(MAP_1 ", 'group_idx': 3, 'kv_cache_spec_kind': 'mamba'}");
    event(MAP_1 ", 'group_idx': 4, 'kv_cache_spec_kind': 'sliding_window', "
                "'kv_cache_spec_sliding_window': 9}");
    kv_json_writer_init(&w, &text);
    kv_json_begin_object(&w);
    kve_reader_write(reader, &w);
    kv_json_end_object(&w);
    assert_int_equal(kve_reader_create(&opts, &other), 0);
    kv_json_init(&json, text.data, text.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        assert_int_equal(kve_reader_read(other, &json, key), 1);
    assert_int_equal(kv_json_finish(&json), 0);
    expect_source(other, 1, KV_NEEDS_CHUNK, 4, 16, 1);
    expect_source(other, 2, KV_NEEDS_ALL, 1, 0, 1);
    expect_source(other, 3, KV_NEEDS_STATE, 1, 0, 1);
    expect_source(other, 4, KV_NEEDS_RUN, 2, 9, 1);
    use_reader(NULL);
    tell(&chunk, 1);
    assert_int_equal(kve_reader_take_over(reader, other), 0);
    assert_int_equal(reader->sources.told.n, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 1}");
    assert_int_equal(batch.ops[0].source, 1);
    event(MAP_1 ", 'group_idx': 1, " CHUNKED "}");
    assert_int_equal(batch.ops[0].source, 1);
    kve_reader_destroy(other);
    kv_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(sorted_lists),     T(impossible_groups),     T(chunks),
        T(what_events_lack), T(keys_inside_of_blocks), T(lists),
        T(replicas),         T(one_formula),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
