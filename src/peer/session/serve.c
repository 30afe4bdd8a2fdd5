// SPDX-License-Identifier: Apache-2.0
/*
 * Answering a peer. Each request is open from its arrival until the last byte of its answer has left.
 * The peer may have max_requests open at a time, so one that asks and never reads binds that many
 * answers and no more.
 */
#include <fcntl.h>

#include "base/core/log.h"
#include "peer/session/net.h"

#define URGENT_MAX (64u << 10) /* longer replies are bulk */

/* ---- open requests, with the session locked ---- */

static struct kvbm_open_request *find(struct kvbm_session *session, uint64_t id)
{
    for (uint32_t i = 0; i < session->n_requests; i++) {
        if (session->requests[i].id == id)
            return &session->requests[i];
    }
    return NULL;
}

void kvbm_request_end(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_open_request *request = find(session, id);

    if (request)
        *request = session->requests[--session->n_requests];
}

static int open_request(struct kvbm_session *session, uint64_t id, uint16_t type)
{
    uint32_t max = session->net->max_requests;
    int err = 0;

    pthread_mutex_lock(&session->lock);
    if (!session->requests)
        session->requests = malloc(max * sizeof(*session->requests));
    if (!session->requests)
        err = -ENOMEM;
    else if (session->n_requests == max || find(session, id))
        err = -EPROTO;
    else
        session->requests[session->n_requests++] =
            (struct kvbm_open_request){.id = id, .type = type};
    pthread_mutex_unlock(&session->lock);
    return err;
}

/* End an answer without its (other) chunks. */
static void send_cut(struct kvbm_session *session, uint16_t type, uint64_t id, int status)
{
    const struct kvbm_frame frame = {
        .type = type, .flags = KVBM_FRAME_REPLY | KVBM_FRAME_CUT, .id = id, .status = status};

    if (kvbm_send_small(session, &frame) < 0 && session->err == 0) {
        session->err = -ENOMEM; /* the peer would wait for ever */
        kvbm_kick(session->conns[0]);
    }
}

void kvbm_request_cancelled(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_open_request *request;

    pthread_mutex_lock(&session->lock);
    request = find(session, id);
    if (request && !request->answered)
        request->cancelled = true;
    else if (request) {
        uint16_t type = request->type;

        if (kvbm_cut_bulk(session, id)) /* else all of it is on its way */
            send_cut(session, type, id, -ECANCELED);
    }
    pthread_mutex_unlock(&session->lock);
}

void kvbm_session_take_back(struct kvbm_session *session, uint64_t id, int status)
{
    struct kvbm_open_request *request;

    pthread_mutex_lock(&session->lock);
    request = session->state == KVBM_OPEN ? find(session, id) : NULL;
    if (request && !request->answered)
        request->cancelled = true;
    else if (request) {
        uint16_t type = request->type;

        if (kvbm_take_back(session, id) && session->state == KVBM_OPEN)
            send_cut(session, type, id, status);
    }
    pthread_mutex_unlock(&session->lock);
}

/* ---- handlers ---- */

static void serve_request(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_net *net = session->net;
    struct kvbm_request request = {.id = conn->frame.id,
                                   .type = conn->frame.type,
                                   .body = conn->body.data,
                                   .len = conn->body.len,
                                   .fd = conn->frame_fd};
    struct kvbm_service service;

    pthread_mutex_lock(&net->lock);
    service = net->services[request.type];
    net->serving = service.fn ? request.type : 0;
    pthread_mutex_unlock(&net->lock);
    if (!service.fn) {
        if (request.id && request.type != KVBM_CANCEL)
            (void)kvbm_session_reply(session, request.id, -EOPNOTSUPP, NULL, 0, -1);
        return;
    }
    service.fn(service.arg, session, &request);
    conn->frame_fd = request.fd;
    pthread_mutex_lock(&net->lock);
    net->serving = 0;
    pthread_cond_broadcast(&net->served);
    pthread_mutex_unlock(&net->lock);
    kvbm_end_sent(net); /* else a fast peer's answers wait for their ends by the thousand */
}

int kvbm_agent_serve(struct kvbm_agent *agent, uint16_t type, kvbm_serve_fn fn, void *arg)
{
    struct kvbm_net *net = agent->net;
    int err = 0;

    if ((type < KVBM_FIRST_SERVICE && type != KVBM_CANCEL) || type >= KVBM_N_TYPES)
        return -EINVAL;
    pthread_mutex_lock(&net->lock);
    if (fn && net->services[type].fn)
        err = -EEXIST;
    else
        net->services[type] = (struct kvbm_service){fn, arg};
    while (!fn && net->serving == type && !kvbm_on_event_thread(net))
        pthread_cond_wait(&net->served, &net->lock);
    pthread_mutex_unlock(&net->lock);
    return err;
}

static void send_pong(struct kvbm_session *session)
{
    const struct kvbm_frame pong = {.type = KVBM_PONG};

    pthread_mutex_lock(&session->lock);
    if (!session->pong_queued) { /* one is enough, however often the peer asks */
        session->pong_queued = true;
        session->pong_queued = kvbm_send_small(session, &pong) == 0 && session->pong_queued;
    }
    pthread_mutex_unlock(&session->lock);
}

