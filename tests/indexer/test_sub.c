// SPDX-License-Identifier: Apache-2.0
/* The connection to a publisher: libzmq's sockets at the other end, and peers that speak by hand. */
#include "base/unit.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "indexer/peer_bytes.h"
#include "indexer/zmq/sub.h"

enum { LIMIT = 4 << 20 };
#define PATIENCE_NS (30 * KV_NS_PER_S)

/* -- an event thread of one connection --------------------------------------------------------- */

static struct ki_sub_limits limits = {.max_message = LIMIT, .max_bytes = 2 * (LIMIT + 65536)};

struct rig {
    struct ki_sub sub;
    struct ki_sub_room room;
    int epoll_fd;
    bool ready;
    uint64_t skew_ns;   /* added to the time that the connection sees */
    size_t n;           /* messages so far */
    struct kv_buf last; /* frames of the last one, each behind its length */
};

static uint64_t now(const struct rig *r)
{
    return kv_now_ns() + r->skew_ns;
}

static void rig_open(struct rig *r, const char *endpoint)
{
    memset(r, 0, sizeof(*r));
    r->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    assert_true(r->epoll_fd >= 0);
    assert_int_equal(ki_sub_open(&r->sub, endpoint, &limits, r->epoll_fd, 7, now(r)), 0);
}

static void rig_close(struct rig *r)
{
    ki_sub_close(&r->sub);
    assert_null(r->sub.own);
    close(r->epoll_fd);
    kv_buf_fini(&r->last);
}

static void take(struct rig *r, const struct ki_zmtp_message *m)
{
    r->n++;
    kv_buf_clear(&r->last);
    for (size_t i = 0; i < KV_MIN(m->n_frames, (size_t)KVE_MAX_FRAMES); i++) {
        kv_buf_printf(&r->last, "%zu:", m->spans[i].len);
        kv_buf_append(&r->last, m->spans[i].data, m->spans[i].len);
    }
}

/* One turn, of at most @max messages. */
static void turn(struct rig *r, size_t max)
{
    struct ki_zmtp_message m;

    ki_sub_begin(&r->sub, &r->room);
    while (max) {
        if (ki_sub_next(&r->sub, &m, now(r))) {
            take(r, &m);
            max--;
        } else if (!ki_sub_fill(&r->sub, now(r))) {
            r->ready = false;
            break;
        }
    }
    ki_sub_end(&r->sub, now(r));
    memset(&r->room, 0xa5, sizeof(r->room)); /* others' bytes */
}

/* Wait for news for a moment, and take a turn. */
static void step(struct rig *r)
{
    struct epoll_event event;

    if (epoll_wait(r->epoll_fd, &event, 1, r->ready ? 0 : 5) == 1) {
        assert_int_equal(event.data.u64, 7);
        ki_sub_ready(&r->sub, event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
        r->ready = true;
    }
    if (r->sub.deadline_ns && now(r) >= r->sub.deadline_ns)
        ki_sub_tick(&r->sub, now(r));
    if (r->ready)
        turn(r, 3);
}

#define STEP_UNTIL(r, condition)                        \
    do {                                                \
        uint64_t until_ns_ = kv_now_ns() + PATIENCE_NS; \
        while (!(condition)) {                          \
            assert_true(kv_now_ns() < until_ns_);       \
            step(r);                                    \
        }                                               \
    } while (0)

/* -- libzmq at the other end ------------------------------------------------------------------- */

static void *context;

static void *publish_at(const char *where, char ret[128])
{
    void *socket = zmq_socket(context, ZMQ_XPUB);
    int none = 0, on = 1, patience = 30000;
    size_t size = 128;

    assert_non_null(socket);
    zmq_setsockopt(socket, ZMQ_SNDHWM, &none, sizeof(none));
    zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof(none));
    zmq_setsockopt(socket, ZMQ_XPUB_VERBOSE, &on, sizeof(on));
    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &patience, sizeof(patience));
    for (int i = 0; zmq_bind(socket, where) != 0; i++) { /* libzmq gives an address back later */
        assert_true(zmq_errno() == EADDRINUSE && i < 3000);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    assert_int_equal(zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, ret, &size), 0);
    return socket;
}

