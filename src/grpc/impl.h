// SPDX-License-Identifier: Apache-2.0
/** The parts of the server: loops, connections, calls. See grpc.h for the drawing. */
#ifndef KV_GRPC_IMPL_H
#define KV_GRPC_IMPL_H

#include <nghttp2/nghttp2.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/buf.h"
#include "base/json/json.h" /* struct kv_str */
#include "base/thread/thread.h"
#include "grpc/frames.h"
#include "grpc/grpc.h"

#define KG_MAX_LOOPS 64
#define KG_BUCKETS 4096
#define KG_MAX_HEADERS ((size_t)32 << 10) /* bytes of a call's headers */
#define KG_READ ((size_t)64 << 10)        /* bytes of one read */
#define KG_STREAM_WINDOW (256 << 10)
#define KG_CONNECTION_WINDOW (16 << 20)

struct kg_loop;

struct kg_conn {
    struct kg_loop *loop;
    int fd; /* -1: none (the fuzzer's) */
    nghttp2_session *session;
    struct kv_buf out; /* bytes of frames; the first out_at are sent */
    size_t out_at;
    bool begun;                      /* the client's SETTINGS have come */
    bool dirty;                      /* in the loop's list of connections to flush */
    bool polls_out;                  /* epoll tells when it can send */
    bool broken;                     /* to be closed */
    uint64_t opened_ns, progress_ns; /* progress: of bytes to send */
    size_t answers;                  /* of the server's answers: its calls' */
    struct kg_conn *next, *prev;     /* of the loop */
    struct kg_conn *next_dirty;
};

/** How far a call's answer has come. */
enum kg_reply {
    KG_REPLY_NONE,    /* nothing sent */
    KG_REPLY_OPEN,    /* headers are submitted, messages follow */
    KG_REPLY_FINISHED /* status is known, and goes behind what is to be sent; or the call is over */
};

struct kg_call {
    struct kg_conn *conn;
    int32_t stream;
    uint64_t number;
    const struct kg_method *method; /* NULL: not known, or the call hasn't begun */
    void *state;
    enum kg_reply reply;
    bool begun; /* begin has returned true: end is due */
    bool post;  /* its :method is POST */
    bool grpc;  /* its content type is gRPC's */
    bool waits; /* nghttp2 has deferred the answer until it is resumed */
    char path[128];
    size_t header_bytes;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    struct kg_frames in;
    size_t charged;    /* of the server's incomplete bytes */
    struct kv_buf out; /* messages; the first out_at bytes are handed to nghttp2 */
    size_t out_at;
    size_t taken; /* of the server's answers: capacity of out beyond KG_FREE, or what it will be */
    size_t owed;  /* bytes for which the client gets room once out is short */
    enum kg_status status;
    char text[128];
    struct kg_call *next; /* of its bucket */
};

struct kg_loop {
    struct kg_server *server;
    uint32_t index;
    pthread_t thread;
    bool started;
    int epoll;
    struct kv_wake wake;
    pthread_mutex_t lock; /* guards posts */
    struct kg_post *posts, **posts_end;
    struct kg_conn *conns, *dirty;
    size_t n_calls;
    uint64_t next_number;
    uint64_t deadline_ns; /* of the calls, or earlier; UINT64_MAX: none */
    uint64_t ticked_ns;
    int stopping; /* 0: no; 1: GOAWAY announced; 2: sent */
    uint64_t stop_ns;
    struct kg_call *table[KG_BUCKETS]; /* calls by number */
    char read[KG_READ];
};

struct kg_server {
    struct kg_opts opts;
    int listener;
    uint16_t port;
    nghttp2_session_callbacks *callbacks;
    nghttp2_option *option;
    atomic_bool stop;
    _Atomic uint64_t connections, calls, incomplete, answers; /* now; the last two: bytes */
    uint32_t n_loops;
    uint32_t turn; /* the loop that gets the next connection; loop 0's, which accepts */
    struct kg_loop *loops[KG_MAX_LOOPS];
};

/* loop.c */
int kg_loop_create(struct kg_server *server, uint32_t index, struct kg_loop **ret);
void kg_loop_destroy(struct kg_loop *loop); /* runs the posts that are left, without calls */
void *kg_loop_run(void *loop);
void kg_loop_mark(struct kg_conn *conn); /* have its frames sent */

/* conn.c */
int kg_conn_callbacks(struct kg_server *server); /* makes server->callbacks and option */
int kg_conn_create(struct kg_loop *loop, int fd, uint64_t now_ns, struct kg_conn **ret);
void kg_conn_destroy(struct kg_conn *conn); /* ends its calls, closes fd */
void kg_conn_read(struct kg_conn *conn);
void kg_conn_feed(struct kg_conn *conn, const void *data, size_t len); /* sets broken on failure */
void kg_conn_fill(struct kg_conn *conn);                               /* frames to out */
void kg_conn_flush(struct kg_conn *conn, uint64_t now_ns);

/* call.c */
struct kg_call *kg_call_create(struct kg_conn *conn, int32_t stream); /* NULL: refuse it */
void kg_call_destroy(struct kg_call *call);                           /* ends it before */
void kg_call_header(struct kg_call *call, struct kv_str name, struct kv_str value);
void kg_call_start(struct kg_call *call); /* its headers are complete */
void kg_call_data(struct kg_call *call, const void *data, size_t len);
void kg_call_closed_half(struct kg_call *call);
ssize_t kg_call_read(nghttp2_session *session, int32_t stream, uint8_t *buf, size_t len,
                     uint32_t *flags, nghttp2_data_source *source, void *conn);
/** Parse "100m" and its like. Returns nanoseconds; UINT64_MAX: none that is valid. */
uint64_t kg_timeout_parse(const char *text, size_t len);

#endif
