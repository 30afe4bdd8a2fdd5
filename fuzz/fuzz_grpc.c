// SPDX-License-Identifier: Apache-2.0
/*
 * A connection of the gRPC server with the services of external processing, without a socket. The input is a
 * list of steps, so that the fuzzer gets behind HPACK and the framing:
 *
 *     kind (1 byte), length (2 bytes), as many bytes
 *
 *     0  bytes of the connection as they are        3  DATA with a message (head before it)
 *     1  HEADERS of Process on the next stream      4  RST_STREAM
 *     2  DATA                                       5  the same as 3, with END_STREAM
 *     6  HEADERS of health's Check                  7  as much is sent as the peer lets
 *
 * Each call that began has ended when the connection is gone, each booking is freed once, and no bytes stay
 * charged.
 */
#include "base/core/clock.h"
#include "extproc/stream.h"
#include "grpc/impl.h"
#include "require.h"

static size_t booked, freed;

static int choose(void *arg, const struct kx_ask *ask, char ret[KX_MAX_ENDPOINTS])
{
    size_t bytes = strlen(ask->id) + strlen(ask->model);

    (void)arg;
    for (size_t i = 0; i < ask->n_candidates; i++)
        bytes += strlen(ask->candidates[i]);
    for (size_t i = 0; ask->tokens && i < ask->n_tokens; i++)
        bytes += ask->tokens[i];
    if (bytes % 5 == 0)
        return -ENOBUFS;
    booked++;
    memcpy(ret, "10.0.0.1:80", 12);
    return 0;
}

static void first_token(void *arg, const char *id)
{
    (void)arg;
    REQUIRE(id[0] && freed < booked);
}

static void output(void *arg, const char *id, uint64_t n)
{
    (void)arg;
    REQUIRE(id[0] && n > 0 && freed < booked);
}

static void end(void *arg, const char *id, bool lost)
{
    (void)arg, (void)lost;
    REQUIRE(id[0]);
    freed++;
}

static bool is_ready(void *arg)
{
    (void)arg;
    return true;
}

/* The objects that kx_server_start makes, without sockets and threads. */
struct fixture {
    struct kx_server kx;
    struct kg_server kg;
    struct kg_loop *loop;
};

static void prepare(struct fixture *f)
{
    f->kx.picker = (struct kx_picker){.choose = choose,
                                      .first_token = first_token,
                                      .output = output,
                                      .end = end,
                                      .ready = is_ready};
    f->kx.opts.max_body = 20000;
    f->kx.opts.max_bodies = 40000;
    REQUIRE(pthread_mutex_init(&f->kx.lock, NULL) == 0 && kx_metrics_create(&f->kx) == 0);
    kx_methods(&f->kx);
    f->kg.listener = -1;
    f->kg.n_loops = 1;
    f->kg.opts = (struct kg_opts){.methods = f->kx.methods,
                                  .n_methods = 2,
                                  .max_calls = 64,
                                  .max_connections = 4,
                                  .max_message = 1 << 16,
                                  .max_incomplete = 1 << 18,
                                  .max_answers = 1 << 18};
    REQUIRE(kg_conn_callbacks(&f->kg) == 0);
    REQUIRE(kg_loop_create(&f->kg, 1, &f->loop) == 0); /* loop 0 would listen */
}

static void feed_frame(struct kg_conn *conn, uint8_t kind, uint8_t flags, int32_t stream,
                       const void *payload, size_t len)
{
    struct kv_buf frame = KV_BUF_INIT;
    const uint8_t head[] = {(uint8_t)(len >> 16),
                            (uint8_t)(len >> 8),
                            (uint8_t)len,
                            kind,
                            flags,
                            (uint8_t)(stream >> 24),
                            (uint8_t)(stream >> 16),
                            (uint8_t)(stream >> 8),
                            (uint8_t)stream};

    kv_buf_append(&frame, head, sizeof(head));
    kv_buf_append(&frame, payload, len);
    REQUIRE(!frame.error);
    kg_conn_feed(conn, frame.data, frame.len);
    kv_buf_fini(&frame);
}

