// SPDX-License-Identifier: Apache-2.0
/** The state of a stream: stream.c has its request, response.c its response. */
#ifndef KV_EXTPROC_STREAM_IMPL_H
#define KV_EXTPROC_STREAM_IMPL_H

#include "base/json/json.h" /* struct kv_str */
#include "ext_proc.pb-c.h"
#include "extproc/stream.h"
#include "extproc/subset.h"

/** How far a request has come; see stream.c. */
enum kx_phase { HEADERS, BODY, TOKENS, ROUTED, REFUSED };

/** Response of a routed request: each state comes after the one before. */
enum kx_response { NO_RESPONSE, RESPONDING, TOLD_FIRST, OVER };

struct kx_stream {
    struct kx_server *server;
    struct kg_call *call;
    enum kx_phase phase;
    enum kx_response response; /* with ROUTED */
    uint32_t modes[2];         /* Kx__BodySendMode of each side */
    bool body_over;            /* of the request: no more chunks are taken */
    bool trailers;             /* they ended the body */
    bool response_over;        /* of Envoy's messages: later chunks are passed over */
    bool events;               /* the response is text/event-stream */
    bool newline;              /* its last byte is a line's end */
    unsigned status;           /* of the response */
    struct kv_buf body;        /* of the request, until it is routed */
    size_t charged;            /* of server->bodies */
    struct kx_subset subset;
    char session[KX_MAX_SESSION + 1];
    char id[KX_ID];
    uint64_t whole_ns; /* when the request was complete */
};

/** Headers of a message; an empty map where it has none. */
const Kx__HeaderMap *kx_headers_of(const Kx__HttpHeaders *headers);
bool kx_is_header(const Kx__HeaderValue *header, const char *name);
/** Value of a header: raw_value, or else value. */
struct kv_str kx_value_of(const Kx__HeaderValue *header);

void kx_take_response(struct kx_stream *s, const Kx__HttpHeaders *headers);
void kx_take_response_body(struct kx_stream *s, const Kx__HttpBody *body);
/** The response has ended by itself: free the booking. */
void kx_complete(struct kx_stream *s);
/** Free the booking of a routed request, once. */
void kx_end_response(struct kx_stream *s, enum kx_end end);

#endif
