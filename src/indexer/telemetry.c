// SPDX-License-Identifier: Apache-2.0
#include "indexer/telemetry.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/metrics.h"
#include "event/router_event.h" /* kve_tier_name */

#ifndef KV_VERSION
#define KV_VERSION "unknown"
#endif

/* 0.1 ms to 52 s, doubling: the buckets that dashboards of the original expect. */
static const double buckets[] = {0.0001, 0.0002, 0.0004, 0.0008,  0.0016,  0.0032, 0.0064,
                                 0.0128, 0.0256, 0.0512, 0.1024,  0.2048,  0.4096, 0.8192,
                                 1.6384, 3.2768, 6.5536, 13.1072, 26.2144, 52.4288};

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

/* Series of one endpoint; found once, then updated without a lock. */
struct endpoint {
    _Atomic(struct kv_series *) duration, requests[N_METHODS], errors[2];
};

struct ki_telemetry {
    struct kv_metrics *metrics;
    struct kv_metric *family[N_FAMILIES];
    const struct ki_route *routes;
    size_t n_routes;
    struct kv_series *queries_hit, *queries_miss, *query_blocks, *query_matched;
    struct endpoint endpoints[]; /* one per route, and the last for unknown paths */
};

int ki_telemetry_create(const struct ki_route *routes, size_t n_routes, struct ki_telemetry **ret)
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

/* -- requests ---------------------------------------------------------------------------------- */

/* Label sets appear with first use, so series are made then. Two threads may both ask: same answer.
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

void ki_telemetry_request(struct ki_telemetry *t, const struct ki_request *request, unsigned status)
{
    const struct ki_route *route = request->route;
    const char *path = route ? route->path : "unknown";
    struct endpoint *e = &t->endpoints[route ? (size_t)(route - t->routes) : t->n_routes];
    size_t method = method_index(request->method);
    double seconds = (double)(kv_now_ns() - request->started_ns) / 1e9;

    if (route && route->flags & KI_ROUTE_UNMEASURED)
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

/* -- what is read when somebody asks ----------------------------------------------------------- */

