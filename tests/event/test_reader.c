// SPDX-License-Identifier: Apache-2.0
/* The rules of the reader: the operations of each event, and the handling of malformed batches. */
#include "event/reader_unit.h"

#include "base/core/clock.h"
#include "event/reader/reader.h"
#include "event/reader/salts.h"
#include "event/wire/unique.h"

/* -- batches ----------------------------------------------------------------------------------- */

static void expect_rank(const char *text, bool has_rank, uint32_t rank)
{
    assert_int_equal(decode(text), 0);
    assert_int_equal(batch.has_rank, has_rank);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops[0].rank, has_rank ? rank : 9);
    assert_int_equal(batch.rank, rank);
}

static void test_batch_shapes(void **state)
{
    (void)state;
    expect_rank("[1.5, [['AllBlocksCleared']]]", false, 0);
    expect_rank("[1.5, [['AllBlocksCleared']], nil]", false, 0);
    expect_rank("[1.5, [['AllBlocksCleared']], 0]", true, 0);
    expect_rank("[1.5, [['AllBlocksCleared']], 127]", true, 127);
    expect_rank("[1.5, [['AllBlocksCleared']], 128]", true, 128);
    expect_rank("[1.5, [['AllBlocksCleared']], 300]", true, 300);
    expect_rank("[1.5, [['AllBlocksCleared']], 70000]", true, 70000);
    expect_rank("[1.5, [['AllBlocksCleared']], 4294967295]", true, UINT32_MAX);
    expect_rank("[1.5, [['AllBlocksCleared']], -1]", true, UINT32_MAX);
    expect_rank("[1.5, [['AllBlocksCleared']], -2147483648]", true, 0x80000000u);
    expect_rank("[1.5, [['AllBlocksCleared']], 3, 'more', {'x': [nil]}]", true, 3);
    expect_rank("[1.5, [['AllBlocksCleared']], nil, 5]", false, 0);
    expect_rank("[nil, [['AllBlocksCleared']], 3]", true, 3);
    expect_rank("{'ts': 1.5, 'events': [['AllBlocksCleared']]}", false, 0);
    expect_rank("{'events': [['AllBlocksCleared']], 'data_parallel_rank': 3, 'ts': 1.5}", true, 3);
    expect_rank("{'dp_rank': 4, 'events': [['AllBlocksCleared']]}", true, 4);
    expect_rank("{'events': [['AllBlocksCleared']], 7: 8, 'attn_dp_rank': 200, 'other': [1]}", true,
                200);
    expect_rank("{'attn_dp_rank': nil, 'events': [['AllBlocksCleared']]}", false, 0);
}

/* Numbers of every width at the end, behind events that end in every suspicious byte. */
static void test_rank_is_read_right(void **state)
{
    static const uint32_t ranks[] = {0,    1,      0x7f,    0x80,   0xc0,      0xcc,
                                     0xcd, 0xffff, 0x10000, 0xcecc, 0xffffffff};
    char text[256];

    (void)state;
    for (size_t r = 0; r < KV_COUNT(ranks); r++) {
        for (unsigned tail = 0xc0; tail < 0xe0; tail++) {
            for (unsigned pad = 0; pad < 10; pad++) {
                snprintf(text, sizeof(text), "[1.5, [['AllBlocksCleared', x'%02x%.*s']], %u]", tail,
                         (int)(2 * pad), "01020304050607080910", ranks[r]);
                expect_rank(text, true, ranks[r]);
            }
        }
    }
}

static void test_no_batches(void **state)
{
    static const char *const bad[] = {
        "nil",
        "7",
        "'batch'",
        "[]",
        "[1.5]",
        "{}",
        "[1.5, nil]",
        "[1.5, 7, 0]",
        "[1.5, {}, 0]",
        "['x', 'y', 0]",
        "[1.5, [], 'rank']",
        "[1.5, [], 1.5]",
        "[1.5, [], 4294967296]",
        "[1.5, [], -2147483649]",
        "[[], [], 0]",
        "{'ts': 1.5}",
        "{'events': 7}",
        "{'events': [], 'dp_rank': 'x'}",
        "[1.5, [], [], 0]",
    };

    (void)state;
    assert_int_equal(decode_bytes("", 0), -EPROTO);
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        if (decode(bad[i]) != -EPROTO)
            fail_msg("accepted: %s", bad[i]);
    }
    /* Something behind the batch. */
    assert_int_equal(decode_bytes("\x92\xc0\x90\xc0", 4), -EPROTO);
    assert_int_equal(decode_bytes("\x93\xc0\x90\xc0\xc0", 5), -EPROTO);
    assert_int_equal(decode_bytes("\x92\xc0\x90", 3), 0);
}

static void test_timestamps(void **state)
{
    (void)state;
    assert_int_equal(decode("[1757500000.25, []]"), 0);
    assert_true(batch.timestamp == 1757500000.25);
    assert_int_equal(decode("[1757500000, []]"), 0);
    assert_true(batch.timestamp == 1757500000.0);
    assert_int_equal(decode("[1757500000250, []]"), 0); /* whole milliseconds */
    assert_true(batch.timestamp == 1757500000.25);
    assert_int_equal(decode("{'events': []}"), 0);
    assert_true(batch.timestamp == 0);
}

/* Headers that promise four billion elements, wherever they may stand, in payloads of a few bytes.
 */
