// SPDX-License-Identifier: Apache-2.0
/* Which changes become one published event. */
#include <string.h>

#include "bm/events/events.h"

bool kvbm_event_follows(const struct kvbm_event *a, const struct kvbm_event *b)
{
    if (a->type != b->type || a->tier != b->tier || a->group != b->group)
        return false;
    if (a->type != KVBM_EVENT_STORED)
        return true;
    return b->parent && a->key_len == b->key_len && !memcmp(a->key, b->parent, a->key_len);
}
