// SPDX-License-Identifier: Apache-2.0
/* Metrics of discovery, read at each scrape. */
#include <inttypes.h>
#include <stddef.h>

#include "base/metrics/metric_text.h"
#include "indexer/discover/discovery.h"

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

static void put(struct kv_buf *out, const char *name, const struct ki_source_info *info)
{
    kv_buf_printf(out, "%s{", name);
    kv_metric_label(out, "source", info->name);
    kv_buf_puts(out, "} ");
}

void ki_discovery_render(struct ki_discovery *d, struct kv_buf *out)
{
    static const char up[] = "kv_indexer_discovery_up";
    struct ki_source_info info;

    if (!d)
        return;
    kv_metric_head(out, up, "gauge", "1 while the source can be read");
    for (size_t i = 0; ki_discovery_info(d, i, &info); i++) {
        put(out, up, &info);
        kv_buf_printf(out, "%d\n", info.current);
    }
    for (size_t f = 0; f < KV_COUNT(fields); f++) {
        kv_metric_head(out, fields[f].name, fields[f].type, fields[f].help);
        for (size_t i = 0; ki_discovery_info(d, i, &info); i++) {
            put(out, fields[f].name, &info);
            kv_buf_printf(out, "%" PRIu64 "\n", kv_metric_value(&fields[f], &info));
        }
    }
}