static void test_bombs(void **state)
{
    static const char *const places[] = {
        "%s",
        "92c0%s",
        "92c091%s",
        "92c09192%s",
        "92c09192ab426c6f636b53746f726564%s",       /* hashes */
        "92c09195ab426c6f636b53746f7265649101c0%s", /* tokens */
        "92c0918101%s",
        "92c09182a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573%s",
        "92c09182a474797065ab426c6f636b53746f726564a9746f6b656e5f696473%s",
        "92c09182a474797065ab426c6f636b53746f726564aa65787472615f6b657973%s",
    };
    static const char *const heads[] = {"ddffffffff", "dfffffffff", "dcffff",      "deffff",
                                        "dbffffffff", "c6ffffffff", "c9ffffffff01"};
    struct kv_buf bytes = KV_BUF_INIT;
    char hex[256];

    (void)state;
    for (size_t p = 0; p < KV_COUNT(places); p++) {
        for (size_t h = 0; h < KV_COUNT(heads); h++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
            snprintf(hex, sizeof(hex), places[p], heads[h]);
#pragma GCC diagnostic pop
            strcat(hex, "01020304");
            kv_buf_clear(&bytes);
            pack_hex(&bytes, hex);
            assert_int_equal(decode_bytes(bytes.data, bytes.len), -EPROTO);
        }
    }
    kv_buf_fini(&bytes);
}

/* -- bad events -------------------------------------------------------------------------------- */

/* A bad event between two good ones costs neither. */
static void test_bad_event_is_skipped(void **state)
{
    static const struct {
        const char *text;
        enum kve_skip skip;
    } bad[] = {
        {"7", KVE_SKIP_MALFORMED},
        {"nil", KVE_SKIP_MALFORMED},
        {"[]", KVE_SKIP_MALFORMED},
        {"{}", KVE_SKIP_MALFORMED},
        {"[7]", KVE_SKIP_MALFORMED},
        {"['BlockStored']", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,4]]", KVE_SKIP_MALFORMED},
        {"['BlockStored', 7, nil, [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', nil, nil, [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', ['one'], nil, [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [x'01020304050607'], nil, [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1.5], nil, [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], 'root', [1,2,3,4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,-4], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,4294967296], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,nil], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,'four'], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,''], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,'k000000000'], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,'4294967296'], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,'99999999999'], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [[1,2],[2,3],[3,4],[4]], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [[1,2],[2,3],[3,4],5], 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, 'tokens', 4]", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,4], 'four']", KVE_SKIP_MALFORMED},
        {"['BlockStored', [1], nil, [1,2,3,4], -4]", KVE_SKIP_MALFORMED},
        {STORED_1 ", nil, 7]", KVE_SKIP_MALFORMED},
        {STORED_1 ", nil, nil, 7]", KVE_SKIP_MALFORMED},
        {STORED_1 ", nil, nil, nil, 7]", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'lora_name': 7}", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'group_idx': 'zero'}", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'group_idx': -1}", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'group_idx': 4294967296}", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'cache_salt': [1]}", KVE_SKIP_MALFORMED},
        {MAP_1 ", 'dp_rank': 'x'}", KVE_SKIP_MALFORMED},
        {"{'block_hashes': [1], 'token_ids': [1,2,3,4], 'block_size': 4}", KVE_SKIP_MALFORMED},
        {"{'type': 'BlockRemoved', 'medium': 'GPU'}", KVE_SKIP_MALFORMED},
        {"{'type': 7}", KVE_SKIP_MALFORMED},
        {"['BlockRemoved']", KVE_SKIP_MALFORMED},
        {"['BlockMoved', [1], {'a': 2}]", KVE_SKIP_UNKNOWN_TYPE},
        {"{'type': 'BlockMoved', 'block_hashes': 7}", KVE_SKIP_UNKNOWN_TYPE},
        {"{'block_hashes': 'other', 'type': 'BlockMoved'}", KVE_SKIP_UNKNOWN_TYPE},
        {"{'event_type': 'moved'}", KVE_SKIP_UNKNOWN_TYPE},
        {"['BlockStored', [1], nil, [1,2,3,4,5,6,7,8], 8]", KVE_SKIP_BLOCK_SIZE},
        {"['BlockStored', [1], nil, [1,2,3,4], nil]", KVE_SKIP_BLOCK_SIZE},
        {"['BlockStored', [1], nil, [], 8]", KVE_SKIP_BLOCK_SIZE},
        {"['BlockStored', [1], nil, [1,2,3], 4]", KVE_SKIP_TOKEN_COUNT},
        {"['BlockStored', [1], nil, [1,2,3,4,5,6,7,8], 4]", KVE_SKIP_TOKEN_COUNT},
        {"['BlockStored', [1,1], nil, [1,2,3,4,5,6,7,8], 4]", KVE_SKIP_DUPLICATE_HASH},
        {"['BlockStored', [1,2], 2, [1,2,3,4,5,6,7,8], 4]", KVE_SKIP_DUPLICATE_HASH},
        {MAP_1 ", 'group_idx': 1}", KVE_SKIP_GROUP},
        {MAP_1 ", 'medium': 'TAPE'}", KVE_SKIP_MEDIUM},
        {MAP_1 ", 'locality': 'REMOTE'}", KVE_SKIP_REMOTE},
        {MAP_1 ", 'locality': 'ELSEWHERE'}", KVE_SKIP_REMOTE},
    };
    char text[1024];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        snprintf(text, sizeof(text), "[1.5, [['BlockRemoved', [5]], %s, ['AllBlocksCleared']], 0]",
                 bad[i].text);
        assert_int_equal(decode(text), 0);
        if (batch.n_ops != 2 || batch.skipped[bad[i].skip] != 1)
            fail_msg("%s", bad[i].text);
        expect_skip(bad[i].skip);
        assert_int_equal(batch.n_events, 3);
        assert_int_equal(batch.ops[0].type, KVE_OP_REMOVE);
        assert_int_equal(batch.ops[1].type, KVE_OP_CLEAR);
    }
}

