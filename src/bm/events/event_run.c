// SPDX-License-Identifier: Apache-2.0
/* Runs of changes that become one published event. */
#include <string.h>

#include "bm/events/events.h"

/* True when @b continues the run of @a. */
static bool follows(const struct kvbm_event *a, const struct kvbm_event *b)
{
    if (a->type != b->type || a->tier != b->tier || a->group != b->group)
        return false;
    if (a->type != KVBM_EVENT_STORED)
        return true;
    return b->parent && a->key_len == b->key_len && !memcmp(a->key, b->parent, a->key_len) &&
           a->n_tokens == b->n_tokens;
}

size_t kvbm_event_run(const struct kvbm_event *events, size_t n)
{
    size_t len = 1;

    while (len < n && follows(&events[len - 1], &events[len]))
        len++;
    return len;
}
