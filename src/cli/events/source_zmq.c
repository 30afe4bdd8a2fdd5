// SPDX-License-Identifier: Apache-2.0
#include "cli/events/source_impl.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/bar.h"
#include "indexer/zmq/listen.h"
#include "indexer/zmq/place.h"
#include "indexer/zmq/sub.h"
#include "indexer/zmq/target.h"

#define RESOLVE_NS (50 * KV_NS_PER_MS) /* between two questions for a host's address */
#define RESOLVED_AGE_MS 5000
#define LISTENER UINT64_MAX /* epoll's data of the address that publishers connect to */
#define MAX_FILLS 32        /* reads from one connection before others have their turn */
#define MAX_WAIT_MS 200     /* a signal may come before the wait for readiness begins */

struct connection {
    struct ki_sub sub;
    bool more; /* its turn ended before its bytes did */
    char from[KC_MAX_FROM];
};

struct zmq_source {
    struct kc_source base;
    char url[KC_MAX_FROM];
    struct ki_place place; /* its topic points into url */
    struct ki_target target;
    struct kv_resolver *resolver;
    const char *unresolved; /* why there is no address to connect to; NULL: there is */
    uint64_t resolve_ns;    /* time of the next question; 0: none is due */
    int epoll_fd, listen_fd;
    bool ever;
    const char *last_problem;
    struct ki_sub_limits limits;
    struct ki_sub_room room;
    struct connection *connections[KC_MAX_CONNECTIONS]; /* those that are NULL are free */
};

/* -- life -------------------------------------------------------------------------------------- */

static void close_source(struct kc_source *base)
{
    struct zmq_source *source = (struct zmq_source *)base;

    for (size_t i = 0; i < KC_MAX_CONNECTIONS; i++) {
        if (source->connections[i])
            ki_sub_close(&source->connections[i]->sub);
        free(source->connections[i]);
    }
    if (source->listen_fd >= 0)
        close(source->listen_fd);
    if (source->epoll_fd >= 0)
        close(source->epoll_fd);
    kv_resolver_destroy(source->resolver);
    free(source);
}

static int open_listener(struct zmq_source *source)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = LISTENER};

    source->listen_fd = ki_listen(&source->place.endpoint);
    if (source->listen_fd < 0)
        return source->listen_fd;
    return epoll_ctl(source->epoll_fd, EPOLL_CTL_ADD, source->listen_fd, &event) < 0 ? -errno : 0;
}

static int open_source(struct zmq_source *source)
{
    int rc;

    source->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (source->epoll_fd < 0)
        return -errno;
    if (source->place.binds)
        return open_listener(source);
    rc = kv_resolver_create(NULL, &source->resolver);
    source->connections[0] = calloc(1, sizeof(*source->connections[0]));
    if (rc < 0 || !source->connections[0])
        return -ENOMEM;
    memcpy(source->connections[0]->from, source->place.address, sizeof(source->place.address));
    ki_target_init(&source->target, source->url);
    source->resolve_ns = 1;
    return 0;
}

/* Return what a connection waits for; NULL: nothing. */
static const char *problem_of(const struct ki_sub *sub)
{
    if (sub->state == KI_SUB_UP || sub->problem)
        return sub->problem;
    if (sub->state == KI_SUB_CONNECTING)
        return "no answer so far: a firewall, or no such host";
    return sub->state == KI_SUB_SHAKING
               ? "connected, but nobody has spoken ZMTP so far: is that a ZMQ publisher's port?"
               : NULL;
}

static void get_state(const struct kc_source *base, struct kc_source_state *ret)
{
    const struct zmq_source *source = (const struct zmq_source *)base;

    *ret = (struct kc_source_state){.ever = source->ever, .binds = source->place.binds};
    ret->problem = source->unresolved ? source->unresolved : source->last_problem;
    for (size_t i = 0; i < KC_MAX_CONNECTIONS; i++) {
        const struct connection *c = source->connections[i];

        ret->connected += c && c->sub.state == KI_SUB_UP;
        if (c && problem_of(&c->sub))
            ret->problem = problem_of(&c->sub);
    }
    if (ret->connected)
        ret->problem = NULL;
}

/* -- connections ------------------------------------------------------------------------------- */