/* Wait until the publisher has the subscription to everything. */
static void await_subscription(struct rig *r, void *socket)
{
    zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};
    char byte[8] = {0};

    while (byte[0] != 1) { /* 0: the end of the last one */
        STEP_UNTIL(r, zmq_poll(&item, 1, 0) == 1);
        assert_int_equal(zmq_recv(socket, byte, sizeof(byte), 0), 1);
    }
}

/* Send a message of two frames, the second one of @len bytes. */
static void send_message(void *socket, size_t len, struct kv_buf *ret_text)
{
    char *body = malloc(len + 1);

    for (size_t i = 0; i < len; i++)
        body[i] = (char)('a' + (i + len) % 23);
    kv_buf_clear(ret_text);
    kv_buf_printf(ret_text, "3:seq%zu:", len);
    kv_buf_append(ret_text, body, len);
    assert_int_equal(zmq_send(socket, "seq", 3, ZMQ_SNDMORE), 3);
    assert_int_equal(zmq_send(socket, body, len, 0), (int)len);
    free(body);
}

/* Messages of many lengths, one at a time and then in a heap. */
static void exchange(const char *where)
{
    static const size_t lens[] = {0,     1,      255,    256,       8191,  65535,
                                  65536, 131072, 300000, LIMIT - 1, LIMIT, 5};
    struct kv_buf text = KV_BUF_INIT;
    char endpoint[128];
    void *socket = publish_at(where, endpoint);
    struct rig *r = malloc(sizeof(*r));

    rig_open(r, endpoint);
    await_subscription(r, socket);
    assert_int_equal(r->sub.state, KI_SUB_UP);
    assert_int_equal(r->sub.ups, 1);
    assert_null(r->sub.problem);
    for (size_t i = 0; i < KV_COUNT(lens); i++) {
        send_message(socket, lens[i], &text);
        STEP_UNTIL(r, r->n == i + 1);
        assert_int_equal(r->last.len, text.len);
        assert_memory_equal(r->last.data, text.data, text.len);
    }
    STEP_UNTIL(r, !r->ready);
    assert_in_range(r->sub.own_capacity, 0, 4096); /* of the large ones nothing is kept */
    for (size_t i = 0; i < 3000; i++)
        send_message(socket, i % 50 ? i % 300 : 100000 + i, &text);
    STEP_UNTIL(r, r->n == KV_COUNT(lens) + 3000);
    assert_memory_equal(r->last.data, text.data, text.len);
    assert_int_equal(r->sub.ups, 1);
    rig_close(r);
    free(r);
    kv_buf_fini(&text);
    zmq_close(socket);
}

static void test_tcp(void **state)
{
    (void)state;
    exchange("tcp://127.0.0.1:*");
}

static void test_ipc(void **state)
{
    char where[64];

    (void)state;
    snprintf(where, sizeof(where), "ipc:///tmp/kv-sub-test-%d", (int)getpid());
    exchange(where);
    unlink(where + 6);
    snprintf(where, sizeof(where), "ipc://@kv-sub-test-%d", (int)getpid());
    exchange(where);
}

/* Nobody there, then a publisher, then none, then another at the same place. */
static void test_comes_and_goes(void **state)
{
    struct kv_buf text = KV_BUF_INIT;
    char where[64], endpoint[128];
    struct rig *r = malloc(sizeof(*r));
    void *socket;

    (void)state;
    snprintf(where, sizeof(where), "ipc://@kv-sub-goes-%d", (int)getpid());
    rig_open(r, where);
    STEP_UNTIL(r, r->sub.problem != NULL);
    assert_non_null(strstr(r->sub.problem, "no answer"));
    for (uint64_t i = 1; i <= 3; i++) {
        socket = publish_at(where, endpoint);
        await_subscription(r, socket);
        assert_int_equal(r->sub.ups, i);
        assert_null(r->sub.problem);
        send_message(socket, 1000 * i, &text);
        STEP_UNTIL(r, r->n == i);
        assert_memory_equal(r->last.data, text.data, text.len);
        assert_int_equal(zmq_unbind(socket, endpoint), 0);
        zmq_close(socket);
        STEP_UNTIL(r, r->sub.state != KI_SUB_UP);
        assert_int_equal(r->sub.reopened, 0);
    }
    rig_close(r);
    free(r);
    kv_buf_fini(&text);
}

