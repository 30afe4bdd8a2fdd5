// SPDX-License-Identifier: Apache-2.0
/* Bodies of a group's requests, written and read. */
#include "tier/group/wire.h"

#include "base/core/le.h"
#include "peer/lease/lease_wire.h"

#define JOINING_BYTES 16
#define FACTS_BYTES 20
#define ORDER_BYTES 40

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)kv_get_le(at, 4);
}

void kvbm_joining_write(struct kv_buf *to, const struct kvbm_joining *joining)
{
    kvbm_put32(to, KVBM_GROUP_VERSION);
    kvbm_put32(to, joining->rank);
    kvbm_put32(to, joining->n_ranks);
    kvbm_put32(to, joining->n_places);
    for (uint32_t i = 0; i < joining->n_places; i++) {
        const struct kvbm_place_facts *place = &joining->places[i];

        kvbm_put32(to, place->id);
        kvbm_put32(to, place->n_blocks);
        kvbm_put32(to, place->n_layers);
        kvbm_put32(to, place->outer);
        kvbm_put32(to, place->page_size);
    }
}

/* Tell whether a place is one of those before it, or empty. */
static bool is_odd(const struct kvbm_place_facts *places, uint32_t i)
{
    for (uint32_t k = 0; k < i; k++) {
        if (places[k].id == places[i].id)
            return true;
    }
    return !places[i].n_blocks || !places[i].n_layers || !places[i].outer || !places[i].page_size;
}

int kvbm_joining_read(const void *body, size_t len, struct kvbm_joining *ret)
{
    const uint8_t *at = body;

    if (len < JOINING_BYTES || get32(at) != KVBM_GROUP_VERSION)
        return -EPROTO;
    *ret = (struct kvbm_joining){
        .rank = get32(at + 4), .n_ranks = get32(at + 8), .n_places = get32(at + 12)};
    if (ret->rank >= ret->n_ranks || ret->n_ranks > KVBM_MAX_RANKS || ret->n_places == 0 ||
        ret->n_places > KVBM_MAX_PLACES ||
        len != JOINING_BYTES + (size_t)ret->n_places * FACTS_BYTES)
        return -EPROTO;
    at += JOINING_BYTES;
    for (uint32_t i = 0; i < ret->n_places; i++, at += FACTS_BYTES) {
        ret->places[i] = (struct kvbm_place_facts){.id = get32(at),
                                                   .n_blocks = get32(at + 4),
                                                   .n_layers = get32(at + 8),
                                                   .outer = get32(at + 12),
                                                   .page_size = get32(at + 16)};
        if (is_odd(ret->places, i))
            return -EPROTO;
    }
    return 0;
}

void kvbm_joined_write(struct kv_buf *to, const uint32_t *n_blocks, uint32_t n_places)
{
    for (uint32_t i = 0; i < n_places; i++)
        kvbm_put32(to, n_blocks[i]);
}

int kvbm_joined_read(const void *body, size_t len, uint32_t n_places, uint32_t *n_blocks)
{
    if (len != (size_t)n_places * 4)
        return -EPROTO;
    for (uint32_t i = 0; i < n_places; i++)
        n_blocks[i] = get32((const uint8_t *)body + (size_t)i * 4);
    return 0;
}

void kvbm_order_write(struct kv_buf *to, uint64_t number, uint32_t time_ms,
                      const struct kvbm_group_transfer *transfer)
{
    uint8_t le[8];

    kv_put_le64(le, number);
    kv_buf_append(to, le, sizeof(le));
    kvbm_put32(to, transfer->from);
    kvbm_put32(to, transfer->to);
    kvbm_put32(to, transfer->n);
    kvbm_put32(to, transfer->first_layer);
    kvbm_put32(to, transfer->n_layers);
    kvbm_put32(to, (uint32_t)transfer->flow);
    kvbm_put32(to, (uint32_t)transfer->priority);
    kvbm_put32(to, time_ms);
    for (uint32_t i = 0; i < transfer->n; i++)
        kvbm_put32(to, transfer->src_blocks[i]);
    for (uint32_t i = 0; i < transfer->n; i++)
        kvbm_put32(to, transfer->dst_blocks[i]);
}

int kvbm_order_read(const void *body, size_t len, struct kvbm_group_order *ret)
{
    const uint8_t *at = body;

    if (len < ORDER_BYTES)
        return -EPROTO;
    *ret = (struct kvbm_group_order){.number = kv_get_le64(at),
                                     .from = get32(at + 8),
                                     .to = get32(at + 12),
                                     .n = get32(at + 16),
                                     .first_layer = get32(at + 20),
                                     .n_layers = get32(at + 24),
                                     .flow = get32(at + 28),
                                     .priority = (int32_t)get32(at + 32),
                                     .time_ms = get32(at + 36),
                                     .src = at + ORDER_BYTES};
    ret->dst = ret->src + (size_t)ret->n * 4;
    if (ret->n == 0 || ret->n > KVBM_MAX_GROUP_BLOCKS || ret->flow > KVBM_ONBOARD ||
        len != ORDER_BYTES + (size_t)ret->n * 8)
        return -EPROTO;
    return 0;
}
