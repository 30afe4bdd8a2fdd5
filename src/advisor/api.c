// SPDX-License-Identifier: Apache-2.0
/* Endpoints of kv-advisor, and its metrics. */
#include <inttypes.h>

#include "advisor/advice.h"
#include "advisor/explain.h"
#include "advisor/plan.h"
#include "advisor/service.h"
#include "base/core/clock.h"
#include "base/metrics/metric_text.h"

static uint32_t now_s(void)
{
    return (uint32_t)(kv_wall_ns() / KV_NS_PER_S);
}

static void ok(struct kh_reply *reply)
{
    kv_buf_puts(&reply->body, "{\"status\":\"ok\"}");
}

static void health(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg;
    (void)request;
    ok(reply);
}

static void ready(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;

    (void)request;
    if (atomic_load(&service->ready))
        ok(reply);
    else
        kh_reply_error(reply, 503, "the members have not been listed yet");
}

static void explain(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;
    struct kv_json_writer w;
    uint8_t key[KVA_KEY];
    struct kv_str hash;
    bool found;

    if (!kh_request_param(request, "hash", &hash) || !kva_parse_key(hash, key)) {
        kh_reply_error(reply, 400,
                       "expected ?hash= and 32 hexadecimal digits: a blob's key in the "
                       "store");
        return;
    }
    kv_json_writer_init(&w, &reply->body);
    pthread_mutex_lock(&service->world.lock);
    found = kva_explain(&service->volumes, service->world.index, service->options->policy, key,
                        now_s(), &w);
    pthread_mutex_unlock(&service->world.lock);
    if (!found)
        kh_reply_error(reply, 404, "no member has this blob, and no publisher has told of it");
}

static void get_stats(struct kva_service *service, struct kva_index_stats *index,
                      struct kva_feed_stats *feed)
{
    pthread_mutex_lock(&service->world.lock);
    kva_index_get_stats(service->world.index, index);
    kva_feed_get_stats(service->world.feed, feed);
    pthread_mutex_unlock(&service->world.lock);
}

static void plan(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;
    const struct kva_packing packing = kva_options_packing(service->options);
    struct kva_index_stats stats;
    struct kva_feed_stats feed;
    struct kv_json_writer w;
    struct kva_plan plan;

    (void)request;
    kva_plan_make(&service->volumes, &service->world,
                  (uint32_t)(service->options->reclaim_ms / 1000), &packing, &plan);
    get_stats(service, &stats, &feed);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_bool(&w, "dry_run", service->options->dry_run);
    kv_json_member_bool(&w, "leader", !service->options->dry_run && kva_leader_is(service->leader));
    kv_json_member_str(&w, "policy", service->options->policy);
    kva_plan_json(&service->volumes, &stats, &plan, &w);
    kv_json_end_object(&w);
}

static void advise(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;
    const struct kva_options *o = service->options;
    const struct kva_advice_terms terms = {.prefill = (double)o->prefill,
                                           .gpu_hour = (double)o->gpu_hour_nano / 1e9,
                                           .block_tokens = (double)o->block_tokens,
                                           .share = (unsigned)o->share};
    struct kva_advice *copy = NULL;
    struct kv_json_writer w;
    int rc;

    (void)request;
    pthread_mutex_lock(&service->world.lock);
    kva_feed_flush(service->world.feed);
    rc = kva_advice_copy(service->advice, &copy);
    pthread_mutex_unlock(&service->world.lock);
    if (rc < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kva_advice_json(copy, &service->volumes, &terms, &w);
    kv_json_end_object(&w);
    kva_advice_destroy(copy);
}

static void scan(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)request;
    kva_service_scan(arg);
    reply->status = 202;
    ok(reply);
}

static void reopen(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;
    struct kv_error error = {0};

    (void)request;
    if (service->access_log && kh_access_log_reopen(service->access_log, &error) < 0)
        kh_reply_error(reply, 500, "%s", error.text);
    else
        ok(reply);
}

/* -- metrics ----------------------------------------------------------------------------------- */

/* A family with one value for each member. */
static void by_member(const struct kva_service *service, struct kv_buf *out, const char *name,
                      const char *help, const char *type, const uint64_t *values, size_t stride)
{
    kv_metric_head(out, name, type, help);
    for (size_t m = 0; m < service->volumes.config.n_members; m++)
        kv_buf_printf(out, "%s{member=\"%s\"} %" PRIu64 "\n", name,
                      service->volumes.config.members[m].name,
                      *(const uint64_t *)((const char *)values + m * stride));
}

