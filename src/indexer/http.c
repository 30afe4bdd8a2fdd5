// SPDX-License-Identifier: Apache-2.0
#include "indexer/http.h"

#include <inttypes.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "indexer/framing.h"
#include "indexer/linger.h"

/*
 * The life of a request:
 *
 *   header complete ──► begin: framing, authorization, route ──refused──► early reply, connection
 * closed │                                                        └─────► short bodies are read and
 * dropped, ▼                                                                so that the connection
 * can stay collect: the body, under the limits ▼ finish: the handler fills the reply ──► sent from
 * its buffer, or streamed through a pipe ▼ completed: the exchange goes back to the free list with
 * its buffers
 */

#define HTTP_CONTENT_TOO_LARGE 413 /* its name differs between versions of the library */
#define DISCARD_MAX (64u << 10)    /* a body worth reading although the request is refused */
#define KEEP_BUFFER (256u << 10)   /* larger buffers are freed after use */
#define KEEP_EXCHANGES 64
#define FIRST_BODY (64u << 10)
#define SLOWEST_BYTES_PER_MS 32 /* bodies and replies may take 30 s and this rate on top */
#define PATIENCE_MS 30000
#define STREAM_LIMIT_MS 3600000
#define PIPE_BYTES (256u << 10)
#define STREAM_BLOCK (32u << 10)
#define CONNECTION_MEMORY (64u << 10) /* request header and read buffer of a connection */

struct exchange {
    struct ki_http *http;
    struct MHD_Connection *connection;
    struct ki_conn *conn;
    struct ki_request request;
    struct ki_reply reply;
    struct kv_buf body;
    size_t charged;  /* bytes of body counted in http->body_bytes */
    size_t received; /* bytes of the body so far, kept or not */
    struct ki_framing framing;
    bool refused; /* the reply is there; what comes of the body is dropped */
    struct exchange *next;
};

struct stream {
    struct ki_http *http;
    struct stream *prev, *next;
    struct MHD_Connection *connection;
    int fd; /* of the connection */
    struct ki_pipe *pipe;
    ki_produce_fn produce;
    void (*done)(void *arg);
    void *arg;
    pthread_t thread;
    bool started;
};

struct ki_http {
    struct MHD_Daemon *daemon;
    struct ki_http_opts opts;
    struct ki_conns *conns;
    struct ki_linger *linger;
    atomic_bool stopping;
    atomic_size_t in_flight, body_bytes;
    _Atomic uint64_t overloaded, bad_framing;
    pthread_mutex_t lock; /* what follows */
    struct exchange *free;
    size_t n_free;
    struct stream streams; /* ring */
    size_t n_streams;
    bool no_more_streams; /* the server is about to stop */
};

bool ki_request_param(const struct ki_request *request, const char *name, struct kv_str *ret)
{
    struct exchange *ex = request->native;
    const char *value;
    size_t len;

    if (MHD_lookup_connection_value_n(ex->connection, MHD_GET_ARGUMENT_KIND, name, strlen(name),
                                      &value, &len) != MHD_YES)
        return false;
    ret->p = value ? value : "";
    ret->len = value ? len : 0;
    return true;
}

/* -- streamed replies -------------------------------------------------------------------------- */

static void park(void *arg)
{
    MHD_suspend_connection(((struct stream *)arg)->connection);
}

static void wake(void *arg)
{
    MHD_resume_connection(((struct stream *)arg)->connection);
}

static void *stream_main(void *arg)
{
    struct stream *stream = arg;
    int rc = stream->produce(stream->arg, stream->pipe);

    ki_pipe_end(stream->pipe, rc == 0);
    return NULL;
}

/*
 * Cut off, so that the client doesn't take what it got for the whole. 0.9.75 marks such a
 * connection closed but, having just come back from being suspended, may not look at it again: the
 * hang-up makes it.
 */
static ssize_t break_off(struct stream *stream)
{
    shutdown(stream->fd, SHUT_RDWR);
    return MHD_CONTENT_READER_END_WITH_ERROR;
}

