// SPDX-License-Identifier: Apache-2.0
/*
 * Latency that a choice adds to a request through Envoy's external processing, without tokenizing.
 *
 *     ext_proc_bench [RATE [SECONDS [PORT]]]     2000 requests/s, 3 s a round; PORT: also a server that runs there
 *
 * The yardstick is a pass-through of the same server: it answers with a fixed endpoint, and gives the body back.
 * Requests of 2 KB with token ids come on one connection at fixed times, whatever the server does. A latency is from
 * a request's time to the end of its body's way back. Rounds of both alternate.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "extproc/extproc.h"
#include "grpc/frames.h"
#include "kv_hash.h"
#include "kv_select.h"
#include "support.h"

enum { ROUNDS = 5, WORKERS = 8, BLOCK = 16, MAX_REQUESTS = 1 << 20 };

/* -- the servers --------------------------------------------------------------------------------- */

struct books {
    pthread_mutex_t lock;
    struct kvsel *selector; /* NULL: pass through */
};

static int choose(void *arg, const struct kx_ask *ask, char ret[KX_MAX_ENDPOINTS])
{
    struct books *books = arg;
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    uint64_t hashes[1024];
    size_t n = KV_MIN(ask->n_tokens / BLOCK, KV_COUNT(hashes));
    int rc = 0;

    if (books->selector) {
        n = kve_hash_tokens(KVE_SEED, ask->tokens, n * BLOCK, BLOCK, 0, hashes);
        kve_sequence_hashes(hashes, n, hashes);
        request.tokens = ask->n_tokens;
        request.hashes = hashes;
        request.n_hashes = n;
        pthread_mutex_lock(&books->lock);
        rc = kvsel_select(books->selector, &request, kv_now_ns(), &choice);
        if (rc == 0)
            rc = kvsel_book(books->selector, ask->id, strlen(ask->id), &request, &choice,
                            kv_now_ns());
        pthread_mutex_unlock(&books->lock);
    }
    (void)snprintf(ret, KX_MAX_ENDPOINTS, "10.0.0.%u:8000", (unsigned)choice.worker.worker);
    return rc;
}

static void end(void *arg, const char *id, bool lost)
{
    struct books *books = arg;

    if (!books->selector)
        return;
    pthread_mutex_lock(&books->lock);
    kvsel_free(books->selector, id, strlen(id), lost ? KVSEL_LOST : KVSEL_DONE, kv_now_ns());
    pthread_mutex_unlock(&books->lock);
}

static struct kx_server *start(struct books *books, struct kx_picker *picker)
{
    struct kx_server *server;
    struct kv_error error;
    int rc;

    *picker = (struct kx_picker){.arg = books, .choose = choose, .end = end};
    const struct kx_opts opts = {.host = "127.0.0.1", .picker = picker};

    rc = kx_server_start(&opts, &server, &error);
    if (rc < 0)
        bench_die(error.text, rc);
    return server;
}

static void add_workers(struct books *books)
{
    int rc = kvsel_create(NULL, &books->selector);

    for (uint64_t i = 0; i < WORKERS && rc == 0; i++) {
        struct kvsel_worker worker = KVSEL_WORKER_INIT;

        worker.holder.worker = i;
        rc = kvsel_set_worker(books->selector, &worker);
    }
    if (rc < 0)
        bench_die("workers", rc);
}

/* -- the client ---------------------------------------------------------------------------------- */

struct client {
    int fd;
    nghttp2_session *session;
    struct kv_buf wire; /* messages of a request: headers, body */
    double *latencies;  /* in ms */
    size_t done, failed;
    struct kv_buf out;
    size_t out_at;
};

struct request {
    uint64_t due_ns;
    size_t sent, messages;
    struct kg_frames frames;
};

static ssize_t give(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t len,
                    uint32_t *flags, nghttp2_data_source *source, void *arg)
{
    struct client *c = arg;
    struct request *r = source->ptr;
    size_t n = KV_MIN(len, c->wire.len - r->sent);

    (void)session, (void)stream;
    memcpy(buf, c->wire.data + r->sent, n);
    r->sent += n;
    if (r->sent == c->wire.len)
        *flags |= NGHTTP2_DATA_FLAG_EOF;
    return (ssize_t)n;
}

