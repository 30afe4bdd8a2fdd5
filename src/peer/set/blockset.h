// SPDX-License-Identifier: Apache-2.0
/**
 * Contents of a block set, and their form on the wire (docs/formats.md, "Block sets").
 *
 * A kvbm_facts is one generation of a set. It never changes once it is made, except for its stale
 * mark; readers' lists count references to it and so see exactly the generation that they asked.
 */
#ifndef KVBM_PEER_SET_BLOCKSET_H
#define KVBM_PEER_SET_BLOCKSET_H

#include <stdatomic.h>

#include "base/core/buf.h"
#include "bm/storage/layout.h"
#include "peer/set/shared.h"

#define KVBM_MAX_SET_BYTES (8u << 20) /* 65,536 layers, 8 transport keys and the rest take 3.2 MB */

struct kvbm_facts {
    _Atomic uint32_t references;
    atomic_bool
        stale; /* a later generation is known, or the set is gone. Pairs with a list's check */
    atomic_bool told;    /* the log has said that the set doesn't fit */
    uint64_t expires_ns; /* of a peer's set; 0: never */

    char agent[KVBM_MAX_AGENT_NAME + 1];
    char fingerprint[KVBM_MAX_FINGERPRINT + 1];
    uint64_t worker, incarnation, generation, lifetime_ms;
    uint32_t id, key_len;
    bool writable;
    struct kvbm_shard shard;
    struct kvbm_layout *layout; /* deserialised; the bytes below in another form */
    uint32_t n_transports;
    struct kvbm_transport_key transports[KVBM_MAX_TRANSPORTS]; /* keys lie in bytes */
    uint8_t *bytes;                                            /* serialised */
    size_t len;

    /* Of a peer's set, under the agent's lock until it is there: its shared memory, mapped once. */
    struct kvbm_mapped *mapped;
    bool asked_memory; /* the peer's memory was refused, or is mapped */
};

/**
 * Parse a serialised set. The caller owns *@ret and frees it with kvbm_facts_put. Returns 0,
 * -EPROTO, -EPROTONOSUPPORT or -ENOMEM.
 */
int kvbm_facts_parse(const void *data, size_t len, struct kvbm_facts **ret);

/** Serialise @facts with @layout; bytes and len aren't looked at. Returns 0 or -ENOMEM. */
int kvbm_facts_write(const struct kvbm_facts *facts, const struct kvbm_layout *layout,
                     struct kv_buf *to);

/** Count one more reference. */
struct kvbm_facts *kvbm_facts_get(struct kvbm_facts *facts);

/** Drop a reference; the last one frees. NULL is a no-op. */
void kvbm_facts_put(struct kvbm_facts *facts);

/** True when ranks with blocks of one form (@like) hold the same heads of each block. */
bool kvbm_shards_are_alike(const struct kvbm_shard *a, const struct kvbm_shard *b,
                           const struct kvbm_layout_config *like);

/** True for names of agents: 1 to KVBM_MAX_AGENT_NAME of A-Z a-z 0-9 . _ - */
bool kvbm_agent_name_is_valid(const char *name, size_t len);

/** True when a shard fits the layout that its rank holds. */
bool kvbm_shard_fits(const struct kvbm_shard *shard, const struct kvbm_layout_config *layout);

#endif
