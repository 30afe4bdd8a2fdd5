// SPDX-License-Identifier: Apache-2.0
/* Envelopes and RouterEvents of Dynamo's event plane: bytes of the real publisher, every order of
 * members, what is left out and what is refused, and writing as the inverse of reading. */
#include "event/pack.h"

#include "event/reader/reader.h"
#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "event/wire/frames.h"
#include "event/wire/raw_event.h"

#define WORKER UINT64_C(13052285362917670345)
#define PUBLISHER UINT64_C(2158715499371232)
#define N_CAPTURED 3

/* Last frames of a publisher of Dynamo 1.6.1 (KvEventPublisher, zmq): a store at the root, a removal,
 * and a store below a block together with a removal. */
static const char *const captured[N_CAPTURED] = {
    "010000014185ac7075626c69736865725f6964cf0007ab571e82dae0a873657175656e63651eac7075626c6973"
    "6865645f6174cf000001a22cab52f9a5746f706963a96b762d6576656e7473a77061796c6f6164c4f09184a977"
    "6f726b65725f6964cfb523086233bcfdc9ac73746f726167655f74696572a6646576696365b0726573696465"
    "6e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696429a46461746181a673746f"
    "72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f636b739283aa62"
    "6c6f636b5f686173680bab746f6b656e735f68617368cfcb38e4d7fb2dca5cad6d6d5f65787472615f696e66"
    "6fc083aa626c6f636b5f686173682aab746f6b656e735f68617368cfe8d3ec39b907b74cad6d6d5f65787472"
    "615f696e666fc0a764705f72616e6b00",
    "01000000ca85ac7075626c69736865725f6964cf0007ab571e82dae0a873657175656e63651fac7075626c6973"
    "6865645f6174cf000001a22cab54f5a5746f706963a96b762d6576656e7473a77061796c6f6164c4799184a977"
    "6f726b65725f6964cfb523086233bcfdc9ac73746f726167655f74696572a6646576696365b0726573696465"
    "6e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f69642aa46461746181a772656d"
    "6f76656481ac626c6f636b5f686173686573912aa764705f72616e6b00",
    "010000019985ac7075626c69736865725f6964cf0007ab571e82dae0a873657175656e636520ac7075626c6973"
    "6865645f6174cf000001a22cab56eda5746f706963a96b762d6576656e7473a77061796c6f6164c501479284a9"
    "776f726b65725f6964cfb523086233bcfdc9ac73746f726167655f74696572a6646576696365b07265736964"
    "656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f69642ba46461746181a67374"
    "6f72656483ab706172656e745f686173680bae73746172745f706f736974696f6ec0a6626c6f636b739183aa"
    "626c6f636b5f68617368cfffffffffffffffdbab746f6b656e735f68617368cfb53c7478409b7e5bad6d6d5f"
    "65787472615f696e666fc0a764705f72616e6b0084a9776f726b65725f6964cfb523086233bcfdc9ac73746f"
    "726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a5657665"
    "6e7483a86576656e745f69642ca46461746181a772656d6f76656481ac626c6f636b5f68617368657391cfff"
    "ffffffffffffdba764705f72616e6b00"};

static struct kve_reader *reader;
static struct kve_batch batch;

static int set_up(void **state)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4, .max_events = 8};

    (void)state;
    return kve_reader_create(&opts, &reader);
}

static int tear_down(void **state)
{
    (void)state;
    kve_reader_destroy(reader);
    return 0;
}

/* Decode an envelope around @payload. */
static int decode_bytes(uint64_t publisher, const void *payload, size_t len)
{
    struct kve_envelope e = {
        .publisher = publisher, .topic = {"kv-events", 9}, .payload = {payload, len}};
    struct kv_buf bytes = KV_BUF_INIT;
    int rc;

    kve_envelope_write(&bytes, &e);
    memset(&batch, 0, sizeof(batch));
    rc = kve_reader_decode(reader, bytes.data, bytes.len, &batch);
    kv_buf_fini(&bytes);
    return rc;
}

/* The same, around the events that @text lists. */
static int decode_as(uint64_t publisher, const char *text)
{
    struct kv_buf payload = KV_BUF_INIT;
    int rc;

    pack(&payload, "%s", text);
    rc = decode_bytes(publisher, payload.data, payload.len);
    kv_buf_fini(&payload);
    return rc;
}

