// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body.h"

#include "base/json/msgpack.h"
#include "base/unit.h"
#include "event/pack.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/body_mm.h"
#include "indexer/model/lookup.h"
#include "kv_event.h"

static struct ki_body body;
static struct kv_error error;

static int parse(enum ki_media media, const char *text, size_t len, uint32_t required,
                 uint32_t optional)
{
    /* An exact copy, so that sanitizers see a read beyond the end. */
    char *copy = malloc(len ? len : 1);
    int rc;

    memcpy(copy, text, len);
    memset(&error, 0, sizeof(error));
    rc = ki_body_parse(media, (struct kv_str){copy, len}, required, optional, &body, &error);
    free(copy);
    return rc;
}

#define QUERY (KI_TOKEN_IDS | KI_MODEL_NAME)
#define QUERY_MORE (KI_TENANT_ID | KI_LORA_NAME | KI_CACHE_SALT | KI_EXPLAIN)
#define REGISTER (KI_INSTANCE_ID | KI_ENDPOINT | KI_MODEL_NAME | KI_BLOCK_SIZE)
#define REGISTER_MORE (KI_TENANT_ID | KI_DP_RANK | KI_REPLAY_ENDPOINT)

static int json(const char *text, uint32_t required, uint32_t optional)
{
    return parse(KI_MEDIA_JSON, text, strlen(text), required, optional);
}

static int packed(const struct kv_buf *text, uint32_t required, uint32_t optional)
{
    return parse(KI_MEDIA_MSGPACK, text->data, text->len, required, optional);
}

static int teardown(void **state)
{
    (void)state;
    ki_body_fini(&body);
    memset(&body, 0, sizeof(body));
    return 0;
}

static const uint32_t *tokens(void)
{
    return (const uint32_t *)(const void *)body.token_ids.data;
}

static const uint64_t *hashes(void)
{
    return (const uint64_t *)(const void *)body.block_hashes.data;
}

static void media_types(void **state)
{
    static const struct {
        const char *type;
        enum ki_media media;
    } cases[] = {
        {"application/json", KI_MEDIA_JSON},
        {"Application/JSON; charset=utf-8", KI_MEDIA_JSON},
        {"application/json;charset=utf-8", KI_MEDIA_JSON},
        {"application/vnd.api+json", KI_MEDIA_JSON},
        {"application/msgpack", KI_MEDIA_MSGPACK},
        {"application/x-msgpack", KI_MEDIA_MSGPACK},
        {"application/vnd.msgpack", KI_MEDIA_MSGPACK},
        {NULL, KI_MEDIA_OTHER},
        {"", KI_MEDIA_OTHER},
        {"text/json", KI_MEDIA_OTHER},
        {"text/plain", KI_MEDIA_OTHER},
        {"application/jsonx", KI_MEDIA_OTHER},
        {"application/+json", KI_MEDIA_OTHER},
        {"application/", KI_MEDIA_OTHER},
        {"application/x-www-form-urlencoded", KI_MEDIA_OTHER},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++)
        if (ki_media_of(cases[i].type) != cases[i].media)
            fail_msg("%s", cases[i].type ? cases[i].type : "(none)");
}

static void a_query(void **state)
{
    (void)state;
    assert_int_equal(json("{\"unknown\":{\"a\":[1,{}]},\"token_ids\":[1, 2,4294967295,0],"
                          "\"model_name\":\"m\\u00e9\",\"tenant_id\":\"t\",\"lora_name\":null,"
                          "\"explain\":true,\"endpoint\":5}",
                          QUERY, QUERY_MORE),
                     0);
    assert_int_equal(body.token_ids.len, 16);
    assert_int_equal(tokens()[2], UINT32_MAX);
    assert_string_equal(body.model_name, "m\xc3\xa9");
    assert_string_equal(body.tenant_id, "t");
    assert_null(body.lora_name);
    assert_null(body.endpoint); /* not a field of this endpoint: whatever it is, it is ignored */
    assert_true(body.explain);
    assert_int_equal(body.present & KI_LORA_NAME, 0);

    /* nothing stays from one request to the next */
    assert_int_equal(json("{\"token_ids\":[],\"model_name\":\"n\"}", QUERY, QUERY_MORE), 0);
    assert_int_equal(body.token_ids.len, 0);
    assert_null(body.tenant_id);
    assert_false(body.explain);
}

