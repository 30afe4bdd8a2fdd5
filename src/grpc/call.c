// SPDX-License-Identifier: Apache-2.0
/* A call: its headers, the messages that come, the answer. */
#include <stdio.h>

#include "base/core/ascii.h"
#include "base/core/clock.h"
#include "grpc/impl.h"

uint64_t kg_timeout_parse(const char *text, size_t len)
{
    static const struct {
        char unit;
        uint64_t ns;
    } units[] = {{'H', 3600 * KV_NS_PER_S},
                 {'M', 60 * KV_NS_PER_S},
                 {'S', KV_NS_PER_S},
                 {'m', KV_NS_PER_MS},
                 {'u', 1000},
                 {'n', 1}};
    uint64_t n = 0;

    if (len < 2 || len > 9) /* at most 8 digits */
        return UINT64_MAX;
    for (size_t i = 0; i < len - 1; i++) {
        if (!kv_is_digit(text[i]))
            return UINT64_MAX;
        n = n * 10 + (uint64_t)(text[i] - '0');
    }
    for (size_t i = 0; i < KV_COUNT(units); i++) {
        if (units[i].unit == text[len - 1])
            return n > UINT64_MAX / 2 / units[i].ns ? UINT64_MAX : n * units[i].ns;
    }
    return UINT64_MAX;
}

struct kg_call *kg_call_create(struct kg_conn *conn, int32_t stream)
{
    struct kg_loop *loop = conn->loop;
    struct kg_server *server = loop->server;
    struct kg_call *call;

    if (atomic_fetch_add_explicit(&server->calls, 1, memory_order_relaxed) >=
        server->opts.max_calls)
        goto refuse;
    call = calloc(1, sizeof(*call));
    if (!call)
        goto refuse;
    call->conn = conn;
    call->stream = stream;
    call->number = loop->next_number++ * KG_MAX_LOOPS + loop->index;
    call->deadline_ns = UINT64_MAX;
    call->in.max = server->opts.max_message;
    struct kg_call **bucket = &loop->table[call->number / KG_MAX_LOOPS % KG_BUCKETS];

    call->next = *bucket;
    *bucket = call;
    loop->n_calls++;
    return call;
refuse:
    atomic_fetch_sub_explicit(&server->calls, 1, memory_order_relaxed);
    return NULL;
}

static void charge(struct kg_call *call, size_t bytes)
{
    struct kg_server *server = call->conn->loop->server;

    if (bytes > call->charged)
        atomic_fetch_add_explicit(&server->incomplete, bytes - call->charged, memory_order_relaxed);
    else
        atomic_fetch_sub_explicit(&server->incomplete, call->charged - bytes, memory_order_relaxed);
    call->charged = bytes;
}

/* Have the server's answers count @bytes of this call's. Returns false where its connection may not take
 * as much: fewer bytes would stay free than it had then. */
static bool take(struct kg_call *call, size_t bytes)
{
    struct kg_server *server = call->conn->loop->server;
    size_t want = bytes - KV_MIN(bytes, KG_FREE), n = want - KV_MIN(want, call->taken);
    uint64_t used = atomic_fetch_add_explicit(&server->answers, n, memory_order_relaxed) + n;

    if (n && used + call->conn->answers + n > server->opts.max_answers) {
        atomic_fetch_sub_explicit(&server->answers, n, memory_order_relaxed);
        return false;
    }
    if (n == 0)
        atomic_fetch_sub_explicit(&server->answers, call->taken - want, memory_order_relaxed);
    call->conn->answers += want - call->taken;
    call->taken = want;
    return true;
}

static void free_answer(struct kg_call *call)
{
    kv_buf_fini(&call->out);
    call->out_at = 0;
    (void)take(call, 0);
}

void kg_call_destroy(struct kg_call *call)
{
    struct kg_loop *loop = call->conn->loop;
    struct kg_call **at = &loop->table[call->number / KG_MAX_LOOPS % KG_BUCKETS];

    call->reply = KG_REPLY_FINISHED; /* end sends nothing */
    if (call->begun)
        call->method->end(call->method->arg, call);
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
    loop->n_calls--;
    charge(call, 0);
    atomic_fetch_sub_explicit(&loop->server->calls, 1, memory_order_relaxed);
    kv_buf_fini(&call->in.body);
    free_answer(call);
    free(call);
}

