// SPDX-License-Identifier: Apache-2.0
/* Parts of a block's hash beside its tokens: LoRA adapter, cache salt (given or inherited),
 * multimodal objects. */
#include "event/reader_unit.h"

/* -- LoRA, salts ------------------------------------------------------------------------------- */

static void test_lora(void **state)
{
    (void)state;
    event(STORED_1 ", 3, 'GPU', 'adapter']");
    expect_block(1, local("adapter", "", 0));
    event(STORED_1 ", nil, 'GPU', '']");
    expect_block(1, local("", "", 0));
    event(MAP_1 ", 'lora_name': 'adapter', 'lora_id': 3, 'extra_keys': [['adapter']]}");
    expect_block(1, local("adapter", "", 0));
}

static void test_salt_of_sglang(void **state)
{
    (void)state;
    event(STORED_1 ", nil, 'GPU', {'cache_salt': 'tenant-a', 'session_id': 's'}]");
    expect_block(1, local("", "tenant-a", 0));
    use_reader(NULL);
    event(STORED_1 ", nil, 'GPU', {'session_id': 's', 7: 8}]");
    expect_block(1, local("", "", 0));
    event(STORED_1 ", nil, 'GPU', {'cache_salt': nil}, nil, 0]");
    expect_block(1, local("", "", 0));
    event("['BlockStoredWithMetadata', [1], nil, [1,2,3,4], 4, nil, 'GPU', {'cache_salt': 'b'}]");
    expect_block(1, local("", "b", 0));
    use_reader(NULL);
    event(MAP_1 ", 'cache_salt': 'tenant-a'}");
    expect_block(1, local("", "tenant-a", 0));
    use_reader(NULL);
    event(MAP_1 ", 'metadata': {'cache_salt': 'tenant-a'}}");
    expect_block(1, local("", "tenant-a", 0));
}

#define HEX_64 "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF"

static void test_salt_in_extra_keys(void **state)
{
    (void)state;
    event(MAP_1 ", 'extra_keys': [['dynamo-cache-salt:tenant-a']]}");
    expect_block(1, local("", "tenant-a", 0));
    use_reader(NULL);
    event(MAP_1 ", 'lora_name': 'l', 'extra_keys': [['l', 'salt']]}");
    expect_block(1, local("l", "salt", 0));
    use_reader(NULL);
    event(MAP_1 ", 'cache_salt': 'dynamo-cache-salt:tenant-a', 'extra_keys': "
                "[['dynamo-cache-salt:tenant-a']]}");
    expect_block(1, local("", "tenant-a", 0));
    use_reader(NULL);
    /* Within a chain a bare string isn't a salt; one that says it is, is. */
    event("['BlockStored', [1], 7, [1,2,3,4], 4, nil, 'GPU', nil, [['string']]]");
    expect_block(1, local("", "", 0));
    event(MAP_1 ", 'parent_block_hash': 7, 'extra_keys': [['dynamo-cache-salt:x']]}");
    expect_block(1, local("", "x", 0));
    use_reader(NULL);
    /* In a map objects are pairs, so a salt may look like a digest, and like the adapter. */
    event(MAP_1 ", 'extra_keys': [['" HEX_64 "']]}");
    expect_block(1, local("", HEX_64, 0));
    use_reader(NULL);
    event(MAP_1 ", 'lora_name': 'l', 'extra_keys': [['l', ['cat', 0], 'l']]}");
    uint64_t cat = kve_mm_placed(kve_mm_identity("cat", 3), 0);
    expect_block(1, kve_hash_block(kve_seed("l", 1, "l", 1), one_to_8, 4, &cat, 1));
    use_reader(NULL);
    /* A salt that looks like a digest is no multimodal object where the event names it. */
    event(MAP_1 ", 'cache_salt': '" HEX_64 "', 'extra_keys': [['" HEX_64 "']]}");
    expect_block(1, local("", HEX_64, 0));
}

