// SPDX-License-Identifier: Apache-2.0
/*
 * Asking a peer. A call stays in its session's table until the whole reply has come, also when its
 * caller has given up: the late bytes have to go somewhere, and only the table knows that they are
 * late.
 *
 *   caller                                 event thread
 *   start: request out, call in table
 *   wait ............................      reply's chunks ──► pieces or body, marked busy meanwhile
 *     done? return.                        last chunk: out of the table, done
 *     deadline: abandoned = true;
 *       wait until not busy; return        later chunks ──► scratch; last: out of the table, freed
 */
#include <fcntl.h>
#include <unistd.h>

#include "peer/session/net.h"

#define MAX_CALLS 4096 /* of a session, whatever the peer allows; an agent allows no more */
#define MAP_INLINE 64  /* chunks whose marks need no memory of their own: 16 MiB */

struct kvbm_call {
    LIST_ENTRY(kvbm_call) list;
    struct kvbm_session *session; /* the caller's reference */
    uint64_t id;
    uint16_t type;

    /* under the session's lock */
    unsigned references;    /* of the session's table, and of the caller */
    pthread_cond_t changed; /* done, cancelled, failed, or not busy any more */
    bool listed;            /* in the session's table */
    bool abandoned;         /* the caller has returned, or is about to */
    bool busy;              /* the event thread writes into the call's memory */
    bool done, cancelled;
    int err;                  /* instead of a reply */
    void (*ended)(void *arg); /* NULL: nobody watches */
    void *ended_arg;

    /* the reply; the event thread, then the caller */
    bool begun;
    int32_t status;
    uint64_t total, arrived;
    int fd;
    uint64_t *map; /* a bit for each chunk that has come */
    uint64_t map_inline;
    void *body;       /* collected; NULL with pieces */
    struct iovec *to; /* [n_to] the caller's memory */
    size_t n_to;
    uint64_t room;
    size_t piece, piece_at; /* where the next byte of the chunk being read belongs */
    uint64_t at;            /* offset of that byte */
};

static struct kvbm_calls *bucket(struct kvbm_session *session, uint64_t id)
{
    return &session->calls[id % KVBM_CALL_BUCKETS];
}

struct kvbm_call *kvbm_call_find(struct kvbm_session *session, uint64_t id)
{
    struct kvbm_call *call = NULL;

    for (call = LIST_FIRST(bucket(session, id)); call; call = LIST_NEXT(call, list)) {
        if (call->id == id)
            break;
    }
    return call;
}

/* Free a call. NULL is a no-op. The session may be locked unless this is its last reference. */
static void call_free(struct kvbm_call *call)
{
    struct kvbm_session *session = call ? call->session : NULL;

    if (!call)
        return;
    if (call->map != &call->map_inline)
        free(call->map);
    if (call->fd >= 0)
        close(call->fd);
    pthread_cond_destroy(&call->changed);
    free(call->body);
    free(call->to);
    free(call);
    kvbm_session_put(session);
}

/* ---- the event thread ---- */

/* Drop a reference, with the session locked. Returns the call if it is to be freed. */
static struct kvbm_call *drop(struct kvbm_call *call)
{
    return --call->references == 0 ? call : NULL;
}

/* Take a call out of the table, with the session locked. Returns the call if it is to be freed. */
static struct kvbm_call *end_call(struct kvbm_session *session, struct kvbm_call *call)
{
    LIST_REMOVE(call, list);
    session->n_calls--;
    call->listed = false;
    call->done = true;
    pthread_cond_signal(&call->changed);
    if (call->ended)
        call->ended(call->ended_arg);
    return drop(call);
}

void kvbm_calls_end(struct kvbm_session *session)
{
    struct kvbm_call *call = NULL;

    for (size_t i = 0; i < KVBM_CALL_BUCKETS; i++) {
        while ((call = LIST_FIRST(&session->calls[i]))) {
            if (call->err == 0)
                call->err = -EPIPE;
            call_free(end_call(session, call));
        }
    }
}

