// SPDX-License-Identifier: Apache-2.0
/* Messages around a batch: accepted ones, refused ones, and telling the two replay forms apart. */
#include "base/unit.h"

#include "base/core/error.h"
#include "event/wire/frames.h"

#define SPAN(text)             \
    {                          \
        text, sizeof(text) - 1 \
    }
#define SEQ_5 "\0\0\0\0\0\0\0\5"
#define SEQ_END "\xff\xff\xff\xff\xff\xff\xff\xff"

static void test_live(void **state)
{
    struct kve_span frames[] = {SPAN("topic"), SPAN(SEQ_5), SPAN("payload"), SPAN("")};
    struct kve_message message;

    (void)state;
    assert_int_equal(kve_message_parse_live(frames, 3, &message), 0);
    assert_int_equal(message.sequence, 5);
    assert_int_equal(message.topic.len, 5);
    assert_int_equal(message.payload.len, 7);
    assert_false(message.is_end);
    for (size_t n = 0; n <= 4; n++)
        assert_int_equal(kve_message_parse_live(frames, n, &message), n == 3 ? 0 : -EPROTO);
    for (size_t len = 0; len < 16; len++) {
        frames[1] = (struct kve_span){SEQ_5 "12345678", len};
        assert_int_equal(kve_message_parse_live(frames, 3, &message), len == 8 ? 0 : -EPROTO);
    }
    /* The last sequence number there is is a number like any other on a live stream. */
    frames[1] = (struct kve_span)SPAN(SEQ_END);
    assert_int_equal(kve_message_parse_live(frames, 3, &message), 0);
    assert_true(message.sequence == UINT64_MAX);
    assert_false(message.is_end);
}

static void test_replay(void **state)
{
    static const struct {
        struct kve_span frames[4];
        size_t n;
        int rc;
        bool is_end;
        size_t topic_len;
    } cases[] = {
        {{SPAN(""), SPAN(SEQ_5), SPAN("p")}, 3, 0, false, 0},
        {{SPAN(""), SPAN("kv"), SPAN(SEQ_5), SPAN("p")}, 4, 0, false, 2},
        {{SPAN(""), SPAN(""), SPAN(SEQ_5), SPAN("p")}, 4, 0, false, 0},
        {{SPAN(SEQ_5), SPAN("p")}, 2, 0, false, 0},
        {{SPAN("kv"), SPAN(SEQ_5), SPAN("p")}, 3, 0, false, 2},
        /* A topic of eight bytes is no sequence number. */
        {{SPAN(""), SPAN("12345678"), SPAN(SEQ_5), SPAN("p")}, 4, 0, false, 8},
        {{SPAN(""), SPAN(SEQ_END), SPAN("")}, 3, 0, true, 0},
        {{SPAN(""), SPAN(""), SPAN(SEQ_END), SPAN("")}, 4, 0, true, 0},
        {{SPAN(""), SPAN("kv"), SPAN(SEQ_END), SPAN("")}, 4, 0, true, 2},
        {{SPAN(""), SPAN(SEQ_END), SPAN("p")}, 3, -EPROTO, false, 0},
        {{SPAN("x"), SPAN(""), SPAN(SEQ_5), SPAN("p")}, 4, -EPROTO, false, 0},
        {{SPAN(""), SPAN("1234567"), SPAN("p")}, 3, -EPROTO, false, 0},
        {{SPAN("p")}, 1, -EPROTO, false, 0},
        {{SPAN("")}, 0, -EPROTO, false, 0},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kve_message message = {.sequence = 99};

        assert_int_equal(kve_message_parse_replay(cases[i].frames, cases[i].n, &message),
                         cases[i].rc);
        if (cases[i].rc) {
            assert_int_equal(message.sequence, 99);
            continue;
        }
        assert_int_equal(message.is_end, cases[i].is_end);
        assert_int_equal(message.topic.len, cases[i].topic_len);
        assert_int_equal(message.payload.len, cases[i].is_end ? 0 : 1);
        if (!cases[i].is_end)
            assert_int_equal(message.sequence, 5);
    }
    struct kve_span five[5] = {SPAN(""), SPAN(""), SPAN(""), SPAN(SEQ_5), SPAN("p")};
    struct kve_message message;

    assert_int_equal(kve_message_parse_replay(five, 5, &message), -EPROTO);
}

/* Publishers that don't number. */
static void test_short(void **state)
{
    static const struct {
        size_t n;
        struct kve_span frames[3];
        bool numbered;
        uint64_t sequence;
        size_t topic_len;
    } good[] = {
        {1, {SPAN("\x92")}, false, 0, 0},
        {1, {SPAN("\xc4\x01\x92")}, false, 0, 0},
        {1, {SPAN("\xdf")}, false, 0, 0},
        {2, {SPAN("kv"), SPAN("\x92")}, false, 0, 2},
        {2, {SPAN(""), SPAN("\x81")}, false, 0, 0},
        {2, {SPAN("kvevents"), SPAN("\x92")}, false, 0, 8}, /* eight letters */
        {2, {SPAN(SEQ_5), SPAN("\x92")}, true, 5, 0},
    };
    static const struct kve_span bad[][3] = {
        {SPAN("")}, {SPAN("hello")}, {SPAN("kv"), SPAN("hello")}, {SPAN("\x92"), SPAN("")}};
    struct kve_message message;
    bool numbered;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(good); i++) {
        numbered = !good[i].numbered;
        assert_int_equal(kve_message_parse_short(good[i].frames, good[i].n, &message, &numbered),
                         0);
        assert_int_equal(numbered, good[i].numbered);
        assert_true(message.sequence == good[i].sequence);
        assert_int_equal(message.topic.len, good[i].topic_len);
        assert_ptr_equal(message.payload.data, good[i].frames[good[i].n - 1].data);
    }
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        assert_int_equal(
            kve_message_parse_short(bad[i], bad[i][1].data ? 2 : 1, &message, &numbered), -EPROTO);
    assert_int_equal(kve_message_parse_short(good[0].frames, 0, &message, &numbered), -EPROTO);
    assert_int_equal(kve_message_parse_short(good[0].frames, 3, &message, &numbered), -EPROTO);
}

static void test_request(void **state)
{
    struct kve_replay_request request;
    uint8_t bytes[8];

    (void)state;
    kve_replay_request_init(&request, 5);
    assert_int_equal(request.frames[0].len, 0);
    assert_int_equal(request.frames[1].len, 8);
    assert_memory_equal(request.frames[1].data, SEQ_5, 8);
    for (unsigned bit = 0; bit < 64; bit++) {
        kve_sequence_put(bytes, UINT64_C(1) << bit);
        assert_int_equal(bytes[7 - bit / 8], 1u << bit % 8);
        assert_true(kve_sequence_get(bytes) == UINT64_C(1) << bit);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_live),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_short),
        cmocka_unit_test(test_request),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
