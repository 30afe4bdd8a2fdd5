// SPDX-License-Identifier: Apache-2.0
/*
 * The states of a stream's request:
 *
 *                        end of the body, or a limit
 *   HEADERS ──► BODY ──────────────┬──► TOKENS ──┐ the engine's answer, or its deadline
 *      │ no body                   │             ▼
 *      └───────────────────────────┴────► ROUTED or REFUSED
 *
 * In HEADERS to TOKENS nothing is answered: Envoy waits. ROUTED answers the headers, gives the body back, and
 * from then on each chunk at once. A second end of the body (Envoy 1.35 to 1.37 may send the last chunk
 * twice) is passed over.
 */
#include "extproc/stream.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "extproc/answer.h"
#include "extproc/stream_impl.h"

/* A question to the tokenizer, and who asked. */
struct asking {
    struct kx_question question;
    struct kg_post post;
    struct kx_server *server;
    struct kv_buf model;
    uint64_t guess; /* of the prompt's tokens */
    int rc;
};

static struct kv_buf steal(struct kv_buf *buf)
{
    struct kv_buf taken = *buf;

    *buf = (struct kv_buf)KV_BUF_INIT;
    return taken;
}

static struct kx_stream *stream_of(struct kg_call *call)
{
    return kg_call_state(call);
}

bool kx_stream_begin(void *server, struct kg_call *call)
{
    struct kx_stream *s = calloc(1, sizeof(*s));

    if (!s)
        return false;
    s->server = server;
    s->call = call;
    s->modes[KX_REQUEST] = s->modes[KX_RESPONSE] = KX__BODY_SEND_MODE__FULL_DUPLEX_STREAMED;
    kg_call_set_state(call, s);
    return true;
}

/* -- the request: hold, choose, give back ------------------------------------------------------- */

static void charge(struct kx_stream *s, size_t bytes)
{
    if (bytes > s->charged)
        atomic_fetch_add_explicit(&s->server->bodies, bytes - s->charged, memory_order_relaxed);
    else
        atomic_fetch_sub_explicit(&s->server->bodies, s->charged - bytes, memory_order_relaxed);
    s->charged = bytes;
}

static void let_go_of_body(struct kx_stream *s)
{
    kv_buf_fini(&s->body);
    charge(s, 0);
}

/* The request has its worker: answer all that Envoy has sent. */
static void give_back(struct kx_stream *s, const char *endpoints, bool bodiless)
{
    kx_answer_headers(s->call, KX_REQUEST, endpoints);
    if (!bodiless)
        kx_answer_stream(s->call, KX_REQUEST, s->body.data, s->body.len,
                         s->body_over && !s->trailers);
    if (s->trailers)
        kx_answer_trailers(s->call, KX_REQUEST);
    let_go_of_body(s);
}

static enum kx_result result_of(int rc)
{
    switch (rc) {
    case 0:
        return KX_ROUTED;
    case -EHOSTUNREACH:
        return KX_NONE_FITS;
    case -ENOBUFS:
    case -EAGAIN:
        return KX_SHED;
    default:
        return KX_BROKEN;
    }
}

static void refuse(struct kx_stream *s, enum kx_result result)
{
    static const struct {
        unsigned status;
        const char *text;
    } refusals[KX_N_RESULTS] = {
        [KX_NONE_FITS] = {503, "no worker fits this request"},
        [KX_SHED] = {429, "too many requests"},
        [KX_BROKEN] = {500, "the worker could not be chosen"},
    };

    s->phase = REFUSED;
    let_go_of_body(s);
    kx_answer_refusal(s->call, refusals[result].status, refusals[result].text);
}

static void choose(struct kx_stream *s, struct kx_scratch *scratch, struct kx_ask *ask,
                   bool bodiless)
{
    struct kx_server *server = s->server;
    char endpoints[KX_MAX_ENDPOINTS];
    int rc = 0;

    kv_buf_clear(&scratch->candidates);
    if (s->subset.limited)
        rc = kx_subset_list(&s->subset, &scratch->candidates);
    snprintf(s->id, sizeof(s->id), "%s-%" PRIx64, server->prefix,
             atomic_fetch_add_explicit(&server->next_id, 1, memory_order_relaxed));
    ask->id = s->id;
    ask->session = s->session[0] ? s->session : NULL;
    ask->limited = s->subset.limited;
    ask->candidates = (const char *const *)(void *)scratch->candidates.data;
    ask->n_candidates = s->subset.n;
    if (rc == 0 && ask->limited && ask->n_candidates == 0)
        rc = -EHOSTUNREACH;
    if (rc == 0)
        rc = server->picker.choose(server->picker.arg, ask, endpoints);
    enum kx_result result = result_of(rc);

    kv_series_add(server->results[result], 1);
    kv_series_add(server->sources[ask->source], 1);
    kv_series_observe(server->seconds, (double)(kv_now_ns() - s->whole_ns) / 1e9);
    kv_buf_fini(&s->subset.texts);
    if (result != KX_ROUTED) {
        refuse(s, result);
        return;
    }
    s->phase = ROUTED;
    give_back(s, endpoints, bodiless);
}