static void store_child(uint64_t hash, uint64_t parent)
{
    event("['BlockStored', [%llu], %llu, [1,2,3,4], 4]", (unsigned long long)hash,
          (unsigned long long)parent);
}

static void store_salted(uint64_t hash, const char *salt)
{
    event("{'type': 'BlockStored', 'block_hashes': [%llu], 'token_ids': [1,2,3,4], 'block_size': 4,"
          " 'cache_salt': '%s'}",
          (unsigned long long)hash, salt);
}

static void test_salt_is_inherited(void **state)
{
    (void)state;
    store_salted(1, "a");
    store_salted(2, "b");
    store_child(11, 1);
    expect_block(11, local("", "a", 0));
    store_child(12, 2);
    expect_block(12, local("", "b", 0));
    store_child(111, 11);
    expect_block(111, local("", "a", 0));
    store_child(22, 21); /* no salt is known of that parent */
    expect_block(22, local("", "", 0));
    /* Chains of another rank are other chains. */
    assert_int_equal(decode("[0, [['BlockStored', [13], 1, [1,2,3,4], 4]], 1]"), 0);
    expect_block(13, local("", "", 0));
    /* A salt told with the event counts, whatever the parent's. */
    event(MAP_1 ", 'parent_block_hash': 11, 'cache_salt': 'c'}");
    expect_block(1, local("", "c", 0));
    kve_reader_reset(reader);
    store_child(11, 1);
    expect_block(11, local("", "", 0));
}

/* Windows alone: a store that leaves the first block out shows no salt, and stores a copy all the same. */
static void test_salt_of_windows_that_leave_out_the_root(void **state)
{
    static const char window[] =
        "'block_size': 4, 'group_idx': 0, 'kv_cache_spec_kind': 'sliding_window', "
        "'kv_cache_spec_sliding_window': 5";

    (void)state;
    event("{'type': 'BlockStored', 'block_hashes': [2], 'token_ids': [1,2,3,4,5,6,7,8], %s}",
          window);
    event("{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], "
          "'extra_keys': [['dynamo-cache-salt:a'], nil], %s}",
          window);
    event("{'type': 'BlockRemoved', 'block_hashes': [2], 'group_idx': 0}"); /* one of two */
    event("{'type': 'BlockStored', 'block_hashes': [3], 'parent_block_hash': 2, "
          "'token_ids': [1,2,3,4], %s}",
          window);
    expect_block(3, local("", "a", 0));
}

static void test_empty_salt_is_none(void **state)
{
    (void)state;
    store_salted(1, "");
    expect_block(1, local("", "", 0));
    store_child(11, 1);
    expect_block(11, local("", "", 0));
    store_salted(1, "dynamo-cache-salt:");
    expect_block(1, local("", "", 0));
}

static void test_ambiguous_salt(void **state)
{
    (void)state;
    store_salted(1, "a");
    store_salted(1, "b");
    store_child(11, 1);
    expect_none(KVE_SKIP_NAMESPACE);
    event("{'type': 'BlockStored', 'block_hashes': [11], 'token_ids': [1,2,3,4], 'block_size': 4,"
          " 'parent_block_hash': 1, 'cache_salt': 'b'}");
    expect_block(11, local("", "b", 0));
    store_salted(2, "a");
    event("['BlockStored', [2], nil, [1,2,3,4], 4]"); /* with a salt and without */
    expect_block(2, local("", "", 0));
    store_child(22, 2);
    expect_none(KVE_SKIP_NAMESPACE);
    event("['BlockRemoved', [2]]"); /* both copies gone, and with them the doubt */
    event("['BlockRemoved', [2]]");
    store_salted(2, "a");
    store_child(22, 2);
    expect_block(22, local("", "a", 0));
    /* A block known as salted under a parent that isn't known: something between was lost. */
    store_child(22, 99);
    expect_none(KVE_SKIP_NAMESPACE);
}