static void hashes_of_both_signs(void **state)
{
    (void)state;
    assert_int_equal(json("{\"block_hashes\":[18446744073709551615,-1,9223372036854775808,"
                          "-9223372036854775808,0,5],\"model_name\":\"m\"}",
                          KI_BLOCK_HASHES | KI_MODEL_NAME, 0),
                     0);
    assert_int_equal(body.block_hashes.len, 6 * 8);
    assert_true(hashes()[0] == UINT64_MAX && hashes()[1] == UINT64_MAX);
    assert_true(hashes()[2] == UINT64_C(1) << 63 && hashes()[3] == UINT64_C(1) << 63);
    assert_true(hashes()[4] == 0 && hashes()[5] == 5);
}

static void a_registration(void **state)
{
    (void)state;
    assert_int_equal(json("{\"instance_id\":18446744073709551615,\"endpoint\":\"tcp://h:1\","
                          "\"model_name\":\"m\",\"block_size\":16,\"dp_rank\":4294967295}",
                          REGISTER, REGISTER_MORE),
                     0);
    assert_true(body.instance_id == UINT64_MAX);
    assert_true(body.dp_rank == UINT32_MAX);
    assert_int_equal(body.block_size, 16);
    assert_int_equal(body.present & KI_REPLAY_ENDPOINT, 0);
}

/* A string is a number where it is digits, else a name; both formats agree. */
static void instance_ids(void **state)
{
    static const struct {
        const char *json; /* of the value */
        const char *name; /* NULL: none */
        uint64_t number;
        const char *problem; /* NULL: accepted */
    } cases[] = {
        {"7", NULL, 7, NULL},
        {"\"7\"", NULL, 7, NULL},
        {"\"18446744073709551615\"", NULL, UINT64_MAX, NULL},
        {"\"pod-a\"", "pod-a", UINT64_C(0x8646c1aac08e7b41), NULL},
        {"\"\\u00e9\"", "\u00e9", UINT64_C(0xf7940a006cf10cb3), NULL},
        {"\"\"", NULL, 0, "a name has 1 to 253 bytes"},
        {"\"07\"", NULL, 0, "digits alone are a number"},
        {"\"a\\tb\"", NULL, 0, "a name is UTF-8 without control characters"},
        {"null", NULL, 0, "expected"},
        {"[]", NULL, 0, "expected"},
        {"true", NULL, 0, "expected"},
    };
    struct kv_buf text = KV_BUF_INIT;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        int wanted = cases[i].problem ? -EINVAL : 0;

        kv_buf_clear(&text);
        kv_buf_printf(&text, "{\"instance_id\":%s,\"model_name\":\"m\"}", cases[i].json);
        if (json(kv_buf_cstr(&text), KI_INSTANCE_ID | KI_MODEL_NAME, 0) != wanted)
            fail_msg("%s: %s", cases[i].json, error.text);
        if (cases[i].problem) {
            assert_non_null(strstr(error.text, "field 'instance_id': "));
            if (!strstr(error.text, cases[i].problem))
                fail_msg("%s: %s", cases[i].json, error.text);
            continue;
        }
        for (int media = 0; media < 2; media++) {
            assert_true(body.instance_id == cases[i].number);
            assert_int_equal(body.instance_name != NULL, cases[i].name != NULL);
            if (cases[i].name)
                assert_string_equal(body.instance_name, cases[i].name);
            assert_string_equal(body.model_name, "m");
            kv_buf_clear(&text);
            kv_msgpack_put_map(&text, 2);
            kv_msgpack_put_str(&text, "instance_id");
            if (cases[i].name)
                kv_msgpack_put_str(&text, cases[i].name);
            else
                kv_msgpack_put_u64(&text, cases[i].number);
            kv_msgpack_put_str(&text, "model_name");
            kv_msgpack_put_str(&text, "m");
            assert_int_equal(packed(&text, KI_INSTANCE_ID | KI_MODEL_NAME, 0), 0);
        }
    }
    assert_int_equal(json("{\"instance_id\":\"a\",\"instance_id\":2,\"model_name\":\"m\"}",
                          KI_INSTANCE_ID | KI_MODEL_NAME, 0),
                     -EINVAL);
    kv_buf_fini(&text);
}

