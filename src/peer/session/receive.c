// SPDX-License-Identifier: Apache-2.0
/*
 * Reading from a connection: frame by frame, the body straight to where it belongs.
 *
 *   socket ──► [ rest of the body ──► a call's memory, or a body of our own, or nowhere ]
 *         └──► [ the connection's buffer: what follows, usually the next header         ]
 *
 * One read fills both, so a bulk reply costs a system call a chunk, and small frames come several a
 * call. A body of our own grows as its bytes arrive, so a lie about its length takes no memory.
 */
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "peer/session/net.h"

/* A turn: then other connections have theirs. Requests may cost more than their bytes. */
#define BUDGET (4u << 20) /* bytes read */
#define TURN_NS (5 * KV_NS_PER_MS)
#define PIECES 64                    /* of a call's memory, in one read */
#define STEP (64u << 10)             /* growth of a body of our own */
#define LONG (16u << 10)             /* bytes of a body that are worth a mark of the socket */
#define IDLE_NS (100 * KV_NS_PER_MS) /* a body that doesn't grow for so long waits for its peer */
#define LEAST_RATE (32u << 10)       /* bytes a second of a body of more than a step */

/* ---- descriptors ---- */

/* Keep a descriptor for its frame. @fd -1: it came, and this process has no room for it. */
static int keep_fd(struct kvbm_conn *conn, int fd)
{
    if (conn->n_fds == KVBM_IN_FDS) {
        if (fd >= 0)
            close(fd);
        return -EPROTO;
    }
    conn->fds[conn->n_fds++] = fd;
    return 0;
}

/*
 * Keep what came with a message. Its room is that of one descriptor, which the kernel rounds up to
 * two: all that have come are this process's now, and are kept or closed.
 */
static int keep_fds(struct kvbm_conn *conn, struct msghdr *message)
{
    size_t came = 0;
    int err = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < n; i++) {
            int fd, kept;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
            kept = keep_fd(conn, fd);
            err = err < 0 ? err : kept;
        }
        came += n;
    }
    if (came > 1) /* a frame has one at most, and the kernel joins none of two messages */
        return -EPROTO;
    if (!came && message->msg_flags & MSG_CTRUNC) /* it came, and there was no number left for it */
        err = keep_fd(conn, -1);
    return err;
}

static int take_fd(struct kvbm_conn *conn)
{
    int fd = conn->fds[0];

    memmove(conn->fds, conn->fds + 1, --conn->n_fds * sizeof(int));
    return fd;
}

/* ---- frames ---- */

/* Find the session whose body is longest; @idle_ns: of those that haven't grown for so long. */
static struct kvbm_session *longest_body(const struct kvbm_net *net, uint64_t now, uint64_t idle_ns)
{
    const struct kvbm_sessions *lists[] = {&net->sessions, &net->newcomers};
    struct kvbm_session *session, *worst = NULL;

    for (size_t i = 0; i < KV_COUNT(lists); i++) {
        for (session = TAILQ_FIRST(lists[i]); session; session = TAILQ_NEXT(session, list)) {
            const struct kvbm_conn *conn = session->conns[0];

            if (conn->counted && now - KV_MIN(now, conn->grown_ns) >= idle_ns &&
                (!worst || conn->counted > worst->conns[0]->counted))
                worst = session;
        }
    }
    return worst;
}

/*
 * Bodies under way need more than they may. End the session whose body is longest, of those that don't
 * go on. Returns 0, or -ENOBUFS when @conn's own is the one.
 */
static int end_longest(const struct kvbm_conn *conn)
{
    struct kvbm_net *net = conn->session->net;
    uint64_t now = kv_now_ns();
    struct kvbm_session *worst = longest_body(net, now, IDLE_NS);

    if (!worst)
        worst = longest_body(net, now, 0);
    if (!worst || worst == conn->session)
        return -ENOBUFS;
    kvbm_session_end(worst, -ENOBUFS, kvbm_words(-ENOBUFS));
    return 0;
}

