// SPDX-License-Identifier: Apache-2.0
/*
 * HTTP client of http_bench, indexer_bench and selector_bench. Closed loop: one thread, HTTP_CONNECTIONS keep-alive
 * connections, each with one request out.
 */
#ifndef KV_BENCH_HTTP_LOAD_H
#define KV_BENCH_HTTP_LOAD_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/json/json.h"

#define HTTP_CONNECTIONS 8
#define HTTP_REPLY_MAX (1u << 20)
#define BENCH_MODEL "bench-model"

/* End the program, with its children, when @ok is false. */
static inline void require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "%s: %s failed (%s)\n", program_invocation_short_name, what, strerror(errno));
    exit(1);
}

static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* -- requests ---------------------------------------------------------------------------------- */

struct request {
    struct kv_buf text; /* header and body */
};

static inline void request_make(struct request *request, const char *path, const char *type,
                                const struct kv_buf *body)
{
    kv_buf_clear(&request->text);
    kv_buf_printf(&request->text,
                  "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %s\r\n"
                  "Content-Length: %zu\r\n\r\n",
                  path, type, body->len);
    kv_buf_append(&request->text, body->data, body->len);
}

/* Write the body of a /query about @n token ids. */
static inline void write_query(struct kv_buf *body, const char *model, const uint32_t *tokens,
                               size_t n)
{
    struct kv_json_writer w;

    kv_buf_clear(body);
    kv_json_writer_init(&w, body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "model_name", model);
    kv_json_key(&w, "token_ids");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < n; i++)
        kv_json_put_u64(&w, tokens[i]);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
}

/* -- one request at a time --------------------------------------------------------------------- */

/* Connect. Returns a descriptor, or -1 when the port is closed. */
static inline int http_connect(uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(fd >= 0, "socket");
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return fd;
}

/* Return the length of the whole reply in @text (NUL-terminated), 0 while its header is
 * incomplete. */
static inline size_t http_reply_len(const char *text)
{
    const char *end = strstr(text, "\r\n\r\n"), *length = strcasestr(text, "Content-Length:");

    if (!end)
        return 0;
    require(length != NULL && length < end, "Content-Length in a reply");
    return (size_t)(end + 4 - text) + strtoul(length + 15, NULL, 10);
}

/* Send @request and wait for the whole reply. Returns the status; 0: no connection. */
static inline int http_ask(uint16_t port, const struct request *request, struct kv_buf *reply)
{
    int fd = http_connect(port);
    size_t sent = 0, expected = 0;

    kv_buf_clear(reply);
    if (fd < 0)
        return 0;
    while (sent < request->text.len) {
        ssize_t n = send(fd, request->text.data + sent, request->text.len - sent, MSG_NOSIGNAL);

        require(n > 0, "send");
        sent += (size_t)n;
    }
    while (expected == 0 || reply->len < expected) {
        ssize_t n;

        require(kv_buf_reserve(reply, 1 << 16) == 0, "memory");
        n = recv(fd, reply->data + reply->len, 1 << 16, 0);
        require(n > 0, "recv");
        reply->len += (size_t)n;
        if (!expected)
            expected = http_reply_len(kv_buf_cstr(reply));
    }
    close(fd);
    return atoi(kv_buf_cstr(reply) + strlen("HTTP/1.1 "));
}

/* -- many at a time ---------------------------------------------------------------------------- */

struct connection {
    int fd;
    const struct request *request;
    size_t sent;
    char *reply;
    size_t got, expected; /* expected 0: the header isn't complete */
    size_t first, n;      /* its requests: n of load.requests, in turns */
    size_t next;          /* number of the next one */
};

struct load {
    const struct request *requests;
    size_t n_requests;
    int epoll;
    struct connection connections[HTTP_CONNECTIONS];
    uint64_t done;
};

