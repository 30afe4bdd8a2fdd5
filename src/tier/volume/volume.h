// SPDX-License-Identifier: Apache-2.0
/**
 * Inside of volumes. Files and stores are a manager with that one tier: staging, checksums, breakers
 * and durability are the tiers' own. A peer's volume is a lease and a copy in its session.
 */
#ifndef KVBM_TIER_VOLUME_VOLUME_H
#define KVBM_TIER_VOLUME_VOLUME_H

#include <stdatomic.h>

#include "kvbm_manager.h"
#include "kvbm_volume.h"

#define KVBM_VOLUME_BATCH 32u /* keys of one pin or lease: half of the staging buffers */

struct kvbm_volume {
    char name[KVBM_MAX_AGENT_NAME + 1], peer[KVBM_MAX_AGENT_NAME + 1];
    uint32_t set, key_len, n_files;
    uint64_t block_bytes;
    struct kvbm_agent *agent;
    struct kvbm_manager *manager; /* NULL: a peer's */
    bool on_disk;
    struct kvbm_layout *like;   /* of a peer's volume: form of its blocks */
    struct kvbm_blockset *lent; /* NULL: peers don't see it */
    _Atomic uint64_t gets, hits, puts, kept;
};

/** A part of a get: at most KVBM_VOLUME_BATCH keys. */
struct kvbm_volume_part {
    struct kvbm_chain chain;
    uint32_t n;
    const struct kvbm_layout *layout;
    const uint32_t *blocks;
    uint64_t deadline_ns;
    uint8_t ok[KVBM_VOLUME_BATCH / 8]; /* zeros; the callee sets bits */
    uint8_t state[KVBM_VOLUME_BATCH];  /* of a tier: enum kvbm_where of each key */
};

/** Get keys of a peer. What doesn't come is a miss. Returns 0 or -ENOMEM. */
int kvbm_volume_get_from_peer(struct kvbm_volume *volume, struct kvbm_volume_part *part);

/** Tell the room of a peer's set: 0 without a session, or when its blocks are others. */
uint64_t kvbm_volume_peer_capacity(struct kvbm_volume *volume);

#endif
