// SPDX-License-Identifier: Apache-2.0
/**
 * The last hour in memory: a sample each --history-interval, KI_HISTORY_SAMPLES of them.
 *
 *     main loop ── ki_history_tick ──► ring of samples ──► GET /history (any thread)
 *
 * A sample has what happened since the one before (queries, their durations, events) and how things are
 * at its time (blocks, memory, streams). Older samples are overwritten: the memory is fixed, 130 KiB.
 */
#ifndef KV_INDEXER_HISTORY_H
#define KV_INDEXER_HISTORY_H

#include <stdint.h>

#include "indexer/fleet.h"
#include "indexer/telemetry.h"

#define KI_HISTORY_SAMPLES 360 /* an hour at the default interval of 10 s */

struct ki_sample {
    uint64_t wall_ms;               /* its end, since 1970 */
    uint64_t span_ms;               /* time since the sample before */
    struct ki_query_counts queries; /* in that time */
    uint64_t events;                /* events applied in that time, of any outcome */
    uint64_t blocks, holder_blocks, index_bytes, resident_bytes;
    uint64_t tier_blocks[KV_N_TIERS];
    uint32_t workers, ranks, active, partial;
};

struct ki_history;

/** Create an empty history with a sample each @interval_ms (0: none ever). Returns 0 or -ENOMEM. */
int ki_history_create(uint64_t interval_ms, struct ki_history **ret);
void ki_history_destroy(struct ki_history *history);

/**
 * Take a sample when one is due. Returns the time of the next one, monotonic in ns; UINT64_MAX: never.
 * One thread only.
 */
uint64_t ki_history_tick(struct ki_history *history, struct ki_telemetry *telemetry,
                         struct ki_registry *registry, uint64_t now_ns);

/**
 * Copy to @ret, which has room for KI_HISTORY_SAMPLES, the samples from number *@from on, oldest first.
 * Samples are numbered from 0; *@from becomes the number of the first one copied. Returns how many. Any
 * thread.
 */
size_t ki_history_read(struct ki_history *history, uint64_t *from, struct ki_sample *ret);

#endif
