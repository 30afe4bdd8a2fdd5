// SPDX-License-Identifier: Apache-2.0
/* Forms that some publishers give their events: roots, adapters, bytes, media, components, chunks. */
#include "event/reader_unit.h"

#include "event/reader/reader.h"
#include "event/wire/media.h"

/* An unsigned parent is 0 at a root, until a block has that hash. */
static void test_parent_0(void **state)
{
    static const char *const roots[] = {"nil", "0", "x''", "x'0000000000000000'",
                                        "x'00000000000000000000000000000000'"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(roots); i++) {
        event("['BlockStored', [1], %s, [1,2,3,4], 4]", roots[i]);
        assert_false(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->has_parent);
    }
    event("['BlockStored', [1], x'0000000000000002', [1,2,3,4], 4]");
    assert_true(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->has_parent);
    event("['BlockRemoved', [0], 'GPU']"); /* no store */
    event("['BlockStored', [1], 0, [1,2,3,4], 4]");
    assert_false(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->has_parent);
    event("['BlockStored', [0], nil, [1,2,3,4], 4]");
    event("['BlockStored', [1], 0, [1,2,3,4], 4]");
    assert_true(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->has_parent);
    kve_reader_reset(reader);
    event("['BlockStored', [1], 0, [1,2,3,4], 4]");
    assert_false(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->has_parent);
}

/* A number doesn't tell which adapter's a block is. */
static void test_adapters_by_number(void **state)
{
    static const char *const adapters[] = {"1", "0", "'a3c0'"}, *const none[] = {"nil", "-1", "''"};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        event(MAP_1 ", 'lora_id': %s, 'lora_name': nil}", adapters[i]);
        expect_none(KVE_SKIP_NAMESPACE);
        event(STORED_1 ", %s, 'GPU']", adapters[i]);
        expect_none(KVE_SKIP_NAMESPACE);
        assert_int_equal(reader->n_lost, 1); /* the engine has blocks that nothing can name */
        assert_int_equal(reader->lost[0].tiers, 1u << KV_TIER_DEVICE);
        event(MAP_1 ", 'lora_id': %s, 'lora_name': 'a'}", adapters[i]);
        expect_block(1, local("a", "", 0));
        event(MAP_1 ", 'lora_id': %s, 'extra_keys': [[{'type': 'lora', 'name': 'a'}]]}",
              adapters[i]);
        expect_block(1, local("a", "", 0));
        event(MAP_1 ", 'lora_id': %s}", none[i]);
        expect_block(1, local("", "", 0));
        event(STORED_1 ", %s, 'GPU']", none[i]);
        expect_block(1, local("", "", 0));
    }
    /* A tier's event without the number may be an adapter's, too. */
    event(MAP_1 ", 'medium': 'CPU'}");
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    /* Named by hash alone: the index knows whose it is. */
    event("{'type': 'BlockStored', 'block_hashes': [1], 'lora_id': 3, 'medium': 'CPU'}");
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
}

/* The bytes of @text as msgpack, in bytes of msgpack, behind what @out has. */
static void put_bytes(struct kv_buf *out, const char *text)
{
    struct kv_buf inner = KV_BUF_INIT;

    pack(&inner, "%s", text);
    kv_msgpack_put_bin(out, inner.data, inner.len);
    kv_buf_fini(&inner);
}

