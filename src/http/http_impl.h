// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the files of the HTTP seam. No other file uses the HTTP library.
 *
 *   http.c           the server: its threads, connections, start and stop
 *   http_request.c   a request until its handler has filled the reply
 *   http_faults.c    answers to what the library refuses by itself
 *   http_slow.c      handlers that may take long, on threads of their own
 *   http_send.c      the reply on its way, from a buffer or streamed
 */
#ifndef KV_HTTP_HTTP_IMPL_H
#define KV_HTTP_HTTP_IMPL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include "http/budget.h"
#include "http/framing.h"
#include "http/http.h"
#include "http/linger.h"

/*
 * Request header and read buffer of a connection, in bytes. libmicrohttpd zeroes one and a half times
 * as much after each request, and reads bodies in pieces of half of it.
 */
#define CONNECTION_MEMORY (32u << 10)
/* Largest lag behind the slowest pace (conns.h), with a body and with a reply. */
#define KH_BODY_PATIENCE_MS 10000
#define KH_PATIENCE_MS 30000
/* Bytes of a body or reply for which a connection needs no budget. */
#define KH_FREE_BYTES ((size_t)64 << 10)

struct kh_exchange {
    struct kh_http *http;
    struct MHD_Connection *connection;
    struct kh_conn *conn;
    struct kh_client *client; /* the connection's */
    struct kh_request request;
    struct kh_reply reply;
    struct kv_buf body;
    size_t charged;  /* bytes of body and reply taken from the budget */
    size_t received; /* bytes of the body so far, kept or dropped */
    struct kh_framing framing;
    char *authority;  /* of a target in absolute form, or NULL */
    char allowed[40]; /* methods of the path, for the header Allow */
    bool deferred;    /* the handler runs, or will run, on a slow thread */
    bool refused;     /* the reply is decided; the rest of the body is dropped */
    struct kh_exchange *next;
};

struct kh_slow;
struct kh_stream;

struct kh_http {
    struct MHD_Daemon *daemon;
    struct kh_http_opts opts;
    struct kh_budget *budget;
    struct kh_conns *conns;
    struct kh_linger *linger;
    struct kh_slow *slow;
    atomic_bool stopping;
    uint64_t stopping_ns; /* when that began; for the thread that stops */
    atomic_size_t in_flight;
    _Atomic uint64_t overloaded, bad_framing;
    pthread_mutex_t lock; /* guards the fields below */
    struct kh_exchange *free;
    size_t n_free;
    struct kh_stream *streams;
    size_t n_streams, n_evicted; /* evicted: streams that were cut off and haven't ended yet */
    bool no_more_streams;        /* the server is about to stop */
};

/* Callbacks of the library: a request's start, the pieces of its body, its end. */
enum MHD_Result kh_http_on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                   const char *method, const char *version, const char *data,
                                   size_t *len, void **state);
void kh_http_on_completed(void *cls, struct MHD_Connection *connection, void **state,
                          enum MHD_RequestTerminationCode code);
/* The library's callback for a request line, whose header may still be coming in. Returns NULL. */
void *kh_http_on_request_line(void *cls, const char *uri, struct MHD_Connection *connection);
/* Note that a header was handed over, or its connection has ended. */
void kh_http_head_ended(struct kh_conn *conn);
/* Answer clients that speak plain HTTP to the TLS port. For a connection that has just begun. */
void kh_http_watch_tls(struct MHD_Connection *connection, struct kh_conn *conn);
/* Answer the request that the library is about to refuse, if there is one. For its log callback. */
void kh_http_answer_refused(struct kh_http *http);
/* Return the library's connection's own, or NULL. */
struct kh_conn *kh_http_conn_of(struct MHD_Connection *connection);
/* Free the exchanges that are kept for reuse. */
void kh_http_free_exchanges(struct kh_http *http);

int kh_slow_create(struct kh_slow **ret);
/*
 * Finish the running handlers; answer the waiting ones, and those that come yet, with 503. Call
 * while MHD still runs, since it has suspended their connections.
 */
void kh_slow_stop(struct kh_slow *slow);
/* Free it, once no HTTP thread runs any more. NULL is a no-op. */
void kh_slow_destroy(struct kh_slow *slow);
/* Suspend the exchange's connection and run its handler again on a slow thread. */
void kh_slow_defer(struct kh_slow *slow, struct kh_exchange *exchange);

/*
 * Take @n more bytes from the budget for the exchange. Makes room by closing slow connections of
 * the same client. Returns false when there is no room.
 */
bool kh_http_charge(struct kh_exchange *exchange, size_t n);

/* Queue exchange->reply. */
enum MHD_Result kh_http_send(struct kh_exchange *exchange);
/* Drop the producer of a reply that won't be sent. */
void kh_http_drop_producer(struct kh_reply *reply);
/*
 * Cut off streams that outlast the drain, and let no others begin: MHD aborts when it stops with a
 * suspended connection.
 */
void kh_http_cancel_streams(struct kh_http *http);

#endif
