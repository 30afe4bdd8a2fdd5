// SPDX-License-Identifier: Apache-2.0
/* Records of the event plane: round trips in both forms beside the records themselves as model, bytes
 * that are fixed, and damage. */
#include "base/core/le.h"
#include "base/unit.h"
#include "plane/record.h"

#define MAX 200

/* A record and the memory of its keys. */
struct held {
    struct kvp_record record;
    uint8_t key[KVP_MAX_KEY], parent[KVP_MAX_KEY];
};

static uint64_t state_;

static struct held random_record(uint32_t key_len)
{
    struct held held;
    struct kvp_record *r = &held.record;

    memset(&held, 0, sizeof(held));
    for (size_t i = 0; i < KVP_MAX_KEY; i++) {
        held.key[i] = (uint8_t)unit_random(&state_);
        held.parent[i] = (uint8_t)unit_random(&state_);
    }
    r->event = unit_below(&state_, 2) ? KVP_STORE : KVP_REMOVE;
    r->tier = (enum kv_tier)unit_below(&state_, KV_N_TIERS);
    r->first = r->event == KVP_STORE && unit_below(&state_, 2);
    r->last = r->event == KVP_REMOVE && unit_below(&state_, 2);
    r->has_prefix = unit_below(&state_, 2);
    r->has_tokens_hash = unit_below(&state_, 2);
    r->group = (uint32_t)unit_below(&state_, 64);
    r->key_len = key_len;
    r->parent = unit_below(&state_, 2) ? held.parent : NULL;
    r->position = (uint32_t)unit_random(&state_);
    r->prefix = r->has_prefix ? unit_random(&state_) : 0;
    r->tokens_hash = r->has_tokens_hash ? unit_random(&state_) : 0;
    r->block_bytes = unit_random(&state_);
    r->volume = unit_random(&state_);
    return held;
}

static struct kvp_header random_header(void)
{
    struct kvp_header header = KVP_HEADER_INIT;

    header.kind = 1 + (enum kvp_kind)unit_below(&state_, 3);
    snprintf(header.publisher, sizeof(header.publisher), "kvasir.c.%llx.t.w",
             (unsigned long long)unit_below(&state_, 1 << (1 + unit_below(&state_, 30))));
    header.incarnation = unit_random(&state_);
    header.sequence = unit_random(&state_);
    header.time_ns = unit_random(&state_);
    if (header.kind == KVP_SNAPSHOT) {
        header.part = unit_random(&state_);
        header.request = unit_random(&state_);
        header.last = unit_below(&state_, 2);
    }
    for (size_t i = 0; i < 16; i++)
        header.fingerprint[i] = (uint8_t)unit_random(&state_);
    return header;
}

/* Records that kvp_read is to hand out. */
struct expected {
    struct held *records;
    size_t n, seen;
    const struct kvp_header *header;
};

static void assert_headers_equal(const struct kvp_header *a, const struct kvp_header *b)
{
    assert_int_equal(a->kind, b->kind);
    assert_string_equal(a->publisher, b->publisher);
    assert_true(a->incarnation == b->incarnation && a->sequence == b->sequence);
    assert_true(a->part == b->part && a->request == b->request && a->last == b->last);
    assert_true(a->time_ns == b->time_ns);
    assert_memory_equal(a->fingerprint, b->fingerprint, 16);
}

static void compare(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    struct expected *expected = arg;
    const struct held *held = &expected->records[expected->seen++];
    struct kvp_record bare = *record, like = held->record;

    assert_headers_equal(header, expected->header);
    assert_int_equal(record->key_len, like.key_len);
    assert_memory_equal(record->key, held->key, like.key_len);
    assert_int_equal(!record->parent, !like.parent);
    if (record->parent)
        assert_memory_equal(record->parent, held->parent, like.key_len);
    bare.key = bare.parent = like.key = like.parent = NULL;
    assert_memory_equal(&bare, &like, sizeof(bare)); /* both were zeroed first */
}

static void read_back(const void *data, size_t len, struct expected *expected)
{
    struct kvp_header header = KVP_HEADER_INIT;

    expected->seen = 0;
    assert_int_equal(kvp_read(data, len, &header, compare, expected), 0);
    assert_int_equal(expected->seen, expected->n);
    assert_int_equal(header.n_records, expected->n);
    assert_headers_equal(&header, expected->header);
}

