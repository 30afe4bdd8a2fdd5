// SPDX-License-Identifier: Apache-2.0
/**
 * Bodies of a group's requests (docs/formats.md, "Requests of a group"). Little-endian, fixed width;
 * a reader of a body refuses whatever a writer wouldn't write.
 *
 * Functions that read return 0 or -EPROTO.
 */
#ifndef KVBM_GROUP_WIRE_H
#define KVBM_GROUP_WIRE_H

#include "base/core/buf.h"
#include "kvbm_group.h"

/** Types of requests and notes. The numbers are stable (wire). */
enum {
    KVBM_GROUP_JOIN = 32,     /* worker to leader; answered when all ranks are there */
    KVBM_GROUP_TRANSFER = 33, /* leader to worker; answered when the copies have ended */
    KVBM_GROUP_CANCEL = 34,   /* leader to worker; a note */
    KVBM_GROUP_LEAVE = 35     /* worker to leader; a note */
};

#define KVBM_GROUP_VERSION 1
#define KVBM_MAX_WHY 200 /* bytes of a refusal's reason */

/** Properties of a place that a leader compares. */
struct kvbm_place_facts {
    uint32_t id, n_blocks, n_layers, outer, page_size;
};

struct kvbm_joining {
    uint32_t rank, n_ranks, n_places;
    struct kvbm_place_facts places[KVBM_MAX_PLACES];
};

void kvbm_joining_write(struct kv_buf *to, const struct kvbm_joining *joining);
int kvbm_joining_read(const void *body, size_t len, struct kvbm_joining *ret);

/** Answer to a join: blocks that all ranks have, of each place that was named, in its order. */
void kvbm_joined_write(struct kv_buf *to, const uint32_t *n_blocks, uint32_t n_places);
int kvbm_joined_read(const void *body, size_t len, uint32_t n_places, uint32_t *n_blocks);

/** A transfer as a worker is told it. */
struct kvbm_group_order {
    uint64_t number;
    uint32_t from, to, n, first_layer, n_layers, flow, time_ms; /* time_ms 0: no deadline */
    int32_t priority;
    const uint8_t *src, *dst; /* [n] of 4 bytes each, as on the wire */
};

void kvbm_order_write(struct kv_buf *to, uint64_t number, uint32_t time_ms,
                      const struct kvbm_group_transfer *transfer);
int kvbm_order_read(const void *body, size_t len, struct kvbm_group_order *ret);

#endif
