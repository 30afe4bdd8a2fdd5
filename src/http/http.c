// SPDX-License-Identifier: Apache-2.0
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/net/bind.h"
#include "http/http_impl.h"
#include "http/tls.h"

#define HANG_UP_MS 2000 /* for its threads to notice that their connections are closed */

/* -- connections ------------------------------------------------------------------------------- */

/* Copy the address, IPv4 as ::ffff:0:0/96; all 0 when it isn't known. */
static void peer_address(const struct sockaddr *address, uint8_t ret[16])
{
    memset(ret, 0, 16);
    if (address && address->sa_family == AF_INET) {
        ret[10] = ret[11] = 0xff;
        memcpy(ret + 12, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
    } else if (address && address->sa_family == AF_INET6) {
        memcpy(ret, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, 16);
    }
}

static bool is_loopback(const uint8_t address[16])
{
    static const uint8_t mapped[13] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127};
    static const uint8_t local[16] = {[15] = 1};

    return memcmp(address, mapped, sizeof(mapped)) == 0 || memcmp(address, local, 16) == 0;
}

/*
 * Accept a connection, or hang up once the server stops. (MHD_quiesce_daemon would give up the
 * socket. But its epoll threads may take the socket out of their sets at the same moment, and then
 * libmicrohttpd ends the process.)
 */
static enum MHD_Result on_accept(void *cls, const struct sockaddr *address, socklen_t len)
{
    struct kh_http *http = cls;

    (void)address;
    (void)len;
    return atomic_load_explicit(&http->stopping, memory_order_relaxed) ? MHD_NO : MHD_YES;
}

static struct kh_conn *add_connection(struct kh_http *http, struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info;
    struct kh_client *client;
    struct kh_conn *conn;
    uint8_t address[16];
    int fd;

    /* From 1.0 on, the library stores every answer in the same place. */
    info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    fd = info ? info->connect_fd : -1;
    info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    peer_address(info ? info->client_addr : NULL, address);
    client = kh_budget_join(http->budget, address);
    if (!client)
        return NULL;
    conn = kh_conns_add(http->conns, fd, is_loopback(address), client);
    if (!conn)
        kh_budget_leave(http->budget, client);
    return conn;
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct kh_http *http = cls;

    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        *context = add_connection(http, connection);
        if (http->opts.tls && *context)
            kh_http_watch_tls(connection, *context);
    } else if (*context) {
        struct kh_conn *conn = *context;
        struct kh_client *client = conn->client;

        kh_http_head_ended(conn);
        if (conn->linger)
            kh_linger_add(http->linger, conn->fd);
        kh_conns_remove(http->conns, conn);
        kh_budget_leave(http->budget, client);
        *context = NULL;
    }
}

static void on_log(void *cls, const char *fmt, va_list args) KV_PRINTF(2, 0);
static void on_log(void *cls, const char *fmt, va_list args)
{
    char text[256], quoted[300];

    kh_http_answer_refused(cls);
    vsnprintf(text, sizeof(text), fmt, args);
    text[strcspn(text, "\r\n")] = '\0';
    kv_log_debug("http", "libmicrohttpd", "text=%s", kv_log_quote(quoted, sizeof(quoted), text));
}

/* -- start and stop ---------------------------------------------------------------------------- */

static struct MHD_Daemon *start_daemon(struct kh_http *http, int fd)
{
    const struct kh_http_opts *opts = &http->opts;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ERROR_LOG | MHD_USE_ITC |
                     MHD_ALLOW_SUSPEND_RESUME | (opts->tls ? MHD_USE_TLS : 0);
    struct MHD_OptionItem items[8];
    size_t n = 0;

    if (opts->threads > 1)
        items[n++] = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, opts->threads, NULL};
    if (opts->tls)
        items[n++] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_CERT_CALLBACK, 0, kh_tls_callback()};
    items[n] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    return MHD_start_daemon(
        flags, 0, on_accept, http, kh_http_on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log,
        http, MHD_OPTION_URI_LOG_CALLBACK, kh_http_on_request_line, http, MHD_OPTION_LISTEN_SOCKET,
        fd, MHD_OPTION_CONNECTION_LIMIT, opts->max_connections, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)(opts->idle_timeout_ms / 1000), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_MEMORY, MHD_OPTION_NOTIFY_COMPLETED, kh_http_on_completed, NULL,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, http, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY, items, MHD_OPTION_END);
}

