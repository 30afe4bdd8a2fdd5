// SPDX-License-Identifier: Apache-2.0
/*
 * Writing to a connection. Urgent messages (requests, notes, small replies) go first, each whole.
 * Bulk replies follow in chunks, so that an urgent message waits for at most one of them.
 *
 *   urgent ─► [req][note]                ┐
 *   bulk   ─► [chunk 3 of a][chunk 1 of b] ┴─► now: header, pieces ──► socket
 *
 * With data connections, the chunks of the session go to whichever of these is free, and the control
 * connection carries only urgent messages.
 *
 * The thread that queues an urgent message also writes it, unless another one is writing or the
 * socket is full: no switch to the event thread in the usual case. Bulk is the event thread's, which
 * writes it before it serves the next request: the peer has bytes to read meanwhile.
 */
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "peer/session/net.h"

#define PIECES 256        /* of one system call */
#define BUDGET (4u << 20) /* bytes written before other connections have their turn */

/* ---- messages ---- */

static struct kvbm_out *make_out(const struct kvbm_frame *frame, size_t more)
{
    struct kvbm_out *out = calloc(1, sizeof(*out) + more);

    if (!out)
        return NULL;
    out->frame = *frame;
    out->fd = -1;
    out->from = (struct iovec *)(out + 1);
    return out;
}

struct kvbm_out *kvbm_out_copy(const struct kvbm_frame *frame, const void *body, size_t len)
{
    struct kvbm_out *out = make_out(frame, sizeof(struct iovec) + len);

    if (!out)
        return NULL;
    out->from[0] = (struct iovec){out->from + 1, len};
    out->n_from = 1;
    out->frame.total = len;
    out->queued = sizeof(*out) + len;
    if (len)
        memcpy(out->from + 1, body, len);
    return out;
}

struct kvbm_out *kvbm_out_from(const struct kvbm_frame *frame, const struct iovec *from, size_t n)
{
    struct kvbm_out *out = make_out(frame, n * sizeof(*from));

    if (!out)
        return NULL;
    if (n)
        memcpy(out->from, from, n * sizeof(*from));
    out->n_from = n;
    for (size_t i = 0; i < n; i++)
        out->frame.total += from[i].iov_len;
    return out;
}

void kvbm_out_end(struct kvbm_out *out)
{
    if (!out)
        return;
    if (out->done)
        out->done(out->arg);
    if (out->fd >= 0)
        close(out->fd);
    free(out);
}

/* ---- the next frame ---- */

/* Begin to write a frame of @out: its next chunk, or all of it. */
static void begin(struct kvbm_conn *conn, struct kvbm_out *out, bool bulk)
{
    struct kvbm_writing *now = &conn->now;
    struct kvbm_frame *frame = &out->frame;
    uint64_t left = frame->total - frame->offset;

    frame->len = (uint32_t)(bulk ? KV_MIN(left, (uint64_t)KVBM_CHUNK_BYTES) : left);
    *now = (struct kvbm_writing){.out = out,
                                 .len = KVBM_FRAME_BYTES + frame->len,
                                 .piece = out->piece,
                                 .piece_at = out->piece_at,
                                 .bulk = bulk};
    frame->flags = (uint16_t)(out->fd >= 0 && frame->offset == 0 ? frame->flags | KVBM_FRAME_FD
                                                                 : frame->flags & ~KVBM_FRAME_FD);
    kvbm_frame_write(frame, now->head);
    frame->offset += frame->len;
    out->n_flying++;
}

/* Step over @len bytes of a message's pieces. */
static void step_over(const struct kvbm_out *out, size_t len, size_t *piece, size_t *at)
{
    while (len) {
        size_t here = KV_MIN(len, out->from[*piece].iov_len - *at);

        *at += here;
        len -= here;
        if (*at == out->from[*piece].iov_len) {
            ++*piece;
            *at = 0;
        }
    }
}

static bool takes_bulk(const struct kvbm_conn *conn)
{
    const struct kvbm_session *session = conn->session;

    return session->n_conns == 1 || conn != session->conns[0];
}

