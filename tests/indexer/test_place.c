// SPDX-License-Identifier: Apache-2.0
/* Registered endpoints: [bind:]ENDPOINT[#TOPIC], and the rules that admit them. */
#include "indexer/zmq/place.h"

#include <errno.h>

#include "base/core/error.h"
#include "base/unit.h"

static void good_ones(void **state)
{
    static const struct {
        const char *text, *address, *topic;
        bool binds;
    } good[] = {
        {"tcp://h:5557", "tcp://h:5557", "", false},
        {"tcp://h:5557#kv@a@m", "tcp://h:5557", "kv@a@m", false},
        {"tcp://h:5557#a#b", "tcp://h:5557", "a#b", false},
        {"bind:tcp://*:5557", "tcp://*:5557", "", true},
        {"bind:tcp://0.0.0.0:5557#t", "tcp://0.0.0.0:5557", "t", true},
        {"bind:tcp://[::1]:1", "tcp://[::1]:1", "", true},
        {"ipc:///run/a#b", "ipc:///run/a#b", "", false},
    };
    struct ki_place place;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(good); i++) {
        assert_int_equal(ki_place_parse(good[i].text, &place, NULL), 0);
        assert_string_equal(place.address, good[i].address);
        assert_string_equal(place.topic, good[i].topic);
        assert_int_equal(place.binds, good[i].binds);
    }
}

static void bad_ones(void **state)
{
    static const char *const bad[] = {"",
                                      "bind:",
                                      "bind:bind:tcp://*:1",
                                      "BIND:tcp://*:1",
                                      "bind:tcp://*:*",
                                      "bind:tcp://*:0",
                                      "bind:tcp://host:1",
                                      "bind:ipc:///x",
                                      "bind:inproc://x",
                                      "tcp://*:1",
                                      "tcp://0.0.0.0:1",
                                      "tcp://h:1#",
                                      "bind:tcp://*:1#",
                                      "#t",
                                      "tcp://h#t:1"};
    char longest[700] = "tcp://";
    struct ki_place place;
    const char *why;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        why = NULL;
        assert_int_equal(ki_place_parse(bad[i], &place, &why), -EINVAL);
        assert_non_null(why);
    }
    memset(longest + 6, 'a', sizeof(longest) - 7);
    assert_int_equal(ki_place_parse(longest, &place, NULL), -EINVAL);
}

static void rules(void **state)
{
    static const struct {
        const char *rule, *text;
        bool admits;
    } cases[] = {
        {"*", "bind:tcp://*:1", true},
        {"tcp://*", "bind:tcp://*:1", false},
        {"bind:tcp://*", "bind:tcp://*:1", true},
        {"bind:tcp://*:1", "bind:tcp://*:1#t", true},
        {"bind:tcp://*:1", "bind:tcp://*:2", false},
        {"bind:tcp://10.0.0.0/8", "bind:tcp://10.1.2.3:1", true},
        {"bind:tcp://10.0.0.0/8", "bind:tcp://*:1", false},
        {"bind:tcp://*", "tcp://h:1", false},
        {"tcp://h", "tcp://h:1#t", true},
        {"bind:*", "bind:tcp://*:1", true},
        {"bind:*", "tcp://h:1", false},
        {"bind:*", "ipc:///tmp/x", false},
    };
    struct ki_place place;
    const char *why;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        assert_int_equal(ki_place_check_rule(cases[i].rule, &why), 0);
        assert_int_equal(ki_place_parse(cases[i].text, &place, NULL), 0);
        assert_int_equal(ki_place_is_admitted(cases[i].rule, &place), cases[i].admits);
    }
    assert_int_equal(ki_place_check_rule("bind:", &why), -EINVAL);
    assert_int_equal(ki_place_check_rule("bind:nonsense", &why), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_ones),
        cmocka_unit_test(bad_ones),
        cmocka_unit_test(rules),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