static bool count_message(void *arg, const void *data, size_t len)
{
    (void)data, (void)len;
    ((struct request *)arg)->messages++;
    return true;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data,
                   size_t len, void *arg)
{
    struct client *c = arg;
    struct request *r = nghttp2_session_get_stream_user_data(session, stream);
    size_t before = r->messages;

    (void)flags;
    if (kg_frames_feed(&r->frames, data, len, count_message, r) < 0)
        return NGHTTP2_ERR_CALLBACK_FAILURE;
    if (before < 2 && r->messages >= 2)
        c->latencies[c->done++] = (double)(kv_now_ns() - r->due_ns) / 1e6;
    return 0;
}

static int on_close(nghttp2_session *session, int32_t stream, uint32_t code, void *arg)
{
    struct client *c = arg;
    struct request *r = nghttp2_session_get_stream_user_data(session, stream);

    (void)code;
    c->failed += r->messages < 2;
    kv_buf_fini(&r->frames.body);
    free(r);
    return 0;
}

static nghttp2_nv header(const char *name, const char *value)
{
    return (nghttp2_nv){(uint8_t *)(uintptr_t)name, (uint8_t *)(uintptr_t)value, strlen(name),
                        strlen(value), NGHTTP2_NV_FLAG_NONE};
}

static void ask(struct client *c, uint64_t due_ns)
{
    const nghttp2_nv nv[] = {
        header(":method", "POST"), header(":scheme", "http"),
        header(":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
        header(":authority", "x"), header("content-type", "application/grpc")};
    struct request *r = calloc(1, sizeof(*r));
    nghttp2_data_provider from = {.source = {.ptr = r}, .read_callback = give};

    if (!r)
        bench_die("a request", -ENOMEM);
    r->due_ns = due_ns;
    r->frames.max = 1 << 20;
    if (nghttp2_submit_request(c->session, NULL, nv, KV_COUNT(nv), &from, r) < 0)
        bench_die("a stream", 0);
}

static void flush(struct client *c)
{
    const uint8_t *data;
    ssize_t n;

    if (c->out_at == c->out.len) {
        kv_buf_clear(&c->out);
        c->out_at = 0;
    }
    while ((n = nghttp2_session_mem_send(c->session, &data)) > 0)
        kv_buf_append(&c->out, data, (size_t)n);
    n = send(c->fd, c->out.data + c->out_at, c->out.len - c->out_at, MSG_NOSIGNAL);
    if (n > 0)
        c->out_at += (size_t)n;
}

static void receive(struct client *c)
{
    static char buf[65536];
    ssize_t n = recv(c->fd, buf, sizeof(buf), 0);

    if (n == 0 || (n > 0 && nghttp2_session_mem_recv(c->session, (uint8_t *)buf, (size_t)n) < 0))
        bench_die("the server hung up", 0);
}

/* A protobuf field of bytes. */
static void put_field(struct kv_buf *out, unsigned number, const void *data, size_t len)
{
    kv_buf_putc(out, (char)(number << 3 | 2));
    for (size_t left = len;; left >>= 7) {
        kv_buf_putc(out, (char)((left & 0x7F) | (left > 0x7F ? 0x80 : 0)));
        if (left <= 0x7F)
            break;
    }
    kv_buf_append(out, data, len);
}

static void put_message(struct kv_buf *out, unsigned number, const struct kv_buf *message)
{
    struct kv_buf whole = KV_BUF_INIT;
    uint8_t head[KG_HEAD];

    put_field(&whole, number, message->data, message->len);
    kg_frame_head(head, (uint32_t)whole.len);
    kv_buf_append(out, head, sizeof(head));
    kv_buf_append(out, whole.data, whole.len);
    kv_buf_fini(&whole);
}

/* Request headers, and a body of 2 KB: 400 token ids. */
static void make_wire(struct kv_buf *wire)
{
    struct kv_buf body = KV_BUF_INIT, message = KV_BUF_INIT;

    kv_buf_puts(&body, "{\"prompt\":[");
    for (unsigned i = 0; i < 400; i++)
        kv_buf_printf(&body, "%s%u", i ? "," : "", 1000 + i * 7);
    kv_buf_puts(&body, "]}");
    put_message(wire, 2, &message);
    put_field(&message, 1, body.data, body.len);
    kv_buf_append(&message, "\x10\x01", 2); /* end_of_stream */
    put_message(wire, 4, &message);
    kv_buf_fini(&body);
    kv_buf_fini(&message);
}

static void open_client(struct client *c, uint16_t port)
{
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    nghttp2_session_callbacks *callbacks;
    int on = 1;

    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&at, sizeof(at)) < 0)
        bench_die("connect", -errno);
    (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)fcntl(c->fd, F_SETFL, O_NONBLOCK);
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
    nghttp2_session_client_new(&c->session, callbacks, c);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_submit_settings(c->session, 0, NULL, 0);
    nghttp2_session_set_local_window_size(c->session, 0, 0, 16 << 20);
    make_wire(&c->wire);
}