/* The producer starts with the first read: a HEAD request never gets that far. */
static ssize_t stream_read(void *cls, uint64_t pos, char *data, size_t max)
{
    struct stream *stream = cls;
    long n;

    (void)pos;
    if (!stream->started) {
        if (kv_thread_start(&stream->thread, "http-stream", stream_main, stream) < 0)
            return break_off(stream);
        stream->started = true;
    }
    n = ki_pipe_read(stream->pipe, data, max);
    if (n > 0)
        return (ssize_t)n;
    if (n == -EAGAIN)
        return 0;
    return n == 0 ? MHD_CONTENT_READER_END_OF_STREAM : break_off(stream);
}

static void stream_free(void *cls)
{
    struct stream *stream = cls;
    struct ki_http *http = stream->http;

    ki_pipe_cancel(stream->pipe);
    if (stream->started)
        pthread_join(stream->thread, NULL);
    if (stream->done)
        stream->done(stream->arg);
    pthread_mutex_lock(&http->lock);
    stream->prev->next = stream->next;
    stream->next->prev = stream->prev;
    http->n_streams--;
    pthread_mutex_unlock(&http->lock);
    ki_pipe_destroy(stream->pipe);
    free(stream);
}

static int add_stream(struct ki_http *http, struct stream *stream)
{
    int rc = -EBUSY;

    pthread_mutex_lock(&http->lock);
    if (!http->no_more_streams && http->n_streams < http->opts.max_streams) {
        stream->prev = http->streams.prev;
        stream->next = &http->streams;
        stream->prev->next = stream->next->prev = stream;
        http->n_streams++;
        rc = 0;
    }
    pthread_mutex_unlock(&http->lock);
    return rc;
}

static int make_stream(struct exchange *ex, struct stream **ret)
{
    struct stream *stream = calloc(1, sizeof(*stream));
    const struct ki_pipe_reader reader = {.park = park, .wake = wake, .arg = stream};
    int rc = -ENOMEM;

    if (!stream)
        return rc;
    stream->http = ex->http;
    stream->connection = ex->connection;
    stream->fd = ex->conn->fd;
    stream->produce = ex->reply.produce;
    stream->done = ex->reply.done;
    stream->arg = ex->reply.produce_arg;
    rc = ki_pipe_create(PIPE_BYTES, &reader, &stream->pipe);
    if (rc == 0)
        rc = add_stream(ex->http, stream);
    if (rc < 0) {
        ki_pipe_destroy(stream->pipe);
        free(stream);
        return rc;
    }
    *ret = stream;
    return 0;
}

static void drop_producer(struct ki_reply *reply)
{
    if (reply->produce && reply->done)
        reply->done(reply->produce_arg);
    reply->produce = NULL;
}

/* From here on the stream, not the reply, answers for done(). */
static struct MHD_Response *stream_response(struct exchange *ex)
{
    struct MHD_Response *response;
    struct stream *stream;

    if (make_stream(ex, &stream) < 0) {
        drop_producer(&ex->reply);
        atomic_fetch_add_explicit(&ex->http->overloaded, 1, memory_order_relaxed);
        ki_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                       "too many streamed replies at a time, try again later");
        ki_reply_header(&ex->reply, "Retry-After", "5");
        return NULL;
    }
    ex->reply.produce = NULL;
    response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, stream_read,
                                                 stream, stream_free);
    if (!response)
        stream_free(stream);
    else
        ki_conn_busy(ex->conn, STREAM_LIMIT_MS);
    return response;
}

/* -- sending ----------------------------------------------------------------------------------- */

static struct MHD_Response *buffer_response(struct exchange *ex)
{
    struct kv_buf *body = &ex->reply.body;

    if (body->error) { /* out of memory while writing it */
        static char text[] = "{\"error\":\"out of memory\"}";

        kv_buf_fini(body);
        ex->reply.status = MHD_HTTP_SERVICE_UNAVAILABLE;
        ex->reply.content_type = "application/json";
        return MHD_create_response_from_buffer(sizeof(text) - 1, text, MHD_RESPMEM_PERSISTENT);
    }
    ki_conn_busy(ex->conn, PATIENCE_MS + body->len / SLOWEST_BYTES_PER_MS);
    return MHD_create_response_from_buffer(body->len, body->len ? body->data : "",
                                           MHD_RESPMEM_PERSISTENT);
}

/*
 * To a HEAD with a streamed reply the library would send the chunk that ends a body, which the
 * client takes for the start of the next reply: such a reply goes out unchunked, and closes.
 */
