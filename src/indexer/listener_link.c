// SPDX-License-Identifier: Apache-2.0
/* The SUB socket and the connection behind it. */
#include <inttypes.h>

#include "base/log.h"
#include "indexer/listener_impl.h"
#include "indexer/pump.h"
#include "indexer/socket.h"

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
    const char *problem = l->link.problem;

    pthread_mutex_lock(&l->lock);
    l->connected = l->link.state == KI_LINK_UP;
    if (l->connected && l->ups_told != l->link.ups) {
        l->sub_ready = true; /* first read what the last connection brought */
        ki_stream_reachable(&l->stream, now_ns);
    }
    if (!l->connected)
        ki_stream_disconnected(&l->stream);
    if (problem || l->connected)
        snprintf(l->last_error, sizeof(l->last_error), "%s", problem ? problem : "");
    pthread_mutex_unlock(&l->lock);
}

void ki_listener_heard(struct ki_listener *l, bool first, uint64_t now_ns)
{
    if (ki_link_is_well(&l->link, now_ns))
        show_link(l, now_ns);
    if (!first)
        return;
    /*
     * The stream hears of the connection with the batch itself. libzmq reports a connection before
     * it delivers its messages; the message may be of an earlier one.
     */
    if (ki_link_read(&l->link, now_ns))
        show_link(l, now_ns);
    if (l->link.ups == l->ups_told + 1)
        l->ups_told = l->link.ups;
}

/*
 * End the overlap with the dump of a peer that gives no positions. All batches published during the
 * dump have been read, live or by the first replay.
 */
static void end_overlap(struct ki_listener *l)
{
    if (!l->applier.overlaps || l->has_overlap_end || l->holding ||
        l->stream.state != KI_STREAM_LIVE || l->stream.seeded)
        return;
    pthread_mutex_lock(&l->lock);
    l->applier.overlaps = false;
    pthread_mutex_unlock(&l->lock);
}

void ki_listener_tell_connection(struct ki_listener *l, uint64_t now_ns)
{
    unsigned steps = 0;

    if (!l->started || l->sub_ready || ki_listener_has_backlog(l))
        return;
    end_overlap(l);
    if (l->link.state != KI_LINK_UP || l->ups_told == l->link.ups)
        return;
    pthread_mutex_lock(&l->lock);
    if (!l->gone && l->stream.state == KI_STREAM_LIVE) {
        /* The first connection, made before recovery, is older than the peer's dump. */
        bool anew = l->ups_at_start != 1 || l->link.ups != 1;

        steps = ki_stream_connected(&l->stream, anew, now_ns);
        l->ups_told = l->link.ups;
    }
    pthread_mutex_unlock(&l->lock);
    ki_listener_follow(l, steps, now_ns);
}

/* Log each connection's start and loss once, and its absence SILENT_NS after the start. */
static void log_link(struct ki_listener *l, uint64_t now_ns)
{
    static struct kv_log_rate rate;
    bool up = l->link.state == KI_LINK_UP;
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
    kv_log_quote(quoted, sizeof(quoted), up || !l->link.problem ? "" : l->link.problem);
    if (kv_log_allowed(&rate, LINK_LINES))
        kv_log_(up ? KV_LOG_INFO : KV_LOG_WARN, "indexer", said,
                "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s reason=%s", l->instance, l->rank,
                l->endpoint, quoted);
    l->link_told = up ? KI_TOLD_UP : KI_TOLD_DOWN;
}

/* Update the times for look_again and the log. */
static void note_link(struct ki_listener *l, uint64_t now_ns)
{
    log_link(l, now_ns);
    if (l->link.state == KI_LINK_UP) {
        l->was_up = true;
        l->look_again_ns = 0;
    } else if (!l->look_again_ns) {
        l->lost_ns = now_ns;
        l->look_again_ns = now_ns + KV_NS_PER_S;
    }
}