/* Connect, once the host's address is known. */
static void find_target(struct zmq_source *source, uint64_t now_ns)
{
    struct ki_sub *sub = &source->connections[0]->sub;
    int rc;

    if (!source->resolve_ns || now_ns < source->resolve_ns)
        return;
    rc = ki_target_find(&source->target, source->resolver, RESOLVED_AGE_MS);
    source->resolve_ns = rc < 0 ? now_ns + RESOLVE_NS : 0;
    source->unresolved = rc < 0 && rc != -EINPROGRESS ? kv_resolver_strerror(rc) : NULL;
    if (rc == 0 &&
        ki_sub_open(sub, source->target.where, &source->limits, source->epoll_fd, 0, now_ns) < 0)
        source->unresolved = "no address to connect to";
}

/* Try the host's next address after one that doesn't answer. */
static void turn_target(struct zmq_source *source, uint64_t now_ns)
{
    struct ki_sub *sub = &source->connections[0]->sub;

    if (!sub->changed)
        return;
    sub->changed = false;
    if (sub->state != KI_SUB_WAITING ||
        ki_target_turn(&source->target, source->resolver, RESOLVED_AGE_MS, true) <= 0)
        return;
    source->last_problem = sub->problem;
    ki_sub_close(sub);
    source->resolve_ns = now_ns + RESOLVE_NS;
}

/* Write the address of a publisher that has connected. IPv4 comes as ::ffff:a.b.c.d. */
static void write_peer(const struct sockaddr_storage *peer, socklen_t len, char ret[KC_MAX_FROM])
{
    char host[NI_MAXHOST], port[NI_MAXSERV];
    const char *shown = host;

    if (getnameinfo((const struct sockaddr *)peer, len, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV))
        return;
    if (strncmp(host, "::ffff:", 7) == 0 && strchr(host, '.'))
        shown += 7;
    snprintf(ret, KC_MAX_FROM, strchr(shown, ':') ? "tcp://[%.200s]:%s" : "tcp://%.200s:%s", shown,
             port);
}