/* Cache groups, in both formats. */
static void groups(void **state)
{
    static const struct {
        const char *json, *packed, *problem;
    } cases[] = {
        {"[]", "[]", NULL},
        {"null", "nil", NULL},
        {"[{\"kind\":\"mamba\",\"group\":3,\"block_size\":32},{\"group\":1,"
         "\"kind\":\"chunked_local_attention\",\"chunk\":64,\"more\":[1]}]",
         "[{'kind': 'mamba', 'group': 3, 'block_size': 32}, {'group': 1, 'kind': "
         "'chunked_local_attention', 'chunk': 64, 'more': [1]}]",
         NULL},
        {"[{\"group\":1,\"kind\":\"mamba\"},{\"group\":1,\"kind\":\"mamba\"}]",
         "[{'group': 1, 'kind': 'mamba'}, {'group': 1, 'kind': 'mamba'}]", "told twice"},
        {"[{\"group\":4294967295}]", "[{'group': 4294967295}]", ""},
        {"[{\"group\":1,\"kind\":2}]", "[{'group': 1, 'kind': 2}]", "expected"},
        {"[{\"group\":-1}]", "[{'group': -1}]", ""},
        {"[1]", "[1]", "expected"},
        {"{}", "{}", "expected"},
        {"1", "1", "expected"},
    };

    (void)state;
    for (size_t i = 0; i < 2 * KV_COUNT(cases); i++) {
        struct kv_buf text = KV_BUF_INIT;
        int rc;

        if (i % 2)
            pack(&text, "{'url': 'u', 'groups': %s}", cases[i / 2].packed);
        else
            kv_buf_printf(&text, "{\"url\":\"u\",\"groups\":%s}", cases[i / 2].json);
        rc = i % 2 ? packed(&text, KI_URL, KI_GROUPS) : json(kv_buf_cstr(&text), KI_URL, KI_GROUPS);
        if (rc != (cases[i / 2].problem ? -EINVAL : 0))
            fail_msg("%s: %d, %s", cases[i / 2].json, rc, error.text);
        if (rc &&
            (!strstr(error.text, "field 'groups': ") || !strstr(error.text, cases[i / 2].problem)))
            fail_msg("%s: %s", cases[i / 2].json, error.text);
        if (i / 2 == 2) {
            assert_int_equal(body.groups.n, 2);
            assert_int_equal(body.groups.items[0].group, 1);
            assert_int_equal(body.groups.items[0].kind, KVE_KIND_CHUNKED);
            assert_int_equal(body.groups.items[0].chunk, 64);
            assert_int_equal(body.groups.items[1].kind, KVE_KIND_MAMBA);
            assert_int_equal(body.groups.items[1].block_size, 32);
        } else if (!rc) {
            assert_int_equal(body.groups.n, 0);
        }
        kv_buf_fini(&text);
    }
}

