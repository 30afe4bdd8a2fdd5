// SPDX-License-Identifier: Apache-2.0
/* Stopping the HTTP server: running requests are answered, new ones are refused, and no moment of
 * the stop crashes the process. */
#include <arpa/inet.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "http/http_impl.h"
#include "support.h"

static const char get[] = "GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n";
static const char get_later[] = "GET /later HTTP/1.1\r\nHost: localhost\r\n\r\n";

struct server {
    struct kh_http *http;
    uint16_t port;
    uint32_t slow_ms;
    _Atomic bool held;             /* the handler waits for its end */
    _Atomic uint32_t begun, freed; /* freed: the first so many don't wait any more */
};

static void sleep_ms(uint32_t ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static void slow(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct server *server = arg;
    uint32_t number = atomic_fetch_add(&server->begun, 1);

    (void)request;
    (void)reply;
    sleep_ms(server->slow_ms);
    while (atomic_load(&server->held) && number >= atomic_load(&server->freed))
        sleep_ms(1);
}

/* A handler that needs a slow thread. */
static void later(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg;
    reply->rerun = !request->may_wait;
}

static void start(struct server *server, uint32_t threads)
{
    static const struct kh_route routes[] = {{.method = "GET", .path = "/slow", .handle = slow},
                                             {.method = "GET", .path = "/later", .handle = later}};
    const struct kh_http_opts opts = {.threads = threads,
                                      .max_connections = 64,
                                      .idle_timeout_ms = 10000,
                                      .bodies_bytes = 1 << 20,
                                      .max_streams = 1,
                                      .routes = routes,
                                      .n_routes = KV_COUNT(routes),
                                      .arg = server};
    struct kv_error error = {0};
    int fd;

    atomic_store(&server->begun, 0);
    assert_int_equal(kh_http_bind("127.0.0.1", 0, &fd, &server->port, &error), 0);
    assert_int_equal(kh_http_start(fd, &opts, &server->http, &error), 0);
}

/* A connection to @port that gives up after a minute, or -1. */
static int connect_to(uint16_t port)
{
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct timeval limit = {.tv_sec = 60};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Read @fd to its end. */
static size_t read_all(int fd, char *to, size_t cap)
{
    size_t n = 0;

    for (ssize_t got; n + 1 < cap && (got = recv(fd, to + n, cap - n - 1, 0)) > 0;)
        n += (size_t)got;
    to[n] = '\0';
    return n;
}

static size_t ask(uint16_t port, char *to, size_t cap)
{
    int fd = connect_to(port);
    size_t n = 0;

    to[0] = '\0';
    if (fd < 0)
        return 0;
    if (send(fd, get, sizeof(get) - 1, MSG_NOSIGNAL) > 0)
        n = read_all(fd, to, cap);
    close(fd);
    return n;
}

struct client {
    uint16_t port;
    char reply[1024];
    _Atomic bool enough;
};

static void *ask_once(void *arg)
{
    struct client *client = arg;

    ask(client->port, client->reply, sizeof(client->reply));
    return NULL;
}

static void test_finishes_what_it_has_begun(void **state)
{
    struct server server = {.slow_ms = 300};
    struct client client = {0};
    pthread_t thread;

    (void)state;
    start(&server, 2);
    client.port = server.port;
    assert_int_equal(pthread_create(&thread, NULL, ask_once, &client), 0);
    while (!atomic_load(&server.begun))
        sleep_ms(1);
    kh_http_stop(server.http, 60000);
    pthread_join(thread, NULL);
    assert_non_null(strstr(client.reply, "200 OK"));
    assert_non_null(strstr(client.reply, "Connection: close"));
}

static void *stop(void *arg)
{
    kh_http_stop(arg, 60000);
    return NULL;
}

static void test_serves_nobody_new(void **state)
{
    struct server server = {.held = true};
    struct client client = {0};
    pthread_t asks, stops;
    uint32_t begun;
    char reply[1024];

    (void)state;
    start(&server, 4);
    client.port = server.port;
    assert_int_equal(pthread_create(&asks, NULL, ask_once, &client), 0);
    while (!atomic_load(&server.begun))
        sleep_ms(1);
    assert_int_equal(pthread_create(&stops, NULL, stop, server.http), 0);
    while (!atomic_load(&server.http->stopping))
        sleep_ms(1);
    begun = atomic_load(&server.begun);
    assert_int_equal(ask(server.port, reply, sizeof(reply)), 0);
    assert_int_equal(atomic_load(&server.begun), begun);
    atomic_store(&server.held, false);
    pthread_join(stops, NULL);
    pthread_join(asks, NULL);
    assert_non_null(strstr(client.reply, "200 OK"));
    assert_int_equal(connect_to(server.port), -1);
}

static void say(int fd, const char *request)
{
    assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
}

static void *free_all(void *arg)
{
    struct server *server = arg;

    wait_until(atomic_load(&server->http->stopping));
    sleep_ms(300); /* the drain is over, and the connections are shut down */
    atomic_store(&server->held, false);
    return NULL;
}

/*
 * The only HTTP thread is busy beyond the drain. It has heard before of two requests that it reads
 * afterwards, one on each side of the one that keeps it. Both need a slow thread.
 */
static void test_needs_a_slow_thread_after_the_drain(void **state)
{
    struct server server = {.held = true};
    pthread_t frees;
    int fds[4];

    (void)state;
    start(&server, 1);
    for (size_t i = 0; i < KV_COUNT(fds); i++)
        fds[i] = connect_to(server.port);
    say(fds[3], get);
    wait_until(atomic_load(&server.begun) == 1);
    say(fds[0], get_later);
    say(fds[1], get);
    say(fds[2], get_later);
    atomic_store(&server.freed, 1);
    wait_until(atomic_load(&server.begun) == 2);
    assert_int_equal(pthread_create(&frees, NULL, free_all, &server), 0);
    kh_http_stop(server.http, 10);
    pthread_join(frees, NULL);
    for (size_t i = 0; i < KV_COUNT(fds); i++)
        close(fds[i]);
}

static void *connect_on_and_on(void *arg)
{
    struct client *client = arg;

    while (!atomic_load(&client->enough)) {
        int fd = connect_to(client->port);

        if (fd >= 0)
            close(fd);
    }
    return NULL;
}

/* libmicrohttpd's quiesce races with its epoll threads and ends the process; seen once, and too
 * rare to be seen here. */
static void test_under_a_storm_of_connections(void **state)
{
    uint64_t deadline = kv_now_ns() + 4000 * KV_NS_PER_MS;

    (void)state;
    for (int round = 0; round < 400 && kv_now_ns() < deadline; round++) {
        struct server server = {0};
        struct client client = {0};
        pthread_t threads[2];

        start(&server, 1 + (uint32_t)round % 4);
        client.port = server.port;
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, connect_on_and_on, &client), 0);
        sleep_ms((uint32_t)round % 7);
        kh_http_stop(server.http, 10);
        atomic_store(&client.enough, true);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finishes_what_it_has_begun),
        cmocka_unit_test(test_serves_nobody_new),
        cmocka_unit_test(test_needs_a_slow_thread_after_the_drain),
        cmocka_unit_test(test_under_a_storm_of_connections),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
