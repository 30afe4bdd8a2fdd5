// SPDX-License-Identifier: Apache-2.0
/* GET /discovery: the sources of --discover and --dynamo, and their state. */
#include <stdint.h>

#include "base/json/json.h"
#include "indexer/service.h"

static void write_source(struct kv_json_writer *w, const struct ki_source_info *info)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "source", info->name);
    kv_json_member_bool(w, "current", info->current);
    if (*info->error)
        kv_json_member_str(w, "error", info->error);
    if (info->age_ms != UINT64_MAX)
        kv_json_member_u64(w, "age_ms", info->age_ms);
    kv_json_member_u64(w, "workers", info->workers);
    kv_json_member_u64(w, "withdrawn", info->withdrawn);
    kv_json_member_u64(w, "refused", info->refused);
    kv_json_member_u64(w, "conflicts", info->conflicts);
    kv_json_member_u64(w, "left_out", info->left_out);
    if (info->left_out)
        kv_json_member_str(w, "left_out_first", info->why_left);
    kv_json_member_u64(w, "failures", info->failures);
    kv_json_end_object(w);
}

void ki_api_discovery(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_source_info info;
    struct kv_json_writer w;

    (void)request;
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_array(&w);
    for (size_t i = 0; ki_discovery_info(service->discovery, i, &info); i++)
        write_source(&w, &info);
    kv_json_end_array(&w);
}