static inline void load_send(struct load *load, struct connection *c)
{
    struct epoll_event event = {.data.ptr = c, .events = EPOLLIN};
    bool waited = c->sent > 0;
    ssize_t n = send(c->fd, c->request->text.data + c->sent, c->request->text.len - c->sent,
                     MSG_DONTWAIT | MSG_NOSIGNAL);

    require(n > 0 || errno == EAGAIN, "send");
    if (n > 0)
        c->sent += (size_t)n;
    if (c->sent < c->request->text.len)
        event.events |= EPOLLOUT;
    if (waited || event.events & EPOLLOUT)
        epoll_ctl(load->epoll, EPOLL_CTL_MOD, c->fd, &event);
}

static inline void load_next(struct load *load, struct connection *c)
{
    c->request = &load->requests[(c->first + c->next++ % c->n) % load->n_requests];
    c->sent = c->got = c->expected = 0;
    load_send(load, c);
}

static inline void load_receive(struct load *load, struct connection *c)
{
    ssize_t n = recv(c->fd, c->reply + c->got, HTTP_REPLY_MAX - c->got - 1, MSG_DONTWAIT);

    if (n < 0 && errno == EAGAIN)
        return;
    require(n > 0, "recv");
    c->got += (size_t)n;
    if (!c->expected) {
        c->reply[c->got] = '\0';
        c->expected = http_reply_len(c->reply);
        require(!c->expected || strncmp(c->reply, "HTTP/1.1 200", 12) == 0, c->reply);
    }
    if (c->expected && c->got >= c->expected) {
        load->done++;
        load_next(load, c);
    }
}

static inline void load_open(struct load *load, uint16_t port, bool own)
{
    load->epoll = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = 0; i < HTTP_CONNECTIONS; i++) {
        struct connection *c = &load->connections[i];
        struct epoll_event event = {.data.ptr = c, .events = EPOLLIN};

        c->fd = http_connect(port);
        c->reply = malloc(HTTP_REPLY_MAX);
        c->first = i * load->n_requests / HTTP_CONNECTIONS;
        c->n = own ? load->n_requests / HTTP_CONNECTIONS : load->n_requests;
        c->next = 0;
        require(c->fd >= 0 && c->reply != NULL, "connect");
        epoll_ctl(load->epoll, EPOLL_CTL_ADD, c->fd, &event);
    }
}

static inline void load_close(struct load *load)
{
    for (size_t i = 0; i < HTTP_CONNECTIONS; i++) {
        close(load->connections[i].fd);
        free(load->connections[i].reply);
    }
    close(load->epoll);
}

/* Send @requests in turns, on fresh connections, for @ms or until @max of them are sent (0: no
 * limit). @own: each connection sends its share of them alone, in their order. Returns the number of
 * replies; *ret_seconds: the time taken. */
static inline uint64_t http_load_of(uint16_t port, const struct request *requests,
                                    size_t n_requests, bool own, uint64_t ms, uint64_t max,
                                    double *ret_seconds)
{
    struct load load = {.requests = requests, .n_requests = n_requests};
    struct epoll_event events[HTTP_CONNECTIONS];
    uint64_t started, now;

    load_open(&load, port, own);
    started = now = kv_now_ns();
    for (size_t i = 0; i < HTTP_CONNECTIONS; i++)
        load_next(&load, &load.connections[i]);
    while (now < started + ms * KV_NS_PER_MS && (max == 0 || load.done < max)) {
        int n = epoll_wait(load.epoll, events, HTTP_CONNECTIONS, 10000);

        require(n > 0, "the server answers");
        for (int i = 0; i < n; i++) {
            if (events[i].events & EPOLLOUT)
                load_send(&load, events[i].data.ptr);
            if (events[i].events & EPOLLIN)
                load_receive(&load, events[i].data.ptr);
        }
        now = kv_now_ns();
    }
    load_close(&load);
    require(load.done > 0, "a reply in a round");
    *ret_seconds = (double)(now - started) / 1e9;
    return load.done;
}

static inline uint64_t http_load(uint16_t port, const struct request *requests, size_t n_requests,
                                 uint64_t ms, uint64_t max, double *ret_seconds)
{
    return http_load_of(port, requests, n_requests, false, ms, max, ret_seconds);
}

#endif
