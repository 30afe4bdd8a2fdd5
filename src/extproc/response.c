// SPDX-License-Identifier: Apache-2.0
/* The response of a routed request: its first token, its output, its end. All of it goes back unchanged. */
#include "extproc/answer.h"
#include "extproc/stream_impl.h"

bool kx_is_header(const Kx__HeaderValue *header, const char *name)
{
    return kv_str_eq((struct kv_str){(const char *)header->key.data, header->key.len}, name);
}

struct kv_str kx_value_of(const Kx__HeaderValue *header)
{
    ProtobufCBinaryData value = header->raw_value.len ? header->raw_value : header->value;

    return (struct kv_str){(const char *)value.data, value.len};
}

const Kx__HeaderMap *kx_headers_of(const Kx__HttpHeaders *headers)
{
    static const Kx__HeaderMap none = KX__HEADER_MAP__INIT;

    return headers->headers ? headers->headers : &none;
}

void kx_end_response(struct kx_stream *s, enum kx_end end)
{
    struct kx_picker *p = &s->server->picker;

    if (s->phase != ROUTED || s->response == OVER)
        return;
    s->response = OVER;
    p->end(p->arg, s->id, end != KX_END_DONE);
    kv_series_add(s->server->ends[end], 1);
}

/* The response has ended by itself. Of a refused request the worker has computed nothing. */
void kx_complete(struct kx_stream *s)
{
    s->response_over = true;
    kx_end_response(s, s->status >= 400 ? KX_END_LOST : KX_END_DONE);
}

void kx_take_response(struct kx_stream *s, const Kx__HttpHeaders *headers)
{
    static const char events[] = "text/event-stream";
    const Kx__HeaderMap *map = kx_headers_of(headers);

    for (size_t i = 0; i < map->n_headers; i++) {
        struct kv_str value = kx_value_of(map->headers[i]);

        if (kx_is_header(map->headers[i], ":status"))
            s->status = value.len == 3 ? (unsigned)(value.p[0] - '0') * 100 : 0;
        else if (kx_is_header(map->headers[i], "content-type"))
            s->events =
                value.len >= sizeof(events) - 1 && memcmp(value.p, events, sizeof(events) - 1) == 0;
    }
    if (s->response == NO_RESPONSE)
        s->response = RESPONDING;
    kx_answer_headers(s->call, KX_RESPONSE, NULL);
    if (headers->end_of_stream)
        kx_complete(s);
}

/* Count the empty lines that end events. A chunk may begin within one. */
static uint64_t count_events(struct kx_stream *s, ProtobufCBinaryData body)
{
    uint64_t n = 0;

    for (size_t i = 0; i < body.len; i++) {
        if (body.data[i] == '\r')
            continue;
        bool newline = body.data[i] == '\n';

        n += newline && s->newline;
        s->newline = newline && !s->newline;
    }
    return n;
}

/* A stream of events brings a token, or some, with each event; the first of them is the first token. */
static void note_output(struct kx_stream *s, ProtobufCBinaryData body)
{
    struct kx_picker *p = &s->server->picker;
    uint64_t n;

    if (s->phase != ROUTED || !s->events || s->status >= 400 || body.len == 0 ||
        s->response == OVER)
        return;
    n = count_events(s, body);
    if (s->response == RESPONDING) {
        s->response = TOLD_FIRST;
        p->first_token(p->arg, s->id);
        n -= n > 0;
    }
    if (n > 0)
        p->output(p->arg, s->id, n);
}

void kx_take_response_body(struct kx_stream *s, const Kx__HttpBody *body)
{
    if (s->modes[KX_RESPONSE] != KX__BODY_SEND_MODE__FULL_DUPLEX_STREAMED)
        kx_answer_body(s->call, KX_RESPONSE);
    else if (!s->response_over)
        kx_answer_stream(s->call, KX_RESPONSE, body->body.data, body->body.len,
                         body->end_of_stream);
    if (s->response_over)
        return;
    note_output(s, body->body);
    if (body->end_of_stream)
        kx_complete(s);
}