static int decode(const char *text)
{
    return decode_as(PUBLISHER, text);
}

static void expect_skip(const char *text, enum kve_skip skip)
{
    assert_int_equal(decode(text), 0);
    assert_int_equal(batch.n_ops, 0);
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], i == (int)skip);
}

/* -- the real publisher's bytes ---------------------------------------------------------------- */

static void parse_captured(int i, struct kv_buf *frame, struct kve_message *ret)
{
    uint8_t publisher[8], sequence[8];
    struct kve_span frames[4] = {{"kv-events", 9}, {publisher, 8}, {sequence, 8}};

    kv_buf_clear(frame);
    pack_hex(frame, captured[i]);
    frames[3] = (struct kve_span){frame->data, frame->len};
    kve_sequence_put(publisher, PUBLISHER);
    kve_sequence_put(sequence, 30 + (uint64_t)i);
    assert_int_equal(kve_message_parse_live(frames, 4, ret), 0);
    assert_true(ret->has_publisher);
    assert_true(ret->publisher == PUBLISHER);
    assert_int_equal(ret->sequence, 30 + i);
}

static void test_captured(void **state)
{
    struct kv_buf frame = KV_BUF_INIT;
    struct kve_envelope envelope;
    struct kve_message message;
    const struct kve_op *op;

    (void)state;
    kve_reader_expect(reader, PUBLISHER, WORKER, 0);
    for (int i = 0; i < N_CAPTURED; i++) {
        parse_captured(i, &frame, &message);
        assert_int_equal(kve_envelope_read(message.payload.data, message.payload.len, &envelope),
                         0);
        assert_true(envelope.publisher == PUBLISHER);
        assert_true(envelope.sequence == message.sequence);
        assert_true(kv_str_eq(envelope.topic, KVE_ENVELOPE_TOPIC));
        assert_int_equal(
            kve_reader_decode(reader, message.payload.data, message.payload.len, &batch), 0);
        assert_true(batch.timestamp == (double)envelope.published_ms / 1000);
        assert_int_equal(batch.n_events, i == 2 ? 2 : 1);
        assert_int_equal(batch.n_ops, batch.n_events);
        assert_false(reader->misses_events);
        op = batch.ops;
        assert_int_equal(op->type, i == 1 ? KVE_OP_REMOVE : KVE_OP_STORE);
        if (i == 0) {
            assert_int_equal(op->n, 2);
            assert_false(op->has_parent);
            assert_true(op->blocks[0].hash == 11 && op->blocks[1].hash == 42);
            assert_true(op->blocks[1].tokens_hash == UINT64_C(0xe8d3ec39b907b74c));
        } else if (i == 2) {
            assert_true(op->has_parent && op->parent == 11);
            assert_true(op->blocks[0].hash == (uint64_t)-37);
            assert_true(batch.ops[1].hashes[0] == (uint64_t)-37);
        }
    }
    kv_buf_fini(&frame);
}

/* Write what was read: the bytes are the same. */
static void test_captured_again(void **state)
{
    struct kv_buf frame = KV_BUF_INIT, payload = KV_BUF_INIT, out = KV_BUF_INIT;
    struct kve_router_scratch scratch = {0};
    struct kve_envelope envelope;
    struct kve_router_event ev;
    struct kve_message message;
    uint8_t head[KVE_DIRECT_HEAD];
    struct kv_msgpack m;
    uint32_t n;

    (void)state;
    for (int i = 0; i < N_CAPTURED; i++) {
        parse_captured(i, &frame, &message);
        assert_int_equal(kve_envelope_read(message.payload.data, message.payload.len, &envelope),
                         0);
        kv_msgpack_init(&m, envelope.payload.p, envelope.payload.len);
        n = kv_msgpack_array(&m);
        kv_buf_clear(&payload);
        kv_msgpack_put_array(&payload, n);
        for (; n; n--) {
            assert_int_equal(kve_router_event_unpack(&m, &scratch, &ev), 0);
            kve_router_event_pack(&payload, &ev);
        }
        envelope.payload = (struct kv_str){payload.data, payload.len};
        kv_buf_clear(&out);
        kve_envelope_write(&out, &envelope);
        kve_direct_head_put(head, out.len);
        assert_memory_equal(frame.data, head, sizeof(head));
        assert_int_equal(frame.len, out.len + sizeof(head));
        assert_memory_equal(frame.data + sizeof(head), out.data, out.len);
    }
    kve_router_scratch_fini(&scratch);
    kv_buf_fini(&frame);
    kv_buf_fini(&payload);
    kv_buf_fini(&out);
}

