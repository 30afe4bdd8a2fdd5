// SPDX-License-Identifier: Apache-2.0
/*
 * GET /registrations, which peers follow. Separate from /workers, whose format is the original's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/json/json.h"
#include "indexer/api/body_groups.h"
#include "indexer/service.h"

static void write_registration(struct kv_json_writer *w, const struct ki_worker_info *info)
{
    char groups[KI_GROUPS_TEXT];

    kv_json_begin_object(w);
    kv_json_member_u64(w, "instance_id", info->instance); /* versions without names need it */
    if (info->name)
        kv_json_member_str(w, "instance_name", info->name);
    kv_json_member_u64(w, "dp_rank", info->rank);
    kv_json_member_str(w, "model_name", info->model);
    kv_json_member_str(w, "tenant_id", info->tenant);
    kv_json_member_u64(w, "block_size", info->block_size);
    kv_json_member_str(w, "endpoint", info->endpoint);
    if (info->replay_endpoint)
        kv_json_member_str(w, "replay_endpoint", info->replay_endpoint);
    if (info->num_blocks)
        kv_json_member_u64(w, "num_blocks", info->num_blocks);
    if (info->habits.silent_windows)
        kv_json_member_bool(w, "silent_windows", true);
    if (info->habits.report_mode)
        kv_json_member_str(w, "kv_cache_report_mode",
                           ki_report_mode_name(info->habits.report_mode));
    if (info->learned_report_mode)
        kv_json_member_str(w, "learned_report_mode",
                           ki_report_mode_name(info->learned_report_mode));
    if (info->habits.eagle_drop)
        kv_json_member_bool(w, "eagle_drop", true);
    if (info->habits.eagle_groups)
        kv_json_member_str(w, "eagle_groups", ki_groups_format(info->habits.eagle_groups, groups));
    if (info->habits.groups.n) {
        kv_json_key(w, "groups");
        ki_told_write(&info->habits.groups, w);
    }
    kv_json_member_u64(w, "version", info->version);
    kv_json_end_object(w);
}

static bool param_is(const struct kh_request *request, const char *name, uint64_t wanted)
{
    struct kv_str text;
    char number[24];

    if (!kh_request_param(request, name, &text))
        return false;
    snprintf(number, sizeof(number), "%" PRIu64, wanted);
    return kv_str_eq(text, number);
}

static void write_lists(struct kv_json_writer *w, const struct ki_worker_info *infos, long n,
                        const struct ki_removed *removed, long n_removed)
{
    kv_json_key(w, "registrations");
    kv_json_begin_array(w);
    for (long i = 0; i < n; i++)
        if (!infos[i].fed) /* peers that follow the same server find the worker there */
            write_registration(w, &infos[i]);
    kv_json_end_array(w);
    kv_json_key(w, "removed");
    kv_json_begin_array(w);
    for (long i = 0; i < n_removed; i++) {
        kv_json_begin_object(w);
        kv_json_member_u64(w, "instance_id", removed[i].instance);
        kv_json_member_u64(w, "dp_rank", removed[i].rank);
        kv_json_member_u64(w, "version", removed[i].version);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

void ki_api_registrations(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    /* Read the revision first: a change during the listing is then reported again. */
    uint64_t revision = ki_registry_revision(service->registry);
    uint64_t id = ki_registry_id(service->registry);
    struct ki_worker_info *infos = NULL;
    struct ki_removed *removed = NULL;
    struct kv_json_writer w;
    long n = ki_registry_workers(service->registry, &infos), n_removed = -ENOMEM;

    if (n >= 0)
        n_removed = ki_registry_removed(service->registry, &removed);
    if (n_removed < 0) {
        kh_reply_error(reply, 503, "out of memory");
    } else {
        kv_json_writer_init(&w, &reply->body);
        kv_json_begin_object(&w);
        kv_json_member_u64(&w, "id", id);
        kv_json_member_u64(&w, "revision", revision);
        if (!param_is(request, "id", id) || !param_is(request, "revision", revision))
            write_lists(&w, infos, n, removed, n_removed);
        kv_json_end_object(&w);
    }
    free(removed);
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}
