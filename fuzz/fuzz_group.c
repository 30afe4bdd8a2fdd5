// SPDX-License-Identifier: Apache-2.0
/* Bodies of a group's requests, as a peer may send them. Whatever is accepted lies within its body,
 * and is written alike. */
#include "tier/group/wire.h"

#include "base/core/le.h"
#include "require.h"

static void same(struct kv_buf *again, const uint8_t *data, size_t len)
{
    REQUIRE(!again->error && again->len == len && memcmp(again->data, data, len) == 0);
    kv_buf_fini(again);
}

static void read_joining(const uint8_t *data, size_t len)
{
    struct kv_buf again = KV_BUF_INIT;
    struct kvbm_joining joining;

    if (kvbm_joining_read(data, len, &joining) != 0)
        return;
    REQUIRE(joining.rank < joining.n_ranks && joining.n_ranks <= KVBM_MAX_RANKS);
    REQUIRE(joining.n_places && joining.n_places <= KVBM_MAX_PLACES);
    kvbm_joining_write(&again, &joining);
    same(&again, data, len);
}

static void read_joined(const uint8_t *data, size_t len)
{
    uint32_t n_blocks[3];
    struct kv_buf again = KV_BUF_INIT;

    if (kvbm_joined_read(data, len, 3, n_blocks) != 0)
        return;
    kvbm_joined_write(&again, n_blocks, 3);
    same(&again, data, len);
}

static void read_order(const uint8_t *data, size_t len)
{
    static uint32_t blocks[2 * KVBM_MAX_GROUP_BLOCKS];
    struct kvbm_group_transfer transfer = {.size = sizeof(transfer)};
    struct kv_buf again = KV_BUF_INIT;
    struct kvbm_group_order order;

    if (kvbm_order_read(data, len, &order) != 0)
        return;
    REQUIRE(order.n && order.n <= KVBM_MAX_GROUP_BLOCKS);
    REQUIRE(order.dst + (size_t)order.n * 4 == data + len);
    for (uint32_t i = 0; i < 2 * order.n; i++)
        blocks[i] = (uint32_t)kv_get_le(order.src + (size_t)i * 4, 4);
    transfer.from = order.from;
    transfer.to = order.to;
    transfer.n = order.n;
    transfer.first_layer = order.first_layer;
    transfer.n_layers = order.n_layers;
    transfer.flow = (enum kvbm_flow)order.flow;
    transfer.priority = order.priority;
    transfer.src_blocks = blocks;
    transfer.dst_blocks = blocks + order.n;
    kvbm_order_write(&again, order.number, order.time_ms, &transfer);
    same(&again, data, len);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_joining(data, size);
    read_joined(data, size);
    read_order(data, size);
    return 0;
}
