// SPDX-License-Identifier: Apache-2.0
/*
 * Payloads byte for byte as publishers send them: every generation of vLLM's arrays and maps,
 * SGLang's maps, a cache master's. Each is also cut at every length, which must be refused, never
 * half applied.
 *
 * `test-event-wire decode BLOCK_SIZE` reads payloads (each after its length, 4 bytes little-endian)
 * and prints what they become; tests/e2e/test_reader.py compares that with a model of its own.
 */
#include "event/pack.h"

#include <endian.h>
#include <inttypes.h>

#include "kv_event.h"

#define H UINT64_C(0xdeadbeef12345678)
#define TS "cb41da305498100000"
#define TYPE_STORED "a474797065ab426c6f636b53746f726564"
#define HASHES_1 "ac626c6f636b5f68617368657391cfdeadbeef12345678"
#define PARENT_NIL "b1706172656e745f626c6f636b5f68617368c0"
#define TOKENS_4 "a9746f6b656e5f6964739401020304"
#define BLOCK_SIZE_4 "aa626c6f636b5f73697a6504"
#define LORA_ID_NIL "a76c6f72615f6964c0"
#define MEDIUM_GPU "a66d656469756da3475055"
#define LORA_NAME_NIL "a96c6f72615f6e616d65c0"
#define GROUP_0 "a967726f75705f69647800"

static struct kve_reader *make_reader(uint32_t block_size)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = block_size, .rank = 9};
    struct kve_reader *reader;

    assert_int_equal(kve_reader_create(&opts, &reader), 0);
    return reader;
}

/* Decode, and decode every shorter piece of it (exactly sized, so that asan sees what is overread).
 */
static struct kve_batch decode(struct kve_reader *reader, const char *hex)
{
    struct kv_buf bytes = KV_BUF_INIT;
    struct kve_batch batch, piece;

    pack_hex(&bytes, hex);
    for (size_t len = 0; len < bytes.len; len++) {
        char *exact = malloc(len ? len : 1);

        assert_non_null(exact);
        memcpy(exact, bytes.data, len);
        assert_int_equal(kve_reader_decode(reader, exact, len, &piece), -EPROTO);
        free(exact);
    }
    assert_int_equal(kve_reader_decode(reader, bytes.data, bytes.len, &batch), 0);
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], 0);
    kv_buf_fini(&bytes);
    return batch;
}

static void check_store(const struct kve_op *op, uint64_t hash, enum kv_tier tier, uint64_t seed)
{
    static const uint32_t tokens[] = {1, 2, 3, 4};

    assert_int_equal(op->type, KVE_OP_STORE);
    assert_int_equal(op->tier, tier);
    assert_true(op->n >= 1);
    assert_true(op->blocks[0].hash == hash);
    assert_true(op->blocks[0].tokens_hash == kve_hash_block(seed, tokens, 4, NULL, 0));
}

static void check_remove(const struct kve_op *op, uint64_t hash)
{
    assert_int_equal(op->type, KVE_OP_REMOVE);
    assert_int_equal(op->tier, KV_TIER_DEVICE);
    assert_int_equal(op->n, 1);
    assert_true(op->hashes[0] == hash);
}

/* Check the common parts of all examples: the time, one rank for all, one operation an event. */
static void check_batch(const struct kve_batch *b, bool has_rank, const uint64_t *parent,
                        size_t n_ops, size_t n_blocks)
{
    size_t n = 0;

    assert_true(b->timestamp == 1757500000.25);
    assert_int_equal(b->has_rank, has_rank);
    assert_int_equal(b->rank, 0);
    assert_int_equal(b->n_events, n_ops);
    assert_int_equal(b->n_ops, n_ops);
    assert_int_equal(b->n_blocks, n_blocks);
    for (size_t i = 0; i < n_ops; i++) {
        const struct kve_op *op = &b->ops[i];

        assert_int_equal(op->rank, has_rank ? 0 : 9);
        assert_int_equal(op->has_parent, op->type == KVE_OP_STORE && parent);
        assert_true(!op->has_parent || op->parent == *parent);
        n += op->n;
    }
    assert_int_equal(n, n_blocks);
}

