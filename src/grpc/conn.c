// SPDX-License-Identifier: Apache-2.0
/* A connection: nghttp2's session over a socket. */
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "grpc/impl.h"

/*
 * Calls that a client may cancel at once, and a second. A proxy cancels one for each of its clients that hangs
 * up; nghttp2's own limit, 33 a second after 1000, ends the connection with all its calls.
 */
#define RESETS 100000

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    struct kg_call *call;

    if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
        return 0;
    call = kg_call_create(arg, frame->hd.stream_id);
    if (!call) {
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                  NGHTTP2_REFUSED_STREAM);
        return 0;
    }
    return nghttp2_session_set_stream_user_data(session, frame->hd.stream_id, call) == 0
               ? 0
               : NGHTTP2_ERR_CALLBACK_FAILURE;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_len, const uint8_t *value, size_t len, uint8_t flags, void *arg)
{
    struct kg_call *call = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);

    (void)flags, (void)arg;
    if (!call || frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
        return 0;
    kg_call_header(call, (struct kv_str){(const char *)name, name_len},
                   (struct kv_str){(const char *)value, len});
    return call->header_bytes > KG_MAX_HEADERS ? NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE : 0;
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    struct kg_conn *conn = arg;
    struct kg_call *call;

    if (frame->hd.type == NGHTTP2_SETTINGS)
        conn->begun = true;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA)
        return 0;
    call = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (!call)
        return 0;
    if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST)
        kg_call_start(call);
    if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM)
        kg_call_closed_half(call);
    return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data,
                   size_t len, void *arg)
{
    struct kg_call *call = nghttp2_session_get_stream_user_data(session, stream);

    (void)flags, (void)arg;
    /* A call's unread bytes never hold up the connection's other calls. */
    if (nghttp2_session_consume_connection(session, len) != 0)
        return NGHTTP2_ERR_CALLBACK_FAILURE;
    if (call)
        kg_call_data(call, data, len);
    return 0;
}

/* The answer is complete: a client that still sends is stopped. */
static int on_sent(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    (void)arg;
    if (frame->hd.type == NGHTTP2_HEADERS && (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) &&
        nghttp2_session_get_stream_remote_close(session, frame->hd.stream_id) == 0)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                  NGHTTP2_NO_ERROR);
    return 0;
}

static int on_close(nghttp2_session *session, int32_t stream, uint32_t code, void *arg)
{
    struct kg_call *call = nghttp2_session_get_stream_user_data(session, stream);

    (void)code, (void)arg;
    if (call) {
        nghttp2_session_set_stream_user_data(session, stream, NULL);
        kg_call_destroy(call);
    }
    return 0;
}

int kg_conn_callbacks(struct kg_server *server)
{
    if (nghttp2_session_callbacks_new(&server->callbacks) != 0 ||
        nghttp2_option_new(&server->option) != 0)
        return -ENOMEM;
    nghttp2_session_callbacks *c = server->callbacks;

    nghttp2_session_callbacks_set_on_begin_headers_callback(c, on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(c, on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(c, on_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(c, on_data);
    nghttp2_session_callbacks_set_on_frame_send_callback(c, on_sent);
    nghttp2_session_callbacks_set_on_stream_close_callback(c, on_close);
    nghttp2_option_set_no_auto_window_update(server->option, 1);
#ifdef KV_NGHTTP2_RESETS
    nghttp2_option_set_stream_reset_rate_limit(server->option, RESETS, RESETS);
#endif
    return 0;
}

int kg_conn_create(struct kg_loop *loop, int fd, uint64_t now_ns, struct kg_conn **ret)
{
    struct kg_server *server = loop->server;
    struct kg_conn *conn = calloc(1, sizeof(*conn));
    nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, server->opts.max_calls},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, KG_STREAM_WINDOW},
        {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, KG_MAX_HEADERS},
        {NGHTTP2_SETTINGS_ENABLE_PUSH, 0}};

    atomic_fetch_add_explicit(&server->connections, 1, memory_order_relaxed);
    if (!conn) {
        atomic_fetch_sub_explicit(&server->connections, 1, memory_order_relaxed);
        if (fd >= 0)
            close(fd);
        return -ENOMEM;
    }
    conn->loop = loop;
    conn->fd = fd;
    conn->opened_ns = conn->progress_ns = now_ns;
    conn->next = loop->conns;
    if (conn->next)
        conn->next->prev = conn;
    loop->conns = conn;
    if (nghttp2_session_server_new2(&conn->session, server->callbacks, conn, server->option) != 0 ||
        nghttp2_submit_settings(conn->session, NGHTTP2_FLAG_NONE, settings, KV_COUNT(settings)) !=
            0 ||
        nghttp2_session_set_local_window_size(conn->session, NGHTTP2_FLAG_NONE, 0,
                                              KG_CONNECTION_WINDOW) != 0) {
        kg_conn_destroy(conn);
        return -ENOMEM;
    }
    kg_loop_mark(conn);
    *ret = conn;
    return 0;
}

