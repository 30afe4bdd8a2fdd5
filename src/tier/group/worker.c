// SPDX-License-Identifier: Apache-2.0
/* A worker: joins its leader's group, and runs the leader's transfers by its own copier. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "peer/session/session.h"
#include "tier/group/wire.h"

#define DEFAULT_TIMEOUT_MS 60000

/* One transfer that the copier has. */
struct running {
    LIST_ENTRY(running) list;
    struct kvbm_worker *worker;
    uint64_t request, number, copy; /* of the session, the leader and the copier */
    uint32_t n;
    uint8_t ok[]; /* a bit for each block */
};

struct kvbm_worker {
    struct kvbm_agent *agent;
    struct kvbm_session *session; /* a reference */
    struct kvbm_copier *copier;
    struct kvbm_group_place places[KVBM_MAX_PLACES];
    uint32_t n_places;
    uint32_t n_blocks[KVBM_MAX_PLACES]; /* that all ranks have */

    pthread_mutex_t lock;
    pthread_cond_t idle;
    LIST_HEAD(running_list, running) running;
};

/* ---- transfers ---- */

static void reply_error(struct kvbm_session *session, uint64_t request, int err)
{
    (void)kvbm_session_reply(session, request, err, NULL, 0, -1);
}

/* The copier has ended a transfer. */
static void copied(void *arg, const struct kvbm_done *done)
{
    struct running *r = arg;
    struct kvbm_worker *worker = r->worker;

    (void)kvbm_session_reply(worker->session, r->request, done->status, r->ok, (r->n + 7) / 8, -1);
    pthread_mutex_lock(&worker->lock);
    LIST_REMOVE(r, list);
    if (LIST_EMPTY(&worker->running))
        pthread_cond_broadcast(&worker->idle);
    pthread_mutex_unlock(&worker->lock);
    free(r);
}

static const struct kvbm_layout *layout_of(const struct kvbm_worker *worker, uint32_t id)
{
    for (uint32_t i = 0; i < worker->n_places; i++) {
        if (worker->places[i].id == id)
            return worker->places[i].layout;
    }
    return NULL;
}

/* Submit an order as a job of the copier. Returns 0 or why it can't be. */
static int run(struct kvbm_worker *worker, const struct kvbm_group_order *order, uint64_t request)
{
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = layout_of(worker, order->from),
                              .dst = layout_of(worker, order->to),
                              .n = order->n,
                              .first_layer = order->first_layer,
                              .n_layers = order->n_layers,
                              .flow = (enum kvbm_flow)order->flow,
                              .priority = order->priority,
                              .done = copied};
    uint32_t *blocks = malloc((size_t)order->n * 2 * sizeof(*blocks));
    struct running *r = calloc(1, sizeof(*r) + (order->n + 7) / 8);
    int64_t id = -ENOMEM;

    if (!blocks || !r)
        goto out;
    for (uint32_t i = 0; i < 2 * order->n; i++) /* targets follow sources */
        blocks[i] = (uint32_t)kv_get_le(order->src + (size_t)i * 4, 4);
    *r = (struct running){.worker = worker, .request = request, .number = order->number};
    r->n = order->n;
    t.src_blocks = blocks;
    t.dst_blocks = blocks + order->n;
    t.ok = r->ok;
    t.arg = r;
    t.deadline_ns = order->time_ms ? kv_now_ns() + order->time_ms * KV_NS_PER_MS : 0;
    pthread_mutex_lock(&worker->lock); /* `copied` waits until the job is in the list */
    id = t.src && t.dst ? kvbm_copier_submit(worker->copier, &t) : -EINVAL;
    if (id > 0) {
        r->copy = (uint64_t)id;
        LIST_INSERT_HEAD(&worker->running, r, list);
        r = NULL;
    }
    pthread_mutex_unlock(&worker->lock);
out:
    free(blocks);
    free(r);
    return id < 0 ? (int)id : 0;
}

static void serve_transfer(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_worker *worker = arg;
    struct kvbm_group_order order;
    int err;

    if (!request->id)
        return;
    err = session == worker->session ? kvbm_order_read(request->body, request->len, &order)
                                     : -EPERM; /* another peer than the leader */
    if (err == 0)
        err = run(worker, &order, request->id);
    if (err < 0)
        reply_error(session, request->id, err);
}

static void serve_cancel(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_worker *worker = arg;
    struct running *r = NULL;

    if (request->id || session != worker->session || request->len != 8) {
        if (request->id)
            reply_error(session, request->id, -EPROTO);
        return;
    }
    pthread_mutex_lock(&worker->lock);
    LIST_FOREACH(r, &worker->running, list)
    {
        if (r->number == kv_get_le64(request->body))
            (void)kvbm_copier_cancel(worker->copier, r->copy);
    }
    pthread_mutex_unlock(&worker->lock);
}

/* ---- joining ---- */

/* Whether all that must be given is, and right. */
static bool opts_are_right(const struct kvbm_worker_opts *opts)
{
    if (!kv_sized(opts, "kvbm_worker_opts") ||
        opts->size < offsetof(struct kvbm_worker_opts, timeout_ms) || opts->n_ranks == 0 ||
        opts->n_ranks > KVBM_MAX_RANKS || opts->rank >= opts->n_ranks || !opts->places ||
        opts->n_places == 0 || opts->n_places > KVBM_MAX_PLACES || !opts->copier)
        return false;
    for (uint32_t i = 0; i < opts->n_places; i++) {
        if (!opts->places[i].layout || opts->places[i].reserved)
            return false;
        for (uint32_t k = 0; k < i; k++) {
            if (opts->places[k].id == opts->places[i].id)
                return false;
        }
    }
    return true;
}

