// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/sub_impl.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/net/endpoint.h"

#define EVENTS (EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)
#define FIRST_DELAY_NS (100 * KV_NS_PER_MS)
#define LAST_DELAY_NS (5 * KV_NS_PER_S)
#define LAST_BROKEN_DELAY_NS (30 * KV_NS_PER_S)
#define CONNECT_NS (5 * KV_NS_PER_S)
#define HANDSHAKE_NS (10 * KV_NS_PER_S)
#define MESSAGE_NS (60 * KV_NS_PER_S) /* for a message of more than KI_SUB_READ bytes to come in */
#define PING_NS (5 * KV_NS_PER_S)
#define PONG_NS (10 * KV_NS_PER_S) /* for any byte to come after a PING */
#define TTL_DS 150 /* tenths of a second that the publisher should endure our silence */
/*
 * TCP reports a publisher that vanished without a word (a network that swallows packets) within
 * 15 s: PINGs are the data that it fails to deliver.
 */
#define UNDELIVERED_MS 10000
/* Timers of many connections end together, so that the event thread wakes up for them once. */
#define TIMER_GRID_NS (100 * KV_NS_PER_MS)
#define PING_GRID_NS KV_NS_PER_S

static const char no_answer[] =
    "no answer: nobody listens there, or it can't be reached (an engine whose endpoint has no * "
    "connects, too: give it tcp://*:PORT, or register bind:tcp://*:PORT)";
static const char too_slow[] = "a large message came in too slowly";
static const char silent[] = "connected, but nobody speaks ZMTP there (or the process is frozen)";
static const char frozen[] = "no answer to heartbeats: the publisher is frozen or can't be reached";

static uint64_t on_grid(uint64_t ns, uint64_t grid_ns)
{
    return (ns + grid_ns - 1) / grid_ns * grid_ns;
}

/* -- addresses --------------------------------------------------------------------------------- */

static int set_ipc(struct ki_sub *sub, const char *path)
{
    struct sockaddr_un *un = (struct sockaddr_un *)&sub->address;
    size_t len = strlen(path);

    if (len == 0 || len >= sizeof(un->sun_path))
        return -EINVAL;
    un->sun_family = AF_UNIX;
    memcpy(un->sun_path, path, len + 1);
    sub->address_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + 1);
    if (path[0] != '@')
        return 0;
    un->sun_path[0] = '\0'; /* abstract: its name has no end */
    sub->address_len--;
    return 0;
}