/* Groups that are written read back, as the text of an option does. */
static void groups_as_text(void **state)
{
    static const char text[] =
        "[{\"group\":2,\"window\":40,\"kind\":\"sliding_window\"},"
        "{\"block_size\":32,\"chunk\":64,\"kind\":\"chunked_local_attention\"}]";
    static const char *const wrong[] = {"", "[", "1", "[] []", "[{\"group\": 1}, {\"group\": 1}]"};
    struct kv_buf out = KV_BUF_INIT;
    struct kve_told told = {0};
    struct kv_json_writer w;

    (void)state;
    assert_int_equal(ki_told_read_text(text, &told, &error), 0);
    assert_int_equal(ki_told_check(&told, 16, &error), 0);
    assert_int_equal(ki_told_check(&told, 0, &error), 0);
    kv_json_writer_init(&w, &out);
    ki_told_write(&told, &w);
    assert_string_equal(kv_buf_cstr(&out), text);
    told.items[1].chunk = 40;
    assert_int_equal(ki_told_check(&told, 16, &error), -EINVAL);
    for (size_t i = 0; i < KV_COUNT(wrong); i++)
        assert_int_equal(ki_told_read_text(wrong[i], &told, &error), -EINVAL);
    assert_int_equal(told.n, 2);
    kv_buf_fini(&out);
}

static void routing_group_is_the_tenant(void **state)
{
    (void)state;
    assert_int_equal(json("{\"url\":\"u\",\"routing_group\":\"g\"}", KI_URL, KI_TENANT_ID), 0);
    assert_string_equal(body.tenant_id, "g");
    assert_int_equal(
        json("{\"url\":\"u\",\"routing_group\":\"g\",\"tenant_id\":\"g\"}", KI_URL, KI_TENANT_ID),
        0);
    /* Different values: routing_group wins, wherever it stands; only it is checked. */
    assert_int_equal(
        json("{\"url\":\"u\",\"routing_group\":\"g\",\"tenant_id\":\"h\"}", KI_URL, KI_TENANT_ID),
        0);
    assert_string_equal(body.tenant_id, "g");
    assert_int_equal(
        json("{\"tenant_id\":\"h\",\"url\":\"u\",\"routing_group\":\"g\"}", KI_URL, KI_TENANT_ID),
        0);
    assert_string_equal(body.tenant_id, "g");
    /* null is as if it weren't there */
    assert_int_equal(
        json("{\"tenant_id\":\"h\",\"url\":\"u\",\"routing_group\":null}", KI_URL, KI_TENANT_ID),
        0);
    assert_string_equal(body.tenant_id, "h");
    /* either name at most once */
    assert_int_equal(
        json("{\"tenant_id\":\"h\",\"url\":\"u\",\"tenant_id\":\"h\"}", KI_URL, KI_TENANT_ID),
        -EINVAL);
    assert_int_equal(json("{\"routing_group\":\"g\",\"tenant_id\":\"h\",\"url\":\"u\","
                          "\"routing_group\":\"g\"}",
                          KI_URL, KI_TENANT_ID),
                     -EINVAL);
}

