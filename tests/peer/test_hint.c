// SPDX-License-Identifier: Apache-2.0
/* kv.fetch hints, as Dynamo's router, vLLM and SGLang pass them on, and as nobody should. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "kvbm_remote.h"
#include "starve.h"

#define SOURCE "\"source_control_endpoint\":\"tcp://10.0.0.7:25000\""
#define ENVELOPE(actions) \
    "{\"protocol_version\":\"0.1\",\"message_id\":\"m-1\",\"actions\":[" actions "]}"
#define FETCH(version, payload)                                                             \
    "{\"action_id\":\"a\",\"action_type\":\"kv.fetch\",\"action_version\":\"" version "\"," \
    "\"payload\":" payload "}"
#define HINT(payload) ENVELOPE(FETCH("1.0", "{" payload "}"))

static struct kvbm_hint hint;
static uint64_t hashes[8];

static long parse(const char *json)
{
    size_t len = strlen(json);
    char *exact = malloc(len); /* the byte after it is a sanitizer's */
    long rc;

    assert_non_null(exact);
    memcpy(exact, json, len);
    hint = (struct kvbm_hint)KVBM_HINT_INIT;
    memset(hashes, 0, sizeof(hashes));
    rc = kvbm_hint_parse(exact, len, &hint, hashes, KV_COUNT(hashes));
    free(exact);
    return rc;
}

static void test_router(void **state)
{
    (void)state;
    assert_int_equal(
        parse("{\"protocol_version\": \"0.1\", \"message_id\": \"5ad3\", \"actions\": [{"
              "\"action_id\": \"x\", \"action_type\": \"kv.fetch\", \"action_version\": \"1.0\", "
              "\"payload\": {\"block_hashes\": [15760518052499183552, 7], "
              "\"source_control_endpoint\": \"tcp://worker-a.svc:24001\"}}]}"),
        2);
    assert_string_equal(hint.host, "worker-a.svc");
    assert_int_equal(hint.port, 24001);
    assert_true(!hint.move && !hint.no_retain);
    assert_true(hashes[0] == UINT64_C(15760518052499183552) && hashes[1] == 7);
}

/* SGLang's events carry signed numbers of the same bits; direct callers pass digests. */
static void test_hashes(void **state)
{
    (void)state;
    assert_int_equal(
        parse(HINT(SOURCE ",\"block_hashes\":[-1,-9223372036854775808,18446744073709551615,0,"
                          "\"00000000000000ff\",\"DAb5f0a2c4d6e8f10123456789abcdef\",\"1f\"]")),
        7);
    assert_true(hashes[0] == UINT64_MAX && hashes[1] == UINT64_C(1) << 63);
    assert_true(hashes[2] == UINT64_MAX && hashes[3] == 0 && hashes[4] == 0xff);
    assert_true(hashes[5] == UINT64_C(0xdab5f0a2c4d6e8f1) && hashes[6] == 0x1f);
}

static void test_modes(void **state)
{
    (void)state;
    assert_int_equal(parse(HINT(SOURCE ",\"block_hashes\":[1],\"mode\":\"move\"")), 1);
    assert_true(hint.move && !hint.no_retain);
    assert_int_equal(
        parse(HINT(SOURCE ",\"block_hashes\":[1],\"mode\":\"copy\",\"no_retain\":true")), 1);
    assert_true(!hint.move && hint.no_retain);
    assert_int_equal(parse(HINT("\"block_hashes\":[1]")), 1); /* whoever has it */
    assert_true(!*hint.host && !hint.port);
    assert_int_equal(parse(HINT("\"source_control_endpoint\":null,\"block_hashes\":[1]")), 1);
    assert_int_equal(
        parse(HINT("\"source_control_endpoint\":\"tcp://[fd00::7]:1\",\"block_hashes\":[1]")), 1);
    assert_string_equal(hint.host, "fd00::7");
}

/* Actions and fields of others, members in any order, keys twice, escapes, a payload alone. */
static void test_order_and_skips(void **state)
{
    (void)state;
    assert_int_equal(
        parse(ENVELOPE("{\"action_id\":\"i\",\"action_type\":\"kv.future\",\"action_version\":"
                       "\"9.0\",\"payload\":{\"opaque\":[{}]}},") ""),
        -EPROTO); /* cut short */
    assert_int_equal(parse(ENVELOPE("{\"action_type\":\"kv.demote\",\"payload\":7}," FETCH(
                         "1.0", "{" SOURCE ",\"block_hashes\":[5]}"))),
                     1);
    assert_int_equal(hashes[0], 5);
    assert_int_equal(parse("{\"actions\":[{\"payload\":{\"later\":{\"x\":[1]},\"block_hashes\":[6],"
                           "\"block_hashes\":[8]},\"action_version\":\"1.7\",\"action_type\":"
                           "\"kv\\u002efetch\"}],\"protocol_version\":\"0.1\"}"),
                     1);
    assert_int_equal(hashes[0], 8);
    assert_int_equal(
        parse(ENVELOPE(FETCH("2.0", "{\"other\":1}") "," FETCH("1.0", "{\"block_hashes\":[4]}"))),
        1);
    assert_int_equal(parse("{" SOURCE ",\"block_hashes\":[3]}"), 1);
    assert_int_equal(hint.port, 25000);
}

