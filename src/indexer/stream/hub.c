// SPDX-License-Identifier: Apache-2.0
/*
 * Addresses on which publishers connect (hub.h has the picture). A connection's way:
 *
 *     accepted ─► handshake ─► up, topic unknown ─► first message: known ─┬─► its listener has it
 *         │            │               │                                  └─► waits: that one has
 *         └────────────┴───────────────┴─► ended, or makes room: dropped      a connection already
 *
 * Invariants: a listener has one connection at a time, and each connection goes to one listener.
 * Two listeners of one address never follow the same topic. Anybody may connect, so the number of
 * connections that wait is bounded. A dropped one is freed in the next tick: events of this round
 * may still name it.
 */
#include "indexer/stream/hub.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "event/wire/frames.h"
#include "indexer/stream/listener_impl.h"
#include "indexer/stream/pump.h"
#include "indexer/zmq/listen.h"

#define MAX_WAITING 64 /* connections that wait at an address; see choose_victim */
#define ACCEPT_RETRY_NS (100 * KV_NS_PER_MS)

struct ki_hub_conn {
    struct ki_hub *hub;
    struct ki_sub sub;
    bool known;  /* its first message is there, and topic is set */
    char *topic; /* NULL: none, or no memory */
    struct in6_addr source;
    TAILQ_ENTRY(ki_hub_conn) entry;
};

struct ki_hub {
    struct ki_hubs *hubs;
    int fd;
    char *address;
    size_t n_waiting;
    uint64_t again_ns; /* time to accept connections again, after a failure; 0: accepts them */
    TAILQ_HEAD(ki_hub_waiting, ki_hub_conn) waiting;
    LIST_HEAD(ki_hub_listeners, ki_listener) listeners;
    TAILQ_ENTRY(ki_hub) entry;
};

void ki_hubs_init(struct ki_hubs *hubs, int epoll_fd, struct ki_sub_room *room)
{
    TAILQ_INIT(&hubs->all);
    TAILQ_INIT(&hubs->gone);
    hubs->epoll_fd = epoll_fd;
    hubs->room = room;
}

/* -- the address ------------------------------------------------------------------------------- */

static int open_hub(struct ki_hubs *hubs, const struct ki_place *place, struct ki_hub **ret)
{
    struct epoll_event event = {.events = EPOLLIN};
    struct ki_hub *hub = calloc(1, sizeof(*hub));
    int rc = -ENOMEM;

    if (!hub)
        return -ENOMEM;
    hub->hubs = hubs;
    hub->fd = -1;
    TAILQ_INIT(&hub->waiting);
    hub->address = strdup(place->address);
    if (hub->address)
        rc = hub->fd = ki_listen(&place->endpoint);
    event.data.u64 = KI_PUMP_HUB(hub);
    if (rc >= 0 && epoll_ctl(hubs->epoll_fd, EPOLL_CTL_ADD, hub->fd, &event) < 0)
        rc = -errno;
    if (rc < 0) {
        if (hub->fd >= 0)
            close(hub->fd);
        free(hub->address);
        free(hub);
        return rc;
    }
    TAILQ_INSERT_TAIL(&hubs->all, hub, entry);
    *ret = hub;
    return 0;
}

/* -- waiting connections ----------------------------------------------------------------------- */

/* End a waiting connection now; its memory stays until the next tick. */
static void drop(struct ki_hub_conn *conn)
{
    struct ki_hub *hub = conn->hub;

    if (!hub)
        return; /* dropped already */
    ki_sub_close(&conn->sub);
    TAILQ_REMOVE(&hub->waiting, conn, entry);
    hub->n_waiting--;
    conn->hub = NULL;
    TAILQ_INSERT_TAIL(&hub->hubs->gone, conn, entry);
}

static void free_gone(struct ki_hubs *hubs)
{
    struct ki_hub_conn *conn;

    while ((conn = TAILQ_FIRST(&hubs->gone))) {
        TAILQ_REMOVE(&hubs->gone, conn, entry);
        free(conn->topic);
        free(conn);
    }
}

static bool follows(const struct ki_listener *l, const char *topic)
{
    return strcmp(l->target.place.topic, topic) == 0;
}

/*
 * Return the listener that a connection belongs to, whether it has one already or not; or NULL. A
 * listener without a topic takes what no other follows. Alone at its address, it needn't wait for a
 * message to learn that.
 */
static struct ki_listener *owner_of(const struct ki_hub_conn *conn)
{
    struct ki_listener *first = LIST_FIRST(&conn->hub->listeners), *l, *any = NULL;
    bool only = first && !LIST_NEXT(first, at_hub);

    if (conn->sub.state != KI_SUB_UP)
        return NULL;
    if (only && follows(first, ""))
        return first;
    LIST_FOREACH(l, &conn->hub->listeners, at_hub)
    {
        if (conn->known && conn->topic && follows(l, conn->topic))
            return l;
        if (conn->known && follows(l, ""))
            any = l;
    }
    return any;
}

