// SPDX-License-Identifier: Apache-2.0
/*
 * The connection to the publisher: made, lost, looked for, and reported.
 *
 *     closed ─► resolved ─► connecting ─► up: NEW ─► told to the stream: UP ─► lost: DOWN ─┐
 *       ▲                       ▲                                                          │
 *       └── paused, retired     └── again and again, and at another address after a while ─┘
 *
 * Invariant: the stream hears of a connection behind the last batch of the one before, as it takes
 * what follows for possibly another process's. Until then the link is NEW.
 */
#include <inttypes.h>

#include "base/core/log.h"
#include "indexer/stream/hub.h"
#include "indexer/stream/listener_impl.h"
#include "indexer/stream/pump.h"
#include "indexer/zmq/socket.h"

#define CONNECT_RETRY_NS (5 * KV_NS_PER_S)
#define SILENT_NS (5 * KV_NS_PER_S)
#define LINK_LINES 20 /* log lines a second, of all workers */
/* Time to stay with an address that answered before: it may come back. */
#define LOYALTY_NS (30 * KV_NS_PER_S)
/* Greatest age in milliseconds of a resolved address to connect to. */
#define RESOLVED_AGE_MS 5000

/* -- telling about it -------------------------------------------------------------------------- */

/* Publish the state of the connection in /workers, and report it to the stream. */
static void show_link(struct ki_listener *l, uint64_t now_ns)
{
    const char *problem = l->sub.problem;

    l->sub.changed = false;
    pthread_mutex_lock(&l->lock);
    l->link = l->sub.state != KI_SUB_UP   ? KI_LINK_DOWN
              : l->ups_told != l->sub.ups ? KI_LINK_NEW
                                          : KI_LINK_UP;
    l->is_late |= l->link == KI_LINK_NEW && !l->started &&
                  atomic_load_explicit(&l->env->awaits_dump, memory_order_acquire);
    l->reopened = l->sub.reopened;
    if (l->link == KI_LINK_NEW)
        ki_stream_reachable(&l->stream, now_ns);
    if (l->link == KI_LINK_DOWN)
        ki_stream_disconnected(&l->stream, l->sub.silent_ns ? l->sub.silent_ns : now_ns);
    if (problem || l->link != KI_LINK_DOWN)
        snprintf(l->last_error, sizeof(l->last_error), "%s", problem ? problem : "");
    ki_listener_unlock(l);
}

void ki_listener_note_told(struct ki_listener *l)
{
    l->ups_told = l->sub.ups;
    pthread_mutex_lock(&l->lock);
    if (l->link == KI_LINK_NEW)
        l->link = KI_LINK_UP;
    ki_listener_unlock(l);
}

void ki_listener_tell_dropped(struct ki_listener *l, uint64_t now_ns)
{
    if (!l->backlog.dropped_next || !l->started || l->copying || l->holding ||
        ki_listener_has_backlog(l))
        return;
    pthread_mutex_lock(&l->lock);
    if (!l->gone)
        ki_stream_dropped(&l->stream, l->backlog.dropped_next, now_ns);
    ki_listener_unlock(l);
    l->backlog.dropped_next = 0;
    if (l->backlog.lost_reconnect && l->ups_told == l->sub.ups)
        l->ups_told--; /* that batch would have told of the connection */
    l->backlog.lost_reconnect = false;
}

void ki_listener_tell_connection(struct ki_listener *l, uint64_t now_ns)
{
    unsigned steps = 0;

    if (!l->started || l->copying || l->sub_ready || ki_listener_has_backlog(l))
        return;
    if (l->sub.state != KI_SUB_UP || l->ups_told == l->sub.ups)
        return;
    pthread_mutex_lock(&l->lock);
    if (!l->gone && l->stream.state == KI_STREAM_LIVE) {
        /* The first connection, made before recovery, is older than the peer's dump. */
        bool anew = l->ups_at_start != 1 || l->sub.ups != 1 || l->is_late;

        steps = ki_stream_connected(&l->stream, anew, now_ns);
        l->ups_told = l->sub.ups;
        l->link = KI_LINK_UP;
    }
    ki_listener_unlock(l);
    ki_listener_follow(l, steps, now_ns);
}

/* Log each connection's start and loss once, and its absence SILENT_NS after the start. */
static void log_link(struct ki_listener *l, uint64_t now_ns)
{
    static struct kv_log_rate rate;
    bool up = l->sub.state == KI_SUB_UP;
    const char *said = "connected to a worker";
    char quoted[120];

    if (l->link_told == (up ? KI_TOLD_UP : KI_TOLD_DOWN))
        return;
    if (!up && l->link_told == KI_TOLD_NOTHING) {
        if (!l->silent_ns)
            l->silent_ns = now_ns + SILENT_NS;
        if (now_ns < l->silent_ns)
            return;
    }
    if (!up)
        said = l->link_told == KI_TOLD_UP ? "lost a worker's connection; trying again and again"
                                          : "a worker does not answer; trying again and again";
    kv_log_quote(quoted, sizeof(quoted), up || !l->sub.problem ? "" : l->sub.problem);
    if (kv_log_allowed(&rate, LINK_LINES))
        kv_log_(up ? KV_LOG_INFO : KV_LOG_WARN, "indexer", said,
                "worker=%s rank=%" PRIu32 " endpoint=%s reason=%s", l->who, l->rank, l->endpoint,
                quoted);
    l->link_told = up ? KI_TOLD_UP : KI_TOLD_DOWN;
}