/* -- frames ------------------------------------------------------------------------------------ */

static void test_frames_refused(void **state)
{
    struct kve_span good[4] = {{"t", 1}, {"12345678", 8}, {"12345678", 8}, {"\1\0\0\0\2xy", 7}};
    struct kve_message message;

    (void)state;
    assert_int_equal(kve_message_parse_live(good, 4, &message), 0);
    assert_int_equal(message.payload.len, 2);
    for (size_t len = 0; len < 7; len++) {
        struct kve_span cut[4] = {good[0], good[1], good[2], {"\1\0\0\0\2xy", len}};

        assert_int_equal(kve_message_parse_live(cut, 4, &message), -EPROTO);
    }
    good[3].data = "\2\0\0\0\2xy";
    assert_int_equal(kve_message_parse_live(good, 4, &message), -EPROTO);
    good[3].data = "\1\xff\xff\xff\xffxy";
    assert_int_equal(kve_message_parse_live(good, 4, &message), -EPROTO);
    good[3].data = "\1\0\0\0\2xy";
    good[1].len = 7;
    assert_int_equal(kve_message_parse_live(good, 4, &message), -EPROTO);
}

/* -- envelopes --------------------------------------------------------------------------------- */

static int read_envelope(const char *text, struct kve_envelope *ret)
{
    struct kv_buf bytes = KV_BUF_INIT;
    int rc;

    pack(&bytes, "%s", text);
    rc = kve_envelope_read(bytes.data, bytes.len, ret);
    kv_buf_fini(&bytes);
    return rc;
}

static void test_envelope_orders(void **state)
{
    struct kve_envelope e;

    (void)state;
    assert_int_equal(read_envelope("{'payload': x'90', 'publisher_id': 7}", &e), 0);
    assert_true(e.publisher == 7 && e.sequence == 0 && e.published_ms == 0 && e.payload.len == 1);
    assert_int_equal(read_envelope("{'later': [{1: [2]}], 5: 6, 'topic': 't', 'published_at': nil, "
                                   "'sequence': 18446744073709551615, 'publisher_id': 7, "
                                   "'payload': x''}",
                                   &e),
                     0);
    assert_true(e.sequence == UINT64_MAX && e.topic.len == 1 && e.payload.len == 0);
    assert_int_equal(read_envelope("{'publisher_id': 1, 'publisher_id': 2, 'payload': x''}", &e),
                     0);
    assert_true(e.publisher == 2);
}

static void test_envelope_refused(void **state)
{
    static const char *const bad[] = {
        "{}",
        "[]",
        "nil",
        "{'publisher_id': 7}",
        "{'payload': x''}",
        "{'publisher_id': -7, 'payload': x''}",
        "{'publisher_id': '7', 'payload': x''}",
        "{'publisher_id': 7, 'payload': 'text'}",
        "{'publisher_id': 7, 'payload': [1]}",
        "{'publisher_id': 7, 'payload': x'', 'topic': 5}",
        "{'publisher_id': 7, 'payload': x'', 'sequence': 1.5}",
        "{'publisher_id': 7, 'payload': x'', 'published_at': 'now'}",
    };
    struct kve_envelope e = {.publisher = 99};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        assert_int_equal(read_envelope(bad[i], &e), -EPROTO);
    assert_int_equal(kve_envelope_read("\x82", 1, &e), -EPROTO); /* promises more than follows */
    assert_int_equal(kve_envelope_read("\xdf\xff\xff\xff\xff", 5, &e), -EPROTO);
    assert_int_equal(kve_envelope_read("", 0, &e), -EPROTO);
    assert_true(e.publisher == 99);
}

/* -- events ------------------------------------------------------------------------------------ */

#define BLOCK_1 "{'block_hash': 1, 'tokens_hash': 2, 'mm_extra_info': nil}"
#define STORE_1 "'data': {'stored': {'parent_hash': nil, 'blocks': [" BLOCK_1 "]}}"