/* Remembered for as long as a block is anywhere. */
static void test_salt_lives_as_long_as_its_block(void **state)
{
    (void)state;
    store_salted(1, "a");
    event("['BlockStored', [1], nil, [], 0, nil, 'CPU']"); /* offloaded */
    event("['BlockRemoved', [1], 'GPU']");
    store_child(11, 1);
    expect_block(11, local("", "a", 0));
    event("['BlockRemoved', [1], 'DISK']"); /* where it isn't */
    store_child(11, 1);
    expect_block(11, local("", "a", 0));
    event("['BlockRemoved', [1], 'CPU']");
    store_child(12, 1);
    expect_block(12, local("", "", 0));
    store_child(111, 11);
    expect_block(111, local("", "a", 0));
    use_reader(NULL);
    store_salted(11, "a");
    event("['AllBlocksCleared']");
    store_child(111, 11);
    expect_block(111, local("", "", 0));
}

static void test_salts_are_bounded(void **state)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4, .max_salted = 100};

    (void)state;
    use_reader(&opts);
    for (uint64_t i = 1; i <= 100; i++) {
        store_salted(i, "a");
        expect_block(i, local("", "a", 0));
    }
    store_salted(
        101, "a"); /* what can't be remembered isn't indexed either: its children would be wrong */
    expect_none(KVE_SKIP_NAMESPACE);
    store_child(1000, 2000);
    expect_block(1000, local("", "", 0));
    event("['BlockRemoved', [50]]");
    store_salted(101, "a");
    expect_block(101, local("", "a", 0));
    event("['AllBlocksCleared']");
    for (uint64_t i = 201; i <= 300; i++) {
        store_salted(i, "b");
        expect_block(i, local("", "b", 0));
    }
}

/* -- multimodal -------------------------------------------------------------------------------- */

static void expect_mm(const uint64_t *mm, size_t n)
{
    expect_block(1, kve_hash_block(KVE_SEED, one_to_8, 4, mm, n));
}

static uint64_t xxh_of(const char *text)
{
    return kve_seed(text, strlen(text), NULL, 0) - KVE_SEED;
}

static void test_multimodal_in_extra_keys(void **state)
{
    const uint64_t digest = UINT64_C(0x0011223344556677), placed = kve_mm_placed(digest, 0);
    uint64_t both[] = {kve_mm_placed(xxh_of("cat"), -3), kve_mm_placed(xxh_of("dog"), 4)};

    (void)state;
    event(MAP_1 ", 'extra_keys': [[['" HEX_64 "', 0]]]}");
    expect_mm(&placed, 1);
    assert_true(batch.ops[0].placed);
    event(MAP_1 ", 'extra_keys': [[['" HEX_64 "']]]}"); /* no place: the object alone */
    expect_mm(&digest, 1);
    assert_false(batch.ops[0].placed);
    event(STORED_1 ", nil, 'GPU', nil, [['" HEX_64 "']]]"); /* a bare digest, in an array */
    expect_mm(&digest, 1);
    event(MAP_1 ", 'parent_block_hash': 7, 'extra_keys': [['" HEX_64 "']]}");
    expect_mm(&digest, 1);
    event(MAP_1 ", 'extra_keys': [[['cat', -3], ['dog', 4]]]}");
    expect_mm(both, 2);
    event(MAP_1 ", 'extra_keys': [[['dog', 4], ['cat', -3]]]}");
    expect_mm(both, 2);
    event(STORED_1 ", nil, 'GPU', nil, [[['', 0], [], [7, 8], 7, 1.5, true, nil]]]");
    expect_mm(NULL, 0);
    event(STORED_1 ", nil, 'GPU', nil, [[['cat', -3]]]]");
    expect_mm(both, 1);
    event(MAP_1 ", 'extra_keys': []}");
    expect_mm(NULL, 0);
    event(MAP_1 ", 'extra_keys': [[['cat', -3]], nil]}"); /* more entries than blocks */
    expect_mm(both, 1);
    event(MAP_1 ", 'extra_keys': [nil, [['cat', 0]]]}"); /* an object without a block */
    expect_none(KVE_SKIP_MALFORMED);
    uint64_t embeds = kve_seed("\1\2\3", 3, NULL, 0) - KVE_SEED;
    event(MAP_1 ", 'extra_keys': [[x'010203']]}"); /* prompt embeddings */
    expect_mm(&embeds, 1);
}