/* nghttp2 tells nothing of the streams of a session that it frees. */
static void end_calls(struct kg_conn *conn)
{
    for (size_t i = 0; i < KG_BUCKETS && conn->loop->n_calls > 0; i++) {
        struct kg_call *call = conn->loop->table[i];

        while (call) {
            struct kg_call *next = call->next;

            if (call->conn == conn)
                kg_call_destroy(call);
            call = next;
        }
    }
}

void kg_conn_destroy(struct kg_conn *conn)
{
    struct kg_loop *loop = conn->loop;

    end_calls(conn);
    if (conn->dirty) {
        struct kg_conn **at = &loop->dirty;

        while (*at != conn)
            at = &(*at)->next_dirty;
        *at = conn->next_dirty;
    }
    if (conn->next)
        conn->next->prev = conn->prev;
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        loop->conns = conn->next;
    nghttp2_session_del(conn->session);
    if (conn->fd >= 0)
        close(conn->fd);
    kv_buf_fini(&conn->out);
    atomic_fetch_sub_explicit(&loop->server->connections, 1, memory_order_relaxed);
    free(conn);
}

void kg_conn_feed(struct kg_conn *conn, const void *data, size_t len)
{
    if (nghttp2_session_mem_recv(conn->session, data, len) < 0)
        conn->broken = true;
    kg_loop_mark(conn);
}

void kg_conn_read(struct kg_conn *conn)
{
    for (int i = 0; i < 4 && !conn->broken; i++) { /* then the other connections */
        ssize_t n = recv(conn->fd, conn->loop->read, KG_READ, MSG_DONTWAIT);

        if (n > 0)
            kg_conn_feed(conn, conn->loop->read, (size_t)n);
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            conn->broken = true;
        if (n < (ssize_t)KG_READ)
            return;
    }
}

void kg_conn_fill(struct kg_conn *conn)
{
    if (conn->out_at == conn->out.len) {
        conn->out_at = 0;
        if (conn->out.capacity > 8 * KG_HIGH_WATER)
            kv_buf_fini(&conn->out);
        else
            kv_buf_clear(&conn->out);
    }
    while (conn->out.len - conn->out_at < KG_HIGH_WATER && !conn->broken) {
        const uint8_t *data;
        ssize_t n = nghttp2_session_mem_send(conn->session, &data);

        if (n == 0)
            break;
        if (n > 0)
            kv_buf_append(&conn->out, data, (size_t)n);
        conn->broken |= n < 0 || conn->out.error;
    }
}

static void poll_out(struct kg_conn *conn, bool wanted)
{
    struct epoll_event event = {.events = EPOLLIN | (wanted ? (uint32_t)EPOLLOUT : 0),
                                .data = {.ptr = conn}};

    if (conn->polls_out == wanted)
        return;
    conn->polls_out = wanted;
    if (epoll_ctl(conn->loop->epoll, EPOLL_CTL_MOD, conn->fd, &event) < 0)
        conn->broken = true;
}

void kg_conn_flush(struct kg_conn *conn, uint64_t now_ns)
{
    while (!conn->broken) {
        kg_conn_fill(conn);
        if (conn->out_at == conn->out.len) {
            conn->progress_ns = now_ns;
            conn->broken |= !nghttp2_session_want_read(conn->session) &&
                            !nghttp2_session_want_write(conn->session);
            poll_out(conn, false);
            return;
        }
        ssize_t n = send(conn->fd, conn->out.data + conn->out_at, conn->out.len - conn->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n > 0) {
            conn->out_at += (size_t)n;
            conn->progress_ns = now_ns;
        } else if (errno == EAGAIN) {
            poll_out(conn, true);
            return;
        } else if (errno != EINTR) {
            conn->broken = true;
        }
    }
}
