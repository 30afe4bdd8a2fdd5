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

struct ki_service {
    const struct ki_options *options; /* as at the start */
    struct ki_options *reread;        /* as SIGHUP has read them last; NULL: not yet */
    struct kh_auth *auth;
    struct ki_registry *registry;
    struct ki_peers *peers;
    struct ki_follow *follow;
    struct ki_discovery *discovery; /* NULL: neither --discover nor --dynamo */
    struct ki_nats *nats;           /* NULL: no --nats */
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
 * Run until a signal ends it. Returns 0 or a negative errno with @error.
 */
int ki_service_run(const struct ki_options *options, struct kv_error *error);

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

/** Return the routes of the service; @test adds /test/pause_listener and /test/resume_listener. */
const struct kh_route *ki_routes(bool test, size_t max_body, size_t *ret_n);

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