/* One round. Writes the p50 and p99 of its latencies. */
static void measure(uint16_t port, uint64_t rate, uint64_t seconds, struct bench_samples *p50,
                    struct bench_samples *p99)
{
    struct client c = {0};
    size_t n = KV_MIN(rate * seconds, (uint64_t)MAX_REQUESTS), asked = 0;
    uint64_t start_ns;

    open_client(&c, port);
    c.latencies = calloc(n, sizeof(*c.latencies));
    if (!c.latencies)
        bench_die("latencies", -ENOMEM);
    start_ns = kv_now_ns();
    while (c.done + c.failed < n) {
        uint64_t now_ns = kv_now_ns(), next_ns;

        while (asked < n && start_ns + asked * KV_NS_PER_S / rate <= now_ns) {
            ask(&c, start_ns + asked * KV_NS_PER_S / rate);
            asked++;
        }
        flush(&c);
        next_ns = asked < n ? start_ns + asked * KV_NS_PER_S / rate : now_ns + KV_NS_PER_S;
        struct pollfd fd = {.fd = c.fd,
                            .events = (short)(POLLIN | (c.out_at < c.out.len ? POLLOUT : 0))};
        struct timespec wait = kv_timespec(next_ns > now_ns ? next_ns - now_ns : 0);

        if (ppoll(&fd, 1, &wait, NULL) > 0 && (fd.revents & (POLLIN | POLLHUP)))
            receive(&c);
    }
    if (c.failed)
        bench_die("requests failed", 0);
    qsort(c.latencies, n, sizeof(*c.latencies), bench_by_value);
    bench_sample(p50, c.latencies[n / 2]);
    bench_sample(p99, c.latencies[n * 99 / 100]);
    nghttp2_session_del(c.session);
    close(c.fd);
    kv_buf_fini(&c.wire);
    kv_buf_fini(&c.out);
    free(c.latencies);
}

int main(int argc, char **argv)
{
    struct books books[2] = {{.lock = PTHREAD_MUTEX_INITIALIZER},
                             {.lock = PTHREAD_MUTEX_INITIALIZER}};
    static const char *const names[] = {"pass-through", "choice", "other"};
    struct bench_samples p50[3] = {{.n = 0}}, p99[3] = {{.n = 0}};
    struct kx_picker pickers[2];
    struct kx_server *servers[2];
    uint64_t rate, seconds, port;

    bench_usage(argc, argv, "[RATE [SECONDS [PORT]]]");
    rate = bench_number(argc, argv, 1, 2000);
    seconds = bench_number(argc, argv, 2, 3);
    port = bench_number(argc, argv, 3, 0);
    add_workers(&books[1]);
    for (int i = 0; i < 2; i++)
        servers[i] = start(&books[i], &pickers[i]);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 2; i++)
            measure(kx_server_port(servers[i]), rate, seconds, &p50[i], &p99[i]);
        if (port)
            measure((uint16_t)port, rate, seconds, &p50[2], &p99[2]);
    }
    for (int i = 0; i < (port ? 3 : 2); i++) {
        double middle[2] = {bench_middle(&p50[i]), bench_middle(&p99[i])};

        bench_line("ext_proc",
                   "'server':'%s','rate':%u,'p50_ms':%.3f,'p99_ms':%.3f,'added_p50_ms':%.3f,"
                   "'added_p99_ms':%.3f",
                   names[i], (unsigned)rate, middle[0], middle[1],
                   middle[0] - bench_middle(&p50[0]), middle[1] - bench_middle(&p99[0]));
    }
    for (int i = 0; i < 2; i++)
        kx_server_stop(servers[i]);
    kvsel_destroy(books[1].selector);
    return 0;
}