static void accept_one(struct zmq_source *source, uint64_t now_ns)
{
    struct sockaddr_storage peer;
    socklen_t len = sizeof(peer);
    int fd =
        accept4(source->listen_fd, (struct sockaddr *)&peer, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct connection *c;
    size_t i = 0;

    if (fd < 0)
        return;
    while (i < KC_MAX_CONNECTIONS && source->connections[i])
        i++;
    c = i < KC_MAX_CONNECTIONS ? calloc(1, sizeof(*c)) : NULL;
    if (!c) {
        close(fd);
        return;
    }
    source->connections[i] = c;
    write_peer(&peer, len, c->from);
    ki_sub_accept(&c->sub, fd, &source->limits, source->epoll_fd, i, now_ns);
}

/* Free connections that publishers made and that have ended. */
static void free_ended(struct zmq_source *source)
{
    for (size_t i = 0; i < KC_MAX_CONNECTIONS; i++) {
        struct connection *c = source->connections[i];

        if (!c || c->sub.state >= KI_SUB_CONNECTING)
            continue;
        source->last_problem = c->sub.problem;
        ki_sub_close(&c->sub);
        free(c);
        source->connections[i] = NULL;
    }
}

static uint64_t tick(struct zmq_source *source, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;

    for (size_t i = 0; i < KC_MAX_CONNECTIONS; i++) {
        struct connection *c = source->connections[i];

        if (!c)
            continue;
        if (c->sub.deadline_ns && c->sub.deadline_ns <= now_ns)
            ki_sub_tick(&c->sub, now_ns);
        source->ever |= c->sub.ups > 0;
        if (c->sub.deadline_ns)
            next_ns = KV_MIN(next_ns, c->sub.deadline_ns);
    }
    if (source->place.binds) {
        free_ended(source);
    } else {
        turn_target(source, now_ns);
        find_target(source, now_ns);
    }
    return source->resolve_ns ? KV_MIN(next_ns, source->resolve_ns) : next_ns;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Return true for a message of the topic that the URL names; all are where it names none. */
static bool is_wanted(const struct zmq_source *source, const struct ki_zmtp_message *m)
{
    const char *topic = source->place.topic;
    size_t len = strlen(topic);

    return !len ||
           (m->n_frames > 1 && m->spans[0].len == len && memcmp(m->spans[0].data, topic, len) == 0);
}

static int hand_over(struct zmq_source *source, const struct connection *c,
                     const struct ki_zmtp_message *m, kc_message_fn fn, void *arg)
{
    struct kc_message message = {
        .time_ns = kv_wall_ns(), .from = {c->from, strlen(c->from)}, .n_frames = m->n_frames};

    if (!is_wanted(source, m))
        return 0;
    memcpy(message.frames, m->spans, sizeof(message.frames));
    return fn(arg, &message);
}

/* Read what has come over @c, in one turn. */
static int read_turn(struct zmq_source *source, struct connection *c, uint64_t now_ns,
                     kc_message_fn fn, void *arg)
{
    struct ki_zmtp_message message;
    int rc = 0, fills = 0;

    c->more = false;
    ki_sub_begin(&c->sub, &source->room);
    do
        while (rc == 0 && ki_sub_next(&c->sub, &message, now_ns))
            rc = hand_over(source, c, &message, fn, arg);
    while (rc == 0 && fills++ < MAX_FILLS && ki_sub_fill(&c->sub, now_ns) > 0);
    c->more = fills > MAX_FILLS;
    ki_sub_end(&c->sub, now_ns);
    return rc;
}

/* Read from all connections that have more than one turn's bytes. */
static int read_on(struct zmq_source *source, uint64_t now_ns, kc_message_fn fn, void *arg)
{
    int rc = 0;

    for (size_t i = 0; i < KC_MAX_CONNECTIONS && rc == 0; i++)
        if (source->connections[i] && source->connections[i]->more)
            rc = read_turn(source, source->connections[i], now_ns, fn, arg);
    return rc;
}

/* Return the milliseconds to wait for readiness. */
static int wait_ms(const struct zmq_source *source, uint64_t next_ns, uint64_t now_ns)
{
    for (size_t i = 0; i < KC_MAX_CONNECTIONS; i++)
        if (source->connections[i] && source->connections[i]->more)
            return 0;
    return (int)KV_MIN(kv_ms_until(next_ns, now_ns), (int64_t)MAX_WAIT_MS);
}

static int run(struct kc_source *base, uint64_t deadline_ns, kc_message_fn fn, void *arg)
{
    struct zmq_source *source = (struct zmq_source *)base;
    struct epoll_event events[16];
    uint64_t now_ns = kv_now_ns();
    int rc = 0, n;

    while (rc == 0 && now_ns < deadline_ns && !kc_bar_interrupted()) {
        uint64_t next_ns = KV_MIN(tick(source, now_ns), deadline_ns);

        n = epoll_wait(source->epoll_fd, events, KV_COUNT(events),
                       wait_ms(source, next_ns, now_ns));
        now_ns = kv_now_ns();
        for (int i = 0; i < n && rc == 0; i++) {
            struct connection *c;

            if (events[i].data.u64 == LISTENER) {
                accept_one(source, now_ns);
                continue;
            }
            c = source->connections[events[i].data.u64];
            ki_sub_ready(&c->sub, events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
            c->more = true;
        }
        rc = read_on(source, now_ns, fn, arg);
    }
    return rc;
}

/* -- opening ----------------------------------------------------------------------------------- */

int kc_source_open_zmq(const char *url, struct kc_source **ret, struct kv_error *error)
{
    static const struct kc_source_ops ops = {run, get_state, close_source};
    struct zmq_source *source = calloc(1, sizeof(*source));
    const char *why = NULL;
    int rc;

    if (!source)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    source->base.ops = &ops;
    source->epoll_fd = source->listen_fd = -1;
    source->limits = (struct ki_sub_limits){.max_message = KC_MAX_MESSAGE,
                                            .max_bytes = (uint64_t)4 * KC_MAX_MESSAGE};
    rc = strlen(url) < sizeof(source->url) ? 0 : -EINVAL;
    if (rc == 0) {
        memcpy(source->url, url, strlen(url) + 1);
        rc = ki_place_parse(source->url, &source->place, &why);
    }
    if (rc == 0 && source->place.endpoint.scheme == KV_SCHEME_INPROC)
        rc = -EINVAL;
    if (rc < 0) {
        kv_fail(error, rc, 0, "not a usable URL: %.150s%s%s", url, why ? ": " : "", why ? why : "");
    } else {
        rc = open_source(source);
        if (rc < 0)
            kv_fail(error, rc, 0, "%.150s: %s", url, strerror(-rc));
    }
    if (rc < 0) {
        close_source(&source->base);
        return rc;
    }
    *ret = &source->base;
    return 0;
}
