// SPDX-License-Identifier: Apache-2.0
/**
 * Sessions between agents, as the services of this room use them (docs/formats.md, "Sessions").
 *
 *   asking side                                      answering side
 *   kvbm_session_call ──── request ────────────────► kvbm_serve_fn, on the event thread
 *          ▲                                               │ now or later, from any thread
 *          └─────────────── reply ◄──────────────── kvbm_session_reply / _reply_from
 *   kvbm_session_note ──── note ───────────────────► kvbm_serve_fn, with id 0
 *
 * Sessions are symmetrical: either side calls, whoever opened the session.
 *
 * Each agent has one event thread, started with its first endpoint or session. Handlers and hooks run
 * on that thread and must not block. All functions here may be called from any thread unless they
 * say otherwise. None may be called with the agent's lock held, except where said.
 *
 * Requests of one session reach their handlers in the order in which the peer sent them. Replies come
 * in any order: small ones overtake the chunks of large ones.
 */
#ifndef KVBM_PEER_SESSION_SESSION_H
#define KVBM_PEER_SESSION_SESSION_H

#include <sys/uio.h>

#include "kvbm_lease.h"

/** Types of requests and notes that services serve. The numbers are stable (wire). */
enum {
    KVBM_FIRST_SERVICE = 16, /* below: the session's own frames (wire.h) */
    KVBM_N_TYPES = 64
};

#define KVBM_MAX_REQUEST_BYTES (1u << 20) /* body of a request or note */
#define KVBM_MAX_REPLY_BYTES (16u << 20)  /* body of a reply that kvbm_session_call collects */
#define KVBM_MAX_PIECES 65536 /* pieces of memory that one bulk reply is gathered from */
#define KVBM_SESSION_SLOTS 4  /* 0 to 2: lend.h; the last: tests */

/** Identity of an agent, as it has proved it. */
struct kvbm_identity {
    char name[KVBM_MAX_AGENT_NAME + 1];
    uint64_t worker, incarnation;
};

/* ---------------------------------------------------------------------------------------------
 * Sessions.
 */

/** Count one more reference: the memory stays, also after the session has ended. */
struct kvbm_session *kvbm_session_get(struct kvbm_session *session);

/** Drop a reference; the last one frees. NULL is a no-op. */
void kvbm_session_put(struct kvbm_session *session);

/**
 * Find an open session with the agent of this worker; any one when there are several. Returns
 * a reference for the caller, or NULL.
 */
struct kvbm_session *kvbm_session_find(struct kvbm_agent *agent, uint64_t worker);

/** Return the peer. Constant once the session is open. */
const struct kvbm_identity *kvbm_session_peer(const struct kvbm_session *session);

/** Return this side's agent. */
struct kvbm_agent *kvbm_session_agent(const struct kvbm_session *session);

/** Tell whether descriptors can travel: the session runs over a unix socket. */
bool kvbm_session_takes_fds(const struct kvbm_session *session);

/** Tell whether the session was open a moment ago. */
bool kvbm_session_is_open(const struct kvbm_session *session);

/** End a session, as if its peer had died. @why goes to the log. Returns at once. */
void kvbm_session_abort(struct kvbm_session *session, int err, const char *why);

/**
 * Return the place of a service's own pointer, NULL at first. Services agree on their @slot, below
 * KVBM_SESSION_SLOTS. Only the event thread (handlers, hooks) may use the place.
 */
void **kvbm_session_slot(struct kvbm_session *session, unsigned slot);

/**
 * Hook of a session's begin (@begun) and end. Runs on the event thread: the begin before any of the
 * session's requests is served, the end after the last one. Each begin has its end.
 */
typedef void (*kvbm_session_fn)(void *arg, struct kvbm_session *session, bool begun);

/** Add a hook, before the agent's first session. Returns 0 or -ENOSPC (8 hooks). */
int kvbm_agent_watch(struct kvbm_agent *agent, kvbm_session_fn fn, void *arg);

/* ---------------------------------------------------------------------------------------------
 * Answering.
 */

/** A request or note that has arrived. The body is valid until the handler returns. */
struct kvbm_request {
    uint64_t id; /* for the reply; 0: a note, which gets none */
    uint16_t type;
    const void *body; /* aligned for any type */
    size_t len;
    int fd; /* descriptor that came along, or -1. A handler that keeps it sets -1 here. */
};

/**
 * Handle a request or note on the event thread. Each request needs exactly one reply: from the
 * handler, or later from any thread that holds a reference to @session.
 */
typedef void (*kvbm_serve_fn)(void *arg, struct kvbm_session *session,
                              struct kvbm_request *request);

/**
 * Serve requests and notes of @type, from KVBM_FIRST_SERVICE to KVBM_N_TYPES - 1; or KVBM_CANCEL, whose
 * requests have the id of the one that the peer has given up, and want no answer. NULL for @fn ends
 * that, and returns once no handler of @type runs (on the event thread: at once). Requests of types
 * that nobody serves are answered -EOPNOTSUPP. Returns 0, -EINVAL (type), -EEXIST (served already).
 */
int kvbm_agent_serve(struct kvbm_agent *agent, uint16_t type, kvbm_serve_fn fn, void *arg);

