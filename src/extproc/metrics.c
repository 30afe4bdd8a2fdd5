// SPDX-License-Identifier: Apache-2.0
#include "extproc/stream.h"

static const double buckets[] = {0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
                                 0.01,    0.025,  0.05,    0.1,    0.25,  0.5,    1};

enum family { REQUESTS, PROMPTS, ENDS, SECONDS, STREAMS, BYTES, CONNECTIONS, N_FAMILIES };
static const struct kv_metric_def families[N_FAMILIES] = {
    [REQUESTS] = {.name = "kv_selector_ext_proc_requests_total",
                  .help = "Requests of Envoy's external processing, by what became of them",
                  .type = KV_METRIC_COUNTER,
                  .labels = {"result"}},
    [PROMPTS] = {.name = "kv_selector_ext_proc_prompts_total",
                 .help = "Where a request's tokens came from, or why the load alone decided",
                 .type = KV_METRIC_COUNTER,
                 .labels = {"source"}},
    [ENDS] = {.name = "kv_selector_ext_proc_ends_total",
              .help = "Ends of routed requests",
              .type = KV_METRIC_COUNTER,
              .labels = {"end"}},
    [SECONDS] = {.name = "kv_selector_ext_proc_choice_seconds",
                 .help = "Time from a complete request to its choice, with tokenizing",
                 .type = KV_METRIC_HISTOGRAM,
                 .buckets = buckets,
                 .n_buckets = KV_COUNT(buckets)},
    [STREAMS] = {.name = "kv_selector_ext_proc_streams",
                 .help = "Streams open now",
                 .type = KV_METRIC_GAUGE},
    [BYTES] = {.name = "kv_selector_ext_proc_body_bytes",
               .help = "Bytes of bodies that wait for their end",
               .type = KV_METRIC_GAUGE},
    [CONNECTIONS] = {.name = "kv_selector_ext_proc_connections",
                     .help = "Connections open now",
                     .type = KV_METRIC_GAUGE},
};

static const char *const results[KX_N_RESULTS] = {"routed", "none_fits", "shed", "failed"};
static const char *const ends[KX_N_ENDS] = {"done", "lost", "cancelled"};
static const char *const sources[KX_N_SOURCES] = {"given", "engine", "headers", "unread",
                                                  "early", "alone",  "slow",    "failed"};

const char *kx_source_name(enum kx_source source)
{
    return (unsigned)source < KX_N_SOURCES ? sources[source] : NULL;
}

static void get_series(struct kv_metric *family, const char *const *words, size_t n,
                       struct kv_series **ret)
{
    for (size_t i = 0; i < n; i++)
        ret[i] = kv_metric_get(family, &words[i]);
}

int kx_metrics_create(struct kx_server *server)
{
    struct kv_metric *family[N_FAMILIES];

    if (kv_metrics_create(&server->metrics) < 0)
        return -ENOMEM;
    for (size_t i = 0; i < N_FAMILIES; i++) {
        family[i] = kv_metrics_add(server->metrics, &families[i]);
        if (!family[i])
            return -ENOMEM;
    }
    get_series(family[REQUESTS], results, KX_N_RESULTS, server->results);
    get_series(family[PROMPTS], sources, KX_N_SOURCES, server->sources);
    get_series(family[ENDS], ends, KX_N_ENDS, server->ends);
    server->seconds = kv_metric_get(family[SECONDS], NULL);
    server->streams = kv_metric_get(family[STREAMS], NULL);
    server->bytes = kv_metric_get(family[BYTES], NULL);
    server->connections = kv_metric_get(family[CONNECTIONS], NULL);
    return 0;
}

void kx_server_metrics(struct kx_server *server, struct kv_buf *out)
{
    struct kg_stats stats;

    kg_server_get_stats(server->grpc, &stats);
    kv_series_set(server->streams, (double)stats.calls);
    kv_series_set(server->connections, (double)stats.connections);
    kv_series_set(server->bytes,
                  (double)atomic_load_explicit(&server->bodies, memory_order_relaxed));
    kv_metrics_render(server->metrics, out);
}
