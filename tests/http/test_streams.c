// SPDX-License-Identifier: Apache-2.0
/* Streamed replies: how long they may take, and that a drain doesn't wait for them. */
#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "http/http_impl.h"
#include "support.h"

static int drip(void *arg, struct kh_pipe *pipe)
{
    int rc = 0;

    (void)arg;
    while (rc == 0) {
        rc = kh_pipe_write(pipe, "x\n", 2);
        if (rc == 0)
            rc = kh_pipe_wait(pipe, kv_now_ns() + 5 * KV_NS_PER_MS);
    }
    return rc;
}

static void bounded(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg, (void)request;
    reply->produce = drip;
}

static void endless(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    bounded(arg, request, reply);
    reply->endless = true;
}

static struct kh_http *start(uint16_t *ret_port)
{
    static const struct kh_route routes[] = {
        {.method = "GET", .path = "/bounded", .handle = bounded},
        {.method = "GET", .path = "/endless", .handle = endless}};
    const struct kh_http_opts opts = {.threads = 2,
                                      .max_connections = 64,
                                      .idle_timeout_ms = 10000,
                                      .bodies_bytes = 1 << 20,
                                      .max_streams = 4,
                                      .stream_limit_ms = 100,
                                      .routes = routes,
                                      .n_routes = KV_COUNT(routes)};
    struct kv_error error = {0};
    struct kh_http *http = NULL;
    int fd;

    assert_int_equal(kh_http_bind("127.0.0.1", 0, &fd, ret_port, &error), 0);
    assert_int_equal(kh_http_start(fd, &opts, &http, &error), 0);
    return http;
}

/* Ask for @path, and return the connection once the reply has begun. */
static int ask(uint16_t port, const char *path)
{
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), len;
    char text[200];

    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof(to)), 0);
    len = snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", path);
    assert_int_equal(send(fd, text, (size_t)len, MSG_NOSIGNAL), len);
    assert_true(recv(fd, text, sizeof(text), 0) > 12);
    assert_memory_equal(text, "HTTP/1.1 200", 12);
    return fd;
}

static void test_limit(void **state)
{
    uint16_t port;
    struct kh_http *http = start(&port);
    int lasts = ask(port, "/endless"), fd;
    char text[4096];

    (void)state;
    for (int i = 0; i < 2;
         i++) { /* the second one begins when the endless one is beyond the limit */
        fd = ask(port, "/bounded");
        while (recv(fd, text, sizeof(text), 0) > 0)
            ;
        close(fd);
    }
    while (recv(lasts, text, sizeof(text), MSG_DONTWAIT) > 0)
        ;
    assert_true(recv(lasts, text, sizeof(text), 0) > 0);
    kh_http_drain(http, UINT32_MAX); /* returns: it waits for no stream */
    assert_true(recv(lasts, text, sizeof(text), 0) > 0);
    kh_http_stop(http, 10);
    close(lasts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_limit)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