/* -- arrays ------------------------------------------------------------------------------------ */

static void test_array_two_elements(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch =
        decode(reader, "92" TS "9196ab426c6f636b53746f72656491cfdeadbeef12345678c0940102030404c0");

    (void)state;
    check_batch(&batch, false, NULL, 1, 1);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, KVE_SEED);
    kve_reader_destroy(reader);
}

static void test_array_with_rank(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "9196ab426c6f636b53746f72656491cfdeadbeef12345678c0940102030404c000");

    (void)state;
    check_batch(&batch, true, NULL, 1, 1);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, KVE_SEED);
    kve_reader_destroy(reader);
}

static void test_array_with_medium(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "9297ab426c6f636b53746f72656491cfdeadbeef12345678c0940102030404c0a347"
                "505593ac426c6f636b52656d6f76656491cfdeadbeef12345678a347505500");

    (void)state;
    check_batch(&batch, true, NULL, 2, 2);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, KVE_SEED);
    check_remove(&batch.ops[1], H);
    kve_reader_destroy(reader);
}

static void test_array_digest_hash(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "9193ac426c6f636b52656d6f76656491c420000102030405060708090a0b0c0d0e0f"
                "101112131415161718191a1b1c1d1e1fa347505500");

    (void)state;
    check_batch(&batch, true, NULL, 1, 1);
    check_remove(&batch.ops[0], UINT64_C(0x18191a1b1c1d1e1f));
    kve_reader_destroy(reader);
}

static void test_array_last_form(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "919cab426c6f636b53746f72656491cfdeadbeef12345678cfffffffffffffffff94010203"
                "0404c0a3475055c091c000ae66756c6c5f617474656e74696f6ec000");

    (void)state;
    check_batch(&batch, true, &(uint64_t){UINT64_MAX}, 1, 1);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, KVE_SEED);
    kve_reader_destroy(reader);
}

static void test_array_cleared(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(reader, "93" TS "9191b0416c6c426c6f636b73436c656172656400");

    (void)state;
    check_batch(&batch, true, NULL, 1, 0);
    assert_int_equal(batch.ops[0].type, KVE_OP_CLEAR);
    kve_reader_destroy(reader);
}

/* -- maps -------------------------------------------------------------------------------------- */

static void test_map_stored(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch =
        decode(reader, "93" TS "918b" TYPE_STORED HASHES_1 PARENT_NIL TOKENS_4 BLOCK_SIZE_4
                           LORA_ID_NIL MEDIUM_GPU LORA_NAME_NIL "aa65787472615f6b65797391c0" GROUP_0
                       "b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00");

    (void)state;
    check_batch(&batch, true, NULL, 1, 1);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, KVE_SEED);
    kve_reader_destroy(reader);
}

static void test_map_removed_and_cleared(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "9284a474797065ac426c6f636b52656d6f766564" HASHES_1 MEDIUM_GPU GROUP_0
                "81a474797065b0416c6c426c6f636b73436c656172656400");

    (void)state;
    check_batch(&batch, true, NULL, 2, 1);
    check_remove(&batch.ops[0], H);
    assert_int_equal(batch.ops[1].type, KVE_OP_CLEAR);
    kve_reader_destroy(reader);
}

/* An offload names blocks without their tokens. */
static void test_map_offload(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader, "93" TS "9188" TYPE_STORED HASHES_1 PARENT_NIL "a9746f6b656e5f69647390"
                "aa626c6f636b5f73697a6500" LORA_ID_NIL "a66d656469756da3435055" LORA_NAME_NIL "00");

    (void)state;
    check_batch(&batch, true, NULL, 1, 1);
    assert_int_equal(batch.ops[0].type, KVE_OP_STORE_KNOWN);
    assert_int_equal(batch.ops[0].tier, KV_TIER_HOST);
    assert_int_equal(batch.ops[0].n, 1);
    assert_true(batch.ops[0].hashes[0] == H);
    kve_reader_destroy(reader);
}

