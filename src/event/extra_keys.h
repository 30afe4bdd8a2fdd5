// SPDX-License-Identifier: Apache-2.0
/**
 * What else than its tokens makes a block: multimodal objects, and the salt of its chain.
 *
 * Engines tell it per block, in one of two fields.
 *
 *     block_mm_infos  nil, or {"mm_objects": [{"mm_hash": 7, "offsets": ...}, ...]}, or the same as
 * arrays extra_keys      nil, or a list in which a string may be several things:
 *
 *         ["adapter", ["id", 0], "salt", b"..."]
 *              |          |         |      `-- digest of prompt embeddings
 *              |          |         `-- cache salt, in the first block of a chain only
 *              |          `-- multimodal object and its offset; or, in some versions, the bare id
 *              `-- the LoRA adapter, which the event also names
 */
#ifndef KV_EVENT_EXTRA_KEYS_H
#define KV_EVENT_EXTRA_KEYS_H

#include "event/raw_event.h"

/** More identities than that in one block are refused. */
#define KVE_MAX_MM 256

/** Salts that arrive through an engine's extra keys may carry this in front of the tenant's own. */
#define KVE_SALT_PREFIX "dynamo-cache-salt:"

/** The salt of the chain that starts (or goes on) with this event; empty: none is told. */
struct kv_str kve_extra_salt(const struct kve_raw_event *ev);

/** Walks the blocks of an event in order. */
struct kve_extra_walk {
    struct kv_msgpack m;
    uint32_t left; /* entries not read yet */
    bool infos;    /* block_mm_infos, else extra_keys */
    struct kv_str salt;
};
void kve_extra_walk_init(struct kve_extra_walk *walk, const struct kve_raw_event *ev);

/** Identities of the next block's objects. Returns their number, or -E2BIG above KVE_MAX_MM. */
int kve_extra_walk_next(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM]);

#endif
