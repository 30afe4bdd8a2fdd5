// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body_registration.h"

#include <string.h>

#include "indexer/api/body_groups.h"
#include "indexer/model/lookup.h"
#include "indexer/options.h"

static struct ki_habits habits_of(const struct ki_body *body)
{
    struct ki_habits habits = {
        .eagle_drop = body->present & KI_EAGLE_DROP && body->eagle_drop,
        .groups = body->groups,
        .silent_windows = body->present & KI_SILENT_WINDOWS && body->silent_windows,
    };

    if (body->report_mode)
        (void)ki_report_mode_parse(body->report_mode, strlen(body->report_mode),
                                   &habits.report_mode);
    if (body->eagle_groups)
        (void)ki_groups_parse(body->eagle_groups, strlen(body->eagle_groups), &habits.eagle_groups);
    return habits;
}

static int check(const struct ki_body *body, const struct ki_habits *habits, struct kv_error *error)
{
    if (body->block_size > KI_MAX_BLOCK_SIZE)
        return kv_fail(error, -EINVAL, 0, "block_size must be at most %d", KI_MAX_BLOCK_SIZE);
    if (body->hash_lookahead > KI_MAX_LOOKAHEAD)
        return kv_fail(error, -EINVAL, 0, "hash_lookahead is above %d", KI_MAX_LOOKAHEAD);
    if (body->report_mode && !habits->report_mode)
        return kv_fail(error, -EINVAL, 0, "kv_cache_report_mode is neither full nor incremental");
    if (body->eagle_groups && !habits->eagle_groups)
        return kv_fail(error, -EINVAL, 0, "eagle_groups are no numbers from 0 to 63 and commas");
    if (body->eagle_groups && !habits->eagle_drop)
        return kv_fail(error, -EINVAL, 0, "eagle_groups needs eagle_drop");
    return ki_told_check(&body->groups, (uint32_t)body->block_size, error);
}

int ki_body_registration(const struct ki_body *body, struct ki_registration *ret,
                         struct kv_error *error)
{
    const struct ki_habits habits = habits_of(body);
    int rc = check(body, &habits, error);

    if (rc < 0)
        return rc;
    *ret = (struct ki_registration){
        .instance = body->instance_id,
        .name = body->instance_name,
        .rank = (uint32_t)body->dp_rank,
        .block_size = (uint32_t)body->block_size,
        .endpoint = body->endpoint,
        .replay_endpoint = body->replay_endpoint,
        .num_blocks = body->present & KI_NUM_BLOCKS ? body->num_blocks : 0,
        .habits = habits,
        .model = body->model_name,
        .tenant = body->tenant_id ? body->tenant_id : "default",
    };
    return 0;
}
