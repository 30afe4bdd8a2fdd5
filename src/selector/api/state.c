// SPDX-License-Identifier: Apache-2.0
/* GET /loads, /health, /ready, /replica_sync and the metrics of choices. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/metrics/metric_text.h"
#include "selector/envoy.h"
#include "selector/selector.h"

#define SERIES_MAX 512 /* workers of which each has series of its own */

/* Copy the loads of a fleet. Returns their number, or -ENOMEM. */
static long loads_of(const struct ksel_fleet *fleet, struct kvsel_load **ret)
{
    size_t n = kvsel_get_loads(fleet->books, NULL, 0);

    *ret = calloc(n + 1, sizeof(**ret));
    if (!*ret)
        return -ENOMEM;
    return (long)kvsel_get_loads(fleet->books, *ret, n);
}

/* -- loads --------------------------------------------------------------------------------------- */

static void write_loads(struct ksel *s, const struct ksel_fleet *fleet, struct kv_json_writer *w)
{
    struct kvsel_load *loads;
    long n = loads_of(fleet, &loads);

    kv_json_begin_object(w);
    kv_json_member_str(w, "model_name", fleet->model);
    kv_json_member_str(w, "routing_group", fleet->group);
    kv_json_key(w, "loads");
    kv_json_begin_array(w);
    for (long i = 0; i < n; i++) {
        kv_json_begin_object(w);
        kv_json_key(w, "worker_id");
        ksel_put_worker(s, w, loads[i].holder.worker);
        kv_json_member_u64(w, "dp_rank", loads[i].holder.rank);
        kv_json_member_u64(w, "potential_prefill_tokens", loads[i].waiting);
        kv_json_member_u64(w, "potential_decode_blocks", loads[i].blocks);
        kv_json_member_u64(w, "active_requests", loads[i].requests);
        kv_json_member_u64(w, "context_tokens", loads[i].context);
        kv_json_member_double(w, "tokens_per_second", loads[i].speed);
        kv_json_member_bool(w, "registered", loads[i].known);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
    kv_json_member_u64(w, "pending_count", 0);
    kv_json_member_u64(w, "pending_isl_tokens", 0);
    kv_json_end_object(w);
    free(loads);
}

void ksel_api_loads(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct kv_json_writer w;

    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_array(&w);
    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    for (const struct ksel_fleet *f = s->fleets; f; f = f->next)
        if (kh_request_passes(request, "model_name", f->model) &&
            kh_request_passes(request, "routing_group", f->group))
            write_loads(s, f, &w);
    pthread_mutex_unlock(&s->lock);
    kv_json_end_array(&w);
}

/* -- health -------------------------------------------------------------------------------------- */

void ksel_api_health(void *service, struct kh_request *request, struct kh_reply *reply)
{
    ki_api_health(service, request, reply);
    if (reply->status == 200) {
        reply->content_type = "application/json";
        ki_reply_ok(reply, 200);
    }
}

static void write_member(struct ksel *s, const struct ksel_fleet *fleet,
                         const struct ksel_member *member, struct kv_json_writer *w)
{
    bool draining = member->record && member->record->draining;

    kv_json_begin_object(w);
    kv_json_key(w, "worker_id");
    ksel_put_worker(s, w, member->holder.worker);
    kv_json_member_u64(w, "dp_rank", member->holder.rank);
    kv_json_member_str(w, "model_name", fleet->model);
    kv_json_member_str(w, "routing_group", fleet->group);
    kv_json_member_str(w, "lifecycle",
                       ksel_lifecycle_name(draining ? KSEL_DRAINING : KSEL_SCHEDULABLE));
    kv_json_end_object(w);
}

void ksel_api_ready(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct kv_json_writer w;
    uint64_t n;
    bool ready;

    (void)request;
    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    n = ksel_n_schedulable(s);
    ready = n > 0 && ki_service_is_ready(service);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_bool(&w, "ready", ready);
    kv_json_member_u64(&w, "schedulable_workers", n);
    kv_json_key(&w, "workers");
    kv_json_begin_array(&w);
    for (const struct ksel_fleet *f = s->fleets; f; f = f->next)
        for (size_t i = 0; i < f->n_members; i++)
            write_member(s, f, &f->members[i], &w);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    pthread_mutex_unlock(&s->lock);
    reply->status = ready ? 200 : 503;
}

/* Read the endpoint of a body into @ret. Returns false when @reply has the error. */
static bool read_endpoint(const struct kh_request *request, struct kv_buf *ret,
                          struct kh_reply *reply)
{
    struct kv_buf unescaped = KV_BUF_INIT;
    struct kv_json json;
    struct kv_str key;
    int rc;

    if (!ksel_is_json(request, reply))
        return false;
    kv_json_init(&json, request->body.p, request->body.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key)) {
        if (kv_str_eq(key, "endpoint")) {
            struct kv_str text = kv_json_str(&json, &unescaped);

            kv_buf_clear(ret);
            kv_buf_append(ret, text.p ? text.p : "", text.len);
            kv_buf_putc(ret, '\0');
        } else {
            kv_json_skip(&json);
        }
    }
    rc = kv_json_finish(&json);
    if (rc < 0)
        kh_reply_error(reply, 400, "%s", json.error.text);
    else if (!ret->len)
        kh_reply_error(reply, 422, "missing field 'endpoint'");
    else if (ret->error || unescaped.error)
        kh_reply_error(reply, 503, "out of memory");
    rc = ret->len && !ret->error && !unescaped.error ? rc : -EINVAL;
    kv_buf_fini(&unescaped);
    return rc == 0;
}