/* Choose by the load alone. */
static void choose_blind(struct kx_stream *s, struct kx_scratch *scratch, enum kx_source source,
                         const char *model, uint64_t guess, bool bodiless)
{
    struct kx_ask ask = {.model = model, .source = source, .n_tokens = guess};

    choose(s, scratch, &ask, bodiless);
}

static void free_asking(struct asking *asking)
{
    kv_buf_fini(&asking->question.request);
    kv_buf_fini(&asking->question.tokens);
    kv_buf_fini(&asking->model);
    free(asking);
}

/* On the thread of the call, which may be over. */
static void tokens_came(struct kg_post *post, struct kg_call *call)
{
    struct asking *asking = (struct asking *)(void *)((char *)post - offsetof(struct asking, post));
    struct kx_scratch *scratch = call ? kx_scratch_take(asking->server) : NULL;

    if (call && !scratch)
        kg_call_finish(call, KG_EXHAUSTED, "out of memory");
    if (scratch) {
        struct kx_stream *s = stream_of(call);
        bool ok = asking->rc == 0;
        struct kx_ask ask = {.model = kv_buf_cstr(&asking->model),
                             .source = ok                         ? KX_ENGINE
                                       : asking->rc == -ETIMEDOUT ? KX_SLOW
                                                                  : KX_FAILED,
                             .tokens = ok ? (const void *)asking->question.tokens.data : NULL,
                             .n_tokens = ok ? asking->question.tokens.len / sizeof(uint32_t)
                                            : asking->guess};

        if (s->phase == TOKENS)
            choose(s, scratch, &ask, false);
        kx_scratch_give(asking->server, scratch);
    }
    free_asking(asking);
}

/* On the tokenizer's thread. */
static void tokens_known(struct kx_question *question, int rc)
{
    struct asking *asking = (struct asking *)(void *)question;

    asking->rc = rc;
    kg_server_post(asking->server->grpc, &asking->post);
}

/* Ask an engine for the tokens. Returns KX_ENGINE when they will come, else why not. */
static enum kx_source ask_engine(struct kx_stream *s, struct kx_prompt *prompt)
{
    struct kx_server *server = s->server;
    struct asking *asking;
    char base[KX_MAX_URL - 16];

    if (!server->tokenizer)
        return KX_ALONE;
    if (server->tokenize)
        snprintf(base, sizeof(base), "%s", server->tokenize);
    else if (!server->picker.engine(server->picker.arg, kv_buf_cstr(&prompt->model), base,
                                    sizeof(base)))
        return KX_ALONE;
    asking = calloc(1, sizeof(*asking));
    if (!asking)
        return KX_FAILED;
    snprintf(asking->question.url, sizeof(asking->question.url), "%s/tokenize", base);
    asking->question.deadline_ns = kv_ns_after(s->whole_ns, server->opts.tokenize_ms);
    asking->question.fn = tokens_known;
    asking->question.request = steal(&prompt->request);
    asking->model = steal(&prompt->model);
    asking->guess = prompt->guess;
    asking->post = (struct kg_post){.number = kg_call_number(s->call), .fn = tokens_came};
    asking->server = server;
    if (kx_tokenizer_ask(server->tokenizer, &asking->question) == 0)
        return KX_ENGINE;
    prompt->model = steal(&asking->model);
    free_asking(asking);
    return KX_FAILED;
}

static void decide(struct kx_stream *s, struct kx_scratch *scratch)
{
    struct kx_prompt *prompt = &scratch->prompt;

    s->whole_ns = kv_now_ns();
    if (kx_prompt_read(prompt, s->body.data, s->body.len) < 0) {
        kg_call_finish(s->call, KG_EXHAUSTED, "out of memory");
        return;
    }
    if (prompt->kind == KX_PROMPT_TOKENS) {
        struct kx_ask ask = {.model = kv_buf_cstr(&prompt->model),
                             .source = KX_GIVEN,
                             .tokens = (const void *)prompt->tokens.data,
                             .n_tokens = prompt->tokens.len / sizeof(uint32_t)};

        choose(s, scratch, &ask, false);
        return;
    }
    enum kx_source source = KX_UNREAD;

    if (prompt->kind == KX_PROMPT_TEXT) {
        s->phase = TOKENS;
        source = ask_engine(s, prompt);
    }
    if (source != KX_ENGINE)
        choose_blind(s, scratch, source, kv_buf_cstr(&prompt->model), prompt->guess, false);
}

static void take_headers(struct kx_stream *s, struct kx_scratch *scratch,
                         const Kx__ProcessingRequest *message)
{
    const Kx__HttpHeaders *headers = message->request_headers;
    const Kx__HeaderMap *map = kx_headers_of(headers);

    if (s->phase != HEADERS)
        return;
    if (kx_subset_read(&s->subset, message->metadata_context) < 0) {
        kg_call_finish(s->call, KG_EXHAUSTED, "out of memory");
        return;
    }
    for (size_t i = 0; i < map->n_headers; i++) {
        struct kv_str value = kx_value_of(map->headers[i]);

        if (kx_is_header(map->headers[i], "x-session-token") && value.len <= KX_MAX_SESSION)
            snprintf(s->session, sizeof(s->session), "%.*s", (int)value.len, value.p);
    }
    s->phase = BODY;
    if (!headers->end_of_stream && s->modes[KX_REQUEST] == KX__BODY_SEND_MODE__FULL_DUPLEX_STREAMED)
        return;
    s->body_over = headers->end_of_stream;
    s->whole_ns = kv_now_ns();
    choose_blind(s, scratch, KX_HEADERS, "", 0, true);
}