/* Prepare for the body of a reply whose first frame has come. Returns an error of the call. */
static int make_room(struct kvbm_call *call)
{
    uint64_t n_chunks = (call->total + KVBM_CHUNK_BYTES - 1) / KVBM_CHUNK_BYTES;

    call->map = n_chunks <= MAP_INLINE ? &call->map_inline : calloc((n_chunks + 63) / 64, 8);
    if (!call->map)
        return -ENOMEM;
    if (call->to)
        return call->total <= call->room ? 0 : -EMSGSIZE;
    if (call->total > KVBM_MAX_REPLY_BYTES)
        return -EMSGSIZE;
    if (call->abandoned)
        return 0; /* the bytes are thrown away */
    call->body = call->total ? malloc(call->total) : NULL;
    return call->total && !call->body ? -ENOMEM : 0;
}

/* Note that a chunk comes. Returns false when it has come before. */
static bool mark(struct kvbm_call *call, uint64_t offset)
{
    uint64_t chunk = offset / KVBM_CHUNK_BYTES, bit = UINT64_C(1) << chunk % 64;

    if (call->map[chunk / 64] & bit)
        return false;
    call->map[chunk / 64] |= bit;
    return true;
}

/* Compare a frame with those of the same reply before it. */
static int take_frame(struct kvbm_call *call, struct kvbm_conn *conn)
{
    const struct kvbm_frame *frame = &conn->frame;
    int err = 0;

    if (frame->type != call->type)
        return -EPROTO;
    if (frame->flags & KVBM_FRAME_CUT) {
        call->err = call->err ? call->err : frame->status < 0 ? frame->status : -EPROTO;
        return 0;
    }
    if (!call->begun) {
        call->begun = true;
        call->status = frame->status;
        call->total = frame->total;
        err = make_room(call);
        if (err < 0)
            call->err = err;
        if (!call->map) /* chunks can't be told apart */
            return -ENOMEM;
    }
    if (frame->total != call->total || frame->status != call->status || !mark(call, frame->offset))
        return -EPROTO;
    if (frame->flags & KVBM_FRAME_FD) {
        if (conn->frame_fd < 0)
            call->err = -EMFILE;
        if (call->fd >= 0)
            return -EPROTO;
        call->fd = kvbm_steal_fd(&conn->frame_fd);
    }
    return 0;
}

int kvbm_call_frame(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_call *call = NULL;
    int err = -EPROTO;

    pthread_mutex_lock(&session->lock);
    call = kvbm_call_find(session, conn->frame.id);
    if (call)
        err = take_frame(call, conn);
    else if (conn->frame.id <= session->next_id) /* given up: the rest overtook this chunk's end */
        err = 0;
    if (call && call->err)
        pthread_cond_signal(&call->changed);
    pthread_mutex_unlock(&session->lock);
    conn->call = call;
    conn->sink = call ? KVBM_SINK_CALL : KVBM_SINK_SCRATCH;
    conn->call_at = conn->frame.offset;
    return err;
}

/* Move a call's mark to @offset of its pieces. */
static void seek(struct kvbm_call *call, uint64_t offset)
{
    if (offset < call->at) {
        call->piece = 0;
        call->piece_at = 0;
        call->at = 0;
    }
    while (call->at < offset) {
        size_t here = call->to[call->piece].iov_len - call->piece_at;

        if (here > offset - call->at) {
            call->piece_at += offset - call->at;
            call->at = offset;
        } else {
            call->at += here;
            call->piece++;
            call->piece_at = 0;
        }
    }
}

static size_t list_pieces(struct kvbm_call *call, uint64_t offset, size_t left, struct iovec *to,
                          size_t max)
{
    size_t n = 0, at;

    if (!call->to) {
        to[0] = (struct iovec){(char *)call->body + offset, left};
        return 1;
    }
    seek(call, offset);
    at = call->piece_at;
    for (size_t i = call->piece; left && n < max; i++) {
        size_t len = KV_MIN(left, call->to[i].iov_len - at);

        if (len)
            to[n++] = (struct iovec){(char *)call->to[i].iov_base + at, len};
        left -= len;
        at = 0;
    }
    return n;
}

size_t kvbm_call_claim(struct kvbm_conn *conn, struct iovec *to, size_t max)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_call *call = conn->call;
    size_t n = 0;

    pthread_mutex_lock(&session->lock);
    if (!call->abandoned && call->err == 0) {
        call->busy = true;
        n = list_pieces(call, conn->call_at, conn->left, to, max);
    }
    pthread_mutex_unlock(&session->lock);
    return n;
}

