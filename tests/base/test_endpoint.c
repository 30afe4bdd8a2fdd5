// SPDX-License-Identifier: Apache-2.0

#include <errno.h>
#include <string.h>

#include "base/net/endpoint_rule.h"
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
    assert_int_equal(kv_endpoint_parse_peer("tcp://*:5558", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://127.0.0.1:0", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("ipc://*", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://[::1]:*", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://0.0.0.0:5557", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://[::]:5557", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://[::ffff:0.0.0.0]:5557", &e, NULL), -EINVAL);
    assert_int_equal(kv_endpoint_parse_peer("tcp://127.0.0.1:1", &e, NULL), 0);
    assert_int_equal(kv_endpoint_parse_peer("ipc:///run/engine.sock", &e, NULL), 0);
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
        {"tcp://user@host:1", "invalid TCP host"},
        {"tcp://[*]:1", "invalid TCP host"},
        {"tcp://a..b:1", "invalid TCP host"},
        {"tcp://.a:1", "invalid TCP host"},
        {"tcp://.:1", "invalid TCP host"},
        /* addresses to some resolvers, names to others */
        {"tcp://167772161:1", "invalid TCP host"},
        {"tcp://0x7f000001:1", "invalid TCP host"},
        {"tcp://10.1:1", "invalid TCP host"},
        {"tcp://010.0.0.1:1", "invalid TCP host"},
        {"tcp://127.0.0.1.:1", "invalid TCP host"},
        {"tcp://10.0.0.256:1", "invalid TCP host"},
        {"tcp://a.0x1:1", "invalid TCP host"},
        {"TCP://host:1", "unsupported scheme"},
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

/* Whether @rule admits @endpoint; a refused rule or endpoint fails the test. */
static bool admits(const char *rule, const char *endpoint)
{
    struct kv_endpoint_rule r;
    struct kv_endpoint e;
    const char *why = "";

    if (kv_endpoint_rule_parse(rule, &r, &why) < 0)
        fail_msg("rule %s: %s", rule, why);
    if (kv_endpoint_parse(endpoint, &e, &why) < 0)
        fail_msg("endpoint %s: %s", endpoint, why);
    return kv_endpoint_rule_admits(&r, &e);
}

static void test_rules_admit(void **state)
{
    static const char *const pairs[][2] = {
        {"*", "tcp://a:1"},
        {"*", "ipc:///a"},
        {"tcp://*", "tcp://*:1"},
        {"tcp://*", "tcp://[::1]:1"},
        {"tcp://*:*", "tcp://10.0.0.1:1"},
        {"tcp://*:5557", "tcp://a.b:5557"},
        {"tcp://10.0.*", "tcp://10.0.255.1:1"},
        {"tcp://10.*:5557", "tcp://10.9.8.7:5557"},
        {"tcp://10.0.0.0/16", "tcp://10.0.3.4:5557"},
        {"tcp://10.0.0.0/16:5557-5560", "tcp://10.0.3.4:5560"},
        {"tcp://10.0.0.0/16", "tcp://[::ffff:10.0.3.4]:5557"},
        {"tcp://10.0.3.4", "tcp://[::FFFF:a00:304]:5557"},
        {"tcp://10.0.3.4/32", "tcp://10.0.3.4:0"},
        {"tcp://0.0.0.0/0", "tcp://8.8.8.8:1"},
        {"tcp://[fd00::/8]:5557", "tcp://[fd12:3::4]:5557"},
        {"tcp://[fe80::/10]", "tcp://[fe80::1%eth0]:5557"},
        {"tcp://[::ffff:10.0.0.0/112]", "tcp://10.0.3.4:1"},
        {"tcp://[::1]", "tcp://[0:0:0:0:0:0:0:1]:1"},
        {"tcp://Engine-1.Example.com", "tcp://ENGINE-1.example.COM:1"},
        {"tcp://engine.example.com.", "tcp://engine.example.com:1"},
        {"tcp://engine.example.com", "tcp://engine.example.com.:1"},
        {"tcp://*.example.com", "tcp://a.b.example.com.:1"},
        {"ipc:///run/a.sock", "ipc:///run/a.sock"},
        {"ipc:///run/*", "ipc:///run/x/a.sock"},
        {"ipc://*", "ipc:///tmp/a"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (!admits(pairs[i][0], pairs[i][1]))
            fail_msg("%s does not admit %s", pairs[i][0], pairs[i][1]);
}

/* Spellings that look admitted and name somebody else. */
static void test_rules_refuse(void **state)
{
    static const char *const pairs[][2] = {
        {"tcp://10.0.*", "tcp://10.0.evil.example.com:1"},
        {"tcp://10.0.*", "tcp://10.0.0.1.evil.example.com:1"},
        {"tcp://10.0.*", "tcp://10.1.0.1:1"},
        {"tcp://10.0.0.0/16", "tcp://10.0.evil.example.com:1"},
        {"tcp://10.0.0.0/16", "tcp://10.1.0.0:1"},
        {"tcp://10.0.0.0/16", "tcp://[::10.0.3.4]:1"},
        {"tcp://10.0.0.0/16", "tcp://[64:ff9b::a00:304]:1"},
        {"tcp://10.0.0.0/16", "tcp://*:1"},
        {"tcp://10.0.0.0/16:5557", "tcp://10.0.0.1:55570"},
        {"tcp://10.0.0.0/16:5557", "tcp://10.0.0.1:0"},
        {"tcp://10.0.0.0/16", "ipc://10.0.0.1"},
        {"tcp://0.0.0.0/0", "tcp://[2001:db8::1]:1"},
        {"tcp://0.0.0.0/0", "tcp://localhost:1"},
        {"tcp://[fd00::/8]", "tcp://[fe80::1]:1"},
        {"tcp://engine.example.com", "tcp://engine.example.com.evil.org:1"},
        {"tcp://engine.example.com", "tcp://xengine.example.com:1"},
        {"tcp://*.example.com", "tcp://example.com:1"},
        {"tcp://*.example.com", "tcp://evilexample.com:1"},
        {"tcp://*.example.com", "tcp://a.example.com.evil.org:1"},
        {"tcp://*.example.com:5557", "tcp://a.example.com:5558"},
        {"tcp://*", "ipc:///a"},
        {"ipc:///run/*", "ipc:///run/../etc/a"},
        {"ipc:///run/*", "ipc:///run//a"},
        {"ipc:///run/*", "ipc:///run/./a"},
        {"ipc:///run/*", "ipc:///running/a"},
        {"ipc:///run/*", "ipc:///run/"},
        {"ipc:///run/a", "ipc:///run/ab"},
        {"tcp://*", "inproc://monitor-1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (admits(pairs[i][0], pairs[i][1]))
            fail_msg("%s admits %s", pairs[i][0], pairs[i][1]);
}

static void test_bad_rules(void **state)
{
    static const char *const rules[] = {"",
                                        "10.0.*",
                                        "udp://*",
                                        "inproc://*",
                                        "tcp://",
                                        "ipc://",
                                        "tcp://:1",
                                        "tcp://a:",
                                        "tcp://a:x",
                                        "tcp://a:70000",
                                        "tcp://a:2-1",
                                        "tcp://a:1-",
                                        "tcp://10.0.0.5/16",
                                        "tcp://10.0.0.0/33",
                                        "tcp://10.0.0.0/",
                                        "tcp://10.0.0/16",
                                        "tcp://10.0.0.0/16/8",
                                        "tcp://10.0*",
                                        "tcp://10.*.0.0",
                                        "tcp://*.0.0.1",
                                        "tcp://256.*",
                                        "tcp://10.0.0.0.*",
                                        "tcp://ex*.com",
                                        "tcp://*com",
                                        "tcp://a.*.com",
                                        "tcp://[fd00::/8",
                                        "tcp://[fd00::/8]5557",
                                        "tcp://[fd00::1/8]",
                                        "tcp://[fd00::/129]",
                                        "tcp://[a]",
                                        "tcp://fd00::/8",
                                        "tcp://user@host",
                                        "tcp://a..b",
                                        "ipc:///run/*.sock",
                                        "ipc:///r*n/*"};
    struct kv_endpoint_rule r;

    (void)state;
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++)
        if (kv_endpoint_rule_parse(rules[i], &r, NULL) == 0)
            fail_msg("%s is taken", rules[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),    cmocka_unit_test(test_refused),
        cmocka_unit_test(test_rules_admit), cmocka_unit_test(test_rules_refuse),
        cmocka_unit_test(test_bad_rules),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
