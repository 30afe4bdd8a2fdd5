// SPDX-License-Identifier: Apache-2.0
/**
 * The open HTTP connections, and a janitor that closes those which take too long.
 *
 * The HTTP library closes connections on which no byte moves. That isn't enough: a client may send
 * a byte every few seconds for ever, and connections of one client may use up the limit for all
 * others. Each connection therefore has a pace: the time up to which it has kept up.
 *
 *     between requests       when the last reply was sent (or the connection made)
 *     a body, a stream       its start plus one millisecond for each KH_SLOWEST_BYTES_PER_MS bytes
 *                            moved; never in the future, so early haste allows no later pause
 *     a reply                when it was queued
 *
 * The janitor closes a connection whose pace lags by more than its patience. When the table is
 * nearly full, the janitor closes the connections with the largest lag, first those of clients with
 * more than their share.
 */
#ifndef KV_HTTP_CONNS_H
#define KV_HTTP_CONNS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

struct kh_budget;
struct kh_conns;

struct kh_client; /* budget.h */

struct kh_conn {
    struct kh_conn *prev, *next;
    int fd; /* the connection's socket, not owned */
    bool loopback;
    /* The HTTP thread's own: the client may still be sending when the connection closes. */
    bool linger;
    bool closing; /* the janitor has shut it down; guarded by the table's lock */
    struct kh_client *client;
    /* The HTTP thread's own, for http_faults.c: the library's connection while a header comes in. */
    void *head;
    bool heard; /* of TLS: its first bytes were looked at */
    bool cut;   /* the target has a percent-escaped NUL, which ends what handlers see of it */
    LIST_ENTRY(kh_conn) heads;
    _Atomic uint64_t pace_ns;     /* monotonic time of its pace; 0: the service is working */
    _Atomic uint64_t patience_ns; /* closed when pace_ns is older than this */
    _Atomic uint64_t end_ns;      /* closed at this time in any case; 0: never */
    _Atomic bool holds;           /* holds memory of the budget for an incomplete body */
};

struct kh_conns_stats {
    uint64_t open;     /* open now */
    uint64_t accepted; /* since the start */
    uint64_t expired;  /* closed because a deadline passed */
    uint64_t evicted;  /* closed, idle or slow, to make room */
};

#define KH_SLOWEST_BYTES_PER_MS 32u /* slowest pace that is allowed */

/**
 * Create the table and start the janitor thread. @budget must outlive the table. Returns 0 or a
 * negative errno.
 */
int kh_conns_create(uint64_t max, uint64_t idle_timeout_ms, struct kh_budget *budget,
                    struct kh_conns **ret);
/* After all connections have gone; NULL is a no-op. */
void kh_conns_destroy(struct kh_conns *conns);

/** Add a connection, which counts as idle. Returns NULL when out of memory. */
struct kh_conn *kh_conns_add(struct kh_conns *conns, int fd, bool loopback,
                             struct kh_client *client);
/**
 * Remove a connection before its socket is closed, so that the janitor never touches a reused
 * descriptor.
 */
void kh_conns_remove(struct kh_conns *conns, struct kh_conn *conn);

/**
 * Start a transfer: the client must send or take bytes from now on, and may lag by @patience_ms.
 * @limit_ms bounds the whole transfer (0: no bound).
 */
void kh_conn_start(struct kh_conn *conn, uint64_t patience_ms, uint64_t limit_ms);
/** Note that a connection has moved @n bytes. */
void kh_conn_moved(struct kh_conn *conn, size_t n);
/** Note that a connection has done all its work: it is not behind. */
void kh_conn_caught_up(struct kh_conn *conn);
/**
 * Note that a connection waits for this service. Until kh_conn_caught_up only the common limit
 * counts.
 */
void kh_conn_wait(struct kh_conn *conn);
/** Note that this service works on a request: no deadline, and not closed to make room. */
void kh_conn_busy(struct kh_conn *conn);
/**
 * Set a deadline for a connection that still counts as idle: a slow client that is refused mustn't
 * keep others out.
 */
void kh_conn_limit(struct kh_conn *conn, uint64_t limit_ms);
/** Return how far the connection's pace lags, in nanoseconds. */
uint64_t kh_conn_lag_ns(const struct kh_conn *conn, uint64_t now_ns);

/** Close the connection. Its thread notices soon, before kh_conns_remove. */
void kh_conns_hang_up(struct kh_conns *conns, struct kh_conn *conn);
/**
 * Close all connections, and wait until their threads have removed them, for @limit_ms at most. No new
 * ones may come. Returns how many are left.
 */
uint64_t kh_conns_hang_up_all(struct kh_conns *conns, uint64_t limit_ms);
/**
 * Close the connection of @client that holds memory for a body and lags most, if by more than
 * @lag_ms.
 */
bool kh_conns_drop_slowest(struct kh_conns *conns, const struct kh_client *client, uint64_t lag_ms);

/**
 * Mark the connection as idle after its reply: the next request header must come within the idle
 * timeout.
 */
void kh_conn_idle(struct kh_conns *conns, struct kh_conn *conn);

void kh_conns_get_stats(struct kh_conns *conns, struct kh_conns_stats *ret);

#endif