static void bad_json(void **state)
{
    static const struct {
        const char *text;
        int code;
        const char *message;
    } cases[] = {
        {"", -EBADMSG, "byte 0"},
        {"{", -EBADMSG, "byte 1"},
        {"{}", -EINVAL, "missing field 'token_ids'"},
        {"{\"token_ids\":[1]}", -EINVAL, "missing field 'model_name'"},
        {"{\"token_ids\":[1],\"model_name\":null}", -EINVAL, "field 'model_name'"},
        {"{\"token_ids\":null,\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[1],\"model_name\":\"m\"} x", -EBADMSG, "byte 35"},
        {"{\"token_ids\":[1],\"model_name\":\"m\"", -EBADMSG, "byte 33"},
        {"{\"token_ids\":[1,],\"model_name\":\"m\"}", -EBADMSG, "byte 16"},
        {"{\"token_ids\":[1,x],\"model_name\":\"m\"}", -EBADMSG, "byte 16"},
        {"{\"token_ids\":[01],\"model_name\":\"m\"}", -EBADMSG, "byte"},
        {"{\"token_ids\":[1.5],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[1e3],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[-1],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[4294967296],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[1e999],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[99999999999999999999999999],\"model_name\":\"m\"}", -EINVAL,
         "field 'token_ids'"},
        {"{\"token_ids\":[\"1\"],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[[1]],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[null],\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":\"1\",\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":{},\"model_name\":\"m\"}", -EINVAL, "field 'token_ids'"},
        {"{\"token_ids\":[1],\"model_name\":5}", -EINVAL, "field 'model_name'"},
        {"{\"token_ids\":[1],\"model_name\":[\"m\"]}", -EINVAL, "field 'model_name'"},
        {"{\"token_ids\":[1],\"model_name\":\"m\\u0000\"}", -EINVAL, "field 'model_name'"},
        {"{\"token_ids\":[1],\"model_name\":\"\xff\"}", -EBADMSG, "byte"},
        {"{\"token_ids\":[1],\"model_name\":\"\\ud800\"}", -EBADMSG, "byte"},
        {"{\"token_ids\":[1],\"model_name\":\"m\",\"tenant_id\":1}", -EINVAL, "field 'tenant_id'"},
        {"{\"token_ids\":[1],\"model_name\":\"m\",\"explain\":1}", -EINVAL, "field 'explain'"},
        {"{\"token_ids\":[1],\"token_ids\":[1],\"model_name\":\"m\"}", -EINVAL, "given twice"},
        {"[]", -EINVAL, "(top level)"},
        {" [[1], \"m\"] ", -EINVAL, "expected an object (byte 1)"},
        {"[", -EBADMSG, "byte 1"},
        {"[[1],", -EBADMSG, "byte 5"},
        {"[nul]", -EBADMSG, "byte 4"},
        {"[[1] 2]", -EBADMSG, "byte 5"},
        {"[1", -EINVAL, "expected an object (byte 0)"},
        {"[{", -EINVAL, "expected an object (byte 0)"},
        {"[[1]] x", -EBADMSG, "byte 6"},
        {"5", -EINVAL, "(top level)"},
        {"null", -EINVAL, "(top level)"},
        {"nul", -EBADMSG, "byte 3"},
        {"nulx", -EBADMSG, "byte 3"},
        {"fals", -EBADMSG, "byte 4"},
        {"-", -EBADMSG, "byte"},
        {"1.", -EBADMSG, "byte"},
        {"\"abc", -EBADMSG, "byte 4"},
        {"{\"token_ids\":nul}", -EBADMSG, "byte 16"},
        {"{\"token_ids\":[nul]}", -EBADMSG, "byte 17"},
        {"{\"token_ids\":[1],\"model_name\":tru}", -EBADMSG, "byte 33"},
        {"{\"token_ids\":[1],\"model_name\":\"m\",\"explain\":\"x}", -EBADMSG, "byte"},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", -EBADMSG,
         "byte"},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        int rc = json(cases[i].text, QUERY, QUERY_MORE);

        if (rc != cases[i].code)
            fail_msg("%s: %d, %s", cases[i].text, rc, error.text);
        if (!strstr(error.text, cases[i].message))
            fail_msg("%s: message '%s'", cases[i].text, error.text);
    }
}

static void long_strings_are_refused(void **state)
{
    struct kv_buf text = KV_BUF_INIT;

    (void)state;
    for (size_t len = KI_MAX_NAME; len <= KI_MAX_NAME + 1; len++) {
        kv_buf_clear(&text);
        kv_buf_puts(&text, "{\"url\":\"u\",\"tenant_id\":\"");
        for (size_t i = 0; i < len; i++)
            kv_buf_putc(&text, 'x');
        kv_buf_puts(&text, "\"}");
        assert_int_equal(json(kv_buf_cstr(&text), KI_URL, KI_TENANT_ID),
                         len <= KI_MAX_NAME ? 0 : -EINVAL);
    }
    kv_buf_fini(&text);
}