/* Batch, events or single events packed as bytes. */
static void test_bytes(void **state)
{
    static const char one[] = MAP_1 "}", two[] = "['BlockRemoved', [2], 'GPU']";
    struct kv_buf out = KV_BUF_INIT;

    (void)state;
    put_bytes(&out, "[1.5, [" MAP_1 "}, ['BlockRemoved', [2], 'GPU']], 3]");
    assert_int_equal(decode_bytes(out.data, out.len), 0);
    assert_int_equal(batch.n_ops, 2);
    assert_int_equal(batch.ops[1].rank, 3);
    kv_buf_clear(&out);
    kv_msgpack_put_array(&out, 3);
    pack(&out, "1.5");
    put_bytes(&out, "[" MAP_1 "}, ['BlockRemoved', [2], 'GPU']]");
    pack(&out, "3");
    assert_int_equal(decode_bytes(out.data, out.len), 0);
    assert_int_equal(batch.n_ops, 2);
    kv_buf_clear(&out);
    kv_msgpack_put_array(&out, 2);
    pack(&out, "1.5");
    kv_msgpack_put_array(&out, 5);
    put_bytes(&out, one);
    put_bytes(&out, two);
    pack(&out, "x''");
    pack(&out, "x'93a1'"); /* cut short */
    pack(&out, "x'9000'"); /* bytes behind the event */
    assert_int_equal(decode_bytes(out.data, out.len), 0);
    assert_int_equal(batch.n_ops, 2);
    assert_int_equal(batch.skipped[KVE_SKIP_MALFORMED], 3);
    kv_buf_fini(&out);
    assert_int_equal(decode("[1.5, x'93']"), -EPROTO);
    assert_int_equal(decode("x'93'"), -EPROTO);
    assert_int_equal(decode("x''"), -EPROTO);
}

static void test_names_of_media(void **state)
{
    static const struct {
        const char *name;
        enum kv_tier tier;
        bool is_connector;
    } media[] = {
        {"hbm", KV_TIER_DEVICE, false},        {"NPU", KV_TIER_DEVICE, false},
        {"xpu:1", KV_TIER_DEVICE, false},      {"cuda:12", KV_TIER_DEVICE, false},
        {"DRAM", KV_TIER_HOST, true},          {"Host", KV_TIER_HOST, true},
        {"SSD", KV_TIER_DISK, true},           {"fs", KV_TIER_DISK, true},
        {"OBJ", KV_TIER_EXTERNAL, true},       {"SHARED_STORAGE", KV_TIER_EXTERNAL, true},
        {"cpu", KV_TIER_HOST, true},           {"CPU_PINNED", KV_TIER_HOST, false},
        {"EXTERNAL", KV_TIER_EXTERNAL, false},
    };
    static const char *const unknown[] = {"TAPE", "GPU2", "GPU:", ":1", "1", "GPU:x", "G P U"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(media); i++) {
        const struct kve_medium *m =
            kve_medium_find((struct kv_str){media[i].name, strlen(media[i].name)});

        assert_non_null(m);
        assert_int_equal(m->tier, media[i].tier);
        assert_int_equal(kve_is_connector_tier(m), media[i].is_connector);
    }
    for (size_t i = 0; i < KV_COUNT(unknown); i++)
        assert_null(kve_medium_find((struct kv_str){unknown[i], strlen(unknown[i])}));
}

/* Blocks in a tier of an unknown name may be anywhere; their removal changes nothing. */
static void test_unknown_media(void **state)
{
    (void)state;
    event(MAP_1 ", 'medium': 'TAPE'}");
    expect_none(KVE_SKIP_MEDIUM);
    assert_int_equal(reader->n_lost, 1);
    assert_int_equal(reader->lost[0].source, 0);
    event("['BlockRemoved', [1], 'TAPE']");
    expect_none(KVE_SKIP_MEDIUM);
    assert_int_equal(reader->n_lost, 0);
    for (int i = 0; i < 20; i++)
        event("['BlockRemoved', [1], 'medium %d of a name that is very long \1']", i);
    assert_int_equal(reader->unknown_media.n_items, KVE_MAX_UNKNOWN_MEDIA);
    assert_string_equal(reader->unknown_media.items[0].name, "TAPE");
    assert_int_equal(reader->unknown_media.items[0].n, 2);
    assert_int_equal(reader->unknown_media.n_others, 20 - (KVE_MAX_UNKNOWN_MEDIA - 1));
}