static void test_ignored_type(void **state)
{
    (void)state;
    event("{'type': 'Ignored', 'block_hashes': 7}");
    assert_int_equal(batch.n_ops, 0);
    event("['Ignored', 1, 2]");
    assert_int_equal(batch.n_ops, 0);
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], 0);
}

static void test_names_of_skips(void **state)
{
    (void)state;
    for (int i = 0; i < KVE_N_SKIPS; i++) {
        for (int j = 0; j < i; j++)
            assert_string_not_equal(kve_skip_name((enum kve_skip)i),
                                    kve_skip_name((enum kve_skip)j));
    }
    assert_string_equal(kve_skip_name(KVE_SKIP_BLOCK_SIZE), "block_size");
    assert_string_equal(kve_skip_name(KVE_N_SKIPS), "unknown");
}

static void test_limits(void **state)
{
    struct kve_reader_opts opts = {
        .size = sizeof(opts), .block_size = 4, .max_events = 2, .max_tokens = 8};

    (void)state;
    use_reader(&opts);
    assert_int_equal(decode("[1.5, [['AllBlocksCleared'], 7, ['AllBlocksCleared'], {'x': []}], 0]"),
                     0);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.n_events, 4);
    assert_int_equal(batch.skipped[KVE_SKIP_TOO_LARGE], 2);
    event("['BlockStored', [1,2], nil, [1,2,3,4,5,6,7,8], 4]");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2);
    event("['BlockStored', [1,2], nil, [1,2,3,4,5,6,7,8,9], 4]");
    expect_none(KVE_SKIP_TOO_LARGE);
    event("['BlockRemoved', [1,2,3,4,5,6,7,8,9]]");
    expect_none(KVE_SKIP_TOO_LARGE);
}

static void test_options(void **state)
{
    struct kve_reader_opts opts = {.size = sizeof(opts)};
    struct kve_reader *other;

    (void)state;
    assert_int_equal(kve_reader_create(&opts, &other), -EINVAL);
    assert_int_equal(kve_reader_create(NULL, &other), -EINVAL);
    kve_reader_destroy(NULL);
}

/* -- tokens ------------------------------------------------------------------------------------ */

static void test_bigrams(void **state)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 2};

    (void)state;
    use_reader(&opts);
    event("['BlockStored', [1,2], nil, [[10,11],[11,12],[12,13],[13,14]], 2]");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2);
    assert_true(batch.ops[0].blocks[0].tokens_hash == UINT64_C(5959138341449004422));
    assert_true(batch.ops[0].blocks[1].tokens_hash == UINT64_C(13917772031453556700));
    event("{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [[10,11],[11,12]], "
          "'block_size': 2,"
          " 'extra_keys': [[['x', 0]]]}");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_true(batch.ops[0].blocks[0].tokens_hash != UINT64_C(5959138341449004422));
}

static void test_tokens_as_text(void **state)
{
    (void)state;
    event("['BlockStored', [1], nil, ['1','2','3','4'], 4]");
    expect_block(1, local("", "", 0));
    event("['BlockStored', [1], nil, [1,'2',3,'4'], 4]");
    expect_block(1, local("", "", 0));
    event("['BlockStored', [1], nil, ['4294967295','0','03',4], 4]");
    expect_block(1, kve_hash_block(KVE_SEED, (uint32_t[]){UINT32_MAX, 0, 3, 4}, 4, NULL, 0));
}

static void test_too_few_tokens(void **state)
{
    (void)state;
    event("['BlockStored', [1,2], 7, [1,2,3,4,5,6,7], 4]");
    expect_skip(KVE_SKIP_TOKEN_COUNT);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops[0].n, 1);
    assert_int_equal(batch.n_blocks, 1);
    assert_true(batch.ops[0].blocks[0].tokens_hash == local("", "", 0));
    /* Part of a further block is nothing to worry about. */
    event("['BlockStored', [1], nil, [1,2,3,4,5,6,7], 4]");
    expect_block(1, local("", "", 0));
}

static void test_offload_placeholder(void **state)
{
    static const char *const texts[] = {
        "['BlockStored', [1,2], nil, [], 0, nil, 'CPU']",
        "['BlockStored', [1,2], nil, nil, nil, nil, 'CPU']",
        "['BlockStored', [1,2], nil, [], 4, nil, 'CPU']",
        "['BlockStored', [1,2], 7, [], 0, nil, 'cpu']",
        "{'type': 'BlockStored', 'block_hashes': [1,2], 'medium': 'CPU'}",
        "{'event_type': 'stored', 'block_hashes': [1,2], 'medium': 'cpu_pinned'}",
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        event("%s", texts[i]);
        expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 2);
        assert_false(batch.ops[0].has_parent);
        assert_true(batch.ops[0].hashes[0] == 1 && batch.ops[0].hashes[1] == 2);
    }
    event("['BlockStored', [], nil, [], 4]");
    assert_int_equal(batch.n_ops, 0);
    event("['BlockRemoved', []]");
    assert_int_equal(batch.n_ops, 0);
}