/* Make room for bytes of a body of our own, as far as all sessions together may use memory. */
static int grow_body(struct kvbm_conn *conn, size_t more)
{
    struct kvbm_net *net = conn->session->net;
    int err = kv_buf_reserve(&conn->body, more);

    if (err < 0)
        return err;
    if (!conn->counted || conn->body.len - conn->grown_len >= STEP) {
        conn->grown_ns = kv_now_ns();
        conn->grown_len = conn->body.len;
    }
    net->in_bytes += conn->body.capacity - conn->counted;
    conn->counted = conn->body.capacity;
    while (err == 0 && net->in_bytes > net->max_in)
        err = end_longest(conn);
    return err;
}

bool kvbm_drips(struct kvbm_conn *conn, uint64_t now, bool late)
{
    uint64_t window_ns = conn->session->net->keepalive_ns, ns = now - KV_MIN(now, conn->rate_ns);
    bool slow;

    if (conn->sink != KVBM_SINK_BODY || !conn->in_frame || conn->body.len < STEP)
        return false;
    if (ns < window_ns && !late)
        return false;
    /* When this look is late, the thread stood still, and bytes are unread. */
    slow = !late && conn->body.len - conn->rate_len < ns / KV_NS_PER_MS * LEAST_RATE / 1000;
    conn->rate_ns = now;
    conn->rate_len = conn->body.len;
    return slow;
}

/* Free a large body, and keep a small one's memory for the next frame. */
static void clear_body(struct kvbm_conn *conn)
{
    struct kvbm_net *net = conn->session->net;

    kv_buf_clear(&conn->body);
    if (conn->body.capacity <= KVBM_IN_BYTES)
        return;
    net->in_bytes -= conn->counted;
    conn->counted = 0;
    kv_buf_fini(&conn->body);
}

static int begin_frame(struct kvbm_conn *conn)
{
    int err = kvbm_frame_parse(conn->in + conn->in_at, &conn->frame);

    if (err < 0)
        return err;
    if (conn->session->step != KVBM_OPENED && conn->frame.type > KVBM_REFUSE)
        return -EPROTO;
    if (conn != conn->session->conns[0] && !(conn->frame.flags & KVBM_FRAME_REPLY))
        return -EPROTO; /* data connections carry replies */
    conn->in_at += KVBM_FRAME_BYTES;
    conn->in_frame = true;
    conn->left = conn->frame.len;
    conn->sink = KVBM_SINK_BODY;
    conn->rate_ns = conn->grown_ns = kv_now_ns();
    conn->rate_len = conn->grown_len = 0;
    conn->frame_fd = -1;
    if (conn->frame.flags & KVBM_FRAME_FD) {
        if (conn->n_fds == 0)
            return -EPROTO;
        conn->frame_fd = take_fd(conn);
    }
    return conn->frame.flags & KVBM_FRAME_REPLY ? kvbm_call_frame(conn) : 0;
}

static int end_frame(struct kvbm_conn *conn)
{
    int err;

    conn->in_frame = false;
    if (conn->frame.flags & KVBM_FRAME_REPLY)
        err = kvbm_call_frame_end(conn);
    else if (conn->session->step != KVBM_OPENED)
        err = kvbm_greeted(conn);
    else
        err = kvbm_serve(conn);
    if (conn->frame_fd >= 0)
        close(conn->frame_fd);
    conn->frame_fd = -1;
    clear_body(conn);
    return err;
}

/* Name the memory for the next bytes of the body. Returns the number of pieces, or an error. */
static long claim(struct kvbm_conn *conn, struct iovec *to, size_t max)
{
    struct kvbm_net *net = conn->session->net;

    if (conn->sink == KVBM_SINK_BODY) {
        size_t more = KV_MIN(conn->left, STEP);
        int err = grow_body(conn, more);

        to[0] = (struct iovec){conn->body.data + conn->body.len, more};
        return err < 0 ? err : 1;
    }
    if (conn->sink == KVBM_SINK_CALL) {
        size_t n = kvbm_call_claim(conn, to, max);

        if (n)
            return (long)n;
    }
    to[0] = (struct iovec){net->scratch, KV_MIN((size_t)conn->left, sizeof(net->scratch))};
    return 1;
}

