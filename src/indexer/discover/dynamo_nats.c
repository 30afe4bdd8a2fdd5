// SPDX-License-Identifier: Apache-2.0
#include "indexer/discover/dynamo_nats.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/log.h"
#include "event/router/envelope.h"
#include "event/wire/frames.h"
#include "indexer/stream/listener.h"

#define KEPT_BYTES ((size_t)64 << 20)

struct kept {
    STAILQ_ENTRY(kept) list;
    size_t len;
    char data[];
};
STAILQ_HEAD(kept_list, kept);

/* A publisher, and the listener that its messages are for. */
struct route {
    uint64_t publisher, worker;
    uint32_t rank;
    struct ki_listener *listener; /* NULL: not registered yet, or not any more */
    uint64_t told;                /* connection of which the listener knows; 0: of none */
    bool down;                    /* the listener knows that there is none */
    uint64_t heard;               /* connection over which the last message came; 0: none came */
    struct kept_list kept;        /* older than any message to come */
};

struct ki_dynamo_nats {
    struct ki_registry *registry;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    struct kvp_nats_secrets secrets;
    _Atomic uint64_t connections; /* made so far; relaxed: it orders nothing */
    atomic_bool connected;        /* relaxed, likewise */

    pthread_mutex_t lock;  /* guards the rest */
    struct route **routes; /* sorted by publisher */
    size_t n_routes;
    struct ki_dynamo_nats_stats stats;
};

/* ---- routes ---- */

static void drop_kept(struct ki_dynamo_nats *d, struct route *route)
{
    struct kept *kept;

    while ((kept = STAILQ_FIRST(&route->kept)) != NULL) {
        STAILQ_REMOVE_HEAD(&route->kept, list);
        d->stats.kept_bytes -= kept->len;
        free(kept);
    }
}

static void route_free(struct ki_dynamo_nats *d, struct route *route)
{
    drop_kept(d, route);
    ki_listener_release(route->listener);
    free(route);
}

static int by_publisher(const void *a, const void *b)
{
    const struct route *const *x = a, *const *y = b;

    return ((*x)->publisher > (*y)->publisher) - ((*x)->publisher < (*y)->publisher);
}

static struct route *find(const struct ki_dynamo_nats *d, uint64_t publisher)
{
    const struct route wanted = {.publisher = publisher}, *key = &wanted;
    struct route **found =
        d->n_routes ? bsearch(&key, d->routes, d->n_routes, sizeof(struct route *), by_publisher)
                    : NULL;

    return found ? *found : NULL;
}

/* Take a route that goes on, or make one. NULL: out of memory. */
static struct route *take_route(struct ki_dynamo_nats *d, const struct kvp_dynamo_worker *worker)
{
    struct route *route = find(d, worker->publisher);

    if (route && route->worker == worker->worker && route->rank == worker->rank)
        return route;
    route = calloc(1, sizeof(*route));
    if (!route)
        return NULL;
    route->publisher = worker->publisher;
    route->worker = worker->worker;
    route->rank = worker->rank;
    STAILQ_INIT(&route->kept);
    return route;
}

/* Free the routes of @from that aren't among the @n of @in, which are sorted. */
static void free_others(struct ki_dynamo_nats *d, struct route **from, size_t n_from,
                        struct route **in, size_t n)
{
    for (size_t i = 0; i < n_from; i++) {
        struct route **same =
            n ? bsearch(&from[i], in, n, sizeof(struct route *), by_publisher) : NULL;

        if (!same || *same != from[i])
            route_free(d, from[i]);
    }
}

int ki_dynamo_nats_set(struct ki_dynamo_nats *d, const struct kvp_dynamo_worker *workers, size_t n)
{
    struct route **routes = calloc(n + 1, sizeof(struct route *));
    size_t n_routes = 0;
    bool ok = true;

    if (!routes)
        return -ENOMEM;
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < n && ok; i++) {
        if (workers[i].address)
            continue;
        routes[n_routes] = take_route(d, &workers[i]);
        ok = routes[n_routes] != NULL;
        n_routes += ok;
    }
    qsort(routes, n_routes, sizeof(struct route *), by_publisher);
    if (ok) {
        free_others(d, d->routes, d->n_routes, routes, n_routes);
        free(KV_STEAL(d->routes));
        d->routes = routes;
        d->n_routes = n_routes;
    } else {
        free_others(d, routes, n_routes, d->routes, d->n_routes);
        free(routes);
    }
    pthread_mutex_unlock(&d->lock);
    return ok ? 0 : -ENOMEM;
}

/* ---- messages ---- */

/* The registration has ended, or is another one's: the next one is found by a tick. */
static void detach(struct route *route)
{
    ki_listener_release(route->listener);
    route->listener = NULL;
    route->told = 0;
    route->down = false;
}

/* Give a message to the listener. Returns false when there is none any more. */
static bool give(struct ki_dynamo_nats *d, struct route *route, const struct kve_envelope *envelope,
                 const void *data, size_t len)
{
    const struct kve_message message = {.topic = {envelope->topic.p, envelope->topic.len},
                                        .sequence = envelope->sequence,
                                        .payload = {data, len},
                                        .has_publisher = true,
                                        .publisher = envelope->publisher};

    if (ki_listener_feed_message(route->listener, &message) == -ENOENT) {
        detach(route);
        return false;
    }
    d->stats.messages++;
    return true;
}