/* Large events, in which duplicates aren't found by comparing each with each. */
static void test_duplicates_in_large_events(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(300); round++) {
        size_t n = 2 + unit_below(&random, 400), at = unit_below(&random, n),
               from = unit_below(&random, n);
        bool duplicate = round % 2 && at != from, parent = round % 4 == 3;
        struct kv_buf bytes = KV_BUF_INIT;
        uint64_t *hashes = calloc(n, sizeof(*hashes));

        assert_non_null(hashes);
        for (size_t i = 0; i < n; i++)
            hashes[i] = round % 5 ? unit_random(&random) : i * 4096 + round;
        if (duplicate && !parent)
            hashes[at] = hashes[from];
        kv_msgpack_put_array(&bytes, 2);
        kv_msgpack_put_nil(&bytes);
        kv_msgpack_put_array(&bytes, 1);
        kv_msgpack_put_array(&bytes, 5);
        kv_msgpack_put_str(&bytes, "BlockStored");
        kv_msgpack_put_array(&bytes, (uint32_t)n);
        kv_msgpack_put_u64s(&bytes, hashes, n);
        if (duplicate && parent)
            kv_msgpack_put_u64(&bytes, hashes[at]);
        else
            kv_msgpack_put_nil(&bytes);
        kv_msgpack_put_array(&bytes, (uint32_t)(4 * n));
        for (size_t i = 0; i < 4 * n; i++)
            kv_msgpack_put_u64(&bytes, i % 4 + 1);
        kv_msgpack_put_u64(&bytes, 4);
        assert_int_equal(decode_bytes(bytes.data, bytes.len), 0);
        if (duplicate)
            expect_none(KVE_SKIP_DUPLICATE_HASH);
        else
            assert_true(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, n)->blocks[n - 1].tokens_hash ==
                        local("", "", 0));
        free(hashes);
        kv_buf_fini(&bytes);
    }
}

/*
 * Hashes and ranks chosen so that they would all fall on one slot of a careless table: 60000 of
 * them compared with one another take seconds, spread they take milliseconds.
 */
static void test_chosen_hashes(void **state)
{
    enum { N = 60000 };
    uint64_t *hashes = calloc(N, sizeof(*hashes)), before;
    struct kve_unique unique;
    struct kve_salts salts;

    (void)state;
    assert_non_null(hashes);
    for (uint64_t i = 0; i < N; i++)
        hashes[i] = i << 48;
    before = kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID);
    kve_unique_init(&unique);
    assert_int_equal(kve_unique_check(&unique, NULL, hashes, N), 1);
    kve_unique_fini(&unique);
    kve_salts_init(&salts, 4 * N);
    assert_int_equal(kve_salts_reserve(&salts, 2 * N), 0);
    for (uint32_t i = 0; i < N; i++) {
        kve_salts_put(&salts, 0, hashes[i], 7, KV_TIER_DEVICE);
        kve_salts_put(&salts, i + 1, ((uint64_t)i + 1) << 32 | (i + 1), 7, KV_TIER_DEVICE);
    }
    assert_int_equal(salts.n, 2 * N);
    for (uint32_t i = 0; i < N; i++)
        assert_non_null(kve_salts_find(&salts, i + 1, ((uint64_t)i + 1) << 32 | (i + 1)));
    kve_salts_fini(&salts);
    assert_true(kv_clock_ns_(CLOCK_THREAD_CPUTIME_ID) - before < KV_NS_PER_S);
    free(hashes);
}

/* -- tier and locality ------------------------------------------------------------------------- */

static void test_media(void **state)
{
    static const struct {
        const char *name;
        enum kv_tier tier;
    } media[] = {
        {"nil", KV_TIER_DEVICE},         {"''", KV_TIER_DEVICE},
        {"'GPU'", KV_TIER_DEVICE},       {"'gpu'", KV_TIER_DEVICE},
        {"'Device'", KV_TIER_DEVICE},    {"'CPU'", KV_TIER_HOST},
        {"'cpu'", KV_TIER_HOST},         {"'CPU_PINNED'", KV_TIER_HOST},
        {"'CPU_TIER1'", KV_TIER_HOST},   {"'CPU_TIER2'", KV_TIER_DISK},
        {"'disk'", KV_TIER_DISK},        {"'NVMe'", KV_TIER_DISK},
        {"'STORAGE'", KV_TIER_DISK},     {"'External'", KV_TIER_EXTERNAL},
        {"'NETWORK'", KV_TIER_EXTERNAL}, {"'REMOTE'", KV_TIER_EXTERNAL},
        {"'shared'", KV_TIER_EXTERNAL},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(media); i++) {
        event(STORED_1 ", nil, %s]", media[i].name);
        expect_op(KVE_OP_STORE, media[i].tier, 1);
        event("['BlockRemoved', [1], %s]", media[i].name);
        expect_op(KVE_OP_REMOVE, media[i].tier, 1);
        event("{'medium': %s, 'type': 'BlockRemoved', 'block_hashes': [1]}", media[i].name);
        expect_op(KVE_OP_REMOVE, media[i].tier, 1);
    }
    event("['BlockRemoved', [1], 'GPU2']");
    expect_none(KVE_SKIP_MEDIUM);
    event("['BlockRemoved', [1], 'GP']");
    expect_none(KVE_SKIP_MEDIUM);
}