/* Set an address from its digits, which getaddrinfo reads without asking anybody. */
static int set_tcp(struct ki_sub *sub, const struct kv_endpoint *endpoint)
{
    struct addrinfo hints = {.ai_family = endpoint->ipv6 ? AF_INET6 : AF_INET,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *found;
    char port[8];

    snprintf(port, sizeof(port), "%u", (unsigned)endpoint->port);
    if (endpoint->wildcard || endpoint->any_port ||
        getaddrinfo(endpoint->host, port, &hints, &found))
        return -EINVAL;
    memcpy(&sub->address, found->ai_addr, found->ai_addrlen);
    sub->address_len = found->ai_addrlen;
    freeaddrinfo(found);
    return 0;
}

static int set_address(struct ki_sub *sub, const char *text)
{
    struct kv_endpoint endpoint;

    memset(&sub->address, 0, sizeof(sub->address));
    if (kv_endpoint_parse(text, &endpoint, NULL) < 0)
        return -EINVAL;
    if (endpoint.scheme == KV_SCHEME_TCP)
        return set_tcp(sub, &endpoint);
    return endpoint.scheme == KV_SCHEME_IPC ? set_ipc(sub, endpoint.host) : -EINVAL;
}

/* -- states ------------------------------------------------------------------------------------ */

/* Update the time for ki_sub_tick. */
static void set_deadline(struct ki_sub *sub)
{
    switch (sub->state) {
    case KI_SUB_CLOSED:
        sub->deadline_ns = 0;
        break;
    case KI_SUB_UP:
        sub->deadline_ns = sub->ping_ns;
        break;
    default:
        sub->deadline_ns = sub->give_up_ns;
    }
}

static void enter(struct ki_sub *sub, enum ki_sub_state state, uint64_t until_ns)
{
    sub->state = state;
    sub->give_up_ns = on_grid(until_ns, TIMER_GRID_NS);
    set_deadline(sub);
    sub->changed = true;
}

static void drop(struct ki_sub *sub)
{
    if (sub->fd >= 0)
        close(sub->fd); /* which also ends epoll's interest */
    sub->fd = -1;
    if (!sub->bytes) /* within a turn, messages may still be used: ki_sub_end frees */
        ki_sub_free_own(sub);
    sub->start = sub->end = 0;
    sub->ended = sub->dry = false;
}

void ki_sub_lose(struct ki_sub *sub, const char *problem, bool broken, uint64_t now_ns)
{
    uint64_t *delay_ns = broken ? &sub->broken_delay_ns : &sub->delay_ns;

    sub->problem = problem;
    sub->broken = broken;
    drop(sub);
    sub->bytes = NULL;
    sub->capacity = 0;
    enter(sub, KI_SUB_WAITING, sub->bound ? 0 : now_ns + *delay_ns);
    *delay_ns = KV_MIN(*delay_ns * 2, broken ? LAST_BROKEN_DELAY_NS : LAST_DELAY_NS);
}

/* -- connecting -------------------------------------------------------------------------------- */

static void set_option(int fd, int level, int name, int value)
{
    (void)setsockopt(fd, level, name, &value, sizeof(value)); /* a refusal costs only comfort */
}

static void set_options(const struct ki_sub *sub)
{
    if (sub->address.ss_family == AF_UNIX)
        return;
    set_option(sub->fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(sub->fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(sub->fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(sub->fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
    set_option(sub->fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    set_option(sub->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, UNDELIVERED_MS);
}

/* Begin an attempt to connect. */
static void attempt(struct ki_sub *sub, uint64_t now_ns)
{
    struct epoll_event event = {.events = EVENTS, .data.u64 = sub->data};

    if (sub->broken)
        sub->reopened++;
    sub->broken = false;
    sub->fd = socket(sub->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (sub->fd < 0) {
        ki_sub_lose(sub, "no socket: too many descriptors, or no memory", false, now_ns);
        return;
    }
    set_options(sub);
    if ((connect(sub->fd, (struct sockaddr *)&sub->address, sub->address_len) < 0 &&
         errno != EINPROGRESS) ||
        epoll_ctl(sub->epoll_fd, EPOLL_CTL_ADD, sub->fd, &event) < 0) {
        ki_sub_lose(sub, no_answer, false, now_ns);
        return;
    }
    enter(sub, KI_SUB_CONNECTING, now_ns + CONNECT_NS);
}

/* Return true when the socket is connected to itself, as happens with a free port of this host. */
static bool is_own_end(int fd)
{
    struct sockaddr_storage here, there;
    socklen_t here_len = sizeof(here), there_len = sizeof(there);

    memset(&here, 0, sizeof(here));
    memset(&there, 0, sizeof(there));
    return getsockname(fd, (struct sockaddr *)&here, &here_len) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &there_len) == 0 &&
           here.ss_family != AF_UNIX && here_len == there_len &&
           memcmp(&here, &there, here_len) == 0;
}

void ki_sub_finish_connect(struct ki_sub *sub, uint64_t now_ns)
{
    /* Linux answers a second connect with the result of the first. */
    if (connect(sub->fd, (struct sockaddr *)&sub->address, sub->address_len) < 0 &&
        errno != EISCONN) {
        if (errno != EALREADY && errno != EINPROGRESS && errno != EINTR)
            ki_sub_lose(sub, no_answer, false, now_ns);
        return;
    }
    if (is_own_end(sub->fd)) {
        ki_sub_lose(sub, no_answer, false, now_ns);
        return;
    }
    ki_zmtp_init(&sub->zmtp, sub->limits->max_message);
    enter(sub, KI_SUB_SHAKING, now_ns + HANDSHAKE_NS);
}

void ki_sub_shaken(struct ki_sub *sub, uint64_t now_ns)
{
    sub->ups++;
    sub->problem = NULL;
    sub->silent_ns = sub->pinged_ns = 0;
    sub->delay_ns = FIRST_DELAY_NS;
    sub->ping_ns = on_grid(now_ns + PING_NS, PING_GRID_NS);
    enter(sub, KI_SUB_UP, 0);
}

void ki_sub_flush(struct ki_sub *sub)
{
    struct ki_zmtp_out *out = &sub->zmtp.out;
    ssize_t n;

    if (sub->state < KI_SUB_SHAKING || out->len == 0)
        return;
    n = send(sub->fd, out->bytes, out->len, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0)
        ki_zmtp_sent(out, (size_t)n);
    else if (n < 0 && errno != EAGAIN && errno != EINTR)
        sub->ended = true; /* reading tells the rest */
}

/* -- life -------------------------------------------------------------------------------------- */

int ki_sub_open(struct ki_sub *sub, const char *endpoint, struct ki_sub_limits *limits,
                int epoll_fd, uint64_t data, uint64_t now_ns)
{
    int rc = set_address(sub, endpoint);

    if (rc < 0)
        return rc;
    sub->fd = -1;
    sub->epoll_fd = epoll_fd;
    sub->data = data;
    sub->limits = limits;
    sub->problem = NULL;
    sub->broken = sub->bound = false;
    sub->delay_ns = FIRST_DELAY_NS;
    if (!sub->broken_delay_ns)
        sub->broken_delay_ns = KI_SUB_BROKEN_DELAY_NS;
    attempt(sub, now_ns);
    return 0;
}

static const char nobody[] = "no publisher has connected to this address yet (of this topic)";

void ki_sub_await(struct ki_sub *sub, struct ki_sub_limits *limits, int epoll_fd, uint64_t data)
{
    sub->fd = -1;
    sub->epoll_fd = epoll_fd;
    sub->data = data;
    sub->limits = limits;
    sub->problem = nobody;
    sub->broken = false;
    sub->bound = true;
    enter(sub, KI_SUB_WAITING, 0);
}

void ki_sub_accept(struct ki_sub *sub, int fd, struct ki_sub_limits *limits, int epoll_fd,
                   uint64_t data, uint64_t now_ns)
{
    struct epoll_event event = {.events = EVENTS, .data.u64 = data};

    ki_sub_await(sub, limits, epoll_fd, data);
    sub->fd = fd;
    set_options(sub);
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        ki_sub_lose(sub, KI_SUB_WAS_LOST, false, now_ns);
        return;
    }
    ki_zmtp_init(&sub->zmtp, limits->max_message);
    enter(sub, KI_SUB_SHAKING, now_ns + HANDSHAKE_NS);
}

void ki_sub_take(struct ki_sub *sub, struct ki_sub *from, uint64_t data)
{
    struct epoll_event event = {.events = EVENTS, .data.u64 = data};
    uint64_t ups = sub->ups, reopened = sub->reopened + sub->broken;
    bool deaf = sub->deaf;

    *sub = *from;
    sub->deaf = deaf;
    sub->ups = ups + 1;
    sub->reopened = reopened;
    sub->data = data;
    sub->problem = NULL;
    sub->changed = true;
    (void)epoll_ctl(sub->epoll_fd, EPOLL_CTL_MOD, sub->fd, &event); /* reports what waits */
    from->fd = -1;
    from->own = NULL;
    from->own_capacity = from->start = from->end = 0;
    enter(from, KI_SUB_CLOSED, 0);
}

void ki_sub_close(struct ki_sub *sub)
{
    if (sub->state == KI_SUB_CLOSED)
        return;
    drop(sub);
    enter(sub, KI_SUB_CLOSED, 0);
}

void ki_sub_ready(struct ki_sub *sub, bool ended)
{
    sub->dry = false;
    sub->ended |= ended;
}

/* Return true when no byte waits to be read: the event thread may not have come to read it. */
static bool is_dry(const struct ki_sub *sub)
{
    uint8_t byte;

    return recv(sub->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0;
}

/* Return true when the publisher asked to be cut after such a silence. */
static bool is_silent(const struct ki_sub *sub, uint64_t now_ns)
{
    uint64_t ttl_ns = sub->zmtp.peer_ttl_ds * (KV_NS_PER_S / 10);

    return ttl_ns && now_ns >= sub->heard_ns + ttl_ns && is_dry(sub);
}

/* Return true when a publisher that answers PINGs, or should, has not answered in time. */
static bool is_frozen(struct ki_sub *sub, uint64_t now_ns)
{
    sub->answers |= sub->zmtp.answers;
    if (sub->heard_ns >= sub->pinged_ns)
        sub->pinged_ns = 0;
    if (!sub->answers && (sub->deaf || sub->zmtp.minor < 1))
        return false;
    return sub->pinged_ns && now_ns >= sub->pinged_ns + PONG_NS && is_dry(sub);
}

static void tick_up(struct ki_sub *sub, uint64_t now_ns)
{
    if (is_silent(sub, now_ns)) {
        ki_sub_lose(sub, KI_SUB_WAS_LOST, false, now_ns);
        return;
    }
    if (is_frozen(sub, now_ns)) {
        sub->deaf = !sub->answers;
        sub->silent_ns = sub->pinged_ns;
        ki_sub_lose(sub, frozen, false, now_ns);
        return;
    }
    if (sub->own_capacity > KI_SUB_READ && now_ns >= sub->large_ns + MESSAGE_NS) {
        ki_sub_lose(sub, too_slow, true, now_ns);
        return;
    }
    if (now_ns < sub->ping_ns)
        return;
    ki_zmtp_ping(&sub->zmtp, TTL_DS);
    ki_sub_flush(sub);
    if (!sub->pinged_ns)
        sub->pinged_ns = now_ns;
    sub->ping_ns = on_grid(now_ns + PING_NS, PING_GRID_NS);
    set_deadline(sub);
}

void ki_sub_tick(struct ki_sub *sub, uint64_t now_ns)
{
    if (sub->state == KI_SUB_UP)
        tick_up(sub, now_ns);
    else if (sub->state == KI_SUB_CLOSED || now_ns < sub->give_up_ns ||
             (sub->state == KI_SUB_WAITING && sub->bound))
        return;
    else if (sub->state == KI_SUB_WAITING)
        attempt(sub, now_ns);
    else
        ki_sub_lose(sub, sub->state == KI_SUB_CONNECTING ? no_answer : silent, false, now_ns);
}
