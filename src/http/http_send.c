// SPDX-License-Identifier: Apache-2.0
#include "http/http_impl.h"

#include <sys/socket.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"

#define STREAM_LIMIT_MS 3600000
#define PIPE_BYTES (256u << 10)
#define STREAM_BLOCK (32u << 10)
#define SLOW_MS 1000 /* lag in milliseconds from which a stream is cut off for another one */

struct kh_stream {
    struct kh_http *http;
    struct kh_stream *next, **link; /* link: the pointer to this stream */
    struct MHD_Connection *connection;
    struct kh_conn *conn;
    bool parked;  /* the reader waits for the producer */
    bool evicted; /* cut off to make room; guarded by http->lock */
    struct kh_pipe *pipe;
    kh_produce_fn produce;
    void (*done)(void *arg);
    void *arg;
    pthread_t thread;
    bool started;
};

/* -- streamed replies -------------------------------------------------------------------------- */

static void park(void *arg)
{
    MHD_suspend_connection(((struct kh_stream *)arg)->connection);
}

static void wake(void *arg)
{
    MHD_resume_connection(((struct kh_stream *)arg)->connection);
}

static void *stream_main(void *arg)
{
    struct kh_stream *stream = arg;
    int rc = stream->produce(stream->arg, stream->pipe);

    kh_pipe_end(stream->pipe, rc == 0);
    return NULL;
}

/*
 * End a stream so that the client sees the cut. Release 0.9.75 marks the connection closed but may
 * not check it right after a resume, so shut its socket down.
 */
static ssize_t break_off(struct kh_stream *stream)
{
    shutdown(stream->conn->fd, SHUT_RDWR);
    return MHD_CONTENT_READER_END_WITH_ERROR;
}

/*
 * Read from the stream's pipe. The first read starts the producer, so that a HEAD request runs
 * none.
 */
static ssize_t stream_read(void *cls, uint64_t pos, char *data, size_t max)
{
    struct kh_stream *stream = cls;
    long n;

    (void)pos;
    if (!stream->started) {
        if (kv_thread_start(&stream->thread, "http-stream", stream_main, stream) < 0)
            return break_off(stream);
        stream->started = true;
    }
    /*
     * The library asks for more when the client has taken everything. While the reader was parked,
     * the producer was slow, not the client.
     */
    if (stream->parked)
        kh_conn_caught_up(stream->conn);
    stream->parked = false;
    n = kh_pipe_read(stream->pipe, data, max);
    if (n > 0) {
        kh_conn_moved(stream->conn, (size_t)n);
        return (ssize_t)n;
    }
    if (n == -EAGAIN) {
        stream->parked = true;
        kh_conn_wait(stream->conn);
        return 0;
    }
    return n == 0 ? MHD_CONTENT_READER_END_OF_STREAM : break_off(stream);
}

static void stream_free(void *cls)
{
    struct kh_stream *stream = cls;
    struct kh_http *http = stream->http;

    kh_pipe_cancel(stream->pipe);
    if (stream->started)
        pthread_join(stream->thread, NULL);
    if (stream->done)
        stream->done(stream->arg);
    pthread_mutex_lock(&http->lock);
    *stream->link = stream->next;
    if (stream->next)
        stream->next->link = stream->link;
    http->n_streams--;
    http->n_evicted -= stream->evicted;
    pthread_mutex_unlock(&http->lock);
    kh_pipe_destroy(stream->pipe);
    free(stream);
}

/* Cut off the stream whose client lags most. The caller holds http->lock. */
static bool evict_slowest(struct kh_http *http)
{
    uint64_t now = kv_now_ns(), most = SLOW_MS * KV_NS_PER_MS;
    struct kh_stream *slowest = NULL;

    for (struct kh_stream *s = http->streams; s; s = s->next)
        if (!s->evicted && kh_conn_lag_ns(s->conn, now) > most) {
            most = kh_conn_lag_ns(s->conn, now);
            slowest = s;
        }
    if (!slowest)
        return false;
    slowest->evicted = true;
    http->n_evicted++;
    kh_pipe_cancel(slowest->pipe);
    kh_conns_hang_up(http->conns, slowest->conn);
    return true;
}

/*
 * Add a stream. Streams that were cut off take a moment to end; until then twice the limit may
 * exist.
 */