/* A message over the limit ends the connection, which is made anew. */
static void test_too_large(void **state)
{
    struct kv_buf text = KV_BUF_INIT;
    char endpoint[128];
    void *socket = publish_at("tcp://127.0.0.1:*", endpoint);
    struct rig *r = malloc(sizeof(*r));

    (void)state;
    rig_open(r, endpoint);
    await_subscription(r, socket);
    send_message(socket, LIMIT + 1, &text);
    STEP_UNTIL(r, r->sub.state == KI_SUB_WAITING);
    assert_true(r->sub.broken);
    assert_int_equal(r->sub.own_capacity, 0);
    r->skew_ns += 2 * KV_NS_PER_S;
    await_subscription(r, socket);
    assert_int_equal(r->sub.ups, 2);
    assert_int_equal(r->sub.reopened, 1);
    send_message(socket, 10, &text);
    STEP_UNTIL(r, r->n == 1);
    assert_memory_equal(r->last.data, text.data, text.len);
    rig_close(r);
    free(r);
    kv_buf_fini(&text);
    zmq_close(socket);
}

/* -- a peer that speaks by hand ---------------------------------------------------------------- */

struct hand {
    int server, fd;
    char endpoint[64];
    struct kv_buf bytes; /* to be said */
    struct rig rig;
};

static void hand_open(struct hand *h)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);

    memset(h, 0, sizeof(*h));
    h->server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(h->server >= 0 && bind(h->server, (struct sockaddr *)&address, len) == 0 &&
                listen(h->server, 8) == 0 &&
                getsockname(h->server, (struct sockaddr *)&address, &len) == 0);
    snprintf(h->endpoint, sizeof(h->endpoint), "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    rig_open(&h->rig, h->endpoint);
    h->fd = accept(h->server, NULL, NULL);
    assert_true(h->fd >= 0);
}

static void hand_close(struct hand *h)
{
    close(h->fd);
    close(h->server);
    kv_buf_fini(&h->bytes);
    rig_close(&h->rig);
}

/* Set-up and teardown of tests with one peer, which *state points to. */
static int with_hand(void **state)
{
    *state = calloc(1, sizeof(struct hand));
    hand_open(*state);
    return 0;
}

static int without_hand(void **state)
{
    hand_close(*state);
    free(*state);
    return 0;
}

/* Send as many of the bytes from @at on as the socket takes now. Returns their number. */
static size_t say_some(struct hand *h, size_t at)
{
    ssize_t n = send(h->fd, h->bytes.data + at, h->bytes.len - at, MSG_NOSIGNAL | MSG_DONTWAIT);

    assert_true(n >= 0 || errno == EAGAIN);
    return n > 0 ? (size_t)n : 0;
}

/* Send the bytes of a peer. */
static void say(struct hand *h)
{
    for (size_t at = 0; at < h->bytes.len;) {
        at += say_some(h, at);
        step(&h->rig);
    }
    kv_buf_clear(&h->bytes);
}

/* Read what the connection sends, until @len bytes are there. */
static void hear(struct hand *h, size_t len, uint8_t *ret)
{
    size_t got = 0;

    while (got < len) {
        uint64_t until_ns = kv_now_ns() + PATIENCE_NS;
        ssize_t n = recv(h->fd, ret + got, len - got, MSG_DONTWAIT);

        assert_true(n > 0 || (n < 0 && errno == EAGAIN && kv_now_ns() < until_ns));
        got += n > 0 ? (size_t)n : 0;
        step(&h->rig);
    }
}

/* Shake hands, and read all that the connection says meanwhile. */
static void shake_hands(struct hand *h)
{
    uint8_t heard[KI_ZMTP_GREETING + 27 + 12];

    put_greeting(&h->bytes, 3, 1, "NULL");
    put_ready(&h->bytes, "PUB");
    say(h);
    hear(h, sizeof(heard), heard);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
}