void kg_call_header(struct kg_call *call, struct kv_str name, struct kv_str value)
{
    static const char grpc[] = "application/grpc";
    const size_t n = sizeof(grpc) - 1;

    call->header_bytes += name.len + value.len + 32; /* as HTTP/2 counts them */
    if (kv_str_eq(name, ":method")) {
        call->post = kv_str_eq(value, "POST");
    } else if (kv_str_eq(name, ":path")) {
        if (value.len < sizeof(call->path)) /* longer ones are no method's */
            snprintf(call->path, sizeof(call->path), "%.*s", (int)value.len, value.p);
    } else if (kv_str_eq(name, "content-type")) {
        call->grpc = value.len >= n && memcmp(value.p, grpc, n) == 0 &&
                     (value.len == n || value.p[n] == '+' || value.p[n] == ';');
    } else if (kv_str_eq(name, "grpc-timeout")) {
        uint64_t ns = kg_timeout_parse(value.p, value.len), now = kv_now_ns();

        if (ns < UINT64_MAX - now)
            call->deadline_ns = now + ns;
    }
}

static const struct kg_method *find_method(const struct kg_opts *opts, const char *path)
{
    for (size_t i = 0; i < opts->n_methods; i++) {
        if (strcmp(opts->methods[i].path, path) == 0)
            return &opts->methods[i];
    }
    return NULL;
}

static nghttp2_nv header(const char *name, const char *value)
{
    return (nghttp2_nv){(uint8_t *)name, (uint8_t *)value, strlen(name), strlen(value),
                        NGHTTP2_NV_FLAG_NONE};
}

/* Answer a request that isn't gRPC, with an HTTP status alone. */
static void refuse_http(struct kg_call *call, const char *status)
{
    nghttp2_nv nv = header(":status", status);

    call->reply = KG_REPLY_FINISHED;
    if (nghttp2_submit_response(call->conn->session, call->stream, &nv, 1, NULL) != 0)
        call->conn->broken = true;
    kg_loop_mark(call->conn);
}

void kg_call_start(struct kg_call *call)
{
    struct kg_loop *loop = call->conn->loop;

    if (!call->post) {
        refuse_http(call, "405");
        return;
    }
    if (!call->grpc) {
        refuse_http(call, "415");
        return;
    }
    call->method = find_method(&loop->server->opts, call->path);
    if (!call->method) {
        kg_call_finish(call, KG_UNIMPLEMENTED, "unknown method");
        return;
    }
    loop->deadline_ns = KV_MIN(loop->deadline_ns, call->deadline_ns);
    call->begun = call->method->begin(call->method->arg, call);
    if (!call->begun)
        kg_call_finish(call, KG_EXHAUSTED, "out of memory");
}

static bool take_message(void *arg, const void *data, size_t len)
{
    struct kg_call *call = arg;

    call->method->message(call->method->arg, call, data, len);
    return call->reply != KG_REPLY_FINISHED;
}

/* Give the client room to send as many bytes more, now or once the answer is short. */
static void give_room(struct kg_call *call, size_t len)
{
    call->owed += len;
    if (call->out.len - call->out_at > KG_HIGH_WATER && call->reply != KG_REPLY_FINISHED)
        return;
    if (nghttp2_session_consume_stream(call->conn->session, call->stream, call->owed) != 0)
        call->conn->broken = true;
    call->owed = 0;
}

void kg_call_data(struct kg_call *call, const void *data, size_t len)
{
    struct kg_server *server = call->conn->loop->server;

    if (call->begun && call->reply != KG_REPLY_FINISHED) {
        int rc = kg_frames_feed(&call->in, data, len, take_message, call);

        charge(call, call->in.body.len);
        if (rc == 0 && call->charged &&
            atomic_load_explicit(&server->incomplete, memory_order_relaxed) >
                server->opts.max_incomplete)
            rc = -EMSGSIZE;
        if (rc == -EPROTO)
            kg_call_finish(call, KG_UNIMPLEMENTED, "compressed messages aren't taken");
        else if (rc < 0)
            kg_call_finish(call, KG_EXHAUSTED, "message too large");
    }
    give_room(call, len);
}

void kg_call_closed_half(struct kg_call *call)
{
    if (!call->begun || call->reply == KG_REPLY_FINISHED)
        return;
    if (kg_frames_whole(&call->in))
        call->method->half_close(call->method->arg, call);
    else
        kg_call_finish(call, KG_INVALID, "the last message is incomplete");
}

