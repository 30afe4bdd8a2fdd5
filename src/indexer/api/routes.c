// SPDX-License-Identifier: Apache-2.0
/* The table of endpoints, and functions that their handlers share. */
#include <inttypes.h>
#include <stdio.h>

#include "base/json/json.h"
#include "indexer/service.h"

#ifndef KV_VERSION
#define KV_VERSION "unknown"
#endif

#define READY_PATIENCE_MS 5000 /* for a worker's first answer, where --stale-after is 0 */
#define ADMIN_BODY (2u << 20)  /* the original's limit for all requests */

static const struct kh_route routes[] = {
    {"POST", "/query", ki_api_query, SIZE_MAX, 0},
    {"POST", "/query_by_hash", ki_api_query_by_hash, SIZE_MAX, 0},
    {"POST", "/register", ki_api_register, ADMIN_BODY, 0},
    {"POST", "/unregister", ki_api_unregister, ADMIN_BODY, 0},
    {"POST", "/register_peer", ki_api_register_peer, ADMIN_BODY, 0},
    {"POST", "/deregister_peer", ki_api_deregister_peer, ADMIN_BODY, 0},
    {"GET", "/workers", ki_api_workers, 0, 0},
    {"GET", "/discovery", ki_api_discovery, 0, 0},
    {"GET", "/registrations", ki_api_registrations, 0, 0},
    {"GET", "/peers", ki_api_peers, 0, 0},
    {"GET", "/dump", ki_api_dump, 0, 0},
    {"GET", "/health", ki_api_health, 0, KH_ROUTE_OPEN},
    {"GET", "/ready", ki_api_ready, 0, KH_ROUTE_OPEN},
    {"GET", "/", ki_api_page, 0, KH_ROUTE_TOKENLESS | KH_ROUTE_HTML},
    {"GET", "/", ki_api_root, 0, 0},
    {"POST", "/reopen_logs", ki_api_reopen_logs, ADMIN_BODY, 0},
    {"GET", "/metrics", ki_api_metrics, 0, KH_ROUTE_UNMEASURED},
    {"GET", "/overview", ki_api_overview, 0, 0},
    {"GET", "/history", ki_api_history, 0, 0},
    {"POST", "/explain", ki_api_explain, SIZE_MAX, 0},
    {"GET", "/ui/page.css", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/page.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/api.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/format.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/workers.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/charts.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/explain.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/chart.js", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"GET", "/ui/icon.svg", ki_api_page, 0, KH_ROUTE_TOKENLESS},
    {"POST", "/test/pause_listener", ki_api_pause, ADMIN_BODY, 0},
    {"POST", "/test/resume_listener", ki_api_resume, ADMIN_BODY, 0},
};
#define N_TEST 2

/* Return true when the addition has a route of this method and path. */
static bool is_replaced(const struct ki_addition *addition, const struct kh_route *route)
{
    for (size_t i = 0; addition && i < addition->n_routes; i++)
        if (!(route->flags & KH_ROUTE_HTML) && strcmp(addition->routes[i].path, route->path) == 0 &&
            strcmp(addition->routes[i].method, route->method) == 0)
            return true;
    return false;
}

int ki_routes(struct ki_service *service, bool test)
{
    const struct ki_addition *addition = service->addition;
    size_t n = KV_COUNT(routes) - (test ? 0 : N_TEST), n_added = addition ? addition->n_routes : 0;

    service->routes = calloc(n + n_added, sizeof(*service->routes));
    if (!service->routes)
        return -ENOMEM;
    for (size_t i = 0; i < n_added; i++)
        service->routes[service->n_routes++] = addition->routes[i];
    for (size_t i = 0; i < n; i++)
        if (!is_replaced(addition, &routes[i]))
            service->routes[service->n_routes++] = routes[i];
    for (size_t i = 0; i < service->n_routes; i++)
        if (service->routes[i].max_body == SIZE_MAX)
            service->routes[i].max_body = (size_t)service->options->max_body;
    return 0;
}

struct ki_scratch *ki_scratch_take(struct ki_service *service, struct kh_reply *reply)
{
    struct ki_scratch *scratch;

    pthread_mutex_lock(&service->lock);
    scratch = service->scratch;
    if (scratch)
        service->scratch = scratch->next;
    pthread_mutex_unlock(&service->lock);
    if (!scratch)
        scratch = calloc(1, sizeof(*scratch));
    if (!scratch)
        kh_reply_error(reply, 503, "out of memory");
    return scratch;
}

/* Free most of the memory that a million-token query leaves, and keep what usual queries need. */
static void trim(struct kv_buf *buf)
{
    if (buf->capacity > (1u << 20))
        kv_buf_fini(buf);
}

static void trim_matches(struct kvi_matches *matches)
{
    if (matches->scratch_bytes + matches->capacity * sizeof(struct kvi_match) > (4u << 20))
        kvi_matches_fini(matches);
}

void ki_scratch_give(struct ki_service *service, struct ki_scratch *scratch)
{
    trim(&scratch->body.token_ids);
    trim(&scratch->body.block_hashes);
    trim(&scratch->body.unescaped);
    trim(&scratch->body.mm_objects);
    trim(&scratch->lookup.hashes);
    trim(&scratch->lookup.other_hashes);
    trim_matches(&scratch->lookup.matches);
    trim_matches(&scratch->lookup.others);
    pthread_mutex_lock(&service->lock);
    scratch->next = service->scratch;
    service->scratch = scratch;
    pthread_mutex_unlock(&service->lock);
}

bool ki_read_body(struct kh_request *request, struct kh_reply *reply, uint32_t required,
                  uint32_t optional, struct ki_scratch *scratch)
{
    enum ki_media media = ki_media_of(request->content_type);
    struct kv_error error = {0};
    int rc;

    if (media == KI_MEDIA_OTHER) {
        kh_reply_error(reply, 415,
                       "expected the header Content-Type: application/json (or "
                       "application/msgpack)");
        return false;
    }
    rc = ki_body_parse(media, request->body, required, optional, &scratch->body, &error);
    if (rc == 0) {
        if (scratch->body.model_name)
            snprintf(request->model, sizeof(request->model), "%s", scratch->body.model_name);
        return true;
    }
    kh_reply_error(reply, rc == -EINVAL ? 422 : rc == -ENOMEM ? 503 : 400, "%s", error.text);
    return false;
}

void ki_reply_ok(struct kh_reply *reply, unsigned status)
{
    reply->status = status;
    kv_buf_puts(&reply->body, "{\"status\":\"ok\"}");
}

void ki_api_health(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;

    (void)request;
    if (ki_service_is_ready(service))
        reply->content_type = NULL; /* 200 and an empty body */
    else
        kh_reply_error(reply, 503,
                       "not ready: fewer than %" PRIu64
                       " workers have been registered (--min-initial-workers)",
                       service->options->min_initial_workers);
}

/*
 * Return true while a stream has still to catch up: it fetches batches, or its worker may just be
 * about to answer. A worker that has not answered for long holds up nobody.
 */
static bool is_catching_up(const struct ki_worker_info *info, uint64_t patience_ms)
{
    if (info->status == KI_REPLAYING)
        return true;
    return (info->status == KI_PENDING || info->status == KI_FAILED) &&
           (info->connected || info->absent_ms < patience_ms);
}

void ki_api_ready(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    uint64_t stale_ms = service->options->stale_after_ms;
    struct ki_worker_info *infos;
    size_t behind = 0;
    long n;

    ki_api_health(arg, request, reply);
    if (reply->status != 200)
        return;
    n = ki_registry_workers(service->registry, &infos);
    if (n < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    for (long i = 0; i < n; i++)
        behind += is_catching_up(&infos[i], stale_ms ? stale_ms : READY_PATIENCE_MS);
    ki_worker_infos_free(infos, n);
    if (behind)
        kh_reply_error(reply, 503, "not ready: %zu of %ld event streams are catching up", behind,
                       n);
}

void ki_api_root(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct kv_json_writer w;
    char text[64];

    (void)request;
    kh_reply_header(reply, "Vary", "Accept"); /* browsers get the page */
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "service", ki_options_program(service->options));
    kv_json_member_str(&w, "version", KV_VERSION);
    kv_json_key(&w, "endpoints");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < service->n_routes; i++) {
        const struct kh_route *route = &service->routes[i];

        if (route->flags & KH_ROUTE_TOKENLESS || strncmp(route->path, "/test/", 6) == 0)
            continue; /* a file of the web page */
        snprintf(text, sizeof(text), "%s %s", route->method, route->path);
        kv_json_put_str(&w, text);
    }
    kv_json_end_array(&w);
    kv_json_end_object(&w);
}

