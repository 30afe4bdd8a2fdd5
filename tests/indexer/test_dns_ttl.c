// SPDX-License-Identifier: Apache-2.0
/* The time for which an answer of a name server is good. */
#include "indexer/discover/dns_ask.h"

#include "base/unit.h"

#define FALLBACK 99
#define QUESTION "\1w\2kv\4test\0\0\1\0\1"
#define RECORD(ttl) "\xc0\x0c\0\1\0\1\0\0" ttl "\0\4\x7f\0\0\1"

static uint32_t ttl_of(const char *message, size_t len)
{
    return ki_dns_ttl((const unsigned char *)message, len, FALLBACK);
}

static void answers(void **state)
{
    static const char two[] =
        "\0\7\x81\x80\0\1\0\2\0\0\0\0" QUESTION RECORD("\0\x3c") RECORD("\0\5");
    static const char none[] = "\0\7\x81\x83\0\1\0\0\0\1\0\0" QUESTION RECORD("\1\0");
    static const char empty[] = "\0\7\x81\x83\0\1\0\0\0\0\0\0" QUESTION;

    (void)state;
    assert_int_equal(ttl_of(two, sizeof(two) - 1), 5);
    assert_int_equal(ttl_of(none, sizeof(none) - 1), 256); /* of the authority */
    assert_int_equal(ttl_of(empty, sizeof(empty) - 1), FALLBACK);
    for (size_t len = 0; len < sizeof(two) - 1 - 4; len++) /* the address itself isn't looked at */
        assert_int_equal(ttl_of(two, len), FALLBACK);
}

/* Names that lead out of the message. */
static void nonsense(void **state)
{
    static const char long_label[] = "\0\7\x81\x80\0\1\0\1\0\0\0\0\x3fw";
    static const char half_pointer[] = "\0\7\x81\x80\0\0\0\1\0\0\0\0\xc0";

    (void)state;
    assert_int_equal(ttl_of(long_label, sizeof(long_label) - 1), FALLBACK);
    assert_int_equal(ttl_of(half_pointer, sizeof(half_pointer) - 1), FALLBACK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(answers), cmocka_unit_test(nonsense)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