/* Keep a message for a listener to come. One for which there is no room shows as a gap. */
static void keep(struct ki_dynamo_nats *d, struct route *route, const void *data, size_t len)
{
    struct kept *kept = NULL;

    if (d->stats.kept_bytes + len <= KEPT_BYTES)
        kept = malloc(sizeof(*kept) + len);
    if (!kept) {
        d->stats.dropped++;
        return;
    }
    kept->len = len;
    memcpy(kept->data, data, len);
    STAILQ_INSERT_TAIL(&route->kept, kept, list);
    d->stats.kept_bytes += len;
}

static void on_message(void *arg, const struct kvp_nats_msg *msg)
{
    struct ki_dynamo_nats *d = arg;
    struct kve_envelope envelope;
    struct route *route = NULL;
    bool bad = kve_envelope_read(msg->data, msg->len, &envelope) < 0 ||
               !kv_str_eq(envelope.topic, KVE_ENVELOPE_TOPIC);

    pthread_mutex_lock(&d->lock);
    if (!bad)
        route = find(d, envelope.publisher);
    d->stats.bad += bad;
    d->stats.strangers += !bad && !route;
    if (route) {
        route->heard = atomic_load_explicit(&d->connections, memory_order_relaxed);
        if (!route->listener || !STAILQ_EMPTY(&route->kept) ||
            !give(d, route, &envelope, msg->data, msg->len))
            keep(d, route, msg->data, msg->len);
    }
    pthread_mutex_unlock(&d->lock);
}

static void on_state(void *arg, bool connected)
{
    struct ki_dynamo_nats *d = arg;

    if (connected)
        atomic_fetch_add_explicit(&d->connections, 1, memory_order_relaxed);
    atomic_store_explicit(&d->connected, connected, memory_order_relaxed);
}

/* ---- ticks ---- */

/* Find the listener of a route's rank, if it is registered, and has started. */
static void attach(struct ki_dynamo_nats *d, struct route *route)
{
    struct ki_listener *l = ki_registry_listener(d->registry, route->worker, route->rank);

    if (l && l->fed && l->has_publisher && l->publisher == route->publisher &&
        ki_listener_has_started(l))
        route->listener = l;
    else
        ki_listener_release(l);
}

/* Tell the listener of the server's state. Returns false when there is no listener any more. */
static bool tell_link(struct ki_dynamo_nats *d, struct route *route)
{
    uint64_t connection = atomic_load_explicit(&d->connections, memory_order_relaxed);
    bool connected = atomic_load_explicit(&d->connected, memory_order_relaxed);
    int rc = 0;

    if (!connected && !route->down) {
        route->down = true;
        rc = ki_listener_feed_link(route->listener, "no answer of the NATS server");
    } else if (connected && (route->down || route->told != connection)) {
        if (route->told && route->heard != connection)
            rc = ki_listener_feed_reconnected(route->listener);
        if (rc == 0)
            rc = ki_listener_feed_link(route->listener, NULL);
        route->told = connection;
        route->down = false;
    }
    if (rc == -ENOENT)
        detach(route);
    return rc == 0;
}

static void give_kept(struct ki_dynamo_nats *d, struct route *route)
{
    struct kve_envelope envelope;
    struct kept *kept;

    while ((kept = STAILQ_FIRST(&route->kept)) != NULL) {
        if (kve_envelope_read(kept->data, kept->len, &envelope) == 0 && /* was read before */
            !give(d, route, &envelope, kept->data, kept->len))
            return;
        STAILQ_REMOVE_HEAD(&route->kept, list);
        d->stats.kept_bytes -= kept->len;
        free(kept);
    }
}

void ki_dynamo_nats_tick(struct ki_dynamo_nats *d)
{
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_routes; i++) {
        struct route *route = d->routes[i];

        if (!route->listener)
            attach(d, route);
        if (route->listener && tell_link(d, route))
            give_kept(d, route);
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- life ---- */

void ki_dynamo_nats_get_stats(struct ki_dynamo_nats *d, struct ki_dynamo_nats_stats *ret)
{
    pthread_mutex_lock(&d->lock);
    *ret = d->stats;
    pthread_mutex_unlock(&d->lock);
    kvp_nats_get_stats(d->nats, &ret->nats);
}

void ki_dynamo_nats_close(struct ki_dynamo_nats *d)
{
    if (!d)
        return;
    kvp_nats_unsubscribe(d->sub);
    kvp_nats_close(d->nats, 0);
    for (size_t i = 0; i < d->n_routes; i++)
        route_free(d, d->routes[i]);
    free(KV_STEAL(d->routes));
    explicit_bzero(&d->secrets, sizeof(d->secrets));
    pthread_mutex_destroy(&d->lock);
    free(d);
}

int ki_dynamo_nats_open(const struct ki_dynamo_nats_opts *opts, struct ki_dynamo_nats **ret,
                        struct kv_error *error)
{
    struct kvp_nats_opts server = KVP_NATS_OPTS_INIT;
    struct ki_dynamo_nats *d = calloc(1, sizeof(*d));
    int rc;

    if (!d)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_init(&d->lock, NULL);
    d->registry = opts->registry;
    rc = kvp_nats_args_read(opts->args, &d->secrets, &server, error);
    if (rc < 0)
        goto fail;
    server.url = opts->url;
    server.name = "kv-indexer";
    rc = kvp_nats_open(&server, on_state, d, &d->nats);
    if (rc == 0)
        rc = kvp_nats_subscribe(d->nats, opts->subject, 0, on_message, d, &d->sub);
    if (rc < 0) {
        kv_fail(error, rc, 0, "--dynamo-nats: %s",
                rc == -ENOTSUP ? "needs libkv_nats and libnats" : strerror(-rc));
        goto fail;
    }
    *ret = d;
    return 0;

fail:
    ki_dynamo_nats_close(d);
    return rc;
}
