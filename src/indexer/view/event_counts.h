// SPDX-License-Identifier: Apache-2.0
/**
 * Count events by outcome, under the names and labels of the original's metrics
 * (dynamo_kvrouter_kv_cache_events_applied, ..._event_warnings). The sums belong to the process and
 * outlive registrations. An event counts once for each operation that the reader makes of it.
 */
#ifndef KV_INDEXER_VIEW_EVENT_COUNTS_H
#define KV_INDEXER_VIEW_EVENT_COUNTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

enum ki_event_type { KI_EVENT_STORED, KI_EVENT_REMOVED, KI_EVENT_CLEARED, KI_N_EVENT_TYPES };

enum ki_event_status {
    KI_EVENT_OK,
    KI_EVENT_NO_PARENT, /* the parent of stored blocks is unknown */
    KI_EVENT_NO_BLOCK,  /* a removed or offloaded block is unknown */
    KI_EVENT_INVALID,
    KI_EVENT_NO_ROOM, /* the index, or memory, is full */
    KI_N_EVENT_STATUSES
};

/** Outcomes of one batch. Zero-initialise. */
struct ki_event_counts {
    uint32_t applied[KI_N_EVENT_TYPES][KI_N_EVENT_STATUSES];
    uint32_t duplicate_stores;
    bool any; /* some outcome was noted */
};

/**
 * Note a stored event: kvi_store's return value and, on success, whether all blocks were there
 * already.
 */
void ki_event_counts_store(struct ki_event_counts *counts, int rc, size_t added, size_t n);
/**
 * Note the hashes that an event names: the return value of kvi_remove or kvi_store_known for @n of
 * them.
 */
void ki_event_counts_named(struct ki_event_counts *counts, enum ki_event_type type, long rc,
                           size_t n);
void ki_event_counts_clear(struct ki_event_counts *counts);

/** Add a batch's outcomes to the process's and reset them. Thread-safe, except for @counts. */
void ki_event_counts_add(struct ki_event_counts *counts);
/** Return how many events this process has applied or tried to, of any outcome. Any thread. */
uint64_t ki_event_counts_total(void);
/** Append both families to an exposition. */
void ki_event_counts_render(struct kv_buf *out);

#endif