/* -- the answer --------------------------------------------------------------------------------- */

static void wake(struct kg_call *call)
{
    struct kg_conn *conn = call->conn;

    if (call->waits && nghttp2_session_resume_data(conn->session, call->stream) != 0)
        conn->broken = true;
    call->waits = false;
    kg_loop_mark(conn);
}

static void open_answer(struct kg_call *call)
{
    nghttp2_nv nv[] = {header(":status", "200"), header("content-type", "application/grpc")};
    nghttp2_data_provider from = {.source = {.ptr = call}, .read_callback = kg_call_read};

    call->reply = KG_REPLY_OPEN;
    if (nghttp2_submit_response(call->conn->session, call->stream, nv, KV_COUNT(nv), &from) != 0)
        call->conn->broken = true;
}

uint8_t *kg_call_send(struct kg_call *call, size_t len)
{
    uint8_t *room;

    if (call->reply == KG_REPLY_FINISHED)
        return NULL;
    if (call->out_at > 0 && call->out_at == call->out.len) {
        call->out.len = 0;
        call->out_at = 0;
    }
    if (!take(call, KV_MAX(call->out.capacity, call->out.len + KG_HEAD + len))) {
        kg_call_finish(call, KG_EXHAUSTED, "answers aren't read");
        return NULL;
    }
    if (len > UINT32_MAX || kv_buf_reserve(&call->out, KG_HEAD + len) < 0) {
        kg_call_finish(call, KG_EXHAUSTED, "out of memory");
        return NULL;
    }
    room = (uint8_t *)call->out.data + call->out.len;
    kg_frame_head(room, (uint32_t)len);
    call->out.len += KG_HEAD + len;
    if (call->reply == KG_REPLY_NONE)
        open_answer(call);
    wake(call);
    return room + KG_HEAD;
}

/* The status as headers: behind messages, or @alone (then with the headers of an answer). */
static size_t make_trailers(const struct kg_call *call, bool alone, nghttp2_nv nv[4],
                            char digits[4])
{
    size_t n = 0;

    if (alone) {
        nv[n++] = header(":status", "200");
        nv[n++] = header("content-type", "application/grpc");
    }
    snprintf(digits, 4, "%u", (unsigned)call->status % 100);
    nv[n++] = header("grpc-status", digits);
    if (call->text[0])
        nv[n++] = header("grpc-message", call->text);
    return n;
}

void kg_call_finish(struct kg_call *call, enum kg_status status, const char *text)
{
    bool alone = call->reply == KG_REPLY_NONE;
    nghttp2_nv nv[4];
    char digits[4];

    if (call->reply == KG_REPLY_FINISHED)
        return;
    call->reply = KG_REPLY_FINISHED;
    call->status = status;
    snprintf(call->text, sizeof(call->text), "%s", text ? text : "");
    if (alone) {
        size_t n = make_trailers(call, true, nv, digits);

        if (nghttp2_submit_response(call->conn->session, call->stream, nv, n, NULL) != 0)
            call->conn->broken = true;
    }
    wake(call);
    give_room(call, 0);
}

ssize_t kg_call_read(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t len,
                     uint32_t *flags, nghttp2_data_source *source, void *conn)
{
    struct kg_call *call = source->ptr;
    size_t n = KV_MIN(call->out.len - call->out_at, len);
    nghttp2_nv nv[4];
    char digits[4];

    (void)conn;
    if (n) {
        memcpy(buf, call->out.data + call->out_at, n);
        call->out_at += n;
        if (call->owed)
            give_room(call, 0);
    } else if (call->reply != KG_REPLY_FINISHED) {
        call->waits = true;
        if (call->out.capacity > KG_READ) /* calls that wait hold little memory */
            free_answer(call);
        return NGHTTP2_ERR_DEFERRED;
    }
    if (call->out_at == call->out.len && call->reply == KG_REPLY_FINISHED) {
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        if (nghttp2_submit_trailer(session, stream, nv, make_trailers(call, false, nv, digits)) !=
            0)
            return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
    return (ssize_t)n;
}

uint64_t kg_call_number(const struct kg_call *call)
{
    return call->number;
}

void kg_call_set_state(struct kg_call *call, void *state)
{
    call->state = state;
}

void *kg_call_state(const struct kg_call *call)
{
    return call->state;
}
