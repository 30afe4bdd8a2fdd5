// SPDX-License-Identifier: Apache-2.0
/*
 * One move of a key to a tier at a time. Staged blocks are in no pool, so several stores of a key
 * may be queued. A second copy would evict another block of the tier. Entries of a key that moves
 * wait aside, and join the queue again when the move ends: the tier has the key then, or they try.
 */
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

static uint64_t hash_of(const struct kvbm_down *down)
{
    return kvbm_pin_hash(down->pin, down->index);
}

/* Without memory the entry moves all the same. */
static bool set_aside(struct kvbm_queue *q, const struct kvbm_down *down)
{
    if (q->n_aside == q->aside_capacity) {
        uint32_t capacity = q->aside_capacity ? q->aside_capacity * 2 : 64;
        struct kvbm_down *more = realloc(q->aside, capacity * sizeof(*more));

        if (!more)
            return false;
        q->aside = more;
        q->aside_capacity = capacity;
    }
    q->aside[q->n_aside++] = *down;
    return true;
}

bool kvbm_once_begin(struct kvbm_queue *q, enum kv_tier to, struct kvbm_down *down)
{
    if (!down->pin)
        return true;
    if (kvbm_set_has(&q->moving, hash_of(down)))
        return !set_aside(q, down);
    /* without memory the key may move twice, and take two blocks of the tier */
    if (kvbm_set_reserve(&q->moving, 1) == 0) {
        kvbm_set_add(&q->moving, hash_of(down));
        down->moving_to = (uint8_t)to;
    }
    return true;
}

void kvbm_once_end(struct kvbm_down *down)
{
    enum kv_tier to = (enum kv_tier)down->moving_to;
    struct kvbm_manager *m;
    struct kvbm_queue *q;
    uint64_t hash;

    if (!down->moving_to) /* nor has it a pin, perhaps */
        return;
    m = down->pin->manager;
    q = &m->offload.queues[to];
    hash = hash_of(down);
    down->moving_to = 0;
    kvbm_set_drop(&q->moving, hash);
    for (uint32_t i = q->n_aside; i-- > 0;) {
        struct kvbm_down waits = q->aside[i];

        if (hash_of(&waits) != hash)
            continue;
        /* from the end: what takes this place has been looked at */
        q->aside[i] = q->aside[--q->n_aside];
        kvbm_queue_push(m, to, waits);
    }
}

void kvbm_once_drop(struct kvbm_manager *m, enum kv_tier to, const struct kvbm_job_ *job)
{
    struct kvbm_queue *q = &m->offload.queues[to];

    for (uint32_t i = q->n_aside; i-- > 0;) {
        struct kvbm_down waits = q->aside[i];

        if (job && waits.through != job)
            continue;
        q->aside[i] = q->aside[--q->n_aside];
        kvbm_stats_of(m, to)->dropped++;
        kvbm_down_ended(m, &waits, false);
    }
}
