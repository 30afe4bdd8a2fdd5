// SPDX-License-Identifier: Apache-2.0
/* Metrics that are read at each scrape: state of streams, indexes, connections and the process. */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/metrics/metric_text.h"
#include "event/router/router_event.h" /* kve_tier_name */
#include "indexer/telemetry.h"
#include "indexer/view/event_counts.h"

#ifndef KV_VERSION
#define KV_VERSION "unknown"
#endif

static void plain(struct kv_buf *out, const char *name, const char *type, const char *help,
                  uint64_t value)
{
    kv_metric_head(out, name, type, help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

static void stream_labels(struct kv_buf *out, const char *name, const struct ki_worker_info *info)
{
    kv_buf_printf(out, "%s{", name);
    kv_metric_label(out, "model", info->model);
    kv_buf_putc(out, ',');
    kv_metric_label(out, "tenant", info->tenant);
    kv_buf_putc(out, ',');
    if (info->name)
        kv_metric_label(out, "instance", info->name);
    else
        kv_buf_printf(out, "instance=\"%" PRIu64 "\"", info->instance);
    kv_buf_printf(out, ",dp_rank=\"%" PRIu32 "\"", info->rank);
}

#define COUNTER(field, name, help)                                                               \
    {                                                                                            \
        "kv_indexer_stream_" name "_total", help, offsetof(struct ki_worker_info, field), false, \
    }
#define VOLUME(field, name, help)                                                               \
    {                                                                                           \
        "kv_indexer_stream_" name "_total", help, offsetof(struct ki_worker_info, field), true, \
    }
/* Of more ranks than this, a scrape has the short form unless it asks for all. */
#define SHORT_FROM 64

static const struct {
    const char *name, *help;
    size_t offset;
    bool volume; /* a sign of health: left out in the short form */
} stream_counters[] = {
    VOLUME(batches, "batches", "Batches applied"),
    VOLUME(events, "events", "Events applied"),
    VOLUME(blocks, "blocks", "Blocks stored and removed by events"),
    VOLUME(bytes, "bytes", "Payload bytes of the batches applied"),
    COUNTER(gaps, "gaps", "Gaps seen in the sequence numbers"),
    COUNTER(missed_batches, "missed_batches", "Batches that no replay brought back"),
    VOLUME(replays, "replays", "Replays asked for"),
    COUNTER(failed_replays, "failed_replays", "Replays given up"),
    VOLUME(replayed_batches, "replayed_batches", "Batches that a replay brought"),
    COUNTER(overruns, "overruns", "Replays that came too late: the publisher's ring had moved on"),
    COUNTER(resyncs, "resyncs",
            "Times that the blocks of the stream were forgotten because too many were not real"),
    COUNTER(absences, "absences",
            "Times that the blocks of the stream were forgotten for want of a connection"),
    COUNTER(restarts, "restarts", "Engine restarts: the blocks of the stream were forgotten"),
    COUNTER(reopened, "reopened", "Connections made anew because the publisher broke the protocol"),
    COUNTER(duplicates, "duplicates", "Batches dropped because they were applied before"),
    COUNTER(malformed, "malformed", "Messages that could not be understood"),
    COUNTER(orphans, "orphans", "Stored events whose parent the worker does not have"),
    COUNTER(rejected, "rejected", "Stored events that the index refused"),
};

static void write_counters(struct kv_buf *out, const struct ki_worker_info *infos, long n, bool all)
{
    for (size_t c = 0; c < KV_COUNT(stream_counters); c++) {
        if (stream_counters[c].volume && !all)
            continue;
        kv_metric_head(out, stream_counters[c].name, "counter", stream_counters[c].help);
        for (long i = 0; i < n; i++) {
            uint64_t value;

            memcpy(&value, (const char *)&infos[i] + stream_counters[c].offset, sizeof(value));
            if (!value && !all)
                continue;
            stream_labels(out, stream_counters[c].name, &infos[i]);
            kv_buf_printf(out, "} %" PRIu64 "\n", value);
        }
    }
}

static void write_skipped(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char name[] = "kv_indexer_stream_skipped_events_total";

    kv_metric_head(out, name, "counter", "Events left out, by reason");
    for (long i = 0; i < n; i++)
        for (int s = 0; s < KVE_N_SKIPS; s++) {
            if (infos[i].skipped[s] == 0)
                continue;
            stream_labels(out, name, &infos[i]);
            kv_buf_printf(out, ",reason=\"%s\"} %" PRIu64 "\n", kve_skip_name((enum kve_skip)s),
                          infos[i].skipped[s]);
        }
}

static void write_media(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char name[] = "kv_indexer_stream_unknown_medium_events_total";

    kv_metric_head(out, name, "counter", "Events left out because their medium is unknown");
    for (long i = 0; i < n; i++)
        for (uint32_t k = 0; k < infos[i].unknown_media.n_items; k++) {
            stream_labels(out, name, &infos[i]);
            kv_buf_putc(out, ',');
            kv_metric_label(out, "medium", infos[i].unknown_media.items[k].name);
            kv_buf_printf(out, "} %" PRIu64 "\n", infos[i].unknown_media.items[k].n);
        }
}

static void write_reasons(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char name[] = "kv_indexer_stream_partial_reason";

    kv_metric_head(out, name, "gauge", "1 for each reason for which the view is partial");
    for (long i = 0; i < n; i++)
        for (ki_reasons left = infos[i].reasons; left; left &= left - 1) {
            stream_labels(out, name, &infos[i]);
            kv_buf_printf(out, ",reason=\"%s\"} 1\n",
                          ki_reason_info((enum ki_reason)__builtin_ctzll(left))->name);
        }
}

static void write_gauges(struct kv_buf *out, const struct ki_worker_info *infos, long n, bool all)
{
    static const char seq[] = "kv_indexer_stream_last_seq";
    static const char age[] = "kv_indexer_stream_last_event_age_seconds";
    static const char left_out[] = "kv_indexer_stream_left_out";
    static const char up[] = "kv_indexer_worker_up";
    static const char partial[] = "kv_indexer_stream_partial";
    uint64_t now = kv_wall_ns();

    kv_metric_head(out, seq, "gauge", "Sequence number of the last batch applied");
    for (long i = 0; i < n; i++) {
        if (!infos[i].has_sequence || !all)
            continue;
        stream_labels(out, seq, &infos[i]);
        kv_buf_printf(out, "} %" PRIu64 "\n", infos[i].last_sequence);
    }
    kv_metric_head(out, age, "gauge", "Time since the last batch was applied");
    for (long i = 0; i < n; i++) {
        if (!infos[i].last_event_ns)
            continue;
        stream_labels(out, age, &infos[i]);
        kv_buf_printf(out, "} %.3f\n",
                      now > infos[i].last_event_ns ? (double)(now - infos[i].last_event_ns) / 1e9
                                                   : 0.0);
    }
    kv_metric_head(out, up, "gauge", "1 while there is a connection to the worker's publisher");
    for (long i = 0; i < n; i++) {
        stream_labels(out, up, &infos[i]);
        kv_buf_printf(out, "} %d\n", infos[i].connected);
    }
    kv_metric_head(out, partial, "gauge",
                   "1 when answers about the rank may be wrong: see stream_partial_reason");
    for (long i = 0; i < n; i++) {
        if (!infos[i].reasons && !all)
            continue;
        stream_labels(out, partial, &infos[i]);
        kv_buf_printf(out, "} %d\n", infos[i].reasons != 0);
    }
    write_reasons(out, infos, n);
    kv_metric_head(out, left_out, "gauge",
                   "Blocks and copies that limits of the index leave out: the view is partial");
    for (long i = 0; i < n; i++) {
        if (!infos[i].left_out && !all)
            continue;
        stream_labels(out, left_out, &infos[i]);
        kv_buf_printf(out, "} %" PRIu64 "\n", infos[i].left_out);
    }
}

static void write_listeners(struct kv_buf *out, const struct ki_worker_info *infos, long n)
{
    static const char *const names[] = {"dynamo_kvindexer_listeners", "kv_indexer_listeners"};
    uint64_t by_status[KI_WITHDRAWN + 1] = {0}, instances = 0;

    for (long i = 0; i < n; i++) {
        by_status[infos[i].status]++;
        instances += i == 0 || infos[i].instance != infos[i - 1].instance;
    }
    plain(out, "dynamo_kvindexer_workers", "gauge", "Number of registered worker instances",
          instances);
    for (size_t i = 0; i < KV_COUNT(names); i++) {
        kv_metric_head(out, names[i], "gauge", "Event stream listeners, by status");
        for (int s = 0; s <= KI_WITHDRAWN; s++)
            kv_buf_printf(out, "%s{status=\"%s\"} %" PRIu64 "\n", names[i],
                          ki_listener_status_name((enum ki_listener_status)s), by_status[s]);
    }
}

static void write_streams(struct kv_buf *out, struct ki_registry *registry, bool all)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(registry, &infos);

    all |= n <= SHORT_FROM;
    if (n < 0)
        return;
    write_listeners(out, infos, n);
    if (n > 0) {
        write_gauges(out, infos, n, all);
        write_counters(out, infos, n, all);
        write_skipped(out, infos, n);
        write_media(out, infos, n);
    }
    ki_worker_infos_free(infos, n);
}

static void model_labels(struct kv_buf *out, const char *name, const struct ki_model *model)
{
    kv_buf_printf(out, "%s{", name);
    kv_metric_label(out, "model", model->name);
    kv_buf_putc(out, ',');
    kv_metric_label(out, "tenant", model->tenant);
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

    kv_metric_head(out, name, "gauge",
                   "Blocks by storage tier, counted once for every rank that holds them");
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
    for (long i = 0; i < n; i++) {
        stats[i].size = sizeof(stats[i]);
        kvi_get_stats(models[i]->index, &stats[i]);
    }
    for (size_t g = 0; g < KV_COUNT(index_gauges); g++) {
        kv_metric_head(out, index_gauges[g].name, "gauge", index_gauges[g].help);
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

static void write_http(struct kv_buf *out, struct kh_http *http)
{
    struct kh_http_stats stats;

    kh_http_get_stats(http, &stats);
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

uint64_t ki_resident_bytes(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f && fscanf(f, "%*u %lu", &pages) != 1) // NOLINT(cert-err34-c): the kernel wrote it
        pages = 0;
    if (f)
        fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void write_process(struct kv_buf *out)
{
    uint64_t resident = ki_resident_bytes();

    if (resident)
        plain(out, "process_resident_memory_bytes", "gauge", "Resident memory size in bytes",
              resident);
    kv_metric_head(out, "kv_indexer_build_info", "gauge", "Always 1; the version is the label");
    kv_buf_printf(out, "kv_indexer_build_info{version=\"%s\"} 1\n", KV_VERSION);
}

void ki_telemetry_render_state(struct ki_registry *registry, struct kh_http *http, bool all,
                               struct kv_buf *out)
{
    write_indexes(out, registry);
    write_streams(out, registry, all);
    ki_event_counts_render(out);
    if (http)
        write_http(out, http);
    write_process(out);
}