static void write_message(struct kv_buf *out, const struct kvp_header *header,
                          const struct held *records, size_t n)
{
    kvp_begin(out, header);
    for (size_t i = 0; i < n; i++) {
        struct kvp_record record = records[i].record;

        record.key = records[i].key;
        record.parent = record.parent ? records[i].parent : NULL;
        kvp_put(out, &record);
    }
    assert_int_equal(kvp_end(out, (uint32_t)n), 0);
}

static void test_round_trips(void **state)
{
    struct kv_buf out = KV_BUF_INIT, json = KV_BUF_INIT;
    static struct held records[MAX];

    (void)state;
    for (size_t round = 0; round < unit_rounds(500); round++) {
        struct kvp_header header = random_header();
        struct expected expected = {
            .records = records, .n = unit_below(&state_, MAX), .header = &header};

        for (size_t i = 0; i < expected.n; i++)
            records[i] = random_record(4 + (uint32_t)unit_below(&state_, 61));
        write_message(&out, &header, records, expected.n);
        read_back(out.data, out.len, &expected);
        assert_int_equal(kvp_to_json(out.data, out.len, &json), 0);
        read_back(json.data, json.len, &expected);
    }
    kv_buf_fini(&out);
    kv_buf_fini(&json);
}

/* The specification's "about 100 bytes": a record with keys of 8 bytes has 64. */
static void test_bytes(void **state)
{
    static const char expected[] =
        "{\"kind\":\"events\",\"publisher\":\"kvasir.c.m.t.w\",\"incarnation\":"
        "\"0000000000000007\","
        "\"sequence\":3,\"time_ns\":5,\"fingerprint\":\"000102030405060708090a0b0c0d0e0f\","
        "\"events\":[{\"event_type\":\"store\",\"sequence_hash\":\"0102030405060708\","
        "\"prefix_hash\":\"0000000000000009\",\"block_size\":4096,"
        "\"storage_location\":\"000000000000000a\",\"extra_metadata\":{\"tier\":\"host\",\"group\":"
        "0,"
        "\"position\":2,\"parent\":\"1112131415161718\",\"tokens_hash\":\"000000000000000b\","
        "\"first\":true}}]}";
    struct kvp_header header = {
        .size = sizeof(header),
        .kind = KVP_EVENTS,
        .publisher = "kvasir.c.m.t.w",
        .incarnation = 7,
        .sequence = 3,
        .time_ns = 5,
        .fingerprint = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    struct kvp_record record = {.event = KVP_STORE,
                                .tier = KV_TIER_HOST,
                                .first = true,
                                .has_prefix = true,
                                .has_tokens_hash = true,
                                .key_len = 8,
                                .key = "\x01\x02\x03\x04\x05\x06\x07\x08",
                                .parent = "\x11\x12\x13\x14\x15\x16\x17\x18",
                                .position = 2,
                                .prefix = 9,
                                .tokens_hash = 11,
                                .block_bytes = 4096,
                                .volume = 10};
    struct kv_buf out = KV_BUF_INIT, json = KV_BUF_INIT;

    (void)state;
    kvp_begin(&out, &header);
    kvp_put(&out, &record);
    assert_int_equal(kvp_end(&out, 1), 0);
    assert_int_equal(out.len, KVP_FIXED + 16 + 64);
    assert_memory_equal(out.data, "KVEV\x01\x01\x70\x00", 8);
    assert_true(kv_get_le64((uint8_t *)out.data + 8) == UINT64_C(0x47aedc22a7797a5a));
    assert_memory_equal(out.data + KVP_FIXED, "kvasir.c.m.t.w\0\0", 16);
    assert_memory_equal(out.data + KVP_FIXED + 16, "\x01\x01\x1d\x08\x02\0\0\0\0\x10", 10);
    assert_int_equal(kvp_to_json(out.data, out.len, &json), 0);
    assert_int_equal(json.len, strlen(expected));
    assert_memory_equal(json.data, expected, json.len);
    kv_buf_fini(&out);
    kv_buf_fini(&json);
}

/* No changed or missing byte of a binary message goes unnoticed. */
static void test_damage(void **state)
{
    struct kv_buf out = KV_BUF_INIT;
    struct held records[3];
    struct kvp_header header = random_header(), ret = KVP_HEADER_INIT;

    (void)state;
    for (size_t i = 0; i < 3; i++)
        records[i] = random_record(8);
    write_message(&out, &header, records, 3);
    for (size_t i = 0; i < out.len; i++) {
        int err;

        assert_true(kvp_read(out.data, i, &ret, NULL, NULL) == -EBADMSG);
        for (unsigned bit = 0; bit < 8; bit++) {
            out.data[i] = (char)(out.data[i] ^ 1 << bit);
            err = kvp_read(out.data, out.len, &ret, NULL, NULL);
            assert_true(err == -EBADMSG || (i == 4 && err == -EPROTONOSUPPORT));
            out.data[i] = (char)(out.data[i] ^ 1 << bit);
        }
    }
    assert_int_equal(kvp_read(out.data, out.len, &ret, NULL, NULL), 0);
    assert_int_equal(kvp_read(NULL, 0, &ret, NULL, NULL), -EBADMSG);
    for (size_t i = 0; i < 3; i++) /* padding with the right checksum */
        records[i].record.key_len = 5;
    write_message(&out, &header, records, 3);
    out.data[out.len - 1] = 1;
    assert_int_equal(kvp_end(&out, 3), 0);
    assert_int_equal(kvp_read(out.data, out.len, &ret, NULL, NULL), -EBADMSG);
    out.data[out.len - 1] = 0;
    assert_int_equal(kvp_end(&out, 3), 0);
    assert_int_equal(kvp_read(out.data, out.len, &ret, NULL, NULL), 0);
    ret.size = 0;
    assert_int_equal(kvp_read(out.data, out.len, &ret, NULL, NULL), -EINVAL);
    kv_buf_fini(&out);
}

static int read_text(const char *text)
{
    return kvp_read(text, strlen(text), NULL, NULL, NULL);
}

static void test_json(void **state)
{
    (void)state;
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a\",\"events\":[]}"), 0);
    assert_int_equal(
        read_text("{\"events\":[],\"new\":[{}],\"publisher\":\"a\",\"kind\":\"alive\"}"), 0);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a\"}"), -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"events\":[]}"), -EBADMSG);
    assert_int_equal(read_text("{\"publisher\":\"a\",\"events\":[]}"), -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"dead\",\"publisher\":\"a\",\"events\":[]}"), -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a>\",\"events\":[]}"),
                     -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a\",\"events\":[]}}"),
                     -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a\",\"events\":[{}]}"),
                     -EBADMSG);
    assert_int_equal(read_text("{\"kind\":\"alive\",\"publisher\":\"a\",\"part\":1,\"events\":[]}"),
                     -EBADMSG);
    assert_int_equal(read_text("{"), -EBADMSG);
}