/* Every byte alone, and messages that share a packet with the half of another. */
static void test_slow_sender(void **state)
{
    struct hand *h = *state;
    struct kv_buf all = KV_BUF_INIT;
    size_t first;

    put_greeting(&all, 3, 0, "NULL");
    put_ready(&all, "PUB");
    first = all.len;
    for (uint64_t i = 0; i < 20; i++)
        put_batch(&all, "topic", i, "some payload of a batch", 23);
    for (size_t i = 0; i < all.len; i++) {
        kv_buf_append(&h->bytes, all.data + i, 1);
        say(h);
    }
    STEP_UNTIL(&h->rig, h->rig.n == 20);
    for (size_t at = first; at < all.len; at += 53) {
        kv_buf_append(&h->bytes, all.data + at, KV_MIN((size_t)53, all.len - at));
        say(h);
    }
    STEP_UNTIL(&h->rig, h->rig.n == 40);
    assert_int_equal(h->rig.last.len, 2 + 5 + 2 + 8 + 3 + 23);
    assert_int_equal(h->rig.sub.ups, 1);
    kv_buf_fini(&all);
}

/* A publisher that announces much and sends little costs little. */
static void test_announced_only(void **state)
{
    struct hand *h = *state;
    uint64_t be = htobe64(LIMIT);
    static char zeros[100000];

    shake_hands(h);
    kv_buf_append(&h->bytes, "\2", 1);
    kv_buf_append(&h->bytes, &be, sizeof(be));
    say(h);
    STEP_UNTIL(&h->rig, !h->rig.ready && h->rig.sub.end - h->rig.sub.start == 9);
    assert_in_range(h->rig.sub.own_capacity, 9, 4096);
    kv_buf_append(&h->bytes, zeros, sizeof(zeros));
    say(h);
    STEP_UNTIL(&h->rig, !h->rig.ready && h->rig.sub.end - h->rig.sub.start == 9 + sizeof(zeros));
    assert_in_range(h->rig.sub.own_capacity, sizeof(zeros), 4 * sizeof(zeros));
}

static void test_pings(void **state)
{
    struct hand *h = *state;
    uint8_t heard[16];

    shake_hands(h);
    put_frame_bytes(&h->bytes, PEER_COMMAND, "\4PING\0\0who", 10);
    say(h);
    hear(h, 10, heard);
    assert_memory_equal(heard, "\4\10\4PONGwho", 10);
    h->rig.skew_ns += 7 * KV_NS_PER_S; /* our own turn */
    hear(h, 9, heard);
    assert_memory_equal(heard, "\4\7\4PING\0\226", 9);
    assert_int_equal(h->rig.sub.ups, 1);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
}

/* Wait until the connection has unread bytes, without reading them. */
static void await_bytes(const struct ki_sub *sub)
{
    struct pollfd item = {.fd = sub->fd, .events = POLLIN};

    assert_int_equal(poll(&item, 1, 30000), 1);
}

/* Let time pass up to the next PING, which must come. */
static void await_ping(struct hand *h)
{
    uint8_t heard[16];

    h->rig.skew_ns += 6 * KV_NS_PER_S;
    hear(h, 9, heard);
    assert_memory_equal(heard, "\4\7\4PING\0\226", 9);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
}

static void answer_ping(struct hand *h)
{
    put_frame_bytes(&h->bytes, PEER_COMMAND, "\4PONG", 5);
    say(h);
    STEP_UNTIL(&h->rig, h->rig.sub.zmtp.answers);
}

static void reconnect(struct hand *h)
{
    close(h->fd);
    h->rig.skew_ns += 10 * KV_NS_PER_S;
    STEP_UNTIL(&h->rig, h->rig.sub.state >= KI_SUB_CONNECTING);
    h->fd = accept(h->server, NULL, NULL);
    assert_true(h->fd >= 0);
}

static void lose_frozen(struct hand *h)
{
    uint64_t asked_ns = now(&h->rig);

    h->rig.skew_ns += 12 * KV_NS_PER_S;
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    assert_int_equal(h->rig.sub.state, KI_SUB_WAITING);
    assert_false(h->rig.sub.broken);
    assert_non_null(strstr(h->rig.sub.problem, "heartbeats"));
    assert_in_range(h->rig.sub.silent_ns, 1, asked_ns); /* absent since it was asked */
}

