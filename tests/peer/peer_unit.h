// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of agents and block sets: agents by one letter, layouts, sets as bytes. */
#ifndef KV_TEST_PEER_UNIT_H
#define KV_TEST_PEER_UNIT_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/xxh.h"
#include "bm/layout_unit.h"
#include "kvbm_lease.h"
#include "support.h"

#define SET_CAP 8192
#define HEADS 4

/** 6 blocks of 2 layers, K and V, 4 tokens, 4 heads of 8 elements of 2 bytes. */
static inline struct kvbm_layout_config small_config(void)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = 6,
                                       .num_layers = 2,
                                       .outer_dim = 2,
                                       .page_size = 4,
                                       .inner_dim = HEADS * 8,
                                       .dtype_width_bytes = 2,
                                       .num_heads = HEADS};
}

static inline struct kvbm_layout *small_layout(void)
{
    struct kvbm_layout_config config = small_config();

    return allocate(&config, KVBM_STORAGE_SYSTEM);
}

static inline struct kvbm_agent *agent_named(const char *name, uint64_t worker)
{
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = name, .worker = worker, .fingerprint = "model"};
    struct kvbm_agent *agent = NULL;

    assert_int_equal(kvbm_agent_create(&opts, &agent), 0);
    return agent;
}

static inline size_t bytes_of(const struct kvbm_blockset *set, uint8_t bytes[SET_CAP])
{
    long len = kvbm_blockset_serialise(set, bytes, SET_CAP, NULL);

    assert_true(len > 0);
    return (size_t)len;
}

/** An agent with one set: as bytes, those of its last generation. */
struct owner {
    struct kvbm_agent *agent;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    uint8_t bytes[SET_CAP];
    size_t len;
};

static inline void owner_fini(struct owner *o)
{
    kvbm_blockset_destroy(o->set);
    assert_int_equal(kvbm_agent_destroy(o->agent), 0);
    kvbm_layout_destroy(o->layout);
}

/** Put a checksum under changed bytes, as if they had been written so. */
static inline void sign(uint8_t *bytes, size_t len)
{
    uint64_t sum = kv_xxh64(bytes, len - 8, 0);

    for (size_t i = 0; i < 8; i++)
        bytes[len - 8 + i] = (uint8_t)(sum >> 8 * i);
}

#endif