static void test_locality(void **state)
{
    (void)state;
    event(MAP_1 ", 'locality': 'LOCAL'}");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event(MAP_1 ", 'locality': nil, 'ownership': 'tier-2', 'session_id': 'x'}");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'locality': 'REMOTE'}");
    expect_none(KVE_SKIP_REMOTE);
    event(STORED_1 ", nil, 'GPU', nil, nil, 0, 'full_attention', nil, 'REMOTE', 'x']");
    expect_none(KVE_SKIP_REMOTE);
    event("['BlockRemoved', [1], nil, 0, 'full_attention', nil, 'local', 'x']");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
}

/* An event may say itself whose it is (a cache master speaks for several ranks). */
static void test_rank_of_an_event(void **state)
{
    (void)state;
    event(MAP_1 ", 'dp_rank': 6}");
    assert_int_equal(batch.ops[0].rank, 6);
    event(MAP_1 ", 'dp_rank': nil}");
    assert_int_equal(batch.ops[0].rank, 0);
}

/* -- groups ------------------------------------------------------------------------------------ */

static void test_groups_in_arrays(void **state)
{
    (void)state;
    event(STORED_1 ", nil, 'GPU', nil, nil, 0]");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event(STORED_1 ", nil, 'GPU', nil, nil, 1]");
    expect_none(KVE_SKIP_GROUP);
    event(STORED_1 ", nil, 'GPU', nil, nil, nil]");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event("['BlockRemoved', [1], 'GPU', 1]");
    expect_none(KVE_SKIP_GROUP);
    event("['BlockRemoved', [1], 'GPU', 0]");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
}

/* The only source of the last operation. */
static struct kve_source source_of_op(void)
{
    struct kve_source source;

    assert_int_equal(kve_reader_source(reader, batch.ops[0].source, &source), 0);
    return source;
}

static void expect_window(enum kve_op_type type, uint32_t group, uint32_t window, uint32_t need,
                          uint32_t stride)
{
    const struct kve_op *op = expect_op(type, KV_TIER_DEVICE, 1);
    struct kve_source source = source_of_op();

    assert_true(op->source > 0);
    assert_int_equal(source.kind, KVE_SOURCE_WINDOW);
    assert_int_equal(source.group, group);
    assert_int_equal(source.window, window);
    assert_int_equal(source.need, need);
    assert_int_equal(source.stride, stride);
    assert_string_equal(source.owner, "");
}

/* Blocks of 2 tokens where 4 are registered: operations name them, and tell how many there were. */
static void test_small_blocks(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 2; n++) {
        event("{'type': 'BlockStored', 'block_hashes': [%s], 'parent_block_hash': 9, "
              "'block_size': 2, 'token_ids': [1,2,3,4], 'group_idx': 3, "
              "'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 6}",
              n == 1 ? "8" : "7,8");
        expect_op(KVE_OP_STORE_KNOWN, KV_TIER_DEVICE, n);
        assert_int_equal(source_of_op().need, 3);
        assert_int_equal(source_of_op().stride, 1);
        assert_int_equal(source_of_op().parts, 2);
        assert_int_equal(batch.ops[0].n_covered, 2);
        assert_true(batch.ops[0].has_parent);
        assert_true(batch.ops[0].parent == 9);
    }
    event("{'type': 'BlockStored', 'block_hashes': [8], 'block_size': 3, 'token_ids': [1,2,3], "
          "'group_idx': 3, 'kv_cache_spec_kind': 'sliding_window', "
          "'kv_cache_spec_sliding_window': 6}");
    expect_none(KVE_SKIP_GROUP);
}

static void test_kinds(void **state)
{
    static const struct {
        const char *tail;
        enum { MAIN, WINDOW, SKIPPED } is;
        uint32_t group, window, need;
    } tails[] = {
        {"0, 'full_attention', nil", MAIN, 0, 0, 0},
        {"1, 'mla_attention', nil", MAIN, 0, 0, 0},
        {"nil, 'sink_full_attention', nil", MAIN, 0, 0, 0},
        {"0, 'mamba', nil", WINDOW, 0, 0, 1}, /* the kind counts, not the number */
        {"0, 'sliding_window', 1024", WINDOW, 0, 1024, 256},
        {"3, 'sliding_window', 1025", WINDOW, 3, 1025, 256},
        {"3, 'sliding_window', 1026", WINDOW, 3, 1026, 257},
        {"3, 'sliding_window', 1", WINDOW, 3, 1, 1},
        {"3, 'sliding_window', 2", WINDOW, 3, 2, 1},
        {"nil, 'sliding_window_mla', 128", WINDOW, 0, 128, 32},
        {"0, 'sliding_window', nil", SKIPPED, 0, 0, 0},
        {"0, 'chunked_local_attention'", SKIPPED, 0, 0, 0},
        {"0, 'unknown'", SKIPPED, 0, 0, 0},
        {"'full_attention'", MAIN, 0, 0, 0}, /* without a slot for the group */
        {"'mamba'", WINDOW, 0, 0, 1},
        {"'full_attention', 0", MAIN, 0, 0, 0},
        {"nil, nil, nil", MAIN, 0, 0, 0},
        {"nil, nil, 1024", MAIN, 0, 0, 0},
        {"[nil], 0, 'mamba'", WINDOW, 0, 0, 1}, /* block_mm_infos before it */
        {"nil, 0, 'mamba'", WINDOW, 0, 0, 1},
        {"[nil], 1, 'sliding_window', 9", WINDOW, 1, 9, 2},
        {"[nil], 0", MAIN, 0, 0, 0},
        {"[nil], 2", SKIPPED, 0, 0, 0},
        {"0, 'full_attention', nil, 'LOCAL', 'vllm', 'and', ['more']", MAIN, 0, 0, 0},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(tails); i++) {
        use_reader(NULL);
        event(STORED_1 ", nil, 'GPU', nil, nil, %s]", tails[i].tail);
        if (tails[i].is == MAIN)
            assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->source, 0);
        else if (tails[i].is == WINDOW)
            expect_window(KVE_OP_STORE, tails[i].group, tails[i].window, tails[i].need, 1);
        else
            expect_none(KVE_SKIP_GROUP);
    }
    use_reader(NULL);
    event(MAP_1 ", 'kv_cache_spec_kind': 'mamba', 'group_idx': 0}");
    expect_window(KVE_OP_STORE, 0, 0, 1, 1);
    event(MAP_1 ", 'kv_cache_spec_kind': 'full_attention', 'group_idx': 3}");
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
}