void kvbm_call_claimed(struct kvbm_conn *conn, size_t n)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_call *call = conn->call;

    conn->call_at += n;
    pthread_mutex_lock(&session->lock);
    call->busy = false;
    if (call->abandoned) /* abandon() waits for it; a caller that waits for the reply sleeps on */
        pthread_cond_signal(&call->changed);
    pthread_mutex_unlock(&session->lock);
}

/* Throw away the chunks of an ended call that other connections are still reading. */
static void leave_call(struct kvbm_session *session, const struct kvbm_call *call)
{
    for (uint32_t i = 0; i < session->n_conns; i++) {
        struct kvbm_conn *conn = session->conns[i];

        if (conn->call != call)
            continue;
        conn->call = NULL;
        conn->sink = KVBM_SINK_SCRATCH;
    }
}

int kvbm_call_frame_end(struct kvbm_conn *conn)
{
    struct kvbm_session *session = conn->session;
    struct kvbm_call *call = KV_STEAL(conn->call), *over = NULL;

    if (!call)
        return 0;
    pthread_mutex_lock(&session->lock);
    call->arrived += conn->frame.len;
    if (conn->frame.flags & KVBM_FRAME_CUT || call->arrived == call->total) {
        leave_call(session, call); /* CUT may overtake chunks on data connections */
        over = end_call(session, call);
    }
    pthread_mutex_unlock(&session->lock);
    call_free(over);
    return 0;
}

/* ---- callers ---- */

static struct kvbm_call *call_create(struct kvbm_session *session, uint16_t type,
                                     const struct iovec *to, size_t n)
{
    struct kvbm_call *call = calloc(1, sizeof(*call));

    if (!call)
        return NULL;
    call->session = kvbm_session_get(session);
    call->references = 1;
    call->type = type;
    call->fd = -1;
    call->map = &call->map_inline;
    kv_cond_init(&call->changed);
    if (!to)
        return call;
    call->to = malloc((n ? n : 1) * sizeof(*to));
    if (!call->to) {
        call_free(call);
        return NULL;
    }
    if (n)
        memcpy(call->to, to, n * sizeof(*to));
    call->n_to = n;
    for (size_t i = 0; i < n; i++)
        call->room += to[i].iov_len;
    return call;
}

/* Put a call into the table and its request on the way. Consumes @out on success. */
static int submit(struct kvbm_call *call, struct kvbm_out *out)
{
    struct kvbm_session *session = call->session;
    int err = 0;

    pthread_mutex_lock(&session->lock);
    if (session->state != KVBM_OPEN || session->err)
        err = -EPIPE;
    else if (session->n_calls >= KV_MIN(session->peer.max_requests, (uint32_t)MAX_CALLS) ||
             session->queued + out->queued > session->net->max_queued)
        err = -EAGAIN;
    if (err == 0) {
        call->id = out->frame.id = ++session->next_id;
        call->listed = true;
        call->references++;
        LIST_INSERT_HEAD(bucket(session, call->id), call, list);
        session->n_calls++;
        kvbm_send(session, out);
    }
    pthread_mutex_unlock(&session->lock);
    return err;
}

int kvbm_call_start(struct kvbm_session *session, uint16_t type, const void *body, size_t len,
                    int fd, const struct iovec *to, size_t n, struct kvbm_call **ret)
{
    const struct kvbm_frame frame = {.type = type};
    struct kvbm_call *call = NULL;
    struct kvbm_out *out;
    int err = -ENOMEM;

    if (type < KVBM_FIRST_SERVICE || type >= KVBM_N_TYPES || len > KVBM_MAX_REQUEST_BYTES ||
        n > KVBM_MAX_PIECES || (fd >= 0 && !kvbm_session_takes_fds(session)))
        return -EINVAL;
    call = call_create(session, type, to, n);
    out = kvbm_out_copy(&frame, body, len);
    if (!call || !out)
        goto fail;
    if (fd >= 0) {
        out->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        err = -errno;
        if (out->fd < 0)
            goto fail;
    }
    err = submit(call, out);
    if (err < 0)
        goto fail;
    *ret = call;
    return 0;

fail:
    kvbm_out_end(out);
    call_free(call);
    return err;
}