/**
 * Answer request @id with @status (0, a count, or a negative errno down to -4095) and a copy of
 * @body, at most KVBM_MAX_REPLY_BYTES. @fd (-1: none) is duplicated; only over unix sockets. Returns
 * 0; -EINVAL; -ENOENT (no such request is open); -ECANCELED (the peer has given it up); -ENOMEM;
 * -EMFILE; -EPIPE (the session has ended). The request is answered unless the error is -EINVAL; where
 * memory or descriptors lack, with that error.
 */
int kvbm_session_reply(struct kvbm_session *session, uint64_t id, int32_t status, const void *body,
                       size_t len, int fd);

/**
 * Answer a request with bytes straight from memory of the caller: @n pieces, copied list, of at most
 * KVBM_MAX_PIECES and 4 GiB in all. @done(arg) runs exactly once, also when the call fails: when
 * nothing reads the pieces any more (sent, given up by the peer, taken back, or the session has
 * ended). It runs on the event thread, within this call when that fails, or within
 * kvbm_session_take_back; without locks, and must not block. Errors as kvbm_session_reply.
 */
int kvbm_session_reply_from(struct kvbm_session *session, uint64_t id, int32_t status,
                            const struct iovec *from, size_t n, void (*done)(void *arg), void *arg);

/**
 * Take back the pieces of kvbm_session_reply_from: none is read after this call. The peer gets @status
 * in place of chunks that haven't left; the session goes on. A request without a reply is given up as
 * by its peer. From any thread without locks.
 */
void kvbm_session_take_back(struct kvbm_session *session, uint64_t id, int status);

/* ---------------------------------------------------------------------------------------------
 * Asking.
 */

/** Reply to a call. */
struct kvbm_reply {
    int32_t status; /* of the peer's kvbm_session_reply */
    void *body;     /* NULL when empty */
    size_t len;
    int fd; /* descriptor that came along, or -1 */
};

/** Free the body and close the descriptor of a reply. */
void kvbm_reply_fini(struct kvbm_reply *reply);

/**
 * Ask the peer and wait for its reply. @fd (-1: none) travels along, over unix sockets only. The
 * caller ends *@ret with kvbm_reply_fini. Not from the event thread. Returns 0 when a reply came
 * (see its status), or
 *   -EINVAL     @type, @len, @fd
 *   -ETIMEDOUT  no reply until @deadline_ns (CLOCK_MONOTONIC)
 *   -EAGAIN     as many calls are open as the peer allows, also such that were given up
 *   -EPIPE      the session has ended
 *   -EMSGSIZE   a reply beyond KVBM_MAX_REPLY_BYTES
 *   -EDEADLK    called on the event thread
 *   -EMFILE     a descriptor came and couldn't be taken
 *   -ENOMEM
 */
int kvbm_session_call(struct kvbm_session *session, uint16_t type, const void *body, size_t len,
                      int fd, uint64_t deadline_ns, struct kvbm_reply *ret);

/**
 * As kvbm_session_call, with the reply's body read from the socket into @n pieces of the caller's
 * memory. Once the call has returned, not one byte there changes any more, whatever arrives late.
 * Bytes there are undefined unless the call succeeds. *@status (may be NULL) becomes the reply's.
 * Returns the length of the body, or an error as above; -EMSGSIZE: the reply is longer than the
 * pieces.
 */
long kvbm_session_call_into(struct kvbm_session *session, uint16_t type, const void *body,
                            size_t len, const struct iovec *to, size_t n, uint64_t deadline_ns,
                            int32_t *status);

/** A call under way. */
struct kvbm_call;

/**
 * Begin a call, and return before its reply has come. @to (NULL: collect the body) is copied; the
 * memory that it names stays the call's until kvbm_call_wait has returned. kvbm_call_wait ends each
 * call, exactly once. Errors as kvbm_session_call.
 */
int kvbm_call_start(struct kvbm_session *session, uint16_t type, const void *body, size_t len,
                    int fd, const struct iovec *to, size_t n, struct kvbm_call **ret);

/**
 * Wait for the end of a call and free it. @reply (may be NULL) as by kvbm_session_call; without a
 * body when the call has pieces. Returns the length of the body, or an error as above; -ECANCELED
 * after kvbm_call_cancel.
 */
long kvbm_call_wait(struct kvbm_call *call, uint64_t deadline_ns, struct kvbm_reply *reply);

/**
 * Run @fn(@arg) once when a call has ended; at once if it has. It runs with the session's lock held:
 * it may signal, and nothing else. Before kvbm_call_wait, once a call.
 */
void kvbm_call_watch(struct kvbm_call *call, void (*fn)(void *arg), void *arg);

/** Make kvbm_call_wait return now. From any thread, before kvbm_call_wait has returned. */
void kvbm_call_cancel(struct kvbm_call *call);

/**
 * Send a note, which has no reply. Also from the event thread, and with the agent's lock held.
 * Notes that wait for their turn at the peer are lost when this side closes while the peer writes to it.
 * Returns 0; -EINVAL (type, len); -ENOMEM; -ENOBUFS (the peer doesn't read: max_queued_bytes wait for
 * it); -EPIPE (the session has ended).
 */
int kvbm_session_note(struct kvbm_session *session, uint16_t type, const void *body, size_t len);

#endif
