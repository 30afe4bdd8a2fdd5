// SPDX-License-Identifier: Apache-2.0
#include "indexer/telemetry.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "base/core/clock.h"
#include "base/metrics/metric_text.h"
#include "base/metrics/metrics.h"

/* 5 µs to 52 s, doubling; from 0.1 ms on the buckets that dashboards of the original expect. */
static const double buckets[] = {0.000005, 0.00001, 0.000025, 0.00005, 0.0001,  0.0002,
                                 0.0004,   0.0008,  0.0016,   0.0032,  0.0064,  0.0128,
                                 0.0256,   0.0512,  0.1024,   0.2048,  0.4096,  0.8192,
                                 1.6384,   3.2768,  6.5536,   13.1072, 26.2144, 52.4288};

_Static_assert(KV_COUNT(buckets) + 1 == KI_N_LATENCIES, "a count for each bucket, and one beyond");

enum family { DURATION, REQUESTS, ERRORS, QUERIES, QUERY_BLOCKS, QUERY_MATCHED, N_FAMILIES };
static const struct kv_metric_def families[N_FAMILIES] = {
    [DURATION] = {.name = "dynamo_kvindexer_request_duration_seconds",
                  .help = "HTTP request latency",
                  .type = KV_METRIC_HISTOGRAM,
                  .labels = {"endpoint"},
                  .buckets = buckets,
                  .n_buckets = KV_COUNT(buckets)},
    [REQUESTS] = {.name = "dynamo_kvindexer_requests_total",
                  .help = "Total HTTP requests",
                  .type = KV_METRIC_COUNTER,
                  .labels = {"endpoint", "method"}},
    [ERRORS] = {.name = "dynamo_kvindexer_errors_total",
                .help = "HTTP error responses (4xx/5xx)",
                .type = KV_METRIC_COUNTER,
                .labels = {"endpoint", "status_class"}},
    [QUERIES] = {.name = "kv_indexer_queries_total",
                 .help = "Queries answered, by whether any worker held the first block",
                 .type = KV_METRIC_COUNTER,
                 .labels = {"result"}},
    [QUERY_BLOCKS] = {.name = "kv_indexer_query_blocks_total",
                      .help = "Full blocks asked for",
                      .type = KV_METRIC_COUNTER},
    [QUERY_MATCHED] = {.name = "kv_indexer_query_matched_blocks_total",
                       .help = "Blocks of the longest match of each query",
                       .type = KV_METRIC_COUNTER},
};

static const char *const methods[] = {"GET",    "POST",    "HEAD",  "PUT",
                                      "DELETE", "OPTIONS", "PATCH", "OTHER"};
#define N_METHODS KV_COUNT(methods)

/* Series of one endpoint, found once, then updated without a lock. */
struct endpoint {
    _Atomic(struct kv_series *) duration, requests[N_METHODS], errors[2];
};

struct ki_telemetry {
    struct kv_metrics *metrics;
    struct kv_metric *family[N_FAMILIES];
    const struct kh_route *routes;
    size_t n_routes;
    struct kv_series *queries_hit, *queries_miss, *query_blocks, *query_matched;
    struct endpoint endpoints[]; /* one per route, and a last one for unknown paths */
};

int ki_telemetry_create(const struct kh_route *routes, size_t n_routes, struct ki_telemetry **ret)
{
    struct ki_telemetry *t = calloc(1, sizeof(*t) + (n_routes + 1) * sizeof(t->endpoints[0]));
    static const char *const hit[] = {"hit"}, *const miss[] = {"miss"};
    int rc;

    if (!t)
        return -ENOMEM;
    t->routes = routes;
    t->n_routes = n_routes;
    rc = kv_metrics_create(&t->metrics);
    for (int i = 0; rc == 0 && i < N_FAMILIES; i++) {
        t->family[i] = kv_metrics_add(t->metrics, &families[i]);
        rc = t->family[i] ? 0 : -ENOMEM;
    }
    if (rc < 0) {
        ki_telemetry_destroy(t);
        return rc;
    }
    t->queries_hit = kv_metric_get(t->family[QUERIES], hit);
    t->queries_miss = kv_metric_get(t->family[QUERIES], miss);
    t->query_blocks = kv_metric_get(t->family[QUERY_BLOCKS], NULL);
    t->query_matched = kv_metric_get(t->family[QUERY_MATCHED], NULL);
    *ret = t;
    return 0;
}

void ki_telemetry_destroy(struct ki_telemetry *telemetry)
{
    if (!telemetry)
        return;
    kv_metrics_destroy(telemetry->metrics);
    free(telemetry);
}

/*
 * Return the series of a label set, made on first use. Two threads that ask at once get the same
 * one.
 */
