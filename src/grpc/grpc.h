// SPDX-License-Identifier: Apache-2.0
/**
 * A small gRPC server over HTTP/2 without TLS (h2c), for calls of any kind: unary and streams.
 *
 *     connection ──► loop (one thread, epoll, nghttp2) ──► call ──► callbacks of its method
 *                                    ▲
 *     other threads ── kg_server_post(call's number)
 *
 * - A connection belongs to one loop. All callbacks of its calls run on that loop's thread.
 * - A call is known to other threads by its number. A post for a call that is over gets NULL.
 * - Flow control: a call that has more than KG_HIGH_WATER bytes to send gives its client no further
 *   room to send, until they are sent.
 * - Limits: connections, calls, bytes of a message, bytes of all messages that are incomplete, bytes
 *   of all answers that wait to be read, bytes of a call's headers. Beyond: the connection is closed,
 *   the call refused or ended with KG_EXHAUSTED. A connection's answers may take as much as is free:
 *   alone, half of the limit, so that the next one finds room.
 * - Deadlines: the client's (grpc-timeout); 10 s for a connection's first frames; 60 s without
 *   progress of bytes to send.
 *
 * Format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. A message is preceded by a
 * byte (1: compressed, refused) and its length (4 bytes, big-endian).
 */
#ifndef KV_GRPC_GRPC_H
#define KV_GRPC_GRPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

#define KG_HIGH_WATER ((size_t)256 << 10)
#define KG_FREE ((size_t)8 << 10) /* bytes of a call's answer that no limit counts */

/** Status codes of gRPC that this server sends. */
enum kg_status {
    KG_OK = 0,
    KG_INVALID = 3,
    KG_DEADLINE = 4,
    KG_NOT_FOUND = 5,
    KG_EXHAUSTED = 8,
    KG_UNIMPLEMENTED = 12
};

struct kg_call;
struct kg_server;

/** A method. Callbacks may send to their call and finish it; @data is valid during the callback. */
struct kg_method {
    const char *path; /* "/grpc.health.v1.Health/Check" */
    void *arg;
    /* A call begins. Returns false when it can't be served: it ends with KG_EXHAUSTED, without end. */
    bool (*begin)(void *arg, struct kg_call *call);
    void (*message)(void *arg, struct kg_call *call, const void *data, size_t len);
    void (*half_close)(void *arg, struct kg_call *call); /* the client sends no more messages */
    /* The call is over, finished or cancelled: once for each begin that returned true. */
    void (*end)(void *arg, struct kg_call *call);
};

struct kg_opts {
    const char *host; /* to listen on: an address or a name */
    uint16_t port;    /* 0: any */
    const struct kg_method *methods;
    size_t n_methods;
    uint32_t threads;         /* 2 */
    uint32_t max_connections; /* 1024 */
    uint32_t max_calls;       /* 16384, of all connections */
    size_t max_message;       /* 4 MiB */
    size_t max_incomplete;    /* 256 MiB: bytes of all messages that are incomplete */
    size_t max_answers; /* 256 MiB: bytes of all answers to send, beyond KG_FREE of each call */
    uint64_t drain_ms;  /* 5000: what running calls get at kg_server_stop */
};

struct kg_stats {
    uint64_t connections, calls; /* now */
    uint64_t answer_bytes;       /* now, of max_answers */
};

/**
 * Listen and serve. @opts->methods must outlive the server. *@ret is written before the first callback. Returns 0 or
 * a negative errno with @error; then *@ret is NULL.
 */
int kg_server_start(const struct kg_opts *opts, struct kg_server **ret, struct kv_error *error);

/** Return the port that the server listens on. */
uint16_t kg_server_port(const struct kg_server *server);

/**
 * Refuse new connections and calls (GOAWAY), let running ones finish for drain_ms, then cancel them.
 * Posts after this are still run, without a call, by kg_server_destroy. Call it once.
 */
void kg_server_stop(struct kg_server *server);

/** Free a server that has been stopped. NULL is a no-op. */
void kg_server_destroy(struct kg_server *server);

/** Read the counts. Any thread. */
void kg_server_get_stats(struct kg_server *server, struct kg_stats *ret);

/** Work for the thread of a call. The caller owns the memory; fn may free it. */
struct kg_post {
    struct kg_post *next; /* the server's */
    uint64_t number;      /* of the call */
    void (*fn)(struct kg_post *post, struct kg_call *call);
};

/** Have @post->fn called once on the thread of its call, with NULL when the call is over. Any thread. */
void kg_server_post(struct kg_server *server, struct kg_post *post);

/* -- of a call; only within callbacks and posts of that call ------------------------------------ */

uint64_t kg_call_number(const struct kg_call *call);
void kg_call_set_state(struct kg_call *call, void *state);
void *kg_call_state(const struct kg_call *call);

/**
 * Add a message of @len bytes to those to send. Returns where its bytes go, to be filled before the
 * next call of any function here; NULL: finished already, or out of memory or of max_answers (the call
 * is ended with KG_EXHAUSTED).
 */
uint8_t *kg_call_send(struct kg_call *call, size_t len);

/** End the call behind what is to be sent. @text: ASCII, or NULL. A second time changes nothing. */
void kg_call_finish(struct kg_call *call, enum kg_status status, const char *text);

#endif
