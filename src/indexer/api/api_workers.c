// SPDX-License-Identifier: Apache-2.0
/* GET /workers: all of them, or a page of those that a person looks for. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/args/args.h"
#include "base/core/clock.h"
#include "base/json/json.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/explain.h"
#include "indexer/api/page.h"
#include "indexer/fleet.h"
#include "indexer/service.h"

/* Return the status of an instance: that of the rank that most needs attention. */
static enum ki_listener_status worst(const struct ki_worker_info *infos, long n)
{
    static const int order[] = {[KI_PAUSED] = 0,  [KI_ACTIVE] = 1, [KI_REPLAYING] = 2,
                                [KI_PENDING] = 3, [KI_FAILED] = 4, [KI_WITHDRAWN] = 5};
    enum ki_listener_status status = infos[0].status;

    for (long i = 1; i < n; i++)
        if (order[infos[i].status] > order[status])
            status = infos[i].status;
    return status;
}

/* Write what arrived and doesn't count, where there is any. */
static void write_left_out(struct kv_json_writer *w, const struct ki_worker_info *info)
{
    if (info->malformed)
        kv_json_member_u64(w, "malformed", info->malformed);
    if (info->unnumbered)
        kv_json_member_bool(w, "unnumbered", true);
    if (info->event_block_size)
        kv_json_member_u64(w, "event_block_size", info->event_block_size);
    ki_explain_skipped(w, info->skipped, &info->unknown_media);
}

static uint64_t age_ms(uint64_t wall_ns)
{
    uint64_t now = kv_wall_ns();

    return now > wall_ns ? (now - wall_ns) / KV_NS_PER_MS : 0;
}

static void write_listener(struct kv_json_writer *w, const struct ki_worker_info *info)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "endpoint", info->endpoint);
    if (info->replay_endpoint)
        kv_json_member_str(w, "replay_endpoint", info->replay_endpoint);
    kv_json_member_str(w, "status", ki_listener_status_name(info->status));
    kv_json_member_bool(w, "connected", info->connected);
    if (!info->connected)
        kv_json_member_u64(w, "disconnected_ms", info->absent_ms);
    if (info->last_error)
        kv_json_member_str(w, "last_error", info->last_error);
    if (info->has_sequence)
        kv_json_member_u64(w, "last_seq", info->last_sequence);
    if (info->last_event_ns)
        kv_json_member_u64(w, "last_event_age_ms", age_ms(info->last_event_ns));
    if (info->has_lag) {
        kv_json_key(w, "lag_ms");
        kv_json_put_i64(w, info->lag_ms);
    }
    kv_json_member_u64(w, "blocks", info->held);
    kv_json_member_u64(w, "batches", info->batches);
    kv_json_member_u64(w, "gaps", info->gaps);
    kv_json_member_u64(w, "missed_batches", info->missed_batches);
    kv_json_member_bool(w, "partial", info->reasons != 0);
    if (info->reasons) {
        kv_json_key(w, "partial_reasons");
        ki_reasons_write(w, info->reasons);
    }
    if (info->n_groups) {
        kv_json_key(w, "groups");
        ki_groups_write(info->groups, info->n_groups, info->block_size, w);
    }
    write_left_out(w, info);
    kv_json_end_object(w);
}

/* Write which source of discovery tells of the instance, and whether that can be read. */
static void write_source(struct kv_json_writer *w, struct ki_discovery *discovery,
                         const struct ki_worker_info *info)
{
    long at = ki_discovery_source_of(discovery, info->instance, info->rank);
    struct ki_source_info source;

    if (at < 0 || !ki_discovery_info(discovery, (size_t)at, &source))
        return;
    kv_json_key(w, "discovery");
    kv_json_begin_object(w);
    kv_json_member_str(w, "source", source.name);
    kv_json_member_bool(w, "current", source.current);
    if (*source.error)
        kv_json_member_str(w, "error", source.error);
    kv_json_end_object(w);
}

static void write_worker(struct kv_json_writer *w, struct ki_service *service,
                         const struct ki_worker_info *infos, long n)
{
    kv_json_begin_object(w);
    if (infos->name)
        kv_json_member_str(w, "instance_id", infos->name);
    else
        kv_json_member_u64(w, "instance_id", infos->instance);
    kv_json_member_str(w, "source", "zmq");
    kv_json_member_str(w, "status", ki_listener_status_name(worst(infos, n)));
    kv_json_member_str(w, "model_name", infos->model);
    kv_json_member_str(w, "tenant_id", infos->tenant);
    kv_json_member_str(w, "routing_group", infos->tenant);
    kv_json_member_u64(w, "block_size", infos->block_size);
    write_source(w, service->discovery, infos);
    kv_json_key(w, "endpoints");
    kv_json_begin_object(w);
    for (long i = 0; i < n; i++) {
        kv_json_key_u64(w, infos[i].rank);
        kv_json_put_str(w, infos[i].endpoint);
    }
    kv_json_end_object(w);
    kv_json_key(w, "listeners");
    kv_json_begin_object(w);
    for (long i = 0; i < n; i++) {
        kv_json_key_u64(w, infos[i].rank);
        write_listener(w, &infos[i]);
    }
    kv_json_end_object(w);
    if (service->addition)
        service->addition->write_worker(service, infos, n, w);
    kv_json_end_object(w);
}