static void test_tagged_extra_keys(void **state)
{
    const uint64_t cat = xxh_of("cat");
    const uint64_t digest = kve_mm_placed(UINT64_C(0x0011223344556677), 2);

    (void)state;
    event(MAP_1 ", 'event_version': 1, 'extra_keys': [[{'type': 'mm', 'modality': 'image', "
                "'hash': '" HEX_64 "', 'block_offset': 2}]]}");
    expect_mm(&digest, 1);
    event(MAP_1 ", 'extra_keys': [[{'hash': 'cat', 'type': 'MultiModalKey'}]]}");
    expect_mm(&cat, 1);
    event(MAP_1 ", 'extra_keys': [[{'type': 'lora', 'name': 'l'}, {'type': 'cache_salt', "
                "'salt': 'tenant-a'}]]}");
    expect_block(1, local("l", "tenant-a", 0));
    use_reader(NULL);
    event(STORED_1 ", nil, 'GPU', nil, [[{'type': 'cache_salt', 'salt': '" HEX_64 "'}]]]");
    expect_block(1, local("", HEX_64, 0));
    use_reader(NULL);
    uint64_t embeds = kve_seed("\1\2\3", 3, NULL, 0) - KVE_SEED;
    event(MAP_1 ", 'extra_keys': [[{'type': 'prompt_embeds', 'hash': x'010203'}]]}");
    expect_mm(&embeds, 1);
}

/* Nothing tells which prompts such a block serves: to index it as plain would be a false hit. */
static void test_keys_that_are_not_understood(void **state)
{
    static const char *const keys[] = {
        "[{'type': 'legacy', 'value': 'x'}]",
        "[{'type': 'mm'}]",
        "[{'hash': 'x'}]",
        "[['', 0]]",
        "[[]]",
        "[[7, 8]]",
        "[7]",
        "[true]",
        "{'typed': 1}",
        "7",
        "['salt', ['', 0]]",
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        event(MAP_1 ", 'extra_keys': [%s]}", keys[i]);
        expect_none(KVE_SKIP_EXTRA_KEYS);
    }
    event(STORED_1 ", nil, 'GPU', nil, [[{'type': 'something', 'value': 'x'}]]]");
    expect_none(KVE_SKIP_EXTRA_KEYS);
    /* Within a chain a string is neither adapter nor salt. */
    event(MAP_1 ", 'parent_block_hash': 7, 'extra_keys': [['string']]}");
    expect_none(KVE_SKIP_EXTRA_KEYS);
    event(MAP_1 ", 'parent_block_hash': 7, 'lora_name': 'l', 'extra_keys': [['l']]}");
    expect_block(1, local("l", "", 0));
    /* The blocks before it are fine. */
    event("{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], "
          "'block_size': 4, 'extra_keys': [nil, [{'type': 'something'}]]}");
    expect_skip(KVE_SKIP_EXTRA_KEYS);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops[0].n, 1);
    assert_true(batch.ops[0].blocks[0].tokens_hash == local("", "", 0));
}

static void test_objects_may_be_ignored(void **state)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4, .ignore_mm_keys = true};
    uint64_t mm = 42;

    (void)state;
    use_reader(&opts);
    event(MAP_1 ", 'extra_keys': [[['cat', 0], 'salt']]}");
    expect_block(1, local("", "salt", 0));
    event(MAP_1 ", 'block_mm_infos': [{'mm_objects': [{'mm_hash': 42}]}]}");
    expect_mm(&mm, 1);
}

