// SPDX-License-Identifier: Apache-2.0
/**
 * Internals of sessions.
 *
 *   agent ──► net ──► event thread: epoll, kicks from other threads, timers (loop.c)
 *              ├────► listeners (listen.c)
 *              ├────► newcomers: sessions whose handshake runs (handshake.c)
 *              └────► open sessions ──► connections: the control one, then data ones
 *                        │                 ├ reading (receive.c): frame by frame, into a call's
 *                        │                 │ memory or a body of its own
 *                        │                 └ writing (send.c): urgent frames, then chunks
 *                        ├► calls: requests that wait for the peer's reply (call.c)
 *                        └► requests of the peer that wait for a reply of ours (serve.c)
 *
 * Locks, in the order in which a thread may take them: agent, net, session, kicks. Only the event
 * thread reads from sockets, ends sessions and closes descriptors. Any thread may write urgent
 * frames; a connection's `writing` mark says which one does.
 */
#ifndef KVBM_PEER_SESSION_NET_H
#define KVBM_PEER_SESSION_NET_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "peer/session/agent.h"
#include "peer/session/auth.h"
#include "peer/session/wire.h"

enum {
    KVBM_MAX_LISTENERS = 8,
    KVBM_MAX_WATCHERS = 8,
    KVBM_MAX_DATA = 8,        /* data connections of a session */
    KVBM_MAX_NEWCOMERS = 128, /* of listeners, handshakes at a time; one more ends another */
    KVBM_IN_BYTES = 4096,     /* read ahead of a connection */
    KVBM_IN_FDS = 4,          /* descriptors that came and whose frames haven't */
    KVBM_CALL_BUCKETS = 64
};

struct kvbm_conn;
struct kvbm_net;

/** A descriptor in epoll. */
struct kvbm_source {
    int fd;
    void (*ready)(struct kvbm_source *source, uint32_t events); /* on the event thread */
};

static inline int kvbm_steal_fd(int *fd)
{
    int ret = *fd;

    *fd = -1;
    return ret;
}

/* ---- messages on their way out ---- */

/** A message to the peer. Its pieces are read until it is done. */
struct kvbm_out {
    TAILQ_ENTRY(kvbm_out) queue;
    struct kvbm_frame frame; /* total and offset of the next chunk */
    struct iovec *from;      /* [n_from]; a copy of the list, behind this struct */
    size_t n_from;
    size_t piece, piece_at;  /* where the next chunk begins */
    size_t queued;           /* bytes of memory that count against max_queued_bytes */
    uint32_t n_flying;       /* chunks that a connection is writing */
    bool cut;                /* given up: no further chunk */
    int fd;                  /* own, or -1 */
    void (*done)(void *arg); /* may be NULL */
    void *arg;
};
TAILQ_HEAD(kvbm_outs, kvbm_out);

/* ---- connections ---- */

/** Frame that a connection is writing. */
struct kvbm_writing {
    struct kvbm_out *out; /* NULL: none */
    uint8_t head[KVBM_FRAME_BYTES];
    size_t done; /* bytes of the frame, header included */
    size_t len;
    size_t piece, piece_at; /* next byte of the body */
    bool bulk;
    bool fd_sent;
};

/** Destination of the body that a connection is reading. */
enum kvbm_sink { KVBM_SINK_BODY, KVBM_SINK_CALL, KVBM_SINK_SCRATCH };

struct kvbm_conn {
    struct kvbm_source source; /* first */
    struct kvbm_session *session;
    void *tls; /* NULL: plain */
    bool is_unix, is_opener;
    bool has_tls; /* or had, before the end */
    bool secured; /* TLS, if any, is agreed on */
    bool greeted; /* the listener has seen that the opener speaks its kind (TLS or plain) */

    /* reading: the event thread */
    bool readable;
    int mark;              /* bytes that make the socket readable (SO_RCVLOWAT); 0: as for 1 */
    bool ending;           /* the peer has closed: read until there is nothing */
    uint64_t turn_ends_ns; /* when requests wait for the connection's next turn */
    bool waits;            /* bytes of the buffer do */
    uint8_t in[KVBM_IN_BYTES];
    size_t in_at, in_len;
    struct kvbm_frame frame;
    bool in_frame;
    uint32_t left; /* of the frame's body */
    enum kvbm_sink sink;
    struct kv_buf body;
    size_t counted;         /* bytes of body that net->in_bytes knows */
    uint64_t grown_ns;      /* when bytes of a step had come to the body, */
    size_t grown_len;       /* and how long it was then */
    uint64_t rate_ns;       /* since when the body's rate is measured, */
    size_t rate_len;        /* and how long it was then */
    struct kvbm_call *call; /* NULL: nobody waits for the reply */
    uint64_t call_at;       /* offset of the next byte in its body */
    int frame_fd;
    int fds[KVBM_IN_FDS];
    unsigned n_fds;

