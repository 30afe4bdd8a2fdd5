// SPDX-License-Identifier: Apache-2.0
/* An event in a queue: this header, the key, the parent's key, the tokens, each padded to 8 bytes.
 * Records lie one behind the other. */
#ifndef KVBM_BM_EVENTS_EVENT_RECORD_H
#define KVBM_BM_EVENTS_EVENT_RECORD_H

#include <string.h>

#include "kvbm_events.h"

struct kvbm_record {
    uint32_t bytes; /* length of the whole record */
    uint32_t position;
    uint64_t sequence;
    uint64_t time_ns;
    uint32_t n_tokens;
    uint8_t type, tier, key_len, group;
    uint8_t first, last, has_parent, again;
    uint32_t unused2;
};

static inline size_t kvbm_record_pad(size_t n)
{
    return (n + 7) & ~(size_t)7;
}

static inline size_t kvbm_record_bytes(const struct kvbm_event *e)
{
    return sizeof(struct kvbm_record) + kvbm_record_pad(e->key_len) * (e->parent ? 2 : 1) +
           kvbm_record_pad(e->n_tokens * sizeof(uint32_t));
}

/** Write @e to @to, which has room for kvbm_record_bytes. */
static inline void kvbm_record_put(uint8_t *to, const struct kvbm_event *e)
{
    struct kvbm_record r = {
        .bytes = (uint32_t)kvbm_record_bytes(e),
        .position = e->position,
        .sequence = e->sequence,
        .time_ns = e->time_ns,
        .n_tokens = e->n_tokens,
        .type = (uint8_t)e->type,
        .tier = (uint8_t)e->tier,
        .key_len = (uint8_t)e->key_len,
        .group = (uint8_t)e->group,
        .first = e->first,
        .last = e->last,
        .has_parent = e->parent != NULL,
        .again = e->again,
    };

    memcpy(to, &r, sizeof(r));
    to += sizeof(r);
    memcpy(to, e->key, e->key_len);
    to += kvbm_record_pad(e->key_len);
    if (e->parent) {
        memcpy(to, e->parent, e->key_len);
        to += kvbm_record_pad(e->key_len);
    }
    if (e->n_tokens)
        memcpy(to, e->tokens, e->n_tokens * sizeof(uint32_t));
}

/** Read the record at @from; @ret points into it. Returns the record's length. */
static inline size_t kvbm_record_get(const uint8_t *from, struct kvbm_event *ret)
{
    struct kvbm_record r;
    const uint8_t *key = from + sizeof(r), *parent;

    memcpy(&r, from, sizeof(r));
    parent = key + kvbm_record_pad(r.key_len);
    *ret = (struct kvbm_event){
        .type = r.type,
        .tier = r.tier,
        .first = r.first,
        .last = r.last,
        .again = r.again,
        .group = r.group,
        .key_len = r.key_len,
        .key = key,
        .parent = r.has_parent ? parent : NULL,
        .position = r.position,
        .n_tokens = r.n_tokens,
        .tokens =
            r.n_tokens
                ? (const uint32_t *)(const void *)(parent +
                                                   (r.has_parent ? kvbm_record_pad(r.key_len) : 0))
                : NULL,
        .sequence = r.sequence,
        .time_ns = r.time_ns,
    };
    return r.bytes;
}

#endif