static enum MHD_Result send_reply(struct exchange *ex)
{
    struct ki_reply *reply = &ex->reply;
    struct MHD_Response *response = NULL;
    enum MHD_Result rc;
    bool streamed;

    if (reply->produce)
        response = stream_response(ex);
    streamed = response != NULL;
    if (!response)
        response = buffer_response(ex);
    if (!response)
        return MHD_NO;
    if (reply->content_type)
        MHD_add_response_header(response, "Content-Type", reply->content_type);
    for (size_t i = 0; i < reply->n_headers; i++)
        MHD_add_response_header(response, reply->headers[i].name, reply->headers[i].value);
    if (reply->close || atomic_load_explicit(&ex->http->stopping, memory_order_relaxed))
        MHD_add_response_header(response, "Connection", "close");
    if (streamed && strcmp(ex->request.method, "HEAD") == 0)
        MHD_set_response_options(response, MHD_RF_HTTP_1_0_COMPATIBLE_STRICT, MHD_RO_END);
    rc = MHD_queue_response(ex->connection, reply->status, response);
    MHD_destroy_response(response);
    if (ex->http->opts.observe)
        ex->http->opts.observe(ex->http->opts.arg, &ex->request, reply->status);
    return rc;
}

/* -- the start of a request -------------------------------------------------------------------- */

static enum MHD_Result take_header(void *cls, enum MHD_ValueKind kind, const char *key,
                                   size_t key_len, const char *value, size_t value_len)
{
    (void)kind;
    ki_framing_header(cls, key, key_len, value ? value : "", value ? value_len : 0);
    return MHD_YES;
}

/*
 * Before 1.0 the library takes a bare LF for a line's end and cuts a value at a NUL, whatever its
 * strictness. It cuts the lines in place, so that the layout of its strings shows both. From 1.0 on it
 * refuses them itself, and moves more.
 */