static int add_stream(struct kh_http *http, struct kh_stream *stream)
{
    uint32_t max = http->opts.max_streams;
    int rc = -EBUSY;

    pthread_mutex_lock(&http->lock);
    if (!http->no_more_streams && http->n_streams < 2 * max &&
        (http->n_streams - http->n_evicted < max || evict_slowest(http))) {
        stream->next = http->streams;
        stream->link = &http->streams;
        if (stream->next)
            stream->next->link = &stream->next;
        http->streams = stream;
        http->n_streams++;
        rc = 0;
    }
    pthread_mutex_unlock(&http->lock);
    return rc;
}

static int make_stream(struct kh_exchange *ex, struct kh_stream **ret)
{
    struct kh_stream *stream = calloc(1, sizeof(*stream));
    const struct kh_pipe_reader reader = {.park = park, .wake = wake, .arg = stream};
    int rc = -ENOMEM;

    if (!stream)
        return rc;
    stream->http = ex->http;
    stream->connection = ex->connection;
    stream->conn = ex->conn;
    stream->produce = ex->reply.produce;
    stream->done = ex->reply.done;
    stream->arg = ex->reply.produce_arg;
    rc = kh_pipe_create(PIPE_BYTES, &reader, &stream->pipe);
    if (rc == 0)
        rc = add_stream(ex->http, stream);
    if (rc < 0) {
        kh_pipe_destroy(stream->pipe);
        free(stream);
        return rc;
    }
    *ret = stream;
    return 0;
}

void kh_http_drop_producer(struct kh_reply *reply)
{
    if (reply->produce && reply->done)
        reply->done(reply->produce_arg);
    reply->produce = NULL;
}

/* from here on the stream calls done(), not the reply */
static struct MHD_Response *stream_response(struct kh_exchange *ex)
{
    uint64_t limit_ms = ex->http->opts.stream_limit_ms;
    struct MHD_Response *response;
    struct kh_stream *stream;

    limit_ms = limit_ms ? limit_ms : STREAM_LIMIT_MS;
    if (make_stream(ex, &stream) < 0) {
        kh_http_drop_producer(&ex->reply);
        atomic_fetch_add_explicit(&ex->http->overloaded, 1, memory_order_relaxed);
        kh_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                       "too many streamed replies at a time, try again later");
        kh_reply_header(&ex->reply, "Retry-After", "5");
        return NULL;
    }
    ex->reply.produce = NULL;
    response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, stream_read,
                                                 stream, stream_free);
    if (!response)
        stream_free(stream);
    else
        kh_conn_start(ex->conn, KH_PATIENCE_MS, ex->reply.endless ? 0 : limit_ms);
    return response;
}

void kh_http_cancel_streams(struct kh_http *http)
{
    for (int i = 0; i < 400; i++) {
        size_t left;

        pthread_mutex_lock(&http->lock);
        http->no_more_streams = true;
        for (struct kh_stream *s = http->streams; s; s = s->next)
            kh_pipe_cancel(s->pipe);
        left = http->n_streams;
        pthread_mutex_unlock(&http->lock);
        if (left == 0)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 5 * KV_NS_PER_MS}, NULL);
    }
}

/* -- sending ----------------------------------------------------------------------------------- */

/* Refuse a large reply: memory for replies that clients don't take is limited, too. */
static void refuse_large(struct kh_exchange *ex)
{
    struct kv_buf *body = &ex->reply.body;

    if (body->capacity <= KH_FREE_BYTES || kh_http_charge(ex, body->capacity - KH_FREE_BYTES))
        return;
    kv_buf_fini(body);
    kh_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                   "too many large replies to this client at a time, try again later");
    kh_reply_header(&ex->reply, "Retry-After", "1");
}

static struct MHD_Response *buffer_response(struct kh_exchange *ex)
{
    struct kv_buf *body = &ex->reply.body;

    refuse_large(ex);

    if (body->error) { /* out of memory while writing the body */
        static char text[] = "{\"error\":\"out of memory\"}";

        kv_buf_fini(body);
        ex->reply.status = MHD_HTTP_SERVICE_UNAVAILABLE;
        ex->reply.content_type = "application/json";
        return MHD_create_response_from_buffer(sizeof(text) - 1, text, MHD_RESPMEM_PERSISTENT);
    }
    kh_conn_start(ex->conn, KH_PATIENCE_MS + body->len / KH_SLOWEST_BYTES_PER_MS, 0);
    return MHD_create_response_from_buffer(body->len, body->len ? body->data : "",
                                           MHD_RESPMEM_PERSISTENT);
}

/*
 * To a HEAD with a streamed reply the library would send the chunk that ends a body, and the client
 * would take it for the next reply. Such a reply goes out unchunked, and the connection closes.
 */
enum MHD_Result kh_http_send(struct kh_exchange *ex)
{
    struct kh_reply *reply = &ex->reply;
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