static void msgpack_arrays_and_packed_integers(void **state)
{
    const uint32_t ids[] = {1, 200, 70000, UINT32_MAX};
    struct kv_buf text = KV_BUF_INIT;

    (void)state;
    kv_msgpack_put_map(&text, 3);
    kv_msgpack_put_u64(&text, 7); /* a key that is no string: passed over */
    kv_msgpack_put_array(&text, 0);
    kv_msgpack_put_str(&text, "token_ids");
    kv_msgpack_put_array(&text, 4);
    for (int i = 0; i < 4; i++)
        kv_msgpack_put_u64(&text, ids[i]);
    kv_msgpack_put_str(&text, "model_name");
    kv_msgpack_put_str(&text, "m");
    assert_int_equal(packed(&text, QUERY, QUERY_MORE), 0);
    assert_int_equal(body.token_ids.len, sizeof(ids));
    assert_memory_equal(body.token_ids.data, ids, sizeof(ids));

    kv_buf_clear(&text);
    kv_msgpack_put_map(&text, 2);
    kv_msgpack_put_str(&text, "model_name");
    kv_msgpack_put_str(&text, "m");
    kv_msgpack_put_str(&text, "token_ids");
    kv_msgpack_put_bin(&text, "\1\0\0\0\310\0\0\0\160\21\1\0\377\377\377\377", 16);
    assert_int_equal(packed(&text, QUERY, QUERY_MORE), 0);
    assert_memory_equal(body.token_ids.data, ids, sizeof(ids));
    kv_buf_fini(&text);
}

static void bad_msgpack(void **state)
{
#define HEAD "\x82\xaamodel_name\xa1m\xa9token_ids"
    static const struct {
        const char *text;
        size_t len;
        int code;
        const char *message;
    } cases[] = {
#define BAD(text, code, message) {text, sizeof(text) - 1, code, message}
        BAD("", -EBADMSG, "malformed msgpack at byte 0"),
        BAD("\x90", -EINVAL, "expected a map"),
        BAD("\xc0", -EINVAL, "expected a map"),
        BAD("\x80", -EINVAL, "missing field 'token_ids'"),
        BAD("\x82", -EBADMSG, "malformed"),
        BAD(HEAD, -EBADMSG, "malformed"),
        BAD(HEAD "\xc0", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\xa1x", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x80", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x91\xff", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x91\xc0", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x91\xca\0\0\0\0", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x91\xcf\0\0\0\1\0\0\0\0", -EINVAL, "field 'token_ids'"),
        BAD(HEAD "\x92\x01", -EBADMSG, "malformed"),
        BAD(HEAD "\xdd\xff\xff\xff\xff\x01", -EBADMSG, "malformed"),
        BAD(HEAD "\xc6\xff\xff\xff\xff\x01", -EBADMSG, "malformed"),
        BAD(HEAD "\xc4\x03\1\2\3", -EINVAL, "multiple"),
        BAD(HEAD "\x91\x01\x01", -EBADMSG, "malformed"),
        BAD("\xdf\xff\xff\xff\xff", -EBADMSG, "malformed"),
        BAD("\x81\xaamodel_name\x05", -EINVAL, "field 'model_name'"),
        BAD("\x81\xaamodel_name\xa3"
            "a\0b",
            -EINVAL, "field 'model_name'"),
        BAD("\x81\xaamodel_name\xa3m\xff\xfe", -EINVAL, "field 'model_name': not UTF-8"),
        BAD("\x81\xaamodel_name\xa2m\xc3", -EINVAL, "field 'model_name': not UTF-8"),
        BAD("\x81\xa9tenant_id\xa3\xed\xa0\x80", -EINVAL, "field 'tenant_id': not UTF-8"),
        BAD("\x81\xa1x\xc1", -EBADMSG, "malformed"),
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        int rc = parse(KI_MEDIA_MSGPACK, cases[i].text, cases[i].len, QUERY, QUERY_MORE);

        if (rc != cases[i].code)
            fail_msg("case %zu: %d, %s", i, rc, error.text);
        if (!strstr(error.text, cases[i].message))
            fail_msg("case %zu: message '%s'", i, error.text);
    }
}

#define MM (KI_MM_OBJECTS | KI_BLOCK_MM_INFOS)
#define WITH_MM(field) "{\"token_ids\":[1],\"model_name\":\"m\"," field "}"

