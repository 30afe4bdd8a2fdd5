// SPDX-License-Identifier: Apache-2.0
/* GET /overview and /history: the service at a glance, now and over the last hour. */
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/json/json.h"
#include "event/router/router_event.h" /* kve_tier_name */
#include "indexer/fleet.h"
#include "indexer/history.h"
#include "indexer/model/model.h"
#include "indexer/service.h"

#ifndef KV_VERSION
#define KV_VERSION "unknown"
#endif

static void write_tiers(const uint64_t blocks[KV_N_TIERS], struct kv_json_writer *w)
{
    kv_json_key(w, "tier_blocks");
    kv_json_begin_object(w);
    for (int t = 0; t < KV_N_TIERS; t++)
        kv_json_member_u64(w, kve_tier_name((enum kv_tier)t), blocks[t]);
    kv_json_end_object(w);
}

/* -- now --------------------------------------------------------------------------------------- */

static void write_fleet(const struct ki_fleet *fleet, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "workers", fleet->workers);
    kv_json_member_u64(w, "ranks", fleet->ranks);
    kv_json_key(w, "streams");
    kv_json_begin_object(w);
    for (int s = 0; s <= KI_WITHDRAWN; s++)
        kv_json_member_u64(w, ki_listener_status_name((enum ki_listener_status)s),
                           fleet->by_status[s]);
    kv_json_end_object(w);
    kv_json_member_u64(w, "unconnected_ranks", fleet->unconnected);
    kv_json_member_u64(w, "partial_ranks", fleet->partial);
    kv_json_key(w, "partial_reasons");
    kv_json_begin_object(w);
    for (int i = 0; i < KI_N_REASONS; i++) {
        const struct ki_reason_info *reason = ki_reason_info((enum ki_reason)i);

        if (!fleet->with_reason[i])
            continue;
        kv_json_key(w, reason->name);
        kv_json_begin_object(w);
        kv_json_member_u64(w, "ranks", fleet->with_reason[i]);
        kv_json_member_str(w, "set_by", reason->set_by);
        kv_json_member_str(w, "ended_by", reason->ended_by);
        kv_json_end_object(w);
    }
    kv_json_end_object(w);
}

static void write_model(const struct ki_model *model, struct kv_json_writer *w)
{
    struct kvi_stats stats = KVI_STATS_INIT;

    kvi_get_stats(model->index, &stats);
    kv_json_begin_object(w);
    kv_json_member_str(w, "model_name", model->name);
    kv_json_member_str(w, "tenant_id", model->tenant);
    kv_json_member_u64(w, "block_size", model->block_size);
    kv_json_member_u64(w, "blocks", stats.blocks);
    kv_json_member_u64(w, "holder_blocks", stats.holder_blocks);
    kv_json_member_u64(w, "holders", stats.holders);
    kv_json_member_u64(w, "chains", stats.chains);
    kv_json_member_u64(w, "parked", stats.parked);
    kv_json_member_u64(w, "bytes", stats.bytes);
    write_tiers(stats.tier_blocks, w);
    kv_json_end_object(w);
}

static void write_models(struct ki_service *service, struct kv_json_writer *w)
{
    struct ki_model **models;
    long n = ki_registry_models(service->registry, &models);

    kv_json_key(w, "models");
    kv_json_begin_array(w);
    for (long i = 0; i < n; i++) {
        write_model(models[i], w);
        ki_model_release(models[i]);
    }
    kv_json_end_array(w);
    if (n >= 0)
        free(models);
}

/* Write a quantile in milliseconds, null when there was no query. */
static void write_quantile(const char *key, const struct ki_query_counts *queries, double q,
                           struct kv_json_writer *w)
{
    double seconds = ki_latency_quantile(queries->latency, q);

    kv_json_key(w, key);
    if (seconds < 0)
        kv_json_put_null(w);
    else
        kv_json_put_double(w, seconds * 1000);
}

static void write_queries(const struct ki_query_counts *queries, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "queries", queries->hits + queries->misses);
    kv_json_member_u64(w, "hits", queries->hits);
    kv_json_member_u64(w, "query_blocks", queries->blocks);
    kv_json_member_u64(w, "matched_blocks", queries->matched);
    write_quantile("p50_ms", queries, 0.5, w);
    write_quantile("p99_ms", queries, 0.99, w);
}

void ki_api_overview(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_query_counts queries;
    struct ki_worker_info *infos;
    struct kv_json_writer w;
    struct ki_fleet fleet;
    long n;

    if (!request
             ->may_wait) { /* thousands of ranks take milliseconds, and queries don't wait for that */
        reply->rerun = true;
        return;
    }
    n = ki_registry_workers(service->registry, &infos);
    if (n < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    ki_fleet_sum(infos, n, &fleet);
    ki_worker_infos_free(infos, n);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "service", "kv-indexer");
    kv_json_member_str(&w, "version", KV_VERSION);
    kv_json_member_u64(&w, "started_ms", service->started_wall_ns / KV_NS_PER_MS);
    kv_json_member_u64(&w, "now_ms", kv_wall_ns() / KV_NS_PER_MS);
    kv_json_member_u64(&w, "resident_bytes", ki_resident_bytes());
    write_fleet(&fleet, &w);
    write_models(service, &w);
    ki_telemetry_queries(service->telemetry, &queries);
    kv_json_key(&w, "since_start");
    kv_json_begin_object(&w);
    write_queries(&queries, &w);
    kv_json_end_object(&w);
    kv_json_end_object(&w);
}

/* -- the last hour ----------------------------------------------------------------------------- */

static void write_sample(const struct ki_sample *sample, struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    kv_json_member_u64(w, "time_ms", sample->wall_ms);
    kv_json_member_u64(w, "span_ms", sample->span_ms);
    write_queries(&sample->queries, w);
    kv_json_member_u64(w, "events", sample->events);
    kv_json_member_u64(w, "blocks", sample->blocks);
    kv_json_member_u64(w, "holder_blocks", sample->holder_blocks);
    write_tiers(sample->tier_blocks, w);
    kv_json_member_u64(w, "index_bytes", sample->index_bytes);
    kv_json_member_u64(w, "resident_bytes", sample->resident_bytes);
    kv_json_member_u64(w, "workers", sample->workers);
    kv_json_member_u64(w, "ranks", sample->ranks);
    kv_json_member_u64(w, "active_ranks", sample->active);
    kv_json_member_u64(w, "partial_ranks", sample->partial);
    kv_json_end_object(w);
}

/* Answer with the samples from number ?from= on: a page asks for those that it hasn't seen yet. */
void ki_api_history(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_sample *samples;
    struct kv_json_writer w;
    uint64_t from = 0;
    size_t n;

    if (!kh_request_u64(request, "from", &from)) {
        kh_reply_error(reply, 400, "from is the number of a sample");
        return;
    }
    samples = malloc(KI_HISTORY_SAMPLES * sizeof(*samples));
    if (!samples) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    n = ki_history_read(service->history, &from, samples);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_u64(&w, "interval_ms", service->options->history_interval_ms);
    kv_json_member_u64(&w, "from", from);
    kv_json_member_u64(&w, "next", from + n);
    kv_json_key(&w, "samples");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < n; i++)
        write_sample(&samples[i], &w);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    free(samples);
}
