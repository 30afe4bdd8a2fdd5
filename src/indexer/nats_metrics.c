// SPDX-License-Identifier: Apache-2.0
/* Metrics of --nats, read at each scrape: sums over all publishers. */
#include <inttypes.h>
#include <stddef.h>

#include "base/core/error.h"
#include "base/metrics/metric_text.h"
#include "indexer/nats.h"

#define OF(field) offsetof(struct kvp_follow_stats, field)

static const struct kv_metric_field fields[] = {
    {"kv_indexer_nats_records_total", "counter", "Records of block managers taken over NATS",
     OF(records)},
    {"kv_indexer_nats_gaps_total", "counter",
     "Missing messages that the next one's number showed: each asks for a snapshot", OF(gaps)},
    {"kv_indexer_nats_restarts_total", "counter", "Publishers that began anew", OF(restarts)},
    {"kv_indexer_nats_snapshots_asked_total", "counter", "Snapshots asked for", OF(asked)},
    {"kv_indexer_nats_snapshots_total", "counter", "Snapshots that came to their end",
     OF(snapshots)},
    {"kv_indexer_nats_bad_messages_total", "counter",
     "Messages that are none of the event plane, or on another's subject", OF(bad)},
    {"kv_indexer_nats_refused_messages_total", "counter",
     "Messages of publishers for which there was no place or memory", OF(refused)},
    {"kv_indexer_nats_unwanted_messages_total", "counter",
     "Messages of publishers whose subject names no worker, or whose worker is leaving",
     OF(unwanted)},
    {"kv_indexer_nats_twins_total", "counter",
     "Times that a second publisher of one subject was heard", OF(twins)},
    {"kv_indexer_nats_overflows_total", "counter",
     "Times that messages behind a snapshot request found no room", OF(overflows)},
    {"kv_indexer_nats_buffered_bytes", "gauge", "Messages that wait for a snapshot",
     OF(buffered_bytes)},
    {"kv_indexer_nats_received_total", "counter", "Messages received", OF(nats.received)},
    {"kv_indexer_nats_missed_total", "counter",
     "Messages received and dropped, as reading them was too slow", OF(nats.missed)},
    {"kv_indexer_nats_connections_total", "counter",
     "Connections to the server: more than one after losses", OF(nats.connections)},
};

static void put(struct kv_buf *out, const char *name, const char *help, uint64_t value)
{
    kv_metric_head(out, name, "gauge", help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

void ki_nats_render(struct ki_nats *nats, struct kv_buf *out)
{
    struct kvp_follow_stats stats;

    if (!nats)
        return;
    ki_nats_get_stats(nats, &stats);
    put(out, "kv_indexer_nats_up", "1 while the server is connected", stats.nats.connected);
    put(out, "kv_indexer_nats_publishers", "Publishers that are followed", stats.publishers);
    put(out, "kv_indexer_nats_publishers_whole", "Of these, with a whole view", stats.whole);
    for (size_t i = 0; i < KV_COUNT(fields); i++) {
        kv_metric_head(out, fields[i].name, fields[i].type, fields[i].help);
        kv_buf_printf(out, "%s %" PRIu64 "\n", fields[i].name, kv_metric_value(&fields[i], &stats));
    }
}
