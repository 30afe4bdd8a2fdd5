// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "http/http_impl.h"

/*
 * The life of a request:
 *
 *   begin      its header is complete: framing, authorization, route. Refused: the reply goes out
 *              at once and the connection closes, unless the body is so short that it is read and
 *              dropped
 *   collect    the body, under the limits
 *   finish     the handler fills the reply, which is sent from its buffer or streamed through a
 *              pipe
 *   completed  the exchange goes back to the free list with its buffers
 */

#define HTTP_CONTENT_TOO_LARGE 413 /* its name differs between versions of the library */
#define DISCARD_MAX (64u << 10) /* a refused request's body is read and dropped up to this size */
/* Larger buffers are freed after use, so the next client doesn't pay for them. */
#define KEEP_BUFFER KH_FREE_BYTES
#define KEEP_EXCHANGES 64
#define FIRST_BODY KH_FREE_BYTES
/* Lag in milliseconds from which a body is cut off for others of its client. */
#define SLOW_MS 1000

static bool find_value(const struct kh_request *request, enum MHD_ValueKind kind, const char *name,
                       struct kv_str *ret)
{
    struct kh_exchange *ex = request->native;
    const char *value;
    size_t len;

    if (MHD_lookup_connection_value_n(ex->connection, kind, name, strlen(name), &value, &len) !=
        MHD_YES)
        return false;
    ret->p = value ? value : "";
    ret->len = value ? len : 0;
    return true;
}

bool kh_request_param(const struct kh_request *request, const char *name, struct kv_str *ret)
{
    return find_value(request, MHD_GET_ARGUMENT_KIND, name, ret);
}

bool kh_request_header(const struct kh_request *request, const char *name, struct kv_str *ret)
{
    return find_value(request, MHD_HEADER_KIND, name, ret);
}

/* -- exchanges, reused ------------------------------------------------------------------------- */