/* A publisher that answers PINGs, and stops: frozen. Bytes that wait to be read show life. */
static void test_frozen(void **state)
{
    struct hand *h = *state;

    shake_hands(h);
    await_ping(h);
    answer_ping(h);
    for (int i = 0; i < 4; i++) { /* quiet for long, but it answers */
        await_ping(h);
        put_frame_bytes(&h->bytes, PEER_COMMAND, "\4PONG", 5);
        say(h);
        STEP_UNTIL(&h->rig, h->rig.sub.heard_ns >= h->rig.sub.pinged_ns);
    }
    await_ping(h);
    h->rig.skew_ns += 30 * KV_NS_PER_S;
    assert_int_equal(send(h->fd, "\0\1x", 3, MSG_NOSIGNAL), 3);
    await_bytes(&h->rig.sub);
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    STEP_UNTIL(&h->rig, h->rig.n == 1);
    h->rig.skew_ns += 6 * KV_NS_PER_S;
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    lose_frozen(h);
    assert_false(h->rig.sub.deaf);
}

/* A publisher that never answers a PING loses its connection once; from then on it may be quiet. */
static void test_deaf(void **state)
{
    struct hand *h = *state;

    shake_hands(h);
    await_ping(h);
    lose_frozen(h);
    assert_true(h->rig.sub.deaf);
    reconnect(h);
    shake_hands(h);
    for (int i = 0; i < 10; i++)
        await_ping(h);
    assert_int_equal(h->rig.sub.ups, 2);
    answer_ping(h); /* it was only frozen, then */
    await_ping(h);
    h->rig.skew_ns += 30 * KV_NS_PER_S;
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    assert_int_equal(h->rig.sub.state, KI_SUB_WAITING);
}

/* Lose the connection of one that awaits its publisher, and give it the next one. */
static void await_next(struct hand *h, uint64_t wanted_ups)
{
    struct rig *r = &h->rig;
    struct hand *next = calloc(1, sizeof(*next));

    hand_open(next);
    shake_hands(next);
    ki_sub_await(&r->sub, &limits, next->rig.epoll_fd, 7);
    ki_sub_take(&r->sub, &next->rig.sub, 7);
    assert_int_equal(r->sub.ups, wanted_ups);
    close(h->fd);
    close(r->epoll_fd);
    h->fd = next->fd;
    r->epoll_fd = next->rig.epoll_fd;
    next->fd = next->rig.epoll_fd = -1;
    hand_close(next);
    free(next);
}

/* The same where the publisher connects. */
static void test_deaf_that_connects(void **state)
{
    struct hand *h = *state;

    shake_hands(h);
    await_ping(h);
    lose_frozen(h);
    await_next(h, 2);
    for (int i = 0; i < 10; i++)
        await_ping(h);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    assert_int_equal(h->rig.sub.ups, 2);
}

/* A publisher that asks for it is cut when it falls silent, but not while its bytes wait. */
static void test_silence(void **state)
{
    struct hand *h = *state;
    uint8_t heard[16];

    shake_hands(h);
    put_frame_bytes(&h->bytes, PEER_COMMAND, "\4PING\2\130", 7); /* 60 s */
    say(h);
    hear(h, 7, heard);
    h->rig.skew_ns += 50 * KV_NS_PER_S;
    hear(h, 9, heard);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    h->rig.skew_ns += 70 * KV_NS_PER_S;
    assert_int_equal(send(h->fd, "\0\1x", 3, MSG_NOSIGNAL), 3);
    await_bytes(&h->rig.sub);
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    STEP_UNTIL(&h->rig, h->rig.n == 1);
    h->rig.skew_ns += 70 * KV_NS_PER_S;
    ki_sub_tick(&h->rig.sub, now(&h->rig));
    assert_int_equal(h->rig.sub.state, KI_SUB_WAITING);
    assert_false(h->rig.sub.broken);
}

