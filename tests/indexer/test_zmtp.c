// SPDX-License-Identifier: Apache-2.0
/* The parser of ZMTP: the handshake, messages cut into pieces of every size, commands, limits. */
#include "base/unit.h"

#include <errno.h>

#include "base/core/error.h"
#include "indexer/peer_bytes.h"
#include "indexer/zmq/zmtp.h"

enum { LIMIT = 1 << 20 };

/* All that a parser has made of some bytes. */
struct told {
    struct kv_buf text;
    int rc;
    enum ki_zmtp_state state;
    struct ki_zmtp zmtp;
};

static void write_message(struct kv_buf *out, const struct ki_zmtp_message *m)
{
    kv_buf_printf(out, "message of %zu:", m->n_frames);
    for (size_t i = 0; i < KV_MIN(m->n_frames, (size_t)KVE_MAX_FRAMES); i++) {
        kv_buf_printf(out, " %zu:", m->spans[i].len);
        kv_buf_append(out, m->spans[i].data, m->spans[i].len);
    }
    kv_buf_puts(out, "\n");
}

/* Give the parser @len bytes, @step at a time, as a connection does. Never before it needs them. */
static void tell(const uint8_t *bytes, size_t len, size_t step, struct told *ret)
{
    struct kv_buf kept = KV_BUF_INIT;
    size_t given = 0;

    memset(ret, 0, sizeof(*ret));
    ki_zmtp_init(&ret->zmtp, LIMIT);
    while (given < len && ret->rc >= 0) {
        size_t n = KV_MIN(step, len - given);
        enum ki_zmtp_state before;

        kv_buf_append(&kept, bytes + given, n);
        given += n;
        do {
            struct ki_zmtp_message m;
            size_t used = 0;

            before = ret->zmtp.state;
            ret->rc = ki_zmtp_parse(&ret->zmtp, (const uint8_t *)kept.data, kept.len, &m, &used);
            if (ret->rc == 1)
                write_message(&ret->text, &m);
            if (ret->rc == 0 && ret->zmtp.state == before)
                assert_true(ret->zmtp.needed > kept.len - used);
            memmove(kept.data, kept.data + used, kept.len - used);
            kept.len -= used;
        } while (ret->rc == 1 || (ret->rc == 0 && ret->zmtp.state != before));
    }
    ret->state = ret->zmtp.state;
    kv_buf_fini(&kept);
}

static void begin(struct kv_buf *out)
{
    put_greeting(out, 3, 1, "NULL");
    put_ready(out, "PUB");
}

/* Check the verdict on @bytes, whole and in pieces, and free them. */
static void expect(struct kv_buf *bytes, int rc, enum ki_zmtp_state state, const char *text)
{
    static const size_t steps[] = {1, 2, 3, 7, 64, SIZE_MAX};

    for (size_t i = 0; i < KV_COUNT(steps); i++) {
        struct told told;

        tell((const uint8_t *)bytes->data, bytes->len, steps[i], &told);
        assert_int_equal(told.rc, rc);
        assert_int_equal(told.state, state);
        assert_string_equal(kv_buf_cstr(&told.text), text);
        kv_buf_fini(&told.text);
    }
    kv_buf_fini(bytes);
}

static void test_greetings(void **state)
{
    static const struct {
        uint8_t major, minor;
        const char *mechanism;
        int rc;
    } cases[] = {{3, 0, "NULL", 0},
                 {3, 1, "NULL", 0},
                 {4, 0, "NULL", 0}, /* a later version must speak ours */
                 {2, 1, "NULL", -EPROTONOSUPPORT},
                 {1, 0, "", -EPROTONOSUPPORT},
                 {3, 1, "PLAIN", -EPROTONOSUPPORT},
                 {3, 1, "NULLX", -EPROTONOSUPPORT},
                 {3, 0, "CURVE", -EPROTONOSUPPORT}};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_buf bytes = KV_BUF_INIT;

        put_greeting(&bytes, cases[i].major, cases[i].minor, cases[i].mechanism);
        expect(&bytes, cases[i].rc, cases[i].rc ? KI_ZMTP_GREETS : KI_ZMTP_SHAKES, "");
    }
}

