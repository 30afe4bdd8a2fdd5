// SPDX-License-Identifier: Apache-2.0
/** The service: main starts and stops it; the HTTP handlers (api_*.c) use it. */
#ifndef KV_INDEXER_SERVICE_H
#define KV_INDEXER_SERVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "http/access_log.h"
#include "http/auth.h"
#include "http/http.h"
#include "indexer/api/body.h"
#include "indexer/discover/discovery.h"
#include "indexer/history.h"
#include "indexer/model/lookup.h"
#include "indexer/nats.h"
#include "indexer/options.h"
#include "indexer/registry/registry.h"
#include "indexer/replica/follow.h"
#include "indexer/replica/peers.h"
#include "indexer/telemetry.h"

/** Buffers for one request besides its body, used again so that the hot path allocates nothing. */
struct ki_scratch {
    struct ki_body body;
    struct ki_lookup lookup;
    struct kv_buf views; /* struct ki_view */
    struct kv_buf names; /* const struct ki_name *, valid while one answer is written */
    struct ki_scratch *next;
};

struct ki_service;

/** Parts that another program adds to the service: kv-selector is a kv-indexer with choices. */
struct ki_addition {
    const struct kh_route *routes; /* one with a method and path of the service's own replaces it */
    size_t n_routes;
    /* Start, when workers are registered and before the port is open. Sets service->added. */
    int (*start)(struct ki_service *service, struct kv_error *error);
    uint32_t streams; /* streamed replies at a time, beside the service's own */
    /* Get ready to stop, while HTTP still runs: end the addition's streamed replies. */
    void (*end)(struct ki_service *service);
    /* Stop, when HTTP has ended. Called after a failed or missing start, too. */
    void (*stop)(struct ki_service *service);
    /* Do what is due, on the main thread. Returns the time of the next call, monotonic in ns. */
    uint64_t (*tick)(struct ki_service *service, uint64_t now_ns);
    void (*render)(struct ki_service *service, struct kv_buf *out); /* append metrics */
    /* Open log files again. Returns 0 or an error with @error. */
    int (*reopen)(struct ki_service *service, struct kv_error *error);
    /* Write members of an instance in GET /workers: its @n ranks. */
    void (*write_worker)(struct ki_service *service, const struct ki_worker_info *infos, long n,
                         struct kv_json_writer *w);
    /* Write the workers of a whole list that aren't registered; @infos are all that are. */
    void (*write_others)(struct ki_service *service, const struct kh_request *request,
                         const struct ki_worker_info *infos, long n, struct kv_json_writer *w);
};

struct ki_service {
    const struct ki_addition *addition; /* NULL: kv-indexer alone */
    void *added;                        /* the addition's own */
    struct kh_route *routes;            /* owned: all that are served */
    size_t n_routes;
    const struct ki_options *options; /* as at the start */
    struct ki_options *reread;        /* as SIGHUP has read them last; NULL: not yet */
    struct kh_auth *auth;
    struct ki_registry *registry;
    struct ki_peers *peers;
    struct ki_follow *follow;
    struct ki_discovery *discovery;
    struct ki_nats *nats; /* NULL: no --nats */
    struct ki_telemetry *telemetry;
    struct ki_history *history;
    uint64_t started_wall_ns;
    struct kh_tls *tls;               /* NULL: plain HTTP */
    struct kh_access_log *access_log; /* NULL: none */
    atomic_bool ready;                /* --min-initial-workers have been registered */
    _Atomic(struct kh_http *) http;   /* NULL until it has started */
    uint32_t max_connections;         /* connections that the descriptor limit leaves for HTTP */
    uint32_t max_registrations;       /* registrations that it leaves */
    /* Guards scratch: a free list, never longer than the number of HTTP threads. */
    pthread_mutex_t lock;
    struct ki_scratch *scratch;
};

/**
 * Parse the command line of @program (as ki_options_parse does) into @options, and run until a signal ends
 * it, with what @addition (may be NULL) adds. Returns the exit status.
 */
int ki_main(const struct ki_program *program, const struct ki_addition *addition, int argc,
            char **argv, struct ki_options *options);

/** Take a scratch. NULL when out of memory (@reply then says so). */
struct ki_scratch *ki_scratch_take(struct ki_service *service, struct kh_reply *reply);
void ki_scratch_give(struct ki_service *service, struct ki_scratch *scratch);

/**
 * Read the request's body into @scratch->body. Returns false on failure: @reply then has 415, 400
 * or 422.
 */
bool ki_read_body(struct kh_request *request, struct kh_reply *reply, uint32_t required,
                  uint32_t optional, struct ki_scratch *scratch);

/** Return true once --min-initial-workers have been registered; stays true. */
bool ki_service_is_ready(struct ki_service *service);

/** Set the reply to {"status":"ok"}. */
void ki_reply_ok(struct kh_reply *reply, unsigned status);

/**
 * Set the routes of the service: the addition's, then its own. @test adds /test/pause_listener and
 * /test/resume_listener. Bodies of queries, and those of routes whose max_body is SIZE_MAX, may have --max-body.
 * Returns 0 or -ENOMEM.
 */
int ki_routes(struct ki_service *service, bool test);

/* Handlers; @service is a struct ki_service. */
void ki_api_query(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_query_by_hash(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_register(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_unregister(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_workers(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_register_peer(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_deregister_peer(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_peers(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_registrations(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_discovery(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_dump(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_metrics(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_health(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_ready(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_overview(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_history(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_explain(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_page(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_root(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_reopen_logs(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_pause(void *service, struct kh_request *request, struct kh_reply *reply);
void ki_api_resume(void *service, struct kh_request *request, struct kh_reply *reply);

#endif