static void test_events_of_any_order(void **state)
{
    (void)state;
    assert_int_equal(
        decode("[{'event': {'dp_rank': 3, 'data': {'stored': {'blocks': ["
               "{'mm_extra_info': {'mm_objects': [1, [2]]}, 'tokens_hash': -1, 'x': 1, "
               "'block_hash': 2}, " BLOCK_1 "], 'start_position': 4, 'parent_hash': "
               "-5}}, 'event_id': 9, 'z': [1, {}]}, 'worker_id': 7}]"),
        0);
    assert_int_equal(batch.n_ops, 1);
    assert_int_equal(batch.ops->rank, 3);
    assert_int_equal(batch.ops->tier, KV_TIER_DEVICE);
    assert_true(batch.ops->parent == (uint64_t)-5);
    assert_true(batch.ops->single);
    assert_int_equal(batch.ops->n, 2);
    assert_true(batch.ops->blocks[0].hash == 2 && batch.ops->blocks[0].tokens_hash == UINT64_MAX);
    assert_true(batch.ops->blocks[1].hash == 1 && batch.ops->blocks[1].tokens_hash == 2);
}

static void test_tiers(void **state)
{
    static const char *const names[] = {"device", "host_pinned", "disk", "external"};
    char text[256];

    (void)state;
    for (int tier = 0; tier < KV_N_TIERS; tier++) {
        snprintf(text, sizeof(text), "[{'worker_id': 1, 'storage_tier': '%s', 'event': {%s}}]",
                 names[tier], STORE_1);
        assert_int_equal(decode(text), 0);
        assert_int_equal(batch.ops->tier, tier);
    }
    expect_skip("[{'worker_id': 1, 'storage_tier': 'tape', 'event': {" STORE_1 "}}]",
                KVE_SKIP_MEDIUM);
    assert_int_equal(reader->n_lost, 1);
}

static void test_cleared(void **state)
{
    static const char *const forms[] = {"'cleared'", "{'cleared': nil}"};
    char text[128];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(forms); i++) {
        snprintf(text, sizeof(text), "[{'worker_id': 1, 'event': {'data': %s, 'dp_rank': 2}}]",
                 forms[i]);
        assert_int_equal(decode(text), 0);
        assert_int_equal(batch.n_ops, 1);
        assert_int_equal(batch.ops->type, KVE_OP_CLEAR);
        assert_int_equal(batch.ops->tiers, (1u << KV_N_TIERS) - 1);
        assert_int_equal(batch.ops->rank, 2);
    }
}

/* One event that can't be used doesn't take the others along, and says what it may have been about. */
static void test_left_out(void **state)
{
    static const char *const malformed[] = {
        "7",
        "nil",
        "{}",
        "{'worker_id': 1}",
        "{'event': {" STORE_1 "}}",
        "{'worker_id': 'a', 'event': {" STORE_1 "}}",
        "{'worker_id': 1, 'event': 5}",
        "{'worker_id': 1, 'event': {}}",
        "{'worker_id': 1, 'event': {'data': {}}}",
        "{'worker_id': 1, 'event': {'data': 5}}",
        "{'worker_id': 1, 'event': {'data': {'stored': {}}}}",
        "{'worker_id': 1, 'event': {'data': {'stored': {'blocks': [1]}}}}",
        "{'worker_id': 1, 'event': {'data': {'stored': {'blocks': [{'block_hash': 1}]}}}}",
        "{'worker_id': 1, 'event': {'data': {'removed': {}}}}",
        "{'worker_id': 1, 'event': {'data': {'removed': {'block_hashes': ['a']}}}}",
        "{'worker_id': 1, 'event': {'dp_rank': 4294967296, 'data': 'cleared'}}",
        "{'worker_id': 1, 'event': {'data': {'removed': {'block_hashes': [1]}, 'cleared': nil}}}",
    };
    char text[512];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(malformed); i++) {
        snprintf(text, sizeof(text), "[%s, {'worker_id': 1, 'event': {%s}}]", malformed[i],
                 STORE_1);
        assert_int_equal(decode(text), 0);
        assert_int_equal(batch.skipped[KVE_SKIP_MALFORMED], 1);
        assert_int_equal(batch.n_ops, 1);
        assert_int_equal(reader->n_lost, 1);
        assert_int_equal(reader->lost[0].tiers, (1u << KV_N_TIERS) - 1);
    }
    expect_skip("[{'worker_id': 1, 'event': {'data': {'moved': {}}}}]", KVE_SKIP_UNKNOWN_TYPE);
    expect_skip("[{'worker_id': 1, 'event': {'data': {'stored': {'blocks': [" BLOCK_1 "," BLOCK_1
                "]}}}}]",
                KVE_SKIP_DUPLICATE_HASH);
    expect_skip("[{'worker_id': 1, 'residency_domain': 'cache_owner', 'event': {" STORE_1 "}}]",
                KVE_SKIP_REMOTE);
    assert_int_equal(reader->n_lost, 0);
    assert_int_equal(decode("[{'worker_id': 1, 'event': {'data': {'stored': {'blocks': []}}}}]"),
                     0);
    assert_int_equal(batch.n_ops, 0);
}