static bool is_peer(struct ki_peers *peers, const char *url)
{
    char **urls;
    long n = ki_peers_list(peers, &urls), at = 0;

    while (at < n && strcmp(urls[at], url) != 0)
        at++;
    if (n >= 0)
        ki_peers_free(urls, n);
    return at < n;
}

static void register_peer(struct ki_peers *peers, const char *url, struct kh_reply *reply)
{
    bool known = is_peer(peers, url);
    int rc = ki_peers_add(peers, url);

    if (rc == 0)
        ki_reply_ok(reply, known ? 200 : 201);
    else if (rc == -EINVAL || rc == -EMSGSIZE)
        kh_reply_error(reply, 400, "endpoint: expected " KI_PEER_URL_FORM);
    else
        kh_reply_error(reply, 503, "%s", rc == -ENOSPC ? "too many peers" : "out of memory");
}

void ksel_api_replica_sync(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_peers *peers = ((struct ki_service *)service)->peers;
    struct kv_buf url = KV_BUF_INIT;

    if (read_endpoint(request, &url, reply)) {
        if (strcmp(request->route->path, "/replica_sync/register_peer") == 0)
            register_peer(peers, url.data, reply);
        else if (ki_peers_remove(peers, url.data) < 0)
            kh_reply_error(reply, 404, "peer not found");
        else
            ki_reply_ok(reply, 200);
    }
    kv_buf_fini(&url);
}