static void one(struct kv_buf *out, const char *name, const char *help, const char *type,
                uint64_t value)
{
    kv_metric_head(out, name, type, help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

static void put_index(const struct kva_service *service, const struct kva_index_stats *s,
                      struct kv_buf *out)
{
    const size_t step = sizeof(s->members[0]);

    one(out, "kv_advisor_blobs", "Blobs tracked", "gauge", s->blocks);
    one(out, "kv_advisor_index_bytes", "Memory of the index", "gauge", s->memory);
    one(out, "kv_advisor_refused_total", "Blobs left out: --max-blobs, or no memory", "counter",
        s->refused);
    one(out, "kv_advisor_references_total", "Uses of blobs", "counter", s->clock);
    by_member(service, out, "kv_advisor_member_blobs", "Blobs that the member has", "gauge",
              &s->members[0].have, step);
    by_member(service, out, "kv_advisor_member_bytes", "Bytes of blobs that the member has",
              "gauge", &s->members[0].have_bytes, step);
    by_member(service, out, "kv_advisor_wanted_blobs", "Blobs that the member shall have", "gauge",
              &s->members[0].want, step);
    by_member(service, out, "kv_advisor_wanted_bytes", "Bytes that the member shall have", "gauge",
              &s->members[0].want_bytes, step);
    by_member(service, out, "kv_advisor_other_bytes", "Bytes of blobs that can't be tracked",
              "gauge", &s->members[0].reserved, step);
    by_member(service, out, "kv_advisor_uses_total", "Uses of blobs that the member was to have",
              "counter", &s->members[0].hits, step);
}

static void put_mover(const struct kva_service *service, struct kv_buf *out)
{
    struct kva_mover *mover = atomic_load(&service->mover);
    struct kva_mover_stats s = {.passes = 0};

    if (mover)
        kva_mover_get_stats(mover, &s);
    by_member(service, out, "kv_advisor_copied_blobs_total", "Blobs copied into the member",
              "counter", s.copied, sizeof(s.copied[0]));
    by_member(service, out, "kv_advisor_copied_bytes_total", "Bytes copied into the member",
              "counter", s.copied_bytes, sizeof(s.copied_bytes[0]));
    by_member(service, out, "kv_advisor_removed_blobs_total", "Copies removed from the member",
              "counter", s.removed, sizeof(s.removed[0]));
    one(out, "kv_advisor_deleted_blobs_total", "Blobs that publishers had removed, deleted",
        "counter", s.deleted);
    one(out, "kv_advisor_bad_blobs_total", "Sources of copies that didn't verify", "counter",
        s.bad);
    one(out, "kv_advisor_failed_total", "Steps that failed, and are tried again", "counter",
        s.failed);
    one(out, "kv_advisor_lingering_blobs", "Blobs whose second copy is removed soon", "gauge",
        s.lingering);
    one(out, "kv_advisor_packs_written_total", "Packs written", "counter", s.packer.packs);
    one(out, "kv_advisor_packed_blobs_total", "Blobs written into packs", "counter",
        s.packer.blobs);
    one(out, "kv_advisor_packed_bytes_total", "Bytes written into packs", "counter",
        s.packer.bytes);
    one(out, "kv_advisor_dropped_blobs_total", "Single blobs removed: a pack has them", "counter",
        s.packer.dropped);
    one(out, "kv_advisor_packs_rewritten_total",
        "Packs with few live blobs that were rewritten or removed", "counter", s.packer.rewritten);
    one(out, "kv_advisor_packs_swept_total", "Half-written packs removed", "counter",
        s.packer.strays);
    one(out, "kv_advisor_packing_failed_total", "Steps of packing that failed, and are tried again",
        "counter", s.packer.failed);
    one(out, "kv_advisor_leader", "1 while this advisor may move blobs, as far as --lock says",
        "gauge", mover && kva_leader_is(service->leader));
    one(out, "kv_advisor_quiet", "1 in quiet hours", "gauge", s.quiet);
    one(out, "kv_advisor_idle_passes_total", "Passes over the index without anything to do",
        "counter", s.passes);
}

static void put_events(const struct kva_service *service, const struct kva_feed_stats *feed,
                       struct kv_buf *out)
{
    struct kvp_follow_stats s = {.publishers = 0};

    if (service->follow)
        kva_follow_get_stats(service->follow, &s);
    one(out, "kv_advisor_records_total", "Records of publishers", "counter", feed->records);
    one(out, "kv_advisor_stores_total", "Records of blobs stored", "counter", feed->stores);
    one(out, "kv_advisor_onboarded_total", "Uses of blobs that records told of", "counter",
        feed->uses);
    one(out, "kv_advisor_removals_total", "Records of blobs removed", "counter", feed->removals);
    one(out, "kv_advisor_unsized_total", "Records without size or fingerprint, left out", "counter",
        feed->unsized);
    one(out, "kv_advisor_publishers", "Publishers heard of", "gauge", feed->publishers);
    one(out, "kv_advisor_whole_publishers", "Publishers whose blobs are all told", "gauge",
        feed->whole);
    one(out, "kv_advisor_nats_connected", "1 while there is a connection", "gauge",
        s.nats.connected);
    one(out, "kv_advisor_gaps_total", "Gaps in the messages' numbers", "counter", s.gaps);
    one(out, "kv_advisor_snapshots_total", "Snapshots of publishers", "counter", s.snapshots);
}

static void metrics(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kva_service *service = arg;
    struct kva_index_stats stats;
    struct kva_feed_stats feed;

    (void)request;
    get_stats(service, &stats, &feed);
    reply->content_type = "text/plain; version=0.0.4";
    put_index(service, &stats, &reply->body);
    put_mover(service, &reply->body);
    put_events(service, &feed, &reply->body);
    one(&reply->body, "kv_advisor_scans_total", "Listings of all members", "counter",
        atomic_load(&service->volumes.scans));
    kv_metric_head(&reply->body, "kv_advisor_state_pause_seconds", "gauge",
                   "Time for which the last save of the state held up events and moves");
    kv_buf_printf(&reply->body, "kv_advisor_state_pause_seconds %.6f\n",
                  (double)atomic_load(&service->pause_ns) / 1e9);
    one(&reply->body, "kv_advisor_unlisted_members", "Members that the last scan couldn't list",
        "gauge", atomic_load(&service->volumes.unlisted));
}

static const struct kh_route routes[] = {
    {"GET", "/health", health, 0, KH_ROUTE_OPEN},
    {"GET", "/ready", ready, 0, KH_ROUTE_OPEN},
    {"GET", "/explain", explain, 0, 0},
    {"GET", "/plan", plan, 0, 0},
    {"GET", "/advise", advise, 0, 0},
    {"POST", "/scan", scan, 65536, 0},
    {"POST", "/reopen_logs", reopen, 65536, 0},
    {"GET", "/metrics", metrics, 0, 0},
};

const struct kh_route *kva_routes(size_t *ret_n)
{
    *ret_n = KV_COUNT(routes);
    return routes;
}
