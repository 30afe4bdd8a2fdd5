// SPDX-License-Identifier: Apache-2.0
/**
 * The HTTP seam: routes in, replies out. Only the files that include http_impl.h know the HTTP
 * library.
 *
 * The seam
 * - collects bodies into reused buffers, under a limit per route and one for all together,
 * - refuses ambiguous framing (two Content-Lengths, Content-Length with Transfer-Encoding, ...),
 * - answers unknown paths and methods with 404 and 405,
 * - gives connections deadlines (conns.h),
 * - streams replies from a thread of their own (pipe.h).
 *
 * Handlers run on one of the seam's threads, one request at a time per thread.
 */
#ifndef KV_HTTP_HTTP_HTTP_H
#define KV_HTTP_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/json/json.h" /* struct kv_str */
#include "http/conns.h"
#include "http/pipe.h"

struct kh_http;
struct kh_request;
struct kh_reply;

typedef void (*kh_handle_fn)(void *arg, struct kh_request *request, struct kh_reply *reply);

enum kh_route_flags {
    KH_ROUTE_OPEN = 1,       /* served without authorization */
    KH_ROUTE_UNMEASURED = 2, /* not passed to observe */
    KH_ROUTE_TOKENLESS = 4,  /* holds no data: needs no token, other rules of access hold */
    /* Only for requests whose Accept names text/html; others get a later route of the same path. */
    KH_ROUTE_HTML = 8,
};

struct kh_route {
    const char *method; /* "GET" (HEAD is served too), "POST", "PATCH", "DELETE" */
    const char *path;   /* exact, but for one {id}, which stands for any text that isn't empty */
    kh_handle_fn handle;
    size_t max_body; /* bytes; 0: no body is read */
    unsigned flags;
};

/** A request; all of it is valid until the handler returns. */
struct kh_request {
    const struct kh_route *route; /* NULL: no such path or method */
    const char *method;
    const char *path;
    struct kv_str id;          /* the part of path where the route has {id}, percent-decoded */
    const char *content_type;  /* or NULL */
    const char *authorization; /* or NULL */
    const char *host;          /* the header, or of a target in absolute form; or NULL */
    const char *origin;        /* the header, or NULL; "" when given twice */
    struct kv_str body;
    bool loopback;       /* the client is on this machine */
    uint64_t started_ns; /* monotonic: when its header was complete */
    bool may_wait;       /* this thread may wait (see kh_reply.rerun) */
    char model[129];     /* set by the handler: the model asked about, cut. Empty: none */
    void *native;        /* for the seam */
};

/** Find a query argument (?name=value), percent-decoded. Returns false when it is absent. */
bool kh_request_param(const struct kh_request *request, const char *name, struct kv_str *ret);

/**
 * Read a query argument that is a number into *@ret, which stays when the argument is absent. Returns false
 * when it is none.
 */
bool kh_request_u64(const struct kh_request *request, const char *name, uint64_t *ret);

/** Return true unless a query argument, such as ?model_name=, asks for another value than @value. */
bool kh_request_passes(const struct kh_request *request, const char *name, const char *value);

/** Find a header's value, not decoded. Returns false when it is absent. */
bool kh_request_header(const struct kh_request *request, const char *name, struct kv_str *ret);

/**
 * Produce a streamed body by kh_pipe_write, on a thread of its own. Returns 0 when it is complete.
 */
typedef int (*kh_produce_fn)(void *arg, struct kh_pipe *pipe);

#define KH_REPLY_MAX_HEADERS 8

/** A reply for the handler to fill. Starts as 200 with an empty application/json body. */
struct kh_reply {
    unsigned status;
    const char *content_type; /* NULL: none */
    struct kv_buf body;
    struct {
        const char *name, *value; /* strings that outlive the reply */
    } headers[KH_REPLY_MAX_HEADERS];
    size_t n_headers;
    bool close; /* close the connection after the reply */
    /* Call the handler again, with may_wait; its other changes of the reply are undone. */
    bool rerun;
    /* With produce set, the body is streamed. done(produce_arg) is called once in any case. */
    kh_produce_fn produce;
    void (*done)(void *arg);
    void *produce_arg;
    bool endless; /* the streamed body may take longer than opts.stream_limit_ms */
};

void kh_reply_header(struct kh_reply *reply, const char *name, const char *value);
/** Replace the reply by {"error": "<text>"} with @status. */
void kh_reply_error(struct kh_reply *reply, unsigned status, const char *fmt, ...) KV_PRINTF(3, 4);

struct kh_http_opts {
    uint32_t threads;
    uint32_t max_connections;
    uint64_t idle_timeout_ms;
    /* Limit of bodies and replies together, beyond 64 KiB of each connection (budget.h). */
    size_t bodies_bytes;
    uint32_t max_streams;     /* most streamed replies at a time */
    uint64_t stream_limit_ms; /* longest time of one; 0: an hour */
    bool tls;                 /* serve HTTPS with the process's kh_tls */
    const struct kh_route *routes;
    size_t n_routes;
    /*
     * Decide, before the body is read, whether the request may go on. Otherwise fills @reply and
     * returns false.
     */
    bool (*admit)(void *arg, const struct kh_request *request, struct kh_reply *reply);
    /* Called when a reply is being sent. */
    void (*observe)(void *arg, const struct kh_request *request, unsigned status);
    void *arg; /* passed to handlers, admit and observe */
};

/** Reserve @host:@port without listening yet: until kh_http_start, clients are refused. */
int kh_http_bind(const char *host, uint16_t port, int *ret_fd, uint16_t *ret_port,
                 struct kv_error *error);

/** Listen on @fd (taken over, also on failure) and serve. */
int kh_http_start(int fd, const struct kh_http_opts *opts, struct kh_http **ret,
                  struct kv_error *error);

/**
 * Hang up on new connections, and let running requests finish, streamed replies aside, for @drain_ms at
 * most. NULL is a no-op. The time of kh_http_stop counts from this call on.
 */
void kh_http_drain(struct kh_http *http, uint64_t drain_ms);

/**
 * Hang up on new connections, let running requests finish for @drain_ms at most, then close. NULL
 * is a no-op.
 */
void kh_http_stop(struct kh_http *http, uint64_t drain_ms);

struct kh_http_stats {
    struct kh_conns_stats connections;
    uint64_t in_flight;   /* requests being read or answered */
    uint64_t body_bytes;  /* bytes taken of opts.bodies_bytes */
    uint64_t streams;     /* streamed replies */
    uint64_t overloaded;  /* requests refused because of bodies_bytes or max_streams */
    uint64_t bad_framing; /* requests refused because their framing is ambiguous */
};
void kh_http_get_stats(struct kh_http *http, struct kh_http_stats *ret);

#endif