static void feed_headers(struct kg_conn *conn, int32_t stream, const char *path)
{
    const char *const pairs[][2] = {{":method", "POST"},
                                    {":scheme", "http"},
                                    {":path", path},
                                    {":authority", "x"},
                                    {"content-type", "application/grpc"}};
    struct kv_buf block = KV_BUF_INIT;

    for (size_t i = 0; i < KV_COUNT(pairs); i++) {
        kv_buf_putc(&block, 0);
        for (int k = 0; k < 2; k++) {
            kv_buf_putc(&block, (char)strlen(pairs[i][k]));
            kv_buf_puts(&block, pairs[i][k]);
        }
    }
    feed_frame(conn, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, block.data, block.len);
    kv_buf_fini(&block);
}

static void feed_message(struct kg_conn *conn, int32_t stream, const uint8_t *data, size_t len,
                         bool last)
{
    struct kv_buf body = KV_BUF_INIT;
    uint8_t head[KG_HEAD];

    len = KV_MIN(len, (size_t)16000);
    kg_frame_head(head, (uint32_t)len);
    kv_buf_append(&body, head, sizeof(head));
    kv_buf_append(&body, data, len);
    feed_frame(conn, NGHTTP2_DATA, last ? NGHTTP2_FLAG_END_STREAM : 0, stream, body.data, body.len);
    kv_buf_fini(&body);
}

static void take_step(struct kg_conn *conn, uint8_t kind, const uint8_t *data, size_t len,
                      int32_t *stream)
{
    static const uint8_t cancel[4] = {0, 0, 0, 8};
    int32_t at = *stream - 2 * (int32_t)(kind >> 4); /* an older stream, with the upper bits */

    switch (kind & 7) {
    case 0:
        kg_conn_feed(conn, data, len);
        break;
    case 1:
    case 6:
        *stream += 2;
        feed_headers(conn, *stream,
                     (kind & 7) == 1 ? "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
                                     : "/grpc.health.v1.Health/Check");
        break;
    case 2:
        feed_frame(conn, NGHTTP2_DATA, 0, at, data, KV_MIN(len, (size_t)16000));
        break;
    case 4:
        feed_frame(conn, NGHTTP2_RST_STREAM, 0, at, cancel, sizeof(cancel));
        break;
    case 7:
        kg_conn_fill(conn);
        conn->out_at = conn->out.len;
        break;
    default:
        feed_message(conn, at, data, len, (kind & 7) == 5);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fixture *f;
    struct kg_conn *conn;
    int32_t stream = -1;
    size_t before = booked - freed;

    if (!f) {
        f = calloc(1, sizeof(*f));
        REQUIRE(f);
        prepare(f);
    }
    REQUIRE(kg_conn_create(f->loop, -1, kv_now_ns(), &conn) == 0);
    kg_conn_feed(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
    while (size >= 3 && !conn->broken) {
        size_t len = KV_MIN((size_t)data[1] << 8 | data[2], size - 3);

        take_step(conn, data[0], data + 3, len, &stream);
        data += 3 + len;
        size -= 3 + len;
    }
    if (!conn->broken)
        kg_conn_fill(conn);
    kg_conn_destroy(conn);
    REQUIRE(booked - freed == before && before == 0);
    REQUIRE(f->loop->n_calls == 0 && !f->loop->conns && !f->loop->dirty);
    REQUIRE(atomic_load(&f->kg.calls) == 0 && atomic_load(&f->kg.connections) == 0);
    REQUIRE(atomic_load(&f->kg.answers) == 0);
    REQUIRE(atomic_load(&f->kg.incomplete) == 0 && atomic_load(&f->kx.bodies) == 0);
    return 0;
}