/* Account for @n bytes of the body that lie where claim() said. */
static void claimed(struct kvbm_conn *conn, size_t n)
{
    conn->left -= (uint32_t)n;
    if (conn->sink == KVBM_SINK_BODY)
        conn->body.len += n;
    else if (conn->sink == KVBM_SINK_CALL)
        kvbm_call_claimed(conn, n);
}

/* Copy from the connection's buffer to where the body belongs. */
static int copy_body(struct kvbm_conn *conn)
{
    struct iovec to[PIECES];
    long n = claim(conn, to, PIECES);
    size_t sum = 0;

    for (long i = 0; i < n && conn->in_at < conn->in_len; i++) {
        size_t len = KV_MIN(to[i].iov_len, conn->in_len - conn->in_at);

        memcpy(to[i].iov_base, conn->in + conn->in_at, len);
        conn->in_at += len;
        sum += len;
    }
    if (n > 0)
        claimed(conn, sum);
    return n < 0 ? (int)n : 0;
}

static bool is_turn_over(const struct kvbm_conn *conn)
{
    return kv_now_ns() >= conn->turn_ends_ns;
}

/* Take the frames in the buffer, up to the end of the turn. Returns 0 or the error that ends the
 * session. */
static int take_frames(struct kvbm_conn *conn)
{
    int err = 0;

    conn->waits = false;
    while (err == 0 && !conn->waits && !kvbm_has_ended(conn->session)) {
        if (conn->session->step == KVBM_REFUSED) { /* the peer may say what it likes */
            conn->in_frame = false;
            conn->in_at = conn->in_len;
            break;
        }
        if (conn->in_frame && conn->left == 0) {
            err = end_frame(conn);
            conn->waits = conn->in_at < conn->in_len && is_turn_over(conn);
        } else if (conn->in_frame && conn->in_at < conn->in_len) {
            err = copy_body(conn);
        } else if (!conn->in_frame && conn->in_len - conn->in_at >= KVBM_FRAME_BYTES) {
            err = begin_frame(conn);
        } else {
            break;
        }
    }
    return err;
}

/* ---- the socket ---- */

static ssize_t read_tls(struct kvbm_conn *conn, const struct iovec *to, size_t n)
{
    const struct kvbm_tls_abi *tls = conn->session->net->auth.crypto;
    ssize_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0; at < to[i].iov_len;) {
            ssize_t got = tls->read(conn->tls, (char *)to[i].iov_base + at, to[i].iov_len - at);

            if (got <= 0)
                return sum ? sum : got;
            at += (size_t)got;
            sum += got;
        }
    }
    return sum;
}