/* -- metrics ------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *type, *help;
    size_t offset;
} counts[] = {
    {"kv_selector_bookings", "gauge", "Live bookings", offsetof(struct kvsel_stats, bookings)},
    {"kv_selector_sessions", "gauge", "Sessions that have a worker",
     offsetof(struct kvsel_stats, sessions)},
    {"kv_selector_predictions", "gauge", "Prompts that count as held before events say so",
     offsetof(struct kvsel_stats, predictions)},
    {"kv_selector_choices_total", "counter", "Workers chosen",
     offsetof(struct kvsel_stats, choices)},
    {"kv_selector_ties_total", "counter", "Choices drawn among several of least cost",
     offsetof(struct kvsel_stats, ties)},
    {"kv_selector_unfit_total", "counter", "Requests that no worker fitted",
     offsetof(struct kvsel_stats, unfit)},
    {"kv_selector_booked_total", "counter", "Bookings made", offsetof(struct kvsel_stats, booked)},
    {"kv_selector_freed_total", "counter", "Bookings freed by their clients",
     offsetof(struct kvsel_stats, freed)},
    {"kv_selector_lost_total", "counter", "Of them: the worker didn't compute the prompt",
     offsetof(struct kvsel_stats, lost)},
    {"kv_selector_expired_total", "counter", "Bookings freed after --booking-expiry",
     offsetof(struct kvsel_stats, expired)},
    {"kv_selector_predictions_confirmed_total", "counter", "Predictions that events confirmed",
     offsetof(struct kvsel_stats, announced)},
    {"kv_selector_predictions_outlived_total", "counter", "Predictions that ended by --predict",
     offsetof(struct kvsel_stats, outlived)},
};

static void labels(struct kv_buf *out, const char *name, const struct ksel_fleet *fleet)
{
    kv_buf_printf(out, "%s{", name);
    kv_metric_label(out, "model", fleet->model);
    kv_buf_putc(out, ',');
    kv_metric_label(out, "tenant", fleet->group);
}

static void render_counts(struct ksel *s, struct kv_buf *out)
{
    for (size_t i = 0; i < KV_COUNT(counts); i++) {
        kv_metric_head(out, counts[i].name, counts[i].type, counts[i].help);
        for (const struct ksel_fleet *f = s->fleets; f; f = f->next) {
            struct kvsel_stats stats = KVSEL_STATS_INIT;
            uint64_t value;

            (void)kvsel_get_stats(f->books, &stats);
            memcpy(&value, (const char *)&stats + counts[i].offset, sizeof(value));
            labels(out, counts[i].name, f);
            kv_buf_printf(out, "} %" PRIu64 "\n", value);
        }
    }
}

static void render_loads(struct ksel *s, const char *name, const char *help, size_t offset,
                         struct kv_buf *out)
{
    kv_metric_head(out, name, "gauge", help);
    for (const struct ksel_fleet *f = s->fleets; f; f = f->next) {
        struct kvsel_load *loads;
        long n = loads_of(f, &loads);

        for (long i = 0; i < n && n <= SERIES_MAX; i++) {
            char text[KI_INSTANCE_TEXT];
            uint64_t value;

            memcpy(&value, (const char *)&loads[i] + offset, sizeof(value));
            labels(out, name, f);
            kv_buf_putc(out, ',');
            kv_metric_label(
                out, "instance",
                ki_registry_instance_text(s->service->registry, loads[i].holder.worker, text));
            kv_buf_printf(out, ",dp_rank=\"%" PRIu32 "\"} %" PRIu64 "\n", loads[i].holder.rank,
                          value);
        }
        free(loads);
    }
}

static void render_plain(struct ksel *s, struct kv_buf *out)
{
    kv_metric_head(out, "kv_selector_schedulable_workers", "gauge", "Workers that may be chosen");
    kv_buf_printf(out, "kv_selector_schedulable_workers %" PRIu64 "\n", ksel_n_schedulable(s));
    kv_metric_head(out, "kv_selector_shed_total", "counter",
                   "Requests refused because of --max-waiting");
    kv_buf_printf(out, "kv_selector_shed_total %" PRIu64 "\n", s->shed);
    if (!s->log)
        return;
    kv_metric_head(out, "kv_selector_decision_log_dropped_total", "counter",
                   "Lines of the decision log that were not written");
    kv_buf_printf(out, "kv_selector_decision_log_dropped_total %" PRIu64 "\n",
                  ksel_log_dropped(s->log));
}

void ksel_render(struct ki_service *service, struct kv_buf *out)
{
    struct ksel *s = ksel_of(service);

    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    render_counts(s, out);
    render_loads(s, "kv_selector_waiting_tokens",
                 "Tokens to compute of requests without a first token",
                 offsetof(struct kvsel_load, waiting), out);
    render_loads(s, "kv_selector_context_tokens", "Tokens of running requests",
                 offsetof(struct kvsel_load, context), out);
    render_plain(s, out);
    pthread_mutex_unlock(&s->lock);
    ksel_envoy_render(s, out);
    ksel_peers_render(s, out);
}