/* Blocks that lack a component which others have serve nobody knows which prompts. */
static void test_components(void **state)
{
    const struct kve_op *op;

    (void)state;
    event(MAP_1 ", 'component_types': ['FULL', 'SWA']}");
    op = expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_true(op->single && !op->incomplete);
    event(MAP_1 ", 'component_types': ['FULL']}");
    op = expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_true(op->single && op->incomplete);
    event(MAP_1 ", 'component_types': ['SWA', 'FULL']}");
    assert_false(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->incomplete);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'component_types': ['SWA']}");
    assert_true(expect_op(KVE_OP_STORE_KNOWN, KV_TIER_DEVICE, 1)->incomplete);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'component_types': ['FULL']}");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'component_types': ['FULL', 'SWA']}");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1]}");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    assert_int_equal(reader->n_lost, 0);
    event(MAP_1 ", 'component_types': ['FULL', 'SWA', 'MAMBA']}"); /* which those before lacked */
    assert_int_equal(reader->n_lost, 1);
    event(MAP_1 ", 'component_types': nil}");
    assert_false(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->single);
    event(MAP_1 ", 'component_types': 'FULL'}");
    expect_none(KVE_SKIP_MALFORMED);
}

#define CHUNK(hashes, tokens, more)                                               \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'token_ids': [" tokens \
    "], 'block_size': 4, 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'" more "}"
#define TWO(more) CHUNK("1, 2", "1,2,3,4,5,6,7,8", more)

static void test_chunks(void **state)
{
    (void)state;
    event(TWO(", 'medium': 'GPU'"));
    event(TWO(", 'medium': 'CPU_PINNED'"));
    event(TWO(", 'medium': 'CPU', 'locality': 'LOCAL'"));
    event(TWO(", 'medium': 'CPU', 'extra_keys': [nil, ['a']]"));
    event(MAP_1 ", 'medium': 'CPU'}"); /* of no group */
    for (int t = 0; t < KV_N_TIERS; t++)
        assert_int_equal(reader->chunk[t], 0);
    event(TWO(", 'medium': 'CPU'"));
    event(TWO(", 'medium': 'CPU', 'ownership': 'nfs'"));
    assert_int_equal(reader->chunk[KV_TIER_HOST], 2);
    event(TWO(", 'medium': 'STORAGE'"));
    assert_int_equal(reader->chunk[KV_TIER_DISK], 2);
    assert_int_equal(reader->n_lost, 0);
    event(CHUNK("1", "1,2,3,4", ", 'medium': 'CPU'"));
    assert_int_equal(reader->chunk[KV_TIER_HOST], KVE_CHUNK_VARIES);
    assert_int_equal(reader->n_lost, 1);
    assert_int_equal(reader->lost[0].tiers, 1u << KV_TIER_HOST);
    event(MAP_1 ", 'medium': 'STORAGE', 'ownership': 'mooncake'}"); /* a single block beside them */
    assert_int_equal(reader->chunk[KV_TIER_DISK], KVE_CHUNK_VARIES);
    event(TWO(", 'medium': 'CPU'")); /* a clear of the tier may have ended the doubt */
    assert_int_equal(reader->n_lost, 1);
    kve_reader_reset(reader);
    assert_int_equal(reader->chunk[KV_TIER_HOST], 0);
}

static void test_block_size_is_told(void **state)
{
    (void)state;
    event("['BlockStored', [1], nil, [1,2,3,4,5,6,7,8], 8]");
    expect_none(KVE_SKIP_BLOCK_SIZE);
    assert_int_equal(reader->other_block_size, 8);
    event("['BlockStored', [1], nil, [1,2], 2]");
    assert_int_equal(reader->other_block_size, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_parent_0),       T(test_adapters_by_number), T(test_bytes),
        T(test_names_of_media), T(test_unknown_media),      T(test_components),
        T(test_chunks),         T(test_block_size_is_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
