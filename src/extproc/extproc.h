// SPDX-License-Identifier: Apache-2.0
/**
 * An endpoint picker for Envoy: external processing as the Gateway API Inference Extension uses it.
 *
 *     Envoy ── request headers, body ──► prompt ──► tokenizer ──► picker: choose, and book
 *           ◄── header and metadata with the endpoint, body ──────┘
 *           ── response headers, body ──► picker: first token, output, end
 *           ◄── the same, unchanged
 *
 * One gRPC stream is one HTTP request. The picker is told of its first token and its end from the
 * response, so that no client has to free bookings; a stream that ends before is a request that was
 * cancelled.
 *
 * The choice knows of the prompt (enum kx_source) its token ids where the request has them, or those that an
 * engine's /tokenize gives within a deadline. Else the load alone decides.
 *
 * Sources: envoy/service/ext_proc/v3/external_processor.proto; the endpoint picker protocol,
 * https://github.com/kubernetes-sigs/gateway-api-inference-extension (docs/proposals/004).
 */
#ifndef KV_EXTPROC_EXTPROC_H
#define KV_EXTPROC_EXTPROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"

#define KX_MAX_ENDPOINTS 2704 /* bytes of a choice's endpoints */

/** Where the tokens of a choice come from, or why there are none. */
enum kx_source {
    KX_GIVEN = 0,   /* the request has token ids */
    KX_ENGINE = 1,  /* /tokenize gave them */
    KX_HEADERS = 2, /* no body: none sent, or Envoy sends it after the choice */
    KX_UNREAD = 3,  /* the body has no prompt that is understood */
    KX_EARLY = 4,   /* the body is beyond a limit: chosen before its end */
    KX_ALONE = 5,   /* no tokenizer is configured */
    KX_SLOW = 6,    /* /tokenize didn't answer in time */
    KX_FAILED = 7,  /* /tokenize failed, or isn't asked for a while after failures */
    KX_N_SOURCES = 8
};

/** A request that needs a worker. All of it is valid during the call only. */
struct kx_ask {
    const char *id;      /* of the booking: unique among all servers */
    const char *model;   /* as the body names it; "": not named */
    const char *session; /* header x-session-token; NULL: none */
    enum kx_source source;
    const uint32_t *tokens;        /* with KX_GIVEN and KX_ENGINE */
    size_t n_tokens;               /* else a guess: a quarter of the prompt's bytes */
    bool limited;                  /* only the candidates may be chosen */
    const char *const *candidates; /* "ip:port" */
    size_t n_candidates;
};

/** The workers, and who chooses among them. Calls come from several threads at a time. */
struct kx_picker {
    void *arg;
    /*
     * Choose a worker and book the request. Writes its endpoint and, behind commas, fallbacks ("ip:port")
     * to @ret. Returns 0; -EHOSTUNREACH: none fits, or none serves the model (503); -ENOBUFS, -EAGAIN: too
     * much load (429); another negative errno (500).
     */
    int (*choose)(void *arg, const struct kx_ask *ask, char ret[KX_MAX_ENDPOINTS]);
    void (*first_token)(void *arg, const char *id);
    void (*output)(void *arg, const char *id, uint64_t n); /* @n further events of the response */
    void (*end)(void *arg, const char *id,
                bool lost);   /* @lost: an error, or cancelled without a token */
    bool (*ready)(void *arg); /* a worker could be chosen */
    /* Write the base URL of an engine that tokenizes for @model. Returns false when there is none. NULL: none. */
    bool (*engine)(void *arg, const char *model, char *ret, size_t size);
};

struct kx_opts {
    const char *host;
    uint16_t port; /* 0: any */
    const struct kx_picker *picker;
    const char *tokenize; /* base URL of the engine that tokenizes; NULL: picker->engine */
    uint64_t tokenize_ms; /* 200: deadline of a tokenizing */
    size_t max_body;      /* 8 MiB: bytes of a body that wait for its end */
    size_t max_bodies;    /* 512 MiB: of all bodies */
    uint64_t drain_ms;    /* 5000 */
};

struct kx_server;

/** Serve. @opts and its picker are copied. Returns 0 or a negative errno with @error. */
int kx_server_start(const struct kx_opts *opts, struct kx_server **ret, struct kv_error *error);

/** Return the port that the server listens on. */
uint16_t kx_server_port(const struct kx_server *server);

/** Let running streams end for drain_ms, cancel the others, free the server. NULL is a no-op. */
void kx_server_stop(struct kx_server *server);

/** Append the metrics in Prometheus text format. Any thread. */
void kx_server_metrics(struct kx_server *server, struct kv_buf *out);

/** Return the word for a source, such as "engine". */
const char *kx_source_name(enum kx_source source);

#endif