static void test_not_zmtp(void **state)
{
    static const char *const texts[] = {"HTTP/1.1 400 Bad Request\r\n", "\xff\0\0\0\0\0\0\0\0\xfe"};
    static const size_t lens[] = {26, 10};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        struct kv_buf bytes = KV_BUF_INIT;

        kv_buf_append(&bytes, texts[i], lens[i]);
        expect(&bytes, -EPROTO, KI_ZMTP_GREETS, "");
    }
}

static void test_ready(void **state)
{
    static const struct {
        const char *body;
        size_t len;
        int rc;
    } cases[] = {
        {"\5READY", 6, 0},
        {"\5READY\13Socket-Type\0\0\0\4XPUB", 26, 0},
        {"\5READY\13socket-TYPE\0\0\0\3PUB\10Identity\0\0\0\0", 38, 0},
        {"\5READY\1X\0\0\0\0", 12, 0},
        {"\5READY\13Socket-Type\0\0\0\3SUB", 25, -EPROTO},
        {"\5READY\13Socket-Type\0\0\0\4PUB", 25, -EPROTO},
        {"\5READY\13Socket-Type\0\0\0", 21, -EPROTO},
        {"\5READY\377Socket-Type\0\0\0\3PUB", 25, -EPROTO},
        {"\5READY\1X\377\377\377\377", 12, -EPROTO},
        {"\5ERROR\2no", 9, -EPROTO},
        {"\6READY", 6, -EPROTO},
        {"", 0, -EPROTO},
    };
    struct kv_buf bytes = KV_BUF_INIT;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        put_greeting(&bytes, 3, 0, "NULL");
        put_frame_bytes(&bytes, PEER_COMMAND, cases[i].body, cases[i].len);
        expect(&bytes, cases[i].rc, cases[i].rc ? KI_ZMTP_SHAKES : KI_ZMTP_TALKS, "");
    }
    put_greeting(&bytes, 3, 0, "NULL");
    put_frame_bytes(&bytes, 0, "a message too early", 19);
    expect(&bytes, -EPROTO, KI_ZMTP_SHAKES, "");
}

/* Subscribe with a message where the publisher speaks 3.0, with a command since 3.1. */
static void test_subscription(void **state)
{
    static const char message[] = "\0\1\1", command[] = "\4\12\11SUBSCRIBE";

    (void)state;
    for (uint8_t minor = 0; minor < 3; minor++) {
        const char *wanted = minor ? command : message;
        size_t len = minor ? sizeof(command) - 1 : sizeof(message) - 1;
        struct kv_buf bytes = KV_BUF_INIT;
        struct told told;

        put_greeting(&bytes, 3, minor, "NULL");
        put_ready(&bytes, "XPUB");
        tell((const uint8_t *)bytes.data, bytes.len, SIZE_MAX, &told);
        assert_int_equal(told.zmtp.out.len, KI_ZMTP_GREETING + 27 + len);
        assert_memory_equal(told.zmtp.out.bytes + KI_ZMTP_GREETING + 27, wanted, len);
        kv_buf_fini(&bytes);
        kv_buf_fini(&told.text);
    }
}

