// SPDX-License-Identifier: Apache-2.0
/** A peer made of a plain socket, that says what a test tells it: right, wrong, or half. */
#ifndef KV_TEST_RAW_PEER_H
#define KV_TEST_RAW_PEER_H

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "peer/session/wire.h"
#include "session_unit.h"
#include "support.h"

struct raw {
    int fd;
    struct kvbm_frame frame; /* the last one read */
    uint8_t body[KVBM_CHUNK_BYTES];
};

static inline struct sockaddr_un raw_address(const char *endpoint)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};

    snprintf(at.sun_path, sizeof(at.sun_path), "%s", endpoint + strlen("unix:"));
    return at;
}

static inline int raw_socket(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    return fd;
}

/** Connect to an agent's unix endpoint. */
static inline void raw_connect(struct raw *raw, const char *endpoint)
{
    struct sockaddr_un at = raw_address(endpoint);

    raw->fd = raw_socket();
    assert_int_equal(connect(raw->fd, (struct sockaddr *)&at, sizeof(at)), 0);
}

/** Send bytes. The peer may have closed: that is for the test to see when it reads. */
static inline void raw_bytes(struct raw *raw, const void *data, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t n = send(raw->fd, (const char *)data + at, len - at, MSG_NOSIGNAL);

        if (n <= 0)
            return;
        at += (size_t)n;
    }
}

/** Send a frame with a body of frame->len bytes. */
static inline void raw_frame(struct raw *raw, const struct kvbm_frame *frame, const void *body)
{
    uint8_t head[KVBM_FRAME_BYTES];

    kvbm_frame_write(frame, head);
    raw_bytes(raw, head, sizeof(head));
    raw_bytes(raw, body, frame->len);
}

static inline void raw_say(struct raw *raw, uint16_t type, uint64_t id, const void *body,
                           uint32_t len)
{
    const struct kvbm_frame frame = {.type = type, .id = id, .len = len, .total = len};

    raw_frame(raw, &frame, body);
}

/** Wait until there is something to read, or the end. */
static inline void raw_await(const struct raw *raw)
{
    struct pollfd polled = {.fd = raw->fd, .events = POLLIN};

    assert_int_equal(poll(&polled, 1, (int)(SOON_NS / KV_NS_PER_MS)), 1);
}

/** Read bytes. Returns false at the end of the connection. */
static inline bool raw_read(struct raw *raw, void *to, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t n;

        raw_await(raw);
        n = recv(raw->fd, (char *)to + at, len - at, 0);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

/** Read a frame with its body. Returns false at the end of the connection. */
static inline bool raw_next(struct raw *raw)
{
    uint8_t head[KVBM_FRAME_BYTES];

    if (!raw_read(raw, head, sizeof(head)))
        return false;
    assert_int_equal(kvbm_frame_parse(head, &raw->frame), 0);
    assert_true(raw->frame.len <= sizeof(raw->body));
    return raw_read(raw, raw->body, raw->frame.len);
}

/** Read frames until one of @type. Returns false at the end. */
static inline bool raw_until(struct raw *raw, uint16_t type)
{
    while (raw_next(raw)) {
        if (raw->frame.type == type)
            return true;
    }
    return false;
}

/** Read until the agent closes. Fails the test if it doesn't. */
static inline void raw_expect_end(struct raw *raw)
{
    uint8_t byte[4096];

    do
        raw_await(raw);
    while (recv(raw->fd, byte, sizeof(byte), 0) > 0);
    close(raw->fd);
    raw->fd = -1;
}

static inline struct kvbm_hello raw_who(const char *name, uint64_t worker)
{
    struct kvbm_hello hello = {.oldest = 1,
                               .newest = 1,
                               .who = {.worker = worker, .incarnation = 99},
                               .key_len = 8,
                               .max_requests = 8,
                               .fingerprint = "model"};

    snprintf(hello.who.name, sizeof(hello.who.name), "%s", name);
    return hello;
}

static inline void raw_hello(struct raw *raw, uint16_t type, const struct kvbm_hello *hello,
                             const void *more, size_t more_len)
{
    struct kv_buf body = KV_BUF_INIT;

    kvbm_hello_write(hello, &body);
    kv_buf_append(&body, more, more_len);
    assert_int_equal(body.error, 0);
    raw_say(raw, type, 0, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
}

/** Do the opener's side of a handshake without a token. */
static inline void raw_open(struct raw *raw, const char *endpoint, const char *name)
{
    const struct kvbm_hello hello = raw_who(name, 77);
    const uint8_t mac[KVBM_MAC_BYTES] = {0};

    raw_connect(raw, endpoint);
    raw_hello(raw, KVBM_HELLO, &hello, NULL, 0);
    assert_true(raw_until(raw, KVBM_CHALLENGE));
    raw_say(raw, KVBM_PROOF, 0, mac, sizeof(mac));
    assert_true(raw_until(raw, KVBM_WELCOME));
    raw_say(raw, KVBM_READY, 0, NULL, 0);
    assert_true(raw_until(raw, KVBM_SETS_TOLD));
}

/** Do the listener's side of a handshake, up to READY, on a connection that was accepted. */
static inline void raw_greet(struct raw *raw, const char *name)
{
    const struct kvbm_challenge challenge = {.version = 1};
    struct kvbm_hello hello = raw_who(name, 78);
    const uint8_t mac[KVBM_MAC_BYTES] = {0};
    uint8_t body[KVBM_CHALLENGE_BYTES];

    hello.join[0] = 1;
    assert_true(raw_until(raw, KVBM_HELLO));
    kvbm_challenge_write(&challenge, body);
    raw_say(raw, KVBM_CHALLENGE, 0, body, sizeof(body));
    assert_true(raw_until(raw, KVBM_PROOF));
    raw_hello(raw, KVBM_WELCOME, &hello, mac, sizeof(mac));
    assert_true(raw_until(raw, KVBM_READY));
}

/** As raw_greet, and say that there are no sets. */
static inline void raw_welcome(struct raw *raw, const char *name)
{
    raw_greet(raw, name);
    raw_say(raw, KVBM_SETS_TOLD, 0, NULL, 0);
}

#endif