/* A window's event names its blocks by their hashes alone where its tokens cover left-out blocks, too, and
 * where a main group has told their places. */
static void test_window_groups(void **state)
{
    (void)state;
    event("{'type': 'BlockStored', 'block_hashes': [2], 'parent_block_hash': nil, 'block_size': 4, "
          "'token_ids': [1,2,3,4,5,6,7,8], 'group_idx': 1, 'kv_cache_spec_kind': 'sliding_window', "
          "'kv_cache_spec_sliding_window': 6}");
    expect_window(KVE_OP_STORE_KNOWN, 1, 6, 2, 1);
    assert_true(batch.ops[0].hashes[0] == 2);
    /* A block of three registered ones. */
    event("{'type': 'BlockStored', 'block_hashes': [3], 'block_size': 12, "
          "'token_ids': [1,2,3,4,5,6,7,8,9,10,11,12], 'group_idx': 2, "
          "'kv_cache_spec_kind': 'mamba'}");
    expect_window(KVE_OP_STORE_KNOWN, 2, 0, 1, 3);
    event("{'type': 'BlockStored', 'block_hashes': [3], 'block_size': 6, "
          "'token_ids': [1,2,3,4,5,6], 'group_idx': 3, 'kv_cache_spec_kind': 'mamba'}");
    expect_none(KVE_SKIP_GROUP);
    /* Removals name the group alone, offloaded copies neither tokens nor a size. */
    event("{'type': 'BlockRemoved', 'block_hashes': [3], 'medium': 'GPU', 'group_idx': 2}");
    assert_int_equal(expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1)->source, 2);
    event("{'type': 'BlockStored', 'block_hashes': [3], 'block_size': 0, 'token_ids': [], "
          "'medium': 'CPU', 'group_idx': 2}");
    assert_int_equal(expect_op(KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1)->source, 2);
    /* A second full-attention group must hold all of a match. */
    event(MAP_1 ", 'kv_cache_spec_kind': 'full_attention', 'group_idx': 5}");
    assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->source, 0);
    event(MAP_1 ", 'kv_cache_spec_kind': 'full_attention', 'group_idx': 0}");
    expect_window(KVE_OP_STORE_KNOWN, 0, 0, 1, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'medium': 'GPU', 'group_idx': 5}");
    assert_int_equal(expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1)->source, 0);
    /* Beside a main group the hashes do. */
    event(MAP_1 ", 'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 6, "
                "'group_idx': 1}");
    expect_window(KVE_OP_STORE_KNOWN, 1, 6, 2, 1);
}

/* -- owners ------------------------------------------------------------------------------------ */

static void expect_owner(uint32_t number, const char *name)
{
    struct kve_source source = source_of_op();

    assert_int_equal(batch.ops[0].source, number);
    assert_int_equal(source.kind, number ? KVE_SOURCE_OWNER : KVE_SOURCE_MAIN);
    assert_int_equal(source.stride, 1);
    assert_string_equal(source.owner, name);
}

static void test_owners_are_apart(void **state)
{
    struct kve_source source;

    (void)state;
    assert_int_equal(kve_reader_source(reader, 0, &source), 0);
    assert_int_equal(source.kind, KVE_SOURCE_MAIN);
    assert_int_equal(kve_reader_source(reader, 1, &source), -ENOENT);
    event(MAP_1 ", 'medium': 'CPU', 'ownership': 'mooncake'}");
    expect_owner(1, "mooncake");
    event(MAP_1 ", 'medium': 'CPU', 'ownership': nil}");
    expect_owner(0, "");
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'medium': 'CPU', 'ownership': 'kvcr'}");
    expect_owner(2, "kvcr");
    event(STORED_1 ", nil, 'CPU', nil, nil, 0, 'full_attention', nil, 'LOCAL', 'mooncake']");
    expect_owner(1, "mooncake");
    event("['BlockRemoved', [1], 'CPU', 0, 'full_attention', nil, nil, 'kvcr']");
    expect_owner(2, "kvcr");
    event("['BlockRemoved', [1], 'CPU', 0, 'full_attention', nil, nil, 7]");
    expect_owner(0, "");
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'medium': 'CPU', 'ownership': 'a name of "
          "so many characters that the rest of it would not fit into it'}");
    assert_int_equal(strlen(source_of_op().owner), KVE_MAX_OWNER);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'medium': 'CPU', 'ownership': 'a name of "
          "so many characters that the rest of it would not fit into the'}");
    assert_int_equal(batch.ops[0].source, 4);
    kve_reader_reset(reader);
    event(MAP_1 ", 'medium': 'CPU', 'ownership': 'kvcr'}");
    expect_owner(2, "kvcr");
}