static void test_subjects(void **state)
{
    char subject[KVP_MAX_SUBJECT], long_name[300];

    (void)state;
    assert_int_equal(kvp_subject("prod", "llama-3.1", "", "w 1", subject), 31);
    assert_string_equal(subject, "kvasir.prod.llama-3%2E1.%.w%201");
    assert_true(kvp_subject("*", ">", NULL, "%", subject) > 0);
    assert_string_equal(subject, "kvasir.%2A.%3E.%.%25");
    assert_true(kvp_subject("a.b", "ü\n", "_", "-", subject) > 0);
    assert_string_equal(subject, "kvasir.a%2Eb.%C3%BC%0A._.-");
    memset(long_name, 'x', sizeof(long_name) - 1);
    long_name[sizeof(long_name) - 1] = '\0';
    assert_int_equal(kvp_subject("a", "b", "c", long_name, subject), -ENAMETOOLONG);
    long_name[KVP_MAX_SUBJECT - 14] = '\0'; /* "kvasir.a.b.c." and the NUL take the rest */
    assert_int_equal(kvp_subject("a", "b", "c", long_name, subject), KVP_MAX_SUBJECT - 1);
    long_name[KVP_MAX_SUBJECT - 14] = 'x';
    long_name[KVP_MAX_SUBJECT - 13] = '\0';
    assert_int_equal(kvp_subject("a", "b", "c", long_name, subject), -ENAMETOOLONG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips), cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_damage),      cmocka_unit_test(test_json),
        cmocka_unit_test(test_subjects),
    };

    state_ = unit_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