int kvbm_serve(struct kvbm_conn *conn)
{
    const struct kvbm_frame *frame = &conn->frame;
    int err = 0;

    switch (frame->type) {
    case KVBM_PING:
        send_pong(conn->session);
        return 0;
    case KVBM_PONG:
        return 0;
    case KVBM_CANCEL:
        kvbm_request_cancelled(conn->session, frame->id);
        serve_request(conn); /* an owner undoes what the request has done */
        return 0;
    case KVBM_SET:
    case KVBM_SET_GONE:
    case KVBM_SETS_TOLD:
        return kvbm_exchange_frame(conn);
    default:
        if (frame->type < KVBM_FIRST_SERVICE)
            return -EPROTO;
        if (frame->id)
            err = open_request(conn->session, frame->id, frame->type);
        if (err == 0)
            serve_request(conn);
        return err;
    }
}

/* ---- answers ---- */

/* Mark a request as answered, with the session locked. Returns 0 or why no answer is wanted. */
static int answer(struct kvbm_session *session, uint64_t id, uint16_t *type)
{
    struct kvbm_open_request *request;

    if (session->state != KVBM_OPEN)
        return -EPIPE;
    request = find(session, id);
    if (!request || request->answered)
        return -ENOENT;
    request->answered = true;
    *type = request->type;
    if (!request->cancelled)
        return 0;
    send_cut(session, *type, id, -ECANCELED);
    return -ECANCELED;
}

/* Send an answer, or @err when there is none. Consumes @out. */
static int send_answer(struct kvbm_session *session, uint64_t id, int err, struct kvbm_out *out)
{
    uint16_t type = 0;
    int rc;

    pthread_mutex_lock(&session->lock);
    rc = answer(session, id, &type);
    if (rc == 0 && err == 0 && out && session->queued + out->queued > session->net->max_queued)
        err = -ENOBUFS;
    if (rc == 0 && err < 0) {
        send_cut(session, type, id, err);
        rc = err;
    }
    if (rc == 0 && out) {
        out->frame.type = type;
        if (out->frame.total > URGENT_MAX)
            kvbm_send_bulk(session, KV_STEAL(out));
        else
            kvbm_send(session, KV_STEAL(out));
    }
    pthread_mutex_unlock(&session->lock);
    kvbm_out_end(out);
    return rc;
}

int kvbm_session_reply(struct kvbm_session *session, uint64_t id, int32_t status, const void *body,
                       size_t len, int fd)
{
    const struct kvbm_frame frame = {.flags = KVBM_FRAME_REPLY, .id = id, .status = status};
    struct kvbm_out *out;
    int err = -ENOMEM;

    if (status < -4095 || len > KVBM_MAX_REPLY_BYTES ||
        (fd >= 0 && !kvbm_session_takes_fds(session)))
        return -EINVAL;
    out = kvbm_out_copy(&frame, body, len);
    if (out) {
        err = 0;
        out->fd = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
        if (fd >= 0 && out->fd < 0)
            err = -errno;
    }
    return send_answer(session, id, err, out);
}

int kvbm_session_reply_from(struct kvbm_session *session, uint64_t id, int32_t status,
                            const struct iovec *from, size_t n, void (*done)(void *arg), void *arg)
{
    const struct kvbm_frame frame = {.flags = KVBM_FRAME_REPLY, .id = id, .status = status};
    struct kvbm_out *out = NULL;
    int err = -ENOMEM;

    if (status < -4095 || n > KVBM_MAX_PIECES) {
        err = -EINVAL;
    } else {
        out = kvbm_out_from(&frame, from, n);
        if (out && out->frame.total > KVBM_MAX_REPLY_TOTAL)
            err = -EINVAL;
    }
    if (!out || err == -EINVAL) {
        kvbm_out_end(out);
        if (done)
            done(arg);
        return err == -EINVAL ? err : send_answer(session, id, err, NULL);
    }
    out->done = done;
    out->arg = arg;
    return send_answer(session, id, 0, out);
}

/* ---- notes ---- */

int kvbm_session_note(struct kvbm_session *session, uint16_t type, const void *body, size_t len)
{
    const struct kvbm_frame frame = {.type = type};
    struct kvbm_out *out;
    int err = 0;

    if (type < KVBM_FIRST_SERVICE || type >= KVBM_N_TYPES || len > KVBM_MAX_REQUEST_BYTES)
        return -EINVAL;
    out = kvbm_out_copy(&frame, body, len);
    if (!out)
        return -ENOMEM;
    pthread_mutex_lock(&session->lock);
    if (session->state != KVBM_OPEN)
        err = -EPIPE;
    else if (session->queued + sizeof(*out) + len > session->net->max_queued)
        err = -ENOBUFS;
    else
        kvbm_send(session, KV_STEAL(out));
    pthread_mutex_unlock(&session->lock);
    kvbm_out_end(out);
    return err;
}