static void test_offsets_may_be_ignored(void **state)
{
    struct kve_reader_opts opts = {
        .size = sizeof(opts), .block_size = 4, .ignore_mm_offsets = true};
    uint64_t cat = xxh_of("cat");

    (void)state;
    use_reader(&opts);
    event(MAP_1 ", 'extra_keys': [[['cat', 3], 'salt']]}");
    expect_block(1, kve_hash_block(kve_seed("", 0, "salt", 4), one_to_8, 4, &cat, 1));
    assert_false(batch.ops[0].placed);
}

/* Offloaded copies are announced without salt and adapter: their hashes say which blocks they
 * are. */
static void test_offloaded_copies_hide_their_namespace(void **state)
{
    (void)state;
    event(MAP_1 ", 'medium': 'CPU', 'extra_keys': nil}");
    expect_op(KVE_OP_STORE, KV_TIER_HOST, 1); /* no salt anywhere yet */
    store_salted(5, "a");
    event("{'type': 'BlockStored', 'block_hashes': [5], 'token_ids': [1,2,3,4], 'block_size': 4, "
          "'medium': 'CPU', 'extra_keys': nil}");
    assert_true(expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1)->hashes[0] == 5);
    store_child(51, 5);
    expect_block(51, local("", "a", 0));
    event("{'type': 'BlockRemoved', 'block_hashes': [5], 'medium': 'GPU'}");
    store_child(52, 5); /* still on the host */
    expect_block(52, local("", "a", 0));
    event("['AllBlocksCleared']"); /* of the device alone */
    store_child(53, 5);
    expect_block(53, local("", "a", 0));
    use_reader(NULL);
    event(MAP_1 ", 'lora_name': 'l'}");
    event(MAP_1 ", 'medium': 'CPU', 'lora_name': nil}");
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    event(MAP_1 ", 'medium': 'CPU', 'lora_name': 'l'}");
    expect_op(KVE_OP_STORE, KV_TIER_HOST, 1);
    use_reader(NULL); /* Mooncake's store writes its medium in small letters */
    store_salted(5, "a");
    event("{'type': 'BlockStored', 'block_hashes': [5], 'token_ids': [1,2,3,4], 'block_size': 4, "
          "'medium': 'cpu', 'extra_keys': nil}");
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [5], 'medium': 'GPU'}");
    event("['AllBlocksCleared']");
    store_child(53, 5);
    expect_block(53, local("", "a", 0));
    use_reader(NULL); /* images are hidden as salts are */
    event(MAP_1 ", 'extra_keys': [[['cat', 0]]]}");
    event(MAP_1 ", 'medium': 'CPU', 'extra_keys': nil}");
    expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    use_reader(NULL); /* SGLang tells its salts with each event */
    store_salted(5, "a");
    event("{'type': 'BlockStored', 'block_hashes': [5], 'token_ids': [1,2,3,4], 'block_size': 4, "
          "'medium': 'CPU_PINNED', 'cache_salt': 'a'}");
    expect_op(KVE_OP_STORE, KV_TIER_HOST, 1);
}

/* An engine may hold two copies of a block, and a chain goes on when one of them is gone. */
static void test_salt_of_copies(void **state)
{
    (void)state;
    store_salted(1, "a");
    store_salted(1, "a");
    event("['BlockRemoved', [1]]");
    store_child(11, 1);
    expect_block(11, local("", "a", 0));
    event("['BlockRemoved', [1]]");
    store_child(12, 1);
    expect_block(12, local("", "", 0));
}