static void test_messages(void **state)
{
    struct kv_buf bytes = KV_BUF_INIT;

    (void)state;
    begin(&bytes);
    put_batch(&bytes, "", 0x3132333435363738, "payload", 7);
    put_frame_bytes(&bytes, 0, "", 0);
    put_frame_bytes(&bytes, PEER_LONG, "long form", 9);
    expect(&bytes, 0, KI_ZMTP_TALKS,
           "message of 3: 0: 8:12345678 7:payload\nmessage of 1: 0:\nmessage of 1: 9:long form\n");
    begin(&bytes);
    for (int i = 0; i < 11; i++)
        put_frame_bytes(&bytes, i < 10 ? PEER_MORE : 0, "f", 1);
    put_frame_bytes(&bytes, 0, "next", 4);
    expect(&bytes, 0, KI_ZMTP_TALKS,
           "message of 11: 1:f 1:f 1:f 1:f 1:f 1:f 1:f 1:f\nmessage of 1: 4:next\n");
    begin(&bytes);
    put_frame_bytes(&bytes, 8, "a reserved flag", 15);
    expect(&bytes, -EPROTO, KI_ZMTP_TALKS, "");
}

/* A PING is answered with its own context, also between the frames of a message. */
static void test_ping(void **state)
{
    static const char ping[] = "\4PING\0\226who";
    struct kv_buf bytes = KV_BUF_INIT;
    struct told told;

    (void)state;
    for (size_t step = 1; step < 40; step++) {
        kv_buf_clear(&bytes);
        begin(&bytes);
        put_frame_bytes(&bytes, PEER_MORE, "a", 1);
        put_frame_bytes(&bytes, PEER_COMMAND, ping, sizeof(ping) - 1);
        put_frame_bytes(&bytes, PEER_COMMAND, "\7UNKNOWN", 8);
        put_frame_bytes(&bytes, PEER_COMMAND, "\4PONGxyz", 8);
        put_frame_bytes(&bytes, 0, "b", 1);
        tell((const uint8_t *)bytes.data, bytes.len, step, &told);
        assert_string_equal(kv_buf_cstr(&told.text), "message of 2: 1:a 1:b\n");
        assert_int_equal(told.zmtp.peer_ttl_ds, 150);
        assert_memory_equal(told.zmtp.out.bytes + told.zmtp.out.len - 10, "\4\10\4PONGwho", 10);
        kv_buf_fini(&told.text);
    }
    kv_buf_clear(&bytes);
    begin(&bytes);
    put_frame_bytes(&bytes, PEER_COMMAND, "\4PING\0", 6);
    expect(&bytes, -EPROTO, KI_ZMTP_TALKS, "");
    begin(&bytes);
    put_frame_bytes(&bytes, PEER_COMMAND, "\4PING\0\0a context of 17 by", 24);
    expect(&bytes, -EPROTO, KI_ZMTP_TALKS, "");
}

/* A publisher that asks and asks, and reads no answer, costs no memory. */
static void test_many_pings(void **state)
{
    struct kv_buf bytes = KV_BUF_INIT;
    struct told told;

    (void)state;
    begin(&bytes);
    for (int i = 0; i < 1000; i++)
        put_frame_bytes(&bytes, PEER_COMMAND, "\4PING\0\0", 7);
    put_frame_bytes(&bytes, 0, "m", 1);
    tell((const uint8_t *)bytes.data, bytes.len, SIZE_MAX, &told);
    assert_string_equal(kv_buf_cstr(&told.text), "message of 1: 1:m\n");
    assert_in_range(told.zmtp.out.len, 1, sizeof(told.zmtp.out.bytes));
    kv_buf_fini(&told.text);
    kv_buf_fini(&bytes);
}

/* The parser refuses a length over the limit at the header, before the bytes come. */
static void test_limits(void **state)
{
    static const struct {
        uint8_t flags;
        uint64_t len;
        int rc;
    } cases[] = {{PEER_LONG, LIMIT, 0},
                 {PEER_LONG, LIMIT + 1, -EMSGSIZE},
                 {PEER_LONG, UINT64_MAX, -EMSGSIZE},
                 {PEER_LONG, INT64_MAX, -EMSGSIZE},
                 {PEER_LONG | PEER_MORE, LIMIT + 1, -EMSGSIZE},
                 {PEER_LONG | PEER_COMMAND, KI_ZMTP_MAX_COMMAND, 0},
                 {PEER_LONG | PEER_COMMAND, KI_ZMTP_MAX_COMMAND + 1, -EPROTO}};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_buf bytes = KV_BUF_INIT;
        uint64_t be = htobe64(cases[i].len);

        begin(&bytes);
        kv_buf_append(&bytes, &cases[i].flags, 1);
        kv_buf_append(&bytes, &be, sizeof(be));
        expect(&bytes, cases[i].rc, KI_ZMTP_TALKS, "");
    }
}

