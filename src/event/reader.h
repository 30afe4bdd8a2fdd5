// SPDX-License-Identifier: Apache-2.0
/** A reader's own state, for reader.c and reader_state.c. */
#ifndef KV_EVENT_READER_H
#define KV_EVENT_READER_H

#include "event/raw_event.h"
#include "event/salts.h"
#include "event/sources.h"
#include "event/unique.h"

struct kve_reader {
    uint32_t block_size;
    uint32_t rank;
    uint32_t max_events;

    struct kve_scratch scratch; /* its hashes are part of the batch */
    struct kve_unique unique;
    uint64_t *locals;
    size_t locals_capacity;

    struct kve_op *ops;
    size_t *starts; /* of each op in blocks or in scratch.hashes, which move while they grow */
    size_t n_ops, ops_capacity, starts_capacity;
    struct kv_block *blocks;
    size_t n_blocks, blocks_capacity;
    uint32_t *remaining; /* beside scratch.hashes, of the removals that say so */
    size_t remaining_capacity;
    /* Of the batch, since its last event of the device: see pool_clear. */
    uint32_t n_clears;
    bool pool_began;

    /* From here on: remembered between batches. A replica has to know it as well (reader_state.c). */
    struct kve_sources sources;
    bool ignore_mm_keys, ignore_mm_offsets;
    bool saw_salt, saw_adapter, saw_objects; /* since the last reset */
    uint32_t engine_tiers; /* bit per tier that the publisher clears together with its device */
    uint32_t pool_tiers;   /* bit per tier in which a connector has a block pool of its own */
    bool saw_offload;      /* a lower tier that is no such pool */
    struct kve_salts salts;
};

#endif