static const struct ki_mm_object *objects(size_t n)
{
    assert_int_equal(body.mm_objects.len, n * sizeof(struct ki_mm_object));
    return (const struct ki_mm_object *)(const void *)body.mm_objects.data;
}

static void expect_object(const struct ki_mm_object *o, uint64_t identity, uint64_t start,
                          uint64_t end)
{
    assert_true(o->identity == identity);
    assert_true(o->start == start);
    assert_true(o->end == end);
}

static void expect_place(const struct ki_mm_object *o, bool known, int64_t place)
{
    assert_int_equal(o->to > 0, known);
    assert_true(o->place == place);
}

static void images(void **state)
{
    const struct ki_mm_object *o;

    (void)state;
    assert_int_equal(json(WITH_MM("\"mm_objects\":[{\"id\":\"cat\",\"offset\":9,\"length\":4,"
                                  "\"kind\":\"image\"},{\"length\":2,\"mm_hash\":-1,"
                                  "\"offset\":3}]"),
                          QUERY, MM),
                     0);
    o = objects(2);
    expect_object(&o[0], kve_mm_identity("cat", 3), 9, 13);
    expect_object(&o[1], UINT64_MAX, 3, 5);
    assert_null(ki_mm_sort(&body.mm_objects, 13, 4));
    expect_object(&objects(2)[0], UINT64_MAX, 3, 5);
    assert_non_null(ki_mm_sort(&body.mm_objects, 12, 4));
    assert_int_equal(json(WITH_MM("\"block_mm_infos\":[null,{\"mm_objects\":[{\"mm_hash\":42,"
                                  "\"offsets\":[[0,2]]},{\"mm_hash\":7}]},{}]"),
                          QUERY, MM),
                     0);
    o = objects(2);
    expect_object(&o[0], 42, 1, 0);
    expect_object(&o[1], 7, 1, 0);
    assert_null(ki_mm_sort(&body.mm_objects, 1, 4));
    expect_place(&objects(2)[0], true, 0);
    expect_place(&objects(2)[1], false, 0);
    /* Objects go on from the end of one block at the start of the next. */
    assert_int_equal(
        json(
            WITH_MM("\"block_mm_infos\":[{\"mm_objects\":[{\"mm_hash\":42,\"offsets\":[[3,4]]}]},"
                    "{\"mm_objects\":[{\"mm_hash\":42,\"offsets\":[[0,4]]}]},"
                    "{\"mm_objects\":[{\"mm_hash\":42,\"offsets\":[[0,1]]},"
                    "{\"mm_hash\":7,\"offsets\":[[1,2]]},{\"mm_hash\":8,\"offsets\":[[0,1],[2,3]]},"
                    "{\"mm_hash\":9,\"offsets\":[[0,1,2]]}]}]"),
            QUERY, MM),
        0);
    assert_null(ki_mm_sort(&body.mm_objects, 1, 4));
    expect_place(&objects(6)[0], true, 3);
    expect_place(&objects(6)[1], true, -1);
    expect_place(&objects(6)[2], true, -5);
    expect_place(&objects(6)[3], true, 1);
    expect_place(&objects(6)[4], false, 0);
    expect_place(&objects(6)[5], false, 0);
    /* Ranges that can't be tell nothing, and leave the query well. */
    assert_int_equal(
        json(
            WITH_MM("\"block_mm_infos\":[{\"mm_objects\":[{\"mm_hash\":1,\"offsets\":[[-3,5]]},"
                    "{\"mm_hash\":2,\"offsets\":[[0.5,2]]},{\"mm_hash\":3,\"offsets\":[[\"a\",2]]},"
                    "{\"mm_hash\":4,\"offsets\":[[0,18446744073709551616]]}]}]"),
            QUERY, MM),
        0);
    for (size_t i = 0; i < 4; i++)
        expect_place(&objects(4)[i], false, 0);
    assert_int_equal(json(WITH_MM("\"mm_objects\":null"), QUERY, MM), 0);
    assert_int_equal(json(WITH_MM("\"mm_objects\":[{\"id\":\"a\",\"offset\":0,\"length\":5},"
                                  "{\"id\":\"b\",\"offset\":4,\"length\":1}]"),
                          QUERY, MM),
                     0);
    assert_non_null(ki_mm_sort(&body.mm_objects, 100, 4)); /* they overlap */
}

