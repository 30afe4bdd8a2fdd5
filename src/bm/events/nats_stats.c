// SPDX-License-Identifier: Apache-2.0
/* Counters of the NATS sink, as a struct and as Prometheus text. */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>

#include "base/core/error.h"
#include "base/metrics/metric_text.h"
#include "bm/events/nats_sink.h"

#define FIELD(field) offsetof(struct kvbm_nats_stats, field)

static const struct kv_metric_field fields[] = {
    {"kvbm_nats_records_total", "counter", "Events queued for NATS.", FIELD(records)},
    {"kvbm_nats_messages_total", "counter", "Messages queued for NATS.", FIELD(messages)},
    {"kvbm_nats_bytes_total", "counter", "Bytes of these messages.", FIELD(bytes)},
    {"kvbm_nats_lost_total", "counter", "Events lost in the event manager's queue.", FIELD(lost)},
    {"kvbm_nats_dropped_total", "counter",
     "Events in messages that the client's queue had no room for.", FIELD(dropped)},
    {"kvbm_nats_forgotten_total", "counter",
     "Stored blocks whose prefix and tokens are not remembered for want of room.",
     FIELD(forgotten)},
    {"kvbm_nats_snapshots_total", "counter", "Snapshots sent to the end.", FIELD(snapshots)},
    {"kvbm_nats_snapshots_failed_total", "counter", "Snapshots given up.", FIELD(snapshots_failed)},
    {"kvbm_nats_queued_bytes", "gauge", "Messages that wait for the server.", FIELD(queued_bytes)},
    {"kvbm_nats_connections_total", "counter", "Connections made to servers.", FIELD(connections)},
};

int kvbm_nats_get_stats(struct kvbm_nats_sink *sink, struct kvbm_nats_stats *ret)
{
    struct kvbm_nats_stats stats;
    struct kvp_nats_stats client;

    if (!sink || !kv_sized(ret, "kvbm_nats_stats"))
        return -EINVAL;
    kvp_nats_get_stats(sink->nats, &client);
    pthread_mutex_lock(&sink->lock);
    stats = sink->stats;
    pthread_mutex_unlock(&sink->lock);
    stats.queued_bytes = client.queued_bytes;
    stats.connections = client.connections;
    stats.connected = client.connected;
    KV_GIVE(ret, &stats);
    return 0;
}

static void put_labelled(struct kv_buf *out, const struct kvbm_nats_sink *sink, const char *name,
                         uint64_t value)
{
    kv_buf_puts(out, name);
    kv_buf_putc(out, '{');
    kv_metric_label(out, "publisher", sink->header.publisher);
    kv_buf_printf(out, "} %" PRIu64 "\n", value);
}

long kvbm_nats_metrics(struct kvbm_nats_sink *sink, char *to, size_t cap)
{
    static const char up[] = "kvbm_nats_connected";
    struct kvbm_nats_stats stats = KVBM_NATS_STATS_INIT;
    struct kv_buf out = KV_BUF_INIT;
    int err = cap && !to ? -EINVAL : kvbm_nats_get_stats(sink, &stats);

    if (err < 0)
        return err;
    for (size_t i = 0; i < KV_COUNT(fields); i++) {
        kv_metric_head(&out, fields[i].name, fields[i].type, fields[i].help);
        put_labelled(&out, sink, fields[i].name, kv_metric_value(&fields[i], &stats));
    }
    kv_metric_head(&out, up, "gauge", "1: a server is connected.");
    put_labelled(&out, sink, up, stats.connected);
    return kv_metric_give(&out, to, cap);
}
