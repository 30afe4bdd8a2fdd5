// SPDX-License-Identifier: Apache-2.0
/**
 * The open HTTP connections and a janitor that ends those which take too long.
 *
 * The HTTP library closes connections on which nothing moves. That isn't enough: a client may send
 * a byte every few seconds for ever, and idle clients may use up the connection limit so that
 * nobody else is accepted. So every connection has a deadline that trickling bytes don't move (the
 * next request header, the rest of a body, the reply), and when the table is nearly full the
 * connections that have been idle longest make room.
 */
#ifndef KV_INDEXER_CONNS_H
#define KV_INDEXER_CONNS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct ki_conns;

struct ki_conn {
    struct ki_conn *prev, *next;
    int fd; /* the connection's socket, not owned */
    bool loopback;
    bool linger;  /* the HTTP thread's own: the client may still be sending when it is closed */
    bool closing; /* shut down by the janitor; guarded by the table's lock */
    _Atomic uint64_t deadline_ns; /* monotonic; 0: none */
    _Atomic uint64_t idle_since;  /* monotonic; 0: a request is in progress */
};

struct ki_conns_stats {
    uint64_t open;     /* now */
    uint64_t accepted; /* since the start */
    uint64_t expired;  /* closed because a deadline passed */
    uint64_t evicted;  /* closed, idle, to make room */
};

/** Starts the janitor thread. Returns 0 or a negative errno. */
int ki_conns_create(uint64_t max, uint64_t idle_timeout_ms, struct ki_conns **ret);
void ki_conns_destroy(struct ki_conns *conns); /* all connections must be gone; NULL is a no-op */

/** NULL when out of memory. The connection counts as idle. */
struct ki_conn *ki_conns_add(struct ki_conns *conns, int fd, bool loopback);
/** Before the socket is closed, so that the janitor never touches a reused descriptor. */
void ki_conns_remove(struct ki_conns *conns, struct ki_conn *conn);

/** A request is in progress; what comes next must be done within @limit_ms (0: no limit). */
void ki_conn_busy(struct ki_conn *conn, uint64_t limit_ms);
/**
 * The same deadline, but the connection still counts as idle: who is refused mustn't keep others
 * out by being slow.
 */
void ki_conn_limit(struct ki_conn *conn, uint64_t limit_ms);
/** The reply is out; the next request header must come within the idle timeout. */
void ki_conn_idle(struct ki_conns *conns, struct ki_conn *conn);

void ki_conns_get_stats(struct ki_conns *conns, struct ki_conns_stats *ret);

#endif