static void head(struct kv_buf *out, const char *name, const char *type, const char *help)
{
    kv_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void plain(struct kv_buf *out, const char *name, const char *type, const char *help,
                  uint64_t value)
{
    head(out, name, type, help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

/* A label value: backslash, quote and newline are escaped. */
static void label(struct kv_buf *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '\\' || *text == '"')
            kv_buf_putc(out, '\\');
        if (*text == '\n')
            kv_buf_puts(out, "\\n");
        else
            kv_buf_putc(out, *text);
    }
}

static void stream_labels(struct kv_buf *out, const char *name, const struct ki_worker_info *info)
{
    kv_buf_printf(out, "%s{model=\"", name);
    label(out, info->model);
    kv_buf_puts(out, "\",tenant=\"");
    label(out, info->tenant);
    kv_buf_printf(out, "\",instance=\"%" PRIu64 "\",dp_rank=\"%" PRIu32 "\"", info->instance,
                  info->rank);
}

#define COUNTER(field, name, help)                                                       \
    {                                                                                    \
        "kv_indexer_stream_" name "_total", help, offsetof(struct ki_worker_info, field) \
    }
static const struct {
    const char *name, *help;
    size_t offset;
} stream_counters[] = {
    COUNTER(batches, "batches", "Batches applied"),
    COUNTER(events, "events", "Events applied"),
    COUNTER(blocks, "blocks", "Blocks stored and removed by events"),
    COUNTER(bytes, "bytes", "Payload bytes of the batches applied"),
    COUNTER(gaps, "gaps", "Gaps seen in the sequence numbers"),
    COUNTER(missed_batches, "missed_batches", "Batches that no replay brought back"),
    COUNTER(replays, "replays", "Replays asked for"),
    COUNTER(failed_replays, "failed_replays", "Replays given up"),
    COUNTER(replayed_batches, "replayed_batches", "Batches that a replay brought"),
    COUNTER(overruns, "overruns", "Replays that came too late: the publisher's ring had moved on"),
    COUNTER(restarts, "restarts", "Engine restarts: the blocks of the stream were forgotten"),
    COUNTER(duplicates, "duplicates", "Batches dropped because they were applied before"),
    COUNTER(malformed, "malformed", "Messages that could not be understood"),
    COUNTER(orphans, "orphans", "Stored events whose parent the worker does not have"),
    COUNTER(rejected, "rejected", "Stored events that the index refused"),
};

static void write_counters(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    for (size_t c = 0; c < KV_COUNT(stream_counters); c++) {
        head(out, stream_counters[c].name, "counter", stream_counters[c].help);
        for (long i = 0; i < n; i++) {
            uint64_t value;

            memcpy(&value, (const char *)&infos[i] + stream_counters[c].offset, sizeof(value));
            stream_labels(out, stream_counters[c].name, &infos[i]);
            kv_buf_printf(out, "} %" PRIu64 "\n", value);
        }
    }
}

static void write_skipped(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char name[] = "kv_indexer_stream_skipped_events_total";

    head(out, name, "counter", "Events left out, by reason");
    for (long i = 0; i < n; i++)
        for (int s = 0; s < KVE_N_SKIPS; s++) {
            if (infos[i].skipped[s] == 0)
                continue;
            stream_labels(out, name, &infos[i]);
            kv_buf_printf(out, ",reason=\"%s\"} %" PRIu64 "\n", kve_skip_name((enum kve_skip)s),
                          infos[i].skipped[s]);
        }
}

static void write_gauges(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char seq[] = "kv_indexer_stream_last_seq";
    static const char age[] = "kv_indexer_stream_last_event_age_seconds";
    static const char partial[] = "kv_indexer_stream_partial";
    uint64_t now = kv_wall_ns();

    head(out, seq, "gauge", "Sequence number of the last batch applied");
    for (long i = 0; i < n; i++) {
        if (!infos[i].has_sequence)
            continue;
        stream_labels(out, seq, &infos[i]);
        kv_buf_printf(out, "} %" PRIu64 "\n", infos[i].last_sequence);
    }
    head(out, age, "gauge", "Time since the last batch was applied");
    for (long i = 0; i < n; i++) {
        if (!infos[i].last_event_ns)
            continue;
        stream_labels(out, age, &infos[i]);
        kv_buf_printf(out, "} %.3f\n",
                      now > infos[i].last_event_ns ? (double)(now - infos[i].last_event_ns) / 1e9
                                                   : 0.0);
    }
    head(out, partial, "gauge", "1 when events are known to be missing from the view");
    for (long i = 0; i < n; i++) {
        stream_labels(out, partial, &infos[i]);
        kv_buf_printf(out, "} %d\n", infos[i].partial);
    }
}

static void write_listeners(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    uint64_t by_status[KI_FAILED + 1] = {0}, instances = 0;

    for (long i = 0; i < n; i++) {
        by_status[infos[i].status]++;
        instances += i == 0 || infos[i].instance != infos[i - 1].instance;
    }
    plain(out, "dynamo_kvindexer_workers", "gauge", "Number of registered worker instances",
          instances);
    head(out, "kv_indexer_listeners", "gauge", "Event stream listeners, by status");
    for (int s = 0; s <= KI_FAILED; s++)
        kv_buf_printf(out, "kv_indexer_listeners{status=\"%s\"} %" PRIu64 "\n",
                      ki_listener_status_name((enum ki_listener_status)s), by_status[s]);
}

static void write_streams(struct kv_buf *out, struct ki_registry *registry)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(registry, &infos);

    if (n < 0)
        return;
    write_listeners(out, infos, n);
    if (n > 0) {
        write_gauges(out, infos, n);
        write_counters(out, infos, n);
        write_skipped(out, infos, n);
    }
    ki_worker_infos_free(infos, n);
}

static void model_labels(struct kv_buf *out, const char *name, const struct ki_model *model)
{
    kv_buf_printf(out, "%s{model=\"", name);
    label(out, model->name);
    kv_buf_puts(out, "\",tenant=\"");
    label(out, model->tenant);
    kv_buf_putc(out, '"');
}

static const struct {
    const char *name, *help;
    size_t offset;
} index_gauges[] = {
    {"kv_indexer_index_blocks", "Distinct blocks in the index", offsetof(struct kvi_stats, blocks)},
    {"kv_indexer_index_holder_blocks", "Blocks, counted once for every worker rank that holds them",
     offsetof(struct kvi_stats, holder_blocks)},
    {"kv_indexer_index_holders", "Worker ranks in the index", offsetof(struct kvi_stats, holders)},
    {"kv_indexer_index_chains", "Compressed nodes of the index",
     offsetof(struct kvi_stats, chains)},
    {"kv_indexer_index_bytes", "Memory of the index", offsetof(struct kvi_stats, bytes)},
};

