// SPDX-License-Identifier: Apache-2.0
/* State of readers in dumps: for every name of an engine, another reader can continue from it. */
#include "event/reader_unit.h"

#include <string.h>

#include "event/reader/reader.h"
#include "event/reader/reader_state.h"

#define STORED \
    "{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [1,2,3,4], 'block_size': 4"

/* A reader that has read what @from would tell in a dump. */
static struct kve_reader *told(const struct kve_reader *from)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4, .rank = 9};
    struct kv_buf text = KV_BUF_INIT;
    struct kve_reader *to;
    struct kv_json_writer w;
    struct kv_json json;
    struct kv_str key;

    assert_int_equal(kve_reader_create(&opts, &to), 0);
    kv_json_writer_init(&w, &text);
    kv_json_begin_object(&w);
    kve_reader_write(from, &w);
    kv_json_end_object(&w);
    kv_json_init(&json, text.data, text.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        if (kve_reader_read(to, &json, key) != 1)
            fail_msg("unreadable: %.*s", (int)text.len, text.data);
    assert_int_equal(kv_json_finish(&json), 0);
    kv_buf_fini(&text);
    return to;
}

/* State that decides how later events are read. */
static void habits_of_the_publisher(void **state)
{
    struct kve_reader *other, *copy;

    (void)state;
    event("['BlockStored', [0], nil, [1,2,3,4], 4]");
    event(STORED ", 'component_types': ['FULL', 'SWA']}");
    event("{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], "
          "'block_size': 4, 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention', 'medium': "
          "'SSD'}");
    reader->names_ranks = true;
    copy = kve_reader_copy(reader);
    reader->names_ranks = false;
    other = told(copy);
    assert_int_equal(kve_reader_take_over(reader, other), 0);
    assert_true(reader->names_ranks);
    assert_true(reader->names_zero);
    assert_int_equal(reader->components, copy->components);
    assert_true(reader->components & ~KVE_COMPONENT_FULL);
    assert_int_equal(reader->unclear_tiers, 1u << KV_TIER_DISK);
    assert_int_equal(reader->chunk[KV_TIER_DISK], 2);
    assert_int_equal(reader->chunk[KV_TIER_HOST], 0);
    kve_reader_destroy(copy);
    kve_reader_destroy(other);
}

static void expect_same_sources(void)
{
    struct kve_reader *other = told(reader);
    struct kve_source a, b;
    uint32_t n = 0;

    for (; kve_reader_source(reader, n, &a) == 0; n++) {
        assert_int_equal(kve_reader_source(other, n, &b), 0);
        assert_string_equal(a.owner, b.owner);
        assert_int_equal(a.kind, b.kind);
        assert_int_equal(a.stride, b.stride);
        assert_int_equal(a.parts, b.parts);
    }
    assert_int_equal(kve_reader_source(other, n, &b), -ENOENT);
    kve_reader_destroy(other);
}