static struct kh_exchange *take_exchange(struct kh_http *http)
{
    struct kh_exchange *ex;
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

static void free_exchange(struct kh_exchange *ex)
{
    kv_buf_fini(&ex->body);
    kv_buf_fini(&ex->reply.body);
    free(ex);
}

static void give_back(struct kh_exchange *ex)
{
    struct kh_http *http = ex->http;
    bool keep;

    kh_http_drop_producer(&ex->reply);
    free(ex->authority);
    kh_budget_give(http->budget, ex->client, ex->charged);
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

/* -- the start of a request -------------------------------------------------------------------- */

struct kh_conn *kh_http_conn_of(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return info ? info->socket_context : NULL;
}

static enum MHD_Result take_header(void *cls, enum MHD_ValueKind kind, const char *key,
                                   size_t key_len, const char *value, size_t value_len)
{
    (void)kind;
    kh_framing_header(cls, key, key_len, value ? value : "", value ? value_len : 0);
    return MHD_YES;
}

/*
 * Note whether the library changed the header's layout. Before 1.0 it takes a bare LF for a line's
 * end and cuts a value at a NUL, in any mode; the places of its strings show both. From 1.0 on it
 * refuses both itself, and moves the strings.
 */
static void watch_layout(struct kh_exchange *ex, const char *version)
{
    const union MHD_ConnectionInfo *info;

    if (strncmp(MHD_get_version(), "0.", 2) != 0)
        return;
    info = MHD_get_connection_info(ex->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (info)
        kh_framing_expect_whole(&ex->framing, ex->request.method, info->header_size, version);
}

/* Add a method to those that the path has. */
static void allow(struct kh_exchange *ex, const char *method)
{
    char *allowed = ex->allowed;
    size_t len = strlen(allowed);

    if (!strstr(allowed, method))
        snprintf(allowed + len, sizeof(ex->allowed) - len, "%s%s", len ? ", " : "", method);
}

static void refuse_method(struct kh_exchange *ex)
{
    kh_reply_error(&ex->reply, MHD_HTTP_METHOD_NOT_ALLOWED, "method not allowed, use %s",
                   ex->allowed);
    if (strstr(ex->allowed, "GET"))
        allow(ex, "HEAD");
    kh_reply_header(&ex->reply, "Allow", ex->allowed);
}

/* Return true when @path is a route's, and the text in place of its {id}. */
static bool is_path(const char *route, const char *path, struct kv_str *id)
{
    size_t len, behind;

    *id = (struct kv_str){"", 0};
    for (; *route && *route != '{' && *route == *path; route++)
        path++;
    if (*route != '{')
        return *route == *path;
    route += strlen("{id}");
    len = strlen(path);
    behind = strlen(route);
    if (len <= behind || strcmp(path + len - behind, route) != 0)
        return false;
    *id = (struct kv_str){path, len - behind};
    return true;
}

/* Return true when the Accept header names text/html, as that of browsers does for pages. */
static bool accepts_html(const struct kh_request *request)
{
    static const char html[] = "text/html";
    const size_t len = sizeof(html) - 1;
    struct kv_str accept;

    if (!kh_request_header(request, "Accept", &accept))
        return false;
    for (size_t i = 0; i + len <= accept.len; i++) {
        char before = i ? accept.p[i - 1] : ',';
        char behind = i + len < accept.len ? accept.p[i + len] : ',';

        if (strncasecmp(accept.p + i, html, len) == 0 && strchr(", \t", before) &&
            strchr(",; \t", behind))
            return true;
    }
    return false;
}

/* Set request.route, or fill the reply. */
static bool find_route(struct kh_exchange *ex)
{
    const struct kh_http_opts *opts = &ex->http->opts;
    const char *method = strcmp(ex->request.method, "HEAD") == 0 ? "GET" : ex->request.method;

    for (size_t i = 0; i < opts->n_routes; i++) {
        const struct kh_route *route = &opts->routes[i];

        if (!is_path(route->path, ex->request.path, &ex->request.id) ||
            (route->flags & KH_ROUTE_HTML && !accepts_html(&ex->request)))
            continue;
        ex->request.route = route;
        if (strcmp(route->method, method) == 0)
            return true;
        allow(ex, route->method);
    }
    if (ex->request.route) {
        refuse_method(ex);
        return false;
    }
    kh_reply_error(&ex->reply, MHD_HTTP_NOT_FOUND, "no such path; GET / lists the endpoints");
    return false;
}

static bool may_go_on(struct kh_exchange *ex, const char *version)
{
    const struct kh_http_opts *opts = &ex->http->opts;
    const char *problem =
        ex->conn->cut ? "NUL in the target" : kh_framing_problem(&ex->framing, version);
    bool found = find_route(ex);

    if (problem) {
        atomic_fetch_add_explicit(&ex->http->bad_framing, 1, memory_order_relaxed);
        kh_reply_error(&ex->reply, MHD_HTTP_BAD_REQUEST, "bad request: %s", problem);
        ex->reply.close = true;
        return false;
    }
    if (opts->admit && !opts->admit(opts->arg, &ex->request, &ex->reply))
        return false;
    if (!found)
        return false;
    if (ex->framing.content_length > KV_MAX(ex->request.route->max_body, (size_t)DISCARD_MAX) ||
        (ex->request.route->max_body && ex->framing.content_length > ex->request.route->max_body)) {
        kh_reply_error(&ex->reply, HTTP_CONTENT_TOO_LARGE,
                       "body of %" PRIu64 " bytes is over the limit of %zu",
                       ex->framing.content_length, ex->request.route->max_body);
        ex->reply.close = true;
        return false;
    }
    return true;
}

/*
 * Take a target in absolute form apart, which every server must accept (RFC 9112, 3.2.2): its host
 * counts in place of the header's. Out of memory it stays, a path that isn't known.
 */
static void split_target(struct kh_exchange *ex)
{
    const char *target = ex->request.path, *authority, *path;

    if (strncasecmp(target, "http://", 7) != 0 && strncasecmp(target, "https://", 8) != 0)
        return;
    authority = strchr(target, ':') + 3;
    path = authority + strcspn(authority, "/");
    ex->authority = strndup(authority, (size_t)(path - authority));
    if (!ex->authority)
        return;
    ex->request.host = ex->authority;
    ex->request.path = *path ? path : "/";
}

/* Handle a complete header. */
static enum MHD_Result begin(struct kh_http *http, struct MHD_Connection *connection,
                             const char *url, const char *method, const char *version, void **state)
{
    struct kh_conn *conn = kh_http_conn_of(connection);
    struct kh_exchange *ex = conn ? take_exchange(http) : NULL;

    if (conn)
        kh_http_head_ended(conn);
    if (!ex)
        return MHD_NO;
    *state = ex;
    atomic_fetch_add_explicit(&http->in_flight, 1, memory_order_relaxed);
    ex->http = http;
    ex->connection = connection;
    ex->conn = conn;
    ex->client = conn->client;
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
    ex->request.host = ex->framing.host;
    ex->request.origin = ex->framing.origin;
    split_target(ex);
    if (may_go_on(ex, version)) {
        /*
         * The library accepts a bare LF between chunks, too, without a trace. Close the connection
         * afterwards.
         */
        ex->reply.close = kh_framing_chunked(&ex->framing);
        kh_conn_start(conn, KH_BODY_PATIENCE_MS, 0);
        return MHD_YES;
    }
    ex->refused = true;
    kh_conn_limit(conn, KH_PATIENCE_MS);
    if (!ex->reply.close && !ex->framing.expects && !kh_framing_chunked(&ex->framing) &&
        ex->framing.content_length <= DISCARD_MAX)
        return MHD_YES;
    ex->reply.close = true;
    conn->linger = true;
    return kh_http_send(ex);
}

/* -- the body ---------------------------------------------------------------------------------- */

bool kh_http_charge(struct kh_exchange *ex, size_t n)
{
    struct kh_http *http = ex->http;

    if (kh_budget_take(http->budget, ex->client, n)) {
        ex->charged += n;
        return true;
    }
    atomic_fetch_add_explicit(&http->overloaded, 1, memory_order_relaxed);
    /* Cut off the client's own slow bodies, so that a second try finds room. */
    (void)kh_conns_drop_slowest(http->conns, ex->client, SLOW_MS);
    return false;
}

/* Compute the part of @bytes that must be taken from the budget. */
static size_t beyond_free(size_t bytes)
{
    return bytes > KH_FREE_BYTES ? bytes - KH_FREE_BYTES : 0;
}

static int grow(struct kh_exchange *ex, size_t more)
{
    struct kv_buf *body = &ex->body;
    size_t need = body->len + more, want = KV_MAX(need, KV_MAX(2 * body->capacity, FIRST_BODY));
    size_t total;

    if (need <= body->capacity)
        want = body->capacity;
    else if (!kh_framing_chunked(&ex->framing) && ex->framing.content_length < want)
        want = ex->framing.content_length;
    total = beyond_free(want);
    if (total > ex->charged) {
        if (!kh_http_charge(ex, total - ex->charged))
            return -ENOBUFS;
        atomic_store_explicit(&ex->conn->holds, true, memory_order_relaxed);
    }
    return kv_buf_reserve(body, want - body->len);
}

static enum MHD_Result collect(struct kh_exchange *ex, const char *data, size_t *len)
{
    size_t n = *len, limit = ex->request.route ? ex->request.route->max_body : 0;

    *len = 0;
    ex->received += n;
    kh_conn_moved(ex->conn, n);
    if (ex->refused || limit == 0) {
        if (ex->received > KV_MAX(4 * limit, (size_t)DISCARD_MAX))
            return MHD_NO; /* the body has no end: hang up */
    } else if (ex->received > limit) {
        kh_reply_error(&ex->reply, HTTP_CONTENT_TOO_LARGE, "body is over the limit of %zu bytes",
                       limit);
        ex->refused = ex->reply.close = true;
    } else if (grow(ex, n) < 0) {
        kh_reply_error(&ex->reply, MHD_HTTP_SERVICE_UNAVAILABLE,
                       "too many large requests of this client at a time, try again later");
        kh_reply_header(&ex->reply, "Retry-After", "1");
        ex->refused = ex->reply.close = true;
    } else {
        kv_buf_append(&ex->body, data, n);
    }
    if (ex->refused && ex->charged) {
        atomic_store_explicit(&ex->conn->holds, false, memory_order_relaxed);
        kh_budget_give(ex->http->budget, ex->client, ex->charged);
        ex->charged = 0;
        kv_buf_fini(&ex->body);
    }
    return MHD_YES;
}

static enum MHD_Result finish(struct kh_exchange *ex)
{
    atomic_store_explicit(&ex->conn->holds, false, memory_order_relaxed);
    if (!ex->refused && !ex->deferred) {
        kh_conn_busy(ex->conn);
        ex->request.body = (struct kv_str){ex->body.len ? ex->body.data : "", ex->body.len};
        ex->request.route->handle(ex->http->opts.arg, &ex->request, &ex->reply);
        if (ex->reply.rerun) {
            ex->deferred = true;
            kh_slow_defer(ex->http->slow, ex);
            return MHD_YES; /* the library calls this again when the connection is resumed */
        }
    }
    return kh_http_send(ex);
}

/* -- the library's callbacks ------------------------------------------------------------------- */

enum MHD_Result kh_http_on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                   const char *method, const char *version, const char *data,
                                   size_t *len, void **state)
{
    if (!*state)
        return begin(cls, connection, url, method, version, state);
    if (*len)
        return collect(*state, data, len);
    return finish(*state);
}

void kh_http_on_completed(void *cls, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode code)
{
    struct kh_exchange *ex = *state;

    (void)cls;
    (void)connection;
    (void)code;
    if (!ex)
        return;
    *state = NULL;
    atomic_store_explicit(&ex->conn->holds, false, memory_order_relaxed);
    kh_conn_idle(ex->http->conns, ex->conn);
    give_back(ex);
}

void kh_http_free_exchanges(struct kh_http *http)
{
    while (http->free) {
        struct kh_exchange *ex = http->free;

        http->free = ex->next;
        free_exchange(ex);
    }
}