static void test_too_many_owners(void **state)
{
    (void)state;
    for (unsigned i = 1; i < 64; i++) {
        event("{'type': 'BlockRemoved', 'block_hashes': [1], 'ownership': 'o%u'}", i);
        assert_int_equal(batch.ops[0].source, i);
    }
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'ownership': 'one more'}");
    expect_none(KVE_SKIP_SOURCE);
    event("{'type': 'AllBlocksCleared', 'ownership': 'one more'}");
    expect_none(KVE_SKIP_SOURCE);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'ownership': 'o63'}");
    expect_owner(63, "o63");
    kve_reader_reset(reader);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'ownership': 'one more'}");
    expect_none(KVE_SKIP_SOURCE);
    kve_reader_renew(reader);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'ownership': 'one more'}");
    expect_owner(1, "one more");
}

static void test_remaining_copies(void **state)
{
    const struct kve_op *op;

    (void)state;
    assert_int_equal(
        decode("[1.5, [['BlockRemoved', [7]], "
               "{'type': 'BlockRemoved', 'remaining_copy_counts': [0, 3], 'block_hashes': [1, 2]}, "
               "{'type': 'BlockRemoved', 'block_hashes': [4], 'remaining_copy_counts': [1]}, "
               "{'type': 'BlockRemoved', 'block_hashes': [4], 'remaining_copy_counts': nil}], 0]"),
        0);
    op = batch.ops;
    assert_int_equal(batch.n_ops, 4);
    assert_null(op[0].remaining);
    assert_int_equal(op[1].remaining[0], 0);
    assert_int_equal(op[1].remaining[1], 3);
    assert_int_equal(op[2].remaining[0], 1);
    assert_null(op[3].remaining);
    event("{'type': 'BlockRemoved', 'block_hashes': [4], 'remaining_copy_counts': [1, 2]}");
    expect_none(KVE_SKIP_MALFORMED);
    event("{'type': 'BlockRemoved', 'block_hashes': [4], 'remaining_copy_counts': ['1']}");
    expect_none(KVE_SKIP_MALFORMED);
    event("{'type': 'BlockRemoved', 'block_hashes': [4], 'remaining_copy_counts': 1}");
    expect_none(KVE_SKIP_MALFORMED);
}

/* -- lookahead --------------------------------------------------------------------------------- */

#define AHEAD                                                                          \
    "{'type': 'BlockStored', 'block_hashes': [1, 2], 'token_ids': [1,2,3,4,5,6,7,8], " \
    "'block_size': 4, 'lookahead_token_ids': "

static void test_lookahead(void **state)
{
    const struct kve_op *op;

    (void)state;
    event(AHEAD "[[5], [9]]}");
    op = expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2);
    assert_int_equal(op->lookahead, 1);
    assert_true(op->blocks[0].tokens_hash == kve_hash_block(KVE_SEED, one_to_8, 5, NULL, 0));
    assert_true(op->blocks[1].tokens_hash == kve_hash_block(KVE_SEED, one_to_8 + 4, 5, NULL, 0));
    event(AHEAD "[[5,6,7,8,9], [9,10,11,12,13]]}");
    op = expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2);
    assert_int_equal(op->lookahead, 5);
    assert_true(op->blocks[0].tokens_hash == kve_hash_block(KVE_SEED, one_to_8, 9, NULL, 0));
    event(AHEAD "nil}");
    assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2)->lookahead, 0);
    event(AHEAD "[[], []]}");
    assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 2)->lookahead, 0);
    event("['BlockStored', [1], nil, [[1,2],[2,3],[3,4],[4,5]], 4]");
    assert_int_equal(expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1)->lookahead, 1);
    event(AHEAD "[[5]]}"); /* one list for two blocks */
    expect_none(KVE_SKIP_MALFORMED);
    event(AHEAD "[[5], [9, 10]]}");
    expect_none(KVE_SKIP_MALFORMED);
    event(AHEAD "[[6], [9]]}"); /* the next block says otherwise */
    expect_none(KVE_SKIP_MALFORMED);
    event(AHEAD "[['5'], [9]]}");
    expect_none(KVE_SKIP_MALFORMED);
    event(AHEAD "5}");
    expect_none(KVE_SKIP_MALFORMED);
    event(AHEAD "[[5,6,7,8,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1], [9]]}");
    expect_none(KVE_SKIP_TOO_LARGE);
}
#undef AHEAD

static void test_groups_are_learned_per_rank(void **state)
{
    (void)state;
    assert_int_equal(
        decode("[0, [{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [1,2,3,4],"
               "'block_size': 4, 'group_idx': 2, 'kv_cache_spec_kind': 'full_attention'}], 5]"),
        0);
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_int_equal(decode("[0, [['BlockRemoved', [1], nil, 2]], 5]"), 0);
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    assert_int_equal(decode("[0, [['BlockRemoved', [1], nil, 2]], 6]"), 0); /* another rank */
    expect_none(KVE_SKIP_GROUP);
    assert_int_equal(decode("[0, [['BlockRemoved', [1], nil, 3]], 5]"), 0); /* another group */
    expect_none(KVE_SKIP_GROUP);
    kve_reader_reset(reader);
    assert_int_equal(decode("[0, [['BlockRemoved', [1], nil, 2]], 5]"), 0);
    expect_none(KVE_SKIP_GROUP);
}

