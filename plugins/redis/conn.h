// SPDX-License-Identifier: Apache-2.0
/**
 * One connection to a server: non-blocking, TCP, TLS or a unix socket. Requests are sent from, and
 * payloads received into, their own memory without a copy. Not thread-safe.
 */
#ifndef KV_REDIS_CONN_H
#define KV_REDIS_CONN_H

#include <sys/uio.h>

#include "redis/resp.h"
#include "redis/tls.h"

struct rds_conn {
    int fd; /* -1: closed */
    SSL *ssl;
    short extra; /* poll events that TLS needs besides those asked for */
    struct resp_parser parser;
    char *in; /* received, not parsed yet */
    size_t in_pos, in_len;
    uint64_t sent, received; /* in bytes */
};

#define RDS_CONN_INIT \
    {                 \
        .fd = -1      \
    }

/**
 * Connect. @path: of a unix socket, or "". @tls may be NULL. Returns 0, or a negative errno with
 * @error.
 */
int rds_conn_open(struct rds_conn *conn, const struct rds_address *address, const char *path,
                  struct rds_tls *tls, uint64_t deadline_ns, struct kv_error *error);
void rds_conn_close(struct rds_conn *conn);

/**
 * Send what the socket takes now. Returns the number of bytes (0: none now) or a negative errno.
 */
ssize_t rds_conn_send(struct rds_conn *conn, const struct iovec *iov, int n);

/** Receive. Returns 1: a reply, in *ret; 0: none yet; -ECONNRESET, -EPROTO, ... */
int rds_conn_recv(struct rds_conn *conn, struct resp_value *ret);

/** Wait for @events until the deadline. Returns 0 or -ETIMEDOUT. */
int rds_conn_wait(struct rds_conn *conn, short events, uint64_t deadline_ns);

/** Send @len bytes and wait for @n replies, for the first commands of a connection. */
int rds_conn_talk(struct rds_conn *conn, const char *data, size_t len, struct resp_value *ret,
                  size_t n, uint64_t deadline_ns);

#endif
