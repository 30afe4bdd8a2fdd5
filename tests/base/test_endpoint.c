// SPDX-License-Identifier: Apache-2.0

#include <errno.h>
#include <string.h>

#include "base/endpoint.h"
#include "base/unit.h"

static void test_accepted(void **state)
{
    struct kv_endpoint e;

    (void)state;
    assert_int_equal(kv_endpoint_parse("tcp://host-1.example:5557", &e, NULL), 0);
    assert_string_equal(e.host, "host-1.example");
    assert_int_equal(e.port, 5557);
    assert_int_equal(kv_endpoint_parse("tcp://*:5558", &e, NULL), 0);
    assert_true(e.wildcard);
    assert_int_equal(kv_endpoint_parse("tcp://127.0.0.1:0", &e, NULL), 0);
    assert_true(e.any_port);
    assert_int_equal(kv_endpoint_parse("tcp://127.0.0.1:*", &e, NULL), 0);
    assert_true(e.any_port);
    assert_int_equal(kv_endpoint_parse("tcp://[::1]:65535", &e, NULL), 0);
    assert_true(e.ipv6);
    assert_string_equal(e.host, "::1");
    assert_int_equal(kv_endpoint_parse("tcp://[fe80::1%eth0]:1", &e, NULL), 0);
    assert_int_equal(kv_endpoint_parse("ipc:///run/engine.sock", &e, NULL), 0);
    assert_int_equal(e.scheme, KV_SCHEME_IPC);
    assert_string_equal(e.host, "/run/engine.sock");
    assert_int_equal(kv_endpoint_parse("inproc://events", &e, NULL), 0);
    assert_int_equal(e.scheme, KV_SCHEME_INPROC);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "missing scheme"},
        {"host:5557", "missing scheme"},
        {"udp://host:1", "unsupported scheme"},
        {"tcp://", "missing address"},
        {"ipc://", "missing address"},
        {"tcp://host", "missing TCP port"},
        {"tcp://host:", "missing TCP port"},
        {"tcp://[::1]", "missing TCP port"},
        {"tcp://:5557", "missing TCP host"},
        {"tcp://[]:1", "missing TCP host"},
        {"tcp://[::1:5557", "missing closing `]`"},
        {"tcp://host:65536", "invalid TCP port"},
        {"tcp://host:-1", "invalid TCP port"},
        {"tcp://host:5557x", "invalid TCP port"},
        {"tcp://host:000001", "invalid TCP port"},
        {"tcp://::1:5557", "invalid TCP host"},
        {"tcp://[not-v6]:1", "invalid TCP host"},
        {"tcp://[::1%]:1", "invalid TCP host"},
        {"tcp://a b:1", "invalid TCP host"},
        {"tcp://eth0:1;10.0.0.1:2", "invalid TCP host"},
        {"tcp://a\nb:1", "invalid TCP host"},
    };
    struct kv_endpoint e;
    char big[600] = "ipc://";

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *why = "";

        assert_int_equal(kv_endpoint_parse(cases[i].text, &e, &why), -EINVAL);
        assert_string_equal(why, cases[i].why);
    }
    memset(big + 6, 'a', 500);
    assert_int_equal(kv_endpoint_parse(big, &e, NULL), -EINVAL);
}

static void test_patterns(void **state)
{
    (void)state;
    assert_true(kv_pattern_match("tcp://10.0.*:5557", "tcp://10.0.3.4:5557"));
    assert_false(kv_pattern_match("tcp://10.0.*:5557", "tcp://10.0.3.4:55570"));
    assert_true(kv_pattern_match("*", ""));
    assert_true(kv_pattern_match("**a*", "bba"));
    assert_false(kv_pattern_match("", "a"));
    assert_true(kv_pattern_match("a*b*c", "a-b-b-c"));
    assert_false(kv_pattern_match("a*b*c", "a-b-b"));
    assert_false(kv_pattern_match("tcp://*", "ipc://x"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_patterns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