static void log_breach(const struct ki_listener *l)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "the publisher broke the protocol or sent too much: connecting anew",
                    "worker=%s rank=%" PRIu32 " endpoint=%s limit=%" PRId64, l->who, l->rank,
                    l->endpoint, KI_MAX_MESSAGE);
}

void ki_listener_note_link(struct ki_listener *l, uint64_t now_ns)
{
    if (!ki_listener_is_open(l))
        return;
    if (l->sub.changed) {
        if (l->sub.broken)
            log_breach(l);
        show_link(l, now_ns);
    }
    log_link(l, now_ns);
    if (l->sub.state == KI_SUB_UP) {
        l->was_up = true;
        l->look_again_ns = 0;
    } else if (!l->look_again_ns) {
        l->lost_ns = now_ns;
        l->look_again_ns = now_ns + KV_NS_PER_S;
    }
}

/* -- opening and closing ----------------------------------------------------------------------- */

static void close_sub(struct ki_listener *l)
{
    ki_sub_close(&l->sub);
    l->sub_ready = false;
}

void ki_listener_disconnect(struct ki_listener *l)
{
    ki_listener_close_replay(l);
    close_sub(l);
    ki_hub_leave(l);
    l->link_told = KI_TOLD_NOTHING; /* closed on purpose, not lost */
    l->silent_ns = 0;
    ki_listener_drop_held(l);
    pthread_mutex_lock(&l->lock);
    l->link = KI_LINK_DOWN;
    ki_stream_detach(&l->stream);
    ki_listener_unlock(l);
}

static void fail_connect(struct ki_listener *l, const char *why, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    pthread_mutex_lock(&l->lock);
    snprintf(l->last_error, sizeof(l->last_error), "%.70s: %s", l->endpoint, why);
    ki_listener_unlock(l);
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "can't connect; trying again in 5 s",
                    "worker=%s rank=%" PRIu32 " error=\"%s\"", l->who, l->rank, l->last_error);
    l->retry_at_ns = now_ns + CONNECT_RETRY_NS;
}

static void note_open(struct ki_listener *l, uint64_t look_again_ns, uint64_t now_ns)
{
    l->retry_at_ns = 0;
    l->lost_ns = now_ns;
    l->look_again_ns = look_again_ns;
    pthread_mutex_lock(&l->lock);
    l->last_error[0] = '\0';
    ki_listener_unlock(l);
}

/* Wait for a publisher that connects. */
static void listen_for_it(struct ki_listener *l, uint64_t now_ns)
{
    int rc = ki_hub_join(l->hubs, l);

    if (rc < 0) {
        fail_connect(
            l,
            rc == -EADDRINUSE
                ? "another worker has this address and topic, or another program the address"
                : strerror(-rc),
            now_ns);
        return;
    }
    ki_sub_await(&l->sub, &l->env->arriving, l->epoll_fd, KI_PUMP_SUB(l));
    note_open(l, now_ns, now_ns);
}

void ki_listener_connect(struct ki_listener *l, uint64_t now_ns)
{
    int rc = ki_target_find(&l->target, l->env->resolver, RESOLVED_AGE_MS);

    if (l->replay_endpoint) /* resolve it before it is needed */
        (void)ki_target_find(&l->replay_target, l->env->resolver, RESOLVED_AGE_MS);
    if (rc == -EINPROGRESS) {
        l->retry_at_ns = now_ns + KI_RESOLVE_POLL_NS;
        return;
    }
    if (rc < 0) {
        fail_connect(l, kv_resolver_strerror(rc), now_ns);
        return;
    }
    if (l->target.place.binds) {
        listen_for_it(l, now_ns);
        return;
    }
    rc = ki_sub_open(&l->sub, l->target.where, &l->env->arriving, l->epoll_fd, KI_PUMP_SUB(l),
                     now_ns);
    if (rc < 0) {
        fail_connect(l, "no address to connect to", now_ns);
        return;
    }
    note_open(l, now_ns + CONNECT_RETRY_NS, now_ns);
}

/* -- connecting anew --------------------------------------------------------------------------- */

/*
 * Resolve the name again without a connection: it may have moved, or have another address that
 * answers. First read what the last connection brought.
 */
static void look_again(struct ki_listener *l, uint64_t now_ns)
{
    int rc;

    if (l->target.place.binds && l->look_again_ns && now_ns >= l->look_again_ns) {
        if (!ki_hub_offer(l, now_ns)) /* one may have come while this one had another */
            l->look_again_ns = now_ns + KV_NS_PER_S;
        return;
    }
    if (!l->target.named || !l->look_again_ns || now_ns < l->look_again_ns)
        return;
    l->look_again_ns = now_ns + KI_RESOLVE_POLL_NS;
    if (l->sub_ready || l->holding)
        return;
    rc = ki_target_turn(&l->target, l->env->resolver, 1000,
                        !l->was_up || now_ns - l->lost_ns > LOYALTY_NS);
    if (rc == -EINPROGRESS)
        return;
    l->look_again_ns = now_ns + CONNECT_RETRY_NS;
    if (rc <= 0)
        return;
    l->was_up = false;
    close_sub(l);
    ki_listener_connect(l, now_ns);
}

void ki_listener_reconnect(struct ki_listener *l, uint64_t now_ns)
{
    ki_sub_tick(&l->sub, now_ns);
    ki_listener_note_link(l, now_ns);
    look_again(l, now_ns);
}