static void watch_layout(struct exchange *ex, const char *version)
{
    const union MHD_ConnectionInfo *info;

    if (strncmp(MHD_get_version(), "0.", 2) != 0)
        return;
    info = MHD_get_connection_info(ex->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (info)
        ki_framing_expect_whole(&ex->framing, ex->request.method, info->header_size, version);
}

static void refuse_method(struct exchange *ex, const char *allowed)
{
    ki_reply_error(&ex->reply, MHD_HTTP_METHOD_NOT_ALLOWED, "method not allowed, use %s", allowed);
    ki_reply_header(&ex->reply, "Allow", strcmp(allowed, "GET") == 0 ? "GET, HEAD" : allowed);
}

/* Sets request.route; with none, the reply says why. A path has one method. */
static bool find_route(struct exchange *ex)
{
    const struct ki_http_opts *opts = &ex->http->opts;
    const char *method = ex->request.method;
    bool head = strcmp(method, "HEAD") == 0;

    for (size_t i = 0; i < opts->n_routes; i++) {
        const struct ki_route *route = &opts->routes[i];

        if (strcmp(route->path, ex->request.path) != 0)
            continue;
        ex->request.route = route;
        if (strcmp(route->method, head ? "GET" : method) == 0)
            return true;
        refuse_method(ex, route->method);
        return false;
    }
    ki_reply_error(&ex->reply, MHD_HTTP_NOT_FOUND, "no such path");
    return false;
}

static bool may_go_on(struct exchange *ex, const char *version)
{
    const struct ki_http_opts *opts = &ex->http->opts;
    const char *problem = ki_framing_problem(&ex->framing, version);
    bool found = find_route(ex);

    if (problem) {
        atomic_fetch_add_explicit(&ex->http->bad_framing, 1, memory_order_relaxed);
        ki_reply_error(&ex->reply, MHD_HTTP_BAD_REQUEST, "bad request: %s", problem);
        ex->reply.close = true;
        return false;
    }
    if (opts->admit && !opts->admit(opts->arg, &ex->request, &ex->reply))
        return false;
    if (!found)
        return false;
    if (ex->framing.content_length > KV_MAX(ex->request.route->max_body, (size_t)DISCARD_MAX) ||
        (ex->request.route->max_body && ex->framing.content_length > ex->request.route->max_body)) {
        ki_reply_error(&ex->reply, HTTP_CONTENT_TOO_LARGE,
                       "body of %" PRIu64 " bytes is over the limit of %zu",
                       ex->framing.content_length, ex->request.route->max_body);
        ex->reply.close = true;
        return false;
    }
    return true;
}

static struct exchange *take_exchange(struct ki_http *http)
{
    struct exchange *ex;
    struct kv_buf body, reply;

    pthread_mutex_lock(&http->lock);
    ex = http->free;
    if (ex) {
        http->free = ex->next;
        http->n_free--;
    }
    pthread_mutex_unlock(&http->lock);
    if (!ex)
        return calloc(1, sizeof(*ex));
    body = ex->body;
    reply = ex->reply.body;
    memset(ex, 0, sizeof(*ex));
    ex->body = body;
    ex->reply.body = reply;
    return ex;
}

static void trim(struct kv_buf *buf)
{
    if (buf->capacity > KEEP_BUFFER)
        kv_buf_fini(buf);
    else
        kv_buf_clear(buf);
}

static void free_exchange(struct exchange *ex)
{
    kv_buf_fini(&ex->body);
    kv_buf_fini(&ex->reply.body);
    free(ex);
}

static void give_back(struct exchange *ex)
{
    struct ki_http *http = ex->http;
    bool keep;

    drop_producer(&ex->reply);
    atomic_fetch_sub_explicit(&http->body_bytes, ex->charged, memory_order_relaxed);
    atomic_fetch_sub_explicit(&http->in_flight, 1, memory_order_relaxed);
    trim(&ex->body);
    trim(&ex->reply.body);
    pthread_mutex_lock(&http->lock);
    keep = http->n_free < KEEP_EXCHANGES;
    if (keep) {
        ex->next = http->free;
        http->free = ex;
        http->n_free++;
    }
    pthread_mutex_unlock(&http->lock);
    if (!keep)
        free_exchange(ex);
}

static struct ki_conn *conn_of(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return info ? info->socket_context : NULL;
}

/* The header is complete. */
static enum MHD_Result begin(struct ki_http *http, struct MHD_Connection *connection,
                             const char *url, const char *method, const char *version, void **state)
{
    struct ki_conn *conn = conn_of(connection);
    struct exchange *ex = conn ? take_exchange(http) : NULL;

    if (!ex)
        return MHD_NO;
    *state = ex;
    atomic_fetch_add_explicit(&http->in_flight, 1, memory_order_relaxed);
    ex->http = http;
    ex->connection = connection;
    ex->conn = conn;
    ex->reply.status = MHD_HTTP_OK;
    ex->reply.content_type = "application/json";
    ex->request.method = method;
    ex->request.path = url;
    ex->request.loopback = conn->loopback;
    ex->request.started_ns = kv_now_ns();
    ex->request.native = ex;
    watch_layout(ex, version);
    MHD_get_connection_values_n(connection, MHD_HEADER_KIND, take_header, &ex->framing);
    ex->request.content_type = ex->framing.content_type;
    ex->request.authorization = ex->framing.authorization;
    if (may_go_on(ex, version)) {
        size_t expected = ki_framing_chunked(&ex->framing) ? ex->request.route->max_body
                                                           : ex->framing.content_length;

        /* The library takes a bare LF between chunks too, unseen: nothing may follow. */
        ex->reply.close = ki_framing_chunked(&ex->framing);
        ki_conn_busy(conn, PATIENCE_MS + expected / SLOWEST_BYTES_PER_MS);
        return MHD_YES;
    }
    ex->refused = true;
    ki_conn_limit(conn, PATIENCE_MS);
    if (!ex->reply.close && !ex->framing.expects && !ki_framing_chunked(&ex->framing) &&
        ex->framing.content_length <= DISCARD_MAX)
        return MHD_YES;
    ex->reply.close = true;
    conn->linger = true;
    return send_reply(ex);
}

/* -- the body ---------------------------------------------------------------------------------- */

static int grow(struct exchange *ex, size_t more)
{
    struct kv_buf *body = &ex->body;
    size_t need = body->len + more, want = KV_MAX(need, KV_MAX(2 * body->capacity, FIRST_BODY));
    size_t total;

    if (need <= body->capacity)
        want = body->capacity;
    else if (!ki_framing_chunked(&ex->framing) && ex->framing.content_length < want)
        want = ex->framing.content_length;
    total = want > ex->charged ? want - ex->charged : 0;
    if (total &&
        atomic_fetch_add_explicit(&ex->http->body_bytes, total, memory_order_relaxed) + total >
            ex->http->opts.bodies_bytes) {
        atomic_fetch_sub_explicit(&ex->http->body_bytes, total, memory_order_relaxed);
        return -ENOBUFS;
    }
    ex->charged += total;
    return kv_buf_reserve(body, want - body->len);
}

static enum MHD_Result collect(struct exchange *ex, const char *data, size_t *len)
{
    size_t n = *len, limit = ex->request.route ? ex->request.route->max_body : 0;

    *len = 0;
    ex->received += n;
    if (ex->refused || limit == 0) {
        if (ex->received > KV_MAX(4 * limit, (size_t)DISCARD_MAX))
            return MHD_NO; /* it doesn't end: hang up */
    } else if (ex->received > limit) {
        ki_reply_error(&ex->reply, HTTP_CONTENT_TOO_LARGE, "body is over the limit of %zu bytes",
                       limit);
        ex->refused = ex->reply.close = true;
    } else if (grow(ex, n) < 0) {
        atomic_fetch_add_explicit(&ex->http->overloaded, 1, memory_order_relaxed);
        ki_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                       "too many large requests at a time, try again later");
        ki_reply_header(&ex->reply, "Retry-After", "1");
        ex->refused = ex->reply.close = true;
    } else {
        kv_buf_append(&ex->body, data, n);
    }
    if (ex->refused && ex->charged) {
        atomic_fetch_sub_explicit(&ex->http->body_bytes, ex->charged, memory_order_relaxed);
        ex->charged = 0;
        kv_buf_fini(&ex->body);
    }
    return MHD_YES;
}