static void bad_images(void **state)
{
    static const char *const bad[] = {
        "\"mm_objects\":7",
        "\"mm_objects\":[7]",
        "\"mm_objects\":[null]",
        "\"mm_objects\":[{}]",
        "\"mm_objects\":[{\"id\":\"a\",\"offset\":1}]",
        "\"mm_objects\":[{\"id\":\"a\",\"length\":1}]",
        "\"mm_objects\":[{\"id\":\"a\",\"offset\":1,\"length\":0}]",
        "\"mm_objects\":[{\"id\":\"\",\"offset\":1,\"length\":1}]",
        "\"mm_objects\":[{\"id\":7,\"offset\":1,\"length\":1}]",
        "\"mm_objects\":[{\"id\":\"a\",\"offset\":-1,\"length\":1}]",
        "\"mm_objects\":[{\"id\":\"a\",\"offset\":4294967296,\"length\":1}]",
        "\"mm_objects\":[],\"block_mm_infos\":[]",
        "\"block_mm_infos\":[7]",
        "\"block_mm_infos\":[{\"mm_objects\":[{\"offsets\":[]}]}]",
        "\"block_mm_infos\":{}",
    };
    char text[300];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        snprintf(text, sizeof(text), WITH_MM("%s"), bad[i]);
        if (json(text, QUERY, MM) != -EINVAL)
            fail_msg("case %zu: %s", i, bad[i]);
    }
}

static void packed_images(void **state)
{
    struct kv_buf text = KV_BUF_INIT;

    (void)state;
    pack(&text, "{'token_ids': [1], 'model_name': 'm', 'mm_objects': "
                "[{'id': 'cat', 'offset': 9, 'length': 4, 'more': [1]}]}");
    assert_int_equal(packed(&text, QUERY, MM), 0);
    expect_object(objects(1), kve_mm_identity("cat", 3), 9, 13);
    kv_buf_clear(&text);
    pack(&text, "{'token_ids': [1], 'model_name': 'm', 'block_mm_infos': "
                "[nil, {'mm_objects': [{'mm_hash': -1, 'offsets': []}], 'x': 1}]}");
    assert_int_equal(packed(&text, QUERY, MM), 0);
    expect_object(objects(1), UINT64_MAX, 1, 0);
    kv_buf_clear(&text);
    pack(&text, "{'token_ids': [1], 'model_name': 'm', 'mm_objects': [{'id': 7}]}");
    assert_int_equal(packed(&text, QUERY, MM), -EINVAL);
    kv_buf_clear(&text);
    pack(&text, "{'token_ids': [1], 'model_name': 'm', 'mm_objects': {'id': 7}}");
    assert_int_equal(packed(&text, QUERY, MM), -EINVAL);
    kv_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(media_types),
        cmocka_unit_test_teardown(a_query, teardown),
        cmocka_unit_test_teardown(hashes_of_both_signs, teardown),
        cmocka_unit_test_teardown(a_registration, teardown),
        cmocka_unit_test_teardown(instance_ids, teardown),
        cmocka_unit_test_teardown(groups, teardown),
        cmocka_unit_test_teardown(groups_as_text, teardown),
        cmocka_unit_test_teardown(routing_group_is_the_tenant, teardown),
        cmocka_unit_test_teardown(bad_json, teardown),
        cmocka_unit_test_teardown(long_strings_are_refused, teardown),
        cmocka_unit_test_teardown(msgpack_arrays_and_packed_integers, teardown),
        cmocka_unit_test_teardown(bad_msgpack, teardown),
        cmocka_unit_test_teardown(images, teardown),
        cmocka_unit_test_teardown(bad_images, teardown),
        cmocka_unit_test_teardown(packed_images, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