/* Patience with peers that say nothing, and longer and longer pauses for those that talk nonsense. */
static void test_strangers(void **state)
{
    struct hand *h = *state;

    STEP_UNTIL(&h->rig, h->rig.sub.state == KI_SUB_SHAKING);
    h->rig.skew_ns += 20 * KV_NS_PER_S;
    STEP_UNTIL(&h->rig, h->rig.sub.state == KI_SUB_WAITING);
    assert_non_null(strstr(h->rig.sub.problem, "nobody speaks ZMTP"));
    assert_false(h->rig.sub.broken);
    for (uint64_t i = 0; i < 8; i++) {
        close(h->fd);
        h->rig.skew_ns += 40 * KV_NS_PER_S;
        STEP_UNTIL(&h->rig, h->rig.sub.state >= KI_SUB_CONNECTING);
        h->fd = accept(h->server, NULL, NULL);
        assert_true(h->fd >= 0);
        assert_int_equal(h->rig.sub.reopened, i);
        put_greeting(&h->bytes, 3, 1, "BOGUS");
        say(h);
        STEP_UNTIL(&h->rig, h->rig.sub.state == KI_SUB_WAITING);
        assert_int_equal(h->rig.sub.broken_delay_ns,
                         KV_MIN(KV_NS_PER_S << (i + 1), 30 * KV_NS_PER_S));
        assert_true(h->rig.sub.broken);
        assert_non_null(strstr(h->rig.sub.problem, "credentials"));
    }
}

/* The end of the stream comes with its last bytes: these are read, the half message is dropped. */
static void test_end_behind_bytes(void **state)
{
    struct hand *h = *state;

    shake_hands(h);
    put_batch(&h->bytes, "", 1, "whole", 5);
    put_batch(&h->bytes, "", 2, "half", 4);
    assert_int_equal(send(h->fd, h->bytes.data, h->bytes.len - 2, MSG_NOSIGNAL),
                     (ssize_t)h->bytes.len - 2);
    assert_int_equal(shutdown(h->fd, SHUT_WR), 0);
    STEP_UNTIL(&h->rig, h->rig.sub.state == KI_SUB_WAITING);
    assert_int_equal(h->rig.n, 1);
    assert_non_null(strstr(h->rig.sub.problem, "lost"));
}

/* A large message, in memory of its own, is valid until the turn ends, also when the bytes behind it
 * end the connection. */
static void test_breach_behind_a_message(void **state)
{
    static uint8_t body[300000];
    struct hand *h = *state;
    struct ki_zmtp_message m = {0}, none;
    struct epoll_event event;
    size_t at = 0;

    memset(body, 'b', sizeof(body));
    shake_hands(h);
    put_frame_bytes(&h->bytes, 0, body, sizeof(body));
    kv_buf_append(&h->bytes, "\xff\xff\xff", 3);
    while (!m.n_frames) {
        at += say_some(h, at);
        if (at == h->bytes.len && epoll_wait(h->rig.epoll_fd, &event, 1, 5) == 1)
            ki_sub_ready(&h->rig.sub, false);
        ki_sub_begin(&h->rig.sub, &h->rig.room);
        while (!ki_sub_next(&h->rig.sub, &m, now(&h->rig)))
            if (!ki_sub_fill(&h->rig.sub, now(&h->rig)))
                break;
        if (!m.n_frames)
            ki_sub_end(&h->rig.sub, now(&h->rig));
    }
    while (h->rig.sub.state == KI_SUB_UP) { /* the last bytes may come behind the message */
        at += say_some(h, at);
        assert_false(ki_sub_next(&h->rig.sub, &none, now(&h->rig)));
        (void)ki_sub_fill(&h->rig.sub, now(&h->rig));
    }
    assert_int_equal(h->rig.sub.state, KI_SUB_WAITING);
    assert_int_equal(m.spans[0].len, sizeof(body));
    assert_memory_equal(m.spans[0].data, body, sizeof(body));
    ki_sub_end(&h->rig.sub, now(&h->rig));
    assert_null(h->rig.sub.own);
}

/* Begin a large message, and leave out its end. */
static void say_most(struct hand *h)
{
    static uint8_t body[LIMIT];

    shake_hands(h);
    put_frame_bytes(&h->bytes, 0, body, sizeof(body));
    h->bytes.len -= 10;
}