/*
 * Give a connection to its listener, if that waits for one. Returns the listener. Bytes read so far
 * go along, and sub_ready is set for them: epoll has reported them to the hub and won't again.
 */
static struct ki_listener *give(struct ki_hub_conn *conn, uint64_t now_ns)
{
    struct ki_listener *l = owner_of(conn);

    if (!l || l->sub.state != KI_SUB_WAITING)
        return NULL;
    ki_sub_take(&l->sub, &conn->sub, KI_PUMP_SUB(l));
    l->source = conn->source;
    l->sub_ready = true;
    drop(conn);
    ki_listener_note_link(l, now_ns);
    return l;
}

bool ki_hub_offer(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_hub_conn *conn;

    if (!l->hub || l->sub.state != KI_SUB_WAITING)
        return false;
    TAILQ_FOREACH(conn, &l->hub->waiting, entry)
    if (owner_of(conn) == l)
        return give(conn, now_ns) != NULL;
    return false;
}

static bool is_same(const struct in6_addr *a, const struct in6_addr *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

bool ki_hub_may_be_back(const struct ki_listener *l)
{
    const struct ki_hub_conn *conn;

    if (!l->hub || l->sub.state != KI_SUB_WAITING)
        return false;
    TAILQ_FOREACH(conn, &l->hub->waiting, entry)
    if (conn->sub.state == KI_SUB_UP && !conn->known && is_same(&conn->source, &l->source))
        return true;
    return false;
}

/* Return the number of waiting connections that have the source of @one. */
static size_t count_source(const struct ki_hub *hub, const struct ki_hub_conn *one)
{
    const struct ki_hub_conn *conn;
    size_t n = 0;

    for (conn = TAILQ_FIRST(&hub->waiting); conn; conn = TAILQ_NEXT(conn, entry))
        n += is_same(&conn->source, &one->source);
    return n;
}

/*
 * Choose the connection that makes room: of the source with most of them, so that no other source
 * suffers; the oldest whose handshake isn't done, or else the oldest.
 */
static struct ki_hub_conn *choose_victim(const struct ki_hub *hub)
{
    struct ki_hub_conn *conn, *best = NULL;
    size_t most = 0;

    for (conn = TAILQ_FIRST(&hub->waiting); conn; conn = TAILQ_NEXT(conn, entry)) {
        size_t n = count_source(hub, conn);

        if (!best || n > most ||
            (n == most && is_same(&conn->source, &best->source) && best->sub.state == KI_SUB_UP &&
             conn->sub.state != KI_SUB_UP))
            best = conn;
        most = KV_MAX(n, most);
    }
    return best;
}

/* Return the address at the other end; IPv4 as a mapped one. */
static struct in6_addr source_of(const struct sockaddr_storage *from)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)from;
    struct in6_addr ret = {.s6_addr = {[10] = 0xff, [11] = 0xff}};

    if (from->ss_family == AF_INET6)
        return ((const struct sockaddr_in6 *)from)->sin6_addr;
    memcpy(ret.s6_addr + 12, &v4->sin_addr, sizeof(v4->sin_addr));
    return ret;
}

/* Choose whether epoll reports connections that come, and those not accepted yet. */
static void watch(struct ki_hub *hub, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = KI_PUMP_HUB(hub)};

    (void)epoll_ctl(hub->hubs->epoll_fd, EPOLL_CTL_MOD, hub->fd, &event);
}

/* Accept none for a while: epoll would report the one that waits again and again. */
static void rest(struct ki_hub *hub, int error, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 1))
        kv_log_warn("indexer", "can't accept a publisher's connection; trying again in 0.1 s",
                    "endpoint=bind:%s error=\"%s\"", hub->address, strerror(error));
    hub->again_ns = now_ns + ACCEPT_RETRY_NS;
    watch(hub, 0);
}

void ki_hub_accept(struct ki_hub *hub, uint64_t now_ns)
{
    struct ki_listener *l = LIST_FIRST(&hub->listeners);

    for (int i = 0; i < MAX_WAITING; i++) {
        struct sockaddr_storage from = {.ss_family = AF_UNSPEC};
        socklen_t len = sizeof(from);
        int fd = accept4(hub->fd, (struct sockaddr *)&from, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct ki_hub_conn *conn = fd < 0 ? NULL : calloc(1, sizeof(*conn));

        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
                rest(hub, errno, now_ns);
            return;
        }
        if (!conn) {
            close(fd);
            return;
        }
        if (hub->n_waiting == MAX_WAITING)
            drop(choose_victim(hub));
        conn->hub = hub;
        conn->source = source_of(&from);
        TAILQ_INSERT_TAIL(&hub->waiting, conn, entry);
        hub->n_waiting++;
        ki_sub_accept(&conn->sub, fd, &l->env->arriving, hub->hubs->epoll_fd,
                      KI_PUMP_HUB_CONN(conn), now_ns);
    }
}