    /* writing: under the session's lock */
    struct kvbm_outs urgent;
    struct kvbm_writing now;
    bool writing;   /* some thread is in a system call for it */
    bool blocked;   /* the socket is full; EPOLLOUT will come */
    unsigned edges; /* of EPOLLOUT that came */
    int broken;     /* error of a write; the event thread ends the session */
    size_t turn;    /* bytes written in this turn of the event thread, which alone looks here */

    struct kvbm_session *kicked; /* the reference of a kick; under the net's lock of kicks */
    TAILQ_ENTRY(kvbm_conn) kicks;
};
TAILQ_HEAD(kvbm_conns, kvbm_conn);

/* ---- sessions ---- */

/** A request of the peer that wasn't answered, or whose answer hasn't left completely. */
struct kvbm_open_request {
    uint64_t id;
    uint16_t type;
    bool answered, cancelled;
};

enum kvbm_session_state { KVBM_GREETING, KVBM_OPEN, KVBM_ENDED };

/** Steps of a handshake, as the side that waits for the frame. */
enum kvbm_step {
    KVBM_WAIT_HELLO,
    KVBM_WAIT_CHALLENGE,
    KVBM_WAIT_PROOF,
    KVBM_WAIT_WELCOME,
    KVBM_WAIT_READY,
    KVBM_OPENED,
    KVBM_REFUSED /* by this side; the reason is on its way out */
};

LIST_HEAD(kvbm_calls, kvbm_call);

struct kvbm_session {
    _Atomic uint32_t references;
    struct kvbm_net *net;
    TAILQ_ENTRY(kvbm_session) list;  /* newcomers or open sessions, by next check; or dead ones */
    uint64_t check_ns;               /* next look at its timers; the event thread */
    _Atomic uint64_t heard_ns;       /* last read, or turn of frames that waited */
    bool pinged;                     /* since heard; the event thread */
    bool attached, in_newcomers;     /* the event thread */
    void *slots[KVBM_SESSION_SLOTS]; /* the event thread */
    bool begun;                      /* hooks ran; the event thread */
    bool told;                       /* gets exports as they change; under the agent's lock */
    bool counted;                    /* among net->n_sessions; the event thread */

    /* handshake: the event thread, until the session is open; then constant */
    enum kvbm_step step;
    struct kv_buf transcript; /* bodies of HELLO and CHALLENGE, which the MACs cover */
    struct kvbm_hello peer;
    uint8_t join[KVBM_JOIN_BYTES];
    uint8_t nonce[KVBM_NONCE_BYTES];
    bool is_data; /* of one data connection, until that joins its session */
    char endpoint[128];
    uint64_t
        origin; /* of a listener's: the opener's process, IPv4 address or IPv6 network of 64 bits */

    pthread_mutex_t lock;   /* all below */
    pthread_cond_t changed; /* state, or a connection isn't written any more */
    enum kvbm_session_state state;
    bool filled; /* the peer's sets have arrived */
    bool gone;   /* ended, and all hooks have run */
    int err;     /* why it ended, or why it is to end */
    char why[KVBM_MAX_REASON + 1];
    struct kvbm_conn *conns[1 + KVBM_MAX_DATA];
    uint32_t n_conns;
    struct kvbm_outs bulk;
    uint64_t queued; /* bytes of copied bodies that wait */
    bool pong_queued;
    struct kvbm_calls calls[KVBM_CALL_BUCKETS];
    uint32_t n_calls;
    uint64_t next_id;
    struct kvbm_link links[KVBM_N_CARRIERS];
    struct kvbm_open_request *requests; /* [n_requests], room for max_requests */
    uint32_t n_requests;
};
TAILQ_HEAD(kvbm_sessions, kvbm_session);

/* ---- nets ---- */

struct kvbm_listener {
    struct kvbm_source source; /* first */
    struct kvbm_net *net;
    bool is_unix;
    bool asleep;      /* no descriptor was left */
    uint64_t wake_ns; /* when to try again */
    char endpoint[128];
    uint64_t device, inode; /* of the unix socket's file */
};

struct kvbm_service {
    kvbm_serve_fn fn;
    void *arg;
};