static enum MHD_Result finish(struct exchange *ex)
{
    if (!ex->refused) {
        ex->request.body = (struct kv_str){ex->body.len ? ex->body.data : "", ex->body.len};
        ex->request.route->handle(ex->http->opts.arg, &ex->request, &ex->reply);
    }
    return send_reply(ex);
}

/* -- the library's callbacks ------------------------------------------------------------------- */

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *len, void **state)
{
    if (!*state)
        return begin(cls, connection, url, method, version, state);
    if (*len)
        return collect(*state, data, len);
    return finish(*state);
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode code)
{
    struct exchange *ex = *state;

    (void)cls;
    (void)connection;
    (void)code;
    if (!ex)
        return;
    *state = NULL;
    ki_conn_idle(ex->http->conns, ex->conn);
    give_back(ex);
}

static bool is_loopback(const struct sockaddr *address)
{
    static const uint8_t mapped[13] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127};

    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)address;

        return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
    }
    if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const void *)address;

        return IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr) ||
               memcmp(&in6->sin6_addr, mapped, sizeof(mapped)) == 0;
    }
    return false;
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct ki_http *http = cls;

    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *fd =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        int number = fd ? fd->connect_fd : -1;
        const union MHD_ConnectionInfo *peer =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);

        *context = ki_conns_add(http->conns, number,
                                peer && peer->client_addr && is_loopback(peer->client_addr));
    } else if (*context) {
        struct ki_conn *conn = *context;

        if (conn->linger)
            ki_linger_add(http->linger, conn->fd);
        ki_conns_remove(http->conns, conn);
        *context = NULL;
    }
}

static void on_log(void *cls, const char *fmt, va_list args) KV_PRINTF(2, 0);
static void on_log(void *cls, const char *fmt, va_list args)
{
    char text[256], quoted[300];

    (void)cls;
    vsnprintf(text, sizeof(text), fmt, args);
    text[strcspn(text, "\r\n")] = '\0';
    kv_log_debug("http", "libmicrohttpd", "text=%s", kv_log_quote(quoted, sizeof(quoted), text));
}

/* -- start and stop ---------------------------------------------------------------------------- */

static struct MHD_Daemon *start_daemon(struct ki_http *http, int fd)
{
    const struct ki_http_opts *opts = &http->opts;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ERROR_LOG | MHD_USE_ITC |
                     MHD_ALLOW_SUSPEND_RESUME | (opts->tls_cert ? MHD_USE_TLS : 0);
    struct MHD_OptionItem items[8];
    size_t n = 0;

