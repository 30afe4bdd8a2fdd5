// SPDX-License-Identifier: Apache-2.0
#include "indexer/history.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "indexer/view/event_counts.h"

struct ki_history {
    uint64_t interval_ns;
    /* For the thread that samples. */
    uint64_t last_ns; /* time of the last sample, or of the start */
    struct ki_query_counts last_queries;
    uint64_t last_events;
    pthread_mutex_t lock; /* guards the fields below */
    uint64_t n;           /* samples so far; number i lies at i % KI_HISTORY_SAMPLES */
    struct ki_sample items[KI_HISTORY_SAMPLES];
};

int ki_history_create(uint64_t interval_ms, struct ki_history **ret)
{
    struct ki_history *history = calloc(1, sizeof(*history));

    if (!history)
        return -ENOMEM;
    pthread_mutex_init(&history->lock, NULL);
    history->interval_ns = interval_ms * KV_NS_PER_MS;
    history->last_ns = kv_now_ns();
    history->last_events = ki_event_counts_total();
    *ret = history;
    return 0;
}

void ki_history_destroy(struct ki_history *history)
{
    if (!history)
        return;
    pthread_mutex_destroy(&history->lock);
    free(history);
}

static struct ki_query_counts since(const struct ki_query_counts *now,
                                    const struct ki_query_counts *before)
{
    struct ki_query_counts d = {now->hits - before->hits,
                                now->misses - before->misses,
                                now->blocks - before->blocks,
                                now->matched - before->matched,
                                {0}};

    for (size_t i = 0; i < KI_N_LATENCIES; i++)
        d.latency[i] = now->latency[i] - before->latency[i];
    return d;
}

static void read_state(struct ki_registry *registry, struct ki_sample *sample)
{
    struct ki_worker_info *infos;
    struct ki_index_sums sums;
    struct ki_fleet fleet;
    long n = ki_registry_workers(registry, &infos);

    ki_fleet_sum(infos, n, &fleet);
    if (n >= 0)
        ki_worker_infos_free(infos, n);
    ki_index_sum(registry, &sums);
    sample->workers = (uint32_t)fleet.workers;
    sample->ranks = (uint32_t)fleet.ranks;
    sample->active = (uint32_t)fleet.by_status[KI_ACTIVE];
    sample->partial = (uint32_t)fleet.partial;
    sample->blocks = sums.blocks;
    sample->holder_blocks = sums.holder_blocks;
    sample->index_bytes = sums.bytes;
    memcpy(sample->tier_blocks, sums.tier_blocks, sizeof(sums.tier_blocks));
    sample->resident_bytes = ki_resident_bytes();
}

uint64_t ki_history_tick(struct ki_history *history, struct ki_telemetry *telemetry,
                         struct ki_registry *registry, uint64_t now_ns)
{
    struct ki_query_counts queries;
    struct ki_sample sample = {0};
    uint64_t events;

    if (!history->interval_ns)
        return UINT64_MAX;
    if (now_ns < history->last_ns + history->interval_ns)
        return history->last_ns + history->interval_ns;
    ki_telemetry_queries(telemetry, &queries);
    events = ki_event_counts_total();
    sample.wall_ms = kv_wall_ns() / KV_NS_PER_MS;
    sample.span_ms = (now_ns - history->last_ns) / KV_NS_PER_MS;
    sample.queries = since(&queries, &history->last_queries);
    sample.events = events - history->last_events;
    read_state(registry, &sample);
    history->last_queries = queries;
    history->last_events = events;
    history->last_ns = now_ns;
    pthread_mutex_lock(&history->lock);
    history->items[history->n++ % KI_HISTORY_SAMPLES] = sample;
    pthread_mutex_unlock(&history->lock);
    return now_ns + history->interval_ns;
}

size_t ki_history_read(struct ki_history *history, uint64_t *from, struct ki_sample *ret)
{
    size_t n = 0;

    pthread_mutex_lock(&history->lock);
    if (history->n > KI_HISTORY_SAMPLES)
        *from = KV_MAX(*from, history->n - KI_HISTORY_SAMPLES);
    *from = KV_MIN(*from, history->n);
    for (uint64_t i = *from; i < history->n; i++)
        ret[n++] = history->items[i % KI_HISTORY_SAMPLES];
    pthread_mutex_unlock(&history->lock);
    return n;
}
