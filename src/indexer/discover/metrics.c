// SPDX-License-Identifier: Apache-2.0
/* Metrics of discovery, read at each scrape. */
#include <inttypes.h>
#include <stddef.h>

#include "base/metrics/metric_text.h"
#include "indexer/discover/discovery.h"
#include "indexer/discover/dynamo_nats.h"

static const struct kv_metric_field fields[] = {
    {"kv_indexer_discovery_workers", "gauge", "Worker ranks that the source names",
     offsetof(struct ki_source_info, workers)},
    {"kv_indexer_discovery_withdrawn", "gauge",
     "Worker ranks that the source has named, within --discover-grace",
     offsetof(struct ki_source_info, withdrawn)},
    {"kv_indexer_discovery_refused", "gauge",
     "Worker ranks of the source that can't be registered for now",
     offsetof(struct ki_source_info, refused)},
    {"kv_indexer_discovery_conflicts", "gauge",
     "Worker ranks that an earlier source tells otherwise",
     offsetof(struct ki_source_info, conflicts)},
    {"kv_indexer_discovery_left_out", "gauge", "Entries of the source that make no worker",
     offsetof(struct ki_source_info, left_out)},
    {"kv_indexer_discovery_sets_total", "counter", "Changes that the source has told",
     offsetof(struct ki_source_info, sets)},
    {"kv_indexer_discovery_failures_total", "counter", "Looks at the source that failed",
     offsetof(struct ki_source_info, failures)},
};

#define OF_NATS(field) offsetof(struct ki_dynamo_nats_stats, field)

static const struct kv_metric_field nats_fields[] = {
    {"kv_indexer_dynamo_nats_messages_total", "counter",
     "Messages on NATS that were given to the streams of workers", OF_NATS(messages)},
    {"kv_indexer_dynamo_nats_strangers_total", "counter",
     "Messages on NATS whose publisher has no record", OF_NATS(strangers)},
    {"kv_indexer_dynamo_nats_bad_messages_total", "counter",
     "Messages on NATS that are no envelopes of events", OF_NATS(bad)},
    {"kv_indexer_dynamo_nats_dropped_total", "counter",
     "Messages that came before their worker's registration, and found no room", OF_NATS(dropped)},
    {"kv_indexer_dynamo_nats_missed_total", "counter",
     "Messages received and dropped, as reading them was too slow", OF_NATS(nats.missed)},
    {"kv_indexer_dynamo_nats_connections_total", "counter",
     "Connections to the server: more than one after losses", OF_NATS(nats.connections)},
};

static void put(struct kv_buf *out, const char *name, const char *source)
{
    kv_buf_printf(out, "%s{", name);
    kv_metric_label(out, "source", source);
    kv_buf_puts(out, "} ");
}

static void render_nats(struct ki_discovery *d, struct kv_buf *out)
{
    static const char up[] = "kv_indexer_dynamo_nats_up";
    struct ki_dynamo_nats_stats stats;
    const char *name;
    size_t at = 0;

    if (!ki_discovery_nats(d, &at, &name, &stats))
        return;
    kv_metric_head(out, up, "gauge", "1 while the NATS server is connected");
    for (at = 0; ki_discovery_nats(d, &at, &name, &stats);) {
        put(out, up, name);
        kv_buf_printf(out, "%d\n", stats.nats.connected);
    }
    for (size_t f = 0; f < KV_COUNT(nats_fields); f++) {
        kv_metric_head(out, nats_fields[f].name, nats_fields[f].type, nats_fields[f].help);
        for (at = 0; ki_discovery_nats(d, &at, &name, &stats);) {
            put(out, nats_fields[f].name, name);
            kv_buf_printf(out, "%" PRIu64 "\n", kv_metric_value(&nats_fields[f], &stats));
        }
    }
}

void ki_discovery_render(struct ki_discovery *d, struct kv_buf *out)
{
    static const char up[] = "kv_indexer_discovery_up";
    struct ki_source_info info;

    if (!d)
        return;
    kv_metric_head(out, up, "gauge", "1 while the source can be read");
    for (size_t i = 0; ki_discovery_info(d, i, &info); i++) {
        put(out, up, info.name);
        kv_buf_printf(out, "%d\n", info.current);
    }
    for (size_t f = 0; f < KV_COUNT(fields); f++) {
        kv_metric_head(out, fields[f].name, fields[f].type, fields[f].help);
        for (size_t i = 0; ki_discovery_info(d, i, &info); i++) {
            put(out, fields[f].name, info.name);
            kv_buf_printf(out, "%" PRIu64 "\n", kv_metric_value(&fields[f], &info));
        }
    }
    render_nats(d, out);
}