static void test_map_lora_and_salt(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(
        reader,
        "93" TS "918a" TYPE_STORED
        "ac626c6f636b5f68617368657392cfdeadbeef12345678cfffffffffffffffff" PARENT_NIL
        "a9746f6b656e5f696473980102030401020304" BLOCK_SIZE_4 "a76c6f72615f696403" MEDIUM_GPU
        "a96c6f72615f6e616d65a761646170746572aa65787472615f6b6579739292a761646170746572a673616c"
        "742d3191a761646170746572" GROUP_0 "00");
    uint64_t seed = kve_seed("adapter", 7, "salt-1", 6);

    (void)state;
    check_batch(&batch, true, NULL, 1, 2);
    assert_int_equal(batch.ops[0].n, 2);
    check_store(&batch.ops[0], H, KV_TIER_DEVICE, seed);
    assert_true(batch.ops[0].blocks[1].hash == UINT64_MAX);
    assert_true(batch.ops[0].blocks[1].tokens_hash == batch.ops[0].blocks[0].tokens_hash);
    kve_reader_destroy(reader);
}

static void test_map_multimodal(void **state)
{
    static const uint32_t tokens[] = {1, 2, 3, 4};
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch =
        decode(reader, "93" TS "918a" TYPE_STORED HASHES_1 PARENT_NIL TOKENS_4 BLOCK_SIZE_4
                           LORA_ID_NIL MEDIUM_GPU LORA_NAME_NIL
                       "aa65787472615f6b657973919192a66d6d6861736800" GROUP_0 "00");
    /* xxh3 of the id, seed 0; and its place */
    uint64_t mm = kve_mm_placed(kve_seed("mmhash", 6, NULL, 0) - KVE_SEED, 0);

    (void)state;
    check_batch(&batch, true, NULL, 1, 1);
    assert_int_equal(batch.ops[0].type, KVE_OP_STORE);
    assert_int_equal(batch.ops[0].tier, KV_TIER_DEVICE);
    assert_true(batch.ops[0].blocks[0].hash == H);
    assert_true(batch.ops[0].blocks[0].tokens_hash == kve_hash_block(KVE_SEED, tokens, 4, &mm, 1));
    kve_reader_destroy(reader);
}

/* -- SGLang ------------------------------------------------------------------------------------ */

static void test_sglang_map(void **state)
{
    struct kve_reader *reader = make_reader(2);
    struct kve_batch batch = decode(
        reader,
        "93cb40290000000000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739"
        "2ff02b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b"
        "5f73697a6502a76c6f72615f6964c0a66d656469756da347505583a474797065ac426c6f636b52656d6f7"
        "66564ac626c6f636b5f68617368657391ffa66d656469756da347505581a474797065b0416c6c426c6f63"
        "6b73436c656172656404");

    (void)state;
    assert_true(batch.timestamp == 12.5);
    assert_int_equal(batch.rank, 4);
    assert_int_equal(batch.n_ops, 3);
    assert_int_equal(batch.ops[0].n, 2);
    assert_true(batch.ops[0].blocks[0].hash == UINT64_MAX);
    assert_true(batch.ops[0].blocks[1].hash == 2);
    check_remove(&batch.ops[1], UINT64_MAX);
    assert_int_equal(batch.ops[2].type, KVE_OP_CLEAR);
    assert_int_equal(batch.ops[2].rank, 4);
    kve_reader_destroy(reader);
}

static void test_sglang_least_hash_and_empty_batch(void **state)
{
    struct kve_reader *reader = make_reader(2);
    struct kve_batch batch =
        decode(reader, "92cb40290000000000009192ac426c6f636b52656d6f76656491d38000000000000000");

    (void)state;
    check_remove(&batch.ops[0], UINT64_C(1) << 63);
    batch = decode(reader, "93cb40140000000000009000");
    assert_int_equal(batch.n_ops, 0);
    assert_int_equal(batch.n_events, 0);
    assert_true(batch.timestamp == 5.0);
    kve_reader_destroy(reader);
}

/* -- a cache master: 20 keys in a map16, the type not first, nil tokens ------------------------ */