static void write_tiers(struct kv_buf *out, struct ki_model **models, const struct kvi_stats *stats,
                        long n)
{
    static const char name[] = "kv_indexer_index_tier_blocks";

    head(out, name, "gauge", "Blocks by storage tier, counted once for every rank that holds them");
    for (long i = 0; i < n; i++)
        for (int t = 0; t < KV_N_TIERS; t++) {
            model_labels(out, name, models[i]);
            kv_buf_printf(out, ",tier=\"%s\"} %" PRIu64 "\n", kve_tier_name((enum kv_tier)t),
                          stats[i].tier_blocks[t]);
        }
}

static void write_models(struct kv_buf *out, struct ki_model **models, long n)
{
    struct kvi_stats *stats = calloc((size_t)n, sizeof(*stats));

    if (!stats)
        return;
    for (long i = 0; i < n; i++)
        kvi_get_stats(models[i]->index, &stats[i]);
    for (size_t g = 0; g < KV_COUNT(index_gauges); g++) {
        head(out, index_gauges[g].name, "gauge", index_gauges[g].help);
        for (long i = 0; i < n; i++) {
            uint64_t value;

            memcpy(&value, (const char *)&stats[i] + index_gauges[g].offset, sizeof(value));
            model_labels(out, index_gauges[g].name, models[i]);
            kv_buf_printf(out, "} %" PRIu64 "\n", value);
        }
    }
    write_tiers(out, models, stats, n);
    free(stats);
}

static void write_indexes(struct kv_buf *out, struct ki_registry *registry)
{
    struct ki_model **models;
    long n = ki_registry_models(registry, &models);

    if (n < 0)
        return;
    plain(out, "dynamo_kvindexer_models", "gauge", "Number of active model+tenant indexers",
          (uint64_t)n);
    if (n > 0)
        write_models(out, models, n);
    for (long i = 0; i < n; i++)
        ki_model_release(models[i]);
    free(models);
}

static void write_http(struct kv_buf *out, struct ki_http *http)
{
    struct ki_http_stats stats;

    ki_http_get_stats(http, &stats);
    plain(out, "kv_indexer_http_connections", "gauge", "Open HTTP connections",
          stats.connections.open);
    plain(out, "kv_indexer_http_accepted_total", "counter", "HTTP connections accepted",
          stats.connections.accepted);
    plain(out, "kv_indexer_http_expired_total", "counter",
          "HTTP connections closed because a request or reply took too long",
          stats.connections.expired);
    plain(out, "kv_indexer_http_evicted_total", "counter",
          "Idle HTTP connections closed to make room", stats.connections.evicted);
    plain(out, "kv_indexer_http_in_flight", "gauge", "Requests being read or answered",
          stats.in_flight);
    plain(out, "kv_indexer_http_body_bytes", "gauge", "Memory held by request bodies",
          stats.body_bytes);
    plain(out, "kv_indexer_http_streams", "gauge", "Streamed replies in progress", stats.streams);
    plain(out, "kv_indexer_http_overloaded_total", "counter",
          "Requests refused because too many large ones were in progress", stats.overloaded);
    plain(out, "kv_indexer_http_bad_framing_total", "counter",
          "Requests refused because of ambiguous framing", stats.bad_framing);
}

static void write_process(struct kv_buf *out)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f && fscanf(f, "%*u %lu", &pages) == 1) // NOLINT(cert-err34-c): the kernel wrote it
        plain(out, "process_resident_memory_bytes", "gauge", "Resident memory size in bytes",
              pages * (uint64_t)sysconf(_SC_PAGESIZE));
    if (f)
        fclose(f);
    head(out, "kv_indexer_build_info", "gauge", "Always 1; the version is the label");
    kv_buf_printf(out, "kv_indexer_build_info{version=\"%s\"} 1\n", KV_VERSION);
}

void ki_telemetry_render(struct ki_telemetry *telemetry, struct ki_registry *registry,
                         struct ki_http *http, struct kv_buf *out)
{
    kv_metrics_render(telemetry->metrics, out);
    write_indexes(out, registry);
    write_streams(out, registry);
    if (http)
        write_http(out, http);
    write_process(out);
}