/*
 * Give a call up, with the session locked: nothing writes into its memory from here on. The reply may
 * end, unread, while this waits. The peer is told then, too: a lease that it granted has no reader.
 */
static void abandon(struct kvbm_call *call)
{
    struct kvbm_session *session = call->session;
    const struct kvbm_frame cancel = {.type = KVBM_CANCEL, .id = call->id};
    bool asked = call->listed;

    call->abandoned = true;
    call->ended = NULL;
    while (call->busy)
        pthread_cond_wait(&call->changed, &session->lock);
    free(KV_STEAL(call->body)); /* the call stays until the peer ends its reply, perhaps never */
    if (asked && session->state == KVBM_OPEN)
        (void)kvbm_send_small(session, &cancel); /* without it, the whole reply comes in vain */
}

static long result(struct kvbm_call *call, struct kvbm_reply *reply)
{
    if (call->err < 0)
        return call->err;
    if (reply) {
        *reply = (struct kvbm_reply){.status = call->status, .body = call->body, .fd = call->fd};
        reply->len = call->total;
        call->body = NULL;
        call->fd = -1;
    }
    return (long)call->total;
}

long kvbm_call_wait(struct kvbm_call *call, uint64_t deadline_ns, struct kvbm_reply *reply)
{
    struct kvbm_session *session = call->session;
    bool late = kvbm_on_event_thread(session->net);
    long rc = late ? -EDEADLK : -ETIMEDOUT;

    pthread_mutex_lock(&session->lock);
    while (!call->done && !call->cancelled && !call->err && !late)
        late = kv_cond_wait_until(&call->changed, &session->lock, deadline_ns) == -ETIMEDOUT;
    if (call->done) {
        rc = result(call, reply);
    } else {
        rc = call->cancelled ? -ECANCELED : call->err ? call->err : rc;
        abandon(call);
    }
    call = drop(call); /* else the event thread frees it, once the rest has come */
    pthread_mutex_unlock(&session->lock);
    call_free(call);
    return rc;
}

void kvbm_call_watch(struct kvbm_call *call, void (*fn)(void *arg), void *arg)
{
    pthread_mutex_lock(&call->session->lock);
    if (call->done) {
        fn(arg);
    } else {
        call->ended = fn;
        call->ended_arg = arg;
    }
    pthread_mutex_unlock(&call->session->lock);
}

void kvbm_call_cancel(struct kvbm_call *call)
{
    pthread_mutex_lock(&call->session->lock);
    call->cancelled = true;
    pthread_cond_signal(&call->changed);
    pthread_mutex_unlock(&call->session->lock);
}

int kvbm_session_call(struct kvbm_session *session, uint16_t type, const void *body, size_t len,
                      int fd, uint64_t deadline_ns, struct kvbm_reply *ret)
{
    struct kvbm_call *call = NULL;
    int err = kvbm_on_event_thread(session->net)
                  ? -EDEADLK
                  : kvbm_call_start(session, type, body, len, fd, NULL, 0, &call);
    long rc = err < 0 ? err : kvbm_call_wait(call, deadline_ns, ret);

    return rc < 0 ? (int)rc : 0;
}

long kvbm_session_call_into(struct kvbm_session *session, uint16_t type, const void *body,
                            size_t len, const struct iovec *to, size_t n, uint64_t deadline_ns,
                            int32_t *status)
{
    struct kvbm_reply reply = {.fd = -1};
    struct kvbm_call *call = NULL;
    int err = kvbm_on_event_thread(session->net)
                  ? -EDEADLK
                  : kvbm_call_start(session, type, body, len, -1, to, n, &call);
    long rc = err < 0 ? err : kvbm_call_wait(call, deadline_ns, &reply);

    if (rc >= 0 && status)
        *status = reply.status;
    if (rc >= 0)
        kvbm_reply_fini(&reply);
    return rc;
}

void kvbm_reply_fini(struct kvbm_reply *reply)
{
    free(reply->body);
    if (reply->fd >= 0)
        close(reply->fd);
    *reply = (struct kvbm_reply){.fd = -1};
}