struct kvbm_net {
    struct kvbm_agent *agent;
    struct kvbm_auth auth;
    uint32_t max_sessions, max_requests;
    uint64_t max_queued, max_in; /* bytes: of one session, of all */
    uint64_t keepalive_ns, handshake_ns;
    uint32_t layers, outer, page_size;
    struct kvbm_listener listeners[KVBM_MAX_LISTENERS];
    uint32_t n_listeners;

    int epoll;
    struct kv_wake wake;
    pthread_t thread;

    pthread_mutex_t lock;  /* all below */
    pthread_cond_t served; /* no handler runs */
    bool running, stopping;
    struct kvbm_sessions sessions; /* open; changed by the event thread alone */
    struct kvbm_service services[KVBM_N_TYPES];
    int serving; /* type whose handler runs; 0: none */
    struct {
        kvbm_session_fn fn;
        void *arg;
    } watchers[KVBM_MAX_WATCHERS];
    uint32_t n_watchers;

    pthread_mutex_t kicks_lock;
    struct kvbm_conns kicks; /* each counts a reference to its session */
    struct kvbm_outs sent;   /* messages that wait for the event thread to run their `done` */

    /* the event thread */
    struct kvbm_sessions newcomers, dead;
    uint32_t n_newcomers, n_sessions; /* newcomers: of listeners alone */
    uint64_t in_bytes;
    uint8_t scratch[64 << 10]; /* for bytes that nobody waits for any more */
};

/* ---- loop.c ---- */

/** Make the net of an agent from its options. Starts nothing. */
int kvbm_net_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts);
/** End all sessions and the event thread; free. NULL is a no-op. */
void kvbm_net_destroy(struct kvbm_net *net);
/** Start the event thread, unless it runs. */
int kvbm_net_start(struct kvbm_net *net);
bool kvbm_on_event_thread(const struct kvbm_net *net);
/**
 * Be the event thread of a net that wasn't started, for one round that doesn't wait: programs without
 * threads, such as fuzzers. Returns whether there was an event.
 */
bool kvbm_net_turn(struct kvbm_net *net);
int kvbm_net_add(struct kvbm_net *net, struct kvbm_source *source, uint32_t events);
/** Have the event thread look at a connection soon: at what waits to be read, written or ended. */
void kvbm_kick(struct kvbm_conn *conn);
/** Move a connection to @session, with that one locked. A kick that waits counts a reference to it then. */
void kvbm_kick_moves(struct kvbm_conn *conn, struct kvbm_session *session);
/** Have the event thread end a message that was sent. With any lock but that of kicks. */
void kvbm_out_sent(struct kvbm_net *net, struct kvbm_out *out);
/** End the messages that were sent. The event thread, without locks. */
void kvbm_end_sent(struct kvbm_net *net);

/* ---- session.c ---- */

/** Make a session, with one reference. Takes @fd, which is closed on errors. */
int kvbm_session_create(struct kvbm_net *net, int fd, bool is_unix, bool is_opener,
                        const char *endpoint, struct kvbm_session **ret);
/** End a session. The event thread. @why is for the log. */
void kvbm_session_end(struct kvbm_session *session, int err, const char *why);
/** Take a new session into the event thread, and begin its handshake. */
void kvbm_session_attach(struct kvbm_session *session);
/** Move the connection of @session to @other, and end @session. The event thread. */
void kvbm_session_move(struct kvbm_session *session, struct kvbm_session *other);
/** Take a session whose handshake is over among the open ones. The event thread. */
void kvbm_session_begin(struct kvbm_session *session);
/** Look at a session's timers. The event thread. */
void kvbm_session_check(struct kvbm_session *session, uint64_t now);
/** Tell whether a session has ended. The event thread. */
bool kvbm_has_ended(const struct kvbm_session *session);
/** Describe an error that ends a session. */
const char *kvbm_words(int err);

/* ---- receive.c ---- */

/** Read what has arrived. The event thread. */
void kvbm_receive(struct kvbm_conn *conn);
/**
 * Read parts of chunks that sockets don't tell of yet; @all: whatever has arrived. The event thread.
 * Returns false when the session has ended.
 */
bool kvbm_receive_arrived(struct kvbm_session *session, bool all);

/** Tell whether a body comes more slowly than a peer may send. The event thread, at each check. */
bool kvbm_drips(struct kvbm_conn *conn, uint64_t now, bool late);

/* ---- send.c ---- */