/* Read up to the first message, which tells the topic and is left for the listener. */
static void read_topic(struct ki_hub_conn *conn, uint64_t now_ns)
{
    struct ki_sub *sub = &conn->sub;
    struct ki_zmtp_message whole;
    struct kve_message message;
    bool numbered;

    for (;;) {
        size_t start = sub->start;

        if (!ki_sub_next(sub, &whole, now_ns)) {
            if (!ki_sub_fill(sub, now_ns))
                return;
            continue;
        }
        sub->start = start;
        conn->known = true;
        if (whole.n_frames <= KVE_MAX_FRAMES &&
            (kve_message_parse_live(whole.spans, whole.n_frames, &message) == 0 ||
             kve_message_parse_short(whole.spans, whole.n_frames, &message, &numbered) == 0))
            conn->topic = strndup(message.topic.data, message.topic.len);
        return;
    }
}

struct ki_listener *ki_hub_read(struct ki_hub_conn *conn, bool ended, uint64_t now_ns)
{
    if (!conn->hub)
        return NULL; /* it has ended in this round of events */
    ki_sub_ready(&conn->sub, ended);
    if (!conn->known) {
        ki_sub_begin(&conn->sub, conn->hub->hubs->room);
        read_topic(conn, now_ns);
        ki_sub_end(&conn->sub, now_ns);
    } else if (ended) { /* nobody took it in time: its messages show as a gap */
        drop(conn);
        return NULL;
    }
    if (conn->sub.state == KI_SUB_WAITING) {
        drop(conn);
        return NULL;
    }
    return give(conn, now_ns);
}

/* Return the earlier of two times; 0 is never. */
static uint64_t earlier(uint64_t a_ns, uint64_t b_ns)
{
    return !a_ns || (b_ns && b_ns < a_ns) ? b_ns : a_ns;
}

uint64_t ki_hubs_tick(struct ki_hubs *hubs, uint64_t now_ns)
{
    struct ki_hub_conn *conn, *next;
    uint64_t deadline_ns = 0;
    struct ki_hub *hub;

    free_gone(hubs);
    for (hub = TAILQ_FIRST(&hubs->all); hub; hub = TAILQ_NEXT(hub, entry)) {
        if (hub->again_ns && now_ns >= hub->again_ns) {
            hub->again_ns = 0;
            watch(hub, EPOLLIN);
        }
        deadline_ns = earlier(deadline_ns, hub->again_ns);
        for (conn = TAILQ_FIRST(&hub->waiting); conn; conn = next) {
            next = TAILQ_NEXT(conn, entry);
            if (conn->sub.deadline_ns && now_ns >= conn->sub.deadline_ns)
                ki_sub_tick(&conn->sub, now_ns);
            if (conn->sub.state == KI_SUB_WAITING)
                drop(conn);
            else
                deadline_ns = earlier(deadline_ns, conn->sub.deadline_ns);
        }
    }
    return deadline_ns;
}

/* -- listeners --------------------------------------------------------------------------------- */

static struct ki_hub *find_hub(struct ki_hubs *hubs, const char *address)
{
    struct ki_hub *hub = TAILQ_FIRST(&hubs->all);

    while (hub && strcmp(hub->address, address) != 0)
        hub = TAILQ_NEXT(hub, entry);
    return hub;
}

int ki_hub_join(struct ki_hubs *hubs, struct ki_listener *l)
{
    const struct ki_place *place = &l->target.place;
    struct ki_listener *other;
    struct ki_hub *hub = find_hub(hubs, place->address);
    int rc = 0;

    if (l->hub)
        return 0;
    if (!hub)
        rc = open_hub(hubs, place, &hub);
    if (rc < 0)
        return rc;
    /* With two listeners of one topic, chance would decide which worker a publisher is. */
    LIST_FOREACH(other, &hub->listeners, at_hub)
    if (follows(other, place->topic))
        return -EADDRINUSE;
    l->hub = hub;
    LIST_INSERT_HEAD(&hub->listeners, l, at_hub);
    return 0;
}

void ki_hub_leave(struct ki_listener *l)
{
    struct ki_hub *hub = KV_STEAL(l->hub);

    if (!hub)
        return;
    LIST_REMOVE(l, at_hub);
    if (!LIST_EMPTY(&hub->listeners))
        return;
    while (!TAILQ_EMPTY(&hub->waiting))
        drop(TAILQ_FIRST(&hub->waiting));
    free_gone(hub->hubs);
    TAILQ_REMOVE(&hub->hubs->all, hub, entry);
    close(hub->fd);
    free(hub->address);
    free(hub);
}