static void test_removes_do_not_teach(void **state)
{
    (void)state;
    event("['BlockRemoved', [1], nil, 2, 'full_attention', nil]");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    event("['BlockRemoved', [1], nil, 2]");
    expect_none(KVE_SKIP_GROUP);
}

/* Where group 0 is another cache, its removes must not take the main cache's blocks of the same
 * hash. */
static void test_group_0_may_be_another(void **state)
{
    (void)state;
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'mamba'}");
    expect_window(KVE_OP_STORE, 0, 0, 1, 1);
    event("['BlockRemoved', [1], nil, 0]");
    assert_int_equal(expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1)->source, 1);
    event(MAP_1 ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'}");
    event("['BlockRemoved', [1], nil, 0]");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
}

/* As many ranks as an indexer follows, and more, whose groups can't be remembered. */
static void test_many_groups(void **state)
{
    unsigned rank = 0;

    (void)state;
    for (; rank < 1024; rank++) {
        event(MAP_1 ", 'group_idx': 7, 'dp_rank': %u, 'kv_cache_spec_kind': 'mla_attention'}",
              rank);
        expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    }
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 7, 'dp_rank': 1023}");
    expect_op(KVE_OP_REMOVE, KV_TIER_DEVICE, 1);
    assert_false(kve_reader_skips_group(reader));
    assert_false(kve_reader_has_main(reader, rank));
    event(MAP_1 ", 'group_idx': 7, 'dp_rank': %u, 'kv_cache_spec_kind': 'mla_attention'}", rank);
    expect_op(KVE_OP_STORE, KV_TIER_DEVICE, 1);
    event("{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 7, 'dp_rank': %u}", rank);
    expect_none(KVE_SKIP_GROUP);
    assert_true(kve_reader_skips_group(reader));
    assert_true(kve_reader_has_main(reader, rank));
    kve_reader_reset(reader);
    assert_false(kve_reader_skips_group(reader));
}

/* -- everything together ----------------------------------------------------------------------- */

/* Operations keep their order and their own data, however the arrays behind them grow. */
static void test_long_batch(void **state)
{
    enum { EVENTS = 5000 };
    struct kv_buf bytes = KV_BUF_INIT;
    size_t blocks = 0;

    (void)state;
    for (int round = 0; round < 3; round++) {
        kv_buf_clear(&bytes);
        kv_msgpack_put_array(&bytes, 2);
        kv_msgpack_put_double(&bytes, 1);
        kv_msgpack_put_array(&bytes, EVENTS);
        for (unsigned i = 0; i < EVENTS; i++) {
            if (i % 3 == 0)
                pack(&bytes, "['BlockStored', [%u, %u], %u, [%u,0,0,0,%u,1,1,1], 4]", i, i + EVENTS,
                     i + 2 * EVENTS, i, i);
            else if (i % 3 == 1)
                pack(&bytes, "['BlockRemoved', [%u, %u, %u]]", i, i + 1, i + 2);
            else
                pack(&bytes, "['Nonsense']");
        }
        assert_int_equal(decode_bytes(bytes.data, bytes.len), 0);
        assert_int_equal(batch.n_events, EVENTS);
        assert_int_equal(batch.n_ops, 3334);
        assert_int_equal(batch.skipped[KVE_SKIP_UNKNOWN_TYPE], 1666);
        blocks = 0;
        for (unsigned op = 0; op < batch.n_ops; op++) {
            unsigned i = op / 2 * 3 + op % 2;
            const struct kve_op *o = &batch.ops[op];

            if (op % 2) {
                assert_int_equal(o->n, 3);
                assert_true(o->hashes[0] == i && o->hashes[2] == i + 2);
            } else {
                uint32_t tokens[] = {i, 1, 1, 1};

                assert_int_equal(o->n, 2);
                assert_true(o->parent == i + 2 * EVENTS);
                assert_true(o->blocks[1].hash == i + EVENTS);
                assert_true(o->blocks[1].tokens_hash ==
                            kve_hash_block(KVE_SEED, tokens, 4, NULL, 0));
            }
            blocks += o->n;
        }
        assert_int_equal(batch.n_blocks, blocks);
        event("['AllBlocksCleared']"); /* a small batch between */
    }
    kv_buf_fini(&bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_batch_shapes),
        T(test_rank_is_read_right),
        T(test_no_batches),
        T(test_timestamps),
        T(test_bombs),
        T(test_bad_event_is_skipped),
        T(test_ignored_type),
        T(test_names_of_skips),
        T(test_limits),
        T(test_options),
        T(test_bigrams),
        T(test_tokens_as_text),
        T(test_too_few_tokens),
        T(test_offload_placeholder),
        T(test_duplicates_in_large_events),
        T(test_chosen_hashes),
        T(test_media),
        T(test_locality),
        T(test_rank_of_an_event),
        T(test_groups_in_arrays),
        T(test_small_blocks),
        T(test_kinds),
        T(test_window_groups),
        T(test_owners_are_apart),
        T(test_too_many_owners),
        T(test_remaining_copies),
        T(test_lookahead),
        T(test_groups_are_learned_per_rank),
        T(test_removes_do_not_teach),
        T(test_group_0_may_be_another),
        T(test_many_groups),
        T(test_long_batch),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
