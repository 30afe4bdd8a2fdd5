// SPDX-License-Identifier: Apache-2.0
#include "select/policy/policy.h"

#include <string.h>

#include "base/core/error.h"
#include "select/policy/adaptive.h"
#include "select/policy/dynamo.h"
#include "select/policy/plain.h"
#include "select/policy/scored.h"

static const struct kvsel_policy policies[] = {
    {"adaptive", kvsel_adaptive, false},
    {"dynamo", kvsel_dynamo, true},
    {"least", kvsel_least, false},
    {"round-robin", kvsel_round_robin, false},
    {"scored", kvsel_scored, false},
    {"prefix", kvsel_prefix, false},
    {"cache-aware", kvsel_cache_aware, false},
};

const struct kvsel_policy *kvsel_policy_find(const char *name)
{
    for (size_t i = 0; i < KV_COUNT(policies); i++)
        if (strcmp(policies[i].name, name) == 0)
            return &policies[i];
    return NULL;
}

const char *kvsel_policy_name(size_t i)
{
    return i < KV_COUNT(policies) ? policies[i].name : NULL;
}