void ki_listener_read_link(struct ki_listener *l, uint64_t now_ns)
{
    if (l->link_ready && ki_link_read(&l->link, now_ns))
        show_link(l, now_ns);
    l->link_ready = false;
    if (l->sub)
        note_link(l, now_ns);
}

/* -- opening and closing ----------------------------------------------------------------------- */

static void close_sub(struct ki_listener *l)
{
    ki_link_close(&l->link, l->sub, l->epoll_fd);
    ki_socket_close(l->sub, l->epoll_fd);
    l->sub = NULL;
    l->sub_ready = l->link_ready = false;
}

void ki_listener_disconnect(struct ki_listener *l)
{
    ki_listener_close_replay(l);
    close_sub(l);
    l->link_told = KI_TOLD_NOTHING; /* closed on purpose, not lost */
    l->silent_ns = 0;
    ki_listener_drop_held(l);
    pthread_mutex_lock(&l->lock);
    l->connected = false;
    ki_stream_detach(&l->stream);
    pthread_mutex_unlock(&l->lock);
}

/* Connect to l->target.where. */
static int open_sub(struct ki_listener *l)
{
    int rc = ki_socket_open(l->env->zmq, ZMQ_SUB, l->target.where, KI_RECEIVE_QUEUE, KI_MAX_MESSAGE,
                            l->epoll_fd, KI_PUMP_SUB(l), &l->sub);

    if (rc == 0)
        rc = ki_link_open(&l->link, l->env->zmq, l->sub, l->epoll_fd, KI_PUMP_LINK(l));
    if (rc == 0)
        rc = ki_socket_connect(l->sub, l->target.where);
    if (rc < 0)
        close_sub(l);
    return rc;
}

static void fail_connect(struct ki_listener *l, const char *why, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    pthread_mutex_lock(&l->lock);
    snprintf(l->last_error, sizeof(l->last_error), "%.70s: %s", l->endpoint, why);
    pthread_mutex_unlock(&l->lock);
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "can't connect; trying again in 5 s",
                    "worker=%" PRIu64 " rank=%" PRIu32 " error=\"%s\"", l->instance, l->rank,
                    l->last_error);
    l->retry_at_ns = now_ns + CONNECT_RETRY_NS;
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
    rc = open_sub(l);
    if (rc < 0) {
        fail_connect(l, zmq_strerror(-rc), now_ns);
        return;
    }
    l->sub_ready = l->link_ready = true; /* connecting may have consumed an edge */
    l->retry_at_ns = 0;
    l->lost_ns = now_ns;
    l->look_again_ns = now_ns + CONNECT_RETRY_NS;
    pthread_mutex_lock(&l->lock);
    l->last_error[0] = '\0';
    pthread_mutex_unlock(&l->lock);
}

/* -- connecting anew --------------------------------------------------------------------------- */

/*
 * Resolve the name again without a connection: it may have moved, or have another address that
 * answers. First read what the last connection brought.
 */
static void look_again(struct ki_listener *l, uint64_t now_ns)
{
    int rc;

    note_link(l, now_ns);
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

/*
 * Make the socket anew after libzmq has given up the connection. First read what it brought:
 * closing the socket would lose that. A running replay goes on; batches missed meanwhile show as a
 * gap.
 */
static void reopen(struct ki_listener *l, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    if (l->sub_ready) {
        l->link.dead_at_ns = now_ns + l->link.delay_ns;
        return;
    }
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "the publisher broke the protocol or sent too much: connecting anew",
                    "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s limit=%" PRId64, l->instance,
                    l->rank, l->endpoint, KI_MAX_MESSAGE);
    close_sub(l);
    ki_link_back_off(&l->link);
    pthread_mutex_lock(&l->lock);
    l->reopened++;
    pthread_mutex_unlock(&l->lock);
    ki_listener_connect(l, now_ns);
}

void ki_listener_reconnect(struct ki_listener *l, uint64_t now_ns)
{
    if (ki_link_is_dead(&l->link, now_ns))
        reopen(l, now_ns);
    else
        look_again(l, now_ns);
}