static void test_master_map(void **state)
{
    struct kve_reader *reader = make_reader(4);
    struct kve_batch batch = decode(reader, "93cf000001993329c7fa91de0014a86576656e745f696401a97469"
                                            "6d657374616d70cf000001993329c7faaa65766"
                                            "56e745f74797065a673746f726564a474797065ab426c6f636b537"
                                            "46f726564aa6d6f64656c5f6e616d65c0aa626c"
                                            "6f636b5f73697a65c0af6164646974696f6e616c5f73616c74c0a9"
                                            "6c6f72615f6e616d65c0a974656e616e745f696"
                                            "4a764656661756c74aa6261636b656e645f6964a6706f6f6c2d30a"
                                            "867726f75705f6964c0a66d656469756da36370"
                                            "75a764705f72616e6bc0aa6f626a6563745f6b6579a430783130aa"
                                            "7365715f6861736865739110ac626c6f636b5f6"
                                            "861736865739110ae626173655f626c6f636b5f69647800ab70617"
                                            "2656e745f68617368c0a9746f6b656e5f696473"
                                            "c0b1706172656e745f626c6f636b5f68617368c000");

    (void)state;
    assert_true(batch.timestamp > 1.75e9 && batch.timestamp < 1.76e9);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops[0].type, KVE_OP_STORE_KNOWN);
    assert_int_equal(batch.ops[0].tier, KV_TIER_HOST);
    assert_true(batch.ops[0].hashes[0] == 16);
    kve_reader_destroy(reader);
}

/* -- for the Python test ----------------------------------------------------------------------- */

static void print_op(const struct kve_op *op)
{
    static const char *const names[] = {"store", "known", "remove", "clear"};

    printf("%s %d %" PRIu32, names[op->type], op->tier, op->rank);
    if (op->has_parent)
        printf(" parent=%" PRIu64, op->parent);
    for (size_t i = 0; i < op->n; i++) {
        if (op->type == KVE_OP_STORE)
            printf(" %" PRIu64 ":%" PRIu64, op->blocks[i].hash, op->blocks[i].tokens_hash);
        else
            printf(" %" PRIu64, op->hashes[i]);
    }
    printf("\n");
}

static int print_batches(uint32_t block_size)
{
    struct kve_reader *reader = make_reader(block_size);
    struct kve_batch batch;
    uint32_t len;

    while (fread(&len, sizeof(len), 1, stdin) == 1) {
        char *payload = malloc(le32toh(len) + 1);
        int rc;

        if (!payload || fread(payload, 1, le32toh(len), stdin) != le32toh(len))
            return 1;
        rc = kve_reader_decode(reader, payload, le32toh(len), &batch);
        free(payload);
        printf("batch %d\n", rc);
        for (size_t i = 0; !rc && i < batch.n_ops; i++)
            print_op(&batch.ops[i]);
        for (int i = 0; !rc && i < KVE_N_SKIPS; i++) {
            if (batch.skipped[i])
                printf("skipped %s %" PRIu32 "\n", kve_skip_name((enum kve_skip)i),
                       batch.skipped[i]);
        }
    }
    kve_reader_destroy(reader);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_array_two_elements),
        cmocka_unit_test(test_array_with_rank),
        cmocka_unit_test(test_array_with_medium),
        cmocka_unit_test(test_array_digest_hash),
        cmocka_unit_test(test_array_last_form),
        cmocka_unit_test(test_array_cleared),
        cmocka_unit_test(test_map_stored),
        cmocka_unit_test(test_map_removed_and_cleared),
        cmocka_unit_test(test_map_offload),
        cmocka_unit_test(test_map_lora_and_salt),
        cmocka_unit_test(test_map_multimodal),
        cmocka_unit_test(test_sglang_map),
        cmocka_unit_test(test_sglang_least_hash_and_empty_batch),
        cmocka_unit_test(test_master_map),
    };

    if (argc == 3 && strcmp(argv[1], "decode") == 0)
        return print_batches((uint32_t)atoi(argv[2]));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