    if (opts->threads > 1)
        items[n++] = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, opts->threads, NULL};
    if (opts->tls_cert) {
        items[n++] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_CERT, 0, (void *)opts->tls_cert};
        items[n++] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_KEY, 0, (void *)opts->tls_key};
    }
    items[n] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    return MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, opts->max_connections,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)(opts->idle_timeout_ms / 1000),
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY,
        items, MHD_OPTION_END);
}

static void free_http(struct ki_http *http)
{
    while (http->free) {
        struct exchange *ex = http->free;

        http->free = ex->next;
        free_exchange(ex);
    }
    ki_conns_destroy(http->conns);
    ki_linger_destroy(http->linger);
    pthread_mutex_destroy(&http->lock);
    free(http);
}

int ki_http_start(int fd, const struct ki_http_opts *opts, struct ki_http **ret,
                  struct kv_error *error)
{
    struct ki_http *http = calloc(1, sizeof(*http));
    int rc;

    if (!http) {
        close(fd);
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    }
    http->opts = *opts;
    http->streams.prev = http->streams.next = &http->streams;
    pthread_mutex_init(&http->lock, NULL);
    rc = ki_conns_create(opts->max_connections, opts->idle_timeout_ms, &http->conns);
    if (rc == 0)
        rc = ki_linger_create(&http->linger);
    if (rc == 0 && listen(fd, 1024) < 0)
        rc = -errno;
    if (rc == 0) {
        errno = 0;
        http->daemon = start_daemon(http, fd);
        rc = http->daemon ? 0 : errno ? -errno : -EINVAL;
    }
    if (rc < 0) {
        close(fd);
        free_http(http);
        return kv_fail(error, rc, 0, "the HTTP server can't start%s (%s)",
                       opts->tls_cert ? ": are certificate and key valid and a pair?" : "",
                       strerror(-rc));
    }
    *ret = http;
    return 0;
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void wait_until_idle(struct ki_http *http, uint64_t limit_ms)
{
    uint64_t deadline = kv_now_ns() + limit_ms * KV_NS_PER_MS;

    while (atomic_load_explicit(&http->in_flight, memory_order_relaxed) > 0 &&
           kv_now_ns() < deadline)
        sleep_ms(5);
}

/*
 * Streams that outlast the drain are cut off and no others begin: a connection that is suspended
 * when MHD stops makes it abort.
 */
static void cancel_streams(struct ki_http *http)
{
    for (int i = 0; i < 400; i++) {
        size_t left;

        pthread_mutex_lock(&http->lock);
        http->no_more_streams = true;
        for (struct stream *s = http->streams.next; s != &http->streams; s = s->next)
            ki_pipe_cancel(s->pipe);
        left = http->n_streams;
        pthread_mutex_unlock(&http->lock);
        if (left == 0)
            return;
        sleep_ms(5);
    }
}

void ki_http_stop(struct ki_http *http, uint64_t drain_ms)
{
    int fd;

    if (!http)
        return;
    atomic_store_explicit(&http->stopping, true, memory_order_relaxed);
    fd = MHD_quiesce_daemon(http->daemon);
    if (fd >= 0)
        shutdown(fd, SHUT_RDWR); /* refuse; its threads may still look at the number */
    wait_until_idle(http, drain_ms);
    cancel_streams(http);
    MHD_stop_daemon(http->daemon);
    if (fd >= 0)
        close(fd);
    free_http(http);
}

void ki_http_get_stats(struct ki_http *http, struct ki_http_stats *ret)
{
    ki_conns_get_stats(http->conns, &ret->connections);
    ret->in_flight = atomic_load_explicit(&http->in_flight, memory_order_relaxed);
    ret->body_bytes = atomic_load_explicit(&http->body_bytes, memory_order_relaxed);
    ret->overloaded = atomic_load_explicit(&http->overloaded, memory_order_relaxed);
    ret->bad_framing = atomic_load_explicit(&http->bad_framing, memory_order_relaxed);
    pthread_mutex_lock(&http->lock);
    ret->streams = http->n_streams;
    pthread_mutex_unlock(&http->lock);
}