/* A message's frames count together, and so do commands between them. */
static void test_limit_of_all_frames(void **state)
{
    static uint8_t zeros[LIMIT / 4];

    (void)state;
    for (int commands = 0; commands < 2; commands++) {
        size_t len = commands ? KI_ZMTP_MAX_COMMAND : sizeof(zeros), fit = 0;
        struct kv_buf bytes = KV_BUF_INIT;
        struct told told;

        begin(&bytes);
        put_frame_bytes(&bytes, PEER_MORE, "first", 5);
        for (; fit < LIMIT / len; fit++)
            put_frame_bytes(&bytes, commands ? PEER_COMMAND : PEER_MORE, zeros, len);
        tell((const uint8_t *)bytes.data, bytes.len, SIZE_MAX, &told);
        assert_int_equal(told.rc, 0);
        kv_buf_fini(&told.text);
        for (; fit < (LIMIT + KI_ZMTP_SLACK) / len + 1; fit++)
            put_frame_bytes(&bytes, commands ? PEER_COMMAND : PEER_MORE, zeros, len);
        tell((const uint8_t *)bytes.data, bytes.len, SIZE_MAX, &told);
        assert_int_equal(told.rc, -EMSGSIZE);
        kv_buf_fini(&told.text);
        kv_buf_fini(&bytes);
    }
}

/* Append a random message or command, and what should become of it. */
static void put_random(uint64_t *seed, struct kv_buf *bytes, struct kv_buf *text)
{
    uint8_t body[600];
    size_t n = 1 + unit_below(seed, 4);

    kv_buf_printf(text, "message of %zu:", n);
    for (size_t i = 0; i < n; i++) {
        size_t len = unit_below(seed, unit_below(seed, 4) ? 20 : sizeof(body));

        for (size_t k = 0; k < len; k++)
            body[k] = (uint8_t)('a' + unit_below(seed, 26));
        if (unit_below(seed, 5) == 0)
            put_frame_bytes(bytes, PEER_COMMAND, "\4PING\0\0", 7);
        put_frame_bytes(
            bytes, (uint8_t)((i + 1 < n ? PEER_MORE : 0) | (unit_below(seed, 9) ? 0 : PEER_LONG)),
            body, len);
        kv_buf_printf(text, " %zu:", len);
        kv_buf_append(text, body, len);
    }
    kv_buf_puts(text, "\n");
}

static void test_random_messages(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(300); round++) {
        struct kv_buf bytes = KV_BUF_INIT, text = KV_BUF_INIT;
        struct told told;

        begin(&bytes);
        for (uint64_t n = unit_below(&seed, 20); n; n--)
            put_random(&seed, &bytes, &text);
        tell((const uint8_t *)bytes.data, bytes.len, 1 + unit_below(&seed, 200), &told);
        assert_int_equal(told.rc, 0);
        assert_string_equal(kv_buf_cstr(&told.text), kv_buf_cstr(&text));
        kv_buf_fini(&told.text);
        kv_buf_fini(&bytes);
        kv_buf_fini(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greetings),
        cmocka_unit_test(test_not_zmtp),
        cmocka_unit_test(test_ready),
        cmocka_unit_test(test_subscription),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_ping),
        cmocka_unit_test(test_many_pings),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_limit_of_all_frames),
        cmocka_unit_test(test_random_messages),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