/* Read into pieces, with descriptors that come along. Returns bytes; 0: closed; an error. */
static ssize_t read_pieces(struct kvbm_conn *conn, struct iovec *to, size_t n)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = to, .msg_iovlen = n};
    ssize_t got;
    int err;

    if (conn->tls)
        return read_tls(conn, to, n);
    if (conn->is_unix) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
    }
    do {
        got = recvmsg(conn->source.fd, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno == ECONNRESET ? -EPIPE : -errno;
    err = conn->is_unix ? keep_fds(conn, &message) : 0;
    return err < 0 ? err : got;
}

/* Read once: the rest of a body, and what follows it into the buffer. */
static ssize_t fill(struct kvbm_conn *conn)
{
    struct iovec to[PIECES + 1];
    long n = 0;
    size_t body = 0, room;
    ssize_t got;

    if (conn->in_at) {
        memmove(conn->in, conn->in + conn->in_at, conn->in_len - conn->in_at);
        conn->in_len -= conn->in_at;
        conn->in_at = 0;
    }
    if (conn->in_frame) /* the buffer is empty then */
        n = claim(conn, to, PIECES);
    if (n < 0)
        return n;
    for (long i = 0; i < n; i++)
        body += to[i].iov_len;
    room = sizeof(conn->in) - conn->in_len;
    if (conn->in_frame && body < conn->left)
        room = 0; /* the buffer holds what follows the body */
    to[n] = (struct iovec){conn->in + conn->in_len, room};
    got = read_pieces(conn, to, (size_t)n + (room > 0));
    /* A plain socket that gave less is empty. Its next bytes, or its end, are an event of their own. */
    if (got > 0 && (size_t)got < body + room && !conn->tls && !conn->ending && conn->n_fds == 0)
        conn->readable = false;
    if (conn->in_frame)
        claimed(conn, got > 0 ? KV_MIN((size_t)got, body) : 0);
    if (got > 0 && (size_t)got > body)
        conn->in_len += (size_t)got - body;
    return got;
}

/* End a session by an error whose words it has already, perhaps. */
static void end_session(struct kvbm_session *session, int err)
{
    bool has_words;

    pthread_mutex_lock(&session->lock); /* another thread may be writing words of its own */
    has_words = session->why[0];
    pthread_mutex_unlock(&session->lock);
    kvbm_session_end(session, err, has_words ? session->why : kvbm_words(err));
}

/*
 * Have the socket be readable once the rest of a chunk is there, not at each packet of it. The mark is
 * never above what the frame lacks; the kernel ignores it when its own memory is short, and at the end.
 */
static void set_mark(struct kvbm_conn *conn)
{
    int mark = conn->in_frame && conn->left >= LONG && !conn->tls && !conn->is_unix
                   ? (int)KV_MIN(conn->left, (uint32_t)KVBM_CHUNK_BYTES)
                   : 1;

    if (mark != KV_MAX(conn->mark, 1) &&
        setsockopt(conn->source.fd, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof(mark)) == 0)
        conn->mark = mark;
}

/* Take frames that have waited for this turn. Returns false when there is nothing to read in it. */
static bool take_waiting(struct kvbm_conn *conn)
{
    int err = take_frames(conn);

    conn->session->heard_ns = kv_now_ns(); /* the peer isn't silent: this side is slow */
    if (err < 0)
        end_session(conn->session, err);
    else if (conn->waits)
        kvbm_kick(conn);
    return err == 0 && !conn->waits;
}

void kvbm_receive(struct kvbm_conn *conn)
{
    struct kvbm_session *session;
    size_t sum = 0;

    conn->turn_ends_ns = kv_now_ns() + TURN_NS;
    if (conn->waits && !take_waiting(conn))
        return;
    session = conn->session;
    while (conn->readable && !kvbm_has_ended(session)) {
        ssize_t got = fill(conn);
        int err = got > 0 ? take_frames(conn) : 0;

        if (got == -EAGAIN) {
            conn->readable = false;
            break;
        }
        if (got == 0)
            kvbm_session_end(session, -EPIPE, "the peer has closed the connection");
        else if (got < 0)
            kvbm_session_end(session, (int)got, kvbm_words((int)got));
        else if (err < 0)
            end_session(conn->session, err);
        if (got <= 0 || err < 0)
            return;
        session = conn->session; /* a data connection may have joined its session */
        session->heard_ns = kv_now_ns();
        sum += (size_t)got;
        if (conn->waits || (conn->readable && (sum >= BUDGET || is_turn_over(conn)))) {
            kvbm_kick(conn);
            return;
        }
    }
    if (!kvbm_has_ended(session))
        set_mark(conn);
}

bool kvbm_receive_arrived(struct kvbm_session *session, bool all)
{
    for (uint32_t i = 0; i < session->n_conns && !kvbm_has_ended(session); i++) {
        struct kvbm_conn *conn = session->conns[i];

        if (conn->mark <= 1 && !all)
            continue;
        conn->readable = true;
        kvbm_receive(conn);
    }
    return !kvbm_has_ended(session);
}