/* routing_group overrides tenant_id, as in bodies. */
static bool passes_tenant(const struct kh_request *request, const char *tenant)
{
    struct kv_str unused;
    bool group = kh_request_param(request, "routing_group", &unused);

    return kh_request_passes(request, group ? "routing_group" : "tenant_id", tenant);
}

/* Return true when @text contains @part, in any case of ASCII letters. */
static bool contains(const char *text, struct kv_str part)
{
    for (; strlen(text) >= part.len; text++)
        if (strncasecmp(text, part.p, part.len) == 0)
            return true;
    return false;
}

/* Return true when the id, model or an endpoint of an instance contains the text of ?search=. */
static bool is_sought(const struct kh_request *request, const struct ki_worker_info *infos, long n)
{
    char number[KV_U64_TEXT_MAX + 1];
    struct kv_str part;
    bool found;

    if (!kh_request_param(request, "search", &part) || !part.len)
        return true;
    snprintf(number, sizeof(number), "%" PRIu64, infos->instance);
    found = contains(infos->name ? infos->name : number, part) || contains(infos->model, part);
    for (long i = 0; i < n && !found; i++)
        found = contains(infos[i].endpoint, part);
    return found;
}

/* Return true unless ?only= is a word that no worker could ever fit. */
static bool is_only_known(const struct kh_request *request)
{
    struct kv_str only = {"", 0};
    bool known =
        !kh_request_param(request, "only", &only) || !only.len || kv_str_eq(only, "attention");

    for (int s = 0; s <= KI_WITHDRAWN; s++)
        known |= kv_str_eq(only, ki_listener_status_name((enum ki_listener_status)s));
    return known;
}

/* Return true when ?only= doesn't leave the instance out: "attention", or the name of a status. */
static bool is_wanted(const struct kh_request *request, const struct ki_worker_info *infos, long n)
{
    struct kv_str only;
    bool wanted = false;

    if (!kh_request_param(request, "only", &only) || !only.len)
        return true;
    for (long i = 0; i < n && !wanted; i++)
        wanted = kv_str_eq(only, "attention")
                     ? ki_needs_attention(&infos[i])
                     : kv_str_eq(only, ki_listener_status_name(infos[i].status));
    return wanted;
}

static bool passes_all(const struct kh_request *request, const struct ki_worker_info *infos, long n)
{
    return kh_request_passes(request, "model_name", infos->model) &&
           passes_tenant(request, infos->tenant) && is_wanted(request, infos, n) &&
           is_sought(request, infos, n);
}

/* The ranks of an instance in a list of registrations. */
struct instance {
    const struct ki_worker_info *infos;
    long n;
};

static int compare(const void *a, const void *b)
{
    return ki_compare_instances(((const struct instance *)a)->infos,
                                ((const struct instance *)b)->infos);
}

/* List the instances that pass in @ret, which has room for @n. Returns their number. */
static size_t list(const struct kh_request *request, const struct ki_worker_info *infos, long n,
                   struct instance *ret)
{
    size_t found = 0;

    for (long i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && infos[end].instance == infos[i].instance)
            end++;
        if (passes_all(request, &infos[i], end - i))
            ret[found++] = (struct instance){&infos[i], end - i};
    }
    return found;
}

static void write_some(struct kv_json_writer *w, struct ki_service *service,
                       const struct instance *instances, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        write_worker(w, service, instances[i].infos, instances[i].n);
}

/* Write a page of the instances, sorted for people. */
static void write_page(struct kv_json_writer *w, struct ki_service *service,
                       struct instance *instances, struct ki_page *page)
{
    const uint64_t from = KV_MIN(page->offset, page->total);

    qsort(instances, page->total, sizeof(*instances), compare);
    kv_json_begin_object(w);
    kv_json_key(w, "workers");
    kv_json_begin_array(w);
    write_some(w, service, instances, from, from + KV_MIN(page->limit, page->total - from));
    kv_json_end_array(w);
    ki_page_write(page, w);
    kv_json_end_object(w);
}

void ki_api_workers(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_worker_info *infos;
    struct instance *instances;
    struct kv_json_writer w;
    struct ki_page page;
    long n;

    if (!request
             ->may_wait) { /* thousands of ranks take milliseconds, and queries don't wait for that */
        reply->rerun = true;
        return;
    }
    if (!ki_page_of(request, reply, &page))
        return;
    if (!is_only_known(request)) {
        kh_reply_error(reply, 400, "only is attention, or a status of a listener");
        return;
    }
    n = ki_registry_workers(service->registry, &infos);
    instances = n < 0 ? NULL : calloc((size_t)n + 1, sizeof(*instances));
    if (instances) {
        page.total = list(request, infos, n, instances);
        kv_json_writer_init(&w, &reply->body);
        if (page.given) {
            write_page(&w, service, instances, &page);
        } else {
            kv_json_begin_array(&w);
            write_some(&w, service, instances, 0, page.total);
            if (service->addition)
                service->addition->write_others(service, request, infos, n, &w);
            kv_json_end_array(&w);
        }
    } else {
        kh_reply_error(reply, 503, "out of memory");
    }
    free(instances);
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}