/* Choose what to write next. @any: bulk, too. Returns false when there is nothing. */
static bool choose(struct kvbm_conn *conn, bool any)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_out *out = TAILQ_FIRST(&conn->urgent);

    if (out) {
        TAILQ_REMOVE(&conn->urgent, out, queue);
        begin(conn, out, false);
        return true;
    }
    out = any && takes_bulk(conn) ? TAILQ_FIRST(&session->bulk) : NULL;
    if (!out)
        return false;
    begin(conn, out, true);
    step_over(out, out->frame.len, &out->piece, &out->piece_at);
    if (out->frame.offset == out->frame.total)
        TAILQ_REMOVE(&session->bulk, out, queue);
    return true;
}

/* ---- the system call ---- */

static ssize_t write_tls(struct kvbm_conn *conn, const struct iovec *from, size_t n)
{
    const struct kvbm_tls_abi *tls = conn->session->net->auth.crypto;
    ssize_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0; at < from[i].iov_len;) {
            ssize_t put =
                tls->write(conn->tls, (const char *)from[i].iov_base + at, from[i].iov_len - at);

            if (put <= 0)
                return sum ? sum : put == 0 ? -EPIPE : put;
            at += (size_t)put;
            sum += put;
        }
    }
    return sum;
}

static ssize_t write_pieces(struct kvbm_conn *conn, struct iovec *from, size_t n, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = from, .msg_iovlen = n};
    struct cmsghdr *c;
    ssize_t put;

    if (conn->tls)
        return write_tls(conn, from, n);
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        c = CMSG_FIRSTHDR(&message);
        *c = (struct cmsghdr){CMSG_LEN(sizeof(fd)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    do {
        put = sendmsg(conn->source.fd, &message, MSG_NOSIGNAL);
    } while (put < 0 && errno == EINTR);
    return put >= 0 ? put : errno == ECONNRESET ? -EPIPE : -errno;
}

/* List what is left of the frame being written. Returns the number of pieces. */
static size_t list_rest(const struct kvbm_writing *now, struct iovec to[PIECES])
{
    size_t left = now->len - now->done, n = 0, at = now->piece_at;

    if (now->done < KVBM_FRAME_BYTES) {
        to[n++] = (struct iovec){(void *)(now->head + now->done), KVBM_FRAME_BYTES - now->done};
        left = now->len - KVBM_FRAME_BYTES;
    }
    for (size_t i = now->piece; left && n < PIECES; i++) {
        const struct iovec *piece = &now->out->from[i];
        size_t len = KV_MIN(left, piece->iov_len - at);

        if (len)
            to[n++] = (struct iovec){(char *)piece->iov_base + at, len};
        left -= len;
        at = 0;
    }
    return n;
}

/* ---- the writer ---- */

/* End the frame being written, with the session locked. */
static void end_frame(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_out *out = KV_STEAL(conn->now.out);
    const struct kvbm_frame *frame = &out->frame;

    out->n_flying--;
    if (out->n_flying || (!out->cut && frame->offset < frame->total))
        return;
    session->queued -= out->queued;
    if (frame->type == KVBM_PONG)
        session->pong_queued = false;
    if (frame->flags & KVBM_FRAME_REPLY && !out->cut)
        kvbm_request_end(session, frame->id);
    if (out->done)
        kvbm_out_sent(session->net, out);
    else
        kvbm_out_end(out);
}

static void account(struct kvbm_conn *conn, size_t put)
{
    struct kvbm_writing *now = &conn->now;
    size_t head = now->done < KVBM_FRAME_BYTES ? KV_MIN(put, KVBM_FRAME_BYTES - now->done) : 0;

    now->fd_sent = true;
    now->done += put;
    step_over(now->out, put - head, &now->piece, &now->piece_at);
    if (now->done == now->len)
        end_frame(conn);
}

/* Write once, with the session locked; unlocks around the system call. Returns bytes or an error. */
static ssize_t write_once(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_writing *now = &conn->now;
    struct iovec from[PIECES];
    size_t n = list_rest(now, from), asked = 0;
    int fd = now->fd_sent || !(now->head[6] & KVBM_FRAME_FD) ? -1 : now->out->fd;
    unsigned edges = conn->edges;
    ssize_t put;

    for (size_t i = 0; i < n; i++)
        asked += from[i].iov_len;
    pthread_mutex_unlock(&session->lock);
    put = write_pieces(conn, from, n, fd);
    pthread_mutex_lock(&session->lock);
    if (put < 0 && put != -EAGAIN) {
        conn->broken = (int)put;
        return put;
    }
    if ((put < 0 || (size_t)put < asked) && edges == conn->edges) /* else it has room again */
        conn->blocked = true;
    if (put > 0)
        account(conn, (size_t)put);
    return put;
}

void kvbm_flush(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    bool any = kvbm_on_event_thread(session->net);
    size_t sum = any ? conn->turn : 0;

    if (conn->writing || !conn->secured)
        return;
    if (conn->tls && !any) { /* one thread at a time may use a TLS stream: the event thread */
        kvbm_kick(conn);
        return;
    }
    conn->writing = true;
    while (!conn->blocked && !conn->broken && sum < BUDGET && session->state != KVBM_ENDED) {
        ssize_t put = conn->now.out || choose(conn, any) ? write_once(conn) : 0;

        if (put == 0)
            break;
        sum += put > 0 ? (size_t)put : 0;
    }
    conn->writing = false;
    if (any)
        conn->turn = sum;
    pthread_cond_broadcast(&session->changed); /* for who waits until nobody writes */
    if (session->state == KVBM_ENDED)
        return;
    if (conn->broken && session->err == 0) {
        session->err = conn->broken;
        snprintf(session->why, sizeof(session->why), "%s", kvbm_words(conn->broken));
    }
    if (conn->broken || sum >= BUDGET || (!any && !TAILQ_EMPTY(&session->bulk)))
        kvbm_kick(conn);
}

/* ---- queueing ---- */

void kvbm_send(struct kvbm_session *session, struct kvbm_out *out)
{
    struct kvbm_conn *conn = session->conns[0];

    session->queued += out->queued;
    TAILQ_INSERT_TAIL(&conn->urgent, out, queue);
    kvbm_flush(conn);
}

void kvbm_send_bulk(struct kvbm_session *session, struct kvbm_out *out)
{
    bool first = TAILQ_EMPTY(&session->bulk);

    session->queued += out->queued;
    TAILQ_INSERT_TAIL(&session->bulk, out, queue);
    for (uint32_t i = 0; first && i < session->n_conns; i++) {
        if (!takes_bulk(session->conns[i]))
            continue;
        if (kvbm_on_event_thread(session->net))
            kvbm_flush(session->conns[i]);
        else
            kvbm_kick(session->conns[i]);
    }
}

bool kvbm_cut_bulk(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_out *out;

    for (out = TAILQ_FIRST(&session->bulk); out; out = TAILQ_NEXT(out, queue)) {
        if (out->frame.id == id)
            break;
    }
    if (!out)
        return false;
    out->cut = true;
    TAILQ_REMOVE(&session->bulk, out, queue);
    if (out->n_flying) /* its writer ends it */
        return true;
    session->queued -= out->queued;
    pthread_mutex_unlock(&session->lock);
    kvbm_out_end(out);
    pthread_mutex_lock(&session->lock);
    return true;
}

/* Make a message of the next @left bytes of @out's pieces, with the same frame. */
static struct kvbm_out *own_bytes(const struct kvbm_out *out, size_t piece, size_t piece_at,
                                  size_t left)
{
    struct kvbm_out *own = make_out(&out->frame, sizeof(struct iovec) + left);
    char *to;

    if (!own)
        return NULL;
    to = (char *)(own->from + 1);
    own->from[0] = (struct iovec){to, left};
    own->n_from = 1;
    own->queued = sizeof(*own) + left;
    while (left) {
        const struct iovec *from = &out->from[piece++];
        size_t len = KV_MIN(left, from->iov_len - piece_at);

        memcpy(to, (char *)from->iov_base + piece_at, len);
        to += len;
        left -= len;
        piece_at = 0;
    }
    return own;
}

/* Let the frame that a connection writes go on from bytes of its own. Returns 0 or -ENOMEM. */
static int own_frame(struct kvbm_conn *conn)
{
    struct kvbm_writing *now = &conn->now;
    size_t left = now->len - KV_MAX(now->done, (size_t)KVBM_FRAME_BYTES);
    struct kvbm_out *own = own_bytes(now->out, now->piece, now->piece_at, left);

    if (!own)
        return -ENOMEM;
    own->cut = now->out->cut;
    own->frame.offset = own->frame.total; /* no chunk follows */
    own->n_flying = 1;
    conn->session->queued += own->queued;
    now->out->n_flying--;
    now->out = own;
    now->piece = now->piece_at = 0;
    return 0;
}

static struct kvbm_out *find_in(struct kvbm_outs *queue, uint64_t id)
{
    struct kvbm_out *out;

    for (out = TAILQ_FIRST(queue); out; out = TAILQ_NEXT(out, queue)) {
        if (out->frame.id == id && out->frame.flags & KVBM_FRAME_REPLY)
            break;
    }
    return out;
}

/* Find a reply that waits in chunks, or that connections write the rest of. */
static struct kvbm_out *find_begun(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_out *out = find_in(&session->bulk, id);

    for (uint32_t i = 0; i < session->n_conns && !out; i++) {
        out = session->conns[i]->now.out;
        if (out && (out->frame.id != id || !(out->frame.flags & KVBM_FRAME_REPLY)))
            out = NULL;
    }
    return out;
}

/* Put a copy in the place of a reply that waits as a whole. Returns 0 or -ENOMEM. */
static int own_waiting(struct kvbm_session *session, struct kvbm_out *out)
{
    struct kvbm_out *own = own_bytes(out, 0, 0, out->frame.total);

    if (!own)
        return -ENOMEM;
    session->queued += own->queued;
    TAILQ_INSERT_BEFORE(out, own, queue);
    TAILQ_REMOVE(&session->conns[0]->urgent, out, queue);
    return 0;
}

/* Have all connections write @out's frames from bytes of their own. Returns 0 or -ENOMEM. */
static int own_frames(struct kvbm_session *session, const struct kvbm_out *out)
{
    int err = 0;

    for (uint32_t i = 0; i < session->n_conns && err == 0; i++) {
        struct kvbm_conn *conn = session->conns[i];

        while (conn->writing && conn->now.out == out) /* short: sockets don't block */
            pthread_cond_wait(&session->changed, &session->lock);
        if (conn->now.out == out)
            err = own_frame(conn);
    }
    return err;
}

/* Take back a reply of which chunks are on their way. Returns 0 or -ENOMEM. */
static int take_back_begun(struct kvbm_session *session, struct kvbm_out *out)
{
    if (out->frame.offset < out->frame.total) {
        out->cut = true;
        TAILQ_REMOVE(&session->bulk, out, queue);
    }
    return own_frames(session, out);
}

bool kvbm_take_back(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_out *waits = find_in(&session->conns[0]->urgent, id);
    struct kvbm_out *out = waits ? waits : find_begun(session, id);
    int err;
    bool cut;

    if (!out)
        return false;
    out->n_flying++; /* it stays meanwhile */
    err = waits ? own_waiting(session, out) : take_back_begun(session, out);
    cut = out->cut;
    out->n_flying--;
    if (err < 0) { /* the session's end gives the memory back */
        if (session->err == 0) {
            session->err = err;
            snprintf(session->why, sizeof(session->why), "%s", kvbm_words(err));
        }
        kvbm_kick(session->conns[0]);
    }
    if (out->n_flying || (waits && err < 0))
        return false;
    session->queued -= out->queued;
    pthread_mutex_unlock(&session->lock);
    kvbm_out_end(out);
    pthread_mutex_lock(&session->lock);
    return cut;
}

int kvbm_send_small(struct kvbm_session *session, const struct kvbm_frame *frame)
{
    struct kvbm_out *out = kvbm_out_copy(frame, NULL, 0);

    if (!out)
        return -ENOMEM;
    kvbm_send(session, out);
    return 0;
}