void ki_api_reopen_logs(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct kv_error error = {0};

    (void)request;
    if ((service->access_log && kh_access_log_reopen(service->access_log, &error) < 0) ||
        (service->addition && service->addition->reopen(service, &error) < 0))
        kh_reply_error(reply, 500, "%s", error.text);
    else
        ki_reply_ok(reply, 200);
}

void ki_api_metrics(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    const struct ki_limit limits[] = {
        {"max-connections", service->options->max_connections, service->max_connections},
        {"max-registrations", service->options->max_registrations, service->max_registrations}};
    struct kv_str detail;

    reply->content_type = "text/plain; version=0.0.4";
    ki_telemetry_render(service->telemetry, service->registry,
                        atomic_load_explicit(&service->http, memory_order_acquire),
                        kh_request_param(request, "detail", &detail) && kv_str_eq(detail, "true"),
                        &reply->body);
    ki_telemetry_render_limits(limits, KV_COUNT(limits), &reply->body);
    ki_discovery_render(service->discovery, &reply->body);
    ki_nats_render(service->nats, &reply->body);
    if (service->addition)
        service->addition->render(service, &reply->body);
    if (service->access_log)
        kv_buf_printf(
            &reply->body,
            "# HELP kv_indexer_access_log_dropped_total Lines of the access log that were "
            "not written\n"
            "# TYPE kv_indexer_access_log_dropped_total counter\n"
            "kv_indexer_access_log_dropped_total %" PRIu64 "\n",
            kh_access_log_dropped(service->access_log));
}