/* True when another @len bytes may wait for the body's end. */
static bool has_room(const struct kx_stream *s, size_t len)
{
    const struct kx_opts *o = &s->server->opts;

    return s->body.len + len <= o->max_body &&
           atomic_load_explicit(&s->server->bodies, memory_order_relaxed) + len <= o->max_bodies;
}

static void hold_body(struct kx_stream *s, struct kx_scratch *scratch, ProtobufCBinaryData body)
{
    bool early = !has_room(s, body.len);

    kv_buf_append(&s->body, body.data, body.len);
    if (s->body.error) {
        kg_call_finish(s->call, KG_EXHAUSTED, "out of memory");
        return;
    }
    charge(s, s->body.len);
    if (s->body_over && !early) {
        decide(s, scratch);
    } else if (early) {
        s->whole_ns = kv_now_ns();
        choose_blind(s, scratch, KX_EARLY, "", s->body.len / 4, false);
    }
}

static void take_body(struct kx_stream *s, struct kx_scratch *scratch, const Kx__HttpBody *body)
{
    if (s->modes[KX_REQUEST] != KX__BODY_SEND_MODE__FULL_DUPLEX_STREAMED) {
        kx_answer_body(s->call, KX_REQUEST);
        return;
    }
    if (s->body_over || (s->phase != BODY && s->phase != ROUTED))
        return;
    s->body_over = body->end_of_stream;
    if (s->phase == ROUTED)
        kx_answer_stream(s->call, KX_REQUEST, body->body.data, body->body.len, s->body_over);
    else
        hold_body(s, scratch, body->body);
}

static void take_trailers(struct kx_stream *s, struct kx_scratch *scratch)
{
    if (s->trailers || s->phase == HEADERS)
        return;
    s->trailers = true;
    if (s->phase == ROUTED) {
        s->body_over = true;
        kx_answer_trailers(s->call, KX_REQUEST);
    } else if (s->phase == BODY && !s->body_over) {
        s->body_over = true;
        decide(s, scratch);
    }
}

/* -- messages ----------------------------------------------------------------------------------- */

static void take(struct kx_stream *s, struct kx_scratch *scratch,
                 const Kx__ProcessingRequest *message)
{
    if (message->protocol_config && s->phase == HEADERS) {
        s->modes[KX_REQUEST] = message->protocol_config->request_body_mode;
        s->modes[KX_RESPONSE] = message->protocol_config->response_body_mode;
    }
    switch (message->request_case) {
    case KX__PROCESSING_REQUEST__REQUEST_REQUEST_HEADERS:
        take_headers(s, scratch, message);
        break;
    case KX__PROCESSING_REQUEST__REQUEST_REQUEST_BODY:
        take_body(s, scratch, message->request_body);
        break;
    case KX__PROCESSING_REQUEST__REQUEST_REQUEST_TRAILERS:
        take_trailers(s, scratch);
        break;
    case KX__PROCESSING_REQUEST__REQUEST_RESPONSE_HEADERS:
        kx_take_response(s, message->response_headers);
        break;
    case KX__PROCESSING_REQUEST__REQUEST_RESPONSE_BODY:
        kx_take_response_body(s, message->response_body);
        break;
    case KX__PROCESSING_REQUEST__REQUEST_RESPONSE_TRAILERS:
        if (!s->response_over)
            kx_complete(s);
        kx_answer_trailers(s->call, KX_RESPONSE);
        break;
    default: /* metadata alone, or what this server doesn't know: nothing is expected */
        break;
    }
}

void kx_stream_message(void *server, struct kg_call *call, const void *data, size_t len)
{
    struct kx_scratch *scratch = kx_scratch_take(server);
    Kx__ProcessingRequest *message;

    if (!scratch) {
        kg_call_finish(call, KG_EXHAUSTED, "out of memory");
        return;
    }
    message = kx__processing_request__unpack(&scratch->arena.allocator, len, data);
    if (message)
        take(stream_of(call), scratch, message);
    else
        kg_call_finish(call, KG_INVALID, "not a ProcessingRequest");
    kx_scratch_give(server, scratch);
}

/* Envoy sends no more: the response is over, or the rest goes by without the picker. */
void kx_stream_half_close(void *server, struct kg_call *call)
{
    (void)server;
    kg_call_finish(call, KG_OK, NULL);
}

void kx_stream_end(void *server, struct kg_call *call)
{
    struct kx_stream *s = stream_of(call);

    (void)server;
    kx_end_response(s, s->response == TOLD_FIRST ? KX_END_DONE : KX_END_CANCELLED);
    let_go_of_body(s);
    kv_buf_fini(&s->subset.texts);
    free(s);
}