#define DEEP 3000

static void test_payloads_refused(void **state)
{
    struct kv_buf deep = KV_BUF_INIT;

    (void)state;
    assert_int_equal(decode("{}"), -EPROTO);
    assert_int_equal(decode("nil"), -EPROTO);
    assert_int_equal(decode_bytes(PUBLISHER, "", 0), -EPROTO);
    assert_int_equal(decode_bytes(PUBLISHER, "\x90\x90", 2), -EPROTO); /* bytes behind it */
    assert_int_equal(decode_bytes(PUBLISHER, "\xdd\xff\xff\xff\xff", 5), -EPROTO);
    assert_int_equal(decode("[]"), 0);
    assert_int_equal(batch.n_events, 0);
    kv_buf_puts(&deep, "[{'worker_id': 1, 'x': ");
    for (int i = 0; i < DEEP; i++)
        kv_buf_puts(&deep, "[");
    for (int i = 0; i < DEEP; i++)
        kv_buf_puts(&deep, "]");
    kv_buf_puts(&deep, ", 'event': {" STORE_1 "}}]");
    assert_int_equal(decode(kv_buf_cstr(&deep)), 0); /* passed over, at any depth */
    assert_int_equal(batch.n_ops, 1);
    kv_buf_fini(&deep);
}

static void test_limits(void **state)
{
    struct kve_reader_opts opts = {
        .size = sizeof(opts), .block_size = 4, .max_events = 2, .max_tokens = 2};
#define ONE "{'worker_id': 1, 'event': {" STORE_1 "}}"

    (void)state;
    kve_reader_destroy(reader);
    assert_int_equal(kve_reader_create(&opts, &reader), 0);
    assert_int_equal(decode("[" ONE "," ONE "," ONE "," ONE "]"), 0);
    assert_int_equal(batch.n_events, 4);
    assert_int_equal(batch.n_ops, 2);
    assert_int_equal(batch.skipped[KVE_SKIP_TOO_LARGE], 2);
    assert_int_equal(reader->n_lost, 1);
    expect_skip("[{'worker_id': 1, 'event': {'data': {'removed': {'block_hashes': "
                "[1, 2, 3, 4, 5]}}}}]",
                KVE_SKIP_TOO_LARGE);
    assert_int_equal(decode("[" ONE "]"), 0); /* the limit is no lasting failure */
    assert_int_equal(batch.n_ops, 1);
}

/* -- whose events, and which are missing ------------------------------------------------------- */

static int decode_id(uint64_t id)
{
    char text[256];

    snprintf(text, sizeof(text),
             "[{'worker_id': 5, 'event': {'event_id': %llu, 'dp_rank': 1, %s}}]",
             (unsigned long long)id, STORE_1);
    return decode(text);
}

static void test_expected(void **state)
{
    (void)state;
    kve_reader_expect(reader, PUBLISHER, 5, 1);
    assert_int_equal(decode_as(PUBLISHER + 1, "[]"), -EPROTO);
    assert_int_equal(decode_id(1), 0);
    assert_int_equal(batch.n_ops, 1);
    expect_skip("[{'worker_id': 6, 'event': {'event_id': 2, 'dp_rank': 1, " STORE_1 "}}]",
                KVE_SKIP_REMOTE);
    expect_skip("[{'worker_id': 5, 'event': {'event_id': 2, 'dp_rank': 0, " STORE_1 "}}]",
                KVE_SKIP_REMOTE);
    assert_int_equal(reader->n_lost, 0);
    assert_int_equal(decode("[{'event': 7}]"), 0); /* it may have been the worker's */
    assert_int_equal(reader->n_lost, 1);
    assert_int_equal(reader->lost[0].rank, 1);
}