static void write_joining(struct kv_buf *to, const struct kvbm_worker_opts *opts)
{
    struct kvbm_joining joining = {
        .rank = opts->rank, .n_ranks = opts->n_ranks, .n_places = opts->n_places};

    for (uint32_t i = 0; i < opts->n_places; i++) {
        const struct kvbm_layout_config *c = kvbm_layout_get_config(opts->places[i].layout);

        joining.places[i] = (struct kvbm_place_facts){.id = opts->places[i].id,
                                                      .n_blocks = c->num_blocks,
                                                      .n_layers = c->num_layers,
                                                      .outer = c->outer_dim,
                                                      .page_size = c->page_size};
    }
    kvbm_joining_write(to, &joining);
}

static int refuse(const struct kvbm_worker_opts *opts, int err, const char *why, size_t len)
{
    char text[KVBM_MAX_WHY + 1], quoted[2 * KVBM_MAX_WHY];
    char *to = KV_OPT(opts, why, NULL);

    snprintf(text, sizeof(text), "%.*s", (int)KV_MIN(len, sizeof(text)), why);
    kv_log_error("kvbm", "a worker can't join its group", "rank=%u error=\"%s\" why=%s", opts->rank,
                 strerror(-err), kv_log_quote(quoted, sizeof(quoted), text));
    if (to && KV_OPT(opts, why_size, 0))
        snprintf(to, opts->why_size, "%s", text);
    return err;
}

/* Ask the leader, and wait until all ranks have. */
static int ask(struct kvbm_worker *worker, const struct kvbm_worker_opts *opts)
{
    static const char no_answer[] = "no answer from the leader", no_leader[] = "it leads no group";
    uint64_t timeout_ms = KV_OPT(opts, timeout_ms, DEFAULT_TIMEOUT_MS);
    struct kvbm_reply reply = {.fd = -1};
    struct kv_buf body = KV_BUF_INIT;
    int err;

    write_joining(&body, opts);
    err = body.error ? body.error
                     : kvbm_session_call(worker->session, KVBM_GROUP_JOIN, body.data, body.len, -1,
                                         kv_ns_after(kv_now_ns(), timeout_ms), &reply);
    kv_buf_fini(&body);
    if (err < 0)
        return refuse(opts, err, no_answer, strlen(no_answer));
    if (reply.status == -EOPNOTSUPP)
        err = refuse(opts, reply.status, no_leader, strlen(no_leader));
    else if (reply.status < 0)
        err = refuse(opts, reply.status, reply.body ? reply.body : "", reply.len);
    else
        err = kvbm_joined_read(reply.body, reply.len, worker->n_places, worker->n_blocks);
    kvbm_reply_fini(&reply);
    return err;
}

static int serve(struct kvbm_worker *worker)
{
    int err = kvbm_agent_serve(worker->agent, KVBM_GROUP_TRANSFER, serve_transfer, worker);

    if (err < 0)
        return err;
    err = kvbm_agent_serve(worker->agent, KVBM_GROUP_CANCEL, serve_cancel, worker);
    if (err < 0)
        (void)kvbm_agent_serve(worker->agent, KVBM_GROUP_TRANSFER, NULL, NULL);
    return err;
}

/* End a worker that serves. */
static void end(struct kvbm_worker *worker)
{
    (void)kvbm_agent_serve(worker->agent, KVBM_GROUP_TRANSFER, NULL, NULL);
    (void)kvbm_agent_serve(worker->agent, KVBM_GROUP_CANCEL, NULL, NULL);
    pthread_mutex_lock(&worker->lock);
    while (!LIST_EMPTY(&worker->running))
        pthread_cond_wait(&worker->idle, &worker->lock);
    pthread_mutex_unlock(&worker->lock);
}

static void worker_free(struct kvbm_worker *worker)
{
    kvbm_session_put(worker->session);
    pthread_cond_destroy(&worker->idle);
    pthread_mutex_destroy(&worker->lock);
    free(worker);
}

int kvbm_worker_join(struct kvbm_session *session, const struct kvbm_worker_opts *opts,
                     struct kvbm_worker **ret)
{
    struct kvbm_worker *worker;
    int err;

    if (!session || !ret || !opts_are_right(opts))
        return -EINVAL;
    worker = calloc(1, sizeof(*worker));
    if (!worker)
        return -ENOMEM;
    worker->session = kvbm_session_get(session);
    worker->agent = kvbm_session_agent(session);
    worker->copier = opts->copier;
    worker->n_places = opts->n_places;
    memcpy(worker->places, opts->places, opts->n_places * sizeof(*opts->places));
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->idle, NULL);
    LIST_INIT(&worker->running);
    err = serve(worker);
    if (err == 0) {
        err = ask(worker, opts);
        if (err < 0) { /* the leader may wait for the others still: don't count on this rank */
            (void)kvbm_session_note(worker->session, KVBM_GROUP_LEAVE, NULL, 0);
            end(worker);
        }
    }
    if (err < 0)
        worker_free(worker);
    else
        *ret = worker;
    return err;
}

int64_t kvbm_worker_blocks(const struct kvbm_worker *worker, uint32_t id)
{
    for (uint32_t i = 0; worker && i < worker->n_places; i++) {
        if (worker->places[i].id == id)
            return worker->n_blocks[i];
    }
    return worker ? -ENOENT : -EINVAL;
}

void kvbm_worker_leave(struct kvbm_worker *worker)
{
    if (!worker)
        return;
    (void)kvbm_session_note(worker->session, KVBM_GROUP_LEAVE, NULL, 0);
    end(worker);
    worker_free(worker);
}