/* A second main group whose blocks are no whole number of the registered ones can't be followed. */
static void groups_of_odd_block_sizes(void **state)
{
    (void)state;
    event(STORED ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    event(
        "{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [1,2,3,4,5,6], 'block_size': 6, "
        "'group_idx': 1, 'kv_cache_spec_kind': 'full_attention'}");
    assert_int_equal(batch.n_ops, 0);
    assert_true(kve_reader_skips_group(reader));
    expect_same_sources();
}

/* Groups that have shown blocks below the device alone: no tier has what a match needs. */
static void groups_below_the_device(void **state)
{
    struct kve_reader *other;

    (void)state;
    event(STORED ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention', 'medium': 'GPU'}");
    event(STORED ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention', 'medium': 'CPU'}");
    event(STORED
          ", 'group_idx': 1, 'kv_cache_spec_kind': 'mamba', 'medium': 'CPU', 'ownership': 'a'}");
    assert_false(kve_reader_skips_group(reader));
    event(STORED ", 'group_idx': 2, 'kv_cache_spec_kind': 'mamba', 'medium': 'CPU'}");
    other = told(reader);
    assert_true(kve_reader_skips_group(reader));
    assert_true(kve_reader_skips_group(other));
    kve_reader_destroy(other);
    event(STORED ", 'group_idx': 2, 'kv_cache_spec_kind': 'mamba', 'medium': 'GPU'}");
    other = told(reader);
    assert_false(kve_reader_skips_group(reader));
    assert_false(kve_reader_skips_group(other));
    kve_reader_destroy(other);
}

/* The tier in which a group lives, below the device: what has shown it may be long gone. */
static void groups_at_home_below(void **state)
{
    static const char *const below =
                                 STORED ", 'group_idx': 0, 'medium': 'CPU', 'extra_keys': [nil], "
                                        "'kv_cache_spec_kind': 'mla_attention'}",
                             *const device = STORED ", 'group_idx': 2, 'medium': 'GPU', "
                                                    "'kv_cache_spec_kind': 'mla_attention'}",
                             *const offloaded = STORED ", 'group_idx': 2, 'medium': 'CPU', "
                                                       "'kv_cache_spec_kind': 'mla_attention'}";
    struct kve_reader *other, *copy;

    (void)state;
    event("%s", below);
    other = told(reader);
    assert_true(kve_reader_skips_group(other));
    assert_int_equal(kve_reader_take_over(reader, other), 0);
    kve_reader_destroy(other);
    event("%s", device); /* blocks of group 0 came before: nothing tells what these were */
    assert_int_equal(reader->n_lost, 1);
    assert_int_equal(reader->lost[0].tiers, 1u << KV_TIER_DEVICE | 1u << KV_TIER_HOST);
    other = told(reader);
    copy = kve_reader_copy(other);
    assert_false(kve_reader_skips_group(copy));
    assert_int_equal(kve_reader_take_over(reader, copy), 0);
    kve_reader_destroy(other);
    kve_reader_destroy(copy);
    event("%s", below);
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'medium': 'CPU', 'group_idx': 0}");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    event("%s", offloaded);
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    other = told(reader);
    assert_true(kve_reader_skips_group(other)); /* one lives there, another is offloaded there */
    kve_reader_destroy(other);
}

/* A dump can't put a group at home on the device. */
static void no_home_on_the_device(void **state)
{
    static const char text[] =
        "{\"groups\":[{\"group\":1,\"kind\":\"main\",\"stride\":1,\"parts\":1,"
        "\"below\":true,\"home\":true,\"tier\":0}]}";
    struct kv_json json;
    struct kv_str key;

    (void)state;
    kv_json_init(&json, text, sizeof(text) - 1);
    kv_json_object(&json);
    assert_true(kv_json_next_key(&json, &key));
    assert_int_equal(kve_reader_read(reader, &json, key), -EPROTO);
}

/* Owners of any bytes are kept under a name of their own that is text, so that JSON brings it whole. */
static void owners_of_any_bytes(void **state)
{
    static const struct kv_str owners[] = {
        {"mooncake", 8},
        {"caf\xc3\xa9", 5},
        {"b\xff", 2},
        {"b\xfe", 2},
        {"b\xef\xbf\xbd", 4}, /* what JSON would have in place of either */
        {"\0", 1},
        {"\0a", 2},
        {"a\0b", 3},
        {"a", 1},
        {"0123456789012345678901234567890123456789012345678901234567890\xff", 62},
        {"012345678901234567890123456789012345678901234567890123456789012", 63},
        {"0123456789012345678901234567890123456789012345678901234567890123", 64},
        {"0123456789012345678901234567890123456789012345\xc3\xa9 and so on, and so on", 70},
        {"\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9"
         "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9"
         "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9",
         66},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(owners); i++) /* a number each */
        assert_int_equal(kve_sources_owner(&reader->sources, owners[i]), i + 1);
    for (size_t i = 0; i < KV_COUNT(owners); i++)
        assert_int_equal(kve_sources_owner(&reader->sources, owners[i]), i + 1);
    assert_string_equal(reader->sources.items[1].owner, "mooncake");
    assert_string_equal(reader->sources.items[2].owner, "caf\xc3\xa9");
    expect_same_sources();
}

/* Groups and sources of sizes that no reader can have are refused, here or when they are taken over. */
static void impossible_sizes(void **state)
{
    static const struct {
        const char *text;
        int rc, taken;
    } cases[] = {
        {"{\"groups\":[{\"group\":1,\"kind\":\"other\",\"stride\":1,\"parts\":0}]}", -EPROTO, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"other\",\"stride\":1,\"parts\":4294967295}]}",
         -EPROTO, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"other\",\"stride\":0,\"parts\":2}]}", -EPROTO, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"main\",\"stride\":1,\"parts\":65}]}", -EPROTO, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"window\",\"window\":5,\"need\":1,\"stride\":0}]}",
         -EPROTO, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"window\",\"window\":5,\"need\":1,\"stride\":1,"
         "\"parts\":8}]}",
         1, -EPROTO},
        {"{\"sources\":[{\"owner\":\"\",\"group\":1,\"window\":5,\"need\":1,\"stride\":1,"
         "\"parts\":3}]}",
         1, -EPROTO},
        {"{\"groups\":[{\"group\":1,\"kind\":\"other\",\"stride\":1,\"parts\":2}]}", 1, 0},
        {"{\"groups\":[{\"group\":1,\"kind\":\"other\",\"stride\":0}]}", 1, 0},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 1};
        struct kve_reader *other;
        struct kv_json json;
        struct kv_str key;

        assert_int_equal(kve_reader_create(&opts, &other), 0);
        kv_json_init(&json, cases[i].text, strlen(cases[i].text));
        kv_json_object(&json);
        assert_true(kv_json_next_key(&json, &key));
        assert_int_equal(kve_reader_read(other, &json, key), cases[i].rc);
        if (cases[i].rc == 1)
            assert_int_equal(kve_reader_take_over(reader, other), cases[i].taken);
        kve_reader_destroy(other);
        /* No event of such a group may divide by its size. */
        event("{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [], 'group_idx': 1, "
              "'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 5}");
        event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 1, "
              "'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 5}");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(habits_of_the_publisher),
        cmocka_unit_test_setup_teardown(groups_of_odd_block_sizes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(groups_below_the_device, set_up, tear_down),
        cmocka_unit_test_setup_teardown(groups_at_home_below, set_up, tear_down),
        cmocka_unit_test_setup_teardown(no_home_on_the_device, set_up, tear_down),
        cmocka_unit_test_setup_teardown(owners_of_any_bytes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(impossible_sizes, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