static void test_event_ids(void **state)
{
    static const struct {
        uint64_t id;
        bool misses;
    } rows[] = {{7, false}, {8, false}, {10, true}, {11, false}, {11, true}, {3, true}, {4, false}};

    (void)state;
    assert_int_equal(decode_id(1), 0);
    assert_int_equal(decode_id(5), 0);
    assert_false(reader->misses_events); /* of nobody in particular */
    kve_reader_expect(reader, PUBLISHER, 5, 1);
    for (size_t i = 0; i < KV_COUNT(rows); i++) {
        assert_int_equal(decode_id(rows[i].id), 0);
        assert_int_equal(reader->misses_events, rows[i].misses);
    }
    kve_reader_reset(reader);
    assert_int_equal(decode_id(1), 0);
    assert_false(reader->misses_events);
}

/* -- random events ----------------------------------------------------------------------------- */

#define MOST 200

static void random_event(uint64_t *seed, struct kv_block *blocks, uint64_t *hashes,
                         struct kve_router_event *ret)
{
    *ret = (struct kve_router_event){
        .holder = {.worker = unit_random(seed), .rank = (uint32_t)unit_random(seed)},
        .event_id = unit_random(seed) >> unit_random(seed) % 64,
        .type = unit_random(seed) % 3 == 0   ? KVE_OP_STORE
                : unit_random(seed) % 2 == 0 ? KVE_OP_REMOVE
                                             : KVE_OP_CLEAR,
        .tier = (enum kv_tier)(unit_random(seed) % KV_N_TIERS),
        .has_parent = unit_random(seed) % 2,
        .blocks = blocks,
        .hashes = hashes,
    };
    ret->has_parent &= ret->type == KVE_OP_STORE;
    ret->parent = ret->has_parent ? unit_random(seed) : 0;
    ret->n = ret->type == KVE_OP_CLEAR ? 0 : unit_random(seed) % MOST;
    for (size_t i = 0; i < ret->n; i++) {
        hashes[i] = unit_random(seed) >> unit_random(seed) % 64;
        blocks[i] = (struct kv_block){unit_random(seed) >> unit_random(seed) % 64,
                                      unit_random(seed) >> unit_random(seed) % 64};
    }
}

static void test_round_trips(void **state)
{
    static struct kv_block blocks[MOST];
    static uint64_t hashes[MOST];
    uint64_t seed = unit_seed();
    struct kve_router_scratch scratch = {0};
    struct kve_router_event ev, again;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_msgpack m;

    (void)state;
    for (size_t i = 0, n = unit_rounds(3000); i < n; i++) {
        random_event(&seed, blocks, hashes, &ev);
        kv_buf_clear(&out);
        kve_router_event_pack(&out, &ev);
        kv_msgpack_init(&m, out.data, out.len);
        assert_int_equal(kve_router_event_unpack(&m, &scratch, &again), 0);
        assert_ptr_equal(m.p, m.end);
        assert_true(again.holder.worker == ev.holder.worker && again.event_id == ev.event_id);
        assert_int_equal(again.holder.rank, ev.holder.rank);
        assert_int_equal(again.type, ev.type);
        assert_int_equal(again.tier, ev.tier);
        assert_int_equal(again.has_parent, ev.has_parent);
        assert_true(again.parent == ev.parent);
        assert_int_equal(again.n, ev.n);
        if (ev.n && ev.type == KVE_OP_STORE)
            assert_memory_equal(again.blocks, blocks, ev.n * sizeof(*blocks));
        if (ev.n && ev.type == KVE_OP_REMOVE)
            assert_memory_equal(again.hashes, hashes, ev.n * sizeof(*hashes));
    }
    kve_router_scratch_fini(&scratch);
    kv_buf_fini(&out);
}

#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_captured),
        T(test_captured_again),
        cmocka_unit_test(test_frames_refused),
        cmocka_unit_test(test_envelope_orders),
        cmocka_unit_test(test_envelope_refused),
        T(test_events_of_any_order),
        T(test_tiers),
        T(test_cleared),
        T(test_left_out),
        T(test_payloads_refused),
        T(test_limits),
        T(test_expected),
        T(test_event_ids),
        cmocka_unit_test(test_round_trips),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