static void test_versions(void **state)
{
    (void)state;
    assert_int_equal(parse(ENVELOPE(FETCH("2.0", "{}"))), -EPROTONOSUPPORT);
    assert_int_equal(parse(ENVELOPE(FETCH("10.0", "{}"))), -EPROTONOSUPPORT);
    assert_int_equal(parse("{\"protocol_version\":\"1.0\",\"actions\":7}"), -EPROTONOSUPPORT);
    assert_int_equal(parse(ENVELOPE("")), -ENOENT);
    assert_int_equal(parse(ENVELOPE("{\"action_type\":\"kv.demote\"}")), -ENOENT);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {
        "",
        "null",
        "[]",
        "{}",
        "{\"protocol_version\":\"0.1\"}",
        "{\"protocol_version\":0.1,\"actions\":[]}",
        "{\"protocol_version\":\"0.1\",\"actions\":\"bad\"}",
        ENVELOPE("7"),
        ENVELOPE("{\"action_type\":7}"),
        ENVELOPE("{\"action_type\":\"kv.fetch\"}"),
        ENVELOPE("{\"action_type\":\"kv.fetch\",\"action_version\":\"1.0\"}"),
        ENVELOPE(FETCH("1.0", "\"bad\"")),
        ENVELOPE(FETCH("1.0", "{}")),
        HINT(SOURCE),
        HINT(SOURCE ",\"block_hashes\":[]"),
        HINT(SOURCE ",\"block_hashes\":7"),
        HINT(SOURCE ",\"block_hashes\":[true]"),
        HINT(SOURCE ",\"block_hashes\":[null]"),
        HINT(SOURCE ",\"block_hashes\":[1.5]"),
        HINT(SOURCE ",\"block_hashes\":[18446744073709551616]"),
        HINT(SOURCE ",\"block_hashes\":[-9223372036854775809]"),
        HINT(SOURCE ",\"block_hashes\":[\"\"]"),
        HINT(SOURCE ",\"block_hashes\":[\"xyz\"]"),
        HINT(SOURCE ",\"block_hashes\":[1],\"mode\":\"invalid\""),
        HINT(SOURCE ",\"block_hashes\":[1],\"mode\":7"),
        HINT(SOURCE ",\"block_hashes\":[1],\"no_retain\":\"yes\""),
        HINT(SOURCE ",\"block_hashes\":[1]") " x",
        HINT("\"source_control_endpoint\":7,\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"host:1\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://host\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://host:0\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://host:65536\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://*:1\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://0.0.0.0:1\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://[::]:1\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"ipc:///tmp/x\",\"block_hashes\":[1]"),
        HINT("\"source_control_endpoint\":\"tcp://a b:1\",\"block_hashes\":[1]"),
    };
    struct kvbm_hint h = KVBM_HINT_INIT;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        long rc = parse(bad[i]);

        if (rc != -EPROTO)
            fail_msg("%ld for %s", rc, bad[i]);
        assert_true(!*hint.host && !hint.port); /* written on success only */
    }
    assert_int_equal(kvbm_hint_parse(NULL, 0, &h, hashes, 8), -EINVAL);
    assert_int_equal(kvbm_hint_parse("{}", 2, NULL, hashes, 8), -EINVAL);
    assert_int_equal(kvbm_hint_parse("{}", 2, &h, NULL, 8), -EINVAL);
    h.size = 0;
    assert_int_equal(kvbm_hint_parse("{}", 2, &h, hashes, 8), -EINVAL);
}

/* Each prefix of a hint is refused. */
static void test_cut(void **state)
{
    static const char whole[] = HINT(SOURCE ",\"block_hashes\":[-1,\"ff\"],\"mode\":\"copy\"");
    char text[sizeof(whole)];

    (void)state;
    for (size_t len = 0; len < sizeof(whole) - 1; len++) {
        memcpy(text, whole, len);
        text[len] = '\0';
        assert_int_equal(parse(text), -EPROTO);
    }
    assert_int_equal(parse(whole), 2);
}

/* More hashes than room: the first ones, and how many there are. */
static void test_many(void **state)
{
    enum { N = 100000 };
    char *text = malloc(N * 8 + 200), *end = text;
    struct kvbm_hint h = KVBM_HINT_INIT;
    uint64_t few[3] = {0};

    (void)state;
    assert_non_null(text);
    end += sprintf(end, "{\"block_hashes\":[0");
    for (int i = 1; i < N; i++)
        end += sprintf(end, ",%d", i);
    end += sprintf(end, "]}");
    assert_int_equal(kvbm_hint_parse(text, (size_t)(end - text), &h, few, 2), N);
    assert_true(few[0] == 0 && few[1] == 1 && few[2] == 0);
    assert_int_equal(kvbm_hint_parse(text, (size_t)(end - text), &h, NULL, 0), N);
    memset(text, '[', N); /* deeper than any hint */
    assert_int_equal(kvbm_hint_parse(text, N, &h, few, 2), -EPROTO);
    free(text);
}

static void test_starved(void **state)
{
    long rc = -ENOMEM;

    (void)state;
    for (long n = 2; rc == -ENOMEM; n++) { /* 1: of parse() above */
        starve_at(n);
        rc = parse(ENVELOPE(FETCH("1\\u002e0", "{\"block_hashes\":[\"f\\u0066\"]}")));
        assert_true(rc == (starved() ? -ENOMEM : 1));
        starve_at(0);
    }
    assert_int_equal(hashes[0], 0xff);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_router),   cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_modes),    cmocka_unit_test(test_order_and_skips),
        cmocka_unit_test(test_versions), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_cut),      cmocka_unit_test(test_many),
        cmocka_unit_test(test_starved),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