/** Make a message with a copy of @body behind it. */
struct kvbm_out *kvbm_out_copy(const struct kvbm_frame *frame, const void *body, size_t len);
/** Make a message of @n pieces that stay the caller's. */
struct kvbm_out *kvbm_out_from(const struct kvbm_frame *frame, const struct iovec *from, size_t n);
/** End a message: run its done, close its descriptor, free. Without locks that its done may take. */
void kvbm_out_end(struct kvbm_out *out);
/** Queue an urgent message, with the session locked, and write what can be. */
void kvbm_send(struct kvbm_session *session, struct kvbm_out *out);
/** Queue a reply to be sent in chunks, with the session locked. */
void kvbm_send_bulk(struct kvbm_session *session, struct kvbm_out *out);
/** Queue a frame without a body. Returns 0 or -ENOMEM. */
int kvbm_send_small(struct kvbm_session *session, const struct kvbm_frame *frame);
/** Write what waits, with the session locked. */
void kvbm_flush(struct kvbm_conn *conn);
/**
 * Give up a reply's chunks that aren't on their way, with the session locked; unlocks meanwhile.
 * Returns false when there are none.
 */
bool kvbm_cut_bulk(struct kvbm_session *session, uint64_t id);
/**
 * Let a reply go on without the memory of its pieces, with the session locked; unlocks meanwhile. What a
 * socket has a part of is copied, further chunks are given up. Returns whether some are: then the
 * caller sends CUT.
 */
bool kvbm_take_back(struct kvbm_session *session, uint64_t id);

/* ---- call.c ---- */

struct kvbm_call *kvbm_call_find(struct kvbm_session *session, uint64_t id);
/** Begin a reply's frame. Returns 0; -EPROTO: nobody asked for it. */
int kvbm_call_frame(struct kvbm_conn *conn);
/** Name the memory for the next bytes of a call's body. Returns pieces; 0: to be thrown away. */
size_t kvbm_call_claim(struct kvbm_conn *conn, struct iovec *to, size_t max);
/** Account for @n bytes that arrived there, and let the caller have the memory back. */
void kvbm_call_claimed(struct kvbm_conn *conn, size_t n);
/** End a reply's frame. */
int kvbm_call_frame_end(struct kvbm_conn *conn);
/** End all calls with -EPIPE, with the session locked. */
void kvbm_calls_end(struct kvbm_session *session);

/* ---- serve.c ---- */

/** Serve a request or note that has arrived. Returns 0 or the error that ends the session. */
int kvbm_serve(struct kvbm_conn *conn);
/** Forget a request whose answer has left, with the session locked. */
void kvbm_request_end(struct kvbm_session *session, uint64_t id);
/** Note that the peer has given up a request. */
void kvbm_request_cancelled(struct kvbm_session *session, uint64_t id);

/* ---- handshake.c ---- */

/** Begin the handshake of an opener. Returns 0 or an error. */
int kvbm_greet(struct kvbm_session *session);
/** Take a frame of a handshake. Returns 0 or the error that ends the session. */
int kvbm_greeted(struct kvbm_conn *conn);
/** Refuse a peer, in words for both sides' logs. Returns @err. */
int kvbm_refuse(struct kvbm_session *session, int err, const char *fmt, ...) KV_PRINTF(3, 4);

/* ---- handshake_fit.c ---- */

/** Compare models and blocks. Returns 0, or what kvbm_refuse has returned with step REFUSED. */
int kvbm_fits(struct kvbm_session *session);
/** Compare with the open sessions: no two peers share a name or a worker. Returns as kvbm_fits. */
int kvbm_admit(struct kvbm_session *session);

/* ---- handshake_tls.c ---- */

/** Give a new connection a TLS stream. @host: that the listener's certificate must name. */
int kvbm_conn_tls(struct kvbm_conn *conn, const char *host);
/** Go on with TLS, or see that there is none, on a connection that isn't secured. */
void kvbm_secure(struct kvbm_conn *conn);

/* ---- listen.c ---- */

int kvbm_listen(struct kvbm_net *net, const struct kvbm_agent_opts *opts);
void kvbm_listener_close(struct kvbm_listener *listener);
void kvbm_listener_wake(struct kvbm_listener *listener);

/* ---- exchange.c ---- */

/** Send all exported sets to a session that begins, and later ones as they change. */
void kvbm_exchange_begin(struct kvbm_session *session);
/** Forget the peer's sets with its last session. */
void kvbm_exchange_end(struct kvbm_session *session);
/** Take a SET or SET_GONE frame. Returns 0 or the error that ends the session. */
int kvbm_exchange_frame(struct kvbm_conn *conn);
/** Tell all sessions of a new generation of a set, with the agent locked. */
void kvbm_exchange_tell(struct kvbm_agent *agent, struct kvbm_facts *facts);
/** Tell all sessions that a set is gone, with the agent locked. */
void kvbm_exchange_gone(struct kvbm_agent *agent, const struct kvbm_facts *facts);

#endif
