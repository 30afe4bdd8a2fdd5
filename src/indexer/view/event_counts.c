// SPDX-License-Identifier: Apache-2.0
/*
 * Outcomes of events, for /metrics (event_counts.h). Dashboards made for the original read them, so
 * names, labels and the meaning of each status are the original's.
 */
#include "indexer/view/event_counts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "base/metrics/metric_text.h"

static const char *const types[] = {"stored", "removed", "cleared"};
static const char *const statuses[] = {"ok", "parent_block_not_found", "block_not_found",
                                       "invalid_block", "capacity_exhausted"};

/* Relaxed: sums that nothing else depends on. One addition per batch and outcome, not per event. */
static _Atomic uint64_t applied[KI_N_EVENT_TYPES][KI_N_EVENT_STATUSES], duplicate_stores;

/* Further errors of the index are all of room: a limit, or memory. */
static enum ki_event_status status_of(long rc)
{
    switch (rc) {
    case -ENOENT:
        return KI_EVENT_NO_PARENT;
    case -EINVAL:
        return KI_EVENT_INVALID;
    default:
        return rc < 0 ? KI_EVENT_NO_ROOM : KI_EVENT_OK;
    }
}

void ki_event_counts_store(struct ki_event_counts *counts, int rc, size_t added, size_t n)
{
    counts->any = true;
    counts->applied[KI_EVENT_STORED][status_of(rc)]++;
    counts->duplicate_stores += rc == 0 && n > 0 && added == 0;
}

void ki_event_counts_named(struct ki_event_counts *counts, enum ki_event_type type, long rc,
                           size_t n)
{
    counts->any = true;
    counts->applied[type][rc < 0           ? KI_EVENT_NO_ROOM
                          : (size_t)rc < n ? KI_EVENT_NO_BLOCK
                                           : KI_EVENT_OK]++;
}

void ki_event_counts_clear(struct ki_event_counts *counts)
{
    counts->any = true;
    counts->applied[KI_EVENT_CLEARED][KI_EVENT_OK]++;
}

void ki_event_counts_add(struct ki_event_counts *counts)
{
    if (!counts->any)
        return;
    for (int t = 0; t < KI_N_EVENT_TYPES; t++)
        for (int s = 0; s < KI_N_EVENT_STATUSES; s++)
            if (counts->applied[t][s])
                atomic_fetch_add_explicit(&applied[t][s], counts->applied[t][s],
                                          memory_order_relaxed);
    if (counts->duplicate_stores)
        atomic_fetch_add_explicit(&duplicate_stores, counts->duplicate_stores,
                                  memory_order_relaxed);
    memset(counts, 0, sizeof(*counts));
}

uint64_t ki_event_counts_total(void)
{
    uint64_t total = 0;

    for (int t = 0; t < KI_N_EVENT_TYPES; t++)
        for (int s = 0; s < KI_N_EVENT_STATUSES; s++)
            total += atomic_load_explicit(&applied[t][s], memory_order_relaxed);
    return total;
}

/* Label sets appear with their first use, as in the original. */
void ki_event_counts_render(struct kv_buf *out)
{
    static const char name[] = "dynamo_kvrouter_kv_cache_events_applied";
    static const char warnings[] = "dynamo_kvrouter_kv_cache_event_warnings";

    kv_metric_head(out, name, "counter", "Total number of KV cache events applied to index");
    for (int t = 0; t < KI_N_EVENT_TYPES; t++)
        for (int s = 0; s < KI_N_EVENT_STATUSES; s++) {
            uint64_t n = atomic_load_explicit(&applied[t][s], memory_order_relaxed);

            if (n)
                kv_buf_printf(out, "%s{event_type=\"%s\",status=\"%s\"} %" PRIu64 "\n", name,
                              types[t], statuses[s], n);
        }
    kv_metric_head(out, warnings, "counter", "Total number of KV cache event warnings");
    if (atomic_load_explicit(&duplicate_stores, memory_order_relaxed))
        kv_buf_printf(out, "%s{warning_kind=\"duplicate_store\"} %" PRIu64 "\n", warnings,
                      atomic_load_explicit(&duplicate_stores, memory_order_relaxed));
}