static void test_multimodal_infos(void **state)
{
    const uint64_t digest = UINT64_C(0x0011223344556677);
    uint64_t mm[] = {42, 7, UINT64_MAX};

    (void)state;
    event(MAP_1 ", 'block_mm_infos': [{'mm_objects': [{'mm_hash': 42, 'offsets': [[0, 2]]}]}]}");
    expect_mm(mm, 1);
    event(
        MAP_1
        ", 'block_mm_infos': [{'mm_objects': [{'offsets': [], 'mm_hash': 42}, {'mm_hash': 7}]}]}");
    expect_mm(mm, 2);
    event(MAP_1 ", 'block_mm_infos': [[[[42, [[0, 2]]], [7, []], [-1]]]]}");
    expect_mm(mm, 3);
    event(MAP_1 ", 'block_mm_infos': [nil]}");
    expect_mm(NULL, 0);
    event(MAP_1 ", 'block_mm_infos': [{7: 8, 'mm_objects': nil}, nil]}");
    expect_mm(NULL, 0);
    event(MAP_1 ", 'block_mm_infos': [{7: 8, 'mm_objects': [{'mm_hash': '" HEX_64 "'}]}]}");
    expect_mm(&digest, 1);
    /* An entry that isn't understood may be an image: the block isn't indexed as text. */
    static const char *const unknown[] = {
        "7",
        "'x'",
        "{'mm_objects': 7}",
        "{'mm_objects': [nil]}",
        "{'mm_objects': [7]}",
        "{'mm_objects': [{'mm_hash': ''}]}",
        "{'mm_objects': [{'offsets': [[0, 2]]}]}",
        "{'mm_objects': [{'mm_hash': 42}]}, {'mm_objects': [{'mm_hash': 7}]}",
    };
    for (size_t i = 0; i < KV_COUNT(unknown); i++) {
        event(MAP_1 ", 'block_mm_infos': [%s]}", unknown[i]);
        expect_none(KVE_SKIP_MALFORMED);
    }
    event("{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], "
          "'block_size': 4, 'block_mm_infos': [{'mm_objects': [{'mm_hash': 42}]}]}");
    expect_none(KVE_SKIP_MALFORMED); /* one entry, two blocks */
    /* In an array, with metadata for the LoRA's slot. */
    event(STORED_1
          ", nil, 'GPU', {'session_id': 'x'}, nil, [[[[42, [[0, 2]]]]]], 0, 'full_attention']");
    expect_mm(mm, 1);
    /* Each block its own. */
    event("{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], "
          "'block_size': 4,"
          " 'block_mm_infos': [nil, {'mm_objects': [{'mm_hash': 42}]}]}");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2);
    assert_true(batch.ops[0].blocks[0].tokens_hash == local("", "", 0));
    assert_true(batch.ops[0].blocks[1].tokens_hash ==
                kve_hash_block(KVE_SEED, one_to_8 + 4, 4, mm, 1));
}

static void test_too_many_objects(void **state)
{
    struct kv_buf text = KV_BUF_INIT;

    (void)state;
    for (int n = 256; n <= 257; n++) {
        kv_buf_clear(&text);
        kv_buf_puts(&text, "[0, [" MAP_1 ", 'extra_keys': [[");
        for (int i = 0; i < n; i++)
            kv_buf_puts(&text, "['x', 0],");
        kv_buf_puts(&text, "]]}]]");
        assert_int_equal(decode(kv_buf_cstr(&text)), 0);
        if (n == 256)
            expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
        else
            expect_none(KVE_SKIP_TOO_LARGE);
    }
    kv_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_lora),
        T(test_salt_of_sglang),
        T(test_salt_in_extra_keys),
        T(test_salt_is_inherited),
        T(test_salt_of_windows_that_leave_out_the_root),
        T(test_empty_salt_is_none),
        T(test_ambiguous_salt),
        T(test_salt_lives_as_long_as_its_block),
        T(test_salts_are_bounded),
        T(test_multimodal_in_extra_keys),
        T(test_salt_of_copies),
        T(test_offloaded_copies_hide_their_namespace),
        T(test_tagged_extra_keys),
        T(test_keys_that_are_not_understood),
        T(test_objects_may_be_ignored),
        T(test_offsets_may_be_ignored),
        T(test_multimodal_infos),
        T(test_too_many_objects),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
