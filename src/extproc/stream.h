// SPDX-License-Identifier: Apache-2.0
/** A stream of Envoy's: one HTTP request, from its headers to the end of its response. */
#ifndef KV_EXTPROC_STREAM_H
#define KV_EXTPROC_STREAM_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/metrics/metrics.h"
#include "extproc/arena.h"
#include "extproc/extproc.h"
#include "extproc/prompt.h"
#include "extproc/tokenize.h"
#include "grpc/grpc.h"

#define KX_MAX_CANDIDATES 4096
#define KX_MAX_SESSION 256
#define KX_ID 48

/** Fate of a request. */
enum kx_result { KX_ROUTED, KX_NONE_FITS, KX_SHED, KX_BROKEN, KX_N_RESULTS };

/** How the response of a routed request ended. */
enum kx_end { KX_END_DONE, KX_END_LOST, KX_END_CANCELLED, KX_N_ENDS };

/** Buffers of one message's handling, used again. At most one for each thread. */
struct kx_scratch {
    struct kx_arena arena;
    struct kx_prompt prompt;
    struct kv_buf candidates; /* raw const char * */
    struct kx_scratch *next;
};

struct kx_server {
    struct kx_opts opts;
    struct kx_picker picker;
    char *tokenize;  /* base URL, or NULL */
    char prefix[17]; /* of ids of bookings: random */
    _Atomic uint64_t next_id;
    _Atomic size_t bodies;          /* bytes of bodies that wait for their end */
    struct kx_tokenizer *tokenizer; /* NULL: none is configured */
    struct kg_method methods[2];
    struct kg_server *grpc;
    pthread_mutex_t lock; /* guards scratch */
    struct kx_scratch *scratch;
    struct kv_metrics *metrics;
    struct kv_series *results[KX_N_RESULTS], *sources[KX_N_SOURCES], *ends[KX_N_ENDS];
    struct kv_series *seconds, *streams, *bytes, *connections;
};

/* Callbacks of the method Process; @server is a struct kx_server. */
bool kx_stream_begin(void *server, struct kg_call *call);
void kx_stream_message(void *server, struct kg_call *call, const void *data, size_t len);
void kx_stream_half_close(void *server, struct kg_call *call);
void kx_stream_end(void *server, struct kg_call *call);

/** Fill server->methods. */
void kx_methods(struct kx_server *server);

/** Take buffers (NULL: out of memory), and give them back. */
struct kx_scratch *kx_scratch_take(struct kx_server *server);
void kx_scratch_give(struct kx_server *server, struct kx_scratch *scratch);

/** Create the metrics. Returns 0 or -ENOMEM. */
int kx_metrics_create(struct kx_server *server);

#endif
