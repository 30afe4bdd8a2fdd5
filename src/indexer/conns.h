// SPDX-License-Identifier: Apache-2.0
/**
 * The open HTTP connections and a janitor that ends those which take too long.
 *
 * The HTTP library closes connections on which nothing moves. More is needed: a client may send a
 * byte every few seconds for ever, and connections of one client may use up the limit so that
 * nobody else is accepted. So each connection has the time up to which it has kept pace:
 *
 *     between requests       when the last reply was sent (or the connection made)
 *     a body, a stream       as many milliseconds after its start as the client has moved bytes, at
 *     the slowest pace that
 *                            is allowed; never in the future, so that haste at first buys no sleep
 *                            later
 *     a reply                when it was queued
 *
 * The janitor closes a connection that is behind by more than its patience. When the table is
 * nearly full, it closes the connections furthest behind, first those of clients with more than
 * their share.
 */
#ifndef KV_INDEXER_CONNS_H
#define KV_INDEXER_CONNS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ki_budget;
struct ki_conns;

struct ki_client; /* budget.h */

struct ki_conn {
    struct ki_conn *prev, *next;
    int fd; /* the connection's socket, not owned */
    bool loopback;
    bool linger;  /* the HTTP thread's own: the client may still be sending when it is closed */
    bool closing; /* shut down by the janitor; guarded by the table's lock */
    struct ki_client *client;
    _Atomic uint64_t pace_ns;     /* monotonic: kept pace up to then; 0: it is our turn */
    _Atomic uint64_t patience_ns; /* closed that long after pace_ns */
    _Atomic uint64_t end_ns;      /* closed then in any case; 0: never */
    _Atomic bool holds;           /* memory of the budget for a body that isn't complete */
};

struct ki_conns_stats {
    uint64_t open;     /* now */
    uint64_t accepted; /* since the start */
    uint64_t expired;  /* closed because a deadline passed */
    uint64_t evicted;  /* closed, idle or slow, to make room */
};

#define KI_SLOWEST_BYTES_PER_MS 32u /* the slowest pace that is allowed */

/** Starts the janitor thread. @budget outlives the table. Returns 0 or a negative errno. */
int ki_conns_create(uint64_t max, uint64_t idle_timeout_ms, struct ki_budget *budget,
                    struct ki_conns **ret);
void ki_conns_destroy(struct ki_conns *conns); /* all connections must be gone; NULL is a no-op */

/** NULL when out of memory. The connection counts as idle. */
struct ki_conn *ki_conns_add(struct ki_conns *conns, int fd, bool loopback,
                             struct ki_client *client);
/** Before the socket is closed, so that the janitor never touches a reused descriptor. */
void ki_conns_remove(struct ki_conns *conns, struct ki_conn *conn);

/** The client is to send or to take bytes from now on, and may lie behind by @patience_ms. @limit_ms is for all of it
 * (0: none). */
void ki_conn_start(struct ki_conn *conn, uint64_t patience_ms, uint64_t limit_ms);
/** Note that a connection has moved @n bytes. */
void ki_conn_moved(struct ki_conn *conn, size_t n);
/** Note that a connection has done all its work: it is not behind. */
void ki_conn_caught_up(struct ki_conn *conn);
/**
 * Note that a connection waits for this service: until ki_conn_caught_up only the common limit
 * counts.
 */
void ki_conn_wait(struct ki_conn *conn);
/** Note that this service works on a request: no deadline, and not closed to make room. */
void ki_conn_busy(struct ki_conn *conn);
/**
 * A deadline that keeps its place among the idle: who is refused mustn't keep others out by being
 * slow.
 */
void ki_conn_limit(struct ki_conn *conn, uint64_t limit_ms);
/** By how much it lies behind. */
uint64_t ki_conn_lag_ns(const struct ki_conn *conn, uint64_t now_ns);

/** Close it; its thread notices soon. Before ki_conns_remove. */
void ki_conns_hang_up(struct ki_conns *conns, struct ki_conn *conn);
/**
 * Close the connection of @client whose body holds memory and lies behind most, if by more than
 * @lag_ms.
 */
bool ki_conns_drop_slowest(struct ki_conns *conns, const struct ki_client *client, uint64_t lag_ms);

/** The reply is out; the next request header must come within the idle timeout. */
void ki_conn_idle(struct ki_conns *conns, struct ki_conn *conn);

void ki_conns_get_stats(struct ki_conns *conns, struct ki_conns_stats *ret);

#endif
