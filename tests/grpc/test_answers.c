// SPDX-License-Identifier: Apache-2.0
/* Answers that clients don't read are bounded over all calls, and one connection leaves room for others. */
#include "base/core/clock.h"
#include "grpc/impl.h"
#include "support.h"

enum { MOST = 1 << 20, EACH = 10000 };

static size_t sent, refused; /* answers of all calls */

static bool begin(void *arg, struct kg_call *call)
{
    (void)arg, (void)call;
    return true;
}

/* A message's bytes are the number of answers to it. */
static void message(void *arg, struct kg_call *call, const void *data, size_t len)
{
    (void)arg, (void)data;
    for (size_t i = 0; i < len; i++) {
        uint8_t *room = kg_call_send(call, EACH);

        sent += room != NULL;
        refused += room == NULL;
        if (room)
            memset(room, 'a', EACH);
    }
}

static void nothing(void *arg, struct kg_call *call)
{
    (void)arg, (void)call;
}

static const struct kg_method method = {
    .path = "/a/b", .begin = begin, .message = message, .half_close = nothing, .end = nothing};

static struct kg_server server;
static struct kg_loop *loop;

static void feed(struct kg_conn *conn, uint8_t kind, uint8_t flags, int32_t stream,
                 const void *payload, size_t len)
{
    uint8_t frame[9 + 1000] = {(uint8_t)(len >> 16), (uint8_t)(len >> 8), (uint8_t)len, kind,
                               flags};

    assert_true(len <= sizeof(frame) - 9);
    frame[8] = (uint8_t)stream;
    if (len)
        memcpy(frame + 9, payload, len);
    kg_conn_feed(conn, frame, 9 + len);
}

/* Connect. A client that doesn't read gives its calls no window. */
static struct kg_conn *client(bool reads)
{
    static const uint8_t no_window[6] = {0, NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE};
    static const uint8_t room[4] = {0x7f, 0xff, 0, 0};
    struct kg_conn *conn;

    assert_int_equal(kg_conn_create(loop, -1, kv_now_ns(), &conn), 0);
    kg_conn_feed(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    feed(conn, NGHTTP2_SETTINGS, 0, 0, no_window, reads ? 0 : sizeof(no_window));
    feed(conn, NGHTTP2_WINDOW_UPDATE, 0, 0, room, sizeof(room));
    return conn;
}

/* Begin call @stream and ask for @n answers of it. */
static void ask(struct kg_conn *conn, int32_t stream, uint8_t n)
{
    static const char *const pairs[][2] = {{":method", "POST"},
                                           {":scheme", "http"},
                                           {":path", "/a/b"},
                                           {":authority", "x"},
                                           {"content-type", "application/grpc"}};
    uint8_t block[200], body[KG_HEAD + 255] = {0};
    size_t len = 0;

    for (size_t i = 0; i < KV_COUNT(pairs); i++) {
        block[len++] = 0;
        for (int k = 0; k < 2; k++) {
            size_t of = strlen(pairs[i][k]);

            block[len++] = (uint8_t)of;
            memcpy(block + len, pairs[i][k], of);
            len += of;
        }
    }
    feed(conn, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, block, len);
    kg_frame_head(body, n);
    feed(conn, NGHTTP2_DATA, 0, stream, body, KG_HEAD + n);
    assert_false(conn->broken);
}

/* Have all frames sent. */
static void drain(struct kg_conn *conn)
{
    do {
        kg_conn_fill(conn);
        conn->out_at = conn->out.len;
        kg_conn_fill(conn);
    } while (conn->out.len > 0);
}

static uint64_t answer_bytes(void)
{
    struct kg_stats stats;

    kg_server_get_stats(&server, &stats);
    return stats.answer_bytes;
}

static void test_unread(void **state)
{
    struct kg_conn *deaf = client(false), *deafer = client(false), *reader = client(true);
    size_t first;
    (void)state;

    sent = refused = 0;
    for (int32_t stream = 1; stream < 101; stream += 2)
        ask(deaf, stream, 100);
    first = sent;
    assert_true(sent * EACH > MOST / 4 && sent * EACH <= MOST / 2 + 50 * KG_FREE);
    assert_true(refused > 0);
    assert_true(answer_bytes() <= MOST / 2);
    for (int32_t stream = 1; stream < 101; stream += 2)
        ask(deafer, stream, 100);
    assert_true(sent > first); /* the second finds half of the rest */
    assert_true(answer_bytes() <= MOST / 4 * 3);
    sent = refused = 0;
    for (int32_t stream = 1; stream < 21; stream += 2) {
        ask(reader, stream, 6);
        drain(reader);
    }
    assert_int_equal(sent, 60); /* who reads has no limit */
    assert_int_equal(refused, 0);
    kg_conn_destroy(deaf);
    kg_conn_destroy(deafer);
    ask(reader, 101, 1);
    drain(reader);
    assert_true(answer_bytes() < MOST / 4);
    kg_conn_destroy(reader);
    assert_int_equal(answer_bytes(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unread)};
    int failed;

    server.listener = -1;
    server.n_loops = 1;
    server.opts = (struct kg_opts){.methods = &method,
                                   .n_methods = 1,
                                   .max_calls = 1000,
                                   .max_connections = 4,
                                   .max_message = 1 << 16,
                                   .max_incomplete = 1 << 18,
                                   .max_answers = MOST};
    assert_int_equal(kg_conn_callbacks(&server), 0);
    assert_int_equal(kg_loop_create(&server, 1, &loop), 0); /* loop 0 would listen */
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    kg_loop_destroy(loop);
    nghttp2_session_callbacks_del(server.callbacks);
    nghttp2_option_del(server.option);
    return failed;
}
