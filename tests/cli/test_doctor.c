// SPDX-License-Identifier: Apache-2.0
/* Parse what `kvasir doctor` reads: ports' first bytes, cut anywhere; answers of other shapes; times of batches. */
#include "support.h"

#include <string.h>

#include "base/json/msgpack.h"
#include "cli/doctor/answers.h"
#include "cli/doctor/findings.h"
#include "cli/doctor/port.h"

/* Bytes of a peer of @type: greeting and READY. Returns their number. */
static size_t put_peer(uint8_t *bytes, const char *mechanism, const char *type)
{
    size_t len = strlen(type), n = 64;

    memset(bytes, 0, 64);
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    memcpy(bytes + 12, mechanism, strlen(mechanism));
    bytes[n++] = 4;
    bytes[n++] = (uint8_t)(6 + 12 + 4 + len);
    memcpy(bytes + n, "\5READY\13Socket-Type\0\0\0", 21);
    n += 21;
    bytes[n++] = (uint8_t)len;
    memcpy(bytes + n, type, len);
    return n + len;
}

static void test_ports_cut_anywhere(void **state)
{
    uint8_t bytes[KC_PORT_BYTES];
    size_t n = put_peer(bytes, "NULL", "ROUTER");
    struct kc_port_answer answer = {.what = KC_PORT_REFUSED};

    (void)state;
    for (size_t i = 0; i < n; i++)
        assert_int_equal(kc_port_read(bytes, i, &answer), 0);
    assert_int_equal(kc_port_read(bytes, n, &answer), 1);
    assert_int_equal(answer.what, KC_PORT_ZMTP);
    assert_string_equal(answer.type, "ROUTER");
}

static void test_ports_of_others(void **state)
{
    uint8_t bytes[KC_PORT_BYTES];
    struct kc_port_answer answer = {.what = KC_PORT_REFUSED};
    size_t n = put_peer(bytes, "CURVE", "PUB");

    (void)state;
    assert_int_equal(kc_port_read(bytes, n, &answer), 1);
    assert_int_equal(answer.what, KC_PORT_OTHER);
    assert_non_null(strstr(answer.said, "credentials"));
    assert_int_equal(kc_port_read((const uint8_t *)"SSH-2.0-x\r\n", 11, &answer), 1);
    assert_int_equal(answer.what, KC_PORT_OTHER);
    assert_non_null(strstr(answer.said, "SSH-2.0-x"));
    n = put_peer(bytes, "NULL", "a type that is far too long to keep");
    answer = (struct kc_port_answer){.what = KC_PORT_REFUSED};
    assert_int_equal(kc_port_read(bytes, n, &answer), 1);
    assert_string_equal(answer.type, "");
}

static void test_answers_of_other_shapes(void **state)
{
    static const char *const texts[] = {"",     "{}",           "[1]",       "{\"tokens\": 3}",
                                        "[[]]", "{\"explain\"", "[{\"x\": 1"};
    struct kc_listeners listeners = {.n = 0};
    struct kv_buf tokens = KV_BUF_INIT;
    struct kc_match match;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        size_t len = strlen(texts[i]);

        assert_true(kc_listeners_read(texts[i], len, &listeners) < 0);
        assert_int_equal(kc_match_read(texts[i], len, NULL, &match), -EPROTO);
        if (i != 2)
            assert_int_equal(kc_tokens_read(texts[i], len, &tokens), -EPROTO);
    }
    kc_listeners_fini(&listeners);
    kv_buf_fini(&tokens);
}

static double time_of(double time)
{
    struct kv_buf batch = KV_BUF_INIT;
    double ret;

    kv_msgpack_put_array(&batch, 2);
    kv_msgpack_put_double(&batch, time);
    kv_msgpack_put_array(&batch, 0);
    ret = kc_batch_time(batch.data, batch.len);
    kv_buf_fini(&batch);
    return ret;
}

static void test_times(void **state)
{
    (void)state;
    assert_true(time_of(1.76e9) == 1.76e9);
    assert_true(time_of(1.76e12) == 1.76e9); /* milliseconds */
    assert_true(time_of(12.5) == 0);         /* since the engine's start */
    assert_true(time_of(1e300) == 0);
    assert_true(kc_batch_time("\x90", 1) == 0);
}

static void test_report(void **state)
{
    struct kc_report *report = calloc(1, sizeof(*report));

    (void)state;
    assert_int_equal(kc_report_status(report), 0);
    for (int i = 0; i < 100; i++) /* more than there is room for */
        kc_found(report, KC_FINDING_partial, "worker %d, a text of some length to fill the room",
                 i);
    assert_int_equal(kc_report_count(report), 1);
    assert_int_equal(kc_report_status(report), 1);
    assert_memory_equal(report->measured[KC_FINDING_partial], "worker 0", 8);
    kc_found(report, KC_FINDING_indexer_refused, "x");
    assert_int_equal(kc_report_status(report), 2);
    for (int i = 0; i < 2 * KC_NOTES; i++)
        kc_well(report, "%d", i);
    assert_int_equal(report->n_notes, KC_NOTES);
    assert_int_equal(kc_finding_named("partial", 7), KC_FINDING_partial);
    assert_int_equal(kc_finding_named("partially", 9), KC_N_FINDINGS);
    free(report);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ports_cut_anywhere),
        cmocka_unit_test(test_ports_of_others),
        cmocka_unit_test(test_answers_of_other_shapes),
        cmocka_unit_test(test_times),
        cmocka_unit_test(test_report),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
