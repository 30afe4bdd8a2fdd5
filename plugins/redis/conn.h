// SPDX-License-Identifier: Apache-2.0
/**
 * One connection to a server: non-blocking, TCP, TLS or a unix socket. Requests are sent from where
 * they lie, payloads received where they stay. Not thread-safe.
 */
#ifndef KV_REDIS_CONN_H
#define KV_REDIS_CONN_H

#include <sys/uio.h>

#include "redis/resp.h"
#include "redis/tls.h"

struct rds_conn {
    int fd; /* -1: closed */
    SSL *ssl;
    short extra; /* poll events that TLS waits for beyond what was asked */
    struct resp_parser parser;
    char *in; /* received, not parsed yet */
    size_t in_pos, in_len;
    uint64_t sent, received; /* bytes */
};

#define RDS_CONN_INIT \
    {                 \
        .fd = -1      \
    }

/** @path: of a unix socket, or "". @tls may be NULL. 0, or a negative errno with @error. */
int rds_conn_open(struct rds_conn *conn, const struct rds_address *address, const char *path,
                  struct rds_tls *tls, uint64_t deadline_ns, struct kv_error *error);
void rds_conn_close(struct rds_conn *conn);

/** Bytes taken (0: none now) or a negative errno. */
ssize_t rds_conn_send(struct rds_conn *conn, const struct iovec *iov, int n);

/** 1: a reply, in *ret; 0: none yet; -ECONNRESET, -EPROTO, ... */
int rds_conn_recv(struct rds_conn *conn, struct resp_value *ret);

/** Wait until @events or the deadline: 0 or -ETIMEDOUT. */
int rds_conn_wait(struct rds_conn *conn, short events, uint64_t deadline_ns);

/** Send @len bytes and await @n replies: for the few words when a connection begins. */
int rds_conn_talk(struct rds_conn *conn, const char *data, size_t len, struct resp_value *ret,
                  size_t n, uint64_t deadline_ns);

#endif