static void free_http(struct kh_http *http)
{
    kh_slow_destroy(http->slow);
    kh_http_free_exchanges(http);
    kh_conns_destroy(http->conns);
    kh_budget_destroy(http->budget);
    kh_linger_destroy(http->linger);
    pthread_mutex_destroy(&http->lock);
    free(http);
}

/* The library's own errors of sockets don't tell the reason. */
int kh_http_bind(const char *host, uint16_t port, int *ret_fd, uint16_t *ret_port,
                 struct kv_error *error)
{
    int rc = kv_bind(host, port, ret_fd, ret_port, error);

    if (rc == -EADDRINUSE)
        return kv_fail(error, rc, 0, "port %u is in use; choose another with --port", port);
    return rc;
}

int kh_http_start(int fd, const struct kh_http_opts *opts, struct kh_http **ret,
                  struct kv_error *error)
{
    struct kh_http *http = calloc(1, sizeof(*http));
    int rc;

    if (!http) {
        close(fd);
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    }
    http->opts = *opts;
    pthread_mutex_init(&http->lock, NULL);
    rc = kh_budget_create(opts->bodies_bytes, &http->budget);
    if (rc == 0)
        rc = kh_conns_create(opts->max_connections, opts->idle_timeout_ms, http->budget,
                             &http->conns);
    if (rc == 0)
        rc = kh_linger_create(&http->linger);
    if (rc == 0)
        rc = kh_slow_create(&http->slow);
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
        return kv_fail(error, rc, 0, "the HTTP server can't start (%s)", strerror(-rc));
    }
    *ret = http;
    return 0;
}

static uint64_t streams_of(struct kh_http *http)
{
    uint64_t n;

    pthread_mutex_lock(&http->lock);
    n = http->n_streams;
    pthread_mutex_unlock(&http->lock);
    return n;
}

/*
 * Hang up on new connections, and wait until no request is running, or with @but_streams none but streamed
 * replies: @limit_ms at most, from the first call on.
 */
static void wait_until_idle(struct kh_http *http, bool but_streams, uint64_t limit_ms)
{
    if (!atomic_exchange_explicit(&http->stopping, true, memory_order_relaxed))
        http->stopping_ns = kv_now_ns();
    while (atomic_load_explicit(&http->in_flight, memory_order_relaxed) >
               (but_streams ? streams_of(http) : 0) &&
           kv_now_ns() < http->stopping_ns + limit_ms * KV_NS_PER_MS)
        nanosleep(&(struct timespec){.tv_nsec = 5 * KV_NS_PER_MS}, NULL);
}

void kh_http_drain(struct kh_http *http, uint64_t drain_ms)
{
    if (http)
        wait_until_idle(http, true, drain_ms);
}

/*
 * Once libmicrohttpd 0.9.75 is told to stop, a request that it refuses by itself ends the process:
 * MHD_queue_response then says yes and queues nothing, and the header is built from no response. So
 * no request may be coming in at that moment: the connections are closed before.
 */
void kh_http_stop(struct kh_http *http, uint64_t drain_ms)
{
    if (!http)
        return;
    wait_until_idle(http, false, drain_ms);
    kh_http_cancel_streams(http);
    kh_slow_stop(http->slow);
    if (kh_conns_hang_up_all(http->conns, HANG_UP_MS))
        kv_log_warn("http", "connections are still open at the stop", NULL);
    MHD_stop_daemon(http->daemon); /* closes the listening socket, too */
    free_http(http);
}

void kh_http_get_stats(struct kh_http *http, struct kh_http_stats *ret)
{
    kh_conns_get_stats(http->conns, &ret->connections);
    ret->in_flight = atomic_load_explicit(&http->in_flight, memory_order_relaxed);
    ret->body_bytes = kh_budget_used(http->budget);
    ret->overloaded = atomic_load_explicit(&http->overloaded, memory_order_relaxed);
    ret->bad_framing = atomic_load_explicit(&http->bad_framing, memory_order_relaxed);
    pthread_mutex_lock(&http->lock);
    ret->streams = http->n_streams;
    pthread_mutex_unlock(&http->lock);
}