static struct kv_series *series_of(struct ki_telemetry *t, _Atomic(struct kv_series *) *slot,
                                   enum family family, const char *endpoint, const char *second)
{
    const char *const values[] = {endpoint, second};
    struct kv_series *series = atomic_load_explicit(slot, memory_order_acquire);

    if (!series) {
        series = kv_metric_get(t->family[family], values);
        atomic_store_explicit(slot, series, memory_order_release);
    }
    return series;
}

static size_t method_index(const char *method)
{
    size_t i = 0;

    while (i < N_METHODS - 1 && strcmp(methods[i], method) != 0)
        i++;
    return i;
}

void ki_telemetry_request(struct ki_telemetry *t, const struct kh_request *request, unsigned status)
{
    const struct kh_route *route = request->route;
    const char *path = route ? route->path : "unknown";
    struct endpoint *e = &t->endpoints[route ? (size_t)(route - t->routes) : t->n_routes];
    size_t method = method_index(request->method);
    double seconds = (double)(kv_now_ns() - request->started_ns) / 1e9;

    if (route && route->flags & KH_ROUTE_UNMEASURED)
        return;
    kv_series_observe(series_of(t, &e->duration, DURATION, path, NULL), seconds);
    kv_series_add(series_of(t, &e->requests[method], REQUESTS, path, methods[method]), 1);
    if (status >= 400) {
        bool server = status >= 500;

        kv_series_add(series_of(t, &e->errors[server], ERRORS, path, server ? "5xx" : "4xx"), 1);
    }
}

void ki_telemetry_query(struct ki_telemetry *t, uint64_t blocks, uint64_t matched)
{
    kv_series_add(matched ? t->queries_hit : t->queries_miss, 1);
    kv_series_add(t->query_blocks, blocks);
    kv_series_add(t->query_matched, matched);
}

void ki_telemetry_queries(struct ki_telemetry *t, struct ki_query_counts *ret)
{
    static const char *const paths[] = {"/query", "/query_by_hash"};

    *ret = (struct ki_query_counts){
        .hits = kv_series_count(t->queries_hit),
        .misses = kv_series_count(t->queries_miss),
        .blocks = kv_series_count(t->query_blocks),
        .matched = kv_series_count(t->query_matched),
    };
    for (size_t i = 0; i < t->n_routes; i++) {
        struct kv_series *series =
            atomic_load_explicit(&t->endpoints[i].duration, memory_order_acquire);

        for (size_t k = 0; series && k < KV_COUNT(paths); k++)
            if (strcmp(t->routes[i].path, paths[k]) == 0)
                kv_series_buckets(series, ret->latency);
    }
}

double ki_latency_quantile(const uint64_t latency[KI_N_LATENCIES], double q)
{
    uint64_t total = 0;
    double rank, below = 0;

    for (size_t i = 0; i < KI_N_LATENCIES; i++)
        total += latency[i];
    if (!total)
        return -1;
    rank = q * (double)total;
    for (size_t i = 0; i < KV_COUNT(buckets); i++) {
        double from = i ? buckets[i - 1] : 0, n = (double)latency[i];

        if (n > 0 && below + n >= rank)
            return from + (buckets[i] - from) * (rank - below) / n;
        below += n;
    }
    return buckets[KV_COUNT(buckets) - 1];
}

void ki_telemetry_render(struct ki_telemetry *telemetry, struct ki_registry *registry,
                         struct kh_http *http, bool all, struct kv_buf *out)
{
    kv_metrics_render(telemetry->metrics, out);
    ki_telemetry_render_state(registry, http, all, out);
}

/* -- limits ------------------------------------------------------------------------------------ */

static void write_limits(struct kv_buf *out, const char *name, const char *help,
                         const struct ki_limit *limits, size_t n, bool wanted)
{
    kv_metric_head(out, name, "gauge", help);
    for (size_t i = 0; i < n; i++)
        kv_buf_printf(out, "%s{option=\"%s\"} %" PRIu64 "\n", name, limits[i].option,
                      wanted ? limits[i].wanted : limits[i].is);
}

void ki_telemetry_render_limits(const struct ki_limit *limits, size_t n, struct kv_buf *out)
{
    struct rlimit descriptors;

    write_limits(out, "kv_indexer_limit", "Limits in force, by the option that sets them", limits,
                 n, false);
    write_limits(out, "kv_indexer_limit_wanted",
                 "What the options ask for; more than the limit where descriptors are too few",
                 limits, n, true);
    if (getrlimit(RLIMIT_NOFILE, &descriptors) != 0)
        return;
    kv_metric_head(out, "process_max_fds", "gauge", "Maximum number of open file descriptors");
    kv_buf_printf(out, "process_max_fds %" PRIu64 "\n", (uint64_t)descriptors.rlim_cur);
}