/* Publishers that begin large messages share a limit: the third one is lost, and comes back when
 * there is room. */
static void test_large_ones_at_once(void **state)
{
    struct hand *h = calloc(3, sizeof(*h));

    (void)state;
    for (int i = 0; i < 2; i++) {
        hand_open(&h[i]);
        say_most(&h[i]);
        say(&h[i]);
        STEP_UNTIL(&h[i].rig, h[i].rig.sub.end >= LIMIT - 10);
    }
    assert_in_range(atomic_load(&limits.used), 2 * (LIMIT - 10), limits.max_bytes);
    hand_open(&h[2]);
    say_most(&h[2]);
    for (size_t at = 0; h[2].rig.sub.state != KI_SUB_WAITING;) {
        ssize_t n =
            send(h[2].fd, h[2].bytes.data + at, h[2].bytes.len - at, MSG_NOSIGNAL | MSG_DONTWAIT);

        at += n > 0 ? (size_t)n : 0;
        step(&h[2].rig);
    }
    assert_non_null(strstr(h[2].rig.sub.problem, "too many at once"));
    assert_false(h[2].rig.sub.broken);
    assert_int_equal(h[0].rig.sub.state, KI_SUB_UP);
    hand_close(&h[0]);
    assert_in_range(atomic_load(&limits.used), LIMIT - 10, limits.max_bytes / 2);
    kv_buf_append(&h[1].bytes, "0123456789", 10); /* the end of the second one's */
    say(&h[1]);
    STEP_UNTIL(&h[1].rig, h[1].rig.n == 1);
    hand_close(&h[1]);
    hand_close(&h[2]);
    assert_int_equal(atomic_load(&limits.used), 0);
    free(h);
}

/* A large message that doesn't end is a breach; small ones may take their time. */
static void test_large_one_is_slow(void **state)
{
    struct hand *h = *state;

    shake_hands(h);
    put_batch(&h->bytes, "", 1, "small", 5);
    h->bytes.len -= 2;
    say(h);
    h->rig.skew_ns += 300 * KV_NS_PER_S;
    step(&h->rig);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    hand_close(h);
    hand_open(h);
    say_most(h);
    say(h);
    h->rig.skew_ns += 50 * KV_NS_PER_S;
    step(&h->rig);
    assert_int_equal(h->rig.sub.state, KI_SUB_UP);
    h->rig.skew_ns += 20 * KV_NS_PER_S;
    STEP_UNTIL(&h->rig, h->rig.sub.state == KI_SUB_WAITING);
    assert_non_null(strstr(h->rig.sub.problem, "too slowly"));
    assert_true(h->rig.sub.broken);
    assert_int_equal(atomic_load(&limits.used), 0);
}

static void test_bad_endpoints(void **state)
{
    static const char *const endpoints[] = {"inproc://x",        "tcp://*:1",
                                            "tcp://127.0.0.1:*", "tcp://localhost:80",
                                            "udp://1.2.3.4:5",   "ipc://"};
    struct ki_sub sub = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(endpoints); i++) {
        assert_int_equal(ki_sub_open(&sub, endpoints[i], &limits, -1, 0, 0), -EINVAL);
        assert_int_equal(sub.state, KI_SUB_CLOSED);
    }
    ki_sub_close(&sub);
}

static int group_setup(void **state)
{
    (void)state;
    context = zmq_ctx_new();
    return context ? 0 : -1;
}

static int group_teardown(void **state)
{
    (void)state;
    return zmq_ctx_term(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_ipc),
        cmocka_unit_test(test_comes_and_goes),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test_setup_teardown(test_slow_sender, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_announced_only, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_pings, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_frozen, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_deaf, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_deaf_that_connects, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_silence, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_strangers, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_end_behind_bytes, with_hand, without_hand),
        cmocka_unit_test_setup_teardown(test_breach_behind_a_message, with_hand, without_hand),
        cmocka_unit_test(test_large_ones_at_once),
        cmocka_unit_test_setup_teardown(test_large_one_is_slow, with_hand, without_hand),
        cmocka_unit_test(test_bad_endpoints),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
